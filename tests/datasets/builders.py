"""Small datasets in the formats of others, written with their own libraries (pyarrow, PyAV, h5py, zarr, minari).

No code of Ostinato takes part. Every builder writes one dataset and returns a `Model`: NumPy arrays with what a correct
reader returns for each row. Frames of videos are those that PyAV decodes from the whole file, read from its beginning.
The values come from a generator with a fixed seed: the same arguments give the same dataset.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .videos import decode_video, pictures, write_video

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "EVERY_KIND",
    "STATE",
    "Model",
    "d4rl_hdf5",
    "diffusion_zarr",
    "last_rows",
    "lerobot_v3",
    "lerobot_v21",
    "minari_dataset",
    "pictures",
    "robomimic_hdf5",
    "write_tasks",
    "write_video",
]

Array = np.ndarray[Any, np.dtype[Any]]
Key = str | tuple[str, ...]
Features = dict[str, tuple[str, tuple[int, ...]]]

STATE: Features = {"observation.state": ("float32", (3,)), "action": ("float32", (2,))}
# One feature of every kind that LeRobot writes: scalars, vectors and matrices, numbers and truth values.
EVERY_KIND: Features = {
    **STATE,
    "observation.joints": ("float64", (5,)),
    "observation.grid": ("float32", (2, 3)),
    "observation.cube": ("float32", (2, 2, 2)),
    "observation.contact": ("bool", (4,)),
    "observation.steps": ("int64", (2,)),
    "next.reward": ("float32", (1,)),
    "next.done": ("bool", (1,)),
    "next.success": ("bool", (1,)),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """What a correct reader returns.

    Attributes:
        path: The file or directory that was written.
        lengths: The number of rows of each episode, in order.
        columns: Key -> array `[rows, ...]`, all episodes in order. Features of shape `(1,)` are `[rows]`; frames are
            uint8 `[rows, 3, H, W]`.
        tasks: The task of each row as a text; empty where the format has none.
        fps: Frames per second, where the format has them.
        infos: Further fields by their names in the file, which not every reader returns.
    """

    path: Path
    lengths: list[int]
    columns: dict[Key, Array]
    tasks: list[str] = dataclasses.field(default_factory=list)
    fps: int | None = None
    infos: dict[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def ends(self) -> list[int]:
        """The row after the last one of each episode."""
        return list(itertools.accumulate(self.lengths))

    @property
    def starts(self) -> list[int]:
        """The first row of each episode."""
        return [0, *self.ends[:-1]]


def last_rows(lengths: Sequence[int]) -> NDArray[np.bool_]:
    """Whether each row is the last one of its episode."""
    return np.isin(np.arange(sum(lengths)), np.cumsum(lengths) - 1)


# ------------------------------------------------------------------------------------------------------------ LeRobot


def lerobot_v3(
    folder: Path,
    *,
    episodes_per_file: int = 2,
    episodes_per_video: int | Mapping[str, int] = 2,
    files_per_chunk: int = 1000,
    skipped_frames: Mapping[str, int] | None = None,
    fixed_lists: bool = True,
    **options: Any,
) -> Model:
    """Write a LeRobot dataset of version 3.0.

    A video of several episodes is encoded in one run, so that an episode need not begin with a keyframe.

    Args:
        folder: The directory to write.
        episodes_per_file: Episodes in each Parquet file.
        episodes_per_video: Episodes in each MP4 file; a mapping has a number for each camera.
        files_per_chunk: Files in each `chunk-...` directory.
        skipped_frames: Camera -> frames before the first episode of each file that belong to no episode.
        fixed_lists: Vectors as fixed-size lists, as the official writer has them; False for the lists of its converter.
        options: See `Recording`.
    """
    made = Recording(folder, **options)
    episodes: list[dict[str, Any]] = [
        {
            "episode_index": episode,
            "tasks": [_task(episode % made.tasks)],
            "length": span.stop - span.start,
            "dataset_from_index": span.start,
            "dataset_to_index": span.stop,
        }
        for episode, span in enumerate(made.spans)
    ]
    for name in made.cameras:
        count = episodes_per_video if isinstance(episodes_per_video, int) else episodes_per_video[name]
        _v3_videos(made, name, episodes, count, files_per_chunk, (skipped_frames or {}).get(name, 0))
    for file, group in enumerate(_groups(len(episodes), episodes_per_file)):
        chunk, number = divmod(file, files_per_chunk)
        for episode in group:
            episodes[episode] |= {"data/chunk_index": chunk, "data/file_index": number}
        path = folder / f"data/chunk-{chunk:03d}/file-{number:03d}.parquet"
        made.write_rows(path, [made.spans[episode] for episode in group], fixed=fixed_lists)
    for row, span in zip(episodes, made.spans, strict=True):
        for name, entry in made.statistics(span).items():
            row |= {f"stats/{name}/{kind}": value for kind, value in entry.items()}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(episodes), path)
    pattern = "chunk-{chunk_index:03d}/file-{file_index:03d}"
    made.write_info(
        "v3.0",
        chunks_size=files_per_chunk,
        data_files_size_in_mb=100,
        video_files_size_in_mb=200,
        data_path=f"data/{pattern}.parquet",
        video_path=f"videos/{{video_key}}/{pattern}.mp4",
    )
    (folder / "meta/stats.json").write_text(json.dumps(made.statistics(slice(None)), indent=4))
    write_tasks(folder / "meta/tasks.parquet", made.task_texts)
    return made.model()


def lerobot_v21(folder: Path, *, episodes_per_chunk: int = 1000, **options: Any) -> Model:
    """Write a LeRobot dataset of version 2.1: a Parquet file and an MP4 of each camera for each episode.

    Args:
        folder: The directory to write.
        episodes_per_chunk: Episodes in each `chunk-...` directory.
        options: See `Recording`.
    """
    made = Recording(folder, **options)
    decoded: dict[str, list[NDArray[np.uint8]]] = {name: [] for name in made.cameras}
    for episode, span in enumerate(made.spans):
        chunk = episode // episodes_per_chunk
        for name in made.cameras:
            path = folder / f"videos/chunk-{chunk:03d}/{name}/episode_{episode:06d}.mp4"
            decoded[name].append(made.write_video(path, made.frames[name][span]))
        made.write_rows(folder / f"data/chunk-{chunk:03d}/episode_{episode:06d}.parquet", [span], fixed=True)
    made.columns |= {name: np.concatenate(frames) for name, frames in decoded.items()}
    made.write_info(
        "v2.1",
        total_videos=len(made.cameras) * len(made.spans),
        total_chunks=-(-len(made.spans) // episodes_per_chunk),
        chunks_size=episodes_per_chunk,
        data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        video_path="videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    )
    count = range(len(made.spans))
    lines = {
        "tasks": [{"task_index": n, "task": text} for n, text in enumerate(made.task_texts)],
        "episodes": [{"episode_index": e, "tasks": [_task(e % made.tasks)], "length": made.lengths[e]} for e in count],
        "episodes_stats": [{"episode_index": e, "stats": made.statistics(made.spans[e])} for e in count],
    }
    for name, rows in lines.items():
        (folder / f"meta/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made.model()


@dataclasses.dataclass
class Recording:
    """What LeRobot datasets of both versions hold.

    Attributes:
        folder: The directory to write.
        lengths: Rows of each episode.
        cameras: Video feature -> `(height, width)`.
        images: Image feature (PNG in Parquet) -> `(height, width)`.
        features: Name -> `(dtype, shape)` of the other features.
        fps: Frames per second.
        tasks: Number of tasks; episode `i` has task `i % tasks`.
        codec: Name of PyAV's encoder.
        keyframes: Largest distance of keyframes.
        b_frames: Frames between reference frames that are stored out of order.
    """

    folder: Path
    lengths: Sequence[int] = (7, 5, 9)
    cameras: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    images: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    features: Features = dataclasses.field(default_factory=lambda: STATE)
    fps: int = 10
    tasks: int = 2
    codec: str = "libx264"
    keyframes: int = 2
    b_frames: int = 0

    def __post_init__(self) -> None:
        ends = itertools.accumulate(self.lengths)
        self.spans = [slice(end - length, end) for length, end in zip(self.lengths, ends, strict=True)]
        self.task_texts = [_task(number) for number in range(min(self.tasks, len(self.lengths)))]
        sizes = {**self.cameras, **self.images}
        self.frames = {name: pictures(sum(self.lengths), *size, seed=n) for n, (name, size) in enumerate(sizes.items())}
        self.encoded = {name: _png(self.frames[name]) for name in self.images}
        self.columns = self._values()
        self.columns |= {name: self.frames[name].transpose(0, 3, 1, 2) for name in self.images}
        self.described = self._described()

    def _values(self) -> dict[Key, Array]:
        """Random values of all features, and the columns that every LeRobot dataset has."""
        generator = np.random.default_rng(0)
        rows = sum(self.lengths)
        columns: dict[Key, Array] = {}
        for name, (dtype, shape) in self.features.items():
            full = (rows, *shape) if shape != (1,) else (rows,)
            if dtype == "bool":
                columns[name] = generator.random(full) < 0.5
            elif "int" in dtype:
                columns[name] = generator.integers(-100, 100, full).astype(dtype)
            else:
                columns[name] = generator.standard_normal(full).astype(dtype)
        if "next.done" in columns:
            columns["next.done"] = last_rows(self.lengths)
        steps = np.concatenate([np.arange(length) for length in self.lengths])
        episode = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return columns | {
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": episode,
            "index": np.arange(rows),
            "task_index": episode % self.tasks,
        }

    def _described(self) -> dict[str, dict[str, Any]]:
        """The entry `features` of `info.json`."""
        result: dict[str, dict[str, Any]] = {}
        for name, (dtype, shape) in self.features.items():
            names = [f"{name.rpartition('.')[2]}_{n}" for n in range(shape[0])] if len(shape) == 1 else None
            result[name] = {"dtype": dtype, "shape": list(shape), "names": names}
        codec = {"libx264": "h264", "libx265": "hevc", "libsvtav1": "av1"}.get(self.codec, self.codec)
        sides = ["height", "width", "channels"]
        for name, (height, width) in self.cameras.items():
            info = {"video.height": height, "video.width": width, "video.codec": codec, "video.pix_fmt": "yuv420p"}
            info |= {"video.is_depth_map": False, "video.fps": self.fps, "video.channels": 3, "has_audio": False}
            result[name] = {"dtype": "video", "shape": [height, width, 3], "names": sides, "info": info}
        for name, (height, width) in self.images.items():
            result[name] = {"dtype": "image", "shape": [height, width, 3], "names": sides}
        for name in ("timestamp", "frame_index", "episode_index", "index", "task_index"):
            result[name] = {"dtype": str(self.columns[name].dtype), "shape": [1], "names": None}
        return result

    def write_video(self, path: Path, frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Write an MP4, and return its frames as they decode."""
        options: dict[str, Any] = {"codec": self.codec, "keyframes": self.keyframes, "b_frames": self.b_frames}
        write_video(path, frames, fps=self.fps, **options)
        return decode_video(path)

    def write_rows(self, path: Path, spans: Sequence[slice], *, fixed: bool) -> None:
        """Write the rows of some episodes as one Parquet file, one row group for each episode."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = []
        for span in spans:
            arrays: dict[str, pa.Array] = {}
            for name, entry in self.described.items():
                if entry["dtype"] == "image":
                    files = [
                        {"bytes": data, "path": f"frame-{n:06d}.png"} for n, data in enumerate(self.encoded[name][span])
                    ]
                    arrays[name] = pa.array(files, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
                elif entry["dtype"] != "video":
                    arrays[name] = _nested(self.columns[name][span], fixed=fixed)
            tables.append(pa.table(arrays))
        features = {name: _hugging_face(entry) for name, entry in self.described.items() if name in arrays}
        schema = tables[0].schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        with pq.ParquetWriter(path, schema) as writer:
            for table in tables:
                writer.write_table(table.cast(schema))

    def statistics(self, span: slice) -> dict[str, dict[str, Any]]:
        """Statistics of all features; those of pictures are of the frames before they were encoded."""
        return {
            name: _statistics(
                self.frames[name][span] if name in self.frames else self.columns[name][span],
                camera=name in self.frames,
            )
            for name in self.described
        }

    def write_info(self, version: str, *, video_path: str, **more: Any) -> None:
        info = {
            "codebase_version": version,
            "robot_type": "builder",
            "total_episodes": len(self.lengths),
            "total_frames": sum(self.lengths),
            "total_tasks": len(self.task_texts),
            "fps": self.fps,
            "splits": {"train": f"0:{len(self.lengths)}"},
            "features": self.described,
            "video_path": video_path if self.cameras else None,
        }
        (self.folder / "meta").mkdir(parents=True, exist_ok=True)
        (self.folder / "meta/info.json").write_text(json.dumps(info | more, indent=4))

    def model(self) -> Model:
        texts = [_task(int(number)) for number in self.columns["task_index"]]
        columns = {**self.columns, "done": last_rows(self.lengths)}
        return Model(self.folder, list(self.lengths), columns, texts, self.fps)


def _task(number: int) -> str:
    return f"Put the {['red', 'green', 'blue'][number % 3]} cube into box {number}."


def _groups(count: int, size: int) -> Iterator[range]:
    return (range(first, min(first + size, count)) for first in range(0, count, size))


def _v3_videos(
    made: Recording, name: str, episodes: list[dict[str, Any]], per_file: int, files_per_chunk: int, skipped: int
) -> None:
    """Write the MP4 files of one camera, note where each episode lies, and keep its frames as they decode."""
    frames, decoded = made.frames[name], []
    for file, group in enumerate(_groups(len(episodes), per_file)):
        chunk, number = divmod(file, files_per_chunk)
        path = made.folder / f"videos/{name}/chunk-{chunk:03d}/file-{number:03d}.mp4"
        span = slice(made.spans[group[0]].start, made.spans[group[-1]].stop)
        before = np.zeros((skipped, *frames.shape[1:]), np.uint8)
        decoded.append(made.write_video(path, np.concatenate([before, frames[span]]))[skipped:])
        at = skipped
        for episode in group:
            episodes[episode] |= {
                f"videos/{name}/chunk_index": chunk,
                f"videos/{name}/file_index": number,
                f"videos/{name}/from_timestamp": at / made.fps,
                f"videos/{name}/to_timestamp": (at + made.lengths[episode]) / made.fps,
            }
            at += made.lengths[episode]
    made.columns[name] = np.concatenate(decoded)


def _png(frames: NDArray[np.uint8]) -> list[bytes]:
    from PIL import Image

    result = []
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="PNG", compress_level=1)
        result.append(buffer.getvalue())
    return result


def _nested(values: Array, *, fixed: bool) -> pa.Array:
    """`[rows, ...]` as an Arrow array: vectors as lists, matrices as lists of lists."""
    result = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        size = values.shape[axis]
        if fixed and values.ndim == 2:
            result = pa.FixedSizeListArray.from_arrays(result, size)
        else:
            offsets = np.arange(0, len(result) + 1, size, dtype=np.int32)
            result = pa.ListArray.from_arrays(pa.array(offsets), result)
    return result


def _hugging_face(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What Hugging Face's `datasets` writes about a column."""
    value = {"dtype": entry["dtype"], "_type": "Value"}
    if entry["dtype"] == "image":
        return {"_type": "Image"}
    if entry["shape"] == [1]:
        return value
    if len(entry["shape"]) == 1:
        return {"feature": value, "length": entry["shape"][0], "_type": "List"}
    return {"shape": entry["shape"], "dtype": entry["dtype"], "_type": f"Array{len(entry['shape'])}D"}


