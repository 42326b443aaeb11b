"""Directories of trajectories: layout, saving in the background, checkpoints, loading, ids."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.unit.trajectories.rollouts import (
    add,
    as_rlinf,
    check_batch,
    files,
    ids_on_disk,
    loaded,
    rollout,
    saving,
    small,
)

from ostinato import TrajectoryReplayBuffer
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
    OptionError,
)


def test_a_checkpoint_needs_a_new_directory(tmp_path):
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([rollout(0)])
    (tmp_path / "empty").mkdir()
    buffer.save_checkpoint(tmp_path / "empty")
    with pytest.raises(CheckpointError):
        buffer.save_checkpoint(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        buffer.save_checkpoint(tmp_path / "file")
    TrajectoryReplayBuffer().save_checkpoint(tmp_path / "nothing")
    assert len(loaded(tmp_path / "nothing")) == 0


def test_auto_save_path_is_a_checkpoint_of_its_own_trajectories_alone(tmp_path):
    """Ids do not tell: trajectories loaded from elsewhere have the ids 0 to 2, too."""
    with saving(tmp_path / "own", 2, form="safetensors") as buffer:
        assert not (tmp_path / "own" / "trajectory_index.json").exists()
        buffer.save_checkpoint(tmp_path / "own")
        assert (tmp_path / "own" / "trajectory_index.json").exists()
        add(buffer, rollout(2, 3))
        assert loaded(tmp_path / "own").trajectory_ids == [0, 1, 2]
        buffer.load_checkpoint(tmp_path / "own", is_distributed=True, world_size=2)
        with pytest.raises(CheckpointError):
            buffer.save_checkpoint(tmp_path / "own")
    with saving(tmp_path / "elsewhere", form="safetensors") as other:
        other.add_trajectories([rollout(number) for number in range(10, 13)])
    with saving(tmp_path / "own", form="safetensors") as buffer:
        buffer.load_checkpoint(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError):
            buffer.save_checkpoint(tmp_path / "own")
        buffer.save_checkpoint(tmp_path / "new")
        buffer.load_checkpoint(tmp_path / "own")
        buffer.save_checkpoint(tmp_path / "own")
    assert {serial // 1000 for serial in check_batch(loaded(tmp_path / "new").sample(100))} == {10, 11, 12}


def test_each_rank_gets_its_contiguous_share(tmp_path):
    """Which trajectories that are: `tests/stateful/test_trajectory_machine.py`."""
    with saving(tmp_path / "a", 4, form="safetensors"):
        pass
    shares = [loaded(tmp_path / "a", is_distributed=True, local_rank=rank, world_size=2) for rank in range(2)]
    assert {share.get_stats()["trajectory_counter"] for share in shares} == {4}
    assert not torch.equal(*(share.sample(30)["rewards"] % 1000 for share in shares)), "each has its own generator"
    for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(OptionError, match=r"local_rank must be|world_size must be"):
            loaded(tmp_path / "a", is_distributed=True, local_rank=rank, world_size=ranks)
    with pytest.raises(OptionError, match="need is_distributed=True"):
        loaded(tmp_path / "a", world_size=3)


def test_one_buffer_at_a_time_saves_to_a_directory(tmp_path):
    with saving(tmp_path / "a", 1, form="safetensors"):
        with pytest.raises(CheckpointError):
            saving(tmp_path / "a", 1, form="safetensors")
        assert loaded(tmp_path / "a").trajectory_ids == [0]  # reading is allowed
    with pytest.raises(OptionError, match="holds trajectories as safetensors, not pt"):
        saving(tmp_path / "a", form="pt")
    as_rlinf(tmp_path / "pt", "pt")
    with (
        saving(tmp_path / "a", form="safetensors") as buffer,
        pytest.raises(CheckpointError, match="holds trajectories as safetensors"),
    ):
        buffer.load_checkpoint(tmp_path / "pt")


@pytest.mark.filterwarnings("error")
def test_the_default_path_warns_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="auto_save_path was not given: trajectories are saved to"):
        buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path="")
    add(buffer, rollout(0))  # warnings are errors here
    buffer.close()
    path = buffer.auto_save_path
    assert path is not None
    assert path.parent == tmp_path / "logs" / "replay_buffer"
    assert len(loaded(path)) == 1
    buffer = TrajectoryReplayBuffer(auto_save_path="", cache_size=1)
    buffer.add_trajectories([rollout(0), rollout(1)])
    buffer.flush()
    (tmp_path / "file").write_text("")
    for auto_save in (False, True):
        with pytest.raises(OptionError, match=r"auto_save_path must be a directory.* it is a file"):
            TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "logs"]


def test_journal_and_index_are_both_recovered(tmp_path):
    """The index is the same before the journal is merged, after it, and with a torn last line."""
    with saving(tmp_path / "a", 2, form="safetensors"):
        pass
    buffer = saving(tmp_path / "a", form="safetensors")
    buffer.load_checkpoint(tmp_path / "a")
    add(buffer, rollout(2, 3))
    add(buffer, rollout(3, 3))
    shutil.copytree(tmp_path / "a", tmp_path / "crashed")
    journal = tmp_path / "crashed" / "ostinato_journal.jsonl"
    whole = journal.read_bytes()
    for torn in (b"", b'0123456789abcdef {"torn'):
        journal.write_bytes(whole + torn)
        assert loaded(tmp_path / "crashed").trajectory_ids == [0, 1, 2, 3]
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[1].replace(b"f", b"e") + b"".join(lines[2:]))
    with pytest.raises(DamagedFileError, match=r"ostinato_journal\.jsonl is damaged in line 2"):
        loaded(tmp_path / "crashed")
    buffer.close()


def test_a_removed_journal_is_replaced(tmp_path):
    buffer = saving(tmp_path / "a", 1)
    (tmp_path / "a" / "ostinato_journal.jsonl").unlink()
    add(buffer, small())
    assert ids_on_disk(tmp_path / "a") == [0, 1]
    buffer.close()


def test_trajectories_of_a_failed_close_are_saved_by_the_next(tmp_path):
    buffer = saving(tmp_path / "a", 1)
    (tmp_path / "a").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        add(buffer, small())
    with pytest.raises(CheckpointError, match=r"1 trajectories could not be saved \(ids 1\)"):
        buffer.close()
    (tmp_path / "away").rename(tmp_path / "a")
    buffer.close()
    assert buffer.get_stats()["pending_saves"] == 0
    assert ids_on_disk(tmp_path / "a") == [0, 1]


def test_cleared_trajectories_are_not_retried(tmp_path):
    buffer = saving(tmp_path / "a", 1)
    (tmp_path / "a").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        add(buffer, rollout(1))
    with pytest.raises(CheckpointError, match=r"clear\(\) gives them up"):
        buffer.sample(1)
    (tmp_path / "away").rename(tmp_path / "a")
    for number in (2, 3):  # also after close
        buffer.clear()
        assert add(buffer, small()) == [number]
        buffer.close()
        assert ids_on_disk(tmp_path / "a") == [number]
    assert len(files(tmp_path / "a")) == 3, "cleared files stay"


def test_the_error_for_a_directory_of_ranks_names_them(tmp_path):
    for rank in range(2):
        with saving(tmp_path / f"rank_{rank}", 1):
            pass
    with pytest.raises(CheckpointError, match=r"no trajectories at .*, but in rank_0, rank_1: take one of these"):
        loaded(tmp_path)
