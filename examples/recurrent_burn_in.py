"""A task that needs memory: with burn-in a recurrent learner solves it from short windows of episodes.

The first observation shows a cue, up or down. The following observations of a corridor are all the same. At its end
the learner must turn in the direction of the cue. Rows are single steps of a random policy. Windows are made by
`SequenceUnit(length, burn_in=...)`: over the `burn_in` rows the network only updates its hidden state, and it is
trained on the `length` rows after these (Kapturowski et al. 2019, section 3).

Three learners get the same rows and the same number of updates:

- recurrent, with burn-in: its hidden state at the end of the corridor contains the cue;
- recurrent, without burn-in: its windows are too short to contain both the cue and the turn;
- feed-forward: no memory.

    python examples/recurrent_burn_in.py            # three seeds of each learner; writes recurrent_burn_in.png
    python examples/recurrent_burn_in.py --quick    # a few seconds, does not solve the task

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

from ostinato import LazyTensorStorage, ReplayBuffer, SequenceUnit

GAMMA = 0.9
LENGTH = 3
"""Rows per window that are trained on: fewer than between the cue and the turn."""
Curve = list[tuple[int, float]]
"""Gradient steps, and the fraction of correct turns in new episodes."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    corridor: int = 6
    """Steps between the cue and the turn."""
    episodes: int = 2_000
    """Episodes of the random policy."""
    steps: int = 800
    """Gradient steps of each learner."""
    windows: int = 64
    """Windows per batch."""
    seed: int = 0


def cues_and_observations(settings: Settings, episodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the cue of each episode, -1 or 1, `[E]`, and observations `[E, T, 3]`: cue, corridor, turn."""
    steps = settings.corridor + 2
    cue = torch.randint(0, 2, (episodes,), generator=generator) * 2.0 - 1.0
    seen = torch.zeros(episodes, steps, 3)
    seen[:, 0, 0] = cue
    seen[:, 1:-1, 1] = 1.0
    seen[:, -1, 2] = 1.0
    return cue, seen


def random_play(settings: Settings, generator: torch.Generator) -> dict[str, Tensor]:
    """Return rows `[E * T]`: a random action, up (1) or down (0), at every step; only the last one is rewarded."""
    cue, seen = cues_and_observations(settings, settings.episodes, generator)
    episodes, steps, _ = seen.shape
    action = torch.randint(0, 2, (episodes, steps), generator=generator)
    reward, done = torch.zeros(episodes, steps), torch.zeros(episodes, steps, dtype=torch.bool)
    reward[:, -1] = torch.where(action[:, -1] == (cue > 0), 1.0, -1.0)
    done[:, -1] = True
    rows = {"observation": seen, "action": action, "reward": reward, "done": done}
    return {name: value.flatten(0, 1) for name, value in rows.items()}


def make_buffer(settings: Settings, rows: dict[str, Tensor], burn_in: int) -> ReplayBuffer:
    """Store single rows; windows are made when they are sampled."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(len(rows["done"])),
        sample_unit=SequenceUnit(LENGTH, burn_in=burn_in, bootstrap=1),
        batch_size=settings.windows,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    rb.extend(rows)
    return rb


class Memory(nn.Module):
    """Action values from the observation and, if recurrent, the hidden state."""

    def __init__(self, *, recurrent: bool) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 32) if recurrent else None
        self.plain = nn.Sequential(nn.Linear(3, 32), nn.Tanh())
        self.head = nn.Linear(32, 2)

    def step(self, seen: Tensor, state: Tensor) -> Tensor:
        """Return the next state `[B, 32]`."""
        out: Tensor = self.plain(seen) if self.cell is None else self.cell(seen, state)
        return out

    def forward(self, seen: Tensor, valid: Tensor, burn_in: int) -> Tensor:
        """Return the values `[B, T - burn_in, 2]` of windows `[B, T, 3]`; the burn-in has no gradient."""
        state = torch.zeros(seen.shape[0], 32)
        with torch.no_grad():
            for t in range(burn_in):
                state = self.step(seen[:, t], state) * valid[:, t, None]  # padding before the episode resets the state
        values = []
        for t in range(burn_in, seen.shape[1]):
            state = self.step(seen[:, t], state)
            values.append(self.head(state))
        return torch.stack(values, 1)


@torch.no_grad()
def right_turns(settings: Settings, network: Memory) -> float:
    """Return the fraction of new episodes with the correct turn."""
    cue, seen = cues_and_observations(settings, 500, torch.Generator().manual_seed(settings.seed + 1))
    values = network(seen, torch.ones(seen.shape[:2]), burn_in=0)[:, -1]
    return float((values.argmax(-1) == (cue > 0)).float().mean())


