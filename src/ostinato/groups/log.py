"""The log of a buffer of groups: an append-only file in segments, whose writers share the waits for the disk.

A segment is a file of frames: serial number, length and checksum (three uint64, little-endian), and the body of a
record (`records.py`). The first frame says which log the segment belongs to. A frame is whole if its checksum is right,
which covers its serial number, its length and its body.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import xxhash

from ostinato.durable.files import (
    OpenFile,
    create_file,
    damaged,
    disk_errors,
    fsync_dir,
    read_into,
    start_writeback,
    sync_fd,
    write_all,
)
from ostinato.errors import CheckpointError
from ostinato.groups.records import pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ostinato.groups.ledger import Place

HEADER = struct.Struct("<QQQ")
NAME = re.compile(r"(segment|base)-(\d{12})\.log", re.ASCII)
_WRITEBACK_BYTES = 2**20
Sync = Literal["always", "interval", "never"]


def segment_name(kind: str, number: int) -> str:
    """Return the name of a file of a log."""
    return f"{kind}-{number:012d}.log"


def frame(serial: int, body: bytes | memoryview) -> bytes:
    """Return a record with its header."""
    return b"".join((HEADER.pack(serial, len(body), _check(serial, body)), body))


def _check(serial: int, body: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64_intdigest(body)
    return xxhash.xxh3_64_intdigest(HEADER.pack(serial, len(body), digest))


def frames_of(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield serial number, offset and body of each frame up to the first that is not whole."""
    offset = 0
    while offset + HEADER.size <= len(data):
        serial, nbytes, check = HEADER.unpack_from(data, offset)
        end = offset + HEADER.size + nbytes
        if end > len(data):
            return
        body = data[offset + HEADER.size : end]
        if check != _check(serial, body):
            return
        yield serial, offset, body
        offset = end


