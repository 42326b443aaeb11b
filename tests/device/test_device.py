"""Buffers on a device that is not the CPU, in a process of their own: a device is registered for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ostinato.core.episodes.table import EpisodeTable
from ostinato.core.records import Run
from ostinato.errors import OptionError

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("cases", "device"),
    [
        ("cases_values.py", "fakegpu"),  # a GPU draws other numbers than the CPU, to which these are compared
        ("cases_waits.py", "fakegpu"),
        pytest.param("cases_waits.py", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_on_a_device(cases: str, device: str) -> None:
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


def test_an_episode_table_takes_no_tensor_without_values() -> None:
    """`FakeTensorMode` makes tensors that have a device and a shape only; nothing reads the memory they do not have."""
    table = EpisodeTable(8)
    with FakeTensorMode():
        ends, slots = torch.zeros(4, dtype=torch.bool), torch.arange(4)
        with pytest.raises(OptionError, match="ends has no values on the CPU to read, got a FakeTensor"):
            table.record(Run(0, 4, 8), ends)
        assert table.rows == 0
        table.record(Run(0, 4, 8), None)
        for ask in (table.ahead, table.starts(2).draw):
            with pytest.raises(OptionError, match="has no values on the CPU to read, got a FakeTensor"):
                ask(slots)
