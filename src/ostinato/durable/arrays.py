"""Arrays in files: dtypes, runs of rows, the records that manifests keep, and reading, mapping and writing rows."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from ostinato.core.rows import as_bits
from ostinato.durable.blocks import FileRecord, NewFile, check_size, open_checked, verify_file
from ostinato.durable.files import (
    check_free,
    damaged,
    disk_errors,
    file_size,
    read_into,
    safe_join,
    sync_file,
)
from ostinato.errors import CheckpointError, OptionError, StorageMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ostinato.durable.blocks import BlockReader

_WHOLE_KEYS = {"dtype", "shape", "files"}
_COLUMN_KEYS = {"dtype", "shape", "of", "offset"}
_STAGING_BYTES = 2**20  # fits into the cache of the processor
_DEVICE_STAGING_BYTES = 8 * 2**20
_FIXED = 0x10  # MAP_FIXED, of Linux and macOS alike
PIECE_BYTES = 2 * 2**20
MOST_PATCHES = 16
"""The next save replaces this many patches of an array by one."""
_PRINT_BYTES = 64 * 1024
_ZEROS = bytes(4096)
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
    total = int(runs[:, 1].sum()) if len(runs) else 0
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
        shape, dtype, n = self.shape[1:], self.torch_dtype, rows.shape[0]
        if n == 0 or 0 in shape:
            return torch.empty((n, *shape), dtype=dtype, device="cpu")
        steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        flat = rows.view(-1).view(dtype)
        start = flat.storage_offset() + self.offset // dtype.itemsize
        return flat.as_strided((n, *shape), (self.row_bytes // dtype.itemsize, *steps), start)

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
        if arrays is not None:
            return _column_from_json(node, dtype, shape, arrays, where)
        files = node["files"]
        if not isinstance(files, list) or not files:
            damaged(where, "files must be a list of a base and its patches")
        record = cls.whole(dtype, shape, tuple([FileRecord.from_json(file, where) for file in files]))
        base, patches, nbytes, row = record.files[0], record.patches, record.nbytes, record.row_bytes
        fits = base.nbytes == nbytes or (patches and shape and row and base.nbytes < nbytes and not base.nbytes % row)
        if base.runs or not all(patch.runs for patch in patches) or not fits:
            damaged(where, f"the first file has {base.nbytes} bytes, shape and dtype make {nbytes}")
        return record


def _column_from_json(
    node: dict[str, Any], dtype: str, shape: tuple[int, ...], arrays: dict[str, ArrayRecord], where: str
) -> ArrayRecord:
    """Compare a column with the array whose rows contain it."""
    of, offset, item = node["of"], node["offset"], DTYPES[dtype].itemsize
    rows = arrays.get(of) if isinstance(of, str) else None
    if rows is None or not shape or type(offset) is not int:
        damaged(where, "a column needs the name of its packed rows, an offset, and a shape")
    fits = rows.of is None and rows.dtype == "uint8" and len(rows.shape) == 2 and rows.shape[0] == shape[0]
    if not fits or not 0 <= offset <= rows.row_bytes - math.prod(shape[1:]) * item:
        damaged(where, f"it does not lie in the rows {rows.dtype}{list(rows.shape)} of {of[:80]!r}")
    if offset % item or rows.row_bytes % item:
        damaged(where, f"its elements of {item} bytes are not aligned")
    return ArrayRecord(dtype, shape, rows.files, rows.row_bytes, of, offset)


# -- reading -----------------------------------------------------------------------------------------------------------


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


def check_sizes(root: Path, record: ArrayRecord) -> None:
    """Compare the sizes of the files of an array with its record.

    Raises:
        DamagedFileError: naming the file.
    """
    for file in record.files:
        check_size(root, file)


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
    check_sizes(root, record)
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
            where = _where(slots)
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
        where = _where(chosen)
        for record, dest in targets:
            values = record.column(part)
            if isinstance(where, slice):
                copy_elements(dest[where], values)
            else:
                as_bits(dest)[where.to(dest.device)] = as_bits(values).to(dest.device)


def _where(rows: np.ndarray | range) -> slice | Tensor:
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


def map_file(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a file that holds exactly the elements of an array, copy-on-write.

    Raises:
        DamagedFileError: The file is missing or has another size.
    """
    nbytes, size = shape_nbytes(shape, dtype), file_size(path)
    if size != nbytes:
        damaged(path, f"it has {size} bytes, {nbytes} expected: {dtype}{list(shape)}")
    with torch.inference_mode(mode=False):
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8).view(dtype).view(shape)


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
    check_sizes(root, record)
    if not capacity * width:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, capacity * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(mode=False):
        raw = torch.frombuffer(memory, dtype=torch.uint8)  # owns the memory, which is released with the last view
    for reader, places in _layers(root, record, verify=False):
        for slots, at in places.segments():
            if isinstance(slots, range):
                _map_over(raw, reader, at, slots.start * width, len(slots) * width)
            elif len(slots):
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


