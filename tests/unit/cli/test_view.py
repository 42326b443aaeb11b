"""`ostinato view` and `ostinato plot`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from tests.command import run_here as ostinato
from tests.unit.viz.rollouts import file_of, store

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("typer")
pytest.importorskip("matplotlib")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return store(tmp_path / "a")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("view", ("--replay-dir", "--camera", "--headless", "--save-image", "--no-display", "--web")),
        ("plot", ("--output", "report.png")),
    ],
)
def test_help_names_options_and_gives_an_example(command: str, words: tuple[str, ...]) -> None:
    done = ostinato(command, "--help")
    assert done.returncode == 0
    for word in (*words, "Example", f"ostinato {command}", "Exit"):
        assert word in done.stdout


@pytest.mark.parametrize(
    "dashes", ["--replay_dir {} --save_image --no_display", "--replay-dir {} --save-image --no-display"]
)
def test_one_picture_and_exit(dashes: str, path: Path, tmp_path: Path) -> None:
    output = tmp_path / "one.png"
    done = ostinato("view", *dashes.format(path).split(), "--output", output, "--camera", "wrist_images")
    assert done.returncode == 0, done.stderr
    assert output.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    first = output.read_bytes()
    options = ("--save-image", "--no-display", "--output", output, "--episode", 2, "--step", 3, "--batch", 1)
    kept = ostinato("view", path, *options)
    assert (kept.returncode, output.read_bytes()) == (1, first)
    assert f"{output} exists: give --overwrite" in kept.stderr
    assert ostinato("view", path, *options, "--overwrite").returncode == 0
    assert output.read_bytes() != first


def test_the_prompt_through_a_pipe(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "viz.png"
    main = "from ostinato.cli.main import main; main()"
    command = [sys.executable, "-c", main, "view", "--replay_dir", path, "--headless", "--output", output]
    with subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(3):
            line = process.stdout.readline()
        assert line.startswith("trajectory 0 (1 of 3): step 0 of 3"), process.stderr.read() if process.stderr else ""
        first = output.read_bytes()
        process.stdin.write("n\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("trajectory 0 (1 of 3): step 1 of 3")
        assert output.read_bytes() != first  # written before the answer
        out, err = process.communicate("j 2\n", timeout=60)  # and the end of input
    assert out.startswith("trajectory 2 (3 of 3): step 0 of 4")
    assert err == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
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
        ("--headless --replay-dir b", "given twice"),
    ],
)
def test_options_that_exclude_each_other_are_usage_errors(options: str, words: str, path: Path) -> None:
    done = ostinato("view", path, *options.split())
    assert done.returncode == 2
    assert words in " ".join(done.stderr.replace("│", "").split())


def test_what_cannot_be_read_is_one_line(tmp_path: Path, path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, words in (("gone", "there is no directory"), ("empty", "neither trajectories nor a checkpoint")):
        for command in (("view", tmp_path / place, "--headless"), ("plot", tmp_path / place)):
            done = ostinato(*command)
            assert done.returncode == 1
            assert done.stderr.startswith("error: ")
            assert words in done.stderr
    pickled = store(tmp_path / "p", form="pkl")
    assert "--allow-pickle" in ostinato("view", pickled, "--headless").stderr
    assert ostinato("view", path, "--headless", "--output", tmp_path / "no" / "x.png").returncode == 1
    assert ostinato("view").returncode == 2


def test_broken_trajectories_do_not_stop_it(path: Path, tmp_path: Path) -> None:
    name = file_of(path, 0).name
    file_of(path, 0).unlink()
    options = ("--save-image", "--no-display", "--output", tmp_path / "x.png", "--overwrite")
    done = ostinato("view", path, *options)
    assert (done.returncode, (tmp_path / "x.png").exists()) == (1, True), "the picture says the same"
    assert f"{name} is missing" in done.stderr
    assert ostinato("view", path, *options, "--episode", 1).returncode == 0


def test_plot_and_view_of_a_checkpoint(tmp_path: Path, path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.rand(5, 2), "done": torch.tensor([0, 0, 1, 0, 1]).bool(), "reward": torch.rand(5)})
    rb.dumps(tmp_path / "ck")
    for place in (tmp_path / "ck", path):
        done = ostinato("plot", place, "--output", tmp_path / "report.png", "--overwrite")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "report.png").stat().st_size > 20_000
    done = ostinato("view", tmp_path / "ck", "--save-image", "--no-display", "--output", tmp_path / "x.png")
    assert done.returncode == 0, done.stderr
    assert ostinato("plot", tmp_path / "ck", "--output", tmp_path / "x.pdf").returncode == 1
    before = (tmp_path / "report.png").read_bytes()
    for command in (
        ("plot", path, "--output", tmp_path / "report.png"),
        ("view", path, "--headless", "--output", tmp_path / "report.png"),
        ("view", path, "--save-image", "--output", tmp_path / "report.png"),
        ("view", path, "--rerun", "--output", tmp_path / "report.png"),
    ):
        done = ostinato(*command)
        assert (done.returncode, (tmp_path / "report.png").read_bytes()) == (1, before)
        assert "give --overwrite" in done.stderr


def test_a_directory_of_ranks_names_them(path: Path, tmp_path: Path) -> None:
    done = ostinato("view", tmp_path, "--headless")
    assert done.returncode == 1
    assert "give one of a in it" in done.stderr


def test_the_window_takes_an_output_for_its_pictures(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("agg")
    done = ostinato("view", path, "--output", tmp_path / "x.png")
    assert done.returncode == 1
    assert "cannot open a window" in done.stderr  # and not that --output has no effect


def test_a_directory_is_named_where_a_dot_was_given(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.viz import SavedBuffer, TrajectoryFolder

    monkeypatch.chdir(path)
    assert TrajectoryFolder(".").title.startswith("a, 3 trajectories")
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.rand(1, 2)})
    rb.dumps(path / "ck")
    monkeypatch.chdir(path / "ck")
    assert SavedBuffer(".").title == "ck, 1 of 10 rows, 1 block"


def test_a_port_in_use_is_an_error(path: Path) -> None:
    import socket

    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ostinato("view", path, "--web", "--port", port)
    assert done.returncode == 1
    assert f"port {port} cannot be opened" in done.stderr
    assert "give another --port" in done.stderr
