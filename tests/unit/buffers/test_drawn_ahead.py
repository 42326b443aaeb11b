"""With prefetch, a batch is that of an earlier call: its rows, weights and generations, whatever was written since.

The model is the same buffer without prefetch: its batches are taken when the other one draws, and compared when they
come out. So nothing may depend on when the thread copies the rows.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from ostinato import (
    LimitedSampler,
    RaggedTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

from ...registry import CAPACITY, SAMPLERS, STORAGES, UNITS, seeded
from ...registry import rows as combined
from ...tags import same_state

BUFFERS: dict[str, Any] = {
    "uniform": ("LazyTensorStorage", "RandomSampler", "none"),
    "prioritized": ("LazyTensorStorage", "PrioritizedSampler", "none"),
    "list": ("ListStorage", "PrioritizedSampler", "none"),
    "ragged": ("", "RandomSampler", "none"),
    "single copy": ("LazyTensorStorage, single_copy", "RandomSampler", "none"),
    "memmap": ("LazyMemmapStorage", "RandomSampler", "none"),
    "environments": ("LazyTensorStorage, ndim=2", "RandomSampler", "none"),
    "nstep": ("LazyTensorStorage", "RandomSampler", "NStep"),
    "frames": ("LazyTensorStorage", "PrioritizedSampler", "FrameStack"),
    "slices": ("LazyTensorStorage", "SliceSampler", "none"),
    "shared": ("LazyTensorStorage", "RandomSampler", "none"),
    "uses": ("LazyTensorStorage", "", "none"),
    "view": ("LazyTensorStorage", "RandomSampler", "none"),
}
"""Storage, sampler and unit of each kind."""


def rows(first: int, count: int, kind: str = "") -> Any:
    lanes = 2 if kind == "environments" else 1
    return combined(count // lanes, first // lanes, lanes)


def make(kind: str, depth: int) -> ReplayBuffer:
    storage, sampler, unit = BUFFERS[kind]
    prefetch = depth or None
    rb = TensorDictReplayBuffer(
        storage=STORAGES[storage](CAPACITY)
        if storage
        else RaggedTensorStorage(CAPACITY, ragged="tokens", layout="padded"),
        sampler=SAMPLERS[sampler].make(CAPACITY) if sampler else LimitedSampler(100),
        sample_unit=UNITS[unit](CAPACITY),
        shared=kind == "shared",
        dim_extend=0,
        batch_size=6,
        prefetch=None if kind == "view" else prefetch,
        generator=seeded(3),
    )
    return rb.view(prefetch=prefetch, generator=seeded(8)) if kind == "view" else rb


class Late:
    """A buffer without prefetch whose batches come out as late as those of a buffer with it."""

    def __init__(self, rb: Any, depth: int) -> None:
        self.rb, self.depth = rb, depth
        self.queue: deque[Any] = deque()

    def sample(self) -> Any:
        while len(self.queue) <= self.depth:
            self.queue.append(self.rb.sample(return_info=True))
        return self.queue.popleft()


def told(info: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in info.items() if key != "stale"}


def write(rb: Any, kind: str, step: int) -> None:
    """Write rows, and now and then change some that are there."""
    rb.extend(rows(2 * step, 2, kind))
    if kind in {"list", "environments", "ragged", "shared"}:
        return
    if step % 3 == 1:
        rb.extend(rows(5000 + step, 1))
    if step % 4 == 2:
        rb[1:3] = rows(9000 + step, 2)
    if step % 5 == 3:
        rb.set_at_("t", torch.tensor([-step]), torch.tensor([4]))


def learn(buffers: list[Any], info: dict[Any, Any], step: int) -> None:
    """Feed priorities back."""
    if "priority_weight" not in info:
        return
    priority = (info["index"] * 7 + step) % 11 / 3 + 0.1
    for rb in buffers:
        rb.update_priority(info["index"], priority.float(), generation=info["index_generation"])


@pytest.mark.parametrize("kind", BUFFERS)
def test_batches_are_those_of_an_earlier_call(kind):
    depth = 4 if kind == "uniform" else 2
    rb, late = make(kind, depth), Late(make(kind, 0), depth)
    for each in (rb, late.rb):
        each.extend(rows(600, 6, kind))
    for step in range(40):  # the ring is full after the ninth
        for each in (rb, late.rb):
            write(each, kind, step)
        batch, info = rb.sample(return_info=True)
        expected, given = late.sample()
        same_state([batch, told(info)], [expected, told(given)])
        learn([rb, late.rb], info, step)
