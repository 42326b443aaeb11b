"""Rollouts on disk: transitions of `T` steps of `B` environments with two pictures each, one file a rollout."""

from __future__ import annotations

import os
import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.adapter import Call, Setup

STEPS, ENVS = 50, 4
_PICTURE = (64, 64, 3)


def rollout() -> dict[str, Any]:
    """Return the fields of one rollout, 4.9 MB of pictures and small fields."""

    def rows(*shape: int) -> torch.Tensor:
        return torch.rand(STEPS, ENVS, *shape)

    def obs() -> dict[str, torch.Tensor]:
        pictures = torch.randint(0, 256, (STEPS, ENVS, *_PICTURE), dtype=torch.uint8)
        return {"main_images": pictures, "states": rows(8)}

    flags = {name: rows(1) > 0.5 for name in ("terminations", "truncations", "dones")}
    return {
        "actions": rows(7),
        "rewards": rows(1),
        "prev_logprobs": rows(7),
        **flags,
        "curr_obs": obs(),
        "next_obs": obs(),
    }


def sample(setup: Setup) -> Call:
    """Write the rollouts and return a call that draws a batch from them."""
    package = import_module("ostinato")
    buffer = package.TrajectoryReplayBuffer(
        cache_size=5, auto_save=True, auto_save_path=setup.directory / "rollouts", trajectory_format=setup.kind
    )
    values = package.Trajectory(**rollout())
    for _ in range(setup.rows // (STEPS * ENVS)):
        buffer.add_trajectories([values])
    buffer.close()
    return lambda: buffer.sample(setup.batch)


def read(setup: Setup) -> Call:
    """Return a call that reads as many pictures from bare files into preallocated memory, nothing else."""
    width = 64 * 64 * 3
    count = setup.rows // (STEPS * ENVS)
    files = [_file(setup.directory / str(number), 2 * STEPS * ENVS * width) for number in range(count)]
    target = memoryview(bytearray(2 * setup.batch * width))
    pieces = [[target[at : at + width]] for at in range(0, len(target), width)]

    def call() -> None:
        for piece in pieces:
            os.preadv(files[random.randrange(count)], piece, width * random.randrange(2 * STEPS * ENVS))

    return call


def _file(path: Path, nbytes: int) -> int:
    path.write_bytes(bytes(nbytes))
    return os.open(path, os.O_RDONLY)


FORMATS = ("safetensors", "pt")
WORKLOADS = {f"trajectories.{name}": sample for name in FORMATS}
LIMITS = {f"trajectories.{name}": read for name in FORMATS}
