"""Permits that a rate limiter lends to handles, without Ray: against a plain model, with delays and deaths."""

from __future__ import annotations

import asyncio
import math
import time
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import RateLimiter
from ostinato.buffers.rate_limit import Flow, Stock
from ostinato.distributed.permits import LEASE_S, Loan, PermitReport, Permits, Purse
from ostinato.distributed.rate_limits import RateLimits
from ostinato.errors import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ostinato.distributed.permits import Kind

MANY = Stock(10**9)
KINDS: tuple[Kind, Kind] = ("write", "draw")


class Client:
    """A handle: what it has done in truth, and what it has told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.purse = Purse()
        self.untold = {"write": 0, "draw": 0}


class Network:
    """Handles, the limiter, and messages between them that arrive late."""

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self.flow = Flow(limiter)
        self.permits = Permits(self.flow)
        self.now = 0.0
        self.clients: dict[int, Client] = {}
        self.made = 0
        self.done = {"write": limiter.min_size_to_sample, "draw": 0}
        self.lost = {"write": 0, "draw": 0}
        self.sent: list[tuple[float, Client, PermitReport]] = []
        self.lent = self.requests = 0
        self.flow.wrote(limiter.min_size_to_sample)

    def client(self, number: int) -> Client:
        if number not in self.clients:
            self.made += 1
            self.clients[number] = Client(f"handle {self.made}")
        return self.clients[number]

    def call(self, client: Client, kind: Kind, rows: int) -> bool:
        """Make a call that does not wait; return whether it proceeded."""
        if client.purse.take(kind, rows, self.now):
            client.untold[kind] += rows
            self.done[kind] += rows
            return True
        self.requests += 1
        loan = Loan(client.name, client.purse.ask(kind, rows), self.report_of(client))
        self.permits.settle(loan.owner, loan.report)
        allowed, lent = self.permits.may(kind, rows, MANY), 0
        if allowed:
            self.flow.wrote(rows * (kind == "write"))
            self.flow.drew(rows * (kind == "draw"))
            self.done[kind] += rows
            if loan.rows:
                lent = self.permits.lend(loan.owner, kind, rows, loan.rows, MANY, self.now)
        elif not self.permits.lent and not self.sent:
            assert not self.truth_allows(kind, rows)
        client.purse.receive(kind, loan.rows, lent, self.permits.era, self.now, self.now)
        self.lent += lent
        return allowed

    def report_of(self, client: Client) -> PermitReport:
        report = client.purse.report(self.now)
        assert (report.written, report.drawn) == (client.untold["write"], client.untold["draw"])
        client.untold = {"write": 0, "draw": 0}
        return report

    def pass_time(self, seconds: float, delay: float) -> None:
        self.now += seconds
        for client in self.clients.values():
            due = client.purse.due
            if due is not None and due <= self.now:
                self.sent.append((self.now + delay, client, self.report_of(client)))
        self.deliver()

    def deliver(self) -> None:
        for message in [one for one in self.sent if one[0] <= self.now]:
            self.permits.settle(message[1].name, message[2])
            self.sent.remove(message)
        self.permits.expire(self.now)

    def die(self, number: int) -> None:
        client = self.clients.pop(number, None)
        if client is None:
            return
        for kind in KINDS:
            self.lost[kind] += client.untold[kind]

    def truth_allows(self, kind: Kind, rows: int) -> bool:
        """Whether an exact limiter would allow a call, given what was done by handles that can still tell it."""
        flow = Flow(self.limiter)
        flow.wrote(self.done["write"] - self.lost["write"])
        flow.drew(self.done["draw"] - self.lost["draw"])
        return flow.may_write(rows, MANY) if kind == "write" else flow.may_draw(rows, MANY)

    def check_band(self) -> None:
        ratio, (low, high) = self.limiter.exact_ratio or Fraction(0), self.limiter.exact_band
        written, drawn = self.done["write"] - self.lost["write"], self.done["draw"] - self.lost["draw"]
        assert low <= ratio * written - drawn <= high


LIMITERS = [
    RateLimiter(1, 40, 8),
    RateLimiter(0.3, 20, 30),
    RateLimiter(4, 200, 8),
    RateLimiter(samples_per_insert=1, min_diff=0, max_diff=64),
    RateLimiter(samples_per_insert=1, min_diff=-math.inf, max_diff=64),
    RateLimiter(samples_per_insert=2, min_diff=-4, max_diff=math.inf),
]
CALLS = st.tuples(st.just("call"), st.integers(0, 3), st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 20))
TIMES = st.tuples(
    st.just("time"), st.sampled_from([0.001, 0.004, 0.03, 0.3, 1.1]), st.sampled_from([0.0, 0.002, 0.2, 0.7])
)
DEATHS = st.tuples(st.just("die"), st.integers(0, 3))


def run(network: Network, ops: Sequence[Any], check: Callable[[], None]) -> None:
    for op in ops:
        if op[0] == "call":
            for _ in range(op[4]):
                network.call(network.client(op[1]), op[2], op[3])
                check()
                network.pass_time(0.0003, 0.0)
        elif op[0] == "time":
            network.pass_time(op[1], op[2])
        else:
            network.die(op[1])
            # reports of others may come late, and so may the end of its lease
    network.now += 1.0
    network.pass_time(0.0, 0.0)  # all that is due is told
    network.pass_time(LEASE_S, 0.0)


@pytest.mark.parametrize("limiter", LIMITERS, ids=lambda limiter: str(limiter.band))
@given(st.lists(st.one_of(CALLS, CALLS, TIMES, DEATHS), max_size=40))
def test_calls_on_lent_permits_keep_the_band(limiter: RateLimiter, ops: list[Any]) -> None:
    network = Network(limiter)
    run(network, ops, network.check_band)
    assert not network.permits.lent
    assert not network.sent
    counted = {"write": network.flow.written, "draw": network.flow.drawn}
    assert counted == {kind: network.done[kind] - network.lost[kind] for kind in KINDS}


def test_a_handle_that_calls_often_needs_few_calls_to_the_limiter() -> None:
    network = Network(RateLimiter(1, 100_000, 8))
    for _ in range(2_000):
        assert network.call(network.client(0), "write", 4)
        assert network.call(network.client(1), "draw", 4)
        network.pass_time(0.001, 0.0)
    assert network.requests < 4_000 / 4


def test_a_handle_that_calls_now_and_then_borrows_nothing() -> None:
    network = Network(RateLimiter(1, 100_000, 8))
    for _ in range(200):
        network.call(network.client(0), "write", 4)
        network.pass_time(0.05, 0.0)
    assert network.lent == 0


def test_permits_of_a_dead_handle_return() -> None:
    network = Network(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=100, min_size_to_sample=1))
    while not network.lent:
        assert network.call(network.client(0), "write", 2)
    network.die(0)
    done = network.done["write"]
    assert not network.call(network.client(1), "write", 100 - done)
    network.pass_time(LEASE_S, 0.0)
    assert network.call(network.client(1), "write", 100 - done)


def test_a_late_report_is_counted_and_one_of_earlier_counts_is_not() -> None:
    flow = Flow(RateLimiter(1, 100, 1))
    permits = Permits(flow)
    assert permits.lend("a", "write", 2, 10, MANY, 0.0) == 10
    assert permits.expire(LEASE_S)
    assert not permits.lent
    assert permits.settle("a", PermitReport(0, written=6, unwritten=4))
    assert (flow.written, permits.lent) == (6, False)
    permits.begin()
    flow.begin(50)
    assert not permits.settle("a", PermitReport(0, written=6))
    assert flow.written == 1


def test_no_more_than_half_of_what_is_free_is_lent() -> None:
    permits = Permits(Flow(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=100)))
    assert permits.lend("a", "write", 8, 1000, MANY, 0.0) == 48
    assert permits.lend("b", "write", 8, 1000, MANY, 0.0) == 24
    assert not permits.may("write", 29, MANY)
    assert permits.may("write", 28, MANY)
    assert not permits.may("draw", 1, MANY)  # nothing was written so far
    permits.settle("a", PermitReport(0, written=40, unwritten=8))
    assert permits.may("draw", 40, MANY)
    assert not permits.may("draw", 41, MANY)


# -- the limiter in its event loop ------------------------------------------------------------------------------------


class Remote(NamedTuple):
    """A method of an actor."""

    remote: Callable[[], Awaitable[tuple[int, bool]]]


class Shard:
    """Stands for the actor of a shard that has rows."""

    def __init__(self, rows: int, *, counting: bool = False) -> None:
        self.rows, self.counting = rows, counting
        self.drawable = Remote(self._drawable)

    async def _drawable(self) -> tuple[int, bool]:
        return self.rows, self.counting


async def borrowed(limits: RateLimits, kind: Kind, rows: int, wanted: int, era: int = 0) -> tuple[int, int, int]:
    found = await limits.acquire(kind, rows, 0.0, 0.0, None, Loan("a", wanted, PermitReport(era)))
    assert isinstance(found, tuple)
    return found


def test_a_denial_waits_for_the_reports_of_permits() -> None:
    async def check() -> None:
        limits = RateLimits(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=64), [Shard(100)])
        _, lent, era = await borrowed(limits, "write", 4, 40)
        assert lent == 28
        await limits.acquire("draw", 4, 0.0, 0.0)  # written by the first call, and by "begin"
        waiting = asyncio.ensure_future(limits.acquire("draw", 9, 0.0, 0.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await limits.settle("a", PermitReport(era, written=8, unwritten=20))
        assert (await waiting)[0] == 9  # type: ignore[index]
        assert await limits.totals() == (13, 13)
        assert (await borrowed(limits, "write", 4, 40))[1] == 0  # readers have waited
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match="4 more row"):
            await limits.acquire("draw", 8, 0.0, 0.0)
        assert time.monotonic() - began < 0.2  # nothing is lent
        assert await limits.can("draw", 4)
        assert not await limits.can("draw", 5)

    asyncio.run(check())


def test_permits_are_lent_only_while_no_call_waits() -> None:
    async def check() -> None:
        limits = RateLimits(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=64), [Shard(100)])
        reader = asyncio.ensure_future(limits.acquire("draw", 30, 30.0, 0.0))
        await asyncio.sleep(0.05)
        _, lent, _ = await borrowed(limits, "write", 4, 40)
        assert lent == 0
        await borrowed(limits, "write", 26, 40)
        assert (await reader)[0] == 30  # type: ignore[index]

    asyncio.run(check())


@pytest.mark.parametrize("counting", [False, True])
def test_draws_that_consume_rows_are_allowed_one_by_one(counting: bool) -> None:
    async def check() -> None:
        limits = RateLimits(RateLimiter(min_size_to_sample=10), [Shard(100, counting=counting)])
        _, lent, _ = await borrowed(limits, "draw", 4, 40)
        assert lent == (0 if counting else 40)

    asyncio.run(check())


def test_calls_that_wait_proceed_in_the_order_of_their_arrival() -> None:
    async def check() -> None:
        limits = RateLimits(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=64), [Shard(100)])
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

    asyncio.run(check())


class Step(NamedTuple):
    """A call of one of several tasks."""

    writes: bool
    rows: int


@pytest.mark.parametrize("limiter", [RateLimiter(1, 12, 8), RateLimiter(0.7, 30, 10)])
@given(st.lists(st.builds(Step, st.booleans(), st.integers(1, 6)), max_size=50), st.integers(1, 4))
def test_waiting_calls_are_counted_once(limiter: RateLimiter, steps: list[Step], tasks: int) -> None:
    """Calls of several tasks, each of which gives up at once or waits until the others have let it go on."""

    async def check() -> None:
        limits = RateLimits(limiter, [Shard(100)])
        await limits.acquire("write", 1, 0.0, 0.0)
        began, done = await limits.totals(), {"write": 0, "draw": 0}

        async def work(mine: Sequence[Step]) -> None:
            for step in mine:
                kind: Kind = "write" if step.writes else "draw"
                try:
                    await limits.acquire(kind, step.rows, 0.002, 0.0)
                except WaitTimeoutError:
                    continue
                done[kind] += step.rows
                low, high = limiter.exact_band
                written, drawn = limits._flow.written, limits._flow.drawn
                assert low <= (limiter.exact_ratio or 0) * written - drawn <= high

        await asyncio.gather(*(work(steps[i::tasks]) for i in range(tasks)))
        assert await limits.totals() == (began[0] + done["write"], began[1] + done["draw"])
        assert not any(side.waiting for side in limits._sides.values())

    asyncio.run(check())
