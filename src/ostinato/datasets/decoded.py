"""`cache="memory"` and `cache="disk"`: where the rows of a dataset are kept after they were decoded once."""

from __future__ import annotations

import json
import mmap
import os
import re
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
import xxhash

from ostinato.datasets.columns import BlockColumn, DenseColumn, MovedColumn, TensorColumn
from ostinato.durable import files
from ostinato.durable.files import LOCK_NAME, DirectoryLock
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
    DirectoryInUseError,
    OptionError,
    StorageMemoryError,
    UsageError,
)
from ostinato.storages.memory import HeapMemory, MappedMemory, show_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.dataset import Contents

_MANIFEST = "ostinato-decoded.json"
_VERSION = 1
_FLUSH_BYTES = 256 << 20
_FLUSH_S = 30.0


def decode_once(
    contents: Contents, used: set[FieldPath], rows: int, kind: str, source: Any, cache_dir: str | Path | None
) -> Contents:
    """Keep each row of the fields after its first read.

    Args:
        contents: of the whole dataset.
        used: the fields to keep.
        rows: rows of the chosen episodes; memory for others is not touched.
        kind: "memory" or "disk".
        source: the dataset.
        cache_dir: for "disk": where the rows persist; None for temporary files.

    Returns:
        The contents with these fields kept.

    Raises:
        StorageMemoryError: if there is too little memory or disk.
        DirectoryInUseError: if another process uses `cache_dir`.
        CheckpointError: if `cache_dir` holds the rows of another dataset.
    """
    whole = int(contents.lengths.sum())
    found: dict[int, tuple[str, int, DatasetColumn]] = {}
    for path, column in contents.columns.items():
        for number, part in enumerate(_parts_of(column) if path in used else []):
            size = int(part.source.starts[-1]) if isinstance(part, BlockColumn) else whole
            found.setdefault(id(part), (_file_of(path, number), size, part))
    sizes = {name: _nbytes(size, part.dtype, part.shape) for name, size, part in found.values()}
    memory: HeapRows | DecodedFiles = HeapRows(forked=True)
    if kind == "memory":
        _check_memory(sum(sizes.values()) * rows // whole)
    else:
        directory = None if cache_dir is None else Path(cache_dir).expanduser().absolute()
        memory = DecodedFiles(directory, "" if directory is None else fingerprint_of(contents, source, directory))
        memory.check(sizes)
    kept = {i: DenseColumn(part, size, memory, name) for i, (name, size, part) in found.items()}
    return with_columns(contents, {path: contents.columns[path] for path in used}, kept)


def _parts_of(column: DatasetColumn) -> list[DatasetColumn]:
    """Return the columns to keep for one that may read others: tables, so that two fields share them, or itself."""
    if isinstance(column, MovedColumn) and _in_tables(column):
        return [*tables_of(column)]
    return [] if isinstance(column, (TensorColumn, DenseColumn)) else [column]


def _in_tables(column: DatasetColumn) -> bool:
    if isinstance(column, MovedColumn):
        return all(map(_in_tables, column.columns))
    return isinstance(column, (BlockColumn, TensorColumn, DenseColumn))


def tables_of(column: DatasetColumn) -> list[BlockColumn]:
    """Return the tables in files that a column reads."""
    if isinstance(column, MovedColumn):
        return [table for inner in column.columns for table in tables_of(inner)]
    return [column] if isinstance(column, BlockColumn) else []


def with_columns(
    contents: Contents, columns: Mapping[FieldPath, DatasetColumn], kept: Mapping[int, DatasetColumn]
) -> Contents:
    """Return contents whose `columns` read others in the place of those in `kept`, by their `id`."""
    return replace(contents, columns={**contents.columns, **{path: _with(c, kept) for path, c in columns.items()}})


def _with(column: DatasetColumn, kept: Mapping[int, DatasetColumn]) -> DatasetColumn:
    if id(column) in kept:
        return kept[id(column)]
    if isinstance(column, MovedColumn):
        return column.on([_with(inner, kept) for inner in column.columns])
    return column


def _check_memory(nbytes: int) -> None:
    import psutil

    free = psutil.virtual_memory().available
    if nbytes > free:
        msg = (
            f'cache="memory" needs {nbytes} bytes ({show_bytes(nbytes)}) for the decoded rows, {free} bytes '
            f'({show_bytes(free)}) are free: use cache="disk", or fewer fields= or episodes='
        )
        raise StorageMemoryError(msg)


def _file_of(path: FieldPath, number: int) -> str:
    """Return the name of the file of a field: readable, and different for each field."""
    key = json.dumps([path, number])
    readable = re.sub(r"[^A-Za-z0-9]+", "_", ".".join(map(str, path))).strip("_")[:60]
    return f"{readable}-{xxhash.xxh3_64_hexdigest(key.encode())}.bin"


def fingerprint_of(contents: Contents, source: Any, cache_dir: Path | None = None) -> str:
    """Return a hash of what the rows of a dataset depend on: its format, episodes and files (names, sizes, times).

    Raises:
        OptionError: if `source` is not a path.
    """
    if not isinstance(source, (str, os.PathLike)):
        msg = f"cache_dir is for a dataset opened by its path, whose files tell when it changes, got {source!r}"
        raise OptionError(msg)
    source = Path(source).expanduser().absolute()
    digest = xxhash.xxh3_128()
    digest.update(repr((contents.format, contents.fps, contents.selection)).encode())
    digest.update(contents.lengths.contiguous().numpy().tobytes())
    for path, column in sorted(contents.columns.items(), key=repr):
        digest.update(repr((path, column.dtype, tuple(column.shape))).encode())
    skipped = None if cache_dir is None else os.path.realpath(cache_dir)
    for folder, folders, names in os.walk(source) if source.is_dir() else [(str(source.parent), [], [source.name])]:
        folders[:] = sorted(name for name in folders if os.path.realpath(Path(folder, name)) != skipped)
        for name in sorted(names):
            file = Path(folder, name)
            status = file.stat()
            digest.update(repr((str(file.relative_to(source.parent)), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


@final
class HeapRows:
    """Rows in the memory of this process; a process that gets a pickled copy begins without them.

    Args:
        forked: processes that are forked share the rows that are read later, too. Pages are touched when they are first
            written; else they are huge.
    """

    def __init__(self, *, forked: bool = False) -> None:
        self._forked = forked

    def open(self, name: str, rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return memory for rows `[rows, *shape]`, and which of them were read, bool `[rows]`."""
        nbytes = _nbytes(rows, dtype, shape)
        if self._forked:
            return _shared(nbytes).view(dtype).view(rows, *shape), _shared(rows).view(torch.bool)
        memory = HeapMemory(torch.device("cpu"))
        memory.check(nbytes)
        values = memory.block(name, nbytes).view(dtype).view(rows, *shape)
        return values, torch.zeros(rows, dtype=torch.bool, device="cpu")

    def kept(self, nbytes: int) -> None:
        """Do nothing: rows do not outlive the process."""

    def flush(self) -> None:
        """Do nothing: rows do not outlive the process."""


def _shared(nbytes: int) -> Tensor:
    """Return zeros, uint8 `[nbytes]`, in memory that forked processes share."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    with torch.inference_mode(mode=False):
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _nbytes(rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return rows * dtype.itemsize * torch.Size(shape).numel()


@final
class DecodedFiles:
    """Rows in mapped files, one for each field, which processes share. Thread-safe.

    In a directory that was given, the rows persist. Beside the rows of a field, a file `.rows` says which of them are
    there. It is replaced, whole or not at all, after the rows that it names are on the disk: a process that is killed
    loses rows that were decoded last, and no row is ever wrong. Processes that are forked, and those that get a pickled
    copy, decode into the same files; processes that open the directory meanwhile get an error.

    Args:
        directory: where rows persist; None for temporary files, which are removed at the end.
        fingerprint: of the dataset.

    Raises:
        DirectoryInUseError: if another process uses the directory.
        CheckpointError: if the directory has another fingerprint.
        OptionError: if the directory holds other files.
    """

    def __init__(self, directory: Path | None, fingerprint: str) -> None:
        self._persists = directory is not None
        if directory is not None:
            files.make_directories(directory)
            _acquire(directory)
            try:
                _check_manifest(directory, fingerprint)
            except BaseException:
                _release(directory)
                raise
        self._mapped = MappedMemory(directory)
        self._opened: dict[str, tuple[str, Tensor]] = {}
        self._own = True
        self._begin()
        if directory is not None:
            weakref.finalize(self, _end, self._mapped, self._opened, os.getpid())

    def _begin(self) -> None:
        self._pending = 0
        self._flushed = time.monotonic()
        self._flushing = threading.Lock()  # never waited for: a forked process may get it locked

    def __getstate__(self) -> dict[str, Any]:
        """Where the files are."""
        return {"directory": self._mapped.directory, "persists": self._persists}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Use the files of the process that made them."""
        self._persists = state["persists"]
        self._mapped = MappedMemory(state["directory"], remove=False)
        self._opened = {}
        self._own = False
        self._begin()

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._mapped.directory

    def check(self, sizes: dict[str, int]) -> None:
        """Compare the bytes of the files `sizes` that are not there yet with the free space of the disk.

        Raises:
            StorageMemoryError: naming the bytes needed and the bytes free.
        """
        missing = {name: size for name, size in sizes.items() if not _has_size(self.directory / name, size)}
        nbytes, free = sum(missing.values()), files.free_bytes(self.directory)
        if nbytes > free:
            msg = (
                f'cache="disk" needs {nbytes} bytes ({show_bytes(nbytes)}) in {self.directory}, {free} bytes '
                f"({show_bytes(free)}) are free: use another cache_dir=, or fewer fields="
            )
            raise StorageMemoryError(msg)

    def open(self, name: str, rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the rows `[rows, *shape]` of a file, and which of them are there, bool `[rows]`.

        Raises:
            DamagedFileError: if the file that says so is damaged.
            StorageMemoryError: if there is too little space.
            UsageError: in a process that got a copy: if the process that opened the dataset has ended.
        """
        path, nbytes = self.directory / name, _nbytes(rows, dtype, shape)
        filled_name = f"{name}.filled"
        described = json.dumps([_VERSION, rows, str(dtype), list(shape)])
        saved = None
        if self._own:
            (self.directory / filled_name).unlink(missing_ok=True)  # that of a process that was killed, or closed it
            saved = _load_rows(path, nbytes, described, rows) if self._persists else None
        elif not (self.directory / filled_name).exists():
            msg = f"{self.directory} is gone: the process that opened the dataset with cache='disk' has ended"
            raise UsageError(msg)
        values = self._mapped.block(name, nbytes).view(dtype).view(rows, *shape)
        filled = self._mapped.block(filled_name, rows).view(torch.bool)
        if saved is not None:
            filled.copy_(saved)
        if self._persists:
            self._opened[name] = (described, filled)
        return values, filled

    def kept(self, nbytes: int) -> None:
        """Note that rows of so many bytes were decoded; now and then, all rows are saved."""
        self._pending += nbytes
        if self._pending >= _FLUSH_BYTES or time.monotonic() > self._flushed + _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Save all rows: those decoded so far are there after a crash. Does nothing if another thread does so."""
        if self._persists and self._flushing.acquire(blocking=False):
            try:
                self._pending, self._flushed = 0, time.monotonic()
                _save(self._mapped, self._opened)
            finally:
                self._flushing.release()


# -- directories -------------------------------------------------------------------------------------------------------

_locks: dict[tuple[int, str], tuple[DirectoryLock, int]] = {}
"""Locks of this process, by process and directory, and how many objects share them."""
_locks_lock = threading.Lock()


def _acquire(directory: Path) -> None:
    key = (os.getpid(), os.path.realpath(directory))
    with _locks_lock:
        if key in _locks:
            _locks[key] = (_locks[key][0], _locks[key][1] + 1)
            return
        lock = DirectoryLock(directory)
        try:
            lock.acquire()
        except CheckpointError as error:
            msg = f"cache_dir {directory} is used by another process: wait until it ends, or choose another directory"
            raise DirectoryInUseError(msg) from error
        _locks[key] = (lock, 1)


def _release(directory: Path) -> None:
    key = (os.getpid(), os.path.realpath(directory))
    with _locks_lock:
        if key in _locks:
            lock, count = _locks.pop(key)
            if count > 1:
                _locks[key] = (lock, count - 1)
            else:
                lock.release()


def _end(mapped: MappedMemory, opened: dict[str, tuple[str, Tensor]], process: int) -> None:
    """Save all rows and release the directory, unless this is a forked process."""
    if os.getpid() == process:
        try:
            _save(mapped, opened)
            for name in opened:
                (mapped.directory / f"{name}.filled").unlink(missing_ok=True)
        finally:
            _release(mapped.directory)


def _check_manifest(directory: Path, fingerprint: str) -> None:
    path = directory / _MANIFEST
    if not path.exists():
        others = [other.name for other in directory.iterdir() if other.name != LOCK_NAME]
        if others:
            msg = f"cache_dir {directory} holds other files ({', '.join(sorted(others)[:3])}): choose a new directory"
            raise OptionError(msg)
        text = json.dumps({"version": _VERSION, "fingerprint": fingerprint})
        files.atomic_write(path, text.encode())
        return
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        msg = f"{path} is damaged: remove {directory} to decode the dataset anew"
        raise DamagedFileError(msg) from error
    if found != {"version": _VERSION, "fingerprint": fingerprint}:
        msg = (
            f"cache_dir {directory} holds the rows of another dataset, or files of the dataset have changed since: "
            "remove the directory to decode anew, or choose another one"
        )
        raise CheckpointError(msg)


def _has_size(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size == nbytes


def _save(mapped: MappedMemory, opened: dict[str, tuple[str, Tensor]]) -> None:
    """Write the rows to the disk, then which ones they are."""
    marks = {name: (described, filled.numpy().copy()) for name, (described, filled) in opened.items()}
    changed = {}
    for name, (described, filled) in marks.items():
        data = _packed(described, filled)
        path = _rows_path(mapped.directory / name)
        if not (path.exists() and path.read_bytes() == data):
            changed[path] = data
    if changed:
        mapped.sync()
        for path, data in changed.items():
            files.atomic_write(path, data)


def _rows_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.rows")


def _packed(described: str, filled: np.ndarray[Any, np.dtype[np.bool_]]) -> bytes:
    body = described.encode() + b"\n" + np.packbits(filled).tobytes()
    return xxhash.xxh3_128_digest(body) + body


def _load_rows(path: Path, nbytes: int, described: str, rows: int) -> Tensor | None:
    """Return which rows a file holds, bool `[rows]`; None if it is new, which the disk knows before it is made."""
    marks = _rows_path(path)
    if not marks.exists():
        return None
    data = marks.read_bytes()
    head, _, bits = data[16:].partition(b"\n")
    if xxhash.xxh3_128_digest(data[16:]) != data[:16] or len(bits) != (rows + 7) // 8:
        msg = f"{marks} is damaged: remove {path.parent} to decode the dataset anew"
        raise DamagedFileError(msg)
    if head.decode() == described and _has_size(path, nbytes):
        return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), count=rows).astype(np.bool_))
    marks.unlink()
    files.fsync_dir(path.parent)
    return None
