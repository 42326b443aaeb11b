"""Directories: saving in the background, checkpoints, loading, damage, ids, RLinf's layout."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.unit.trajectories._rollouts import check_batch, files, rollout

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.durable import files as durable_files
from ostinato.errors import CheckpointError, DamagedFileError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("pt", "pkl", "safetensors")
SAMPLES = os.environ.get("OSTINATO_RLINF_CHECKPOINTS")


def saving(path: Path, count: int = 0, form: str = "safetensors", **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, trajectory_format=form, allow_pickle=form == "pkl", **options
    )
    if count:
        future = buffer.add_trajectories([rollout(number, 3) for number in range(count)])
        assert future is not None
        assert future.result() == list(range(count))
    return buffer


def loaded(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(allow_pickle=True)
    buffer.load_checkpoint(path, **options)
    return buffer


def equal_batches(first: TrajectoryReplayBuffer, second: TrajectoryReplayBuffer) -> None:
    for count in (3, 50, 7):
        one, two = first.sample(count), second.sample(count)
        assert check_batch(one) == check_batch(two)
    assert torch.equal(first.sample(5, replace=False)["rewards"], second.sample(5, replace=False)["rewards"])


@pytest.mark.parametrize("form", FORMATS)
def test_a_closed_directory_has_the_layout_of_rlinf(tmp_path: Path, form: str) -> None:
    with saving(tmp_path / "a", form=form, seed=77) as buffer:
        buffer.add_trajectories([rollout(0, 3, model_weights_id="w_5"), Trajectory(rewards=torch.zeros(2, 4, 1))])
    root = tmp_path / "a"
    assert json.loads((root / "metadata.json").read_text()) == {
        "trajectory_format": form,
        "size": 2,
        "total_samples": 14,
        "trajectory_counter": 2,
        "seed": 77,
    }
    index = json.loads((root / "trajectory_index.json").read_text())
    assert index["trajectory_id_list"] == [0, 1]
    assert index["trajectory_index"]["0"] == {
        "num_samples": 6,
        "trajectory_id": 0,
        "max_episode_length": 3,
        "shape": [3, 2, 3],
        "model_weights_id": "w_5",
    }
    bare = index["trajectory_index"]["1"]
    assert (bare["shape"], bare["model_weights_id"][-2:]) == ([2, 4, 1], "_0")
    names = [f"trajectory_0_w_5.{form}", f"trajectory_1_{bare['model_weights_id']}.{form}"]
    assert files(root) == names
    assert {path.name for path in root.iterdir()} == {
        "metadata.json",
        "trajectory_index.json",
        "ostinato_store.jsonl",
        *names,
    }
    if form != "safetensors":
        path = root / names[1]
        tree = torch.load(path, weights_only=True) if form == "pt" else pickle.loads(path.read_bytes())
        assert type(tree) is dict
        assert set(tree) == {"rewards", "max_episode_length", "model_weights_id"}


def as_rlinf(root: Path, form: str, *, old_spelling: bool = False) -> None:
    """Write a directory as RLinf does: no list of ours, one opaque text between id and extension."""
    root.mkdir(parents=True)
    index = {}
    for number in range(3):
        values = rollout(number, 4, epochs=2).to_dict() | {"model_weights_id": f"opaque-{number}"}
        name = root / f"trajectory_{number}_opaque-{number}.{form}"
        if form == "pt":
            torch.save(values, name)
        else:
            name.write_bytes(pickle.dumps(values))
        index[str(number)] = {
            "num_samples": 8,
            "trajectory_id": number,
            "max_episode_length": 4,
            "shape": [4, 2, 3],
            "model_weights_id": f"opaque-{number}",
        }
    meta = {"trajectory_format": form, "size": 3, "total_samples": 24, "trajectory_counter": 3, "seed": 9}
    (root / "metadata.json").write_text(json.dumps(meta))
    spelt = "trajector_index.json" if old_spelling else "trajectory_index.json"
    (root / spelt).write_text(json.dumps({"trajectory_index": index, "trajectory_id_list": [0, 1, 2]}))


@pytest.mark.parametrize("form", ["pt", "pkl"])
@pytest.mark.parametrize("old_spelling", [False, True])
def test_directories_of_rlinf_load(tmp_path: Path, form: str, old_spelling: bool) -> None:
    as_rlinf(tmp_path / "a", form, old_spelling=old_spelling)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    buffer = loaded(tmp_path / "a")
    assert (len(buffer), buffer.total_samples, buffer.seed, buffer.trajectory_format) == (3, 24, 9, form)
    assert len(set(check_batch(buffer.sample(24, replace=False)))) == 24
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    buffer.add_trajectories([rollout(7, 4)])
    assert buffer.trajectory_ids == [0, 1, 2, 3]
    buffer.save_checkpoint(tmp_path / "b")
    equal_batches(buffer, loaded(tmp_path / "b"))


def test_strided_and_shared_tensors_of_others_are_read_as_they_look(tmp_path: Path) -> None:
    as_rlinf(tmp_path / "a", "pt")
    for number in range(3):
        values = rollout(number, 4, epochs=2).to_dict()
        images = values["curr_obs"]["main_images"]
        values["curr_obs"]["main_images"] = images.permute(4, 0, 1, 3, 2).contiguous().permute(1, 2, 4, 3, 0)
        values["rewards"] = values["actions"][..., :1]  # a view of another field
        values["prev_logprobs"] = values["rewards"].expand(4, 2, 3)
        values["actions"] = values["actions"].transpose(0, 1).contiguous().transpose(0, 1)
        torch.save(values, tmp_path / "a" / f"trajectory_{number}_opaque-{number}.pt")
    buffer = loaded(tmp_path / "a")
    assert len(set(check_batch(buffer.sample(24, replace=False)))) == 24
    assert torch.equal(buffer.load_trajectory(1).rewards, rollout(1, 4).rewards)  # type: ignore[arg-type]


@pytest.mark.skipif(not SAMPLES, reason="OSTINATO_RLINF_CHECKPOINTS names no folder")
@pytest.mark.parametrize(("name", "rows"), [("done_rows_pt", 48), ("single_pkl", 48), ("ranks_pt/rank_0", 72)])
def test_samples_of_rlinf(name: str, rows: int) -> None:
    batch = loaded(Path(str(SAMPLES)) / name).sample(rows, replace=False)
    serial = batch["actions"][:, 0]
    assert torch.equal(batch["curr_obs"]["states"][:, 0], serial)
    assert torch.equal(batch["next_obs"]["states"][:, 0], serial + 0.5)
    assert len(serial.unique()) == rows


def test_pickles_are_never_read_without_consent(tmp_path: Path) -> None:
    as_rlinf(tmp_path / "a", "pkl")
    trap = tmp_path / "ran"
    (tmp_path / "a" / "trajectory_1_opaque-1.pkl").write_bytes(pickle.dumps(_Trap(trap)))
    with pytest.raises(CheckpointError, match="give allow_pickle=True"):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "a")
    assert not trap.exists()


class _Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_hostile_pt_file_is_refused_and_not_executed(tmp_path: Path) -> None:
    as_rlinf(tmp_path / "a", "pt")
    trap = tmp_path / "ran"
    torch.save({"rewards": _Trap(trap)}, tmp_path / "a" / "trajectory_1_opaque-1.pt")
    with pytest.raises(DamagedFileError, match=r"trajectory 1: .*trajectory_1_opaque-1.pt holds more than tensors"):
        loaded(tmp_path / "a")
    assert not trap.exists()


@pytest.mark.parametrize("weights", ["../../escape", "a/b", "..", "", 5, "a\0b"])
def test_names_in_the_index_cannot_lead_out_of_the_directory(tmp_path: Path, weights: Any) -> None:
    as_rlinf(tmp_path / "a", "pt")
    path = tmp_path / "a" / "trajectory_index.json"
    index = json.loads(path.read_text())
    index["trajectory_index"]["1"]["model_weights_id"] = weights
    path.write_text(json.dumps(index))
    with pytest.raises(DamagedFileError):
        loaded(tmp_path / "a")


def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    as_rlinf(tmp_path / "a", "pt")
    path = tmp_path / "a" / "trajectory_1_opaque-1.pt"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFileError, match=r"no.* regular file"):
        loaded(tmp_path / "a")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("auto_save", [False, True])
def test_a_checkpoint_holds_all_and_sampling_goes_on_bit_for_bit(tmp_path: Path, form: str, auto_save: bool) -> None:
    buffer = TrajectoryReplayBuffer(
        cache_size=2,
        auto_save=auto_save,
        auto_save_path=tmp_path / "own",
        trajectory_format=form,
        allow_pickle=True,
    )
    buffer.add_trajectories([rollout(number, 3) for number in range(6)])
    buffer.sample(11)
    buffer.save_checkpoint(tmp_path / "deep" / "saved")
    again = loaded(tmp_path / "deep" / "saved")
    assert (again.trajectory_ids, again.total_samples) == (buffer.trajectory_ids, buffer.total_samples)
    equal_batches(buffer, again)
    shutil.rmtree(tmp_path / "own", ignore_errors=True)  # it needs nothing of the first directory
    check_batch(again.sample(100))
    again.save_checkpoint(tmp_path / "second")
    shutil.rmtree(tmp_path / "deep")
    equal_batches(loaded(tmp_path / "second"), loaded(tmp_path / "second"))


def test_a_checkpoint_needs_a_new_place(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([rollout(0)])
    (tmp_path / "empty").mkdir()
    buffer.save_checkpoint(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="exists and is not empty: choose a new path"):
        buffer.save_checkpoint(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is no directory"):
        buffer.save_checkpoint(tmp_path / "file")
    TrajectoryReplayBuffer().save_checkpoint(tmp_path / "nothing")
    assert len(loaded(tmp_path / "nothing")) == 0


def test_a_checkpoint_of_the_own_directory_folds_the_journal(tmp_path: Path) -> None:
    with saving(tmp_path / "a", 2) as buffer:
        assert not (tmp_path / "a" / "trajectory_index.json").exists()
        buffer.save_checkpoint(tmp_path / "a")
        assert (tmp_path / "a" / "trajectory_index.json").exists()
        buffer.add_trajectories([rollout(2, 3)])
        buffer.flush()
        equal_batches(loaded(tmp_path / "a"), loaded(tmp_path / "a"))
        assert loaded(tmp_path / "a").trajectory_ids == [0, 1, 2]
        buffer.load_checkpoint(tmp_path / "a", is_distributed=True, world_size=2)
        with pytest.raises(CheckpointError, match="does not list the same trajectories"):
            buffer.save_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
def test_each_rank_gets_its_contiguous_share(tmp_path: Path, ranks: int) -> None:
    with saving(tmp_path / "a", 7):
        pass
    shares = [loaded(tmp_path / "a", is_distributed=True, local_rank=r, world_size=ranks) for r in range(ranks)]
    assert [number for share in shares for number in share.trajectory_ids] == list(range(7))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for share in shares:
        assert share.total_samples == 6 * len(share)
        assert share.get_stats()["trajectory_counter"] == 7
    if ranks == 1:
        equal_batches(shares[0], loaded(tmp_path / "a"))
    if ranks == 2:
        draws = [share.sample(30)["rewards"] % 1000 for share in shares]
        assert not torch.equal(*draws)  # streams of their own


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_out_of_range(tmp_path: Path, rank: int, ranks: int) -> None:
    with saving(tmp_path / "a", 1):
        pass
    with pytest.raises(OptionError, match="local_rank must be in"):
        loaded(tmp_path / "a", is_distributed=True, local_rank=rank, world_size=ranks)
    with pytest.raises(OptionError, match="need is_distributed=True"):
        loaded(tmp_path / "a", world_size=3)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"garbage" * 100),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("ours", [True, False])
def test_damaged_files_are_named_or_skipped(tmp_path: Path, form: str, kind: str, ours: bool) -> None:
    if ours:
        with saving(tmp_path / "a", 3, form):
            pass
    elif form == "safetensors":
        pytest.skip("RLinf writes no safetensors")
    else:
        as_rlinf(tmp_path / "a", form)
    name = files(tmp_path / "a")[1]
    DAMAGE[kind](tmp_path / "a" / name)
    buffer = TrajectoryReplayBuffer(allow_pickle=True)
    buffer.add_trajectories([rollout(5)])
    with pytest.raises(DamagedFileError, match="trajectory 1: ") as caught:
        buffer.load_checkpoint(tmp_path / "a")
    assert name in str(caught.value)
    assert check_batch(buffer.sample(5)), "the buffer is as it was"
    with pytest.warns(RuntimeWarning, match=r"1 damaged trajectories were left out \(ids \[1\]\)"):
        buffer.load_checkpoint(tmp_path / "a", on_damage="skip")
    assert buffer.trajectory_ids == [0, 2]
    assert {serial // 1000 for serial in check_batch(buffer.sample(90))} == {0, 2}


@pytest.mark.parametrize("name", ["metadata.json", "trajectory_index.json", "ostinato_store.jsonl"])
def test_damaged_lists_are_named(tmp_path: Path, name: str) -> None:
    with saving(tmp_path / "a", 3):
        pass
    path = tmp_path / "a" / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedFileError, match=name):
        loaded(tmp_path / "a")
    if name == "ostinato_store.jsonl":
        check_batch(loaded(tmp_path / "a", on_damage="skip").sample(50))
    path.unlink()
    if name == "ostinato_store.jsonl":
        check_batch(loaded(tmp_path / "a").sample(50))
    else:
        with pytest.raises(DamagedFileError, match="but not both of"):
            loaded(tmp_path / "a")


def test_a_file_that_goes_while_it_is_sampled_is_named(tmp_path: Path) -> None:
    with saving(tmp_path / "a", 2):
        pass
    buffer = loaded(tmp_path / "a")
    os.truncate(tmp_path / "a" / files(tmp_path / "a")[0], 900)
    with pytest.raises(DamagedFileError, match=r"trajectory_0_.* it was truncated"):
        buffer.sample(100)


def test_clear_keeps_files_and_new_ids_lie_above_them(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a", 3)
    buffer.clear()
    assert (len(buffer), buffer.total_samples) == (0, 0)
    assert len(files(tmp_path / "a")) == 3
    future = buffer.add_trajectories([rollout(7, 3)])
    assert future is not None
    assert future.result() == [3]
    buffer.close()
    assert loaded(tmp_path / "a").trajectory_ids == [3]
    fresh = saving(tmp_path / "a")
    future = fresh.add_trajectories([rollout(8, 3)])
    assert future is not None
    assert future.result() == [4]
    fresh.close()
    assert loaded(tmp_path / "a").trajectory_ids == [3, 4]
    spilling = TrajectoryReplayBuffer(cache_size=1)
    spilling.add_trajectories([rollout(0), rollout(1)])
    spilling.clear()
    spilling.add_trajectories([rollout(0)])
    assert spilling.trajectory_ids == [2]  # no id is given twice


def test_clear_cache_spills_and_the_next_add_starts_the_saver_again(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(cache_size=4, auto_save_path=tmp_path)
    buffer.add_trajectories([rollout(number) for number in range(3)])
    assert not savers()
    buffer.clear_cache()
    assert not savers()
    assert buffer.get_stats()["cached_trajectories"] == 0
    check_batch(buffer.sample(40))
    buffer.add_trajectories([rollout(number) for number in range(3, 9)])
    assert savers()
    assert len(set(check_batch(buffer.sample(100, replace=False)))) == 100
    buffer.close()
    assert not savers()
    check_batch(buffer.sample(40))


def savers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ostinato-saver"]


def test_a_closed_buffer_can_go_on(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a", 2)
    buffer.close()
    buffer.close()
    check_batch(buffer.sample(10))
    buffer.add_trajectories([rollout(2, 3)])
    buffer.close()
    assert loaded(tmp_path / "a").trajectory_ids == [0, 1, 2]


def test_one_buffer_at_a_time_saves_to_a_directory(tmp_path: Path) -> None:
    with saving(tmp_path / "a", 1):
        with pytest.raises(CheckpointError, match="is being saved to"):
            saving(tmp_path / "a", 1)
        assert loaded(tmp_path / "a").trajectory_ids == [0]  # reading is fine
    with pytest.raises(OptionError, match="holds trajectories as safetensors, not pt"):
        saving(tmp_path / "a", form="pt")
    as_rlinf(tmp_path / "pt", "pt")
    with saving(tmp_path / "a") as buffer, pytest.raises(CheckpointError, match="holds trajectories as safetensors"):
        buffer.load_checkpoint(tmp_path / "pt")


def test_adding_goes_on_beside_what_a_directory_held(tmp_path: Path) -> None:
    """A fresh buffer neither loads nor loses what lies in its directory, RLinf's included."""
    as_rlinf(tmp_path / "a", "pt")
    with saving(tmp_path / "a", form="pt") as buffer:
        future = buffer.add_trajectories([rollout(9, 4)])
        assert future is not None
        assert future.result() == [3]
        assert buffer.trajectory_ids == [3]
    assert loaded(tmp_path / "a").trajectory_ids == [0, 1, 2, 3]


