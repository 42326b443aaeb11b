"""RLinf: its `TrajectoryReplayBuffer` over `pt` files, its only format without unpickling; rollouts in files only."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Any

from benchmarks.peers._trajectories import ENVS, FORMATS, STEPS, rollout

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup

_OTHERS = (
    "uniform",
    "prioritized",
    "prioritized-rows",
    "prioritized-threads",
    "priority-update",
    "extend",
    "add",
    "images",
    "mmap",
    "slices",
    "slices-writing",
    "slices-rows",
    "n-step",
    "frame-stack",
    "single-copy",
    "amp",
    "checkpoint",
    "shared",
    "start",
)
LACKS = dict.fromkeys(_OTHERS, "rollouts in files only")


def version() -> str:
    """Return the library's version."""
    import_module("rlinf.data.replay_buffer")
    return installed("rlinf")


def sample(setup: Setup) -> Call:
    """Write the rollouts and return a call that draws a batch from all of them, with a cache of five."""
    module: Any = import_module("rlinf.data.replay_buffer")
    records: Any = import_module("rlinf.data.embodied_io_struct")
    buffer = module.TrajectoryReplayBuffer(
        cache_size=5, sample_window_size=0, auto_save=True, auto_save_path=str(setup.directory / "rollouts")
    )
    values = records.Trajectory(**rollout())
    for _ in range(setup.rows // (STEPS * ENVS)):
        buffer.add_trajectories([values])
    buffer.close()
    return lambda: buffer.sample(setup.batch)


WORKLOADS: dict[str, Callable[[Setup], Call]] = {f"trajectories.{name}": sample for name in FORMATS}
