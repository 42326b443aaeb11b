"""Rollouts whose numbers identify their transitions."""

from __future__ import annotations

import json
import os
import pickle
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.tags import same_state

from ostinato import Trajectory, TrajectoryReplayBuffer

if TYPE_CHECKING:
    from pathlib import Path


def serials(number: int, steps: int, envs: int) -> torch.Tensor:
    """`number * 1000 + t * B + b` of each transition, `[T, B, 1]`."""
    return (torch.arange(steps * envs).reshape(steps, envs, 1) + number * 1000).float()


def fields(serial: torch.Tensor) -> dict[str, Any]:
    """The fields of transitions by their serial numbers `[..., 1]`: of a rollout, or of a batch."""

    def wide(width: int) -> torch.Tensor:
        return serial.repeat(*[1] * (serial.ndim - 1), width)

    images = (serial.long()[..., None, None] + torch.arange(48).reshape(4, 4, 3)) % 251
    return {
        "actions": wide(3),
        "rewards": serial.clone(),
        "prev_logprobs": wide(3),
        "prev_values": serial.clone(),
        "dones": (serial % 2).bool(),
        "terminations": serial % 3 == 0,
        "truncations": serial % 5 == 0,
        "forward_inputs": {"action": wide(4).reshape(*serial.shape[:-1], 2, 2).double()},
        "curr_obs": {"states": wide(2), "main_images": images.to(torch.uint8)},
        "next_obs": {"states": wide(2) + 0.5},
    }


def rollout(number: int, steps: int = 6, envs: int = 2, *, epochs: int = 0, **more: Any) -> Trajectory:
    """A rollout whose fields are functions of the serial numbers of its transitions.

    With `epochs` flags have a leading row for each epoch (-1 in `dones_as_numbers`), and `prev_values` a trailing one.
    """
    values = fields(serials(number, steps, envs))
    values["prev_values"] = trailing(values["prev_values"], epochs)
    for flag in ("dones", "terminations", "truncations"):
        values[flag] = leading(values[flag], epochs)
    values["curr_obs"]["task"] = ["pick", "place"]
    return Trajectory(**({"max_episode_length": steps} | values | more))


def leading(rows: torch.Tensor, epochs: int) -> torch.Tensor:
    """Insert a row that belongs to no transition before each epoch; it differs from the next row."""
    if not epochs:
        return rows
    return torch.cat([torch.cat([~part[:1], part]) for part in rows.chunk(epochs)])


def trailing(rows: torch.Tensor, epochs: int) -> torch.Tensor:
    """Insert a row that belongs to no transition after each epoch."""
    if not epochs:
        return rows
    return torch.cat([torch.cat([part, part[-1:] - 7777]) for part in rows.chunk(epochs)])


def check_batch(batch: dict[str, Any]) -> list[int]:
    """Check that the fields of each row belong to one transition; return the serial numbers."""
    expected = fields(batch["rewards"])
    same_state({key: batch[key] for key in expected}, expected)
    return [int(number) for number in batch["rewards"].flatten()]


def files(directory: Path) -> list[str]:
    """Names of the trajectory files of a directory."""
    return sorted(path.name for path in directory.iterdir() if re.match(r"trajectory_\d", path.name))


FORMATS = ("pt", "pkl", "safetensors")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def saving(path: Path, count: int = 0, form: str = "pt", **options: Any) -> TrajectoryReplayBuffer:
    """A buffer that saves to a directory, with `count` saved rollouts."""
    options = {"allow_pickle": form == "pkl", **options}
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=form, **options)
    if count:
        assert add(buffer, *(rollout(number, 3) for number in range(count))) == list(range(count))
    return buffer


def add(buffer: TrajectoryReplayBuffer, *trajectories: Trajectory) -> list[int]:
    """Add trajectories, wait until they are saved, and return their ids."""
    future = buffer.add_trajectories(list(trajectories))
    assert future is not None
    return future.result(20)


def loaded(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    """A buffer that has loaded a directory."""
    buffer = TrajectoryReplayBuffer(allow_pickle=True)
    buffer.load_checkpoint(path, **options)
    return buffer


def ids_on_disk(path: Path) -> list[int]:
    """The ids that a load of a directory finds."""
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(path)
    return buffer.trajectory_ids


def small(**more: Any) -> Trajectory:
    """A trajectory of eight random rewards, with other fields as given."""
    return Trajectory(rewards=torch.rand(4, 2, 1), **more)


def as_rlinf(root: Path, form: str, *, old_spelling: bool = False, named: bool = True) -> None:
    """Write a directory as RLinf does: without `ostinato_store.jsonl`, with any or no text between id and extension."""
    root.mkdir(parents=True)
    index = {}
    for number in range(3):
        weights = f"opaque-{number}" if named else ""
        values = rollout(number, 4, epochs=2).to_dict() | {"model_weights_id": weights}
        name = root / f"trajectory_{number}_{weights}.{form}"
        if form == "pt":
            torch.save(values, name)
        else:
            name.write_bytes(pickle.dumps(values))
        index[str(number)] = {
            "num_samples": 8,
            "trajectory_id": number,
            "max_episode_length": 4,
            "shape": [4, 2, 3],
            "model_weights_id": weights,
        }
    meta = {"trajectory_format": form, "size": 3, "total_samples": 24, "trajectory_counter": 3, "seed": 9}
    (root / "metadata.json").write_text(json.dumps(meta))
    spelt = "trajector_index.json" if old_spelling else "trajectory_index.json"
    (root / spelt).write_text(json.dumps({"trajectory_index": index, "trajectory_id_list": [0, 1, 2]}))
