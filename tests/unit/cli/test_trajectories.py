"""The commands for trajectories as users run them: output, JSON, exit status."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import pytest

from ostinato import TrajectoryReplayBuffer
from ostinato.cli.main import main
from tests.unit.trajectories._rollouts import files, rollout

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("typer")


def ostinato(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in this process: a new one takes seconds to import torch."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["ostinato", *map(str, arguments)])
        patch.setenv("COLUMNS", "100")
        patch.setenv("TERM", "dumb")
        patch.delenv("FORCE_COLOR", raising=False)
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def answer(*arguments: object) -> Any:
    done = ostinato(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "saved") as buffer:
        buffer.add_trajectories([rollout(number, 3, 2) for number in range(4)])
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sample", ("--load-path", "--num-chunks", "--cache-size", "--enable-cache")),
        ("merge", ("--source-path", "--save-path", "--copy")),
        ("split", ("--source-path", "--save-path", "--split-count", "--copy")),
        ("verify", ("--json", "--allow-pickle")),
        ("convert", ("--source-path", "--save-path", "--format")),
    ],
)
def test_help_names_options_and_gives_an_example(command: str, words: tuple[str, ...]) -> None:
    done = ostinato(command, "--help")
    assert done.returncode == 0
    for word in (*words, "Example", f"ostinato {command}", "Exit"):
        assert word in done.stdout


def test_sample_prints_keys_shapes_and_dtypes(saved: Path) -> None:
    done = ostinato("sample", "--load-path", saved, "--num-chunks", "10", "--cache-size", "10", "--enable-cache")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:4] == ["4", "trajectories,", "24", "transitions"]
    assert ["curr_obs.main_images", "uint8", "[10,", "4,", "4,", "3]"] in lines
    report = answer("sample", "--load-path", saved, "--num-chunks", "1024")
    assert ["rewards", "float32", [1024, 1]] in report["keys"]


def test_options_that_would_have_no_effect_are_refused(saved: Path) -> None:
    assert ostinato("sample", "--load-path", saved, "--cache-size", "3").returncode == 2
    assert ostinato("inspect", saved.parent, "--allow-pickle").returncode == 2


def test_inspect_and_verify(saved: Path) -> None:
    done = ostinato("inspect", saved)
    assert done.returncode == 0
    assert "4 trajectories, 24 transitions (3 x 2 steps x environments), 4 models" in done.stdout
    assert "sampling goes on exactly where it stopped" in done.stdout
    report = answer("inspect", saved)
    assert {key["name"] for key in report["keys"]} >= {"rewards", "curr_obs.main_images", "forward_inputs.action"}
    assert answer("inspect", saved, "--quick")["keys"] == []
    whole = ostinato("verify", saved)
    assert whole.returncode == 0
    assert whole.stdout.splitlines()[-1] == "all whole"


def test_verify_names_each_damaged_file_and_exits_with_1(saved: Path) -> None:
    names = files(saved)
    data = bytearray((saved / names[0]).read_bytes())
    data[len(data) // 2] ^= 1  # one bit of a picture: sizes and headers still fit
    (saved / names[0]).write_bytes(data)
    (saved / names[2]).unlink()
    (saved / "trajectory_9_stray.pt").write_bytes(b"")
    meta = json.loads((saved / "metadata.json").read_text())
    (saved / "metadata.json").write_text(json.dumps(meta | {"total_samples": 99}))
    done = ostinato("verify", saved)
    assert done.returncode == 1
    damaged = [line for line in done.stdout.splitlines() if line.startswith("damaged:")]
    assert [line.split()[1].rstrip(":") for line in damaged] == ["metadata.json", names[0], names[2]]
    assert "checksum" in damaged[1] or "differs" in damaged[1]
    assert "1 trajectory files that no list names" in done.stdout
    report = json.loads(ostinato("verify", saved, "--json").stdout)
    assert [item["trajectory_id"] for item in report["damage"]] == [None, 0, 2]
    assert ostinato("verify", saved.parent / "nowhere").returncode == 1


def test_merge_split_and_convert(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    saved.rename(tmp_path / "ranks" / "rank_0")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "ranks" / "rank_1") as buffer:
        buffer.add_trajectories([rollout(number, 3, 2) for number in (10, 11)])
    merged = answer("merge", "--source-path", tmp_path / "ranks", "--save-path", tmp_path / "merged", "--copy")
    assert (merged["trajectories"], merged["total_samples"], merged["copied"]) == (6, 36, True)
    again = ostinato("merge", "--source-path", tmp_path / "ranks", "--save-path", tmp_path / "merged")
    assert again.returncode == 1
    assert "exists and is not empty" in again.stderr
    part = answer("split", "--source-path", tmp_path / "merged", "--save-path", tmp_path / "part", "--split-count", "2")
    assert (part["trajectories"], part["copied"]) == (2, False)
    few = ostinato("split", "--source-path", tmp_path / "merged", "--save-path", tmp_path / "x", "--split-count", "30")
    assert few.returncode == 1
    assert "split_count must be in [1, 4]" in few.stderr
    fast = answer("convert", "--source-path", tmp_path / "part", "--save-path", tmp_path / "fast")
    assert (fast["trajectory_format"], fast["trajectories"]) == ("safetensors", 2)
    assert answer("verify", tmp_path / "fast")["checksums"] == 2
