"""Ostinato: `ReplayBuffer` with dict and TensorDict batches; OSTINATO_NATIVE=0 leaves the native part out."""

from __future__ import annotations

import os
from importlib import import_module

from benchmarks.peers import _trajectories
from benchmarks.peers._composable import workloads

_OFF = os.environ.get("OSTINATO_NATIVE") == "0"
LACKS = {"start": "imports the same", "prioritized-rows": "see the compiled way"} if _OFF else {}
WORKLOADS = {
    name: call
    for name, call in (workloads("ostinato") | _trajectories.WORKLOADS).items()
    if not (_OFF and name.split(".")[0] in LACKS)
}


def version() -> str:
    """Return the library's version, and say so when the native part is absent though not switched off."""
    package = import_module("ostinato")
    _ = package.ReplayBuffer
    absent = getattr(import_module("ostinato._backend"), "native", None) is None
    number = getattr(package, "__version__", "from source")
    return f"{number}{' (native part missing)' if absent and not _OFF else ''}"
