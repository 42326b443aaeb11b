"""Writing arrays: all rows, or a patch with those that have changed since an older checkpoint."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
import xxhash

from ostinato.durable.arrays import ArrayRecord, join_runs, one_run, place, place_all, read_runs
from ostinato.durable.blocks import BLOCK_BYTES, FileRecord, NewFile
from ostinato.durable.dtypes import DTYPES, check_plain, copy_elements, dtype_name, is_raw, raw_view, shape_nbytes
from ostinato.durable.files import check_free, disk_errors, safe_join
from ostinato.durable.positioned_reads import read_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.arrays import Runs

PIECE_BYTES = 2 * 2**20
MOST_PATCHES = 16
"""The next save replaces this many patches of an array by one."""
_PRINT_BYTES = 64 * 1024
_ZEROS = bytes(4096)


class Piece(NamedTuple):
    """Rows that are adjacent in a file."""

    offset: int
    """Position of the first row in the file, in bytes."""
    rows: np.ndarray
    """Numbers of the rows, int64 `[n]`."""
    first: int | None
    """Number of the first row, if the rows are adjacent in the array, too."""


@final
class RowFile:
    """The new file of a base (all rows) or of a patch (some runs of rows).

    One thread appends. `put_ahead` requires the lock that guards the rows.

    Args:
        path: New file.
        dtype: Name of the dtype of the array.
        shape: Shape of the array, `[rows, ...]`, or `[]` for a scalar.
        runs: The rows of a patch; None makes a base.
        block_bytes: Bytes per checksum.

    Raises:
        StorageMemoryError: The disk is too small.
    """

    def __init__(
        self, path: Path, dtype: str, shape: tuple[int, ...], runs: Runs | None, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.row_bytes = shape_nbytes(shape[1:], DTYPES[dtype])
        self._patch = runs is not None
        rows = shape[0] if shape else 1
        self.places = place_all(rows, self.row_bytes) if runs is None else place(runs, self.row_bytes)
        self.done = 0
        """Rows before this offset were copied from memory; the caller sets it under the lock that guards the rows."""
        check_free(path, self.places.nbytes)
        self.file = NewFile(path, self.places.nbytes, block_bytes)
        if runs is not None:
            self.append(0, np.ascontiguousarray(runs, dtype="<i8").reshape(-1).view(np.uint8).data)

    def pieces(self) -> Iterator[Piece]:
        """Divide the rows into pieces of at most 2 MiB (or one row), in the order of the file."""
        most = max(1, PIECE_BYTES // max(1, self.row_bytes))
        for first, count, at in self.places.large_runs():
            for start in range(first, first + count, most):
                rows = np.arange(start, min(start + most, first + count))
                yield Piece(at + (start - first) * self.row_bytes, rows, start)
        rows = self.places.small_rows()
        for start in range(0, len(rows), most):
            yield Piece(self.places.small_start + start * self.row_bytes, rows[start : start + most], None)

    def append(self, offset: int, data: memoryview) -> None:
        """Write the next bytes at an offset; the gap before it is filled with zeros.

        Raises:
            StorageMemoryError: The disk is full.
        """
        while self.file.nbytes < offset:
            self.file.append(memoryview(_ZEROS)[: offset - self.file.nbytes])
        self.file.append(data)

    def write(self, tensor: Tensor) -> None:
        """Append the rows of the whole array, which the file needs.

        Contiguous CPU memory is written without a copy; strided rows and tensors on other devices are staged in
        2 MiB of memory, or one row. The tensor must not change meanwhile, or the checksums will not match.
        """
        tensor = tensor if tensor.ndim else tensor.unsqueeze(0)
        staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        for piece in self.pieces():
            where = torch.from_numpy(piece.rows) if piece.first is None else slice(piece.first, piece.rows[-1] + 1)
            rows = tensor[where]
            if not is_raw(rows):
                if staging.nbytes < rows.nbytes:
                    staging = torch.empty(rows.nbytes, dtype=torch.uint8, device="cpu")
                source, rows = rows, staging[: rows.nbytes].view(rows.dtype).view(rows.shape)
                copy_elements(rows, source)
            self.append(piece.offset, raw_view(rows))

    def put_ahead(self, offset: int, data: memoryview) -> None:
        """Write rows before it is their turn.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.file.path, self.places.nbytes):
            while len(data):
                count = os.pwrite(self.file.fd, data, offset)
                data, offset = data[count:], offset + count

    def read_back(self, offset: int, view: memoryview) -> None:
        """Read rows that `put_ahead` wrote."""
        read_into(self.file.fd, view, offset, self.file.path)

    def finish(self, *, sync: bool = False) -> FileRecord:
        """Close the file and return its record.

        Args:
            sync: Wait until the bytes are on the disk.
        """
        self.append(self.places.nbytes, memoryview(b""))
        return self.file.finish(runs=len(self.places.runs) if self._patch else 0, sync=sync)

    def close(self) -> None:
        """Close the file; does nothing if it is closed."""
        self.file.close()


