"""Samplers and writers that keep a state of rows serve one buffer at a time, and begin anew in the next one."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ConsumingSampler,
    HeapSampler,
    LazyTensorStorage,
    LimitedSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackSampler,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.samplers import Sampler


ROWS = 20

BOUND: dict[str, Callable[[], Sampler]] = {
    "prioritized": lambda: PrioritizedSampler(ROWS, 1.0, 1.0, eps=0.0),
    "prioritized slices": lambda: PrioritizedSliceSampler(ROWS, 1.0, 1.0, eps=0.0, slice_len=2),
    "without replacement": SamplerWithoutReplacement,
    "endless": lambda: SamplerWithoutReplacement(endless=True),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "streaming slices": lambda: StreamingSliceSampler(slice_len=2),
    "consuming": lambda: ConsumingSampler(1),
    "limited": lambda: LimitedSampler(1),
    "queue": QueueSampler,
    "stack": StackSampler,
    "heap": lambda: HeapSampler(ROWS),
    "prompt groups": lambda: PromptGroupSampler(samples_per_group=2, group_key="done", strategy="recency"),
    "staleness": lambda: StalenessAwareSampler(version_key="x"),
}
pytestmark = pytest.mark.filterwarnings("ignore:a batch has 1 groups")


def rows(count: int = 6, first: int = 0) -> TensorDict:
    x = torch.arange(first, first + count)
    return TensorDict({"x": x, "done": (x % 6 == 5)[:, None]}, [count])


def buffer(sampler: Any = None, count: int = 6, storage: Any = None, **given: Any) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(ROWS) if storage is None else storage
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=2, **given)
    if count:
        rb.extend(rows(count))
    return rb


def draws(rb: ReplayBuffer) -> list[Any]:
    torch.manual_seed(0)
    return [rb.sample()["x"].tolist() for _ in range(3)]


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(OptionError, match=r"serves another replay buffer.*make a (sampler|writer) for each"):
        call()


def use(rb: ReplayBuffer) -> None:
    """Leave a state that differs from that of a new sampler."""
    if rb.sampler.prioritized:
        rb.update_priority(torch.arange(6), torch.tensor([0.0, 0.0, 90.0, 0.0, 0.0, 0.0]) + 1e-3)
    if type(rb.sampler) is not StreamingSliceSampler:
        rb.sample()


# -- while the first buffer is in use ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", BOUND.values(), ids=BOUND)
def test_a_sampler_serves_one_buffer_and_begins_anew_when_that_is_gone(make: Callable[[], Sampler]) -> None:
    """It draws what a new one draws, in a buffer that is empty or over a storage with rows."""
    first, same, other = buffer(make()), buffer(make()), buffer()
    sampler = first.sampler
    refused(lambda: buffer(sampler, 0))
    refused(lambda: other.set_sampler(sampler))
    assert type(other.sampler) is RandomSampler
    if not sampler.counting:
        refused(partial(other.view, sampler=sampler))
        refused(partial(first.view, sampler=sampler))
    assert draws(first) == draws(same)
    first.extend(rows(6, 6))
    use(first)
    del first
    for before in (0, 6):
        rbs = []
        for one in (sampler, make()):
            storage = LazyTensorStorage(ROWS)
            if before:
                storage.set(range(before), rows(before))
            rbs.append(buffer(one, 6, storage))
        assert rbs[0].sampler is sampler
        assert len(rbs[0]) == before + 6
        assert draws(rbs[0]) == draws(rbs[1])
        rbs.clear()


@pytest.mark.parametrize("make", [RandomSampler, lambda: SliceSampler(slice_len=2)])
def test_parts_without_a_state_of_rows_are_shared(make: Callable[[], Sampler]) -> None:
    sampler, writer = make(), RoundRobinWriter()
    first, second = buffer(sampler, writer=writer), buffer(sampler, 18, writer=writer)
    for rb, count in ((first, 6), (second, 18), (second.view(sampler=sampler), 18)):
        assert set(rb.sample(300)["x"].tolist()) == set(range(count))


@pytest.mark.parametrize(
    "writer", [ReservoirWriter(), TensorDictMaxValueWriter(rank_key="x"), RoundRobinWriter(track_generations=True)]
)
def test_a_writer_of_another_buffer_raises_and_begins_anew_when_that_is_gone(writer: Any) -> None:
    rb, other = buffer(writer=writer), buffer(count=0)
    refused(lambda: buffer(writer=writer))
    refused(lambda: other.set_writer(writer))
    other.extend(rows())
    assert len(rb) == len(other) == 6
    del rb
    again = buffer(writer=writer, storage=LazyTensorStorage(4), count=3)
    again.extend(rows(3, 3))
    assert len(again) == 4
    assert not isinstance(writer, TensorDictMaxValueWriter) or sorted(again[:]["x"].tolist()) == [2, 3, 4, 5]


def test_buffers_that_are_not_made_yet_or_any_more_have_no_sampler() -> None:
    sampler = SamplerWithoutReplacement(drop_last=True)
    with pytest.raises(ValueError, match="batch") as failed:
        ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler)
    first: Any = buffer(sampler)
    assert failed.value is not None  # its traceback refers to the buffer that could not be made
    rb = buffer(sampler, 0, delayed_init=True)
    refused(lambda: rb.extend(rows()))
    gc.disable()
    try:
        first.cycle = first
        del first
        rb.extend(rows())  # garbage in a cycle is not in use
    finally:
        gc.enable()
    assert len(rb) == 6


# -- when the first buffer is gone -------------------------------------------------------------------------------------


# -- copies, shared buffers and checkpoints ----------------------------------------------------------------------------
