"""Permits that a rate limiter lends to handles, without Ray: against a plain model, with delays and deaths."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import RateLimiter
from ostinato.buffers.rate_limit import Flow, Stock
from ostinato.distributed.permits import LEASE_S, Loan, PermitReport, Permits, Purse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        ratio, (low, high) = Fraction(str(self.limiter.samples_per_insert or 0)), self.limiter.band
        written, drawn = self.done["write"] - self.lost["write"], self.done["draw"] - self.lost["draw"]
        assert low <= ratio * written - drawn <= high


LIMITERS = [
    RateLimiter(0.3, 20, 30),
    RateLimiter(samples_per_insert=1, min_diff=0, max_diff=64),
    RateLimiter(samples_per_insert=2, min_diff=-4, max_diff=math.inf),
]
CALLS = st.tuples(st.just("call"), st.integers(0, 3), st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 20))
TIMES = st.tuples(st.just("time"), st.sampled_from([0.001, 0.004, 0.03, 0.2]), st.sampled_from([0.0, 0.002, 0.2, 0.7]))
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
