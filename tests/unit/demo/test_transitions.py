"""What the demo stores and learns from: true next observations; targets after truncation and termination."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.demo import Agent, Collector, DqnConfig, EnvSpec
from ostinato.errors import OptionError

pytest.importorskip("gymnasium")


def upright(observations: torch.Tensor) -> torch.Tensor:
    """Balance the pole well enough to reach the time limit: push to where it falls, and back to the middle."""
    position, speed, angle, turn = observations.unbind(-1)
    return (3.0 * angle + turn + 0.1 * position + 0.3 * speed > 0).long()


def test_rows_hold_the_true_successor_and_one_episode_each() -> None:
    collector = Collector(seed=0)
    rows = collector.collect(300, upright, epsilon=1.0)
    assert {name: tuple(column.shape) for name, column in rows.items()} == {
        "observation": (300, 4), "action": (300,), "reward": (300,), "next_observation": (300, 4),
        "terminated": (300,), "truncated": (300,), "episode": (300,), "step": (300,),
    }  # fmt: skip
    assert rows["observation"].dtype == rows["next_observation"].dtype == rows["reward"].dtype == torch.float32
    assert rows["terminated"].dtype == rows["truncated"].dtype == torch.bool
    assert rows["step"].tolist() == list(range(300))
    over = rows["terminated"] | rows["truncated"]
    follows = (rows["next_observation"][:-1] == rows["observation"][1:]).all(dim=-1)
    assert torch.equal(follows, ~over[:-1]), "a row's successor is the next row, unless an episode ends between them"
    assert torch.equal(rows["episode"][1:] - rows["episode"][:-1], over[:-1].long())
    last = rows["next_observation"][rows["terminated"]]
    assert ((last[:, 0].abs() > 2.4) | (last[:, 2].abs() > 0.2095)).all(), (
        "the last state of an episode is the fallen one"
    )
    collector.close()


def test_the_time_limit_truncates_and_does_not_terminate() -> None:
    collector = Collector(seed=1)
    rows = collector.collect(501, upright, epsilon=0.0)
    assert rows["truncated"].nonzero().tolist() == [[499]]
    assert not rows["terminated"].any()
    assert collector.episode_returns == [500.0]
    assert rows["next_observation"][499].abs().max() > 0
    assert not torch.equal(rows["next_observation"][499], rows["observation"][500])
    collector.close()


def test_goals_bootstrap_on_truncation_but_not_on_termination() -> None:
    config = DqnConfig(gamma=0.9, reward_scale=0.5)
    state = torch.get_rng_state()
    learner = Agent(config, EnvSpec(4, 2, (1.0,) * 4), torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state), "networks leave the global generator alone"
    following = torch.randn(3, 4)
    batch = {
        "observation": torch.randn(3, 4),
        "action": torch.tensor([0, 1, 0]),
        "reward": torch.tensor([1.0, 1.0, 1.0]),
        "next_observation": following,
        "terminated": torch.tensor([False, False, True]),
        "truncated": torch.tensor([False, True, False]),
    }
    choice = learner.act(following)
    with torch.no_grad():
        future = learner.target(following)[torch.arange(3), choice]
    goals = learner.targets(batch)
    assert torch.allclose(goals[:2], 0.5 + 0.9 * future[:2])
    assert goals[2] == 0.5
    before = learner.snapshot()
    several = {**batch, "gamma": torch.tensor([0.9, 0.81, 0.729])}
    assert torch.allclose(learner.targets(several)[:2], 0.5 + torch.tensor([0.9, 0.81]) * future[:2])
    assert learner.targets(several)[2] == 0.5
    error = learner.learn(batch, step=0)
    assert error.shape == (3,)
    moved = [name for name, value in learner.snapshot().items() if not torch.equal(value, before[name])]
    assert moved == [name for name in before if name != "scale"]


def test_settings_are_checked_and_short_runs_shrink_the_phases() -> None:
    settings: dict[str, Any]
    for settings, message in (
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"tau": 0.0}, "tau must be above 0"),
        ({"gamma": 1.5}, "gamma must be at most 1"),
        ({"steps": 500, "warmup_steps": 500}, "warmup_steps must be below steps=500"),
    ):
        with pytest.raises(OptionError, match=message):
            DqnConfig(**settings)
    for steps in (1, 10, 9_999, 10_000):
        config, whole = DqnConfig().over(steps), DqnConfig()
        assert config.steps == steps
        assert config.warmup_steps < steps
        for name in ("warmup_steps", "explore_steps", "validate_every"):
            assert getattr(config, name) == max(name != "warmup_steps", getattr(whole, name) * steps // 10_000), name
