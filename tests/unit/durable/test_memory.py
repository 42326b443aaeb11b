"""The memory that saving and loading take, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEMORY = """
import resource, sys
import torch
from ostinato.durable import CheckpointReader, CheckpointWriter

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

table = torch.ones(1_600_000, 16)
torch.ones(1000).mul_(2)
with CheckpointWriter(sys.argv[1] + "-warm", format_name="example") as writer:
    writer.add_array("a", torch.ones(10))
    writer.commit({})
before = peak()
for half in (table[:, 3:11], table.view(16, -1).t(), table):
    with CheckpointWriter(sys.argv[1], format_name="example", needed_bytes=half.nbytes) as writer:
        writer.add_array("a", half)
        writer.commit({})
    CheckpointReader(sys.argv[1], format_name="example").read_into([("a", half)])
    CheckpointReader(sys.argv[1], format_name="example").verify()
    assert half.nbytes > 50_000_000
    assert peak() - before < 32 * 2**20, (half.stride(), peak() - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the module resource is missing")
def test_saving_and_loading_take_little_memory(tmp_path):
    """Contiguous or not: strided rows, columns, and a whole table."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", MEMORY, tmp_path / "a"], timeout=120, check=True)
