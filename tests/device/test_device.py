"""Buffers on a device that is not the CPU, in a process of their own: a device is registered for a whole process."""

from __future__ import annotations

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


@pytest.mark.parametrize("cases", sorted(path.name for path in HERE.glob("cases_*.py")))
def test_on_a_device(cases: str) -> None:
    """A test of them alone: `pytest tests/device/cases_waits.py -k ...`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / cases)]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=280, check=False)
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
