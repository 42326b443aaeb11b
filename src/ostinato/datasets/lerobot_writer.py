"""Writes LeRobot datasets of version 3: Parquet tables, MP4 videos or PNG images, statistics and tasks."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ostinato._optional import require
from ostinato.core.kinds import show_path
from ostinato.core.options import check_choice, check_integer, check_number
from ostinato.core.processes import kept_scheduling
from ostinato.datasets.format import Writing
from ostinato.datasets.transitions import marks_ends, read_rows, spans_of
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ostinato.core.rows import Leaf
    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.dataset import DatasetStorage
    from ostinato.durable.progress import Progress

CODECS = {
    "h264": ("libx264", {"crf": "23", "preset": "fast", "bf": "0"}),
    "av1": ("libsvtav1", {"crf": "30", "preset": "8"}),
    "lossless": ("libx264rgb", {"qp": "0", "preset": "fast", "bf": "0"}),
}
"""Encoders and their options by the names of `codec`."""

_NUMBERED = {"frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64"}
NUMBERS = (
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
"""Dtypes of features that are numbers."""
_CHUNK_BYTES = 32 << 20
_CHUNK_FILES = 1000
_MOST_FRAMES, _SIDE = 100, 150
"""Statistics of frames are those of so many of an episode, evenly apart, with at least so many pixels on a side."""
_TOLERANCE_S = 1e-4
_PATTERN = "chunk-{chunk_index:03d}/file-{file_index:03d}"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LeRobotOptions:
    """How a dataset is written; see `export`."""

    fps: float
    tasks: Sequence[str]
    """The task of each episode."""
    task_path: FieldPath | None
    """The field of text that has the task of each row instead; None for none."""
    images: str = "video"
    codec: str = "h264"
    keyframe_interval: int = 2
    data_file_mb: float = 100
    video_file_mb: float = 200
    robot_type: str | None = None

    def check(self) -> None:
        """Check options whose values do not depend on the rows.

        Raises:
            OptionError: naming the option.
        """
        check_choice("images", self.images, ("video", "png"))
        check_choice("codec", self.codec, tuple(CODECS))
        check_integer("keyframe_interval", self.keyframe_interval, 1, OptionError)
        for name in ("fps", "data_file_mb", "video_file_mb"):
            what = "a positive number of " + ("rows per second" if name == "fps" else "megabytes")
            check_number(name, getattr(self, name), what, lambda number: 0 < number < math.inf)


class _Feature(NamedTuple):
    """One field of the rows as a feature of LeRobot."""

    name: str
    path: FieldPath
    kind: str
    """`value`, `string`, `image` or `video`."""
    dtype: str
    shape: tuple[int, ...]
    """Shape as LeRobot names it: `[1]` for single numbers, `[H, W, 3]` for images."""
    channels_last: bool = False

    @property
    def is_frame(self) -> bool:
        """Whether it holds images."""
        return self.kind in {"image", "video"}

    def described(self, codec: str, fps: float) -> dict[str, Any]:
        """Return the entry of `info.json`."""
        names = ["height", "width", "channels"] if self.is_frame else None
        entry: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "names": names}
        if self.kind == "video":
            height, width, _ = self.shape
            written = {"h264": "h264", "av1": "av1", "lossless": "h264"}[codec]
            info = {"video.height": height, "video.width": width, "video.codec": written}
            info |= {"video.pix_fmt": _pixel_format(codec, height, width), "video.is_depth_map": False}
            entry["info"] = {**info, "video.fps": fps, "video.channels": 3, "has_audio": False}
        return entry

    def hugging_face(self) -> dict[str, Any]:
        """Return how Hugging Face's `datasets` describes the column."""
        value = {"dtype": self.dtype, "_type": "Value"}
        if self.kind == "image":
            return {"_type": "Image"}
        if self.shape == (1,):
            return value
        if len(self.shape) == 1:
            return {"feature": value, "length": self.shape[0], "_type": "List"}
        return {"shape": list(self.shape), "dtype": self.dtype, "_type": f"Array{len(self.shape)}D"}


