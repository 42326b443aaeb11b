"""Checkpoint directories: saved by writing new files and replacing one manifest; read with every check, no code run."""

from __future__ import annotations

import contextlib
import os
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np
import torch
import xxhash

from ostinato.durable import progress
from ostinato.durable.arrays import (
    DTYPES,
    ArrayRecord,
    NewFile,
    check_plain,
    check_sizes,
    copy_elements,
    dtype_name,
    index_of,
    is_raw,
    join_runs,
    map_rows,
    one_run,
    open_mapped,
    place,
    place_all,
    raw_view,
    read_array,
    read_arrays,
    read_blocks,
    read_runs,
    shape_nbytes,
    verify_array,
)
from ostinato.durable.files import (
    LOCK_NAME,
    DirectoryLock,
    check_free,
    damaged,
    disk_errors,
    fsync_dir,
    make_directories,
    new_token,
    read_into,
    safe_join,
    sync_file,
)
from ostinato.durable.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    canonical,
    decode,
    encode,
    parse_json,
    read_manifest,
    write_manifest,
)
from ostinato.errors import CheckpointError, DamagedFileError, SavedOverError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from ostinato.durable.arrays import FileRecord, Runs

PIECE_BYTES = 2 * 2**20
"""Most bytes of rows, unless one row has more, that are copied at once."""
MOST_PATCHES = 16
"""The next save replaces this many patches of an array by one."""
_PRINT_BYTES = 64 * 1024
_ZEROS = bytes(4096)
MAX_LINE_BYTES = 64 * 2**20
_LINE_INLINE_BYTES = 2**20
_LINES_BYTES = 2**20
_BODY_KEYS = {"arrays", "state", "save"}
_SAVE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_STATE_PREFIX = "state:"
_MAX_NAME = 1024
_ATTEMPTS = 3
_MAPPED_FILE = re.compile(r"block[a-z0-9-]*\.bin|manifest\.json", re.ASCII)
_OWN_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}\.bin|manifest\.json\.[0-9a-f]{16}\.tmp", re.ASCII)


