"""Adversarial motion priors (Peng et al. 2021) on a pendulum: an agent imitates demonstrations, without task reward.

The demonstrations swing Gymnasium's Pendulum-v1 to the horizontal and back, from any start. A discriminator learns to
distinguish their transitions from the agent's. Its score is the agent's only reward (PPO, Schulman et al. 2017). Half
of the agent's transitions in each batch of the discriminator come from a replay buffer, so that it does not forget
earlier behavior. The script trains with and without the buffer and plots both.

    python examples/amp_discriminator.py            # writes amp_discriminator.png
    python examples/amp_discriminator.py --quick    # a few seconds, learns nothing

Needs `pip install 'ostinato[demo]'`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from ostinato.compat.isaacgymenvs import ReplayBuffer

ENVS, STEPS = 48, 64
"""Parallel environments, and steps of each per iteration."""
EPISODE = 200
BATCH = 512
GOAL = 0.0
"""Energy of the demonstrated motion: that of a pendulum at rest at the horizontal."""
DISCOUNT, TRACE, CLIP = 0.9, 0.9, 0.2


class Pendulums:
    """Several environments of Pendulum-v1; episodes end after a fixed number of steps."""

    def __init__(self, count: int, seed: int) -> None:
        # without wrappers a step takes half the time; here they would only count steps
        self._envs = [gymnasium.make("Pendulum-v1").unwrapped for _ in range(count)]
        self.now = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self._envs)])
        self._steps = 0

    def step(self, torques: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], bool]:
        """Apply a torque to each; return the next observations, and whether all episodes ended."""
        after = np.stack([env.step(torque)[0] for env, torque in zip(self._envs, torques[:, None], strict=True)])
        self._steps += 1
        over = self._steps % EPISODE == 0
        self.now = np.stack([env.reset()[0] for env in self._envs]) if over else after
        return after, over


def energy(seen: Tensor) -> Tensor:
    """Energy of observations (cos, sin, speed) `[..., 3]`, over the moment of inertia: -15 hanging, 15 upright."""
    return 0.5 * seen[..., 2] ** 2 + 15 * seen[..., 0]


def features(seen: Tensor) -> Tensor:
    """Scale observations to about one."""
    return seen * torch.tensor([1.0, 1.0, 0.2])


def demonstrate(episodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Swing by energy control (Astrom and Furuta 2000); return transitions `[n, 6]` and observations `[T, E, 3]`."""
    envs = Pendulums(episodes, seed)
    seen = []
    for _ in range(EPISODE):
        now = torch.from_numpy(envs.now)
        torque = ((GOAL - energy(now)) * now[:, 2]).clamp(-2, 2)
        after, _ = envs.step(torque.numpy())
        seen.append((now, torch.from_numpy(after)))
    transitions = torch.cat([torch.cat((features(now), features(after)), 1) for now, after in seen])
    return transitions, torch.stack([now for now, _ in seen])


def network(inputs: int, outputs: int = 1) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def parts(rows: int, size: int) -> list[Tensor]:
    """Shuffle the row indices and split them into minibatches."""
    order = torch.randperm(rows)
    return [order[start : start + size] for start in range(0, rows, size)]


class Rollout(NamedTuple):
    """Transitions of the agent, all `[T, E, ...]`."""

    seen: Tensor
    after: Tensor
    action: Tensor
    log_prob: Tensor
    over: Tensor

    @property
    def transitions(self) -> Tensor:
        """Inputs of the discriminator, `[T * E, 6]`."""
        return torch.cat((features(self.seen), features(self.after)), -1).flatten(0, 1)


