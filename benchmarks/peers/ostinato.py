"""Ostinato: `ReplayBuffer` with dict and TensorDict batches; OSTINATO_NATIVE=0 leaves the native part out."""

from __future__ import annotations

import os
from importlib import import_module

from benchmarks.peers._composable import workloads

LACKS: dict[str, str] = {}
WORKLOADS = workloads("ostinato")


def version() -> str:
    """Return the library's version, and say so when the native part is absent though not switched off."""
    package = import_module("ostinato")
    _ = package.ReplayBuffer
    off = os.environ.get("OSTINATO_NATIVE") == "0"
    absent = getattr(import_module("ostinato._backend"), "native", None) is None
    number = getattr(package, "__version__", "from source")
    return f"{number}{' (native part missing)' if absent and not off else ''}"