@final
class CheckpointReader:
    """Reads arrays and state from a checkpoint directory.

    The manifest and the size of every file are verified at the start. No file stays open between calls. If another
    checkpoint is saved to the directory meanwhile, reading raises an error that says so. Thread-safe.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format_name: str,
        body: dict[str, Any] | None = None,
        records: dict[str, ArrayRecord] | None = None,
    ) -> None:
        """Read and verify the manifest, and compare the sizes of all files.

        Args:
            path: Directory of the checkpoint.
            format_name: Kind of checkpoint.
            body: Content of a manifest that was read already, or is not written yet: files are not looked at then.
            records: Arrays in a body that is not written yet.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at the path.
            CheckpointError: The path is a file, or the checkpoint is of another format or of an unknown version.
            DamagedFileError: The manifest is damaged, or a file is missing or has another size.
        """
        self._root, self.format_name = Path(path).absolute(), format_name
        # A save removes the files of the older checkpoint right after it replaced the manifest.
        for left in reversed(range(_ATTEMPTS)):
            manifest = Manifest(format_name, FORMAT_VERSION, body or {})
            if body is None:
                manifest = read_manifest(self._root, format_name=format_name)
            self.version, self._body = manifest.version, manifest.body
            self._records = read_records(self._root, manifest.body) if records is None else records
            self.arrays = own_files(self._records)
            """Records of the arrays that have files of their own, by name."""
            self.nbytes = sum([record.total_bytes for record in self.arrays.values()])
            """Bytes of all arrays."""
            try:
                if body is None:
                    with self._saved_over():
                        check_sizes(self._root, self.arrays.values())
                return
            except SavedOverError:
                if not left:
                    raise

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays in the order in which they were added, columns of packed rows included."""
        return tuple(self._records)

    @property
    def save(self) -> str:
        """Random identifier of the save, to which an incremental save refers."""
        return str(self._body["save"])

    def record(self, name: str) -> ArrayRecord:
        """Return the record of an array.

        Raises:
            CheckpointError: There is no such array.
        """
        record = self._records.get(name)
        if record is None:
            msg = f"{self._root} holds no array {name[:80]!r}; it holds {list(self._records)[:20]}"
            raise CheckpointError(msg)
        return record

    @property
    def encoded_state(self) -> Any:
        """The state as JSON values, as in the manifest."""
        return self._body["state"]

    def state(self) -> Any:
        """Return the saved Python state. Each call decodes it again."""
        return decode(self._body["state"], where=f"{self._root / MANIFEST_NAME}: state", load=self.read)

    def read(self, name: str) -> Tensor:
        """Read an array into a new CPU tensor and compare its checksums."""
        with self._saved_over():
            return read_array(self._root, self.record(name))

    def read_into(self, columns: Sequence[tuple[str, Tensor]], *, verify: bool = True) -> None:
        """Read an array, or columns of the same packed rows in one pass, each into a tensor of its dtype and shape.

        Raises:
            CheckpointError: The columns do not lie in the same rows, or one has another dtype or shape.
        """
        with self._saved_over():
            read_arrays(self._root, [(self.record(name), dest) for name, dest in columns], verify=verify)

    def open_mapped(self, name: str) -> Tensor:
        """Map an array copy-on-write; its bytes are not read and its checksums are not compared."""
        with self._saved_over():
            return open_mapped(self._root, self.record(name))

    def map_rows(self, name: str, capacity: int) -> Tensor:
        """Map an array with room for more rows; see `arrays.map_rows`."""
        with self._saved_over():
            return map_rows(self._root, self.record(name), capacity)

    def values(self, name: str) -> Iterator[Any]:
        """Yield the Python values that `CheckpointWriter.add_values` wrote."""
        record = self.record(name)
        where = f"{self._root / record.files[0].file}"
        if record.dtype != "uint8" or len(record.shape) != 1 or record.patches or record.of is not None:
            damaged(where, f"values must be uint8[n], got {record.dtype}{list(record.shape)}")
        rest, count = b"", 0
        with self._saved_over():
            for block in read_blocks(self._root, record.files[0]):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    yield decode(parse_json(line, where), where=f"{where}: value {count}", load=self.read)
                    count += 1
                if len(rest) > MAX_LINE_BYTES:
                    break
        if rest:
            damaged(where, f"value {count} has no end, or takes more than {MAX_LINE_BYTES} bytes")

    def verify(self) -> int:
        """Read every file, compare all checksums and decode the state; return the bytes of the arrays.

        Raises:
            DamagedFileError: A file or the state is damaged; the message names the first file and the byte offset.
        """
        with self._saved_over():
            for record in self.arrays.values():
                verify_array(self._root, record)
        self.state()
        return self.nbytes

    @contextlib.contextmanager
    def _saved_over(self) -> Iterator[None]:
        """Distinguish damage from a newer save, which removes the files of the older checkpoint."""
        try:
            yield
        except DamagedFileError as error:
            if not self._is_current():
                msg = f"{self._root} was saved over while it was read: open it again"
                raise SavedOverError(msg) from error
            raise

    def _is_current(self) -> bool:
        try:
            return read_manifest(self._root, format_name=self.format_name).body == self._body
        except CheckpointError:
            return True  # the manifest is damaged, too: the first error is more precise


