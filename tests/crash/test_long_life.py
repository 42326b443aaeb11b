"""Long lives: nothing grows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.lives import BUFFERS

QUICK = {"prioritized slices", "mapped, ahead"}


@pytest.mark.skipif(os.name == "nt", reason="needs limits of POSIX")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in BUFFERS]
)
def test_fifty_wraps_of_growing_episodes_take_no_memory(name):
    """In a process of its own; one that hangs is ended and fails."""
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "tests.crash.lives", name]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for word in ("Error", "resource_tracker", "leaked"):
        assert word not in done.stderr, done.stderr[-3000:]
