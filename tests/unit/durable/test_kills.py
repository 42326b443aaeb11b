"""Killed savers, full disks and the memory that saving takes, each in a process of its own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato.durable import CheckpointReader, CheckpointWriter
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
KILLS = 4
TRIES = 100


def save(path: Path, number: int, data: torch.Tensor | None = None) -> None:
    data = torch.full((200_000,), number) if data is None else data
    with CheckpointWriter(path, format_name="example") as writer:
        for name in ("a", "b", "c"):
            writer.add_array(name, data)
        writer.commit({"number": number, "big": data[:50_000]})


def load(path: Path) -> int:
    reader = CheckpointReader(path, format_name="example")
    state = reader.state()
    for tensor in (reader.read("a"), reader.read("b"), reader.read("c"), state["big"]):
        assert tensor.unique().tolist() == [state["number"]]
    return int(state["number"])


def killed_while_saving(path: Path, number: int, delay_s: float) -> bool:
    """Fork a process that saves, kill it after a delay; True when the kill fell inside the save."""
    data = torch.full((200_000,), number)  # made here: torch's threads do not outlive a fork
    ready, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(start, b"x")
            save(path, number, data)
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(start)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, 0)
    started = time.perf_counter()
    save(path, 0)
    duration = time.perf_counter() - started
    rng = random.Random(5)
    inside = 0
    current = 0
    for number in range(1, TRIES + 1):
        hit = killed_while_saving(path, number, rng.random() * duration)
        inside += hit
        duration *= 1.0 if hit else 0.8  # the first save may have taken longer than these do
        found = load(path)
        assert found in (current, number)
        current = found
        if inside >= KILLS and number >= 3 * KILLS:
            break
    assert inside >= KILLS
    save(path, TRIES + 1)
    assert load(path) == TRIES + 1
    assert len(list(path.iterdir())) == 5  # what the killed ones left is gone


def test_a_killed_first_save_leaves_nothing_that_loads(tmp_path: Path) -> None:
    for number in range(3):
        path = tmp_path / str(number)
        if killed_while_saving(path, number, 0.001 * number):
            try:
                assert load(path) == number
            except CheckpointError as error:
                assert "no checkpoint at" in str(error)  # noqa: PT017
        save(path, 50)
        assert load(path) == 50


def run(code: str, *arguments: object) -> str:
    """Run Python in a process of its own and return what it printed."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


FULL_DISK = """
import resource, sys
import torch
from ostinato.durable import CheckpointWriter
from ostinato.errors import StorageMemoryError
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
what = sys.argv[2]
try:
    with CheckpointWriter(sys.argv[1], format_name="example") as writer:
        writer.add_array("small", torch.zeros(1000))
        if what == "array":
            writer.add_array("large", torch.zeros(500_000))
        if what == "values":
            writer.add_values("large", ["x" * 500_000] * 4)
        writer.commit({"text": "x" * 2_000_000})
except StorageMemoryError as error:
    print(error)
"""


@pytest.mark.parametrize(("what", "needed"), [("array", 2_000_000), ("values", 1_000_000), ("state", 2_000_000)])
def test_a_full_disk_leaves_the_old_checkpoint_and_names_the_bytes(tmp_path: Path, what: str, needed: int) -> None:
    path = tmp_path / "a"
    save(path, 3)
    before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    message = run(FULL_DISK, path, what)
    words = message.split()
    assert int(words[words.index("needed,") - 2]) >= needed
    assert "bytes free (File too large): free disk space" in message
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
    assert load(path) == 3


MEMORY = """
import resource, sys
import torch
from ostinato.durable import CheckpointReader, CheckpointWriter

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

path, layout = sys.argv[1:]
table = torch.ones(4_700_000, 16)
half = table if layout == "contiguous" else table[:, 3:11] if layout == "rows" else table.view(16, -1).t()
torch.ones(1000).mul_(2)
with CheckpointWriter(path + "-warm", format_name="example") as writer:
    writer.add_array("a", torch.ones(10))
    writer.commit({})
before = peak()
with CheckpointWriter(path, format_name="example", needed_bytes=half.nbytes) as writer:
    writer.add_array("a", half)
    writer.commit({})
written = peak()
CheckpointReader(path, format_name="example").read_into("a", half)
CheckpointReader(path, format_name="example").verify()
print(half.nbytes, written - before, peak() - before)
"""


@pytest.mark.parametrize("layout", ["contiguous", "rows", "columns"])
def test_saving_and_loading_take_little_memory(tmp_path: Path, layout: str) -> None:
    size, writing, both = map(int, run(MEMORY, tmp_path / "a", layout).split())
    assert size >= 150_000_000
    assert writing < 32 * 2**20
    assert both < 32 * 2**20
