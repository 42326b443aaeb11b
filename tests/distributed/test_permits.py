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
from ostinato.distributed.permits import LEASE_S, PermitReport, Permits, Purse

if TYPE_CHECKING:
    from ostinato.distributed.permits import Kind

MANY = Stock(10**9)
KINDS: tuple[Kind, Kind] = ("write", "draw")
LIMITERS = [
    RateLimiter(0.3, 20, 30),
    RateLimiter(samples_per_insert=1, min_diff=0, max_diff=64),
    RateLimiter(samples_per_insert=2, min_diff=-4, max_diff=math.inf),
]


class Network:
    """Handles, the limiter, and messages between them that arrive late."""

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter, self.flow = limiter, Flow(limiter)
        self.permits = Permits(self.flow)
        self.now, self.requests, self.deaths = 0.0, 0, 0
        self.purses: dict[str, Purse] = {}
        self.untold: dict[str, dict[str, int]] = {}
        self.done = {"write": limiter.min_size_to_sample, "draw": 0}
        self.sent: list[tuple[float, str, PermitReport]] = []
        self.flow.wrote(limiter.min_size_to_sample)

    def call(self, number: int, kind: Kind, rows: int) -> None:
        """Make a call of a handle that does not wait."""
        name = f"{number} after {self.deaths} deaths"
        purse = self.purses.setdefault(name, Purse())
        untold = self.untold.setdefault(name, {"write": 0, "draw": 0})
        if purse.take(kind, rows, self.now):
            untold[kind] += rows
            self.done[kind] += rows
            return
        self.requests += 1
        wanted, lent = purse.ask(kind, rows), 0
        self.permits.settle(name, self.report(name))
        if self.permits.may(kind, rows, MANY):
            self.flow.wrote(rows * (kind == "write"))
            self.flow.drew(rows * (kind == "draw"))
            self.done[kind] += rows
            lent = self.permits.lend(name, kind, rows, wanted, MANY, self.now) if wanted else 0
        purse.receive(kind, wanted, lent, self.permits.era, self.now, self.now)

    def report(self, name: str) -> PermitReport:
        found = self.purses[name].report(self.now)
        assert (found.written, found.drawn) == tuple(self.untold[name].values())
        self.untold[name] = {"write": 0, "draw": 0}
        return found

    def die(self) -> None:
        """All handles die with what they have not told."""
        for untold in self.untold.values():
            for kind in KINDS:
                self.done[kind] -= untold[kind]
        self.deaths += 1
        self.purses, self.untold = {}, {}

    def pass_time(self, seconds: float, delay: float = 0.0) -> None:
        self.now += seconds
        for name, purse in self.purses.items():
            if purse.due is not None and purse.due <= self.now:
                self.sent.append((self.now + delay, name, self.report(name)))
        for message in [one for one in self.sent if one[0] <= self.now]:
            self.permits.settle(*message[1:])
            self.sent.remove(message)
        self.permits.expire(self.now)

    def check(self) -> None:
        ratio, (low, high) = self.limiter.exact_ratio or Fraction(0), self.limiter.exact_band
        assert low <= ratio * self.done["write"] - self.done["draw"] <= high


CALLS = st.tuples(st.just("call"), st.integers(0, 3), st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 20))
TIMES = st.tuples(
    st.just("time"), st.sampled_from([0.001, 0.004, 0.03, 0.3, 1.1]), st.sampled_from([0.0, 0.002, 0.2, 0.7])
)


@pytest.mark.parametrize("limiter", LIMITERS, ids=lambda limiter: str(limiter.band))
@given(st.lists(CALLS | CALLS | TIMES | st.just(("die",)), max_size=40))
def test_calls_on_lent_permits_keep_the_band(limiter: RateLimiter, ops: list[Any]) -> None:
    network = Network(limiter)
    for name, *given_ in ops:
        if name == "time":
            network.pass_time(*given_)
        elif name == "die":
            network.die()
        else:
            for _ in range(given_[3]):
                network.call(*given_[:3])
                network.check()
                network.pass_time(0.0003)
    network.pass_time(1.0)  # all that is due is told
    network.pass_time(LEASE_S)
    assert not network.permits.lent
    assert {"write": network.flow.written, "draw": network.flow.drawn} == network.done


def test_a_handle_that_calls_often_needs_few_calls_to_the_limiter() -> None:
    network = Network(RateLimiter(1, 100_000, 8))
    for _ in range(2_000):
        network.call(0, "write", 4)
        network.call(1, "draw", 4)
        network.pass_time(0.001)
    assert network.done == {"write": 8_008, "draw": 8_000}
    assert network.requests < 4_000 / 4


def test_half_of_what_is_free_is_lent_and_reports_of_earlier_counts_do_not_count() -> None:
    flow = Flow(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=100))
    permits = Permits(flow)
    assert permits.lend("a", "write", 8, 1000, MANY, 0.0) == 48
    assert permits.lend("b", "write", 8, 1000, MANY, 0.0) == 24
    assert (permits.may("write", 28, MANY), permits.may("write", 29, MANY)) == (True, False)
    assert not permits.may("draw", 1, MANY)  # nothing was written so far
    permits.settle("a", PermitReport(0, written=40, unwritten=8))
    assert (permits.may("draw", 40, MANY), permits.may("draw", 41, MANY)) == (True, False)
    assert permits.expire(LEASE_S)
    assert not permits.lent
    assert permits.settle("b", PermitReport(0, written=24)), "a late report counts"
    assert flow.written == 64
    permits.begin()
    flow.begin(50)
    assert not permits.settle("a", PermitReport(0, written=6))
    assert flow.written == 1
