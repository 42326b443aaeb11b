"""LeRobot datasets, versions 2.0, 2.1 and 3: metadata, tables in Parquet files, cameras in videos, read as they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.datasets.checks import FirstFault, Place, read_file, read_object
from ostinato.datasets.columns import DenseColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.decoded import HeapRows
from ostinato.datasets.format import Format
from ostinato.datasets.lerobot_checks import INFO, STATISTICS, examine_lerobot
from ostinato.datasets.lerobot_writer import NUMBERS, WRITE, merged
from ostinato.datasets.parquet import EpisodeFiles, NumberField, PictureColumn, TextBlocks
from ostinato.datasets.stored import last_rows
from ostinato.datasets.video import VideoColumn
from ostinato.durable.progress import PARTS, counted
from ostinato.errors import DamagedFileError, KindError, MissingFileError, SchemaError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.datasets.checks import Faults, Severity
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.format import Reading

Ints = np.ndarray[Any, np.dtype[np.int64]]

_STATISTICS_V2 = "meta/episodes_stats.jsonl"
_EPISODES_V2, _EPISODES_V3 = "meta/episodes.jsonl", "meta/episodes"
_PLACES = {
    3: {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    },
    2: {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    },
}
"""Usual places of files."""
_ROWS = ("episode_index", "length", "dataset_from_index", "dataset_to_index")
_DATA = ("data/chunk_index", "data/file_index")
_MOST = 1 << 40
_MOST_TASKS = 1 << 24
_NUMBERS = {name: getattr(torch, name) for name in NUMBERS}
_SMALL_SHARE = 16
"""Timestamps and tasks of at most this part of the budget are kept as tensors, since every batch reads them."""


# -- metadata ----------------------------------------------------------------------------------------------------------


@final
class Paths(Sequence[Path]):
    """Paths of files that a template and numbers make.

    Args:
        root: folder of the dataset.
        template: such as "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet".
        values: what its fields stand for, for each file.
    """

    def __init__(self, root: Path, template: str, values: Sequence[Mapping[str, Any]]) -> None:
        self._root, self._template, self._values = root, template, values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        """Return one path, or those of a slice."""
        return [self[i] for i in range(*at.indices(len(self)))] if isinstance(at, slice) else self._root / self.name(at)

    def name(self, at: int) -> PurePosixPath:
        """Return a path relative to the dataset.

        Raises:
            DamagedFileError: if the template is none, or the path leads out of the dataset.
        """
        values = self._values[at]
        try:
            found = PurePosixPath(self._template.format(**values))
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            msg = f"{self._template!r} is no template of paths of files: {error}"
            raise DamagedFileError(msg) from error
        if found.is_absolute() or ".." in found.parts:
            msg = f"{str(found)!r} leads out of the folder of the dataset"
            raise DamagedFileError(msg)
        return found

    def known(self, at: int) -> str | None:
        """Return a path relative to the dataset; None for -1, or if there is none."""
        return self.name(at).as_posix() if 0 <= at < len(self) else None


class Videos(NamedTuple):
    """Where the frames of a camera lie."""

    files: Paths
    file_of: Ints
    """The video of each episode, a position in `files`; -1 if the metadata does not say."""
    begin: np.ndarray[Any, np.dtype[np.float64]]
    """When each episode begins in its video, in seconds."""
    end: np.ndarray[Any, np.dtype[np.float64]] | None = None
    """When each episode ends in its video, if that was read; None if a video has one episode."""


@dataclass
class Episodes:
    """Where the rows and videos of each episode lie, in the order of their numbers."""

    said_by: str
    """The file, or the folder of files, that tells it."""
    numbers: Ints
    """Value of `episode_index`."""
    lengths: Ints
    """-1 where the metadata does not say, as in the fields below."""
    tables: Paths
    file_of: Ints
    """The Parquet file of each episode, a position in `tables`."""
    videos: dict[str, Videos]
    starts: Ints | None = None
    """First row of each episode in the dataset; None in version 2."""
    stops: Ints | None = None
    tasks: Sequence[Any] = ()
    """Texts of the tasks of each episode, for the doctor."""
    statistics: Sequence[Mapping[str, Any]] = ()
    """Statistics of each episode by feature, for the doctor."""


@final
class Metadata:
    """The folder `meta` of a dataset. What is missing or wrong is a fault; usual values stand in its place.

    Args:
        root: the dataset.
        faults: takes what is wrong. If it raises, so does what reads.
    """

    def __init__(self, root: Path, faults: Faults) -> None:
        self.root, self._faults = root, faults
        self.info: dict[str, Any] = self.read_object(INFO)
        """`meta/info.json`."""
        version = self.info.get("codebase_version")
        numbers = str(version).removeprefix("v").split(".")
        self.wrong_version = ""
        """Why the dataset cannot be read; empty if its version is known."""
        if numbers[0] != "3" and numbers[:2] not in (["2", "0"], ["2", "1"]):
            self.wrong_version = (
                f"codebase_version is {version!r}, and 2.0, 2.1 and 3 are read: convert the dataset to v3.0 with the "
                "scripts of lerobot"
            )
        self.version = str(version)
        """"v3.0", "v2.1" or "v2.0"."""
        if numbers[0] not in {"2", "3"}:
            self.version = "v3.0" if (root / _EPISODES_V3).is_dir() or self._tasks_table.exists() else "v2.1"
        self.major = int(self.version.removeprefix("v")[0])
        self.features: dict[str, dict[str, Any]] = {}
        self.fps: float | None = None

    @property
    def _tasks_table(self) -> Path:
        return self.root / "meta" / "tasks.parquet"

    def fault(
        self,
        check: str,
        message: str,
        file: str,
        name: str | None = None,
        *,
        episode: int | None = None,
        severity: Severity | None = None,
    ) -> None:
        """Add a fault in a file of metadata."""
        self._faults.add(check, message, Place(file, episode, field=name), severity=severity)

    # -- files ---------------------------------------------------------------------------------------------------------

    def read_object(self, file: str) -> dict[str, Any]:
        """Return the object in a file of JSON; an empty one if there is none."""
        return read_object(self.root, Place(file), self._faults) or {}

    def read_lines(self, file: str) -> list[dict[str, Any]] | None:
        """Return the objects of a file with one JSON object in each line; None if it cannot be read."""
        text = read_file(self.root, Place(file), lambda path: path.read_text("utf-8"), self._faults)
        if text is None:
            return None
        lines = [line for line in text.split("\n") if line.strip()]
        try:
            together = json.loads(f"[{','.join(lines)}]")  # several times as fast as line by line
            if len(together) == len(lines) and all(isinstance(value, dict) for value in together):
                return cast("list[dict[str, Any]]", together)
        except (ValueError, RecursionError):
            pass  # line by line, to name the line
        found = []
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                self.fault("file-unreadable", f"line {number} of {len(lines)} cannot be read as JSON: {error}", file)
                continue
            if isinstance(value, dict):
                found.append(value)
            else:
                self.fault("file-unreadable", f"line {number} is no JSON object: {line[:60]}", file)
        return found

    def _read_table(self, file: str, columns: Sequence[str] = (), *, every: bool = True) -> Any:
        """Return a Parquet file, or some of its columns; None if it cannot be read. Columns that miss are faults."""
        parquet = require("pyarrow.parquet", "lerobot")

        def read(path: Path) -> Any:
            with parquet.ParquetFile(path) as opened:
                present = [name for name in opened.schema_arrow.names if every or name in columns]
                return opened.schema_arrow.names, opened.read(columns=present).select(present)

        names, table = read_file(self.root, Place(file), read, self._faults) or ([], None)
        for name in columns if table is not None else ():
            if name not in names:
                self.fault("metadata-invalid", f"it has no column {name!r}: it has {', '.join(names)}", file, name)
        return table

    # -- the description -----------------------------------------------------------------------------------------------

    def check_info(self) -> None:
        """Check `meta/info.json`."""
        if not self.info:
            return
        fps, features = self.info.get("fps"), self.info.get("features")
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
            self.fault("metadata-invalid", f"fps must be a positive number, got {fps!r}", INFO, "fps")
        else:
            self.fps = fps
        if not isinstance(features, dict) or not features:
            text = f"features must name the columns of the dataset, got {features!r}"
            self.fault("metadata-invalid", text, INFO, "features")
            return
        self.features = {name: entry for name, entry in features.items() if isinstance(entry, dict)}
        for name, entry in features.items():
            if not (isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and self.shape(name) is not None):
                text = f"feature {name!r} must have a dtype and a shape of integers, got {entry!r}"
                self.fault("metadata-invalid", text, INFO, name)

    def check_count(self, name: str, count: int, words: str, default: int | None = None) -> None:
        """Compare a count of `meta/info.json` with another; `words` say where that is from."""
        said = self.info.get(name, default)
        if self.info and said != count:
            self.fault("count-mismatch", f"it gives {name} {said!r}, but {words}", INFO, name)

    @property
    def cameras(self) -> list[str]:
        """Features that are videos."""
        return [name for name, entry in self.features.items() if entry.get("dtype") == "video"]

    @property
    def images(self) -> list[str]:
        """Features that are pictures in the tables."""
        return [name for name, entry in self.features.items() if entry.get("dtype") == "image"]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a feature in one row, None if the metadata does not say."""
        shape = self.features[name].get("shape")
        valid = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        return tuple(shape) if valid and shape is not None else None

    def picture_shape(self, name: str) -> tuple[int, int, int] | None:
        """Return `(C, H, W)` of a camera, None if the metadata does not say."""
        shape, names = self.shape(name), self.features[name].get("names")
        if shape is None or len(shape) != 3 or 0 in shape:
            return None
        first = names[0] if isinstance(names, list) and len(names) == 3 else None
        if first in ("channel", "channels") or (first is None and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4)):
            return shape[0], shape[1], shape[2]
        return shape[2], shape[0], shape[1]

    def video_info(self, name: str) -> dict[str, Any]:
        """Return what is said of the videos of a camera: its `video.fps`, `video.codec` and others."""
        found: Any = self.features[name].get("info") or self.features[name].get("video_info")
        return found if isinstance(found, dict) else {}

    def _paths(self, key: str, values: Sequence[Mapping[str, Any]]) -> Paths:
        """Return the paths of files by a template; none if it is wrong."""
        template: Any = self.info.get(key)
        if not isinstance(template, str) or not template:
            if self.info:
                text = f"{key} must be the template of a path, got {template!r}"
                self.fault("metadata-invalid", text, INFO, key)
            template = _PLACES[self.major][key]
        paths = Paths(self.root, template, values)
        try:
            paths[:1]
        except DamagedFileError as error:
            self.fault("metadata-invalid", str(error), INFO, key)
            return Paths(self.root, template, ())
        return paths

    @property
    def _table(self) -> str:
        return _EPISODES_V3 if self.major == 3 else _EPISODES_V2

    # -- episodes ------------------------------------------------------------------------------------------------------

    def read_episodes(self, *, every: bool = False) -> Episodes:
        """Read and check the table of episodes.

        Args:
            every: read tasks, statistics and ends of videos, too.
        """
        found = self._episodes_v3(every=every) if self.major == 3 else self._episodes_v2(every=every)
        for at in np.flatnonzero((found.lengths < 1) & (found.lengths != -1)).tolist():
            number, length = int(found.numbers[at]), int(found.lengths[at])
            text = f"episode {number} has {length} rows: an episode has at least one"
            self.fault("episode-length", text, self._table, episode=number)
        self._check_numbers(found)
        if found.starts is not None and found.stops is not None:
            self._check_bounds(found, found.starts, found.stops)
        return found

    def _check_numbers(self, found: Episodes) -> None:
        twice = np.flatnonzero(np.diff(found.numbers) == 0)
        other = np.flatnonzero(found.numbers != np.arange(found.numbers.shape[0]))
        if twice.shape[0]:
            number = int(found.numbers[twice[0]])
            self.fault("metadata-invalid", f"it has episode {number} twice", self._table, episode=number)
        elif other.shape[0]:
            at = int(other[0])
            text = f"row {at} has episode {found.numbers[at]}, where episode {at} should be"
            severity: Severity = "error" if self.major == 3 else "warning"  # version 2 allows gaps
            self.fault("metadata-invalid", text, self._table, episode=at, severity=severity)

    def _check_bounds(self, found: Episodes, starts: Ints, stops: Ints) -> None:
        ends = np.concatenate([[0], stops[:-1]])
        wrong = (starts >= 0) & (stops >= 0) & ((starts != ends) | (stops - starts != found.lengths))
        for at in np.flatnonzero(wrong).tolist():
            number, length, start, stop, before = (
                int(n[at]) for n in (found.numbers, found.lengths, starts, stops, ends)
            )
            if length not in {-1, stop - start}:
                text = f"episode {number} of {length} rows is at the rows [{start}, {stop}), which are {stop - start}"
            elif start != before:
                what = "overlap the episode before, which ends at" if start < before else "leave a gap after"
                text = f"the rows [{start}, {stop}) of episode {number} {what} row {before}"
            else:
                continue
            self.fault("episode-bounds", text, self._table, episode=number)

    def _episodes_v2(self, *, every: bool) -> Episodes:
        """Read `meta/episodes.jsonl`: one Parquet file and one video of each camera for each episode."""
        rows = self.read_lines(_EPISODES_V2) or []
        numbers = self._integers([row.get("episode_index") for row in rows], _EPISODES_V2, "episode_index")
        lengths = self._integers([row.get("length") for row in rows], _EPISODES_V2, "length")
        order = np.argsort(numbers, kind="stable")
        order = order[numbers[order] >= 0]
        numbers, lengths = numbers[order], lengths[order]
        size = self.info.get("chunks_size")
        if type(size) is not int or size < 1:
            if self.info:
                text = f"chunks_size must be an integer of at least 1, got {size!r}"
                self.fault("metadata-invalid", text, INFO, "chunks_size")
            size = 1000
        values = [{"episode_chunk": number // size, "episode_index": number} for number in numbers.tolist()]
        each = np.arange(len(values))
        videos = {}
        for camera in self.cameras:
            paths = self._paths("video_path", [{**value, "video_key": camera} for value in values])
            videos[camera] = Videos(paths, each, np.zeros(len(values)))
        found = Episodes(_EPISODES_V2, numbers, lengths, self._paths("data_path", values), each, videos)
        if every:
            found.tasks = [rows[at].get("tasks") for at in order.tolist()]
            missing = self.version == "v2.0" and not (self.root / _STATISTICS_V2).exists()
            lines = [] if missing else self.read_lines(_STATISTICS_V2) or []
            known = {row.get("episode_index"): row.get("stats") for row in lines}
            found.statistics = [_objects(known.get(number)) for number in numbers.tolist()]
        return found

    def _integers(self, values: Sequence[Any], file: str, name: str, most: int = _MOST) -> Ints:
        """Return integers; -1 for what is none."""
        found = []
        for number, value in enumerate(values, 1):
            good = type(value) is int and 0 <= value < most
            if not good:
                text = f"line {number}: {name} must be an integer of at least 0 and below {most}, got {value!r}"
                self.fault("metadata-invalid", text, file, name)
            found.append(value if good else -1)
        return np.array(found, dtype=np.int64)

    def _episodes_v3(self, *, every: bool) -> Episodes:
        """Read `meta/episodes`: several episodes in each Parquet file and each video."""
        kinds = ("chunk_index", "file_index", "from_timestamp", *(("to_timestamp",) if every else ()))
        names = [*_ROWS, *_DATA, *(f"videos/{camera}/{kind}" for camera in self.cameras for kind in kinds)]
        files = [
            path.relative_to(self.root).as_posix() for path in sorted((self.root / _EPISODES_V3).glob("*/*.parquet"))
        ]
        if not files:
            text = "it has no Parquet file: a LeRobot dataset of version 3 has its episodes there"
            self.fault("file-missing", text, _EPISODES_V3)
        wanted = [*names, "tasks"] if every else names
        tables = [(file, self._read_table(file, wanted, every=every)) for file in counted(files, PARTS)]
        read = [(file, table) for file, table in tables if table is not None]
        columns = {name: self._numbers(name, read) for name in names}
        order = np.argsort(columns["episode_index"], kind="stable")
        order = order[columns["episode_index"][order] >= 0]
        columns = {name: values[order] for name, values in columns.items()}
        numbers, lengths, starts, stops = (columns[name].astype(np.int64) for name in _ROWS)
        videos = {}
        for camera in self.cameras:
            of = f"videos/{camera}"
            end = columns[f"{of}/to_timestamp"].astype(np.float64) if every else None
            begin = columns[f"{of}/from_timestamp"].astype(np.float64)
            videos[camera] = Videos(*self._places(columns, of, "video_path", camera), begin, end)
        data = self._places(columns, "data", "data_path")
        found = Episodes(files[0] if len(files) == 1 else _EPISODES_V3, numbers, lengths, *data, videos, starts, stops)
        if every:
            rows = [row for _, table in read for row in self._described(table)]
            found.tasks = [rows[at][0] for at in order.tolist()]
            found.statistics = [rows[at][1] for at in order.tolist()]
        return found

    def _numbers(self, name: str, tables: Sequence[tuple[str, Any]]) -> np.ndarray[Any, Any]:
        """Return a column of the episodes; -1 for what is no number, NaN for what is no time."""
        parts, missing = [np.zeros(0, np.int64)], math.nan if name.endswith("timestamp") else -1
        for file, table in tables:
            values = np.full(table.num_rows, missing)
            if name in table.column_names:
                found = table.column(name).to_numpy()
                good = np.isfinite(found) if found.dtype.kind in "iuf" else np.zeros(found.shape, bool)
                if not good.all():
                    text = f"column {name!r} must have a number for each episode"
                    self.fault("metadata-invalid", text, file, name)
                values = np.where(good, found, missing) if found.dtype.kind in "iuf" else values
            parts.append(values)
        return np.concatenate(parts)

    def _places(self, columns: Mapping[str, Any], of: str, key: str, camera: str = "") -> tuple[Paths, Ints]:
        """Return the different files of the episodes, and the one of each episode."""
        pairs = np.stack([columns[f"{of}/chunk_index"], columns[f"{of}/file_index"]], 1).astype(np.int64)
        known = (pairs >= 0).all(1)
        found, which = np.unique(pairs[known], axis=0, return_inverse=True)
        file_of = np.full(pairs.shape[0], -1)
        file_of[known] = which.reshape(-1)
        keys = {"video_key": camera} if camera else {}
        values = [{"chunk_index": chunk, "file_index": file, **keys} for chunk, file in found.tolist()]
        return self._paths(key, values), file_of

    @staticmethod
    def _described(table: Any) -> list[tuple[Any, dict[str, dict[str, Any]]]]:
        """Return tasks and statistics of each episode in a table."""
        found = []
        for row in table.to_pylist():
            statistics: dict[str, dict[str, Any]] = {}
            for key in row:
                name, _, kind = key.removeprefix("stats/").rpartition("/")
                if key.startswith("stats/"):
                    statistics.setdefault(name, {})[kind] = row[key]
            found.append((row.get("tasks"), statistics))
        return found

    # -- tasks, statistics ---------------------------------------------------------------------------------------------

    def read_tasks(self) -> dict[int, str] | None:
        """Return the texts of the tasks by number; None if they cannot be read."""
        file = "meta/tasks.parquet" if self.major == 3 else "meta/tasks.jsonl"
        if self.major == 3:
            table = self._read_table(file)
            names = [] if table is None else [name for name in table.column_names if name != "task_index"]
            if table is not None and ("task_index" not in table.column_names or not names):
                text = f"it must have task_index and the texts of the tasks, it has {', '.join(table.column_names)}"
                self.fault("metadata-invalid", text, file)
            if not names or "task_index" not in table.column_names:
                return None
            numbers = table.column("task_index").to_pylist()
            texts = table.column(
                "task" if "task" in names else names[0]
            ).to_pylist()  # pandas names its index otherwise
        else:
            rows = self.read_lines(file)
            if rows is None:
                return None
            numbers, texts = [row.get("task_index") for row in rows], [row.get("task") for row in rows]
        found = self._integers(numbers, file, "task_index", _MOST_TASKS).tolist()
        return {number: str(text) for number, text in zip(found, texts, strict=True) if number >= 0}

    def read_statistics(self) -> dict[str, Any]:
        """Return `meta/stats.json`; of version 2.1, the merged statistics of the episodes."""
        file = _STATISTICS_V2
        if self.major == 2 and (self.root / file).is_file():
            rows = [row.get("stats", {}) for row in self.read_lines(file) or ()]
            try:
                return {name: merged([row[name] for row in rows]) for name in (rows[0] if rows else ())}
            except (KeyError, TypeError, ValueError) as error:
                self.fault("metadata-invalid", f"it has statistics of another form in some episode: {error!r}", file)
        return self.read_object(STATISTICS) if (self.root / STATISTICS).is_file() else {}


def _objects(value: Any) -> dict[str, dict[str, Any]]:
    return {k: v for k, v in value.items() if isinstance(v, dict)} if isinstance(value, dict) else {}


# -- reading -----------------------------------------------------------------------------------------------------------


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
class _PlainValues(Mapping[str, Any]):
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

    def _metadata(self) -> _PlainValues:
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
        return _PlainValues(values, self._meta.read_statistics)


FORMAT = Format(
    "LeRobot",
    recognizes_lerobot,
    read_lerobot,
    examine=lambda path, look: examine_lerobot(Metadata(path, look), look),
    resembles=resembles_lerobot,
    root=lerobot_root,
    write=WRITE,
)
