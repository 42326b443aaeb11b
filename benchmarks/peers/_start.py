"""Workloads that start a fresh interpreter: the same for each library but for the program."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.adapter import Seconds

if TYPE_CHECKING:
    from benchmarks.adapter import Call

_IMPORT = """
import gc, torch, time
gc.collect()  # due for torch's objects: otherwise it falls into the imports of some versions, and not of others
before = time.perf_counter()
from {module} import {names}
print(time.perf_counter() - before)
"""


def program(code: str) -> Call:
    """Return a call that runs `code` in a new process of this interpreter and waits for its end.

    The call raises RuntimeError with the last line of what the program said when it fails.
    """

    def call() -> str:
        # with bytecode, as of an installed package, also for a checkout in an environment that keeps none
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            msg = f"the program failed: {words[-1]}"
            raise RuntimeError(msg)
        return done.stdout

    return call


def importing(module: str, names: str) -> Call:
    """Return a call that imports names of a module in a new process that has torch, and returns how long that took."""
    run = program(_IMPORT.format(module=module, names=names))
    run()  # writes the bytecode
    return lambda: Seconds(str(run()).splitlines()[-1])