def _statistics(values: Array, *, camera: bool) -> dict[str, Any]:
    """Statistics of `[rows, ...]`, or of pictures `[rows, H, W, 3]` for each color between 0 and 1."""
    if camera:
        values = values.astype(np.float64) / 255
    axes, keep = ((0, 1, 2), (3, 1, 1)) if camera else ((0,), values.shape[1:] or (1,))
    numbers = values.astype(np.float64)
    result = {name: getattr(numbers, name)(axes) for name in ("min", "max", "mean", "std")}
    return {name: np.reshape(value, keep).tolist() for name, value in result.items()} | {"count": [len(values)]}


def write_tasks(path: Path, tasks: Sequence[str]) -> None:
    """Write `tasks.parquet` as pandas does: the texts are the index of the table."""
    index = "__index_level_0__"
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.large_string())})
    plain = {"metadata": None}
    pandas = {
        "index_columns": [index],
        "column_indexes": [
            {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object", **plain}
        ],
        "columns": [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64", **plain},
            {"name": None, "field_name": index, "pandas_type": "unicode", "numpy_type": "object", **plain},
        ],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.0",
    }
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


# ----------------------------------------------------------------------------------------------- D4RL, robomimic, Zarr


def _transitions(
    lengths: Sequence[int], observation: int, action: int, dtype: str = "float32"
) -> tuple[Array, Array, Array, Array, Array]:
    """Observations, next observations (within an episode those of the next row), actions, rewards, last rows."""
    generator = np.random.default_rng(0)
    observations, following = [], []
    for length in lengths:
        states = generator.standard_normal((length + 1, observation)).astype(dtype)
        observations.append(states[:-1])
        following.append(states[1:])
    rows = sum(lengths)
    actions = generator.standard_normal((rows, action)).astype(dtype)
    rewards = generator.standard_normal(rows).astype("float32")
    return np.concatenate(observations), np.concatenate(following), actions, rewards, last_rows(lengths)


def d4rl_hdf5(
    path: Path,
    *,
    lengths: Sequence[int] = (6, 4, 8),
    terminated: Sequence[int] = (0, 2),
    timeouts: bool = True,
    next_observations: bool = False,
) -> Model:
    """Write a D4RL file: flat arrays `observations`, `actions`, `rewards`, `terminals`, and `timeouts`.

    The file also has the groups `infos` (`qpos`, `qvel`, `action_log_probs`) and `metadata`.

    Args:
        path: The file to write.
        lengths: Rows of each episode.
        terminated: Episodes that end by termination; the others are cut off by a timeout.
        timeouts: Whether the file has the array `timeouts`. Without it only terminated episodes have an end: those
            that are cut off run into the next one, and the model has the episodes that can be told apart.
        next_observations: Whether the file has the array `next_observations`.
    """
    import h5py

    observations, following, actions, rewards, last = _transitions(lengths, 3, 2)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    ended = last & np.isin(episode, list(terminated))
    cut = last & ~ended
    extra = {
        "infos/qpos": observations[:, :2].astype("float64"),
        "infos/qvel": observations[:, 2:].astype("float64"),
        "infos/action_log_probs": -np.abs(rewards),
    }
    with h5py.File(path, "w") as file:
        arrays = {"observations": observations, "actions": actions, "rewards": rewards, "terminals": ended}
        arrays |= {"timeouts": cut} if timeouts else {}
        arrays |= {"next_observations": following} if next_observations else {}
        arrays |= extra
        for name, values in arrays.items():
            file.create_dataset(name, data=values, compression="gzip")
        file["metadata/algorithm"] = "SAC"
        file["metadata/iteration"] = 100
        file["metadata/policy/fc0/weight"] = np.ones((2, 3), "float32")
    if not timeouts:
        cut = np.zeros_like(cut)
        cut[-1] = not ended[-1]
    done = ended | cut
    columns = _outcome(observations, following, actions, rewards, ended, cut)
    if not next_observations:
        columns["next", "observation"] = np.concatenate([observations[1:], observations[-1:]])
    counts = np.diff(np.flatnonzero(done), prepend=-1).tolist()
    return Model(path, counts, columns, infos=extra)


def _outcome(
    observations: Array, following: Array, actions: Array, rewards: Array, terminated: Array, truncated: Array
) -> dict[Key, Array]:
    return {
        "observation": observations,
        "action": actions,
        ("next", "observation"): following,
        ("next", "reward"): rewards,
        ("next", "terminated"): terminated,
        ("next", "truncated"): truncated,
        ("next", "done"): terminated | truncated,
    }


def robomimic_hdf5(
    path: Path,
    *,
    lengths: Sequence[int] = (6, 4, 8),
    cameras: Mapping[str, tuple[int, int]] | None = None,
    next_observations: bool = True,
    masks: bool = True,
) -> Model:
    """Write a robomimic file: `data/demo_N/{obs, next_obs, actions, rewards, dones, states}` and `mask/{train, valid}`.

    The last row of every demonstration has `dones` 1 and reward 1. `demo_10` sorts before `demo_2` as a text: eleven
    lengths show whether a reader goes by the numbers.

    Args:
        path: The file to write.
        lengths: Rows of each demonstration.
        cameras: Observation of pictures -> `(height, width)`; stored as uint8 `[rows, H, W, 3]`.
        next_observations: Whether the demonstrations have `next_obs`.
        masks: Whether the file has filter keys: the first demonstration is in `valid`, the others are in `train`.
    """
    import h5py

    states, following, actions, _, last = _transitions(lengths, 5, 3, "float64")
    rewards = last.astype("float64")
    frames = {name: pictures(sum(lengths) + 1, *size, seed=n) for n, (name, size) in enumerate((cameras or {}).items())}
    current = {"robot0_eef_pos": states[:, :3], "object": states[:, 3:], **{n: f[:-1] for n, f in frames.items()}}
    later = {"robot0_eef_pos": following[:, :3], "object": following[:, 3:], **{n: f[1:] for n, f in frames.items()}}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(lengths)
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {}})
        for n, end in enumerate(np.cumsum(lengths)):
            demo = data.create_group(f"demo_{n}")
            demo.attrs["num_samples"], demo.attrs["model_file"] = lengths[n], "<mujoco/>"
            arrays = {"actions": actions, "rewards": rewards, "dones": last.astype("int64"), "states": states}
            arrays |= {f"obs/{name}": values for name, values in current.items()}
            arrays |= {f"next_obs/{name}": values for name, values in later.items()} if next_observations else {}
            for name, values in arrays.items():
                demo.create_dataset(name, data=values[end - lengths[n] : end])
        if masks:
            names = [f"demo_{n}".encode() for n in range(len(lengths))]
            file["mask/valid"], file["mask/train"] = np.array(names[:1]), np.array(names[1:])
    columns: dict[Key, Array] = {("observation", name): values for name, values in current.items()}
    columns |= {("next", "observation", name): values for name, values in later.items()}
    columns |= {"action": actions, ("next", "reward"): rewards, ("next", "done"): last}
    return Model(path, list(lengths), columns, infos={"states": states})


