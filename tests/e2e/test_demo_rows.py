"""What the demo stores and learns from: true next observations; targets after truncation and termination."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.errors import OptionError

pytest.importorskip("gymnasium")
pytest.importorskip("rich")

from examples.demo.cartpole import Agent, Collector, DqnConfig, EnvSpec


def upright(observations: torch.Tensor) -> torch.Tensor:
    """Balance the pole well enough to reach the time limit: push to where it falls, and back to the middle."""
    position, speed, angle, turn = observations.unbind(-1)
    return (3.0 * angle + turn + 0.1 * position + 0.3 * speed > 0).long()


def test_the_time_limit_truncates_and_does_not_terminate():
    collector = Collector(seed=1)
    rows = collector.collect(501, upright, epsilon=0.0)
    assert rows["truncated"].nonzero().tolist() == [[499]]
    assert not rows["terminated"].any()
    assert collector.episode_returns == [500.0]
    assert rows["next_observation"][499].abs().max() > 0
    assert not torch.equal(rows["next_observation"][499], rows["observation"][500])
    collector.close()


def test_goals_bootstrap_on_truncation_but_not_on_termination():
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
    several = {**batch, "gamma": torch.tensor([0.9, 0.81, 0.729])}
    assert torch.allclose(learner.targets(several)[:2], 0.5 + torch.tensor([0.9, 0.81]) * future[:2])
    assert learner.targets(several)[2] == 0.5


def test_settings_are_checked_and_short_runs_shrink_the_phases():
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
