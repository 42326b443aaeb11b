"""Arrays in files with checksums: dtypes, runs of rows, records in manifests, and reading, mapping and writing rows."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from ostinato.core.rows import as_bits
from ostinato.durable.files import (
    create_file,
    damaged,
    disk_errors,
    file_size,
    open_file,
    read_into,
    safe_join,
    start_writeback,
    write_all,
)
from ostinato.durable.progress import count as count_bytes
from ostinato.errors import CheckpointError, OptionError, StorageMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

BLOCK_BYTES = 4 * 2**20
"""Bytes that each checksum covers."""
TABLE_ENTRY_BYTES = 16
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)
# Bytes are hashed and written, or read and hashed, in steps that mostly fit into the cache of the processor.
_STEP_BYTES = 2 * 2**20
_THREADS = 4
_THREAD_BYTES = 8 * 2**20
"""Bytes for each thread that reads a file."""
_PART_BYTES = 32 * 2**20
"""Most bytes that a thread reads before they are counted."""
_WHOLE_KEYS = {"dtype", "shape", "files"}
_COLUMN_KEYS = {"dtype", "shape", "of", "offset"}
_STAGING_BYTES = 2**20  # fits into the cache of the processor
_DEVICE_STAGING_BYTES = 8 * 2**20
_FIXED = 0x10  # MAP_FIXED, of Linux and macOS alike
_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
# The last ones need a recent version of torch.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_MAX_DIMS = 64
_MAX_BYTES = 2**62


# -- dtypes, and tensors as raw memory ---------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files, for example `bfloat16`.

    Raises:
        CheckpointError: Files cannot hold this dtype.
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        msg = f"dtype {dtype} cannot be saved: convert to one of {', '.join(DTYPES)}"
        raise CheckpointError(msg)
    return name


def check_shape(shape: object) -> tuple[int, ...] | None:
    """Return a shape from a file as a tuple; None if it is not a list of plausible sizes."""
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        return None
    product = 1
    for size in shape:
        if type(size) is not int or size < 0:
            return None
        product *= max(size, 1)  # zero sizes as 1: torch multiplies the other sizes for the strides
        if product > _MAX_BYTES:
            return None
    return tuple(shape)


def shape_nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


def check_plain(tensor: Tensor, where: Path | str) -> Tensor:
    """Return a plain tensor without autograd history and with the same memory.

    Raises:
        CheckpointError: It is sparse, nested, without data, or has a dtype that files cannot hold.
    """
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        msg = f"{where}: cannot save a {tensor.layout} tensor on {tensor.device}: only dense tensors with data"
        raise CheckpointError(msg)
    if sys.byteorder != "little":
        msg = f"{where}: files are little-endian, big-endian machines are not supported"
        raise CheckpointError(msg)
    dtype_name(tensor.dtype)
    return tensor.detach().as_subclass(Tensor)


def is_raw(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` is its elements in order, readable by the CPU."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy_elements(dest: Tensor, source: Tensor) -> None:
    """Copy between tensors of one dtype and shape with any strides and devices."""
    plain = not (source.is_conj() or source.is_neg() or dest.is_conj() or dest.is_neg())
    if plain and dest.device.type == source.device.type == "cpu" and dest.ndim:
        # 4 to 30 times faster than torch for strided rows of few elements
        same_size = _SAME_SIZE[dest.element_size()]
        np.copyto(dest.view(same_size).numpy(), source.view(same_size).numpy())
    else:
        dest.copy_(source)


def raw_view(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor for which `is_raw` is True as writable bytes. No copy."""
    # as_strided, since a tensor of a single element is contiguous with any stride
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def host_view(tensor: Tensor) -> memoryview:
    """Return the elements of any dense tensor as bytes in order; a copy unless they lie so in memory of the CPU."""
    return raw_view(tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg().contiguous())