def diffusion_zarr(
    path: Path,
    *,
    lengths: Sequence[int] = (6, 4, 8),
    zarr_format: int = 2,
    chunk_rows: int = 5,
    picture_dtype: str = "uint8",
) -> Model:
    """Write a replay buffer as Diffusion Policy does: `data/{action, state, img}` and `meta/episode_ends`.

    Args:
        path: The directory to write, or the archive if the name ends with `.zip`.
        lengths: Rows of each episode.
        zarr_format: 2 or 3.
        chunk_rows: Rows of each chunk: chunks and episodes do not end together.
        picture_dtype: uint8, or float32 as in the files of PushT.
    """
    observations, _, actions, _, _ = _transitions(lengths, 5, 2)
    images = pictures(sum(lengths), 16, 16).astype(picture_dtype)
    arrays: dict[Key, Array] = {"action": actions, "state": observations, "img": images}
    write_zarr(path, arrays, lengths, zarr_format, chunk_rows)
    return Model(path, list(lengths), arrays)


def write_zarr(
    path: Path, arrays: Mapping[Any, Array], lengths: Sequence[int], zarr_format: int = 3, chunk_rows: int = 10
) -> None:
    """Write arrays of rows and the ends of episodes."""
    import numcodecs
    import zarr

    store: Any = zarr.storage.ZipStore(path, mode="w") if path.suffix == ".zip" else zarr.storage.LocalStore(path)
    root: Any = zarr.open_group(store, mode="w", zarr_format=2 if zarr_format == 2 else 3)
    packed = {"compressors": [numcodecs.Blosc("zstd", clevel=1)]} if zarr_format == 2 else {}
    data, meta = root.create_group("data"), root.create_group("meta")
    for name, values in arrays.items():
        array = data.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=(chunk_rows, *values.shape[1:]), **packed
        )
        array[:] = values
    ends = np.cumsum(lengths).astype(np.int64)
    meta.create_array("episode_ends", shape=ends.shape, dtype=ends.dtype, chunks=ends.shape, **packed)[:] = ends
    store.close()


