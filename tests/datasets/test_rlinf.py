"""Directories of trajectories as datasets, beside the trajectories that were written."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import Trajectory, TrajectoryReplayBuffer, open_dataset
from ostinato.errors import CheckpointError, DamagedFileError, SchemaError

if TYPE_CHECKING:
    from pathlib import Path


def rollout(number: int, steps: int = 6, envs: int = 2, *, extra_rows: bool = False) -> Trajectory:
    """A trajectory whose values say where they come from."""
    random = np.random.default_rng(number)
    serial = torch.arange(steps * envs).reshape(steps, envs) + 1000 * number
    stops = torch.from_numpy(random.random((steps, envs)) < 0.2)
    cuts = torch.from_numpy(random.random((steps, envs)) < 0.2) & ~stops

    def flags(values: torch.Tensor) -> torch.Tensor:
        values = values.unsqueeze(-1)
        return torch.cat((torch.zeros_like(values[:1]), values)) if extra_rows else values

    states = serial.float().unsqueeze(-1).expand(steps, envs, 3).contiguous()
    images = (serial % 251).to(torch.uint8)[..., None, None, None].expand(steps, envs, 4, 4, 3).contiguous()
    return Trajectory(
        max_episode_length=steps,
        actions=states[..., :2].contiguous(),
        rewards=serial.float().unsqueeze(-1),
        terminations=flags(stops),
        truncations=flags(cuts),
        dones=flags(stops | cuts),
        prev_logprobs=states[..., :2].contiguous(),
        curr_obs={"states": states, "images": images},
        next_obs={"states": states + 0.5, "images": images},
        forward_inputs={"chains": states.contiguous()},
        extra={"note": "text"},
    )


def write(path: Path, trajectories: list[Trajectory], **options: Any) -> None:
    with TrajectoryReplayBuffer(seed=0, auto_save=True, auto_save_path=path, **options) as rb:
        rb.add_trajectories(trajectories)


def model(trajectories: list[Trajectory]) -> dict[str, Any]:
    """Rows one environment after the other, and the lengths of episodes."""
    rows, lengths = [], []
    for one in trajectories:
        assert one.rewards is not None
        assert one.dones is not None
        steps, envs = one.rewards.shape[:2]
        dones = one.dones[-steps:, :, 0]
        for env in range(envs):
            rows += one.rewards[:, env, 0].long().tolist()
            ends = [step for step in range(steps) if dones[step, env] or step == steps - 1]
            lengths += np.diff([-1, *ends]).tolist()
    return {"serial": rows, "lengths": lengths}


@pytest.mark.parametrize(("format_name", "extra_rows"), [("pt", True), ("safetensors", False)])
def test_rows_follow_each_other_by_environment(tmp_path: Path, format_name: str, extra_rows: bool) -> None:
    trajectories = [rollout(n, steps=4 + n, envs=1 + n % 3, extra_rows=extra_rows) for n in range(5)]
    for rank, part in ((0, slice(2)), (2, slice(2, 3)), (10, slice(3, None))):
        write(tmp_path / f"rank_{rank}", trajectories[part], trajectory_format=format_name)
    expected = model(trajectories)
    dataset = pickle.loads(pickle.dumps(open_dataset(tmp_path)))
    assert dataset.format == "rlinf"
    assert {".".join(path) for path in dataset.schema.paths} == {
        *("observation.states", "observation.images", "next.observation.states", "next.observation.images"),
        *("next.reward", "next.terminated", "next.truncated", "next.done"),
        *("action", "prev_logprobs", "forward_inputs.chains"),
    }
    assert dataset["next", "reward"][:, 0].long().tolist() == expected["serial"]
    assert dataset.episode_lengths.tolist() == expected["lengths"]
    serial = torch.tensor(expected["serial"])
    assert torch.equal(dataset["observation", "states"][:, 0], serial.float())
    assert torch.equal(dataset["next", "observation", "states"][:, 0], serial + 0.5)
    assert torch.equal(dataset["observation", "images"][:, 0, 0, 0].long(), serial % 251)
    assert torch.equal(dataset["action"][:, 1], serial.float())
    assert torch.equal(dataset["forward_inputs", "chains"][:, 2], serial.float())
    ends = dataset["next", "terminated"] | dataset["next", "truncated"]
    assert torch.equal(ends, dataset["next", "done"])


def test_fields_that_differ_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, values, message in (
        ("versions", torch.zeros(6, 2, 1), ""),
        ("actions", torch.zeros(6, 2, 7), "actions is float32"),
        ("extra", {"action": torch.zeros(6, 2, 1)}, "two fields would be 'action'"),
    ):
        other = rollout(1)
        setattr(other, name, values)
        write(tmp_path / name, [rollout(0), other] if name != "extra" else [other])
        if message:
            with pytest.raises(SchemaError, match=message):
                open_dataset(tmp_path / name)
    dataset = open_dataset(tmp_path / "versions")
    assert ("versions",) not in dataset.schema.paths
    assert any("versions" in sentence for sentence in dataset.assumptions)
    write(tmp_path / "pkl", [rollout(0)], trajectory_format="pkl", allow_pickle=True)
    with pytest.raises(CheckpointError, match="allow-pickle"):
        open_dataset(tmp_path / "pkl")
    file = next((tmp_path / "versions").glob("trajectory_1_*"))
    for damage in (lambda: file.write_bytes(file.read_bytes()[:-100]), file.unlink):
        damage()
        with pytest.raises(DamagedFileError, match="trajectory_1_"):
            open_dataset(tmp_path / "versions")
