"""DQN on CartPole-v1 with prioritized replay over shards: actors collect, one learner learns, all at the same time.

Each Ray actor plays with its own environment and writes to the shard it was given; the learner draws prioritized
batches from all shards as from one buffer, while the next ones are on their way, and sends its weights now and then.

    python examples/distributed_dqn.py            # about two minutes on two cores
    python examples/distributed_dqn.py --quick    # a look
"""

from __future__ import annotations

import argparse
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

from ostinato import LazyTensorStorage, PrioritizedSampler, ShardedReplayBuffer

GAMMA, LONGEST = 0.99, 500
SCALE = torch.tensor([2.4, 3.0, 0.21, 3.0])
"""About the largest positions, speeds, angles and rates of a good episode."""


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    collectors: int = 2
    shards: int = 2
    capacity: int = 20_000
    """Rows of each shard."""
    batch: int = 128
    updates: int = 6_000
    warmup: int = 1_000
    """Rows before the first update."""
    rows_per_update: float = 4.0
    """Collectors that are further ahead wait."""
    send_every: int = 50
    """Updates between two copies of the weights to the collectors."""
    seed: int = 0


def network() -> nn.Sequential:
    """Return a network that scores both actions of scaled observations."""
    return nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))


class Collector:
    """Plays episodes and writes every step to a shard."""

    def __init__(self, buffer: ShardedReplayBuffer, seed: int) -> None:
        torch.set_num_threads(1)
        self.buffer = buffer
        self.env = gymnasium.make("CartPole-v1")
        self.network = network()
        self.chance = np.random.default_rng(seed)
        self.observation, _ = self.env.reset(seed=seed)
        self.total = 0.0

    def collect(self, steps: int, weights: dict[str, Tensor] | None, epsilon: float) -> list[float]:
        """Play some steps, write them at once, and return the returns of the episodes that ended."""
        if weights is not None:
            self.network.load_state_dict(weights)
        rows: list[tuple[Any, ...]] = []
        returns = []
        for _ in range(steps):
            action = self.act(epsilon)
            following, reward, terminated, truncated, _ = self.env.step(action)
            rows.append((self.observation, action, float(reward), following, terminated))
            self.total += float(reward)
            self.observation = following
            if terminated or truncated:
                returns.append(self.total)
                self.observation, _ = self.env.reset()
                self.total = 0.0
        columns = [torch.from_numpy(np.asarray(column)) for column in zip(*rows, strict=True)]
        names = ("observation", "action", "reward", "following", "terminated")
        self.buffer.extend(dict(zip(names, columns, strict=True)))
        return returns

    def act(self, epsilon: float) -> int:
        """Return the best action, or any."""
        if self.chance.random() < epsilon:
            return int(self.chance.integers(2))
        with torch.inference_mode():
            return int(self.network(torch.from_numpy(self.observation) / SCALE).argmax())


class Learner:
    """Double DQN with importance weights; it sees batches, never the environment."""

    def __init__(self, updates: int) -> None:
        self.network, self.target = network(), network()
        self.target.load_state_dict(self.network.state_dict())
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3, eps=1e-3)
        self.updates = updates

    def learn(self, batch: dict[str, Tensor], weights: Tensor, done: float) -> Tensor:
        """Take a step; return the temporal-difference errors."""
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


def play(policy: nn.Module, episodes: int) -> float:
    """Return the mean return of greedy episodes."""
    env = gymnasium.make("CartPole-v1")
    total = 0.0
    for seed in range(episodes):
        observation, _ = env.reset(seed=10_000 + seed)
        over = False
        while not over:
            with torch.inference_mode():
                action = int(policy(torch.from_numpy(observation) / SCALE).argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            total += float(reward)
    return total / episodes


class Collection:
    """The collectors at work: each has one call running, unless collecting is ahead of learning."""

    def __init__(self, actors: list[Any], settings: Settings) -> None:
        self.settings = settings
        self.idle = list(actors)
        self.running: dict[Any, Any] = {}
        self.rows = 0  # asked for
        self.weights: Any = None
        self.returns: list[float] = []

    def turn(self, updates: int, *, wait: bool = False) -> None:
        """Take note of what has ended, and send idle collectors on, as far as learning allows."""
        ended, _ = ray.wait(list(self.running), timeout=None if wait else 0) if self.running else ([], [])
        for reference in ended:
            self.returns += ray.get(reference)
            self.idle.append(self.running.pop(reference))
        settings = self.settings
        while self.idle and self.rows <= settings.warmup + updates * settings.rows_per_update:
            actor = self.idle.pop(0)
            epsilon = max(0.05, 1.0 - updates / 1500)
            self.running[actor.collect.remote(64, self.weights, epsilon)] = actor
            self.rows += 64


def make_buffer(settings: Settings) -> ShardedReplayBuffer:
    """Return the shards; batches are on their way while one is learned from."""
    return ShardedReplayBuffer(
        settings.shards,
        storage=partial(LazyTensorStorage, settings.capacity),
        sampler=partial(PrioritizedSampler, settings.capacity, 0.6, 0.4, 1e-3),
        batch_size=settings.batch,
        prefetch=2,
    )


def train(settings: Settings) -> None:
    """Learn while actors collect, and print how fast and how well."""
    buffer = make_buffer(settings)
    actors = [
        ray.remote(num_cpus=0)(Collector).remote(buffer, settings.seed + number)
        for number in range(settings.collectors)
    ]
    learner, collection = Learner(settings.updates), Collection(actors, settings)
    while len(buffer) < settings.warmup:
        collection.turn(0, wait=True)
    print(f"{len(buffer):,} rows collected, learning begins")
    start, rows = time.perf_counter(), collection.rows
    for update in range(settings.updates):
        collection.turn(update)
        batch, info = buffer.sample(return_info=True)
        errors = learner.learn(batch, info["priority_weight"], update / settings.updates)
        buffer.update_priority(info, errors)
        if update % settings.send_every == 0:
            collection.weights = ray.put(learner.network.state_dict())
        if (update + 1) % max(settings.updates // 10, 1) == 0:
            elapsed = time.perf_counter() - start
            recent = float(np.mean(collection.returns[-20:]))
            print(
                f"update {update + 1:5}: return {recent:5.0f}, {settings.batch * (update + 1) / elapsed:7,.0f} rows/s "
                f"sampled, {(collection.rows - rows) / elapsed:5,.0f} rows/s collected"
            )
    stats = buffer.stats()
    print(
        f"{stats.rows_written:,} rows written, {stats.rows_drawn:,} drawn, {stats.stale_updates:,} updates were stale"
    )
    print(f"return of the greedy policy, mean of 10 episodes: {play(learner.target, 10):.0f} of {LONGEST}")
    buffer.close()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few updates alone")
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
