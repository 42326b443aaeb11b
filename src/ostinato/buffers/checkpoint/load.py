"""Opening a checkpoint: the state of a buffer with its rows in their places, read or mapped when they are copied."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.buffers.checkpoint.state import readable, restoring
from ostinato.core.rows import NAME_LENGTH
from ostinato.durable import CheckpointReader
from ostinato.durable.arrays import ColumnRecord
from ostinato.errors import OptionError
from ostinato.storages.object_columns import unpack, unpack_column
from ostinato.storages.tensor import raise_mapped_ring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.storages import Storage

__all__ = ["Reading", "load_buffer", "open_state"]


class Reading(NamedTuple):
    """How a checkpoint is read."""

    format_name: str
    verify: bool
    mmap: bool


@final
class _Saved:
    """A column that is still on the disk; storages read it straight into their memory, or map it."""

    def __init__(self, reader: CheckpointReader, name: str, *, verify: bool) -> None:
        self._reader = reader
        self._name = name
        self._verify = verify
        record = reader.record(name)
        self.dtype, self.shape = record.torch_dtype, record.shape
        self.packed = isinstance(record, ColumnRecord)
        """Whether it lies in packed rows, beside others."""
        self.rows = record.of if isinstance(record, ColumnRecord) else name
        """The array that has the files: packed rows, or the column itself."""
        self.offset = record.offset if isinstance(record, ColumnRecord) else 0
        """Where the column begins in each of its rows, in bytes."""
        whole = reader.whole(self.rows)
        self.row_bytes = whole.row_bytes if whole.shape else 0
        """Bytes of each of its rows."""

    def read_into(self, dest: Tensor) -> None:
        """Read and check the bytes."""
        self._reader.read_into(self._name, dest, verify=self._verify)

    def read_rows_into(self, dest: Tensor) -> None:
        """Read the packed rows that it lies in, uint8 `[rows, row_bytes]`."""
        self._reader.read_into(self.rows, dest, verify=self._verify)

    def read_with(self, others: Sequence[tuple[_Saved, Tensor]]) -> None:
        """Read columns of the same packed rows, each into its tensor, in one pass."""
        columns = [(other._name, dest) for other, dest in others]  # noqa: SLF001 (its own kind)
        self._reader.read_columns(self.rows, columns, verify=self._verify)

    def read(self) -> Tensor:
        """Read and check the bytes into a new tensor."""
        return self._reader.read(self._name)

    def opened(self) -> Tensor:
        """Return the column as it lies in its files, which stay open; read into memory where they cannot be mapped."""
        try:
            return self._reader.open_mapped(self._name)
        except OptionError:
            return self._reader.read(self._name)

    def map_rows(self, capacity: int) -> Tensor:
        """Map the rows that it lies in, copy-on-write, with room for so many: uint8 `[capacity * row_bytes]`."""
        return self._reader.map_rows(self.rows, capacity)


def load_buffer(
    path: str | Path, restore: Callable[[dict[str, Any]], None], storages: Sequence[Storage], reading: Reading
) -> str | None:
    """Read a directory and hand its state to `restore`; rows are read straight into the storages' memory.

    A storage that holds rows already is only touched once every file is open and every checksum was compared: its rows
    are then copied out of the open files, whatever others save to the directory meanwhile.

    Returns:
        The name of the save that was loaded, from which an incremental save can go on.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CheckpointError: if it does not fit.
        DamagedFileError: naming the damaged file.
        OptionError: if rows of a storage cannot be mapped.
    """
    for storage in storages if reading.mmap else ():
        if not storage.mappable or storage.load_hooks:
            msg = (
                "mmap=True needs a LazyTensorStorage on the CPU without single_copy and loading hooks, got "
                f"{storage!r} with {len(storage.load_hooks)} hooks: load without it"
            )
            raise OptionError(msg)
    reader = CheckpointReader(path, format_name=reading.format_name)
    used = not reading.mmap and any(map(len, storages))
    with readable(f"a replay buffer in {path}"):
        state = open_state(reader, storages, reading, opened=used)
    if used and reading.verify:
        reader.verify()
    for mine, storage in zip(state.get("members", [state]), storages, strict=False) if reading.mmap else ():
        with readable("this storage"):
            saved = mine["storage"]["state"]
            seam = storage.seam(saved)
        if seam:
            raise_mapped_ring(saved, seam, storage.capacity)
    restoring(restore, storages)(state)
    return reader.save


def open_state(
    reader: CheckpointReader, storages: Sequence[Any], reading: Reading, *, objects: bool = True, opened: bool = False
) -> dict[str, Any]:
    """Return the state of a buffer, or an ensemble, with its rows where their names stand.

    Columns are read when they are copied, out of files that are open already if `opened`. Without `objects`, Python
    objects are only counted.
    """
    state: dict[str, Any] = reader.state()
    members = state.get("members")
    if members is None:
        return _get_rows(reader, state, storages[0], "", reading, objects=objects, opened=opened)
    if len(members) != len(storages):
        return state  # the ensemble says so itself
    pairs = enumerate(zip(members, storages, strict=True))
    got = [
        _get_rows(reader, mine, storage, f"{i}:", reading, objects=objects, opened=opened)
        for i, (mine, storage) in pairs
    ]
    return {**state, "members": got}


def _get_rows(
    reader: CheckpointReader,
    state: dict[str, Any],
    storage: Any,
    prefix: str,
    reading: Reading,
    *,
    objects: bool,
    opened: bool,
) -> dict[str, Any]:
    """Return the state of one buffer with its rows where their names stand."""
    saved = dict(state["storage"]["state"])
    if "columns" in saved:
        names = saved["columns"]
        # names of up to 1022 characters were written whole before longer ones were cut
        found = {name: _Saved(reader, f"{prefix}{name}", verify=reading.verify) for name in names}
        own = (".has", ".apart")  # suffixes, which follow names that were cut
        named = {n if n.endswith(own) else n[:NAME_LENGTH]: column for n, column in found.items()}
        saved["columns"] = {n: column.opened() for n, column in named.items()} if opened else named
        saved["mapped"] = reading.mmap
    allow = bool(getattr(storage, "allow_pickle", False))
    if "objects" in saved:
        forms = saved["objects"]
        saved["objects"] = {
            name: _get_objects(reader, f"{prefix}{name}", form, allow_pickle=allow)
            if objects
            else [None] * math.prod(reader.record(f"{prefix}{name}.ends").shape)
            for name, form in forms.items()
        }
    if "items" in saved and not objects:
        saved["items"] = range(int(saved["items"]))
    elif "items" in saved:
        saved["items"] = [unpack(item, allow_pickle=allow) for item in reader.values(f"{prefix}items")]
    return {**state, "storage": {**state["storage"], "state": saved}}


def _get_objects(reader: CheckpointReader, name: str, form: object, *, allow_pickle: bool) -> list[Any]:
    """Read one column of Python objects."""
    text, ends = (reader.read(f"{name}.{part}") for part in ("text", "ends"))
    return unpack_column(name, form, text, ends, allow_pickle=allow_pickle)