def can_write_ahead() -> bool:
    """Whether this system can write rows before their turn."""
    return hasattr(os, "pwrite")


def write_array(
    root: Path, file: str, tensor: Tensor, *, block_bytes: int = BLOCK_BYTES, sync: bool = True
) -> ArrayRecord:
    """Write a tensor to a new file; see `RowFile.write`.

    Args:
        root: Existing directory.
        file: Name of the new file in it.
        tensor: Dense tensor of any shape, on any device, contiguous or not.
        block_bytes: Bytes per checksum.
        sync: Wait until the bytes are on the disk.

    Returns:
        The record for the manifest.

    Raises:
        CheckpointError: The tensor is sparse, or has a dtype that files cannot hold.
        StorageMemoryError: The disk is full; the file is removed.
    """
    path = safe_join(root, file)
    plain = check_plain(tensor, path)
    dtype, shape = dtype_name(plain.dtype), tuple(plain.shape)
    rows = RowFile(path, dtype, shape, None, block_bytes)
    with rows.file:
        rows.write(plain)
        return ArrayRecord.whole(dtype, shape, (rows.finish(sync=sync),))


def write_stream(root: Path, file: str, chunks: Iterable[bytes], *, block_bytes: int = BLOCK_BYTES) -> ArrayRecord:
    """Write bytes of unknown total size; the record is that of an array `uint8[nbytes]`.

    Raises:
        StorageMemoryError: The disk is full; the file is removed.
    """
    with NewFile(safe_join(root, file), block_bytes=block_bytes) as new:
        for chunk in chunks:
            new.append(memoryview(chunk))
        record = new.finish(sync=True)
    return ArrayRecord.whole("uint8", (record.nbytes,), (record,))


# -- what an incremental save writes -----------------------------------------------------------------------------------


def plan(
    root: Path, old: ArrayRecord | None, dtype: str, shape: tuple[int, ...], changed: Runs | None
) -> tuple[ArrayRecord, Runs | None]:
    """Decide which rows to write.

    If the patches of an array would take more bytes than its base, all rows are written. So an array takes at most
    twice its bytes on the disk, and an incremental save writes at most as much as a full one.

    Args:
        root: Directory of the older checkpoint.
        old: Record of the array in it.
        dtype: The dtype now.
        shape: The shape now.
        changed: Rows that have changed since; None writes all.

    Returns:
        The record to which the new file is added, and the rows that it gets: None for all rows, and no rows if the
        older files hold everything.
    """
    everything = ArrayRecord.whole(dtype, shape, ()), None
    if changed is None or old is None or old.dtype != dtype or not shape or old.shape[1:] != shape[1:]:
        return everything
    if old.shape[0] > shape[0] or (not old.files[0].nbytes and old.shape != shape):
        return everything
    runs = join_runs(changed, one_run(old.shape[0], shape[0] - old.shape[0]))
    if not len(runs) or not old.files[0].nbytes:
        return old, one_run(0, 0)
    base, *patches = old.files
    if len(patches) >= MOST_PATCHES:
        runs, patches = join_runs(runs, *read_runs(root, old)), []
    if place(runs, old.row_bytes).nbytes + sum(patch.nbytes for patch in patches) > base.nbytes:
        return everything
    return replace(old, shape=shape, files=(base, *patches)), runs


class Print(NamedTuple):
    """Fingerprint of an array: its dtype, shape, and a checksum of every 64 KiB."""

    dtype: Any
    shape: tuple[int, ...]
    sums: np.ndarray


def print_of(tensor: Tensor) -> Print:
    """Return the fingerprint of a contiguous tensor on the CPU. Cost: one pass over its bytes."""
    raw = raw_view(tensor)
    starts = range(0, len(raw), _PRINT_BYTES)
    sums = np.fromiter((xxhash.xxh3_64_intdigest(raw[i : i + _PRINT_BYTES]) for i in starts), np.uint64, len(starts))
    return Print(tensor.dtype, tuple(tensor.shape), sums)


def changed_rows(old: Print | None, new: Print, row_bytes: int) -> Runs:
    """Return the rows of all blocks that differ, and new rows; all rows if the dtype or shape of a row differs."""
    rows = new.shape[0] if new.shape else 0
    if old is None or old.dtype != new.dtype or old.shape[1:] != new.shape[1:] or not row_bytes:
        return one_run(0, rows)
    common = min(len(old.sums), len(new.sums))
    differ = np.flatnonzero(old.sums[:common] != new.sums[:common])
    first = differ * _PRINT_BYTES // row_bytes
    last = np.minimum(-(-(differ + 1) * _PRINT_BYTES // row_bytes), rows)
    runs = np.stack([first, last - first], axis=1)[first < last]
    start = common * _PRINT_BYTES // row_bytes
    return join_runs(runs.astype(np.int64), one_run(start, max(0, rows - start)))
