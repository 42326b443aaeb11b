"""What one step of a trajectory shows, as plain data: two observations, facts, and a strip over all steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.errors import OptionError, OstinatoError
from ostinato.viz.reel import Reel, is_picture, picture_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.durable.trees import TreePath
    from ostinato.viz.reel import Columns, Reels
    from ostinato.viz.walk import Spot

__all__ = ["ALL_CAMERAS", "Moment", "Shown", "Side", "Strip", "Traces", "ends_of", "moment", "strip_of"]

ALL_CAMERAS = "*"
"""As camera: every camera there is."""
_USUAL_CAMERA = "main_images"
_MOST_TRACES = 12
_MOST_NUMBERS = 8
_MOST_POINTS = 2_000


@dataclass(frozen=True, slots=True)
class Shown:
    """One picture."""

    camera: str
    pixels: np.ndarray
    """uint8 `[H, W, 3]`."""


@dataclass(frozen=True, slots=True)
class Traces:
    """A vector over all steps of a trajectory, one line a component. Of many steps, what a picture can tell apart."""

    name: str
    steps: np.ndarray
    """int64 `[N]`: all `T` steps up to 2,000 of them, else two points for each stretch."""
    values: np.ndarray
    """float32 `[N, D]`, at most 12 components; of a stretch the least and the greatest value."""
    components: int
    """Components there are."""


@dataclass(frozen=True, slots=True)
class Side:
    """One observation: pictures, or lines where there are none, or a note where there is neither."""

    title: str
    pictures: tuple[Shown, ...] = ()
    traces: tuple[Traces, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Strip:
    """What happens over a whole trajectory of one environment."""

    reward: Traces | None
    ends: np.ndarray
    """Steps at which a flag is set, int64; of very many, as many as a picture can tell apart."""
    action: Traces | None


@dataclass(frozen=True, slots=True)
class Moment:
    """One transition, to be drawn by any screen."""

    title: str
    """Such as `trajectory 7 (3 of 10)`."""
    step: int
    steps: int
    env: int
    envs: int
    facts: tuple[tuple[str, str], ...]
    """Step, batch, action, reward, done, and what else is known, in words."""
    current: Side
    following: Side
    strip: Strip | None
    problem: str = ""
    """Why it cannot be shown; empty where it can."""


def moment(reels: Reels, spot: Spot, camera: str | None = None) -> Moment:
    """Work out what to show at a place; broken files become a moment that says so.

    Args:
        reels: The trajectories.
        spot: Where.
        camera: Name of the observation to look at; None: `main_images`, else the first that holds pictures, else the
            vectors. `ALL_CAMERAS`: all of them.
    """
    reel = reels.open(spot.reel)
    title = f"{reel.name} ({spot.reel + 1} of {len(reels.ids)})"
    try:
        if reel.columns is None:
            return _broken(title, reel.problem)
        sides = (
            _side("current observation", reel, reel.roles.current, spot, camera),
            _side("next observation", reel, reel.roles.following, spot, camera),
        )
        strip = strip_of(reel, spot.env)
        facts = _facts(reel, reel.columns, spot)
        return Moment(title, spot.step, reel.steps, spot.env, reel.envs, facts, *sides, strip)
    except (OstinatoError, OSError) as error:
        if isinstance(error, OptionError):
            raise
        return _broken(title, str(error))


def _broken(title: str, problem: str) -> Moment:
    sides = (Side("current observation", note=problem), Side("next observation", note="cannot be read"))
    return Moment(title, 0, 1, 0, 1, (("problem", problem),), *sides, None, problem)


def strip_of(reel: Reel, env: int) -> Strip | None:
    """Return rewards, ends and actions over all steps of one environment; None for a broken trajectory."""
    columns, roles = reel.columns, reel.roles
    if columns is None:
        return None

    def read() -> Strip:
        reward = None
        if roles.reward is not None:
            reward = _traces("reward", _flat(columns.column(roles.reward, env)).sum(axis=1))
        action = None if roles.action is None else _traces("action", columns.column(roles.action, env))
        return Strip(reward, _apart(ends_of(reel, env), reel.steps), action)

    return reel.once(("strip", env), read)


def ends_of(reel: Reel, env: int) -> np.ndarray:
    """Return the steps of one environment at which a flag is set, int64."""
    ended = np.zeros(reel.steps, dtype=bool)
    if reel.columns is not None:
        for path in reel.roles.ends.values():
            ended |= _flat(reel.columns.column(path, env)).any(axis=1)
    return np.flatnonzero(ended)


def _apart(steps: np.ndarray, count: int) -> np.ndarray:
    """Return the first step in each stretch of a picture's width."""
    return steps[np.unique(steps // -(-count // _MOST_POINTS), return_index=True)[1]]


def _flat(values: np.ndarray) -> np.ndarray:
    """Return float32 `[T, D]`."""
    if values.dtype.kind == "c":
        values = np.abs(values)
    return values.reshape(len(values), -1).astype(np.float32)


def _traces(name: str, values: np.ndarray) -> Traces:
    flat = _flat(values)
    kept, count = flat[:, :_MOST_TRACES], len(flat)
    if count <= _MOST_POINTS:
        return Traces(name, np.arange(count), kept, flat.shape[1])
    starts = np.arange(0, count, -(-count // (_MOST_POINTS // 2)))
    bounds = np.stack([np.fmin.reduceat(kept, starts), np.fmax.reduceat(kept, starts)], axis=1)
    return Traces(name, starts.repeat(2), bounds.reshape(-1, kept.shape[1]), flat.shape[1])


def _facts(reel: Reel, columns: Columns, spot: Spot) -> tuple[tuple[str, str], ...]:
    roles = reel.roles
    facts = [("step", f"{spot.step} of {reel.steps}"), ("batch", f"{spot.env} of {reel.envs}")]
    for word, path in (("action", roles.action), ("reward", roles.reward)):
        if path is not None:
            facts.append((word, _numbers(columns.row(path, spot.step, spot.env))))
    if roles.ends:
        facts.append(("done", _done(columns, roles.ends, spot)))
    for word, path in roles.extra.items():
        value = columns.row(path, spot.step, spot.env)
        facts.append((word, ("yes" if value.any() else "no") if value.dtype.kind == "b" else _numbers(value)))
    facts += [(word, _worded(value, reel.envs, spot.env)) for word, value in reel.words]
    return tuple(facts)


def _done(columns: Columns, ends: Mapping[str, TreePath], spot: Spot) -> str:
    said = [word for word, path in ends.items() if columns.row(path, spot.step, spot.env).any()]
    more = [word for word in said if word != "done"]
    return ("yes" if said else "no") + (f" ({', '.join(more)})" if more else "")


def _worded(value: Any, envs: int, env: int) -> str:
    text = value[env] if isinstance(value, list) and len(value) == envs else value
    return str(text)[:200]


def _numbers(value: np.ndarray) -> str:
    flat = value.reshape(-1)
    shown = [str(item) if flat.dtype.kind in "biu" else _short(item) for item in flat[:_MOST_NUMBERS].tolist()]
    more = f", ... ({flat.size} in all)" if flat.size > _MOST_NUMBERS else ""
    return shown[0] if flat.size == 1 else f"[{', '.join(shown)}{more}]"


def _short(value: complex) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.7g}"


def _side(title: str, reel: Reel, named: Mapping[str, TreePath], spot: Spot, camera: str | None) -> Side:
    columns = reel.columns
    if columns is None or not named:
        return Side(title, note="not stored")
    pictures = {name: path for name, path in named.items() if is_picture(tuple(columns.shapes[path]))}
    wanted = _wanted(pictures, named, camera)
    if wanted is None:
        there = ", ".join(named)
        return Side(title, note=f"no {camera} here: there are {there}")
    shown = [
        Shown(name if len(views) == 1 else f"{name} [{number}]", view)
        for name in wanted
        if name in pictures
        for views in (picture_of(columns.row(pictures[name], spot.step, spot.env)),)
        for number, view in enumerate(views)
    ]
    if shown:
        return Side(title, tuple(shown))

    def read(name: str) -> Traces:
        return _traces(name, columns.column(named[name], spot.env))

    vectors = [name for name in wanted if name not in pictures]
    found = [reel.once((named[name], spot.env), partial(read, name)) for name in vectors]
    return Side(title, traces=tuple(found))


def _wanted(pictures: Mapping[str, Any], named: Mapping[str, Any], camera: str | None) -> list[str] | None:
    """Return the observations to show; None where there is none of that name."""
    if camera == ALL_CAMERAS:
        return list(pictures or named)
    if camera is not None:
        return [camera] if camera in named else None
    if pictures:
        return [_USUAL_CAMERA if _USUAL_CAMERA in pictures else next(iter(pictures))]
    return list(named)
