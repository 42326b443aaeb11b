"""A learner in the manner of FastTD3 swings sixteen pendulums up, with n-step returns from its replay buffer.

FastTD3 (Seo et al. 2025) trains TD3 with many environments, large batches and n-step returns. Its buffer stores each
observation twice and joins the newest rows to the oldest when it is full; `ostinato.compat.fasttd3` does neither, with
the same methods. The learner here has two critics and delayed updates of the actor, without a distributional critic.

    python examples/fasttd3_pendulum.py                     # writes fasttd3_pendulum.png
    python examples/fasttd3_pendulum.py --quick             # a few seconds, learns nothing

Needs `pip install 'ostinato[tensordict,viz]'`.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import Tensor, nn

from ostinato.compat.fasttd3 import SimpleReplayBuffer

NUM_ENVS, LIMIT, GAMMA, N_STEPS = 16, 200, 0.97, 3
BATCH = 16
"""Rows of each environment in a batch."""


class Pendulums:
    """The pendulum of Gymnasium, `NUM_ENVS` at once; episodes end by their time limit alone."""

    def __init__(self) -> None:
        self.angle, self.speed = torch.zeros(NUM_ENVS), torch.zeros(NUM_ENVS)
        self.steps = torch.arange(NUM_ENVS) * LIMIT // NUM_ENVS  # so that not all episodes end at once
        self.reset(torch.ones(NUM_ENVS, dtype=torch.bool))

    def reset(self, which: Tensor) -> None:
        """Put some pendulums somewhere."""
        self.angle = torch.where(which, (torch.rand(NUM_ENVS) * 2 - 1) * torch.pi, self.angle)
        self.speed = torch.where(which, torch.rand(NUM_ENVS) * 2 - 1, self.speed)

    def observe(self) -> Tensor:
        """Return observations `[NUM_ENVS, 3]`."""
        return torch.stack((self.angle.cos(), self.angle.sin(), self.speed), 1)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the observations after a step, which are the final ones of an episode, rewards and truncations."""
        torque = 2 * action.squeeze(1).clamp(-1, 1)
        angle = (self.angle + torch.pi) % (2 * torch.pi) - torch.pi
        reward = -(angle**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed = (self.speed + (15 * self.angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
        self.angle = self.angle + self.speed * 0.05
        self.steps = self.steps + 1
        after, late = self.observe(), self.steps >= LIMIT
        self.reset(late)
        self.steps = torch.where(late, 0, self.steps)
        return after, reward, late


def network(inputs: int, *last: nn.Module) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), *last)


class Learner:
    """TD3 (Fujimoto et al. 2018) on n-step transitions."""

    def __init__(self) -> None:
        self.actor, self.critics = network(3, nn.Tanh()), nn.ModuleList([network(4), network(4)])
        self.target_actor, self.target_critics = deepcopy(self.actor), deepcopy(self.critics)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), 1e-3)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), 1e-3)
        self.updates = 0

    def update(self, batch: TensorDict) -> None:
        """Take one gradient step."""
        now, after, action = batch["observations"], batch["next"], batch["actions"]
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            following = (self.target_actor(after["observations"]) + noise).clamp(-1, 1)
            both = torch.cat((after["observations"], following), 1)
            value = torch.minimum(*(critic(both) for critic in self.target_critics)).squeeze(1)
            bootstrap = ((after["dones"] == 0) | (after["truncations"] == 1)).float()
            target = after["rewards"] + bootstrap * GAMMA ** after["effective_n_steps"] * value
        pairs = torch.cat((now, action), 1)
        losses = [nn.functional.mse_loss(critic(pairs).squeeze(1), target) for critic in self.critics]
        self.step(self.critic_optimizer, torch.stack(losses).sum())
        self.updates += 1
        if self.updates % 2 == 0:
            self.step(self.actor_optimizer, -self.critics[0](torch.cat((now, self.actor(now)), 1)).mean())
            for target_net, net in ((self.target_actor, self.actor), (self.target_critics, self.critics)):
                for old, new in zip(target_net.parameters(), net.parameters(), strict=True):
                    old.data.lerp_(new.data, 0.01)

    @staticmethod
    def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Minimize a loss."""
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def evaluate(actor: nn.Module) -> float:
    """Return the mean return of one episode of each pendulum, without noise."""
    pendulums, total = Pendulums(), torch.zeros(NUM_ENVS)
    pendulums.steps.zero_()
    for _ in range(LIMIT):
        total += pendulums.step(actor(pendulums.observe()))[1]
    return float(total.mean())


def train(steps: int, seed: int) -> list[tuple[int, float]]:
    """Train, and return the environment steps and returns of evaluations."""
    torch.manual_seed(seed)
    pendulums, learner = Pendulums(), Learner()
    buffer = SimpleReplayBuffer(NUM_ENVS, 1000, 3, 1, 0, n_steps=N_STEPS, gamma=GAMMA)
    noise = torch.linspace(0.05, 0.8, NUM_ENVS).unsqueeze(1)  # another one for each environment
    curve, start, every = [(0, evaluate(learner.actor))], time.perf_counter(), max(1, steps // 10)
    for step in range(1, steps + 1):
        obs = pendulums.observe()
        with torch.no_grad():
            action = (learner.actor(obs) + noise * torch.randn_like(noise)).clamp(-1, 1)
        after, reward, late = pendulums.step(action)
        ends = {"rewards": reward, "dones": late, "truncations": late, "observations": after}
        buffer.extend(TensorDict({"observations": obs, "actions": action, "next": ends}, batch_size=[NUM_ENVS]))
        if step >= 20:
            for _ in range(2):
                learner.update(buffer.sample(BATCH))
        if step % every == 0:
            curve.append((step * NUM_ENVS, evaluate(learner.actor)))
            speed = step * NUM_ENVS / (time.perf_counter() - start)
            print(f"{curve[-1][0]:6,} steps, return {curve[-1][1]:6.0f}, {speed:5,.0f} steps/s", flush=True)
    return curve


def draw(path: Path, curve: list[tuple[int, float]]) -> None:
    """Plot the returns by the number of steps."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curve, strict=True), color="#0072B2", linewidth=2, marker="o", markersize=4)
    axes.set(xlabel="environment steps", ylabel="return of an episode")
    axes.set_title(f"{NUM_ENVS} pendulums, TD3 with {N_STEPS}-step returns")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_500, help="steps of each of the pendulums (default 1500)")
    parser.add_argument("--seed", type=int, default=0, help="seed")
    parser.add_argument("--quick", action="store_true", help="a run of a few steps")
    parser.add_argument("--picture", type=Path, default=Path("fasttd3_pendulum.png"), help="where to write it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the networks are small
    curve = train(40 if given.quick else given.steps, given.seed)
    print(f"return of an episode: {curve[0][1]:.0f} before training, {curve[-1][1]:.0f} at the end")
    draw(given.picture, curve)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
