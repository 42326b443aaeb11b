"""Targets: what a workload's results must show, each a small record that judges them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.records import LIMIT_PREFIX, Verdict, fastest_limit_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.records import Result

OURS = "ostinato"
_UNITS = ((1e6, "us"), (1e3, "ms"))
_FOUR_DIGITS = 999.5
_ANY_PEER = "any peer"
_ANY_LIMIT = "any limit"
NOT_PEERS = ("ostinato", "ostinato-torch")


def human(seconds: float) -> str:
    """Return seconds in the unit that reads best, with three digits."""
    scale, unit = next((pair for pair in _UNITS if seconds * pair[0] < _FOUR_DIGITS), (1.0, "s"))
    value = seconds * scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def is_peer(name: str) -> bool:
    """Say whether a result belongs to another library (neither ours nor a limit)."""
    return name not in NOT_PEERS and not name.startswith(LIMIT_PREFIX)


@dataclass(frozen=True)
class Seen:
    """What a target judges: the results of its own workload and those of all others.

    Each method raises KeyError with the name of what was not measured.
    """

    name: str
    sections: Mapping[str, Mapping[str, Result]]

    def result(self, library: str) -> Result:
        """Return what a library did."""
        found = self.sections[self.name].get(library)
        if found is None or not found.rounds:
            raise KeyError(library)
        return found

    def median(self, library: str) -> float:
        """Return a library's seconds per call."""
        return self.result(library).median_s

    @property
    def ours(self) -> float:
        """Our seconds per call."""
        return self.median(OURS)

    @property
    def limit(self) -> float:
        """Seconds per call of the fastest limit."""
        limit = fastest_limit_s(self.sections[self.name])
        if limit is None:
            raise KeyError(_ANY_LIMIT)
        return limit

    @property
    def fastest_peer(self) -> tuple[str, float]:
        """The fastest other library and its seconds per call."""
        measured = {name: found.median_s for name, found in self.sections[self.name].items() if found.rounds}
        peers = [name for name in measured if is_peer(name)]
        if not peers:
            raise KeyError(_ANY_PEER)
        fastest = min(peers, key=measured.__getitem__)
        return fastest, measured[fastest]

    def at(self, name: str) -> Seen:
        """Return the same of another workload."""
        if name not in self.sections:
            raise KeyError(name)
        return replace(self, name=name)


@dataclass(frozen=True)
class Target(ABC):
    """Something that a workload should reach."""

    @abstractmethod
    def text(self) -> str:
        """Return the target in a few words."""

    @abstractmethod
    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Return what was measured and whether it is enough; KeyError names what is missing."""

    def judge(self, seen: Seen) -> Verdict:
        """Return the verdict, undecided where something that it needs was not measured."""
        try:
            measured, met = self.measure(seen)
        except KeyError as missing:
            return Verdict(self.text(), f"not measured: {missing.args[0]}", None)
        return Verdict(self.text(), measured, met)


@dataclass(frozen=True)
class AtMost(Target):
    """The call takes at most so many seconds."""

    seconds: float

    def text(self) -> str:
        """Return the target in a few words."""
        return f"at most {human(self.seconds)}"

    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Compare our median with the number."""
        return human(seen.ours), seen.ours <= self.seconds


@dataclass(frozen=True)
class TimesPeer(Target):
    """Some peer takes at least so many times as long; below 1, we may take that much longer."""

    peer: str
    times: float

    def text(self) -> str:
        """Return the target in a few words."""
        if self.times < 1:
            return f"within {1 / self.times:g}x of {self.peer}"
        return f"ahead of {self.peer}" if self.times == 1 else f">= {self.times:g}x {self.peer}"

    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Compare the ratio of the medians with the number."""
        peer, ours = seen.median(self.peer), seen.ours
        measured = f"{ours / peer:.3g}x {self.peer}" if self.times < 1 else f"{peer / ours:.3g}x"
        return measured, peer / ours >= self.times


@dataclass(frozen=True)
class AheadOfAll(Target):
    """No measured peer is faster."""

    def text(self) -> str:
        """Return the target in a few words."""
        return "ahead of every peer"

    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Compare us with the fastest peer."""
        name, fastest = seen.fastest_peer
        return f"{fastest / seen.ours:.3g}x {name}", seen.ours <= fastest


@dataclass(frozen=True)
class WithinLimit(Target):
    """Our median is at most so many times the fastest limit."""

    times: float

    def text(self) -> str:
        """Return the target in a few words."""
        return f"within {self.times:g}x of the limit"

    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Compare us with the fastest limit row."""
        times = seen.ours / seen.limit
        return f"{times:.3g}x the limit", times <= self.times


@dataclass(frozen=True)
class GrowthWithinLimit(Target):
    """From a smaller workload to this one our time grows by at most so many times the growth of the limit."""

    smaller: str
    times: float = 1

    def text(self) -> str:
        """Return the target in a few words."""
        most = "the growth" if self.times == 1 else f"{self.times:g}x the growth"
        return f"growth from {self.smaller} within {most} of the limit"

    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Compare both growths; each is a ratio of two workloads of this run."""
        before = seen.at(self.smaller)
        ours, limit = seen.ours / before.ours, seen.limit / before.limit
        return f"{ours:.3g}x, the limit {limit:.3g}x", ours <= self.times * limit


@dataclass(frozen=True)
class AtMostAbove(Target):
    """The call takes at most so many seconds more than ours of another workload."""

    other: str
    seconds: float

    def text(self) -> str:
        """Return the target in a few words."""
        return f"at most {human(self.seconds)} above {self.other}"

    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Compare our medians of both workloads."""
        above = seen.ours - seen.at(self.other).ours
        return f"{human(max(above, 0.0))} above", above <= self.seconds


@dataclass(frozen=True)
class TailWithin(Target):
    """99 of 100 calls of a usual round take at most so many times the median call."""

    times: float

    def text(self) -> str:
        """Return the target in a few words."""
        return f"99th percentile within {self.times:g}x of the median"

    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Compare our 99th percentile with our median call."""
        tail = seen.result(OURS).p99_s
        return f"{tail / seen.ours:.3g}x ({human(tail)})", tail <= self.times * seen.ours


@dataclass(frozen=True)
class WorstWithin(Target):
    """The slowest call of a usual round, in processor time, is at most so many times the median call."""

    times: float

    def text(self) -> str:
        """Return the target in a few words."""
        return f"worst call within {self.times:g}x of the median"

    def measure(self, seen: Seen) -> tuple[str, bool]:
        """Compare our slowest call with our median call."""
        worst = seen.result(OURS).worst_cpu_s
        times = worst / seen.ours
        return f"{times:.3g}x ({human(worst)} of processor time)", times <= self.times
