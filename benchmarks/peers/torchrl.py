"""TorchRL: `ReplayBuffer` with dict (pytree) and with TensorDict batches."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers import _episodes, _threads
from benchmarks.peers._composable import workloads

LACKS = {
    "prioritized-rows": "sizes are compared for Ostinato alone",
    "prioritized-threads": "threads are compared for Ostinato alone",
    "priority-update": "sizes are compared for Ostinato alone",
    "slices-rows": "sizes are compared for Ostinato alone",
    **dict.fromkeys(("uniform-out", "images-out"), "no batch that it could fill"),
    "trajectories": "no rollouts in files",
    "checkpoint": "compared with plain writes and reads",
    "dataset": "decodes whole files, one frame a call",
    **dict.fromkeys(("n-step", "frame-stack", "single-copy", "shared"), "compared with Ostinato's plain samples"),
}
_ALL = {**workloads("torchrl.data"), **_episodes.slices("torchrl.data"), **_threads.workloads("torchrl.data")}
WORKLOADS = {name: call for name, call in _ALL.items() if name.split(".")[0] not in LACKS}


def version() -> str:
    """Return the library's version."""
    import_module("torchrl.data")
    return str(import_module("torchrl").__version__)
