"""Buffers on a device that is not the CPU, in a process of their own: a device is registered for a whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("cases", ["waits", "values", "fake_tensors"])
def test_on_a_device(cases: str) -> None:
    """Runs `cases_*.py`; a test of them alone: `pytest tests/device/cases_waits.py -k ...`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / f"cases_{cases}.py")]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
