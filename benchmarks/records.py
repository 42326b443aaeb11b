"""Records of a run, and their JSON form. No measuring and no printing here."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 2
LIMIT_PREFIX = "limit"
"""Names of libraries that begin so are limits."""


@dataclass(frozen=True)
class Round:
    """One turn of one library at one workload: seconds per call."""

    median_s: float
    mean_s: float
    p99_s: float
    worst_s: float
    worst_cpu_s: float
    calls: int


@dataclass(frozen=True)
class Result:
    """What one library did at one workload: its rounds, or the reason why there are none."""

    rounds: tuple[Round, ...] = ()
    missing: str | None = None

    @property
    def median_s(self) -> float:
        """Seconds per call: the median over the rounds of each round's median."""
        return statistics.median(turn.median_s for turn in self.rounds)

    @property
    def mean_s(self) -> float:
        """Seconds per call with every stall counted: the median over the rounds of each round's mean."""
        return statistics.median(turn.mean_s for turn in self.rounds)

    @property
    def p99_s(self) -> float:
        """Seconds that 99 of 100 calls of a usual round stay below: the median over the rounds."""
        return statistics.median(turn.p99_s for turn in self.rounds)

    @property
    def worst_s(self) -> float:
        """Seconds of the slowest call of a usual round, by the clock: the median over the rounds."""
        return statistics.median(turn.worst_s for turn in self.rounds)

    @property
    def worst_cpu_s(self) -> float:
        """Processor seconds of the slowest call of a usual round: interruptions by others do not count."""
        return statistics.median(turn.worst_cpu_s for turn in self.rounds)

    @property
    def spread(self) -> float:
        """Slowest round median divided by the fastest: how noisy the machine was."""
        medians = [turn.median_s for turn in self.rounds]
        return max(medians) / min(medians)


def fastest_limit_s(results: Mapping[str, Result]) -> float | None:
    """Return the seconds per call of the fastest limit, or None where none was measured."""
    limits = (result.median_s for name, result in results.items() if name.startswith(LIMIT_PREFIX) and result.rounds)
    return min(limits, default=None)


@dataclass(frozen=True)
class Verdict:
    """One target, what was measured for it, and whether it was met (None: could not be judged)."""

    target: str
    measured: str
    met: bool | None


@dataclass(frozen=True)
class Library:
    """One column of the comparison."""

    name: str
    title: str
    version: str
    missing: str | None = None


@dataclass(frozen=True)
class Section:
    """One workload with the results of all libraries and the verdicts on its targets."""

    name: str
    title: str
    limit: str
    results: dict[str, Result]
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Report:
    """One whole run."""

    machine: dict[str, str]
    settings: dict[str, str | int | bool]
    libraries: tuple[Library, ...]
    sections: tuple[Section, ...]
    format: int = field(default=FORMAT)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with medians and ratios beside the rounds for other readers."""
        values = asdict(self)
        for section, record in zip(values["sections"], self.sections, strict=True):
            limit_s = fastest_limit_s(record.results)
            for name, result in record.results.items():
                if result.rounds:
                    section["results"][name]["summary"] = {
                        "median_s": result.median_s,
                        "vs_limit": None if limit_s is None else result.median_s / limit_s,
                        "mean_s": result.mean_s,
                        "p99_s": result.p99_s,
                        "worst_s": result.worst_s,
                        "worst_cpu_s": result.worst_cpu_s,
                        "spread": result.spread,
                    }
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """Rebuild a report.

        Raises:
            ValueError: The values are not those of `to_json`; the message names the part.
        """
        if values.get("format") != FORMAT:
            given = values.get("format")
            msg = f"the report must have format {FORMAT}, got {given!r}: run the benchmarks again"
            raise ValueError(msg)
        try:
            return cls(
                machine=dict(values["machine"]),
                settings=dict(values["settings"]),
                libraries=tuple(Library(**library) for library in values["libraries"]),
                sections=tuple(_section(section) for section in values["sections"]),
            )
        except (KeyError, TypeError) as error:
            msg = f"the report lacks a part or has one too many: {error}"
            raise ValueError(msg) from error


def _section(values: dict[str, Any]) -> Section:
    results = {
        name: Result(rounds=tuple(Round(**turn) for turn in result["rounds"]), missing=result["missing"])
        for name, result in values["results"].items()
    }
    verdicts = tuple(Verdict(**verdict) for verdict in values["verdicts"])
    return Section(values["name"], values["title"], values["limit"], results, verdicts)
