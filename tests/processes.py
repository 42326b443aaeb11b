"""Processes for tests: a fork server that has imported torch, so that a new process takes milliseconds, not seconds."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CONTEXT", "run"]

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes by forking one that has imported what most tests need."""
CONTEXT.set_forkserver_preload(["torch", "tensordict", "tests.registry"])


def run(function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> Any:
    """Call a function of a module in a process of its own; return or raise what it did.

    The process begins as a new one does, with the modules of the tests imported and without what this process has made.
    A process that dies raises `BrokenProcessPool`.
    """
    with ProcessPoolExecutor(1, CONTEXT) as pool:
        return pool.submit(function, *args).result(timeout_s)
