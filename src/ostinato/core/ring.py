"""Stamps: the serial number of the write that filled each slot. One integer answers who is stale, torn or old."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.records import Run

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.records import Placement

__all__ = ["Stamps"]


@final
class Stamps:
    """The serial number of the row in each slot, 0 where nothing was written.

    Serial numbers count rows written in the life of the buffer, from 1; they never repeat, not even after
    `clear`. While rows are written in ring order, a slot's stamp follows from the cursor alone, and no memory
    is spent; the first write elsewhere (`rb[i] = row`, a max-value writer) lays out int64 `[capacity]`.

    Not thread-safe: the buffer that owns it holds its lock.
    """

    __slots__ = ("_array", "_base", "_cursor", "capacity", "device", "written")

    lost = 0
    """Rows whose writer died: none in one process."""
    repairs = 0
    """Deaths with the lock of all: none in one process."""

    def __init__(self, capacity: int, device: torch.device | None = None, *, after: int = 0) -> None:
        self.capacity = capacity
        self.device = device or torch.device("cpu")
        self._array: Tensor | None = None
        self._base = after
        self._cursor = 0
        self.written = after

    @property
    def cursor(self) -> int:
        """Slot after the newest row written in ring order."""
        return self._cursor

    @property
    def nbytes(self) -> int:
        """Bytes held: none as long as rows are written in ring order."""
        return 0 if self._array is None else self._array.nbytes

    def note(self, placement: Placement) -> None:
        """Give fresh serials to the slots of a placement. Cost: O(1) in ring order, else O(rows)."""
        first = self.written + 1
        if isinstance(placement, Run):
            if self._array is None and (placement.start - placement.skip - self._cursor) % self.capacity == 0:
                self.written += placement.total
                self._cursor = (placement.start + placement.rows) % self.capacity
                return
            slots, first = placement.slots(self.device), first + placement.skip
        else:
            slots = placement.slots
        self.touch(slots, first, placement.total)

    def touch(self, slots: Tensor, first: int | None = None, total: int | None = None) -> None:
        """Give fresh serials to arbitrary slots (an edit in place); the last duplicate wins."""
        count = int(slots.shape[0])
        if count == 0:
            return
        array = self._materialise(int(slots.max()) + 1)
        slots = slots.to(self.device)
        first = self.written + 1 if first is None else first
        serials = torch.arange(first, first + count, device=self.device)
        self.written += count if total is None else total
        # put in order: torch leaves the winner among duplicates open, the largest serial is the last one
        array.scatter_reduce_(0, slots, serials, "amax")

    def of(self, slots: Tensor) -> Tensor:
        """Return the stamps of `slots`, int64 of the same shape. Copy."""
        if self._array is not None:
            known = slots.clamp(max=self._array.shape[0] - 1)
            return torch.where(slots == known, self._array[known], 0)
        age = (self._cursor - 1 - slots).remainder_(self.capacity)
        stamps = self.written - age
        return torch.where(stamps > self._base, stamps, 0)

    def of_present(self, slots: Tensor) -> Tensor:
        """Return the stamps of slots that hold rows; a few microseconds for some hundred on the CPU. Copy."""
        if self._array is not None or not slots.is_cpu:
            return self.of(slots)
        return torch.from_numpy(self._in_ring(slots.numpy()))

    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Return what compiled code computes stamps from, good until the next write.

        The address of the array and its length; or, in ring order, 0, 0, the cursor, and what to add to a slot before
        it and from it on; then the largest stamp that no row has.
        """
        array = self._array
        if array is not None:
            return array.data_ptr(), array.shape[0], 0, 0, 0, 0
        newest = self.written - self._cursor + 1
        return 0, 0, self._cursor, newest, newest - self.capacity, self._base

    def match(self, slots: Tensor, stamps: Tensor) -> Tensor:
        """Return bool: which of `slots` still hold the rows whose stamps these are.

        Slots must be in `[0, capacity)`; False where nothing was written.
        """
        if self._array is not None or not slots.is_cpu:
            return (self.of(slots) == stamps) & (stamps > 0)
        # of an unwritten slot this gives a number up to `base`, which no row present has
        given = stamps.numpy()
        return torch.from_numpy((self._in_ring(slots.numpy()) == given) & (given > self._base))

    def _in_ring(self, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        newest = self.written - self._cursor + 1
        return slots + np.where(slots < self._cursor, newest, newest - self.capacity)

    def newer(self, slots: Tensor, serial: int) -> Tensor:
        """Return bool: which of `slots` were written, or emptied, after the write number `serial`."""
        stamps = self.of(slots)
        return (stamps > serial) | (stamps == 0)

    def clear(self) -> None:
        """Forget all rows; serials go on, so that rows drawn before are recognised as gone."""
        self.written += 1
        self._base = self.written
        self._cursor = 0
        self._array = None

    def resume(self, rows: int, cursor: int) -> None:
        """Take over `rows` rows that a storage brought along, the newest just before `cursor`."""
        self.written = self._base + rows
        self._cursor = cursor

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the array, where there is one, is not copied."""
        return {"written": self.written, "base": self._base, "cursor": self._cursor, "array": self._array}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        array = state["array"]
        self.written, self._base, self._cursor = int(state["written"]), int(state["base"]), int(state["cursor"])
        with torch.inference_mode(mode=False):  # changed in place in any mode
            self._array = None if array is None else array.to(self.device, torch.int64).clone()

    def _materialise(self, needed: int) -> Tensor:
        """Lay out stamps for at least `needed` slots; the array doubles, since a list storage may have no bound."""
        held = 0 if self._array is None else self._array.shape[0]
        if self._array is None or held < needed:
            size = min(self.capacity, max(needed, 2 * held, min(self.written, self.capacity)))
            with torch.inference_mode(mode=False):
                self._array = self.of(torch.arange(size, device=self.device))
        return self._array
