"""Workloads that start a fresh interpreter: the same for each library but for the program."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.adapter import Call


def program(code: str) -> Call:
    """Return a call that runs `code` in a new process of this interpreter and waits for its end.

    The call raises CalledProcessError when the program fails.
    """

    def call() -> None:
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

    return call
