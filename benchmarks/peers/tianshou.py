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
    "dataset": "no videos",
    "amp": "no sampling without replacement",
    "start": "not timed: its import brings a whole training library",
    **dict.fromkeys(("uniform-out", "images-out"), "no batch that it could fill"),
    **dict.fromkeys(("threads", "latency"), "not documented for threads"),
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


def _vector(setup: Setup) -> Any:
    buffer = _module().VectorReplayBuffer(setup.rows, setup.batch)
    buffer.add(_batch(data.transitions(setup.batch), setup.batch))
    for value in buffer._meta.values():  # noqa: SLF001 - no public way to touch the arrays
        value[:] = 0  # so that no call meets a page for the first time
    return buffer


def extend(setup: Setup) -> Call:
    """Write one row into each of `batch` parts of a vector buffer, its way to write many rows."""
    buffer = _vector(setup)
    batches = cycle([_batch(rows, setup.batch) for rows in data.pool(data.transitions, setup.batch)])
    return lambda: buffer.add(next(batches))


def add(setup: Setup) -> Call:
    """Write single transitions."""
    buffer = _full(setup, data.transitions)
    items = cycle([_batch(rows, 1)[0] for rows in data.pool(data.transitions, 1)])
    return lambda: buffer.add(next(items))


def extend_numpy(setup: Setup) -> Call:
    """Write batches of arrays; the call also makes the `Batch`."""
    buffer, batches = _vector(setup), cycle(data.pool(data.transitions, setup.batch))
    return lambda: buffer.add(_batch(next(batches), setup.batch))


def add_numpy(setup: Setup) -> Call:
    """Write single transitions of arrays and Python scalars; the call also makes the `Batch`."""
    buffer, made = _full(setup, data.transitions), _module().Batch
    steps = cycle([data.step(rows) for rows in data.pool(data.transitions, 1)])

    def call() -> None:
        obs, action, reward, next_obs, done = next(steps)
        row = made(obs=obs, act=action, rew=reward, terminated=done, truncated=False, obs_next=next_obs)
        buffer.add(row)

    return call


WORKLOADS: dict[str, Callable[[Setup], Call]] = {
    "uniform.dict": uniform,
    "prioritized.dict": prioritized,
    "extend.dict": extend,
    "extend.numpy": extend_numpy,
    "add.dict": add,
    "add.numpy": add_numpy,
    "images.dict": images,
}
