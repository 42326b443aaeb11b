"""The examples: each one runs, shows progress and ends with a picture; full runs show what they claim (slow)."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {
    "amp_discriminator": None,
    "behaviour_cloning_lerobot": "av",
    "fasttd3_pendulum": "tensordict",
    "groups": None,
    "hindsight_bit_flip": None,
    "image_memory": None,
    "offline_to_online_sac": "minari",
    "prioritized_cliffwalk": None,
    "recurrent_burn_in": None,
    "sb3_prioritized_dqn": "stable_baselines3",
    "shared_writers": None,
}
"""Examples that run in this process, and the package each one needs beside those above."""
RAY = "distributed_dqn"
RESULTS = {
    "amp_discriminator": r"with replay: gap to the demonstrations [\d.]+ -> [\d.]+, discriminator accuracy [\d.]+",
    "behaviour_cloning_lerobot": r"new episodes in which the policy reaches the disc: \d+%, before training \d+%",
    "fasttd3_pendulum": r"return of an episode: -\d+ before training, -\d+ at the end",
    "groups": r"same groups and order +True\nequal weights +True",
    "hindsight_bit_flip": r"with Hindsight: \d+% of new goals reached, mean of 1 seeds",
    "image_memory": r"FrameStack, codec +[\d,]+ +[\d.]+x +[\d.]+ ms +[\d.]+ ms",
    "offline_to_online_sac": r"dataset: 400 steps of 2 episodes.*\n(?s:.*)"
    r"dataset and live steps: +100 steps, +9% of the batch from the dataset.*\n(?s:.*)"
    r"live steps alone: +100 steps, +0% of the batch from the dataset.*\n(?s:.*)"
    r"live steps alone: better than the controller after \w+ steps, return -\d+ at the end",
    "prioritized_cliffwalk": r" +6 +126 +[\d,]+ +[\d,]+ +[\d.]+x ",
    "recurrent_burn_in": r"feed-forward +right turns +\d+%, mean of 1 seeds",
    "sb3_prioritized_dqn": r"uniform, 1-step .*: return \d+ of 500 in the last three evaluations, mean of 1 seeds",
    "shared_writers": r"half-written rows +0",
}
"""The lines that state the result of each example."""
PROGRESS = re.compile(r"\d(?: steps/s|/s\)|[\w ]* rows/s| updates/s)|equal from all buffers|x   \d+ s$")
"""What a line of progress contains: a speed, a count of checks or the time spent."""


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Undo what a program may set: threads, torch's generator, the environment, the folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))  # processes that an example starts import it, too
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def load(name: str) -> Any:
    """Import an example."""
    needed = NEEDS.get(name)
    if needed is not None:
        pytest.importorskip(needed)
    return importlib.import_module(name)


def check_picture(path: Path) -> None:
    """Check that a picture is there, and is not an empty sheet."""
    image = importlib.import_module("PIL.Image").open(path)
    assert image.width >= 800
    assert len(image.convert("L").getcolors()) > 20


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_shows_progress_and_ends_with_a_picture(name, tmp_path, capsys):
    picture = tmp_path / "here.png"
    with pytest.raises(SystemExit) as ended:
        load(name).main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"python examples/{name}.py --quick" in re.sub(" +", " ", text)
    assert all(part in text for part in ("pip install 'ostinato[", "--seed", "--steps", "--quick", "--picture"))
    load(name).main(["--quick", "--picture", str(picture)])
    text = capsys.readouterr().out
    if name == "shared_writers" and "is not possible here" in text:
        pytest.skip("needs shared memory and the native extension")
    lines = text.splitlines()
    assert lines[-1] == f"picture: {picture}"
    assert any(PROGRESS.search(line) for line in lines), text
    assert re.search(f"^{RESULTS[name]}", text, re.MULTILINE), text
    check_picture(picture)
    assert [path.name for path in tmp_path.iterdir()] == ["here.png"], "an example leaves no other files"


def test_every_example_is_tested_and_in_the_gallery():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*NEEDS, RAY}
    page = (EXAMPLES / "README.md").read_text()
    for name in names:
        section = re.search(rf"^## {name}\.py\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert section is not None, f"examples/README.md has no section for {name}"
        assert f"python examples/{name}.py\n" in section[1], f"{name}: no command"
        assert f"[source]({name}.py)" in section[1]
        pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", section[1])
        assert pictures == [f"../docs/pictures/examples/{name}.png"]
        assert re.search(r"\d+ s", section[1]), f"{name}: no time"
    folder = EXAMPLES.parent / "docs" / "pictures" / "examples"
    assert sum(path.stat().st_size for path in folder.glob("*.png")) < 350_000


@pytest.mark.ray
def test_actors_and_one_learner_work_together(tmp_path):
    command = [sys.executable, str(EXAMPLES / f"{RAY}.py"), "--quick"]
    text = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert f"picture: {RAY}.png" in text.splitlines()  # Ray may have the last word
    check_picture(tmp_path / f"{RAY}.png")
    assert PROGRESS.search(text)
    found = re.search(r"([\d,]+) rows written, ([\d,]+) drawn", text)
    assert found is not None
    written, drawn = (int(count.replace(",", "")) for count in found.groups())
    assert written >= 256, "no batch before min_size_to_sample"
    assert drawn >= 40 * 128


def test_priorities_save_replays():
    """With 510 transitions, of which one is rewarded, uniform draws need at least four times as many of them."""
    example = load("prioritized_cliffwalk")
    counts = {
        sampler: [example.learn(8, sampler, seed, 100_000)[-1] for seed in range(3)]
        for sampler in ("uniform", "prioritized")
    }
    assert all(error < 1e-3 for runs in counts.values() for _, error in runs)
    assert min(count for count, _ in counts["uniform"]) > 4 * max(count for count, _ in counts["prioritized"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_needs_a_network_that_remembers_and_a_burn_in():
    example = load("recurrent_burn_in")
    for name, runs in example.run(example.Settings(), 2).items():
        for _, turns in (run[-1] for run in runs):
            assert turns >= 0.95 if name == "recurrent, burn-in" else turns <= 0.65


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hindsight_learns_where_nothing_else_does():
    example = load("hindsight_bit_flip")
    with_it, without = example.run(example.Settings(), 1).values()
    assert with_it[0][-1][1] >= 0.95
    assert without[0][-1][1] <= 0.05
