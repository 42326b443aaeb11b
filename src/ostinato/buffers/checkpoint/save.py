"""Saving: what is small under the lock, the rows piece by piece while writers go on, and only what has changed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.buffers.checkpoint.load import Reading, open_state
from ostinato.buffers.checkpoint.state import Lineage, Snapshot, converted, readable, rows_since
from ostinato.durable import CheckpointWriter
from ostinato.durable.dtypes import dtype_name
from ostinato.errors import CheckpointError
from ostinato.storages.object_columns import pack, pack_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ostinato.buffers.engine import LocalEngine
    from ostinato.durable.checkpoint_writer import RowFile
    from ostinato.durable.row_ranges import Runs
    from ostinato.storages.table import RowArray

__all__ = ["Saving", "one_at_a_time", "save_buffer", "save_state"]


class Saving(NamedTuple):
    """What is saved."""

    engines: Sequence[LocalEngine]
    """Of one buffer, or of the members of an ensemble."""
    state: Callable[[], dict[str, Any]]
    """Returns the state; called under the locks. That of an ensemble has those of its buffers under `members`."""
    locked: Callable[[], AbstractContextManager[Any]]
    """Takes the locks of all engines."""
    checker: Callable[[], Callable[[dict[str, Any]], None]]
    """Returns what raises `CheckpointError` for a state that a load would not take; called under the locks."""
    format_name: str
    """What the checkpoint is one of."""


def save_buffer(path: str | Path, saving: Saving, *, incremental: bool = False) -> None:
    """Write a checkpoint of one moment; it takes the place of an older one once its state was read back and checked.

    Args:
        path: the directory.
        saving: what is saved.
        incremental: write only what has changed since the save that the directory holds, if it is one of these buffers.

    Raises:
        CheckpointError: if something cannot be saved, or the path holds other things.
        StorageMemoryError: if the disk is too small.
    """
    engines = saving.engines
    with one_at_a_time(engines):
        with saving.locked():
            needed = 0 if incremental else sum(_row_bytes(engine) for engine in engines)
        with CheckpointWriter(path, format_name=saving.format_name, needed_bytes=needed) as writer:
            begun = _Begun(writer, [], [])
            try:
                with saving.locked():
                    check, storages = saving.checker(), [engine.storage for engine in engines]
                    lineages = [Lineage(e.ring, e.ring.written, e.storage, writer.prints) for e in engines]
                    _begin(begun, saving, incremental=incremental)
                for engine, snapshot in zip(engines, begun.snapshots, strict=True):
                    snapshot.write_out(engine.lock)
                for name, file in begun.files:
                    writer.end_rows(name, file)
            finally:
                with saving.locked():
                    for engine in engines:
                        engine.saves.snapshot = None
                for _, file in begun.files:
                    file.close()
            _verify(path, writer, storages, check)
            older = writer.older_save
            writer.finish()
        for engine, lineage in zip(engines, lineages, strict=True):
            engine.saves.remember(writer.save, lineage, older)


def _verify(
    path: str | Path, writer: CheckpointWriter, storages: Sequence[Any], check: Callable[[dict[str, Any]], None]
) -> None:
    """Read the state back and check it as a load does, before the older checkpoint is replaced; rows are not read.

    Raises:
        CheckpointError: if no load would take it.
    """
    reading = Reading("", verify=False, mmap=False)
    try:
        with readable("a replay buffer"):
            check(open_state(writer.preview(), storages, reading, objects=False))
    except CheckpointError as error:
        msg = (
            f"the state of this buffer cannot be saved to {path}, since no load would take it: {error}. An older "
            "checkpoint there stays as it was"
        )
        raise CheckpointError(msg) from error


@contextlib.contextmanager
def one_at_a_time(engines: Sequence[LocalEngine]) -> Iterator[None]:
    """Keep other saves and loads of these buffers out; taken before any engine's lock, in an order that is the same."""
    with contextlib.ExitStack() as stack:
        for engine in sorted(engines, key=id):
            stack.enter_context(engine.saves.lock)
        yield


def _row_bytes(engine: LocalEngine) -> int:
    rows = len(engine.storage)
    return sum(array.row_bytes * rows for array in engine.storage.row_arrays())


class _Begun(NamedTuple):
    writer: CheckpointWriter
    snapshots: list[Snapshot]
    files: list[tuple[str, RowFile]]


