"""Writes datasets in the formats of other tools: LeRobot, Minari, and HDF5 as robomimic and D4RL have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ostinato.datasets.open import formats
from ostinato.durable.files import fsync_dir, new_directory, new_file, sync_file
from ostinato.durable.progress import Progress
from ostinato.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.datasets.dataset import DatasetStorage
    from ostinato.durable.progress import ProgressOption


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
    writings = {kind.write.name: kind.write for kind in formats() if kind.write is not None}
    if format not in writings:
        msg = f"format must be one of {', '.join(writings)}, got {format!r}"
        raise OptionError(msg)
    writing = writings[format]
    wrong = [name for name in options if name not in writing.options]
    if wrong:
        msg = f"{wrong[0]} is no option of format={format!r}: it has {', '.join(writing.options) or 'none'}"
        raise OptionError(msg)
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        msg = f"{target} exists: choose another path, or give overwrite=True to replace it"
        raise CheckpointError(msg)
    if writing.is_file and target.is_dir():
        msg = f"{target} is a folder, and {format} is one file: give the path of the file"
        raise CheckpointError(msg)
    write = writing.prepare(dataset, options)
    rows, episodes = len(dataset), int(dataset.episode_lengths.shape[0])
    new_path = new_file if writing.is_file else new_directory
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
