"""A figure about a buffer: returns in order of insertion, lengths, priorities, ages of rows, bytes per field."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ostinato.core.options import plural
from ostinato.viz.figures import Bars, Curves, FigureSpec, Line, Shares, Stack, format_number, thin

if TYPE_CHECKING:
    from ostinato.viz.figures import Panel
    from ostinato.viz.sources import TrajectorySource

__all__ = ["bars", "byte_shares", "report", "returns_of"]

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))
_MAX_POINTS = 5_000
_BARS = 30
_MAX_FIELDS = 7


def report(source: TrajectorySource) -> FigureSpec:
    """Return a figure that summarizes a buffer. Reads each reward once, and no observations.

    Args:
        source: A directory of trajectories or a checkpoint.
    """
    found = [source.returns(index) for index in range(len(source.ids))]
    lengths = np.array([source.extent(index)[0] for index in range(len(source.ids))])
    low: list[Panel] = [bars(f"Steps of each {source.unit}", "steps", plural(source.unit), lengths)]
    if source.priorities is not None:
        low.append(bars("Priorities", "priority", "rows", source.priorities))
    low.append(bars("Age of rows", "rows added since", "rows", source.row_ages()))
    low.append(byte_shares(source.field_bytes()))
    found = [value if value is not None and np.isfinite(value) else None for value in found]
    known = [value for value in found if value is not None]
    rows: list[tuple[Panel, ...]] = [tuple(low[:2]), tuple(low[2:])] if len(low) > 2 else [tuple(low)]
    if known:
        rows.insert(0, (returns_of(found, source.unit),))
    unread = len(found) - len(known)
    summary = [f"mean length {format_number(lengths.mean())}"]
    if known:
        summary.append(f"mean return {format_number(float(np.mean(known)))}")
    if unread:
        summary.append(f"{unread:,} without readable rewards" if known else "no readable rewards")
    if source.history:
        summary.append(source.history)
    return FigureSpec(source.title, " · ".join(summary), tuple(rows))


def returns_of(found: list[float | None], unit: str) -> Curves:
    """Plot returns in order of insertion; returns that cannot be read leave a gap."""
    places = np.array([place for place, value in enumerate(found) if value is not None], dtype=float)
    values = np.array([value for value in found if value is not None], dtype=float)
    window = 1 if len(values) < 100 else max(5, len(values) // 50)
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    kept = list(thin(len(values), _MAX_POINTS))
    x = tuple(places[kept].tolist())
    each = Line(unit, x, tuple(values[kept].tolist()), "first" if window == 1 else "quiet", "dots")
    mean = Line(f"mean of {window}", x, tuple(means[kept].tolist()))
    return Curves(
        title=f"Return of each {unit}",
        x_label=f"{plural(unit)} in order of insertion",
        y_label="return",
        lines=(replace(each, style="beads"),) if window == 1 else (each, mean),
    )


def bars(title: str, x_label: str, y_label: str, values: np.ndarray) -> Bars:
    """Return a histogram of numbers; those that are not finite are left out."""
    finite = values[np.isfinite(values)].astype(float)
    whole = finite.size > 0 and bool((finite == np.round(finite)).all())
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if whole:  # each bar has the same number of integers: otherwise uniform data looks uneven
        room = max(0, 3 - round((high - low) / 2))  # a single value would fill the panel
        first = low - room if low < 0 else max(low - room, 0)
        edges = np.arange(first - 0.5, high + room + 1.5, np.ceil((high - low + 1) / _BARS))
        edges = edges if edges[-1] > high else np.append(edges, 2 * edges[-1] - edges[-2])
    else:
        edges = np.linspace(low, high if high > low else low + 1.0, _BARS + 1)
    counts, _ = np.histogram(finite, edges)
    summary = f"mean {format_number(finite.mean())}, max {format_number(high)}" if finite.size else "none"
    stack = Stack(summary, tuple(counts.astype(float).tolist()))
    return Bars(title, x_label, y_label, tuple(edges.tolist()), (stack,))


def byte_shares(found: dict[str, int]) -> Shares:
    """Return the bytes of the largest fields."""
    order = sorted(found, key=lambda name: -found[name])
    most_shown = _MAX_FIELDS if len(order) > _MAX_FIELDS + 1 else _MAX_FIELDS + 1
    kept, rest = order[:most_shown], order[most_shown:]
    sizes = {name: found[name] for name in kept}
    if rest:
        sizes[f"{len(rest)} more"] = sum(found[name] for name in rest)
    total, most = max(sum(sizes.values()), 1), max(sizes.values(), default=0)
    unit, scale = next(((unit, scale) for unit, scale in _SIZES if most >= scale), _SIZES[-1])
    return Shares(
        "Bytes by field",
        unit,
        tuple(sizes),
        tuple(size / scale for size in sizes.values()),
        tuple("< 0.1%" if 0 < size / total < 0.0005 else f"{size / total:.1%}" for size in sizes.values()),
    )
