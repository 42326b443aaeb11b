"""cpprb: `ReplayBuffer` of numpy arrays; batches in and out are dicts of numpy arrays."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as installed
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import data
from benchmarks.peers._start import program

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows

_OWN_KIND = "numpy batches only, see dict"
LACKS = dict.fromkeys(("uniform", "extend", "add", "prioritized"), _OWN_KIND) | {
    "prioritized-rows": "sizes are compared for Ostinato alone",
    "prioritized-threads": "threads are compared for Ostinato alone",
    "priority-update": "sizes are compared for Ostinato alone",
    "trajectories": "no rollouts in files",
    "checkpoint": "compared with plain writes and reads",
    "dataset": "no videos",
    "amp": "no sampling without replacement",
    "start.import": "does not import torch",
    **dict.fromkeys(("uniform-out", "images-out"), "no batch that it could fill"),
    **dict.fromkeys(("threads", "latency"), "not documented for threads"),
    **dict.fromkeys(("slices", "slices-writing", "slices-rows"), "no slices of episodes"),
    **dict.fromkeys(("n-step", "frame-stack", "single-copy", "shared"), "compared with Ostinato's plain samples"),
}
_FIRST_BATCH = """
import numpy as np
from cpprb import ReplayBuffer
buffer = ReplayBuffer(10_000, {"obs": {"shape": 17}, "reward": {}})
buffer.add(obs=np.zeros((1000, 17), dtype=np.float32), reward=np.zeros(1000, dtype=np.float32))
buffer.sample(256)
"""


def version() -> str:
    """Return the library's version."""
    import_module("cpprb")
    return installed("cpprb")


def _full(setup: Setup, make: Callable[[int], Rows], *, kind: str = "ReplayBuffer", **options: object) -> Any:
    fields = {key: {"shape": value.shape[1:] or 1, "dtype": value.dtype} for key, value in make(1).items()}
    # By name, so that type checking does not need the peer.
    buffer = getattr(import_module("cpprb"), kind)(setup.rows, fields, **options)
    for rows in data.chunks(make, setup.rows, 500 if make is data.frames else 10_000):
        buffer.add(**rows)
    return buffer


def uniform(setup: Setup) -> Call:
    """Sample transitions uniformly."""
    buffer = _full(setup, data.transitions)
    return lambda: buffer.sample(setup.batch)


def prioritized(setup: Setup) -> Call:
    """Sample transitions by priority, and give them new ones."""
    buffer = _full(setup, data.transitions, kind="PrioritizedReplayBuffer", alpha=0.6)
    rng = np.random.default_rng(0)
    buffer.update_priorities(np.arange(setup.rows), rng.random(setup.rows))
    new = cycle(list(rng.random((256, setup.batch))))

    def call() -> None:
        batch = buffer.sample(setup.batch, beta=0.4)
        buffer.update_priorities(batch["indexes"], next(new))

    return call


def images(setup: Setup) -> Call:
    """Sample frames uniformly."""
    buffer = _full(setup, data.frames)
    return lambda: buffer.sample(setup.batch)


def extend(setup: Setup) -> Call:
    """Write batches of transitions."""
    buffer, batches = _full(setup, data.transitions), cycle(data.pool(data.transitions, setup.batch))
    return lambda: buffer.add(**next(batches))


def add(setup: Setup) -> Call:
    """Write single transitions."""
    buffer = _full(setup, data.transitions)
    items = cycle([data.first_row(rows) for rows in data.pool(data.transitions, 1)])
    return lambda: buffer.add(**next(items))


def add_numpy(setup: Setup) -> Call:
    """Write single transitions of arrays and Python scalars."""
    buffer = _full(setup, data.transitions)
    steps = cycle([data.step(rows) for rows in data.pool(data.transitions, 1)])

    def call() -> None:
        obs, action, reward, next_obs, done = next(steps)
        buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

    return call


def mmap(setup: Setup) -> Call:
    """Write and samples memory-mapped transitions."""
    buffer = _full(setup, data.transitions, mmap_prefix=str(setup.directory / "rows"))
    batches = cycle(data.pool(data.transitions, setup.batch))

    def call() -> None:
        buffer.add(**next(batches))
        buffer.sample(setup.batch)

    return call


WORKLOADS: dict[str, Callable[[Setup], Call]] = {
    "uniform.dict": uniform,
    "prioritized.dict": prioritized,
    "extend.dict": extend,
    "extend.numpy": extend,
    "add.dict": add,
    "add.numpy": add_numpy,
    "images.dict": images,
    "mmap.dict": mmap,
    "start.first-batch": lambda _setup: program(_FIRST_BATCH),
}
