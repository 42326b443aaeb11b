"""Threads that share prefetched batches, under many schedules: each gets a batch, or an error after its timeout."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from ostinato import LazyTensorStorage, QueueSampler, ReplayBuffer
from ostinato.buffers import pipeline, prefetch, rate_limit, reader, store
from ostinato.buffers.checkpoint import save
from ostinato.distributed import batch_stream, deadlines
from ostinato.distributed.batch_stream import ShardBatches
from ostinato.distributed.deadlines import GRACE_S, Deadline
from ostinato.errors import UsageError, WaitTimeoutError

from ..schedules import Schedule, explore

MODULES = (batch_stream, deadlines, save, reader, store, pipeline, prefetch, rate_limit)
CAPACITY = 16


class OneShard:
    """Draws from a buffer in this process, as a `ShardSampler` draws from shards."""

    consumer: Any = True

    def __init__(self, rb: ReplayBuffer) -> None:
        self._rb = rb
        self.returned = 0

    def deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.of_wait(timeout_s, math.inf, 60.0, share=0.5)

    def within(self, deadline: Deadline) -> Any:
        return nullcontext(deadline)

    def batches_per_round(self, depth: int) -> int:
        return 1

    def uniforms(self, size: int) -> torch.Tensor:
        return torch.zeros(size)

    def forget(self) -> None:
        """No rows are kept."""

    def give_back(self, rows: int) -> None:
        self.returned += rows

    def draw(self, size: int, uniforms: torch.Tensor, timeout_s: float | None, *, offers: Any = None) -> Any:
        return self._rb.sample(size, return_info=True, timeout_s=timeout_s)


def make(depth: int = 2) -> tuple[ReplayBuffer, ShardBatches]:
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=QueueSampler())
    return rb, ShardBatches(OneShard(rb), depth)  # type: ignore[arg-type]


def writes(rb: ReplayBuffer, rows: int) -> None:
    for i in range(0, rows, 4):
        rb.extend(torch.arange(i, i + 4), timeout_s=math.inf)


def reads(batches: ShardBatches, number: int, timeout_s: float | None = None) -> list[int]:
    return [row for _ in range(number) for row in batches.next(4, timeout_s, None)[0].tolist()]


def a_patient_and_an_impatient_reader(schedule: Schedule) -> None:
    """Each has its own timeout, and the batch of the one that gives up is not lost."""
    rb, batches = make()
    rows: list[int] = []

    def patient() -> None:
        while len(rows) < 24:
            with suppress(WaitTimeoutError):
                rows.extend(reads(batches, 1, 30.0))

    def impatient() -> None:
        for _ in range(2):
            with suppress(WaitTimeoutError):
                rows.extend(reads(batches, 1, 0.5))

    def late() -> None:
        schedule.sleep(7.0)
        writes(rb, 24)

    schedule.run(patient, impatient, impatient, late)
    assert sorted(rows) == list(range(24))


def one_waits_for_ever(schedule: Schedule) -> None:
    """Behind a reader without a timeout, another one still times out."""
    rb, batches = make()
    waited: list[float] = []

    def impatient() -> None:
        began = schedule.now
        with suppress(WaitTimeoutError):
            reads(batches, 1, 1.0)
        waited.append(schedule.now - began)

    def late() -> None:
        while len(waited) < 2:
            schedule.sleep(1.0)
        writes(rb, 16)

    schedule.run(lambda: reads(batches, 1), impatient, impatient, late)
    assert max(waited) <= 2 * (1.0 + GRACE_S)


def dropped(schedule: Schedule) -> None:
    """A reader that waits when batches are dropped gets a batch or an error."""
    rb, batches = make()
    rows: list[int] = []
    left = [2]

    def read() -> None:
        for _ in range(3):
            with suppress(UsageError, WaitTimeoutError):
                rows.extend(reads(batches, 1, 20.0))
        left[0] -= 1

    def write() -> None:
        first = 0
        while left[0]:
            with suppress(WaitTimeoutError):
                rb.extend(torch.arange(first, first + 4), timeout_s=1.0)
                first += 4

    schedule.run(read, read, write, batches.drop, batches.drop)
    assert max(Counter(rows).values(), default=1) == 1


SCENARIOS = [a_patient_and_an_impatient_reader, one_waits_for_ever, dropped]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_reader_returns(scenario):
    explore(range(50), MODULES, scenario)