_OWN = [
    _Feature("timestamp", (), "value", "float32", (1,)),
    *(_Feature(name, (), "value", dtype, (1,)) for name, dtype in _NUMBERED.items()),
]


def _pixel_format(codec: str, height: int, width: int) -> str:
    if codec == "lossless":
        return "rgb24"
    return "yuv444p" if (height % 2 or width % 2) and codec == "h264" else "yuv420p"


# -- checks ------------------------------------------------------------------------------------------------------------


def plan_lerobot(dataset: DatasetStorage, options: LeRobotOptions) -> list[_Feature]:
    """Return the features of a dataset, after all checks that need no row but its ends and timestamps.

    Raises:
        SchemaError: if a field has no counterpart in LeRobot.
        KindError: if the encoder is missing.
        MissingExtraError: naming the extra to install.
    """
    require("pyarrow", "lerobot")
    features = [found for leaf in dataset.schema.leaves if (found := _feature(dataset, leaf, options)) is not None]
    features += [
        _Feature(_name(leaf.path), leaf.path, "string", "string", (1,))
        for leaf in dataset.schema.objects
        if leaf.path not in {("task",), options.task_path}
    ]
    seen: dict[str, FieldPath] = {}
    for feature in features:
        if feature.name in seen:
            msg = (
                f"{show_path(feature.path)} and {show_path(seen[feature.name])} would both be the feature "
                f"{feature.name!r} of LeRobot: rename one with fields="
            )
            raise SchemaError(msg)
        seen[feature.name] = feature.path
    if ("action",) not in {feature.path for feature in features}:
        msg = "LeRobot needs the field 'action': name it with fields="
        raise SchemaError(msg)
    for feature in features:
        if feature.kind == "video":
            _check_encoder(feature, options)
    if any(feature.kind == "image" for feature in features):
        require("PIL.Image", "lerobot")
    _check_timestamps(dataset, options.fps)
    return features


def _feature(dataset: DatasetStorage, leaf: Leaf, options: LeRobotOptions) -> _Feature | None:
    """Return the feature of a field; None if LeRobot numbers it anew, or knows it from the episodes."""
    path, dtype = leaf.path, str(leaf.dtype).removeprefix("torch.")
    if len(path) == 1 and path[0] in {"timestamp", *_NUMBERED}:
        return None
    if path == ("done",) and marks_ends(dataset):
        return None
    name = _name(path)
    if dtype == "uint8" and len(leaf.shape) == 3 and 3 in (leaf.shape[0], leaf.shape[2]):
        last = leaf.shape[0] != 3
        height, width = leaf.shape[:2] if last else leaf.shape[1:]
        kind = "video" if options.images == "video" else "image"
        name = "observation.image" if path == ("observation",) else name
        return _Feature(name, path, kind, kind, (height, width, 3), last)
    if dtype not in NUMBERS or len(leaf.shape) > 5 or 0 in leaf.shape:
        msg = (
            f"{show_path(path)} is {dtype}{list(leaf.shape)}: LeRobot holds numbers of up to 5 dimensions, none 0. "
            "Leave it out with fields="
        )
        raise SchemaError(msg)
    name = "observation.state" if path == ("observation",) else name
    return _Feature(name, path, "value", dtype, tuple(leaf.shape) or (1,))


def _name(path: FieldPath) -> str:
    name = ".".join(map(str, path))
    if "/" in name:
        msg = f"names of LeRobot's features have no '/', got {name!r}: rename it with fields="
        raise SchemaError(msg)
    return "next.done" if name == "done" else name


def _check_encoder(feature: _Feature, options: LeRobotOptions) -> None:
    """Check that the encoder is there, and takes frames of this size."""
    av = require("av", "lerobot")
    encoder, given = CODECS[options.codec]
    height, width, _ = feature.shape
    try:
        context = av.CodecContext.create(encoder, "w")
        context.width, context.height, context.time_base = width, height, Fraction(1, 25)
        context.pix_fmt, context.options = _pixel_format(options.codec, height, width), dict(given)
        with kept_scheduling():
            context.open()
    except (ValueError, OSError, LookupError, av.error.FFmpegError) as error:
        msg = (
            f"this build of PyAV has no encoder {encoder} for codec={options.codec!r}, or none for frames of "
            f"{height}x{width} ({show_path(feature.path)}): choose another codec, or images='png'"
        )
        raise KindError(msg) from error


