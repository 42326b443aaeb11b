"""Tensors as raw little-endian files with a checksum per block; at most 32 MiB of extra memory."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import torch

from ostinato.durable.blocks import BlockWriter, open_checked
from ostinato.durable.chains import Rows, map_rows, read_rows, read_runs
from ostinato.durable.dtypes import check_plain, copy_elements, dtype_name, is_raw, raw_view, shape_nbytes
from ostinato.durable.files import create_file, disk_errors, safe_join, sync_fd
from ostinato.durable.records import BLOCK_BYTES, ArrayRecord
from ostinato.errors import CheckpointError, DamagedFileError, StorageMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.records import FileRecord

__all__ = [
    "open_mapped",
    "read_array",
    "read_array_into",
    "read_stream",
    "verify_array",
    "write_array",
    "write_stream",
]

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
