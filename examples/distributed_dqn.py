"""Distributed DQN on CartPole-v1: Ray actors collect while one learner trains on prioritized batches from shards.

Each actor steps its own environment and writes to one shard. The learner samples prioritized batches from all shards,
prefetches the next ones, and regularly sends its weights to the actors. A rate limiter enforces two new rows per
update.

    python examples/distributed_dqn.py            # one to three minutes on two busy cores
    python examples/distributed_dqn.py --quick    # a short run
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
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


def train(settings: Settings) -> None:
    """Train while actors collect, and print speed and returns."""
    buffer = make_buffer(settings)
    kind: Any = ray.remote(Collector)
    actors = [
        kind.options(num_cpus=0, max_concurrency=2).remote(buffer, settings.seed + number)
        for number in range(settings.collectors)
    ]
    running = [actor.run.remote() for actor in actors]
    learner = Learner()
    returns: list[float] = [0.0]
    asked: list[Any] = []
    solved = 0
    batch, info = buffer.sample(return_info=True)  # waits until there are enough rows
    print(f"{len(buffer):,} rows collected, learning begins")
    start, rows = time.perf_counter(), buffer.write_count
    for update in range(settings.updates):
        errors = learner.learn(batch, info["priority_weight"], update / settings.updates)
        buffer.update_priority(info, errors)
        if update % settings.send_every == 0:
            returns += [one for found in ray.get(asked) for one in found]
            weights, epsilon = ray.put(learner.network.state_dict()), max(0.05, 1.0 - update / 1500)
            asked = [actor.follow.remote(weights, epsilon) for actor in actors]
        if (update + 1) % min(settings.play_every, settings.updates) == 0:
            elapsed, solved = time.perf_counter() - start, learner.play() and solved + 1
            print(
                f"update {update + 1:5}: return {np.mean(returns[-20:]):3.0f} while collecting, {learner.latest:3.0f} "
                f"greedy, {settings.batch * (update + 1) / elapsed:7,.0f} rows/s sampled, "
                f"{(buffer.write_count - rows) / elapsed:5,.0f} rows/s collected"
            )
            if solved == 2:
                break
        batch, info = buffer.sample(return_info=True)
    report(buffer, learner)
    for actor, call in zip(actors, running, strict=True):
        ray.cancel(call)
        ray.kill(actor)
    ray.wait(running, num_returns=len(running), timeout=30)
    buffer.close()


def report(buffer: ShardedReplayBuffer, learner: Learner) -> None:
    """Print the counts of the buffer and the final return."""
    stats = buffer.stats()
    print(
        f"{stats.rows_written:,} rows written, {stats.rows_drawn:,} drawn, {stats.draws_per_insert:.1f} for each; "
        f"{stats.stale_updates:,} updates were stale"
    )
    print(f"return of the greedy policy, mean of 10 episodes: {play(learner.best, 10, 20_000):.0f} of {LONGEST}")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run of a few updates")
    parser.add_argument("--collectors", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    ray.init(include_dashboard=False, logging_level=40, log_to_driver=False)
    updates = {"updates": 40, "warmup": 256} if given.quick else {}
    train(Settings(collectors=given.collectors, shards=given.shards, seed=given.seed, **updates))
    ray.shutdown()


if __name__ == "__main__":
    main()
