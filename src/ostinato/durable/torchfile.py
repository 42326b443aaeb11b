"""Files of `torch.save`, in which the offsets of tensors are found. Nothing is executed (`weights_only=True`).

A file is a zip archive with uncompressed tensors. `torch.load(mmap=True)` returns the position of each tensor in its
storage, the directory of the archive the position of each storage in the file; both must agree.
"""

from __future__ import annotations

import mmap
import os
import pickle
import zipfile
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from ostinato.durable.dtypes import dtype_name
from ostinato.durable.headers import Header, Placed
from ostinato.durable.positioned_reads import pread
from ostinato.durable.trees import flatten, nest
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.durable.headers import Sink
    from ostinato.durable.trees import TreePath

__all__ = ["check_crc", "read_header", "write"]

_LOCAL_HEADER_BYTES = 30
_LOAD_ERRORS = (RuntimeError, OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, IndexError)


def write(sink: Sink, tensors: dict[TreePath, Tensor], plain: dict[TreePath, Any]) -> None:
    """Write a plain nested dict as `torch.save` does."""
    torch.save(nest({**tensors, **plain}), cast("IO[bytes]", sink))  # it calls write and flush only


def read_header(fd: int, path: Path) -> Header:
    """Read the header of a file; the bytes of its tensors are not read.

    Raises:
        DamagedFileError: It is not an archive of `torch.save`, contains more than `weights_only=True` allows, or its
            parts do not match.
    """
    size = os.fstat(fd).st_size
    records = _records(fd, size, path)
    values = flatten(_load(path), where=path)
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            _damaged(path, f"{'.'.join(key)[:80]} is not a dense plain tensor")
    base = _base(tensors.values(), records, path)
    placed = tuple(_place(key, tensor, base, path) for key, tensor in tensors.items())
    for piece in placed:
        piece.check(size, path)
    return Header(size, placed, {key: value for key, value in values.items() if key not in tensors})


def check_crc(fd: int, path: Path) -> None:
    """Read a whole archive and verify the checksums of its records.

    Raises:
        DamagedFileError: naming the first record that differs.
    """
    with os.fdopen(fd, "rb", closefd=False) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                bad = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
            _damaged(path, str(error))
    if bad is not None:
        _damaged(path, f"the checksum of its record {bad[:80]!r} differs")


def _load(path: Path) -> dict[str, Any]:
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        msg = f"{path} contains more than tensors and plain values; nothing was executed: {str(error)[:300]}"
        raise DamagedFileError(msg) from error
    except _LOAD_ERRORS as error:
        _damaged(path, str(error)[:300])
    if not isinstance(tree, dict):
        _damaged(path, f"it contains a {type(tree).__name__}, a dict expected")
    return tree


def _records(fd: int, size: int, path: Path) -> list[tuple[int, int]]:
    """Return offset and size of each record with a storage in the order of the file."""
    found = []
    try:
        with os.fdopen(os.dup(fd), "rb") as stream, zipfile.ZipFile(stream) as archive:
            names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED or info.file_size > size for info in names.values()):
                _damaged(path, "its records are compressed, which torch.save never does")
            if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
                _damaged(path, "its numbers are not little-endian")
            infos = [info for name, info in names.items() if name.startswith("data/") and info.file_size]
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, DamagedFileError):
            raise
        _damaged(path, f"not a file of torch.save in its format since 1.6: {error}")
    for info in infos:
        head = pread(fd, _LOCAL_HEADER_BYTES, info.header_offset)
        if len(head) < _LOCAL_HEADER_BYTES or head[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
            _damaged(path, f"its record {info.filename[:80]!r} cannot be read in place")
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = info.header_offset + _LOCAL_HEADER_BYTES + lengths
        if start + info.file_size > size:
            _damaged(path, f"its record {info.filename[:80]!r} ends after the file")
        found.append((start, info.file_size))
    return sorted(found)


def _base(tensors: Any, records: list[tuple[int, int]], path: Path) -> int:
    """Return the address to which byte 0 of the file is mapped, to convert addresses to offsets."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    mapped = sorted((address, nbytes) for address, nbytes in storages.items() if nbytes)
    if not mapped:
        return 0
    base = mapped[0][0] - records[0][0] if records else 0
    if [(address - base, nbytes) for address, nbytes in mapped] != records or base % mmap.PAGESIZE:
        _damaged(path, "its storages are not at the offsets in its directory")
    return base


def _place(key: TreePath, tensor: Tensor, base: int, path: Path) -> Placed:
    try:
        dtype = dtype_name(tensor.dtype)
    except CheckpointError as error:
        msg = f"{path}: {'.'.join(key)[:80]}: {error}"
        raise DamagedFileError(msg) from error
    strides = None if tensor.is_contiguous() else tuple(step * tensor.element_size() for step in tensor.stride())
    offset = tensor.data_ptr() - base if tensor.numel() else 0
    return Placed(key, dtype, tuple(tensor.shape), offset, strides)


def _damaged(path: Path, problem: str) -> NoReturn:
    msg = f"{path} is damaged: {problem}"
    raise DamagedFileError(msg)
