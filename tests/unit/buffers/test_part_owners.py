"""Samplers and writers that keep a state of rows serve one buffer at a time, and begin anew in the next one."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import OptionError

from ...registry import CAPACITY, SAMPLERS, rows

if TYPE_CHECKING:
    from collections.abc import Callable


BOUND = {name: part.make for name, part in SAMPLERS.items() if part.make(CAPACITY).keeps_rows}
pytestmark = pytest.mark.filterwarnings("ignore:a batch has 1 groups")


def buffer(sampler: Any = None, count: int = 6, storage: Any = None, **given: Any) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(CAPACITY) if storage is None else storage
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=3, **given)
    if count:
        rb.extend(rows(count))
    return rb


def draws(rb: ReplayBuffer) -> list[Any]:
    torch.manual_seed(0)
    return [rb.sample()["t"].tolist() for _ in range(2)]


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(OptionError, match=r"serves another replay buffer.*make a (sampler|writer) for each"):
        call()


def use(rb: ReplayBuffer) -> None:
    """Leave a state that differs from that of a new sampler."""
    if rb.sampler.prioritized:
        rb.update_priority(torch.arange(6), torch.tensor([0.0, 0.0, 90.0, 0.0, 0.0, 0.0]) + 1e-3)
    if type(rb.sampler) is not StreamingSliceSampler:
        rb.sample()


@pytest.mark.parametrize("make", BOUND.values(), ids=BOUND)
def test_a_sampler_serves_one_buffer_and_begins_anew_when_that_is_gone(make):
    """It draws what a new one draws, in a buffer that is empty or over a storage with rows."""
    first, same, other = buffer(make(CAPACITY)), buffer(make(CAPACITY)), buffer()
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
        for one in (sampler, make(CAPACITY)):
            storage = LazyTensorStorage(CAPACITY)
            if before:
                storage.set(range(before), rows(before))
            rbs.append(buffer(one, 6, storage))
        assert rbs[0].sampler is sampler
        assert len(rbs[0]) == before + 6
        assert draws(rbs[0]) == draws(rbs[1])
        rbs.clear()


@pytest.mark.parametrize("make", [RandomSampler, lambda: SliceSampler(slice_len=3)])
def test_parts_without_a_state_of_rows_are_shared(make):
    sampler, writer = make(), RoundRobinWriter()
    first, second = buffer(sampler, writer=writer), buffer(sampler, 18, writer=writer)
    for rb, count in ((first, 6), (second, 18), (second.view(sampler=sampler), 18)):
        assert set(rb.sample(300)["t"].tolist()) == set(range(count))


@pytest.mark.parametrize(
    "writer", [ReservoirWriter(), TensorDictMaxValueWriter(rank_key="t"), RoundRobinWriter(track_generations=True)]
)
def test_a_writer_of_another_buffer_raises_and_begins_anew_when_that_is_gone(writer):
    rb, other = buffer(writer=writer), buffer(count=0)
    refused(lambda: buffer(writer=writer))
    refused(lambda: other.set_writer(writer))
    other.extend(rows(6))
    assert len(rb) == len(other) == 6
    del rb
    again = buffer(writer=writer, storage=LazyTensorStorage(4), count=3)
    again.extend(rows(3, 3))
    assert len(again) == 4
    assert not isinstance(writer, TensorDictMaxValueWriter) or sorted(again[:]["t"].tolist()) == [2, 3, 4, 5]


def test_a_buffer_that_is_garbage_in_a_cycle_is_not_in_use():
    first: Any = buffer(SamplerWithoutReplacement())
    rb = buffer(first.sampler, 0, delayed_init=True)
    refused(lambda: rb.extend(rows(6)))
    gc.disable()
    try:
        first.cycle = first
        del first
        rb.extend(rows(6))
    finally:
        gc.enable()
    assert len(rb) == 6