# -- writing -----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows that are adjacent in a file."""

    offset: int
    """Position of the first row in the file, in bytes."""
    rows: np.ndarray
    """Numbers of the rows, int64 `[n]`, ascending."""

    @property
    def where(self) -> slice | Tensor:
        """Index of the rows: a slice if they are adjacent in the array, too."""
        return _where(self.rows)


@final
class RowFile(NewFile):
    """The new file of a base (all rows) or of a patch (some runs of rows).

    One thread appends. `put_ahead` requires the lock that guards the rows.

    Args:
        path: New file.
        dtype: Name of the dtype of the array.
        shape: Shape of the array, `[rows, ...]`, or `[]` for a scalar.
        runs: The rows of a patch; None makes a base.
        name: Name of the array in a manifest.

    Raises:
        StorageMemoryError: The disk is too small.
    """

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...], runs: Runs | None, name: str = "") -> None:
        self.name = name
        self.row_bytes = shape_nbytes(shape[1:], DTYPES[dtype])
        rows = shape[0] if shape else 1
        self.places = place_all(rows, self.row_bytes) if runs is None else place(runs, self.row_bytes)
        self.done = 0
        """Rows before this offset were copied from memory; the caller sets it under the lock that guards the rows."""
        self._runs = 0 if runs is None else len(runs)
        check_free(path, self.places.nbytes)
        super().__init__(path, self.places.nbytes)
        if runs is not None:
            self.append(np.ascontiguousarray(runs, dtype="<i8").reshape(-1).view(np.uint8).data)

    def pieces(self) -> Iterator[Piece]:
        """Divide the rows into pieces of at most 2 MiB (or one row), in the order of the file."""
        most = max(1, PIECE_BYTES // max(1, self.row_bytes))
        for rows, at in self.places.segments():
            for start in range(0, len(rows), most):
                part = rows[start : start + most]
                numbers = np.arange(part.start, part.stop) if isinstance(part, range) else part
                yield Piece(at + start * self.row_bytes, numbers)

    def put(self, offset: int, data: memoryview) -> None:
        """Append bytes at an offset; the gap before it is filled with zeros.

        Raises:
            StorageMemoryError: The disk is full.
        """
        while self.nbytes < offset:
            self.append(memoryview(_ZEROS)[: offset - self.nbytes])
        self.append(data)

    def write(self, tensor: Tensor) -> None:
        """Append the rows of the whole array, which the file needs.

        Contiguous CPU memory is written without a copy; strided rows and tensors on other devices are staged in
        2 MiB of memory, or one row. The tensor must not change meanwhile, or the checksums will not match.
        """
        tensor = tensor if tensor.ndim else tensor.unsqueeze(0)
        staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        for piece in self.pieces():
            rows = tensor[piece.where]
            if not is_raw(rows):
                if staging.nbytes < rows.nbytes:
                    staging = torch.empty(rows.nbytes, dtype=torch.uint8, device="cpu")
                source, rows = rows, staging[: rows.nbytes].view(rows.dtype).view(rows.shape)
                copy_elements(rows, source)
            self.put(piece.offset, raw_view(rows))

    def put_ahead(self, offset: int, data: memoryview) -> None:
        """Write rows before it is their turn.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.path, self.places.nbytes):
            while len(data):
                count = os.pwrite(self.fd, data, offset)
                data, offset = data[count:], offset + count

    def read_back(self, offset: int, view: memoryview) -> None:
        """Read rows that `put_ahead` wrote."""
        read_into(self.fd, view, offset, self.path)

    def end(self) -> FileRecord:
        """Close the file, whose rows are complete, and return its record."""
        self.put(self.places.nbytes, memoryview(b""))
        return self.finish(self._runs)


def can_write_ahead() -> bool:
    """Whether this system can write rows before their turn."""
    return hasattr(os, "pwrite")


def write_array(root: Path, file: str, tensor: Tensor) -> ArrayRecord:
    """Write a tensor to a new file, and wait until it is on the disk; see `RowFile.write`.

    Args:
        root: Existing directory.
        file: Name of the new file in it.
        tensor: Dense tensor of any shape, on any device, contiguous or not.

    Returns:
        The record for the manifest.

    Raises:
        CheckpointError: The tensor is sparse, or has a dtype that files cannot hold.
        StorageMemoryError: The disk is full; the file is removed.
    """
    path = safe_join(root, file)
    plain = check_plain(tensor, path)
    dtype, shape = dtype_name(plain.dtype), tuple(plain.shape)
    with RowFile(path, dtype, shape, None) as rows:
        rows.write(plain)
        record = ArrayRecord.whole(dtype, shape, (rows.end(),))
        sync_file(path)
    return record


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
    return old._replace(shape=shape, files=(base, *patches)), runs


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
