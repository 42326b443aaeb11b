"""Trajectories whose images encode id, step, environment, camera and observation in their colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato import Trajectory, TrajectoryReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CAMERAS = ("main_images", "wrist_images", "extra_view_images")


def stamp(number: int, step: int, env: int, camera: int = 0, view: int = 0, *, following: bool = False) -> np.ndarray:
    """The picture of one transition, uint8 `[8, 8, 3]`; red and green are id and step, blue is all the rest."""
    picture = np.zeros((8, 8, 3), dtype=np.uint8)
    picture[...] = (number, step, env * 50 + camera * 10 + view + 5 * following)
    return picture


def read_stamp(pixels: np.ndarray) -> tuple[int, ...]:
    """Red, green and blue of a picture of one colour."""
    flat = pixels.reshape(-1, pixels.shape[-1])
    assert (flat == flat[0]).all()
    return tuple(int(value) for value in flat[0][:3])


def _camera(number: int, steps: int, envs: int, camera: int, *, following: bool) -> torch.Tensor:
    views = 2 if camera == 2 else 1
    rows = [
        [[stamp(number, step, env, camera, view, following=following) for view in range(views)] for env in range(envs)]
        for step in range(steps)
    ]
    pictures = torch.from_numpy(np.array(rows))
    return pictures if views > 1 else pictures[:, :, 0]


def rollout(number: int, steps: int, envs: int, *, images: bool = True, **more: Any) -> Trajectory:
    """A trajectory; its rewards are `id + step / 100` and the last step is done."""
    serial = torch.arange(steps).float()[:, None, None].expand(steps, envs, 1)
    done = torch.zeros(steps, envs, 1, dtype=torch.bool)
    done[-1] = True
    states = torch.cat([serial, serial * 2, serial * 0 + number], -1)
    sides: list[dict[str, Any]] = [{"states": states}, {"states": states + 0.5}]
    for following, side in enumerate(sides):
        for camera, name in enumerate(CAMERAS if images else ()):
            side[name] = _camera(number, steps, envs, camera, following=bool(following))
    sides[0]["task"] = [f"task of {env}" for env in range(envs)]
    values: dict[str, Any] = {
        "actions": serial.repeat(1, 1, 4) / 10,
        "rewards": number + serial / 100,
        "dones": done,
        "terminations": done,
        "curr_obs": sides[0],
        "next_obs": sides[1],
    }
    return Trajectory(**(values | more))


def store(
    path: Path, extents: Sequence[tuple[int, int]] = ((3, 2), (2, 1), (4, 2)), form: str = "safetensors", **more: Any
) -> Path:
    """Save trajectories of these steps and environments, ids from 0."""
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, trajectory_format=form, allow_pickle=form == "pkl"
    ) as buffer:
        buffer.add_trajectories([rollout(number, *extent, **more) for number, extent in enumerate(extents)])
    return path


def file_of(path: Path, number: int) -> Path:
    """The file of a trajectory."""
    return next(iter(path.glob(f"trajectory_{number}_*")))
