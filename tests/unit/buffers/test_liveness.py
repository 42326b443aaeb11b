"""No call waits for ever while what it waits for is there: threads under schedules that a seed decides."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, QueueSampler, ReplayBuffer
from ostinato.buffers import cut, engine, feed, gate, prefetch

from ...schedules import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = (cut, engine, feed, gate, prefetch)


def explore(seeds: range, scenario: Callable[[Schedule], None]) -> None:
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            schedule = Schedule(seed, MODULES)
            schedule.replace(patch)
            scenario(schedule)


def queue(schedule: Schedule, prefetch_: int) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(16), sampler=QueueSampler(), batch_size=5, prefetch=prefetch_)

    def write(first: int) -> None:
        for i in range(first, first + 20, 4):
            rb.extend(torch.arange(i, i + 4), timeout_s=math.inf)

    def read() -> list[int]:
        return [row for _ in range(4) for row in rb.sample(timeout_s=math.inf).tolist()]

    found = schedule.run(lambda: write(0), lambda: write(20), read, read)
    assert sorted(found[2] + found[3]) == list(range(40))


@pytest.mark.parametrize("depth", [None, 3])
def test_a_queue(depth: Any) -> None:
    explore(range(200), lambda schedule: queue(schedule, depth))
