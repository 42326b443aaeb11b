"""Buffers on a device that is not the CPU, in a process of their own: a device is registered for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("cases", "device"),
    [
        ("cases_values.py", "fakegpu"),  # a GPU draws other numbers than the CPU, to which these are compared
        ("cases_waits.py", "fakegpu"),
        pytest.param("cases_waits.py", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_on_a_device(cases, device):
    """A test of them alone: `pytest tests/device/cases_waits.py -k ...`."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)],
        env={**os.environ, "OSTINATO_DEVICE": device},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
