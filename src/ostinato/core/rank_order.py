"""Rows in the order of a key, of equal keys the oldest first: for stacks, priority queues, and what leaves first."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np

from ostinato.core.eligible import ANY, DELETED, Eligible, each_once, grown

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

ReadKeys: TypeAlias = "Callable[[NDArray[np.int64]], tuple[NDArray[np.float64], NDArray[np.int64]]]"
"""Returns the keys and the generations of rows, by their slots; of a generation 0 there is no row."""
_Entry: TypeAlias = tuple[float, int, int]
"""Key, generation and slot of a row."""
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "mean": lambda x: x.mean(-1),
    "median": lambda x: x.median(-1).values,
    "sum": lambda x: x.sum(-1),
}
"""How several numbers of a row, by which it is ranked, become one; of an even number the median is the lower one."""
_FEW = 1024
"""Up to this number of changed rows the rows are not sorted again."""


@final
class RankOrder(Eligible):
    """The rows that are neither deleted nor used up, by ascending key, of equal keys by ascending generation.

    Most rows are in one sorted array. Rows that were added or changed since it was made are in a heap, and the rows are
    sorted again once these are a quarter of all: O(log rows) for each change over time, with one pass of O(rows log
    rows) for each `rows / 4` changes. Keys are read when they are needed. Nothing of this is state to be saved: the
    order follows from keys and generations.

    Memory: 26 bytes for each slot, and about 100 for each changed row.

    Args:
        rising: whether rows that are added or changed come after all others, as by age: they are then only looked at
            once no others are left.
    """

    def __init__(self, *, rising: bool = False) -> None:
        super().__init__(ranked=False)
        self._rising = rising
        self._keys: NDArray[np.float64] = np.zeros(0, np.float64)
        self._ages: NDArray[np.int64] = np.zeros(0, np.int64)
        self._in_order: NDArray[np.bool_] = np.zeros(0, np.bool_)  # rows that are found in the sorted array
        self._sorted: NDArray[np.int64] = np.zeros(0, np.int64)
        self._at = 0  # entries of the sorted array before this one are outdated
        self._heap: list[_Entry] = []
        self._changed: list[NDArray[np.int64]] = []  # rows whose keys are to be read
        self._changes = 0

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these rows are in the order, bool `[n]`; also of slots that held none."""
        known = slots < self._reasons.size
        return known & (self._reasons[np.where(known, slots, 0)] == 0) if self._reasons.size else known

    def include(self, slots: NDArray[np.int64], reason: int = ANY) -> None:
        """Add rows, or read the keys of rows again that have changed. Cost: O(n)."""
        if not slots.size:
            return
        slots = each_once(slots)
        super().include(slots, reason)
        self._in_order[slots] = False
        self._changed.append(slots)
        self._changes += slots.size
        if self._changes > 2 * self.rows + _FEW:
            self._changed = [each_once(np.concatenate(self._changed))]
            self._changes = self._changed[0].size

    def exclude(self, slots: NDArray[np.int64], reason: int) -> None:
        """Remove rows; slots that never were in the order are left out."""
        slots = each_once(slots[slots < self._reasons.size])
        super().exclude(slots, reason)
        self._in_order[slots] = False

    def first(self, count: int, read: ReadKeys) -> NDArray[np.int64]:
        """Return the first rows, at most `count`; they stay in the order. Cost: O(count log rows).

        Args:
            count: rows.
            read: returns keys and generations of the rows that have changed.
        """
        if self._rising:
            found = self._from_sorted(count)
            if found.size == count or not self._changed:
                return found
        self._read(read)
        found = self._from_sorted(count)
        last = self._entry(int(found[-1])) if found.size == count and count else None
        fresh: list[_Entry] = []
        while self._heap and len(fresh) < count and (last is None or self._heap[0] < last):
            entry = heappop(self._heap)
            if (not fresh or entry != fresh[-1]) and self._is_current(entry):
                fresh.append(entry)
        for entry in fresh:
            heappush(self._heap, entry)
        if not fresh:
            return found
        both = np.concatenate((np.array([entry[2] for entry in fresh], np.int64), found))
        return both[np.lexsort((self._ages[both], self._keys[both]))[:count]]

    def ranks(self, slots: NDArray[np.int64]) -> list[tuple[float, int]]:
        """Return key and generation of rows that `first` returned."""
        return list(zip(self._keys[slots].tolist(), self._ages[slots].tolist(), strict=True))

    def clear(self) -> None:
        """Remove all rows."""
        self.__init__(rising=self._rising)

    def _read(self, read: ReadKeys) -> None:
        """Read the keys of the rows that have changed."""
        if not self._changed:
            return
        slots = self._changed[0] if len(self._changed) == 1 else each_once(np.concatenate(self._changed))
        self._changed, self._changes = [], 0
        slots = slots[self._reasons[slots] == 0]
        keys, ages = read(slots)
        if not ages.all():  # rows that were deleted
            self.exclude(slots[ages == 0], DELETED)
            slots, keys, ages = slots[ages > 0], keys[ages > 0], ages[ages > 0]
        self._keys[slots], self._ages[slots] = keys, ages
        if self._rising or len(self._heap) + slots.size > max(_FEW, self.rows // 4):
            self._sort()
        else:
            for entry in zip(keys.tolist(), ages.tolist(), slots.tolist(), strict=True):
                heappush(self._heap, entry)

    def _sort(self) -> None:
        rows = self.order().numpy()
        self._sorted = rows[np.lexsort((self._ages[rows], self._keys[rows]))]
        self._in_order[rows] = True
        self._at, self._heap = 0, []

    def _from_sorted(self, count: int) -> NDArray[np.int64]:
        """Return the first rows that are still in the sorted array, and drop the outdated entries before them."""
        start, stop, step = self._at, self._at, max(count, 16)
        kept: list[NDArray[np.int64]] = []
        found = 0
        while found < count and stop < self._sorted.size:
            piece = self._sorted[stop : stop + step]
            kept.append(piece[self._in_order[piece]])
            found, stop, step = found + kept[-1].size, stop + piece.size, 2 * step
        if not found:
            self._at = stop
            return np.zeros(0, np.int64)
        rows = np.concatenate(kept) if len(kept) > 1 else kept[0]
        if found < stop - start:
            self._sorted[stop - found : stop] = rows
        self._at = stop - found
        return rows[:count].copy()

    def _entry(self, slot: int) -> _Entry:
        return float(self._keys[slot]), int(self._ages[slot]), slot

    def _is_current(self, entry: _Entry) -> bool:
        slot = entry[2]
        return bool(self._reasons[slot] == 0 and not self._in_order[slot]) and self._entry(slot) == entry

    def _reserve(self, rows: int) -> None:
        super()._reserve(rows)
        self._keys, self._ages = grown(self._keys, rows), grown(self._ages, rows)
        self._in_order = grown(self._in_order, rows)
