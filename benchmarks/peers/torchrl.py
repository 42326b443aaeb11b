"""TorchRL: `ReplayBuffer` with dict (pytree) and with TensorDict batches."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers._composable import workloads

LACKS: dict[str, str] = {}
WORKLOADS = workloads("torchrl.data")


def version() -> str:
    """Return the library's version."""
    import_module("torchrl.data")
    return str(import_module("torchrl").__version__)
