"""The ring: how many rows a buffer holds, where the next one goes, generations and arrivals of rows."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.counts import RingCounts, make_counts
from ostinato.core.records import Run, View

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.counts import BufferCounts
    from ostinato.core.records import Placement


@final
class Ring:
    """Rows present, cursor, number of rows written, generation and arrival of each slot, for all parts of a buffer.

    The *generation* of a row is its serial number among all rows written in the life of the buffer, from 1; a slot
    without a row has generation 0. Serial numbers never repeat, not even after `clear`, so a generation that differs
    from the one at a draw says that the row has been replaced or edited.

    The *arrival* of a row is its generation when it was written. An edit (`rb[i] = row`) gives the row a new
    generation, so that priorities of its former values are recognized. Its arrival stays, and with it its place in
    every order of rows.

    While rows are written in ring order, both follow from the cursor and use no memory. The first write elsewhere (an
    edit, a max-value writer) allocates int64 `[capacity]`, the first edit as much again for arrivals. A conditional
    update changes fields of a row, which keeps its generation; the first one allocates as much for the time of the last
    change.

    Not thread-safe: the buffer that owns it holds its lock.

    Args:
        capacity: slots.
        device: where generations are computed.
        after: serial number of the last row written before; the first row of this ring gets the next one.
    """

    __slots__ = ("_array", "_arrivals", "_patched", "counts", "device", "lock")

    priorities: Tensor | None = None
    """Memory for priorities that comes with the ring: none."""
    whole: Any = None
    """The slots that hold whole rows, where others below `rows` do not: as rows that may be drawn; None if all do."""
    stale_updates = 0
    """Priorities of other processes that came too late: none in one process."""
    lost = 0
    """Rows whose writer died: none in one process."""
    repairs = 0
    """Repairs after a process died with the lock: none in one process."""

    def __init__(self, capacity: int, device: torch.device | None = None, *, after: int = 0) -> None:
        self.device = device or torch.device("cpu")
        self.lock: Any = RLock()
        """Guards what several processes change in a ring that they share; in one process the buffer has its own."""
        self.counts: RingCounts = make_counts(RingCounts)
        """Rows, cursor and serial numbers, which native calls change, too."""
        self.counts.capacity = capacity
        self.counts.written = self.counts.base = after
        self._array: Tensor | None = None
        self._arrivals: Tensor | None = None
        """For each slot, the generation of its row before edits, as long as `_array`; None if no row was edited."""
        self._patched: Tensor | None = None
        """For each slot, the serial number at the last change that kept the generation; as long as `_array`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the lock."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a lock of its own."""
        self.lock = RLock()
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def capacity(self) -> int:
        """Slots."""
        return self.counts.capacity

    @property
    def rows(self) -> int:
        """Rows present: slots `[0, rows)`."""
        return self.counts.rows

    @property
    def cursor(self) -> int:
        """Slot after the newest row; where rows are in ring order and the ring is full, the slot of the oldest row."""
        return self.counts.cursor

    @property
    def written(self) -> int:
        """Serial number of the last row written."""
        return self.counts.written

    @property
    def nbytes(self) -> int:
        """Bytes held: none as long as rows are written in ring order."""
        return sum(0 if array is None else array.nbytes for array in (*self._arrays, self._patched))

    @property
    def _arrays(self) -> tuple[Tensor, ...]:
        """The arrays that a write changes."""
        return tuple(array for array in (self._array, self._arrivals) if array is not None)

    def arrays_of_all(self) -> tuple[Tensor, ...]:
        """Return the numbers that a write changes, of all slots: generations, and arrivals if there are any.

        Empty in ring order, and while there are not numbers for all slots yet.
        """
        arrays = self._arrays
        return arrays if all(len(array) == self.capacity for array in arrays) else ()

    def record(self, placement: Placement) -> Placement:
        """Record that rows are about to be written to the slots of a placement, which is returned.

        Cost: O(1) in ring order, else O(rows).
        """
        if isinstance(placement, Run) and self._array is None:
            start, rows, capacity, skip = placement
            if (start - skip - self.counts.cursor) % capacity == 0:
                self.counts.written += skip + rows
                self.counts.rows = max(self.counts.rows, min(start + rows, capacity))
                self.counts.cursor = (start + rows) % capacity
                return placement
        slots = placement.slots_written(self.device)
        self._renumber(slots, self.written + 1 + placement.skip, placement.total)
        if slots.shape[0]:
            self.counts.rows = max(self.rows, placement.end)
            self.counts.cursor = self.rows % self.capacity if placement.cursor is None else placement.cursor
        return placement

    def is_current(self) -> bool:
        """Whether the rows recorded last are still to come: no other process has cleared the ring since."""
        return True

    def commit(self, counts: BufferCounts, rows: int) -> None:
        """Count rows that were written and reported."""
        counts.written += rows
        counts.since_empty += rows

    def abandon(self) -> None:
        """Give up rows that were recorded and not committed."""

    def take_back(self, placement: Placement, rows: int, cursor: int) -> bool:
        """Undo `record` for rows that could not be stored: the ring holds `rows` rows again, and the serials are used.

        Serial numbers go on, so that a reader in flight notices slots that were written in part.

        Returns:
            Whether the writer has to follow.
        """
        if self._array is None:
            self.counts.base += placement.total
        self.counts.rows, self.counts.cursor = rows, cursor
        return True

    def record_edit(self, slots: Tensor) -> None:
        """Record that rows are edited in place, int64 `[n]`; they keep their arrivals.

        Of equal slots the last one has the largest generation. What is written to the slot of a deleted row is no row.
        """
        here = self.arrivals(slots) > 0
        if not bool(here.all()):
            self.record_patch(slots[~here])
            slots = slots[here]
        if self._arrivals is None and slots.shape[0]:
            array = self._allocated(self.rows)
            with torch.inference_mode(mode=False):
                self._arrivals = array.clone()
        self._renumber(slots, self.written + 1, int(slots.shape[0]), arrive=False)

    def record_patch(self, slots: Tensor) -> None:
        """Record that fields of rows present are changed, int64 `[n]`; the rows keep their generations.

        Takes one serial number, so that a reader in flight, and a save, notice the change.
        """
        array = self._allocated(self.rows)
        patched = self._patched
        if patched is None or patched.shape[0] < array.shape[0]:
            with torch.inference_mode(mode=False):
                grown = torch.zeros(array.shape, dtype=torch.int64, device=self.device)
            if patched is not None:
                grown[: patched.shape[0]] = patched
            self._patched = patched = grown
        self.counts.written += 1
        patched[slots.to(self.device)] = self.written

    def record_delete(self, slots: Tensor) -> None:
        """Record that rows present are deleted, int64 `[n]`: their generation is 0 until the slots are written.

        Takes one serial number, so that a reader in flight, and a save, notice it.
        """
        self._allocated(self.rows)
        self.counts.written += 1
        for array in self._arrays:
            array[slots.to(self.device)] = 0

    def _renumber(self, slots: Tensor, first: int, total: int, *, arrive: bool = True) -> None:
        """Give `slots` the serial numbers from `first` on, and count `total` rows as written; none without slots.

        Args:
            slots: int64 `[n]`.
            first: serial number of the first one.
            total: rows to count.
            arrive: whether these are new rows; else rows that are edited.
        """
        count = int(slots.shape[0])
        if count == 0:
            return
        array = self._allocated(int(slots.max()) + 1)
        serials = torch.arange(first, first + count, device=self.device)
        # with equal slots torch does not define which write wins; the largest serial number is the last one
        for numbers in self._arrays if arrive else (array,):
            numbers.scatter_reduce_(0, slots.to(self.device), serials, "amax")
        self.counts.written += total

    def view(self) -> View:
        """Return what samplers may see, now, but for episodes."""
        return View(self.rows, self.capacity, self.cursor, self, self.device)

    def generations(self, slots: Tensor) -> Tensor:
        """Return the generations of `slots`, int64 of the same shape; 0 where there is no row. Copy."""
        if self._array is not None:
            known = slots.clamp(max=self._array.shape[0] - 1)
            return torch.where(slots == known, self._array[known], 0)
        age = (self.cursor - 1 - slots).remainder_(self.capacity)
        generations = self.written - age
        return torch.where(generations > self.counts.base, generations, 0)

    def arrivals(self, slots: Tensor) -> Tensor:
        """Return the arrivals of `slots`, int64 of the same shape; 0 where there is no row. Copy."""
        if self._arrivals is None:
            return self.generations(slots)
        known = slots.clamp(max=self._arrivals.shape[0] - 1)
        return torch.where(slots == known, self._arrivals[known], 0)

    def generations_of_rows(self, slots: Tensor) -> Tensor:
        """Return the generations of slots that hold rows; a few microseconds for hundreds of them on the CPU. Copy."""
        if self._array is not None or not slots.is_cpu:
            return self.generations(slots)
        return torch.from_numpy(self._in_ring(slots.numpy()))

    def native_state(self) -> tuple[int, int, int, int, int, int]:
        """Return the numbers from which native code computes generations, valid until the next write.

        The address of the array and its length; or, in ring order, 0, 0, the cursor, and what to add to a slot before
        the cursor and from the cursor on; then the largest serial number that no row present has.
        """
        array = self._array
        if array is not None:
            return array.data_ptr(), array.shape[0], 0, 0, 0, 0
        newest = self.written - self.cursor + 1
        return 0, 0, self.cursor, newest, newest - self.capacity, self.counts.base

    def matches(self, slots: Tensor, generations: Tensor) -> Tensor:
        """Return bool: which of `slots` still hold the rows of these generations.

        Slots must be in `[0, capacity)`; False where there is no row.
        """
        if self._array is not None or not slots.is_cpu:
            return (self.generations(slots) == generations) & (generations > 0)
        # for a slot without a row `_in_ring` gives a number up to `_base`, which no row present has
        given = generations.numpy()
        return torch.from_numpy((self._in_ring(slots.numpy()) == given) & (given > self.counts.base))

    def holds(self, slots: Tensor, generations: Tensor) -> Tensor:
        """Return bool: which of `slots` still hold the rows that had these generations, edited since or not."""
        arrivals = self.arrivals(slots)
        return (arrivals > 0) & (arrivals <= generations)

    def _in_ring(self, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        newest = self.written - self.cursor + 1
        return slots + np.where(slots < self.cursor, newest, newest - self.capacity)

    def changed(self, slots: Tensor, serial: int) -> Tensor:
        """Return bool: which of `slots` were written, patched or emptied after the row with this serial number."""
        return self.modified(slots, serial) | (self.generations(slots) == 0)

    def modified(self, slots: Tensor, serial: int) -> Tensor:
        """Return bool: which of `slots` were written or patched after the row with this serial number."""
        later = self.generations(slots) > serial
        patched = self._patched
        if patched is None:
            return later
        known = slots.clamp(max=patched.shape[0] - 1)
        return later | ((slots == known) & (patched[known] > serial))

    def move(self, cursor: int) -> None:
        """Continue at another slot, in `[0, rows]` and below the capacity. Cost: O(rows)."""
        if cursor != self.cursor:
            self._allocated(self.rows)
            self.counts.cursor = cursor

    def keep(self, rows: int) -> None:
        """Record that `rows` of the rows present were moved to the first slots in the order of their age, others left.

        The rows get new serial numbers, so that slots and generations of earlier draws match no row.
        """
        self.counts.written += 1
        self.counts.base = self.written
        self.counts.written += rows
        self.counts.rows, self.counts.cursor = rows, rows % self.capacity
        self._forget_arrays()

    def clear(self) -> None:
        """Forget all rows. Serial numbers go on, so that rows drawn before are recognized as gone."""
        self.counts.written += 1
        self.counts.base = self.written
        self.counts.rows = self.counts.cursor = 0
        self._forget_arrays()

    def _forget_arrays(self) -> None:
        """Let generations follow from the cursor."""
        self._array = self._arrivals = self._patched = None
        self.counts.in_order = True

    def take_over(self, rows: int, cursor: int) -> None:
        """Start with the `rows` rows that a storage holds already, the newest one just before `cursor`."""
        self.counts.written = self.counts.base + rows
        self.counts.rows, self.counts.cursor = rows, cursor

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the arrays of generations and arrivals, where there are such, are not copied."""
        state = {"written": self.written, "base": self.counts.base, "cursor": self.cursor, "array": self._array}
        return state if self._arrivals is None else {**state, "arrivals": self._arrivals}

    def load_state_dict(self, state: dict[str, Any], rows: int) -> None:
        """Restore what `state_dict` returned, for a storage that holds `rows` rows."""
        array = state["array"]
        counts = self.counts
        counts.written, counts.base, counts.cursor = int(state["written"]), int(state["base"]), int(state["cursor"])
        counts.rows, counts.in_order = rows, array is None
        self._patched = None
        with torch.inference_mode(mode=False):  # changed in place in any mode
            own = slice(self.capacity)  # a larger ring may have had an array with more slots
            self._array = None if array is None else array[own].to(self.device, torch.int64).clone()
            self._arrivals = state["arrivals"][own].to(self.device).clone() if "arrivals" in state else None

    def _allocated(self, needed: int) -> Tensor:
        """Return the generations of at least `needed` slots; the array doubles: a list storage may have no bound."""
        held = 0 if self._array is None else self._array.shape[0]
        if self._array is None or held < needed:
            size = min(self.capacity, max(needed, 2 * held, min(self.written, self.capacity)))
            with torch.inference_mode(mode=False):
                if self._array is None:
                    self._array = self._all_in_ring(size)
                else:
                    slots = torch.arange(size, device=self.device)
                    arrivals = None if self._arrivals is None else self.arrivals(slots)
                    self._array, self._arrivals = self.generations(slots), arrivals
            self.counts.in_order = False
        return self._array

    def _all_in_ring(self, size: int) -> Tensor:
        """Return the generations of the first slots while rows are in ring order, without the passes of `_in_ring`."""
        newest, split = self.written - self.cursor + 1, min(self.cursor, size)
        array = torch.arange(newest, newest + size, device=self.device)
        array[split:] -= self.capacity
        array[self.rows :] = 0
        return array


def no_slots(ring: Ring) -> Tensor:
    """Return the slots of no rows, int64 `[0]`."""
    return torch.empty(0, dtype=torch.int64, device=ring.device)