def update(
    settings: Settings, rb: ReplayBuffer, network: Memory, target: Memory, optimizer: torch.optim.Optimizer
) -> None:
    """Take a gradient step of Q-learning on windows, and move the target network."""
    flat, info = rb.sample(return_info=True)
    batch = {name: value.unflatten(0, (settings.windows, -1)) for name, value in flat.items()}
    valid = info["validity_mask"].view(settings.windows, -1).float()
    burn_in = valid.shape[1] - LENGTH - 1
    values = network(batch["observation"], valid, burn_in)[:, :-1]
    with torch.no_grad():
        following = target(batch["observation"], valid, burn_in)[:, 1:].amax(-1)
    now = slice(burn_in, burn_in + LENGTH)
    goal = batch["reward"][:, now] + GAMMA * following.masked_fill(batch["done"][:, now], 0.0)
    chosen = values.gather(-1, batch["action"][:, now, None]).squeeze(-1)
    loss = ((chosen - goal) ** 2 * valid[:, now]).sum() / valid[:, now].sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
            slow.lerp_(fast, 0.02)


def train(settings: Settings, name: str, burn_in: int, *, recurrent: bool) -> Curve:
    """Train one learner on stored episodes, and evaluate it 20 times."""
    torch.manual_seed(settings.seed)  # the networks' first weights
    rb = make_buffer(settings, random_play(settings, torch.Generator().manual_seed(settings.seed)), burn_in)
    network, target = Memory(recurrent=recurrent), Memory(recurrent=recurrent)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    curve, start = [(0, right_turns(settings, network))], time.perf_counter()
    for step in range(1, settings.steps + 1):
        update(settings, rb, network, target, optimizer)
        if step % max(1, settings.steps // 20) == 0:
            curve.append((step, right_turns(settings, network)))
        if step % max(1, settings.steps // 2) == 0:
            speed = step / (time.perf_counter() - start)
            print(
                f"{name:21} (windows of {burn_in} + {LENGTH} rows), seed {settings.seed}: {step:5,} updates, "
                f"right turns {curve[-1][1]:4.0%}, {speed:4.0f} updates/s",
                flush=True,
            )
    return curve


def run(settings: Settings, seeds: int) -> dict[str, list[Curve]]:
    """Train the three learners, each with several seeds."""
    rows = settings.episodes * (settings.corridor + 2)
    print(f"{rows:,} rows of random play; the cue lies {settings.corridor + 1} steps before the turn", flush=True)
    learners = {
        "recurrent, burn-in": (settings.corridor + 1, True),  # from the cue to the row before the turn
        "recurrent, no burn-in": (0, True),
        "feed-forward": (settings.corridor + 1, False),
    }
    return {
        name: [train(replace(settings, seed=settings.seed + i), name, burn_in, recurrent=rnn) for i in range(seeds)]
        for name, (burn_in, rnn) in learners.items()
    }


def draw(path: Path, curves: dict[str, list[Curve]]) -> None:
    """Plot the correct turns by the number of gradient steps: each seed, and the mean."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    for (name, runs), color in zip(curves.items(), ("#0072B2", "#B36B00", "#00795C"), strict=True):
        for run in runs:
            axes.plot(*zip(*run, strict=True), color=color, alpha=0.35, linewidth=1)
        mean = [sum(rates) / len(rates) for rates in zip(*([rate for _, rate in run] for run in runs), strict=True)]
        axes.plot([step for step, _ in runs[0]], mean, color=color, linewidth=2, label=name)
    axes.axhline(0.5, color="grey", linestyle="--", linewidth=0.8, label="chance")
    axes.set(xlabel="gradient steps", ylabel="correct turns", ylim=(0.3, 1.03), title="A cue to remember")
    axes.legend(loc="center right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Settings.steps, help="gradient steps of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each learner (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--quick", action="store_true", help="a short run that does not solve the task, one seed")
    parser.add_argument("--picture", type=Path, default=Path("recurrent_burn_in.png"), help="where to write it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more threads do not speed up networks this small
    settings, seeds = Settings(steps=given.steps, seed=given.seed), given.seeds
    if given.quick:
        settings, seeds = Settings(episodes=50, steps=6, windows=8, seed=given.seed), 1
    curves = run(settings, seeds)
    for name, runs in curves.items():
        print(f"{name:21} right turns {sum(run[-1][1] for run in runs) / seeds:4.0%}, mean of {seeds} seeds")
    draw(given.picture, curves)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
