"""Reading a log of groups back: the ledger it makes, where it is cut, and its compaction."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ostinato.durable.files import (
    damaged,
    fsync_dir,
    new_contents,
    opened,
    read_into,
    sync_fd,
    write_all,
)
from ostinato.durable.manifest import read_manifest
from ostinato.errors import DamagedFileError
from ostinato.groups.ledger import Ledger
from ostinato.groups.log import HEADER, NAME, FilePlace, Recovered, Segment, frame, frames_of, segment_name
from ostinato.groups.records import event_of, pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ostinato.groups.ledger import Place


FORMAT = "ostinato-groups"
"""What the manifest of a folder says."""


class Cut(NamedTuple):
    """A file that was cut off at its last whole record.

    Attributes:
        file: Its path.
        offset: Where it ends now.
        nbytes: Bytes that were cut off.
        serial: Serial number of the last record that is there: later ones are missing.
        reason: Why.
    """

    file: str
    offset: int
    nbytes: int
    serial: int
    reason: str


class Replayed(NamedTuple):
    """A ledger, made from a log.

    Attributes:
        ledger: The ledger.
        found: The files of the log.
        cuts: Files that end with a record that is not whole.
        stale: Files that are not needed: those before a compaction that a crash has left.
        lost: Segments behind a damaged one, whose records cannot follow.
    """

    ledger: Ledger
    found: Recovered
    cuts: list[Cut]
    stale: list[Path]
    lost: list[Path]


def log_files(folder: Path) -> dict[tuple[str, int], Path]:
    """Return the files of a log by kind and number."""
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted(((match[1], int(match[2])), path) for match, path in matches if match is not None))


def replay(folder: Path, name: str, order: str, *, upto: int | None = None, repair: bool = False) -> Replayed:
    """Read a log and make its ledger; changes no file.

    Args:
        folder: The folder of the log.
        name: The name of the log.
        order: See `Ledger`.
        upto: Number of the last segment to read; all by default.
        repair: Cut a damaged segment that is not the last one, too.

    Raises:
        DamagedFileError: A file is missing, belongs to another log, or is damaged elsewhere than at the end of the log.
    """
    files = {key: path for key, path in log_files(folder).items() if upto is None or key[1] <= upto}
    base = max((number for kind, number in files if kind == "base"), default=0)
    numbers = sorted(number for kind, number in files if kind == "segment" and number > base)
    stale = [path for (kind, number), path in files.items() if number < base or (kind == "segment" and number == base)]
    reader = _Reader(folder, name, order)
    if base:
        reader.read_base(files["base", base])
    cuts: list[Cut] = []
    number = base
    for following in numbers:
        path = files["segment", following]
        problem = f"segment {number + 1} is missing" if following != number + 1 else reader.read_segment(path)
        if not problem:
            number = following
            continue
        last = following == numbers[-1] and following == number + 1
        if not (last or repair):
            after = len(numbers) - numbers.index(following) - 1
            damaged(path, f"{problem}; {after} segments follow: open with repair=True to cut the log there")
        read = reader.segments[-1].nbytes if reader.segments and reader.segments[-1].path == path else 0
        if last and not read:  # a crash while the segment was created
            stale.append(path)
        cuts.append(Cut(str(path), read, path.stat().st_size - read, reader.ledger.serial, problem))
        number = following if read else number
        break
    lost = [files["segment", each] for each in numbers if each > number and files["segment", each] not in stale]
    found = Recovered(
        folder, name, reader.ledger.serial, reader.segments, max(number, base + 1), continues=number > base
    )
    return Replayed(reader.ledger, found, cuts, stale, lost)


def open_log(folder: Path) -> Replayed:
    """Read the log of a folder that no process has open; changes no file.

    Raises:
        CheckpointNotFoundError: There is no buffer of groups.
        DamagedFileError: As for `replay`.
    """
    return replay(folder, str(read_manifest(folder, format_name=FORMAT).body.get("log")), "ready")


def check_file(path: Path) -> str:
    """Return what is wrong with the records of a file by their checksums; empty if all are whole."""
    data, end = _contents(path), 0
    for _, offset, body in frames_of(data):
        end = offset + HEADER.size + len(body)
    if end == len(data) and end:
        return ""
    return f"its last {len(data) - end} bytes, from byte {end}, are no whole record"


class _Reader:
    """Applies the records of the files of a log."""

    def __init__(self, folder: Path, name: str, order: str) -> None:
        self.folder, self.name, self.order = folder, name, order
        self.ledger = Ledger(order)
        self.segments: list[Segment] = []

    def read_base(self, path: Path) -> None:
        """Read the file of a compaction, which is whole."""
        data = _contents(path)
        end = serial = 0
        with _Applying(path) as record:
            for serial, offset, body in self._frames(path, data, "base"):
                event = event_of(body, record.at(offset))
                if serial == 1:
                    self.ledger = Ledger.from_json(event, self.order)
                elif serial > 1:
                    self.ledger.put(event, FilePlace(self.segments[-1], offset, len(body)))
                end = offset + HEADER.size + len(body)
        if end < len(data) or not end:
            damaged(path, "a record is not whole", f"at byte {end}")
        if not serial or not self.ledger.is_whole():
            damaged(path, "it ends before its last record", f"at byte {end}")

    def read_segment(self, path: Path) -> str:
        """Read a segment up to its first record that is not whole; return what is wrong with it."""
        data = _contents(path)
        with _Applying(path) as record:
            for serial, offset, body in self._frames(path, data, "segment"):
                if serial:
                    if serial != self.ledger.serial + 1:
                        return f"record {serial} at byte {offset}, {self.ledger.serial + 1} expected"
                    event = event_of(body, record.at(offset))
                    self.ledger.apply(serial, event, FilePlace(self.segments[-1], offset, len(body)))
                self.segments[-1].nbytes = offset + HEADER.size + len(body)
        read = self.segments[-1].nbytes if self.segments and self.segments[-1].path == path else 0
        return "" if read == len(data) and read else f"the record at byte {read} is not whole"

    def _frames(self, path: Path, data: memoryview, kind: str) -> Iterator[tuple[int, int, memoryview]]:
        """Yield the frames of a file behind its first, which must be of this log."""
        for serial, offset, body in frames_of(data):
            if not offset:
                head = event_of(body, f"{path}: record at byte 0")
                expected = {"op": kind, "log": self.name, "first": self.ledger.serial + 1 if kind == "segment" else 0}
                if head != expected or serial:
                    damaged(path, f"it begins with {str(head)[:200]}, {expected} expected")
                self.segments.append(Segment(path, 0))
            yield serial, offset, body


class _Applying:
    """Converts what the records of a file that cannot be applied raise."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._where = ""

    def at(self, offset: int) -> str:
        """Name the next record, for messages."""
        self._where = f"{self._path}: record at byte {offset}"
        return self._where

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, KeyError | IndexError | ValueError | TypeError | AttributeError):
            if isinstance(error, DamagedFileError):
                return
            msg = f"{self._where} is damaged: it cannot follow the records before it ({error!r})"
            raise DamagedFileError(msg) from error


