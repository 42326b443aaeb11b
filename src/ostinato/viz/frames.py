"""Frames: the data that a viewer shows of one step of a trajectory, and the navigation between steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ostinato.errors import OptionError, OstinatoError
from ostinato.viz.sources import OpenTrajectory, is_picture, picture_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.durable.tensorfile import TreePath
    from ostinato.viz.sources import TrajectorySource

__all__ = [
    "ALL_CAMERAS",
    "Frame",
    "Navigator",
    "ObservationView",
    "Picture",
    "Position",
    "Timeline",
    "Traces",
    "ends_of",
    "make_traces",
    "read_frame",
    "read_timeline",
]


class Position(NamedTuple):
    """Index of the trajectory in the source, step, and environment (batch index)."""

    trajectory: int = 0
    step: int = 0
    env: int = 0


@final
class Navigator:
    """Moves a position over the trajectories of a source. Each move returns whether the position changed."""

    def __init__(self, source: TrajectorySource, position: Position | None = None) -> None:
        """Start at `position`, or at the first step of the first trajectory."""
        self._source = source
        self.position = Position()
        if position is not None:
            self._go(position.trajectory, position.step, position.env)

    def next(self) -> bool:
        """Go to the next step; from the last step, to the first step of the next trajectory."""
        index, step, env = self.position
        if step + 1 < self._source.open(index).steps:
            return self._go(index, step + 1, env)
        return self.next_trajectory()

    def previous(self) -> bool:
        """Go to the previous step; from the first step, to the last step of the previous trajectory."""
        index, step, env = self.position
        if step > 0:
            return self._go(index, step - 1, env)
        return index > 0 and self._go(index - 1, self._source.open(index - 1).steps - 1, env)

    def next_trajectory(self) -> bool:
        """Go to the first step of the next trajectory."""
        index = self.position.trajectory + 1
        return index < len(self._source.ids) and self._go(index, 0, self.position.env)

    def previous_trajectory(self) -> bool:
        """Go to the first step of the previous trajectory."""
        return self.position.trajectory > 0 and self._go(self.position.trajectory - 1, 0, self.position.env)

    def next_env(self) -> bool:
        """Go to the next environment of the batch, at the same step."""
        return self._go(self.position.trajectory, self.position.step, self.position.env + 1)

    def previous_env(self) -> bool:
        """Go to the previous environment of the batch, at the same step."""
        return self._go(self.position.trajectory, self.position.step, self.position.env - 1)

    def first(self) -> bool:
        """Go to the first step of the trajectory."""
        return self._go(self.position.trajectory, 0, self.position.env)

    def last(self) -> bool:
        """Go to the last step of the trajectory."""
        return self._go(
            self.position.trajectory, self._source.open(self.position.trajectory).steps - 1, self.position.env
        )

    def jump(self, trajectory_id: int) -> bool:
        """Go to the first step of the trajectory with an id. Returns False if there is no such trajectory."""
        index = self._source.find(trajectory_id)
        if index is None:
            return False
        self._go(index, 0, self.position.env)
        return True

    def _go(self, index: int, step: int, env: int) -> bool:
        """Move to a position, clipped to the trajectories, steps and environments that exist."""
        index = min(max(index, 0), len(self._source.ids) - 1)
        trajectory = self._source.open(index)
        position = Position(index, min(max(step, 0), trajectory.steps - 1), min(max(env, 0), trajectory.envs - 1))
        moved, self.position = position != self.position, position
        return moved


ALL_CAMERAS = "*"
"""Value of `camera` that selects all cameras."""
_DEFAULT_CAMERA = "main_images"
_MAX_TRACES = 12
_MAX_NUMBERS = 8
_MAX_POINTS = 2_000


@dataclass(frozen=True, slots=True)
class Picture:
    """One image and the name of its camera."""

    camera: str
    pixels: np.ndarray
    """uint8 `[H, W, 3]`."""


@dataclass(frozen=True, slots=True)
class Traces:
    """A vector over the steps of a trajectory, one line per component, thinned for long trajectories."""

    name: str
    steps: np.ndarray
    """int64 `[N]`: all `T` steps if there are at most 2,000; otherwise two points per bin of steps."""
    values: np.ndarray
    """float32 `[N, D]` with at most 12 components; for a bin, its minimum and maximum."""
    components: int
    """Number of components of the vector."""


@dataclass(frozen=True, slots=True)
class ObservationView:
    """One observation: images, or traces if it has no images, or a note if it has neither."""

    title: str
    pictures: tuple[Picture, ...] = ()
    traces: tuple[Traces, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rewards, ends and actions of one environment over a whole trajectory."""

    reward: Traces | None
    ends: np.ndarray
    """Steps at which an end flag is set, int64; thinned to what a figure can show."""
    action: Traces | None


