"""LeRobot datasets, versions 2.0, 2.1 and 3: tables in Parquet files and cameras in videos, read as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.datasets.checks import FirstFault
from ostinato.datasets.columns import DenseColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.decoded import HeapRows
from ostinato.datasets.format import Format
from ostinato.datasets.lerobot_checks import examine_lerobot
from ostinato.datasets.lerobot_metadata import INFO, Metadata
from ostinato.datasets.lerobot_writer import NUMBERS, WRITE
from ostinato.datasets.parquet import EpisodeFiles, NumberField, PictureColumn, TextBlocks
from ostinato.datasets.stored import last_rows
from ostinato.datasets.video import VideoColumn
from ostinato.errors import DamagedFileError, KindError, MissingFileError, SchemaError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.format import Reading
    from ostinato.datasets.lerobot_metadata import Episodes, Videos

_NUMBERS = {name: getattr(torch, name) for name in NUMBERS}
_SMALL_SHARE = 16
"""Timestamps and tasks of at most this part of the budget are kept as tensors, since every batch reads them."""


def recognizes_lerobot(path: Path) -> bool:
    """Return whether a path is a LeRobot dataset: its folder, its folder `meta`, or `meta/info.json`."""
    return lerobot_root(path) is not None


def lerobot_root(path: Path) -> Path | None:
    """Return the folder of a LeRobot dataset, given it, its folder `meta`, or `meta/info.json`; None if it is none."""
    if path.name == "info.json" and path.parent.name == "meta" and path.is_file():
        return path.parent.parent
    if path.name == "meta" and (path / "info.json").is_file():
        return path.parent
    return path if (path / "meta" / "info.json").is_file() else None


def resembles_lerobot(path: Path) -> bool:
    """Return whether a path is a LeRobot dataset whose description may be missing."""
    names = ("info.json", "episodes.jsonl", "tasks.jsonl", "tasks.parquet", "stats.json")
    return any((path / "meta" / name).is_file() for name in names) or (path / "meta" / "episodes").is_dir()


def read_lerobot(path: Path, reading: Reading) -> Contents:
    """Read what a LeRobot dataset holds: its metadata and the episodes, no rows.

    Args:
        path: the folder of the dataset, its folder `meta`, or `meta/info.json`.
        reading: how rows are read.

    Raises:
        KindError: if the version is not one of 2.0, 2.1 and 3.
        DamagedFileError: naming the file, if the metadata cannot be read or does not agree.
        SchemaError: if there are no episodes.
        MissingExtraError: if pyarrow is not installed.
    """
    root = lerobot_root(path)
    if root is None:
        msg = f"{path} is no LeRobot dataset: there is no meta/info.json"
        raise MissingFileError(msg)
    meta = Metadata(root, FirstFault(root))
    if meta.wrong_version:
        msg = f"{root / INFO}: {meta.wrong_version}"
        raise KindError(msg)
    meta.check_info()
    episodes = meta.read_episodes()
    said_by = root / episodes.said_by
    if not len(episodes.lengths):
        msg = f"{said_by} has no episode: there is nothing to sample"
        raise SchemaError(msg)
    counts = {"total_episodes": len(episodes.lengths), "total_frames": int(episodes.lengths.sum())}
    for name, count in counts.items():
        meta.check_count(name, count, f"{said_by} gives {count}: one of them is cut short or out of date", count)
    return _Builder(meta, episodes, meta.read_tasks() or {}, reading).contents()


@final
class _Metadata(Mapping[str, Any]):
    """Plain values by name; the statistics are read when they are first asked for."""

    def __init__(self, values: dict[str, Any], read_statistics: Callable[[], Any]) -> None:
        self._values, self._read = values, read_statistics

    def __getitem__(self, name: str) -> Any:
        if name == "stats" and name not in self._values:
            self._values[name] = self._read()
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._values, "stats": None})

    def __len__(self) -> int:
        return len({*self._values, "stats"})

    def __repr__(self) -> str:
        return repr(dict(self))


# -------------------------------------------------------------------------------------------------------------- columns


@final
class _Places:
    """Finds the frame of each row in the videos of a camera.

    Args:
        videos: where episodes lie.
        table: the episodes.
        timestamps: the field `timestamp`.
        fps: frames per second.
    """

    def __init__(self, videos: Videos, table: EpisodeFiles, timestamps: DatasetColumn, fps: float) -> None:
        self._videos, self._table, self._timestamps, self._fps = videos, table, timestamps, fps

    def locate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the video of each row, int64 `[n]`, and when its frame is shown, in seconds, float64 `[n]`."""
        stored = self._timestamps.start(rows)()
        exact = (stored.double() * self._fps).round() / self._fps
        # float32 rounds the times of long episodes by more than a frame may be off: undo it where nothing else was done
        seconds = torch.where(exact.to(stored.dtype) == stored, exact, stored.double())
        episodes = np.searchsorted(self._table.starts, rows.numpy(), side="right") - 1
        begin = torch.from_numpy(self._videos.begin[episodes])
        return torch.from_numpy(self._videos.file_of[episodes]), begin + seconds


