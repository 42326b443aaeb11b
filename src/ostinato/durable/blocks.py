"""Files with a checksum for each block of 4 MiB: their records, writing and reading."""

from __future__ import annotations

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import xxhash

from ostinato.durable.files import (
    create_file,
    damaged,
    disk_errors,
    file_size,
    opened,
    read_into,
    safe_join,
    start_writeback,
    write_all,
)
from ostinato.durable.progress import count as count_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_BYTES = 4 * 2**20
TABLE_ENTRY_BYTES = 16
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)
# Bytes are hashed and written, or read and hashed, in steps that mostly fit into the cache of the processor.
_STEP_BYTES = 2 * 2**20
_THREADS = 4
_LARGE_BYTES = 8 * 2**20
"""Bytes for each thread that reads a file."""
_PART_BYTES = 32 * 2**20
"""Most bytes that a thread reads before they are counted."""


@final
class FileRecord(NamedTuple):
    """One file of an array: its base, or a patch that replaces some of its rows.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        runs: Number of runs of rows in a patch; 0 for a base.
        nbytes: Exact size of the file.
        checksums: XXH3-64 (seed 0) of each block of `BLOCK_BYTES` as 16 hexadecimal digits; the last block may be
            shorter.
    """

    file: str
    runs: int
    nbytes: int
    checksums: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {**self._asdict(), "checksums": list(self.checksums)}

    @classmethod
    def from_json(cls, node: object, where: str) -> FileRecord:
        """Read a record from a file and verify each field.

        Args:
            node: Parsed JSON.
            where: What error messages begin with.

        Raises:
            DamagedFileError: A field is missing, unknown or of a wrong type, or does not match the others.
        """
        if not isinstance(node, dict) or len(node) != len(cls._fields) or not all(map(node.__contains__, cls._fields)):
            damaged(where, f"a file must have exactly the keys {list(cls._fields)}, got {str(node)[:80]}")
        file, runs, nbytes, checksums = map(node.__getitem__, cls._fields)
        if type(file) is not str:
            damaged(where, "file must be a string")
        if type(runs) is not int or type(nbytes) is not int or not 0 <= runs * TABLE_ENTRY_BYTES <= nbytes:
            damaged(where, f"{str(runs)[:40]} runs do not fit into {str(nbytes)[:40]} bytes")
        if type(checksums) is not list or len(checksums) != -(-nbytes // BLOCK_BYTES):
            damaged(where, f"{nbytes} bytes need {-(-nbytes // BLOCK_BYTES)} checksums")
        if not {str}.issuperset(map(type, checksums)) or not all(map(_CHECKSUM.fullmatch, checksums)):
            damaged(where, "checksums must be strings of 16 hexadecimal digits")
        return cls(file, runs, nbytes, tuple(checksums))


class NewFile:
    """A new file to which bytes are appended; a checksum of each block is computed.

    A `with` block closes it, and removes it after an error.

    Args:
        path: The file, which must not exist.
        needed_bytes: Expected size, for the message if the disk is full.

    Raises:
        StorageMemoryError: The disk is full; `append` raises it, too.
    """

    def __init__(self, path: Path, needed_bytes: int = 0) -> None:
        self.path = path
        self.nbytes = 0
        """Bytes appended."""
        self._needed_bytes = needed_bytes
        self._hash = xxhash.xxh3_64()
        self._checksums: list[str] = []
        self.fd = -1
        with disk_errors(path, needed_bytes):
            self.fd = create_file(path, read=True)

    def append(self, view: memoryview) -> None:
        """Append bytes (`view` is one-dimensional, of format `B`)."""
        with disk_errors(self.path, max(self._needed_bytes, self.nbytes + len(view))):
            while len(view):
                room = BLOCK_BYTES - self.nbytes % BLOCK_BYTES
                step = view[: min(room, _STEP_BYTES)]
                self._hash.update(step)
                write_all(self.fd, step)
                self.nbytes += len(step)
                if len(step) == room:
                    self._close_block()
                count_bytes(len(step))
                view = view[len(step) :]

    def finish(self, runs: int = 0) -> FileRecord:
        """Close the file and return its record; `runs` is the number of runs of rows in a patch."""
        if self.nbytes % BLOCK_BYTES:
            self._close_block()
        self.close()
        return FileRecord(self.path.name, runs, self.nbytes, tuple(self._checksums))

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
        start = (len(self._checksums) - 1) * BLOCK_BYTES
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
        while len(view):
            room = BLOCK_BYTES - self._offset % BLOCK_BYTES
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
        checked = BlockReader(self.fd, self._record, self.path, verify=True)
        checked.read_into(view)
        checked.skip_to(min(-(-len(view) // BLOCK_BYTES) * BLOCK_BYTES, self._record.nbytes))
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
        total = len(view)
        share = min(-(-total // BLOCK_BYTES // threads), max(1, _PART_BYTES // BLOCK_BYTES)) * BLOCK_BYTES
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
        block = (self._offset - 1) // BLOCK_BYTES
        found, expected = self._hash.hexdigest(), self._record.checksums[block]
        if found != expected:
            where = f"in the block at byte {block * BLOCK_BYTES}"
            damaged(self.path, f"checksum {found}, {expected} expected: restore the file from a copy", where)
        self._hash.reset()


def check_size(root: Path, record: FileRecord) -> None:
    """Check that a file is there and has the recorded size.

    Raises:
        DamagedFileError: It is missing, not a regular file, or has another size.
    """
    path = safe_join(root, record.file)
    _compare_size(path, file_size(path), record)


def _compare_size(path: Path, size: int, record: FileRecord) -> None:
    if size != record.nbytes:
        reason = "the file was truncated, lengthened or replaced"
        damaged(path, f"it has {size} bytes, {record.nbytes} expected: {reason}")


@contextlib.contextmanager
def open_checked(root: Path, record: FileRecord, *, verify: bool) -> Iterator[BlockReader]:
    """Open a file of the recorded size.

    Raises:
        DamagedFileError: The file is missing or has another size.
    """
    path = safe_join(root, record.file)
    with opened(path) as fd:
        _compare_size(path, os.fstat(fd).st_size, record)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the read-ahead
        yield BlockReader(fd, record, path, verify=verify)


def read_blocks(root: Path, record: FileRecord) -> Iterator[bytes]:
    """Yield each block of a file after its checksum was compared.

    Raises:
        DamagedFileError: The file is missing, has another size, or fails a checksum.
    """
    with open_checked(root, record, verify=True) as reader:
        for start in range(0, record.nbytes, BLOCK_BYTES):
            block = bytearray(min(BLOCK_BYTES, record.nbytes - start))
            reader.read_into(memoryview(block))
            yield bytes(block)


def verify_file(root: Path, record: FileRecord) -> None:
    """Read a file and compare its size and checksums.

    Raises:
        DamagedFileError: It is missing, has another size, or fails a checksum.
    """
    with open_checked(root, record, verify=True) as reader:
        reader.skip_to(record.nbytes)
