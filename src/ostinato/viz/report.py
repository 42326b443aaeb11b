"""The figure about a buffer or a dataset: returns, lengths, priorities, ages of rows, bytes, an episode, actions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ostinato.core.options import plural
from ostinato.durable.progress import Progress
from ostinato.errors import DamagedFileError
from ostinato.viz.datasets import DatasetSource
from ostinato.viz.figures import Bars, Curves, FigureSpec, Film, Level, Line, Shares, Stack, format_number, thin
from ostinato.viz.frames import ALL_CAMERAS, Position, make_traces, read_frame
from ostinato.viz.sources import is_picture

if TYPE_CHECKING:
    from ostinato.durable.progress import ProgressOption
    from ostinato.viz.figures import Panel
    from ostinato.viz.sources import OpenTrajectory, TrajectorySource

__all__ = ["report"]

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))
_MAX_POINTS = 5_000
_BARS, _ACTION_BARS = 30, 40
_MAX_FIELDS = 7
_PICTURES = 12
"""Pictures in a row of the figure, of all cameras."""
_MAX_CAMERAS = 2
_MAX_COMPONENTS = 12
_MAX_ROWS = 200_000
_CHUNK = 8_192


def report(source: TrajectorySource, index: int = 0, *, progress: ProgressOption = None) -> FigureSpec:
    """Return a figure that summarizes a buffer, or a dataset and one of its episodes.

    Reads each reward once. Of a dataset also the episode, with some pictures of each of two cameras, and the actions of
    at most 200,000 rows.

    Args:
        source: A directory of trajectories, a checkpoint, or a dataset.
        index: Position of the episode of a dataset in `source.ids`.
        progress: The rows of actions read and their total; see `ostinato.ProgressOption`.

    Raises:
        DamagedFileError: The episode or the actions cannot be read; the message names the file.
    """
    lengths = np.array([source.extent(position)[0] for position in range(len(source.ids))])
    low: list[Panel] = [_bars(f"Steps of each {source.unit}", "steps", plural(source.unit), lengths)]
    rows: list[tuple[Panel, ...]] = []
    summary: list[str] = []
    if isinstance(source, DatasetSource):
        episode = source.open(index)
        if episode.problem:
            raise DamagedFileError(episode.problem)
        rows += filter(None, (tuple(_films(source, index, episode)), tuple(_curves(episode))))
        low += _actions(source, progress)
        summary += _facts(source, episode)
    else:
        low += [] if source.priorities is None else [_bars("Priorities", "priority", "rows", source.priorities)]
        ages = source.row_ages()
        low += [_bars("Age of rows", "rows added since", "rows", ages)] if ages.size else []
    found = [value if value is not None and np.isfinite(value) else None for value in source.all_returns()]
    known = [value for value in found if value is not None]
    low.append(_byte_shares(source.field_bytes()))
    rows += [(_returns(found, source.unit),)] if known else []
    rows += [tuple(low)] if len(low) <= 3 else [tuple(low[:2]), tuple(low[2:])]
    summary.append(f"mean length {format_number(lengths.mean())}")
    summary += [f"mean return {format_number(float(np.mean(known)))}"] if known else ["no readable rewards"]
    summary += [f"{len(found) - len(known):,} without readable rewards"] if 0 < len(known) < len(found) else []
    summary += [source.history] if source.history else []
    return FigureSpec(source.title, " · ".join(summary), tuple(rows))


def _facts(source: DatasetSource, episode: OpenTrajectory) -> list[str]:
    facts = [f"{episode.name}: {episode.steps:,} steps", *(f"{word}: {value}" for word, value in episode.facts)]
    return facts if source.dataset.fps is None else [*facts, f"{source.dataset.fps:g} rows per second"]


def _films(source: DatasetSource, index: int, episode: OpenTrajectory) -> list[Panel]:
    """Return some pictures of each camera, evenly spaced over the episode."""
    cameras = sum(is_picture(source.shapes[path]) for path in episode.roles.current.values())
    if not cameras:
        return []
    steps = np.unique(np.linspace(0, episode.steps - 1, _PICTURES // min(cameras, _MAX_CAMERAS)).astype(int)).tolist()
    shown: dict[str, list[tuple[np.ndarray, str]]] = {}
    for step in steps:
        frame = read_frame(source, Position(index, step), ALL_CAMERAS)
        if frame.problem:
            raise DamagedFileError(frame.problem)
        for picture in frame.current.pictures:
            shown.setdefault(picture.camera, []).append((picture.pixels, f"step {step}"))
    return [
        Film(camera, tuple(pixels for pixels, _ in pictures), tuple(note for _, note in pictures))
        for camera, pictures in list(shown.items())[:_MAX_CAMERAS]
    ]


def _curves(episode: OpenTrajectory) -> list[Panel]:
    """Return the curves of an episode: the action, the first vector of the observation, the reward."""
    roles = episode.roles
    vectors = [(name, path) for name, path in roles.current.items() if not is_picture(episode.shapes[path])]
    vectors.sort(key=lambda found: episode.row(found[1], 0, 0).dtype.kind != "f")  # flags and counts come last
    wanted = [("action", roles.action), *vectors[:1], ("reward", roles.reward)]
    panels: list[Panel] = []
    for name, path in wanted:
        if path is None or not episode.steps:
            continue
        traces = make_traces(name, episode.column(path, 0))
        count = traces.values.shape[1]
        more = "" if count == traces.components else f" ({count} of {traces.components})"
        x = tuple(map(float, traces.steps))
        lines = tuple(Line(str(i), x, tuple(map(float, line)), i) for i, line in enumerate(traces.values.T))
        levels = (Level(0.0),) if name == "reward" else ()
        panels.append(Curves(f"{episode.name}: {name}{more}", "step", "", lines, levels))
    return panels or [_bars(f"{episode.name}: no vectors", "step", "rows", np.zeros(0))]


def _actions(source: DatasetSource, progress: ProgressOption) -> list[Panel]:
    """Return the distribution of each component of the action, if there are actions."""
    path = source.roles.action
    if path is None:
        return []
    total = len(source.dataset)
    rows = torch.arange(0, total, -(-total // _MAX_ROWS), device="cpu")
    parts = []
    with Progress(progress, "read actions", rows.shape[0], unit="rows") as bar:
        for part in torch.split(rows, _CHUNK):
            parts.append(source.at(path, part).reshape(part.shape[0], -1))
            bar.advance(part.shape[0])
    values = np.concatenate(parts).astype(np.float64)
    count = values.shape[1]
    if count == 1:
        return [_bars("Actions", "value", "rows", values[:, 0])]
    kept = values[:, :_MAX_COMPONENTS]
    finite = kept[np.isfinite(kept)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    edges = np.linspace(low, high if high > low else low + 1.0, _ACTION_BARS + 1)
    middles = tuple(((edges[:-1] + edges[1:]) / 2).tolist())
    lines = []
    for number, column in enumerate(kept.T):
        counts, _ = np.histogram(column[np.isfinite(column)], edges)
        share = 100.0 * counts / max(len(column), 1)
        lines.append(Line(str(number), middles, tuple(share.tolist()), number))
    more = "" if count <= _MAX_COMPONENTS else f" ({_MAX_COMPONENTS} of {count})"
    return [Curves(f"Actions{more}", "value", "% of rows", tuple(lines))]


def _returns(found: list[float | None], unit: str) -> Curves:
    """Plot returns in order; those that cannot be read leave a gap."""
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
        x_label=f"{plural(unit)} in order",
        y_label="return",
        lines=(replace(each, style="beads"),) if window == 1 else (each, mean),
    )


def _bars(title: str, x_label: str, y_label: str, values: np.ndarray) -> Bars:
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


def _byte_shares(found: dict[str, int]) -> Shares:
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
