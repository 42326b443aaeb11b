"""Opening a checkpoint: the state of a buffer with its rows in their places, read or mapped when they are copied."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.buffers.checkpoint.state import readable, restoring
from ostinato.core.rows import NAME_LENGTH
from ostinato.durable import CheckpointReader
from ostinato.errors import OptionError
from ostinato.storages.object_columns import unpack, unpack_column
from ostinato.storages.tensor import raise_mapped_ring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ostinato.storages import Storage

__all__ = ["Reading", "load_buffer", "open_state"]


class Reading(NamedTuple):
    """How a checkpoint is read."""

    format_name: str
    verify: bool
    mmap: bool


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
        reader.verify_arrays()
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
        # versions before names were cut wrote up to 1022 characters; suffixes follow a name that was cut
        kept = [n if n.endswith((".has", ".apart")) else n[:NAME_LENGTH] for n in names]
        found = reader.columns([f"{prefix}{name}" for name in names], verify=reading.verify, opened=opened)
        saved["columns"] = dict(zip(kept, found, strict=True))
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
