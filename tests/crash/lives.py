"""Long lives, each in a process of its own: `python -m tests.crash.lives NAME` ends well or says why not."""

from __future__ import annotations

import gc
import sys
from typing import Any

import psutil
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)

CAPACITY = 4000


def rows(start: int, episode: int, count: int) -> dict[str, Any]:
    """Return steps of episodes of `episode` rows, without TensorDicts: each of these processes would import them."""
    t = torch.arange(start, start + count)
    done = t % episode == episode - 1
    obs = (t[:, None] + torch.arange(32)).float()
    return {"t": t, "obs": obs, "next": {"obs": obs + 1, "done": done, "reward": t.float()}}


def _buffer(storage: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage or LazyTensorStorage(CAPACITY),
        batch_size=64,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


BUFFERS: dict[str, Any] = {
    "prioritized slices": lambda: _buffer(
        sampler=PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=4, end_key=("next", "done"))
    ),
    "single copy": lambda: _buffer(LazyTensorStorage(CAPACITY, single_copy=True), sample_unit=NStep(3, 0.9)),
    "mapped, ahead": lambda: _buffer(LazyMemmapStorage(CAPACITY), prefetch=2),
    "list": lambda: _buffer(ListStorage(CAPACITY // 10), sampler=SamplerWithoutReplacement()),
}


def _learn(rb: ReplayBuffer) -> None:
    batch, info = rb.sample(return_info=True)
    if rb.sampler.prioritized:
        rb.update_priority(info["index"], batch["t"].double() % 7 + 1)


def wraps(name: str) -> None:
    """Fifty times round the ring with ever longer episodes: memory and objects are those of the tenth round."""
    rb = BUFFERS[name]()
    capacity, marks, start = rb.storage.capacity, [], 0
    for wrap in range(60):
        episode = 5 + 13 * wrap
        for _ in range(10):
            count = capacity // 10
            rb.extend(rows(start, episode, count))
            start += count
            if len(rb) >= capacity // 2:
                _learn(rb)
        if wrap in {9, 59}:
            gc.collect()
            marks.append((psutil.Process().memory_info().rss, len(gc.get_objects())))
    (memory, objects), (memory_now, objects_now) = marks
    assert memory_now - memory < 4 * 2**20, f"memory grew by {memory_now - memory} bytes in 50 wraps"
    assert objects_now - objects < 200, f"{objects_now - objects} objects more after 50 wraps"
    rb.extend(rows(start, 1000, 64 if isinstance(rb.storage, ListStorage) else capacity))
    rb.sample()


if __name__ == "__main__":
    wraps(sys.argv[1])