@final
class _Builder:
    """Makes the columns of a dataset."""

    def __init__(self, meta: Metadata, episodes: Episodes, tasks: dict[int, str], reading: Reading) -> None:
        self._meta, self._episodes, self._tasks, self._reading = meta, episodes, tasks, reading
        self._info, self._fps = meta.root / INFO, meta.fps or 0.0
        said_by = meta.root / episodes.said_by
        self._table = EpisodeFiles(episodes, indexed=meta.major == 3, said_by=said_by, cache=reading.cache)
        self._rows = int(episodes.lengths.sum())
        self._unread: list[str] = []

    def contents(self) -> Contents:
        """Return all columns."""
        columns: dict[tuple[Any, ...], DatasetColumn] = {}
        features = self._meta.features
        for name in sorted(features, key=lambda name: features[name]["dtype"] == "video"):  # timestamps come first
            column = self._column(name, features[name], columns)
            if column is not None:
                columns[name,] = column
        columns = {(name,): columns[name,] for name in features if (name,) in columns}
        texts: dict[tuple[Any, ...], TextColumn | TextBlocks] = {
            (name,): TextBlocks(self._table, name) for name, entry in features.items() if entry["dtype"] == "string"
        }
        if ("task_index",) in columns and ("task",) not in texts and self._tasks:
            values = [self._tasks.get(number, "") for number in range(max(self._tasks) + 1)]
            texts["task",] = TextColumn(values, columns["task_index",])
        said = (
            "done is the field of the dataset" if ("done",) in columns else "done marks the last frame of each episode"
        )
        assumed = (f"LeRobot does not tell terminated from truncated: {said}.", *self._unread)
        lengths = torch.from_numpy(self._episodes.lengths)
        if ("done",) not in columns:
            columns["done",] = last_rows(lengths)
        name = f"lerobot {self._meta.version}"
        return Contents(name, columns, lengths, texts, self._fps, self._metadata(), assumed)

    def _column(self, name: str, entry: dict[str, Any], others: Mapping[Any, DatasetColumn]) -> DatasetColumn | None:
        """Return the column of a feature; None if it is text, or of a kind that is not read."""
        kind, shape = entry["dtype"], tuple(entry["shape"])
        if kind == "video":
            return self._video(name, others.get(("timestamp",)))
        if kind == "image":
            shape = self._picture_shape(name)
            return PictureColumn(self._table, name, shape, self._reading.videos)
        if kind == "string":
            return None  # is no tensor
        if kind not in _NUMBERS:
            self._unread.append(f"The feature {name!r} is not read: its dtype is {kind}.")
            return None
        allowed = None
        if name == "task_index" and self._tasks:
            allowed = np.isin(np.arange(max(self._tasks) + 1), list(self._tasks))
        column = self._table.column(NumberField(name, _NUMBERS[kind], () if shape == (1,) else shape, allowed))
        nbytes = self._rows * column.dtype.itemsize
        if name in ("timestamp", "task_index") and nbytes * _SMALL_SHARE <= self._reading.cache.max_bytes:
            self._reading.cache.max_bytes -= nbytes
            return DenseColumn(column, self._rows, HeapRows(), name)
        return column

    def _video(self, name: str, timestamps: DatasetColumn | None) -> DatasetColumn:
        if timestamps is None:
            msg = f"{self._info}: there are videos, but no feature 'timestamp', which says where their frames are"
            raise DamagedFileError(msg)
        videos = self._episodes.videos[name]
        find = _Places(videos, self._table, timestamps, self._fps).locate
        shape = self._picture_shape(name)
        return VideoColumn(videos.files, find, shape, self._table.describe, self._reading, self._fps)

    def _picture_shape(self, name: str) -> tuple[int, int, int]:
        shape = self._meta.picture_shape(name)
        if shape is None:
            given = self._meta.features[name]["shape"]
            msg = f"{self._info}: feature {name!r} must have a shape [height, width, channels], got {given}"
            raise DamagedFileError(msg)
        return shape

    def _metadata(self) -> _Metadata:
        info, features = self._meta.info, self._meta.features
        values = {
            "version": self._meta.version,
            "info": info,
            "features": features,
            "tasks": self._tasks,
            "cameras": [name for name, entry in features.items() if entry["dtype"] in ("video", "image")],
            "robot_type": info.get("robot_type"),
            "splits": info.get("splits", {}),
            "episode_index": self._episodes.numbers.tolist(),
        }
        return _Metadata(values, self._meta.read_statistics)


FORMAT = Format(
    "LeRobot",
    recognizes_lerobot,
    read_lerobot,
    examine=examine_lerobot,
    resembles=resembles_lerobot,
    root=lerobot_root,
    write=WRITE,
)
