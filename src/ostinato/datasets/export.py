"""Writes datasets in the formats of other tools: LeRobot, Minari, and HDF5 as robomimic and D4RL have it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ostinato.core.kinds import show_path
from ostinato.datasets.hdf5_writer import (
    HdfOptions,
    plan_d4rl,
    plan_robomimic,
    write_d4rl,
    write_robomimic,
)
from ostinato.datasets.lerobot_writer import LeRobotOptions, check_lerobot_options, plan_lerobot, write_lerobot
from ostinato.datasets.minari_writer import plan_minari, write_minari
from ostinato.datasets.transitions import with_nested_names
from ostinato.durable.files import fsync_dir, new_directory, new_file, sync_file
from ostinato.durable.progress import Progress
from ostinato.errors import CheckpointError, KeyMissingError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.dataset import DatasetStorage
    from ostinato.durable.progress import ProgressOption

__all__ = ["ExportOptions", "ExportReport", "write_dataset"]


class ExportOptions(TypedDict, total=False):
    """Options of `export` that belong to some formats."""

    fps: float
    """LeRobot: rows per second; by default that of the source, where its format knows."""
    task: str | Sequence[str]
    """LeRobot: the task of all episodes, or a list with one for each; by default the field of text `task`, or ""."""
    task_key: str | tuple[str, ...]
    """LeRobot: another field of text that holds the task of each row."""
    images: str
    """LeRobot: "video" (default) writes images to MP4, "png" writes them without loss to the tables."""
    codec: str
    """LeRobot: "h264" (default), "av1", or "lossless", which is H.264 in RGB and bit-exact."""
    keyframe_interval: int
    """LeRobot: largest distance of keyframes, in frames; 2 by default. Random reads decode at most so many frames."""
    data_file_mb: float
    """LeRobot: a table is ended by the episode that would exceed this; 100 by default."""
    video_file_mb: float
    """LeRobot: a video is ended by the episode that exceeds this; 200 by default."""
    robot_type: str
    """LeRobot: name of the robot in `info.json`."""
    dataset_id: str
    """Minari: name of the dataset, `name-v0` or `namespace/name-v0`; "ostinato/export-v0" by default."""
    layout: str
    """HDF5: "robomimic" (default), a group for each episode, or "d4rl", one array for each field."""
    env_args: dict[str, Any]
    """HDF5 of robomimic: how it makes the environment; stored as JSON."""
    compression: str
    """HDF5: "none" (default), "gzip" or "lzf"."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export."""

    path: str
    """The new folder or file."""
    format: str
    """Name of the format."""
    episodes: int
    """Number of episodes."""
    rows: int
    """Number of rows."""
    nbytes: int
    """Bytes of all files."""


def write_dataset(
    dataset: DatasetStorage,
    path: str | Path,
    format: str,  # noqa: A002 (the name in the public call)
    options: ExportOptions,
    *,
    overwrite: bool = False,
    progress: ProgressOption = None,
) -> ExportReport:
    """Write a dataset; see `ostinato.export`.

    Args:
        dataset: the rows.
        path: the new folder or file.
        format: "lerobot", "minari" or "hdf5".
        options: those of the format.
        overwrite: replace what is at the path.
        progress: see `Progress`.
    """
    target = Path(path).expanduser().absolute()
    if format not in _FORMATS:
        msg = f"format must be one of {', '.join(_FORMATS)}, got {format!r}"
        raise OptionError(msg)
    known, prepare, is_file = _FORMATS[format]
    wrong = [name for name in options if name not in known]
    if wrong:
        msg = f"{wrong[0]} is no option of format={format!r}: it has {', '.join(known)}"
        raise OptionError(msg)
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        msg = f"{target} exists: choose another path, or give overwrite=True to replace it"
        raise CheckpointError(msg)
    if is_file and target.is_dir():
        msg = f"{target} is a folder, and {format} is one file: give the path of the file"
        raise CheckpointError(msg)
    write = prepare(dataset, options)
    rows, episodes = len(dataset), int(dataset.episode_lengths.shape[0])
    new_path = new_file if is_file else new_directory
    with (
        Progress(progress, f"export {format}", rows, unit="rows") as bar,
        new_path(target, overwrite=overwrite) as place,
    ):
        write(place, bar)
        nbytes = _sync(place)
        bar.finish()
    return ExportReport(str(target), format, episodes, rows, nbytes)


def _sync(place: Path) -> int:
    """Wait until all files are on the disk; return their bytes."""
    nbytes = 0
    for path in [*sorted(place.rglob("*")), *([place] if place.is_file() else [])]:
        if path.is_dir():
            fsync_dir(path)
        else:
            sync_file(path)
            nbytes += path.stat().st_size
    return nbytes


