"""`ostinato view` and `ostinato plot`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from ostinato.viz import TrajectoryFolder
from tests.command import fails
from tests.command import run_here as ostinato
from tests.unit.viz.rollouts import file_of, store

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("typer")
pytest.importorskip("matplotlib")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return store(tmp_path / "a")


def test_one_picture_and_exit(path, tmp_path):
    output = tmp_path / "one.png"
    for dashes in ("--replay_dir {} --save_image --no_display", "--replay-dir {} --save-image --no-display"):
        output.unlink(missing_ok=True)
        done = ostinato("view", *dashes.format(path).split(), "--output", output, "--camera", "wrist_images")
        assert done.returncode == 0, done.stderr
        assert output.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    first = output.read_bytes()
    options = ("--save-image", "--no-display", "--output", output, "--episode", 2, "--step", 3, "--batch", 1)
    assert ostinato("view", path, *options, "--overwrite").returncode == 0
    assert output.read_bytes() != first


def test_the_prompt_reads_commands_until_the_end_of_input(path, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("n\nj 2\n"))
    done = ostinato("view", "--replay_dir", path, "--headless", "--output", tmp_path / "viz.png")
    assert (done.returncode, done.stderr) == (0, "")
    told = [line.partition(",")[0] for line in done.stdout.splitlines() if line.startswith("trajectory ")]
    assert told == [
        "trajectory 0 (1 of 3): step 0 of 3",
        "trajectory 0 (1 of 3): step 1 of 3",
        "trajectory 2 (3 of 3): step 0 of 4",
    ]
    assert (tmp_path / "viz.png").exists()


def test_options_that_exclude_each_other_are_usage_errors(path):
    for options, words in (
        ("--headless --web", "exclude each other"),
        ("--no-display", "needs --save-image"),
        ("--headless --save-image", "no effect with --headless"),
        ("--web --output x.png", "no effect with --web"),
        ("--rerun --step 1", "all steps of the whole batch are written"),
        ("--headless --camera left", "has no observation 'left': --camera must be one of states, main_images"),
        ("--port 8000", "--port needs --web"),
        ("--web --camera main_images", "shows every camera"),
        ("--headless --episode 9", "there is no trajectory 9"),
        ("--headless --step 3", "must be below 3 and 2"),
    ):
        fails(2, words, "view", path, *options.split())


def test_what_cannot_be_read_is_one_line(tmp_path, path, monkeypatch):
    (tmp_path / "empty").mkdir()
    pytest.importorskip("matplotlib").use("agg")
    for words, *arguments in (
        ("there is no directory", "view", tmp_path / "gone", "--headless"),
        ("there is no directory", "plot", tmp_path / "gone"),
        ("neither trajectories nor a checkpoint", "view", tmp_path / "empty", "--headless"),
        ("--allow-pickle", "view", store(tmp_path / "p", form="pkl"), "--headless"),
        ("directory", "view", path, "--headless", "--output", tmp_path / "no" / "x.png"),
        ("give one of a", "view", tmp_path, "--headless"),  # a directory of ranks
        ("cannot open a window", "view", path, "--output", tmp_path / "x.png"),
    ):
        assert fails(1, words, *arguments).stderr.startswith("error: ")
    name = file_of(path, 0).name
    file_of(path, 0).unlink()
    options = ("--save-image", "--no-display", "--output", tmp_path / "x.png", "--overwrite")
    done = ostinato("view", path, *options)
    assert (done.returncode, (tmp_path / "x.png").exists()) == (1, True), "the picture says the same"
    assert f"{name} is missing" in done.stderr
    assert ostinato("view", path, *options, "--episode", 1).returncode == 0
    monkeypatch.chdir(path)
    assert TrajectoryFolder(".").title.startswith("a, 3 trajectories")


def test_plot_and_view_of_a_checkpoint(tmp_path, path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.rand(5, 2), "done": torch.tensor([0, 0, 1, 0, 1]).bool(), "reward": torch.rand(5)})
    rb.dumps(tmp_path / "ck")
    output = tmp_path / "report.png"
    for place in (tmp_path / "ck", path):
        done = ostinato("plot", place, "--output", output, "--overwrite")
        assert done.returncode == 0, done.stderr
        assert output.stat().st_size > 20_000
    done = ostinato("view", tmp_path / "ck", "--save-image", "--no-display", "--output", tmp_path / "x.png")
    assert done.returncode == 0, done.stderr
    assert ostinato("plot", tmp_path / "ck", "--output", tmp_path / "x.pdf").returncode == 1
    before = output.read_bytes()
    for command, *options in (("plot",), ("view", "--headless"), ("view", "--save-image"), ("view", "--rerun")):
        fails(1, "give --overwrite", command, path, *options, "--output", output)
        assert output.read_bytes() == before


def test_a_port_in_use_is_an_error(path):
    import socket

    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = fails(1, f"port {port} cannot be opened", "view", path, "--web", "--port", port)
    assert "give another --port" in done.stderr
