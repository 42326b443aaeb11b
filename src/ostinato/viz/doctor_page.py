"""The page of plots of the doctor: lengths, times, ranges, steps and cameras of a dataset, with the findings marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ostinato.viz.figures import Curves, FigureSpec, Level, Line, Note, thin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ostinato.datasets.examination import Finding
    from ostinato.datasets.values import FieldProfile
    from ostinato.tools.doctor import Report
    from ostinato.viz.figures import Layer, Panel

__all__ = ["doctor_page"]

_LISTED = 9
_MOST_CHARACTERS, _NAME_CHARACTERS = 185, 30
_MOST_DIMENSIONS = 48
_MOST_POINTS = 4000
_MOST_FIELDS = 4
_ALARMS: tuple[Literal["warning", "error"], ...] = ("warning", "error")
_LEROBOT_MS = 0.1
_USUAL = 8.0


def doctor_page(report: Report) -> FigureSpec:
    """Return the page: the first findings, and the panels that have something to show, two in a row.

    Args:
        report: What `examine` returned.
    """
    fields = [found for found in report.profile.fields if found.low.shape[0] > 1]
    fields.sort(key=lambda found: (not found.name.startswith("action"), found.name))
    panels: list[Panel] = [*_lengths(report), *_jitter(report), *map(_ranges, fields[:_MOST_FIELDS])]
    panels += [*_steps(report), *_cameras(report)]
    notes = [Note(_described(finding), finding.severity) for finding in report.findings[:_LISTED]]
    if len(report.findings) > _LISTED:
        notes.append(Note(f"and {len(report.findings) - _LISTED + sum(report.omitted.values()):,} more"))
    rows = tuple(tuple(panels[at : at + 2]) for at in range(0, len(panels), 2))
    facts = f"{report.format} · {report.extent} · {report.verdict}"
    return FigureSpec(f"Doctor: {report.path}", facts, rows, tuple(notes))


def _described(finding: Finding) -> str:
    place = f" in {finding.place}" if finding.place else ""
    return _short(f"{finding.check}{place}: {finding.message}", _MOST_CHARACTERS)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def _marked(report: Report, *checks: str) -> dict[int, Finding]:
    """Return the first finding, notes excluded, of each episode by these checks (all if none are given)."""
    found: dict[int, Finding] = {}
    for finding in report.findings:
        alarm = finding.severity != "note" and finding.episode is not None
        if alarm and (not checks or finding.check in checks):
            found.setdefault(int(finding.episode or 0), finding)
    return found


def _dots(label: str, x: Iterable[float], y: Iterable[float], layer: Layer = "first") -> Line:
    return Line(label, tuple(map(float, x)), tuple(map(float, y)), layer, "dots")


def _by_episode(label: str, values: np.ndarray, marked: dict[int, Finding]) -> tuple[Line, ...]:
    """Return a dot for each episode, and those of episodes with findings in the colours of these."""
    kept = [n for n in thin(len(values), _MOST_POINTS) if n not in marked]
    lines = [_dots(label, kept, values[kept])]
    for severity in _ALARMS:
        bad = [n for n, finding in marked.items() if finding.severity == severity and n < len(values)]
        lines += [_dots(severity, bad, values[bad], severity)] if bad else []
    return tuple(lines)


def _lengths(report: Report) -> list[Panel]:
    lengths = np.array(report.profile.lengths)
    if not lengths.size:
        return []
    lines = _by_episode("rows", lengths, _marked(report))
    return [Curves("Rows of each episode", "episode", "rows", lines, y_range=(0, float(lengths.max()) * 1.15 + 1))]


def _jitter(report: Report) -> list[Panel]:
    values = np.maximum(np.array(report.profile.jitter_ms), 1e-4)
    if not values.size:
        return []
    lines = _by_episode("episode", values, _marked(report, "timestamp-rate", "timestamp-order"))
    limit = Level(_LEROBOT_MS, f"{_LEROBOT_MS} ms, what\nLeRobot allows")
    reach = (5e-5, max(2.0, float(values.max()) * 3))
    title, y_label = "Largest error of a time step", "ms from 1 / fps"
    return [Curves(title, "episode", y_label, lines, (limit,), y_range=reach, log_above=0.0)]


def _ranges(found: FieldProfile) -> Panel:
    dimensions = found.low.shape[0]
    count = min(dimensions, _MOST_DIMENSIONS)
    low, high, quantiles = found.low[:count], found.high[:count], found.quantiles[:, :count]
    x, constant = np.arange(count), low == high
    lines = [_spans("all values", low, high, "third"), _spans("5 to 95 %", quantiles[0], quantiles[4], "first")]
    lines.append(_dots("median", x, quantiles[2], "second"))
    for side, name, limit in ((0, "least", low), (1, "largest", high)):
        stuck = (found.at_limits[side, :count] >= 0.1) & ~constant
        if stuck.any():
            lines.append(_dots(f"10 % or more\nat the {name} value", x[stuck], limit[stuck], "warning"))
    if constant.any():
        lines.append(_dots("constant", x[constant], low[constant], "note"))
    size = np.maximum(np.abs(low), np.abs(high))
    typical = float(np.median(size))
    more = "" if dimensions == count else f" (the first {count} of {dimensions} dimensions)"
    log_above = typical if 0 < 100 * typical < float(size.max()) else None
    return Curves(f"Range of {found.name}{more}", "dimension", "value", tuple(lines), log_above=log_above)


def _spans(label: str, low: np.ndarray, high: np.ndarray, layer: Layer) -> Line:
    """Return a vertical line from the low to the high value of each dimension."""
    gap = np.full(len(low), np.nan)
    x = np.arange(len(low), dtype=np.float64)
    ends = np.stack((low, high, gap), axis=1)
    return Line(label, tuple(np.stack((x, x, gap), axis=1).ravel()), tuple(ends.ravel()), layer, "wide")


def _steps(report: Report) -> list[Panel]:
    lines = [
        _dots(_short(name, _NAME_CHARACTERS), values[:, 0], np.maximum(values[:, 1], 0.1), number)
        for number, (name, values) in enumerate(report.profile.jumps.items())
        if values.shape[0]
    ]
    if not lines:
        return []
    starts = _starts(report)
    rows = [
        starts[min(finding.episode or 0, len(starts) - 1)] + finding.frame
        for finding in report.findings
        if finding.check == "value-jump" and finding.severity == "warning" and finding.frame is not None
    ]
    levels = [Level(_USUAL, f"{_USUAL:g} times")]
    levels += [Level(float(row), "" if place else "finding", "x") for place, row in enumerate(rows)]
    title, y_label = "Steps between rows", "multiple of usual ones"
    reach = (0.08, max(20.0, *(4 * y for line in lines for y in line.y)))
    return [Curves(title, "row", y_label, tuple(lines), tuple(levels), y_range=reach, log_above=0.0)]


def _cameras(report: Report) -> list[Panel]:
    lines = []
    for number, camera in enumerate(report.profile.cameras):
        order = np.argsort(camera.times, kind="stable")
        order = order[list(thin(len(order), _MOST_POINTS))]
        x, y = camera.times[order].astype(float), camera.brightness[order].astype(float)
        name = _short(camera.name.removeprefix("observation.images."), _NAME_CHARACTERS)
        lines += [Line(name, tuple(x), tuple(y), number)] if len(x) else []
    if not lines:
        return []
    title = "Brightness" if len(lines) > 1 else f"Brightness of {lines[0].label}"
    starts = _starts(report)
    for number, finding in _marked(report, "camera-blank", "camera-frozen").items():
        if number + 1 < len(starts):
            reach = float(starts[number]), float(starts[number + 1])
            lines.append(Line(finding.check, reach, (-3.0, -3.0), finding.severity, "wide"))
    return [Curves(title, "row", "mean of the decoded frame", tuple(lines), y_range=(-6.0, 260.0))]


def _starts(report: Report) -> np.ndarray:
    """Return the first row of each episode, and the number of rows."""
    return np.concatenate([[0], np.cumsum(report.profile.lengths)])
