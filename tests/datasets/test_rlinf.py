"""Directories of trajectories as datasets, beside the trajectories that were written."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import Trajectory, TrajectoryReplayBuffer, open_dataset
from ostinato.errors import CheckpointError, DamagedFileError, SchemaError

from ..unit.trajectories.rollouts import rollout, serials
from .samples import not_opened

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, *trajectories: Trajectory, **options: Any) -> None:
    with TrajectoryReplayBuffer(seed=0, auto_save=True, auto_save_path=path, **options) as rb:
        rb.add_trajectories(list(trajectories))


@pytest.mark.parametrize(("format_name", "epochs"), [("pt", 1), ("safetensors", 0)])
def test_rows_follow_each_other_by_rank_and_environment(tmp_path, format_name, epochs):
    sizes = [(number, 4 + number, 1 + number % 3) for number in range(5)]
    trajectories = [rollout(*size, epochs=epochs) for size in sizes]
    for rank, part in ((0, slice(2)), (2, slice(2, 3)), (10, slice(3, None))):
        write(tmp_path / f"rank_{rank}", *trajectories[part], trajectory_format=format_name)
    columns = [serials(*size)[:, env, 0] for size in sizes for env in range(size[2])]
    serial = torch.cat(columns)
    flags = {"done": serial % 2 == 1, "terminated": serial % 3 == 0, "truncated": serial % 5 == 0}
    last = torch.cat([part == part[-1] for part in columns])
    ends = last | flags["done"] | flags["terminated"] | flags["truncated"]
    dataset = pickle.loads(pickle.dumps(open_dataset(tmp_path)))
    assert dataset.format == "rlinf"
    assert {".".join(path) for path in dataset.schema.paths} == {
        *("observation.states", "observation.main_images", "next.observation.states"),
        *("next.reward", "next.terminated", "next.truncated", "next.done"),
        *("action", "prev_logprobs", "prev_values", "forward_inputs.action"),
    }
    assert dataset.episode_lengths.tolist() == np.diff(ends.nonzero().flatten(), prepend=-1).tolist()
    expected: dict[Any, torch.Tensor] = {
        ("next", "reward"): serial,
        ("observation", "states"): serial,
        ("next", "observation", "states"): serial + 0.5,
        "action": serial,
        "prev_values": serial,
    }
    for key, values in expected.items():
        assert torch.equal(dataset[key][:, -1], values), key
    assert torch.equal(dataset["forward_inputs", "action"][:, 1, 0], serial.double())
    assert torch.equal(dataset["observation", "main_images"][:, 0, 0, 1].long(), (serial.long() + 1) % 251)
    for name, values in flags.items():
        assert torch.equal(dataset["next", name].flatten(), values), name


def test_fields_that_differ_and_files_that_cannot_be_read(tmp_path):
    for name, values, message in (
        ("versions", torch.zeros(6, 2, 1), ""),
        ("actions", torch.zeros(6, 2, 7), "actions is float32"),
        ("extra", {"action": torch.zeros(6, 2, 1)}, "two fields would be 'action'"),
    ):
        changed: dict[str, Any] = {name: values}
        other = rollout(1, **changed)
        write(tmp_path / name, *([other] if name == "extra" else [rollout(0), other]))
        if message:
            not_opened(tmp_path / name, SchemaError, message)
    dataset = open_dataset(tmp_path / "versions")
    assert ("versions",) not in dataset.schema.paths
    assert any("versions" in sentence for sentence in dataset.assumptions)
    write(tmp_path / "pkl", rollout(0), trajectory_format="pkl", allow_pickle=True)
    not_opened(tmp_path / "pkl", CheckpointError, "allow-pickle")
    file = next((tmp_path / "versions").glob("trajectory_1_*"))
    for damage in (lambda: file.write_bytes(file.read_bytes()[:-100]), file.unlink):
        damage()
        not_opened(tmp_path / "versions", DamagedFileError, "trajectory_1_")
