"""Reading a checkpoint directory: nothing is trusted, nothing is executed."""

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
from ostinato.durable.files import open_inside
from ostinato.durable.json_codec import decode
from ostinato.durable.manifest import FORMAT_VERSION, MANIFEST_NAME, parse_json, read_manifest
from ostinato.durable.patched_arrays import Columns, column_of, map_rows, read_rows
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["MAX_LINE_BYTES", "CheckpointReader", "check_sizes", "read_records"]

MAX_LINE_BYTES = 64 * 2**20
_SAVE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ATTEMPTS = 3


@final
class CheckpointReader:
    """Opens a checkpoint directory, checks its manifest and the size of every file, and reads from it.

    Nothing stays open between calls. When somebody saves over the directory meanwhile, reading raises an
    error that says so. May be used from several threads.
    """

    def __init__(self, path: str | os.PathLike[str], *, format_name: str) -> None:
        """Open and validate.

        Raises:
            CheckpointNotFoundError: No checkpoint is there.
            CheckpointError: The path is a file, or the checkpoint is of another format or of an unknown version.
            DamagedFileError: The manifest is damaged, or a file is missing or of another size.
        """
        root = Path(path).absolute()
        # A saver removes the older files right after it replaced the manifest that we may have read.
        for attempt in range(_ATTEMPTS):
            manifest = read_manifest(root, format_name=format_name)
            self._begin(root, format_name, manifest.version, manifest.body)
            try:
                with self._saved_over():
                    self._check_sizes()
            except _SavedOverError:
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    @classmethod
    def of_body(cls, root: Path, body: dict[str, Any], *, format_name: str) -> CheckpointReader:
        """Return a reader of files that no manifest names yet, by the body that it is to have.

        Raises:
            DamagedFileError: The body is not as the format says.
        """
        reader = cls.__new__(cls)
        reader._begin(root, format_name, FORMAT_VERSION, body)  # noqa: SLF001 (its own)
        return reader

    def _begin(self, root: Path, format_name: str, version: tuple[int, int], body: dict[str, Any]) -> None:
        self._root, self.format_name = root, format_name
        self.version, self._body = version, body
        self._records = read_records(root, body)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in the order in which they were added; columns of packed rows are arrays, too."""
        return tuple(self._records)

    @property
    def arrays(self) -> dict[str, ArrayRecord]:
        """The arrays that have files of their own."""
        return {name: record for name, record in self._records.items() if isinstance(record, ArrayRecord)}

    @property
    def save(self) -> str | None:
        """The random name of the save, by which a buffer knows the one that it goes on from; None before 1.1."""
        return self._body.get("save")

    def record(self, name: str) -> ArrayRecord | ColumnRecord:
        """Return what the manifest says of an array.

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
            DamagedFileError: It is a column of another one, or there is none.
        """
        record = self._records.get(name)
        if not isinstance(record, ArrayRecord):
            msg = f"{self._root / MANIFEST_NAME} is damaged: it has no array {name[:80]!r} with a file of its own"
            raise DamagedFileError(msg)
        return record

    @property
    def encoded_state(self) -> Any:
        """The state as the manifest has it."""
        return self._body["state"]

    def state(self) -> Any:
        """Return the Python state that was committed, decoded anew at each call."""
        return decode(self._body["state"], where=f"{self._root / MANIFEST_NAME}: state", load=self.read)

    def read(self, name: str) -> Tensor:
        """Read an array into a new CPU tensor; checksums are compared."""
        record = self.record(name)
        if isinstance(record, ColumnRecord):
            with torch.inference_mode(mode=False):
                dest = torch.empty(record.shape, dtype=record.torch_dtype, device="cpu")
            self.read_into(name, dest)
            return dest
        with self._saved_over():
            return read_array(self._root, record)

    def read_into(self, name: str, dest: Tensor, *, verify: bool = True) -> None:
        """Read an array into a tensor of its dtype and shape, on any device; see `read_array_into`."""
        record = self.record(name)
        if isinstance(record, ColumnRecord):
            self.read_columns(record.of, [(name, dest)], verify=verify)
            return
        with self._saved_over():
            read_array_into(self._root, record, dest, verify=verify)

    def read_columns(self, rows: str, columns: Sequence[tuple[str, Tensor]], *, verify: bool = True) -> None:
        """Read columns of the packed rows `rows`, each into a tensor of its dtype and shape, in one pass.

        Raises:
            CheckpointError: A column is not one of these rows, or of another form.
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
        """Map an array copy-on-write without reading it; checksums are not compared."""
        record = self.record(name)
        if isinstance(record, ColumnRecord):
            rows = self.open_mapped(record.of)
            return column_of(rows, record.offset, record.torch_dtype, record.shape[1:])
        with self._saved_over():
            return open_mapped(self._root, record)

    def map_rows(self, name: str, capacity: int) -> Tensor:
        """Map an array with room for more rows; see `chains.map_rows`."""
        with self._saved_over():
            return map_rows(self._root, self.whole(name), capacity)

    def values(self, name: str) -> Iterator[Any]:
        """Yield the Python values that `add_values` wrote, one by one."""
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
            DamagedFileError: Names the first damaged file and the byte offset of the damage.
        """
        with self._saved_over():
            for record in self.arrays.values():
                verify_array(self._root, record)
        self.state()
        return sum(record.total_bytes for record in self.arrays.values())

    def _check_sizes(self) -> None:
        for record in self.arrays.values():
            check_sizes(self._root, record)

    @contextlib.contextmanager
    def _saved_over(self) -> Iterator[None]:
        """Tell a file that a newer save has removed from a damaged one."""
        try:
            yield
        except DamagedFileError as error:
            if not self._is_current():
                msg = f"{self._root} was saved over while it was read: open it again"
                raise _SavedOverError(msg) from error
            raise

    def _is_current(self) -> bool:
        try:
            return read_manifest(self._root, format_name=self.format_name).body == self._body
        except CheckpointError:
            return True  # damaged as well: the first error says it better


class _SavedOverError(CheckpointError):
    """Another checkpoint has taken the place of the one being read."""


def check_sizes(root: Path, record: ArrayRecord) -> None:
    """Compare the sizes of an array's files with its record.

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
    """Return the array records of a manifest's body, checked.

    Raises:
        DamagedFileError: The body or a record in it is not as the format says.
    """
    arrays, save = body.get("arrays"), body.get("save", "0" * 16)
    if set(body) - {"save"} != {"arrays", "state"} or not isinstance(arrays, dict):
        msg = f"{root / MANIFEST_NAME} is damaged: its body must have exactly the keys ['arrays', 'state']"
        raise DamagedFileError(msg)
    if not isinstance(save, str) or not _SAVE.fullmatch(save):
        msg = f"{root / MANIFEST_NAME} is damaged: save must be 16 hexadecimal digits, got {str(save)[:40]!r}"
        raise DamagedFileError(msg)
    where = f"{root / MANIFEST_NAME}: array "
    columns = {name: node for name, node in arrays.items() if isinstance(node, dict) and "of" in node}
    plain = {
        name: ArrayRecord.from_json(node, where=f"{where}{name[:80]!r}")
        for name, node in arrays.items()
        if name not in columns
    }
    return {
        name: plain[name] if name in plain else ColumnRecord.from_json(node, plain, where=f"{where}{name[:80]!r}")
        for name, node in arrays.items()
    }