def _check_timestamps(dataset: DatasetStorage, fps: float) -> None:
    """Check that timestamps, where rows have them, are those of the frame rate."""
    if ("timestamp",) not in dataset.schema.paths:
        return
    given = read_rows(dataset, ("timestamp",), 0, len(dataset))
    if given.size != len(dataset):
        msg = f"timestamp must be one number of seconds per row, got {list(given.shape[1:])}: leave it out with fields="
        raise SchemaError(msg)
    steps = np.concatenate([np.arange(length) for length in dataset.episode_lengths.tolist()])
    away = np.abs(given.reshape(-1).astype(np.float64) - steps / fps)
    worst = int(away.argmax())
    if away[worst] > _TOLERANCE_S:
        msg = (
            f"row {worst} has the timestamp {float(given.reshape(-1)[worst])}, at fps={fps:g} it would be "
            f"{steps[worst] / fps:g}: give the frame rate of the rows, or leave timestamp out with fields="
        )
        raise SchemaError(msg)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_lerobot(
    dataset: DatasetStorage, features: list[_Feature], options: LeRobotOptions, folder: Path, progress: Progress
) -> None:
    """Write a dataset to an empty folder, episode by episode. Memory: the numbers of one episode, and a few frames."""
    writer = _Writer(dataset, features, options, folder)
    for episode in range(dataset.episode_lengths.shape[0]):
        writer.write(episode, progress)
    writer.finish()


