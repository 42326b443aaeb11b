"""CheckpointReader: reads a checkpoint directory; verifies everything and executes nothing."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.durable.arrays import (
    ArrayRecord,
    ColumnRecord,
    open_mapped,
    read_array,
    read_array_into,
    read_stream,
    verify_array,
)
from ostinato.durable.dtypes import DTYPES
from ostinato.durable.files import open_inside
from ostinato.durable.json_codec import decode
from ostinato.durable.manifest import FORMAT_VERSION, MANIFEST_NAME, parse_json, read_manifest
from ostinato.durable.patched_arrays import Columns, column_of, map_rows, read_rows
from ostinato.durable.progress import count
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, SavedOverError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["MAX_LINE_BYTES", "CheckpointReader", "SavedColumn", "check_sizes", "copy_counted", "read_records"]

MAX_LINE_BYTES = 64 * 2**20
_SAVE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ATTEMPTS = 3
_COPY_BYTES = 64 * 2**20


@final
class CheckpointReader:
    """Reads arrays and state from a checkpoint directory.

    The manifest and the size of every file are verified at the start. No file stays open between calls. If another
    checkpoint is saved to the directory meanwhile, reading raises an error that says so. Thread-safe.
    """

    def __init__(self, path: str | os.PathLike[str], *, format_name: str) -> None:
        """Read and verify the manifest, and compare the sizes of all files.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at the path.
            CheckpointError: The path is a file, or the checkpoint is of another format or of an unknown version.
            DamagedFileError: The manifest is damaged, or a file is missing or has another size.
        """
        root = Path(path).absolute()
        # A save removes the files of the older checkpoint right after it replaced the manifest.
        for attempt in range(_ATTEMPTS):
            manifest = read_manifest(root, format_name=format_name)
            self._begin(root, format_name, manifest.version, manifest.body, read_records(root, manifest.body))
            try:
                with self._saved_over():
                    self._check_sizes()
            except SavedOverError:
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    @classmethod
    def preview(
        cls, root: Path, body: dict[str, Any], records: dict[str, ArrayRecord | ColumnRecord], *, format_name: str
    ) -> CheckpointReader:
        """Return a reader of files that are not named by a manifest yet.

        Args:
            root: Directory of the files.
            body: The body that the manifest will have.
            records: The records of its arrays.
            format_name: Kind of checkpoint.
        """
        reader = cls.__new__(cls)
        reader._begin(root, format_name, FORMAT_VERSION, body, records)  # noqa: SLF001 (its own)
        return reader

    def _begin(
        self,
        root: Path,
        format_name: str,
        version: tuple[int, int],
        body: dict[str, Any],
        records: dict[str, ArrayRecord | ColumnRecord],
    ) -> None:
        self._root, self.format_name = root, format_name
        self.version, self._body, self._records = version, body, records

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays in the order in which they were added, columns of packed rows included."""
        return tuple(self._records)

    @property
    def arrays(self) -> dict[str, ArrayRecord]:
        """Records of the arrays that have files of their own, by name."""
        return {name: record for name, record in self._records.items() if isinstance(record, ArrayRecord)}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(record.total_bytes for record in self._records.values() if isinstance(record, ArrayRecord))

    @property
    def save(self) -> str | None:
        """Random identifier of the save, to which an incremental save refers; None before format 1.1."""
        return self._body.get("save")

    def record(self, name: str) -> ArrayRecord | ColumnRecord:
        """Return the record of an array.

        Raises:
            CheckpointError: There is no such array.
        """
        record = self._records.get(name)
        if record is None:
            msg = f"{self._root} holds no array {name[:80]!r}; it holds {list(self._records)[:20]}"
            raise CheckpointError(msg)
        return record

    def whole(self, name: str) -> ArrayRecord:
        """Return the record of an array that has files of its own.

        Raises:
            DamagedFileError: There is no such array, or it is a column of another array.
        """
        record = self._records.get(name)
        if not isinstance(record, ArrayRecord):
            msg = f"{self._root / MANIFEST_NAME} is damaged: it has no array {name[:80]!r} with a file of its own"
            raise DamagedFileError(msg)
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
        if isinstance(record, ColumnRecord):
            with torch.inference_mode(mode=False):
                dest = torch.empty(record.shape, dtype=record.torch_dtype, device="cpu")
            self.read_into(name, dest)
            return dest
        with self._saved_over():
            return read_array(self._root, record)

    def read_into(self, name: str, dest: Tensor, *, verify: bool = True) -> None:
        """Read an array into a tensor of its dtype and shape on any device; see `read_array_into`."""
        record = self.record(name)
        if isinstance(record, ColumnRecord):
            self.read_columns(record.of, [(name, dest)], verify=verify)
            return
        with self._saved_over():
            read_array_into(self._root, record, dest, verify=verify)

    def read_columns(self, rows: str, columns: Sequence[tuple[str, Tensor]], *, verify: bool = True) -> None:
        """Read columns of the packed rows `rows` in one pass, each into a tensor of its dtype and shape.

        Raises:
            CheckpointError: A column does not lie in these rows, or has another dtype or shape.
        """
        wanted = []
        for name, dest in columns:
            record = self.record(name)
            form = (record.torch_dtype, record.shape)
            if not isinstance(record, ColumnRecord) or record.of != rows or form != (dest.dtype, tuple(dest.shape)):
                msg = (
                    f"{self._root} holds {name[:80]!r} as {record.dtype}{list(record.shape)}, it cannot be read into "
                    f"{dest.dtype}{list(dest.shape)}"
                )
                raise CheckpointError(msg)
            wanted.append((dest, record.offset))
        with self._saved_over():
            read_rows(self._root, self.whole(rows), Columns(wanted), verify=verify)

    def open_mapped(self, name: str) -> Tensor:
        """Map an array copy-on-write; its bytes are not read and its checksums are not compared."""
        record = self.record(name)
        if isinstance(record, ColumnRecord):
            rows = self.open_mapped(record.of)
            return column_of(rows, record.offset, record.torch_dtype, record.shape[1:])
        with self._saved_over():
            return open_mapped(self._root, record)

    def map_rows(self, name: str, capacity: int) -> Tensor:
        """Map an array with room for more rows; see `patched_arrays.map_rows`."""
        with self._saved_over():
            return map_rows(self._root, self.whole(name), capacity)

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
            column = isinstance(record, ColumnRecord)
            rows = record.of if column else name  # type: ignore[union-attr]
            if opened and rows not in mapped:
                try:
                    mapped[rows] = self.open_mapped(rows)
                except OptionError:  # this system cannot map the files
                    mapped[rows] = self.read(rows)
            found.append(SavedColumn(self, name, record, self.whole(rows), mapped.get(rows), verify=verify))
        return found

    def values(self, name: str) -> Iterator[Any]:
        """Yield the Python values that `CheckpointWriter.add_values` wrote."""
        record = self.whole(name)
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
            msg = f"{where} is damaged: value {count} has no end, or takes more than {MAX_LINE_BYTES} bytes"
            raise DamagedFileError(msg)

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
            for record in self._records.values():
                if isinstance(record, ArrayRecord):
                    verify_array(self._root, record)
                    nbytes += record.total_bytes
        return nbytes

    def _check_sizes(self) -> None:
        for record in self._records.values():
            if isinstance(record, ArrayRecord):
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
        whole: record of the packed rows that contain it, or of the array itself.
        mapped: the array of `whole` if its files are open.
        verify: compare checksums.
    """

    __slots__ = (
        "_mapped",
        "_name",
        "_reader",
        "_verify",
        "dtype",
        "offset",
        "packed",
        "row_bytes",
        "rows",
        "shape",
    )

    def __init__(
        self,
        reader: CheckpointReader,
        name: str,
        record: ArrayRecord | ColumnRecord,
        whole: ArrayRecord,
        mapped: Tensor | None,
        *,
        verify: bool,
    ) -> None:
        self._reader = reader
        self._name = name
        self._mapped = mapped
        self._verify = verify
        self.dtype, self.shape = DTYPES[record.dtype], record.shape
        self.packed = isinstance(record, ColumnRecord)
        """Whether it lies in packed rows."""
        self.rows = record.of if isinstance(record, ColumnRecord) else name
        """Name of the packed rows, or of the array itself."""
        self.offset = record.offset if isinstance(record, ColumnRecord) else 0
        """Position in each of these rows, in bytes."""
        self.row_bytes = whole.row_bytes
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
            self._reader.read_columns(self.rows, columns, verify=self._verify)
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
        return column_of(mapped, self.offset, self.dtype, self.shape[1:]) if self.packed else mapped


def copy_counted(dest: Tensor, source: Tensor) -> None:
    """Copy rows in parts of 64 MiB that are counted as progress."""
    if dest.ndim == 0:
        dest.copy_(source)
        return
    rows = max(1, _COPY_BYTES * dest.shape[0] // max(1, dest.nbytes))
    for start in range(0, dest.shape[0], rows):
        dest[start : start + rows].copy_(source[start : start + rows])
        count(source[start : start + rows].nbytes)


def check_sizes(root: Path, record: ArrayRecord) -> None:
    """Compare the sizes of the files of an array with its record.

    Raises:
        DamagedFileError: naming the file.
    """
    for file in record.files:
        fd, size = open_inside(root, file.file)
        os.close(fd)
        if size != file.nbytes:
            msg = f"{root / file.file} has {size} bytes, {file.nbytes} expected"
            raise DamagedFileError(msg)


def read_records(root: Path, body: dict[str, Any]) -> dict[str, ArrayRecord | ColumnRecord]:
    """Return the verified array records in the body of a manifest.

    Raises:
        DamagedFileError: The body or a record in it does not follow the format.
    """
    arrays, save = body.get("arrays"), body.get("save", "0" * 16)
    if set(body) - {"save"} != {"arrays", "state"} or not isinstance(arrays, dict):
        msg = f"{root / MANIFEST_NAME} is damaged: its body must have exactly the keys ['arrays', 'state']"
        raise DamagedFileError(msg)
    if not isinstance(save, str) or not _SAVE.fullmatch(save):
        msg = f"{root / MANIFEST_NAME} is damaged: save must be 16 hexadecimal digits, got {str(save)[:40]!r}"
        raise DamagedFileError(msg)
    where = f"{root / MANIFEST_NAME}: array "
    files: dict[str, ArrayRecord] = {}
    columns: dict[str, dict[str, Any]] = {}
    for name, node in arrays.items():
        if isinstance(node, dict) and "of" in node:
            columns[name] = node
        else:
            files[name] = ArrayRecord.from_json(node, where=f"{where}{name[:80]!r}")
    records: dict[str, ArrayRecord | ColumnRecord] = dict(files)
    for name, node in columns.items():
        records[name] = ColumnRecord.from_json(node, files, where=f"{where}{name[:80]!r}")
    return {name: records[name] for name in arrays}