@final
class SavedColumn:
    """An array of a checkpoint that is read, or mapped, when it is needed."""

    def __init__(self, reader: CheckpointReader, name: str, *, verify: bool) -> None:
        """Name the array; `verify` compares checksums when it is read."""
        record = reader.record(name)
        self._reader, self._verify, self.name = reader, verify, name
        self.dtype, self.shape = DTYPES[record.dtype], record.shape
        self.packed = record.of is not None
        """Whether it lies in packed rows."""
        self.rows = record.of or name
        """Name of the packed rows, or of the array itself."""
        self.offset = record.offset
        """Position in each of these rows, in bytes."""
        self.row_bytes = record.row_bytes
        """Bytes of each of these rows."""

    def read_into(self, dest: Tensor) -> None:
        """Read the array into a tensor of its dtype and shape."""
        self.read_with([(self, dest)])

    def read_rows_into(self, dest: Tensor) -> None:
        """Read the packed rows that contain the array, uint8 `[rows, row_bytes]`."""
        self._reader.read_into([(self.rows, dest)], verify=self._verify)

    def read_with(self, columns: Sequence[tuple[SavedColumn, Tensor]]) -> None:
        """Read arrays in the same packed rows, each into its tensor, in one pass."""
        self._reader.read_into([(column.name, dest) for column, dest in columns], verify=self._verify)

    def read(self) -> Tensor:
        """Read the array into a new tensor."""
        return self._reader.read(self.name)

    def map_rows(self, capacity: int) -> Tensor:
        """Map the packed rows, or the array, copy-on-write, for `capacity` rows: uint8 `[capacity * row_bytes]`."""
        return self._reader.map_rows(self.rows, capacity)


def read_records(root: Path, body: dict[str, Any]) -> dict[str, ArrayRecord]:
    """Return the verified array records in the body of a manifest.

    Raises:
        DamagedFileError: The body or a record in it does not follow the format.
    """
    path, arrays, save = root / MANIFEST_NAME, body.get("arrays"), body.get("save")
    if body.keys() != _BODY_KEYS or not isinstance(arrays, dict):
        damaged(path, f"its body must have exactly the keys {sorted(_BODY_KEYS)}")
    if not isinstance(save, str) or not _SAVE.fullmatch(save):
        damaged(path, f"save must be 16 hexadecimal digits, got {str(save)[:40]!r}")
    found: dict[str, ArrayRecord] = {}
    columns = {name: isinstance(node, dict) and "of" in node for name, node in arrays.items()}
    for name in sorted(arrays, key=columns.__getitem__):  # columns after the rows that they lie in
        known = found if columns[name] else None
        found[name] = ArrayRecord.from_json(arrays[name], where=f"{path}: array {name[:80]!r}", arrays=known)
    return {name: found[name] for name in arrays}


def own_files(records: dict[str, ArrayRecord]) -> dict[str, ArrayRecord]:
    """Return the records of arrays that have files of their own: those of packed rows, not of the columns in them."""
    return {name: record for name, record in records.items() if record.of is None}


