"""Tensors as raw little-endian files with a checksum per block; at most 32 MiB of extra memory."""

from __future__ import annotations

import contextlib
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
    "write_array",
    "write_stream",
]

BLOCK_BYTES = 4 * 2**20
MIN_BLOCK_BYTES = 4 * 2**10
MAX_BLOCK_BYTES = 16 * 2**20
MAX_PATCHES = 1024
TABLE_ENTRY_BYTES = 16
_PATCH_KEYS = {"file", "runs", "nbytes", "block_bytes", "checksums"}
_KEYS = ("file", "dtype", "shape", "nbytes", "block_bytes", "checksums")
_COLUMN_KEYS = ("of", "offset", "dtype", "shape")
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of one file of an array.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        nbytes: Exact size of the file.
        block_bytes: Bytes covered by each checksum; the last block may be shorter.
        checksums: XXH3-64 (seed 0) of each block as 16 hexadecimal digits.
        runs: Of a patch: how many runs of rows it holds, 0 for a base.
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
        """Read the record of a patch, checked.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not fit the others.
        """
        if not isinstance(node, dict) or set(node) != _PATCH_KEYS:
            _damaged(where, f"a patch must have exactly the keys {sorted(_PATCH_KEYS)}")
        runs, nbytes = node["runs"], node["nbytes"]
        if type(nbytes) is not int or type(runs) is not int or not 0 < runs * TABLE_ENTRY_BYTES < nbytes:
            _damaged(where, f"{str(runs)[:40]} runs do not fit into {str(nbytes)[:40]} bytes")
        problem = _file_problem(node, nbytes)
        if problem:
            _damaged(where, problem)
        return cls(**{**node, "checksums": tuple(node["checksums"])})


@final
@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """What a manifest says of one array: row-major, little-endian, nothing else in the file of its base.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        dtype: Name of the dtype, for example `float32`.
        shape: Sizes. Without patches the file holds exactly this; with patches it may hold fewer rows.
        nbytes: Exact size of the file.
        block_bytes: Bytes covered by each checksum; the last block may be shorter.
        checksums: XXH3-64 (seed 0) of each block as 16 hexadecimal digits.
        patches: Files with rows that take the place of earlier ones, in their order.
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
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def base(self) -> FileRecord:
        """The file of the base alone."""
        return FileRecord(self.file, self.nbytes, self.block_bytes, self.checksums)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The base and its patches."""
        return (self.base, *self.patches)

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return shape_nbytes(self.shape[1:], self.torch_dtype)

    @property
    def base_rows(self) -> int:
        """Rows that the base holds."""
        return self.nbytes // self.row_bytes if self.patches else self.shape[0]

    @property
    def total_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.nbytes for file in self.files)

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
        """Read a record that a file gave; every field and how they fit together is checked.

        Args:
            node: Parsed JSON.
            where: Name of the array, for messages.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not fit the others.
        """
        if not isinstance(node, dict) or set(node) - {"patches"} != set(_KEYS):
            found = sorted(map(str, node))[:10] if isinstance(node, dict) else type(node).__name__
            msg = f"{where}: an array record must have exactly the keys {list(_KEYS)}, got {found}"
            raise DamagedFileError(msg)
        shape = check_shape(node["shape"])
        problem = _problem(node, shape)
        if problem or shape is None:
            _damaged(where, problem)
        listed = node.get("patches", [])
        patches = tuple(FileRecord.from_json(one, where=f"{where} patch {i}") for i, one in enumerate(listed))
        return cls(**{**node, "shape": shape, "checksums": tuple(node["checksums"]), "patches": patches})


