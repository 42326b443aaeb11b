"""Positioned reads, and OpenFiles: a limited number of open files, of which the least recently used is closed first."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import os
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np
import torch

from ostinato._backend import backend
from ostinato.durable.dtypes import raw_view
from ostinato.durable.files import open_file
from ostinato.errors import CapacityError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.headers import Placed

__all__ = [
    "GAP_BYTES",
    "OpenFile",
    "OpenFiles",
    "pread",
    "pread_into",
    "read_into",
    "read_pieces",
    "read_strided",
    "read_tensor",
]

GAP_BYTES = 4096
"""Pieces with smaller gaps are read in one call: the gap adds no page."""
_MOST_PIECES = 500  # half of the limit of Linux for one call, since each piece may have a gap before it
_SCRATCH = memoryview(bytearray(GAP_BYTES))  # written by several threads, never read
_SEEKING = threading.Lock()


def read_into(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with the bytes at `offset`.

    Raises:
        DamagedFileError: The file is too short.
    """
    while len(view):
        count = pread_into(fd, [view], offset)
        if count == 0:
            msg = f"{path} ends at byte {offset}, {len(view)} more expected: it was cut"
            raise DamagedFileError(msg)
        view, offset = view[count:], offset + count


def read_pieces(fds: np.ndarray, offsets: np.ndarray, widths: np.ndarray, targets: np.ndarray) -> int:
    """Read pieces of open files, each to its address; adjacent pieces of a file are read in one call.

    Args:
        fds: The file of each piece, int64 `[N]`.
        offsets: Offset of each piece, int64 `[N]`, ascending within a file.
        widths: Bytes of each piece, int64 `[N]`.
        targets: Address of the memory for each piece, int64 `[N]`.

    Returns:
        The first piece for which its file is too short, or N. Memory from this piece on is undefined.

    Raises:
        OSError: A read failed.
    """
    read_ranges = getattr(backend.native, "read_ranges", None)
    if read_ranges is not None:
        columns = [np.ascontiguousarray(column, dtype=np.int64) for column in (fds, offsets, widths, targets)]
        reached, error = read_ranges(*(column.ctypes.data for column in columns), len(fds), GAP_BYTES)
        if error:
            raise OSError(error, os.strerror(error))
        return int(reached)
    gaps = offsets[1:] - offsets[:-1] - widths[:-1]
    cuts = np.flatnonzero((fds[1:] != fds[:-1]) | (gaps > GAP_BYTES) | (gaps < 0)) + 1
    views = [_view(*pair) for pair in zip(targets.tolist(), widths.tolist(), strict=True)]
    starts, files = offsets.tolist(), fds.tolist()
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(fds)], strict=True):
        for at in range(first, last, _MOST_PIECES):
            end = min(at + _MOST_PIECES, last)
            short = _read_run(files[at], views[at:end], starts[at:end])
            if short is not None:
                return at + short
    return len(fds)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _read_run(fd: int, views: Sequence[memoryview], offsets: Sequence[int]) -> int | None:
    """Read pieces with small gaps; return the first one for which the file is too short."""
    parts: list[memoryview] = []
    end = offsets[0]
    for view, offset in zip(views, offsets, strict=True):
        if offset > end:
            parts.append(_SCRATCH[: offset - end])
        parts.append(view)
        end = offset + len(view)
    if pread_into(fd, parts, offsets[0]) == end - offsets[0]:
        return None
    for number, (view, offset) in enumerate(zip(views, offsets, strict=True)):  # a short read: read each piece
        done = 0
        while done < len(view):
            count = pread_into(fd, [view[done:]], offset + done)
            if count == 0:
                return number
            done += count
    return None


def read_tensor(fd: int, placed: Placed, path: Path) -> Tensor:
    """Read a tensor into new contiguous memory.

    Raises:
        DamagedFileError: The file is too short.
    """
    if placed.strides is not None:
        return read_strided(fd, placed, path).contiguous()
    with torch.inference_mode(mode=False):
        tensor = torch.empty(placed.shape, dtype=placed.torch_dtype, device="cpu")
    read_into(fd, raw_view(tensor), placed.offset, path)
    return tensor


def read_strided(fd: int, placed: Placed, path: Path) -> Tensor:
    """Read a strided tensor: all bytes from its first to its last element.

    Raises:
        DamagedFileError: The file is too short.
    """
    with torch.inference_mode(mode=False):
        raw = torch.empty(placed.end() - placed.offset, dtype=torch.uint8, device="cpu")
    read_into(fd, raw_view(raw), placed.offset, path)
    steps = [step // placed.torch_dtype.itemsize for step in placed.strides or ()]
    return raw.view(placed.torch_dtype).as_strided(placed.shape, steps)


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """Return up to `nbytes` bytes at `offset`."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _SEEKING:  # Windows
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def pread_into(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill memory with the bytes at `offset` in one system call, which may read less; return the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, views, offset)
    data = pread(fd, sum(map(len, views)), offset)
    total = len(data)
    for view in views:
        part, data = data[: len(view)], data[len(view) :]
        view[: len(part)] = part
    return total


_NO_MORE = {errno.EMFILE, errno.ENFILE}
# Windows has no such limit.
_resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None


def _share() -> int:
    """Return half of the number of files that the process may open."""
    if _resource is None:
        return sys.maxsize
    most, _ = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return sys.maxsize if most == _resource.RLIM_INFINITY else max(1, most // 2)


@final
class OpenFile:
    """A file descriptor that is closed with the last reference to this object."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        """Open a regular file.

        Raises:
            DamagedFileError: It is missing, or not a regular file.
        """
        self.fd = -1
        self.fd = open_file(path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # else the system reads 128 KiB ahead for each row

    def __del__(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)


@final
class OpenFiles:
    """Open files by key, closed by `close()` or a `with` block. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` files open besides those in use, and at most half of what the process may open."""
        self.limit = min(limit, _share())
        self._files: OrderedDict[Hashable, OpenFile] = OrderedDict()
        self.lock = threading.Lock()
        """Held during a lookup and while a file is opened."""

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def get(self, key: Hashable, path: Callable[[], Path]) -> OpenFile:
        """Return an open file, which stays open as long as the caller has a reference to it.

        Args:
            key: Identifies the file; faster to create and to compare than a path.
            path: Called if the file is not open.

        Raises:
            DamagedFileError: It is missing, or not a regular file.
        """
        with self.lock:
            file = self._files.get(key)
            if file is None:
                file = self._open(path())
                self._files[key] = file
                if len(self._files) > self.limit:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(key)
            return file

    def _open(self, path: Path) -> OpenFile:
        try:
            return OpenFile(path)
        except OSError as error:
            if error.errno not in _NO_MORE:
                raise
        self._files.clear()  # closes the files that are not in use
        try:
            return OpenFile(path)
        except OSError as error:
            if error.errno not in _NO_MORE:
                raise
            msg = (
                f"no more files can be opened ({error.strerror}): give a lower max_open_files (it is {self.limit}), "
                "or raise the limit of the process (ulimit -n)"
            )
            raise CapacityError(msg) from error

    def clear(self) -> None:
        """Close all files that are not in use."""
        with self.lock:
            self._files.clear()

    close = clear

    def __enter__(self) -> Self:
        """Return the files; the end of the `with` block closes them."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close all files that are not in use."""
        self.clear()