@dataclass(frozen=True, slots=True)
class Frame:
    """One transition, ready to be displayed."""

    title: str
    """For example `trajectory 7 (3 of 10)`."""
    step: int
    steps: int
    env: int
    envs: int
    facts: tuple[tuple[str, str], ...]
    """Names and values: step, batch, action, reward, done, and further fields of the source."""
    current: ObservationView
    following: ObservationView
    timeline: Timeline | None
    problem: str = ""
    """Reason why the transition cannot be read; empty if it can be read."""


def read_frame(source: TrajectorySource, position: Position, camera: str | None = None) -> Frame:
    """Read the transition at a position. For a damaged file the frame describes the problem.

    Args:
        source: The trajectories.
        position: The transition to read.
        camera: Name of the observation to show. None: `main_images` if present, otherwise the first observation with
            images, otherwise the vectors. `ALL_CAMERAS`: all images.
    """
    trajectory = source.open(position.trajectory)
    title = f"{trajectory.name} ({position.trajectory + 1} of {len(source.ids)})"
    try:
        if trajectory.problem:
            return _broken(title, trajectory.problem)
        titles = trajectory.roles.titles
        current = _observation(titles[0], trajectory, trajectory.roles.current, position, camera)
        if current.pictures and not trajectory.roles.following:
            following = _vectors("vectors", trajectory, trajectory.roles.current, position)
        else:
            following = _observation(titles[1], trajectory, trajectory.roles.following, position, camera)
        observations = (current, following)
        timeline = read_timeline(trajectory, position.env)
        facts = _facts(trajectory, position)
        return Frame(
            title, position.step, trajectory.steps, position.env, trajectory.envs, facts, *observations, timeline
        )
    except (OstinatoError, OSError) as error:
        if isinstance(error, OptionError):
            raise
        return _broken(title, str(error))


def _broken(title: str, problem: str) -> Frame:
    current = ObservationView("current observation", note=problem)
    following = ObservationView("next observation", note="cannot be read")
    return Frame(title, 0, 1, 0, 1, (("problem", problem),), current, following, None, problem)


def read_timeline(trajectory: OpenTrajectory, env: int) -> Timeline | None:
    """Return rewards, ends and actions over all steps of one environment; None if the trajectory is damaged."""
    roles = trajectory.roles
    if trajectory.problem:
        return None

    def read() -> Timeline:
        reward = None
        if roles.reward is not None:
            reward = make_traces("reward", _flat(trajectory.column(roles.reward, env)).sum(axis=1))
        action = None if roles.action is None else make_traces("action", trajectory.column(roles.action, env))
        return Timeline(reward, _thin_steps(ends_of(trajectory, env), trajectory.steps), action)

    return trajectory.cached(("timeline", env), read)


def ends_of(trajectory: OpenTrajectory, env: int) -> np.ndarray:
    """Return the steps of one environment at which an end flag is set, int64."""
    ended = np.zeros(trajectory.steps, dtype=bool)
    for path in trajectory.roles.ends.values():
        ended |= _flat(trajectory.column(path, env)).any(axis=1)
    return np.flatnonzero(ended)


