"""Workloads over episodes: slices in TorchRL's words, and Ostinato's units beside plain samples of the same bytes."""

from __future__ import annotations

from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import data
from benchmarks.adapter import KINDS
from benchmarks.peers._torch import as_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows

SLICE = 16
EPISODE = 200
N_STEPS = 3
FRAMES = 4
WRITTEN = 256


def slices(module: str) -> dict[str, Callable[[Setup], Call]]:
    """Return the slice workloads for a module that has TorchRL's names."""

    def static(setup: Setup) -> Call:
        call: Call = _sliced(module, setup, cached=True).sample  # nothing is written: TorchRL may keep what it found
        return call

    def writing(setup: Setup) -> Call:
        buffer = _sliced(module, setup, cached=False)
        batches = cycle([_shaped(episodes(WRITTEN, seed), setup) for seed in range(data.POOL)])

        def call() -> None:
            buffer.extend(next(batches))
            buffer.sample()

        return call

    table: dict[str, Callable[[Setup], Call]] = {f"slices.{kind}": static for kind in KINDS}
    table |= {f"slices-writing.{kind}": writing for kind in KINDS}
    return table | {f"slices-rows.{rows}": static for rows in ("1e5", "1e7")}


def episodes(count: int, seed: int = 0) -> Rows:
    """Return transitions in episodes of `EPISODE` steps."""
    rows = data.transitions(count, seed)
    rows["done"][:] = False
    rows["done"][EPISODE - 1 :: EPISODE] = True
    return rows


def _sliced(module: str, setup: Setup, *, cached: bool) -> Any:
    parts = import_module(module)
    nested = setup.kind in KINDS[1:]
    end = ("next", "done") if nested else "done"
    sampler = parts.SliceSampler(slice_len=SLICE, end_key=end, cache_values=cached)
    made = parts.TensorDictReplayBuffer if setup.kind == "tdbuffer" else parts.ReplayBuffer
    buffer = made(storage=parts.LazyTensorStorage(setup.rows), sampler=sampler, batch_size=setup.batch)
    for rows in data.chunks(episodes, setup.rows, 10_000):
        buffer.extend(_shaped(rows, setup))
    return buffer


def _shaped(rows: Rows, setup: Setup) -> Any:
    """Bring rows to the kind asked for; TensorDicts have what follows a step under `next`."""
    if setup.kind not in KINDS[1:]:
        return as_kind(rows, "dict")
    from tensordict import TensorDict

    flat = {key: torch.from_numpy(value) for key, value in rows.items()}
    after = {"observation": flat["next_obs"], "reward": flat["reward"][:, None], "done": flat["done"][:, None]}
    count = flat["done"].shape[0]
    return TensorDict({"observation": flat["obs"], "action": flat["action"], "next": after}, [count])


def n_step(setup: Setup) -> Call:
    """Draw transitions over `N_STEPS` steps."""
    ours = import_module("ostinato")
    return _filled(setup, episodes, sample_unit=ours.NStep(N_STEPS, 0.99))


def n_step_plain(setup: Setup) -> Call:
    """Draw rows that hold the rewards of `N_STEPS` steps."""
    return _filled(setup, lambda count: _widened(episodes(count)))


def _widened(rows: Rows) -> Rows:
    return {**rows, "reward": rows["reward"].repeat(N_STEPS).reshape(-1, N_STEPS)}


def single_frames(count: int, seed: int = 0) -> Rows:
    """Return single frames in episodes: 14,113 bytes a row."""
    rows = data.frames(count, seed)
    return {
        "obs": rows["obs"][..., 0].copy(),
        "next_obs": rows["next_obs"][..., 0].copy(),
        "done": episodes(count)["done"],
    }


def stacks(setup: Setup) -> Call:
    """Draw stacks of `FRAMES` frames from single ones."""
    ours = import_module("ostinato")
    return _filled(setup, single_frames, chunk=500, sample_unit=ours.FrameStack(FRAMES, ["obs"]))


def stacks_plain(setup: Setup) -> Call:
    """Draw rows that hold whole stacks."""
    return _filled(setup, data.frames, chunk=500)


def single_copy(setup: Setup) -> Call:
    """Draw transitions whose next observations are those of the next rows."""
    ours = import_module("ostinato")
    storage = ours.LazyTensorStorage(setup.rows, single_copy={"next_obs": "obs"})
    return _filled(setup, linked, storage=storage)


def single_copy_plain(setup: Setup) -> Call:
    """Draw transitions that are stored whole."""
    return _filled(setup, linked)


def linked(count: int) -> Rows:
    """Return transitions that follow each other."""
    rows = episodes(count)
    inside = rows["done"][:-1] == 0
    rows["next_obs"][:-1][inside] = rows["obs"][1:][inside]
    return rows


UNITS: dict[str, Callable[[Setup], Call]] = {
    "n-step.dict": n_step,
    "frame-stack.dict": stacks,
    "single-copy.dict": single_copy,
}
PLAIN: dict[str, Callable[[Setup], Call]] = {
    "n-step.dict": n_step_plain,
    "frame-stack.dict": stacks_plain,
    "single-copy.dict": single_copy_plain,
}


def _filled(setup: Setup, make: Callable[[int], Rows], *, chunk: int = 10_000, **options: Any) -> Call:
    ours = import_module("ostinato")
    options.setdefault("storage", ours.LazyTensorStorage(setup.rows))
    buffer = ours.ReplayBuffer(batch_size=setup.batch, **options)
    for rows in _pieces(make, setup.rows, chunk):
        buffer.extend({key: torch.from_numpy(value) for key, value in rows.items()})
    call: Call = buffer.sample
    return call


def _pieces(make: Callable[[int], Rows], rows: int, chunk: int) -> Iterator[Rows]:
    return data.chunks(make, rows, chunk)