def test_the_default_path_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="auto_save_path was not given: trajectories are saved to") as caught:
        buffer = TrajectoryReplayBuffer(auto_save=True)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.add_trajectories([rollout(0)])
        buffer.close()
    path = buffer.auto_save_path
    assert path is not None
    assert path.parent == tmp_path / "logs" / "replay_buffer"
    assert len(loaded(path)) == 1


def test_a_failed_write_is_reported_by_the_next_call_and_then_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = saving(tmp_path / "a", 1)
    original = durable_files.create_file

    def full(path: Path) -> int:
        raise OSError(28, "No space left on device")

    for module in ("ostinato.durable.files", "ostinato.durable.tensorfile"):
        monkeypatch.setattr(f"{module}.create_file", full)
    future = buffer.add_trajectories([rollout(1, 3)])
    assert future is not None
    with pytest.raises(Exception, match=r"cannot write .* bytes needed"):
        future.result()
    wait_until(lambda: buffer.get_stats()["pending_saves"] == 1)
    for call in (lambda: buffer.add_trajectories([rollout(2, 3)]), lambda: buffer.sample(1), buffer.flush):
        with pytest.raises(CheckpointError, match=r"1 trajectories could not be saved \(ids 1\): .*tried again"):
            repeat(call)
    assert buffer.trajectory_ids == [0, 1]
    check_batch(buffer.sample(20)) if buffer.get_stats()["pending_saves"] == 0 else None
    for module in ("ostinato.durable.files", "ostinato.durable.tensorfile"):
        monkeypatch.setattr(f"{module}.create_file", original)
    for _ in range(3):
        try:
            buffer.close()
        except CheckpointError:
            continue
        break
    buffer.flush()
    buffer.close()
    assert loaded(tmp_path / "a").trajectory_ids == [0, 1]


