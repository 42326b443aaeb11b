"""Bit flipping: with hindsight a DQN learns a task whose reward random exploration hardly ever finds.

The state is `n` bits, an action flips one of them, and the reward is -1 until all bits equal the goal
(Andrychowicz et al. 2017, section 3.1). A random policy with 15 bits succeeds in one of two thousand episodes.
`Hindsight` replaces the goal of most drawn rows by one that was achieved later in the same episode, so every
episode has rewards to learn from.

Several environments run in parallel; `VectorEnvRecorder` writes what they return: each entry of their dict observations
is a field of its own, `achieved_goal` and `next_achieved_goal`, `desired_goal` and `next_desired_goal`, as
`Hindsight` expects them.

    python examples/hindsight_bit_flip.py            # three seeds, with and without; writes hindsight_bit_flip.png
    python examples/hindsight_bit_flip.py --quick    # a few seconds, few bits

Needs `pip install 'ostinato[viz]'`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ostinato import Hindsight, LazyTensorStorage, ReplayBuffer, VectorEnvRecorder

GAMMA = 0.98
Batch = dict[str, Tensor]
Curve = list[tuple[int, float]]
"""Episodes played, and the fraction of new goals that the greedy policy reaches."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    bits: int = 15
    envs: int = 16
    """Parallel environments."""
    steps: int = 14_400
    """Steps in all environments together."""
    updates: int = 40
    """Gradient steps after each episode of all environments."""
    batch: int = 128
    explore: float = 0.2
    """Share of random actions."""
    seed: int = 0


def reached(state: Tensor, goal: Tensor) -> Tensor:
    """Whether all bits of `[..., n]` equal the goal."""
    return (state == goal).all(-1)


def reward_of(batch: Batch) -> Tensor:
    """Return the reward of rows for their current goals: 0 if the goal is reached, else -1."""
    return reached(batch["next_achieved_goal"], batch["desired_goal"]).float() - 1.0


class BitFlip:
    """`envs` environments of `n` bits; the caller resets ended episodes."""

    def __init__(self, settings: Settings) -> None:
        self._shape = (settings.envs, settings.bits)
        self._generator = torch.Generator().manual_seed(settings.seed)
        self.state, self.goal = self._bits(), self._bits()
        self._steps = torch.zeros(settings.envs, dtype=torch.int64)

    def _bits(self) -> Tensor:
        return torch.randint(0, 2, self._shape, generator=self._generator).float()

    def see(self) -> Batch:
        """Return the observation, a dict of `[envs, n]`."""
        return {"achieved_goal": self.state, "desired_goal": self.goal}

    def reset(self, which: Tensor) -> Batch:
        """Begin new episodes in the environments of a mask, `[envs]`."""
        self.state = torch.where(which[:, None], self._bits(), self.state)
        self.goal = torch.where(which[:, None], self._bits(), self.goal)
        self._steps = self._steps.masked_fill(which, 0)
        return self.see()

    def step(self, action: Tensor) -> tuple[Batch, Tensor, Tensor, Tensor]:
        """Flip one bit in each; return observation, reward, terminated and truncated."""
        self.state = (self.state - nn.functional.one_hot(action, self._shape[1])).abs()
        self._steps = self._steps + 1
        terminated = reached(self.state, self.goal)
        truncated = (self._steps >= self._shape[1]) & ~terminated
        return self.see(), terminated.float() - 1.0, terminated, truncated


class Learner:
    """DQN: values of all actions, given bits and goal."""

    def __init__(self, settings: Settings) -> None:
        self._network, self._target = (
            nn.Sequential(nn.Linear(2 * settings.bits, 256), nn.ReLU(), nn.Linear(256, settings.bits)) for _ in range(2)
        )
        self._target.load_state_dict(self._network.state_dict())
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-3)

    @torch.no_grad()
    def act(self, seen: Batch) -> Tensor:
        """Return the greedy actions `[B]`."""
        values: Tensor = self._network(torch.cat([seen["achieved_goal"], seen["desired_goal"]], -1))
        return values.argmax(-1)

    def learn(self, batch: Batch) -> None:
        """Take one gradient step; a transition is terminal if it reaches its goal, original or replaced."""
        with torch.no_grad():
            after = torch.cat([batch["next_achieved_goal"], batch["desired_goal"]], -1)
            future = self._target(after).amax(-1).masked_fill(batch["reward"] == 0.0, 0.0)
            goal = (batch["reward"] + GAMMA * future).clamp(min=-1.0 / (1.0 - GAMMA), max=0.0)
        values = self._network(torch.cat([batch["achieved_goal"], batch["desired_goal"]], -1))
        loss = nn.functional.smooth_l1_loss(values.gather(-1, batch["action"][:, None]).squeeze(-1), goal)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    @torch.no_grad()
    def follow(self) -> None:
        """Move the target network toward the trained one."""
        for slow, fast in zip(self._target.parameters(), self._network.parameters(), strict=True):
            slow.lerp_(fast, 0.05)