# ------------------------------------------------------------------------------------------------------------- Minari


def minari_dataset(
    folder: Path,
    *,
    lengths: Sequence[int] = (6, 4, 8),
    data_format: str = "hdf5",
    observation: str = "box",
    action: str = "box",
) -> Model:
    """Write a Minari dataset with Minari's own storage into `folder / "data"`.

    `minari.load_dataset(folder.name)` finds it where `MINARI_DATASETS_PATH` is `folder.parent`.

    Args:
        folder: The directory of the dataset, such as `.../door-v0`.
        lengths: Steps of each episode; every other one is truncated.
        data_format: "hdf5", "arrow" or "parquet".
        observation: "box", "dict" (nested, with a picture and a goal), or "image" (uint8 stored as it is).
        action: "box" or "discrete".
    """
    from gymnasium import spaces

    generator = np.random.default_rng(0)
    space = _observation_space(observation)
    actions: Any = spaces.Discrete(4) if action == "discrete" else spaces.Box(-9, 9, (2,), np.float32)
    written: list[dict[str, Any]] = []
    for n, length in enumerate(lengths):
        ends = np.arange(length) == length - 1
        stop = np.zeros(length, bool)
        chosen = generator.integers(0, 4, length) if action == "discrete" else generator.uniform(-9, 9, (length, 2))
        written.append(
            {
                "observations": _observations(space, length + 1, generator, len(written)),
                "actions": chosen.astype("int64" if action == "discrete" else "float32"),
                "rewards": generator.standard_normal(length),
                "terminations": ends if n % 2 == 0 else stop,
                "truncations": stop if n % 2 == 0 else ends,
                "infos": {"success": [*ends.tolist(), True], "qpos": generator.standard_normal((length + 1, 2))},
            }
        )
    write_minari(folder, space, actions, written, data_format, jpeg_encoding=False)
    return _minari_model(folder, list(lengths), written)


