"""Stacks and heaps: as in Reverb, with rows that leave, states and windows; `tests/stateful` has a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ConsumingSampler,
    Episodes,
    HeapSampler,
    LazyTensorStorage,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SequenceUnit,
    StackSampler,
    TensorDictReplayBuffer,
)
from ostinato.errors import (
    CapacityError,
    CheckpointError,
    OptionError,
    PriorityError,
    SlotError,
    TooFewRowsError,
    WaitTimeoutError,
)

from ..buffers.refusals import raises

CAPACITY = 6
KINDS: dict[str, Any] = {
    "stack": lambda most: StackSampler(most),
    "max": lambda most: HeapSampler(CAPACITY, "max", most),
    "min": lambda most: HeapSampler(CAPACITY, "min", most),
}


def make(kind: str, most: int | None, **options: Any) -> ReplayBuffer:
    sampler = ConsumingSampler(most or 3) if kind == "consuming" else KINDS[kind](most)
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, **options)


def test_a_stack_and_a_queue_of_priorities_as_in_reverb():
    """`reverb.Table.stack` and a table with MaxHeap, `max_times_sampled=1` and a limiter."""
    limiter = RateLimiter(samples_per_insert=1, min_diff=0, max_diff=3, timeout_s=0.0)
    stack = make("stack", 1, batch_size=1, rate_limiter=limiter)
    stack.extend(torch.arange(3))
    with pytest.raises(WaitTimeoutError):
        stack.extend(torch.tensor([3]))
    assert [stack.sample().item() for _ in range(3)] == [2, 1, 0]
    with pytest.raises(WaitTimeoutError):
        stack.sample()
    heap = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=HeapSampler(CAPACITY, "max", 1), batch_size=2, priority_key="p"
    )
    heap.extend(TensorDict({"x": torch.arange(4), "p": torch.tensor([1.0, 5.0, -3.0, 2.0])}, [4]))
    assert [batch["x"].tolist() for batch in heap] == [[1, 3], [0, 2]]
    assert len(heap) == 0
    assert not heap.can_sample()


@pytest.mark.parametrize("kind", ["stack", "min"])
def test_rows_that_were_there_before_and_windows_that_are_whole(kind):
    storage = LazyTensorStorage(CAPACITY)
    storage.set(range(4), torch.arange(4))
    rb = ReplayBuffer(storage=storage, sampler=KINDS[kind](None), batch_size=2)
    assert rb.sample().tolist() == ([3, 2] if kind == "stack" else [0, 1])
    other = LazyTensorStorage(CAPACITY)
    other.set(range(2), torch.arange(10, 12))
    rb.set_storage(other)
    assert rb.sample().tolist() == ([11, 10] if kind == "stack" else [10, 11])
    rb = make(kind, None, batch_size=2, sample_unit=SequenceUnit(2, "strict"), episodes=Episodes(end_key="done"))
    rb.extend({"x": torch.arange(5), "done": torch.tensor([False, False, True, False, False])})
    first = rb.sample()["x"].reshape(2, 2)[:, 0].tolist()
    assert first == ([3, 1] if kind == "stack" else [0, 1])
    with pytest.raises(TooFewRowsError):
        rb.sample(5)


def test_states_of_other_options_and_damaged_ones():
    rb = make("max", 2)
    rb.extend(torch.arange(5))
    rb.sample(2)
    for other in (make("min", 2), make("max", None), make("max", 3), make("stack", 2)):
        with pytest.raises(CheckpointError):
            other.load_state_dict(rb.state_dict())
    for name, value in (
        ("priorities", torch.full((5,), torch.inf, dtype=torch.float64)),
        ("priorities", torch.zeros(4, dtype=torch.float64)),
        ("largest", -1.0),
        ("uses", torch.full((5,), 3, dtype=torch.int32)),
        ("uses", torch.zeros(5)),
        ("free", torch.tensor([0])),
    ):
        state = rb.state_dict()
        state["sampler"]["state"][name] = value
        with pytest.raises(CheckpointError):
            make("max", 2).load_state_dict(state)


def test_wrong_options_and_parts_that_do_not_go_together():
    raises(
        (lambda: StackSampler(0), OptionError, ""),
        (lambda: HeapSampler(0), CapacityError, ""),
        (lambda: HeapSampler(8, reduction="sum"), OptionError, "reduction"),
        (lambda: ReplayBufferEnsemble(make("stack", 1), make("stack", 1), batch_size=2), OptionError, ""),
        (
            lambda: ReplayBuffer(storage=LazyTensorStorage(8), sampler=HeapSampler(4)).extend(torch.arange(5)),
            SlotError,
            "",
        ),
        (lambda: HeapSampler(4).update_priority([0], float("nan")), PriorityError, ""),
        (lambda: make("max", 1, batch_size=2, prefetch=2), OptionError, ""),
    )


@pytest.mark.parametrize("kind", ["stack", "max", "consuming"])
def test_a_buffer_that_is_emptied_during_a_draw_delivers_it(kind):
    rb = make(kind, 1, batch_size=2)
    rb.extend(torch.arange(4))

    def empty_meanwhile(batch: torch.Tensor) -> torch.Tensor:
        rb.empty()
        return batch

    rb.append_transform(empty_meanwhile)
    assert rb.sample().shape == (2,)
    assert len(rb) == 0


def test_the_last_row_of_a_draw_that_failed_is_left():
    rb = make("stack", 1, batch_size=1, transform=lambda batch: batch.missing)
    rb.extend(torch.arange(1))
    with pytest.raises(AttributeError):
        rb.sample()
    assert not rb.sampler.ran_out
