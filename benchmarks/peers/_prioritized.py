"""What only Ostinato is measured at: priorities in several threads, and in large updates."""

from __future__ import annotations

import time
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from benchmarks.adapter import Seconds
from benchmarks.peers._threads import together
from ostinato import LazyTensorStorage, PrioritizedReplayBuffer

if TYPE_CHECKING:
    from benchmarks.adapter import Call, Setup

_SAMPLES = 50
_MILLION = 1_000_000


def _full(rows: int, width: int) -> PrioritizedReplayBuffer:
    """A full buffer whose priorities differ; rows have `width` float32 numbers."""
    buffer = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(rows))
    for start in range(0, rows, _MILLION):
        index = buffer.extend({"obs": torch.zeros(min(_MILLION, rows - start), width)})
        buffer.update_priority(index, torch.rand(index.shape[0]))
    return buffer


def threads(setup: Setup) -> Call:
    """Sample in as many threads as the kind says; seconds per sample of all of them together."""
    buffer = _full(setup.rows, 40)
    return together(lambda: buffer.sample(setup.batch), int(setup.kind), _SAMPLES)


def update(setup: Setup) -> Call:
    """Give random rows new priorities, bare; seconds per thousand of them."""
    buffer = _full(setup.rows, 1)
    batches = cycle([(torch.randint(0, setup.rows, (setup.batch,)), torch.rand(setup.batch)) for _ in range(64)])

    def call() -> Seconds:
        index, priority = next(batches)
        start = time.perf_counter()
        buffer.update_priority(index, priority)
        return Seconds((time.perf_counter() - start) * 1000 / setup.batch)

    return call
