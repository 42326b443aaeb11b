"""DQN of Stable-Baselines3 with prioritized replay (Schaul et al. 2016) and 3-step returns, on CartPole-v1.

Stable-Baselines3 has no prioritized replay: it passes no TD errors to its buffers. A short subclass of its DQN samples
by priority, multiplies the loss by the importance weights and updates the priorities. The buffer is
`ostinato.compat.sb3.ReplayBuffer` with a `PrioritizedSampler`. The script also trains Stable-Baselines3's own DQN with
its own buffer and the same settings, and plots the returns of both.

    python examples/sb3_prioritized_dqn.py                     # writes sb3_prioritized_dqn.png
    python examples/sb3_prioritized_dqn.py --quick             # a few seconds, learns nothing

Needs `pip install 'ostinato[sb3,viz]'`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from torch.nn import functional

from ostinato import PrioritizedSampler
from ostinato.compat.sb3 import ReplayBuffer

CAPACITY, GAMMA = 20_000, 0.99
EPISODES, LONGEST = 5, 500
"""Episodes of each evaluation, and the maximum steps of one."""
Curve = list[tuple[int, float]]
"""Environment steps, and the mean return of the greedy policy."""


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


def make(seed: int, *, prioritized: bool) -> DQN:
    """Return the algorithm with its environment and buffer."""
    common: dict[str, Any] = {
        "buffer_size": CAPACITY,
        "learning_rate": 1e-3,
        "learning_starts": 1_000,
        "batch_size": 64,
        "gamma": GAMMA,
        "train_freq": 16,
        "gradient_steps": 8,
        "target_update_interval": 400,
        "exploration_fraction": 0.3,
        "exploration_final_eps": 0.04,
        "policy_kwargs": {"net_arch": [64, 64]},
        "seed": seed,
        "device": "cpu",
    }
    if not prioritized:
        return DQN("MlpPolicy", "CartPole-v1", **common)
    buffer = {"n_steps": 3, "gamma": GAMMA, "sampler": PrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4)}
    return PrioritizedDQN(
        "MlpPolicy", "CartPole-v1", replay_buffer_class=ReplayBuffer, replay_buffer_kwargs=buffer, **common
    )


class Evaluation(BaseCallback):
    """Evaluates the greedy policy regularly, and prints the progress."""

    def __init__(self, name: str, every: int) -> None:
        super().__init__()
        self.name, self.every = name, every
        self.curve: Curve = []
        self._env = make_vec_env("CartPole-v1", seed=1)
        self._start = time.perf_counter()

    def _on_step(self) -> bool:
        if self.num_timesteps % self.every == 0:
            mean, _ = evaluate_policy(self.model, self._env, n_eval_episodes=EPISODES)
            self.curve.append((self.num_timesteps, float(mean)))  # type: ignore[arg-type]
            speed = self.num_timesteps / (time.perf_counter() - self._start)
            print(f"{self.name}: {self.num_timesteps:6,} steps, return {mean:3.0f}, {speed:5,.0f} steps/s", flush=True)
        return True


def train(name: str, steps: int, seed: int, *, prioritized: bool) -> Curve:
    """Train once and return the evaluations."""
    evaluation = Evaluation(f"{name}, seed {seed}", every=max(1, steps // 10))
    make(seed, prioritized=prioritized).learn(steps, callback=evaluation)
    return evaluation.curve


def draw(path: Path, curves: dict[str, list[Curve]]) -> None:
    """Plot the returns by the number of steps: each seed, and the mean."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    for (name, runs), color in zip(curves.items(), ("#0072B2", "#B36B00"), strict=True):
        for run in runs:
            axes.plot(*zip(*run, strict=True), color=color, alpha=0.35, linewidth=1)
        mean = [sum(returns) / len(returns) for returns in zip(*([r for _, r in run] for run in runs), strict=True)]
        axes.plot([step for step, _ in runs[0]], mean, color=color, linewidth=2, label=name)
    axes.set(xlabel="environment steps", ylabel="return of the greedy policy", ylim=(0, 1.04 * LONGEST))
    axes.set_title("CartPole-v1, DQN of Stable-Baselines3")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps of each training")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each kind (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--quick", action="store_true", help="a run of a few hundred steps, one seed")
    parser.add_argument("--picture", type=Path, default=Path("sb3_prioritized_dqn.png"), help="where to write it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the network is small
    steps, seeds = (1_100, 1) if given.quick else (given.steps, given.seeds)
    kinds = {"prioritized, 3-step (Ostinato)": True, "uniform, 1-step (Stable-Baselines3)": False}
    curves = {
        name: [train(name, steps, given.seed + i, prioritized=prioritized) for i in range(seeds)]
        for name, prioritized in kinds.items()
    }
    for name, runs in curves.items():
        late = sum(mean for run in runs for _, mean in run[-3:]) / sum(len(run[-3:]) for run in runs)
        print(f"{name}: return {late:.0f} of {LONGEST} in the last three evaluations, mean of {seeds} seeds")
    draw(given.picture, curves)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
