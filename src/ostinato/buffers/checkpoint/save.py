"""Saving: small state under the lock, then rows piece by piece while writers continue, or only what has changed."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers.checkpoint.state import check_state, each_storage, open_state, view_states
from ostinato.buffers.observer import Observer
from ostinato.durable import CheckpointWriter, progress
from ostinato.durable.arrays import as_runs, dtype_name, join_runs, one_run, raw_view
from ostinato.durable.checkpoint import PIECE_BYTES, can_write_ahead
from ostinato.errors import CheckpointError, OstinatoError
from ostinato.storages.checkpoint import convert_rows, put_rows, readable, save_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from ostinato.buffers.mixing import EnsembleEngine
    from ostinato.buffers.reader import Reader
    from ostinato.buffers.store import Store
    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring
    from ostinato.durable.arrays import Runs
    from ostinato.durable.checkpoint import Piece, Print, RowFile
    from ostinato.storages import Storage
    from ostinato.storages.table import RowArray


def save_buffer(
    engine: Reader | EnsembleEngine,
    path: str | Path,
    state: Callable[[], dict[str, Any]],
    *,
    incremental: bool = False,
) -> None:
    """Write a checkpoint of one moment; it takes the place of an older one once its state was read back and checked.

    Args:
        engine: of the buffer, or of the ensemble.
        path: the directory.
        state: returns the state; called under the locks. That of an ensemble has those of its buffers under `members`.
        incremental: write only what has changed since the save that the directory holds, if it is one of these buffers.

    Raises:
        CheckpointError: if something cannot be saved, or the path holds other things.
        StorageMemoryError: if the disk is too small.
    """
    engines = engine.saved
    for each in engines if incremental else ():
        each.store.require_private("save with incremental=True, since no process knows all changes")
    with ExitStack() as stack:
        stack.enter_context(engine.saves.lock)  # before any engine's lock
        with engine.lock:
            needed = 0 if incremental else sum(map(_row_bytes, engines))
        writer = stack.enter_context(CheckpointWriter(path, format_name=engine.format_name, needed_bytes=needed))
        snapshots: list[Snapshot] = []
        try:
            with engine.lock:
                taken, storages = engine.checker(), [e.storage for e in engines]
                lineages = [Lineage(e.ring, e.ring.written, e.storage, writer.prints) for e in engines]
                _begin(writer, engines, state(), snapshots, incremental=incremental)
            for each, snapshot in zip(engines, snapshots, strict=True):
                snapshot.write_out(each.lock)
                for _, file in snapshot.arrays:
                    writer.end_rows(file)
        finally:
            with engine.lock:
                for each in engines:
                    each.saves.snapshot = None
                    each.parts_changed()
            for snapshot in snapshots:
                snapshot.close()
        _verify(path, writer, storages, taken)
        older = writer.older_save
        writer.finish()
        for each, lineage in zip(engines, lineages, strict=True):
            each.saves.remember(writer.save, lineage, older)


def _verify(
    path: str | Path, writer: CheckpointWriter, storages: Sequence[Any], check: Callable[[dict[str, Any]], None]
) -> None:
    """Read the state back and check it as a load does, before the older checkpoint is replaced; rows are not read.

    Raises:
        CheckpointError: if no load would take it.
    """
    try:
        with readable("a replay buffer"):
            check(open_state(writer.preview(), storages))
    except CheckpointError as error:
        msg = (
            f"the state of this buffer cannot be saved to {path}, since no load would take it: {error}. An older "
            "checkpoint there stays as it was"
        )
        raise CheckpointError(msg) from error


def checker(engine: Reader) -> Callable[[dict[str, Any]], None]:
    """Return what checks a saved state against the parts as they are now; the caller holds the lock.

    It raises `CheckpointError`, naming what a load into these parts would not take.
    """
    engines, store = [], object.__new__(type(engine.store))
    vars(store).update(vars(engine.store))
    for each in engine.store.readers:
        now: Reader = object.__new__(type(each))
        vars(now).update(vars(each), store=store)
        engines.append(now)

    def check(state: dict[str, Any]) -> None:
        for mine, saved in zip(engines, [state, *view_states(state, len(engines) - 1)], strict=True):
            check_state(mine, saved, saved["batch_size"])
        rows = state["storage"]["state"]
        if "hooked" not in rows:  # what hooks made of the rows is theirs to read
            engines[0].storage.check_state(rows)

    return check


def _arrays(engine: Reader) -> Sequence[RowArray]:
    """Return the memory of rows that is copied piece by piece."""
    dense = engine.storage.dense
    return () if dense is None else dense.row_arrays()


def _row_bytes(engine: Reader) -> int:
    rows = len(engine.storage)
    return sum(array.row_bytes * rows for array in _arrays(engine))


def _begin(
    writer: CheckpointWriter,
    engines: Sequence[Reader],
    state: dict[str, Any],
    snapshots: list[Snapshot],
    *,
    incremental: bool,
) -> None:
    """Under the locks: write what is small, begin the files of the rows, and add the snapshot of each buffer."""
    older = writer.older_save if incremental else None
    known = [None if older is None else engine.saves.lineages.get(older) for engine in engines]
    patches = all(lineage is not None for lineage in known)
    if patches:
        writer.known = known[0].prints  # type: ignore[union-attr]
    state = each_storage(state, [e.storage for e in engines], lambda saved, storage, _: convert_rows(saved, storage))
    if not patches:
        progress.begin(tensor_bytes(state))
    members, put = state.get("members"), []
    for i, (engine, lineage, mine) in enumerate(zip(engines, known, members or [state], strict=True)):
        snapshots.append(Snapshot(engine))
        put.append(_put_rows(writer, engine, lineage, mine, snapshots[-1].arrays, "" if members is None else f"{i}:"))
    writer.take_state(put[0] if members is None else {**state, "members": put})
    if patches:
        progress.begin(sum(file.places.nbytes for snapshot in snapshots for _, file in snapshot.arrays))
    for engine, snapshot in zip(engines, snapshots, strict=True):
        engine.saves.snapshot = snapshot
        engine.parts_changed()  # writes are told to the snapshot


def tensor_bytes(state: Any) -> int:
    """Return the bytes of the tensors of a state, without Python objects."""
    nbytes, waiting = 0, [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            nbytes += value.nbytes
        elif isinstance(value, dict):
            for key, item in value.items():
                if key not in {"items", "objects"}:
                    waiting.append(item)
        elif isinstance(value, (list, tuple)):
            waiting += value
    return nbytes


def _put_rows(
    writer: CheckpointWriter,
    engine: Reader,
    lineage: Lineage | None,
    state: dict[str, Any],
    arrays: list[tuple[RowArray, RowFile]],
    prefix: str,
) -> dict[str, Any]:
    """Write the rows of one buffer, and return its state with their names in their place.

    Files of `arrays` are only begun.
    """
    saved, rows, done = state["storage"]["state"], len(engine.storage), set()
    if saved.get("columns") is not None and "hooked" not in saved:
        changed = _changed(engine, lineage)
        for array in _arrays(engine):
            shape = (rows, *array.data.shape[1:])
            columns = [(f"{prefix}{m.name}", m.offset, m.dtype, (rows, *m.shape)) for m in array.members]
            file = writer.begin_rows(f"{prefix}{array.name}", dtype_name(array.data.dtype), shape, changed, columns)
            arrays += [] if file is None else [(array, file)]
            done |= {member.name for member in array.members} or {array.name}
    return _with_rows(state, put_rows(writer, saved, prefix, done=done, compare=True))


def _with_rows(state: dict[str, Any], rows: dict[str, Any] | None) -> dict[str, Any]:
    """Return the state of a buffer with another state of its storage."""
    return {**state, "storage": {**state["storage"], "state": rows}}


def save_state(path: str | Path, state: dict[str, Any], format_name: str) -> None:
    """Write a state that is no buffer's, such as another library's, as a checkpoint.

    Raises:
        CheckpointError: if something cannot be saved, or the path holds other things.
        StorageMemoryError: if the disk is too small.
    """
    save_rows(path, format_name, [state["storage"]["state"]], lambda put: _with_rows(state, put[0]))


def _changed(engine: Reader, lineage: Lineage | None) -> Runs | None:
    """Return the rows that have changed since a save; None if that cannot be told."""
    storage = engine.storage
    if lineage is None or storage.exposed or lineage.ring is not engine.ring or lineage.storage is not storage:
        return None
    return rows_since(engine.ring, lineage.serial, len(storage))


_BLOCK_ROWS = 2**20
_MOST_LINEAGES = 8
_ROOMS = 4
"""Pieces that are filled while others are on their way to the file."""


class Lineage(NamedTuple):
    """What a buffer knows of a save that it goes on from."""

    ring: Ring
    serial: int
    """Number of the last write before it."""
    storage: Storage
    prints: dict[str, Print]
    """What its other arrays looked like."""


@final
class Saves:
    """Of one buffer: the save in progress, and the saves that an incremental one can go on from."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """One save or load at a time; taken before the engine's lock."""
        self.snapshot: Snapshot | None = None
        self.lineages: dict[str, Lineage] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy without saves."""
        return Saves, ()

    def loaded(self, save: str | None, ring: Ring, storage: Storage) -> None:
        """Let incremental saves go on from the save that was just loaded."""
        self.remember(save or "", Lineage(ring, ring.written, storage, {}), None)

    def remember(self, save: str, lineage: Lineage, instead: str | None) -> None:
        """Remember a save, in the place of the one that it was written over."""
        self.lineages.pop(instead or "", None)
        self.lineages[save] = lineage
        while len(self.lineages) > _MOST_LINEAGES:
            self.lineages.pop(next(iter(self.lineages)))


def rows_since(ring: Ring, serial: int, rows: int) -> Runs:
    """Return which of the first `rows` rows were written after the write number `serial`.

    Also rows that have left since, or before: they may have been written, too. Cost: O(1) while rows are written in
    ring order, else O(rows).
    """
    if ring.nbytes == 0:
        fresh = min(ring.written - serial, ring.capacity)
        first = (ring.cursor - fresh) % ring.capacity if fresh > 0 else 0
        head = one_run(first, max(0, min(fresh, ring.capacity - first)))
        tail = one_run(0, max(0, first + fresh - ring.capacity) if fresh > 0 else 0)
        runs = join_runs(head, tail)
        runs = runs[runs[:, 0] < rows]
        return np.stack([runs[:, 0], np.minimum(runs[:, 1], rows - runs[:, 0])], axis=1)
    found = []
    for start in range(0, rows, _BLOCK_ROWS):
        slots = torch.arange(start, min(rows, start + _BLOCK_ROWS), device=ring.device)
        found.append(as_runs(slots[ring.changed(slots, serial)].cpu().numpy()))
    return join_runs(*found)


@final
class Snapshot(Observer):
    """The rows of a buffer at the moment when this was made, under its lock."""

    def __init__(self, engine: Reader) -> None:
        self.arrays: list[tuple[RowArray, RowFile]] = []
        """Where rows lie, and the files that they go to."""
        self._ring, self._rows = engine.ring, len(engine.storage)
        self._replaced = np.zeros(-(-self._rows // 8), dtype=np.uint8)
        """A bit for each row that was replaced since: what was there lies in the files."""
        self._error: Exception | None = None

    def before_write(self, store: Store, placement: Placement) -> None:
        """Keep the rows that a placement replaces."""
        self.keep(store.ring, placement.slots_written(store.ring.device))

    def before_change(self, store: Store, slots: Tensor, data: Any) -> None:  # noqa: ARG002
        """Keep the rows that an edit changes."""
        self.keep(store.ring, slots)

    def before_move(self, store: Store) -> None:
        """Keep all rows."""
        self.keep(store.ring, torch.arange(store.ring.rows, device=store.ring.device))

    def keep(self, ring: Ring, slots: Tensor) -> None:
        """Put rows down that are about to be replaced. A disk that is full ends the save, not the write."""
        if ring is not self._ring or self._error is not None:
            return
        try:
            here = torch.unique(slots).cpu().numpy()
            here = here[here < self._rows]
            here = here[~self._was_replaced(here)]
            for array, file in self.arrays:
                _put_ahead(array, file, here)
            np.bitwise_or.at(self._replaced, here >> 3, (1 << (here & 7)).astype(np.uint8))
        except (OSError, OstinatoError) as error:
            self._error = error

    def _was_replaced(self, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray[Any, Any] = (self._replaced[rows >> 3] >> (rows & 7)) & 1 == 1
        return found

    def close(self) -> None:
        """Close the files."""
        for _, file in self.arrays:
            file.close()

    def write_out(self, lock: Any) -> None:
        """Write all rows, taking the engine's lock for one piece (at most 2 MiB, or one row) at a time.

        Raises:
            StorageMemoryError: if the disk is full.
        """
        with nullcontext() if can_write_ahead() else lock, ThreadPoolExecutor(1) as writer:
            for array, file in self.arrays:
                rows = min(max(1, PIECE_BYTES // max(1, file.row_bytes)), int(file.places.runs[:, 1].sum()))
                count = _ROOMS if rows * file.row_bytes <= PIECE_BYTES else 1
                rooms = torch.zeros((count, rows, file.row_bytes), dtype=torch.uint8, device="cpu")
                under_way: deque[tuple[Future[None], int]] = deque()
                for number, piece in enumerate(file.pieces()):
                    if len(under_way) == len(rooms):
                        _wait(*under_way.popleft())
                    room = rooms[number % len(rooms), : len(piece.rows)]
                    self._take(array, file, piece, room, lock)
                    under_way.append((writer.submit(file.put, piece.offset, raw_view(room)), room.nbytes))
                for last in under_way:
                    _wait(*last)

    def _take(self, array: RowArray, file: RowFile, piece: Piece, room: Tensor, lock: Any) -> None:
        with lock:
            if self._error is not None:
                raise self._error
            array.copy(room, piece.where)
            replaced = np.flatnonzero(self._was_replaced(piece.rows))
            file.done = piece.offset + len(piece.rows) * file.row_bytes
        for first, count in as_runs(replaced).tolist():
            file.read_back(piece.offset + first * file.row_bytes, raw_view(room[first : first + count]))


def _wait(written: Future[None], nbytes: int) -> None:
    """Wait until a piece is in the file, and count it in the thread of the call."""
    written.result()
    progress.count(nbytes)


def _put_ahead(array: RowArray, file: RowFile, slots: np.ndarray) -> None:
    places = file.places.offsets(slots, file.row_bytes)
    waiting = places >= file.done
    slots, places = slots[waiting], places[waiting]
    most = max(1, PIECE_BYTES // max(1, file.row_bytes))
    for start in range(0, len(slots), most):
        part, at = torch.from_numpy(slots[start : start + most]), places[start : start + most]
        room = torch.empty((len(part), file.row_bytes), dtype=torch.uint8, device="cpu")
        array.copy(room, part)
        cuts = [0, *(np.flatnonzero(np.diff(at) != file.row_bytes) + 1).tolist(), len(at)]
        for first, last in pairwise(cuts):
            file.put_ahead(int(at[first]), raw_view(room[first:last]))
