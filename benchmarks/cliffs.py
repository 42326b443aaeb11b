"""What each ordinary option costs, alone and in pairs: `python -m benchmarks.cliffs`.

Each figure is the time of a call (sample, extend, add, update_priority) over that of the same call of a plain buffer in
the same process, each the shortest of all `--repeats`, which measure one option after the other. `bound` is the time
over that of a bare loop in C which copies the bytes of as many rows (`limits.cpp`). Where TorchRL has the
configuration, `torchrl` is our time over its time. A pair that a buffer does not take is left empty. `--json` writes
all times in microseconds, `--picture` draws the pairs as heat maps. docs/performance.md explains the figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

import ostinato as ours
from benchmarks.adapter import Setup
from benchmarks.data import transitions
from benchmarks.peers._limits import Table
from ostinato.errors import OstinatoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Times = dict[str, float]
CALLS = ("sample", "extend", "add", "update")
EPISODE, SLICE, FILL = 100, 16, 10_000
FIRST = 100
LIMIT = 3
"""No ordinary option should cost more times the plain call."""
FRAME = (84, 84, 8)
"""One field of 56 KB, for rows of images."""


@dataclass(frozen=True)
class Case:
    """What all options of a table have in common."""

    capacity: int
    batch: int
    kind: str = "tensordict"
    images: bool = False

    def fields(self, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return transitions in episodes, the last of which ends with the last row; images are one field more."""
        made = {key: torch.as_tensor(value, device="cpu") for key, value in transitions(count, seed).items()}
        step = torch.arange(count, device="cpu")
        made["done"] = (step % EPISODE == EPISODE - 1) | (step == count - 1)
        made["next_obs"] = torch.where(made["done"][:, None], made["next_obs"], made["obs"].roll(-1, 0))
        made |= {"version": step // FILL, "mask": step % 10 != 0, "goal": made["action"], "achieved": made["action"]}
        if self.images:
            made["frame"] = torch.zeros((count, *FRAME), dtype=torch.uint8, device="cpu")
        return made

    def rows(self, count: int, seed: int = 0) -> Any:
        """Return transitions as the buffer gets them."""
        made = self.fields(count, seed)
        return made if self.kind == "dict" else TensorDict(made, [count])


@dataclass
class Parts:
    """What a buffer is made of; options fill it in."""

    case: Case
    draws: set[str] = field(default_factory=set)
    """Names of `SAMPLERS`."""
    storage: dict[str, Any] = field(default_factory=dict)
    buffer: dict[str, Any] = field(default_factory=dict)
    ask: dict[str, Any] = field(default_factory=dict)
    """Arguments of `sample`."""
    after: list[Callable[[Any], Any]] = field(default_factory=list)
    """Called with the full buffer; each returns what is to be used in its place."""

    def put(self, name: str, value: Any) -> None:
        """Set an argument of the buffer.

        Raises:
            ValueError: if another option has set it.
        """
        if name in self.buffer:
            msg = f"two options set {name}"
            raise ValueError(msg)
        self.buffer[name] = value


def _deleted(buffer: Any) -> Any:
    buffer.delete([0])
    return buffer


def _unit(make: Callable[[], Any]) -> Callable[[Parts], None]:
    return lambda parts: parts.put("sample_unit", make())


def _max_age(parts: Parts) -> None:
    parts.put("version_key", "version")
    parts.ask["max_age"] = 10**6


def _reward(transition: Any) -> Any:
    return (transition["achieved"] - transition["goal"]).square().sum(-1)


OPTIONS: Mapping[str, Callable[[Parts], None]] = {
    "slices": lambda parts: parts.draws.add("slices"),
    "prioritized": lambda parts: parts.draws.add("prioritized"),
    "stratified": lambda parts: parts.draws.add("stratified"),
    "without replacement": lambda parts: parts.draws.add("without replacement"),
    "n-step": _unit(lambda: ours.NStep(3, 0.99)),
    "frame stack": _unit(lambda: ours.FrameStack(4, ["obs"])),
    "hindsight": _unit(
        lambda: ours.Hindsight(_reward, goal_key="goal", achieved_goal_key="achieved", next_goals=False)
    ),
    "transform": lambda parts: parts.put("transform", ours.ExcludeFields("mask")),
    "single copy": lambda parts: parts.storage.update(single_copy={"next_obs": "obs"}),
    "rate limiter": lambda parts: parts.put("rate_limiter", ours.RateLimiter()),
    "generations": lambda parts: parts.put("writer", ours.RoundRobinWriter(track_generations=True)),
    "versions": lambda parts: parts.put("version_key", "version"),
    "max age": _max_age,
    "mask": lambda parts: parts.put("episodes", ours.Episodes(end_key="done", mask_key="mask")),
    "view": lambda parts: parts.after.append(lambda buffer: buffer.view(sampler=ours.RandomSampler())),
    "environments": lambda parts: parts.storage.update(ndim=2),
    "remover": lambda parts: parts.put("remover", "lifo"),
    "after delete": lambda parts: parts.after.append(_deleted),
    "codec": lambda parts: parts.storage.update(codec={"obs": "zlib"}),
    "list storage": lambda parts: parts.put("storage", ours.ListStorage(parts.case.capacity)),
}
"""Ordinary options, then two that have limits of their own."""

SAMPLERS: Mapping[frozenset[str], Callable[[int], Any]] = {
    frozenset(): lambda _: ours.RandomSampler(),
    frozenset({"slices"}): lambda _: ours.SliceSampler(slice_len=SLICE, end_key="done"),
    frozenset({"prioritized"}): lambda rows: ours.PrioritizedSampler(rows, 0.6, 0.4),
    frozenset({"stratified"}): lambda rows: ours.PrioritizedSampler(rows, 0.6, 0.4, stratified=True),
    frozenset({"without replacement"}): lambda _: ours.SamplerWithoutReplacement(),
    frozenset({"slices", "prioritized"}): lambda rows: ours.PrioritizedSliceSampler(
        rows, 0.6, 0.4, slice_len=SLICE, end_key="done"
    ),
    frozenset({"slices", "without replacement"}): lambda _: ours.SliceSamplerWithoutReplacement(
        slice_len=SLICE, end_key="done"
    ),
}


def make(case: Case, names: tuple[str, ...]) -> tuple[Any, Parts]:
    """Return a full buffer with these options.

    Raises:
        OstinatoError: if they do not go together.
        ValueError: if two of them set the same part.
    """
    parts = Parts(case)
    for name in names:
        OPTIONS[name](parts)
    if frozenset(parts.draws) not in SAMPLERS:
        msg = f"no sampler is {' and '.join(sorted(parts.draws))}"
        raise ValueError(msg)
    storage = parts.buffer.pop("storage", None)
    if storage is None:
        storage = ours.LazyTensorStorage(case.capacity, **parts.storage)
    sampler = SAMPLERS[frozenset(parts.draws)](case.capacity)
    batch = -(-case.batch // SLICE) * SLICE if "slices" in parts.draws else case.batch
    buffer = ours.ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch, **parts.buffer)
    rows = case.rows(min(FILL, case.capacity))
    for _ in range(-(-case.capacity // FILL)):
        buffer.extend(_in_environments(rows, storage.ndim))
    for change in parts.after:
        buffer = change(buffer)
    return buffer, parts


def _in_environments(rows: Any, ndim: int) -> Any:
    """Return rows `[n]` as those of one environment, `[1, n]`, for a storage of several."""
    if ndim == 1:
        return rows
    return rows[None] if isinstance(rows, TensorDict) else {key: value[None] for key, value in rows.items()}


def calls(case: Case, names: tuple[str, ...]) -> dict[str, Callable[[], object]]:
    """Return the calls to measure; see `make` for errors."""
    buffer, parts = make(case, names)
    ndim = buffer.storage.ndim
    batch = _in_environments(case.rows(case.batch, 1), ndim)
    row = case.rows(1, 2)
    one = row[0] if isinstance(row, TensorDict) else {key: value[0] for key, value in row.items()}
    step = _in_environments(one, ndim)
    found: dict[str, Callable[[], object]] = {
        "sample": lambda: buffer.sample(**parts.ask),
        "extend": lambda: buffer.extend(batch),
        "add": lambda: buffer.add(step),
    }
    if buffer.sampler.prioritized:
        info = buffer.sample(return_info=True)[1]
        priorities = torch.rand(len(info["priority_weight"]), device="cpu")
        found["update"] = lambda: buffer.update_priority(info["index"], priorities)
    return found


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """Return the shortest mean time of a call, of ten rounds in so many seconds together.

    The first calls are not counted: rows after a deletion are written in Python for a while.
    """
    begun = time.perf_counter()
    for _ in range(FIRST):
        call()
        if time.perf_counter() - begun > seconds:
            break
    begun = time.perf_counter()
    call()
    count = max(1, int(seconds / 10 / max(time.perf_counter() - begun, 1e-7)))
    best = float("inf")
    for _ in range(10):
        begun = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begun) / count)
    return best * 1e6


def measure(case: Case, names: tuple[str, ...], seconds: float) -> Times | str:
    """Return the times of the calls of a buffer with these options, or why there is no such buffer."""
    try:
        return {name: microseconds(call, seconds) for name, call in calls(case, names).items()}
    except (OstinatoError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]


def shortest(one: Times | str | None, other: Times | str) -> Times | str:
    """Return the shorter time of each call, of two measurements."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other
    return {call: min(value, other[call]) for call, value in one.items()}


# -- the bound, and TorchRL -------------------------------------------------------------------------------------------


def bounds(case: Case, seconds: float) -> Times:
    """Return the times of bare copies of the bytes of rows; none without a compiler."""

    def arrays(count: int, seed: int) -> dict[str, Any]:
        return {key: value.numpy() for key, value in case.fields(count, seed).items()}

    setup = Setup(case.kind, case.capacity, case.batch, Path())
    try:
        reads = Table(setup, arrays, packed=True, reads=case.batch)
    except RuntimeError:
        return {}
    found = {"sample": reads.call("limit_sample")}
    for call, count in (("extend", case.batch), ("add", 1)):
        found[call] = Table(setup, arrays, packed=True, writes=count).call("limit_write")
    return {call: microseconds(work, seconds) for call, work in found.items()}


def torchrl_times(case: Case, name: str, seconds: float) -> Times:
    """Return the times of TorchRL's buffer with an option, as far as it has it; none without TorchRL."""
    try:
        theirs: Any = importlib.import_module("torchrl.data")
        samplers: Any = importlib.import_module("torchrl.data.replay_buffers")
    except ImportError:
        return {}
    keys = {"end_key": "done", "strict_length": True, "slice_len": SLICE}
    made: dict[str, Callable[[], Any]] = {
        "": samplers.RandomSampler,
        "slices": lambda: samplers.SliceSampler(**keys),
        "prioritized": lambda: samplers.PrioritizedSampler(case.capacity, 0.6, 0.4),
        "without replacement": samplers.SamplerWithoutReplacement,
        "list storage": samplers.RandomSampler,
    }
    if name not in made or case.kind == "dict":
        return {}
    kind = theirs.ListStorage if name == "list storage" else theirs.LazyTensorStorage
    try:
        sampler = made[name]()
    except RuntimeError:  # its trees are in an extension that some builds lack
        return {}
    buffer = theirs.ReplayBuffer(storage=kind(case.capacity), sampler=sampler, batch_size=case.batch)
    rows = case.rows(min(FILL, case.capacity))
    for _ in range(-(-case.capacity // FILL)):
        buffer.extend(rows)
    batch, one = case.rows(case.batch, 1), case.rows(1, 2)[0]
    found = {"sample": buffer.sample, "extend": lambda: buffer.extend(batch), "add": lambda: buffer.add(one)}
    return {call: microseconds(work, seconds) for call, work in found.items()}


# -- tables -----------------------------------------------------------------------------------------------------------


def ratios(times: Times, plain: Times) -> Times:
    """Return times over those of the plain buffer; an update of priorities over a plain sample."""
    return {call: value / plain["sample" if call == "update" else call] for call, value in times.items()}


def show(case: Case, found: Mapping[tuple[str, ...], Times | str], bound: Times, theirs: Mapping[str, Times]) -> None:
    """Print the table of single options, and the pairs that cost most."""
    plain = found[()]
    if isinstance(plain, str):
        raise TypeError(plain)
    fields = "images of 56 KB" if case.images else "small rows"
    print(f"\n{case.capacity:,} rows, batch {case.batch}, {case.kind}, {fields}; plain calls in us: ", end="")
    print(", ".join(f"{call} {value:.1f}" for call, value in plain.items()))
    print(f"{'over the plain call':22}" + "".join(f"{call:>8}" for call in CALLS), end="")
    print("   over the bound: " + "".join(f"{call:>8}" for call in bound) + "   over torchrl (sample, extend, add)")
    for names, times in found.items():
        if len(names) < 2 or (isinstance(times, dict) and max(ratios(times, plain).values()) > LIMIT):
            line = _cells(times if isinstance(times, str) else ratios(times, plain), CALLS)
            if isinstance(times, dict):
                other = theirs.get("".join(names), {}) if len(names) < 2 else {}
                line += " " * 19 + _cells({call: times[call] / bound[call] for call in bound}, bound)
                line += "   " + "  ".join(f"{times[call] / other[call]:.2f}" for call in CALLS if call in other)
            print(f"{' + '.join(names) or 'plain':22}{line}")


def _cells(found: Times | str, names: Iterable[str]) -> str:
    """Return figures below each other, or why there are none."""
    if isinstance(found, str):
        return "  " + found[:90]
    return "".join(f"{found[name]:8.1f}" if name in found else f"{'':8}" for name in names)


def draw(path: Path, found: Mapping[tuple[str, ...], Times | str]) -> None:
    """Draw options (on the diagonal) and pairs as heat maps, one for each call; grey where there is no buffer."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    colors: Any = importlib.import_module("matplotlib.colors")
    names, plain = [name for name in OPTIONS if (name,) in found], found[()]
    figure, axes = pyplot.subplots(1, 3, figsize=(30, 11), layout="constrained")
    for axis, call in zip(axes, CALLS, strict=False):
        grid = torch.full((len(names), len(names)), float("nan"), device="cpu")
        for pair, times in found.items():
            if pair and isinstance(times, dict) and isinstance(plain, dict):
                i, j = names.index(pair[0]), names.index(pair[-1])
                grid[i, j] = grid[j, i] = ratios(times, plain)[call]
        axis.set_facecolor("0.85")
        shown = axis.imshow(grid.numpy(), cmap="RdYlGn_r", norm=colors.LogNorm(1 / LIMIT, LIMIT**3))
        axis.set_title(f"{call}: time over that of the plain call", fontsize=18)
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=13)
        axis.set_yticks(range(len(names)), names, fontsize=13)
        for i, line in enumerate(grid.tolist()):
            for j, value in enumerate(line):
                if value == value:
                    axis.text(j, i, f"{value:.1f}" if value < 10 else f"{value:.0f}", ha="center", va="center")
    bar = figure.colorbar(shown, ax=axes, shrink=0.7, aspect=40, ticks=[1 / LIMIT, 1, LIMIT, LIMIT**2, LIMIT**3])
    bar.ax.set_yticklabels([f"{tick:.2g}" for tick in bar.get_ticks()], fontsize=13)
    figure.savefig(path, dpi=80)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000], help="capacities, all filled")
    parser.add_argument("--batches", type=int, nargs="+", default=[256], help="rows a call")
    parser.add_argument("--kinds", nargs="+", default=["tensordict"], choices=["tensordict", "dict"])
    parser.add_argument("--images", action="store_true", help="rows with one field of 56 KB; take few --rows")
    parser.add_argument("--pairs", action="store_true", help="all pairs of options, too")
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--seconds", type=float, default=0.2, help="for each call")
    parser.add_argument("--repeats", type=int, default=3, help="of all measurements; the shortest times count")
    parser.add_argument("--json", type=Path, help="file for all times in microseconds")
    parser.add_argument("--picture", type=Path, help="PNG file for options and pairs of the first table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    written: list[dict[str, Any]] = []
    for kind, capacity, batch in product(given.kinds, given.rows, given.batches):
        case = Case(capacity, batch, kind, given.images)
        wanted: list[tuple[str, ...]] = [(), *((name,) for name in given.options)]
        wanted += combinations(given.options, 2) if given.pairs else []
        found: dict[tuple[str, ...], Any] = {}
        theirs: dict[str, Any] = {}
        bound: Any = None
        for _ in range(given.repeats):
            for names in wanted:
                if not isinstance(found.get(names), str):
                    found[names] = shortest(found.get(names), measure(case, names, given.seconds))
            for name in ("", *given.options):
                theirs[name] = shortest(theirs.get(name), torchrl_times(case, name, given.seconds))
            bound = shortest(bound, bounds(case, given.seconds))
        show(case, found, bound, theirs)
        if given.picture is not None and not written:
            draw(given.picture, found)
        cells = [{"options": names, "us": times} for names, times in found.items()]
        written.append({"case": vars(case), "cells": cells, "bound": bound, "torchrl": theirs})
    if given.json is not None:
        given.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
