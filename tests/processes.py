"""Processes for tests: a fork server that has imported torch, so that a new process takes milliseconds, not seconds."""

from __future__ import annotations

import multiprocessing

__all__ = ["CONTEXT"]

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes by forking one that has imported what most tests need."""
CONTEXT.set_forkserver_preload(["torch", "tensordict", "tests.contracts.test_buffers"])