@final
class Segment:
    """A file of a log, open for reading until the last place in it is gone."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Open the file, whose frames are whole up to `nbytes`; raises what `files.open_file` raises."""
        self.path = path
        self.nbytes = nbytes
        self.needed_bytes = 0
        """Bytes of records that groups need."""
        self._file = OpenFile(path)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return the body of the frame at an offset.

        Raises:
            DamagedFileError: It is not whole.
        """
        data = memoryview(bytearray(HEADER.size + nbytes))
        read_into(self._file.fd, data, offset, self.path)
        serial, length, check = HEADER.unpack_from(data)
        body = data[HEADER.size :]
        if length != nbytes or check != _check(serial, body):
            damaged(self.path, "the checksum of a record does not match", f"at byte {offset}")
        return body


class FilePlace(NamedTuple):
    """A record in a segment."""

    segment: Segment
    offset: int
    nbytes: int

    def read(self) -> memoryview:
        """Return the body of the record; raises what `Segment.read` raises."""
        return self.segment.read(self.offset, self.nbytes)

    def need(self, nbytes: int) -> None:
        """Add to the bytes that groups need in the segment."""
        self.segment.needed_bytes += nbytes


class MemoryPlace(NamedTuple):
    """A record in memory."""

    body: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return len(self.body)

    def read(self) -> memoryview:
        """Return a copy of the record."""
        return memoryview(bytearray(self.body))

    def need(self, nbytes: int) -> None:
        """Do nothing: what no group needs is freed with its last reference."""


@final
class MemoryLog:
    """A log without files: only the records that groups need are in memory."""

    def __init__(self) -> None:
        """Start at serial number 0."""
        self.written = 0

    def write(self, body: bytes) -> tuple[int, Place]:
        """Return the serial number and the place of a record."""
        self.written += 1
        return self.written, MemoryPlace(body)

    def wait(self, serial: int) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Recovered(NamedTuple):
    """What was found in the folder of a log.

    Attributes:
        folder: The folder.
        name: The name of the log.
        serial: Serial number of the last record.
        segments: Its files, in order.
        number: Number of the segment to write.
        continues: Whether this is the last of `segments`; it is created otherwise.
    """

    folder: Path
    name: str
    serial: int
    segments: list[Segment]
    number: int
    continues: bool


@final
class Log:
    """A log in a folder, which continues its last segment. `write` needs a lock of its caller; `wait` does not."""

    def __init__(self, found: Recovered, sync: Sync, interval_s: float, segment_bytes: int) -> None:
        """Continue a log.

        Args:
            found: What is in its folder, which is locked.
            sync: `always`, `interval` or `never`.
            interval_s: Seconds between two syncs, with `interval`.
            segment_bytes: Another segment begins when one has so many bytes.

        Raises:
            StorageMemoryError: The disk is full.
        """
        self._found, self._sync, self._most = found, sync, segment_bytes
        self.segments = found.segments
        """All files of the log; the last one is being written."""
        self.written = self._synced = found.serial
        """Serial number of the last record."""
        self._state = threading.Condition()
        """Guards what follows; held for moments, never during a sync."""
        self._syncing = False
        self._failure = ""
        self._fd = -1
        self._started = 0
        self.number = found.number
        """Number of the segment that is being written."""
        if found.continues:
            self._continue(self.segments[-1])
        else:
            self._begin(found.number)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if sync == "interval":
            self._thread = threading.Thread(target=self._sync_often, args=(interval_s,), daemon=True)
            self._thread.start()

    def _continue(self, segment: Segment) -> None:
        """Continue a segment behind its last whole frame."""
        self._fd = os.open(segment.path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        os.ftruncate(self._fd, segment.nbytes)
        os.lseek(self._fd, segment.nbytes, os.SEEK_SET)
        sync_fd(self._fd)

    def write(self, body: bytes) -> tuple[int, Place]:
        """Append a record. A killed process loses none that was written; see `wait` for power cuts.

        Returns:
            Its serial number and its place.

        Raises:
            StorageMemoryError: The disk is full; the log is as before.
            CheckpointError: An earlier write or sync failed in a way that could not be undone.
        """
        self.check()
        if self.segments[-1].nbytes > self._most:
            self.roll()
        segment, serial = self.segments[-1], self.written + 1
        offset = segment.nbytes
        self._append(segment, frame(serial, body))
        with self._state:
            self.written = serial
        if segment.nbytes - self._started >= _WRITEBACK_BYTES:
            start_writeback(self._fd, self._started, segment.nbytes - self._started)
            self._started = segment.nbytes
        return serial, FilePlace(segment, offset, len(body))

    def _append(self, segment: Segment, data: bytes) -> None:
        try:
            with disk_errors(segment.path, len(data)):
                write_all(self._fd, data)
        except BaseException:
            try:
                os.ftruncate(self._fd, segment.nbytes)
                os.lseek(self._fd, segment.nbytes, os.SEEK_SET)
            except OSError as error:
                self._failure = f"a failed write could not be undone: {error}"
            raise
        segment.nbytes += len(data)

    def is_wasteful(self) -> bool:
        """Whether groups need less than half of the bytes of whole segments, so that a compaction pays."""
        *whole, _ = self.segments
        nbytes = sum(segment.nbytes for segment in whole)
        return nbytes > self._most and sum(segment.needed_bytes for segment in whole) < nbytes / 2

    def roll(self) -> int:
        """Begin another segment; return the number of the one before, which is on the disk as a whole."""
        with self._state:
            while self._syncing:
                self._state.wait()
            self.check()
            self._sync_now(self._fd)
            self._synced = self.written
            self._state.notify_all()
            self._begin(self.number + 1)
        return self.number - 1

    def _begin(self, number: int) -> None:
        """Create a segment and continue in it."""
        path = self._found.folder / segment_name("segment", number)
        head = frame(0, pack({"op": "segment", "log": self._found.name, "first": self.written + 1}))
        with disk_errors(path, len(head)):
            fd = create_file(path)
            try:
                write_all(fd, head)
                sync_fd(fd)
                fsync_dir(path.parent)
                segment = Segment(path, len(head))
            except BaseException:
                os.close(fd)
                path.unlink()
                raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.number, self._started = fd, number, 0
        self.segments.append(segment)

    def wait(self, serial: int) -> None:
        """Return when a record is as safe as `sync` promises: with `always`, on the disk.

        Raises:
            CheckpointError: The disk could not be synced.
        """
        if self._sync == "always":
            self._flush(serial)

    def flush(self) -> None:
        """Return when everything that was written is on the disk, whatever `sync` is; raises what `wait` raises."""
        self._flush(self.written)

    def _flush(self, serial: int) -> None:
        """Sync for all records written so far, or wait for a thread that does."""
        with self._state:
            while self._synced < serial:
                self.check()
                if self._syncing:
                    self._state.wait()
                    continue
                self._syncing, reached, fd = True, self.written, self._fd
                self._state.release()
                try:
                    self._sync_now(fd)
                    failed = False
                except CheckpointError:
                    failed = True
                finally:
                    self._state.acquire()
                    self._syncing = False
                    self._state.notify_all()
                if not failed:
                    self._synced = max(self._synced, reached)

    def _sync_now(self, fd: int) -> None:
        try:
            sync_fd(fd)
        except OSError as error:  # the system may have dropped what it could not write: nothing can be promised
            self._failure = f"the disk could not be synced: {error}"
            raise CheckpointError(self._failure) from error

    def _sync_often(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            with contextlib.suppress(CheckpointError):  # the next call raises it
                self.flush()

    def check(self) -> None:
        """Raise if nothing can be written any more.

        Raises:
            CheckpointError: An earlier write or sync has failed, or the log is closed.
        """
        if self._failure:
            msg = f"{self._found.folder}: {self._failure}: close the buffer and open it again"
            raise CheckpointError(msg)

    def close(self) -> None:
        """Sync and close the log; it takes no more records."""
        if self._fd < 0:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if not self._failure:
                self.flush()
        finally:
            os.close(self._fd)
            self._fd = -1
            self._failure = self._failure or _CLOSED


_CLOSED = "the buffer is closed"
