"""Saving into a directory: immutable data files, one manifest replaced atomically, then the garbage goes."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np
import torch

from ostinato.durable.arrays import (
    BLOCK_BYTES,
    ArrayRecord,
    ColumnRecord,
    FileRecord,
    verify_array,
    write_array,
    write_stream,
)
from ostinato.durable.blocks import BlockWriter
from ostinato.durable.checkpoint_reader import MAX_LINE_BYTES, CheckpointReader, check_sizes, read_records
from ostinato.durable.dtypes import DTYPES, check_plain, dtype_name, is_raw, raw_view, shape_nbytes
from ostinato.durable.files import check_free, create_file, disk_errors, fsync_dir, new_token, sync_file
from ostinato.durable.json_codec import encode
from ostinato.durable.locks import LOCK_NAME, DirectoryLock
from ostinato.durable.manifest import MANIFEST_NAME, canonical, parse_json, read_manifest, write_manifest
from ostinato.durable.patched_arrays import Plan, changed_rows, mapped_pieces, plan, print_of
from ostinato.durable.positioned_reads import read_into
from ostinato.durable.row_ranges import contains, one_run, place, rows_of
from ostinato.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from torch import Tensor

    from ostinato.durable.patched_arrays import Print
    from ostinato.durable.row_ranges import Runs

__all__ = ["PIECE_BYTES", "CheckpointWriter", "Piece", "RowFile", "can_write_ahead", "check_target", "collect_garbage"]

PIECE_BYTES = 2 * 2**20
_ZEROS = bytes(4096)


def can_write_ahead() -> bool:
    """Whether rows can be put down before their turn on this system."""
    return hasattr(os, "pwrite")


class Piece(NamedTuple):
    """Rows that follow each other in a file."""

    offset: int
    """Where they begin."""
    rows: np.ndarray
    """Their numbers, int64 `[n]`."""
    first: int | None
    """The first one, where they follow each other in the array, too."""


@final
class RowFile:
    """The file of a base (all rows), or of a patch (some runs). One thread appends; `put_ahead` needs the rows' lock.

    Args:
        path: New file.
        row_bytes: Bytes of a row.
        rows: How many rows the array has.
        runs: The rows of a patch; None makes a base.

    Raises:
        StorageMemoryError: The disk is full.
    """

    def __init__(self, path: Path, row_bytes: int, rows: int, runs: Runs | None) -> None:
        self.path = path
        self.row_bytes = row_bytes
        self.runs = one_run(0, rows) if runs is None else runs
        self._patch = runs is not None
        if runs is None:
            self._at, self._large = np.zeros(len(self.runs), dtype=np.int64), np.ones(len(self.runs), dtype=bool)
            self.nbytes = rows * row_bytes
        else:
            self._at, self._large, _, self.nbytes = place(runs, row_bytes)
        self.done = 0
        """Rows before this place in the file were taken from memory; the caller moves it on under the rows' lock."""
        with disk_errors(path, self.nbytes):
            self._fd = create_file(path, read=True)
        self._blocks = BlockWriter(self._fd, BLOCK_BYTES)
        if self._patch:
            self.append(0, np.ascontiguousarray(runs, dtype="<i8").reshape(-1).view(np.uint8).data)

    def pieces(self) -> Iterator[Piece]:
        """Cut the rows into pieces of at most 2 MiB (or one row), in the order of the file."""
        most = max(1, PIECE_BYTES // max(1, self.row_bytes))
        for (first, count), at in zip(self.runs[self._large].tolist(), self._at[self._large].tolist(), strict=True):
            for start in range(0, count, most):
                n = min(most, count - start)
                yield Piece(at + start * self.row_bytes, np.arange(first + start, first + start + n), first + start)
        small = ~self._large
        if small.any():
            rows, begin = rows_of(self.runs[small]), int(self._at[small][0])
            for start in range(0, len(rows), most):
                yield Piece(begin + start * self.row_bytes, rows[start : start + most], None)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Return where rows (int64, ascending) lie in the file; -1 for those that it does not hold."""
        if not len(self.runs):
            return np.full(len(rows), -1, dtype=np.int64)
        run = np.searchsorted(self.runs[:, 0], rows, side="right") - 1
        return np.where(contains(self.runs, rows), self._at[run] + (rows - self.runs[run, 0]) * self.row_bytes, -1)

    def append(self, offset: int, data: memoryview) -> None:
        """Write the next bytes; what lies between is zero.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.path, self.nbytes):
            while self._blocks.nbytes < offset:
                self._blocks.write(memoryview(_ZEROS)[: offset - self._blocks.nbytes])
            self._blocks.write(data)

    def put_ahead(self, offset: int, data: memoryview) -> None:
        """Put rows down before their turn.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.path, self.nbytes):
            while len(data):
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count

    def read_back(self, offset: int, view: memoryview) -> None:
        """Read rows that were put down before their turn."""
        read_into(self._fd, view, offset, self.path)

    def finish(self) -> FileRecord:
        """Close the file, not synced yet, and return its record."""
        self.append(self.nbytes, memoryview(b""))
        checksums = self._blocks.finish()
        self.close()
        runs = len(self.runs) if self._patch else 0
        return FileRecord(self.path.name, self._blocks.nbytes, BLOCK_BYTES, checksums, runs)

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_OWN_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}\.bin|manifest\.json\.[0-9a-f]{16}\.tmp", re.ASCII)


def check_target(root: Path, format_name: str) -> None:
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


def collect_garbage(root: Path, format_name: str) -> None:
    """Remove data files of ours that the manifest does not name; the caller holds the lock.

    What cannot be removed (a mapped file on Windows) waits for a later save. A manifest that cannot be read
    keeps all.
    """
    named: set[str] = set()
    with contextlib.suppress(OSError, CheckpointError):
        if (root / MANIFEST_NAME).exists():
            body = read_manifest(root, format_name=format_name).body
            records = read_records(root, body).values()
            named = {file.file for record in records if isinstance(record, ArrayRecord) for file in record.files}
        for entry in os.scandir(root):
            if entry.name not in named and _OWN_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()


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
        self._records: dict[str, ArrayRecord | ColumnRecord] = {}
        self._unsynced: list[Path] = []
        self._state: Any = None
        self._made: list[Path] = []
        self._open = False
        self.save = new_token()
        """Random name of this save, kept in its manifest."""
        self.older: dict[str, ArrayRecord] = {}
        """The arrays of the checkpoint that is saved over, by name."""
        self.older_save: str | None = None
        """The random name of that checkpoint; None where there is none."""
        self.prints: dict[str, Print] = {}
        """What `add_changed` arrays, and tensors of the state, look like now."""
        self.known: dict[str, Print] = {}
        """What they looked like at the save that `older` is of; set it to write of them only what has changed."""

    def __enter__(self) -> Self:
        """Check the target and the free disk, make the directory and lock it.

        Raises:
            CheckpointError: The path is a file, a directory with files of others, a checkpoint of another
                format or version, a damaged one, or one that is being saved to.
            StorageMemoryError: Too little free disk; names the bytes needed and free.
        """
        check_target(self._root, self._format_name)
        check_free(self._root, self._needed_bytes)
        try:
            self._make_directory()
            self._lock.acquire()
            self._look_back()
        except BaseException:
            self._lock.release()
            self._remove_directories()
            raise
        self._records.clear()
        self._open = True
        return self

    def _look_back(self) -> None:
        """Take in what the directory holds: whoever holds the lock knows that it stays."""
        if (self._root / MANIFEST_NAME).exists():
            body = read_manifest(self._root, format_name=self._format_name).body
            records = read_records(self._root, body).items()
            self.older = {name: record for name, record in records if isinstance(record, ArrayRecord)}
            self.older_save = body.get("save")

    def add_array(self, name: str, tensor: Tensor) -> ArrayRecord:
        """Write a tensor to a file of its own; `commit` waits until it is on the disk.

        Args:
            name: Name in the manifest, any text; not beginning with `state:`.
            tensor: Dense tensor, on any device, contiguous or not; must not change meanwhile.

        Raises:
            CheckpointError: The name is taken or not allowed, or files cannot hold this tensor.
            StorageMemoryError: The disk is full.
        """
        return self._write(name, self._new_name(name), tensor)

    def add_changed(self, name: str, tensor: Tensor) -> ArrayRecord:
        """Write a tensor as `add_array` does, or of an array that the directory holds only what has changed.

        What has changed is told by the checksums of 64 KiB each, against those in `known`.
        """
        self._new_name(name)
        return self._changed(name, tensor)

    def add_column(self, name: str, column: ColumnRecord) -> None:
        """Name an array that lies in the packed rows of another one."""
        self._new_name(name)
        self._records[name] = column

    def begin_rows(self, name: str, dtype: str, shape: tuple[int, ...], changed: Runs | None) -> RowFile | None:
        """Begin a file for rows that come piece by piece; `end_rows` takes it when it is written.

        Args:
            name: Name in the manifest.
            dtype: Name of the dtype.
            shape: Sizes, `[rows, ...]`.
            changed: Rows that differ from those in `older`; None writes all.

        Returns:
            The file: it says which rows it wants; None where the older ones serve as they are.

        Raises:
            CheckpointError: The name is taken or not allowed.
            StorageMemoryError: The disk is too small.
        """
        file = self._new_name(name)
        todo = Plan(None, one_run(0, 0))
        if changed is not None:
            todo = plan(self._root, self.older.get(name), dtype, shape, changed)
        if todo.kept is not None and not len(todo.runs):
            self._records[name] = todo.kept
            return None
        base = todo.kept or ArrayRecord(file, dtype, shape, 0, 0, ())
        self._records[name] = base
        rows = RowFile(self._root / file, base.row_bytes, shape[0], None if todo.kept is None else todo.runs)
        try:
            check_free(self._root, rows.nbytes)
        except BaseException:
            rows.close()
            raise
        return rows

    def end_rows(self, name: str, rows: RowFile) -> None:
        """Take a file of rows that is written whole."""
        file, base = rows.finish(), self._records[name]
        if not isinstance(base, ArrayRecord):
            msg = f"{name!r} was not begun with begin_rows"
            raise UsageError(msg)
        self._unsynced.append(rows.path)
        if file.runs:
            self._records[name] = replace(base, patches=(*base.patches, file))
        else:
            self._records[name] = ArrayRecord(
                file.file, base.dtype, base.shape, file.nbytes, file.block_bytes, file.checksums
            )

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
        self.take_state(state)
        self.finish()

    def take_state(self, state: object) -> None:
        """Take the state as it is now, for `finish` to commit; larger tensors in it are written."""
        self._check_open()
        self._state = encode(state, store=self._store)

    def take_over(self, reader: CheckpointReader) -> Iterator[int]:
        """Take everything of the checkpoint that this directory holds, each array folded into one file.

        Its random name stays: buffers go on from it as before.

        Yields:
            The bytes of each array that was folded, once it is written.

        Raises:
            CheckpointError: The directory was saved over meanwhile.
            DamagedFileError: A checksum does not fit.
        """
        self._check_open()
        if self.older_save != reader.save:
            msg = f"{self._root} was saved over meanwhile: try again"
            raise CheckpointError(msg)
        for name in reader.names:
            record = reader.record(name)
            if isinstance(record, ArrayRecord) and record.patches:
                verify_array(self._root, record)
                yield self._fold(name, record)
            else:
                self._records[name] = record
        self._state, self.save = reader.encoded_state, reader.save or self.save

    def preview(self) -> CheckpointReader:
        """Return a reader of what `finish` would commit now; the older checkpoint is still there."""
        self._check_open()
        body = parse_json(canonical(self._body()), self._root)
        return CheckpointReader.of_body(self._root, body, format_name=self._format_name)

    def _body(self) -> dict[str, Any]:
        arrays = {name: record.to_json() for name, record in self._records.items()}
        return {"arrays": arrays, "state": self._state, "save": self.save}

    def finish(self) -> None:
        """Commit the state that was taken; see `commit`."""
        self._check_open()
        for path in self._unsynced:
            sync_file(path)
        for record in self._records.values():
            if isinstance(record, ArrayRecord):
                check_sizes(self._root, record)
        fsync_dir(self._root)  # the names of the files must be there before a manifest that names them
        write_manifest(self._root, self._body(), format_name=self._format_name)
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
            collect_garbage(self._root, self._format_name)
        finally:
            self._lock.release()

    def _add(self, name: str, record: ArrayRecord) -> ArrayRecord:
        self._records[name] = record
        return record

    def _write(self, name: str, file: str, tensor: Tensor) -> ArrayRecord:
        check_free(self._root, check_plain(tensor, name).nbytes)
        record = write_array(self._root, file, tensor, sync=False)
        self._unsynced.append(self._root / file)
        return self._add(name, record)

    def _fold(self, name: str, record: ArrayRecord) -> int:
        """Write an array that has patches to one file; return its bytes."""
        rows = RowFile(self._root / f"{_slug(name)}.{new_token()}.bin", record.row_bytes, record.shape[0], None)
        try:
            for piece in mapped_pieces(self._root, record, PIECE_BYTES):
                rows.append(0, raw_view(piece))
            self._records[name] = record
            self.end_rows(name, rows)
        finally:
            rows.close()
        return rows.nbytes

    def _changed(self, name: str, tensor: Tensor) -> ArrayRecord:
        plain = check_plain(tensor, name)
        file = f"{_slug(name)}.{new_token()}.bin"
        if plain.ndim == 0 or not is_raw(plain):
            return self._write(name, file, plain)
        now = self.prints[name] = print_of(plain)
        dtype, shape = dtype_name(plain.dtype), tuple(plain.shape)
        runs = changed_rows(self.known.get(name), now, shape_nbytes(shape[1:], DTYPES[dtype]))
        todo = plan(self._root, self.older.get(name) if name in self.known else None, dtype, shape, runs)
        if todo.kept is None:
            return self._write(name, file, plain)
        if not len(todo.runs):
            return self._add(name, todo.kept)
        rows = RowFile(self._root / file, todo.kept.row_bytes, shape[0], todo.runs)
        try:
            for piece in rows.pieces():
                chosen = (
                    plain[torch.from_numpy(piece.rows)]
                    if piece.first is None
                    else plain[piece.rows[0] : piece.rows[-1] + 1]
                )
                rows.append(piece.offset, raw_view(chosen))
            self._unsynced.append(rows.path)
            return self._add(name, replace(todo.kept, patches=(*todo.kept.patches, rows.finish())))
        finally:
            rows.close()

    def _store(self, tensor: Tensor, where: str) -> str:
        name = f"{_STATE_PREFIX}{where.removeprefix('state')}"
        if len(name) > _MAX_NAME or name in self._records:
            name = f"{_STATE_PREFIX}{len(self._records)}"
        self._changed(name, tensor)
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
        return f"{_slug(name)}.{new_token()}.bin"

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


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name, flags=re.ASCII)[:64]
