"""Memory with files mapped over parts of it: copy-on-write, so that files never change."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.durable.extents import read_into
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Overlay"]

_FIXED = 0x10  # MAP_FIXED, of Linux and macOS alike


def _find_mmap() -> Any:
    if sys.platform not in ("linux", "darwin") or not hasattr(mmap, "MAP_PRIVATE"):
        return None
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return function


_mmap = _find_mmap()


@final
class Overlay:
    """Zeroed memory of so many bytes, over which parts of files can be laid.

    `tensor` (uint8) owns it: it goes back with the last view.

    Raises:
        OptionError: This system has no such mapping.
    """

    def __init__(self, nbytes: int) -> None:
        if _mmap is None:
            msg = f"mmap=True needs Linux or macOS, this is {sys.platform}: load without it"
            raise OptionError(msg)
        if nbytes == 0:
            self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with torch.inference_mode(mode=False):
            self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._view = self.tensor.numpy().data

    def lay(self, fd: int, offset: int, start: int, nbytes: int, path: Path) -> None:
        """Lay bytes of an open file over the memory from `start` on: whole pages mapped, the rest read."""
        end = start + nbytes
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and (start - offset) % mmap.PAGESIZE == 0:
            self._map(fd, offset + first - start, first, last - first)
        else:
            first = last = start
        read_into(fd, self._view[start:first], offset, path)
        read_into(fd, self._view[last:end], offset + last - start, path)

    def forget(self, start: int, end: int) -> None:
        """Give whole pages back that are not looked at again."""
        first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _map(self, fd: int, offset: int, start: int, nbytes: int) -> None:
        address = self.tensor.data_ptr() + start
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(address, nbytes, both, mmap.MAP_PRIVATE | _FIXED, fd, offset) != address:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
