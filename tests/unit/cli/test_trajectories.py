"""The commands for trajectories: output, JSON, exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, Trajectory, TrajectoryReplayBuffer, open_dataset
from tests.command import answer, facts, fails
from tests.command import run_here as ostinato
from tests.unit.trajectories.rollouts import files, saving

pytest.importorskip("typer")

TORCHRL = Path(__file__).parents[2] / "data" / "torchrl_0_14"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    saving(tmp_path / "saved", 4).close()
    return tmp_path / "saved"


def test_sample_prints_keys_shapes_and_dtypes(saved):
    done = ostinato("sample", "--load-path", saved, "--num-chunks", "10", "--cache-size", "10", "--enable-cache")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert (facts(done)["trajectories"], facts(done)["transitions"]) == ("4", "24")
    assert ["curr_obs.main_images", "uint8", "[10,", "4,", "4,", "3]"] in lines
    report = answer("sample", "--load-path", saved, "--num-chunks", "1024")
    assert ["rewards", "float32", [1024, 1]] in report["keys"]


def test_inspect_and_verify(saved):
    done = ostinato("inspect", saved)
    episodes = len(open_dataset(saved).episode_lengths)
    names = ("trajectories", "transitions", "steps x environments", "episodes", "models", "resumes exactly")
    assert [facts(done)[name] for name in names] == ["4", "24", "3 x 2", str(episodes), "4", "yes"]
    report = answer("inspect", saved)
    assert report["episodes"] == answer("doctor", saved)["episodes"] == episodes
    assert {key["name"] for key in report["keys"]} >= {"rewards", "curr_obs.main_images", "forward_inputs.action"}
    assert answer("inspect", saved, "--quick")["keys"] == []
    whole = ostinato("verify", saved)
    assert whole.returncode == 0
    assert whole.stdout.splitlines()[-1] == "no damage found"
    (saved / "trajectory_9_stray.pt").write_bytes(b"")
    assert facts(ostinato("inspect", saved))["not in the index"] == "trajectory_9_stray.pt"


def test_verify_names_each_damaged_file_and_exits_with_1(saved):
    names = files(saved)
    data = bytearray((saved / names[0]).read_bytes())
    data[len(data) // 2] ^= 1  # one bit of a picture: sizes and headers still fit
    (saved / names[0]).write_bytes(data)
    (saved / names[2]).unlink()
    for number in range(12):
        (saved / f"trajectory_9_stray{number}.pt").write_bytes(b"")
    meta = json.loads((saved / "metadata.json").read_text())
    (saved / "metadata.json").write_text(json.dumps(meta | {"total_samples": 99}))
    done = ostinato("verify", saved)
    assert done.returncode == 1
    damaged = [line for line in done.stdout.splitlines() if line.startswith("damaged:")]
    assert [line.split()[1].rstrip(":") for line in damaged] == ["metadata.json", names[0], names[2]]
    assert "checksum" in damaged[1] or "differs" in damaged[1]
    assert done.stdout.count("stray") == 10
    assert "2 more, see --json" in done.stdout
    report = answer("verify", saved, status=1)
    assert [item["trajectory_id"] for item in report["damage"]] == [None, 0, 2]
    assert ostinato("verify", saved.parent / "nowhere").returncode == 1


def test_pickles_without_a_checksum_are_not_checked_and_not_damaged(tmp_path):
    path = tmp_path / "s"
    saving(path, 1, "pkl").close()
    (path / "ostinato_store.jsonl").unlink()  # as RLinf writes it
    done = ostinato("verify", path)
    assert done.returncode == 1
    assert (facts(done)["files"], facts(done)["unchecked"]) == ("0", next(path.glob("*.pkl")).name)
    assert "give --allow-pickle if you trust it" in done.stdout
    assert "damage" not in done.stdout
    assert ostinato("verify", path, "--allow-pickle").returncode == 0
    done = ostinato("doctor", path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, f"{path}: trajectories, not read")
    assert "ostinato convert --allow-pickle" in " ".join(done.stdout.split())
    fails(1, "give --allow-pickle", "sample", "--load-path", path)


def test_merge_split_and_convert(saved, tmp_path):
    saved.rename(tmp_path / "rank_0")
    saving(tmp_path / "rank_1", 2).close()
    merged = answer("merge", "--source-path", tmp_path, "--save-path", tmp_path / "merged", "--copy")
    assert (merged["trajectories"], merged["total_samples"], merged["how"]) == (6, 36, "copied")
    moved = answer("merge", tmp_path, tmp_path / "moved", "--move")
    assert (moved["trajectories"], moved["how"]) == (6, "moved")
    assert not list(tmp_path.glob("rank*/*.pt"))
    part = answer("split", "--source-path", tmp_path / "merged", "--save-path", tmp_path / "part", "--split-count", "2")
    assert (part["trajectories"], part["how"]) == (2, "linked")
    assert answer("split", tmp_path / "merged", tmp_path / "y", "--split-count", 6, "--move")["how"] == "moved"
    assert not list((tmp_path / "merged").rglob("*.pt"))
    fast = answer("convert", tmp_path / "part", tmp_path / "fast")
    assert (fast["trajectory_format"], fast["trajectories"]) == ("safetensors", 2)
    assert answer("verify", tmp_path / "fast")["checksums"] == 2


def test_names_from_files_cannot_command_the_terminal(tmp_path):
    evil = "\x1b]0;owned\x07\x1b[2J\u202ex[red]"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "s") as buffer:
        buffer.add_trajectories([Trajectory(rewards=torch.zeros(2, 1, 1), extra={evil: torch.zeros(2, 1, 1)})])
    (tmp_path / "s" / "trajectory_9_\x1b[2J.pt").write_bytes(b"")
    outputs = [
        ostinato("inspect", tmp_path / "s"),
        ostinato("verify", tmp_path / "s"),
        ostinato("sample", "--load-path", tmp_path / "s", "--num-chunks", "2"),
        ostinato("inspect", tmp_path / "\x1b[2J"),
    ]
    assert [done.returncode for done in outputs] == [0, 0, 0, 1]
    for done in outputs:
        assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout + done.stderr)
    assert "\\x1b[2J\\u202ex[red]" in outputs[0].stdout


def test_convert_takes_checkpoints_of_torchrl(tmp_path, saved):
    ours = tmp_path / "ours"
    report = answer("convert", TORCHRL / "tree", ours)
    assert (report["rows"], report["capacity"], report["storage"]) == (4, 6, "LazyTensorStorage")
    assert "numbers as keys" in report["notes"][0]
    assert answer("inspect", ours)["rows"] == 4
    assert answer("convert", TORCHRL / "tree", ours, "--overwrite")["rows"] == 4
    assert facts(ostinato("convert", TORCHRL / "list.pt", tmp_path / "list"))["rows"] == "3"
    for status, words, *wrong in (
        (1, "overwrite", TORCHRL / "tree", ours),
        (1, "", TORCHRL / "tree", saved, "--overwrite"),  # no checkpoint is there
        (2, "--format", TORCHRL / "tree", tmp_path / "wrong", "--format", "pt"),
        (2, "--ndim", saved, tmp_path / "wrong", "--ndim", "1"),
        (1, "ndim=1, got ndim=2", TORCHRL / "ring", tmp_path / "wrong", "--ndim", "2"),
    ):
        fails(status, words, "convert", *wrong)
    assert not (tmp_path / "wrong").exists()


def test_wrong_usage_and_the_other_kind_of_directory(saved, tmp_path):
    ReplayBuffer(storage=LazyTensorStorage(4)).dumps(tmp_path / "buffer")
    new = tmp_path / "new"
    table: list[Any] = [
        (2, "--cache-size", ("sample", "--load-path", saved, "--cache-size", "3")),
        (2, "--allow-pickle", ("inspect", tmp_path / "buffer", "--allow-pickle")),
        (2, "--format must be one of pt, pkl, safetensors", ("convert", saved, new, "--format", "h5")),
        (2, "exclude each other", ("merge", saved, new, "--copy", "--move")),
        (2, "--save-path", ("merge", saved)),
        (1, "holds no rows", ("sample", tmp_path / "buffer")),
        (1, "give --format", ("convert", tmp_path / "buffer", new)),
        (1, "is a directory of trajectories", ("compact", saved)),
        (1, "ostinato convert", ("verify", TORCHRL / "tree")),
        (1, "is a file", ("inspect", saved / files(saved)[0])),
    ]
    for command, name, more in (
        ("sample", "--load-path", ()),
        ("merge", "--source-path", ("--save-path", "x")),
        ("split", "--source-path", ("--save-path", "x", "--split-count", "1")),
        ("view", "--replay-dir", ("--headless",)),
    ):
        table += [(2, "given twice", (command, saved, name, saved, *more)), (2, name, (command, *more))]
    for status, words, arguments in table:
        fails(status, words, *arguments)
    assert not new.exists()
