"""Tensors as raw little-endian files with a checksum for each block, and the records that manifests keep of them."""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from ostinato.durable.blocks import BlockWriter, open_checked
from ostinato.durable.dtypes import (
    DTYPES,
    check_plain,
    check_shape,
    copy_elements,
    dtype_name,
    is_raw,
    raw_view,
    shape_nbytes,
)
from ostinato.durable.files import create_file, disk_errors, safe_join, sync_fd
from ostinato.durable.patched_arrays import Rows, map_rows, read_rows, read_runs
from ostinato.errors import CheckpointError, DamagedFileError, StorageMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

__all__ = [
    "BLOCK_BYTES",
    "MAX_BLOCK_BYTES",
    "MIN_BLOCK_BYTES",
    "ArrayRecord",
    "ColumnRecord",
    "FileRecord",
    "open_mapped",
    "read_array",
    "read_array_into",
    "read_stream",
    "verify_array",
    "verify_file",
    "verify_runs",
    "write_array",
    "write_stream",
]

BLOCK_BYTES = 4 * 2**20
MIN_BLOCK_BYTES = 4 * 2**10
MAX_BLOCK_BYTES = 16 * 2**20
MAX_PATCHES = 1024
TABLE_ENTRY_BYTES = 16
_ARRAY_KEYS = ("file", "dtype", "shape", "nbytes", "block_bytes", "checksums")
_PATCH_KEYS = {"file", "runs", "nbytes", "block_bytes", "checksums"}
_COLUMN_KEYS = ("of", "offset", "dtype", "shape")
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)
_STAGING_BYTES = 2**20  # fits into the cache of the processor
_DEVICE_STAGING_BYTES = 8 * 2**20


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of an array: its base, or a patch that replaces some of its rows.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        nbytes: Exact size of the file.
        block_bytes: Bytes covered by each checksum; the last block may be shorter.
        checksums: XXH3-64 (seed 0) of each block as 16 hexadecimal digits.
        runs: Number of runs of rows in a patch; 0 for a base.
    """

    file: str
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]
    runs: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the record of a patch as a JSON object."""
        return {
            "file": self.file,
            "runs": self.runs,
            "nbytes": self.nbytes,
            "block_bytes": self.block_bytes,
            "checksums": list(self.checksums),
        }

    @classmethod
    def from_json(cls, node: object, *, where: str) -> FileRecord:
        """Read and verify the record of a patch.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not match the others.
        """
        if not isinstance(node, dict) or set(node) != _PATCH_KEYS:
            _damaged(where, f"a patch must have exactly the keys {sorted(_PATCH_KEYS)}")
        runs, nbytes = node["runs"], node["nbytes"]
        if type(nbytes) is not int or type(runs) is not int or not 0 < runs * TABLE_ENTRY_BYTES < nbytes:
            _damaged(where, f"{str(runs)[:40]} runs do not fit into {str(nbytes)[:40]} bytes")
        _check_file(node, nbytes, where)
        return cls(**{**node, "checksums": tuple(node["checksums"])})


