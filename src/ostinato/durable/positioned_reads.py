"""A bounded number of files held open for positioned reads: the one used longest ago is closed first."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import os
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, final

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
"""Pieces closer than this are read in one call: what lies between costs no page more than they do."""
_MOST_PIECES = 500  # half of what Linux takes in one call, as each piece may have a gap before it
_SCRATCH = memoryview(bytearray(GAP_BYTES))  # written by many threads, read by none
_SEEKING = threading.Lock()


def read_into(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with the bytes at `offset`.

    Raises:
        DamagedFileError: The file ends before.
    """
    while len(view):
        count = pread_into(fd, [view], offset)
        if count == 0:
            msg = f"{path} ends at byte {offset}, {len(view)} more expected: it was cut"
            raise DamagedFileError(msg)
        view, offset = view[count:], offset + count


def read_pieces(fds: np.ndarray, offsets: np.ndarray, widths: np.ndarray, targets: np.ndarray) -> int:
    """Read pieces of open files, each straight to its address; what lies close in a file is read in one call.

    Args:
        fds: The file of each piece, int64 `[N]`.
        offsets: Where it lies, int64 `[N]`, ascending within a file.
        widths: Its bytes, int64 `[N]`.
        targets: The address of its memory, int64 `[N]`, which the caller keeps alive.

    Returns:
        The first piece whose file ends before it does, or N. What targets hold from there on is undefined.

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
    """Read pieces that follow each other with small gaps; return the first that the file ends before."""
    parts: list[memoryview] = []
    end = offsets[0]
    for view, offset in zip(views, offsets, strict=True):
        if offset > end:
            parts.append(_SCRATCH[: offset - end])
        parts.append(view)
        end = offset + len(view)
    if pread_into(fd, parts, offsets[0]) == end - offsets[0]:
        return None
    for number, (view, offset) in enumerate(zip(views, offsets, strict=True)):  # a short read: each by itself
        done = 0
        while done < len(view):
            count = pread_into(fd, [view[done:]], offset + done)
            if count == 0:
                return number
            done += count
    return None


def read_tensor(fd: int, placed: Placed, path: Path) -> Tensor:
    """Read a whole tensor into new contiguous memory.

    Raises:
        DamagedFileError: The file ends before.
    """
    if placed.strides is not None:
        return read_strided(fd, placed, path).contiguous()
    with torch.inference_mode(mode=False):
        tensor = torch.empty(placed.shape, dtype=placed.torch_dtype, device="cpu")
    read_into(fd, raw_view(tensor), placed.offset, path)
    return tensor


def read_strided(fd: int, placed: Placed, path: Path) -> Tensor:
    """Read a tensor whose elements do not lie in order: the bytes from its first to its last, seen by its strides.

    Raises:
        DamagedFileError: The file ends before.
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
    """Fill memory with the bytes at `offset`, as far as one call of the system does, and return their number."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, views, offset)
    data = pread(fd, sum(map(len, views)), offset)
    total = len(data)
    for view in views:
        part, data = data[: len(view)], data[len(view) :]
        view[: len(part)] = part
    return total


_NO_MORE = {errno.EMFILE, errno.ENFILE}
# Windows has no such limit for descriptors that are not those of C.
_resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None


def _share() -> int:
    """Return how many files may be held so that the rest of the process can open as many."""
    if _resource is None:
        return sys.maxsize
    most, _ = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return sys.maxsize if most == _resource.RLIM_INFINITY else max(1, most // 2)


@final
class OpenFile:
    """A descriptor that is closed when nobody holds it any more."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        """Open a regular file.

        Raises:
            DamagedFileError: It is missing, or no regular file.
        """
        self.fd = -1
        self.fd = open_file(path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # else the system reads ahead, 128 KiB a row

    def __del__(self) -> None:
        """Close it."""
        if self.fd >= 0:
            os.close(self.fd)


@final
class OpenFiles:
    """Open files by path. May be used from several threads."""

    def __init__(self, limit: int) -> None:
        """Hold at most `limit` files open, and half of those that the process may, besides those in use right now."""
        self.limit = min(limit, _share())
        self._files: OrderedDict[Hashable, OpenFile] = OrderedDict()
        self.lock = threading.Lock()
        """Held while a file is looked up or opened."""

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self._files)

    def get(self, key: Hashable, path: Callable[[], Path]) -> OpenFile:
        """Return an open file, which stays open as long as the caller holds it.

        Args:
            key: What files are told apart by; cheaper to make and to compare than a path.
            path: Called where the file is not open yet.

        Raises:
            DamagedFileError: It is missing, or no regular file.
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
        self._files.clear()  # those that nobody uses are closed by this
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
        """Let go of all."""
        with self.lock:
            self._files.clear()