# -- writing -----------------------------------------------------------------------------------------------------------


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
        self._older: dict[str, Any] = {}
        """Body of the manifest of the older checkpoint, which cannot change while the lock is held."""
        self.prints: dict[str, Print] = {}
        """Fingerprints of the arrays written with `compare`, and of tensors of the state."""
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
        self._made = make_directories(self._root)
        try:
            self._lock.acquire()
            self._older = self._on_disk()
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
                records = read_records(self._root, body) if (body := self._on_disk()) else {}
                named = {file.file for record in records.values() for file in record.files}
            self._close(named)
            self._remove_directories()

    def _check_target(self) -> None:
        """Raise if the path is something else than a checkpoint directory, or what a killed save left of one."""
        root = self._root
        if not os.path.lexists(root):
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

    def _on_disk(self) -> dict[str, Any]:
        """Return the body of the manifest in the directory; empty without one."""
        if not (self._root / MANIFEST_NAME).exists():
            return {}
        try:
            return read_manifest(self._root, format_name=self._format_name).body
        except CheckpointError as error:
            msg = f"will not save over {self._root}: {error}; remove it or choose another path"
            raise CheckpointError(msg) from error

    @property
    def older_save(self) -> str | None:
        """Identifier of the older checkpoint; None if there is none."""
        return self._older.get("save")

    @cached_property
    def older(self) -> dict[str, ArrayRecord]:
        """Arrays of the older checkpoint by name."""
        return read_records(self._root, self._older) if self._older else {}

    def add_array(self, name: str, tensor: Tensor, *, compare: bool = False) -> ArrayRecord:
        """Write a tensor to a file of its own; `commit` waits until it is on the disk.

        Args:
            name: Name in the manifest: any text that does not begin with `state:`.
            tensor: Dense tensor, on any device, contiguous or not; must not change meanwhile.
            compare: Take a fingerprint of blocks of 64 KiB, and write only blocks that differ from those in `known`.

        Raises:
            CheckpointError: The name is taken or not allowed, or files cannot hold this tensor.
            StorageMemoryError: The disk is full.
        """
        self._check_name(name)
        return self._write(name, tensor, compare=compare)

    def _write(self, name: str, tensor: Tensor, *, compare: bool = True) -> ArrayRecord:
        plain, changed = check_plain(tensor, name), None
        if compare and plain.ndim and is_raw(plain):
            now = self.prints[name] = print_of(plain)
            if name in self.known:
                changed = changed_rows(self.known[name], now, shape_nbytes(now.shape[1:], plain.dtype))
        rows = self.begin_rows(name, dtype_name(plain.dtype), tuple(plain.shape), changed)
        if rows is None:
            return self._records[name]
        with rows:
            rows.write(plain)
            return self.end_rows(rows)

    def add_values(self, name: str, values: Iterable[object]) -> ArrayRecord:
        """Write Python values, one line of JSON each; only a few of them are in memory at a time.

        Tensors and arrays of more than 1 MiB get files of their own.

        Raises:
            CheckpointError: A value cannot be encoded (the message has its path), or takes more than 64 MiB.
            StorageMemoryError: The disk is full.
        """
        self._check_name(name)
        lines = bytearray()
        with NewFile(self._root / _file_name(name)) as new:
            for i, value in enumerate(values):
                node = encode(value, where=f"{name}[{i}]", store=self._write_state, inline_bytes=_LINE_INLINE_BYTES)
                line = canonical(node)
                if len(line) >= MAX_LINE_BYTES:
                    msg = f"{name}[{i}] takes {len(line) + 1} bytes as JSON, at most {MAX_LINE_BYTES} are allowed"
                    raise CheckpointError(msg)
                lines += line + b"\n"
                if len(lines) >= _LINES_BYTES:
                    new.append(memoryview(bytes(lines)))
                    lines.clear()
            new.append(memoryview(bytes(lines)))
            file = new.finish()
        self._unsynced.append(new.path)
        record = self._records[name] = ArrayRecord.whole("uint8", (file.nbytes,), (file,))
        return record

    def begin_rows(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        changed: Runs | None,
        columns: Iterable[tuple[str, int, torch.dtype, tuple[int, ...]]] = (),
    ) -> RowFile | None:
        """Begin a file for rows that are written piece by piece; `end_rows` adds it when it is complete.

        Args:
            name: Name in the manifest, which must be free.
            dtype: Name of the dtype.
            shape: Shape, `[rows, ...]`.
            changed: Rows that differ from those in `older`; None writes all.
            columns: Arrays that lie in packed rows: name, which must be free, offset in a row in bytes, dtype, and
                shape of each.

        Returns:
            The file, which says which rows it needs; None if the older files already hold all rows.

        Raises:
            StorageMemoryError: The disk is too small.
        """
        old = None if changed is None else self.older.get(name)
        self._records[name], runs = plan(self._root, old, dtype, shape, changed)
        packed = self._records[name].row_bytes
        for column, offset, kind, extent in columns:
            self._records[column] = ArrayRecord(dtype_name(kind), extent, (), packed, name, offset)
        if runs is not None and not len(runs):
            return None
        return RowFile(self._root / _file_name(name), dtype, shape, runs, name)

    def end_rows(self, rows: RowFile) -> ArrayRecord:
        """Add a file of rows that is complete."""
        base = self._records[rows.name]
        self._unsynced.append(rows.path)
        record = self._records[rows.name] = base._replace(files=(*base.files, rows.end()))
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
        self._state = encode(state, store=self._write_state)

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
                self._write(name, open_mapped(self._root, record), compare=False)
        self._state, self.save = reader.encoded_state, reader.save

    def preview(self) -> CheckpointReader:
        """Return a reader of what `finish` would commit now; the older checkpoint is still in place."""
        self._check_open()
        body = {"state": self._state, "save": self.save}
        return CheckpointReader(self._root, format_name=self._format_name, body=body, records=self._records)

    def finish(self) -> None:
        """Commit the state that was encoded; see `commit`."""
        self._check_open()
        progress.finish()  # the last moment at which the older checkpoint can stay
        for path in self._unsynced:
            sync_file(path)
        arrays = own_files(self._records).values()
        check_sizes(self._root, arrays)
        named = {file.file for record in arrays for file in record.files}
        fsync_dir(self._root)  # the names of the files must be on the disk before a manifest refers to them
        nodes = {name: record.to_json() for name, record in self._records.items()}
        body = {"arrays": nodes, "state": self._state, "save": self.save}
        write_manifest(self._root, body, format_name=self._format_name)
        self._made.clear()
        self._close(named)

    def _close(self, named: set[str] | None) -> None:
        """Remove data files that are not in `named`, if it is given, and release the lock.

        A file that cannot be removed (a mapped file on Windows) is left for a later save.
        """
        self._open = False
        try:
            if named is not None:
                for path in self._root.iterdir():
                    own = _OWN_FILE.fullmatch(path.name) and path.is_file() and not path.is_symlink()
                    if own and path.name not in named:
                        with contextlib.suppress(OSError):
                            path.unlink()
        finally:
            self._lock.release()

    def _remove_directories(self) -> None:
        with contextlib.suppress(OSError):
            for path in reversed(self._made):
                path.rmdir()

    def _write_state(self, tensor: Tensor, where: str) -> str:
        """Write a tensor of the state to a file of its own; return its name."""
        name = f"{_STATE_PREFIX}{where.removeprefix('state')}"
        if len(name) > _MAX_NAME or name in self._records:
            name = f"{_STATE_PREFIX}{len(self._records)}"
        self._write(name, tensor)
        return name

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


