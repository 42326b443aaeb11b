"""QR-DQN of sb3-contrib with priorities."""

from __future__ import annotations

from ostinato.compat.sb3 import PrioritizedReplayBuffer, PriorityCallback

from .originals import original

contrib = original("sb3_contrib")


def test_qr_dqn_learns_from_priorities():
    model = contrib.QRDQN(
        "MlpPolicy", "CartPole-v1", replay_buffer_class=PrioritizedReplayBuffer, buffer_size=100, learning_starts=20,
        policy_kwargs={"net_arch": [8]}, seed=0,
    )  # fmt: skip
    model.learn(60, callback=PriorityCallback())
    _, info = model.replay_buffer.sample_with_info(50)
    assert len(info["priority_weight"].unique()) > 10
