"""CheckpointWriter: saves into a directory by writing new files and replacing one manifest atomically."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from ostinato.durable import progress
from ostinato.durable.arrays import ArrayRecord, check_sizes, open_mapped, verify_array
from ostinato.durable.checkpoint_reader import MAX_LINE_BYTES, CheckpointReader, read_records
from ostinato.durable.dtypes import check_plain, dtype_name, is_raw, shape_nbytes
from ostinato.durable.files import LOCK_NAME, DirectoryLock, check_free, fsync_dir, new_token, sync_file
from ostinato.durable.json_codec import encode
from ostinato.durable.manifest import MANIFEST_NAME, canonical, read_manifest, write_manifest
from ostinato.durable.row_files import RowFile, changed_rows, plan, print_of, write_stream
from ostinato.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import Tensor

    from ostinato.durable.arrays import Runs
    from ostinato.durable.row_files import Print

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
        self._records: dict[str, ArrayRecord] = {}
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
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        """Without a commit, remove the new files."""
        if self._open:
            named = None
            with contextlib.suppress(OSError, CheckpointError):  # else the manifest does not tell which files are old
                named = {file.file for record in self._on_disk()[0].values() for file in record.files}
            self._close(named)
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

    def _on_disk(self) -> tuple[dict[str, ArrayRecord], str | None]:
        """Return the records of the checkpoint in the directory, and its identifier, if there is one."""
        if not (self._root / MANIFEST_NAME).exists():
            return {}, None
        body = read_manifest(self._root, format_name=self._format_name).body
        return read_records(self._root, body), body["save"]

    def _read_older(self) -> None:
        """Read the records of the older checkpoint, which cannot change while the lock is held."""
        try:
            records, self.older_save = self._on_disk()
        except CheckpointError as error:
            msg = f"will not save over {self._root}: {error}; remove it or choose another path"
            raise CheckpointError(msg) from error
        self.older = {name: record for name, record in records.items() if record.of is None}

    def add_array(self, name: str, tensor: Tensor) -> ArrayRecord:
        """Write a tensor to a file of its own; `commit` waits until it is on the disk.

        Args:
            name: Name in the manifest: any text that does not begin with `state:`.
            tensor: Dense tensor, on any device, contiguous or not; must not change meanwhile.

        Raises:
            CheckpointError: The name is taken or not allowed, or files cannot hold this tensor.
            StorageMemoryError: The disk is full.
        """
        self._check_name(name)
        return self._write(name, tensor, None)

    def add_changed(self, name: str, tensor: Tensor) -> ArrayRecord:
        """Write a tensor as `add_array` does; of an array of the older checkpoint, write only blocks that changed.

        Blocks of 64 KiB are compared by their checksums in `known`.
        """
        self._check_name(name)
        return self._write_changed(name, tensor)

    def add_columns(self, rows: str, columns: Iterable[tuple[str, int, torch.dtype, tuple[int, ...]]]) -> None:
        """Name the arrays that lie in the packed rows `rows`.

        Args:
            rows: name of an array that was added.
            columns: name, offset in a row in bytes, dtype, and shape of each.
        """
        for name, offset, dtype, shape in columns:
            self._check_name(name)
            self._records[name] = ArrayRecord(dtype_name(dtype), shape, (), self._records[rows].row_bytes, rows, offset)

    def add_values(self, name: str, values: Iterable[object]) -> ArrayRecord:
        """Write Python values, one line of JSON each; only a few of them are in memory at a time.

        Tensors and arrays of more than 1 MiB get files of their own.

        Raises:
            CheckpointError: A value cannot be encoded (the message has its path), or takes more than 64 MiB.
            StorageMemoryError: The disk is full.
        """
        self._check_name(name)
        record = self._records[name] = write_stream(self._root, _file_name(name), self._lines(name, values))
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
        self._check_name(name)
        return self._begin_rows(name, dtype, shape, changed)

    def _begin_rows(self, name: str, dtype: str, shape: tuple[int, ...], changed: Runs | None) -> RowFile | None:
        self._records[name], runs = plan(self._root, self.older.get(name), dtype, shape, changed)
        if runs is not None and not len(runs):
            return None
        return RowFile(self._root / _file_name(name), dtype, shape, runs)

    def end_rows(self, name: str, rows: RowFile) -> ArrayRecord:
        """Add a file of rows that is complete."""
        base = self._records[name]
        self._unsynced.append(rows.file.path)
        record = self._records[name] = replace(base, files=(*base.files, rows.finish()))
        return record

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
            record = self._records[name] = reader.record(name)
            if record.of is None and record.patches:
                verify_array(self._root, record)
                self._write(name, open_mapped(self._root, record), None)
        self._state, self.save = reader.encoded_state, reader.save

    def preview(self) -> CheckpointReader:
        """Return a reader of what `finish` would commit now; the older checkpoint is still in place."""
        self._check_open()
        return CheckpointReader(self._root, format_name=self._format_name, body=self._body())

    def _body(self) -> dict[str, Any]:
        arrays = {name: record.to_json() for name, record in self._records.items()}
        return {"arrays": arrays, "state": self._state, "save": self.save}

    def finish(self) -> None:
        """Commit the state that was encoded; see `commit`."""
        self._check_open()
        progress.finish()  # the last moment at which the older checkpoint can stay
        for path in self._unsynced:
            sync_file(path)
        named: set[str] = set()
        for record in self._records.values():
            if record.of is None:
                check_sizes(self._root, record)
                named.update([file.file for file in record.files])
        fsync_dir(self._root)  # the names of the files must be on the disk before a manifest refers to them
        write_manifest(self._root, self._body(), format_name=self._format_name)
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

    def _write(self, name: str, tensor: Tensor, changed: Runs | None) -> ArrayRecord:
        """Write all rows of a tensor, or those that differ from the older checkpoint."""
        plain = check_plain(tensor, name)
        rows = self._begin_rows(name, dtype_name(plain.dtype), tuple(plain.shape), changed)
        if rows is None:
            return self._records[name]
        with rows.file:
            rows.write(plain)
            return self.end_rows(name, rows)

    def _write_changed(self, name: str, tensor: Tensor) -> ArrayRecord:
        plain = check_plain(tensor, name)
        if plain.ndim == 0 or not is_raw(plain):
            return self._write(name, plain, None)
        now = self.prints[name] = print_of(plain)
        known = self.known.get(name)
        changed = changed_rows(known, now, shape_nbytes(now.shape[1:], plain.dtype))
        return self._write(name, plain, None if known is None else changed)

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

    def _check_name(self, name: str) -> None:
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


def _file_name(name: str) -> str:
    """Return the name of a new file for an array."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "_", name, flags=re.ASCII)[:64]
    return f"{slug}.{new_token()}.bin"
