"""Checkpoints of a full buffer, and plain sequential writes and reads of as many bytes, synced to the disk alike."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import data

if TYPE_CHECKING:
    from benchmarks.adapter import Call, Setup

_STEP_BYTES = 2**20


def _buffer(setup: Setup, *, full: bool) -> Any:
    package = import_module("ostinato")
    buffer = package.ReplayBuffer(storage=package.LazyTensorStorage(setup.rows))
    for rows in data.chunks(data.transitions, setup.rows, 100_000) if full else ():
        buffer.extend({name: torch.from_numpy(value) for name, value in rows.items()})
    return buffer


def _bytes(setup: Setup) -> int:
    return sum(value.nbytes for value in data.transitions(1).values()) * setup.rows


def save(setup: Setup) -> Call:
    """Save the buffer, over the save before."""
    buffer, path = _buffer(setup, full=True), setup.directory / "save"
    return lambda: buffer.dumps(path)


def patch(setup: Setup) -> Call:
    """Write a batch of rows and save what has changed."""
    buffer, path = _buffer(setup, full=True), setup.directory / "save"
    rows = {name: torch.from_numpy(value) for name, value in data.transitions(setup.batch, 1).items()}
    buffer.dumps(path)

    def call() -> None:
        buffer.extend(rows)
        buffer.dumps(path, incremental=True)

    return call


def load(setup: Setup) -> Call:
    """Load the save into a buffer that holds nothing, checksums compared."""
    path = setup.directory / "save"
    _buffer(setup, full=True).dumps(path)
    return lambda: _buffer(setup, full=False).loads(path)


def open_mapped(setup: Setup) -> Call:
    """Load the save by mapping its files."""
    path = setup.directory / "save"
    _buffer(setup, full=True).dumps(path)
    return lambda: _buffer(setup, full=False).loads(path, mmap=True)


def write(setup: Setup) -> Call:
    """Write as many bytes to a new file, which takes the place of the one before, and wait for the disk."""
    content = torch.randint(0, 256, (_bytes(setup),), dtype=torch.uint8).numpy().data
    path, fresh = setup.directory / "plain", setup.directory / "fresh"

    def call() -> None:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for start in range(0, len(content), _STEP_BYTES):
            os.write(fd, content[start : start + _STEP_BYTES])
        os.fsync(fd)
        os.close(fd)
        fresh.replace(path)

    return call


def read(setup: Setup) -> Call:
    """Read as many bytes into new memory."""
    nbytes, path = _bytes(setup), setup.directory / "plain"
    write(setup)()

    def call() -> None:
        target = np.empty(nbytes, np.uint8).data  # in huge pages, where the system has them
        fd = os.open(path, os.O_RDONLY)
        for start in range(0, nbytes, _STEP_BYTES):
            os.readv(fd, [target[start : start + _STEP_BYTES]])
        os.close(fd)

    return call


WORKLOADS = {
    "checkpoint.save": save,
    "checkpoint.load": load,
    "checkpoint.patch": patch,
    "checkpoint.map": open_mapped,
}
LIMITS = {"checkpoint.save": write, "checkpoint.load": read}
