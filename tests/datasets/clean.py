"""Datasets without faults, of varied formats and contents: the doctor must be silent about all of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..unit.trajectories.rollouts import saving
from . import builders

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

TOP, WRIST = "observation.images.top", "observation.images.wrist"
ARM: builders.Features = {"observation.state": ("float32", (8,)), "action": ("float32", (7,))}


def arm(lengths: list[int], seed: int = 0) -> dict[str, Array]:
    """Teleoperation of an arm: smooth joints with pauses, a wrist angle that wraps, a gripper that opens and closes."""
    generator = np.random.default_rng(seed)
    actions, states = [], []
    for length in lengths:
        time = np.linspace(0, 1, length)
        knots = generator.uniform(-1, 1, (6, 5))
        path = np.stack([np.interp(time, np.linspace(0, 1, 6), knots[:, n]) for n in range(5)], 1)
        pause = slice(length // 3, length // 3 + length // 10)
        path[pause] = path[pause.start]
        wrist = (np.cumsum(generator.uniform(0, 0.3, length)) + np.pi) % (2 * np.pi) - np.pi
        opened = np.where((time > 0.3) & (time < generator.uniform(0.6, 0.8)), 0.0, 0.08)
        gripper = opened + generator.normal(0, 2e-4, length)
        action = np.concatenate([path, wrist[:, None], opened[:, None]], 1)
        measured = path + generator.normal(0, 1e-3, path.shape)
        state = np.concatenate([measured, wrist[:, None], gripper[:, None], np.full((length, 1), 0.5)], 1)
        actions.append(action)
        states.append(state)
    return {
        "action": np.concatenate(actions).astype(np.float32),
        "observation.state": np.concatenate(states).astype(np.float32),
    }


def locomotion(lengths: list[int], seed: int = 0) -> dict[str, Array]:
    """Reinforcement learning: velocities with contacts, actions that an exploring policy saturates, a quaternion."""
    generator = np.random.default_rng(seed)
    rows = sum(lengths)
    actions = np.clip(generator.normal(0, 1.2, (rows, 4)), -1, 1)
    walk = np.cumsum(generator.normal(0, 0.1, (rows, 3)), 0)
    contact = generator.standard_t(2.5, (rows, 3)) * (generator.random((rows, 1)) < 0.2)
    angle = np.cumsum(generator.normal(0, 0.05, rows))
    quaternion = np.stack([np.cos(angle), np.sin(angle), 0 * angle, 0 * angle], 1)
    quaternion *= generator.choice([-1, 1], (rows, 1))  # either sign is the same rotation
    observation = np.concatenate([walk, contact, quaternion], 1)
    return {
        "observations": observation.astype(np.float32),
        "actions": actions.astype(np.float32),
        "rewards": (walk[:, 0] - 0.1 * (actions**2).sum(1)).astype(np.float32),
    }


# -- LeRobot with values of one's own ---------------------------------------------------------------------------------


def tables(folder: Path) -> list[Path]:
    return sorted((folder / "data").rglob("*.parquet"))


def fill(folder: Path, values: dict[str, Array]) -> None:
    """Replace columns of all tables of a LeRobot v3 dataset, in the order of the rows, and their statistics."""
    row = 0
    for path in tables(folder):
        table = pq.read_table(path)
        for name, new in values.items():
            part = new[row : row + table.num_rows]
            flat = pa.array(part.reshape(-1))
            column = flat if part.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, part.shape[1])
            at = table.column_names.index(name)
            table = table.set_column(at, table.field(at).name, column)
        row += table.num_rows
        pq.write_table(table, path)
    path = folder / "meta/stats.json"
    stats = {name: builders._statistics(column, camera=False) for name, column in values.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | stats))

    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            span = slice(row["dataset_from_index"], row["dataset_to_index"])
            for name, column in values.items():
                for kind, value in builders._statistics(column[span], camera=False).items():
                    row[f"stats/{name}/{kind}"] = value

    episode_table(folder, change)


def episode_table(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the rows of the table of episodes of a LeRobot v3 dataset."""
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows), path)


# -- the datasets -----------------------------------------------------------------------------------------------------


