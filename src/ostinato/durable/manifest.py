"""JSON files with checksums: the manifest of a checkpoint, and journals, to which lines are appended.

A manifest names the contents of a directory and is replaced atomically. Lines that were appended to a journal and
synced survive a crash; an incomplete last line was never reported as written and is ignored; any other damage raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import xxhash

from ostinato.durable.files import atomic_write, damaged, disk_errors, open_file, read_small, sync_fd, write_all
from ostinato.errors import CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = (1, 3)
MAX_MANIFEST_BYTES = 64 * 2**20
_KEYS = {"format", "version", "checksum", "body"}
_DATA_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}\.bin", re.ASCII)
_FORMAT_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest that was read and verified.

    Attributes:
        format_name: Kind of checkpoint.
        version: Major and minor version of the format.
        body: The content.
    """

    format_name: str
    version: tuple[int, int]
    body: dict[str, Any]


def write_manifest(directory: str | Path, body: dict[str, Any], *, format_name: str) -> None:
    """Write or replace the manifest of a directory. After a crash, either the old or the new manifest is there.

    Args:
        directory: Existing directory.
        body: JSON objects, lists, strings, booleans, integers, finite floats and None.
        format_name: Kind of checkpoint: lower-case letters, digits, `_`, `.` and `-`.

    Raises:
        CheckpointError: The body is not JSON, contains NaN or an infinity, or takes more than 64 MiB.
        StorageMemoryError: The disk is full; the old manifest is unchanged.
    """
    if not _FORMAT_NAME.fullmatch(format_name):
        msg = f"format_name must be 1 to 64 lower-case letters, digits, '_', '.' or '-', got {format_name!r}"
        raise CheckpointError(msg)
    try:
        content = canonical(body)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"{directory}: the manifest cannot be written as JSON: {error}"
        raise CheckpointError(msg) from error
    version = list(FORMAT_VERSION)
    head = {"format": format_name, "version": version, "checksum": _checksum(format_name, version, content)}
    text = b'%s,"body":%s}\n' % (canonical(head)[:-1], content)
    if len(text) > MAX_MANIFEST_BYTES:
        msg = (
            f"{directory}: the manifest would take {len(text)} bytes, {MAX_MANIFEST_BYTES} are allowed: "
            "keep large state in tensors, which are saved as files"
        )
        raise CheckpointError(msg)
    atomic_write(Path(directory) / MANIFEST_NAME, text)


def read_manifest(directory: str | Path, *, format_name: str) -> Manifest:
    """Read and verify the manifest of a directory.

    Args:
        directory: Directory of the checkpoint.
        format_name: Kind of checkpoint that the caller can read.

    Raises:
        CheckpointNotFoundError: The path does not exist, or the directory has no manifest.
        CheckpointError: The path is a file, or the checkpoint is of another kind or of a major version that this
            release cannot read.
        DamagedFileError: The file is not JSON, contains NaN, has other keys or another checksum, or is larger than
            64 MiB.
    """
    path = Path(directory) / MANIFEST_NAME
    _check_exists(path)
    node = parse_json(read_small(path, MAX_MANIFEST_BYTES), path)
    if not isinstance(node, dict) or not {"format", "version"} <= set(node):
        damaged(path, "it is not a manifest of Ostinato: no format and version")
    version = _check_version(node, path, format_name)
    if set(node) != _KEYS or not isinstance(node["body"], dict):
        damaged(path, f"it must have exactly the keys {sorted(_KEYS)}, the body an object")
    try:
        found = _checksum(node["format"], node["version"], canonical(node["body"]))
    except (ValueError, RecursionError) as error:
        damaged(path, str(error))
    if found != node["checksum"]:
        damaged(path, f"checksum {found}, {str(node['checksum'])[:40]!r} expected")
    return Manifest(format_name, version, node["body"])


def format_of(directory: str | Path) -> str | None:
    """Return the kind of checkpoint in a directory; None if there is no readable manifest."""
    try:
        node = parse_json(read_small(Path(directory) / MANIFEST_NAME, MAX_MANIFEST_BYTES), directory)
    except (CheckpointError, OSError):
        return None
    name = node.get("format") if isinstance(node, dict) else None
    return name if isinstance(name, str) else None


def data_files(directory: str | Path) -> tuple[str, ...]:
    """Return the names of the files in a directory that are named as those that a manifest describes."""
    try:
        names = [path.name for path in Path(directory).iterdir()]
    except OSError:
        return ()
    return tuple(sorted(name for name in names if _DATA_FILE.fullmatch(name)))


def holds_checkpoint(directory: str | Path) -> bool:
    """Return whether a directory has a manifest, or at least data files of a checkpoint whose manifest is missing."""
    return os.path.lexists(Path(directory) / MANIFEST_NAME) or bool(data_files(directory))


def canonical(node: object) -> bytes:
    """Return JSON without spaces, in ASCII, with keys in their order: the bytes that checksums cover."""
    return json.dumps(node, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def parse_json(text: bytes, where: Path | str) -> Any:
    """Parse JSON from a file, strictly: NaN, infinities and duplicate keys are errors.

    Raises:
        DamagedFileError: The text is not JSON.
    """
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_reject_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        damaged(where, f"not JSON: {str(error)[:200]}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        msg = f"the key {next(key for key in keys if keys.count(key) > 1)[:80]!r} is given twice"
        raise ValueError(msg)
    return found


def _reject_constant(name: str) -> NoReturn:
    msg = f"{name} is not allowed"
    raise ValueError(msg)


def _checksum(format_name: object, version: object, body: bytes) -> str:
    """Return the checksum of the JSON list `[format, version, body]`, whose last item is given as JSON."""
    return xxhash.xxh3_64_hexdigest(b"%s,%s]" % (canonical([format_name, version])[:-1], body))


def _check_exists(path: Path) -> None:
    """Raise if there is no manifest at `path`; the message says what is there instead."""
    if os.path.lexists(path):
        return
    root = path.parent
    if os.path.lexists(root) and not root.is_dir():
        msg = f"no checkpoint at {root}: it is a file, give the directory that dumps() wrote"
        raise CheckpointError(msg)
    msg = f"no checkpoint at {root}: {f'the directory has no {path.name}' if root.is_dir() else 'it does not exist'}"
    if data_files(root):
        msg += ", only data files: restore it from a copy, or save again if the first save was interrupted"
    raise CheckpointNotFoundError(msg)


def _check_version(node: dict[str, Any], path: Path, format_name: str) -> tuple[int, int]:
    if node["format"] != format_name:
        msg = f"{path} is of the format {str(node['format'])[:80]!r}, {format_name!r} expected"
        raise CheckpointError(msg)
    version = node["version"]
    if not isinstance(version, list) or list(map(type, version)) != [int, int] or min(version) < 0:
        damaged(path, f"version must be [major, minor], got {str(version)[:40]}")
    if version[0] != FORMAT_VERSION[0] or version[1] < FORMAT_VERSION[1]:
        msg = (
            f"{path} has format version {str(version[0])[:20]}.{str(version[1])[:20]}; "
            f"this release reads version {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}: "
            "use the release of Ostinato that wrote it, or a later one"
        )
        raise CheckpointError(msg)
    return version[0], version[1]


# -- files of lines: 16 hexadecimal digits (the XXH3-64 of the JSON), a space, the JSON and a line feed ----------------

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
