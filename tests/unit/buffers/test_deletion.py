"""Deletion by index and generation: against a plain model, its distribution, checkpoints, and what it excludes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    ReservoirWriter,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
)
from ostinato.buffers.datasets import buffer_as_dataset
from ostinato.errors import (
    CheckpointError,
    KeyMissingError,
    OptionError,
    SchemaError,
    SlotError,
    UsageError,
    WaitTimeoutError,
)

from ...registry import SAMPLERS, ring, seeded
from .refusals import raises

CAPACITY = 7
KINDS = ["RandomSampler", "SamplerWithoutReplacement", "PrioritizedSampler, largest priority", "LimitedSampler"]
KINDS += ["StackSampler", "HeapSampler", "QueueSampler", "ConsumingSampler"]
KINDS += ["StackSampler, max_times_sampled", "HeapSampler, max_times_sampled"]


def make(kind: str = "RandomSampler", capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    return ring(
        capacity,
        sampler=SAMPLERS[kind].make(capacity),
        writer=RoundRobinWriter(track_generations=True),
        generator=seeded(3),
        **options,
    )


def test_a_pass_goes_on_without_the_deleted_rows():
    rb = make("SamplerWithoutReplacement", batch_size=2)
    rb.extend(torch.arange(7))
    first = rb.sample().tolist()
    gone = [i for i in range(7) if i not in first][:2]
    rb.delete(torch.tensor(gone))
    rest = [rb.sample().tolist(), rb.sample(1).tolist()]
    assert sorted([*first, *rest[0], *rest[1]]) == [i for i in range(7) if i not in gone]
    assert sorted(row for batch in rb for row in batch.tolist()) == [i for i in range(7) if i not in gone]


def test_a_sample_names_the_rows_to_delete():
    rb = make("PrioritizedSampler, largest priority", batch_size=2)
    rb.extend(torch.arange(7))
    _, info = rb.sample(return_info=True)
    rb.extend(torch.arange(7, 10))  # replaces slots 0 to 2
    assert torch.equal(rb.delete(info), info["index"] > 2)
    assert rb.delete({"index": [3], "index_generation": [4]}).tolist() == [3 not in info["index"]]


def test_a_deleted_row_gets_no_priority_and_sets_no_default():
    rb = make("PrioritizedSampler, largest priority", batch_size=2)
    index = rb.extend(torch.arange(4))
    rb.update_priority(index, [1.0, 2.0, 9.0, 3.0])
    rb.delete(2)
    rb.update_priority(2, 50.0)
    rb.update_priority(torch.tensor([2]), torch.tensor([50.0]), torch.tensor([0]))  # the generation of no row
    assert rb.stats().stale_updates == 1
    rb.mark_update(2)
    assert rb.sampler.default_priority == 3.0
    assert rb.extend(torch.tensor([4])).tolist() == [2]
    assert set(rb.sample(64).tolist()) == {0, 1, 3, 4}
    assert rb.delete([3, 3, -1]).tolist() == [True, True, False]


def test_another_sampler_goes_on_without_the_deleted_rows():
    rb = make()
    rb.extend(torch.arange(6))
    rb.delete([1, 4])
    for kind in [*KINDS, "RandomSampler"]:
        rb.set_sampler(SAMPLERS[kind].make(CAPACITY))
        if kind == "QueueSampler":
            with pytest.raises(WaitTimeoutError):  # a queue makes writers wait, the others do not
                rb.extend(torch.arange(CAPACITY), timeout_s=0.0)
        assert len(rb) == 4
        assert set(rb.sample(4).tolist()) <= {0, 2, 3, 5}
    rb.delete([0])
    assert sorted(rb.extend(torch.arange(6, 9)).tolist()) == [0, 1, 4]
    with pytest.raises(OptionError, match="ReservoirWriter"):
        rb.set_writer(ReservoirWriter())


@pytest.mark.parametrize("kind", KINDS[:6])
def test_a_buffer_of_another_size_takes_deleted_rows_over(kind):
    rb = make(kind)
    rb.extend(torch.arange(10))
    rb.delete([1, 5])
    big = make(kind, 12)
    big.load_state_dict(rb.state_dict())
    assert len(big) == 5
    assert set(big.sample(5).tolist()) <= {3, 4, 6, 7, 9}
    index = big.extend(torch.arange(10, 20)).tolist()
    assert {big[slot].item() for slot in index} == set(range(10, 20))


def test_damaged_checkpoints_are_refused():
    rb, other = make(), make()
    rb.extend(torch.arange(7))
    rb.delete([1, 5])
    other.extend(torch.arange(3))
    other.delete([0])
    for wrong in (torch.tensor([1]), torch.tensor([1, 4]), torch.tensor([1.0, 5.0]), torch.tensor([1, 5, 5])):
        state = rb.state_dict()
        state["deleted"]["free"] = wrong
        with pytest.raises(CheckpointError):
            other.load_state_dict(state)
        assert len(other) == 2
    assert other.extend(torch.tensor([9])).tolist() == [0]


def test_what_cannot_be_deleted_changes_nothing():
    unit = {"sample_unit": NStep(2, 0.9, reward_key="gain"), "episodes": Episodes(end_key="done")}
    cases: list[Any] = [
        ({"storage": LazyTensorStorage(8, single_copy=True)}, OptionError, "single_copy"),
        ({"writer": ReservoirWriter()}, OptionError, "ReservoirWriter"),
        ({"episodes": Episodes(end_key="done")}, OptionError, "mask_key"),
        (unit, OptionError, "sample_unit"),
        ({"sampler": SliceSampler(slice_len=2, end_key="done")}, OptionError, "slice samplers"),
        ({"sampler": SamplerWithoutReplacement(endless=True)}, OptionError, "endless"),
        ({"sampler": SamplerWithoutReplacement(drop_last=True), "batch_size": 2}, OptionError, "drop_last"),
        ({"shared": True}, UsageError, "shared=True"),
    ]
    for options, error, words in cases:
        rb = ReplayBuffer(**{"storage": LazyTensorStorage(8), **options})
        done = torch.zeros(4, dtype=torch.bool)
        rb.extend({"x": torch.arange(4), "next_x": torch.arange(1, 5), "gain": torch.ones(4), "done": done})
        with pytest.raises(error, match=words):
            rb.delete([0, 1])
        assert len(rb) == 4
    grid, rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2)), make()
    grid.extend({"x": torch.zeros(2, 4)})
    assert rb.delete([0]).tolist() == [False]
    rb.extend(torch.arange(4))
    raises(
        (lambda: grid.delete([[0, 1]]), OptionError, "ndim=1"),
        (lambda: rb.delete([0, CAPACITY]), SlotError, "out of range"),
        (lambda: rb.delete([-2]), SlotError, ""),
        (lambda: rb.delete([0, 1], [1]), SchemaError, "generation"),
        (lambda: rb.delete(0.5), TypeError, ""),
        (lambda: rb.delete({"slot": torch.arange(2)}), KeyMissingError, ""),
    )
    assert rb.delete([CAPACITY - 1]).tolist() == [False]
    assert rb.delete(torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert (len(grid), len(rb)) == (8, 4)


def test_trajectories_are_those_of_the_rows_present():
    rb = ring(8)
    rb.extend({"episode": torch.tensor([0, 0, 1, 1, 1, 2]), "x": torch.arange(6)})
    rb.delete([3, 5])
    rb.extend({"episode": torch.tensor([2, 2]), "x": torch.arange(6, 8)})
    assert [found.get("x").tolist() for found in rb.query()] == [[0, 1], [2, 4], [6, 7]]
    with pytest.raises(UsageError):
        buffer_as_dataset(rb)
