"""Killed savers, full disks and the memory that saving takes, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import pytest
import torch
from tests.unit.trajectories.kills import run_and_kill

from ostinato.durable import CheckpointReader, CheckpointWriter
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def save(path: Path, number: int) -> None:
    data = torch.full((20_000,), number)
    with CheckpointWriter(path, format_name="example") as writer:
        for name in ("a", "b"):
            writer.add_array(name, data)
        writer.commit({"number": number, "big": data[:10_000]})


def saving(path: Path, number: int, _report: object) -> None:
    save(path, number)


def load(path: Path) -> int:
    reader = CheckpointReader(path, format_name="example")
    state = reader.state()
    for tensor in (reader.read("a"), reader.read("b"), state["big"]):
        assert tensor.unique().tolist() == [state["number"]]
    return int(state["number"])


def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Killed at each file operation in turn."""
    path, current = tmp_path / "a", 0
    save(path, 0)
    for number in count(1):
        killed, _ = run_and_kill(partial(saving, path, number), number - 1)
        found = load(path)
        assert found in (current, number)
        current = found
        if not killed:
            break
    assert number > 5, "the operations were not counted"
    assert found == number
    assert len(list(path.iterdir())) == 4, "what the killed ones left is gone"


def test_a_killed_first_save_leaves_nothing_that_loads(tmp_path: Path) -> None:
    for number in count():
        path = tmp_path / str(number)
        killed, _ = run_and_kill(partial(saving, path, 7), number)
        try:
            assert load(path) == 7
        except CheckpointError as error:
            assert killed
            assert "no checkpoint at" in str(error)  # noqa: PT017
        save(path, 50)
        assert load(path) == 50
        if not killed:
            break


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


def test_saving_and_loading_take_little_memory(tmp_path: Path) -> None:
    """Contiguous or not: strided rows, columns, and a whole table."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", MEMORY, tmp_path / "a"], timeout=120, check=True)
