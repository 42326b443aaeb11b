"""The rate limiter of shards in its event loop, without Ray: how rows are counted, who waits."""

from __future__ import annotations

import asyncio
import time

import pytest

from ostinato import RateLimiter
from ostinato.distributed.rate_limits import RateLimits, RowCounter
from ostinato.errors import WaitTimeoutError

from .coroutines import in_loop

BALANCED = RateLimiter(samples_per_insert=1, min_diff=0, max_diff=64)


class Shard:
    """Stands for the actor of a shard with rows, which answers while it is open."""

    def __init__(self, rows: int, *, counting: bool = False) -> None:
        self.rows, self.counting = rows, counting
        self.asked, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.drawable = self

    async def remote(self) -> tuple[int, bool]:
        self.asked.set()
        await self.open.wait()
        return self.rows, self.counting


# -- counts of rows ---------------------------------------------------------------------------------------------------


@in_loop
async def test_calls_allowed_during_a_count_are_counted():
    shard = Shard(10, counting=True)
    counter = RowCounter([shard], lambda: False, lambda: None)
    await counter.wait_for(counter.request())
    assert (counter.least, counter.most) == (10, 10)
    counter.add_written(3)
    counter.add_drawn(2)
    shard.open.clear()
    shard.asked.clear()
    number = counter.request()
    await shard.asked.wait()
    assert (counter.least, counter.most) == (8, 13)  # the count is not finished
    counter.add_written(1)
    counter.add_drawn(4)
    assert (counter.least, counter.most) == (4, 14)
    shard.open.set()
    await counter.wait_for(number - 1)
    assert (counter.least, counter.most) == (4, 11)  # draws allowed before it may not have arrived yet
    await counter.wait_for(counter.request())
    assert (counter.least, counter.most) == (10, 10)


@in_loop
async def test_a_silent_shard_delays_no_decision():
    silent = Shard(64)
    silent.open.clear()
    limits = RateLimits(RateLimiter(min_size_to_sample=64), [Shard(32), silent])
    await limits.begin()  # waits for it, once
    took = []
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError):
            await limits.acquire("draw", 16, 0.0, 0.0)
        await limits.begin()
        took.append(time.monotonic() - began)
    assert min(took) < 0.6  # the fastest counts: the machine may be busy
    silent.open.set()
    assert await limits.acquire("draw", 16, 30.0, 0.0) == 16


# -- who waits --------------------------------------------------------------------------------------------------------


@in_loop
async def test_calls_that_wait_proceed_in_the_order_of_their_arrival():
    limits = RateLimits(BALANCED, [Shard(100)])
    await limits.acquire("draw", 1, 0.0, 0.0)
    order: list[int] = []

    async def read(number: int, rows: int) -> None:
        await limits.acquire("draw", rows, 30.0, 0.0)
        order.append(number)

    readers = []
    for number, rows in enumerate((8, 4, 8, 2)):
        readers.append(asyncio.ensure_future(read(number, rows)))
        await asyncio.sleep(0.01)
    for rows in (2, 4, 8, 8):
        await limits.acquire("write", rows, 0.0, 0.0)
        await asyncio.sleep(0.01)
    await asyncio.gather(*readers)
    assert order == [3, 1, 0, 2]
