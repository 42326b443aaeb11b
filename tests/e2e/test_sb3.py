"""Stable-Baselines3 learns with the door what it learns with its own buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("stable_baselines3")

from stable_baselines3 import DQN, SAC
from stable_baselines3.common import buffers as host

from ostinato.compat.sb3 import ReplayBuffer


class SameDraws(host.ReplayBuffer):
    """The host's own buffer, that draws from torch's generator as the door does, not from numpy's: one environment."""

    def sample(self, batch_size: int, env: Any = None) -> Any:
        return self._get_samples(torch.randint(0, self.size(), (batch_size,)).numpy(), env)


def train(algorithm: str, buffer: type[host.ReplayBuffer], steps: int, buffer_size: int, seed: int = 0) -> Any:
    """Train a small network, which is enough for these tasks, on one thread."""
    common: dict[str, Any] = {
        "learning_rate": 1e-3, "batch_size": 64, "buffer_size": buffer_size, "replay_buffer_class": buffer,
        "policy_kwargs": {"net_arch": [64, 64]}, "seed": seed, "device": "cpu",
    }  # fmt: skip
    model: Any
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order
    try:
        if algorithm == "SAC":
            model = SAC("MlpPolicy", "Pendulum-v1", tau=0.02, gamma=0.95, **common)
        else:
            options: dict[str, Any] = {
                "learning_starts": 500, "gradient_steps": 2, "target_update_interval": 250,
                "exploration_fraction": 0.5, "exploration_final_eps": 0.04,
            }  # fmt: skip
            model = DQN("MlpPolicy", "CartPole-v1", **options, **common)
        return model.learn(steps)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("algorithm", "steps", "buffer_size"), [("SAC", 230, 150), ("DQN", 900, 600)])
def test_the_same_draws_teach_the_same_bit_for_bit(algorithm, steps, buffer_size):
    """Over a ring that has wrapped, and ends by time limit: episodes of the pendulum have no others."""
    ours, theirs = (
        train(algorithm, kind, steps, buffer_size).policy.state_dict() for kind in (ReplayBuffer, SameDraws)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
