"""Limit of units and of sharing: Ostinato's plain calls, on rows that hold the same bytes ready-made."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers import _episodes, _shared
from benchmarks.workloads import WORKLOADS as WORKLOADS_OF_ALL

PLAIN = {**_episodes.PLAIN, **_shared.PLAIN}
LACKS = {load.family: "the limit of units and of sharing alone" for load in WORKLOADS_OF_ALL if load.name not in PLAIN}
WORKLOADS = PLAIN


def version() -> str:
    """Return the library's version."""
    return str(getattr(import_module("ostinato"), "__version__", "from source"))
