"""Memory that processes share: one file without a name, gone with the last process that has it. Linux.

What lives here: the memory, and how it travels to a process that is being started. What does not: what lies in it.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ostinato._backend import native
from ostinato.errors import OptionError, UsageError
from ostinato.storages.memory import HeapMemory

__all__ = ["Segment", "require_sharing"]

_CPU = torch.device("cpu")
_MISSING = "this system has no memory that processes could share in the way it needs (it is there on Linux)"


class _Part(NamedTuple):
    """Where a block lies in the file."""

    name: str
    offset: int
    nbytes: int


def require_sharing() -> None:
    """Refuse to share where it cannot be done.

    Raises:
        OptionError: without the compiled part, or on another system than Linux.
    """
    if getattr(native, "SharedRing", None) is None:
        missing = "the compiled part of ostinato is missing or switched off" if native is None else _MISSING
        msg = f"shared=True cannot be had here: {missing}. Leave it out, or keep the buffer in one process"
        raise OptionError(msg)


@final
class Segment:
    """Blocks of memory, zero at first, that a process and those it starts have in common.

    Pickling it while a process is started hands the memory itself on; it is never copied, and cannot be pickled
    otherwise. There is no name that could be left behind, whoever is killed.

    Raises:
        OptionError: where processes cannot share memory.
    """

    device = _CPU

    def __init__(self) -> None:
        require_sharing()
        self._fd: int = native.make_shared_memory()  # type: ignore[union-attr]
        self._parts: list[_Part] = []
        self._blocks: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Hand the memory to a process that is being started.

        Raises:
            UsageError: at any other time.
        """
        if get_spawning_popen() is None:
            msg = (
                "a shared buffer goes to another process as an argument of multiprocessing.Process, when that process "
                "is started; it cannot be pickled or copied otherwise: copy its rows with dumps() or state_dict()"
            )
            raise UsageError(msg)
        return {"fd": DupFd(self._fd), "parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map what the other process has mapped."""
        self._fd = state["fd"].detach()
        self._parts = state["parts"]
        self._blocks = {part.name: self._map(part) for part in self._parts}

    def __del__(self) -> None:
        """Give the file back; mappings that are still in use keep the memory."""
        if "_fd" in self.__dict__:  # not so if memory could not be had
            os.close(self._fd)

    def check(self, nbytes: int) -> None:
        """Compare with the memory that is free.

        Raises:
            StorageMemoryError: naming the bytes needed and the bytes there are.
        """
        HeapMemory(_CPU).check(nbytes)

    def block(self, name: str, nbytes: int) -> Tensor:
        """Return the block of this name, uint8 `[nbytes]`: the one that is there, or a new one of zeros."""
        if name not in self._blocks:
            end = self._parts[-1] if self._parts else _Part("", 0, 0)
            page = mmap.ALLOCATIONGRANULARITY
            part = _Part(name, -(-(end.offset + end.nbytes) // page) * page, nbytes)
            os.ftruncate(self._fd, part.offset + nbytes)
            self._blocks[name] = self._map(part)
            self._parts.append(part)
        return self._blocks[name]

    def _map(self, part: _Part) -> Tensor:
        if part.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with torch.inference_mode(mode=False):
            block = torch.frombuffer(mmap.mmap(self._fd, part.nbytes, offset=part.offset), dtype=torch.uint8)
        native.advise_huge_pages(block.data_ptr(), part.nbytes)  # type: ignore[union-attr]
        return block
