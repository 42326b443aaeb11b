"""One page about a buffer: returns in order of insertion, lengths, priorities, age of rows, bytes by field."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ostinato.viz.reel import plural
from ostinato.viz.scene import Bars, Curves, Line, Scene, Shares, Stack, number, thin

if TYPE_CHECKING:
    from ostinato.viz.reel import Reels
    from ostinato.viz.scene import Panel

__all__ = ["report"]

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))
_MOST_POINTS = 5_000
_BARS = 30
_MOST_FIELDS = 7


def report(reels: Reels) -> Scene:
    """Say what to draw of a buffer; every reward is read once, no observation.

    Args:
        reels: A directory of trajectories or a checkpoint.
    """
    found = [reels.returns(index) for index in range(len(reels.ids))]
    lengths = np.array([reels.extent(index)[0] for index in range(len(reels.ids))])
    low: list[Panel] = [_bars(f"Steps of each {reels.unit}", "steps", plural(reels.unit), lengths)]
    if reels.priorities is not None:
        low.append(_bars("Priorities", "priority", "rows", reels.priorities))
    low.append(_bars("Age of rows", "rows added since", "rows", reels.row_ages()))
    low.append(_bytes(reels.field_bytes()))
    found = [value if value is not None and np.isfinite(value) else None for value in found]
    known = [value for value in found if value is not None]
    rows: list[tuple[Panel, ...]] = [tuple(low[:2]), tuple(low[2:])] if len(low) > 2 else [tuple(low)]
    if known:
        rows.insert(0, (_returns(found, reels.unit),))
    unread = len(found) - len(known)
    said = [f"mean length {number(lengths.mean())}"]
    if known:
        said.append(f"mean return {number(float(np.mean(known)))}")
    if unread:
        said.append(f"{unread:,} without readable rewards" if known else "no readable rewards")
    if reels.history:
        said.append(reels.history)
    return Scene(reels.title, " · ".join(said), tuple(rows))


def _returns(found: list[float | None], unit: str) -> Curves:
    """Show returns over the order of insertion; those that cannot be read leave a gap."""
    places = np.array([place for place, value in enumerate(found) if value is not None], dtype=float)
    values = np.array([value for value in found if value is not None], dtype=float)
    window = 1 if len(values) < 100 else max(5, len(values) // 50)
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    kept = list(thin(len(values), _MOST_POINTS))
    x = tuple(places[kept].tolist())
    each = Line(unit, x, tuple(values[kept].tolist()), "first" if window == 1 else "quiet", "dots")
    mean = Line(f"mean of {window}", x, tuple(means[kept].tolist()))
    return Curves(
        title=f"Return of each {unit}",
        x_label=f"{plural(unit)} in order of insertion",
        y_label="return",
        lines=(replace(each, style="beads"),) if window == 1 else (each, mean),
    )


def _bars(title: str, x_label: str, y_label: str, values: np.ndarray) -> Bars:
    finite = values[np.isfinite(values)].astype(float)
    whole = finite.size > 0 and bool((finite == np.round(finite)).all())
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if whole:  # each bar counts as many whole numbers as the next, else even counts would look uneven
        room = max(0, 3 - round((high - low) / 2))  # one value alone would fill the panel
        first = low - room if low < 0 else max(low - room, 0)
        edges = np.arange(first - 0.5, high + room + 1.5, np.ceil((high - low + 1) / _BARS))
        edges = edges if edges[-1] > high else np.append(edges, 2 * edges[-1] - edges[-2])
    else:
        edges = np.linspace(low, high if high > low else low + 1.0, _BARS + 1)
    counts, _ = np.histogram(finite, edges)
    summary = f"mean {number(finite.mean())}, most {number(high)}" if finite.size else "none"
    stack = Stack(summary, tuple(counts.astype(float).tolist()))
    return Bars(title, x_label, y_label, tuple(edges.tolist()), (stack,))


def _bytes(found: dict[str, int]) -> Shares:
    order = sorted(found, key=lambda name: -found[name])
    most_shown = _MOST_FIELDS if len(order) > _MOST_FIELDS + 1 else _MOST_FIELDS + 1
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
