"""The examples run: small in every run of the tests, and in full where slow tests run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, directory: Path, *arguments: str) -> str:
    """Run an example in a process of its own and return what it prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout


def gaps(printed: str) -> dict[str, tuple[float, float]]:
    """Distance from the demonstrations before and after training, with and without replay."""
    found = re.findall(r"^(with\w* replay): gap to the demonstrations ([\d.]+) -> ([\d.]+)", printed, re.MULTILINE)
    return {title: (float(first), float(last)) for title, first, last in found}


def test_the_discriminator_example_runs(tmp_path: Path) -> None:
    printed = run("amp_discriminator.py", tmp_path, "--iterations", "2")
    assert set(gaps(printed)) == {"with replay", "without replay"}
    assert printed.count("discriminator accuracy") == 4
    assert (tmp_path / "amp_discriminator.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_agent_takes_on_the_demonstrated_motion(tmp_path: Path) -> None:
    """The whole of it, in under a minute on an idle machine: the gap shrinks several times, replay on and off."""
    moved = gaps(run("amp_discriminator.py", tmp_path, "--seed", "1"))
    first, last = moved["with replay"]
    assert first > 6
    assert last < first / 3
    assert moved["without replay"][1] < first


def test_the_example_of_a_dataset_and_live_steps_runs(tmp_path: Path) -> None:
    pytest.importorskip("minari")
    printed = run("offline_to_online_sac.py", tmp_path, "--quick")
    assert "dataset: 400 steps of 2 episodes" in printed
    assert "dataset and live steps: 100 steps, 9% of the batch from the dataset" in printed
    assert "live steps alone: 100 steps, 0% of the batch from the dataset" in printed
    assert (tmp_path / "offline_to_online_sac.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_dataset_saves_live_steps(tmp_path: Path) -> None:
    """The whole of it, in about a minute on an idle core."""
    pytest.importorskip("minari")
    printed = run("offline_to_online_sac.py", tmp_path)
    found = re.findall(r"controller after (\d+) steps, return (-\d+) at the end", printed)
    (mixed, last), (alone, _) = [(int(steps), int(end)) for steps, end in found]
    assert mixed < alone
    assert last > -250, "a random policy has about -1200"


def test_the_example_of_a_lerobot_dataset_runs(tmp_path: Path) -> None:
    pytest.importorskip("av")
    printed = run("behaviour_cloning_lerobot.py", tmp_path, "--quick")
    assert "DatasetStorage(lerobot v3.0, rows=40, episodes=4" in printed
    assert (tmp_path / "behaviour_cloning.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_policy_is_cloned_from_videos(tmp_path: Path) -> None:
    """The whole of it, in about a minute on an idle core."""
    pytest.importorskip("av")
    printed = run("behaviour_cloning_lerobot.py", tmp_path)
    found = re.search(r"the policy reaches the disc: (\d+)%, before training (\d+)%", printed)
    assert found is not None
    after, before = map(int, found.groups())
    assert before < 30 < 70 < after


def test_the_example_of_shared_writers_runs(tmp_path: Path) -> None:
    printed = run("shared_writers.py", tmp_path, "--collectors", "1", "--batches", "20")
    assert re.search(r"1344 rows from 1 processes, \d+ batches", printed) or "is not possible here" in printed


@pytest.mark.ray
def test_actors_and_one_learner_work_together(tmp_path: Path) -> None:
    printed = run("distributed_dqn.py", tmp_path, "--quick")
    found = re.search(r"([\d,]+) rows written, ([\d,]+) drawn", printed)
    assert found is not None
    written, drawn = (int(count.replace(",", "")) for count in found.groups())
    assert written >= 256, "no batch before min_size_to_sample"
    assert drawn >= 40 * 128


@pytest.mark.slow
@pytest.mark.ray
def test_actors_and_one_learner_learn_cartpole(tmp_path: Path) -> None:
    """The whole of it: two actors, two shards, in under three minutes on two idle cores."""
    printed = run("distributed_dqn.py", tmp_path)
    found = re.search(r"greedy policy, mean of 10 episodes: (\d+) of 500", printed)
    assert found is not None
    assert int(found[1]) > 300, "a policy that does nothing clever gets about 10 to 20"
