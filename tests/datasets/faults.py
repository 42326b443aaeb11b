"""Datasets with one fault each, and what the doctor must say about it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ostinato import LazyTensorStorage, ReplayBuffer

from . import builders
from .clean import ARM, TOP, Array, arm, episode_table, fill, tables, trajectories

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Damage = Callable[[Path], Any]

LENGTHS = [40, 30, 50]
DATA, SECOND = (f"data/chunk-000/file-00{number}.parquet" for number in range(2))
VIDEO, LATER = (f"videos/{TOP}/chunk-000/file-00{number}.mp4" for number in range(2))
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.jsonl"


@dataclass(frozen=True)
class Fault:
    """A dataset with one fault.

    Attributes:
        base: Writes a dataset without a fault; returns where it is.
        damage: Damages it; may return other data to examine.
        check: The check that must find it.
        severity: With this severity.
        place: At this place.
        consequences: Checks that may find something, too.
    """

    base: Callable[[Path], Path]
    damage: Damage
    check: str
    severity: str
    place: dict[str, Any]
    consequences: tuple[str, ...]

    def write(self, folder: Path) -> Any:
        """Write the dataset, and return what to examine."""
        path = self.base(folder)
        other = self.damage(path)
        return other if isinstance(other, dict) else path


def planted(
    base: Callable[[Path], Path],
    damage: Damage,
    check: str,
    severity: str = "error",
    also: tuple[str, ...] = (),
    **place: Any,
) -> Fault:
    return Fault(base, damage, check, severity, place, also)


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
    return builders.diffusion_zarr(folder, lengths=(10, 10, 10), chunk_rows=10).path


def nothing(folder: Path) -> Path:
    """The fault itself writes the dataset, or returns a mapping."""
    return folder


# -- how faults are planted -------------------------------------------------------------------------------------------


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def cut(name: str, share: float = 0.5) -> Damage:
    """Keep the beginning of a file."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return damage


def replace(name: str, old: bytes, new: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes().replace(old, new))

    return damage


def edited(name: str, change: Callable[[Any], object]) -> Damage:
    """Change a file of JSON, or of lines of it."""

    def damage(folder: Path) -> None:
        path = folder / name
        lines = path.suffix == ".jsonl"
        value = [json.loads(line) for line in path.read_text().splitlines()] if lines else json.loads(path.read_text())
        change(value)
        path.write_text("\n".join(map(json.dumps, value)) if lines else json.dumps(value))

    return damage


def info(**entries: Any) -> Damage:
    return edited(INFO, lambda info: info.update(entries))


def rows(change: Callable[[dict[str, Array]], object], *, file: int = 0) -> Damage:
    """Change the columns of a table, given as arrays `[rows, ...]`."""

    def damage(folder: Path) -> None:
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

    return damage


def put(name: str, place: Any, value: Any, *, file: int = 0) -> Damage:
    """Set some values of a column."""
    return rows(lambda columns: columns[name].__setitem__(place, value), file=file)


def shift(name: str, first: int, stop: int, by: float) -> Damage:
    """Add a number to some rows of a column."""
    return rows(lambda columns: columns[name].__setitem__(slice(first, stop), columns[name][first:stop] + by))


def refill(change: Callable[[Array, Array], object]) -> Damage:
    """Write other actions and states of the arm, and their statistics."""

    def damage(folder: Path) -> None:
        values = arm(LENGTHS)
        change(values["action"], values["observation.state"])
        fill(folder, values)

    return damage


def column(name: str, change: Callable[[list[Any]], list[Any]]) -> Damage:
    """Change a column as Python values."""

    def damage(folder: Path) -> None:
        path = tables(folder)[0]
        table = pq.read_table(path)
        values = pa.array(change(table.column(name).to_pylist()), table.schema.field(name).type)
        pq.write_table(table.set_column(table.column_names.index(name), name, values), path)

    return damage


def episode(number: int, **entries: Any) -> Damage:
    return lambda folder: episode_table(folder, lambda rows: rows[number].update(entries))


def video(frames: Array, name: str = VIDEO, fps: int = 10) -> Damage:
    return lambda folder: builders.write_video(folder / name, frames, fps=fps)


def black(first: int) -> Array:
    """Pictures that are black from one on."""
    frames = builders.pictures(70, 32, 32)
    frames[first:] = 0
    return frames