def make_buffer(settings: Settings, *, hindsight: bool) -> ReplayBuffer:
    """Return a buffer `[environments, time]`, with or without hindsight."""
    return ReplayBuffer(
        storage=LazyTensorStorage(100_000, ndim=2),
        sample_unit=Hindsight(reward_of, her_ratio=0.8, strategy="future") if hindsight else None,
        batch_size=settings.batch,
        generator=torch.Generator().manual_seed(settings.seed),
    )


def play(
    settings: Settings, env: BitFlip, learner: Learner, steps: VectorEnvRecorder, generator: torch.Generator
) -> None:
    """Take `n` steps in every environment and store them."""
    for _ in range(settings.bits):
        random = torch.randint(0, settings.bits, (settings.envs,), generator=generator)
        explore = torch.rand(settings.envs, generator=generator) < settings.explore
        action = torch.where(explore, random, learner.act(env.see()))
        seen, reward, terminated, truncated = env.step(action)
        steps.add_step(action, seen, reward, terminated, truncated)
        over = terminated | truncated
        if over.any():
            steps.reset(env.reset(over), over)


def success(settings: Settings, learner: Learner) -> float:
    """Return the fraction of 500 new goals that the greedy policy reaches."""
    env = BitFlip(Settings(bits=settings.bits, envs=500, seed=settings.seed + 1_000))
    done = reached(env.state, env.goal)
    for _ in range(settings.bits):
        done |= env.step(learner.act(env.see()))[2]
    return float(done.float().mean())


def train(settings: Settings, *, hindsight: bool) -> Curve:
    """Train from scratch, and evaluate 20 times."""
    torch.manual_seed(settings.seed)  # the networks' first weights
    env, learner = BitFlip(settings), Learner(settings)
    rb, generator = make_buffer(settings, hindsight=hindsight), torch.Generator().manual_seed(settings.seed)
    steps, start = VectorEnvRecorder(rb, settings.envs, "DISABLED"), time.perf_counter()
    steps.reset(env.see())
    curve = [(0, success(settings, learner))]
    cycles = max(1, settings.steps // (settings.bits * settings.envs))
    for cycle in range(1, cycles + 1):
        play(settings, env, learner, steps, generator)
        for _ in range(settings.updates):
            learner.learn(rb.sample())
            learner.follow()
        if cycle % max(1, cycles // 20) == 0 or cycle == cycles:
            curve.append((cycle * settings.envs, success(settings, learner)))
        if cycle % max(1, cycles // 4) == 0:
            speed = cycle * settings.envs * settings.bits / (time.perf_counter() - start)
            print(
                f"{'with' if hindsight else 'without'} Hindsight, seed {settings.seed}: {curve[-1][0]:5,} episodes, "
                f"{curve[-1][1]:4.0%} of new goals reached, {speed:5,.0f} steps/s",
                flush=True,
            )
    return curve


def draw(path: Path, bits: int, curves: dict[str, list[Curve]]) -> None:
    """Plot the fraction of goals reached by the number of episodes: each seed, and the mean."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    for (name, runs), color in zip(curves.items(), ("#0072B2", "#B36B00"), strict=True):
        for run in runs:
            axes.plot(*zip(*run, strict=True), color=color, alpha=0.35, linewidth=1)
        mean = [sum(rates) / len(rates) for rates in zip(*([rate for _, rate in run] for run in runs), strict=True)]
        axes.plot([episodes for episodes, _ in runs[0]], mean, color=color, linewidth=2, label=name)
    axes.set(xlabel="episodes", ylabel="new goals reached", ylim=(-0.03, 1.03), title=f"Bit flipping, {bits} bits")
    axes.legend(loc="center right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def run(settings: Settings, seeds: int) -> dict[str, list[Curve]]:
    """Train with and without `Hindsight`, each with several seeds."""
    print(f"{settings.bits} bits, {2**settings.bits:,} goals, {settings.bits} flips to get there", flush=True)
    return {
        name: [train(replace(settings, seed=settings.seed + i), hindsight=hindsight) for i in range(seeds)]
        for name, hindsight in (("with Hindsight", True), ("without Hindsight", False))
    }


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=Settings.bits, help="bits of state and goal (default 15)")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="environment steps of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--quick", action="store_true", help="a short run with few bits, one seed")
    parser.add_argument("--picture", type=Path, default=Path("hindsight_bit_flip.png"), help="where to write it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more threads do not speed up networks this small
    settings, seeds = Settings(bits=given.bits, steps=given.steps, seed=given.seed), given.seeds
    if given.quick:
        settings, seeds = Settings(bits=6, envs=4, steps=72, updates=2, seed=given.seed), 1
    curves = run(settings, seeds)
    for name, runs in curves.items():
        print(f"{name}: {sum(run[-1][1] for run in runs) / seeds:.0%} of new goals reached, mean of {seeds} seeds")
    draw(given.picture, settings.bits, curves)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
