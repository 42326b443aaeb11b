"""Positioned reads: many short pieces of a file, each straight into the memory where it is wanted."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import torch

from ostinato.durable.dtypes import raw_view
from ostinato.errors import DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.headers import Placed

__all__ = ["GAP_BYTES", "pread", "read_into", "read_run", "read_strided", "read_tensor"]

GAP_BYTES = 4096
"""Pieces closer than this are read in one call: what lies between costs no page more than they do."""
_MAX_PIECES = 500  # half of what Linux takes in one call, as each piece may have a gap before it
_SEEKING = threading.Lock()
_SCRATCH = memoryview(bytearray(GAP_BYTES))  # written by many threads, read by none


def read_into(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with the bytes at `offset`.

    Raises:
        DamagedFileError: The file ends before.
    """
    while len(view):
        count = _pread_into(fd, [view], offset)
        if count == 0:
            msg = f"{path} ends at byte {offset}, {len(view)} more expected: it was cut"
            raise DamagedFileError(msg)
        view, offset = view[count:], offset + count


def read_run(fd: int, pieces: Sequence[memoryview], offsets: Sequence[int], path: Path) -> None:
    """Fill pieces that follow each other in the file with gaps of at most `GAP_BYTES`.

    Args:
        fd: The file.
        pieces: Where the bytes go.
        offsets: Where they lie, ascending, without overlap.
        path: For messages.

    Raises:
        DamagedFileError: The file ends before.
    """
    for start in range(0, len(pieces), _MAX_PIECES):
        _read_run(fd, pieces[start : start + _MAX_PIECES], offsets[start : start + _MAX_PIECES], path)


def _read_run(fd: int, pieces: Sequence[memoryview], offsets: Sequence[int], path: Path) -> None:
    if len(pieces) == 1:
        if _pread_into(fd, pieces, offsets[0]) != len(pieces[0]):
            read_into(fd, pieces[0], offsets[0], path)
        return
    views: list[memoryview] = []
    end = offsets[0]
    for piece, offset in zip(pieces, offsets, strict=True):
        if offset > end:
            views.append(_SCRATCH[: offset - end])
        views.append(piece)
        end = offset + len(piece)
    if _pread_into(fd, views, offsets[0]) != end - offsets[0]:  # a short read: each by itself
        for piece, offset in zip(pieces, offsets, strict=True):
            read_into(fd, piece, offset, path)


def read_tensor(fd: int, placed: Placed, path: Path) -> Tensor:
    """Read a whole tensor into new contiguous memory.

    Raises:
        DamagedFileError: The file ends before.
    """
    if placed.strides is not None:
        return read_strided(fd, placed, path).contiguous()
    tensor = torch.empty(placed.shape, dtype=placed.torch_dtype)
    read_into(fd, raw_view(tensor), placed.offset, path)
    return tensor


def read_strided(fd: int, placed: Placed, path: Path) -> Tensor:
    """Read a tensor whose elements do not lie in order: the bytes from its first to its last, seen by its strides.

    Raises:
        DamagedFileError: The file ends before.
    """
    raw = torch.empty(placed.end() - placed.offset, dtype=torch.uint8)
    read_into(fd, raw_view(raw), placed.offset, path)
    itemsize = placed.torch_dtype.itemsize
    strides = placed.strides or torch.empty(placed.shape, device="meta").stride()
    steps = [step // itemsize for step in strides] if placed.strides is not None else list(strides)
    return raw.view(placed.torch_dtype).as_strided(placed.shape, steps)


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """Return up to `nbytes` bytes at `offset`."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _SEEKING:  # Windows
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def _pread_into(fd: int, views: Sequence[memoryview], offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, views, offset)
    data = pread(fd, sum(map(len, views)), offset)
    total = len(data)
    for view in views:
        part, data = data[: len(view)], data[len(view) :]
        view[: len(part)] = part
    return total