def frozen() -> Array:
    frames = builders.pictures(50, 32, 32)
    frames[10:] = frames[10]
    return frames


def hdf5(change: Callable[[Any], object], name: str = "") -> Damage:
    def damage(path: Path) -> None:
        with h5py.File(path / name, "r+") as file:
            change(file)

    return damage


def shorten(file: Any, name: str, count: int) -> None:
    values, attributes = file[name][:count], dict(file[name].attrs)
    del file[name]
    file[name] = values
    file[name].attrs.update(attributes)


def ends(*values: int) -> Damage:
    def damage(path: Path) -> None:
        from zarr import open_group

        array: Any = open_group(path, mode="r+")["meta/episode_ends"]
        array[:] = values

    return damage


# -- faults that need more --------------------------------------------------------------------------------------------


def index_in_front_and_cut(folder: Path) -> None:
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
    cut(VIDEO, 0.8)(folder)


def an_episode_twice(folder: Path) -> None:
    builders.lerobot_v3(folder, lengths=[30, 30, 25], features=ARM)
    values = arm([30, 30, 25])
    for array in values.values():
        array[30:60] = array[:30]
    fill(folder, values)


def an_end_in_the_middle(folder: Path) -> None:
    builders.lerobot_v3(folder, lengths=LENGTHS, features={**ARM, "next.done": ("bool", (1,))})
    fill(folder, arm(LENGTHS))
    put("next.done", 7, True)(folder)


def black_pictures(folder: Path) -> None:
    name = "observation.images.a"
    builders.lerobot_v3(folder, images={name: (16, 24)})
    picture = builders._png(np.zeros((1, 16, 24, 3), np.uint8))[0]
    column(name, lambda rows: [{**row, "bytes": picture} for row in rows])(folder)


def another_task(folder: Path) -> None:
    builders.write_tasks(folder / "meta/tasks.parquet", [builders._task(0), builders._task(1), "Wipe the table."])
    info(total_tasks=3)(folder)


def stream(envs: int, *, limits: bool = True) -> dict[str, Array]:
    """Rows of environments in turn, as one `extend` for each step writes them; episodes are cut after 25 steps."""
    generator, found = np.random.default_rng(0), []
    for env in range(envs):
        walk = generator.normal(size=(100, 3)).cumsum(0).reshape(4, 25, 3)
        last = walk[:, -1:] + generator.normal(size=(4, 1, 3))
        after = np.concatenate([walk[:, 1:], last], 1)
        found.append({"obs": walk.reshape(-1, 3), "next_obs": after.reshape(-1, 3), "env": np.full(100, env)})
    made = {key: np.stack([row[key] for row in found], 1).reshape(100 * envs, -1) for key in found[0]}
    flag = np.repeat(np.arange(100) % 25 == 24, envs) if limits else np.arange(100 * envs) == 100 * envs - 1
    return {**made, "action": made["obs"][:, :1] * 0.1, "truncated": flag}


def limits_without_flags(folder: Path) -> None:
    values = {key: torch.from_numpy(value) for key, value in stream(1, limits=False).items()}
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    rb.extend({**values, "observation": values["obs"], "next": {"observation": values["next_obs"]}})
    rb.dumps(folder)


def a_saved_buffer_with_a_black_camera(folder: Path) -> None:
    images, after = (torch.from_numpy(builders.pictures(40, 16, 16, seed=seed)) for seed in range(2))
    images[20:] = 0
    following = {"observation": {"image": after}, "done": torch.arange(40) % 20 == 19}
    rb = ReplayBuffer(storage=LazyTensorStorage(40))
    rb.extend({"observation": {"image": images}, "action": torch.arange(40.0).sin()[:, None], "next": following})
    rb.dumps(folder)


# -- the faults: what is written and damaged, the check that finds it, where, and what else may be found ---------------

STATE, ACTION = "observation.state", "action"
MISMATCH, WARNING, NOTE = ("statistics-mismatch",), "warning", "note"
MAIN = "data/main_data.hdf5"

