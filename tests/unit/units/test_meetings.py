"""Where windows meet the rest: checkpoints of other options, ensembles, reshaped batches, threads that set options."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    FrameStack,
    Hindsight,
    LazyTensorStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.errors import CheckpointError, OptionError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def rows(count: int = 40, episode: int = 10) -> dict[str, torch.Tensor]:
    t = torch.arange(count)
    lap = t % 7 == 6
    done = t % episode == episode - 1
    return {"t": t, "obs": t.float(), "next_obs": t.float() + 1, "reward": torch.ones(count), "done": done, "lap": lap}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "saver",
    [{"sample_unit": SequenceUnit(4, done_key=None)}, {"sample_unit": NStep(4, 1.0, done_key="lap")}],
    ids=["endless", "laps"],
)
def test_episodes_saved_by_other_keys_are_read_anew(saver: dict[str, Any], tmp_path: Path) -> None:
    saved = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=64, **saver)
    saved.extend(rows())
    saved.dumps(tmp_path / "a")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=NStep(4, 1.0), batch_size=256)
    buffer.loads(tmp_path / "a")
    batch = buffer.sample()
    assert torch.equal(batch["obs"] // 10, (batch["next_obs"] - 1) // 10)


def test_rows_without_ends_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    saved = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100, 0.5, 0.5), batch_size=4)
    saved.extend({"obs": torch.zeros(40)})
    saved.dumps(tmp_path / "a")
    sampler = PrioritizedSampler(100, 0.5, 0.5)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, sample_unit=NStep(2, 0.9), batch_size=4)
    with pytest.raises(CheckpointError, match="no field done"):
        buffer.loads(tmp_path / "a")
    assert len(buffer) == 0
    assert buffer.write_count == 0


def test_queued_draws_of_another_unit_are_refused(tmp_path: Path) -> None:
    def hindsight() -> Hindsight:
        return Hindsight(lambda batch: batch["reward"], goal_key="goal", achieved_goal_key="obs")

    data = {**rows(), "goal": torch.zeros(40)}
    saved = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=hindsight(), batch_size=4, prefetch=2)
    saved.extend(data)
    saved.sample()
    saved.dumps(tmp_path / "a")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=NStep(2, 0.9), batch_size=4, prefetch=2)
    with pytest.raises(CheckpointError, match="same sample_unit"):
        buffer.loads(tmp_path / "a")
    assert len(buffer) == 0


def test_end_keys_of_a_slice_sampler_are_binding() -> None:
    sampler = SliceSampler(slice_len=4, end_keys=["lap"])
    with pytest.raises(OptionError, match="one kind of episodes"):
        ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, episodes=Episodes("done"))


def test_n_may_be_set_while_another_thread_samples() -> None:
    unit = NStep(2, 0.9)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=unit, batch_size=16)
    buffer.extend(rows())
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            unit.n, unit.gamma = 5, 0.5
            unit.n, unit.gamma = 2, 0.9

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(400):
            batch = buffer.sample()
            assert bool((batch["steps_to_next_obs"] <= 5).all())
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("shape", [(32,), (8, 4)])
def test_padded_rows_never_give_priorities_to_anchors(shape: tuple[int, ...]) -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(100), sample_unit=SequenceUnit(4), batch_size=8
    )
    buffer.extend(TensorDict(rows(), [40]))
    sample = buffer.sample().reshape(*shape)
    sample["td_error"] = torch.where(sample["validity_mask"], 1.0, 100.0)
    buffer.update_tensordict_priority(sample)
    assert buffer.sampler.priorities.max() == 1.0  # type: ignore[attr-defined]
    assert buffer.stats().stale_updates == 0


def test_records_of_windows_carry_their_own_stamps() -> None:
    buffer = PrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(100), sample_unit=SequenceUnit(4), batch_size=8
    )
    buffer.extend(rows())
    _, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], torch.rand(32), info["index_generation"])
    assert buffer.stats().stale_updates == 0


def prioritized(sampler: Any = None, unit: Any = None) -> TensorDictReplayBuffer:
    made = PrioritizedSampler(100, 1.0, 1.0, 0.0) if sampler is None else sampler
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=made, sample_unit=unit)
    buffer.extend(TensorDict(rows(), [40]))
    return buffer


def test_windows_of_an_ensemble_give_their_anchors_the_largest_valid_priority() -> None:
    members = [prioritized(unit=SequenceUnit(4)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=16, generator=seeded())
    sample = ensemble.sample()
    assert sample["validity_mask"].shape == sample["index", "index"].shape
    sample["td_error"] = torch.where(sample["validity_mask"], 1.0, 100.0)
    ensemble.update_tensordict_priority(sample)
    assert all(member.sampler.priorities.max() == 1.0 for member in members)  # type: ignore[attr-defined]
    assert sum(member.stats().stale_updates for member in members) == 0


def test_slices_of_an_ensemble_carry_the_stamps_of_all_their_rows() -> None:
    members = [prioritized(PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=4, end_key="done")) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=16, generator=seeded())
    sample = ensemble.sample()
    sample["td_error"] = torch.rand(sample.shape)
    ensemble.update_tensordict_priority(sample)
    assert sum(member.stats().stale_updates for member in members) == 0


def test_the_info_of_an_ensemble_says_what_its_members_say() -> None:
    members = []
    for _ in range(2):
        members.append(ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=SequenceUnit(4, burn_in=1)))
        members[-1].extend(rows())
    ensemble = ReplayBufferEnsemble(*members, batch_size=8, generator=seeded())
    batch, info = ensemble.sample(return_info=True)
    assert info["validity_mask"].shape == info["learning_mask"].shape == batch["t"].shape


def test_slices_without_replacement_are_refused_in_ensembles() -> None:
    members = []
    for _ in range(2):
        sampler = SliceSamplerWithoutReplacement(num_slices=4, end_key="done")
        members.append(ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler))
        members[-1].extend(rows())
    ensemble = ReplayBufferEnsemble(*members, batch_size=16)
    with pytest.raises(OptionError, match="SliceSampler"):
        ensemble.sample()


def test_options_of_units_are_fixed_when_they_are_made() -> None:
    with pytest.raises(UsageError, match="make another unit"):
        SequenceUnit(2, "strict").length = 6
    with pytest.raises(UsageError, match="make another unit"):
        FrameStack(2, ["obs"]).k = 3
    with pytest.raises(UsageError, match="make another unit"):
        Hindsight(lambda batch: batch["reward"]).her_ratio = 7.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float8_e4m3fn])
def test_stacks_are_filled_with_zeros_whatever_the_dtype(dtype: torch.dtype) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20), sample_unit=FrameStack(3, ["obs"], padding="zeros"), batch_size=32
    )
    buffer.extend({"obs": torch.ones(10, 2).to(dtype), "done": torch.arange(10) % 5 == 4})
    stacks = buffer.sample()["obs"].float()
    assert bool((stacks[:, -1] == 1).all())
    assert bool((stacks == 0).any())


def test_edits_through_views_are_followed_when_the_buffer_is_told() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=NStep(4, 1.0), batch_size=256)
    buffer.extend(rows())
    buffer.sample()
    buffer[:]["done"][24] = True
    buffer.read_episodes()
    batch = buffer.sample()
    first, last = batch["obs"], batch["next_obs"] - 1
    assert not bool(((first <= 24) & (last > 24)).any())
    with pytest.raises(UsageError, match="no account of episodes"):
        ReplayBuffer().read_episodes()


def test_windows_of_slices_are_refused_when_the_parts_meet() -> None:
    with pytest.raises(OptionError, match="leave one of them out"):
        ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=4), sample_unit=SequenceUnit(2))
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=SequenceUnit(2))
    with pytest.raises(OptionError, match="leave one of them out"):
        buffer.set_sampler(SliceSampler(slice_len=4))


def test_a_generation_of_any_strides_is_read_right() -> None:
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(100), batch_size=8)
    buffer.extend(rows())
    _, info = buffer.sample(return_info=True)
    strided = torch.zeros(8, 3, dtype=torch.int64)
    strided[:, 0] = info["index_generation"]
    buffer.update_priority(info["index"], torch.rand(8), strided[:, 0])
    assert buffer.stats().stale_updates == 0