@final
class _Writer:
    def __init__(
        self, dataset: DatasetStorage, features: list[_Feature], options: LeRobotOptions, folder: Path
    ) -> None:
        self._dataset, self._features, self._options, self._folder = dataset, features, options, folder
        self._spans = spans_of(dataset)
        self._tasks: dict[str, int] = {}
        self._table = _Table(folder, [f for f in (*features, *_OWN) if f.kind != "video"], options.data_file_mb)
        self._videos = {f.name: _Video(folder, f, options) for f in features if f.kind == "video"}
        self._statistics: dict[str, list[dict[str, Array]]] = {}
        self._episodes: list[dict[str, Any]] = []
        (folder / "meta").mkdir()

    def write(self, episode: int, progress: Progress) -> None:
        """Write one episode."""
        first, last = self._spans[episode]
        columns: dict[str, Any] = {}
        stats: dict[str, dict[str, Array]] = {}
        for feature in self._features:
            if feature.is_frame:
                encoded, stats[feature.name] = self._frames(feature, first, last)
                if feature.kind == "image":
                    columns[feature.name] = encoded
            else:
                columns[feature.name] = read_rows(self._dataset, feature.path, first, last)
        row, columns = self._numbered(episode, columns)
        for feature in (*self._features, *_OWN):
            if feature.kind == "value":
                stats[feature.name] = describe_values(columns[feature.name])
        row |= self._table.write(columns)
        for video in self._videos.values():
            row |= video.end_episode()
        for name, entry in stats.items():
            self._statistics.setdefault(name, []).append(entry)
            row |= {f"stats/{name}/{kind}": value.tolist() for kind, value in entry.items()}
        self._episodes.append(row)
        progress.advance(last - first)

    def _frames(self, feature: _Feature, first: int, last: int) -> tuple[list[bytes], dict[str, Array]]:
        """Write the frames of an episode to its video, or encode them as PNG."""
        size = max(1, _CHUNK_BYTES // math.prod(feature.shape))
        wanted = np.linspace(first, last - 1, min(last - first, _MOST_FRAMES)).round().astype(np.int64)
        step = max(1, max(feature.shape) // _SIDE)
        encoded, some = [], []
        for at in range(first, last, size):
            frames = read_rows(self._dataset, feature.path, at, min(at + size, last))
            frames = frames if feature.channels_last else frames.transpose(0, 2, 3, 1)
            some.append(frames[wanted[(wanted >= at) & (wanted < at + size)] - at, ::step, ::step])
            if feature.kind == "video":
                self._videos[feature.name].write(np.ascontiguousarray(frames))
            else:
                encoded += [_png(np.ascontiguousarray(frame)) for frame in frames]
        return encoded, describe_frames(np.concatenate(some))

    def _numbered(self, episode: int, columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the row of an episode, and its columns with those that LeRobot numbers."""
        first, last = self._spans[episode]
        count = last - first
        path = self._options.task_path
        texts = [self._options.tasks[episode]] * count if path is None else read_rows(self._dataset, path, first, last)
        numbers = [self._tasks.setdefault(text, len(self._tasks)) for text in texts]
        steps = np.arange(count)
        times = (steps / self._options.fps).astype(np.float32)
        if ("timestamp",) in self._dataset.schema.paths:
            times = read_rows(self._dataset, ("timestamp",), first, last).reshape(-1).astype(np.float32)
        columns |= {
            "timestamp": times,
            "frame_index": steps,
            "episode_index": np.full(count, episode),
            "index": np.arange(first, last),
            "task_index": np.array(numbers, np.int64),
        }
        row = {"episode_index": episode, "tasks": list(dict.fromkeys(texts)), "length": count}
        return row | {"dataset_from_index": first, "dataset_to_index": last}, columns

    def finish(self) -> None:
        """Close files, and write what describes them."""
        pa, pq = require("pyarrow", "lerobot"), require("pyarrow.parquet", "lerobot")
        self._table.close()
        for video in self._videos.values():
            video.close()
        for row in self._episodes:
            row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        path = self._folder / "meta/episodes/chunk-000/file-000.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), path)
        whole = {name: merged(entries) for name, entries in self._statistics.items()}
        (self._folder / "meta/stats.json").write_text(json.dumps(whole, indent=4), "utf-8")
        _write_tasks(self._folder / "meta/tasks.parquet", list(self._tasks))
        (self._folder / "meta/info.json").write_text(json.dumps(self._info(), indent=4), "utf-8")

    def _info(self) -> dict[str, Any]:
        options, count = self._options, len(self._spans)
        fps = int(options.fps) if options.fps == int(options.fps) else options.fps
        return {
            "codebase_version": "v3.0",
            "robot_type": options.robot_type,
            "total_episodes": count,
            "total_frames": len(self._dataset),
            "total_tasks": len(self._tasks),
            "chunks_size": _CHUNK_FILES,
            "data_files_size_in_mb": options.data_file_mb,
            "video_files_size_in_mb": options.video_file_mb,
            "fps": fps,
            "splits": {"train": f"0:{count}"},
            "data_path": f"data/{_PATTERN}.parquet",
            "video_path": f"videos/{{video_key}}/{_PATTERN}.mp4" if self._videos else None,
            "features": {f.name: f.described(options.codec, fps) for f in (*self._features, *_OWN)},
        }


# -- statistics --------------------------------------------------------------------------------------------------------

_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}

Stats = dict[str, Array]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def describe_values(values: Array) -> Stats:
    """Return the statistics of rows `[rows, *shape]`: `[*shape]` each, or `[1]` for single numbers."""
    numbers = values.astype(np.float64)
    numbers = numbers.reshape(len(values), *(values.shape[1:] or (1,)))
    quantiles = np.quantile(numbers, list(_QUANTILES.values()), axis=0)
    return {
        "min": numbers.min(0),
        "max": numbers.max(0),
        "mean": numbers.mean(0),
        "std": numbers.std(0),
        "count": np.array([len(values)]),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
    }


def describe_frames(frames: Array) -> Stats:
    """Return the statistics of frames, uint8 `[n, H, W, 3]`, for each color: `[3, 1, 1]` each, in `[0, 1]`."""
    colors = [describe_values(frames[..., color].reshape(-1) / 255) for color in range(3)]
    found = {name: np.stack([color[name] for color in colors]).reshape(3, 1, 1) for name in colors[0]}
    return {**found, "count": np.array([len(frames)])}


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the statistics of all episodes from those of each. Quantiles are means, as LeRobot has them."""
    names = [name for name in ("min", "max", "mean", "std", "count", *_QUANTILES) if name in parts[0]]
    every = {name: np.array([part[name] for part in parts], np.float64) for name in names}
    counts = every["count"].reshape(len(parts), -1)[:, 0]
    weights = (counts / counts.sum()).reshape(-1, *[1] * (every["mean"].ndim - 1))
    found: dict[str, Array] = {name: (values * weights).sum(0) for name, values in every.items() if name != "count"}
    spread = every["std"] ** 2 + (every["mean"] - found["mean"]) ** 2
    found |= {"min": every["min"].min(0), "max": every["max"].max(0), "std": np.sqrt((spread * weights).sum(0))}
    return {**{name: value.tolist() for name, value in found.items()}, "count": [int(counts.sum())]}


# -- files -------------------------------------------------------------------------------------------------------------


def _png(frame: Array) -> bytes:
    out = io.BytesIO()
    require("PIL.Image", "lerobot").fromarray(frame).save(out, format="PNG", compress_level=1)
    return out.getvalue()


def _write_tasks(path: Path, tasks: list[str]) -> None:
    """Write the tasks as pandas writes a table whose index are the texts."""
    pa, pq = require("pyarrow", "lerobot"), require("pyarrow.parquet", "lerobot")
    index = "__index_level_0__"
    kinds = {"task_index": ("int64", "int64"), None: ("unicode", "object")}
    described = [
        {"name": name, "field_name": name or index, "pandas_type": kind, "numpy_type": stored, "metadata": None}
        for name, (kind, stored) in kinds.items()
    ]
    header = [{"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object", "metadata": None}]
    pandas = {"index_columns": [index], "column_indexes": header, "columns": described, "attributes": {}}
    pandas |= {"creator": {"library": "pyarrow", "version": pa.__version__}, "pandas_version": "2.2.0"}
    numbers = pa.array(range(len(tasks)), pa.int64())
    table = pa.table({"task_index": numbers, index: pa.array(tasks, pa.large_string())})
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


def _place(number: int) -> dict[str, int]:
    """Return the numbers in the path of a file."""
    return {"chunk_index": number // _CHUNK_FILES, "file_index": number % _CHUNK_FILES}


def _new_file(folder: Path, number: int, suffix: str) -> Path:
    path = folder / f"{_PATTERN.format(**_place(number))}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@final
class _Table:
    """The Parquet files of the rows: a row group for each episode, several episodes in a file."""

    def __init__(self, folder: Path, features: list[_Feature], file_mb: float) -> None:
        self._folder, self._features, self._most = folder / "data", features, file_mb * 1e6
        self._writer: Any = None
        self._files = self._bytes = 0
        info = {"info": {"features": {feature.name: feature.hugging_face() for feature in features}}}
        self._metadata = {"huggingface": json.dumps(info)}

    def write(self, columns: dict[str, Any]) -> dict[str, int]:
        """Write the rows of an episode; return where they are."""
        pa, pq = require("pyarrow", "lerobot"), require("pyarrow.parquet", "lerobot")
        table = pa.table({feature.name: _arrow(columns[feature.name], feature) for feature in self._features})
        if self._writer is not None and self._bytes + table.nbytes > self._most:
            self.close()
        if self._writer is None:
            self._schema = table.schema.with_metadata(self._metadata)
            self._writer = pq.ParquetWriter(_new_file(self._folder, self._files, "parquet"), self._schema)
            self._files, self._bytes = self._files + 1, 0
        self._writer.write_table(table.cast(self._schema), row_group_size=max(1, table.num_rows))
        self._bytes += table.nbytes
        return {f"data/{key}": value for key, value in _place(self._files - 1).items()}

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _arrow(values: Any, feature: _Feature) -> Any:
    """Return a column as Arrow holds it: vectors as lists of one length, tensors as lists of lists."""
    pa = require("pyarrow", "lerobot")
    if feature.kind == "string":
        return pa.array(values, pa.string())
    if feature.kind == "image":
        rows = [{"bytes": data, "path": f"frame-{n:06d}.png"} for n, data in enumerate(values)]
        return pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    out = pa.array(np.ascontiguousarray(values).reshape(-1))
    shape = feature.shape if feature.shape != (1,) else ()
    for axis in range(len(shape) - 1, -1, -1):
        size = shape[axis]
        if len(shape) == 1:
            out = pa.FixedSizeListArray.from_arrays(out, size)
        else:
            out = pa.ListArray.from_arrays(pa.array(np.arange(0, len(out) + 1, size, dtype=np.int32)), out)
    return out


@final
class _Video:
    """The MP4 files of one camera: several episodes in a file, each begins with a keyframe."""

    def __init__(self, folder: Path, feature: _Feature, options: LeRobotOptions) -> None:
        self._name, self._shape, self._options = feature.name, feature.shape, options
        self._folder = folder / "videos" / feature.name
        self._container: Any = None
        self._stream: Any = None
        self._files = self._frames = self._bytes = 0
        self._begin = 0
        """Frame at which the current episode begins."""

    def write(self, frames: Array) -> None:
        """Encode frames `[n, H, W, 3]` of the current episode."""
        av = require("av", "lerobot")
        if self._container is None:
            self._open()
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = self._frames, 1 / self._rate()
            if self._frames == self._begin:
                frame.pict_type = av.video.frame.PictureType.I
            with kept_scheduling():  # the first frame opens the encoder
                packets = self._stream.encode(frame)
            self._mux(packets)
            self._frames += 1

    def _rate(self) -> Fraction:
        return Fraction(self._options.fps).limit_denominator(100_000)

    def _open(self) -> None:
        av = require("av", "lerobot")
        path = _new_file(self._folder, self._files, "mp4")
        self._files += 1
        height, width, _ = self._shape
        encoder, given = CODECS[self._options.codec]
        self._container = av.open(str(path), "w")
        options = {**given, "g": str(self._options.keyframe_interval)}
        self._stream = self._container.add_stream(encoder, rate=self._rate(), options=options)
        self._stream.width, self._stream.height = width, height
        self._stream.pix_fmt = _pixel_format(self._options.codec, height, width)

    def _mux(self, packets: Any) -> None:
        for packet in packets:
            self._bytes += packet.size
            self._container.mux(packet)

    def end_episode(self) -> dict[str, Any]:
        """End an episode; return where its frames are."""
        fps, begin, end = self._options.fps, self._begin, self._frames
        self._begin = end
        if self._bytes > self._options.video_file_mb * 1e6:
            self.close()
        place = {**_place(self._files - 1), "from_timestamp": begin / fps, "to_timestamp": end / fps}
        return {f"videos/{self._name}/{key}": value for key, value in place.items()}

    def close(self) -> None:
        """Encode the frames that wait, and close the file."""
        if self._container is not None:
            with kept_scheduling():
                self._mux(self._stream.encode(None))
            self._container.close()
            self._container = self._stream = None
            self._frames = self._bytes = self._begin = 0


# -- options -----------------------------------------------------------------------------------------------------------


def _prepare_lerobot(dataset: DatasetStorage, given: Mapping[str, Any]) -> Callable[[Path, Progress], None]:
    fps: Any = given.get("fps", dataset.fps)
    if fps is None:
        msg = f"LeRobot needs the frame rate, which the source ({dataset.format}) does not know: give fps="
        raise OptionError(msg)
    options = LeRobotOptions(fps, *_tasks(dataset, given), **{name: given[name] for name in _PLAIN if name in given})
    options.check()
    for name in ("codec", "keyframe_interval", "video_file_mb"):
        if name in given and options.images == "png":
            msg = f"{name} is for images='video', and images='png' writes no video: leave it out"
            raise OptionError(msg)
    features = plan_lerobot(dataset, options)
    return lambda place, bar: write_lerobot(dataset, features, options, place, bar)


def _tasks(dataset: DatasetStorage, given: Mapping[str, Any]) -> tuple[Sequence[str], FieldPath | None]:
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


_PLAIN = ("images", "codec", "keyframe_interval", "data_file_mb", "video_file_mb", "robot_type")
"""Options that are used as they are given."""
WRITE = Writing("lerobot", ("fps", "task", "task_key", *_PLAIN), _prepare_lerobot)
