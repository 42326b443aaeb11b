"""What the doctor found: findings with severity, place and advice, and the numbers that its page of plots shows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ostinato.core.options import number_of
from ostinato.datasets.checks import CHECKS, WHOLE
from ostinato.tools.datasets import rows_and_episodes

if TYPE_CHECKING:
    import numpy as np

    from ostinato.datasets.checks import Place, Severity

_KEPT = 20
"""Findings of one check that a report lists; further ones are counted."""
_ORDER = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, or one remarkable fact."""

    check: str
    """Name of the check, such as "value-nan"; `docs/doctor.md` describes all."""
    severity: Severity
    """`error`, `warning` or `note`."""
    message: str
    """What is wrong, with the numbers found and expected."""
    advice: str
    """What to do."""
    file: str | None = None
    """File, relative to the dataset."""
    episode: int | None = None
    """Position of the episode in the dataset."""
    frame: int | None = None
    """Row within the episode, or frame of the video where no episode is named."""
    field: str | None = None
    """Name of the field."""
    camera: str | None = None
    """Name of the camera."""

    @property
    def place(self) -> str:
        """Where it is, in words; empty if it concerns the whole dataset."""
        parts = (
            ("", self.file),
            ("episode ", self.episode),
            ("frame ", self.frame),
            ("field ", self.field),
            ("camera ", self.camera),
        )
        return ", ".join(f"{name}{value}" for name, value in parts if value is not None)

    def __str__(self) -> str:
        """One line."""
        place = f" [{self.place}]" if self.place else ""
        return f"{self.severity}: {self.check}{place}: {self.message}"


@dataclass(frozen=True)
class FieldProfile:
    """The values of a field, for plots."""

    name: str
    low: np.ndarray
    """Smallest value of each dimension `[D]`."""
    high: np.ndarray
    """Largest value of each dimension `[D]`."""
    quantiles: np.ndarray
    """5, 25, 50, 75 and 95 % of each dimension `[5, D]`, of evenly spaced rows."""
    at_limits: np.ndarray
    """Share of rows at the smallest and at the largest value `[2, D]`; 0 for dimensions of few values, as switches."""


@dataclass(frozen=True)
class CameraProfile:
    """The brightness of a camera in the frames that were decoded."""

    name: str
    times: np.ndarray
    """Position of the frames in the dataset, as a row number `[n]`."""
    brightness: np.ndarray
    """Mean of the frame, 0 to 255 `[n]`."""


@dataclass
class Profile:
    """Numbers of the dataset for the page of plots."""

    lengths: list[int] = field(default_factory=list)
    """Rows of each episode."""
    jitter_ms: list[float] = field(default_factory=list)
    """Largest distance of a step in time from 1 / fps, for each episode with timestamps."""
    fields: list[FieldProfile] = field(default_factory=list)
    """Actions, observations and rewards."""
    jumps: dict[str, np.ndarray] = field(default_factory=dict)
    """Largest differences of successive values by field: `[n, 2]`, row of the dataset and multiple of the usual one."""
    cameras: list[CameraProfile] = field(default_factory=list)
    """Brightness over time."""


@dataclass(frozen=True)
class Report:
    """The result of `examine`. `print(report)` lists the findings."""

    path: str
    """The dataset."""
    format: str
    """Its format, such as "lerobot v3.0"."""
    episodes: int | None
    """Number of episodes found in the data; None if it was not read."""
    rows: int | None
    """Number of rows that can be sampled, as `open_dataset` counts them; None if there are errors."""
    stored_rows: int | None
    """Number of rows found in the files; None if they were not read."""
    left_out_because: str
    """Why some stored rows cannot be sampled; empty if all can."""
    decoded: str
    """Which pictures were decoded, in words; empty if there are none."""
    findings: tuple[Finding, ...]
    """Errors first, then warnings and notes; at most 20 of each check."""
    omitted: dict[str, int]
    """Number of further findings by check."""
    profile: Profile = field(repr=False, compare=False, default_factory=Profile)
    """Numbers for the page of plots."""

    @property
    def counts(self) -> dict[Severity, int]:
        """Number of listed findings by severity."""
        found = Counter(finding.severity for finding in self.findings)
        return {"error": found["error"], "warning": found["warning"], "note": found["note"]}

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings and notes are allowed."""
        return not self.counts["error"]

    def to_json(self) -> str:
        """Return the report as JSON, without the numbers for plots."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, without the numbers for plots."""
        names = ("path", "format", "episodes", "rows", "stored_rows", "left_out_because", "decoded", "omitted")
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "ok": self.ok, "counts": self.counts, "findings": [asdict(f) for f in self.findings]}

    def __str__(self) -> str:
        """Return the findings, one line each with the advice below."""
        lines = [f"{self.path}: {self.format}, {self.extent}"]
        lines += [self.decoded] if self.decoded else []
        for finding in self.findings:
            lines += [str(finding), f"    {finding.advice}"]
        lines += [f"{count:,} more of {check}" for check, count in self.omitted.items()]
        return "\n".join([*lines, self.verdict])

    @property
    def extent(self) -> str:
        """The numbers of rows and episodes in words."""
        if self.stored_rows is None or self.episodes is None:
            return "not read"
        if self.rows is None:
            return f"{number_of(self.stored_rows, 'row')} and {number_of(self.episodes, 'episode')} could be read"
        return rows_and_episodes(self.rows, self.episodes, self.stored_rows, self.left_out_because)

    @property
    def verdict(self) -> str:
        """The counts in words."""
        counts = self.counts
        if not any(counts.values()):
            return "no findings"
        more = sum(self.omitted.values())
        shown = [number_of(counts[name], name) for name in ("error", "warning", "note")]
        return ", ".join(shown) + (f", {more:,} more not listed" if more else "")


class Findings:
    """Collects findings; of each check and severity the first ones are kept, the others counted."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], list[Finding]] = {}
        self._more: Counter[str] = Counter()

    def add(self, check: str, message: str, place: Place = WHOLE, *, severity: Severity | None = None) -> None:
        """Add a finding; its severity is the usual one of the check unless given."""
        known = CHECKS[check]
        severity = known.severity if severity is None else severity
        kept = self._kept.setdefault((check, severity), [])
        if len(kept) >= _KEPT:
            self._more[check] += 1
            return
        file, episode, frame, field, camera = place
        kept.append(
            Finding(check, severity, message, known.advice, file, _plain(episode), _plain(frame), field, camera)
        )

    def has(self, severity: Severity) -> bool:
        """Whether there is a finding of this severity."""
        return any(name == severity for _, name in self._kept)

    @property
    def listed(self) -> tuple[Finding, ...]:
        """The findings that are kept, errors first."""
        every = [finding for kept in self._kept.values() for finding in kept]
        return tuple(sorted(every, key=lambda finding: _ORDER.index(finding.severity)))

    @property
    def omitted(self) -> dict[str, int]:
        """Number of further findings by check."""
        return dict(self._more)


def _plain(number: int | None) -> int | None:
    return None if number is None else int(number)
