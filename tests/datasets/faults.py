"""Datasets with one fault each, and what the doctor must say about it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, TrajectoryReplayBuffer

from ..unit.trajectories.rollouts import rollout
from . import builders
from .clean import ARM, Array, arm, episode_table, fill, tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["FAULTS", "Fault"]

TOP = "observation.images.top"
LENGTHS = [40, 30, 50]
DATA = "data/chunk-000/file-000.parquet"
VIDEO = f"videos/{TOP}/chunk-000/file-000.mp4"


@dataclass(frozen=True)
class Fault:
    """A dataset with one fault.

    Attributes:
        write: Writes the dataset at a path; returns where it is, or a mapping of arrays.
        check: The check that must find it.
        severity: With this severity.
        place: At this place.
        consequences: Checks that may find something, too.
    """

    write: Callable[[Path], Any]
    check: str
    severity: str = "error"
    place: dict[str, Any] = field(default_factory=dict)
    consequences: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {}


# -- datasets without a fault -----------------------------------------------------------------------------------------


def v3(folder: Path, **options: Any) -> Path:
    builders.lerobot_v3(folder, lengths=LENGTHS, features=ARM, **options)
    fill(folder, arm(LENGTHS))
    return folder


def v3_camera(folder: Path) -> Path:
    return v3(folder, cameras={TOP: (32, 32)})


def v21(folder: Path) -> Path:
    return builders.lerobot_v21(folder, cameras={TOP: (32, 32)}).path


def d4rl(folder: Path) -> Path:
    return builders.d4rl_hdf5(folder.with_name("d.hdf5")).path


def robomimic(folder: Path) -> Path:
    return builders.robomimic_hdf5(folder.with_name("r.hdf5")).path


def minari(folder: Path) -> Path:
    return builders.minari_dataset(folder).path


def arrow(folder: Path) -> Path:
    return builders.minari_dataset(folder, data_format="arrow").path


def zarr(folder: Path) -> Path:
    return builders.diffusion_zarr(folder).path


def saved(folder: Path) -> Path:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder) as buffer:
        buffer.add_trajectories([rollout(number, 2) for number in range(3)])
    return folder


def nothing(folder: Path) -> Path:
    """The fault itself writes the dataset, or returns a mapping."""
    return folder


def planted(
    check: str,
    severity: str = "error",
    *,
    base: Callable[[Path], Path] = v3,
    also: tuple[str, ...] = (),
    **place: Any,
) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Register a function that damages a dataset, and returns None or other data to examine."""

    def register(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def write(folder: Path) -> Any:
            path = base(folder)
            other = damage(path)
            return path if other is None else other

        FAULTS[damage.__name__] = Fault(write, check, severity, place, also)
        return damage

    return register


# -- LeRobot: how faults are planted ----------------------------------------------------------------------------------


def edit_rows(folder: Path, change: Callable[[dict[str, Array]], object], *, file: int = 0) -> None:
    """Change the columns of a table in place, as arrays `[rows, ...]`."""
    path = tables(folder)[file]
    table = pq.read_table(path)
    columns = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        values = flat.to_numpy(zero_copy_only=False).copy()
        columns[name] = values.reshape(len(column), -1) if len(values) != len(column) else values
    change(columns)
    arrays = {
        name: pa.array(v) if v.ndim == 1 else pa.FixedSizeListArray.from_arrays(pa.array(v.reshape(-1)), v.shape[1])
        for name, v in columns.items()
    }
    pq.write_table(pa.table(arrays), path)


def shift(folder: Path, name: str, rows: slice, by: float) -> None:
    """Add a number to some rows of a column."""
    edit_rows(folder, lambda columns: columns[name].__setitem__(rows, columns[name][rows] + by))


def refill(folder: Path, change: Callable[[dict[str, Array]], object]) -> None:
    """Write other values of the arm, and their statistics."""
    values = arm(LENGTHS)
    change(values)
    fill(folder, values)


def replace_column(folder: Path, name: str, change: Callable[[list[Any]], list[Any]]) -> None:
    path = tables(folder)[0]
    table = pq.read_table(path)
    column = pa.array(change(table.column(name).to_pylist()), table.schema.field(name).type)
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_info(folder: Path, **entries: Any) -> None:
    edit_json(folder / "meta/info.json", lambda info: info.update(entries))


def edit_lines(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def cut(path: Path, share: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))


def video(folder: Path, frames: Array, *, file: int = 0, fps: int = 10) -> None:
    builders.write_video(folder / f"videos/{TOP}/chunk-000/file-{file:03d}.mp4", frames, fps=fps)


# -- LeRobot: files and metadata --------------------------------------------------------------------------------------


@planted("file-missing", file="data/chunk-000/file-001.parquet", episode=2)
def a_table_is_missing(folder: Path) -> None:
    tables(folder)[1].unlink()


@planted("file-missing", base=v3_camera, file=VIDEO, episode=0, camera=TOP)
def a_video_is_missing(folder: Path) -> None:
    (folder / VIDEO).unlink()


@planted("file-missing", "warning", file="meta/stats.json")
def the_statistics_are_missing(folder: Path) -> None:
    (folder / "meta/stats.json").unlink()


@planted("file-missing", file="meta/info.json", also=("field-unlisted",))
def the_description_is_missing(folder: Path) -> None:
    (folder / "meta/info.json").unlink()


@planted("file-unreadable", file="meta/info.json", also=("field-unlisted",))
def the_description_is_cut(folder: Path) -> None:
    cut(folder / "meta/info.json", 0.5)


@planted("file-unreadable", file=DATA, episode=0)
def a_table_is_cut(folder: Path) -> None:
    cut(folder / DATA, 0.7)


@planted("file-unreadable", base=v3_camera, file=VIDEO, episode=0, camera=TOP)
def a_video_has_no_index(folder: Path) -> None:
    cut(folder / VIDEO, 0.5)


@planted("file-unreadable", base=v3_camera, file=VIDEO, episode=1, camera=TOP)
def a_video_with_its_index_in_front_is_cut(folder: Path) -> None:
    import av

    path = folder / VIDEO
    moved = path.with_suffix(".moved.mp4")
    with av.open(str(path)) as source, av.open(str(moved), "w", options={"movflags": "faststart"}) as target:
        stream: Any = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    moved.replace(path)
    cut(path, 0.8)


@planted("file-unlisted", "note", file="data/chunk-000/file-007.parquet")
def a_table_belongs_to_nothing(folder: Path) -> None:
    shutil.copy(tables(folder)[0], folder / "data/chunk-000/file-007.parquet")


@planted("metadata-invalid", file="meta/info.json", also=("timestamp-rate",))
def the_frame_rate_is_no_number(folder: Path) -> None:
    edit_info(folder, fps="ten")


@planted("count-mismatch", file="meta/info.json", field="total_frames")
def the_total_of_frames_is_wrong(folder: Path) -> None:
    edit_info(folder, total_frames=119)


@planted("count-mismatch", base=v21, file="meta/info.json", field="total_episodes")
def the_total_of_episodes_is_wrong(folder: Path) -> None:
    edit_info(folder, total_episodes=4)


@planted("split-invalid", file="meta/info.json", field="splits")
def a_split_has_too_many_episodes(folder: Path) -> None:
    edit_info(folder, splits={"train": "0:2", "test": "2:9"})


# -- LeRobot: columns -------------------------------------------------------------------------------------------------


@planted("field-missing", file=DATA, field="action")
def a_column_is_missing(folder: Path) -> None:
    for file in range(2):
        edit_rows(folder, lambda columns: columns.pop("action"), file=file)


@planted("field-unlisted", "note", file=DATA, field="force")
def a_column_is_not_described(folder: Path) -> None:
    edit_rows(folder, lambda columns: columns.update(force=np.arange(len(columns["index"]), dtype="float32")))


@planted("dtype-mismatch", file=DATA, field="action", also=("statistics-mismatch",))
def a_column_has_the_wrong_dtype(folder: Path) -> None:
    edit_rows(folder, lambda columns: columns.update(action=columns["action"].astype("int64")))


@planted("shape-mismatch", file=DATA, field="action")
def a_column_has_the_wrong_shape(folder: Path) -> None:
    edit_json(folder / "meta/info.json", lambda info: info["features"]["action"].update(shape=[6]))


@planted("value-null", file=DATA, field="action")
def a_value_is_null(folder: Path) -> None:
    replace_column(folder, "action", lambda rows: [*rows[:33], None, *rows[34:]])


# -- LeRobot: episodes ------------------------------------------------------------------------------------------------


@planted("episode-length", file=DATA, episode=1, also=("count-mismatch", "index-order", "statistics-mismatch"))
def an_episode_lost_its_last_row(folder: Path) -> None:
    edit_rows(folder, lambda columns: columns.update({name: v[:69] for name, v in columns.items()}))


@planted("episode-bounds", file="meta/episodes", episode=1)
def episodes_overlap_in_the_table(folder: Path) -> None:
    episode_table(folder, lambda rows: rows[1].update(dataset_from_index=38, dataset_to_index=68))


@planted("episode-duplicate", "warning", base=nothing, episode=1, also=("statistics-mismatch",))
def an_episode_is_there_twice(folder: Path) -> None:
    lengths = [30, 30, 25]
    builders.lerobot_v3(folder, lengths=lengths, features=ARM)
    values = arm(lengths)
    for column in values.values():
        column[30:60] = column[:30]
    fill(folder, values)


@planted("index-order", file=DATA, episode=1, frame=4, field="frame_index")
def frame_indices_skip_one(folder: Path) -> None:
    shift(folder, "frame_index", slice(44, 70), 1)


@planted("timestamp-order", file=DATA, episode=0, frame=12, field="timestamp")
def time_goes_back(folder: Path) -> None:
    shift(folder, "timestamp", slice(12, 40), -0.3)


@planted("timestamp-rate", "warning", file=DATA, episode=1, frame=10, field="timestamp")
def a_frame_was_dropped(folder: Path) -> None:
    shift(folder, "timestamp", slice(50, 70), 0.1)


@planted(
    "flag-position",
    "warning",
    base=nothing,
    file=DATA,
    episode=0,
    frame=7,
    field="next.done",
    also=("statistics-mismatch",),
)
def an_episode_ends_in_the_middle(folder: Path) -> None:
    builders.lerobot_v3(folder, lengths=LENGTHS, features={**ARM, "next.done": ("bool", (1,))})
    fill(folder, arm(LENGTHS))
    edit_rows(folder, lambda columns: columns["next.done"].__setitem__(7, True))


# -- LeRobot: values --------------------------------------------------------------------------------------------------


@planted("value-nan", file=DATA, episode=1, frame=5, field="observation.state", also=("statistics-mismatch",))
def a_value_is_nan(folder: Path) -> None:
    refill(folder, lambda values: values["observation.state"].__setitem__((45, 2), np.nan))


@planted("value-infinite", file="data/chunk-000/file-001.parquet", episode=2, frame=0, field="action")
def a_value_is_infinite(folder: Path) -> None:
    edit_rows(folder, lambda columns: columns["action"].__setitem__((0, 1), np.inf), file=1)


@planted("value-jump", "warning", episode=2, frame=20, field="action")
def an_action_jumps(folder: Path) -> None:
    refill(folder, lambda values: values["action"].__setitem__((90, 3), values["action"][90, 3] + 5))


@planted("dimension-constant", "warning", field="action")
def the_action_never_changes(folder: Path) -> None:
    refill(folder, lambda values: values["action"].fill(0.25))


@planted("dimension-saturated", "note", field="observation.state")
def a_sensor_is_saturated(folder: Path) -> None:
    def change(values: dict[str, Array]) -> None:
        column = values["observation.state"][:, 1]
        column[:] = np.minimum(column, np.quantile(column, 0.6))

    refill(folder, change)


@planted("statistics-mismatch", "warning", file="meta/stats.json", field="action")
def the_statistics_are_of_other_data(folder: Path) -> None:
    edit_json(folder / "meta/stats.json", lambda stats: stats["action"]["mean"].__setitem__(2, 0.7))


@planted("statistics-mismatch", "warning", base=v21, episode=1, field="action")
def the_statistics_of_an_episode_are_wrong(folder: Path) -> None:
    path = folder / "meta/episodes_stats.jsonl"
    edit_lines(path, lambda rows: rows[1]["stats"]["action"]["max"].__setitem__(0, 9.0))


# -- LeRobot: tasks ---------------------------------------------------------------------------------------------------


@planted("task-unknown", file=DATA, episode=1, frame=0, field="task_index", also=("task-unused",))
def an_episode_has_an_unknown_task(folder: Path) -> None:
    edit_rows(folder, lambda columns: columns["task_index"].__setitem__(slice(40, 70), 6))


@planted("task-unused", "warning", file="meta/tasks.parquet")
def a_task_has_no_episode(folder: Path) -> None:
    builders.write_tasks(folder / "meta/tasks.parquet", [builders._task(0), builders._task(1), "Wipe the table."])
    edit_info(folder, total_tasks=3)


@planted("task-text", "warning", base=v21, file="meta/tasks.jsonl", also=("task-mismatch",))
def two_tasks_have_one_text(folder: Path) -> None:
    edit_lines(folder / "meta/tasks.jsonl", lambda rows: rows[1].update(task=rows[0]["task"]))


@planted("task-mismatch", "warning", file=DATA, episode=0)
def an_episode_names_another_task(folder: Path) -> None:
    episode_table(folder, lambda rows: rows[0].update(tasks=[builders._task(1)]))


# -- LeRobot: cameras -------------------------------------------------------------------------------------------------


@planted("video-frames", base=v21, file=f"videos/chunk-000/{TOP}/episode_000001.mp4", episode=1, camera=TOP)
def a_video_is_too_short(folder: Path) -> None:
    path = folder / f"videos/chunk-000/{TOP}/episode_000001.mp4"
    builders.write_video(path, builders.pictures(4, 32, 32), fps=10)


@planted("video-frames", base=v3_camera, file=VIDEO, episode=1, frame=20, camera=TOP)
def a_video_of_two_episodes_is_too_short(folder: Path) -> None:
    video(folder, builders.pictures(60, 32, 32))


@planted("video-bounds", base=v3_camera, file=VIDEO, episode=1, camera=TOP)
def clips_overlap(folder: Path) -> None:
    part = f"videos/{TOP}/"
    change = {f"{part}from_timestamp": 3.5, f"{part}to_timestamp": 6.5}
    episode_table(folder, lambda rows: rows[1].update(change))


@planted("video-rate", base=v3_camera, file=VIDEO, episode=0, camera=TOP)
def a_video_has_another_frame_rate(folder: Path) -> None:
    video(folder, builders.pictures(70, 32, 32), fps=20)


@planted("video-size", base=v3_camera, file=VIDEO, episode=0, camera=TOP)
def a_video_has_another_size(folder: Path) -> None:
    video(folder, builders.pictures(70, 32, 48))


@planted("video-codec", base=v3_camera, file=VIDEO, episode=0, camera=TOP)
def a_video_has_an_unknown_codec(folder: Path) -> None:
    path = folder / VIDEO
    path.write_bytes(path.read_bytes().replace(b"avc1", b"qqq7"))


@planted("camera-blank", "warning", base=v3_camera, file=VIDEO, episode=1, frame=0, camera=TOP)
def a_camera_is_black(folder: Path) -> None:
    frames = builders.pictures(70, 32, 32)
    frames[40:] = 0
    video(folder, frames)


@planted("camera-frozen", "warning", base=v3_camera, file=VIDEO.replace("000.mp4", "001.mp4"), episode=2, camera=TOP)
def a_camera_is_frozen(folder: Path) -> None:
    frames = builders.pictures(50, 32, 32)
    frames[10:] = frames[10]
    video(folder, frames, file=1)


@planted("camera-blank", "warning", base=nothing, episode=0, camera="observation.images.a")
def pictures_are_black(folder: Path) -> None:
    builders.lerobot_v3(folder, images={"observation.images.a": (16, 24)})
    black = builders._png(np.zeros((1, 16, 24, 3), np.uint8))[0]
    replace_column(folder, "observation.images.a", lambda rows: [{**row, "bytes": black} for row in rows])


@planted("statistics-mismatch", "warning", base=v3_camera, file="meta/stats.json", camera=TOP)
def the_statistics_of_a_camera_are_wrong(folder: Path) -> None:
    edit_json(folder / "meta/stats.json", lambda stats: stats[TOP].update(mean=[[[0.9]], [[0.9]], [[0.9]]]))


# -- other formats ----------------------------------------------------------------------------------------------------


def shorten(file: Any, name: str, rows: int) -> None:
    values, attributes = file[name][:rows], dict(file[name].attrs)
    del file[name]
    file[name] = values
    file[name].attrs.update(attributes)


@planted("field-missing", base=d4rl, file="d.hdf5", field="rewards")
def d4rl_without_rewards(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["rewards"]


@planted("count-mismatch", base=d4rl, file="d.hdf5", field="actions")
def d4rl_with_too_few_actions(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        shorten(file, "actions", 17)


@planted("file-unreadable", base=d4rl, file="d.hdf5")
def an_hdf5_file_is_cut(path: Path) -> None:
    cut(path, 0.6)


@planted("flag-missing", "note", base=d4rl, also=("reward-constant",))
def no_flag_is_ever_set(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["terminals"][:], file["timeouts"][:] = 0, 0


@planted("reward-constant", "note", base=d4rl, field="rewards")
def rewards_are_constant(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["rewards"][:] = 0.5


def _stream(envs: int, *, limits: bool = True) -> dict[str, Array]:
    """Rows of environments in turn, as one `extend` for each step writes them; episodes are cut after 25 steps."""
    generator, rows = np.random.default_rng(0), []
    for env in range(envs):
        walk = generator.normal(size=(100, 3)).cumsum(0).reshape(4, 25, 3)
        last = walk[:, -1:] + generator.normal(size=(4, 1, 3))
        after = np.concatenate([walk[:, 1:], last], 1)
        rows.append({"obs": walk.reshape(-1, 3), "next_obs": after.reshape(-1, 3), "env": np.full(100, env)})
    stream = {key: np.stack([row[key] for row in rows], 1).reshape(100 * envs, -1) for key in rows[0]}
    flag = np.repeat(np.arange(100) % 25 == 24, envs) if limits else np.arange(100 * envs) == 100 * envs - 1
    return {**stream, "action": stream["obs"][:, :1] * 0.1, "truncated": flag}


@planted("episode-joined", "warning", base=nothing, episode=0, frame=0, also=("value-jump",))
def environments_are_in_turn(folder: Path) -> dict[str, Array]:
    del folder
    return _stream(4)


@planted("episode-joined", "warning", base=nothing, episode=0, frame=24, also=("value-jump",))
def time_limits_have_no_flag(folder: Path) -> None:
    rows = {key: torch.from_numpy(value) for key, value in _stream(1, limits=False).items()}
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    rb.extend({**rows, "observation": rows["obs"], "next": {"observation": rows["next_obs"]}})
    rb.dumps(folder)


@planted("value-nan", base=nothing, episode=1, frame=2, field="observation")
def a_mapping_has_nan(folder: Path) -> dict[str, Any]:
    del folder
    values = arm([20, 20])
    values["observation.state"][22, 0] = np.nan
    return {"observation": values["observation.state"], "action": values["action"], "episode_ends": [20, 40]}


@planted(
    "episode-length",
    base=robomimic,
    file="r.hdf5/data/demo_1",
    episode=1,
    field="num_samples",
    also=("count-mismatch",),
)
def robomimic_counts_wrong(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["data/demo_1"].attrs["num_samples"] = 9


@planted("split-invalid", base=robomimic, file="r.hdf5/mask/train")
def robomimic_filter_names_nothing(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["data/demo_2"]
        file["data"].attrs["total"] = 10


@planted("episode-length", base=minari, file="data/main_data.hdf5/episode_1", episode=1, field="observations")
def minari_lost_an_observation(path: Path) -> None:
    with h5py.File(path / "data/main_data.hdf5", "r+") as file:
        shorten(file, "episode_1/observations", 4)


@planted("count-mismatch", base=arrow, file="data/metadata.json", field="total_steps")
def minari_counts_wrong(path: Path) -> None:
    edit_json(path / "data/metadata.json", lambda meta: meta.update(total_steps=20))


@planted("file-unreadable", base=arrow, file="data/1/part-0.arrow", episode=1)
def minari_table_is_cut(path: Path) -> None:
    cut(path / "data/1/part-0.arrow", 0.5)


@planted("file-missing", base=arrow, file="data/1/metadata.json", episode=1)
def minari_lost_the_metadata_of_an_episode(path: Path) -> None:
    (path / "data/1/metadata.json").unlink()


@planted("not-opened", base=minari, file="data")
def minari_has_a_strange_space(path: Path) -> None:
    edit_json(path / "data/metadata.json", lambda meta: meta.update(observation_space="a box"))


def set_ends(path: Path, ends: list[int]) -> None:
    from zarr import open_group

    array: Any = open_group(path, mode="r+")["meta/episode_ends"]
    array[:] = ends


@planted("episode-bounds", base=zarr, file="meta/episode_ends", episode=1, field="episode_ends")
def zarr_ends_overlap(path: Path) -> None:
    set_ends(path, [10, 6, 18])


@planted("episode-bounds", base=zarr, file="meta/episode_ends", episode=2, field="episode_ends")
def zarr_ends_exceed_the_rows(path: Path) -> None:
    set_ends(path, [6, 10, 19])


@planted("file-missing", "warning", base=zarr, file="data/state", field="state")
def a_zarr_chunk_is_missing(path: Path) -> None:
    (path / "data/state/1.0").unlink()


@planted("file-unreadable", base=nothing, episode=1, field="action")
def a_zarr_chunk_is_damaged(folder: Path) -> None:
    path = builders.diffusion_zarr(folder, lengths=(10, 10, 10), chunk_rows=10).path
    (path / "data/action/1.0").write_bytes(b"nothing of Blosc")


@planted("value-nan", base=nothing, episode=8, frame=0, field="next.reward")
def a_saved_trajectory_has_nan(folder: Path) -> None:
    trajectories = [rollout(number, 2) for number in range(3)]
    rewards = trajectories[2].rewards
    assert rewards is not None
    rewards[0] = float("nan")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder) as buffer:
        buffer.add_trajectories(trajectories)


@planted("saved-damaged", base=saved, file="metadata.json")
def saved_trajectories_count_wrong(folder: Path) -> None:
    edit_json(folder / "metadata.json", lambda meta: meta.update(total_samples=1))