# -- LeRobot -----------------------------------------------------------------------------------------------------------


def _prepare_lerobot(dataset: DatasetStorage, given: ExportOptions) -> Callable[[Path, Progress], None]:
    fps: Any = given.get("fps", dataset.fps)
    if fps is None:
        msg = f"LeRobot needs the frame rate, which the source ({dataset.format}) does not know: give fps="
        raise OptionError(msg)
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        msg = f"fps must be a positive number of rows per second, got {fps!r}"
        raise OptionError(msg)
    options = LeRobotOptions(
        float(fps),
        *_tasks(dataset, given),
        given.get("images", "video"),
        given.get("codec", "h264"),
        given.get("keyframe_interval", 2),
        given.get("data_file_mb", 100),
        given.get("video_file_mb", 200),
        given.get("robot_type"),
    )
    check_lerobot_options(options)
    for name in ("codec", "keyframe_interval", "video_file_mb"):
        if name in given and options.images == "png":
            msg = f"{name} is for images='video', and images='png' writes no video: leave it out"
            raise OptionError(msg)
    features = plan_lerobot(dataset, options)
    return lambda place, bar: write_lerobot(dataset, features, options, place, bar)


def _tasks(dataset: DatasetStorage, given: ExportOptions) -> tuple[Sequence[str], FieldPath | None]:
    """Return the task of each episode, or else the field that holds it."""
    texts = [leaf.path for leaf in dataset.schema.objects]
    episodes = int(dataset.episode_lengths.shape[0])
    if "task_key" in given:
        key = given["task_key"]
        path: FieldPath = (key,) if isinstance(key, str) else tuple(key)
        if "task" in given or path not in texts:
            why = "task and task_key exclude each other" if "task" in given else f"rows have no text {show_path(path)}"
            msg = f"{why}: fields of text are {', '.join(map(show_path, texts)) or 'none'}"
            raise (OptionError if "task" in given else KeyMissingError)(msg)
        return (), path
    task: Any = given.get("task")
    if task is None:
        return ((), ("task",)) if ("task",) in texts else ([""] * episodes, None)
    if isinstance(task, str):
        return [task] * episodes, None
    if not isinstance(task, Sequence) or len(task) != episodes or not all(isinstance(one, str) for one in task):
        msg = f"task must be a text, or a list of {episodes} texts, one for each episode, got {str(task)[:200]}"
        raise OptionError(msg)
    return list(task), None


# -- Minari and HDF5 ---------------------------------------------------------------------------------------------------


def _prepare_minari(dataset: DatasetStorage, given: ExportOptions) -> Callable[[Path, Progress], None]:
    name = given.get("dataset_id", "ostinato/export-v0")
    dataset = with_nested_names(dataset, infos=True)
    plan = plan_minari(dataset, name)
    return lambda place, bar: write_minari(dataset, plan, name, place, bar)


def _prepare_hdf5(dataset: DatasetStorage, given: ExportOptions) -> Callable[[Path, Progress], None]:
    for name, known in (("layout", ("robomimic", "d4rl")), ("compression", ("none", "gzip", "lzf"))):
        if given.get(name, known[0]) not in known:
            msg = f"{name} must be one of {', '.join(known)}, got {given.get(name)!r}"
            raise OptionError(msg)
    compression: Any = given.get("compression", "none")
    dataset = with_nested_names(dataset, infos=False)
    options = HdfOptions(None if compression == "none" else compression, given.get("env_args"))
    if given.get("layout") == "d4rl":
        if options.env_args is not None:
            msg = "env_args is for layout='robomimic', D4RL has no place for it: leave it out"
            raise OptionError(msg)
        arrays = plan_d4rl(dataset)
        return lambda place, bar: write_d4rl(dataset, arrays, options, place, bar)
    fields = plan_robomimic(dataset, options)
    return lambda place, bar: write_robomimic(dataset, fields, options, place, bar)


class _Format(NamedTuple):
    options: tuple[str, ...]
    prepare: Callable[[DatasetStorage, ExportOptions], Callable[[Path, Progress], None]]
    """Make all checks; return what writes to the new path."""
    is_file: bool


_LEROBOT = ("fps", "task", "task_key", "images", "codec", "keyframe_interval", "data_file_mb", "video_file_mb")
_FORMATS = {
    "lerobot": _Format((*_LEROBOT, "robot_type"), _prepare_lerobot, is_file=False),
    "minari": _Format(("dataset_id",), _prepare_minari, is_file=False),
    "hdf5": _Format(("layout", "env_args", "compression"), _prepare_hdf5, is_file=True),
}
