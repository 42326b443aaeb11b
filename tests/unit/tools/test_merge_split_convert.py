"""Merge, split and convert: the place of each trajectory, and errors that change nothing."""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ostinato import TrajectoryReplayBuffer
from ostinato.durable.files import DirectoryLock
from ostinato.errors import CheckpointError, DamagedFileError, OptionError
from ostinato.tools import convert, inspect_store, merge, merge_split, split, verify
from tests.unit.trajectories.rollouts import check_batch, files, loaded, rollout

if TYPE_CHECKING:
    from collections.abc import Iterator


WAYS: dict[str, Any] = {"linked": {}, "copied": {"copy": True}, "moved": {"move": True}}


def write(path: Path, numbers: list[int], form: str = "pt", seed: int = 1) -> None:
    with TrajectoryReplayBuffer(
        seed, auto_save=True, auto_save_path=path, trajectory_format=form, allow_pickle=True
    ) as buffer:
        buffer.add_trajectories([rollout(n, 2, model_weights_id=f"w-{n}_0") for n in numbers])


def owners(path: Path) -> dict[int, int]:
    """Which rollout each id holds."""
    buffer = loaded(path)
    check_batch(buffer.sample(50))
    held = {number: buffer.load_trajectory(number).rewards for number in buffer.trajectory_ids}
    return {number: int(rewards[0, 0, 0]) // 1000 for number, rewards in held.items() if rewards is not None}


def check_sharing(source: Path, target: Path, how: str) -> None:
    """Compare the files of two directories: linked ones are the same files, lists never are."""
    numbers = {path.stat().st_ino for path in source.rglob("*") if path.is_file()}
    shared = {path.name for path in target.iterdir() if path.stat().st_ino in numbers}
    assert shared == (set(files(target)) if how == "linked" else set())


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def flip(path: Path, number: int) -> Path:
    """Change one bit of a trajectory, whose sizes and headers still fit."""
    file = path / files(path)[number]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(("form", "how"), [("pt", "linked"), ("safetensors", "moved"), ("pkl", "copied")])
def test_merge_interleaves_by_id_and_renumbers(tmp_path, form, how, monkeypatch):
    source, target, synced = tmp_path / "s", tmp_path / "t", set()
    for rank, numbers in ((0, [1, 2, 3]), (1, [4]), (10, [5, 6])):
        write(source / f"rank_{rank}", numbers, form, seed=rank + 5)
    before = tree(source)
    monkeypatch.setattr(merge_split, "fsync_dir", lambda path: synced.add((path.name, target.exists())))
    report = merge(source, target, **WAYS[how])
    assert (report.trajectories, report.total_samples, report.how) == (6, 24, how)
    if how == "moved":
        assert {("t.partial", False), *((f"rank_{rank}", False) for rank in (0, 1, 10))} <= synced
        assert (tmp_path.name, True) in synced
    assert owners(target) == dict(enumerate([1, 4, 5, 2, 6, 3]))
    assert files(target)[1] == f"trajectory_1_w-4_0.{form}"
    meta = json.loads((target / "metadata.json").read_text())
    assert meta == {"trajectory_format": form, "size": 6, "total_samples": 24, "trajectory_counter": 6, "seed": 5}
    assert not verify(target, allow_pickle=True).damage
    assert tree(source) == (before if how != "moved" else {})
    check_sharing(source, target, how)


@pytest.mark.parametrize("how", WAYS)
def test_split_takes_the_first_and_a_move_leaves_the_rest(tmp_path, how):
    write(tmp_path / "s", [3, 4, 5, 6])
    before = tree(tmp_path / "s")
    report = split(tmp_path / "s", tmp_path / "t", 3, **WAYS[how])
    assert (report.trajectories, report.how) == (3, how)
    assert owners(tmp_path / "t") == {0: 3, 1: 4, 2: 5}
    check_sharing(tmp_path / "s", tmp_path / "t", how)
    if how != "moved":
        assert tree(tmp_path / "s") == before
    else:
        assert owners(tmp_path / "s") == {3: 6}
        assert inspect_store(tmp_path / "s").trajectory_counter == 4
    split(tmp_path / "s", tmp_path / "all", 4 if how != "moved" else 1, move=True)
    assert inspect_store(tmp_path / "s").trajectories == 0
    assert owners(tmp_path / "t") == {0: 3, 1: 4, 2: 5}


def test_files_are_copied_where_the_file_system_has_no_links(tmp_path, monkeypatch):
    write(tmp_path / "s" / "rank_0", [1, 2])
    write(tmp_path / "s" / "rank_1", [3])
    before, real = tree(tmp_path / "s"), os.link
    for number in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):

        def link(source: Path, target: Path, *, number: int = number, **options: Any) -> None:
            if source.parent.name == "rank_0":
                raise OSError(number, os.strerror(number))
            real(source, target, **options)

        monkeypatch.setattr(os, "link", link)
        assert merge(tmp_path / "s", tmp_path / f"t{number}").how == "copied"
        assert tree(tmp_path / "s") == before
        assert owners(tmp_path / f"t{number}") == {0: 1, 1: 3, 2: 2}


