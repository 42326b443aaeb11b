"""A figure about a dataset: pictures and curves of one episode, lengths, actions, returns, bytes per field."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ostinato.durable.progress import Progress
from ostinato.errors import DamagedFileError
from ostinato.viz.figures import Curves, FigureSpec, Film, Level, Line, format_number
from ostinato.viz.frames import ALL_CAMERAS, Position, make_traces, read_frame
from ostinato.viz.report import bars, byte_shares, returns_of
from ostinato.viz.sources import is_picture

if TYPE_CHECKING:
    from ostinato.durable.progress import ProgressOption
    from ostinato.viz.datasets import DatasetSource
    from ostinato.viz.figures import Panel
    from ostinato.viz.sources import OpenTrajectory

__all__ = ["dataset_report", "size_of"]

_PICTURES = 12
"""Pictures in a row of the figure, of all cameras."""
_MAX_CAMERAS = 2
_MAX_COMPONENTS = 12
_MAX_ROWS = 200_000
_CHUNK = 8_192
_BARS = 40


def dataset_report(source: DatasetSource, index: int, *, progress: ProgressOption = None) -> FigureSpec:
    """Return a figure that summarizes a dataset and one of its episodes.

    Reads the episode, with some pictures of each of two cameras, and the actions and rewards of at most 200,000 rows.

    Args:
        source: the dataset.
        index: position of the episode in `source.ids`.
        progress: the rows read and their total; see `ostinato.ProgressOption`.

    Raises:
        DamagedFileError: the episode or the actions cannot be read; the message names the file.
    """
    episode = source.open(index)
    if episode.problem:
        raise DamagedFileError(episode.problem)
    rows: list[tuple[Panel, ...]] = []
    films = _films(source, index, episode)
    if films:
        rows.append(tuple(films))
    rows.append(tuple(_curves(episode)))
    lengths = np.array([source.extent(position)[0] for position in range(len(source.ids))])
    low: list[Panel] = [bars("Steps of each episode", "steps", "episodes", lengths)]
    with Progress(progress, "read actions", unit="rows") as bar:
        actions = _actions(source, bar)
    if actions is not None:
        low.append(actions)
    found = _returns(source)
    if found is not None:
        low.append(replace(returns_of(found, "episode"), x_label="episode"))
    low.append(byte_shares(source.field_bytes()))
    rows += [tuple(low[:2]), tuple(low[2:])] if len(low) > 3 else [tuple(low)]
    facts = [f"{word}: {value}" for word, value in episode.facts]
    facts += [] if source.dataset.fps is None else [f"{source.dataset.fps:g} rows per second"]
    lines = [f"{episode.name}: {episode.steps:,} steps", *facts]
    return FigureSpec(source.title, " · ".join([*lines, f"mean length {format_number(lengths.mean())}"]), tuple(rows))


def size_of(spec: FigureSpec) -> tuple[int, int]:
    """Return the width and height in pixels that suit a figure of `dataset_report`."""
    return 1600, 150 + 300 * len(spec.rows)


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
    columns, roles = episode.columns, episode.roles
    if columns is None:
        return []
    vectors = [(name, path) for name, path in roles.current.items() if not is_picture(tuple(columns.shapes[path]))]
    vectors.sort(key=lambda found: columns.row(found[1], 0, 0).dtype.kind != "f")  # flags and counts come last
    wanted = [("action", roles.action), *vectors[:1], ("reward", roles.reward)]
    panels: list[Panel] = []
    for name, path in wanted:
        if path is None or not episode.steps:
            continue
        traces = make_traces(name, columns.column(path, 0))
        count = traces.values.shape[1]
        more = "" if count == traces.components else f" ({count} of {traces.components})"
        x = tuple(map(float, traces.steps))
        lines = tuple(Line(str(i), x, tuple(map(float, line)), i) for i, line in enumerate(traces.values.T))
        levels = (Level(0.0),) if name == "reward" else ()
        panels.append(Curves(f"{episode.name}: {name}{more}", "step", "", lines, levels))
    return panels or [bars(f"{episode.name}: no vectors", "step", "rows", np.zeros(0))]


def _actions(source: DatasetSource, bar: Progress) -> Panel | None:
    """Return the distribution of each component of the action."""
    path = source.roles.action
    if path is None:
        return None
    total = len(source.dataset)
    rows = torch.arange(0, total, -(-total // _MAX_ROWS), device="cpu")
    bar.begin(rows.shape[0])
    parts = []
    for part in torch.split(rows, _CHUNK):
        parts.append(source.at(path, part).reshape(part.shape[0], -1))
        bar.advance(part.shape[0])
    values = np.concatenate(parts).astype(np.float64)
    count = values.shape[1]
    if count == 1:
        return bars("Actions", "value", "rows", values[:, 0])
    kept = values[:, :_MAX_COMPONENTS]
    finite = kept[np.isfinite(kept)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    edges = np.linspace(low, high if high > low else low + 1.0, _BARS + 1)
    middles = tuple(((edges[:-1] + edges[1:]) / 2).tolist())
    lines = []
    for number, column in enumerate(kept.T):
        counts, _ = np.histogram(column[np.isfinite(column)], edges)
        share = 100.0 * counts / max(len(column), 1)
        lines.append(Line(str(number), middles, tuple(share.tolist()), number))
    more = "" if count <= _MAX_COMPONENTS else f" ({_MAX_COMPONENTS} of {count})"
    return Curves(f"Actions{more}", "value", "% of rows", tuple(lines))


def _returns(source: DatasetSource) -> list[float | None] | None:
    """Return the return of each episode; None without rewards that can be read."""
    found = [value if value is not None and np.isfinite(value) else None for value in source.all_returns() or ()]
    return found if any(value is not None for value in found) else None