def _contents(path: Path) -> memoryview:
    with opened(path) as fd:
        data = memoryview(bytearray(os.fstat(fd).st_size))
        read_into(fd, data, 0, path)
    return data


def clean(replayed: Replayed) -> None:
    """Remove files that are not needed, and rename segments whose records cannot follow to `*.lost`."""
    for path in replayed.lost:
        path.rename(path.with_name(f"{path.name}.lost"))
    for path in replayed.stale:
        path.unlink()
    for path in replayed.found.folder.glob("*.tmp"):
        path.unlink()
    if replayed.lost or replayed.stale:
        fsync_dir(replayed.found.folder)


def write_base(
    folder: Path, name: str, order: str, upto: int
) -> tuple[Segment, list[tuple[dict[str, Any], Place]], list[Path]]:
    """Write one file in place of all segments up to a number, with the records that groups need.

    Returns:
        The new file; the events in it, each with its place; the files that it replaces.

    Raises:
        StorageMemoryError: The disk is full; nothing has changed.
    """
    replayed = replay(folder, name, order, upto=upto)
    for cut in replayed.cuts:
        damaged(cut.file, cut.reason)
    path = folder / segment_name("base", upto)
    moves: list[tuple[dict[str, Any], int, int]] = []
    with new_contents(path, path.with_name(f"{path.name}.tmp"), 0) as fd:
        write_all(fd, frame(0, pack({"op": "base", "log": name, "first": 0})))
        write_all(fd, frame(1, pack(replayed.ledger.to_json())))
        offset = os.fstat(fd).st_size
        for serial, place in enumerate(replayed.ledger.places(), 2):
            body = place.read()
            data = frame(serial, body)
            write_all(fd, data)
            moves.append((event_of(body, str(path)), offset, len(body)))
            offset += len(data)
        sync_fd(fd)
    fsync_dir(folder)
    segment = Segment(path, offset)
    replaced = [*replayed.stale, *(each.path for each in replayed.found.segments)]
    return segment, [(event, FilePlace(segment, at, nbytes)) for event, at, nbytes in moves], replaced
