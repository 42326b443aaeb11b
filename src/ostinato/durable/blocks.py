"""Readers and writers of files in blocks with checksums."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, final

import xxhash

from ostinato.durable.files import open_inside, start_writeback, write_all
from ostinato.durable.positioned_reads import pread_into
from ostinato.durable.progress import count as count_bytes
from ostinato.errors import DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ostinato.durable.arrays import ArrayRecord, FileRecord

__all__ = ["BlockReader", "BlockWriter", "open_checked"]

# Bytes are hashed and written, or read and hashed, in steps that mostly fit into the cache of the processor.
_STEP_BYTES = 2 * 2**20
_THREADS = 4
_LARGE_BYTES = 8 * 2**20
"""Bytes for each thread that reads a file."""
_PART_BYTES = 32 * 2**20
"""Most bytes that a thread reads before they are counted."""


@final
class BlockWriter:
    """Appends bytes to an open file and computes a checksum of each block."""

    def __init__(self, fd: int, block_bytes: int) -> None:
        """Start at the end of `fd`, which the caller closes."""
        self._fd = fd
        self._block_bytes = block_bytes
        self._hash = xxhash.xxh3_64()
        self._checksums: list[str] = []
        self.nbytes = 0

    def write(self, view: memoryview) -> None:
        """Append bytes (`view` is one-dimensional, of format `B`)."""
        while len(view):
            room = self._block_bytes - self.nbytes % self._block_bytes
            step = view[: min(room, _STEP_BYTES)]
            self._hash.update(step)
            write_all(self._fd, step)
            self.nbytes += len(step)
            if len(step) == room:
                self._close_block()
            count_bytes(len(step))
            view = view[len(step) :]

    def finish(self) -> tuple[str, ...]:
        """Return the checksums of all blocks; the last block may be shorter."""
        if self.nbytes % self._block_bytes:
            self._close_block()
        return tuple(self._checksums)

    def _close_block(self) -> None:
        self._checksums.append(self._hash.hexdigest())
        self._hash.reset()
        start = (len(self._checksums) - 1) * self._block_bytes
        start_writeback(self._fd, start, self.nbytes - start)


@final
class BlockReader:
    """Reads the bytes of a file in order and verifies each block when it is complete."""

    def __init__(self, fd: int, record: ArrayRecord | FileRecord, path: Path, *, verify: bool, offset: int = 0) -> None:
        """Start at a block of `fd`, which the caller closes; `path` is for messages."""
        self.fd = fd
        self._record = record
        self._path = path
        self._verify = verify
        self._hash = xxhash.xxh3_64()
        self._offset = offset

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes.

        Raises:
            DamagedFileError: The checksum of a block differs from the recorded one, or the file ends too early.
        """
        block_bytes = self._record.block_bytes
        while len(view):
            room = block_bytes - self._offset % block_bytes
            step = view[: min(room, _STEP_BYTES)]
            self._fill(step)
            self._offset += len(step)
            if self._verify:
                self._hash.update(step)
                if len(step) == room or self._offset == self._record.nbytes:
                    self._check_block()
            count_bytes(len(step))
            view = view[len(step) :]

    def read_verified(self, view: memoryview) -> None:
        """Fill `view` with the next bytes and verify all blocks that contain them, also without `verify`.

        Raises:
            DamagedFileError: See `read_into`.
        """
        block = self._record.block_bytes
        checked = BlockReader(self.fd, self._record, self._path, verify=True, offset=self._offset // block * block)
        checked.skip_to(self._offset)
        checked.read_into(view)
        checked.skip_to(min(-(-checked._offset // block) * block, self._record.nbytes))
        self.skip_to(self._offset + len(view))

    def skip_to(self, offset: int) -> None:
        """Continue at an offset. With `verify`, skipped bytes are read, since checksums cover them."""
        if not self._verify:
            self._offset = max(self._offset, offset)
            return
        scratch = memoryview(bytearray(min(_STEP_BYTES, max(0, offset - self._offset))))
        while self._offset < offset:
            self.read_into(scratch[: offset - self._offset])

    def read_all_into(self, view: memoryview) -> None:
        """Fill `view` with the whole file; a large file is read by several threads.

        Raises:
            DamagedFileError: See `read_into`.
        """
        block, total = self._record.block_bytes, self._record.nbytes
        threads = min(_THREADS, os.cpu_count() or 1, total // _LARGE_BYTES)
        if threads < 2:
            self.read_into(view)
            return
        share = min(-(-total // block // threads), max(1, _PART_BYTES // block)) * block
        parts = [(start, view[start : start + share]) for start in range(0, total, share)]

        def read(start: int, part: memoryview) -> None:
            BlockReader(self.fd, self._record, self._path, verify=self._verify, offset=start).read_into(part)

        with ThreadPoolExecutor(threads) as pool:
            try:
                for reading, part in [(pool.submit(read, *part), part[1]) for part in parts]:
                    reading.result()
                    count_bytes(len(part))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            count = pread_into(self.fd, [view[filled:]], self._offset + filled)
            if count == 0:
                msg = f"{self._path} ends at byte {self._offset + filled}, {self._record.nbytes} bytes expected"
                raise DamagedFileError(msg)
            filled += count

    def _check_block(self) -> None:
        block = (self._offset - 1) // self._record.block_bytes
        found, expected = self._hash.hexdigest(), self._record.checksums[block]
        if found != expected:
            msg = (
                f"{self._path} is damaged in the block at byte {block * self._record.block_bytes}: "
                f"checksum {found}, {expected} expected: restore the file from a copy"
            )
            raise DamagedFileError(msg)
        self._hash.reset()


@contextlib.contextmanager
def open_checked(root: Path, record: ArrayRecord | FileRecord, *, verify: bool) -> Iterator[BlockReader]:
    """Open a file of the recorded size.

    Raises:
        DamagedFileError: The file is missing or has another size.
    """
    fd, size = open_inside(root, record.file)
    try:
        path = root / record.file
        if size != record.nbytes:
            msg = f"{path} has {size} bytes, {record.nbytes} expected: the file was truncated, lengthened or replaced"
            raise DamagedFileError(msg)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the read-ahead
        yield BlockReader(fd, record, path, verify=verify)
    finally:
        os.close(fd)
