"""TorchRL: `ReplayBuffer` with dict (pytree) and with TensorDict batches."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers._composable import workloads

LACKS = {"prioritized-rows": "sizes are compared for Ostinato alone", "trajectories": "no rollouts in files"}
WORKLOADS = {name: call for name, call in workloads("torchrl.data").items() if not name.startswith("prioritized-rows")}


def version() -> str:
    """Return the library's version."""
    import_module("torchrl.data")
    return str(import_module("torchrl").__version__)