@final
@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """An array with files of its own: row-major and little-endian.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        dtype: Name of the dtype, for example `float32`.
        shape: Shape of the array. Without patches, the file holds exactly this; with patches, it may hold fewer rows.
        nbytes: Exact size of the file.
        block_bytes: Bytes covered by each checksum; the last block may be shorter.
        checksums: XXH3-64 (seed 0) of each block as 16 hexadecimal digits.
        patches: Files with rows that replace earlier ones, in the order in which they apply.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]
    patches: tuple[FileRecord, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def base(self) -> FileRecord:
        """The file of the base."""
        return FileRecord(self.file, self.nbytes, self.block_bytes, self.checksums)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The base and its patches."""
        return (FileRecord(self.file, self.nbytes, self.block_bytes, self.checksums), *self.patches)

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension; 0 for a scalar."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize if self.shape else 0

    @property
    def base_rows(self) -> int:
        """Rows in the base."""
        return self.nbytes // self.row_bytes if self.patches else self.shape[0]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self.nbytes + sum([patch.nbytes for patch in self.patches])

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        node = {
            "file": self.file,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "block_bytes": self.block_bytes,
            "checksums": list(self.checksums),
        }
        return {**node, "patches": [patch.to_json() for patch in self.patches]} if self.patches else node

    @classmethod
    def from_json(cls, node: object, *, where: str = "array") -> ArrayRecord:
        """Read a record from a file and verify each field and their relations.

        Args:
            node: Parsed JSON.
            where: Name of the array in error messages.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not match the others.
        """
        if not isinstance(node, dict) or set(node) - {"patches"} != set(_ARRAY_KEYS):
            found = sorted(map(str, node))[:10] if isinstance(node, dict) else type(node).__name__
            msg = f"{where}: an array record must have exactly the keys {list(_ARRAY_KEYS)}, got {found}"
            raise DamagedFileError(msg)
        if not isinstance(node["dtype"], str) or node["dtype"] not in DTYPES:
            _damaged(where, f"unknown dtype {str(node['dtype'])[:50]!r} (known here: {', '.join(DTYPES)})")
        shape = check_shape(node["shape"])
        if shape is None:
            _damaged(where, f"implausible shape {str(node['shape'])[:80]}")
        nbytes = shape_nbytes(shape, DTYPES[node["dtype"]])
        if "patches" in node:
            nbytes = _check_patched(node, shape, nbytes, where)
        _check_file(node, nbytes, where)
        listed = enumerate(node.get("patches", ()))
        patches = tuple([FileRecord.from_json(one, where=f"{where} patch {i}") for i, one in listed])
        return cls(**{**node, "shape": shape, "checksums": tuple(node["checksums"]), "patches": patches})


@final
@dataclass(frozen=True, slots=True)
class ColumnRecord:
    """An array that lies in the packed rows of another one.

    Attributes:
        of: Name of the other array, `uint8[rows, width]`.
        offset: Position of the column in each row, in bytes.
        dtype: Name of the dtype.
        shape: Shape, `[rows, ...]`.
    """

    of: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the column."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the column."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {"of": self.of, "offset": self.offset, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, node: dict[str, Any], arrays: dict[str, ArrayRecord], *, where: str) -> ColumnRecord:
        """Read a record from a file and compare it with the array that holds the column.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not match the array.
        """
        if set(node) != set(_COLUMN_KEYS):
            _damaged(where, f"a column must have exactly the keys {list(_COLUMN_KEYS)}")
        of, offset, dtype = node["of"], node["offset"], node["dtype"]
        shape, rows = check_shape(node["shape"]), arrays.get(of) if isinstance(of, str) else None
        known = isinstance(dtype, str) and dtype in DTYPES
        if rows is None or shape is None or not shape or not known or type(offset) is not int:
            _damaged(where, "a column needs the name of its packed rows, an offset, a dtype and a shape")
        item = DTYPES[dtype].itemsize
        fits = rows.dtype == "uint8" and len(rows.shape) == 2 and rows.shape[0] == shape[0]
        if not fits or not 0 <= offset <= rows.shape[1] - math.prod(shape[1:]) * item:
            _damaged(where, f"it does not lie in the rows {rows.dtype}{list(rows.shape)} of {of[:80]!r}")
        if offset % item or rows.shape[1] % item:
            _damaged(where, f"its elements of {item} bytes are not aligned")
        return cls(of, offset, dtype, shape)


def _damaged(where: str, problem: str) -> NoReturn:
    msg = f"{where}: damaged array record: {problem}"
    raise DamagedFileError(msg)


def _check_patched(node: dict[str, Any], shape: tuple[int, ...], nbytes: int, where: str) -> int:
    """Check the patches of an array of `nbytes` bytes; return the bytes of its base."""
    patches, base = node["patches"], node["nbytes"]
    if not isinstance(patches, list) or not 0 < len(patches) <= MAX_PATCHES:
        _damaged(where, f"patches must be a list of 1 to {MAX_PATCHES}")
    row = nbytes // shape[0] if shape and shape[0] else 0
    if not row or type(base) is not int or not 0 <= base <= nbytes or base % row:
        _damaged(where, f"nbytes is {str(base)[:40]}, which is not a number of rows of shape {list(shape)}")
    return base


