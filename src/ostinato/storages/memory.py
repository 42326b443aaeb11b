"""Where the bytes of tensor storages come from: the heap of a device, or mapped files. Asks before it takes."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

import psutil
import torch

from ostinato._backend import backend
from ostinato.durable import files
from ostinato.errors import DamagedFileError, MissingFileError, StorageMemoryError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HeapMemory", "MappedMemory", "Memory", "show_bytes"]

_LARGE_BYTES = 8 << 20
"""From this size on a block asks for huge pages; a smaller one would round up to them."""


class Memory(Protocol):
    """Gives uninitialised blocks of bytes."""

    device: torch.device

    def block(self, name: str, nbytes: int) -> Tensor:
        """Return a uint8 tensor `[nbytes]` of its own."""

    def check(self, nbytes: int) -> None:
        """Raise `StorageMemoryError` if `nbytes` more cannot be had."""


@final
class HeapMemory:
    """Plain memory of a device. Cost: pages are touched on first write, not here."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check(self, nbytes: int) -> None:
        """Compare with what the device has free.

        Raises:
            StorageMemoryError: naming the bytes needed and the bytes there are.
        """
        if self.device.type == "cuda":
            free, place = torch.cuda.mem_get_info(self.device)[0], f"on {self.device}"
        elif self.device.type == "cpu":
            free, place = psutil.virtual_memory().available, "in memory"
        else:
            return  # other devices do not say what they have; their allocator speaks for itself
        if nbytes > free:
            _raise_short(nbytes, free, place, "a smaller max_size, smaller dtypes, or LazyMemmapStorage")

    def block(self, name: str, nbytes: int) -> Tensor:  # noqa: ARG002
        """Return a uint8 tensor `[nbytes]`, not initialised."""
        with torch.inference_mode(mode=False):  # rows are written in any mode, whatever the one in which the first came
            block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        native = backend.native
        if native is not None and nbytes >= _LARGE_BYTES and self.device.type == "cpu":
            # before the first touch: random rows then miss the TLB less often
            native.advise_huge_pages(block.data_ptr(), nbytes)
        return block


@final
class MappedMemory:
    """Files in a directory, one for each block, mapped into memory.

    The disk space is reserved when a block is made: writing to a mapped file on a full disk would end the
    process (SIGBUS) instead of raising. Without `scratch_dir` the files are temporary and go with the object.
    """

    device = torch.device("cpu")

    def __init__(self, scratch_dir: Path | None) -> None:
        self.temporary = scratch_dir is None
        if scratch_dir is None:
            self.directory = Path(tempfile.mkdtemp(prefix="ostinato-"))
            weakref.finalize(self, shutil.rmtree, str(self.directory), True)  # noqa: FBT003
        else:
            self.directory = Path(scratch_dir)
        self._blocks: list[Path] = []

    def check(self, nbytes: int) -> None:
        """Compare with what the disk has free.

        Raises:
            StorageMemoryError: naming the bytes needed and the bytes there are.
        """
        parent = next(p for p in (self.directory, *self.directory.parents) if p.exists())
        free = shutil.disk_usage(parent).free
        if nbytes > free:
            _raise_short(nbytes, free, f"on the disk of {self.directory}", "a smaller max_size, or another scratch_dir")

    def block(self, name: str, nbytes: int) -> Tensor:
        """Return a uint8 tensor `[nbytes]` mapped to the file `name`; bytes that the file has already stay."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        if not path.exists() or path.stat().st_size != nbytes:
            files.reserve(path, nbytes)
        self._blocks.append(path)
        with torch.inference_mode(mode=False):
            return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)

    def sync(self) -> None:
        """Wait until all bytes written so far are on the disk."""
        for path in self._blocks:
            with path.open("rb+") as file:
                files.sync_fd(file.fileno())  # pages of a shared mapping belong to the file: fsync writes them back

    def must_exist(self, sizes: dict[str, int]) -> None:
        """Check the files of a directory that is reopened.

        Raises:
            MissingFileError: if one is missing.
            DamagedFileError: if one is no regular file, or has another size.
        """
        for name, nbytes in sizes.items():
            path = self.directory / name
            if not nbytes:
                continue
            if not os.path.lexists(path):
                msg = f"{path} is missing, a file of {nbytes} bytes: the directory is damaged, restore it from a copy"
                raise MissingFileError(msg)
            got = path.stat().st_size if path.is_file() and not path.is_symlink() else None
            if got != nbytes:
                found = "something else" if got is None else f"{got} bytes"
                msg = f"{path} must be a file of {nbytes} bytes, got {found}: the directory is damaged"
                raise DamagedFileError(msg)


def show_bytes(nbytes: float) -> str:
    """Write a number of bytes for people: `165.0 MB` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _raise_short(nbytes: int, free: int, place: str, instead: str) -> None:
    msg = (
        f"the storage needs {nbytes} bytes ({show_bytes(nbytes)}) {place}, {free} bytes ({show_bytes(free)}) "
        f"are free: use {instead}"
    )
    raise StorageMemoryError(msg)
