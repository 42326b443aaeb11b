"""Checks of the pictures of one camera: black or of one color, and frozen while the robot moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ostinato.core.options import number_of
from ostinato.datasets.checks import Place
from ostinato.tools.doctor.report import CameraProfile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ostinato.datasets.checks import Severity
    from ostinato.tools.doctor.report import Findings
    from ostinato.tools.doctor.rows import RowChecks

_DARK = 8.0
"""Frames whose mean is below are black if hardly any pixel is brighter."""
_PLAIN = 1.5
"""Standard deviation of the pixels of a frame of one color, up to rounding of the codec."""


class _Run(NamedTuple):
    """Successive decoded frames that are alike."""

    first: int
    last: int
    frames: int


class CameraChecks:
    """Looks at frames of one camera, episode by episode.

    Args:
        name: the camera.
        findings: where findings are added.
        rows: the checks of the tables, which tell whether the robot moved.
        fps: frames per second, None if it is not known.
    """

    def __init__(self, name: str, findings: Findings, rows: RowChecks, fps: float | None) -> None:
        self.name = name
        self.decoded = 0
        """Number of frames seen."""
        self._findings = findings
        self._rows = rows
        self._second = 10.0 if fps is None else fps
        self._times: list[int] = []
        self._brightness: list[float] = []

    def episode(
        self, number: int, length: int, start: int, frames: Iterable[tuple[int, NDArray[np.uint8]]], file: str | None
    ) -> None:
        """Look at frames of one episode.

        Args:
            number: the episode.
            length: its rows.
            start: its first row in the dataset.
            frames: rows of the episode and their pictures, gray `[H, W]`, in ascending order.
            file: where they lie.
        """
        blank, same = list[_Run](), list[_Run]()
        before: NDArray[np.uint8] | None = None
        seen = 0
        for row, picture in frames:
            seen += 1
            self._times.append(start + row)
            self._brightness.append(float(picture.mean()))
            empty = _is_blank(picture)
            _extend(blank, row, alike=empty and before is not None and _is_blank(before), counts=empty)
            _extend(same, row, alike=before is not None and not empty and _is_same(before, picture), counts=True)
            before = picture
        self.decoded += seen
        self._check_blank(number, length, seen, blank, file)
        self._check_frozen(number, length, seen, same, file)

    def _check_blank(self, number: int, length: int, seen: int, runs: list[_Run], file: str | None) -> None:
        for run in runs:
            whole = run.frames == seen
            if whole or (run.frames > 1 and run.last - run.first >= max(self._second, 10)):
                rows = "all" if whole else f"rows {run.first} to {run.last},"
                looked = f"{number_of(run.frames, 'frame')} looked at, {number_of(length, 'row')}"
                text = f"the picture is black or of one color: {rows} {looked}"
                self._findings.add("camera-blank", text, Place(file, number, run.first, camera=self.name))

    def _check_frozen(self, number: int, length: int, seen: int, runs: list[_Run], file: str | None) -> None:
        for run in runs:
            span = run.last - run.first
            if run.frames < 3 or length < 10:
                continue
            moved = self._rows.motion(number, run.first / (length - 1), run.last / (length - 1))
            whole = run.frames == seen
            long = span >= max(2 * self._second, 10)
            if (whole and (long if moved is None else moved >= 0.05)) or (long and moved is not None and moved >= 0.2):
                goal = any(word in self.name.lower() for word in ("goal", "target", "background"))
                severity: Severity = "note" if goal else "warning"
                motion = "" if moved is None else f", while the state moves by {moved:.0%} of its range"
                text = f"the picture stays the same from row {run.first} to {run.last} of {length} rows{motion}"
                place = Place(file, number, run.first, camera=self.name)
                self._findings.add("camera-frozen", text, place, severity=severity)

    @property
    def brightness(self) -> NDArray[np.float64]:
        """Mean of each frame seen, from 0 to 255 `[n]`."""
        return np.array(self._brightness)

    def profile(self) -> CameraProfile:
        """Return the brightness over time."""
        return CameraProfile(self.name, np.array(self._times), self.brightness)


def _extend(runs: list[_Run], row: int, *, alike: bool, counts: bool) -> None:
    """Add a frame to the last run, or begin one."""
    if alike and runs:
        runs[-1] = _Run(runs[-1].first, row, runs[-1].frames + 1)
    elif counts:
        runs.append(_Run(row, row, 1))


def _is_blank(picture: NDArray[np.uint8]) -> bool:
    if picture.std() < _PLAIN:
        return True
    return bool(picture.mean() < _DARK and np.quantile(picture, 0.999) < 4 * _DARK)


def _is_same(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """Whether two pictures are equal, up to what a codec changes when it encodes the same picture again."""
    if one.shape != other.shape:
        return False
    distance = np.abs(one.astype(np.int16) - other.astype(np.int16))
    return bool(distance.mean() < 0.5 and (distance > 10).mean() < 1e-4)
