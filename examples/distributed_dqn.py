"""Distributed DQN on CartPole-v1: Ray actors collect while one learner trains on prioritized batches from shards.

Each actor steps its own environment and writes to one shard. The learner samples prioritized batches from all shards,
prefetches the next ones, and regularly sends its weights to the actors. A rate limiter enforces two new rows per
update.

    python examples/distributed_dqn.py            # writes distributed_dqn.png
    python examples/distributed_dqn.py --quick    # a few updates, learns nothing

Needs `pip install 'ostinato[demo,ray]'`.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import ray
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from ostinato import LazyTensorStorage, PrioritizedSampler, RateLimiter, ShardedReplayBuffer

GAMMA, LONGEST, SOLVED = 0.99, 500, 475
ROWS = 64
"""Steps per write of a collector."""
SCALE = torch.tensor([1.2, 1.0, 0.105, 1.0])
"""Half of the largest positions and angles of a good episode, and a third of the speeds and rates."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    collectors: int = 2
    shards: int = 2
    capacity: int = 20_000
    """Rows of each shard."""
    batch: int = 128
    updates: int = 8_000
    """Maximum number of updates; a run ends earlier when the greedy policy has solved the task twice in a row."""
    play_every: int = 500
    warmup: int = 1_000
    """Rows before the first update."""
    rows_per_update: float = 2.0
    """Ratio of the rate limiter: collectors and learner wait for each other."""
    send_every: int = 50
    """Updates between two transfers of the weights to the collectors."""
    seed: int = 0


class Moment(NamedTuple):
    """One line of the progress."""

    update: int
    collecting: float
    """Mean return of the collectors' last 20 episodes."""
    greedy: float
    """Mean return of the greedy policy."""
    sampled: float
    """Rows sampled per second, from the first update on."""
    collected: float
    """Rows written per second."""

    def show(self) -> None:
        """Print it."""
        print(
            f"update {self.update:5,}: return {self.collecting:3.0f} while collecting, {self.greedy:3.0f} greedy, "
            f"{self.sampled:7,.0f} rows/s sampled, {self.collected:5,.0f} rows/s collected",
            flush=True,
        )


def network() -> nn.Sequential:
    """Return a network that scores both actions of scaled observations."""
    return nn.Sequential(nn.Linear(4, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))


class Collector:
    """Collects episodes and writes every step to its shard; waits where the rate limiter requires it."""

    def __init__(self, buffer: ShardedReplayBuffer, seed: int) -> None:
        torch.set_num_threads(1)
        self.buffer = buffer
        self.env = gymnasium.make("CartPole-v1")
        self.network = network()
        self.chance = np.random.default_rng(seed)
        self.observation, _ = self.env.reset(seed=seed)
        self.epsilon, self.total = 1.0, 0.0
        self.returns: list[float] = []

    def run(self) -> None:
        """Collect until the actor ends."""
        while True:
            rows = [self.step() for _ in range(ROWS)]
            names = ("observation", "action", "reward", "following", "terminated")
            columns = (torch.from_numpy(np.asarray(column)) for column in zip(*rows, strict=True))
            self.buffer.extend(dict(zip(names, columns, strict=True)))

    def follow(self, weights: dict[str, Tensor], epsilon: float) -> list[float]:
        """Load the learner's weights; return the returns of the episodes completed since the last call."""
        self.network.load_state_dict(weights)
        self.epsilon = epsilon
        returns, self.returns = self.returns, []
        return returns

    def step(self) -> tuple[Any, ...]:
        """Take one environment step and return it as a row."""
        before, action = self.observation, self.act()
        self.observation, reward, terminated, truncated, _ = self.env.step(action)
        row = (before, action, float(reward), self.observation, terminated)
        self.total += float(reward)
        if terminated or truncated:
            self.returns.append(self.total)
            self.observation, _ = self.env.reset()
            self.total = 0.0
        return row

    def act(self) -> int:
        """Return an epsilon-greedy action."""
        if self.chance.random() < self.epsilon:
            return int(self.chance.integers(2))
        with torch.inference_mode():
            return int(self.network(torch.from_numpy(self.observation) / SCALE).argmax())


class Learner:
    """Double DQN with importance weights."""

    def __init__(self) -> None:
        self.network, self.target = network(), network()
        self.target.load_state_dict(self.network.state_dict())
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3, eps=1e-3)
        self.best, self.best_return, self.latest = self.target, 0.0, 0.0

    def play(self) -> bool:
        """Evaluate the greedy policy and keep the best one so far; return whether it solves the task."""
        self.latest = play(self.target, 5, 10_000)
        if self.latest >= self.best_return:
            self.best, self.best_return = copy.deepcopy(self.target), self.latest
        return self.latest >= SOLVED

    def learn(self, batch: dict[str, Tensor], weights: Tensor, done: float) -> Tensor:
        """Take a gradient step; return the temporal-difference errors."""
        following = batch["following"] / SCALE
        with torch.no_grad():
            choice = self.network(following).argmax(1, keepdim=True)
            future = self.target(following).gather(1, choice).squeeze(1)
            goal = 0.1 * batch["reward"].float() + GAMMA * future.masked_fill(batch["terminated"], 0.0)
        value = self.network(batch["observation"] / SCALE).gather(1, batch["action"][:, None]).squeeze(1)
        loss = (weights * functional.smooth_l1_loss(value, goal, reduction="none")).mean()
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * (1.0 - 0.9 * done)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        with torch.no_grad():
            for slow, learned in zip(self.target.parameters(), self.network.parameters(), strict=True):
                slow.lerp_(learned, 0.01)
        errors: Tensor = (goal - value.detach()).abs()
        return errors


