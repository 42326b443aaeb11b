"""Saving into a directory: immutable data files, one manifest replaced atomically, then the garbage goes."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

from ostinato.durable.arrays import (
    write_array,
    write_stream,
)
from ostinato.durable.dtypes import check_plain
from ostinato.durable.files import check_free, fsync_dir, new_token, open_inside
from ostinato.durable.locks import LOCK_NAME, DirectoryLock
from ostinato.durable.manifest import MANIFEST_NAME, canonical, read_manifest, write_manifest
from ostinato.durable.reader import MAX_LINE_BYTES, read_records
from ostinato.durable.values import encode
from ostinato.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from torch import Tensor

    from ostinato.durable.records import ArrayRecord

__all__ = ["CheckpointWriter"]

_OWN_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}\.bin|manifest\.json\.[0-9a-f]{16}\.tmp", re.ASCII)
_STATE_PREFIX = "state:"
_MAX_NAME = 1024
_LINE_INLINE_BYTES = 2**20
_LINES_BYTES = 2**20


@final
class CheckpointWriter:
    """Saves into a directory, new or holding an older checkpoint of the same format.

    The older checkpoint stays valid until `commit` replaces the manifest; leaving the `with` block without
    `commit`, or through an exception, removes the new files and leaves the older checkpoint as it was. One
    thread or process saves at a time; a writer serves one thread.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp()
        >>> with CheckpointWriter(path, format_name="example") as writer:
        ...     record = writer.add_array("obs", torch.zeros(3, 4))
        ...     writer.commit({"cursor": 3})
        >>> record.nbytes, record.dtype
        (48, 'float32')
    """

    def __init__(self, path: str | os.PathLike[str], *, format_name: str, needed_bytes: int = 0) -> None:
        """Name the directory; nothing is touched before the `with` block.

        Args:
            path: Directory to make or to save over.
            format_name: What kind of checkpoint this is.
            needed_bytes: Bytes of all that will be added; compared with the free disk before anything is
                written.
        """
        self._root = Path(path).absolute()
        self._format_name = format_name
        self._needed_bytes = needed_bytes
        self._lock = DirectoryLock(self._root)
        self._records: dict[str, ArrayRecord] = {}
        self._made: list[Path] = []
        self._open = False

    def __enter__(self) -> Self:
        """Check the target and the free disk, make the directory and lock it.

        Raises:
            CheckpointError: The path is a file, a directory with files of others, a checkpoint of another
                format or version, a damaged one, or one that is being saved to.
            StorageMemoryError: Too little free disk; names the bytes needed and free.
        """
        _check_target(self._root, self._format_name)
        check_free(self._root, self._needed_bytes)
        try:
            self._make_directory()
            self._lock.acquire()
        except BaseException:
            self._remove_directories()
            raise
        self._records.clear()
        self._open = True
        return self

    def add_array(self, name: str, tensor: Tensor) -> ArrayRecord:
        """Write a tensor to a file of its own and wait until it is on the disk.

        Args:
            name: Name in the manifest, any text; not beginning with `state:`.
            tensor: Dense tensor, on any device, contiguous or not; must not change meanwhile.

        Raises:
            CheckpointError: The name is taken or not allowed, or files cannot hold this tensor.
            StorageMemoryError: The disk is full.
        """
        file = self._new_name(name)
        check_free(self._root, check_plain(tensor, name).nbytes)
        return self._add(name, write_array(self._root, file, tensor))

    def add_values(self, name: str, values: Iterable[object]) -> ArrayRecord:
        """Write many Python values, one JSON line each, without holding more than a few of them.

        Tensors and arrays of more than 1 MiB get files of their own.

        Raises:
            CheckpointError: A value cannot be encoded (the message names its place), or takes more than 64
                MiB.
            StorageMemoryError: The disk is full.
        """
        file = self._new_name(name)
        return self._add(name, write_stream(self._root, file, self._lines(name, values)))

    def commit(self, state: object) -> None:
        """Replace the manifest: from here on, and after any crash, the directory holds the new checkpoint.

        Args:
            state: Small Python state, as `encode` takes it; larger tensors in it get files of their own.

        Raises:
            CheckpointError: The state cannot be encoded, or takes more than 64 MiB.
            StorageMemoryError: The disk is full.
        """
        self._check_open()
        node = encode(state, store=self._store)
        for record in self._records.values():
            fd, size = open_inside(self._root, record.file)
            os.close(fd)
            if size != record.nbytes:
                msg = f"{self._root / record.file} was changed while it was saved"
                raise CheckpointError(msg)
        arrays = {name: record.to_json() for name, record in self._records.items()}
        fsync_dir(self._root)  # the names of the files must be there before a manifest that names them
        write_manifest(self._root, {"arrays": arrays, "state": node}, format_name=self._format_name)
        for made in self._made:
            fsync_dir(made.parent)
        self._made.clear()
        self._close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Without a commit, remove what was written."""
        if self._open:
            self._close()
            self._remove_directories()

    def _close(self) -> None:
        """Remove what the manifest now on the disk does not name, and give the lock back."""
        self._open = False
        try:
            _collect_garbage(self._root, self._format_name)
        finally:
            self._lock.release()

    def _add(self, name: str, record: ArrayRecord) -> ArrayRecord:
        self._records[name] = record
        return record

    def _store(self, tensor: Tensor) -> str:
        name = f"{_STATE_PREFIX}{len(self._records)}"
        check_free(self._root, tensor.nbytes)
        self._add(name, write_array(self._root, f"state.{new_token()}.bin", tensor))
        return name

    def _lines(self, name: str, values: Iterable[object]) -> Iterator[bytes]:
        lines: list[bytes] = []
        size = 0
        for i, value in enumerate(values):
            node = encode(value, where=f"{name}[{i}]", store=self._store, inline_bytes=_LINE_INLINE_BYTES)
            lines.append(canonical(node) + b"\n")
            size += len(lines[-1])
            if len(lines[-1]) > MAX_LINE_BYTES:
                msg = f"{name}[{i}] takes {len(lines[-1])} bytes as JSON, at most {MAX_LINE_BYTES} are allowed"
                raise CheckpointError(msg)
            if size >= _LINES_BYTES:
                yield b"".join(lines)
                lines.clear()
                size = 0
        yield b"".join(lines)

    def _new_name(self, name: str) -> str:
        self._check_open()
        if not 0 < len(name) <= _MAX_NAME or name.startswith(_STATE_PREFIX):
            msg = f"an array name has 1 to {_MAX_NAME} characters, not 'state:' in front, got {name[:80]!r}"
            raise CheckpointError(msg)
        if name in self._records:
            msg = f"array {name!r} was already added to {self._root}"
            raise CheckpointError(msg)
        slug = re.sub(r"[^A-Za-z0-9_-]+", "_", name, flags=re.ASCII)[:64]
        return f"{slug}.{new_token()}.bin"

    def _check_open(self) -> None:
        if not self._open:
            msg = "a CheckpointWriter is used inside its `with` block, and until commit()"
            raise UsageError(msg)

    def _make_directory(self) -> None:
        missing = []
        place = self._root
        while not place.exists():
            missing.append(place)
            place = place.parent
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            self._made.append(path)

    def _remove_directories(self) -> None:
        with contextlib.suppress(OSError):
            for path in reversed(self._made):
                path.rmdir()


