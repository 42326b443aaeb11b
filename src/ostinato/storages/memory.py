"""Memory of tensor storages: on a device, or in mapped files. The free memory is checked before it is allocated."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

import torch

from ostinato._backend import backend
from ostinato.durable import files, progress
from ostinato.errors import DamagedFileError, MissingFileError, StorageMemoryError

if TYPE_CHECKING:
    from torch import Tensor

_LARGE_BYTES = 8 << 20
"""Smallest block for which huge pages are requested; a smaller one would be rounded up to them."""


class Memory(Protocol):
    """Allocates uninitialized blocks of bytes."""

    device: torch.device

    def block(self, name: str, nbytes: int) -> Tensor:
        """Return a new uint8 tensor `[nbytes]`."""

    def check(self, nbytes: int) -> None:
        """Raise `StorageMemoryError` if `nbytes` more are not available."""


@final
class HeapMemory:
    """Memory of a device. Pages are touched when they are first written."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check(self, nbytes: int) -> None:
        """Compare with the free memory of the device.

        Raises:
            StorageMemoryError: naming the bytes needed and the bytes free.
        """
        if self.device.type == "cuda":
            free, place = torch.cuda.mem_get_info(self.device)[0], f"on {self.device}"
        elif self.device.type == "cpu":
            import psutil

            free, place = psutil.virtual_memory().available, "in memory"
        else:
            return  # the free memory of other devices is not known; their allocator raises
        if nbytes > free:
            _raise_short(nbytes, free, place, "a smaller max_size, smaller dtypes, or LazyMemmapStorage")

    def block(self, name: str, nbytes: int) -> Tensor:  # noqa: ARG002
        """Return a uint8 tensor `[nbytes]`, uninitialized.

        Raises:
            StorageMemoryError: It cannot be allocated, although `check` has found the memory free.
        """
        try:
            with torch.inference_mode(mode=False):  # rows may be written in any mode later
                block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            msg = (
                f"{show_bytes(nbytes)} cannot be allocated on {self.device}: this process may have no more, by a limit "
                f"(ulimit -v) or because others use it ({error}). Take a smaller max_size, or smaller dtypes"
            )
            raise StorageMemoryError(msg) from error
        native = backend.native
        if native is not None and nbytes >= _LARGE_BYTES and self.device.type == "cpu":
            # before the pages are touched; reads of random rows then have fewer TLB misses
            native.advise_huge_pages(block.data_ptr(), nbytes)
        return block


@final
class MappedMemory:
    """Files in a directory, one for each block, mapped into memory.

    The disk space is reserved when a block is created: writing to a mapped file on a full disk would kill the process
    (SIGBUS) instead of raising an error. With `remove` (without it, if there is no `scratch_dir`) the files are
    temporary: `close`, or the end of the object, removes them.
    """

    device = torch.device("cpu")

    def __init__(self, scratch_dir: Path | None, *, remove: bool | None = None) -> None:
        self.temporary = scratch_dir is None
        self._removes = self.temporary if remove is None else remove
        self._blocks: list[Path] = []
        self._numbers: dict[Path, int] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="ostinato-") if scratch_dir is None else scratch_dir)
        if self._removes:  # when it is dropped, and at the end of the process
            weakref.finalize(self, _remove_files, self.directory, self._numbers, os.getpid(), own=self.temporary)

    def check(self, nbytes: int) -> None:
        """Compare with the free space of the disk.

        Raises:
            StorageMemoryError: naming the bytes needed and the bytes free.
        """
        free = files.free_bytes(self.directory)
        if nbytes > free:
            _raise_short(nbytes, free, f"on the disk of {self.directory}", "a smaller max_size, or another scratch_dir")

    def block(self, name: str, nbytes: int) -> Tensor:
        """Return a uint8 tensor `[nbytes]` mapped to the file `name`; existing bytes of the file are kept."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        if not path.exists() or path.stat().st_size != nbytes:
            files.reserve(path, nbytes)
        self._blocks.append(path)
        self._numbers[path] = path.stat().st_ino
        with torch.inference_mode(mode=False):
            return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)

    def sync(self) -> None:
        """Wait until all bytes are on the disk."""
        for path in self._blocks:
            with path.open("rb+") as file:
                files.sync_fd(file.fileno())  # fsync also writes the pages of a shared mapping
                progress.count(os.fstat(file.fileno()).st_size)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by its name."""
        return {path.name: path.stat().st_size for path in self._blocks}

    def close(self) -> None:
        """Remove the files if they go with this object. Mapped blocks stay valid as long as they are referenced."""
        if self._removes:
            self.remove()

    def remove(self) -> bool:
        """Remove the files, and their directory if it is empty then; return whether there were some."""
        return _remove_files(self.directory, self._numbers, os.getpid(), own=self.temporary)

    def must_exist(self, sizes: dict[str, int]) -> None:
        """Check the files of a directory that is opened again.

        Raises:
            MissingFileError: if one is missing.
            DamagedFileError: if one is not a regular file, or has another size.
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


def _remove_files(directory: Path, numbers: dict[Path, int], process: int, *, own: bool) -> bool:
    """Remove the files of a mapped storage, unless this is a forked child of the process that made them.

    Files of the same names that another storage has put in their place are left. A directory of its `own` goes with all
    files, those that other processes have made in it too.
    """
    if os.getpid() != process:
        return False
    if own:
        numbers.clear()
        existed = directory.exists()
        shutil.rmtree(directory, ignore_errors=True)
        return existed
    mine = [path for path, number in numbers.items() if path.exists() and path.stat().st_ino == number]
    numbers.clear()
    if mine:
        for path in {*mine, *directory.glob("block*.bin"), *directory.glob("manifest.json")}:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is gone, or holds other files
        directory.rmdir()
    return bool(mine)


def show_bytes(nbytes: float) -> str:
    """Return a number of bytes as text: `165.0 MB` (powers of 1000)."""
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
