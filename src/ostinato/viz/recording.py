"""A trajectory as `.rrd` file for the Rerun viewer: pictures, reward, action, flags and states over its steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato._optional import require
from ostinato.errors import DamagedFileError, OptionError
from ostinato.viz.moment import ALL_CAMERAS, moment, strip_of
from ostinato.viz.walk import Spot

if TYPE_CHECKING:
    import os

    from ostinato.viz.reel import Reels

__all__ = ["export"]

_TIMELINE = "step"


def export(reels: Reels, index: int, path: str | os.PathLike[str], *, camera: str | None = None) -> Path:
    """Write one trajectory, all environments of its batch, as a recording.

    Args:
        reels: The trajectories.
        index: Position of the trajectory in `reels.ids`.
        path: The file, replaced if it is there; it must end in `.rrd`.
        camera: Name of the observation to write; None: all cameras.

    Returns:
        The path.

    Raises:
        MissingExtraError: The extra `rerun` is not installed.
        OptionError: The path does not end in `.rrd`, or its directory is missing.
        DamagedFileError: The trajectory cannot be read.
    """
    target = Path(path)
    if target.suffix != ".rrd" or not target.absolute().parent.is_dir():
        msg = f"a recording needs a path that ends in .rrd, in a directory that exists, got {target}"
        raise OptionError(msg)
    rerun = require("rerun", "rerun")
    reel = reels.open(index)
    if reel.problem:
        raise DamagedFileError(reel.problem)
    stream = rerun.RecordingStream("ostinato", recording_id=f"{Path(reels.title).name} {reel.name}")
    stream.save(target)
    for env in range(reel.envs):
        root = f"batch_{env}" if reel.envs > 1 else ""
        _series(rerun, stream, root, reels, Spot(index, 0, env))
        for step in range(reel.steps):
            stream.set_time(_TIMELINE, sequence=step)
            seen = moment(reels, Spot(index, step, env), camera or ALL_CAMERAS)
            if seen.problem:
                raise DamagedFileError(seen.problem)
            for name, side in (("current", seen.current), ("next", seen.following)):
                for shown in side.pictures:
                    stream.log(_path(root, name, shown.camera), rerun.Image(shown.pixels))
            facts = "\n".join(f"{word}: {value}" for word, value in seen.facts)
            stream.log(_path(root, "facts"), rerun.TextDocument(facts))
    stream.flush()
    stream.disconnect()
    return target


def _path(*parts: str) -> str:
    return "/".join(part.replace(" ", "_") for part in parts if part)


def _series(rerun: Any, stream: Any, root: str, reels: Reels, spot: Spot) -> None:
    """Write rewards, ends, actions and states, each as one column over all steps."""
    reel = reels.open(spot.reel)
    strip = strip_of(reel, spot.env)
    if strip is None:
        return
    lines: dict[str, np.ndarray] = {} if strip.reward is None else {"reward": strip.reward[:, None]}
    done = np.zeros(reel.steps, dtype=np.float32)
    done[strip.ends] = 1
    lines["done"] = done[:, None]
    if strip.action is not None:
        lines["action"] = strip.action.values
    columns = reel.columns
    for side, named in (("current", reel.roles.current), ("next", reel.roles.following)):
        for name, path in named.items():
            shape = () if columns is None else tuple(columns.shapes[path])
            if columns is not None and len(shape) <= 1 and math.prod(shape) <= 64:
                lines[f"{side}/{name}"] = columns.column(path, spot.env).reshape(reel.steps, -1)
    times = [rerun.TimeColumn(_TIMELINE, sequence=range(reel.steps))]
    for name, values in lines.items():
        numbers = values.astype(np.float64)
        columns_of = rerun.Scalars.columns(scalars=numbers.reshape(-1))
        stream.send_columns(_path(root, name), times, columns_of.partition([numbers.shape[1]] * reel.steps))
