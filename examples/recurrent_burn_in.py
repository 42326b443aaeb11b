"""A task that needs memory: with burn-in a recurrent learner solves it from short windows of episodes.

The first observation shows a cue, up or down. The following observations of a corridor are all the same. At its end
the learner must turn in the direction of the cue. Rows are single steps of a random policy. Windows are made by
`SequenceUnit(length, burn_in=...)`: over the `burn_in` rows the network only updates its hidden state, and it is
trained on the `length` rows after these (Kapturowski et al. 2019, section 3).

Three learners get the same rows and the same number of updates:

- recurrent, with burn-in: its hidden state at the end of the corridor contains the cue;
- recurrent, without burn-in: its windows are too short to contain both the cue and the turn;
- feed-forward: no memory.

Run `python examples/recurrent_burn_in.py`; `--quick` is a short run that does not solve the task.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ostinato import LazyTensorStorage, ReplayBuffer, SequenceUnit

if TYPE_CHECKING:
    from collections.abc import Callable

GAMMA = 0.9
LENGTH = 3
"""Rows per window that are trained on: fewer than between the cue and the turn."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    corridor: int = 6
    """Steps between the cue and the turn."""
    episodes: int = 2_000
    """Episodes of the random policy."""
    updates: int = 1_200
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


def learn(settings: Settings, rb: ReplayBuffer, burn_in: int, *, recurrent: bool) -> Memory:
    """Q-learning with a slowly moving target network on windows of random episodes."""
    network, target = Memory(recurrent=recurrent), Memory(recurrent=recurrent)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(settings.updates):
        flat, info = rb.sample(return_info=True)
        batch = {name: value.unflatten(0, (settings.windows, -1)) for name, value in flat.items()}
        valid = info["validity_mask"].view(settings.windows, -1).float()
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
    return network


@torch.no_grad()
def right_turns(settings: Settings, network: Memory) -> float:
    """Return the fraction of new episodes with the correct turn."""
    cue, seen = cues_and_observations(settings, 500, torch.Generator().manual_seed(settings.seed + 1))
    values = network(seen, torch.ones(seen.shape[:2]), burn_in=0)[:, -1]
    return float((values.argmax(-1) == (cue > 0)).float().mean())


def run(settings: Settings, show: Callable[[str], None] = print) -> dict[str, float]:
    """Train the three learners and return their fractions of correct turns."""
    torch.manual_seed(settings.seed)  # the networks' first weights
    rows = random_play(settings, torch.Generator().manual_seed(settings.seed))
    burn_in = settings.corridor + 1  # from the cue to the row before the turn
    show(f"{len(rows['done']):,} rows of random play; the cue lies {settings.corridor + 1} steps before the turn")
    out: dict[str, float] = {}
    learners = (
        ("recurrent, burn-in", burn_in, True),
        ("recurrent, no burn-in", 0, True),
        ("feed-forward", burn_in, False),
    )
    for name, rows_before, recurrent in learners:
        start = time.perf_counter()
        rb = make_buffer(settings, rows, rows_before)
        network = learn(settings, rb, rows_before, recurrent=recurrent)
        out[name] = right_turns(settings, network)
        window = f"{rows_before} + {LENGTH} rows"
        show(f"{name:22} windows of {window:10} right turns {out[name]:4.0%}   ({time.perf_counter() - start:.0f} s)")
    return out


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a short run that does not solve the task")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not speed up networks this small
    sizes = {"episodes": 50, "updates": 5, "windows": 8} if given.quick else {}
    run(Settings(seed=given.seed, **sizes))


if __name__ == "__main__":
    main()
