"""CheckpointWriter: saves into a directory by writing new files and replacing one manifest atomically."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np
import torch

from ostinato.durable import progress
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
from ostinato.durable.dtypes import check_plain, dtype_name, is_raw, raw_view, shape_nbytes
from ostinato.durable.files import check_free, create_file, disk_errors, fsync_dir, new_token, sync_file
from ostinato.durable.json_codec import encode
from ostinato.durable.locks import LOCK_NAME, DirectoryLock
from ostinato.durable.manifest import MANIFEST_NAME, canonical, read_manifest, write_manifest
from ostinato.durable.patched_arrays import EVERYTHING, changed_rows, mapped_pieces, plan, print_of
from ostinato.durable.positioned_reads import read_into
from ostinato.durable.row_ranges import contains, one_run, place, rows_of
from ostinato.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from torch import Tensor

    from ostinato.durable.patched_arrays import Print
    from ostinato.durable.row_ranges import Runs

__all__ = ["PIECE_BYTES", "CheckpointWriter", "Piece", "RowFile", "can_write_ahead"]

PIECE_BYTES = 2 * 2**20
_ZEROS = bytes(4096)
_STATE_PREFIX = "state:"
_MAX_NAME = 1024
_LINE_INLINE_BYTES = 2**20
_LINES_BYTES = 2**20
_MAPPED_FILE = re.compile(r"block[a-z0-9-]*\.bin|manifest\.json", re.ASCII)
_OWN_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}\.bin|manifest\.json\.[0-9a-f]{16}\.tmp", re.ASCII)


def _is_mapped_storage(path: Path) -> bool:
    """Whether a path is the directory of a mapped storage, which may lie inside that of the checkpoints."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_MAPPED_FILE.fullmatch(entry.name) for entry in path.iterdir())


