"""What users of RLinf and of full disks meet: unnamed weights, formats that change, failures that stay."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.unit.trajectories._kills import run_and_kill
from tests.unit.trajectories._rollouts import check_batch, files, rollout

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.errors import CheckpointError, OptionError, StorageMemoryError
from ostinato.tools import convert, merge, split, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMATS = ("pt", "pkl", "safetensors")


def saving(path: Path, form: str = "pt", count: int = 0, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, trajectory_format=form, allow_pickle=True, **options
    )
    if count:
        future = buffer.add_trajectories([rollout(number, 3) for number in range(count)])
        assert future is not None
        future.result(20)
    return buffer


def loaded(path: Path) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(allow_pickle=True)
    buffer.load_checkpoint(path)
    return buffer


def unnamed(path: Path) -> None:
    """Write a directory as RLinf does where nobody named the weights: an empty text stands for them everywhere."""
    path.mkdir(parents=True)
    index = {}
    for number in range(3):
        values = rollout(number, 3).to_dict() | {"model_weights_id": ""}
        torch.save(values, path / f"trajectory_{number}_.pt")
        facts = {"num_samples": 6, "trajectory_id": number, "max_episode_length": 3, "shape": [3, 2, 3]}
        index[str(number)] = facts | {"model_weights_id": ""}
    meta = {"trajectory_format": "pt", "size": 3, "total_samples": 18, "trajectory_counter": 3, "seed": 9}
    (path / "metadata.json").write_text(json.dumps(meta))
    node = {"trajectory_index": index, "trajectory_id_list": [0, 1, 2]}
    (path / "trajectory_index.json").write_text(json.dumps(node))


def test_directories_of_rlinf_without_weights_ids(tmp_path: Path) -> None:
    unnamed(tmp_path / "ranks" / "rank_0")
    source = tmp_path / "ranks" / "rank_0"
    assert len(set(check_batch(loaded(source).sample(18, replace=False)))) == 18
    assert not verify(source).damage
    convert(source, tmp_path / "fast", "safetensors")
    merge(tmp_path / "ranks", tmp_path / "merged", copy=True)
    split(source, tmp_path / "first", 2, copy=True)
    with saving(source) as buffer:
        future = buffer.add_trajectories([rollout(3, 3)])
        assert future is not None
        assert future.result(20) == [3]
    for path, count in ((tmp_path / "fast", 3), (tmp_path / "merged", 3), (tmp_path / "first", 2), (source, 4)):
        assert len(loaded(path)) == count
        check_batch(loaded(path).sample(50))
        assert not verify(path).damage
        assert "trajectory_0_." in files(path)[0]


def test_spilled_files_are_found_after_a_directory_of_another_format_was_loaded(tmp_path: Path) -> None:
    with saving(tmp_path / "a", "safetensors", 3):
        pass
    buffer = TrajectoryReplayBuffer(cache_size=1, auto_save_path=tmp_path / "spill")
    buffer.add_trajectories([rollout(number) for number in range(3)])
    buffer.flush()
    (spill,) = (tmp_path / "spill").iterdir()
    assert len(files(spill)) == 2
    buffer.load_checkpoint(tmp_path / "a")
    assert files(spill) == []
    buffer.add_trajectories([rollout(number) for number in range(3, 7)])
    buffer.flush()
    assert [name.rpartition(".")[2] for name in files(spill)] == ["safetensors"] * 3
    assert {serial // 1000 for serial in check_batch(buffer.sample(300))} == set(range(7))
    buffer.save_checkpoint(tmp_path / "b")
    check_batch(loaded(tmp_path / "b").sample(300))


@pytest.mark.parametrize("form", FORMATS)
def test_empty_dicts_come_back(tmp_path: Path, form: str) -> None:
    obs = {"states": torch.rand(4, 2, 3), "none": {}, "deep": {"down": {}}}
    one = Trajectory(rewards=torch.rand(4, 2, 1), forward_inputs={}, curr_obs=obs, extra={"mine": {}})
    with saving(tmp_path / "a", form) as buffer:
        buffer.add_trajectories([one])
        assert set(buffer.sample(3)) == {"rewards", "curr_obs"}  # a batch has tensors alone, as RLinf's
    back = loaded(tmp_path / "a").load_trajectory(0)
    assert (back.forward_inputs, back.next_obs, back.extra) == ({}, {}, {"mine": {}})
    assert back.curr_obs is not None
    assert {key: value for key, value in back.curr_obs.items() if key != "states"} == {"none": {}, "deep": {"down": {}}}


def test_a_loaded_trajectory_is_the_callers_own() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([rollout(0)])
    for _ in range(2):
        whole = buffer.load_trajectory(0)
        assert whole.curr_obs is not None
        assert whole.curr_obs["task"] == ["pick", "place"]
        whole.curr_obs["task"].append("more")
        whole.curr_obs["states"].zero_()
    check_batch(buffer.sample(20))


def test_an_empty_auto_save_path_is_none_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="auto_save_path was not given"):
        path = TrajectoryReplayBuffer(auto_save=True, auto_save_path="").auto_save_path
    assert path is not None
    assert path.parent == tmp_path / "logs" / "replay_buffer"
    buffer = TrajectoryReplayBuffer(auto_save_path="", cache_size=1)
    buffer.add_trajectories([rollout(0), rollout(1)])
    buffer.flush()
    assert not list(tmp_path.iterdir())


def test_lengths_of_numpy_are_taken() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([Trajectory(rewards=torch.rand(2, 2), max_episode_length=np.int64(7))])  # type: ignore[arg-type]
    length = buffer.load_trajectory(0).max_episode_length
    assert (length, type(length)) == (7, int)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk_is_named_and_reported_once_while_sampling_goes_on(tmp_path: Path, form: str) -> None:
    big = Trajectory(**(rollout(1).to_dict() | {"extra": {"big": torch.zeros(200000)}}))

    def work(report: Callable[[bytes], None]) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        mine = saving(tmp_path / "b", form, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100000, resource.RLIM_INFINITY))
        future = mine.add_trajectories([big])
        assert future is not None
        with pytest.raises(StorageMemoryError, match=r"cannot write .* bytes needed, .*: free disk space"):
            future.result(20)
        with pytest.raises(CheckpointError, match=r"\(ids 1\): cannot write .* next add_trajectories, flush or close"):
            mine.sample(5)
        for _ in range(5):
            check_batch(mine.sample(20))  # in memory it is still there
            time.sleep(0.01)
        assert mine.get_stats()["pending_saves"] == 1
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"\(ids 1\): cannot write"):
                mine.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        mine.close()
        report(b"done")

    assert run_and_kill(work, 10**9) == (False, b"done")
    assert loaded(tmp_path / "b").trajectory_ids == [0, 1]


def test_what_was_given_up_by_clear_is_not_tried_again(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a", count=1)
    (tmp_path / "a").rename(tmp_path / "away")
    future = buffer.add_trajectories([rollout(1)])
    assert future is not None
    with pytest.raises(FileNotFoundError):
        future.result(20)
    with pytest.raises(CheckpointError, match=r"clear\(\) gives them up"):
        buffer.sample(1)
    (tmp_path / "away").rename(tmp_path / "a")
    buffer.clear()
    buffer.close()
    assert loaded(tmp_path / "a").trajectory_ids == []
    assert len(files(tmp_path / "a")) == 1


def test_verify_names_damaged_files_beside_a_damaged_list(tmp_path: Path) -> None:
    with saving(tmp_path / "a", count=3):
        pass
    (tmp_path / "a" / "ostinato_store.jsonl").write_bytes(b"junk\n")
    name = files(tmp_path / "a")[1]
    (tmp_path / "a" / name).write_bytes(b"junk")
    assert [found.file for found in verify(tmp_path / "a").damage] == ["ostinato_store.jsonl", name]


def test_ranks_of_a_directory_are_named_where_one_of_them_is_meant(tmp_path: Path) -> None:
    for rank in range(2):
        with saving(tmp_path / f"rank_{rank}", count=1):
            pass
    with pytest.raises(CheckpointError, match=r"no trajectories at .*, but in rank_0, rank_1: take one of these"):
        loaded(tmp_path)


def test_the_own_directory_is_no_checkpoint_of_what_was_loaded_from_elsewhere(tmp_path: Path) -> None:
    """Both list the ids 0 to 2, of other trajectories."""
    with saving(tmp_path / "own", count=3):
        pass
    with saving(tmp_path / "elsewhere") as other:
        other.add_trajectories([rollout(number) for number in range(10, 13)])
    with saving(tmp_path / "own") as buffer:
        buffer.load_checkpoint(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="does not list the same trajectories"):
            buffer.save_checkpoint(tmp_path / "own")
        buffer.save_checkpoint(tmp_path / "new")
        buffer.load_checkpoint(tmp_path / "own")
        buffer.save_checkpoint(tmp_path / "own")
    assert {serial // 1000 for serial in check_batch(loaded(tmp_path / "new").sample(100))} == {10, 11, 12}


def test_an_auto_save_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for auto_save in (False, True):
        with pytest.raises(OptionError, match=r"auto_save_path must be a directory.* it is a file"):
            TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=tmp_path / "file")
