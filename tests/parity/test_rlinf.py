"""Directories go to and fro between RLinf's own class and ours; skipped where rlinf is missing.

Its buffer needs little of what the package asks for: `make` installs it without its dependencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.tools import verify

if TYPE_CHECKING:
    from pathlib import Path

theirs: Any = pytest.importorskip("rlinf.data.replay_buffer")
records: Any = pytest.importorskip("rlinf.data.embodied_io_struct")


def values(number: int, epochs: int) -> dict[str, Any]:
    """Six steps of two environments; flags with a leading row for each epoch."""
    serial = (torch.arange(12).reshape(6, 2, 1) + 1000 * number).float()
    flags = (serial % 2).bool()
    if epochs:
        flags = torch.cat([torch.cat([~part[:1], part]) for part in flags.chunk(epochs)])
    return {
        "max_episode_length": 6,
        "actions": serial.repeat(1, 1, 3),
        "rewards": serial,
        "prev_logprobs": serial.repeat(1, 1, 2),
        "prev_values": torch.cat([serial, serial[-1:] * 0 - 1]),
        "dones": flags,
        "curr_obs": {"states": serial.repeat(1, 1, 2), "task": ["pick", "place"]},
        "next_obs": {"states": serial + 0.5},
    }


def check(batch: dict[str, Any]) -> set[int]:
    serial = batch["rewards"]
    assert torch.equal(batch["actions"], serial.repeat(1, 3))
    assert torch.equal(batch["dones"], (serial % 2).bool())
    assert torch.equal(batch["curr_obs"]["states"], serial.repeat(1, 2))
    assert torch.equal(batch["next_obs"]["states"], serial + 0.5)
    return {int(number) for number in serial}


@pytest.mark.parametrize(
    ("form", "epochs", "weights"), [("pt", 0, ""), ("pkl", 1, "5f0c7a52_12"), ("pt", 2, "5f0c7a52_12")]
)
def test_a_directory_goes_to_and_fro(tmp_path: Path, form: str, epochs: int, weights: str) -> None:
    path = tmp_path / "a"
    first = theirs.TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(path), trajectory_format=form)
    first.add_trajectories([records.Trajectory(model_weights_id=weights, **values(n, epochs)) for n in range(3)])
    first.close()
    ours = TrajectoryReplayBuffer(allow_pickle=True)
    ours.load_checkpoint(path)
    assert len(check(ours.sample(36, replace=False))) == 36
    assert not verify(path, allow_pickle=True).damage

    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, trajectory_format=form, allow_pickle=True
    ) as saver:
        saver.add_trajectories([Trajectory(**values(3, epochs))])
    ours.load_checkpoint(path)
    ours.save_checkpoint(tmp_path / "b")
    for directory in (path, tmp_path / "b"):
        again = theirs.TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path / "c"), sample_window_size=0)
        again.load_checkpoint(str(directory))
        assert (len(again), again.total_samples) == (4, 48)
        seen: set[int] = set()
        for _ in range(20):
            seen |= check(again.sample(48))
        assert {number // 1000 for number in seen} == {0, 1, 2, 3}
