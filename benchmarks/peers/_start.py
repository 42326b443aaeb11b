"""Workloads that start a fresh interpreter: the same for each library but for the program."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.adapter import Seconds

if TYPE_CHECKING:
    from benchmarks.adapter import Call

_IMPORT = """
import torch, time
before = time.perf_counter()
import {module}
print(time.perf_counter() - before)
"""


def program(code: str) -> Call:
    """Return a call that runs `code` in a new process of this interpreter and waits for its end.

    The call raises RuntimeError with the last line of what the program said when it fails.
    """

    def call() -> str:
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            msg = f"the program failed: {words[-1]}"
            raise RuntimeError(msg)
        return done.stdout

    return call


def importing(module: str) -> Call:
    """Return a call that imports a module in a new process that has torch, and returns how long that took."""
    run = program(_IMPORT.format(module=module))
    return lambda: Seconds(str(run()).splitlines()[-1])