class Agent:
    """A Gaussian policy over torques in units of 2, and a value function."""

    def __init__(self) -> None:
        self.mean, self.value = network(3), network(3)
        self.log_std = nn.Parameter(torch.tensor(-0.5))
        self._optimizer = torch.optim.Adam([*self.mean.parameters(), *self.value.parameters(), self.log_std], lr=1e-3)

    def log_prob(self, seen: Tensor, action: Tensor) -> Tensor:
        """Return the log-density of actions, up to a constant."""
        distance = (action - self.mean(features(seen)).squeeze(-1)) / self.log_std.exp()
        density: Tensor = -0.5 * distance**2 - self.log_std
        return density

    @torch.no_grad()
    def act(self, envs: Pendulums, steps: int) -> Rollout:
        """Collect `steps` steps."""
        rows = []
        for _ in range(steps):
            seen = torch.from_numpy(envs.now)
            mean = self.mean(features(seen)).squeeze(-1)
            action = mean + self.log_std.exp() * torch.randn(len(mean))
            after, over = envs.step(2 * action.clamp(-1, 1).numpy())
            rows.append((seen, torch.from_numpy(after), action, self.log_prob(seen, action), torch.tensor(over)))
        return Rollout(*(torch.stack(column) for column in zip(*rows, strict=True)))

    def learn(self, rollout: Rollout, reward: Tensor) -> None:
        """Update policy and value function with PPO and generalized advantage estimation."""
        with torch.no_grad():
            value, following = (self.value(features(x)).squeeze(-1) for x in (rollout.seen, rollout.after))
            advantage, carried = torch.empty_like(reward), torch.zeros(reward.shape[1])
            for t in reversed(range(len(reward))):
                surprise = reward[t] + DISCOUNT * following[t] - value[t]  # episodes are only truncated: bootstrap
                carried = surprise + DISCOUNT * TRACE * carried * ~rollout.over[t]
                advantage[t] = carried
            target = (advantage + value).flatten()
        seen, action, before = (x.flatten(0, 1) for x in (rollout.seen, rollout.action, rollout.log_prob))
        weight = ((advantage - advantage.mean()) / (advantage.std() + 1e-6)).flatten()
        for _ in range(4):
            for part in parts(len(seen), 768):
                ratio = (self.log_prob(seen[part], action[part]) - before[part]).exp()
                gain = torch.min(ratio * weight[part], ratio.clamp(1 - CLIP, 1 + CLIP) * weight[part])
                error = functional.mse_loss(self.value(features(seen[part])).squeeze(-1), target[part])
                self._optimizer.zero_grad()
                torch.autograd.backward(0.5 * error - gain.mean())
                self._optimizer.step()


class Discriminator:
    """Scores transitions: 1 for demonstrations, -1 for the agent's (least squares, eq. 6)."""

    def __init__(self) -> None:
        self.score = network(6)
        self._optimizer = torch.optim.Adam(self.score.parameters(), lr=2e-3)

    @torch.no_grad()
    def reward(self, transitions: Tensor) -> Tensor:
        """Return the style reward in [0, 1] (eq. 7)."""
        score: Tensor = self.score(transitions).squeeze(-1)
        return (1 - 0.25 * (score - 1) ** 2).clamp(min=0)

    def learn(self, shown: Tensor, done: Tensor) -> float:
        """Take a gradient step; return the accuracy before it."""
        shown = shown.clone().requires_grad_()
        real, fake = self.score(shown).squeeze(-1), self.score(done).squeeze(-1)
        (slope,) = torch.autograd.grad(real.sum(), shown, create_graph=True)
        loss = ((real - 1) ** 2).mean() + ((fake + 1) ** 2).mean() + 0.5 * (slope**2).sum(-1).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return (torch.cat((real > 0, fake < 0)).float().mean()).item()


class Result(NamedTuple):
    """Result of one training run."""

    title: str
    accuracy: list[float]
    gaps: list[tuple[int, float]]
    """Pairs of iteration and distance from the demonstrations."""
    motion: tuple[Tensor, Tensor]
    """Observations `[T, E, 3]` before and after training."""


