"""A trajectory as `.rrd` file for the Rerun viewer: pictures, reward, action, flags and states over its steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato._optional import require
from ostinato.durable.files import new_token
from ostinato.errors import DamagedFileError, OptionError
from ostinato.viz.moment import ALL_CAMERAS, ends_of, moment
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
        DamagedFileError: The trajectory cannot be read; a file that was there stays as it was.
    """
    target = Path(path)
    if target.suffix != ".rrd" or not target.absolute().parent.is_dir():
        msg = f"a recording needs a path that ends in .rrd, in a directory that exists, got {target}"
        raise OptionError(msg)
    rerun = require("rerun", "rerun")
    reel = reels.open(index)
    if reel.problem:
        raise DamagedFileError(reel.problem)
    stream = rerun.RecordingStream("ostinato")
    unfinished = target.with_name(f"{target.name}.{new_token()}.tmp")
    try:
        stream.save(unfinished)
        stream.send_recording_name(f"{reels.title}: {reel.name}")
        for env in range(reel.envs):
            _write(rerun, stream, reels, Spot(index, 0, env), camera or ALL_CAMERAS)
        stream.flush()
        stream.disconnect()
        unfinished.replace(target)
    except BaseException:
        stream.disconnect()
        unfinished.unlink(missing_ok=True)
        raise
    return target


def _write(rerun: Any, stream: Any, reels: Reels, spot: Spot, camera: str) -> None:
    """Write one environment."""
    reel = reels.open(spot.reel)
    root = f"batch_{spot.env}" if reel.envs > 1 else ""
    _series(rerun, stream, root, reels, spot)
    for step in range(reel.steps):
        stream.set_time(_TIMELINE, sequence=step)
        seen = moment(reels, spot._replace(step=step), camera)
        if seen.problem:
            raise DamagedFileError(seen.problem)
        for name, side in (("current", seen.current), ("next", seen.following)):
            for shown in side.pictures:
                stream.log(_path(root, name, shown.camera), rerun.Image(shown.pixels))
        facts = "\n".join(f"{word}: {value}" for word, value in seen.facts)
        stream.log(_path(root, "facts"), rerun.TextDocument(facts))


def _path(*parts: str) -> str:
    return "/".join(part.replace(" ", "_") for part in parts if part)


def _series(rerun: Any, stream: Any, root: str, reels: Reels, spot: Spot) -> None:
    """Write rewards, ends, actions and states, each as one column over all steps."""
    reel = reels.open(spot.reel)
    columns, roles = reel.columns, reel.roles
    if columns is None:
        return
    done = np.zeros((reel.steps, 1))
    done[ends_of(reel, spot.env)] = 1
    lines = {"done": done}
    for name, path in (("reward", roles.reward), ("action", roles.action)):
        if path is not None:
            lines[name] = columns.column(path, spot.env).reshape(reel.steps, -1)
    for side, named in (("current", roles.current), ("next", roles.following)):
        for name, path in named.items():
            shape = tuple(columns.shapes[path])
            if len(shape) <= 1 and math.prod(shape) <= 64:
                lines[f"{side}/{name}"] = columns.column(path, spot.env).reshape(reel.steps, -1)
    times = [rerun.TimeColumn(_TIMELINE, sequence=range(reel.steps))]
    for name, values in lines.items():
        numbers = values.astype(np.float64)
        columns_of = rerun.Scalars.columns(scalars=numbers.reshape(-1))
        stream.send_columns(_path(root, name), times, columns_of.partition([numbers.shape[1]] * reel.steps))
