"""RLinf: its `TrajectoryReplayBuffer` over `pt` files, its only format without unpickling; rollouts in files only."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Any

from benchmarks.peers._trajectories import ENVS, FORMATS, STEPS, rollout
from benchmarks.workloads import WORKLOADS as WORKLOADS_OF_ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup

LACKS = {load.family: "rollouts in files only" for load in WORKLOADS_OF_ALL if load.family != "trajectories"}


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
