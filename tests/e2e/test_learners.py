"""The examples of windows and hindsight run as they are, and their full runs show what they say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["hindsight_bit_flip", "recurrent_burn_in", "sb3_prioritized_dqn"]
ELSEWHERE = [
    "amp_discriminator",
    "behaviour_cloning_lerobot",
    "distributed_dqn",
    "offline_to_online_sac",
    "shared_writers",
]
"""Tested in `tests/e2e/test_examples.py`."""


def load(name: str) -> Any:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(NAMES + ELSEWHERE)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name.startswith("sb3"):
        pytest.importorskip("stable_baselines3")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "%" in done.stdout
    assert not list(tmp_path.iterdir()), "an example writes no files"


def test_burn_in_rows_before_the_episode_leave_no_trace() -> None:
    example = load("recurrent_burn_in")
    torch.manual_seed(0)
    network = example.Memory(recurrent=True)
    seen = torch.randn(1, 4, 3)
    padded = torch.cat([seen[:, :1].expand(1, 3, 3), seen], 1)
    valid = torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    whole = network(seen, torch.ones(1, 4), burn_in=0)
    assert torch.allclose(network(padded, valid, burn_in=5), whole[:, 2:])


def test_random_play_ends_where_the_turn_counts() -> None:
    example = load("recurrent_burn_in")
    rows = example.random_play(example.Settings(episodes=50), torch.Generator().manual_seed(0))
    seen, steps = rows["observation"].view(50, -1, 3), 8
    assert rows["done"].view(50, steps).nonzero()[:, 1].tolist() == [7] * 50
    right = (rows["action"].view(50, steps)[:, -1] == 1) == (seen[:, 0, 0] > 0)
    assert torch.equal(rows["reward"].view(50, steps)[:, -1], right * 2.0 - 1.0)
    assert (seen[:, 1:, 0] == 0).all(), "the cue is shown once"


def test_flips_and_goals() -> None:
    example = load("hindsight_bit_flip")
    settings = example.Settings(bits=3, envs=4)
    env = example.BitFlip(settings)
    env.goal = torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]])
    env.state = torch.zeros(4, 3)
    seen, reward, terminated, truncated = env.step(torch.tensor([0, 1, 1, 2]))
    assert seen["achieved_goal"].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert (reward.tolist(), terminated.tolist()) == ([0, -1, -1, -1], [True, False, False, False])
    assert not truncated.any()
    env.reset(torch.tensor([True, False, False, False]))
    assert env.see()["desired_goal"][1:].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]], "the others go on"
    env.step(torch.tensor([0, 0, 0, 0]))
    *_, terminated, truncated = env.step(torch.tensor([0, 1, 2, 0]))
    assert terminated.tolist()[1:] == [False, True, False]
    assert truncated.tolist()[1:] == [True, False, True]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_needs_a_network_that_remembers_and_a_burn_in() -> None:
    example = load("recurrent_burn_in")
    for seed in range(2):
        turns = example.run(example.Settings(seed=seed), lambda _: None)
        assert turns["recurrent, burn-in"] >= 0.95
        assert turns["recurrent, no burn-in"] <= 0.65
        assert turns["feed-forward"] <= 0.65


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hindsight_learns_where_nothing_else_does() -> None:
    example = load("hindsight_bit_flip")
    with_it, without = example.run(example.Settings(), lambda _: None)
    assert with_it >= 0.95
    assert without <= 0.05