def _v3_paused_camera(folder: Path) -> Path:
    """A robot that stands still for a while: its camera shows the same picture, as it should; then in a dark room."""
    lengths = [60, 50]
    builders.lerobot_v3(folder, lengths=lengths, features=ARM, cameras={TOP: (32, 32)})
    values = arm(lengths)
    state = values["observation.state"].copy()
    state[10:55] = state[10]
    frames = builders.pictures(60, 32, 32)
    frames[10:55] = frames[10]
    later = np.zeros((50, 32, 32, 3), np.uint8)  # a dark room with a small light that moves
    for row, frame in enumerate(later):
        frame[10:14, row // 2 : row // 2 + 4] = 255
    path = folder / "videos/observation.images.top/chunk-000/file-000.mp4"
    builders.write_video(path, np.concatenate([frames, later]), fps=10)
    fill(folder, {**values, "observation.state": state})
    return folder


def _d4rl(path: Path, lengths: list[int], values: dict[str, Array], *, terminal: bool) -> Path:
    """Write a D4RL file whose episodes all terminate, or are all cut off."""
    import h5py

    last = builders.last_rows(lengths)
    with h5py.File(path, "w") as file:
        for name, array in values.items():
            file[name] = array
        file["terminals"], file["timeouts"] = last & terminal, last & (not terminal)
    return path


def _cartpole(path: Path) -> Path:
    """Discrete actions and rewards that are all one."""
    generator = np.random.default_rng(2)
    observations = np.cumsum(generator.normal(0, 0.1, (76, 4)), 0).astype("float32")
    values = {"observations": observations, "actions": generator.integers(0, 2, 76), "rewards": np.ones(76, "float32")}
    return _d4rl(path, [20, 9, 33, 14], values, terminal=True)


def _grid_world(path: Path) -> Path:
    """Discrete observations: short episodes are equal by chance."""
    states = np.array([0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2])
    lengths = [3, 3, 4, 3]
    values = {"observations": states, "actions": states % 2, "rewards": builders.last_rows(lengths).astype("float32")}
    return _d4rl(path, lengths, values, terminal=True)


def _zarr_pusht(path: Path) -> Path:
    """Positions in pixels, and a chunk of actions that are zero: Zarr writes no file for it."""
    generator = np.random.default_rng(1)
    state = np.cumsum(generator.normal(0, 3, (350, 5)), 0) + 256
    action = np.where((np.arange(350) // 10 % 2 == 0)[:, None], 0, generator.normal(0, 5, (350, 2)))
    arrays = {"state": state.astype("float32"), "action": action.astype("float32")}
    builders.write_zarr(path, arrays, [120, 80, 150])
    return path


def _robomimic_arm(path: Path) -> Path:
    """Demonstrations that report success in more rows than the last one."""
    import h5py

    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = 180
        for n, length in enumerate([60, 50, 70]):
            values, demo = arm([length], seed=n), data.create_group(f"demo_{n}")
            demo.attrs["num_samples"] = length
            demo["actions"], demo["obs/joints"] = values["action"], values["observation.state"]
            demo["obs/top_image"] = builders.pictures(length, 16, 16, seed=n)
            demo["dones"] = (np.arange(length) >= length - 5).astype("int64")
            demo["rewards"] = (np.arange(length) >= length - 5).astype("float64")
    return path


def trajectories(folder: Path) -> Path:
    saving(folder, 3).close()
    return folder


def _ranks(folder: Path) -> Path:
    for rank in range(2):
        trajectories(folder / f"rank_{rank}")
    return folder


CLEAN: dict[str, Callable[[Path], Path]] = {
    "v3-small": lambda p: builders.lerobot_v3(p, lengths=[1, 2, 1, 3]).path,
    "v3-two-cameras": lambda p: (
        builders.lerobot_v3(
            p,
            cameras={TOP: (32, 32), WRIST: (48, 32)},
            images={"observation.images.a": (16, 24)},
            features=builders.EVERY_KIND,
            episodes_per_video={TOP: 3, WRIST: 1},
            fixed_lists=False,
        ).path
    ),
    "v3-many-files": lambda p: (
        builders.lerobot_v3(
            p,
            lengths=[5] * 9,
            episodes_per_video=4,
            files_per_chunk=2,
            cameras={TOP: (32, 32)},
            b_frames=2,
            keyframes=9,
            fps=25,
            skipped_frames={TOP: 4},
        ).path
    ),
    "v3-paused-camera": _v3_paused_camera,
    "v21-chunks": lambda p: (
        builders.lerobot_v21(
            p, lengths=[4] * 7, episodes_per_chunk=3, cameras={TOP: (64, 64)}, codec="libsvtav1", fps=30
        ).path
    ),
    "minari": lambda p: builders.minari_dataset(p).path,
    "minari-arrow": lambda p: builders.minari_dataset(p, data_format="arrow", observation="dict").path,
    "minari-parquet": lambda p: builders.minari_dataset(p, data_format="parquet", action="discrete").path,
    "d4rl": lambda p: builders.d4rl_hdf5(p, timeouts=False).path,
    "d4rl-locomotion": lambda p: _d4rl(p, [1000, 400, 700], locomotion([1000, 400, 700]), terminal=False),
    "cartpole": _cartpole,
    "grid-world": _grid_world,
    "robomimic-arm": _robomimic_arm,
    "ranks": _ranks,
    "zarr-2": lambda p: builders.diffusion_zarr(p).path,
    "zarr-zip": lambda p: builders.diffusion_zarr(p.with_suffix(".zip"), zarr_format=3, picture_dtype="float32").path,
    "zarr-pusht": _zarr_pusht,
}
"""Name -> function that writes the dataset at a path and returns where it is."""
