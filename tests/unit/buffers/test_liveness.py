"""No call waits for ever while what it waits for is there: threads under many schedules, each decided by a seed.

All waits are without a timeout, so a call that waits in vain ends the run: `StuckError` names the seed. The scenarios
are such that every schedule comes to an end: what is written is what is read.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    LimitedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
)
from ostinato.buffers import mixing, pipeline, prefetch, rate_limit, reader, store
from ostinato.buffers.checkpoint import save
from ostinato.errors import EmptyBufferError, WaitTimeoutError

from ...schedules import Schedule, StuckError, explore

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = (save, reader, store, pipeline, prefetch, rate_limit, mixing)
FOREVER = math.inf


def make(capacity: int = 16, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(**{"storage": LazyTensorStorage(capacity), "sampler": QueueSampler(), **options})


def writes(rb: ReplayBuffer, first: int, last: int, rows: int = 4) -> Callable[[], None]:
    def write() -> None:
        for i in range(first, last, rows):
            rb.extend(torch.arange(i, i + rows), timeout_s=FOREVER)

    return write


def reads(rb: ReplayBuffer, batches: int, size: int | None = None) -> Callable[[], list[int]]:
    return lambda: [row for _ in range(batches) for row in rb.sample(size, timeout_s=FOREVER).tolist()]


def queue_with_prefetch(schedule: Schedule) -> None:
    rb = make(batch_size=5, prefetch=3)
    found = schedule.run(writes(rb, 0, 20), writes(rb, 20, 40), reads(rb, 4), reads(rb, 4))
    assert sorted(found[2] + found[3]) == list(range(40))


def more_readers_than_batches_ahead(schedule: Schedule) -> None:
    rb = make(batch_size=5, prefetch=1)
    found = schedule.run(writes(rb, 0, 40), *(reads(rb, 2) for _ in range(4)))
    assert sorted(chain(*found[1:])) == list(range(40))


def batches_of_different_sizes(schedule: Schedule) -> None:
    rb = make()
    found = schedule.run(writes(rb, 0, 20), writes(rb, 20, 40), reads(rb, 4, 3), reads(rb, 4, 7))
    assert sorted(found[2] + found[3]) == list(range(40))


def rows_that_retire(schedule: Schedule) -> None:
    rb = make(24, sampler=LimitedSampler(2), batch_size=4, prefetch=2, rate_limiter=RateLimiter())
    found = schedule.run(writes(rb, 0, 24), reads(rb, 6), reads(rb, 6))
    assert Counter(found[1] + found[2]) == dict.fromkeys(range(24), 2)


def a_ratio(schedule: Schedule) -> None:
    """The balance of rows written and drawn is within the band at every moment."""
    limiter = RateLimiter(samples_per_insert=1.0, error_buffer=12.0, min_size_to_sample=4)
    rb = make(sampler=RandomSampler(), batch_size=4, prefetch=2, rate_limiter=limiter)
    flow, balances = rb._engine.limits[0].flow, list[int]()

    def watched(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(4):
                call()
                balances.append(flow.written - flow.drawn)

        return run

    write = partial(rb.extend, torch.arange(4), timeout_s=FOREVER)
    schedule.run(watched(write), watched(write), watched(reads(rb, 1)), watched(reads(rb, 1)))
    low, high = limiter.band
    assert low <= min(balances) <= max(balances) <= high
    assert (flow.written, flow.drawn >= 32) == (32, True)


def batches_that_fail(schedule: Schedule) -> None:
    """Rows of a batch whose transform raises go back, and some reader gets them."""
    calls = []

    def transform(batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) % 3 == 0:
            msg = "not now"
            raise ValueError(msg)
        return batch

    rb = make(batch_size=4, prefetch=2, transform=transform)
    rows: list[int] = []

    def read() -> None:
        while len(rows) < 32:
            with suppress(ValueError, WaitTimeoutError):
                rows.extend(rb.sample(timeout_s=1.0).tolist())

    schedule.run(writes(rb, 0, 32), read, read)
    assert sorted(rows) == list(range(32))


def emptied(schedule: Schedule) -> None:
    """Rows may go at any time; a reader goes on once others are written, and gets each at most once."""
    rb = make(8, batch_size=3, prefetch=2)
    left = [2]

    def read() -> list[int]:
        try:
            return reads(rb, 4)()
        finally:
            left[0] -= 1

    def write() -> None:
        i = 0
        while left[0]:
            with suppress(WaitTimeoutError):
                rb.extend(torch.arange(i, i + 2), timeout_s=1.0)
                i += 2

    def empty() -> None:
        for _ in range(4):
            rb.empty()

    found = schedule.run(read, read, write, empty)
    assert max(Counter(found[0] + found[1]).values()) == 1
    assert rb.state_dict()["flow"]["drawn"] >= 0


def another_sampler(schedule: Schedule) -> None:
    """A call that waits when the sampler is exchanged is let go on by the new one."""
    rb = make(8, batch_size=4)
    rb.extend(torch.arange(8))

    def exchange() -> None:
        rb.set_sampler(QueueSampler())
        reads(rb, 2)()

    schedule.run(writes(rb, 8, 16), exchange, reads(rb, 1))


def a_sampler_that_nobody_waits_for(schedule: Schedule) -> None:
    rb = make(8, batch_size=4, rate_limiter=RateLimiter(timeout_s=FOREVER))
    rb.extend(torch.arange(8))
    schedule.run(writes(rb, 8, 12), lambda: rb.set_sampler(RandomSampler()))
    assert len(rb) == 8


def another_storage(schedule: Schedule) -> None:
    rb = make(8, batch_size=4, prefetch=1)
    rb.extend(torch.arange(8))
    schedule.run(writes(rb, 8, 12), lambda: rb.set_storage(LazyTensorStorage(8)), lambda: None)
    assert len(rb) in {0, 4}


def a_load(schedule: Schedule) -> None:
    """Readers that wait take the draws that a checkpoint brings along, and the batches queued of them."""
    saved = make(16, batch_size=4, prefetch=3)
    saved.extend(torch.arange(16))
    schedule.run(saved.sample)
    state = saved.state_dict()
    rb = make(16, batch_size=4, prefetch=3)
    found = schedule.run(reads(rb, 1), reads(rb, 1), reads(rb, 1), lambda: rb.load_state_dict(state))
    assert sorted(chain(*found[:3])) == list(range(4, 16))


def another_transform(schedule: Schedule) -> None:
    """Batches that are made anew reach readers that wait."""
    rb = make(batch_size=4, prefetch=3)

    def transform() -> None:
        for _ in range(2):
            rb.append_transform(lambda batch: batch)

    found = schedule.run(writes(rb, 0, 24), reads(rb, 3), reads(rb, 3), transform)
    assert sorted(found[1] + found[2]) == list(range(24))


def epochs(schedule: Schedule) -> None:
    limiter = RateLimiter(min_size_to_sample=8)
    rb = make(8, sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=2, rate_limiter=limiter)

    def iterate() -> int:
        return sum(1 for _ in rb)

    schedule.run(writes(rb, 0, 8), reads(rb, 3), iterate, reads(rb, 2))


def an_ensemble(schedule: Schedule) -> None:
    rbs = [ReplayBuffer(storage=LazyTensorStorage(8)) for _ in range(2)]
    for rb in rbs:
        rb.extend(torch.arange(4))
    both = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=4, prefetch=2)

    def read() -> None:
        for _ in range(4):
            with suppress(EmptyBufferError):
                both.sample()

    def alter() -> None:
        rbs[0].empty()
        both.append_transform(lambda batch: batch)
        rbs[0].extend(torch.arange(4))

    schedule.run(read, read, alter)


QUICK: dict[Callable[[Schedule], None], int] = {
    queue_with_prefetch: 30,
    more_readers_than_batches_ahead: 20,
    batches_of_different_sizes: 20,
    rows_that_retire: 20,
    a_ratio: 20,
    batches_that_fail: 20,
    emptied: 20,
    another_sampler: 20,
    a_sampler_that_nobody_waits_for: 12,
    another_storage: 12,
    a_load: 20,
    another_transform: 20,
    epochs: 15,
    an_ensemble: 15,
}
"""Scenarios, and how many seeds of each run every time."""


@pytest.mark.parametrize("seeds", [None, pytest.param(range(1000, 3000), marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("scenario", QUICK, ids=lambda scenario: scenario.__name__)
def test_every_call_goes_on(scenario, seeds):
    explore(seeds or range(QUICK[scenario]), MODULES, scenario)


def test_a_lost_wake_up_is_found():
    """The schedules find a wait that nothing ends: a queue whose writers wake no reader."""

    def scenario(schedule: Schedule) -> None:
        rb = make(batch_size=4)
        rb._engine.waiters.wake = lambda: None  # type: ignore[method-assign]
        schedule.run(writes(rb, 0, 8), reads(rb, 2))

    with pytest.raises(StuckError, match=r"seed \d+: all wait for each other"):
        explore(range(20), MODULES, scenario)
