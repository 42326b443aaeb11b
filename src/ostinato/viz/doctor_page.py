"""The page of plots of the doctor: lengths, times, ranges, steps and cameras of a dataset, with the findings marked."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato._optional import require
from ostinato.viz.figures import FAINT, INK, LINES, STYLE, format_number, thin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato.tools.doctor.report import FieldProfile, Finding, Report

__all__ = ["draw_page"]

_COLOURS = {"error": "#C62828", "warning": "#D98E00", "note": "#52606D"}
_BLUE, _LIGHT = "#0072B2", "#A9CBE2"
_LISTED = 9
_MOST_DIMENSIONS = 48
_MOST_POINTS = 4000
_MOST_NAMES = 6
_DPI = 130
_WIDTH = 1600
_MARGINS = {"left": 0.06, "right": 0.985, "bottom": 0.17, "top": 0.86, "wspace": 0.14}


def draw_page(report: Report, path: Path) -> None:
    """Draw the page as a PNG file with the Agg backend; needs no display and leaves pyplot alone.

    Args:
        report: what `examine` returned.
        path: the file to write, which is replaced if it exists.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", "viz")
    agg = require("matplotlib.backends.backend_agg", "viz")
    figures = require("matplotlib.figure", "viz")
    rows = _rows(report)
    heights = [1.0 + 0.23 * _lines(report), *(2.9 for _ in rows)]
    with matplotlib.rc_context(STYLE):
        size = (_WIDTH / _DPI, sum(heights) + 0.2)
        figure = figures.Figure(figsize=size, dpi=_DPI, facecolor="white")
        canvas = agg.FigureCanvasAgg(figure)
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        _head(parts[0], report, heights[0])
        for part, panels in zip(parts[1:], rows, strict=True):
            for axes, draw in zip_longest(part.subplots(1, 2, squeeze=False, gridspec_kw=_MARGINS)[0], panels):
                if draw is None:
                    axes.remove()
                else:
                    draw(axes)
        canvas.print_png(path)


def _rows(report: Report) -> list[list[Callable[[Any], None]]]:
    """Return the panels that have something to show, as functions that draw them, two in a row."""
    profile = report.profile
    panels: list[Callable[[Any], None]] = []
    if profile.lengths:
        panels.append(lambda axes: _lengths(axes, report))
    if profile.jitter_ms:
        panels.append(lambda axes: _jitter(axes, report))
    shown = [found for found in profile.fields if found.low.shape[0] > 1]
    shown.sort(key=lambda found: (not found.name.startswith("action"), found.name))
    panels += [lambda axes, found=found: _ranges(axes, found) for found in shown[:4]]  # type: ignore[misc]
    if any(values.shape[0] for values in profile.jumps.values()):
        panels.append(lambda axes: _steps(axes, report))
    if any(len(camera.times) for camera in profile.cameras):
        panels.append(lambda axes: _cameras(axes, report))
    return [panels[at : at + 2] for at in range(0, len(panels), 2)]


# -- the head ---------------------------------------------------------------------------------------------------------


def _lines(report: Report) -> int:
    return min(len(report.findings), _LISTED) + (len(report.findings) > _LISTED) if report.findings else 1


def _head(part: Any, report: Report, height: float) -> None:
    def write(line: float, text: str, **more: Any) -> None:
        part.text(0.012, 1 - (0.3 + line) / height, text, va="center", parse_math=False, **more)

    write(0.0, _short(f"Doctor: {report.path}", 95), fontsize=16, fontweight="bold")
    facts = [report.format, report.extent, report.verdict]
    write(0.36, " · ".join(facts), fontsize=10.5, color=FAINT)
    if not report.findings:
        write(0.7, "No findings.", fontsize=9.5, color="#2E7D32", fontweight="bold")
    for at, finding in enumerate(report.findings[:_LISTED]):
        place = f" in {finding.place}" if finding.place else ""
        text = _short(f"{finding.check}{place}: {finding.message}", 185)
        y = 1 - (0.3 + 0.7 + 0.23 * at) / height
        part.text(0.012, y, "\N{BLACK SQUARE}", fontsize=10, color=_COLOURS[finding.severity], va="center")
        part.text(0.026, y, text, fontsize=8.6, color=INK, va="center", parse_math=False)
    if len(report.findings) > _LISTED:
        more = len(report.findings) - _LISTED + sum(report.omitted.values())
        write(0.7 + 0.23 * _LISTED, f"     and {more:,} more", fontsize=8.6, color=FAINT)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