def save_part(path: str | os.PathLike[str], part: Any, kind: str) -> None:
    """Save the state of a sampler or writer to a directory of its own, which is replaced atomically.

    Args:
        path: the directory, which may hold an older state.
        part: what has the state (`state_dict`).
        kind: "sampler" or "writer".

    Raises:
        CheckpointError: if the state cannot be saved, or the path holds other things.
    """
    with CheckpointWriter(path, format_name=f"ostinato.{kind}") as writer:
        writer.commit({kind: type(part).__name__, "state": part.state_dict()})


def load_part(path: str | os.PathLike[str], part: Any, kind: str, check: Callable[[dict[str, Any]], None]) -> None:
    """Restore what `save_part` saved. No code is executed; checksums are verified.

    Args:
        path: the directory.
        part: what gets the state (`load_state_dict`).
        kind: as for `save_part`.
        check: raises if a state does not fit.

    Raises:
        CheckpointError: if there is no state, it is damaged, or of another class or other options; nothing has changed
            then.
    """
    saved = CheckpointReader(path, format_name=f"ostinato.{kind}").state()
    name = saved.get(kind) if isinstance(saved, dict) else None
    if name != type(part).__name__:
        msg = f"{path} holds the state of a {name}, not of a {type(part).__name__}: load it into one of these"
        raise CheckpointError(msg)
    try:
        check(saved["state"])
    except (KeyError, TypeError, AttributeError) as error:
        msg = f"the {kind}'s state in {path} is damaged ({error!r})"
        raise CheckpointError(msg) from error
    part.load_state_dict(saved["state"])


def _is_mapped_storage(path: Path) -> bool:
    """Whether a path is the directory of a mapped storage, which may lie inside that of the checkpoints."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_MAPPED_FILE.fullmatch(entry.name) for entry in path.iterdir())


def _file_name(name: str) -> str:
    """Return the name of a new file for an array."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "_", name, flags=re.ASCII)[:64]
    return f"{slug}.{new_token()}.bin"