def play(policy: nn.Module, episodes: int, seed: int) -> float:
    """Return the mean return of greedy episodes."""
    env = gymnasium.make("CartPole-v1")
    total = 0.0
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        over = False
        while not over:
            with torch.inference_mode():
                action = int(policy(torch.from_numpy(observation) / SCALE).argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            total += float(reward)
    return total / episodes


def make_buffer(settings: Settings) -> ShardedReplayBuffer:
    """Return the sharded buffer; two batches are prefetched."""
    ratio = settings.batch / settings.rows_per_update
    return ShardedReplayBuffer(
        settings.shards,
        storage=partial(LazyTensorStorage, settings.capacity),
        sampler=partial(PrioritizedSampler, settings.capacity, 0.6, 0.4, 1e-3),
        rate_limiter=RateLimiter(
            samples_per_insert=ratio,
            error_buffer=ratio * 2 * ROWS * settings.collectors,
            min_size_to_sample=settings.warmup,
        ),
        batch_size=settings.batch,
        prefetch=2,
    )


def start(buffer: ShardedReplayBuffer, settings: Settings, learner: Learner) -> tuple[list[Any], list[Any]]:
    """Start the collectors with the learner's weights; return their actors and running calls."""
    kind: Any = ray.remote(Collector)
    actors = [
        kind.options(num_cpus=0, max_concurrency=2).remote(buffer, settings.seed + number)
        for number in range(settings.collectors)
    ]
    print("starting the collectors", flush=True)
    weights = learner.network.state_dict()
    ray.get([actor.follow.remote(weights, 1.0) for actor in actors])  # waits until their processes answer
    return actors, [actor.run.remote() for actor in actors]


def learn(settings: Settings, buffer: ShardedReplayBuffer, learner: Learner, actors: list[Any]) -> list[Moment]:
    """Train while actors collect, and print speed and returns."""
    moments: list[Moment] = []
    returns: list[float] = [0.0]
    asked: list[Any] = []
    solved = 0
    batch, info = buffer.sample(return_info=True)  # waits until there are enough rows
    print(f"{len(buffer):,} rows collected, learning begins", flush=True)
    begun, rows = time.perf_counter(), buffer.write_count
    for update in range(1, settings.updates + 1):
        errors = learner.learn(batch, info["priority_weight"], update / settings.updates)
        buffer.update_priority(info, errors)
        if update % settings.send_every == 1:
            returns += [one for found in ray.get(asked) for one in found]
            weights, epsilon = ray.put(learner.network.state_dict()), max(0.05, 1.0 - update / 1500)
            asked = [actor.follow.remote(weights, epsilon) for actor in actors]
        if update % min(settings.play_every, settings.updates) == 0:
            solved = solved + 1 if learner.play() else 0
            elapsed = time.perf_counter() - begun
            sampled, collected = settings.batch * update / elapsed, (buffer.write_count - rows) / elapsed
            moments.append(Moment(update, float(np.mean(returns[-20:])), learner.latest, sampled, collected))
            moments[-1].show()
            if solved == 2:
                break
        batch, info = buffer.sample(return_info=True)
    return moments


def train(settings: Settings) -> list[Moment]:
    """Collect and train, print the counts of the buffer and the final return."""
    print("starting the shards", flush=True)
    buffer, learner = make_buffer(settings), Learner()
    actors, running = start(buffer, settings, learner)
    moments = learn(settings, buffer, learner, actors)
    stats = buffer.stats()
    for actor, call in zip(actors, running, strict=True):
        ray.cancel(call)
        ray.kill(actor)
    ray.wait(running, num_returns=len(running), timeout=30)
    buffer.close()
    print(
        f"{stats.rows_written:,} rows written, {stats.rows_drawn:,} drawn, {stats.draws_per_insert:.1f} for each; "
        f"{stats.stale_updates:,} updates were stale"
    )
    print(f"return of the greedy policy, mean of 10 episodes: {play(learner.best, 10, 20_000):.0f} of {LONGEST}")
    return moments


def draw(path: Path, moments: list[Moment]) -> None:
    """Plot returns and speeds by the number of updates."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    updates = [moment.update for moment in moments]
    left.plot(updates, [moment.greedy for moment in moments], ".-", color="#0072B2", label="greedy policy")
    left.plot(updates, [moment.collecting for moment in moments], ".-", color="#B36B00", label="collectors, exploring")
    left.axhline(SOLVED, color="grey", linestyle="--", linewidth=0.8, label="solved")
    left.set(xlabel="update", ylabel="mean return", title="CartPole-v1", ylim=(0, 1.04 * LONGEST))
    right.plot(updates, [moment.sampled for moment in moments], ".-", color="#0072B2", label="sampled from the shards")
    right.plot(updates, [moment.collected for moment in moments], ".-", color="#B36B00", label="written by the actors")
    right.set(xlabel="update", ylabel="rows per second", yscale="log", title="speed")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectors", type=int, default=2, help="actors that collect (default 2)")
    parser.add_argument("--shards", type=int, default=2, help="actors that hold the buffer (default 2)")
    parser.add_argument("--steps", type=int, default=Settings.updates, help="most updates of the learner")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and environments")
    parser.add_argument("--quick", action="store_true", help="40 updates, learns nothing")
    parser.add_argument("--picture", type=Path, default=Path("distributed_dqn.png"), help="where to write it")
    given = parser.parse_args(arguments)
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    print("starting Ray", flush=True)
    ray.init(include_dashboard=False, logging_level=40, log_to_driver=False)
    settings = Settings(given.collectors, given.shards, updates=given.steps, seed=given.seed)
    draw(given.picture, train(replace(settings, updates=40, warmup=256) if given.quick else settings))
    print(f"picture: {given.picture}")
    ray.shutdown()


if __name__ == "__main__":
    main()