@final
class CheckpointWriter:
    """Saves into a new directory, or over an older checkpoint of the same format.

    The older checkpoint stays valid until `commit` replaces the manifest. Leaving the `with` block without `commit`, or
    through an exception, removes the new files and leaves the older checkpoint unchanged. One thread or process can
    save to a directory at a time. Not thread-safe.

    Examples:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp()
        >>> with CheckpointWriter(path, format_name="example") as writer:
        ...     record = writer.add_array("obs", torch.zeros(3, 4))
        ...     writer.commit({"cursor": 3})
        >>> record.nbytes, record.dtype
        (48, 'float32')
    """

    def __init__(self, path: str | os.PathLike[str], *, format_name: str, needed_bytes: int = 0) -> None:
        """Name the directory; the `with` block creates and locks it.

        Args:
            path: Directory to create or to save over.
            format_name: Kind of checkpoint.
            needed_bytes: Total bytes that will be added; compared with the free disk space before anything is written.
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
        """Random identifier of this save, kept in its manifest."""
        self.older: dict[str, ArrayRecord] = {}
        """Arrays of the older checkpoint by name."""
        self.older_save: str | None = None
        """Identifier of the older checkpoint; None if there is none."""
        self.prints: dict[str, Print] = {}
        """Fingerprints of the arrays written with `add_changed`, and of tensors of the state."""
        self.known: dict[str, Print] = {}
        """Fingerprints at the save that made `older`; if set, only blocks that differ are written."""

    def __enter__(self) -> Self:
        """Check the target and the free disk space, create the directory and lock it.

        Raises:
            CheckpointError: The path is a file, a directory with other files, a damaged checkpoint, one of another
                format or version, or one that is being saved to.
            StorageMemoryError: There is too little free disk space; the message has the bytes needed and free.
        """
        self._check_target()
        check_free(self._root, self._needed_bytes)
        try:
            self._make_directory()
            self._lock.acquire()
            self._read_older()
        except BaseException:
            self._lock.release()
            self._remove_directories()
            raise
        self._records.clear()
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Without a commit, remove the new files."""
        if self._open:
            self._close(self._named_on_disk())
            self._remove_directories()

    def _check_target(self) -> None:
        """Raise if the path is something else than a checkpoint directory, or what a killed save left of one."""
        root = self._root
        if not root.exists() and not root.is_symlink():
            return
        if not root.is_dir():
            msg = f"{root} is not a directory: choose a path that is free or holds a checkpoint"
            raise CheckpointError(msg)
        names = [entry.name for entry in root.iterdir()]
        if MANIFEST_NAME in names:
            return
        foreign = sorted(name for name in names if name != LOCK_NAME and not _OWN_FILE.fullmatch(name))
        foreign = [name for name in foreign if not _is_mapped_storage(root / name)]
        if foreign:
            msg = f"will not save into {root}: it has no checkpoint but other files ({', '.join(foreign[:3])})"
            raise CheckpointError(msg)

    def _read_older(self) -> None:
        """Read the records of the older checkpoint, which cannot change while the lock is held."""
        if not (self._root / MANIFEST_NAME).exists():
            return
        try:
            body = read_manifest(self._root, format_name=self._format_name).body
            records = read_records(self._root, body)
        except CheckpointError as error:
            msg = f"will not save over {self._root}: {error}; remove it or choose another path"
            raise CheckpointError(msg) from error
        self.older = {name: record for name, record in records.items() if isinstance(record, ArrayRecord)}
        self.older_save = body.get("save")

    def add_array(self, name: str, tensor: Tensor) -> ArrayRecord:
        """Write a tensor to a file of its own; `commit` waits until it is on the disk.

        Args:
            name: Name in the manifest: any text that does not begin with `state:`.
            tensor: Dense tensor, on any device, contiguous or not; must not change meanwhile.

        Raises:
            CheckpointError: The name is taken or not allowed, or files cannot hold this tensor.
            StorageMemoryError: The disk is full.
        """
        return self._write(name, self._new_name(name), tensor)

    def add_changed(self, name: str, tensor: Tensor) -> ArrayRecord:
        """Write a tensor as `add_array` does; of an array of the older checkpoint, write only blocks that changed.

        Blocks of 64 KiB are compared by their checksums in `known`.
        """
        self._new_name(name)
        return self._write_changed(name, tensor)

    def add_columns(self, rows: str, columns: Iterable[tuple[str, int, torch.dtype, tuple[int, ...]]]) -> None:
        """Name the arrays that lie in the packed rows `rows`.

        Args:
            rows: name of an array that was added.
            columns: name, offset in a row in bytes, dtype, and shape of each.
        """
        for name, offset, dtype, shape in columns:
            self._check_name(name)
            self._records[name] = ColumnRecord(rows, offset, dtype_name(dtype), shape)

    def add_values(self, name: str, values: Iterable[object]) -> ArrayRecord:
        """Write Python values, one line of JSON each; only a few of them are in memory at a time.

        Tensors and arrays of more than 1 MiB get files of their own.

        Raises:
            CheckpointError: A value cannot be encoded (the message has its path), or takes more than 64 MiB.
            StorageMemoryError: The disk is full.
        """
        file = self._new_name(name)
        record = self._records[name] = write_stream(self._root, file, self._lines(name, values))
        return record

    def begin_rows(self, name: str, dtype: str, shape: tuple[int, ...], changed: Runs | None) -> RowFile | None:
        """Begin a file for rows that are written piece by piece; `end_rows` adds it when it is complete.

        Args:
            name: Name in the manifest.
            dtype: Name of the dtype.
            shape: Shape, `[rows, ...]`.
            changed: Rows that differ from those in `older`; None writes all.

        Returns:
            The file, which says which rows it needs; None if the older files already hold all rows.

        Raises:
            CheckpointError: The name is taken or not allowed.
            StorageMemoryError: The disk is too small.
        """
        file = self._new_name(name)
        todo = EVERYTHING
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
        """Add a file of rows that is complete."""
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

    def commit(self, state: object) -> None:
        """Replace the manifest: from now on, and after any crash, the directory holds the new checkpoint.

        Args:
            state: Small Python state, see `encode`; larger tensors in it get files of their own.

        Raises:
            CheckpointError: The state cannot be encoded, or takes more than 64 MiB.
            StorageMemoryError: The disk is full.
        """
        self.take_state(state)
        self.finish()

    def take_state(self, state: object) -> None:
        """Encode the state as it is now, for `finish` to commit; larger tensors in it are written."""
        self._check_open()
        self._state = encode(state, store=self._store)

    def take_over(self, reader: CheckpointReader) -> None:
        """Add everything in the checkpoint of this directory, with each array written to a single file.

        The checkpoint keeps its identifier, so buffers can save incrementally to it as before.

        Raises:
            CheckpointError: Another checkpoint was saved to the directory meanwhile.
            DamagedFileError: A checksum does not match.
        """
        self._check_open()
        if self.older_save != reader.save:
            msg = f"{self._root} was saved over meanwhile: try again"
            raise CheckpointError(msg)
        for name in reader.names:
            record = reader.record(name)
            if isinstance(record, ArrayRecord) and record.patches:
                verify_array(self._root, record)
                self._fold(name, record)
            else:
                self._records[name] = record
        self._state, self.save = reader.encoded_state, reader.save or self.save

    def preview(self) -> CheckpointReader:
        """Return a reader of what `finish` would commit now; the older checkpoint is still in place."""
        self._check_open()
        body = {"arrays": {}, "state": self._state, "save": self.save}
        return CheckpointReader.preview(self._root, body, self._records, format_name=self._format_name)

    def finish(self) -> None:
        """Commit the state that was encoded; see `commit`."""
        self._check_open()
        progress.finish()  # the last moment at which the older checkpoint can stay
        for path in self._unsynced:
            sync_file(path)
        named: set[str] = set()
        for record in self._records.values():
            if isinstance(record, ArrayRecord):
                check_sizes(self._root, record)
                named.update([file.file for file in record.files])
        fsync_dir(self._root)  # the names of the files must be on the disk before a manifest refers to them
        arrays = {name: record.to_json() for name, record in self._records.items()}
        body = {"arrays": arrays, "state": self._state, "save": self.save}
        write_manifest(self._root, body, format_name=self._format_name)
        for made in self._made:
            fsync_dir(made.parent)
        self._made.clear()
        self._close(named)

    def _close(self, named: set[str] | None) -> None:
        """Remove data files that are not in `named`, if it is given, and release the lock.

        A file that cannot be removed (a mapped file on Windows) is left for a later save.
        """
        self._open = False
        try:
            if named is not None:
                for entry in os.scandir(self._root):
                    own = _OWN_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                    if own and entry.name not in named:
                        with contextlib.suppress(OSError):
                            Path(entry.path).unlink()
        finally:
            self._lock.release()

    def _named_on_disk(self) -> set[str] | None:
        """Return the files that the manifest on the disk names; None if it cannot be read."""
        try:
            if not (self._root / MANIFEST_NAME).exists():
                return set()
            records = read_records(self._root, read_manifest(self._root, format_name=self._format_name).body)
        except (OSError, CheckpointError):
            return None
        return {file.file for record in records.values() if isinstance(record, ArrayRecord) for file in record.files}

    def _write(self, name: str, file: str, tensor: Tensor) -> ArrayRecord:
        check_free(self._root, check_plain(tensor, name).nbytes)
        record = self._records[name] = write_array(self._root, file, tensor, sync=False)
        self._unsynced.append(self._root / file)
        return record

    def _write_changed(self, name: str, tensor: Tensor) -> ArrayRecord:
        plain = check_plain(tensor, name)
        file = f"{_slug(name)}.{new_token()}.bin"
        if plain.ndim == 0 or not is_raw(plain):
            return self._write(name, file, plain)
        now = self.prints[name] = print_of(plain)
        dtype, shape = dtype_name(plain.dtype), tuple(plain.shape)
        runs = changed_rows(self.known.get(name), now, shape_nbytes(shape[1:], plain.dtype))
        todo = plan(self._root, self.older.get(name) if name in self.known else None, dtype, shape, runs)
        if todo.kept is None:
            return self._write(name, file, plain)
        if not len(todo.runs):
            self._records[name] = todo.kept
            return todo.kept
        rows = RowFile(self._root / file, todo.kept.row_bytes, shape[0], todo.runs)
        try:
            for piece in rows.pieces():
                if piece.first is None:
                    chosen = plain[torch.from_numpy(piece.rows)]
                else:
                    chosen = plain[piece.first : piece.first + len(piece.rows)]
                rows.append(piece.offset, raw_view(chosen))
            self._unsynced.append(rows.path)
            record = self._records[name] = replace(todo.kept, patches=(*todo.kept.patches, rows.finish()))
        finally:
            rows.close()
        return record

    def _fold(self, name: str, record: ArrayRecord) -> None:
        """Write an array that has patches to one file."""
        rows = RowFile(self._root / f"{_slug(name)}.{new_token()}.bin", record.row_bytes, record.shape[0], None)
        try:
            for piece in mapped_pieces(self._root, record, PIECE_BYTES):
                rows.append(0, raw_view(piece))
            self._records[name] = record
            self.end_rows(name, rows)
        finally:
            rows.close()

    def _store(self, tensor: Tensor, where: str) -> str:
        """Write a tensor of the state to a file of its own; return its name."""
        name = f"{_STATE_PREFIX}{where.removeprefix('state')}"
        if len(name) > _MAX_NAME or name in self._records:
            name = f"{_STATE_PREFIX}{len(self._records)}"
        self._write_changed(name, tensor)
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
        """Check the name of a new array and return the name of its file."""
        self._check_name(name)
        return f"{_slug(name)}.{new_token()}.bin"

    def _check_name(self, name: str) -> None:
        if not self._open:
            self._check_open()
        if not 0 < len(name) <= _MAX_NAME or name.startswith(_STATE_PREFIX):
            msg = f"an array name has 1 to {_MAX_NAME} characters and does not begin with 'state:', got {name[:80]!r}"
            raise CheckpointError(msg)
        if name in self._records:
            msg = f"array {name!r} was already added to {self._root}"
            raise CheckpointError(msg)

    def _check_open(self) -> None:
        if not self._open:
            msg = "a CheckpointWriter can be used inside its `with` block only, until commit()"
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