FAULTS: dict[str, Fault] = {
    # files and metadata of LeRobot
    "a_table_is_missing": planted(v3, remove(SECOND), "file-missing", file=SECOND, episode=2),
    "a_video_is_missing": planted(v3_camera, remove(VIDEO), "file-missing", file=VIDEO, episode=0, camera=TOP),
    "the_statistics_are_missing": planted(v3, remove(STATS), "file-missing", WARNING, file=STATS),
    "the_description_is_missing": planted(v3, remove(INFO), "file-missing", also=("field-unlisted",), file=INFO),
    "a_table_is_cut": planted(v3, cut(DATA, 0.7), "file-unreadable", file=DATA, episode=0),
    "a_video_has_no_index": planted(v3_camera, cut(VIDEO), "file-unreadable", file=VIDEO, episode=0, camera=TOP),
    "a_video_with_its_index_in_front_is_cut": planted(
        v3_camera, index_in_front_and_cut, "file-unreadable", file=VIDEO, episode=1, camera=TOP
    ),
    "a_table_belongs_to_nothing": planted(
        v3,
        lambda folder: shutil.copy(folder / DATA, folder / "data/chunk-000/file-007.parquet"),
        "file-unlisted",
        NOTE,
        file="data/chunk-000/file-007.parquet",
    ),
    "the_frame_rate_is_no_number": planted(
        v3, info(fps="ten"), "metadata-invalid", also=("timestamp-rate",), file=INFO
    ),
    "a_split_has_too_many_episodes": planted(
        v3, info(splits={"train": "0:2", "test": "2:9"}), "split-invalid", file=INFO, field="splits"
    ),
    # columns
    "a_column_is_missing": planted(
        v3,
        lambda folder: [rows(lambda columns: columns.pop(ACTION), file=file)(folder) for file in range(2)],
        "field-missing",
        file=DATA,
        field=ACTION,
    ),
    "a_column_is_not_described": planted(
        v3,
        rows(lambda columns: columns.update(force=columns["timestamp"])),
        "field-unlisted",
        NOTE,
        file=DATA,
        field="force",
    ),
    "a_column_has_the_wrong_dtype": planted(
        v3,
        rows(lambda columns: columns.update(action=columns[ACTION].astype("int64"))),
        "dtype-mismatch",
        also=MISMATCH,
        file=DATA,
        field=ACTION,
    ),
    "a_column_has_the_wrong_shape": planted(
        v3,
        edited(INFO, lambda info: info["features"][ACTION].update(shape=[6])),
        "shape-mismatch",
        file=DATA,
        field=ACTION,
    ),
    "a_value_is_null": planted(
        v3, column(ACTION, lambda rows: [*rows[:33], None, *rows[34:]]), "value-null", file=DATA, field=ACTION
    ),
    # episodes
    "an_episode_lost_its_last_row": planted(
        v3,
        rows(lambda columns: columns.update({name: values[:69] for name, values in columns.items()})),
        "episode-length",
        also=("count-mismatch", "index-order", *MISMATCH),
        file=DATA,
        episode=1,
    ),
    "an_episode_is_there_twice": planted(
        nothing, an_episode_twice, "episode-duplicate", WARNING, also=MISMATCH, episode=1
    ),
    "frame_indices_skip_one": planted(
        v3, shift("frame_index", 44, 70, 1), "index-order", file=DATA, episode=1, frame=4, field="frame_index"
    ),
    "time_goes_back": planted(
        v3, shift("timestamp", 12, 40, -0.3), "timestamp-order", episode=0, frame=12, field="timestamp"
    ),
    "a_frame_was_dropped": planted(
        v3, shift("timestamp", 50, 70, 0.1), "timestamp-rate", WARNING, file=DATA, episode=1, frame=10
    ),
    "an_episode_ends_in_the_middle": planted(
        nothing,
        an_end_in_the_middle,
        "flag-position",
        WARNING,
        also=MISMATCH,
        file=DATA,
        episode=0,
        frame=7,
        field="next.done",
    ),
    # values
    "a_value_is_nan": planted(
        v3,
        refill(lambda _, states: states.__setitem__((45, 2), np.nan)),
        "value-nan",
        also=MISMATCH,
        file=DATA,
        episode=1,
        frame=5,
        field=STATE,
    ),
    "a_value_is_infinite": planted(
        v3, put(ACTION, (0, 1), np.inf, file=1), "value-infinite", file=SECOND, episode=2, frame=0, field=ACTION
    ),
    "an_action_jumps": planted(
        v3,
        refill(lambda actions, _: actions.__setitem__((90, 3), actions[90, 3] + 5)),
        "value-jump",
        WARNING,
        episode=2,
        frame=20,
        field=ACTION,
    ),
    "the_action_never_changes": planted(
        v3, refill(lambda actions, _: actions.fill(0.25)), "dimension-constant", WARNING, field=ACTION
    ),
    "a_sensor_is_saturated": planted(
        v3,
        refill(lambda _, states: np.minimum(states[:, 1], np.quantile(states[:, 1], 0.6), out=states[:, 1])),
        "dimension-saturated",
        NOTE,
        field=STATE,
    ),
    "the_statistics_are_of_other_data": planted(
        v3,
        edited(STATS, lambda stats: stats[ACTION]["mean"].__setitem__(2, 0.7)),
        MISMATCH[0],
        WARNING,
        file=STATS,
        field=ACTION,
    ),
    "the_statistics_of_an_episode_are_wrong": planted(
        v21,
        edited("meta/episodes_stats.jsonl", lambda rows: rows[1]["stats"][ACTION]["max"].__setitem__(0, 9.0)),
        MISMATCH[0],
        WARNING,
        episode=1,
        field=ACTION,
    ),
    # tasks
    "an_episode_has_an_unknown_task": planted(
        v3,
        put("task_index", slice(40, 70), 6),
        "task-unknown",
        also=("task-unused",),
        file=DATA,
        episode=1,
        frame=0,
        field="task_index",
    ),
    "a_task_has_no_episode": planted(v3, another_task, "task-unused", WARNING, file="meta/tasks.parquet"),
    "two_tasks_have_one_text": planted(
        v21,
        edited(TASKS, lambda tasks: tasks[1].update(task=tasks[0]["task"])),
        "task-text",
        WARNING,
        also=("task-mismatch",),
        file=TASKS,
    ),
    "an_episode_names_another_task": planted(
        v3, episode(0, tasks=[builders._task(1)]), "task-mismatch", WARNING, file=DATA, episode=0
    ),
    # cameras
    "a_video_of_two_episodes_is_too_short": planted(
        v3_camera, video(builders.pictures(60, 32, 32)), "video-frames", file=VIDEO, episode=1, frame=20, camera=TOP
    ),
    "clips_overlap": planted(
        v3_camera,
        episode(1, **{f"videos/{TOP}/from_timestamp": 3.5, f"videos/{TOP}/to_timestamp": 6.5}),
        "video-bounds",
        file=VIDEO,
        episode=1,
        camera=TOP,
    ),
    "a_video_has_another_frame_rate": planted(
        v3_camera, video(builders.pictures(70, 32, 32), fps=20), "video-rate", file=VIDEO, episode=0, camera=TOP
    ),
    "a_video_has_another_size": planted(
        v3_camera, video(builders.pictures(70, 32, 48)), "video-size", file=VIDEO, episode=0, camera=TOP
    ),
    "a_video_has_an_unknown_codec": planted(
        v3_camera, replace(VIDEO, b"avc1", b"qqq7"), "video-codec", file=VIDEO, episode=0, camera=TOP
    ),
    "another_frame_rate_is_declared": planted(
        v3_camera,
        edited(INFO, lambda info: info["features"][TOP]["info"].update({"video.fps": 25})),
        "video-rate",
        WARNING,
        file=INFO,
        camera=TOP,
    ),
    "a_camera_is_black": planted(
        v3_camera, video(black(40)), "camera-blank", WARNING, file=VIDEO, episode=1, frame=0, camera=TOP
    ),
    "a_camera_is_frozen": planted(
        v3_camera, video(frozen(), LATER), "camera-frozen", WARNING, file=LATER, episode=2, camera=TOP
    ),
    "pictures_are_black": planted(
        nothing, black_pictures, "camera-blank", WARNING, episode=0, camera="observation.images.a"
    ),
    "the_statistics_of_a_camera_are_wrong": planted(
        v3_camera,
        edited(STATS, lambda stats: stats[TOP].update(mean=[[[0.9]]] * 3)),
        MISMATCH[0],
        WARNING,
        file=STATS,
        camera=TOP,
    ),
    # D4RL and robomimic
    "d4rl_without_rewards": planted(
        d4rl, hdf5(lambda file: file.pop("rewards")), "field-missing", file="d.hdf5", field="rewards"
    ),
    "d4rl_with_too_few_actions": planted(
        d4rl, hdf5(lambda file: shorten(file, "actions", 17)), "count-mismatch", file="d.hdf5", field="actions"
    ),
    "an_hdf5_file_is_cut": planted(d4rl, cut("", 0.6), "file-unreadable", file="d.hdf5"),
    "no_flag_is_ever_set": planted(
        d4rl,
        hdf5(lambda file: [file[name].write_direct(np.zeros(18, bool)) for name in ("terminals", "timeouts")]),
        "flag-missing",
        NOTE,
        also=("reward-constant",),
    ),
    "rewards_are_constant": planted(
        d4rl,
        hdf5(lambda file: file["rewards"].write_direct(np.full(18, 0.5, np.float32))),
        "reward-constant",
        NOTE,
        field="rewards",
    ),
    "robomimic_counts_wrong": planted(
        robomimic,
        hdf5(lambda file: file["data/demo_1"].attrs.modify("num_samples", 9)),
        "episode-length",
        also=("count-mismatch",),
        file="r.hdf5/data/demo_1",
        episode=1,
        field="num_samples",
    ),
    "robomimic_filter_names_nothing": planted(
        robomimic,
        hdf5(lambda file: (file.pop("data/demo_2"), file["data"].attrs.modify("total", 10))),
        "split-invalid",
        file="r.hdf5/mask/train",
    ),
    "robomimic_has_nan": planted(
        robomimic,
        hdf5(lambda file: file["data/demo_1/obs/object"].__setitem__((3, 1), np.nan)),
        "value-nan",
        file="r.hdf5/data/demo_1",
        episode=1,
        frame=3,
        field="obs/object",
    ),
    # Minari
    "minari_lost_an_observation": planted(
        minari,
        hdf5(lambda file: shorten(file, "episode_1/observations", 4), MAIN),
        "episode-length",
        file=f"{MAIN}/episode_1",
        episode=1,
        field="observations",
    ),
    "minari_counts_wrong": planted(
        arrow,
        edited("data/metadata.json", lambda meta: meta.update(total_steps=20)),
        "count-mismatch",
        file="data/metadata.json",
        field="total_steps",
    ),
    "minari_table_is_cut": planted(
        arrow, cut("data/1/part-0.arrow"), "file-unreadable", file="data/1/part-0.arrow", episode=1
    ),
    "minari_lost_the_metadata_of_an_episode": planted(
        arrow, remove("data/1/metadata.json"), "file-missing", file="data/1/metadata.json", episode=1
    ),
    "minari_has_a_strange_space": planted(
        minari,
        edited("data/metadata.json", lambda meta: meta.update(observation_space="a box")),
        "not-opened",
        file="data",
    ),
    # Zarr
    "zarr_ends_overlap": planted(
        zarr, ends(20, 10, 30), "episode-bounds", file="meta/episode_ends", episode=1, field="episode_ends"
    ),
    "a_zarr_chunk_is_missing": planted(
        zarr, remove("data/state/1.0"), "file-missing", WARNING, file="data/state", field="state"
    ),
    "a_zarr_chunk_is_damaged": planted(
        zarr,
        lambda path: (path / "data/action/1.0").write_bytes(b"nothing of Blosc"),
        "file-unreadable",
        episode=1,
        field="action",
    ),
    # mappings and what buffers save
    "environments_are_in_turn": planted(
        nothing, lambda _: stream(4), "episode-joined", WARNING, also=("value-jump",), episode=0, frame=0
    ),
    "time_limits_have_no_flag": planted(
        nothing, limits_without_flags, "episode-joined", WARNING, also=("value-jump",), episode=0, frame=24
    ),
    "a_camera_of_a_buffer_is_black": planted(
        nothing, a_saved_buffer_with_a_black_camera, "camera-blank", WARNING, episode=1, camera="observation.image"
    ),
    "saved_trajectories_count_wrong": planted(
        trajectories,
        edited("metadata.json", lambda meta: meta.update(total_samples=1)),
        "saved-damaged",
        file="metadata.json",
    ),
}
