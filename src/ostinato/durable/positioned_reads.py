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

from ostinato._backend import backend
from ostinato.durable.files import damaged, open_file
from ostinato.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path

GAP_BYTES = 4096
"""Pieces with smaller gaps are read in one call: the gap adds no page."""
_SEEKING = threading.Lock()


def read_into(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with the bytes at `offset`.

    Raises:
        DamagedFileError: The file is too short.
    """
    done = _fill(fd, view, offset)
    if done < len(view):
        damaged(path, f"it ends at byte {offset + done}, {len(view) - done} more expected: it was cut")


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` with the bytes at `offset`; return their number, which is smaller at the end of the file."""
    done = 0
    while done < len(view):
        if hasattr(os, "preadv"):
            count = os.preadv(fd, [view[done:]], offset + done)
        else:
            data = pread(fd, len(view) - done, offset + done)
            count = len(data)
            view[done : done + count] = data
        if count == 0:
            break
        done += count
    return done


def read_pieces(fds: np.ndarray, offsets: np.ndarray, widths: np.ndarray, targets: np.ndarray) -> int:
    """Read pieces of open files, each to its address; the extension reads adjacent pieces of a file in one call.

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
    pieces = zip(fds.tolist(), offsets.tolist(), widths.tolist(), targets.tolist(), strict=True)
    for number, (fd, offset, width, target) in enumerate(pieces):
        view = memoryview((ctypes.c_char * width).from_address(target)).cast("B")
        if _fill(fd, view, offset) < width:
            return number
    return len(fds)


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """Return up to `nbytes` bytes at `offset`."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _SEEKING:  # Windows
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


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