def test_close_reports_what_could_not_be_saved(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    buffer = saving(tmp_path / "a", 1)
    (tmp_path / "a").chmod(stat.S_IRUSR | stat.S_IXUSR)
    buffer.add_trajectories([rollout(1, 3)])
    with pytest.raises(CheckpointError, match="could not be saved"):
        buffer.close()
    (tmp_path / "a").chmod(stat.S_IRWXU)


def repeat(call: Any) -> None:
    for _ in range(200):
        call()
        time.sleep(0.01)


def wait_until(true: Any) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within 5 s")


def test_journal_and_index_are_both_recovered(tmp_path: Path) -> None:
    """What the directory says is the same before the fold, after it, and with a torn last line."""
    with saving(tmp_path / "a", 2):
        pass
    buffer = saving(tmp_path / "a")
    buffer.load_checkpoint(tmp_path / "a")
    for number in (2, 3):
        future = buffer.add_trajectories([rollout(number, 3)])
        assert future is not None
        future.result()
    shutil.copytree(tmp_path / "a", tmp_path / "crashed")
    journal = tmp_path / "crashed" / "ostinato_journal.jsonl"
    assert loaded(tmp_path / "crashed").trajectory_ids == [0, 1, 2, 3]
    journal.write_bytes(journal.read_bytes() + b'0123456789abcdef {"torn')
    assert loaded(tmp_path / "crashed").trajectory_ids == [0, 1, 2, 3]
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[1].replace(b"f", b"e") + b"".join(lines[2:4]))
    with pytest.raises(DamagedFileError, match=r"ostinato_journal\.jsonl is damaged in line 2"):
        loaded(tmp_path / "crashed")
    (tmp_path / "crashed" / "metadata.json").unlink()
    buffer.clear()
    shutil.copytree(tmp_path / "a", tmp_path / "cleared")
    assert loaded(tmp_path / "cleared").trajectory_ids == []
    buffer.close()
    assert loaded(tmp_path / "a").trajectory_ids == []


def test_the_cost_of_adding_does_not_grow(tmp_path: Path) -> None:
    """Bytes written for one more trajectory are the same with 5 and with 300 before it."""
    buffer = saving(tmp_path / "a")
    grown = []
    for number in range(300):
        before = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.json*")) if number in (5, 299) else 0
        future = buffer.add_trajectories([Trajectory(rewards=torch.zeros(2, 2), model_weights_id="w")])
        if number in (5, 299):
            assert future is not None
            future.result()
            grown.append(sum(path.stat().st_size for path in (tmp_path / "a").glob("*.json*")) - before)
        elif number in (4, 298):
            buffer.flush()
    assert grown[1] <= grown[0] + 16
    assert not (tmp_path / "a" / "trajectory_index.json").exists()
    buffer.close()
