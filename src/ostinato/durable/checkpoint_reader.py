"""CheckpointReader: reads a checkpoint directory; verifies everything and executes nothing."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ostinato.durable.arrays import (
    ArrayRecord,
    check_sizes,
    map_rows,
    open_mapped,
    read_array,
    read_arrays,
    read_stream,
    verify_array,
)
from ostinato.durable.files import damaged
from ostinato.durable.json_codec import decode
from ostinato.durable.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, parse_json, read_manifest
from ostinato.durable.progress import count
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, SavedOverError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from torch import Tensor

MAX_LINE_BYTES = 64 * 2**20
_BODY_KEYS = {"arrays", "state", "save"}
_SAVE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ATTEMPTS = 3
_COPY_BYTES = 64 * 2**20


@final
class CheckpointReader:
    """Reads arrays and state from a checkpoint directory.

    The manifest and the size of every file are verified at the start. No file stays open between calls. If another
    checkpoint is saved to the directory meanwhile, reading raises an error that says so. Thread-safe.
    """

    def __init__(self, path: str | os.PathLike[str], *, format_name: str, body: dict[str, Any] | None = None) -> None:
        """Read and verify the manifest, and compare the sizes of all files.

        Args:
            path: Directory of the checkpoint.
            format_name: Kind of checkpoint.
            body: Content of a manifest that was read already, or is not written yet: files are not looked at then.

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
            self._records = read_records(self._root, manifest.body)
            try:
                with self._saved_over():
                    if body is None:
                        self._check_sizes()
                return
            except SavedOverError:
                if not left:
                    raise

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays in the order in which they were added, columns of packed rows included."""
        return tuple(self._records)

    @property
    def arrays(self) -> dict[str, ArrayRecord]:
        """Records of the arrays that have files of their own, by name."""
        return {name: record for name, record in self._records.items() if record.of is None}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(record.total_bytes for record in self.arrays.values())

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
        record = self.record(name)
        with self._saved_over():
            return read_array(self._root, record)

    def read_into(self, name: str, dest: Tensor, *, verify: bool = True) -> None:
        """Read an array into a tensor of its dtype and shape on any device; see `read_arrays`."""
        self.read_columns([(name, dest)], verify=verify)

    def read_columns(self, columns: Sequence[tuple[str, Tensor]], *, verify: bool = True) -> None:
        """Read columns of the same packed rows in one pass, each into a tensor of its dtype and shape.

        Raises:
            CheckpointError: The columns do not lie in the same rows, or one has another dtype or shape.
        """
        wanted = [(self.record(name), dest) for name, dest in columns]
        with self._saved_over():
            read_arrays(self._root, wanted, verify=verify)

    def open_mapped(self, name: str) -> Tensor:
        """Map an array copy-on-write; its bytes are not read and its checksums are not compared."""
        record = self.record(name)
        with self._saved_over():
            return open_mapped(self._root, record)

    def map_rows(self, name: str, capacity: int) -> Tensor:
        """Map an array with room for more rows; see `arrays.map_rows`."""
        record = self.record(name)
        with self._saved_over():
            return map_rows(self._root, record, capacity)

    def columns(self, names: Sequence[str], *, verify: bool = True, opened: bool = False) -> list[SavedColumn]:
        """Return arrays `[rows, ...]` that are read later.

        Args:
            names: of the arrays.
            verify: compare checksums when they are read.
            opened: open all files now, so that they can be read even if another checkpoint is saved to the directory;
                checksums are then not compared.
        """
        mapped: dict[str, Tensor] = {}
        found = []
        for name in names:
            record = self.record(name)
            rows = name if record.of is None else record.of
            if opened and rows not in mapped:
                try:
                    mapped[rows] = self.open_mapped(rows)
                except OptionError:  # this system cannot map the files
                    mapped[rows] = self.read(rows)
            found.append(SavedColumn(self, name, record, mapped.get(rows), verify=verify))
        return found

    def values(self, name: str) -> Iterator[Any]:
        """Yield the Python values that `CheckpointWriter.add_values` wrote."""
        record = self.record(name)
        where = f"{self._root / record.file}"
        rest = b""
        count = 0
        with self._saved_over():
            for block in read_stream(self._root, record):
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
        nbytes = self.verify_arrays()
        self.state()
        return nbytes

    def verify_arrays(self) -> int:
        """Read every file and compare all checksums; return the bytes of the arrays.

        Raises:
            DamagedFileError: A file is damaged; the message names the first one and the byte offset.
        """
        nbytes = 0
        with self._saved_over():
            for record in self.arrays.values():
                verify_array(self._root, record)
                nbytes += record.total_bytes
        return nbytes

    def _check_sizes(self) -> None:
        for record in self.arrays.values():
            check_sizes(self._root, record)

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
    """An array of a checkpoint that is read, or mapped, when it is needed.

    Args:
        reader: of the checkpoint.
        name: of the array.
        record: of the array.
        mapped: the array whose files contain it, if they are open.
        verify: compare checksums.
    """

    __slots__ = (
        "_mapped",
        "_name",
        "_reader",
        "_record",
        "_verify",
        "dtype",
        "offset",
        "packed",
        "row_bytes",
        "rows",
        "shape",
    )

    def __init__(
        self, reader: CheckpointReader, name: str, record: ArrayRecord, mapped: Tensor | None, *, verify: bool
    ) -> None:
        self._reader = reader
        self._name = name
        self._record = record
        self._mapped = mapped
        self._verify = verify
        self.dtype, self.shape = record.torch_dtype, record.shape
        self.packed = record.of is not None
        """Whether it lies in packed rows."""
        self.rows = name if record.of is None else record.of
        """Name of the packed rows, or of the array itself."""
        self.offset = record.offset
        """Position in each of these rows, in bytes."""
        self.row_bytes = record.row_bytes
        """Bytes of each of these rows."""

    def read_into(self, dest: Tensor) -> None:
        """Read the array into a tensor of its dtype and shape."""
        if self._mapped is None:
            self._reader.read_into(self._name, dest, verify=self._verify)
        elif dest.numel():
            copy_counted(dest, self._view(self._mapped))

    def read_rows_into(self, dest: Tensor) -> None:
        """Read the packed rows that contain the array, uint8 `[rows, row_bytes]`."""
        if self._mapped is None:
            self._reader.read_into(self.rows, dest, verify=self._verify)
        else:
            copy_counted(dest, self._mapped)

    def read_with(self, others: Sequence[tuple[SavedColumn, Tensor]]) -> None:
        """Read arrays in the same packed rows, each into its tensor, in one pass."""
        if self._mapped is None:
            columns = [(other._name, dest) for other, dest in others]  # noqa: SLF001 (its own kind)
            self._reader.read_columns(columns, verify=self._verify)
            return
        for other, dest in others:
            other.read_into(dest)

    def read(self) -> Tensor:
        """Read the array into a new tensor."""
        return self._reader.read(self._name) if self._mapped is None else self._view(self._mapped).clone()

    def map_rows(self, capacity: int) -> Tensor:
        """Map the packed rows, or the array, copy-on-write, for `capacity` rows: uint8 `[capacity * row_bytes]`."""
        return self._reader.map_rows(self.rows, capacity)

    def _view(self, mapped: Tensor) -> Tensor:
        return self._record.column(mapped) if self.packed else mapped


def copy_counted(dest: Tensor, source: Tensor) -> None:
    """Copy rows in parts of 64 MiB that are counted as progress."""
    if dest.ndim == 0:
        dest.copy_(source)
        return
    rows = max(1, _COPY_BYTES * dest.shape[0] // max(1, dest.nbytes))
    for start in range(0, dest.shape[0], rows):
        dest[start : start + rows].copy_(source[start : start + rows])
        count(source[start : start + rows].nbytes)


def read_records(root: Path, body: dict[str, Any]) -> dict[str, ArrayRecord]:
    """Return the verified array records in the body of a manifest.

    Raises:
        DamagedFileError: The body or a record in it does not follow the format.
    """
    path, arrays, save = root / MANIFEST_NAME, body.get("arrays"), body.get("save")
    if set(body) != _BODY_KEYS or not isinstance(arrays, dict):
        damaged(path, f"its body must have exactly the keys {sorted(_BODY_KEYS)}")
    if not isinstance(save, str) or not _SAVE.fullmatch(save):
        damaged(path, f"save must be 16 hexadecimal digits, got {str(save)[:40]!r}")

    def record(name: str, known: dict[str, ArrayRecord] | None) -> ArrayRecord:
        return ArrayRecord.from_json(arrays[name], where=f"{path}: array {name[:80]!r}", arrays=known)

    columns = {name for name, node in arrays.items() if isinstance(node, dict) and "of" in node}
    whole = {name: record(name, None) for name in arrays if name not in columns}
    return {name: whole[name] if name in whole else record(name, whole) for name in arrays}
