"""Why priorities: one rewarded transition among thousands, found by its TD error instead of by chance.

The Blind Cliffwalk (Schaul et al. 2016, section 3.1) is a corridor of `n` states. In each state one of two actions goes
on, the other one ends the episode. Only the last step has a reward. The buffer holds the transitions of all `2 ** n`
sequences of actions, and one of these transitions is rewarded. Q-learning replays them until the values of all actions
are exact. Drawn uniformly, the rewarded transition and then those before it are rare. `PrioritizedSampler` draws
transitions in proportion to their TD error. Each length is run with several seeds.

    python examples/prioritized_cliffwalk.py            # writes prioritized_cliffwalk.png
    python examples/prioritized_cliffwalk.py --quick    # a few seconds, short corridors

Needs `pip install 'ostinato[viz]'`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure

from ostinato import LazyTensorStorage, PrioritizedSampler, ReplayBuffer

BATCH, LEARNING_RATE = 16, 0.25
EXACT = 1e-3
"""Mean squared error of the values at which a run ends."""
COLORS = {"uniform": "#B36B00", "prioritized": "#0072B2"}


def all_transitions(states: int) -> dict[str, torch.Tensor]:
    """Return the transitions of every sequence of actions, int64, float32 and bool `[2 ** (states + 1) - 2]`."""
    rows = []
    for actions in range(2**states):
        for state in range(states):
            action = actions >> state & 1
            right, last = action == state % 2, state == states - 1
            rows.append((state, action, float(right and last), last or not right))
            if not right:
                break
    names = ("state", "action", "reward", "terminated")
    return {name: torch.tensor(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def make_buffer(rows: dict[str, torch.Tensor], sampler: str, seed: int) -> tuple[ReplayBuffer, bool]:
    """Return a buffer that holds the rows, and whether it keeps priorities."""
    size, prioritized = len(rows["state"]), sampler == "prioritized"
    rb = ReplayBuffer(
        storage=LazyTensorStorage(size),
        # beta=0: no importance weights, as the values of a table have one exact solution
        sampler=PrioritizedSampler(size, alpha=1.0, beta=0.0, eps=1e-4) if prioritized else None,
        batch_size=BATCH,
        generator=torch.Generator().manual_seed(seed),
    )
    rb.extend(rows)
    return rb, prioritized


def learn(states: int, sampler: str, seed: int, most: int) -> list[tuple[int, float]]:
    """Replay until the values are exact; return pairs of transitions replayed and error of the values."""
    rb, prioritized = make_buffer(all_transitions(states), sampler, seed)
    discount = 1 - 1 / states
    exact = [[discount ** (states - 1 - s) if a == s % 2 else 0.0 for a in (0, 1)] for s in range(states)]
    values = (0.1 * torch.randn(states + 1, 2, generator=torch.Generator().manual_seed(seed))).tolist()
    curve: list[tuple[int, float]] = []
    for replayed in range(BATCH, most + 1, BATCH):
        batch, info = rb.sample(return_info=True)
        errors = []
        for state, action, reward, terminated in zip(*(column.tolist() for column in batch.values()), strict=True):
            target = reward + (0.0 if terminated else discount * max(values[state + 1]))
            error = target - values[state][action]
            values[state][action] += LEARNING_RATE * error
            errors.append(abs(error))
        if prioritized:
            rb.update_priority(info["index"], errors)
        wrong = [values[s][a] - exact[s][a] for s in range(states) for a in (0, 1)]
        curve.append((replayed, sum(x * x for x in wrong) / len(wrong)))
        if curve[-1][1] < EXACT:
            break
    return curve


def draw(path: Path, needed: dict[str, dict[int, list[int]]], curves: dict[str, list[tuple[int, float]]]) -> None:
    """Plot the transitions replayed by length, and the error during the runs of the longest corridor."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for sampler, color in COLORS.items():
        lengths = list(needed[sampler])
        counts = needed[sampler].values()
        left.plot(lengths, [median(runs) for runs in counts], ".-", color=color, label=sampler)
        left.fill_between(lengths, [min(r) for r in counts], [max(r) for r in counts], color=color, alpha=0.2)
        right.loglog(*zip(*curves[sampler], strict=True), color=color, label=sampler)
    left.set(yscale="log", xlabel="states", ylabel="transitions replayed", title="until the values are exact (median)")
    right.axhline(EXACT, color="grey", linestyle="--", linewidth=0.8)
    right.set(xlabel="transitions replayed", ylabel="mean squared error", title=f"one run, {lengths[-1]} states")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, run all lengths, print a table and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=12, help="length of the longest corridor (default 12)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="most transitions replayed per run")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each length (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--quick", action="store_true", help="short corridors, one seed")
    parser.add_argument("--picture", type=Path, default=Path("prioritized_cliffwalk.png"), help="where to write it")
    given = parser.parse_args(arguments)
    longest, seeds = (6, 1) if given.quick else (given.states, given.seeds)
    needed: dict[str, dict[int, list[int]]] = {sampler: {} for sampler in COLORS}
    curves: dict[str, list[tuple[int, float]]] = {}
    print("states  transitions      uniform  prioritized   ratio   (median of transitions replayed)", flush=True)
    start = time.perf_counter()
    for states in range(2, longest + 1, 2):
        for sampler, counts in needed.items():
            runs = [learn(states, sampler, given.seed + i, given.steps) for i in range(seeds)]
            counts[states] = [run[-1][0] for run in runs]
            curves[sampler] = runs[0]
        uniform, prioritized = (median(counts[states]) for counts in needed.values())
        size, ratio, spent = 2 ** (states + 1) - 2, uniform / prioritized, time.perf_counter() - start
        print(f"{states:6} {size:12,} {uniform:12,.0f} {prioritized:12,.0f} {ratio:6.1f}x   {spent:.0f} s", flush=True)
    draw(given.picture, needed, curves)
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
