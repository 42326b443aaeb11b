"""Stable-Baselines3: `ReplayBuffer`; numpy goes in, a namedtuple of torch tensors comes out."""

from __future__ import annotations

from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import data

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows

_OWN_KIND = "one kind of batch only, see dict"
LACKS = dict.fromkeys(("uniform", "extend", "add"), _OWN_KIND) | {
    "mmap": "no memory-mapped storage",
    "prioritized": "no prioritized sampling",
    "prioritized-rows": "no prioritized sampling",
    "prioritized-threads": "no prioritized sampling",
    "priority-update": "no prioritized sampling",
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


def version() -> str:
    """Return the library's version."""
    import_module("stable_baselines3.common.buffers")
    return str(import_module("stable_baselines3").__version__)


def _buffer(rows: int, obs: Any, action: Any, lanes: int) -> Any:
    # By name, so that type checking does not need the peer. Without time-limit handling: its faster way.
    buffers = import_module("stable_baselines3.common.buffers")
    return buffers.ReplayBuffer(
        rows,
        obs,
        action,
        device="cpu",
        n_envs=lanes,
        optimize_memory_usage=False,
        handle_timeout_termination=False,
    )


def _fill(buffer: Any, rows: Rows) -> Any:
    """Write every slot straight into its arrays: one `add` a row would take minutes."""
    parts = {
        "observations": "obs",
        "next_observations": "next_obs",
        "actions": "action",
        "rewards": "reward",
        "dones": "done",
    }
    for array, key in parts.items():
        if key in rows:
            target = getattr(buffer, array)
            target[:] = rows[key][0]
        else:
            getattr(buffer, array)[:] = 0
    buffer.full = True
    return buffer


def _transitions(setup: Setup, lanes: int) -> Any:
    spaces = import_module("gymnasium.spaces")
    obs = spaces.Box(-np.inf, np.inf, (data.OBS,), np.float32)
    action = spaces.Box(-np.inf, np.inf, (data.ACTION,), np.float32)
    return _fill(_buffer(setup.rows, obs, action, lanes), data.transitions(1))


def uniform(setup: Setup) -> Call:
    """Sample transitions uniformly."""
    buffer = _transitions(setup, lanes=1)
    return lambda: buffer.sample(setup.batch)


def images(setup: Setup) -> Call:
    """Sample frames uniformly; its rows also hold an action, a reward and a flag."""
    spaces = import_module("gymnasium.spaces")
    frame = spaces.Box(0, 255, data.FRAME, np.uint8)
    buffer = _fill(_buffer(setup.rows, frame, spaces.Discrete(4), 1), data.frames(1))
    return lambda: buffer.sample(setup.batch)


def _writer(buffer: Any, batches: list[Rows], count: int) -> Call:
    infos: list[dict[str, object]] = [{} for _ in range(count)]
    turns = cycle([(b["obs"], b["next_obs"], b["action"], b["reward"], b["done"], infos) for b in batches])
    return lambda: buffer.add(*next(turns))


def extend(setup: Setup) -> Call:
    """Write one row of each of `batch` environments, its way to write many rows."""
    return _writer(_transitions(setup, setup.batch), data.pool(data.transitions, setup.batch), setup.batch)


def add(setup: Setup) -> Call:
    """Write one row of one environment."""
    return _writer(_transitions(setup, 1), data.pool(data.transitions, 1), 1)


WORKLOADS: dict[str, Callable[[Setup], Call]] = {
    "uniform.dict": uniform,
    "extend.dict": extend,
    "extend.numpy": extend,
    "add.dict": add,
    "add.numpy": add,
    "images.dict": images,
}
