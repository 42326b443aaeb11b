"""Export of a trajectory as an `.rrd` file for the Rerun viewer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato._optional import require
from ostinato.durable.files import new_token
from ostinato.errors import DamagedFileError
from ostinato.viz.figures import output_path
from ostinato.viz.frames import ALL_CAMERAS, Position, ends_of, read_frame

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from ostinato.viz.sources import TrajectorySource

__all__ = ["export"]

_TIMELINE = "step"


def export(source: TrajectorySource, index: int, path: str | os.PathLike[str], *, camera: str | None = None) -> Path:
    """Write one trajectory with all environments of its batch: images, reward, action, flags and states by step.

    Args:
        source: The trajectories.
        index: Index of the trajectory in `source.ids`.
        path: The file, which is replaced if it exists; must end in `.rrd`.
        camera: Name of the observation to write; None: all cameras.

    Returns:
        The path.

    Raises:
        MissingExtraError: The extra `rerun` is not installed.
        OptionError: The path does not end in `.rrd`, or its directory does not exist.
        DamagedFileError: The trajectory cannot be read; an existing file is unchanged.
    """
    target = output_path(path, ".rrd")
    rerun = require("rerun", "rerun")
    trajectory = source.open(index)
    if trajectory.problem:
        raise DamagedFileError(trajectory.problem)
    stream = rerun.RecordingStream("ostinato")
    unfinished = target.with_name(f"{target.name}.{new_token()}.tmp")
    try:
        stream.save(unfinished)
        stream.send_recording_name(f"{source.title}: {trajectory.name}")
        for env in range(trajectory.envs):
            _write(rerun, stream, source, Position(index, 0, env), camera or ALL_CAMERAS)
        stream.flush()
        stream.disconnect()
        unfinished.replace(target)
    except BaseException:
        stream.disconnect()
        unfinished.unlink(missing_ok=True)
        raise
    return target


def _write(rerun: Any, stream: Any, source: TrajectorySource, position: Position, camera: str) -> None:
    """Write one environment."""
    trajectory = source.open(position.trajectory)
    root = f"batch_{position.env}" if trajectory.envs > 1 else ""
    _series(rerun, stream, root, source, position)
    for step in range(trajectory.steps):
        stream.set_time(_TIMELINE, sequence=step)
        seen = read_frame(source, position._replace(step=step), camera)
        if seen.problem:
            raise DamagedFileError(seen.problem)
        for name, view in (("current", seen.current), ("next", seen.following)):
            for picture in view.pictures:
                stream.log(_path(root, name, picture.camera), rerun.Image(picture.pixels))
        facts = "\n".join(f"{word}: {value}" for word, value in seen.facts)
        stream.log(_path(root, "facts"), rerun.TextDocument(facts))


def _path(*parts: str) -> str:
    return "/".join(part.replace(" ", "_") for part in parts if part)


def _series(rerun: Any, stream: Any, root: str, source: TrajectorySource, position: Position) -> None:
    """Write rewards, ends, actions and states, each as one column over all steps."""
    trajectory = source.open(position.trajectory)
    roles = trajectory.roles
    done = np.zeros((trajectory.steps, 1))
    done[ends_of(trajectory, position.env)] = 1
    lines = {"done": done}
    for name, path in (("reward", roles.reward), ("action", roles.action)):
        if path is not None:
            lines[name] = trajectory.column(path, position.env).reshape(trajectory.steps, -1)
    for when, named in (("current", roles.current), ("next", roles.following)):
        for name, path in named.items():
            shape = trajectory.shapes[path]
            if len(shape) <= 1 and math.prod(shape) <= 64:
                lines[f"{when}/{name}"] = trajectory.column(path, position.env).reshape(trajectory.steps, -1)
    times = [rerun.TimeColumn(_TIMELINE, sequence=range(trajectory.steps))]
    for name, values in lines.items():
        numbers = values.astype(np.float64)
        columns_of = rerun.Scalars.columns(scalars=numbers.reshape(-1))
        stream.send_columns(_path(root, name), times, columns_of.partition([numbers.shape[1]] * trajectory.steps))