def gap(seen: Tensor, shown: Tensor) -> float:
    """Earth mover's distance between the energies of two motions in the second half of their episodes."""
    quantiles = torch.linspace(0, 1, 201)
    one, other = (energy(x[EPISODE // 2 :]).flatten().quantile(quantiles) for x in (seen, shown))
    return (one - other).abs().mean().item()


def train(title: str, shown: Tensor, motion: Tensor, *, iterations: int, seed: int, replay: bool) -> Result:
    """Train an agent with the discriminator as reward; `replay` adds earlier transitions of the agent."""
    torch.manual_seed(seed)
    agent, discriminator = Agent(), Discriminator()
    envs, judged = Pendulums(ENVS, seed), Pendulums(16, seed + 10_000)
    past = ReplayBuffer(buffer_size=100_000, device=torch.device("cpu"))
    before = after = agent.act(judged, EPISODE).seen
    accuracy, gaps, start = [], [(0, gap(before, motion))], time.perf_counter()
    for iteration in range(1, iterations + 1):
        rollout = agent.act(envs, STEPS)
        done = rollout.transitions
        past.store({"amp_obs": done})
        told = []
        for part in parts(len(done), BATCH):
            fake = done[part]
            if replay:
                half = len(part) // 2
                fake = torch.cat((fake[:half], past.sample(len(part) - half)["amp_obs"]))
            told.append(discriminator.learn(shown[torch.randint(len(shown), (BATCH,))], fake))
        agent.learn(rollout, discriminator.reward(done).view(STEPS, ENVS))
        accuracy.append(sum(told) / len(told))
        if iteration % 10 == 0 or iteration == iterations:
            after = agent.act(judged, EPISODE).seen
            gaps.append((iteration, gap(after, motion)))
            speed = iteration * len(done) / (time.perf_counter() - start)
            print(
                f"{title}: {iteration * len(done):7,} steps, discriminator accuracy {accuracy[-1]:.2f}, "
                f"gap {gaps[-1][1]:5.2f}, {speed:6,.0f} steps/s",
                flush=True,
            )
    return Result(title, accuracy, gaps, (before, after))


def draw(path: Path, motion: Tensor, results: list[Result]) -> None:
    """Plot the states in the second half of the episodes, and the training curves."""
    figure = Figure(figsize=(10, 5.8), layout="constrained")
    axes = figure.subplots(2, 3)
    kept = results[0]
    panels = {
        "demonstrations": motion,
        "agent before training": kept.motion[0],
        f"agent, {kept.title}": kept.motion[1],
        f"agent, {results[1].title}": results[1].motion[1],
    }
    for axis, (title, seen) in zip(axes.flat, panels.items(), strict=False):
        late = seen[EPISODE // 2 :].flatten(0, 1)
        hanging = torch.atan2(-late[:, 1], -late[:, 0]).rad2deg()
        axis.scatter(hanging, late[:, 2], s=2, alpha=0.3, color="#00795C" if seen is motion else "#0072B2")
        axis.set(title=title, xlabel="angle from hanging [degrees]", ylabel="speed [rad/s]")
        axis.set(xlim=(-180, 180), ylim=(-8.5, 8.5))
    for result, color in zip(results, ("#0072B2", "#B36B00"), strict=True):
        axes[1, 1].plot(*zip(*result.gaps, strict=True), marker=".", color=color, label=result.title)
        axes[1, 2].plot(range(1, len(result.accuracy) + 1), result.accuracy, color=color, label=result.title)
    axes[1, 1].set(title="distance from the demonstrations", xlabel="iteration", ylabel="difference in energy")
    axes[1, 1].set(ylim=(0, None))
    axes[1, 2].set(title="discriminator", xlabel="iteration", ylabel="accuracy", ylim=(0.4, 1))
    axes[1, 2].axhline(0.5, color="grey", linewidth=0.8)
    for axis in axes[1, 1:]:
        axis.legend()
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Train with and without the replay buffer, and print and plot the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80 * ENVS * STEPS, help="environment steps of each training")
    parser.add_argument("--seed", type=int, default=0, help="seed of demonstrations, weights and batches")
    parser.add_argument("--quick", action="store_true", help="one iteration, learns nothing")
    parser.add_argument("--picture", type=Path, default=Path("amp_discriminator.png"), help="where to write it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the networks are small: more threads are slower
    iterations = 1 if given.quick else max(1, given.steps // (ENVS * STEPS))
    print("recording demonstrations", flush=True)
    shown, motion = demonstrate(4 if given.quick else 24, given.seed + 1)
    results = [
        train(title, shown, motion, iterations=iterations, seed=given.seed, replay=replay)
        for title, replay in (("with replay", True), ("without replay", False))
    ]
    for result in results:
        first, last, told = result.gaps[0][1], result.gaps[-1][1], result.accuracy[-1]
        print(f"{result.title}: gap to the demonstrations {first:.2f} -> {last:.2f}, discriminator accuracy {told:.2f}")
    draw(given.picture, motion, results)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
