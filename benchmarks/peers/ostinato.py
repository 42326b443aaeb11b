"""Ostinato: `ReplayBuffer` with dict and TensorDict batches; OSTINATO_NATIVE=0 leaves the native part out.

The AMP ring goes through the door for IsaacGymEnvs, whose buffer it stands beside.
"""

from __future__ import annotations

import os
from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING

from benchmarks import data
from benchmarks.peers import _checkpoints, _datasets, _episodes, _prioritized, _shared, _threads, _trajectories
from benchmarks.peers._composable import filled, workloads
from benchmarks.peers._torch import as_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows


def amp(setup: Setup) -> Call:
    """Write AMP observations and samples without replacement."""
    ring = import_module("ostinato.compat.isaacgymenvs").ReplayBuffer(setup.rows, "cpu")
    for rows in data.chunks(data.amp, setup.rows, 10_000):
        ring.store(as_kind(rows, "dict"))
    batches = cycle([as_kind(rows, "dict") for rows in data.pool(data.amp, setup.batch)])

    def call() -> None:
        ring.store(next(batches))
        ring.sample(setup.batch)

    return call


def out(setup: Setup, make: Callable[[int], Rows]) -> Call:
    """Sample into the tensors of an earlier batch."""
    buffer = filled("ostinato", setup, make)
    batch = buffer.sample()
    return lambda: buffer.sample(setup.batch, out=batch)


_OFF = os.environ.get("OSTINATO_NATIVE") == "0"
_OWN = ("prioritized-rows", "prioritized-threads", "priority-update", "slices-rows", "shared", "dataset")
LACKS = {"start": "imports the same", **dict.fromkeys(_OWN, "see the compiled way")} if _OFF else {}
_ALL = {
    **workloads("ostinato"),
    **_episodes.slices("ostinato"),
    **_episodes.UNITS,
    **_shared.WORKLOADS,
    **_trajectories.WORKLOADS,
    **_checkpoints.WORKLOADS,
    **_datasets.WORKLOADS,
    **_threads.workloads("ostinato"),
    "uniform-out.dict": lambda setup: out(setup, data.transitions),
    "images-out.dict": lambda setup: out(setup, data.frames),
    "amp.dict": amp,
    **{f"prioritized-threads.{count}": _prioritized.threads for count in (1, 2)},
    **{f"priority-update.{some}-of-{all_}": _prioritized.update for some in ("1e3", "1e5") for all_ in ("1e6", "1e7")},
}
WORKLOADS = {name: call for name, call in _ALL.items() if name.split(".")[0] not in LACKS}


def version() -> str:
    """Return the library's version, and say so when the native part is absent though not switched off."""
    package = import_module("ostinato")
    _ = package.ReplayBuffer
    absent = import_module("ostinato._backend").backend.native is None
    number = getattr(package, "__version__", "from source")
    return f"{number}{' (native part missing)' if absent and not _OFF else ''}"
