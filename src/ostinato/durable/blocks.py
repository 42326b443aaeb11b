"""Files in blocks with checksums: their records, writing and reading."""

from __future__ import annotations

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self, final

import xxhash

from ostinato.durable.files import (
    create_file,
    damaged,
    disk_errors,
    opened,
    safe_join,
    start_writeback,
    sync_fd,
    write_all,
)
from ostinato.durable.positioned_reads import read_into
from ostinato.durable.progress import count as count_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_BYTES = 4 * 2**20
MIN_BLOCK_BYTES = 4 * 2**10
MAX_BLOCK_BYTES = 16 * 2**20
TABLE_ENTRY_BYTES = 16
FILE_KEYS = ("file", "runs", "nbytes", "block_bytes", "checksums")
"""Keys of a patch; the record of a base has no `runs`."""
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)
# Bytes are hashed and written, or read and hashed, in steps that mostly fit into the cache of the processor.
_STEP_BYTES = 2 * 2**20
_THREADS = 4
_LARGE_BYTES = 8 * 2**20
"""Bytes for each thread that reads a file."""
_PART_BYTES = 32 * 2**20
"""Most bytes that a thread reads before they are counted."""


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of an array: its base, or a patch that replaces some of its rows.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        runs: Number of runs of rows in a patch; 0 for a base.
        nbytes: Exact size of the file.
        block_bytes: Bytes covered by each checksum; the last block may be shorter.
        checksums: XXH3-64 (seed 0) of each block as 16 hexadecimal digits.
    """

    file: str
    runs: int
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {**asdict(self), "checksums": list(self.checksums)}

    @classmethod
    def from_json(cls, node: dict[str, Any], expected: int | None, where: str) -> FileRecord:
        """Read a record from a file and verify each field.

        Args:
            node: Parsed JSON with the keys of the record.
            expected: Bytes that the file must have; None for a patch, whose size depends on its table.
            where: What error messages begin with.

        Raises:
            DamagedFileError: A field is of a wrong type, or does not match the others.
        """
        file, runs, nbytes, block, checksums = (node[key] for key in FILE_KEYS)
        if not isinstance(file, str):
            damaged(where, "file must be a string")
        if expected is None and not (type(runs) is type(nbytes) is int and 0 < runs * TABLE_ENTRY_BYTES < nbytes):
            damaged(where, f"{str(runs)[:40]} runs do not fit into {str(nbytes)[:40]} bytes")
        if type(nbytes) is not int or expected not in (None, nbytes):
            damaged(where, f"nbytes is {str(nbytes)[:40]}, shape and dtype make {expected}")
        if type(block) is not int or not MIN_BLOCK_BYTES <= block <= MAX_BLOCK_BYTES:
            damaged(where, f"block_bytes must be in [{MIN_BLOCK_BYTES}, {MAX_BLOCK_BYTES}], got {str(block)[:40]}")
        if not isinstance(checksums, list) or len(checksums) != -(-nbytes // block):
            damaged(where, f"{nbytes} bytes need {-(-nbytes // block)} checksums")
        if not {str}.issuperset(map(type, checksums)) or not all(map(_CHECKSUM.fullmatch, checksums)):
            damaged(where, "checksums must be strings of 16 hexadecimal digits")
        return cls(file, runs, nbytes, block, tuple(checksums))


@final
class NewFile:
    """A new file to which bytes are appended; a checksum of each block is computed.

    A `with` block closes it, and removes it after an error.

    Args:
        path: The file, which must not exist.
        needed_bytes: Expected size, for the message if the disk is full.
        block_bytes: Bytes per checksum.

    Raises:
        StorageMemoryError: The disk is full; `append` and `finish` raise it, too.
    """

    def __init__(self, path: Path, needed_bytes: int = 0, block_bytes: int = BLOCK_BYTES) -> None:
        self.path = path
        self.needed_bytes = needed_bytes
        self.nbytes = 0
        """Bytes appended."""
        self._block_bytes = block_bytes
        self._hash = xxhash.xxh3_64()
        self._checksums: list[str] = []
        self.fd = -1
        with disk_errors(path, needed_bytes):
            self.fd = create_file(path, read=True)

    def append(self, view: memoryview) -> None:
        """Append bytes (`view` is one-dimensional, of format `B`)."""
        with disk_errors(self.path, max(self.needed_bytes, self.nbytes + len(view))):
            while len(view):
                room = self._block_bytes - self.nbytes % self._block_bytes
                step = view[: min(room, _STEP_BYTES)]
                self._hash.update(step)
                write_all(self.fd, step)
                self.nbytes += len(step)
                if len(step) == room:
                    self._close_block()
                count_bytes(len(step))
                view = view[len(step) :]

    def finish(self, *, runs: int = 0, sync: bool = False) -> FileRecord:
        """Close the file and return its record.

        Args:
            runs: Number of runs of rows in a patch.
            sync: Wait until the bytes are on the disk.
        """
        if self.nbytes % self._block_bytes:
            self._close_block()
        if sync:
            with disk_errors(self.path, self.needed_bytes):
                sync_fd(self.fd)
        self.close()
        return FileRecord(self.path.name, runs, self.nbytes, self._block_bytes, tuple(self._checksums))

    def close(self) -> None:
        """Close the file; does nothing if it is closed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the file; after an error, remove it."""
        self.close()
        if kind is not None:
            self.path.unlink(missing_ok=True)

    def _close_block(self) -> None:
        self._checksums.append(self._hash.hexdigest())
        self._hash.reset()
        start = (len(self._checksums) - 1) * self._block_bytes
        start_writeback(self.fd, start, self.nbytes - start)


@final
class BlockReader:
    """Reads the bytes of a file in order and verifies each block when it is complete."""

    def __init__(self, fd: int, record: FileRecord, path: Path, *, verify: bool, offset: int = 0) -> None:
        """Start at a block of `fd`, which the caller closes; `path` is for messages."""
        self.fd = fd
        self.path = path
        self._record = record
        self._verify = verify
        self._hash = xxhash.xxh3_64()
        self._offset = offset

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes; a large file that is read whole is read by several threads.

        Raises:
            DamagedFileError: The checksum of a block differs from the recorded one, or the file ends too early.
        """
        threads = min(_THREADS, os.cpu_count() or 1, len(view) // _LARGE_BYTES)
        if threads > 1 and len(view) == self._record.nbytes:
            self._read_parts(view, threads)
            return
        block_bytes = self._record.block_bytes
        while len(view):
            room = block_bytes - self._offset % block_bytes
            step = view[: min(room, _STEP_BYTES)]
            read_into(self.fd, step, self._offset, self.path)
            self._offset += len(step)
            if self._verify:
                self._hash.update(step)
                if len(step) == room or self._offset == self._record.nbytes:
                    self._check_block()
            count_bytes(len(step))
            view = view[len(step) :]

    def read_table(self, view: memoryview) -> None:
        """Fill `view` with the first bytes and verify all blocks that contain them, also without `verify`.

        Raises:
            DamagedFileError: See `read_into`.
        """
        block = self._record.block_bytes
        checked = BlockReader(self.fd, self._record, self.path, verify=True)
        checked.read_into(view)
        checked.skip_to(min(-(-len(view) // block) * block, self._record.nbytes))
        self.skip_to(len(view))

    def skip_to(self, offset: int) -> None:
        """Continue at an offset. With `verify`, skipped bytes are read, since checksums cover them."""
        if not self._verify:
            self._offset = max(self._offset, offset)
            return
        scratch = memoryview(bytearray(min(_STEP_BYTES, max(0, offset - self._offset))))
        while self._offset < offset:
            self.read_into(scratch[: offset - self._offset])

    def _read_parts(self, view: memoryview, threads: int) -> None:
        block, total = self._record.block_bytes, len(view)
        share = min(-(-total // block // threads), max(1, _PART_BYTES // block)) * block
        parts = [(start, view[start : start + share]) for start in range(0, total, share)]

        def read(start: int, part: memoryview) -> None:
            BlockReader(self.fd, self._record, self.path, verify=self._verify, offset=start).read_into(part)

        with ThreadPoolExecutor(threads) as pool:
            try:
                for reading, part in [(pool.submit(read, *part), part[1]) for part in parts]:
                    reading.result()
                    count_bytes(len(part))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._offset = total

    def _check_block(self) -> None:
        block = (self._offset - 1) // self._record.block_bytes
        found, expected = self._hash.hexdigest(), self._record.checksums[block]
        if found != expected:
            where = f"in the block at byte {block * self._record.block_bytes}"
            damaged(self.path, f"checksum {found}, {expected} expected: restore the file from a copy", where)
        self._hash.reset()


@contextlib.contextmanager
def open_checked(root: Path, record: FileRecord, *, verify: bool) -> Iterator[BlockReader]:
    """Open a file of the recorded size.

    Raises:
        DamagedFileError: The file is missing or has another size.
    """
    path = safe_join(root, record.file)
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size != record.nbytes:
            reason = "the file was truncated, lengthened or replaced"
            damaged(path, f"it has {size} bytes, {record.nbytes} expected: {reason}")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the read-ahead
        yield BlockReader(fd, record, path, verify=verify)


def read_blocks(root: Path, record: FileRecord, *, verify: bool = True) -> Iterator[bytes]:
    """Yield each block of a file after its checksum was compared.

    Raises:
        DamagedFileError: The file is missing, has another size, or fails a checksum.
    """
    with open_checked(root, record, verify=verify) as reader:
        for start in range(0, record.nbytes, record.block_bytes):
            block = bytearray(min(record.block_bytes, record.nbytes - start))
            reader.read_into(memoryview(block))
            yield bytes(block)


def verify_file(root: Path, record: FileRecord) -> None:
    """Read a file and compare its size and checksums.

    Raises:
        DamagedFileError: It is missing, has another size, or fails a checksum.
    """
    with open_checked(root, record, verify=True) as reader:
        reader.skip_to(record.nbytes)
