"""Samplers on a bare storage: `sample`, `can_sample`, reports of writes, priorities, saved states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    HeapSampler,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    EpisodesError,
    KindError,
    OptionError,
    PriorityError,
    SchemaError,
    SlotError,
    TooFewRowsError,
    UsageError,
)

from ...registry import ring, seeded


def bare(rows: int = 10, capacity: int = 10) -> Storage:
    """A storage of `rows` rows that hold their slot, of which the last `capacity` are kept."""
    rb = ring(capacity)
    rb.extend({"x": torch.arange(rows)})
    return rb.storage


def episodes(*lengths: int, more: dict[str, torch.Tensor] | None = None) -> TensorStorage:
    """Rows of episodes of these lengths, with their number, step and end."""
    traj = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    step = torch.cat([torch.arange(n) for n in lengths])
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])[:, None]
    return TensorStorage({"traj": traj, "step": step, "next": {"done": done}, **(more or {})})


def drawn(sampler: Any, storage: Any, size: int, seed: int = 0) -> list[int]:
    index = sampler.sample(storage, size, generator=seeded(seed))[0]
    found: list[int] = (index if isinstance(index, torch.Tensor) else index[0]).tolist()
    return found


SAMPLERS: list[Any] = [
    RandomSampler,
    SamplerWithoutReplacement,
    lambda: PrioritizedSampler(18, 0.7, 0.9),
    lambda: SliceSampler(slice_len=3, traj_key="traj"),
    lambda: SliceSampler(slice_len=3, end_key=("next", "done"), strict_length=False, pad_output=True),
    lambda: SliceSamplerWithoutReplacement(slice_len=3),
    lambda: PrioritizedSliceSampler(18, 0.7, 0.9, slice_len=3),
    lambda: StalenessAwareSampler(version_key="step"),
]


@pytest.mark.parametrize("make", SAMPLERS)
def test_draws_are_those_of_the_sampler_in_a_buffer_and_go_on_from_a_saved_state(make, tmp_path):
    rows = TensorDict(episodes(5, 3, 10, more={"is_init": torch.zeros(18, 1, dtype=torch.bool)})[:], [18])
    for ndim in (1, 2):
        sampler, loaded, generator = make(), make(), seeded()
        rb = ReplayBuffer(storage=LazyTensorStorage(18, ndim=ndim), sampler=make(), batch_size=6, generator=seeded())
        slots = rb.extend(rows.view(2, 9) if ndim == 2 else rows)
        if sampler.prioritized:
            rb.update_priority(slots, torch.arange(18.0))
            sampler.update_priority(torch.arange(18), rb.sampler.priorities, storage=rb.storage)  # type: ignore[attr-defined]
        for _ in range(4):
            batch, expected = rb.sample(return_info=True)
            index, info = sampler.sample(rb.storage, 6, generator=generator)
            assert isinstance(index, tuple) == (ndim == 2 or "Slice" in type(sampler).__name__)
            assert torch.equal(rb.storage[index]["step"], batch["step"])
            assert all(torch.equal(info[key], expected[key]) for key in info)
            assert sampler.reads or info.keys() == expected.keys() - {"index", "index_generation"}
    sampler.dumps(tmp_path)
    loaded.loads(tmp_path)
    assert drawn(loaded, rb.storage, 6) == drawn(sampler, rb.storage, 6)


def test_a_storage_that_was_never_in_a_buffer():
    storage = ListStorage(8)
    for sampler in (RandomSampler(), PrioritizedSampler(4, 1.0, 1.0), SliceSampler(slice_len=2)):
        with pytest.raises(EmptyBufferError):
            sampler.sample(storage, 2)
        assert not sampler.can_sample(storage, 2)
    storage.set(range(6), [{"x": i} for i in range(6)])
    index, _ = PrioritizedSampler(8, 1.0, 1.0).sample(storage, 4)
    assert [int(row["x"]) for row in storage.get(index)] == index.tolist()  # type: ignore[union-attr]
    wide = TensorStorage({"next": {"done": torch.zeros(4, 3, dtype=torch.bool)}})
    for rows, words in (
        (storage, "Could not get a tensordict out of the storage, which is required for Slic"),
        (wide, "Expected the end-of-trajectory signal to be 1-dimensional"),
    ):
        with pytest.raises(EpisodesError, match=words) as caught:
            SliceSampler(slice_len=2).sample(rows, 2)
    assert isinstance(caught.value, (RuntimeError, TypeError))  # what TorchRL raises for streams and units


# -- priorities -------------------------------------------------------------------------------------------------------


def test_rows_without_a_priority_get_the_default_one():
    sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0)
    assert sampler.default_priority == RandomSampler().default_priority == 1.0
    sampler.update_priority(torch.tensor([1, 0]), torch.tensor([5.0, 2.0]))
    assert sampler.default_priority == 5.0
    sampler.sample(bare(4), 2)
    assert sampler.priorities.tolist() == [2.0, 5.0, 5.0, 5.0]
    sampler.update_priority(2, 0.5)
    sampler.mark_update(0)
    sampler.add(2)
    sampler.extend(torch.tensor([-1, 1]))  # a row that was not kept
    assert sampler.priorities.tolist() == [5.0, 5.0, 5.0, 5.0]
    with pytest.warns(UserWarning, match="update_priority.. on a sampler RandomSampler that is not prioritized"):
        RandomSampler().update_priority(torch.tensor([1]), 1.0)


def test_bad_indices_and_priorities_change_nothing():
    bad: list[Any] = [
        ([4], 1.0, SlotError, "slot 4 is out of range: .* keeps priorities for max_capacity=4"),
        ([-1, 1], [5.0, 2.0], SlotError, r"index -1 is out of range: .* as in rb\[-1\]"),
        ([0, 1], [1.0, 2.0, 3.0], UsageError, "same length as index"),
        ([0, 1, 2], torch.ones(3, 3), SchemaError, r"got \[3, 3\]: a number for each pair .* \.squeeze\(-1\)"),
        ([0, 1], [1.0, math.nan], PriorityError, r"positions \[1\]"),
        ([0.5], 1.0, KindError, "an index must hold integers"),
        ([0], "much", KindError, "real numbers"),
        (torch.tensor([[0, 1]]), 1.0, UsageError, "storage should be provided"),
    ]
    for sampler in (PrioritizedSampler(4, 1.0, 1.0), HeapSampler(4)):
        sampler.extend(range(4))
        sampler.update_priority(range(4), [1.0, 2.0, 3.0, 4.0])
        for index, priority, error, match in bad:
            with pytest.raises(error, match=match):
                sampler.update_priority(index, priority)
            assert sampler.priorities.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_storage_may_be_smaller_than_the_sampler_but_not_its_rows_more():
    sampler = PrioritizedSampler(20, 1.0, 1.0, eps=0.0)
    sampler.update_priority(range(20), torch.arange(20.0))
    assert set(drawn(sampler, bare(3, 5), 100)) == {1, 2}
    assert sampler.priorities.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(SlotError, match="max_capacity=2"):
        PrioritizedSampler(2, 1.0, 1.0).sample(bare(3), 1)
    sampler.update_priority(range(3), 0.0)
    assert not sampler.can_sample(bare(3), 1)
    with pytest.raises(PriorityError):
        sampler.sample(bare(3), 1)


# -- slices and fields ------------------------------------------------------------------------------------------------


def test_episodes_are_read_again_at_each_draw():
    rb = ring(8)
    rb.extend({"traj": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])})
    sampler = SliceSampler(slice_len=4, traj_key="traj")
    kept = SliceSampler(slice_len=4, traj_key="traj", cache_values=True)

    def seen(one: Sampler) -> set[int]:
        return set(rb.storage[one.sample(rb.storage, 16)[0]]["traj"].tolist())

    assert seen(sampler) == seen(kept) == {1}
    rb.storage["traj"][:] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])  # neither length nor cursor has changed
    assert seen(sampler) == {0}
    assert seen(kept) != {0}
    kept.extend(range(8))
    assert seen(kept) == {0}
    rb.extend({"traj": torch.tensor([2, 2, 2, 2, 2])})
    assert seen(sampler) == seen(kept) == {2}


def test_samplers_say_whether_a_batch_can_be_drawn():
    storage = episodes(4, 2)
    answers: list[Any] = [
        (SliceSampler(slice_len=4), 8, True),
        (SliceSampler(slice_len=5), 10, False),
        (SliceSampler(slice_len=5, strict_length=False), 10, True),
        (SliceSamplerWithoutReplacement(slice_len=4, drop_last=True), 8, False),
        (SliceSamplerWithoutReplacement(slice_len=4), 8, True),
        (PrioritizedSliceSampler(6, 1.0, 1.0, slice_len=5), 10, False),
        (SamplerWithoutReplacement(drop_last=True), 6, True),
        (SamplerWithoutReplacement(drop_last=True), 7, False),
    ]
    for sampler, size, can in answers:
        assert sampler.can_sample(storage, size) is can, sampler
    with pytest.raises(TooFewRowsError):
        SamplerWithoutReplacement(drop_last=True).sample(storage, 7)
    with pytest.raises(UsageError):
        SliceSampler(slice_len=4).can_sample(storage, 9)


# -- states, requests, ensembles --------------------------------------------------------------------------------------


def test_states_of_others_are_refused(tmp_path):
    RandomSampler().dumps(tmp_path / "random")
    with pytest.raises(CheckpointError):
        SamplerWithoutReplacement().loads(tmp_path / "random")
    PrioritizedSampler(4, 1.0, 1.0).dumps(tmp_path / "max")
    with pytest.raises(CheckpointError, match="reduction='max'"):
        PrioritizedSampler(4, 1.0, 1.0, reduction="min").loads(tmp_path / "max")
    with pytest.raises(FileNotFoundError):
        RandomSampler().loads(tmp_path / "none")


def test_bad_requests_are_named():
    storage = TensorStorage(torch.arange(4))
    for size in (-1, 1.5, "x", None, True):
        with pytest.raises((OptionError, KindError), match="batch_size must be"):
            RandomSampler().sample(storage, size)  # type: ignore[arg-type]
    with pytest.raises(KindError):
        RandomSampler().sample(ReplayBuffer(storage=storage), 2)  # type: ignore[arg-type]


def test_an_ensemble_samples_its_members(tmp_path):
    storages: Any = StorageEnsemble(bare(4), bare(8))
    mix = SamplerEnsemble(SamplerWithoutReplacement(), RandomSampler(), p=[0.25, 0.75], num_buffer_sampled=4)
    found, info = mix.sample(storages, 8, generator=seeded())
    assert sorted(found["buffer_ids"].tolist()) == [0, 1, 1, 1]
    assert found["index"].shape == (4, 2)
    assert info["parts"] == [{}] * 4
    for (member, rows), index, number in zip(storages.get(found), found["index"], found["buffer_ids"], strict=True):
        assert member == number
        assert torch.equal(rows["x"], index)
    assert (mix.can_sample(storages, 8), mix.can_sample(storages, 7)) == (True, False)
    for given_, size, words in (
        (storages, 7, "divisible by num_buffer_sampled"),
        ([bare(4)], 8, "one storage for each"),
    ):
        with pytest.raises(OptionError, match=words):
            mix.sample(given_, size)
    mix.dumps(tmp_path)
    again = SamplerEnsemble(SamplerWithoutReplacement(), RandomSampler())
    again.loads(tmp_path)
    assert repr(again[0]) == repr(mix[0])
