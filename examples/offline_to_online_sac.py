"""From a dataset to one's own experience: soft actor-critic on Pendulum-v1, from a Minari dataset and live steps.

A mediocre controller with much noise records a Minari dataset on the spot. `open_dataset` makes its files the storage
of a read-only buffer, and a `ReplayBufferEnsemble` draws every batch from it and from a buffer of live steps, in an
exact ratio that follows a schedule: the dataset alone at first, then less and less of it. From the dataset alone the
agent learns little, since it overrates actions that the dataset lacks; with live steps it soon surpasses the
controller. The script also trains without the dataset, which takes longer, and plots returns and ratio of both (SAC:
Haarnoja et al. 2018; mixing: Ball et al. 2023).

    python examples/offline_to_online_sac.py            # writes offline_to_online_sac.png
    python examples/offline_to_online_sac.py --quick    # a few seconds, learns nothing

Needs `pip install 'ostinato[demo,minari]'`.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from ostinato import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, open_dataset

Batch = dict[str, Any]
DISCOUNT, POLYAK, ENTROPY = 0.98, 0.01, -1.0
SCALE = 2.0
"""Largest torque of the pendulum."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    episodes: int = 30
    """Episodes of 200 steps in the dataset."""
    pretrain: int = 1000
    """Updates on the dataset alone."""
    steps: int = 5000
    """Steps in the environment, each with one update."""
    explore: int = 400
    """First steps with random actions where there is no dataset."""
    every: int = 250
    """Steps from one evaluation to the next."""
    batch: int = 128
    seed: int = 0

    @property
    def ratio(self) -> dict[int, float]:
        """Share of the dataset by the number of batches drawn, linear in between."""
        return {self.pretrain: 1.0, self.pretrain + self.steps // 5: 0.5, self.pretrain + self.steps: 0.1}


def record(episodes: int, seed: int) -> Any:
    """Record episodes of a controller that swings the pendulum up, but neither fast nor precisely; a Minari dataset."""
    import minari
    from minari.data_collector import EpisodeBuffer

    env, random, recorded = gymnasium.make("Pendulum-v1"), np.random.default_rng(seed), []
    for episode in range(episodes):
        seen, _ = env.reset(seed=seed + episode)
        steps: dict[str, list[Any]] = {name: [] for name in ("actions", "rewards", "terminations", "truncations")}
        observations = [seen]
        while not (steps["truncations"] and steps["truncations"][-1]):
            cosine, sine, speed = seen
            energy = 0.5 * speed**2 + 15 * cosine
            near = cosine > 0.9 and abs(speed) < 3
            torque = -8 * sine - 2 * speed if near else 0.1 * speed * (15 - energy)
            torque = np.clip(torque + random.normal(0, 2), -SCALE, SCALE)
            action = np.array([torque], np.float32)
            seen, reward, terminated, truncated, _ = env.step(action)
            observations.append(seen)
            for values, value in zip(steps.values(), (action, reward, terminated, truncated), strict=True):
                values.append(value)
        recorded.append(EpisodeBuffer(id=episode, observations=observations, **steps))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that author, description and the like are missing
        return minari.create_dataset_from_buffers("pendulum/mediocre-v0", recorded, env)


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class Agent:
    """Soft actor-critic with two critics and a learned temperature."""

    def __init__(self) -> None:
        self.actor = network(3, 2)
        self.critics = nn.ModuleList([network(4, 1), network(4, 1)])
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = torch.zeros((), requires_grad=True)
        self._optimizers = [
            torch.optim.Adam(parameters, 1e-3)
            for parameters in (self.actor.parameters(), self.critics.parameters(), [self.log_temperature])
        ]

    def act(self, seen: Tensor, *, explore: bool) -> tuple[Tensor, Tensor]:
        """Return torques `[B, 1]` and the logarithms of their densities `[B]`."""
        mean, spread = self.actor(seen / torch.tensor([1.0, 1.0, 8.0])).chunk(2, -1)
        spread = spread.clamp(-5, 1).exp()
        raw = mean + spread * torch.randn_like(mean) if explore else mean
        density = -0.5 * (((raw - mean) / spread) ** 2 + np.log(2 * np.pi)) - spread.log()
        density = density - 2 * (np.log(2) - raw - functional.softplus(-2 * raw))
        return SCALE * raw.tanh(), density.sum(-1)

    @staticmethod
    def value(critics: Any, seen: Tensor, torque: Tensor) -> Tensor:
        """Return the value of each critic, `[2, B]`."""
        inputs = torch.cat([seen / torch.tensor([1.0, 1.0, 8.0]), torque / SCALE], -1)
        return torch.stack([critic(inputs).squeeze(-1) for critic in critics])

    def update(self, batch: Batch) -> None:
        """Take one gradient step on a batch."""
        seen, torque, after = batch["observation"], batch["action"], batch["next"]
        temperature = self.log_temperature.exp().detach()
        with torch.no_grad():
            then, density = self.act(after["observation"], explore=True)
            worth = self.value(self.targets, after["observation"], then).min(0).values - temperature * density
            alive = 1.0 - after["terminated"].float()  # a truncated episode would have gone on
            goal = 0.1 * after["reward"] + DISCOUNT * alive * worth
        self._step(1, (self.value(self.critics, seen, torque) - goal).pow(2).mean())
        now, density = self.act(seen, explore=True)
        self._step(0, (temperature * density - self.value(self.critics, seen, now).min(0).values).mean())
        self._step(2, -(self.log_temperature * (density.detach() + ENTROPY)).mean())
        with torch.no_grad():
            for target, critic in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(critic, POLYAK)

    def _step(self, number: int, loss: Tensor) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizers[number].step()


def evaluate(agent: Agent, envs: gymnasium.vector.SyncVectorEnv) -> float:
    """Return the mean return of one episode without noise in each of several environments, from fixed starts."""
    seen, _ = envs.reset(seed=1000)
    total = np.zeros(envs.num_envs)
    for _ in range(200):
        with torch.no_grad():
            torque, _ = agent.act(torch.as_tensor(seen), explore=False)
        seen, reward, _, _, _ = envs.step(torque.numpy())
        total += reward
    return float(total.mean())


@dataclass
class Result:
    """The course of a training."""

    title: str
    returns: list[tuple[int, float]] = field(default_factory=list)
    """Steps in the environment, and the mean return then."""
    shares: list[float] = field(default_factory=list)
    """Share of the dataset in each batch with a live step."""


def as_float(batch: Batch) -> Batch:
    """Cast rewards, which Minari keeps in double precision."""
    batch["next"]["reward"] = batch["next"]["reward"].float()
    return batch


def train(title: str, dataset: ReplayBuffer, settings: Settings, *, mix: bool) -> Result:
    """Train with a schedule of the dataset's share, or on live steps alone."""
    torch.manual_seed(settings.seed)
    agent, result = Agent(), Result(title)
    online = ReplayBuffer(storage=LazyTensorStorage(settings.steps))
    rb = ReplayBufferEnsemble(
        dataset,
        online,
        ratio=settings.ratio if mix else 0.0,
        when_empty="fill",
        source_key="source",
        transform=as_float,
        batch_size=settings.batch,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 10)
    if mix:
        print(f"{title}: {settings.pretrain:,} updates on the dataset alone", flush=True)
        for _ in range(settings.pretrain):
            agent.update(rb.sample())
    result.returns.append((0, evaluate(agent, envs)))
    live = gymnasium.make("Pendulum-v1")
    live.action_space.seed(settings.seed)
    seen, _ = live.reset(seed=settings.seed)
    start = time.perf_counter()
    for step in range(1, settings.steps + 1):
        if mix or step > settings.explore:
            with torch.no_grad():
                torque = agent.act(torch.as_tensor(seen), explore=True)[0].numpy()
        else:
            torque = live.action_space.sample()
        after, reward, terminated, truncated, _ = live.step(torque)
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        online.add({"observation": seen, "action": torque, "next": {"observation": after, "reward": reward, **flags}})
        seen = live.reset()[0] if flags["done"] else after
        batch = rb.sample()
        agent.update(batch)
        result.shares.append(float((batch["source"] == 0).float().mean()))
        if step % settings.every == 0:
            result.returns.append((step, evaluate(agent, envs)))
            share, mean, speed = result.shares[-1], result.returns[-1][1], step / (time.perf_counter() - start)
            print(
                f"{title}: {step:5,} steps, {share:3.0%} of the batch from the dataset, return {mean:5.0f}, "
                f"{speed:3.0f} steps/s",
                flush=True,
            )
    return result


def draw(path: Path, shown: float, results: list[Result]) -> None:
    """Plot the returns of both trainings, and the share of the dataset."""
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for result, color in zip(results, ("#0072B2", "#B36B00"), strict=True):
        top.plot(*zip(*result.returns, strict=True), marker=".", color=color, label=result.title)
        steps = range(1, len(result.shares) + 1)
        bottom.plot(steps, [100 * share for share in result.shares], color=color, label=result.title)
    top.axhline(shown, color="grey", linestyle="--", label="controller that recorded the dataset")
    top.set(title="Pendulum-v1, soft actor-critic", ylabel="mean return of 10 episodes")
    top.legend(loc="lower right")
    bottom.set(xlabel="steps in the environment", ylabel="dataset in batch [%]", ylim=(-5, 105))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def run(settings: Settings, picture: Path) -> None:
    """Record, train twice, and plot."""
    recorded = record(settings.episodes, settings.seed + 1)
    dataset = ReplayBuffer(storage=open_dataset(recorded))
    shown = float(dataset["next", "reward"].sum()) / settings.episodes
    print(f"dataset: {len(dataset):,} steps of {settings.episodes} episodes, mean return {shown:.0f}", flush=True)
    results = [
        train("dataset and live steps", dataset, settings, mix=True),
        train("live steps alone", dataset, settings, mix=False),
    ]
    for result in results:
        late = np.mean([mean for _, mean in result.returns[-4:]])
        better = next((str(step) for step, mean in result.returns if mean > shown), "never")
        print(f"{result.title}: better than the controller after {better} steps, return {late:.0f} at the end")
    draw(picture, shown, results)
    print(f"picture: {picture}")


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and run, with Minari's files in a folder that is removed afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Settings.steps, help="environment steps of each training")
    parser.add_argument("--seed", type=int, default=0, help="seed of dataset, weights and batches")
    parser.add_argument("--quick", action="store_true", help="a short run that learns nothing")
    parser.add_argument("--picture", type=Path, default=Path("offline_to_online_sac.png"), help="where to write it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the networks are small: more threads are slower
    settings = Settings(steps=given.steps, seed=given.seed)
    if given.quick:
        settings = Settings(seed=given.seed, episodes=2, pretrain=20, steps=100, explore=20, every=50, batch=32)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        run(settings, given.picture)


if __name__ == "__main__":
    main()
