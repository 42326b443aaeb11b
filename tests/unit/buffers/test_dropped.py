"""No part of a dropped buffer is left to the collection of garbage; see also `test_freed.py`."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("backend")

CAPACITY = 64


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def use(rb: ReplayBuffer) -> None:
    rb.extend({"x": torch.arange(40), "end": torch.arange(40) % 5 == 4})
    rb.add({"x": torch.tensor(1), "end": torch.tensor(True)})
    rb.sample()
    rb.sample(return_info=True)
    rb.stats()
    rb.append_transform(lambda batch: batch)
    rb.sample()


def _tensors(**more: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, **more)


KINDS: dict[str, Callable[[], ReplayBuffer]] = {
    "uniform": partial(_tensors),
    "prioritized": lambda: _tensors(sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5)),
    "without replacement": lambda: _tensors(sampler=SamplerWithoutReplacement()),
    "queue": lambda: _tensors(sampler=QueueSampler()),
    "slices": lambda: _tensors(sampler=SliceSampler(num_slices=2, end_key="end")),
    "limited": lambda: _tensors(rate_limiter=RateLimiter(min_size_to_sample=1)),
    "prefetch": lambda: _tensors(prefetch=2),
    "shared": lambda: _tensors(shared=True),
    "shared, prioritized": lambda: _tensors(shared=True, sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5)),
    "shared, prefetch": lambda: _tensors(shared=True, prefetch=2, sampler=RandomSampler()),
    "files": lambda: ReplayBuffer(storage=LazyMemmapStorage(CAPACITY), batch_size=4),
    "list": lambda: ReplayBuffer(storage=ListStorage(CAPACITY), batch_size=4, collate_fn=list),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_buffer_leaves_no_garbage(kind: str, request: pytest.FixtureRequest) -> None:
    if kind.startswith("shared"):
        request.getfixturevalue("needs_native")
    with no_collection():
        rb = KINDS[kind]()
        if kind == "list":
            rb.extend([1, 2, 3, 4])
        else:
            use(rb)
        storage = weakref.ref(rb.storage)
        del rb
        end = time.monotonic() + 20
        while storage() is not None and time.monotonic() < end:
            time.sleep(0.01)  # a thread that makes a batch ahead finishes it
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        ours = {type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("ostinato")}
        tensors = [one.shape for one in gc.garbage if isinstance(one, torch.Tensor)]
        assert (ours, tensors) == (set(), [])