def _check_target(root: Path, format_name: str) -> None:
    """Refuse to save over anything that is not a checkpoint of this format or what is left of one."""
    if not root.exists() and not root.is_symlink():
        return
    if not root.is_dir():
        msg = f"{root} is not a directory: choose a path that is free or holds a checkpoint"
        raise CheckpointError(msg)
    names = sorted(entry.name for entry in root.iterdir())
    if MANIFEST_NAME in names:
        try:
            read_records(root, read_manifest(root, format_name=format_name).body)
        except CheckpointError as error:
            msg = f"will not save over {root}: {error}; remove it or choose another path"
            raise CheckpointError(msg) from error
        return
    foreign = [name for name in names if name != LOCK_NAME and not _OWN_FILE.fullmatch(name)]
    if foreign:
        msg = f"will not save into {root}: it has no checkpoint but other files ({', '.join(foreign[:3])})"
        raise CheckpointError(msg)


def _collect_garbage(root: Path, format_name: str) -> None:
    """Remove data files of ours that the manifest does not name; the caller holds the lock.

    What cannot be removed (a mapped file on Windows) waits for a later save. A manifest that cannot be read
    keeps all.
    """
    named: set[str] = set()
    with contextlib.suppress(OSError, CheckpointError):
        if (root / MANIFEST_NAME).exists():
            body = read_manifest(root, format_name=format_name).body
            named = {record.file for record in read_records(root, body).values()}
        for entry in os.scandir(root):
            if entry.name not in named and _OWN_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()
