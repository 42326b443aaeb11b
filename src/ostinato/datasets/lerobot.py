"""LeRobot datasets, versions 2.0, 2.1 and 3: tables in Parquet files and cameras in videos, read as they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.datasets.columns import DenseColumn, TensorColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.decoded import HeapRows
from ostinato.datasets.parquet import EpisodeFiles, NumberField, PictureColumn, TextBlocks
from ostinato.datasets.video import VideoColumn
from ostinato.durable.progress import PARTS, counted
from ostinato.errors import DamagedFileError, KindError, MissingFileError, SchemaError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.open import Reading

__all__ = ["lerobot_root", "read_lerobot", "recognizes_lerobot", "resembles_lerobot"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

_NUMBERS = {
    name: getattr(torch, name)
    for name in (
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
    )
}
_MOST_TASKS = 1 << 24
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
    info = _Info.read(root / "meta" / "info.json")
    episodes = _episodes_v3(root, info) if info.major == 3 else _episodes_v2(root, info)
    if not len(episodes.lengths):
        msg = f"{episodes.said_by} has no episode: there is nothing to sample"
        raise SchemaError(msg)
    info.check_count("total_episodes", len(episodes.lengths), episodes.said_by)
    info.check_count("total_frames", int(episodes.lengths.sum()), episodes.said_by)
    tasks = _tasks_v3(root) if info.major == 3 else _tasks_v2(root)
    return _Builder(root, info, episodes, tasks, reading).contents()


# ---------------------------------------------------------------------------------------------------- files of metadata


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"{path} is missing: a LeRobot dataset needs it"
        raise MissingFileError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as JSON: {error}"
        raise DamagedFileError(msg) from error


def _load_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object in each line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except FileNotFoundError as error:
        msg = f"{path} is missing: a LeRobot dataset of version 2 needs it"
        raise MissingFileError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise DamagedFileError(msg) from error
    try:
        together = json.loads(f"[{','.join(lines)}]")  # several times as fast as line by line
        if len(together) == len(lines) and all(isinstance(value, dict) for value in together):
            return cast("list[dict[str, Any]]", together)
    except ValueError:
        pass  # line by line, to name the line
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            msg = f"{path}, line {number} of {len(lines)}, cannot be read as JSON: {error}"
            raise DamagedFileError(msg) from error
        if not isinstance(value, dict):
            msg = f"{path}, line {number}, is no JSON object: {line[:60]}"
            raise DamagedFileError(msg)
        found.append(value)
    return found


def _load_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    """Read a Parquet file of metadata, or some of its columns."""
    parquet = require("pyarrow.parquet", "lerobot")
    try:
        with parquet.ParquetFile(path) as file:
            missing = [name for name in columns or () if name not in file.schema_arrow.names]
            if missing:
                msg = f"{path} has no column {missing[0]!r}: it has {', '.join(file.schema_arrow.names)}"
                raise DamagedFileError(msg)
            table = file.read(columns=columns)
            return table if columns is None else table.select(columns)
    except FileNotFoundError as error:
        msg = f"{path} is missing: a LeRobot dataset of version 3 needs it"
        raise MissingFileError(msg) from error
    except DamagedFileError:
        raise
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise DamagedFileError(msg) from error


@final
class _Info(NamedTuple):
    """`meta/info.json`, checked."""

    path: Path
    entries: dict[str, Any]
    major: int
    version: str
    fps: float
    features: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> _Info:
        """Read the file.

        Raises:
            KindError: if the version is unknown.
            DamagedFileError: if an entry is missing or wrong.
        """
        entries = _load_json(path)
        if not isinstance(entries, dict):
            msg = f"{path} is no JSON object"
            raise DamagedFileError(msg)
        version = entries.get("codebase_version")
        numbers = str(version).removeprefix("v").split(".")
        if numbers[0] != "3" and numbers[:2] not in (["2", "0"], ["2", "1"]):
            msg = (
                f"{path}: codebase_version is {version!r}, and 2.0, 2.1 and 3 are read: convert the dataset to v3.0 "
                "with the scripts of lerobot"
            )
            raise KindError(msg)
        fps, features = entries.get("fps"), entries.get("features")
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
            msg = f"{path}: fps must be a positive number, got {fps!r}"
            raise DamagedFileError(msg)
        if not isinstance(features, dict) or not features:
            msg = f"{path}: features must name the columns of the dataset, got {features!r}"
            raise DamagedFileError(msg)
        for name, entry in features.items():
            _check_feature(path, name, entry)
        return cls(path, entries, int(numbers[0]), str(version), fps, features)

    def check_count(self, name: str, count: int, said_by: Path) -> None:
        """Raise `DamagedFileError` if a count differs from the episodes."""
        said = self.entries.get(name, count)
        if said != count:
            msg = (
                f"{self.path} gives {name} {said}, but {said_by} gives {count}: one of them is cut short or out of date"
            )
            raise DamagedFileError(msg)

    def positive(self, name: str) -> int:
        """Return an entry that is a number of at least 1."""
        value = self.entries.get(name)
        if type(value) is not int or value < 1:
            msg = f"{self.path}: {name} must be an integer of at least 1, got {value!r}"
            raise DamagedFileError(msg)
        return value

    def template(self, name: str) -> str:
        """Return an entry that is the template of a path."""
        value = self.entries.get(name)
        if not isinstance(value, str) or not value:
            msg = f"{self.path}: {name} must be the template of a path, got {value!r}"
            raise DamagedFileError(msg)
        return value

    @property
    def cameras(self) -> list[str]:
        """Names of the features that are videos."""
        return [name for name, entry in self.features.items() if entry["dtype"] == "video"]


def _check_feature(path: Path, name: str, entry: Any) -> None:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("dtype"), str)
        or not isinstance(shape, list)
        or any(type(size) is not int or size < 0 for size in shape)
    ):
        msg = f"{path}: feature {name!r} must have a dtype and a shape of integers, got {entry!r}"
        raise DamagedFileError(msg)


# ------------------------------------------------------------------------------------------------------------- episodes


class _Episodes(NamedTuple):
    """Where the rows and videos of each episode lie."""

    said_by: Path
    """The file, or the folder of files, that tells it."""
    numbers: Ints
    """Value of `episode_index`."""
    lengths: Ints
    tables: _Paths
    file_of: Ints
    """The Parquet file of each episode, a position in `tables`."""
    videos: dict[str, _Videos]


class _Videos(NamedTuple):
    """Where the frames of a camera lie."""

    files: _Paths
    file_of: Ints
    """The video of each episode, a position in `files`."""
    begin: np.ndarray[Any, np.dtype[np.float64]]
    """When each episode begins in its video, in seconds."""


@final
class _Paths(Sequence[Path]):
    """Paths of files that a template and numbers make.

    Args:
        root: folder of the dataset.
        template: such as "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet".
        values: what its fields stand for, for each file.
        said_by: the file that has the template, for messages.
    """

    def __init__(self, root: Path, template: str, values: Sequence[Mapping[str, Any]], said_by: Path) -> None:
        self._root, self._template, self._values, self._said_by = root, template, values, said_by
        if values:
            self[0]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        """Return one path, or those of a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        try:
            found = PurePosixPath(self._template.format(**self._values[at]))
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
            if isinstance(error, IndexError) and not -len(self) <= at < len(self):
                raise
            msg = f"{self._said_by}: {self._template!r} is no template of paths of files: {error}"
            raise DamagedFileError(msg) from error
        if found.is_absolute() or ".." in found.parts:
            msg = f"{self._said_by}: {str(found)!r} leads out of the folder of the dataset"
            raise DamagedFileError(msg)
        return self._root / found