def _begin(begun: _Begun, saving: Saving, *, incremental: bool) -> None:
    """Under the locks: write what is small, begin the files of the rows, and take the snapshots."""
    writer = begun.writer
    older = writer.older_save if incremental else None
    known = [None if older is None else engine.saves.lineages.get(older) for engine in saving.engines]
    if all(lineage is not None for lineage in known):
        writer.known = known[0].prints  # type: ignore[union-attr]
    state = converted(saving.state(), [engine.storage for engine in saving.engines])
    members = state.get("members")
    put = [
        _put_rows(begun, engine, lineage, mine, "" if members is None else f"{i}:")
        for i, (engine, lineage, mine) in enumerate(zip(saving.engines, known, members or [state], strict=True))
    ]
    writer.take_state(put[0] if members is None else {**state, "members": put})
    for engine, snapshot in zip(saving.engines, begun.snapshots, strict=True):
        engine.saves.snapshot = snapshot


def _put_rows(
    begun: _Begun, engine: LocalEngine, lineage: Lineage | None, state: dict[str, Any], prefix: str
) -> dict[str, Any]:
    """Begin or write the rows of one buffer, and return its state with their names in their place."""
    writer, storage = begun.writer, dict(state["storage"]["state"])
    columns, items = storage.get("columns"), storage.get("items")
    arrays: list[tuple[RowArray, RowFile]] = []
    if columns is not None:
        done = set()
        changed = _changed(engine, lineage)
        for array in [] if "hooked" in storage else engine.storage.row_arrays():
            done |= {member.name for member in array.members} or {array.name}
            arrays += _begin_array(begun, array, len(engine.storage), changed, prefix)
        for name, column in columns.items():
            if name not in done:
                writer.add_changed(f"{prefix}{name}", column)
        storage["columns"] = list(columns)
    if items is not None:
        _put_items(writer, storage, prefix)
    if "objects" in storage:
        _put_objects(writer, storage, prefix)
    begun.snapshots.append(Snapshot(engine.ring, arrays))
    return {**state, "storage": {**state["storage"], "state": storage}}


def _put_items(writer: CheckpointWriter, storage: dict[str, Any], prefix: str) -> None:
    """Write the objects of a list storage, and put their number in their place."""
    items, allow = storage["items"], bool(storage.get("allow_pickle"))
    writer.add_values(f"{prefix}items", (pack(item, allow_pickle=allow) for item in items))
    storage["items"] = len(items)


def _put_objects(writer: CheckpointWriter, storage: dict[str, Any], prefix: str) -> None:
    """Write the columns of Python objects of a tensor storage, and put their forms in their place."""
    forms, allow = {}, bool(storage.get("allow_pickle"))
    for name, values in storage["objects"].items():
        forms[name], text, ends = pack_column(name, values, allow_pickle=allow)
        writer.add_changed(f"{prefix}{name}.text", text)
        writer.add_changed(f"{prefix}{name}.ends", ends)
    storage["objects"] = forms


def save_state(path: str | Path, state: dict[str, Any], format_name: str) -> None:
    """Write a state that is no buffer's, such as another library's, as a checkpoint.

    Raises:
        CheckpointError: if something cannot be saved, or the path holds other things.
        StorageMemoryError: if the disk is too small.
    """
    storage = dict(state["storage"]["state"])
    columns = storage.get("columns") or {}
    needed = sum(column.nbytes for column in columns.values())
    with CheckpointWriter(path, format_name=format_name, needed_bytes=needed) as writer:
        for name, column in columns.items():
            writer.add_array(name, column)
        if columns:
            storage["columns"] = list(columns)
        if "items" in storage:
            _put_items(writer, storage, "")
        if "objects" in storage:
            _put_objects(writer, storage, "")
        writer.commit({**state, "storage": {**state["storage"], "state": storage}})


def _changed(engine: LocalEngine, lineage: Lineage | None) -> Runs | None:
    """Return the rows that have changed since a save; None if that cannot be told."""
    storage = engine.storage
    if lineage is None or storage.exposed or lineage.ring is not engine.ring or lineage.storage is not storage:
        return None
    return rows_since(engine.ring, lineage.serial, len(storage))


def _begin_array(
    begun: _Begun, array: RowArray, rows: int, changed: Runs | None, prefix: str
) -> list[tuple[RowArray, RowFile]]:
    name, shape = f"{prefix}{array.name}", (rows, *array.data.shape[1:])
    file = begun.writer.begin_rows(name, dtype_name(array.data.dtype), shape, changed)
    columns = [(f"{prefix}{m.name}", m.offset, m.dtype, (rows, *m.shape)) for m in array.members]
    begun.writer.add_columns(name, columns)
    if file is None:
        return []
    begun.files.append((name, file))
    return [(array, file)]
