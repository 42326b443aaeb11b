"""Tianshou: `ReplayBuffer` and `VectorReplayBuffer`; batches in and out are its `Batch` of numpy arrays."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as installed
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import data

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows

_OWN_KIND = "one kind of batch only, see dict"
LACKS = dict.fromkeys(("uniform", "extend", "add", "prioritized"), _OWN_KIND) | {
    "prioritized-rows": "sizes are compared for Ostinato alone",
    "prioritized-threads": "threads are compared for Ostinato alone",
    "priority-update": "sizes are compared for Ostinato alone",
    "mmap": "no memory-mapped storage",
    "trajectories": "no rollouts in files",
    "checkpoint": "compared with plain writes and reads",
    "amp": "no sampling without replacement",
    "start": "not timed: its import brings a whole training library",
    **dict.fromkeys(("slices", "slices-writing", "slices-rows"), "no slices of episodes"),
    **dict.fromkeys(("n-step", "frame-stack", "single-copy", "shared"), "compared with Ostinato's plain samples"),
}


def _module() -> Any:
    # By name, so that type checking does not need the peer.
    return import_module("tianshou.data")


def version() -> str:
    """Return the library's version."""
    _module()
    return installed("tianshou")


def _batch(rows: Rows, count: int) -> Any:
    """Return rows under Tianshou's names; what the workload lacks is a scalar a row."""
    zeros, flags = np.zeros(count, np.float32), np.zeros(count, np.bool_)
    return _module().Batch(
        obs=rows["obs"],
        act=rows.get("action", zeros),
        rew=rows.get("reward", zeros),
        terminated=rows.get("done", flags),
        truncated=flags,
        obs_next=rows["next_obs"],
    )


def _full(setup: Setup, make: Callable[[int], Rows], buffer: Any = None) -> Any:
    """Fill through `set_batch`, as its own `from_data` does: one `add` a row would take minutes."""
    buffer, one = _module().ReplayBuffer(setup.rows) if buffer is None else buffer, make(1)
    rows: Rows = {key: np.empty((setup.rows, *value.shape[1:]), value.dtype) for key, value in one.items()}
    for key, value in one.items():
        rows[key][:] = value
    batch = _batch(rows, setup.rows)
    batch.done = batch.terminated
    buffer.set_batch(batch)
    buffer._size = setup.rows  # noqa: SLF001 - as `from_data` does
    return buffer


def uniform(setup: Setup) -> Call:
    """Sample transitions uniformly; `sample` also returns the indices."""
    buffer = _full(setup, data.transitions)
    return lambda: buffer.sample(setup.batch)


def prioritized(setup: Setup) -> Call:
    """Sample transitions by priority, and give them new ones."""
    rng = np.random.default_rng(0)
    made = _module().PrioritizedReplayBuffer(setup.rows, alpha=0.6, beta=0.4)
    buffer = _full(setup, data.transitions, made)
    buffer.update_weight(np.arange(setup.rows), rng.random(setup.rows))
    new = cycle(list(rng.random((256, setup.batch))))

    def call() -> None:
        _, index = buffer.sample(setup.batch)
        buffer.update_weight(index, next(new))

    return call


def images(setup: Setup) -> Call:
    """Sample frames uniformly; its rows also hold an action, a reward and flags."""
    buffer = _full(setup, data.frames)
    return lambda: buffer.sample(setup.batch)


def extend(setup: Setup) -> Call:
    """Write one row into each of `batch` parts of a vector buffer, its way to write many rows."""
    buffer = _module().VectorReplayBuffer(setup.rows, setup.batch)
    batches = cycle([_batch(rows, setup.batch) for rows in data.pool(data.transitions, setup.batch)])
    buffer.add(next(batches))
    for value in buffer._meta.values():  # noqa: SLF001 - no public way to touch the arrays
        value[:] = 0  # so that no call meets a page for the first time
    return lambda: buffer.add(next(batches))


def add(setup: Setup) -> Call:
    """Write single transitions."""
    buffer = _full(setup, data.transitions)
    items = cycle([_batch(rows, 1)[0] for rows in data.pool(data.transitions, 1)])
    return lambda: buffer.add(next(items))


WORKLOADS: dict[str, Callable[[Setup], Call]] = {
    "uniform.dict": uniform,
    "prioritized.dict": prioritized,
    "extend.dict": extend,
    "add.dict": add,
    "images.dict": images,
}