@final
@dataclass(frozen=True, slots=True)
class ColumnRecord:
    """What a manifest says of an array that lies in the rows of another one.

    Attributes:
        of: Name of the other array, `uint8[rows, width]`.
        offset: Where the column begins in each row, in bytes.
        dtype: Name of its dtype.
        shape: Its sizes, `[rows, ...]`.
    """

    of: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the column."""
        return shape_nbytes(self.shape[1:], self.torch_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the column."""
        return shape_nbytes(self.shape, self.torch_dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {"of": self.of, "offset": self.offset, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, node: dict[str, Any], arrays: dict[str, ArrayRecord], *, where: str) -> ColumnRecord:
        """Read a record that a file gave, and compare it with the array that it lies in.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not fit.
        """
        if set(node) != set(_COLUMN_KEYS):
            _damaged(where, f"a column must have exactly the keys {list(_COLUMN_KEYS)}")
        shape, rows = check_shape(node["shape"]), arrays.get(node["of"]) if isinstance(node["of"], str) else None
        known = isinstance(node["dtype"], str) and node["dtype"] in DTYPES
        if rows is None or shape is None or not shape or not known or type(node["offset"]) is not int:
            _damaged(where, "a column needs the rows it lies in, an offset, a dtype and a shape")
        column = cls(node["of"], node["offset"], node["dtype"], shape)
        fits = rows.dtype == "uint8" and len(rows.shape) == 2 and rows.shape[0] == shape[0]
        item = column.torch_dtype.itemsize
        if not fits or not 0 <= column.offset <= rows.shape[1] - column.row_bytes:
            _damaged(where, f"it does not lie in the rows {rows.dtype}{list(rows.shape)} of {node['of'][:80]!r}")
        if column.offset % item or rows.shape[1] % item:
            _damaged(where, f"its elements of {item} bytes are not aligned")
        return column


def _damaged(where: str, problem: str) -> NoReturn:
    msg = f"{where}: damaged array record: {problem}"
    raise DamagedFileError(msg)


def _problem(node: dict[str, Any], shape: tuple[int, ...] | None) -> str:
    """Say what is wrong with the fields of a record, or return an empty string."""
    if not isinstance(node["dtype"], str) or node["dtype"] not in DTYPES:
        return f"unknown dtype {str(node['dtype'])[:50]!r} (known here: {', '.join(DTYPES)})"
    if shape is None:
        return f"implausible shape {str(node['shape'])[:80]}"
    expected = shape_nbytes(shape, DTYPES[node["dtype"]])
    if "patches" in node:
        return _chain_problem(node, shape, expected) or _file_problem(node, node["nbytes"])
    return _file_problem(node, expected)


def _chain_problem(node: dict[str, Any], shape: tuple[int, ...], expected: int) -> str:
    patches, nbytes = node["patches"], node["nbytes"]
    if not isinstance(patches, list) or not 0 < len(patches) <= MAX_PATCHES:
        return f"patches must be a list of 1 to {MAX_PATCHES}"
    row = expected // shape[0] if shape and shape[0] else 0
    if not row or type(nbytes) is not int or not 0 <= nbytes <= expected or nbytes % row:
        return f"nbytes is {str(nbytes)[:40]}, which are no rows of shape {list(shape)}"
    return ""


def _file_problem(node: dict[str, Any], expected: int) -> str:
    if not isinstance(node["file"], str):
        return "file must be a string"
    if type(node["nbytes"]) is not int or node["nbytes"] != expected:
        return f"nbytes is {str(node['nbytes'])[:40]}, shape and dtype make {expected}"
    block = node["block_bytes"]
    if type(block) is not int or not MIN_BLOCK_BYTES <= block <= MAX_BLOCK_BYTES:
        return f"block_bytes must be in [{MIN_BLOCK_BYTES}, {MAX_BLOCK_BYTES}], got {str(block)[:40]}"
    checksums = node["checksums"]
    if not isinstance(checksums, list) or len(checksums) != -(-expected // block):
        return f"{expected} bytes need {-(-expected // block)} checksums"
    if not all(isinstance(text, str) and _CHECKSUM.fullmatch(text) for text in checksums):
        return "checksums must be strings of 16 hexadecimal digits"
    return ""


_STAGING_BYTES = 2**20  # stays in the processor's cache
_DEVICE_STAGING_BYTES = 8 * 2**20


def write_array(
    root: Path, file: str, tensor: Tensor, *, block_bytes: int = BLOCK_BYTES, sync: bool = True
) -> ArrayRecord:
    """Write a tensor to a new file and wait until it is on the disk, unless somebody else will.

    Contiguous CPU memory is written from where it lies; strided rows and other devices go through a few MiB
    of staging. Nobody may write to the tensor meanwhile: the checksums would not fit.

    Args:
        root: Directory, which exists.
        file: Name of the new file in it.
        tensor: Dense tensor of any shape, on any device, contiguous or not.
        block_bytes: Bytes per checksum.
        sync: Wait for the disk.

    Returns:
        The record that the manifest keeps.

    Raises:
        CheckpointError: The tensor is sparse, or of a dtype that files cannot hold.
        StorageMemoryError: The disk is full; the file is removed.
    """
    path = safe_join(root, file)
    plain = check_plain(tensor, path)
    shape = tuple(plain.shape)
    with _new_file(path, shape_nbytes(shape, plain.dtype), block_bytes, sync=sync) as writer:
        for piece in _staged(plain):
            writer.write(raw_view(piece))
        checksums = writer.finish()
    return ArrayRecord(file, dtype_name(plain.dtype), shape, writer.nbytes, block_bytes, checksums)


def write_stream(root: Path, file: str, chunks: Iterable[bytes], *, block_bytes: int = BLOCK_BYTES) -> ArrayRecord:
    """Write bytes whose number is not known beforehand; the record is that of a `uint8` array `[nbytes]`.

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
    """Read an array into a new CPU tensor. The size of the file is compared before memory is taken.

    Raises:
        DamagedFileError: The file is missing, of another size, or fails a checksum.
        StorageMemoryError: There is not enough memory.
    """
    _check_size(root, record)
    try:
        with torch.inference_mode(mode=False):
            dest = torch.empty(record.shape, dtype=record.torch_dtype, device="cpu")
    except RuntimeError as error:
        msg = f"{root / record.file}: {record.nbytes} bytes of memory needed, more than there is free"
        raise StorageMemoryError(msg) from error
    read_array_into(root, record, dest, verify=verify)
    return dest


def read_array_into(root: Path, record: ArrayRecord, dest: Tensor, *, verify: bool = True) -> None:
    """Read an array into existing memory; what `dest` holds after an error is undefined.

    Args:
        root: Directory of the checkpoint.
        record: What the manifest says of the array.
        dest: Tensor of exactly that dtype and shape, on any device; its rows may be strided.
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
    """Read the files of an array and compare sizes, checksums and tables of rows; keeps nothing.

    Raises:
        DamagedFileError: The file is missing, of another size, or fails a checksum.
    """
    for file in record.files:
        for _ in _blocks(root, file, verify=True):
            pass
    if record.patches:
        read_runs(root, record)


def read_stream(root: Path, record: ArrayRecord, *, verify: bool = True) -> Iterator[bytes]:
    """Yield the bytes of a `uint8` array, block by block, each one after its checksum was compared.

    Raises:
        DamagedFileError: The file is missing, of another size or dtype, or fails a checksum.
    """
    if record.dtype != "uint8" or len(record.shape) != 1 or record.patches:
        msg = f"{root / record.file}: a stream must be uint8[n], got {record.dtype}{list(record.shape)}"
        raise DamagedFileError(msg)
    for block in _blocks(root, record, verify=verify):
        yield bytes(block)


def open_mapped(root: Path, record: ArrayRecord) -> Tensor:
    """Map an array copy-on-write: pages come in as they are touched, writes never reach the file.

    Only the size of the file is compared, not the checksums. The file must not be shortened while it is
    mapped.

    Raises:
        DamagedFileError: The file is missing or of another size.
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
    """Create a file, sync it if asked when the block ends well, remove it otherwise."""
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
    """Yield each block in a buffer that the next one overwrites."""
    buffer = memoryview(bytearray(min(record.block_bytes, record.nbytes)))
    with open_checked(root, record, verify=verify) as reader:
        for start in range(0, record.nbytes, record.block_bytes):
            block = buffer[: record.nbytes - start]
            reader.read_into(block)
            yield block


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Divide a tensor, in row-major order, into views that are raw memory or fit the staging."""
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


def _staged(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the pieces as raw memory; staged ones are overwritten by the next."""
    staging = _staging_for(tensor)
    for piece in _pieces(tensor):
        part = piece if is_raw(piece) else _shaped(staging, piece)
        if part is not piece:
            copy_elements(part, piece)
        yield part


def _staging_bytes(tensor: Tensor) -> int:
    return _STAGING_BYTES if tensor.device.type == "cpu" else _DEVICE_STAGING_BYTES


def _staging_for(tensor: Tensor) -> Tensor:
    return torch.empty(
        0 if is_raw(tensor) else min(tensor.nbytes, _staging_bytes(tensor)), dtype=torch.uint8, device="cpu"
    )


def _shaped(staging: Tensor, like: Tensor) -> Tensor:
    return staging[: like.nbytes].view(like.dtype).view(like.shape)
