"""A consistent cut: the rows of a buffer as they were at one moment, written piece by piece while writers go on.

A writer that is about to replace a row which the save has not come to yet first puts the old one down in its place in
the file. Stamps say which rows were replaced since the cut, so nothing is remembered besides, whatever the size.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato.core.draw import Run
from ostinato.durable.dtypes import raw_view
from ostinato.durable.rowfile import PIECE_BYTES, can_write_ahead
from ostinato.durable.runs import as_runs, contains, join_runs, one_run
from ostinato.errors import OstinatoError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from ostinato.core.draw import Placement
    from ostinato.core.stamps import Stamps
    from ostinato.durable.patching import Print
    from ostinato.durable.rowfile import Piece, RowFile
    from ostinato.durable.runs import Runs
    from ostinato.storages import Storage
    from ostinato.storages.rowarrays import RowArray

__all__ = ["Cut", "Lineage", "Saves", "rows_since"]

_BLOCK_ROWS = 2**20
_MOST_LINEAGES = 8
_ROOMS = 4
"""Pieces that are filled while others are on their way to the file."""


class Lineage(NamedTuple):
    """What a buffer knows of a save that it goes on from."""

    stamps: Stamps
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
        self.cut: Cut | None = None
        self.lineages: dict[str, Lineage] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Give nothing: a copy begins anew."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew."""
        self.__init__()

    def before(self, stamps: Stamps, where: Placement | Tensor) -> None:
        """Hear of slots that are about to be written; before they get their stamps, under the engine's lock."""
        if self.cut is not None:
            slots = where if isinstance(where, torch.Tensor) else _slots(where, stamps.device)
            self.cut.keep(stamps, slots)

    def before_clear(self, stamps: Stamps, rows: int) -> None:
        """Hear that stamps are about to be forgotten, under the engine's lock."""
        if self.cut is not None:
            self.cut.note_replaced(stamps, rows)

    def remember(self, save: str, lineage: Lineage, instead: str | None) -> None:
        """Remember a save, in the place of the one that it was written over."""
        self.lineages.pop(instead or "", None)
        self.lineages[save] = lineage
        while len(self.lineages) > _MOST_LINEAGES:
            self.lineages.pop(next(iter(self.lineages)))


def _slots(placement: Placement, device: torch.device) -> Tensor:
    return placement.slots(device) if isinstance(placement, Run) else placement.slots


def rows_since(stamps: Stamps, serial: int, rows: int) -> Runs:
    """Return which of the first `rows` rows were written after the write number `serial`.

    Cost: O(1) while rows are written in ring order, else O(rows).
    """
    if stamps.nbytes == 0:
        fresh = min(stamps.written - serial, stamps.capacity)
        first = (stamps.cursor - fresh) % stamps.capacity if fresh > 0 else 0
        head = one_run(first, max(0, min(fresh, stamps.capacity - first)))
        tail = one_run(0, max(0, first + fresh - stamps.capacity) if fresh > 0 else 0)
        runs = join_runs(head, tail)
        runs = runs[runs[:, 0] < rows]
        return np.stack([runs[:, 0], np.minimum(runs[:, 1], rows - runs[:, 0])], axis=1)
    found = []
    for start in range(0, rows, _BLOCK_ROWS):
        slots = torch.arange(start, min(rows, start + _BLOCK_ROWS), device=stamps.device)
        found.append(as_runs(slots[stamps.of(slots) > serial].cpu().numpy()))
    return join_runs(*found)


@final
class Cut:
    """The rows at the moment when this was made, under the engine's lock.

    Args:
        stamps: the buffer's.
        arrays: where rows lie, and the files that they go to.
    """

    def __init__(self, stamps: Stamps, arrays: list[tuple[RowArray, RowFile]]) -> None:
        self._stamps = stamps
        self._serial = stamps.written
        self._arrays = arrays
        self._earlier: Runs = one_run(0, 0)
        """Rows replaced since the cut whose stamps were forgotten since."""
        self._error: Exception | None = None

    def keep(self, stamps: Stamps, slots: Tensor) -> None:
        """Put rows down that are about to be replaced. A disk that is full ends the save, not the write."""
        if stamps is not self._stamps or self._error is not None:
            return
        try:
            here = torch.unique(slots).cpu().numpy()
            here = here[~self._replaced(here)]
            for array, file in self._arrays:
                _put_ahead(array, file, here)
        except (OSError, OstinatoError) as error:
            self._error = error

    def note_replaced(self, stamps: Stamps, rows: int) -> None:
        """Remember which rows were replaced since the cut, before their stamps are forgotten."""
        if stamps is self._stamps:
            self._earlier = join_runs(self._earlier, rows_since(stamps, self._serial, rows))

    def write_out(self, lock: Any) -> None:
        """Write all rows, taking the engine's lock for one piece (at most 2 MiB, or one row) at a time.

        Raises:
            StorageMemoryError: if the disk is full.
        """
        with nullcontext() if can_write_ahead() else lock, ThreadPoolExecutor(1) as writer:
            for array, file in self._arrays:
                rows = min(max(1, PIECE_BYTES // max(1, file.row_bytes)), int(file.runs[:, 1].sum()))
                count = _ROOMS if rows * file.row_bytes <= PIECE_BYTES else 1
                rooms = torch.zeros((count, rows, file.row_bytes), dtype=torch.uint8, device="cpu")
                under_way: deque[Future[None]] = deque()
                for number, piece in enumerate(file.pieces()):
                    if len(under_way) == len(rooms):
                        under_way.popleft().result()
                    room = rooms[number % len(rooms), : len(piece.rows)]
                    self._take(array, file, piece, room, lock)
                    under_way.append(writer.submit(file.append, piece.offset, raw_view(room)))
                for last in under_way:
                    last.result()

    def _take(self, array: RowArray, file: RowFile, piece: Piece, room: Tensor, lock: Any) -> None:
        n = len(piece.rows)
        with lock:
            if self._error is not None:
                raise self._error
            where = torch.from_numpy(piece.rows) if piece.first is None else slice(piece.first, piece.first + n)
            array.copy(room, where)
            same = self._stamps.written == self._serial
            replaced = piece.rows[:0] if same else np.flatnonzero(self._replaced(piece.rows))
            file.done = piece.offset + n * file.row_bytes
        for first, count in as_runs(replaced).tolist():
            file.read_back(piece.offset + first * file.row_bytes, raw_view(room[first : first + count]))

    def _replaced(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows (ascending) were replaced since the cut, bool: what was there lies in the file."""
        slots = torch.from_numpy(rows).to(self._stamps.device)
        replaced: np.ndarray[Any, Any] = (self._stamps.of(slots) > self._serial).cpu().numpy()
        both: np.ndarray[Any, Any] = replaced | contains(self._earlier, rows)
        return both


def _put_ahead(array: RowArray, file: RowFile, slots: np.ndarray) -> None:
    places = file.places(slots)
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
