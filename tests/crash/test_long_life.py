"""Long lives: nothing grows, and few open files are enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.lives import BUFFERS

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs limits of POSIX")


def live(name: str, argument: str, *, place: Path | None = None, patience_s: float = PATIENCE_S) -> int:
    """Live a life in a process of its own; one that hangs is ended and fails. Return its exit status."""
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "tests.crash.lives", name, argument]
    environment = {**os.environ, **({} if place is None else {"OSTINATO_TEST_PLACE": str(place)})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience_s, check=False
    )
    assert "Error" not in done.stderr, done.stderr[-3000:]
    assert "resource_tracker" not in done.stderr, done.stderr[-3000:]
    assert "leaked" not in done.stderr, done.stderr[-3000:]
    return done.returncode


QUICK = {"prioritized slices", "mapped, ahead"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in BUFFERS]
)
def test_fifty_wraps_of_growing_episodes_take_no_memory(name: str) -> None:
    assert live("wraps", name) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_store_of_a_hundred_thousand_trajectories_needs_few_open_files(quick_path: Path) -> None:
    assert live("trajectories", "100000", place=quick_path, patience_s=1700) == 0
