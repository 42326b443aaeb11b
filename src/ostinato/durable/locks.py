"""DirectoryLock: an advisory lock for saves to a directory, which the system releases when a process is killed."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any, final

from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

# The system has one of the two; typed as Any, since it depends on the system.
fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None
msvcrt: Any = importlib.import_module("msvcrt") if importlib.util.find_spec("msvcrt") else None

__all__ = ["LOCK_NAME", "DirectoryLock"]

LOCK_NAME = ".ostinato.lock"
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}


@final
class DirectoryLock:
    """Exclusive right of a thread or process to save into a directory.

    File systems without locks are saved to without one.
    """

    def __init__(self, root: Path) -> None:
        """Name the directory; `acquire` locks it."""
        self._path = root / LOCK_NAME
        self._fd = -1

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            CheckpointError: Another thread or process is saving into this directory.
        """
        while True:
            fd = os.open(self._path, _FLAGS, 0o666)
            try:
                _lock(fd, self._path)
                current = self._is_current(fd)
            except BaseException:
                os.close(fd)
                raise
            if current:
                self._fd = fd
                return
            os.close(fd)  # its last owner removed this file: lock the one that others will open

    def release(self, root: Path | None = None) -> None:
        """Release the lock and remove its file; does nothing if it is not held.

        Args:
            root: New path of the directory, if it was renamed.
        """
        if root is not None:
            self._path = root / LOCK_NAME
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):  # Windows cannot remove an open file; the next save uses it
            self._path.unlink()
        os.close(self._fd)
        self._fd = -1

    def _is_current(self, fd: int) -> bool:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(fd))


def _lock(fd: int, path: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt is not None:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if error.errno in _BUSY:
            msg = f"{path.parent} is being saved to by another thread or process: save elsewhere, or later"
            raise CheckpointError(msg) from error