def _thin_steps(steps: np.ndarray, count: int) -> np.ndarray:
    """Keep the first step of each bin, for at most `_MAX_POINTS` steps."""
    return steps[np.unique(steps // -(-count // _MAX_POINTS), return_index=True)[1]]


def _flat(values: np.ndarray) -> np.ndarray:
    """Return float32 `[T, D]`."""
    if values.dtype.kind == "c":
        values = np.abs(values)
    return values.reshape(len(values), -1).astype(np.float32)


def make_traces(name: str, values: np.ndarray) -> Traces:
    """Return a vector over steps, `[T, ...]`, with at most 12 components and 2,000 points."""
    flat = _flat(values)
    kept, count = flat[:, :_MAX_TRACES], len(flat)
    if count <= _MAX_POINTS:
        return Traces(name, np.arange(count), kept, flat.shape[1])
    starts = np.arange(0, count, -(-count // (_MAX_POINTS // 2)))
    bounds = np.stack([np.fmin.reduceat(kept, starts), np.fmax.reduceat(kept, starts)], axis=1)
    return Traces(name, starts.repeat(2), bounds.reshape(-1, kept.shape[1]), flat.shape[1])


def _facts(trajectory: OpenTrajectory, position: Position) -> tuple[tuple[str, str], ...]:
    roles = trajectory.roles
    facts = [("step", f"{position.step} of {trajectory.steps}"), ("batch", f"{position.env} of {trajectory.envs}")]
    for word, path in (("action", roles.action), ("reward", roles.reward)):
        if path is not None:
            facts.append((word, _numbers(trajectory.row(path, position.step, position.env))))
    if roles.ends:
        facts.append(("done", _done(trajectory, position)))
    for word, path in roles.extra.items():
        value = trajectory.row(path, position.step, position.env)
        facts.append((word, ("yes" if value.any() else "no") if value.dtype.kind == "b" else _numbers(value)))
    facts += [(word, _fact(value, trajectory.envs, position.env)) for word, value in trajectory.facts]
    return tuple(facts)


def _done(trajectory: OpenTrajectory, position: Position) -> str:
    ends = trajectory.roles.ends.items()
    flags = [word for word, path in ends if trajectory.row(path, position.step, position.env).any()]
    more = [word for word in flags if word != "done"]
    return ("yes" if flags else "no") + (f" ({', '.join(more)})" if more else "")


def _fact(value: Any, envs: int, env: int) -> str:
    text = value[env] if isinstance(value, list) and len(value) == envs else value
    return str(text)[:200]


def _numbers(value: np.ndarray) -> str:
    flat = value.reshape(-1)
    shown = [str(item) if flat.dtype.kind in "biu" else _short(item) for item in flat[:_MAX_NUMBERS].tolist()]
    more = f", ... ({flat.size} in all)" if flat.size > _MAX_NUMBERS else ""
    return shown[0] if flat.size == 1 else f"[{', '.join(shown)}{more}]"


def _short(value: complex) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.7g}"


def _observation(
    title: str, trajectory: OpenTrajectory, named: Mapping[str, TreePath], position: Position, camera: str | None
) -> ObservationView:
    if not named:
        return ObservationView(title, note="not stored")
    pictures = {name: path for name, path in named.items() if is_picture(trajectory.shapes[path])}
    selected = _selected(pictures, named, camera)
    if selected is None:
        there = ", ".join(named)
        return ObservationView(title, note=f"no observation {camera}; available: {there}")
    shown = [
        Picture(name if len(views) == 1 else f"{name} [{number}]", view)
        for name in selected
        if name in pictures
        for views in (picture_of(trajectory.row(pictures[name], position.step, position.env)),)
        for number, view in enumerate(views)
    ]
    if shown:
        return ObservationView(title, tuple(shown))

    vectors = {name: path for name, path in named.items() if name in selected and name not in pictures}
    return _vectors(title, trajectory, vectors, position)


def _vectors(
    title: str, trajectory: OpenTrajectory, named: Mapping[str, TreePath], position: Position
) -> ObservationView:
    """Return the observations that are no pictures, over all steps."""
    vectors = {name: path for name, path in named.items() if not is_picture(trajectory.shapes[path])}
    if not vectors:
        return ObservationView("next observation", note="not stored")

    def read(name: str, path: TreePath) -> Traces:
        return make_traces(name, trajectory.column(path, position.env))

    found = [trajectory.cached((p, position.env), partial(read, name, p)) for name, p in vectors.items()]
    return ObservationView(title, traces=tuple(found))


def _selected(pictures: Mapping[str, Any], named: Mapping[str, Any], camera: str | None) -> list[str] | None:
    """Return the names of the observations to show; None if `camera` names none."""
    if camera == ALL_CAMERAS:
        return list(pictures or named)
    if camera is not None:
        return [camera] if camera in named else None
    if pictures:
        return [_DEFAULT_CAMERA if _DEFAULT_CAMERA in pictures else next(iter(pictures))]
    return list(named)