# -- the files of rows that a save writes ------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows that are adjacent in a file."""

    offset: int
    """Position of the first row in the file, in bytes."""
    rows: np.ndarray
    """Numbers of the rows, int64 `[n]`, ascending."""

    @property
    def where(self) -> slice | Tensor:
        """Index of the rows: a slice if they are adjacent in the array, too."""
        return index_of(self.rows)


@final
class RowFile(NewFile):
    """The new file of a base (all rows) or of a patch (some runs of rows).

    One thread appends. `put_ahead` requires the lock that guards the rows.

    Args:
        path: New file.
        dtype: Name of the dtype of the array.
        shape: Shape of the array, `[rows, ...]`, or `[]` for a scalar.
        runs: The rows of a patch; None makes a base.
        name: Name of the array in a manifest.

    Raises:
        StorageMemoryError: The disk is too small.
    """

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...], runs: Runs | None, name: str = "") -> None:
        self.name = name
        self.row_bytes = shape_nbytes(shape[1:], DTYPES[dtype])
        rows = shape[0] if shape else 1
        self.places = place_all(rows, self.row_bytes) if runs is None else place(runs, self.row_bytes)
        self.done = 0
        """Rows before this offset were copied from memory; the caller sets it under the lock that guards the rows."""
        self._runs = 0 if runs is None else len(runs)
        check_free(path, self.places.nbytes)
        super().__init__(path, self.places.nbytes)
        if runs is not None:
            self.append(np.ascontiguousarray(runs, dtype="<i8").reshape(-1).view(np.uint8).data)

    def pieces(self) -> Iterator[Piece]:
        """Divide the rows into pieces of at most 2 MiB (or one row), in the order of the file."""
        most = max(1, PIECE_BYTES // max(1, self.row_bytes))
        for rows, at in self.places.segments():
            for start in range(0, len(rows), most):
                part = rows[start : start + most]
                numbers = np.arange(part.start, part.stop) if isinstance(part, range) else part
                yield Piece(at + start * self.row_bytes, numbers)

    def put(self, offset: int, data: memoryview) -> None:
        """Append bytes at an offset; the gap before it is filled with zeros.

        Raises:
            StorageMemoryError: The disk is full.
        """
        while self.nbytes < offset:
            self.append(memoryview(_ZEROS)[: offset - self.nbytes])
        self.append(data)

    def write(self, tensor: Tensor) -> None:
        """Append the rows of the whole array, which the file needs.

        Contiguous CPU memory is written without a copy; strided rows and tensors on other devices are staged in
        2 MiB of memory, or one row. The tensor must not change meanwhile, or the checksums will not match.
        """
        tensor = tensor if tensor.ndim else tensor.unsqueeze(0)
        staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        for piece in self.pieces():
            rows = tensor[piece.where]
            if not is_raw(rows):
                if staging.nbytes < rows.nbytes:
                    staging = torch.empty(rows.nbytes, dtype=torch.uint8, device="cpu")
                source, rows = rows, staging[: rows.nbytes].view(rows.dtype).view(rows.shape)
                copy_elements(rows, source)
            self.put(piece.offset, raw_view(rows))

    def put_ahead(self, offset: int, data: memoryview) -> None:
        """Write rows before it is their turn.

        Raises:
            StorageMemoryError: The disk is full.
        """
        with disk_errors(self.path, self.places.nbytes):
            while len(data):
                count = os.pwrite(self.fd, data, offset)
                data, offset = data[count:], offset + count

    def read_back(self, offset: int, view: memoryview) -> None:
        """Read rows that `put_ahead` wrote."""
        read_into(self.fd, view, offset, self.path)

    def end(self) -> FileRecord:
        """Close the file, whose rows are complete, and return its record."""
        self.put(self.places.nbytes, memoryview(b""))
        return self.finish(self._runs)


def can_write_ahead() -> bool:
    """Whether this system can write rows before their turn."""
    return hasattr(os, "pwrite")


def write_array(root: Path, file: str, tensor: Tensor) -> ArrayRecord:
    """Write a tensor to a new file, and wait until it is on the disk; see `RowFile.write`.

    Args:
        root: Existing directory.
        file: Name of the new file in it.
        tensor: Dense tensor of any shape, on any device, contiguous or not.

    Returns:
        The record for the manifest.

    Raises:
        CheckpointError: The tensor is sparse, or has a dtype that files cannot hold.
        StorageMemoryError: The disk is full; the file is removed.
    """
    path = safe_join(root, file)
    plain = check_plain(tensor, path)
    dtype, shape = dtype_name(plain.dtype), tuple(plain.shape)
    with RowFile(path, dtype, shape, None) as rows:
        rows.write(plain)
        record = ArrayRecord.whole(dtype, shape, (rows.end(),))
        sync_file(path)
    return record


# -- what an incremental save writes -----------------------------------------------------------------------------------


def plan(
    root: Path, old: ArrayRecord | None, dtype: str, shape: tuple[int, ...], changed: Runs | None
) -> tuple[ArrayRecord, Runs | None]:
    """Decide which rows to write.

    If the patches of an array would take more bytes than its base, all rows are written. So an array takes at most
    twice its bytes on the disk, and an incremental save writes at most as much as a full one.

    Args:
        root: Directory of the older checkpoint.
        old: Record of the array in it.
        dtype: The dtype now.
        shape: The shape now.
        changed: Rows that have changed since; None writes all.

    Returns:
        The record to which the new file is added, and the rows that it gets: None for all rows, and no rows if the
        older files hold everything.
    """
    everything = ArrayRecord.whole(dtype, shape, ()), None
    if changed is None or old is None or old.dtype != dtype or not shape or old.shape[1:] != shape[1:]:
        return everything
    if old.shape[0] > shape[0] or (not old.files[0].nbytes and old.shape != shape):
        return everything
    runs = join_runs(changed, one_run(old.shape[0], shape[0] - old.shape[0]))
    if not len(runs) or not old.files[0].nbytes:
        return old, one_run(0, 0)
    base, *patches = old.files
    if len(patches) >= MOST_PATCHES:
        runs, patches = join_runs(runs, *read_runs(root, old)), []
    if place(runs, old.row_bytes).nbytes + sum(patch.nbytes for patch in patches) > base.nbytes:
        return everything
    return old._replace(shape=shape, files=(base, *patches)), runs


class Print(NamedTuple):
    """Fingerprint of an array: its dtype, shape, and a checksum of every 64 KiB."""

    dtype: Any
    shape: tuple[int, ...]
    sums: np.ndarray


def print_of(tensor: Tensor) -> Print:
    """Return the fingerprint of a contiguous tensor on the CPU. Cost: one pass over its bytes."""
    raw = raw_view(tensor)
    starts = range(0, len(raw), _PRINT_BYTES)
    sums = np.fromiter((xxhash.xxh3_64_intdigest(raw[i : i + _PRINT_BYTES]) for i in starts), np.uint64, len(starts))
    return Print(tensor.dtype, tuple(tensor.shape), sums)


def changed_rows(old: Print | None, new: Print, row_bytes: int) -> Runs:
    """Return the rows of all blocks that differ, and new rows; all rows if the dtype or shape of a row differs."""
    rows = new.shape[0] if new.shape else 0
    if old is None or old.dtype != new.dtype or old.shape[1:] != new.shape[1:] or not row_bytes:
        return one_run(0, rows)
    common = min(len(old.sums), len(new.sums))
    differ = np.flatnonzero(old.sums[:common] != new.sums[:common])
    first = differ * _PRINT_BYTES // row_bytes
    last = np.minimum(-(-(differ + 1) * _PRINT_BYTES // row_bytes), rows)
    runs = np.stack([first, last - first], axis=1)[first < last]
    start = common * _PRINT_BYTES // row_bytes
    return join_runs(runs.astype(np.int64), one_run(start, max(0, rows - start)))