class Piece(NamedTuple):
    """Rows that are adjacent in a file."""

    offset: int
    """Position of the first row in the file, in bytes."""
    rows: np.ndarray
    """Numbers of the rows, int64 `[n]`."""
    first: int | None
    """Number of the first row, if the rows are adjacent in the array, too."""


@final
class RowFile:
    """The file of a base (all rows) or of a patch (some runs of rows).

    One thread appends. `put_ahead` requires the lock that guards the rows.

    Args:
        path: New file.
        row_bytes: Bytes of a row.
        rows: Number of rows of the array.
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
        """Rows before this offset were copied from memory; the caller sets it under the lock that guards the rows."""
        with disk_errors(path, self.nbytes):
            self._fd = create_file(path, read=True)
        self._blocks = BlockWriter(self._fd, BLOCK_BYTES)
        if self._patch:
            self.append(0, np.ascontiguousarray(runs, dtype="<i8").reshape(-1).view(np.uint8).data)

    def pieces(self) -> Iterator[Piece]:
        """Divide the rows into pieces of at most 2 MiB (or one row), in the order of the file."""
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
        """Return the offsets of rows (int64, ascending) in the file; -1 for rows that it does not hold."""
        if not len(self.runs):
            return np.full(len(rows), -1, dtype=np.int64)
        run = np.searchsorted(self.runs[:, 0], rows, side="right") - 1
        return np.where(contains(self.runs, rows), self._at[run] + (rows - self.runs[run, 0]) * self.row_bytes, -1)

    def append(self, offset: int, data: memoryview) -> None:
        """Write the next bytes at an offset; the gap before it is filled with zeros.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.path, self.nbytes):
            while self._blocks.nbytes < offset:
                self._blocks.write(memoryview(_ZEROS)[: offset - self._blocks.nbytes])
            self._blocks.write(data)

    def put_ahead(self, offset: int, data: memoryview) -> None:
        """Write rows before it is their turn.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.path, self.nbytes):
            while len(data):
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count

    def read_back(self, offset: int, view: memoryview) -> None:
        """Read rows that `put_ahead` wrote."""
        read_into(self._fd, view, offset, self.path)

    def finish(self) -> FileRecord:
        """Close the file, without a sync, and return its record."""
        self.append(self.nbytes, memoryview(b""))
        checksums = self._blocks.finish()
        self.close()
        runs = len(self.runs) if self._patch else 0
        return FileRecord(self.path.name, self._blocks.nbytes, BLOCK_BYTES, checksums, runs)

    def close(self) -> None:
        """Close the file; does nothing if it is closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def can_write_ahead() -> bool:
    """Whether this system can write rows before their turn."""
    return hasattr(os, "pwrite")


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name, flags=re.ASCII)[:64]
