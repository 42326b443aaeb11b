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

from ostinato import LazyTensorStorage, ReplayBuffer, TrajectoryReplayBuffer

from ..unit.trajectories.rollouts import rollout
from . import builders
from .clean import ARM, TOP, Array, arm, episode_table, fill, tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Damage = Callable[[Path], Any]

__all__ = ["FAULTS", "Fault"]

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
        place: At this place.
        consequences: Checks that may find something, too.
        severity: With this severity.
    """

    base: Callable[[Path], Path]
    damage: Damage
    check: str
    place: dict[str, Any]
    consequences: tuple[str, ...] = ()
    severity: str = "error"

    def write(self, folder: Path) -> Any:
        """Write the dataset, and return what to examine."""
        path = self.base(folder)
        other = self.damage(path)
        return other if isinstance(other, dict) else path


def at(**place: Any) -> dict[str, Any]:
    """The place of a finding."""
    return place


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


def saved(folder: Path) -> Path:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder) as buffer:
        buffer.add_trajectories([rollout(number, 2) for number in range(3)])
    return folder


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


def nan_in_a_mapping(_: Path) -> dict[str, Any]:
    values = arm([20, 20])
    values["observation.state"][22, 0] = np.nan
    return {"observation": values["observation.state"], "action": values["action"], "episode_ends": [20, 40]}


def a_black_camera_in_a_mapping(_: Path) -> dict[str, Any]:
    images, after = builders.pictures(40, 16, 16), builders.pictures(40, 16, 16, seed=1)
    images[20:] = 0
    values = {"observation": {"image": images}, "action": arm([20, 20])["action"]}
    return {**values, "next": {"observation": {"image": after}}, "episode_ends": [20, 40]}


def nan_in_a_trajectory(folder: Path) -> None:
    trajectories = [rollout(number, 2) for number in range(3)]
    rewards = trajectories[2].rewards
    assert rewards is not None
    rewards[0] = float("nan")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder) as buffer:
        buffer.add_trajectories(trajectories)


# -- the faults: what is written and damaged, the check that finds it, where, and what else may be found ---------------

STATE, ACTION = "observation.state", "action"
MISMATCH, WARNING, NOTE = ("statistics-mismatch",), "warning", "note"
MAIN = "data/main_data.hdf5"

FAULTS: dict[str, Fault] = {
    # files and metadata of LeRobot
    "a_table_is_missing": Fault(v3, remove(SECOND), "file-missing", at(file=SECOND, episode=2)),
    "a_video_is_missing": Fault(v3_camera, remove(VIDEO), "file-missing", at(file=VIDEO, episode=0, camera=TOP)),
    "the_statistics_are_missing": Fault(v3, remove(STATS), "file-missing", at(file=STATS), (), WARNING),
    "the_description_is_missing": Fault(v3, remove(INFO), "file-missing", at(file=INFO), ("field-unlisted",)),
    "the_description_is_cut": Fault(v3, cut(INFO), "file-unreadable", at(file=INFO), ("field-unlisted",)),
    "a_table_is_cut": Fault(v3, cut(DATA, 0.7), "file-unreadable", at(file=DATA, episode=0)),
    "a_video_has_no_index": Fault(v3_camera, cut(VIDEO), "file-unreadable", at(file=VIDEO, episode=0, camera=TOP)),
    "a_video_with_its_index_in_front_is_cut": Fault(
        v3_camera, index_in_front_and_cut, "file-unreadable", at(file=VIDEO, episode=1, camera=TOP)
    ),
    "a_table_belongs_to_nothing": Fault(
        v3,
        lambda folder: shutil.copy(folder / DATA, folder / "data/chunk-000/file-007.parquet"),
        "file-unlisted",
        at(file="data/chunk-000/file-007.parquet"),
        (),
        NOTE,
    ),
    "the_frame_rate_is_no_number": Fault(v3, info(fps="ten"), "metadata-invalid", at(file=INFO), ("timestamp-rate",)),
    "the_total_of_frames_is_wrong": Fault(v3, info(total_frames=119), "count-mismatch", at(field="total_frames")),
    "the_total_of_episodes_is_wrong": Fault(v21, info(total_episodes=4), "count-mismatch", at(field="total_episodes")),
    "a_split_has_too_many_episodes": Fault(
        v3, info(splits={"train": "0:2", "test": "2:9"}), "split-invalid", at(file=INFO, field="splits")
    ),
    # columns
    "a_column_is_missing": Fault(
        v3,
        lambda folder: [rows(lambda columns: columns.pop(ACTION), file=file)(folder) for file in range(2)],
        "field-missing",
        at(file=DATA, field=ACTION),
    ),
    "a_column_is_not_described": Fault(
        v3,
        rows(lambda columns: columns.update(force=columns["timestamp"])),
        "field-unlisted",
        at(file=DATA, field="force"),
        (),
        NOTE,
    ),
    "a_column_has_the_wrong_dtype": Fault(
        v3,
        rows(lambda columns: columns.update(action=columns[ACTION].astype("int64"))),
        "dtype-mismatch",
        at(file=DATA, field=ACTION),
        MISMATCH,
    ),
    "a_column_has_the_wrong_shape": Fault(
        v3,
        edited(INFO, lambda info: info["features"][ACTION].update(shape=[6])),
        "shape-mismatch",
        at(file=DATA, field=ACTION),
    ),
    "a_value_is_null": Fault(
        v3, column(ACTION, lambda rows: [*rows[:33], None, *rows[34:]]), "value-null", at(file=DATA, field=ACTION)
    ),
    # episodes
    "an_episode_lost_its_last_row": Fault(
        v3,
        rows(lambda columns: columns.update({name: values[:69] for name, values in columns.items()})),
        "episode-length",
        at(file=DATA, episode=1),
        ("count-mismatch", "index-order", *MISMATCH),
    ),
    "episodes_overlap_in_the_table": Fault(
        v3,
        episode(1, dataset_from_index=38, dataset_to_index=68),
        "episode-bounds",
        at(file="meta/episodes", episode=1),
    ),
    "an_episode_is_there_twice": Fault(
        nothing, an_episode_twice, "episode-duplicate", at(episode=1), MISMATCH, WARNING
    ),
    "frame_indices_skip_one": Fault(
        v3, shift("frame_index", 44, 70, 1), "index-order", at(file=DATA, episode=1, frame=4, field="frame_index")
    ),
    "time_goes_back": Fault(
        v3, shift("timestamp", 12, 40, -0.3), "timestamp-order", at(episode=0, frame=12, field="timestamp")
    ),
    "a_frame_was_dropped": Fault(
        v3, shift("timestamp", 50, 70, 0.1), "timestamp-rate", at(file=DATA, episode=1, frame=10), (), WARNING
    ),
    "an_episode_ends_in_the_middle": Fault(
        nothing,
        an_end_in_the_middle,
        "flag-position",
        at(file=DATA, episode=0, frame=7, field="next.done"),
        MISMATCH,
        WARNING,
    ),
    # values
    "a_value_is_nan": Fault(
        v3,
        refill(lambda _, states: states.__setitem__((45, 2), np.nan)),
        "value-nan",
        at(file=DATA, episode=1, frame=5, field=STATE),
        MISMATCH,
    ),
    "a_value_is_infinite": Fault(
        v3, put(ACTION, (0, 1), np.inf, file=1), "value-infinite", at(file=SECOND, episode=2, frame=0, field=ACTION)
    ),
    "an_action_jumps": Fault(
        v3,
        refill(lambda actions, _: actions.__setitem__((90, 3), actions[90, 3] + 5)),
        "value-jump",
        at(episode=2, frame=20, field=ACTION),
        (),
        WARNING,
    ),
    "the_action_never_changes": Fault(
        v3, refill(lambda actions, _: actions.fill(0.25)), "dimension-constant", at(field=ACTION), (), WARNING
    ),
    "a_sensor_is_saturated": Fault(
        v3,
        refill(lambda _, states: np.minimum(states[:, 1], np.quantile(states[:, 1], 0.6), out=states[:, 1])),
        "dimension-saturated",
        at(field=STATE),
        (),
        NOTE,
    ),
    "the_statistics_are_of_other_data": Fault(
        v3,
        edited(STATS, lambda stats: stats[ACTION]["mean"].__setitem__(2, 0.7)),
        MISMATCH[0],
        at(file=STATS, field=ACTION),
        (),
        WARNING,
    ),
    "the_statistics_of_an_episode_are_wrong": Fault(
        v21,
        edited("meta/episodes_stats.jsonl", lambda rows: rows[1]["stats"][ACTION]["max"].__setitem__(0, 9.0)),
        MISMATCH[0],
        at(episode=1, field=ACTION),
        (),
        WARNING,
    ),
    # tasks
    "an_episode_has_an_unknown_task": Fault(
        v3,
        put("task_index", slice(40, 70), 6),
        "task-unknown",
        at(file=DATA, episode=1, frame=0, field="task_index"),
        ("task-unused",),
    ),
    "a_task_has_no_episode": Fault(v3, another_task, "task-unused", at(file="meta/tasks.parquet"), (), WARNING),
    "two_tasks_have_one_text": Fault(
        v21,
        edited(TASKS, lambda tasks: tasks[1].update(task=tasks[0]["task"])),
        "task-text",
        at(file=TASKS),
        ("task-mismatch",),
        WARNING,
    ),
    "an_episode_names_another_task": Fault(
        v3, episode(0, tasks=[builders._task(1)]), "task-mismatch", at(file=DATA, episode=0), (), WARNING
    ),
    # cameras
    "a_video_is_too_short": Fault(
        v21,
        video(builders.pictures(4, 32, 32), f"videos/chunk-000/{TOP}/episode_000001.mp4"),
        "video-frames",
        at(episode=1, camera=TOP),
    ),
    "a_video_of_two_episodes_is_too_short": Fault(
        v3_camera, video(builders.pictures(60, 32, 32)), "video-frames", at(file=VIDEO, episode=1, frame=20, camera=TOP)
    ),
    "clips_overlap": Fault(
        v3_camera,
        episode(1, **{f"videos/{TOP}/from_timestamp": 3.5, f"videos/{TOP}/to_timestamp": 6.5}),
        "video-bounds",
        at(file=VIDEO, episode=1, camera=TOP),
    ),
    "a_video_has_another_frame_rate": Fault(
        v3_camera, video(builders.pictures(70, 32, 32), fps=20), "video-rate", at(file=VIDEO, episode=0, camera=TOP)
    ),
    "a_video_has_another_size": Fault(
        v3_camera, video(builders.pictures(70, 32, 48)), "video-size", at(file=VIDEO, episode=0, camera=TOP)
    ),
    "a_video_has_an_unknown_codec": Fault(
        v3_camera, replace(VIDEO, b"avc1", b"qqq7"), "video-codec", at(file=VIDEO, episode=0, camera=TOP)
    ),
    "another_frame_rate_is_declared": Fault(
        v3_camera,
        edited(INFO, lambda info: info["features"][TOP]["info"].update({"video.fps": 25})),
        "video-rate",
        at(file=INFO, camera=TOP),
        (),
        WARNING,
    ),
    "a_camera_is_black": Fault(
        v3_camera, video(black(40)), "camera-blank", at(file=VIDEO, episode=1, frame=0, camera=TOP), (), WARNING
    ),
    "a_camera_is_frozen": Fault(
        v3_camera, video(frozen(), LATER), "camera-frozen", at(file=LATER, episode=2, camera=TOP), (), WARNING
    ),
    "pictures_are_black": Fault(
        nothing, black_pictures, "camera-blank", at(episode=0, camera="observation.images.a"), (), WARNING
    ),
    "the_statistics_of_a_camera_are_wrong": Fault(
        v3_camera,
        edited(STATS, lambda stats: stats[TOP].update(mean=[[[0.9]]] * 3)),
        MISMATCH[0],
        at(file=STATS, camera=TOP),
        (),
        WARNING,
    ),
    # D4RL and robomimic
    "d4rl_without_rewards": Fault(
        d4rl, hdf5(lambda file: file.pop("rewards")), "field-missing", at(file="d.hdf5", field="rewards")
    ),
    "d4rl_with_too_few_actions": Fault(
        d4rl, hdf5(lambda file: shorten(file, "actions", 17)), "count-mismatch", at(file="d.hdf5", field="actions")
    ),
    "an_hdf5_file_is_cut": Fault(d4rl, cut("", 0.6), "file-unreadable", at(file="d.hdf5")),
    "no_flag_is_ever_set": Fault(
        d4rl,
        hdf5(lambda file: [file[name].write_direct(np.zeros(18, bool)) for name in ("terminals", "timeouts")]),
        "flag-missing",
        at(),
        ("reward-constant",),
        NOTE,
    ),
    "rewards_are_constant": Fault(
        d4rl,
        hdf5(lambda file: file["rewards"].write_direct(np.full(18, 0.5, np.float32))),
        "reward-constant",
        at(field="rewards"),
        (),
        NOTE,
    ),
    "robomimic_counts_wrong": Fault(
        robomimic,
        hdf5(lambda file: file["data/demo_1"].attrs.modify("num_samples", 9)),
        "episode-length",
        at(file="r.hdf5/data/demo_1", episode=1, field="num_samples"),
        ("count-mismatch",),
    ),
    "robomimic_filter_names_nothing": Fault(
        robomimic,
        hdf5(lambda file: (file.pop("data/demo_2"), file["data"].attrs.modify("total", 10))),
        "split-invalid",
        at(file="r.hdf5/mask/train"),
    ),
    "robomimic_has_nan": Fault(
        robomimic,
        hdf5(lambda file: file["data/demo_1/obs/object"].__setitem__((3, 1), np.nan)),
        "value-nan",
        at(file="r.hdf5/data/demo_1", episode=1, frame=3, field="obs/object"),
    ),
    # Minari
    "minari_lost_an_observation": Fault(
        minari,
        hdf5(lambda file: shorten(file, "episode_1/observations", 4), MAIN),
        "episode-length",
        at(file=f"{MAIN}/episode_1", episode=1, field="observations"),
    ),
    "minari_counts_wrong": Fault(
        arrow,
        edited("data/metadata.json", lambda meta: meta.update(total_steps=20)),
        "count-mismatch",
        at(file="data/metadata.json", field="total_steps"),
    ),
    "minari_table_is_cut": Fault(
        arrow, cut("data/1/part-0.arrow"), "file-unreadable", at(file="data/1/part-0.arrow", episode=1)
    ),
    "minari_lost_the_metadata_of_an_episode": Fault(
        arrow, remove("data/1/metadata.json"), "file-missing", at(file="data/1/metadata.json", episode=1)
    ),
    "minari_has_a_strange_space": Fault(
        minari,
        edited("data/metadata.json", lambda meta: meta.update(observation_space="a box")),
        "not-opened",
        at(file="data"),
    ),
    # Zarr
    "zarr_ends_overlap": Fault(
        zarr, ends(20, 10, 30), "episode-bounds", at(file="meta/episode_ends", episode=1, field="episode_ends")
    ),
    "zarr_ends_exceed_the_rows": Fault(zarr, ends(10, 20, 31), "episode-bounds", at(episode=2, field="episode_ends")),
    "a_zarr_chunk_is_missing": Fault(
        zarr, remove("data/state/1.0"), "file-missing", at(file="data/state", field="state"), (), WARNING
    ),
    "a_zarr_chunk_is_damaged": Fault(
        zarr,
        lambda path: (path / "data/action/1.0").write_bytes(b"nothing of Blosc"),
        "file-unreadable",
        at(episode=1, field="action"),
    ),
    # mappings and what buffers save
    "environments_are_in_turn": Fault(
        nothing, lambda _: stream(4), "episode-joined", at(episode=0, frame=0), ("value-jump",), WARNING
    ),
    "time_limits_have_no_flag": Fault(
        nothing, limits_without_flags, "episode-joined", at(episode=0, frame=24), ("value-jump",), WARNING
    ),
    "a_camera_of_a_mapping_is_black": Fault(
        nothing, a_black_camera_in_a_mapping, "camera-blank", at(episode=1, camera="observation.image"), (), WARNING
    ),
    "ends_are_no_integers": Fault(
        nothing,
        lambda _: {"action": arm([20, 20])["action"], "episode_ends": np.array([20.0, 40.0])},
        "episode-bounds",
        at(field="episode_ends"),
        ("value-jump",),
    ),
    "a_mapping_has_nan": Fault(nothing, nan_in_a_mapping, "value-nan", at(episode=1, frame=2, field="observation")),
    "a_saved_trajectory_has_nan": Fault(
        nothing, nan_in_a_trajectory, "value-nan", at(episode=8, frame=0, field="next.reward")
    ),
    "saved_trajectories_count_wrong": Fault(
        saved,
        edited("metadata.json", lambda meta: meta.update(total_samples=1)),
        "saved-damaged",
        at(file="metadata.json"),
    ),
}
