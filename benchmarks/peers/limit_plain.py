"""Limit of a unit: Ostinato's plain sample of rows that hold the same bytes ready-made."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers._episodes import PLAIN
from benchmarks.workloads import WORKLOADS as WORKLOADS_OF_ALL

LACKS = {load.family: "the limit of units alone" for load in WORKLOADS_OF_ALL if load.name not in PLAIN}
WORKLOADS = PLAIN


def version() -> str:
    """Return the library's version."""
    return str(getattr(import_module("ostinato"), "__version__", "from source"))