def _check_file(node: dict[str, Any], expected: int, where: str) -> None:
    """Check the fields of a record that describe its file of `expected` bytes."""
    if not isinstance(node["file"], str):
        _damaged(where, "file must be a string")
    if type(node["nbytes"]) is not int or node["nbytes"] != expected:
        _damaged(where, f"nbytes is {str(node['nbytes'])[:40]}, shape and dtype make {expected}")
    block = node["block_bytes"]
    if type(block) is not int or not MIN_BLOCK_BYTES <= block <= MAX_BLOCK_BYTES:
        _damaged(where, f"block_bytes must be in [{MIN_BLOCK_BYTES}, {MAX_BLOCK_BYTES}], got {str(block)[:40]}")
    checksums = node["checksums"]
    if not isinstance(checksums, list) or len(checksums) != -(-expected // block):
        _damaged(where, f"{expected} bytes need {-(-expected // block)} checksums")
    if not {str}.issuperset(map(type, checksums)) or not all(map(_CHECKSUM.fullmatch, checksums)):
        _damaged(where, "checksums must be strings of 16 hexadecimal digits")


def write_array(
    root: Path, file: str, tensor: Tensor, *, block_bytes: int = BLOCK_BYTES, sync: bool = True
) -> ArrayRecord:
    """Write a tensor to a new file.

    Contiguous CPU memory is written without a copy; strided rows and tensors on other devices are staged in a few MiB
    of memory. The tensor must not change meanwhile, or the checksums will not match.

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
    shape = tuple(plain.shape)
    with _new_file(path, plain.nbytes, block_bytes, sync=sync) as writer:
        staging = _staging_for(plain)
        for piece in _pieces(plain):
            part = piece if is_raw(piece) else _shaped(staging, piece)
            if part is not piece:
                copy_elements(part, piece)
            writer.write(raw_view(part))
        checksums = writer.finish()
    return ArrayRecord(file, dtype_name(plain.dtype), shape, writer.nbytes, block_bytes, checksums)


def write_stream(root: Path, file: str, chunks: Iterable[bytes], *, block_bytes: int = BLOCK_BYTES) -> ArrayRecord:
    """Write bytes of unknown total size; the record is that of an array `uint8[nbytes]`.

    Raises:
        StorageMemoryError: The disk is full; the file is removed.
    """
    path = safe_join(root, file)
    with _new_file(path, 0, block_bytes) as writer:
        for chunk in chunks:
            with disk_errors(path, writer.nbytes + len(chunk)):
                writer.write(memoryview(chunk))
        checksums = writer.finish()
    return ArrayRecord(file, "uint8", (writer.nbytes,), writer.nbytes, block_bytes, checksums)


def read_array(root: Path, record: ArrayRecord, *, verify: bool = True) -> Tensor:
    """Read an array into a new CPU tensor. The size of the file is compared before memory is allocated.

    Raises:
        DamagedFileError: The file is missing, has another size, or fails a checksum.
        StorageMemoryError: There is not enough memory.
    """
    _check_size(root, record)
    try:
        with torch.inference_mode(mode=False):
            dest = torch.empty(record.shape, dtype=record.torch_dtype, device="cpu")
    except RuntimeError as error:
        msg = f"{root / record.file}: {record.nbytes} bytes of memory needed, which is more than is free"
        raise StorageMemoryError(msg) from error
    read_array_into(root, record, dest, verify=verify)
    return dest


def read_array_into(root: Path, record: ArrayRecord, dest: Tensor, *, verify: bool = True) -> None:
    """Read an array into an existing tensor. After an error, the content of `dest` is undefined.

    Args:
        root: Directory of the checkpoint.
        record: Record of the array.
        dest: Tensor of exactly the recorded dtype and shape, on any device; its rows may be strided.
        verify: Compare the checksum of each block.

    Raises:
        CheckpointError: `dest` has another dtype or shape.
        DamagedFileError: The file is missing, shorter or longer than recorded, or a block fails its checksum;
            the message names the file and the byte offset.
    """
    if dest.dtype != record.torch_dtype or tuple(dest.shape) != record.shape:
        msg = (
            f"{root / record.file} holds {record.dtype}{list(record.shape)}, "
            f"it cannot be read into {dest.dtype}{list(dest.shape)}"
        )
        raise CheckpointError(msg)
    plain = check_plain(dest, root / record.file)
    if record.patches:
        read_rows(root, record, Rows(plain), verify=verify)
        return
    with open_checked(root, record, verify=verify) as reader:
        if is_raw(plain):
            reader.read_all_into(raw_view(plain))
            return
        staging = _staging_for(plain)
        for piece in _pieces(plain):
            part = piece if is_raw(piece) else _shaped(staging, piece)
            reader.read_into(raw_view(part))
            if part is not piece:
                copy_elements(piece, part)


def verify_array(root: Path, record: ArrayRecord) -> None:
    """Read the files of an array and compare sizes, checksums and tables of rows.

    Raises:
        DamagedFileError: A file is missing, has another size, or fails a checksum.
    """
    for file in record.files:
        verify_file(root, file)
    verify_runs(root, record)


def verify_runs(root: Path, record: ArrayRecord) -> None:
    """Compare the tables of rows of the patches of an array.

    Raises:
        DamagedFileError: A table does not fit.
    """
    if record.patches:
        read_runs(root, record)


def verify_file(root: Path, file: FileRecord) -> None:
    """Read one file of an array and compare its size and checksums.

    Raises:
        DamagedFileError: It is missing, has another size, or fails a checksum.
    """
    for _ in _blocks(root, file, verify=True):
        pass


def read_stream(root: Path, record: ArrayRecord, *, verify: bool = True) -> Iterator[bytes]:
    """Yield the bytes of a `uint8` array block by block, each after its checksum was compared.

    Raises:
        DamagedFileError: The file is missing, has another size or dtype, or fails a checksum.
    """
    if record.dtype != "uint8" or len(record.shape) != 1 or record.patches:
        msg = f"{root / record.file}: a stream must be uint8[n], got {record.dtype}{list(record.shape)}"
        raise DamagedFileError(msg)
    for block in _blocks(root, record, verify=verify):
        yield bytes(block)


def open_mapped(root: Path, record: ArrayRecord) -> Tensor:
    """Map an array copy-on-write: pages are loaded when they are touched, writes never reach the file.

    Only the size of the file is compared, not the checksums. The file must not be shortened while it is mapped.

    Raises:
        DamagedFileError: The file is missing or has another size.
    """
    if record.patches:
        return map_rows(root, record, record.shape[0]).view(record.torch_dtype).view(record.shape)
    _check_size(root, record)
    if record.nbytes == 0:
        return torch.empty(record.shape, dtype=record.torch_dtype, device="cpu")
    path = str(safe_join(root, record.file))
    with torch.inference_mode(mode=False):
        raw = torch.from_file(path, shared=False, size=record.nbytes, dtype=torch.uint8)
        return raw.view(record.torch_dtype).view(record.shape)


@contextlib.contextmanager
def _new_file(path: Path, needed_bytes: int, block_bytes: int, *, sync: bool = True) -> Iterator[BlockWriter]:
    """Create a file; remove it if the block raises, else sync it if asked."""
    with disk_errors(path, needed_bytes):
        fd = create_file(path)
        try:
            writer = BlockWriter(fd, block_bytes)
            yield writer
            if sync:
                sync_fd(fd)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _check_size(root: Path, record: ArrayRecord) -> None:
    for file in record.files:
        with open_checked(root, file, verify=False):
            pass


def _blocks(root: Path, record: ArrayRecord | FileRecord, *, verify: bool) -> Iterator[memoryview]:
    """Yield each block in a buffer that the next block overwrites."""
    buffer = memoryview(bytearray(min(record.block_bytes, record.nbytes)))
    with open_checked(root, record, verify=verify) as reader:
        for start in range(0, record.nbytes, record.block_bytes):
            block = buffer[: record.nbytes - start]
            reader.read_into(block)
            yield block


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Divide a tensor, in row-major order, into views that are raw memory or fit into the staging memory."""
    if tensor.numel() == 0:
        return
    limit = _staging_bytes(tensor)
    if is_raw(tensor) or tensor.nbytes <= limit:
        yield tensor
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    rows = limit * len(tensor) // tensor.nbytes
    if rows == 0:
        for row in tensor:
            yield from _pieces(row)
        return
    for start in range(0, len(tensor), rows):
        yield tensor[start : start + rows]


def _staging_bytes(tensor: Tensor) -> int:
    return _STAGING_BYTES if tensor.device.type == "cpu" else _DEVICE_STAGING_BYTES


def _staging_for(tensor: Tensor) -> Tensor:
    nbytes = 0 if is_raw(tensor) else min(tensor.nbytes, _staging_bytes(tensor))
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _shaped(staging: Tensor, like: Tensor) -> Tensor:
    return staging[: like.nbytes].view(like.dtype).view(like.shape)
