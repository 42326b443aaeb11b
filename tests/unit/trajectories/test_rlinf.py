"""Directories of RLinf are written and read, and never executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.trajectories.rollouts import (
    FORMATS,
    add,
    as_rlinf,
    check_batch,
    files,
    loaded,
    rollout,
    saving,
)

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
)
from ostinato.tools import convert, merge, split, verify


@pytest.mark.parametrize("form", FORMATS)
def test_a_closed_directory_has_the_layout_of_rlinf(tmp_path, form):
    root = tmp_path / "a"
    with saving(root, form=form, seed=77) as buffer:
        buffer.add_trajectories([rollout(0, 3, model_weights_id="w_5"), Trajectory(rewards=torch.zeros(2, 4, 1))])
    meta = {"trajectory_format": form, "size": 2, "total_samples": 14, "trajectory_counter": 2, "seed": 77}
    assert json.loads((root / "metadata.json").read_text()) == meta
    index = json.loads((root / "trajectory_index.json").read_text())
    assert index["trajectory_id_list"] == [0, 1]
    facts = {
        "num_samples": 6,
        "trajectory_id": 0,
        "max_episode_length": 3,
        "shape": [3, 2, 3],
        "model_weights_id": "w_5",
    }
    assert index["trajectory_index"]["0"] == facts
    bare = index["trajectory_index"]["1"]
    assert (bare["shape"], bare["model_weights_id"][-2:]) == ([2, 4, 1], "_0")
    names = [f"trajectory_0_w_5.{form}", f"trajectory_1_{bare['model_weights_id']}.{form}"]
    lists = {"metadata.json", "trajectory_index.json", "ostinato_store.jsonl"}
    assert {path.name for path in root.iterdir()} == {*lists, *names}
    if form != "safetensors":
        path = root / names[1]
        tree = torch.load(path, weights_only=True) if form == "pt" else pickle.loads(path.read_bytes())
        assert type(tree) is dict
        assert set(tree) == {"rewards", "max_episode_length", "model_weights_id"}


@pytest.mark.parametrize(("form", "old_spelling"), [("pt", True), ("pkl", False)])
def test_directories_of_rlinf_load(tmp_path, form, old_spelling):
    as_rlinf(tmp_path / "a", form, old_spelling=old_spelling)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    buffer = loaded(tmp_path / "a")
    assert (len(buffer), buffer.total_samples, buffer.seed, buffer.trajectory_format) == (3, 24, 9, form)
    assert len(set(check_batch(buffer.sample(24, replace=False)))) == 24
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    buffer.add_trajectories([rollout(7, 4)])
    assert buffer.trajectory_ids == [0, 1, 2, 3]
    buffer.save_checkpoint(tmp_path / "b")
    assert torch.equal(buffer.sample(50)["rewards"], loaded(tmp_path / "b").sample(50)["rewards"])


def test_strided_and_shared_tensors_are_read_as_their_values(tmp_path):
    as_rlinf(tmp_path / "a", "pt")
    for path in (tmp_path / "a").glob("*.pt"):
        values = torch.load(path, weights_only=True)
        images = values["curr_obs"]["main_images"]
        values["curr_obs"]["main_images"] = images.permute(4, 0, 1, 3, 2).contiguous().permute(1, 2, 4, 3, 0)
        values["rewards"] = values["actions"][..., :1]  # a view of another field
        values["prev_logprobs"] = values["rewards"].expand(4, 2, 3)
        values["actions"] = values["actions"].transpose(0, 1).contiguous().transpose(0, 1)
        torch.save(values, path)
    buffer = loaded(tmp_path / "a")
    assert len(set(check_batch(buffer.sample(24, replace=False)))) == 24
    assert torch.equal(buffer.load_trajectory(1).rewards, rollout(1, 4).rewards)  # type: ignore[arg-type]


class _Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_hostile_files_raise_and_are_not_executed(tmp_path):
    trap = tmp_path / "ran"
    for form in ("pt", "pkl"):
        as_rlinf(tmp_path / form, form)
    torch.save({"rewards": _Trap(trap)}, tmp_path / "pt" / "trajectory_1_opaque-1.pt")
    with pytest.raises(DamagedFileError, match=r"trajectory 1: .*trajectory_1_opaque-1.pt contains more than tensors"):
        loaded(tmp_path / "pt")
    (tmp_path / "pkl" / "trajectory_1_opaque-1.pkl").write_bytes(pickle.dumps(_Trap(trap)))
    with pytest.raises(CheckpointError, match="give allow_pickle=True"):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "pkl")
    assert not trap.exists()


def test_directories_of_rlinf_without_weights_ids(tmp_path):
    """The weights id of each trajectory is an empty text then."""
    source = tmp_path / "ranks" / "rank_0"
    as_rlinf(source, "pt", named=False)
    assert len(set(check_batch(loaded(source).sample(24, replace=False)))) == 24
    assert not verify(source).damage
    convert(source, tmp_path / "fast", "safetensors")
    merge(tmp_path / "ranks", tmp_path / "merged", copy=True)
    split(source, tmp_path / "first", 2, copy=True)
    with saving(source) as buffer:
        assert add(buffer, rollout(3, 3)) == [3]
    for path, count in ((tmp_path / "fast", 3), (tmp_path / "merged", 3), (tmp_path / "first", 2), (source, 4)):
        assert len(set(check_batch(loaded(path).sample(6 * count, replace=False)))) == 6 * count
        assert not verify(path).damage
        assert "trajectory_0_." in files(path)[0]
