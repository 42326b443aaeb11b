"""Targets: what a workload's results must show, each a small record that judges them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.records import Result

OURS = "ostinato"
LIMIT_PREFIX = "limit"
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


def _medians(results: Mapping[str, Result]) -> dict[str, float]:
    return {name: result.median_s for name, result in results.items() if result.rounds}


@dataclass(frozen=True)
class Target(ABC):
    """Something that a workload should reach."""

    @abstractmethod
    def text(self) -> str:
        """Return the target in a few words."""

    @abstractmethod
    def measure(self, results: Mapping[str, Result]) -> tuple[str, bool]:
        """Return what was measured and whether it is enough; KeyError names a library that is missing."""

    def judge(self, results: Mapping[str, Result]) -> Verdict:
        """Return the verdict, undecided where a library that it needs was not measured."""
        try:
            measured, met = self.measure({name: result for name, result in results.items() if result.rounds})
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

    def measure(self, results: Mapping[str, Result]) -> tuple[str, bool]:
        """Compare our median with the number."""
        ours = results[OURS].median_s
        return human(ours), ours <= self.seconds


@dataclass(frozen=True)
class TimesPeer(Target):
    """Some peer takes at least so many times as long."""

    peer: str
    times: float

    def text(self) -> str:
        """Return the target in a few words."""
        return f"ahead of {self.peer}" if self.times == 1 else f">= {self.times:g}x {self.peer}"

    def measure(self, results: Mapping[str, Result]) -> tuple[str, bool]:
        """Compare the ratio of the medians with the number."""
        ratio = results[self.peer].median_s / results[OURS].median_s
        return f"{ratio:.3g}x", ratio >= self.times


@dataclass(frozen=True)
class AheadOfAll(Target):
    """No measured peer is faster."""

    def text(self) -> str:
        """Return the target in a few words."""
        return "ahead of every peer"

    def measure(self, results: Mapping[str, Result]) -> tuple[str, bool]:
        """Compare us with the fastest peer."""
        ours = results[OURS].median_s
        peers = {name: median for name, median in _medians(results).items() if is_peer(name)}
        if not peers:
            raise KeyError(_ANY_PEER)
        fastest = min(peers, key=lambda name: peers[name])
        return f"{peers[fastest] / ours:.3g}x {fastest}", ours <= peers[fastest]


@dataclass(frozen=True)
class WithinLimit(Target):
    """Our median is at most so many times the fastest limit."""

    times: float

    def text(self) -> str:
        """Return the target in a few words."""
        return f"within {self.times:g}x of the limit"

    def measure(self, results: Mapping[str, Result]) -> tuple[str, bool]:
        """Compare us with the fastest limit row."""
        ours = results[OURS].median_s
        limits = [median for name, median in _medians(results).items() if name.startswith(LIMIT_PREFIX)]
        if not limits:
            raise KeyError(_ANY_LIMIT)
        ratio = ours / min(limits)
        return f"{ratio:.3g}x the limit", ratio <= self.times


@dataclass(frozen=True)
class WorstWithin(Target):
    """The slowest call of a usual round, in processor time, is at most so many times the median call."""

    times: float

    def text(self) -> str:
        """Return the target in a few words."""
        return f"worst call within {self.times:g}x of the median"

    def measure(self, results: Mapping[str, Result]) -> tuple[str, bool]:
        """Compare our slowest call with our median call."""
        ours = results[OURS]
        ratio = ours.worst_cpu_s / ours.median_s
        return f"{ratio:.3g}x ({human(ours.worst_cpu_s)} of processor time)", ratio <= self.times
