"""Append-only files of JSON lines with checksums; lines that were appended and synced survive a crash.

A line is 16 hexadecimal digits (the XXH3-64 of the JSON), a space, the JSON and a line feed. An incomplete last line
was never reported as written and is ignored; any other damage raises an error.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Self, final

import xxhash

from ostinato.durable.files import atomic_write, damaged, disk_errors, open_file, sync_fd, write_all
from ostinato.durable.manifest import canonical, parse_json
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_DIGITS = 16


def write_lines(path: Path, nodes: Iterable[dict[str, Any]]) -> None:
    """Replace the file `path` by lines. After a crash, it contains either the old or the new lines."""
    atomic_write(path, b"".join(map(_line, nodes)))


def read_lines(path: Path, *, whole: bool) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, to which other processes may append meanwhile.

    Args:
        path: The file.
        whole: Whether the file was written at once, so that an incomplete last line is damage.

    Raises:
        DamagedFileError: The file is missing, or a line is damaged.
    """
    with os.fdopen(open_file(path), "rb") as stream:
        size, end = os.fstat(stream.fileno()).st_size, 0
        for number, line in enumerate(stream, 1):
            end += len(line)
            torn = not line.endswith(b"\n")
            text = line[_DIGITS + 1 : -1]
            if torn or line[:_DIGITS] != xxhash.xxh3_64_hexdigest(text).encode() or line[_DIGITS : _DIGITS + 1] != b" ":
                if not whole and end >= size:  # the last line, or a line that is being written
                    return
                damaged(path, "its checksum does not match: restore it from a copy", f"in line {number}")
            node = parse_json(text, f"{path}: line {number}")
            if not isinstance(node, dict):
                damaged(path, "not a JSON object", f"in line {number}")
            yield node


def _line(node: dict[str, Any]) -> bytes:
    text = canonical(node)
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)


@final
class Journal:
    """A file open for appending, closed by `close()` or a `with` block. Not thread-safe."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Create the file, or replace it, with the line `head`."""
        self._path = path
        self._broken = False
        write_lines(path, [head])
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        self._nbytes = os.fstat(self._fd).st_size

    def is_sound(self) -> bool:
        """Whether appended lines will be read: the file is intact, and its path still refers to it."""
        try:
            return not self._broken and os.path.samestat(os.fstat(self._fd), self._path.stat())
        except OSError:
            return False

    def append(self, nodes: Iterable[dict[str, Any]]) -> None:
        """Append lines: all of them are on the disk when this returns, and none of them after an error.

        Raises:
            StorageMemoryError: The disk is full.
            CheckpointError: An earlier failed append could not be undone.
        """
        if self._broken:
            msg = f"{self._path} could not be repaired after a failed write: close the buffer, which writes a new file"
            raise CheckpointError(msg)
        data = b"".join(map(_line, nodes))
        try:
            with disk_errors(self._path, len(data)):
                write_all(self._fd, data)
                sync_fd(self._fd)
        except BaseException:
            self._broken = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._nbytes)
                self._broken = False
            raise
        self._nbytes += len(data)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        """Return the journal; the end of the `with` block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()
