"""Limit of units, sharing and threads: Ostinato's plain calls in one thread, on rows with the same bytes ready-made."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers import _episodes, _shared, _threads
from benchmarks.workloads import WORKLOADS as WORKLOADS_OF_ALL

PLAIN = {**_episodes.PLAIN, **_shared.PLAIN, **_threads.ONE_THREAD}
LACKS = {load.family: "not for this workload" for load in WORKLOADS_OF_ALL if load.name not in PLAIN}
WORKLOADS = PLAIN


def version() -> str:
    """Return the library's version."""
    return str(getattr(import_module("ostinato"), "__version__", "from source"))
