"""The command as users run it: its output, its exit status, and what becomes of the process."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedReplayBuffer, ReplayBuffer
from tests.command import START, answer, facts, fails, run_here, run_process

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("typer")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), generator=torch.Generator())
    rb.extend(
        {"obs": torch.arange(12.0).reshape(4, 3), "next": {"reward": torch.tensor([0.0, 1.0, float("nan"), 2.0])}}
    )
    rb.sample(2)
    rb.dumps(tmp_path / "saved")
    return tmp_path / "saved"


def test_an_interrupt_ends_quietly(saved, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    class Interrupted(io.StringIO):
        def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    done = run_here("view", saved, "--headless", "--output", tmp_path / "viz.png")
    assert (done.returncode, done.stderr) == (130, "")


def test_a_pipe_that_is_closed_early_prints_no_traceback(saved):
    command = f"{sys.executable} -W ignore -c '{START}' inspect --json {saved} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr


"""Runs several commands in one process."""


def test_output_that_is_no_terminal_has_no_colours_and_any_encoding(saved):
    nowhere = "no where" * 30
    commands = [["inspect", str(saved)], ["verify", str(saved)], ["--version"], ["--help"], ["inspect", nowhere]]
    start = f"""
import os, runpy, sys
del os.environ["COLUMNS"]
for line in {commands!r}:
    sys.argv = ["ostinato", *line]
    try:
        runpy.run_module("ostinato", run_name="__main__")
    except SystemExit:
        pass
"""
    done = run_process(start=start, PYTHONIOENCODING="ascii", TERM="xterm-256color")
    assert facts(done)["capacity"] == "100"
    assert f"ostinato {version('ostinato')}\n" in done.stdout
    assert "Usage" in done.stdout
    assert nowhere in done.stderr, "lines are not wrapped"
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_errors_are_one_line_and_wrong_usage_exits_with_2(tmp_path):
    pytest.importorskip("gymnasium")
    pytest.importorskip("matplotlib")
    for arguments in (("fly",), ("inspect",), ("demo", "--seed", "-1"), ("demo", "--steps", "many")):
        assert "Traceback" not in fails(2, "", *arguments).stderr
    done = fails(1, "a [red]wonder[/red]", "inspect", tmp_path / "a [red]wonder[/red]")  # what users name is no markup
    assert done.stderr.startswith("error: there is no directory ")
    (tmp_path / "file").write_text("mine")
    fails(1, "", "demo", tmp_path / "file" / "inside")
    for name in ("checkpoint", "demo.png", "report.json"):
        (tmp_path / "file").rename(tmp_path / name)
        fails(1, f"{name} exists: give --overwrite", "demo", tmp_path)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
        (tmp_path / name).rename(tmp_path / "file")


def test_inspect_prints_every_field(saved):
    done = run_here("inspect", saved)
    lines = done.stdout.splitlines()
    assert lines[0] == str(saved)
    assert [facts(done)[name] for name in ("rows", "capacity", "drawn")] == ["4", "100", "2"]
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["obs"] == ["obs", "float32", "[3]", "4", "48", "B", "0", "11", "5.5", "0"]
    assert rows["next.reward"] == ["next.reward", "float32", "-", "4", "16", "B", "0", "2", "1", "1"]
    report = answer("inspect", saved)
    assert (report["rows"], report["capacity"], report["verified"]) == (4, 100, True)
    assert [field["name"] for field in report["fields"]] == ["obs", "next.reward"]
    assert report["fields"][1]["nan_count"] == 1
    flip_a_byte(saved)
    quick = answer("inspect", "--quick", saved)
    assert (quick["verified"], quick["fields"][0]["mean"]) == (False, None), "it reads no data"


def test_inspect_shows_priorities(tmp_path):
    rb = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, eps=0.0, storage=LazyTensorStorage(8))
    index = rb.extend({"a": torch.tensor([1.0, 2.0, 3.0, float("inf")])})
    rb.update_priority(index, [0.0, 1.0, 0.0, 3.0])
    rb.dumps(tmp_path / "saved")
    known = "rows 4, alpha 0.6, beta 0.4"
    line = f"{known}, min 0, mean 1, max 3, zero share 0.5"
    assert facts(run_here("inspect", tmp_path / "saved"))["priorities"] == line
    assert facts(run_here("inspect", "--quick", tmp_path / "saved"))["priorities"] == known
    report = answer("inspect", tmp_path / "saved")
    assert (report["priorities"]["rows"], report["priorities"]["zero_share"]) == (4, 0.5)
    field = report["fields"][0]
    assert (field["minimum"], field["maximum"], field["mean"]) == (1.0, "inf", "inf"), "JSON has no infinity"


def flip_a_byte(saved: Path) -> Path:
    """Damage the file of the rows."""
    file = max(saved.glob("*.bin"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    return file


def test_a_damaged_file_is_one_red_line_and_exit_1(saved):
    file = flip_a_byte(saved)
    done = fails(1, file.name, "inspect", saved, FORCE_COLOR="1", TERM="xterm")
    assert done.stderr.startswith("\x1b[1;31merror: ")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize(
    ("damage", "damaged", "intact"),
    [
        (flip_a_byte, ".bin", 1),
        (lambda path: max(path.glob("*.bin")).unlink(), ".bin", 1),
        (lambda path: cut(path / "manifest.json"), "manifest.json", 0),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json", 0),
    ],
    ids=["flipped", "missing", "manifest-cut", "manifest-missing"],
)
def test_verify_and_doctor_say_what_is_damaged_and_what_was_not_checked(damage, damaged, intact, saved):
    (data,) = saved.glob("*.bin")
    damage(saved)
    done = run_here("verify", saved)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert (lines[0], facts(done)["files"]) == (str(saved), str(intact))
    assert any(line.startswith("damaged: ") and damaged in line for line in lines)
    assert facts(done).get("unchecked") == (None if intact else data.name)
    report = answer("verify", saved, status=1)
    assert (report["files"], report["checksums"], len(report["damage"])) == (intact, intact, 1)
    done = run_here("doctor", saved)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == f"{saved}: checkpoint, not read"
    assert f"error: saved-damaged in {data.name if intact else 'manifest.json'}" in done.stdout
    report = answer("doctor", saved, status=1)
    assert (report["rows"], report["episodes"]) == (None, None)
    for command in ("inspect", "sample"):
        if damaged == "manifest.json":
            assert damaged in run_here(command, str(saved)).stderr, command


COMMANDS = [
    "",
    "demo",
    "inspect",
    "verify",
    "doctor",
    "audit",
    "sample",
    "merge",
    "split",
    "compact",
    "convert",
    "view",
    "plot",
    "top",
]


def test_help_gives_an_example_and_fits_into_80_columns():
    for command in COMMANDS:
        wide, narrow = (run_here(*command.split(), "--help", COLUMNS=columns).stdout for columns in ("200", "80"))
        for word in ("Usage", "Example", f"ostinato {command}"):
            assert word in wide, (command, word)
        assert "\N{HORIZONTAL ELLIPSIS}" not in narrow
        assert max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize(
    ("missing", "extra"), [("typer", "cli"), ("rich.table", "cli"), ("gymnasium", "demo"), ("matplotlib", "viz")]
)
def test_a_missing_extra_says_what_to_install(missing, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    if extra == "cli":
        for name in [name for name in sys.modules if name.startswith("ostinato.cli")]:
            monkeypatch.delitem(sys.modules, name)
    fails(1, f"pip install 'ostinato[{extra}]'", "demo", tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing is written before the packages are found"
