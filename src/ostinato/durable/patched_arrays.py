"""What an incremental save writes of an array: nothing, a patch, one patch in the place of many, or all of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import numpy as np
import torch
import xxhash

from ostinato.core.rows import as_bits
from ostinato.durable.blocks import open_checked
from ostinato.durable.dtypes import copy_elements, is_raw, raw_view
from ostinato.durable.positioned_reads import read_into
from ostinato.durable.row_ranges import check_runs, join_runs, one_run, place, rows_of
from ostinato.errors import DamagedFileError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.arrays import ArrayRecord, FileRecord
    from ostinato.durable.blocks import BlockReader
    from ostinato.durable.row_ranges import Places, Runs

__all__ = [
    "MOST_PATCHES",
    "Columns",
    "Overlay",
    "Plan",
    "Print",
    "Rows",
    "changed_rows",
    "map_rows",
    "mapped_pieces",
    "plan",
    "print_of",
    "read_rows",
    "read_runs",
]

_FIXED = 0x10  # MAP_FIXED, of Linux and macOS alike


def _find_mmap() -> Any:
    if sys.platform not in ("linux", "darwin") or not hasattr(mmap, "MAP_PRIVATE"):
        return None
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return function


_mmap = _find_mmap()


@final
class Overlay:
    """Memory of `nbytes` zeros, over which parts of files can be mapped.

    `tensor` (uint8) owns the memory, which is released with the last view.

    Raises:
        OptionError: This system cannot map files over memory.
    """

    def __init__(self, nbytes: int) -> None:
        if _mmap is None:
            msg = f"mmap=True needs Linux or macOS, this is {sys.platform}: load without it"
            raise OptionError(msg)
        if nbytes == 0:
            self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with torch.inference_mode(mode=False):
            self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._view = self.tensor.numpy().data

    def lay(self, fd: int, offset: int, start: int, nbytes: int, path: Path) -> None:
        """Map bytes of an open file over the memory from `start` on; bytes that are not whole pages are read."""
        end = start + nbytes
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and (start - offset) % mmap.PAGESIZE == 0:
            self._map(fd, offset + first - start, first, last - first)
        else:
            first = last = start
        read_into(fd, self._view[start:first], offset, path)
        read_into(fd, self._view[last:end], offset + last - start, path)

    def forget(self, start: int, end: int) -> None:
        """Release whole pages that are not read again."""
        first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _map(self, fd: int, offset: int, start: int, nbytes: int) -> None:
        address = self.tensor.data_ptr() + start
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(address, nbytes, both, mmap.MAP_PRIVATE | _FIXED, fd, offset) != address:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


_STAGING_BYTES = 2**20


class Target(Protocol):
    """Destination of rows."""

    def window(self, first: int, count: int) -> memoryview | None:
        """Return the memory of rows if bytes can be read into it directly."""

    def put(self, first: int | np.ndarray, rows: Tensor) -> None:
        """Copy rows (uint8 `[n, row_bytes]`) to `first` and the following rows, or to the given rows."""


@final
class Rows:
    """Destination: a tensor `[rows, ...]` of the dtype and shape of the array."""

    def __init__(self, dest: Tensor) -> None:
        self._dest = dest

    def window(self, first: int, count: int) -> memoryview | None:
        """Return the memory of contiguous rows on the CPU."""
        part = self._dest[first : first + count]
        return raw_view(part) if is_raw(part) else None

    def put(self, first: int | np.ndarray, rows: Tensor) -> None:
        """Copy rows."""
        n = rows.shape[0]
        _put(self._dest, first, rows.view(-1).view(self._dest.dtype).view(n, *self._dest.shape[1:]))


class _Column(NamedTuple):
    dest: Tensor
    offset: int


@final
class Columns:
    """Destination: a tensor `[rows, ...]` for each column of packed rows."""

    def __init__(self, columns: Sequence[tuple[Tensor, int]]) -> None:
        self._columns = [_Column(*column) for column in columns]

    def window(self, first: int, count: int) -> memoryview | None:
        """Return None: columns are not contiguous in packed rows."""
        del first, count
        return None

    def put(self, first: int | np.ndarray, rows: Tensor) -> None:
        """Copy each column."""
        for dest, offset in self._columns:
            _put(dest, first, column_of(rows, offset, dest.dtype, tuple(dest.shape[1:])))


def column_of(rows: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a column of packed rows (uint8 `[n, width]`, contiguous) as a view `[n, *shape]`."""
    n, width = rows.shape
    steps: list[int] = []
    step = 1
    for size in reversed(shape):
        steps.insert(0, step)
        step *= size
    item = dtype.itemsize
    if step == 0 or n == 0:
        return torch.empty((n, *shape), dtype=dtype, device="cpu")
    flat = rows.view(-1).view(dtype)
    return flat.as_strided((n, *shape), (width // item, *steps), flat.storage_offset() + offset // item)


def _put(dest: Tensor, first: int | np.ndarray, rows: Tensor) -> None:
    if isinstance(first, int):
        copy_elements(dest[first : first + rows.shape[0]], rows)
    else:
        as_bits(dest)[torch.from_numpy(first).to(dest.device)] = as_bits(rows).to(dest.device)


def read_rows(root: Path, record: ArrayRecord, target: Target, *, verify: bool) -> None:
    """Read the base, then the patches.

    Raises:
        DamagedFileError: A file is missing, has another size, or fails a checksum; names it and the offset. The content
            of the target is then undefined.
    """
    width = record.row_bytes
    staging = torch.empty((max(1, _STAGING_BYTES // max(1, width)), width), dtype=torch.uint8, device="cpu")
    with open_checked(root, record.base, verify=verify) as reader:
        window = target.window(0, record.base_rows)
        if window is not None:
            reader.read_all_into(window)
        else:
            _read_run(reader, target, 0, record.base_rows, staging)
    covered = record.base_rows
    for patch in record.patches:
        with open_checked(root, patch, verify=verify) as reader:
            runs, places = _read_table(reader, root, record, patch)
            for (first, count), at in zip(runs[places.large].tolist(), places.at[places.large].tolist(), strict=True):
                reader.skip_to(at)
                _read_run(reader, target, first, count, staging)
            reader.skip_to(places.small_start)
            slots = rows_of(runs[~places.large])
            for start in range(0, len(slots), len(staging)):
                chosen = slots[start : start + len(staging)]
                part = staging[: len(chosen)]
                reader.read_into(raw_view(part))
                target.put(chosen, part)
        covered = _cover(root / patch.file, covered, runs)
    _check_cover(root / record.file, covered, record.shape[0])


def _read_run(reader: BlockReader, target: Target, first: int, count: int, staging: Tensor) -> None:
    window = target.window(first, count) if count else None
    if window is not None:
        reader.read_into(window)
        return
    for start in range(0, count, len(staging)):
        part = staging[: min(len(staging), count - start)]
        reader.read_into(raw_view(part))
        target.put(first + start, part)


def _read_table(reader: BlockReader, root: Path, record: ArrayRecord, patch: FileRecord) -> tuple[Runs, Places]:
    """Read the table of a patch; its checksums are always compared, since a wrong bit would move rows."""
    runs = np.empty((patch.runs, 2), dtype="<i8")  # at most the size of the file, which was compared
    reader.read_verified(runs.reshape(-1).view(np.uint8).data)
    rows = record.shape[0]
    places = check_runs(runs, root / patch.file, rows=rows, row_bytes=record.row_bytes, nbytes=patch.nbytes)
    return runs, places


def read_runs(root: Path, record: ArrayRecord) -> list[Runs]:
    """Read the runs of rows in each patch of an array.

    Raises:
        DamagedFileError: A file is missing, has another size, or its table is damaged.
    """
    covered, found = record.base_rows, []
    for patch in record.patches:
        with open_checked(root, patch, verify=False) as reader:
            found.append(_read_table(reader, root, record, patch)[0])
        covered = _cover(root / patch.file, covered, found[-1])
    _check_cover(root / record.file, covered, record.shape[0] if record.shape else 0)
    return found


def _cover(path: Path, covered: int, runs: Runs) -> int:
    """Return the number of first rows that are present with a patch, which must continue the rows before it."""
    for first, count in runs[runs.sum(1) > covered].tolist():
        if first > covered:
            _check_cover(path, covered, first)
        covered = max(covered, first + count)
    return covered


def _check_cover(path: Path, covered: int, rows: int) -> None:
    if covered < rows:
        msg = f"{path} is damaged: rows {covered} to {rows - 1} are in no file of the array"
        raise DamagedFileError(msg)


def map_rows(root: Path, record: ArrayRecord, capacity: int) -> Tensor:
    """Map an array copy-on-write with space for `capacity` rows: uint8 `[capacity * row_bytes]`.

    Pages are loaded when they are touched, writes never reach a file, rows that were not saved are zero. Cost: the
    number of files and of runs; rows of short runs are read. Sizes and the checksums of tables are compared, the
    checksums of rows are not.

    Raises:
        DamagedFileError: A file is missing, has another size, or its table is damaged.
        OptionError: This system cannot map files over memory.
    """
    return _lay_out(root, record, capacity).tensor


def mapped_pieces(root: Path, record: ArrayRecord, piece_bytes: int) -> Iterator[Tensor]:
    """Yield the rows of an array in order, uint8 `[n, row_bytes]` each; one piece is in memory at a time.

    Raises:
        DamagedFileError: See `map_rows`.
    """
    raw, width = _lay_out(root, record, record.shape[0]), record.row_bytes
    step = max(1, piece_bytes // max(1, width))
    table = raw.tensor.view(record.shape[0], width)
    for start in range(0, record.shape[0], step):
        yield table[start : start + step]
        raw.forget(start * width, min(start + step, record.shape[0]) * width)


def _lay_out(root: Path, record: ArrayRecord, capacity: int) -> Overlay:
    width = record.row_bytes
    raw = Overlay(capacity * width)
    if not capacity * width:
        return raw
    with open_checked(root, record.base, verify=False) as reader:
        raw.lay(reader.fd, 0, 0, record.nbytes, root / record.file)
    covered = record.base_rows
    table = raw.tensor.view(capacity, width)
    for patch in record.patches:
        with open_checked(root, patch, verify=False) as reader:
            runs, places = _read_table(reader, root, record, patch)
            for (first, count), at in zip(runs[places.large].tolist(), places.at[places.large].tolist(), strict=True):
                raw.lay(reader.fd, at, first * width, count * width, root / patch.file)
            slots = rows_of(runs[~places.large])
            if len(slots):
                reader.skip_to(places.small_start)
                rows = torch.empty((len(slots), width), dtype=torch.uint8, device="cpu")
                reader.read_into(raw_view(rows))
                table[torch.from_numpy(slots)] = rows
        covered = _cover(root / patch.file, covered, runs)
    _check_cover(root / record.file, covered, record.shape[0])
    return raw


MOST_PATCHES = 16
"""The next save replaces this many patches of an array by one."""
_PRINT_BYTES = 64 * 1024


class Plan(NamedTuple):
    """The rows to write of an array that a checkpoint already has."""

    kept: ArrayRecord | None
    """The record of the older checkpoint to which a patch is added; None writes all rows."""
    runs: Runs
    """The rows of the patch; none if nothing has changed."""


EVERYTHING = Plan(None, one_run(0, 0))


def plan(root: Path, old: ArrayRecord | None, dtype: str, shape: tuple[int, ...], changed: Runs) -> Plan:
    """Decide which rows to write.

    If the patches of an array would take more bytes than its base, all rows are written. So an array takes at most
    twice its bytes on the disk, and an incremental save writes at most as much as a full one.

    Args:
        root: Directory of the older checkpoint.
        old: Record of the array in it.
        dtype: The dtype now.
        shape: The shape now.
        changed: Rows that have changed since.
    """
    if old is None or old.dtype != dtype or not shape or old.shape[1:] != shape[1:] or old.shape[0] > shape[0]:
        return EVERYTHING
    if old.nbytes == 0:
        return Plan(old, one_run(0, 0)) if old.shape == shape else EVERYTHING
    runs = join_runs(changed, one_run(old.shape[0], shape[0] - old.shape[0]))
    if not len(runs):
        return Plan(old, runs)
    patches = old.patches
    if len(patches) >= MOST_PATCHES:
        runs, patches = join_runs(runs, *read_runs(root, old)), ()
    if place(runs, old.row_bytes).nbytes + sum(patch.nbytes for patch in patches) > old.nbytes:
        return EVERYTHING
    return Plan(replace(old, shape=shape, patches=patches), runs)


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
