"""A bounded number of files held open for positioned reads: the one used longest ago is closed first."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, final

from ostinato.durable.files import open_file
from ostinato.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path

__all__ = ["OpenFile", "OpenFiles"]

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
