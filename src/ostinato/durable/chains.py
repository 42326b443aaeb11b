"""Arrays of several files, a base and its patches, and columns that lie in their rows: read into memory, or mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np
import torch

from ostinato.core.bits import as_bits
from ostinato.durable.blocks import open_checked
from ostinato.durable.dtypes import copy_elements, is_raw, raw_view
from ostinato.durable.mapping import Overlay
from ostinato.durable.runs import check_runs, rows_of
from ostinato.errors import DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.blocks import BlockReader
    from ostinato.durable.records import ArrayRecord, FileRecord
    from ostinato.durable.runs import Places, Runs

__all__ = ["Columns", "Rows", "map_rows", "mapped_pieces", "read_rows", "read_runs"]

_STAGING_BYTES = 2**20


class Target(Protocol):
    """Where rows go."""

    def window(self, first: int, count: int) -> memoryview | None:
        """Return the memory of rows if bytes can be read straight into it."""

    def put(self, first: int | np.ndarray, rows: Tensor) -> None:
        """Copy rows (uint8 `[n, row_bytes]`) to `first` and the rows after it, or to the rows numbered."""


@final
class Rows:
    """Rows go to a tensor `[rows, ...]` of the array's dtype and shape."""

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
    """Each column of packed rows goes to a tensor `[rows, ...]` of its own."""

    def __init__(self, columns: Sequence[tuple[Tensor, int]]) -> None:
        self._columns = [_Column(*column) for column in columns]

    def window(self, first: int, count: int) -> memoryview | None:
        """Return nothing: columns lie elsewhere."""
        del first, count
        return None

    def put(self, first: int | np.ndarray, rows: Tensor) -> None:
        """Copy each column out of the rows."""
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
    """Read the base, then each patch over it.

    Raises:
        DamagedFileError: A file is missing, of another size, or fails a checksum; names it and the offset. What the
            target holds then is undefined.
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
    """Read the table of a patch and compare its checksums in every mode: one wrong bit puts rows into other slots."""
    runs = np.empty((patch.runs, 2), dtype="<i8")  # not more than the file holds: its size was compared
    reader.read_verified(runs.reshape(-1).view(np.uint8).data)
    rows = record.shape[0]
    places = check_runs(runs, root / patch.file, rows=rows, row_bytes=record.row_bytes, nbytes=patch.nbytes)
    return runs, places


def read_runs(root: Path, record: ArrayRecord) -> list[Runs]:
    """Read which rows each patch of an array holds.

    Raises:
        DamagedFileError: A file is missing, of another size, or its table is damaged.
    """
    covered, found = record.base_rows, []
    for patch in record.patches:
        with open_checked(root, patch, verify=False) as reader:
            found.append(_read_table(reader, root, record, patch)[0])
        covered = _cover(root / patch.file, covered, found[-1])
    _check_cover(root / record.file, covered, record.shape[0] if record.shape else 0)
    return found


def _cover(path: Path, covered: int, runs: Runs) -> int:
    """Return how many first rows there are with a patch: each one goes on where the rows before it ended."""
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
    """Map an array copy-on-write into room for `capacity` rows: uint8 `[capacity * row_bytes]`.

    Pages come in as they are touched, writes never reach a file, rows beyond those saved are zero. Cost: the number of
    files and of runs; rows of short runs are read. Sizes are compared, and tables with their checksums; checksums of
    rows are not.

    Raises:
        DamagedFileError: A file is missing, of another size, or its table is damaged.
        OptionError: This system cannot map files over memory.
    """
    return _lay_out(root, record, capacity).tensor


def mapped_pieces(root: Path, record: ArrayRecord, piece_bytes: int) -> Iterator[Tensor]:
    """Yield the rows of an array in order, uint8 `[n, row_bytes]` each; memory holds one piece at a time.

    Raises:
        DamagedFileError: As `map_rows`.
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
