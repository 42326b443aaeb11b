"""A disk that fills, or a limit on files: the checkpoint that was there stays whole, the message names the bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ostinato import ListStorage, ReplayBuffer
from ostinato.errors import StorageMemoryError
from tests.crash.fuzz import state_of
from tests.registry import registered

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MEGABYTES = 4

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs limits of POSIX")

GROW = """
import resource, sys
import torch
from tensordict import TensorDict
from ostinato import LazyTensorStorage, TensorDictReplayBuffer
from ostinato.errors import StorageMemoryError

folder, save, limit = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=6, generator=torch.Generator().manual_seed(0))
t = torch.arange(20_000)
rb.extend(TensorDict({"t": t, "obs": t[:, None].float().expand(-1, 100)}, [20_000]))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    rb.dumps(folder, incremental=save)
except StorageMemoryError as error:
    print(error)
"""
NEEDED = 20_000 * 408
"""Bytes of the rows of the buffer that does not fit."""
FIRST_FILE = 20_000 * 400
"""Bytes of their first field, which has a file of its own."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few megabytes, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _stays_whole(folder: Path, incremental: bool, limit: int) -> str:
    """Save more than there is room for over a checkpoint, which must stay as it is; return the message."""
    contract = registered("transform")
    rb = contract.fill()
    rb.dumps(folder, incremental=incremental)
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    command = [sys.executable, "-W", "ignore", "-c", GROW, str(folder), str(incremental), str(limit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before
    again = contract.make(contract.capacity)
    again.loads(folder)
    assert state_of(again) == state_of(rb)
    contract.extend(rb, 3, 100)
    rb.dumps(folder, incremental=incremental)  # what fits is saved on
    return done.stdout


def _needed(message: str) -> int:
    words = message.split()
    return int(words[words.index("needed,") - 2])


EACH_SAVE = pytest.mark.parametrize("incremental", [pytest.param(False, marks=pytest.mark.slow), True])


@EACH_SAVE
def test_a_limit_on_files_leaves_the_checkpoint_whole(incremental, tmp_path):
    said = _stays_whole(tmp_path / "a", incremental, 1_000_000)
    assert "File too large" in said
    assert _needed(said) > 1_000_000


@EACH_SAVE
def test_a_full_disk_leaves_the_checkpoint_whole(incremental, small_disk):
    said = _stays_whole(small_disk / "a", incremental, 0)
    assert _needed(said) >= (FIRST_FILE if incremental else NEEDED)  # changes are counted file by file
    assert "free disk space" in said


@pytest.mark.parametrize("incremental", [False, True])
def test_a_disk_that_fills_meanwhile_leaves_the_checkpoint_whole(incremental, small_disk):
    """How many bytes objects take is known when they are written: the disk is full in the middle."""
    folder = small_disk / "a"
    rb, again = (ReplayBuffer(storage=ListStorage(40), collate_fn=lambda rows: rows) for _ in range(2))
    rb.extend(["first"])
    rb.dumps(folder, incremental=incremental)
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    rb.extend([f"{i}" * 200_000 for i in range(39)])
    with pytest.raises(StorageMemoryError, match=r"\d+ bytes needed, \d+ bytes free \(No space left on device\)"):
        rb.dumps(folder, incremental=incremental)
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before
    again.loads(folder)
    assert again[:] == ["first"]