def _episodes_v2(root: Path, info: _Info) -> _Episodes:
    """Read `meta/episodes.jsonl`: one Parquet file and one video of each camera for each episode."""
    path = root / "meta" / "episodes.jsonl"
    rows = _load_lines(path)
    numbers = _integers([row.get("episode_index") for row in rows], path, "episode_index")
    lengths = _integers([row.get("length") for row in rows], path, "length")
    order = np.argsort(numbers, kind="stable")
    numbers, lengths = numbers[order], lengths[order]
    twice = np.flatnonzero(np.diff(numbers) == 0)
    if twice.shape[0]:
        msg = f"{path} has episode {numbers[twice[0]]} twice"
        raise DamagedFileError(msg)
    _check_lengths(path, numbers, lengths)
    size = info.positive("chunks_size")
    values = [{"episode_chunk": number // size, "episode_index": number} for number in numbers.tolist()]
    each = np.arange(len(rows))
    tables = _Paths(root, info.template("data_path"), values, info.path)
    videos = {
        camera: _Videos(
            _Paths(root, info.template("video_path"), [{**value, "video_key": camera} for value in values], info.path),
            each,
            np.zeros(len(rows)),
        )
        for camera in info.cameras
    }
    return _Episodes(path, numbers, lengths, tables, each, videos)


def _episodes_v3(root: Path, info: _Info) -> _Episodes:
    """Read `meta/episodes`: several episodes in each Parquet file and each video."""
    folder = root / "meta" / "episodes"
    own = ["episode_index", "length", "dataset_from_index", "dataset_to_index"]
    places = ["data/chunk_index", "data/file_index"]
    kinds = ("chunk_index", "file_index", "from_timestamp")
    names = [*own, *places, *(f"videos/{camera}/{kind}" for camera in info.cameras for kind in kinds)]
    paths = sorted(folder.glob("*/*.parquet"))
    if not paths:
        msg = f"{folder} has no Parquet file: a LeRobot dataset of version 3 has its episodes there"
        raise MissingFileError(msg)
    tables = [_load_table(path, names) for path in counted(paths, PARTS)]
    where = paths[0] if len(paths) == 1 else folder
    columns = {name: _numbers_of(tables, name, where) for name in names}
    numbers, lengths, first, stop = (columns[name].astype(np.int64) for name in own)
    _check_lengths(where, numbers, lengths)
    ends = np.cumsum(lengths)
    wrong = np.flatnonzero((numbers != np.arange(len(numbers))) | (first != ends - lengths) | (stop != ends))
    if wrong.shape[0]:
        at = int(wrong[0])
        msg = (
            f"{where}: row {at} has episode {numbers[at]} of {lengths[at]} rows at [{first[at]}, {stop[at]}), where "
            f"episode {at} at [{ends[at] - lengths[at]}, {ends[at]}) should be: episodes must follow each other"
        )
        raise DamagedFileError(msg)
    files, file_of = _places(columns, "data", root, info.template("data_path"), info.path)
    videos = {}
    for camera in info.cameras:
        at_camera = _places(columns, f"videos/{camera}", root, info.template("video_path"), info.path, camera)
        videos[camera] = _Videos(*at_camera, columns[f"videos/{camera}/from_timestamp"].astype(np.float64))
    return _Episodes(where, numbers, lengths, files, file_of, videos)


def _places(
    columns: Mapping[str, Any], of: str, root: Path, template: str, said_by: Path, camera: str = ""
) -> tuple[_Paths, Ints]:
    """Return the different files of the episodes, and the one of each episode."""
    pairs = np.stack([columns[f"{of}/chunk_index"], columns[f"{of}/file_index"]], 1).astype(np.int64)
    found, file_of = np.unique(pairs, axis=0, return_inverse=True)
    keys = {"video_key": camera} if camera else {}
    values = [{"chunk_index": chunk, "file_index": file, **keys} for chunk, file in found.tolist()]
    return _Paths(root, template, values, said_by), file_of.reshape(-1)


def _numbers_of(tables: Sequence[Any], name: str, where: Path) -> np.ndarray[Any, Any]:
    parts = [table.column(name).to_numpy() for table in tables]
    values = np.concatenate(parts)
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        msg = f"{where}: column {name!r} must have a number for each episode"
        raise DamagedFileError(msg)
    return values


def _integers(values: Sequence[Any], path: Path, name: str, most: int = 1 << 40) -> Ints:
    for number, value in enumerate(values, 1):
        if type(value) is not int or not 0 <= value < most:
            msg = f"{path}, line {number}: {name} must be an integer of at least 0 and below {most}, got {value!r}"
            raise DamagedFileError(msg)
    return np.array(values, dtype=np.int64)


def _check_lengths(path: Path, numbers: Ints, lengths: Ints) -> None:
    wrong = np.flatnonzero(lengths < 1)
    if wrong.shape[0]:
        msg = f"{path}: episode {numbers[wrong[0]]} has {lengths[wrong[0]]} rows: an episode has at least one"
        raise DamagedFileError(msg)


# ---------------------------------------------------------------------------------------------------- tasks, statistics


def _tasks_v2(root: Path) -> dict[int, str]:
    """Read `meta/tasks.jsonl`; the texts by number."""
    path = root / "meta" / "tasks.jsonl"
    rows = _load_lines(path)
    numbers = _integers([row.get("task_index") for row in rows], path, "task_index", _MOST_TASKS)
    return {int(number): str(row.get("task")) for number, row in zip(numbers, rows, strict=True)}


def _tasks_v3(root: Path) -> dict[int, str]:
    """Read `meta/tasks.parquet`, whose texts are the index of a table of pandas; the texts by number."""
    path = root / "meta" / "tasks.parquet"
    table = _load_table(path)
    texts = [name for name in table.column_names if name != "task_index"]
    if "task_index" not in table.column_names or not texts:
        msg = f"{path} must have task_index and the texts of the tasks, it has {', '.join(table.column_names)}"
        raise DamagedFileError(msg)
    text = "task" if "task" in texts else texts[0]
    numbers = _integers(table.column("task_index").to_pylist(), path, "task_index", _MOST_TASKS)
    return {int(number): str(task) for number, task in zip(numbers, table.column(text).to_pylist(), strict=True)}


def _statistics(root: Path, major: int) -> dict[str, Any]:
    """Read `meta/stats.json`; for version 2.1 merge `meta/episodes_stats.jsonl`."""
    path = root / "meta" / "episodes_stats.jsonl"
    if major == 2 and path.is_file():
        return _merged(path, [row.get("stats", {}) for row in _load_lines(path)])
    path = root / "meta" / "stats.json"
    found: dict[str, Any] = _load_json(path) if path.is_file() else {}
    return found


def _merged(path: Path, episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of episodes, weighted by their counts."""
    out: dict[str, Any] = {}
    try:
        for name in episodes[0] if episodes else ():
            every = [episode[name] for episode in episodes]
            low, high, mean, std, count = (
                np.array([values[kind] for values in every], dtype=np.float64)
                for kind in ("min", "max", "mean", "std", "count")
            )
            weights = count.reshape(-1, *[1] * (mean.ndim - 1)) / count.sum()
            center = (weights * mean).sum(0)
            spread = np.sqrt((weights * (std**2 + (mean - center) ** 2)).sum(0))
            out[name] = {"min": low.min(0), "max": high.max(0), "mean": center, "std": spread}
            out[name]["count"] = count.sum(0).astype(np.int64)
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path} has statistics of another form in some episode: {error!r}"
        raise DamagedFileError(msg) from error
    return {name: {kind: value.tolist() for kind, value in values.items()} for name, values in out.items()}


@final
class _Metadata(Mapping[str, Any]):
    """Plain values by name; some are read when they are first asked for."""

    def __init__(self, values: dict[str, Any], later: dict[str, Callable[[], Any]]) -> None:
        self._values, self._later = values, later

    def __getitem__(self, name: str) -> Any:
        if name in self._later and name not in self._values:
            self._values[name] = self._later[name]()
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._values, *self._later]))

    def __len__(self) -> int:
        return len(self._values.keys() | self._later.keys())

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

    def __init__(self, videos: _Videos, table: EpisodeFiles, timestamps: DatasetColumn, fps: float) -> None:
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

    def __init__(self, root: Path, info: _Info, episodes: _Episodes, tasks: dict[int, str], reading: Reading) -> None:
        self._root, self._info, self._episodes, self._tasks, self._reading = root, info, episodes, tasks, reading
        self._table = EpisodeFiles(
            episodes.tables,
            episodes.file_of,
            episodes.lengths,
            episodes.numbers,
            indexed=info.major == 3,
            said_by=episodes.said_by,
            cache=reading.cache,
        )
        self._rows = int(episodes.lengths.sum())
        self._unread: list[str] = []

    def contents(self) -> Contents:
        """Return all columns."""
        columns: dict[tuple[Any, ...], DatasetColumn] = {}
        features = self._info.features
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
        if ("done",) not in columns:
            columns["done",] = self._done()
        lengths = torch.from_numpy(self._episodes.lengths)
        name = f"lerobot {self._info.version}"
        return Contents(name, columns, lengths, texts, self._info.fps, self._metadata(), assumed)

    def _column(self, name: str, entry: dict[str, Any], others: Mapping[Any, DatasetColumn]) -> DatasetColumn | None:
        """Return the column of a feature; None if it is text, or of a kind that is not read."""
        kind, shape = entry["dtype"], tuple(entry["shape"])
        if kind == "video":
            return self._video(name, entry, others.get(("timestamp",)))
        if kind == "image":
            shape = _picture_shape(self._info.path, name, entry)
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

    def _video(self, name: str, entry: dict[str, Any], timestamps: DatasetColumn | None) -> DatasetColumn:
        if timestamps is None:
            msg = f"{self._info.path}: there are videos, but no feature 'timestamp', which says where their frames are"
            raise DamagedFileError(msg)
        videos = self._episodes.videos[name]
        find = _Places(videos, self._table, timestamps, self._info.fps).locate
        shape = _picture_shape(self._info.path, name, entry)
        return VideoColumn(videos.files, find, shape, self._table.describe, self._reading, self._info.fps)

    def _done(self) -> TensorColumn:
        done = torch.zeros(self._rows, dtype=torch.bool, device="cpu")
        done[torch.from_numpy(self._table.starts[1:] - 1)] = True
        return TensorColumn(done)

    def _metadata(self) -> _Metadata:
        info, features = self._info.entries, self._info.features
        values = {
            "version": self._info.version,
            "info": info,
            "features": features,
            "tasks": self._tasks,
            "cameras": [name for name, entry in features.items() if entry["dtype"] in ("video", "image")],
            "robot_type": info.get("robot_type"),
            "splits": info.get("splits", {}),
            "episode_index": self._episodes.numbers.tolist(),
        }
        return _Metadata(values, {"stats": partial(_statistics, self._root, self._info.major)})


def _picture_shape(path: Path, name: str, entry: dict[str, Any]) -> tuple[int, int, int]:
    """Return `(C, H, W)` of a camera."""
    shape, names = entry["shape"], entry.get("names")
    if len(shape) != 3 or 0 in shape:
        msg = f"{path}: feature {name!r} must have a shape [height, width, channels], got {shape}"
        raise DamagedFileError(msg)
    first = names[0] if isinstance(names, list) and len(names) == 3 else None
    if first in ("channel", "channels") or (first is None and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4)):
        return shape[0], shape[1], shape[2]
    return shape[2], shape[0], shape[1]
