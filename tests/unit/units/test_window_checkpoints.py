"""Checkpoints of buffers with units and slice samplers: the next 200 batches are the same, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    DeltaTimestamps,
    Episodes,
    FrameStack,
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.errors import CheckpointError

from ...episodes import Log, batch_of
from ...tags import same_state
from ...windows import reward_of
from .rings import steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


ENDS = [("next", "terminated"), ("next", "truncated")]


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "nstep": lambda: {"sample_unit": NStep(3, 0.9)},
    "nstep-prioritized": lambda: {"sample_unit": NStep(3, 0.9), "sampler": PrioritizedSampler(40, 0.7, 0.5)},
    "frames": lambda: {"sample_unit": FrameStack(3, ["obs"])},
    "deltas": lambda: {"sample_unit": DeltaTimestamps(steps={"obs": [-1, 0], ("next", "obs"): [0, 4], "t": [0]})},
    "windows-of-deltas": lambda: {"sample_unit": [SequenceUnit(2), DeltaTimestamps(steps={"obs": [-1, 0]})]},
    "sequence": lambda: {"sample_unit": SequenceUnit(2, burn_in=1)},
    "stop": lambda: {"sample_unit": SequenceUnit(3, "stop")},
    "reset": lambda: {"sample_unit": SequenceUnit(3, "include_reset")},
    "strict": lambda: {"sample_unit": SequenceUnit(3, "strict")},
    "hindsight": lambda: {"sample_unit": Hindsight(reward_of, her_ratio=0.5)},
    "hindsight-exact": lambda: {"sample_unit": Hindsight(reward_of, her_ratio=0.5, exact_ratio=True, next_goals=False)},
    "hindsight-random": lambda: {"sample_unit": Hindsight(reward_of, strategy="random")},
    "chain": lambda: {"sample_unit": [FrameStack(2, ["obs"]), NStep(2, 0.9)]},
    "windows-of-goals": lambda: {"sample_unit": [SequenceUnit(2), Hindsight(reward_of)]},
    "slices": lambda: {"sampler": SliceSampler(slice_len=3, end_keys=ENDS)},
    "slices-short": lambda: {"sampler": SliceSampler(slice_len=3, end_keys=ENDS, strict_length=False)},
    "slices-padded": lambda: {
        "sampler": SliceSampler(slice_len=6, end_keys=ENDS, strict_length=False, pad_output=True)
    },
    "slices-span": lambda: {"sampler": SliceSampler(slice_len=3, end_keys=ENDS, span=True)},
    "slices-nstep": lambda: {"sampler": SliceSampler(slice_len=3, end_keys=ENDS), "sample_unit": NStep(2, 0.9)},
    "without": lambda: {"sampler": SliceSamplerWithoutReplacement(slice_len=2, end_keys=ENDS)},
    "without-order": lambda: {"sampler": SliceSamplerWithoutReplacement(slice_len=2, end_keys=ENDS, shuffle=False)},
}


def make(name: str, prefetch: int = 0, storage: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage or LazyTensorStorage(40),
        batch_size=6,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(7),
        **PARTS[name](),
        **options,
    )


def batches(rb: ReplayBuffer, count: int) -> list[Any]:
    return [rb.sample(return_info=True) for _ in range(count)]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", PARTS)
def test_sampling_goes_on_bit_for_bit(name: str, prefetch: int, tmp_path: Path) -> None:
    log = Log(40, longest=6, seed=1)
    rb = make(name, prefetch)
    for rows in (33, 30):
        log.extend(rb, rows)
        batches(rb, 3)
    rb.dumps(tmp_path / "saved")
    state = rb.state_dict()
    expected = batches(rb, 200)
    on_disk, in_memory = make(name, prefetch), make(name, prefetch)
    on_disk.loads(tmp_path / "saved")
    in_memory.load_state_dict(state)
    same_state(batches(on_disk, 200), expected)
    same_state(batches(in_memory, 200), expected)


@pytest.mark.parametrize("name", ["nstep", "sequence", "slices", "without"])
def test_writing_goes_on_as_well(name: str, tmp_path: Path) -> None:
    log = Log(40, longest=6, seed=2)
    rb = make(name)
    log.extend(rb, 57)
    rb.dumps(tmp_path)
    other = make(name, storage=LazyMemmapStorage(40))
    other.loads(tmp_path)
    for rows in (1, 7, 40, 55):
        data = batch_of(log.play(rows))
        rb.extend(data)
        other.extend(data)
        same_state(batches(rb, 5), batches(other, 5))


def test_interleaved_and_masked_rows_come_back() -> None:
    log = Log(40, "mixed", envs=3, masked=0.1, seed=3)
    options: dict[str, Any] = {"episodes": Episodes(ENDS, "env", "mask")}
    rb = make("nstep", **options)
    log.extend(rb, 90)
    other = make("nstep", **options)
    other.load_state_dict(rb.state_dict())
    same_state(batches(rb, 50), batches(other, 50))


def test_a_larger_buffer_reads_the_episodes_off_the_rows() -> None:
    log = Log(40, longest=6, seed=4)
    rb = make("nstep")
    log.extend(rb, 57)
    larger = make("nstep", storage=LazyTensorStorage(64))
    larger.load_state_dict(rb.state_dict())
    one, other = (x._engine.tracker.table(x.storage).episodes() for x in (rb, larger))  # type: ignore[union-attr]
    assert one.rows.tolist() == other.rows.tolist()
    assert one.closed.tolist() == other.closed.tolist()


def test_a_state_without_episodes_is_read_off_the_rows() -> None:
    log = Log(40, longest=6, seed=5)
    plain = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=6)
    log.extend(plain, 57)
    rb = make("nstep")
    rb.load_state_dict({**plain.state_dict(), "generator": None})
    tracker = rb._engine.tracker
    assert tracker is not None
    assert tracker.table(rb.storage).episodes().rows.tolist() == [len(slots) for slots, _ in log.episodes()]


@pytest.mark.parametrize(
    "damage",
    [
        {"firsts": torch.zeros(3)},
        {"firsts": torch.zeros(2, 2, dtype=torch.int64)},
        {"firsts": torch.zeros(1, dtype=torch.int64)},
        {"rows": -1},
        {"order": torch.zeros(4, dtype=torch.int64)},
        {"shuffle": False},
    ],
    ids=str,
)
def test_a_damaged_pass_is_refused(damage: dict[str, Any]) -> None:
    log = Log(40, longest=6, seed=1)
    rb = make("without")
    log.extend(rb, 40)
    rb.sample()
    state = rb.sampler.state_dict()
    with pytest.raises(CheckpointError):
        make("without").sampler.load_state_dict({**state, **damage})


def test_a_queued_draw_with_slices_longer_than_their_padding_is_refused() -> None:
    log = Log(40, longest=6, seed=1)
    rb = make("slices-padded", 2)
    log.extend(rb, 40)
    rb.sample()
    state = rb.state_dict()
    state["pending"][0]["pad"] = 1
    with pytest.raises(CheckpointError, match="damaged"):
        make("slices-padded", 2).load_state_dict(state)


@pytest.mark.parametrize(
    "saver",
    [{"sample_unit": SequenceUnit(4, done_key=None)}, {"sample_unit": NStep(4, 1.0, done_key="lap")}],
    ids=["endless", "laps"],
)
def test_episodes_saved_by_other_keys_are_read_anew(saver: dict[str, Any], tmp_path: Path) -> None:
    saved = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=64, **saver)
    saved.extend(steps())
    saved.dumps(tmp_path / "a")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=NStep(4, 1.0), batch_size=256)
    buffer.loads(tmp_path / "a")
    batch = buffer.sample()
    assert torch.equal(batch["obs"] // 10, (batch["next_obs"] - 1) // 10)


def test_queued_draws_of_another_unit_are_refused(tmp_path: Path) -> None:
    def hindsight() -> Hindsight:
        return Hindsight(lambda batch: batch["reward"], goal_key="goal", achieved_goal_key="obs")

    data = {**steps(), "goal": torch.zeros(40)}
    saved = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=hindsight(), batch_size=4, prefetch=2)
    saved.extend(data)
    saved.sample()
    saved.dumps(tmp_path / "a")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sample_unit=NStep(2, 0.9), batch_size=4, prefetch=2)
    with pytest.raises(CheckpointError, match="same sample_unit"):
        buffer.loads(tmp_path / "a")
    assert len(buffer) == 0