def packed_column(
    raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...], rows: int, row_bytes: int, offset: int
) -> Tensor:
    """Return a field of packed rows (uint8 `[rows * row_bytes]`, contiguous) as a view `[rows, *shape]`.

    Args:
        raw: the packed rows.
        dtype: of the field.
        shape: of the field in one row.
        rows: their number.
        row_bytes: bytes from one row to the next.
        offset: position of the field in each row, in bytes.
    """
    if not rows or 0 in shape:
        return torch.empty((rows, *shape), dtype=dtype, device=raw.device)
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    flat = raw.view(dtype)
    start = flat.storage_offset() + offset // dtype.itemsize
    return flat.as_strided((rows, *shape), (row_bytes // dtype.itemsize, *steps), start)


def jagged(values: Tensor, lengths: Tensor) -> Tensor:
    """Return values `[total, *F]` as a nested tensor `[n, j, *F]` of the layout `torch.jagged`. A view of them."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def offsets_of(nested: Tensor) -> Tensor:
    """Return where the rows of a jagged tensor `[n, j, *F]` begin and end in its values, int64 `[n + 1]`."""
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
    return offsets


def values_of(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of a nested tensor of any layout, `[total, *F]`, and the length of each row, int64 `[n]`."""
    if nested.layout is torch.jagged and nested.lengths() is None:  # type: ignore[attr-defined]  # without holes
        return nested.values().detach(), torch.diff(offsets_of(nested))
    items = [item.detach() for item in nested.unbind(0)]
    return torch.cat(items), torch.tensor([item.shape[0] for item in items], dtype=torch.int64, device="cpu")


# -- runs of rows, and their positions in a patch ----------------------------------------------------------------------

Runs: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
"""int64 `[n, 2]`: first row and number of rows of each run, ascending and disjoint."""

PAGE_BYTES = 4096
_LARGE_BYTES = 2 * PAGE_BYTES
"""Smallest run that is aligned to pages in the file, so that it can be mapped."""


class Places(NamedTuple):
    """Runs of rows, and their positions in a file."""

    runs: Runs
    at: np.ndarray
    """Offset of each run in the file, int64 `[n]`."""
    large: np.ndarray
    """Runs with a place of their own, bool `[n]`; the others follow each other at the end of the file."""
    small_start: int
    """Offset of the first of the other runs."""
    nbytes: int
    """Size of the file."""

    def segments(self) -> Iterator[tuple[range | np.ndarray, int]]:
        """Yield rows that are adjacent in the file, and the offset of the first one; those of small runs come last."""
        for (first, count), at in zip(self.runs[self.large].tolist(), self.at[self.large].tolist(), strict=True):
            yield range(first, first + count), at
        if not self.large.all():
            yield rows_of(self.runs[~self.large]), self.small_start

    def offsets(self, rows: np.ndarray, row_bytes: int) -> np.ndarray:
        """Return the offsets of rows (int64, ascending) in the file; -1 for rows that it does not hold."""
        run = find_run(self.runs, rows)
        if not len(self.runs):
            return run
        return np.where(run < 0, -1, self.at[run] + (rows - self.runs[run, 0]) * row_bytes)


def one_run(first: int, count: int) -> Runs:
    """Return a single run, or none if it has no rows."""
    return np.array([[first, count]] if count else [], dtype=np.int64).reshape(-1, 2)


def as_runs(slots: np.ndarray) -> Runs:
    """Return the runs of ascending distinct slots."""
    return join_runs(np.stack([slots, np.ones_like(slots)], axis=1).astype(np.int64))


def join_runs(*many: Runs) -> Runs:
    """Return the union of runs."""
    runs = np.concatenate([one_run(0, 0), *many])
    if not len(runs):
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(runs.sum(1))
    fresh = np.concatenate([[True], runs[1:, 0] > ends[:-1]])
    starts = np.flatnonzero(fresh)
    lasts = np.concatenate([starts[1:], [len(runs)]]) - 1
    return np.stack([runs[starts, 0], ends[lasts] - runs[starts, 0]], axis=1)


def rows_of(runs: Runs) -> np.ndarray:
    """Return all rows of runs, int64."""
    total = int(runs[:, 1].sum())
    before = np.cumsum(runs[:, 1]) - runs[:, 1]
    rows: np.ndarray[Any, Any] = np.arange(total) + np.repeat(runs[:, 0] - before, runs[:, 1])
    return rows


def find_run(runs: Runs, rows: np.ndarray) -> np.ndarray:
    """Return the number of the run that each row is in, int64; -1 for rows that are in none."""
    if not len(runs):
        return np.full(len(rows), -1, dtype=np.int64)
    run = np.searchsorted(runs[:, 0], rows, side="right") - 1
    return np.where((run >= 0) & (rows < runs[run].sum(1)), run, -1)


def place_all(rows: int, row_bytes: int) -> Places:
    """Return the position of all rows in a file that holds nothing else."""
    runs, nbytes = one_run(0, rows), rows * row_bytes
    return Places(runs, np.zeros(len(runs), dtype=np.int64), np.ones(len(runs), dtype=bool), nbytes, nbytes)


def place(runs: Runs, row_bytes: int) -> Places:
    """Return the positions of runs in a patch file: the table, large runs on pages of their own, then small runs."""
    sizes = runs[:, 1] * row_bytes
    large = sizes >= _LARGE_BYTES
    lead = runs[:, 0] * row_bytes % PAGE_BYTES
    extents = np.where(large, -(-(lead + sizes) // PAGE_BYTES) * PAGE_BYTES, 0)
    start = runs.size * 8
    if large.any():
        start = -(-start // PAGE_BYTES) * PAGE_BYTES
    small_start = start + int(extents.sum())
    small = np.where(large, 0, sizes)
    at = np.where(large, start + np.cumsum(extents) - extents + lead, small_start + np.cumsum(small) - small)
    return Places(runs, at, large, small_start, small_start + int(small.sum()))


def check_runs(runs: Runs, path: Path, *, rows: int, row_bytes: int, nbytes: int) -> Places:
    """Check that a table from a file fits the file and the array, and return the positions of its runs.

    Raises:
        DamagedFileError: naming the file.
    """
    first, count = runs[:, 0], runs[:, 1]
    inside = ((first >= 0) & (count > 0) & (first < rows) & (count <= rows)).all()  # so that the sum cannot overflow
    good = inside and (first + count <= rows).all() and (first[1:] >= (first + count)[:-1]).all()
    places = place(runs, row_bytes) if good else None
    if places is None or places.nbytes != nbytes:
        damaged(path, f"its table of rows does not fit {rows} rows and {nbytes} bytes", "in the block at byte 0")
    return places


# -- records -----------------------------------------------------------------------------------------------------------


@final
class FileRecord(NamedTuple):
    """One file of an array: its base, or a patch that replaces some of its rows.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        runs: Number of runs of rows in a patch; 0 for a base.
        nbytes: Exact size of the file.
        checksums: XXH3-64 (seed 0) of each block of `BLOCK_BYTES` as 16 hexadecimal digits; the last block may be
            shorter.
    """

    file: str
    runs: int
    nbytes: int
    checksums: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {**self._asdict(), "checksums": list(self.checksums)}

    @classmethod
    def from_json(cls, node: object, where: str) -> FileRecord:
        """Read a record from a file and verify each field.

        Args:
            node: Parsed JSON.
            where: What error messages begin with.

        Raises:
            DamagedFileError: A field is missing, unknown or of a wrong type, or does not match the others.
        """
        if not isinstance(node, dict) or len(node) != len(cls._fields) or not all(map(node.__contains__, cls._fields)):
            damaged(where, f"a file must have exactly the keys {list(cls._fields)}, got {str(node)[:80]}")
        file, runs, nbytes, checksums = map(node.__getitem__, cls._fields)
        if type(file) is not str:
            damaged(where, "file must be a string")
        if type(runs) is not int or type(nbytes) is not int or not 0 <= runs * TABLE_ENTRY_BYTES <= nbytes:
            damaged(where, f"{str(runs)[:40]} runs do not fit into {str(nbytes)[:40]} bytes")
        if type(checksums) is not list or len(checksums) != -(-nbytes // BLOCK_BYTES):
            damaged(where, f"{nbytes} bytes need {-(-nbytes // BLOCK_BYTES)} checksums")
        if not {str}.issuperset(map(type, checksums)) or not all(map(_CHECKSUM.fullmatch, checksums)):
            damaged(where, "checksums must be strings of 16 hexadecimal digits")
        return cls(file, runs, nbytes, tuple(checksums))


@final
class ArrayRecord(NamedTuple):
    """An array in files, row-major and little-endian: one of its own, or a column of the packed rows of another.

    Attributes:
        dtype: Name of the dtype, for example `float32`.
        shape: Shape of the array, with all patches.
        files: The base, then patches: files with rows that replace earlier ones or follow them.
        row_bytes: Bytes from one row to the next in these files.
        of: Name of the array `uint8[rows, row_bytes]` whose packed rows contain the column; None if it is no column.
        offset: Position of the column in each row, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    files: tuple[FileRecord, ...]
    row_bytes: int
    of: str | None = None
    offset: int = 0

    @classmethod
    def whole(cls, dtype: str, shape: tuple[int, ...], files: tuple[FileRecord, ...]) -> ArrayRecord:
        """Return the record of an array with files of its own."""
        return cls(dtype, shape, files, shape_nbytes(shape[1:], DTYPES[dtype]))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def patches(self) -> tuple[FileRecord, ...]:
        """The files after the base."""
        return self.files[1:]

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def base_rows(self) -> int:
        """Rows in the base."""
        return self.files[0].nbytes // self.row_bytes if self.row_bytes else self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return shape_nbytes(self.shape, self.torch_dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum([file.nbytes for file in self.files])

    def column(self, rows: Tensor) -> Tensor:
        """Return the array in rows of its files (uint8 `[n, row_bytes]`, contiguous) as a view `[n, ...]`."""
        shape, count = self.shape[1:], rows.shape[0]
        return packed_column(rows.view(-1), self.torch_dtype, shape, count, self.row_bytes, self.offset)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        node: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        if self.of is not None:
            return {**node, "of": self.of, "offset": self.offset}
        return {**node, "files": [file.to_json() for file in self.files]}

    @classmethod
    def from_json(
        cls, node: object, *, where: str = "array", arrays: dict[str, ArrayRecord] | None = None
    ) -> ArrayRecord:
        """Read a record from a file and verify each field and their relations.

        Args:
            node: Parsed JSON.
            where: Name of the array in error messages.
            arrays: Those that a column may lie in; None reads no column.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not match the others.
        """
        keys = _WHOLE_KEYS if arrays is None else _COLUMN_KEYS
        if not isinstance(node, dict) or node.keys() != keys:
            found = sorted(map(str, node))[:10] if isinstance(node, dict) else type(node).__name__
            damaged(where, f"an array record must have exactly the keys {sorted(keys)}, got {found}")
        dtype, shape = node["dtype"], check_shape(node["shape"])
        if not isinstance(dtype, str) or dtype not in DTYPES:
            damaged(where, f"unknown dtype {str(dtype)[:50]!r} (known here: {', '.join(DTYPES)})")
        if shape is None:
            damaged(where, f"implausible shape {str(node['shape'])[:80]}")
        if arrays is None:
            return cls._of_files(dtype, shape, node["files"], where)
        of, offset, item = node["of"], node["offset"], DTYPES[dtype].itemsize
        rows = arrays.get(of) if isinstance(of, str) else None
        if rows is None or not shape or type(offset) is not int:
            damaged(where, "a column needs the name of its packed rows, an offset, and a shape")
        fits = rows.of is None and rows.dtype == "uint8" and len(rows.shape) == 2 and rows.shape[0] == shape[0]
        if not fits or not 0 <= offset <= rows.row_bytes - math.prod(shape[1:]) * item:
            damaged(where, f"it does not lie in the rows {rows.dtype}{list(rows.shape)} of {of[:80]!r}")
        if offset % item or rows.row_bytes % item:
            damaged(where, f"its elements of {item} bytes are not aligned")
        return cls(dtype, shape, rows.files, rows.row_bytes, of, offset)

    @classmethod
    def _of_files(cls, dtype: str, shape: tuple[int, ...], files: object, where: str) -> ArrayRecord:
        """Return the record of an array with files of its own, which were read from a file, too."""
        if not isinstance(files, list) or not files:
            damaged(where, "files must be a list of a base and its patches")
        record = cls.whole(dtype, shape, tuple([FileRecord.from_json(file, where) for file in files]))
        base, patches, row = record.files[0], record.patches, record.row_bytes
        nbytes = record.rows * row
        fits = base.nbytes == nbytes or (patches and shape and row and base.nbytes < nbytes and not base.nbytes % row)
        if base.runs or not all(patch.runs for patch in patches) or not fits:
            damaged(where, f"the first file has {base.nbytes} bytes, shape and dtype make {nbytes}")
        return record


# -- files with a checksum for each block ------------------------------------------------------------------------------


class NewFile:
    """A new file to which bytes are appended; a checksum of each block is computed.

    A `with` block closes it, and removes it after an error.

    Args:
        path: The file, which must not exist.
        needed_bytes: Expected size, for the message if the disk is full.

    Raises:
        StorageMemoryError: The disk is full; `append` raises it, too.
    """

    def __init__(self, path: Path, needed_bytes: int = 0) -> None:
        self.path = path
        self.nbytes = 0
        """Bytes appended."""
        self._needed_bytes = needed_bytes
        self._hash = xxhash.xxh3_64()
        self._checksums: list[str] = []
        self.fd = -1
        with disk_errors(path, needed_bytes):
            self.fd = create_file(path, read=True)

    def append(self, view: memoryview) -> None:
        """Append bytes (`view` is one-dimensional, of format `B`)."""
        with disk_errors(self.path, max(self._needed_bytes, self.nbytes + len(view))):
            while len(view):
                room = BLOCK_BYTES - self.nbytes % BLOCK_BYTES
                step = view[: min(room, _STEP_BYTES)]
                self._hash.update(step)
                write_all(self.fd, step)
                self.nbytes += len(step)
                if len(step) == room:
                    self._close_block()
                count_bytes(len(step))
                view = view[len(step) :]

    def finish(self, runs: int = 0) -> FileRecord:
        """Close the file and return its record; `runs` is the number of runs of rows in a patch."""
        if self.nbytes % BLOCK_BYTES:
            self._close_block()
        self.close()
        return FileRecord(self.path.name, runs, self.nbytes, tuple(self._checksums))

    def close(self) -> None:
        """Close the file; does nothing if it is closed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the file; after an error, remove it."""
        self.close()
        if kind is not None:
            self.path.unlink(missing_ok=True)

    def _close_block(self) -> None:
        self._checksums.append(self._hash.hexdigest())
        self._hash.reset()
        start = (len(self._checksums) - 1) * BLOCK_BYTES
        start_writeback(self.fd, start, self.nbytes - start)


@final
class BlockReader:
    """Reads the bytes of a file in order and verifies each block when it is complete."""

    def __init__(self, fd: int, record: FileRecord, path: Path, *, verify: bool, offset: int = 0) -> None:
        """Start at a block of `fd`, which the caller closes; `path` is for messages."""
        self.fd = fd
        self.path = path
        self._record = record
        self._verify = verify
        self._hash = xxhash.xxh3_64()
        self._offset = offset

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes; a large file that is read whole is read by several threads.

        Raises:
            DamagedFileError: The checksum of a block differs from the recorded one, or the file ends too early.
        """
        threads = min(_THREADS, os.cpu_count() or 1, len(view) // _THREAD_BYTES)
        if threads > 1 and len(view) == self._record.nbytes:
            self._read_parts(view, threads)
            return
        while len(view):
            room = BLOCK_BYTES - self._offset % BLOCK_BYTES
            step = view[: min(room, _STEP_BYTES)]
            read_into(self.fd, step, self._offset, self.path)
            self._offset += len(step)
            if self._verify:
                self._hash.update(step)
                if len(step) == room or self._offset == self._record.nbytes:
                    self._check_block()
            count_bytes(len(step))
            view = view[len(step) :]

    def read_table(self, view: memoryview) -> None:
        """Fill `view` with the first bytes and verify all blocks that contain them, also without `verify`.

        Raises:
            DamagedFileError: See `read_into`.
        """
        checked = BlockReader(self.fd, self._record, self.path, verify=True)
        checked.read_into(view)
        checked.skip_to(min(-(-len(view) // BLOCK_BYTES) * BLOCK_BYTES, self._record.nbytes))
        self.skip_to(len(view))

    def skip_to(self, offset: int) -> None:
        """Continue at an offset. With `verify`, skipped bytes are read, since checksums cover them."""
        if not self._verify:
            self._offset = max(self._offset, offset)
            return
        scratch = memoryview(bytearray(min(_STEP_BYTES, max(0, offset - self._offset))))
        while self._offset < offset:
            self.read_into(scratch[: offset - self._offset])

    def _read_parts(self, view: memoryview, threads: int) -> None:
        total = len(view)
        share = min(-(-total // BLOCK_BYTES // threads), max(1, _PART_BYTES // BLOCK_BYTES)) * BLOCK_BYTES
        parts = [(start, view[start : start + share]) for start in range(0, total, share)]

        def read(start: int, part: memoryview) -> None:
            BlockReader(self.fd, self._record, self.path, verify=self._verify, offset=start).read_into(part)

        with ThreadPoolExecutor(threads) as pool:
            try:
                for reading, part in [(pool.submit(read, *part), part[1]) for part in parts]:
                    reading.result()
                    count_bytes(len(part))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._offset = total

    def _check_block(self) -> None:
        block = (self._offset - 1) // BLOCK_BYTES
        found, expected = self._hash.hexdigest(), self._record.checksums[block]
        if found != expected:
            where = f"in the block at byte {block * BLOCK_BYTES}"
            damaged(self.path, f"checksum {found}, {expected} expected: restore the file from a copy", where)
        self._hash.reset()


def check_sizes(root: Path, arrays: Iterable[ArrayRecord]) -> None:
    """Check that the files of arrays are there and have the recorded sizes.

    Raises:
        DamagedFileError: One is missing, not a regular file, or has another size.
    """
    for file in [file for record in arrays for file in record.files]:
        path = safe_join(root, file.file)
        _compare_size(path, file_size(path), file)


def _compare_size(path: Path, size: int, record: FileRecord) -> None:
    if size != record.nbytes:
        reason = "the file was truncated, lengthened or replaced"
        damaged(path, f"it has {size} bytes, {record.nbytes} expected: {reason}")


@contextlib.contextmanager
def open_checked(root: Path, record: FileRecord, *, verify: bool) -> Iterator[BlockReader]:
    """Open a file of the recorded size.

    Raises:
        DamagedFileError: The file is missing or has another size.
    """
    path = safe_join(root, record.file)
    fd = open_file(path)
    try:
        _compare_size(path, os.fstat(fd).st_size, record)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the read-ahead
        yield BlockReader(fd, record, path, verify=verify)
    finally:
        os.close(fd)


def read_blocks(root: Path, record: FileRecord) -> Iterator[bytearray]:
    """Yield each block of a file after its checksum was compared, in memory of its own.

    Raises:
        DamagedFileError: The file is missing, has another size, or fails a checksum.
    """
    with open_checked(root, record, verify=True) as reader:
        for start in range(0, record.nbytes, BLOCK_BYTES):
            block = bytearray(min(BLOCK_BYTES, record.nbytes - start))
            reader.read_into(memoryview(block))
            yield block


def verify_file(root: Path, record: FileRecord) -> None:
    """Read a file and compare its size and checksums.

    Raises:
        DamagedFileError: It is missing, has another size, or fails a checksum.
    """
    with open_checked(root, record, verify=True) as reader:
        reader.skip_to(record.nbytes)


# -- arrays  -----------------------------------------------------------------------------------------------------------


def _layers(root: Path, record: ArrayRecord, *, verify: bool) -> Iterator[tuple[BlockReader, Places]]:
    """Open the files of an array one after the other; the rows of each apply over those of the files before it.

    The checksums of tables of rows are always compared, since a wrong bit would move rows.

    Raises:
        DamagedFileError: A file is missing, has another size, its table is damaged, or rows are in no file.
    """
    covered = 0
    for file in record.files:
        with open_checked(root, file, verify=verify) as reader:
            places = place_all(record.base_rows, record.row_bytes)
            if file.runs:
                runs = np.empty((file.runs, 2), dtype="<i8")  # at most the size of the file, which was compared
                reader.read_table(runs.reshape(-1).view(np.uint8).data)
                places = check_runs(runs, reader.path, rows=record.rows, row_bytes=record.row_bytes, nbytes=file.nbytes)
            yield reader, places
        for first, count in places.runs[places.runs.sum(1) > covered].tolist():
            _check_covered(reader.path, covered, first)
            covered = max(covered, first + count)
    _check_covered(root / record.files[0].file, covered, record.rows)


def _check_covered(path: Path, covered: int, rows: int) -> None:
    if covered < rows:
        damaged(path, f"rows {covered} to {rows - 1} are in no file of the array")


def read_runs(root: Path, record: ArrayRecord) -> list[Runs]:
    """Read the runs of rows in each patch of an array; their tables are verified.

    Raises:
        DamagedFileError: A file is missing, has another size, or its table is damaged.
    """
    return [places.runs for _, places in _layers(root, record, verify=False)][1:]


def verify_array(root: Path, record: ArrayRecord) -> None:
    """Read the files of an array and compare sizes, checksums and tables of rows.

    Raises:
        DamagedFileError: A file is missing, has another size, or fails a checksum.
    """
    for file in record.files:
        verify_file(root, file)
    read_runs(root, record)


def read_array(root: Path, record: ArrayRecord, *, verify: bool = True) -> Tensor:
    """Read an array into a new CPU tensor. The sizes of its files are compared before memory is allocated.

    Raises:
        DamagedFileError: A file is missing, has another size, or fails a checksum.
        StorageMemoryError: There is not enough memory.
    """
    check_sizes(root, [record])
    try:
        with torch.inference_mode(mode=False):
            dest = torch.empty(record.shape, dtype=record.torch_dtype, device="cpu")
    except RuntimeError as error:
        msg = f"{root / record.files[0].file}: {record.nbytes} bytes of memory needed, which is more than is free"
        raise StorageMemoryError(msg) from error
    read_arrays(root, [(record, dest)], verify=verify)
    return dest


def read_arrays(root: Path, wanted: Sequence[tuple[ArrayRecord, Tensor]], *, verify: bool = True) -> None:
    """Read an array, or columns of the same packed rows, in one pass. After an error, the tensors are undefined.

    Args:
        root: Directory of the checkpoint.
        wanted: Record and tensor of each: of exactly the recorded dtype and shape, on any device; rows may be strided.
        verify: Compare the checksum of each block.

    Raises:
        CheckpointError: A tensor has another dtype or shape, or the arrays are not in the same files.
        DamagedFileError: A file is missing, shorter or longer than recorded, or a block fails its checksum;
            the message names the file and the byte offset.
    """
    record = wanted[0][0]
    targets: list[tuple[ArrayRecord, Tensor]] = []
    for one, dest in wanted:
        if dest.dtype != one.torch_dtype or tuple(dest.shape) != one.shape or one.files != record.files:
            msg = (
                f"{root / record.files[0].file} holds {one.dtype}{list(one.shape)}, "
                f"it cannot be read into {dest.dtype}{list(dest.shape)}"
            )
            raise CheckpointError(msg)
        targets.append((one, dest.detach() if dest.ndim else dest.detach().unsqueeze(0)))
    width, device = record.row_bytes, targets[0][1].device
    most = _STAGING_BYTES if device.type == "cpu" else _DEVICE_STAGING_BYTES
    rows = max(1, min(most // max(1, width), record.rows))
    staging = torch.empty((rows, width), dtype=torch.uint8, device="cpu")
    for reader, places in _layers(root, record, verify=verify):
        for slots, at in places.segments():
            reader.skip_to(at)
            where = index_of(slots)
            if len(targets) == 1 and record.of is None and isinstance(where, slice) and is_raw(targets[0][1][where]):
                reader.read_into(raw_view(targets[0][1][where]))
            else:
                _read_rows(reader, targets, slots, staging)


def _read_rows(
    reader: BlockReader, targets: Sequence[tuple[ArrayRecord, Tensor]], slots: np.ndarray | range, staging: Tensor
) -> None:
    """Read adjacent rows of a file, and copy the columns of each to its slot."""
    for start in range(0, len(slots), len(staging)):
        chosen = slots[start : start + len(staging)]
        part = staging[: len(chosen)]
        reader.read_into(raw_view(part))
        where = index_of(chosen)
        for record, dest in targets:
            values = record.column(part)
            if isinstance(where, slice):
                copy_elements(dest[where], values)
            else:
                as_bits(dest)[where.to(dest.device)] = as_bits(values).to(dest.device)


def index_of(rows: np.ndarray | range) -> slice | Tensor:
    """Return an index of ascending rows: a slice if they are adjacent."""
    if not len(rows) or int(rows[-1]) - int(rows[0]) == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0)
    return torch.from_numpy(np.asarray(rows))


# -- mapping -----------------------------------------------------------------------------------------------------------


def open_mapped(root: Path, record: ArrayRecord) -> Tensor:
    """Map an array copy-on-write: pages are loaded when they are touched, writes never reach a file.

    Sizes and the checksums of tables of rows are compared, the checksums of rows are not. The files must not be
    shortened while they are mapped. Systems that cannot map files over memory read the array.

    Raises:
        DamagedFileError: A file is missing, has another size, or its table is damaged.
    """
    if _mmap is None:
        rows = record._replace(dtype="uint8", shape=(record.rows, record.row_bytes), of=None)
        return record.column(read_array(root, rows, verify=False)).view(record.shape)
    return record.column(map_rows(root, record, record.rows).view(record.rows, record.row_bytes)).view(record.shape)


def map_rows(root: Path, record: ArrayRecord, capacity: int) -> Tensor:
    """Map the files of an array copy-on-write with space for `capacity` rows: uint8 `[capacity * row_bytes]`.

    Pages are loaded when they are touched, writes never reach a file, rows that were not saved are zero. Cost: the
    number of files and of runs; rows of short runs are read. Sizes and the checksums of tables are compared, the
    checksums of rows are not.

    Raises:
        DamagedFileError: A file is missing, has another size, or its table is damaged.
        OptionError: This system cannot map files over memory.
    """
    if _mmap is None:
        msg = f"mmap=True needs Linux or macOS, this is {sys.platform}: load without it"
        raise OptionError(msg)
    width = record.row_bytes
    check_sizes(root, [record])
    if not capacity * width:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, capacity * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(mode=False):
        raw = torch.frombuffer(memory, dtype=torch.uint8)  # owns the memory, which is released with the last view
    for reader, places in _layers(root, record, verify=False):
        for slots, at in places.segments():
            if isinstance(slots, range):
                _map_over(raw, reader, at, slots.start * width, len(slots) * width)
            else:
                reader.skip_to(at)
                rows = torch.empty((len(slots), width), dtype=torch.uint8, device="cpu")
                reader.read_into(raw_view(rows))
                raw.view(capacity, width)[torch.from_numpy(slots)] = rows
    return raw


def _find_mmap() -> Any:
    if sys.platform not in ("linux", "darwin") or not hasattr(mmap, "MAP_PRIVATE"):
        return None
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return function


_mmap = _find_mmap()


def _map_over(raw: Tensor, reader: BlockReader, offset: int, start: int, nbytes: int) -> None:
    """Map bytes of a file over the memory from `start` on; bytes that are not whole pages are read."""
    end, page = start + nbytes, mmap.PAGESIZE
    first, last = -(-start // page) * page, end // page * page
    if last > first and (start - offset) % page == 0:
        address, both = raw.data_ptr() + first, mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _FIXED
        if _mmap(address, last - first, both, flags, reader.fd, offset + first - start) != address:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    else:
        first = last = start
    view = raw_view(raw)
    read_into(reader.fd, view[start:first], offset, reader.path)
    read_into(reader.fd, view[last:end], offset + last - start, reader.path)