# -- panels -----------------------------------------------------------------------------------------------------------


def _dress(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_tick_params(length=0)


def _marked(report: Report, *checks: str) -> dict[int, Finding]:
    """Return the first finding, notes excluded, of each episode by these checks (all if none are given)."""
    found: dict[int, Finding] = {}
    for finding in report.findings:
        alarm = finding.severity != "note" and finding.episode is not None
        if alarm and (not checks or finding.check in checks):
            found.setdefault(int(finding.episode or 0), finding)
    return found


def _lengths(axes: Any, report: Report) -> None:
    lengths = report.profile.lengths
    marked = _marked(report)
    _dress(axes, "Rows of each episode", "episode", "rows")
    if len(lengths) <= 200:
        colours = [_COLOURS[marked[n].severity] if n in marked else _BLUE for n in range(len(lengths))]
        axes.bar(range(len(lengths)), lengths, width=0.85, color=colours)
    else:
        kept = list(thin(len(lengths), _MOST_POINTS))
        axes.plot(kept, [lengths[n] for n in kept], ".", ms=3, color=_BLUE, alpha=0.6, mew=0)
        for number, finding in marked.items():
            if number < len(lengths):
                axes.plot([number], [lengths[number]], "o", ms=5, color=_COLOURS[finding.severity])
    axes.set_ylim(0, max(lengths) * 1.15 + 1)
    axes.grid(visible=False, axis="x")
    _whole_ticks(axes)


def _jitter(axes: Any, report: Report) -> None:
    values = np.maximum(np.array(report.profile.jitter_ms), 1e-4)
    _dress(axes, "Largest error of a time step", "episode", "ms from 1 / fps")
    kept = np.array(thin(len(values), _MOST_POINTS))
    wrong = _marked(report, "timestamp-rate", "timestamp-order")
    bad = np.array([int(n) in wrong for n in kept])
    axes.plot(kept[~bad], values[kept][~bad], ".", ms=9, color=_BLUE, mew=0, alpha=0.8)
    axes.plot(kept[bad], values[kept][bad], "o", ms=6, color=_COLOURS["error"], label="finding" if bad.any() else "_")
    axes.set_yscale("log")
    axes.set_ylim(5e-5, max(2.0, float(values.max()) * 3))
    axes.axhline(0.1, color=FAINT, lw=1, ls=(0, (4, 3)), label="0.1 ms, what LeRobot allows")
    _legend(axes)
    _whole_ticks(axes)


def _ranges(axes: Any, found: FieldProfile) -> None:
    count = min(found.low.shape[0], _MOST_DIMENSIONS)
    x = np.arange(count)
    low, high = found.low[:count], found.high[:count]
    title = f"Range of {found.name}"
    if found.low.shape[0] > count:
        title += f" (the first {count} of {found.low.shape[0]} dimensions)"
    _dress(axes, title, "dimension", "value")
    axes.vlines(x, low, high, color=_LIGHT, lw=3, label="all values")
    axes.vlines(x, found.quantiles[0, :count], found.quantiles[4, :count], color=_BLUE, lw=7, label="5 to 95 %")
    axes.plot(x, found.quantiles[2, :count], "_", ms=9, mew=1.6, color="white")
    constant = low == high
    for side, limit in ((0, low), (1, high)):
        stuck = (found.at_limits[side, :count] >= 0.1) & ~constant
        label = "10 % or more at this limit" if stuck.any() else "_"
        axes.plot(x[stuck], limit[stuck], "v^"[side], ms=7, color=_COLOURS["warning"], label=label, clip_on=False)
    axes.plot(x[constant], low[constant], "x", ms=6, mew=1.6, color=FAINT, label="constant" if constant.any() else "_")
    spread = float(np.max(np.maximum(np.abs(low), np.abs(high)), initial=0.0))
    typical = float(np.median(np.maximum(np.abs(low), np.abs(high)))) if count else 0.0
    if typical > 0 and spread > 100 * typical:
        axes.set_yscale("symlog", linthresh=typical)
    axes.set_xlim(-0.7, count - 0.3)
    axes.grid(visible=False, axis="x")
    _legend(axes)
    _whole_ticks(axes)


def _steps(axes: Any, report: Report) -> None:
    _dress(axes, "Steps between rows", "row", "multiple of a usual step")
    for at, (name, values) in enumerate(report.profile.jumps.items()):
        if values.shape[0]:
            colour = LINES[at % len(LINES)]
            axes.plot(
                values[:, 0], np.maximum(values[:, 1], 0.1), ".", ms=6, alpha=0.7, mew=0, color=colour, label=name
            )
    axes.axhline(8, color=FAINT, lw=1, ls=(0, (4, 3)), label="8 times")
    starts = np.concatenate([[0], np.cumsum(report.profile.lengths)])
    for finding in report.findings:
        if finding.check == "value-jump" and finding.severity == "warning" and finding.frame is not None:
            row = starts[min(finding.episode or 0, len(starts) - 1)] + finding.frame
            axes.axvline(row, color=_COLOURS["error"], lw=1.2, alpha=0.8, zorder=1)
    axes.set_yscale("log")
    axes.set_xlim(0, max((report.stored_rows or 0), 1))
    top = axes.get_ylim()[1]
    axes.set_ylim(0.3, max(20.0, top * 4))
    _legend(axes)
    _number_ticks(axes)


def _cameras(axes: Any, report: Report) -> None:
    _dress(axes, "Brightness", "row", "mean of the decoded frame")
    for at, camera in enumerate(report.profile.cameras):
        order = np.argsort(camera.times, kind="stable")
        kept = order[list(thin(len(order), _MOST_POINTS))] if len(order) else order
        colour = LINES[at % len(LINES)]
        axes.plot(
            camera.times[kept],
            camera.brightness[kept],
            ".-",
            ms=3,
            lw=0.8,
            color=colour,
            label=camera.name.removeprefix("observation.images."),
        )
    lengths = report.profile.lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for number, finding in _marked(report, "camera-blank", "camera-frozen").items():
        if number < len(lengths):
            colour, label = _COLOURS[finding.severity], finding.check
            _, known = axes.get_legend_handles_labels()
            label = "_" if label in known else label
            axes.axvspan(starts[number], starts[number + 1], color=colour, alpha=0.18, lw=0, label=label)
    axes.set_ylim(-5, 260)
    axes.set_xlim(0, max((report.stored_rows or 0), 1))
    _legend(axes)
    _number_ticks(axes)


def _legend(axes: Any) -> None:
    """Name the marks above the panel, right of its title, each once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = {_short(label, 30): handle for label, handle in zip(labels, handles, strict=True)}
    names = list(unique)[:_MOST_NAMES]
    columns = min(len(names), 3)
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.1}
    axes.legend(
        [unique[n] for n in names], names, ncols=columns, handlelength=1.2, columnspacing=1.2, fontsize=8, **place
    )


def _whole_ticks(axes: Any) -> None:
    ticker = require("matplotlib.ticker", "viz")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(10, integer=True))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_number(value)))


def _number_ticks(axes: Any) -> None:
    ticker = require("matplotlib.ticker", "viz")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_number(value)))