def write_minari(folder: Path, space: Any, actions: Any, episodes: Sequence[Any], kind: str, **options: Any) -> None:
    """Write episodes with Minari's own storage."""
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    (folder / "data").mkdir(parents=True)
    storage = MinariStorage.new(folder / "data", space, actions, data_format=kind, **options)
    storage.update_metadata({"dataset_id": folder.name, "author": {"builder"}, "minari_version": "0.5.3"})
    storage.update_episodes([EpisodeBuffer(id=n, seed=100 + n, **buffer) for n, buffer in enumerate(episodes)])


def _observation_space(kind: str) -> Any:
    from gymnasium import spaces

    picture = spaces.Box(0, 255, (12, 10, 3), np.uint8)
    if kind == "image":
        return picture
    if kind == "box":
        return spaces.Box(-np.inf, np.inf, (3,), np.float64)
    inner = spaces.Dict({"position": spaces.Box(-9, 9, (2, 2), np.float32), "contact": spaces.MultiBinary(3)})
    return spaces.Dict(
        {"goal": spaces.Box(-9, 9, (2,), np.float64), "arm": inner, "camera": picture, "mode": spaces.Discrete(5)}
    )


def _observations(space: Any, count: int, generator: np.random.Generator, number: int) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: _observations(part, count, generator, number) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return generator.integers(0, int(space.n), count)
    if space.dtype == np.uint8:
        return pictures(count, *space.shape[:2], seed=number)
    if isinstance(space, spaces.MultiBinary):
        return generator.integers(0, 2, (count, *space.shape)).astype(space.dtype)
    return generator.uniform(-9, 9, (count, *space.shape)).astype(space.dtype)


def _minari_model(folder: Path, lengths: list[int], written: list[dict[str, Any]]) -> Model:
    columns: dict[Key, Array] = {}
    for path, parts in _leaves([buffer["observations"] for buffer in written], ("observation",)):
        key: Key = path if len(path) > 1 else path[0]
        columns[key] = np.concatenate([part[:-1] for part in parts])
        columns["next", *path] = np.concatenate([part[1:] for part in parts])
    columns["action"] = np.concatenate([buffer["actions"] for buffer in written])
    for name, key in (("rewards", "reward"), ("terminations", "terminated"), ("truncations", "truncated")):
        columns["next", key] = np.concatenate([buffer[name] for buffer in written])
    columns["next", "done"] = columns["next", "terminated"] | columns["next", "truncated"]
    infos = written[0]["infos"]
    return Model(
        folder,
        lengths,
        columns,
        infos={name: np.concatenate([np.asarray(buffer["infos"][name]) for buffer in written]) for name in infos},
    )


def _leaves(values: list[Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Array]]]:
    if isinstance(values[0], dict):
        for name in values[0]:
            yield from _leaves([value[name] for value in values], (*path, name))
    else:
        yield path, values
