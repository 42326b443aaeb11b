"""Reading a checkpoint directory: nothing is trusted, nothing is executed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ostinato.durable.arrays import open_mapped, read_array, read_array_into, read_stream, verify_array
from ostinato.durable.files import open_inside
from ostinato.durable.manifest import MANIFEST_NAME, parse_json, read_manifest
from ostinato.durable.records import ArrayRecord
from ostinato.durable.unvalues import decode
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["MAX_LINE_BYTES", "CheckpointReader", "read_records"]

MAX_LINE_BYTES = 64 * 2**20
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
            CheckpointError: No checkpoint is there, or it is of another format or of an unknown version.
            DamagedFileError: The manifest is damaged, or a file is missing or of another size.
        """
        self._root = Path(path).absolute()
        self._format_name = format_name
        # A saver removes the older files right after it replaced the manifest that we may have read.
        for attempt in range(_ATTEMPTS):
            manifest = read_manifest(self._root, format_name=format_name)
            self.version = manifest.version
            self._body = manifest.body
            self._records = read_records(self._root, manifest.body)
            try:
                with self._saved_over():
                    self._check_sizes()
            except _SavedOverError:
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in the order in which they were added."""
        return tuple(self._records)

    def record(self, name: str) -> ArrayRecord:
        """Return what the manifest says of an array.

        Raises:
            CheckpointError: There is no such array.
        """
        record = self._records.get(name)
        if record is None:
            msg = f"{self._root} holds no array {name[:80]!r}; it holds {list(self._records)[:20]}"
            raise CheckpointError(msg)
        return record

    def state(self) -> Any:
        """Return the Python state that was committed, decoded anew at each call."""
        return decode(self._body["state"], where=f"{self._root / MANIFEST_NAME}: state", load=self.read)

    def read(self, name: str) -> Tensor:
        """Read an array into a new CPU tensor; checksums are compared."""
        with self._saved_over():
            return read_array(self._root, self.record(name))

    def read_into(self, name: str, dest: Tensor, *, verify: bool = True) -> None:
        """Read an array into a tensor of its dtype and shape, on any device; see `read_array_into`."""
        with self._saved_over():
            read_array_into(self._root, self.record(name), dest, verify=verify)

    def open_mapped(self, name: str) -> Tensor:
        """Map an array copy-on-write without reading it; checksums are not compared."""
        with self._saved_over():
            return open_mapped(self._root, self.record(name))

    def values(self, name: str) -> Iterator[Any]:
        """Yield the Python values that `add_values` wrote, one by one."""
        where = f"{self._root / self.record(name).file}"
        rest = b""
        count = 0
        with self._saved_over():
            for block in read_stream(self._root, self.record(name)):
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
            for record in self._records.values():
                verify_array(self._root, record)
        self.state()
        return sum(record.nbytes for record in self._records.values())

    def _check_sizes(self) -> None:
        for record in self._records.values():
            fd, size = open_inside(self._root, record.file)
            os.close(fd)
            if size != record.nbytes:
                msg = f"{self._root / record.file} has {size} bytes, {record.nbytes} expected"
                raise DamagedFileError(msg)

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
            return read_manifest(self._root, format_name=self._format_name).body == self._body
        except CheckpointError:
            return True  # damaged as well: the first error says it better


class _SavedOverError(CheckpointError):
    """Another checkpoint has taken the place of the one being read."""


def read_records(root: Path, body: dict[str, Any]) -> dict[str, ArrayRecord]:
    """Return the array records of a manifest's body, checked.

    Raises:
        DamagedFileError: The body or a record in it is not as the format says.
    """
    arrays = body.get("arrays")
    if set(body) != {"arrays", "state"} or not isinstance(arrays, dict):
        msg = f"{root / MANIFEST_NAME} is damaged: its body must have exactly the keys ['arrays', 'state']"
        raise DamagedFileError(msg)
    where = f"{root / MANIFEST_NAME}: array "
    return {name: ArrayRecord.from_json(node, where=f"{where}{name[:80]!r}") for name, node in arrays.items()}