def refused(tmp_path: Path, words: str, work: Any, error: type[Exception] = CheckpointError) -> None:
    before = tree(tmp_path)
    with pytest.raises(error, match=words):
        work()
    assert tree(tmp_path) == before
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("how", "form"), [("linked", "pt"), ("copied", "pkl"), ("moved", "safetensors")])
def test_errors_change_nothing(tmp_path, how, form):
    one, target, way = tmp_path / "s" / "rank_0", tmp_path / "t", WAYS[how]
    write(one, [1, 2], form)
    write(tmp_path / "s" / "rank_1", [3], form)
    write(tmp_path / "mixed" / "rank_0", [1])
    write(tmp_path / "mixed" / "rank_1", [2], "safetensors")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    refused(tmp_path, "different formats", lambda: merge(tmp_path / "mixed", target, **way))
    refused(tmp_path, "exists and is not empty", lambda: merge(tmp_path / "s", tmp_path / "taken", **way))
    refused(tmp_path, "no directories rank_0", lambda: merge(one, target, **way))
    refused(tmp_path, "does not exist", lambda: merge(tmp_path / "nowhere", target, **way))
    refused(tmp_path, r"split_count must be in \[1, 2\]", lambda: split(one, target, 3, **way))
    refused(tmp_path, "split_count must be at least 1", lambda: split(one, target, 0, **way), OptionError)
    refused(tmp_path, "exclude each other", lambda: merge(tmp_path / "s", target, copy=True, move=True), OptionError)
    if how == "moved":
        lock = DirectoryLock(one)
        lock.acquire()
        refused(tmp_path, "is being saved to", lambda: merge(tmp_path / "s", target, move=True))
        lock.release()
    path = one / files(one)[1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for _ in ("with our list", "without it", "the file is missing"):
        refused(tmp_path, "nothing was touched", lambda: merge(tmp_path / "s", target, **way))
        refused(tmp_path, "nothing was touched", lambda: split(one, target, 2, **way))
        if not (one / "ostinato_store.jsonl").exists():
            path.unlink(missing_ok=True)
        (one / "ostinato_store.jsonl").unlink(missing_ok=True)


def test_a_move_that_stops_goes_on_with_the_same_command_alone(tmp_path):
    write(tmp_path / "s" / "rank_0", [1, 2], "safetensors")
    write(tmp_path / "s" / "rank_1", [3], "safetensors")

    with stopping_after(2), pytest.raises(CheckpointError, match=r"after 2 of 3 .* run the same command again"):
        merge(tmp_path / "s", tmp_path / "t", move=True)
    assert not (tmp_path / "t").exists()
    with pytest.raises(CheckpointError):
        split(tmp_path / "s" / "rank_1", tmp_path / "t", 1, move=True)
    before = tree(tmp_path)
    for copy in (True, False):
        with pytest.raises(CheckpointError, match=r"t\.partial holds an unfinished move .* give move=True"):
            merge(tmp_path / "s", tmp_path / "t", copy=copy)
    plan = tmp_path / "t.partial" / "ostinato_plan.json"
    text = plan.read_text()
    name = json.loads(text)["steps"][0][1]
    for steps in ([[0, "../../x", 0]], [[7, name, 0]], [[0, name, 99]], 5):
        plan.write_text(json.dumps(json.loads(text) | {"steps": steps}))
        with pytest.raises(DamagedFileError, match=r"ostinato_plan\.json is damaged"):
            merge(tmp_path / "s", tmp_path / "t", move=True)
    plan.write_text(text)
    lost = next((tmp_path / "s").rglob("*.safetensors"))
    data = lost.read_bytes()
    lost.write_bytes(data[:50])
    with pytest.raises(DamagedFileError, match=r"2 of 3 trajectories are in .*t\.partial already.*same command again"):
        merge(tmp_path / "s", tmp_path / "t", move=True)
    lost.write_bytes(data)
    assert tree(tmp_path) == before
    report = merge(tmp_path / "s", tmp_path / "t", move=True)
    assert report.resumed
    assert owners(tmp_path / "t") == {0: 1, 1: 3, 2: 2}
    assert not list((tmp_path / "s").iterdir())
    assert not (tmp_path / "t" / "ostinato_plan.json").exists()
    flip(tmp_path / "t", 0)
    assert [damage.trajectory_id for damage in verify(tmp_path / "t").damage] == [0], "by the checksum of its source"


@contextmanager
def stopping_after(at: int) -> Iterator[None]:
    """Let no more than some trajectories be renamed."""
    rename, names = Path.rename, list[str]()

    def limited(path: Path, target: Path) -> Path:
        names.extend([path.name] if path.name.startswith("trajectory_") else [])
        if len(names) > at:
            raise OSError("disk on fire")
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", limited)
        yield


def add(path: Path, number: int) -> None:
    """Save one more, as a new process would while a merge stands still; the same weights acted: names come again."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories([rollout(number, 2, model_weights_id="w_0")])


@pytest.mark.parametrize("stopped_at", [1, 4, None])
def test_what_came_while_a_merge_stood_still_stays_in_its_source_and_on_its_list(tmp_path, stopped_at, monkeypatch):
    source, target = tmp_path / "s", tmp_path / "t"
    for rank, number in ((0, 1), (0, 2), (1, 3), (1, 4), (1, 5)):
        add(source / f"rank_{rank}", number)
    if stopped_at is None:  # before the lists of the sources are brought up to date
        monkeypatch.setattr(merge_split, "_finish", lambda *_args, **_options: int("disk on fire"))
        with pytest.raises(ValueError, match="disk on fire"):
            merge(source, target, move=True)
        monkeypatch.undo()
    else:
        with stopping_after(stopped_at), pytest.raises(CheckpointError):
            merge(source, target, move=True)
    add(source / "rank_0", 6)
    add(source / "rank_2", 7)
    report = merge(source, target, move=True)
    assert (report.resumed, report.trajectories) == (True, 5)
    assert report.sources == tuple(str(source / rank) for rank in ("rank_0", "rank_1"))
    assert report.left == tuple(str(source / rank) for rank in ("rank_0", "rank_2"))
    assert owners(target) == dict(enumerate([1, 3, 2, 4, 5]))
    assert list(owners(source / "rank_0").values()) == [6]
    assert list(owners(source / "rank_2").values()) == [7]
    assert not (source / "rank_1").exists()
    for path in (target, source / "rank_0", source / "rank_2"):
        found = verify(path)
        assert (found.damage, found.unlisted) == ((), ())
    again = merge(source, tmp_path / "u", move=True)
    assert (again.trajectories, again.left) == (2, ())


@pytest.mark.parametrize(
    ("source", "target"), [("pt", "safetensors"), ("safetensors", "pt"), ("pkl", "pt"), ("safetensors", "pkl")]
)
def test_convert_keeps_everything_but_the_format(tmp_path, source, target):
    write(tmp_path / "s", [1, 2, 3], source, seed=8)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "s", tmp_path / "t", source, allow_pickle=True)
    if "pkl" in {source, target}:
        with pytest.raises((OptionError, CheckpointError), match="allow_pickle=True"):
            convert(tmp_path / "s", tmp_path / "t", target)
    report = convert(tmp_path / "s", tmp_path / "t", target, allow_pickle=True)
    assert (report.trajectories, report.trajectory_format) == (3, target)
    assert owners(tmp_path / "t") == {0: 1, 1: 2, 2: 3}
    assert not verify(tmp_path / "t", allow_pickle=True).damage
    first, second = loaded(tmp_path / "s"), loaded(tmp_path / "t")
    assert second.seed == 8
    assert check_batch(first.sample(30)) == check_batch(second.sample(30))
    one = second.load_trajectory(1)
    assert (one.model_weights_id, one.curr_obs["task"]) == ("w-2_0", ["pick", "place"])
    assert owners(tmp_path / "s") == {0: 1, 1: 2, 2: 3}
    damaged = flip(tmp_path / "s", 1)
    with pytest.raises(DamagedFileError, match=damaged.name):
        convert(tmp_path / "s", tmp_path / "u", target, allow_pickle=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "t"]


def swap(first: Path, second: Path) -> None:
    aside = first.rename(first.with_name("aside"))
    second.rename(first)
    aside.rename(second)


@pytest.mark.parametrize("form", ["pt", "safetensors", "pkl"])
def test_damage_is_found_without_lists_of_ours(tmp_path, form):
    one = tmp_path / "s" / "rank_0"
    write(one, [1, 2], form)
    (one / "ostinato_store.jsonl").unlink()  # as RLinf writes it: no checksums
    index = one / "trajectory_index.json"
    text = index.read_text()
    value = json.loads(text)
    value["trajectory_index"]["1"] |= {"shape": [3, 2, 1], "num_samples": 6}
    index.write_text(json.dumps(value))
    to = "pt" if form != "pt" else "safetensors"
    words = r"the index says \[3, 2, 1\]"
    with pytest.raises(DamagedFileError, match=rf"holds \[2, 2, .*{words}"):
        convert(one, tmp_path / "t", to, allow_pickle=True)
    if form == "pkl":
        return
    refused(tmp_path, f"{words}.*nothing was touched", lambda: merge(tmp_path / "s", tmp_path / "t"), DamagedFileError)
    index.write_text(text)
    assert not verify(one).damage
    first, second = (one / name for name in files(one))
    swap(first, second)
    damage = verify(one).damage
    assert [item.trajectory_id for item in damage] == [0, 1]
    assert all("files were swapped" in item.problem for item in damage)
    refused(tmp_path, "files were swapped", lambda: merge(tmp_path / "s", tmp_path / "t"), DamagedFileError)
    swap(first, second)
    if form == "pt":  # a zip archive has checksums of its own
        flip(one, 0)
        assert [item.trajectory_id for item in verify(one).damage] == [0]
    else:
        index.rename(one / "trajector_index.json")  # an older, misspelt name
        assert merge(tmp_path / "s", tmp_path / "t", move=True).trajectories == 2
        assert not list((tmp_path / "s").iterdir())
    with pytest.raises(CheckpointError):
        verify(tmp_path / "nowhere")
