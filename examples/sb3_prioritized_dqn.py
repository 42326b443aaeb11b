"""DQN of Stable-Baselines3 with prioritized replay (Schaul et al. 2016) and 3-step returns, on CartPole-v1.

Stable-Baselines3 passes no TD errors to its buffers. A short subclass of its DQN samples by priority, multiplies the
loss by the importance weights and updates the priorities. The buffer is `ostinato.compat.sb3.ReplayBuffer` with a
`PrioritizedSampler`.

    python examples/sb3_prioritized_dqn.py            # about a minute on a CPU
    python examples/sb3_prioritized_dqn.py --quick    # a short run
"""

from __future__ import annotations

import argparse

import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from torch.nn import functional

from ostinato import PrioritizedSampler
from ostinato.compat.sb3 import ReplayBuffer

CAPACITY, GAMMA = 20_000, 0.99
EPISODES, LONGEST = 20, 500
"""Evaluation episodes, and the maximum steps of one."""


class PrioritizedDQN(DQN):
    """DQN that samples transitions in proportion to their last TD error."""

    replay_buffer: ReplayBuffer

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Take gradient steps as DQN does, with importance weights and priority updates."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        for _ in range(gradient_steps):
            batch, info = self.replay_buffer.sample_with_info(batch_size, env=self._vec_normalize_env)
            with torch.no_grad():
                best = self.q_net_target(batch.next_observations).max(1, keepdim=True).values
                target = batch.rewards + (1 - batch.dones) * batch.discounts * best
            value = self.q_net(batch.observations).gather(1, batch.actions.long())
            weight = info["priority_weight"].to(self.device).unsqueeze(-1)
            loss = (weight * functional.smooth_l1_loss(value, target, reduction="none")).mean()
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            self.replay_buffer.update_priority(info, (target - value.detach()).abs())
        self._n_updates += gradient_steps


def make(seed: int) -> PrioritizedDQN:
    """Return the algorithm with its environment and buffer."""
    return PrioritizedDQN(
        "MlpPolicy",
        "CartPole-v1",
        replay_buffer_class=ReplayBuffer,
        replay_buffer_kwargs={
            "n_steps": 3,
            "gamma": GAMMA,
            "sampler": PrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4),
        },
        buffer_size=CAPACITY,
        learning_rate=1e-3,
        learning_starts=500,
        batch_size=64,
        gamma=GAMMA,
        gradient_steps=2,
        target_update_interval=250,
        exploration_fraction=0.3,
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )


def returns(model: DQN) -> float:
    """Return the mean return of the greedy policy."""
    mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", seed=1), n_eval_episodes=EPISODES)
    return float(mean)  # type: ignore[arg-type]


def main() -> None:
    """Train, and print the return before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run of a few hundred steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is small
    model = make(arguments.seed)
    before = returns(model)
    model.learn(700 if arguments.quick else 20_000)
    after = returns(model)
    print(f"return of the greedy policy, mean of {EPISODES} episodes: {before:.0f} -> {after:.0f} ", end="")
    print(f"({after / LONGEST:.0%} of the maximum)")


if __name__ == "__main__":
    main()
