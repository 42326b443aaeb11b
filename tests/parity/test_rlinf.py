"""Directories go to and fro between RLinf's own class and ours; skipped where rlinf is missing.

Its buffer needs little of what the package asks for: `make` installs it without its dependencies.
"""

from __future__ import annotations

from typing import Any

import pytest

from ostinato import TrajectoryReplayBuffer
from ostinato.tools import verify

from ..unit.trajectories.rollouts import check_batch, rollout

theirs: Any = pytest.importorskip("rlinf.data.replay_buffer")
records: Any = pytest.importorskip("rlinf.data.embodied_io_struct")


@pytest.mark.parametrize(
    ("form", "epochs", "weights"), [("pt", 0, ""), ("pkl", 1, "5f0c7a52_12"), ("pt", 2, "5f0c7a52_12")]
)
def test_a_directory_goes_to_and_fro(tmp_path, form, epochs, weights):
    path = tmp_path / "a"
    first = theirs.TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(path), trajectory_format=form)
    first.add_trajectories(
        [records.Trajectory(**rollout(n, epochs=epochs, model_weights_id=weights).to_dict()) for n in range(3)]
    )
    first.close()
    ours = TrajectoryReplayBuffer(allow_pickle=True)
    ours.load_checkpoint(path)
    assert len(set(check_batch(ours.sample(36, replace=False)))) == 36
    assert not verify(path, allow_pickle=True).damage

    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, trajectory_format=form, allow_pickle=True
    ) as saver:
        saver.add_trajectories([rollout(3, epochs=epochs)])
    ours.load_checkpoint(path)
    ours.save_checkpoint(tmp_path / "b")
    for directory in (path, tmp_path / "b"):
        again = theirs.TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path / "c"), sample_window_size=0)
        again.load_checkpoint(str(directory))
        assert (len(again), again.total_samples) == (4, 48)
        seen: set[int] = set()
        for _ in range(20):
            batch = again.sample(48)
            batch["prev_values"] = batch["rewards"]  # it takes rows between epochs for transitions
            seen.update(check_batch(batch))
        assert {number // 1000 for number in seen} == {0, 1, 2, 3}
