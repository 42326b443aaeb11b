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
from tests.crash.kinds import KINDS, extend, fill, fingerprint, read_all
from tests.crash.modes import LOADS, SAVES

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
from tests.crash.modes import SAVES

folder, save, limit = sys.argv[1], SAVES[sys.argv[2]], int(sys.argv[3])
rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=6, generator=torch.Generator().manual_seed(0))
t = torch.arange(20_000)
rb.extend(TensorDict({"t": t, "obs": t[:, None].float().expand(-1, 100)}, [20_000]))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    rb.dumps(folder, **save)
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


def _does_not_fit(folder: Path, save: str, limit: int) -> str:
    command = [sys.executable, "-W", "ignore", "-c", GROW, str(folder), save, str(limit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _stays_whole(folder: Path, save: str, limit: int) -> str:
    rb = fill(KINDS["prioritized"]())
    rb.dumps(folder, **SAVES[save])
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    said = _does_not_fit(folder, save, limit)
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before
    for load in LOADS.values():
        again = KINDS["prioritized"]()
        again.loads(folder, **load)
        assert fingerprint(again.state_dict(), read_all(again)) == fingerprint(rb.state_dict(), read_all(rb))
    extend(rb, 100, 3)
    rb.dumps(folder, **SAVES[save])  # what fits is saved on
    return said


def _needed(message: str) -> int:
    words = message.split()
    return int(words[words.index("needed,") - 2])


EACH_SAVE = [pytest.param("whole", marks=pytest.mark.slow), "incremental"]


@pytest.mark.parametrize("save", EACH_SAVE)
def test_a_limit_on_files_leaves_the_checkpoint_whole(save: str, tmp_path: Path) -> None:
    said = _stays_whole(tmp_path / "a", save, 1_000_000)
    assert "File too large" in said
    assert _needed(said) > 1_000_000


@pytest.mark.parametrize("save", EACH_SAVE)
def test_a_full_disk_leaves_the_checkpoint_whole(save: str, small_disk: Path) -> None:
    said = _stays_whole(small_disk / "a", save, 0)
    assert _needed(said) >= (NEEDED if save == "whole" else FIRST_FILE)  # changes are counted file by file
    assert "free disk space" in said


@pytest.mark.parametrize("save", SAVES)
def test_a_disk_that_fills_meanwhile_leaves_the_checkpoint_whole(save: str, small_disk: Path) -> None:
    """How many bytes objects take is known when they are written: the disk is full in the middle."""
    folder = small_disk / "a"
    rb = ReplayBuffer(storage=ListStorage(40), collate_fn=lambda rows: rows)
    rb.extend(["first"])
    rb.dumps(folder, **SAVES[save])
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    rb.extend([f"{i}" * 200_000 for i in range(39)])
    with pytest.raises(StorageMemoryError, match=r"\d+ bytes needed, \d+ bytes free \(No space left on device\)"):
        rb.dumps(folder, **SAVES[save])
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before
    for load in LOADS.values():
        again = ReplayBuffer(storage=ListStorage(40), collate_fn=lambda rows: rows)
        again.loads(folder, **load)
        assert again[:] == ["first"]
