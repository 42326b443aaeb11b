"""Samplers on a bare storage: `sample`, `can_sample`, reports of writes, priorities, saved states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ConsumingSampler,
    HeapSampler,
    LazyTensorStorage,
    LimitedSampler,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackSampler,
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

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bare(rows: int = 10, capacity: int = 10) -> Storage:
    """A storage of `rows` rows that hold their slot, of which the last `capacity` are kept."""
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity))
    rb.extend({"x": torch.arange(rows)})
    return rb.storage


def episodes(*lengths: int, more: dict[str, torch.Tensor] | None = None) -> TensorStorage:
    """Rows of episodes of these lengths, with their number, step and end."""
    traj = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    step = torch.cat([torch.arange(n) for n in lengths])
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])[:, None]
    return TensorStorage({"traj": traj, "step": step, "next": {"done": done}, **(more or {})})


# -- single rows ------------------------------------------------------------------------------------------------------


SAMPLERS: list[Callable[[], Sampler]] = [
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
@pytest.mark.parametrize("ndim", [1, 2])
def test_draws_are_those_of_the_sampler_in_a_buffer(make: Callable[[], Any], ndim: int) -> None:
    rows = TensorDict(episodes(5, 3, 10, more={"is_init": torch.zeros(18, 1, dtype=torch.bool)})[:], [18])
    rows = rows.view(2, 9) if ndim == 2 else rows
    sampler, generator = make(), dice()
    rb = ReplayBuffer(storage=LazyTensorStorage(18, ndim=ndim), sampler=make(), batch_size=6, generator=dice())
    slots = rb.extend(rows)
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


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_a_storage_that_was_never_in_a_buffer(kind: type[Storage]) -> None:
    storage = kind(8)
    for sampler in (RandomSampler(), PrioritizedSampler(4, 1.0, 1.0), SliceSampler(slice_len=2)):
        with pytest.raises(EmptyBufferError, match="Cannot sample from an empty storage"):
            sampler.sample(storage, 2)
        assert not sampler.can_sample(storage, 2)
    storage.set(range(6), [{"x": i} for i in range(6)] if kind is ListStorage else {"x": torch.arange(6)})
    for sampler in (RandomSampler(), SamplerWithoutReplacement(), PrioritizedSampler(8, 1.0, 1.0)):
        index, _ = sampler.sample(storage, 4)
        rows = storage.get(index)
        found = [row["x"] for row in rows] if kind is ListStorage else rows["x"].tolist()
        assert [int(x) for x in found] == index.tolist()  # type: ignore[union-attr]


def test_a_pass_goes_on_between_calls_and_ends() -> None:
    sampler, storage = SamplerWithoutReplacement(), bare()
    seen: list[int] = []
    for ran_out in (False, False, True):
        seen += sampler.sample(storage, 4)[0].tolist()  # type: ignore[union-attr]
        assert sampler.ran_out == ran_out
    assert sorted(seen) == list(range(10))
    whole = SamplerWithoutReplacement(drop_last=True)
    assert whole.can_sample(bare(4), 4)
    assert not whole.can_sample(bare(3), 4)
    with pytest.raises(TooFewRowsError, match=r"The batch size \(4\) is greater than the storage capacity \(3\)"):
        whole.sample(bare(3), 4)


# -- priorities -------------------------------------------------------------------------------------------------------


def test_rows_without_a_priority_get_the_default_one() -> None:
    sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0)
    assert sampler.default_priority == 1.0
    sampler.update_priority(torch.tensor([1, 0]), torch.tensor([5.0, 2.0]))
    assert sampler.default_priority == 5.0
    sampler.sample(bare(4), 2)
    assert sampler.priorities.tolist() == [2.0, 5.0, 5.0, 5.0]
    sampler.update_priority(2, 0.5)
    sampler.mark_update(0)
    sampler.add(2)
    sampler.extend(torch.tensor([-1, 1]))  # a row that was not kept
    assert sampler.priorities.tolist() == [5.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("make", [lambda: PrioritizedSampler(4, 1.0, 1.0), lambda: HeapSampler(4)])
def test_bad_indices_and_priorities_change_nothing(make: Any) -> None:
    sampler = make()
    sampler.extend(range(4))
    sampler.update_priority(range(4), [1.0, 2.0, 3.0, 4.0])
    bad: list[tuple[Any, Any, type[Exception], str]] = [
        ([4], 1.0, SlotError, "slot 4 is out of range: .* keeps priorities for max_capacity=4"),
        ([-1, 1], [5.0, 2.0], SlotError, r"index -1 is out of range: .* as in rb\[-1\]"),
        (-1, 9.0, SlotError, "index -1"),
        ([0, 1], [1.0, 2.0, 3.0], UsageError, "same length as index"),
        ([0, 1, 2], torch.ones(3, 3), SchemaError, r"got \[3, 3\]: a number for each pair .* \.squeeze\(-1\)"),
        ([0, 1], [1.0, math.nan], PriorityError, r"positions \[1\]"),
        ([0.5], 1.0, KindError, "an index must hold integers"),
        (["a"], 1.0, KindError, "an index"),
        ([0], "much", KindError, "real numbers"),
        (torch.tensor([[0, 1]]), 1.0, UsageError, "storage should be provided"),
    ]
    for index, priority, error, match in bad:
        with pytest.raises(error, match=match):
            sampler.update_priority(index, priority)
        assert sampler.priorities.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_storage_may_be_smaller_than_the_sampler_but_not_its_rows_more() -> None:
    sampler = PrioritizedSampler(20, 1.0, 1.0, eps=0.0)
    sampler.update_priority(range(20), torch.arange(20.0))
    index, _ = sampler.sample(bare(3, 5), 100)
    assert set(index.tolist()) == {1, 2}  # type: ignore[union-attr]
    assert sampler.priorities.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(SlotError, match="max_capacity=2"):
        PrioritizedSampler(2, 1.0, 1.0).sample(bare(3), 1)
    sampler.update_priority(range(3), 0.0)
    assert not sampler.can_sample(bare(3), 1)
    with pytest.raises(PriorityError):
        sampler.sample(bare(3), 1)


# -- slices -----------------------------------------------------------------------------------------------------------


def test_episodes_are_read_again_at_each_draw() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend({"traj": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])})
    sampler = SliceSampler(slice_len=4, traj_key="traj")
    kept = SliceSampler(slice_len=4, traj_key="traj", cache_values=True)

    def drawn(one: Sampler) -> set[int]:
        return set(rb.storage[one.sample(rb.storage, 16)[0]]["traj"].tolist())

    assert drawn(sampler) == drawn(kept) == {1}
    rb.storage["traj"][:] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])  # neither length nor cursor has changed
    assert drawn(sampler) == {0}
    assert drawn(kept) != {0}
    kept.extend(range(8))
    assert drawn(kept) == {0}
    rb.extend({"traj": torch.tensor([2, 2, 2, 2, 2])})
    assert drawn(sampler) == drawn(kept) == {2}


def test_slices_say_whether_there_are_any() -> None:
    storage = episodes(4, 2)
    assert SliceSampler(slice_len=4).can_sample(storage, 8)
    assert not SliceSampler(slice_len=5).can_sample(storage, 10)
    assert SliceSampler(slice_len=5, strict_length=False).can_sample(storage, 10)
    assert not SliceSamplerWithoutReplacement(slice_len=4, drop_last=True).can_sample(storage, 8)
    assert SliceSamplerWithoutReplacement(slice_len=4).can_sample(storage, 8)
    assert not PrioritizedSliceSampler(6, 1.0, 1.0, slice_len=5).can_sample(storage, 10)
    with pytest.raises(UsageError, match="The batch-size must be divisible by the slice length"):
        SliceSampler(slice_len=4).can_sample(storage, 9)


def test_rows_that_do_not_tell_their_episodes() -> None:
    rb = ReplayBuffer(storage=ListStorage(4))
    rb.extend([1, 2, 3])
    with pytest.raises(
        EpisodesError, match="Could not get a tensordict out of the storage, which is required for Slic"
    ):
        SliceSampler(slice_len=2).sample(rb.storage, 2)
    wide = TensorStorage({"next": {"done": torch.zeros(4, 3, dtype=torch.bool)}})
    with pytest.raises(EpisodesError, match="Expected the end-of-trajectory signal to be 1-dimensional"):
        SliceSampler(slice_len=2).sample(wide, 2)
    assert issubclass(EpisodesError, RuntimeError)
    assert issubclass(EpisodesError, TypeError)  # what TorchRL raises for streams and units without fields


# -- states -----------------------------------------------------------------------------------------------------------


SAVED: list[Callable[[], Sampler]] = [
    *SAMPLERS,
    lambda: LimitedSampler(3),
    lambda: ConsumingSampler(3),
    QueueSampler,
    lambda: StackSampler(2),
    lambda: HeapSampler(18, "max", 2),
]


@pytest.mark.parametrize("make", SAVED)
def test_a_saved_sampler_goes_on(make: Callable[[], Any], tmp_path: Path) -> None:
    storage, sampler, loaded = episodes(5, 3, 10), make(), make()
    if sampler.prioritized:
        sampler.update_priority(torch.arange(18), torch.arange(18.0))
    sampler.sample(storage, 6, generator=dice())
    sampler.dumps(tmp_path)
    loaded.loads(tmp_path)
    for size in (6, 3):
        drawn = [one.sample(storage, size, generator=dice(size))[0] for one in (sampler, loaded)]
        assert torch.equal(*(index if isinstance(index, torch.Tensor) else index[0] for index in drawn))


def test_states_of_others_are_refused(tmp_path: Path) -> None:
    RandomSampler().dumps(tmp_path / "random")
    with pytest.raises(CheckpointError, match="holds the state of a RandomSampler, not of a SamplerWithoutReplacement"):
        SamplerWithoutReplacement().loads(tmp_path / "random")
    PrioritizedSampler(4, 1.0, 1.0).dumps(tmp_path / "max")
    with pytest.raises(CheckpointError, match="reduction='max'"):
        PrioritizedSampler(4, 1.0, 1.0, reduction="min").loads(tmp_path / "max")
    with pytest.raises(FileNotFoundError):
        RandomSampler().loads(tmp_path / "none")


# -- ensembles --------------------------------------------------------------------------------------------------------


def test_samplers_that_read_fields_read_a_bare_storage_each_time() -> None:
    storage = bare(12)  # the rows 10, 11, 2, 3, ...
    stale, groups = (
        StalenessAwareSampler(max_staleness=2, version_key="x"),
        PromptGroupSampler(num_groups=10, group_key="x"),
    )
    stale.consumer_version = 11
    assert set(stale.sample(storage, 3)[0].tolist()) == {0, 1, 9}  # type: ignore[union-attr]
    assert sorted(groups.sample(storage, 10)[0].tolist()) == list(range(10))  # type: ignore[union-attr]
    storage["x"][:] = 9  # which a storage does not report
    assert set(stale.sample(storage, 60)[1]["staleness"].tolist()) == {2.0}
    with pytest.warns(UserWarning, match="There are 1 groups"):
        groups.sample(storage, 10)


def test_rows_of_a_bare_storage_leave_and_return() -> None:
    storage, sampler = bare(), ConsumingSampler()
    first, _ = sampler.sample(storage, 4)
    second, _ = sampler.sample(storage, 20)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(10))  # type: ignore[union-attr]
    assert not sampler.can_sample(storage, 1)
    with pytest.raises(EmptyBufferError, match="Cannot sample from an empty storage"):
        sampler.sample(storage, 1)
    sampler.extend(torch.tensor([1, 2]))
    assert sorted(sampler.sample(storage, 5)[0].tolist()) == [1, 2]  # type: ignore[union-attr]
    sampler.mark_update(torch.tensor([2]), storage=storage)
    assert sampler.sample(storage, 4)[0].tolist() == [2]  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [-1, 1.5, "x", None, True])
def test_bad_requests_are_named(size: Any) -> None:
    storage = TensorStorage(torch.arange(4))
    with pytest.raises((OptionError, KindError), match="batch_size must be"):
        RandomSampler().sample(storage, size)
    with pytest.raises(KindError, match="takes a storage"):
        RandomSampler().sample(ReplayBuffer(storage=storage), 2)  # type: ignore[arg-type]


def test_indices_and_priorities_of_many_forms() -> None:
    line = bare(6, 6)
    rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    rb.extend({"x": torch.arange(6).view(2, 3)})
    pair = (torch.tensor([0, 1]), torch.tensor([1, 1]))
    two = [1, 1 + rb.storage.num_envs]
    forms: list[tuple[Storage, Any, list[int]]] = [
        *((line, index, [1, 4]) for index in ([1, 4], torch.tensor([1, 4]), range(1, 5, 3), (torch.tensor([1, 4]),))),
        (line, torch.tensor([1, 4], dtype=torch.int32).numpy(), [1, 4]),
        *((rb.storage, index, two) for index in (torch.stack(pair, 1), pair)),
    ]
    for storage, index, slots in forms:
        for priority in ([7.0, 7.0], 7, torch.full((2, 1), 7.0), torch.tensor([[7.0, 1.0, 0.0], [2.0, 7.0, 0.0]])):
            sampler = PrioritizedSampler(6, 1.0, 1.0)
            sampler.sample(storage, 1)
            sampler.update_priority(index, priority, storage=storage)
            assert (sampler.priorities == 7).nonzero().flatten().tolist() == slots


def test_samplers_without_priorities_have_the_calls_of_those_with() -> None:
    sampler = RandomSampler()
    sampler.add(3)
    sampler.extend(range(4))
    sampler.mark_update(torch.tensor([1]))
    assert sampler.default_priority == 1.0
    with pytest.warns(UserWarning, match="update_priority.. on a sampler RandomSampler that is not prioritized"):
        sampler.update_priority(torch.tensor([1]), 1.0)


def test_an_ensemble_samples_its_members(tmp_path: Path) -> None:
    storages = StorageEnsemble(bare(4), bare(8))
    mix = SamplerEnsemble(SamplerWithoutReplacement(), RandomSampler(), p=[0.25, 0.75], num_buffer_sampled=4)
    found, info = mix.sample(storages, 8, generator=dice())  # type: ignore[arg-type]
    assert sorted(found["buffer_ids"].tolist()) == [0, 1, 1, 1]
    assert found["index"].shape == (4, 2)
    assert info["parts"] == [{}] * 4
    for (member, rows), index, number in zip(storages.get(found), found["index"], found["buffer_ids"], strict=True):
        assert member == number
        assert torch.equal(rows["x"], index)
    assert mix.can_sample(storages, 8)  # type: ignore[arg-type]
    assert not mix.can_sample(storages, 7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="The batch size must be divisible by num_buffer_sampled"):
        mix.sample(storages, 7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="one storage for each of the 2 samplers, got 1"):
        mix.sample([bare(4)], 8)
    mix.dumps(tmp_path)
    again = SamplerEnsemble(SamplerWithoutReplacement(), RandomSampler())
    again.loads(tmp_path)
    assert repr(again[0]) == repr(mix[0])
    every = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
    assert every.can_sample(storages, 4)  # type: ignore[arg-type]
    assert not every.can_sample(StorageEnsemble(bare(4), LazyTensorStorage(8)), 4)  # type: ignore[arg-type]
