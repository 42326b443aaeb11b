"""A new file of an array, written in order, while rows about to be lost may be put down before their turn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ostinato.durable.blocks import BlockWriter
from ostinato.durable.extents import read_into
from ostinato.durable.files import create_file, disk_errors
from ostinato.durable.records import BLOCK_BYTES, FileRecord
from ostinato.durable.runs import contains, one_run, place, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ostinato.durable.runs import Runs

__all__ = ["PIECE_BYTES", "Piece", "RowFile", "can_write_ahead"]

PIECE_BYTES = 2 * 2**20
_ZEROS = bytes(4096)


def can_write_ahead() -> bool:
    """Whether rows can be put down before their turn on this system."""
    return hasattr(os, "pwrite")


class Piece(NamedTuple):
    """Rows that follow each other in a file."""

    offset: int
    """Where they begin."""
    rows: np.ndarray
    """Their numbers, int64 `[n]`."""
    first: int | None
    """The first one, where they follow each other in the array, too."""


@final
class RowFile:
    """The file of a base (all rows), or of a patch (some runs). One thread appends; `put_ahead` needs the rows' lock.

    Args:
        path: New file.
        row_bytes: Bytes of a row.
        rows: How many rows the array has.
        runs: The rows of a patch; None makes a base.

    Raises:
        StorageMemoryError: The disk is full.
    """

    def __init__(self, path: Path, row_bytes: int, rows: int, runs: Runs | None) -> None:
        self.path = path
        self.row_bytes = row_bytes
        self.runs = one_run(0, rows) if runs is None else runs
        self._patch = runs is not None
        if runs is None:
            self._at, self._large = np.zeros(len(self.runs), dtype=np.int64), np.ones(len(self.runs), dtype=bool)
            self.nbytes = rows * row_bytes
        else:
            self._at, self._large, _, self.nbytes = place(runs, row_bytes)
        self.done = 0
        """Rows before this place in the file were taken from memory; the caller moves it on under the rows' lock."""
        with disk_errors(path, self.nbytes):
            self._fd = create_file(path, read=True)
        self._blocks = BlockWriter(self._fd, BLOCK_BYTES)
        if self._patch:
            self.append(0, np.ascontiguousarray(runs, dtype="<i8").reshape(-1).view(np.uint8).data)

    def pieces(self) -> Iterator[Piece]:
        """Cut the rows into pieces of at most 2 MiB (or one row), in the order of the file."""
        most = max(1, PIECE_BYTES // max(1, self.row_bytes))
        for (first, count), at in zip(self.runs[self._large].tolist(), self._at[self._large].tolist(), strict=True):
            for start in range(0, count, most):
                n = min(most, count - start)
                yield Piece(at + start * self.row_bytes, np.arange(first + start, first + start + n), first + start)
        small = ~self._large
        if small.any():
            rows, begin = rows_of(self.runs[small]), int(self._at[small][0])
            for start in range(0, len(rows), most):
                yield Piece(begin + start * self.row_bytes, rows[start : start + most], None)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Return where rows (int64, ascending) lie in the file; -1 for those that it does not hold."""
        if not len(self.runs):
            return np.full(len(rows), -1, dtype=np.int64)
        run = np.searchsorted(self.runs[:, 0], rows, side="right") - 1
        return np.where(contains(self.runs, rows), self._at[run] + (rows - self.runs[run, 0]) * self.row_bytes, -1)

    def append(self, offset: int, data: memoryview) -> None:
        """Write the next bytes; what lies between is zero.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.path, self.nbytes):
            while self._blocks.nbytes < offset:
                self._blocks.write(memoryview(_ZEROS)[: offset - self._blocks.nbytes])
            self._blocks.write(data)

    def put_ahead(self, offset: int, data: memoryview) -> None:
        """Put rows down before their turn.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.path, self.nbytes):
            while len(data):
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count

    def read_back(self, offset: int, view: memoryview) -> None:
        """Read rows that were put down before their turn."""
        read_into(self._fd, view, offset, self.path)

    def finish(self) -> FileRecord:
        """Close the file, not synced yet, and return its record."""
        self.append(self.nbytes, memoryview(b""))
        checksums = self._blocks.finish()
        self.close()
        runs = len(self.runs) if self._patch else 0
        return FileRecord(self.path.name, self._blocks.nbytes, BLOCK_BYTES, checksums, runs)

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
