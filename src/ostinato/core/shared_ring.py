"""SharedRing: generations, counts and reservations of slots in shared memory, by the native extension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato._backend import backend
from ostinato.core.records import Run

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SharedRing"]

_DRAWN, _STALE_UPDATES, _REDONE, _PROCESSES, _LOST, _ROWS_WRITTEN, _SINCE_EMPTY, _REPAIRS = range(8)


@final
class SharedRing:
    """Slots `[0, capacity)` that several processes write and read; `Ring` does the same in one process.

    The generation of a row is its serial number; it is 0 for a slot without a row, and negative while the row is being
    written, or if its writer died. Serial numbers are assigned when slots are reserved, in this order.

    `lock` is a reentrant lock between processes (`with ring.lock:`). If a process dies with the lock, the next process
    that acquires it repairs the ring first. Every wait ends after 30 s with an error that names what was waited for.

    Args:
        memory: uint8, at least `bytes_for(capacity, ranked=ranked)`; zeros, or an existing ring.
        capacity: slots.
        ranked: whether there are priorities.
        fresh: whether to initialize a new ring.
    """

    device = torch.device("cpu")

    def __init__(self, memory: Tensor, capacity: int, *, ranked: bool, fresh: bool) -> None:
        self.capacity = capacity
        self.nbytes = int(memory.nbytes)
        self._memory = memory
        self.lock: Any = backend.native.SharedRing(memory.data_ptr(), capacity, ranked, fresh)  # type: ignore[union-attr]
        self._generations = self._words(self.lock.generations, torch.int64)
        self.priorities = (
            self._words(self.lock.priorities, torch.float64)
            if ranked
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        """Priorities of the slots, float64 `[capacity]`; empty without priorities. View, guarded by the lock."""
        self.tree = self.lock.tree
        """The native tree of the priorities, guarded by the lock."""

    @staticmethod
    def bytes_for(capacity: int, *, ranked: bool) -> int:
        """Return the bytes of a ring."""
        return int(backend.native.SharedRing.bytes_for(capacity, ranked))  # type: ignore[union-attr]

    def _words(self, address: int, dtype: torch.dtype) -> Tensor:
        start = address - self._memory.data_ptr()
        return self._memory[start : start + 8 * self.capacity].view(dtype)

    # -- counts --------------------------------------------------------------------------------------------------------

    def now(self) -> tuple[int, int, int, int]:
        """Return the counts that a draw needs.

        Returns:
            The serial number of the last write; the number of slots below `rows` without a complete row; `rows`, the
            number of slots that were ever reserved; and the number of complete rows.
        """
        moment: tuple[int, int, int, int] = self.lock.state()
        return moment

    @property
    def written(self) -> int:
        """Serial number of the last row for which a slot was reserved."""
        return self.now()[0]

    @property
    def rows(self) -> int:
        """Number of slots that were ever reserved."""
        return self.now()[2]

    @property
    def committed(self) -> int:
        """Number of complete rows."""
        return self.now()[3]

    @property
    def cursor(self) -> int:
        """Slot of the next row, unless another process is still writing to it."""
        return int(self.lock.cursor)

    @property
    def largest(self) -> float:
        """Largest priority ever set."""
        return float(self.lock.max_priority)

    @largest.setter
    def largest(self, value: float) -> None:
        self.lock.max_priority = value

    @property
    def drawn(self) -> int:
        """Rows sampled by all processes."""
        return int(self.lock.count(_DRAWN))

    @property
    def stale_updates(self) -> int:
        """Priority updates of all processes for rows that were already replaced."""
        return int(self.lock.count(_STALE_UPDATES))

    @property
    def redone(self) -> int:
        """Batches that all processes copied again because a row was overwritten."""
        return int(self.lock.count(_REDONE))

    @property
    def lost(self) -> int:
        """Rows that were not completed because their writer died, as far as known."""
        return int(self.lock.count(_LOST))

    @property
    def repairs(self) -> int:
        """Number of repairs after a process died with the lock."""
        return int(self.lock.count(_REPAIRS))

    @property
    def rows_written(self) -> int:
        """Rows written by all processes."""
        return int(self.lock.count(_ROWS_WRITTEN))

    @property
    def rows_since_empty(self) -> int:
        """Rows written by all processes since the buffer was emptied."""
        return int(self.lock.count(_SINCE_EMPTY))

    def number_process(self) -> int:
        """Return a number, from 1, that no other call in any process returns."""
        return int(self.lock.add(_PROCESSES, 1)) + 1

    def note_drawn(self, rows: int) -> None:
        """Count sampled rows."""
        self.lock.add(_DRAWN, rows)

    def note_stale(self, updates: int) -> None:
        """Count priority updates for rows that were already replaced."""
        self.lock.add(_STALE_UPDATES, updates)

    def note_redone(self) -> None:
        """Count a batch that was copied again."""
        self.lock.add(_REDONE, 1)

    # -- writing -------------------------------------------------------------------------------------------------------

    def reserve(self, rows: int) -> tuple[int, Run]:
        """Reserve slots for a batch; the same thread must `commit` or `abandon` them.

        These are the next slots of the ring, except for slots to which a live writer is still copying.

        Returns:
            The serial number of the first row that is kept, and the slots.

        Raises:
            UsageError: if live writers block all slots for 30 s.
        """
        kept = min(rows, self.capacity)
        serial, start = self.lock.reserve(kept, rows)
        return serial, Run(start, kept, self.capacity, rows - kept)

    def holds(self, serial: int) -> bool:
        """Whether the reservation is still valid: False if the ring was emptied meanwhile. Requires the lock."""
        return bool(self.lock.is_current(serial))

    def commit(self, serial: int) -> None:
        """Make the rows readable after they were written completely."""
        self.lock.commit(serial)

    def abandon(self, serial: int) -> None:
        """Release reserved slots; does nothing if they were committed."""
        self.lock.abandon(serial)

    def clear(self, cursor: int = 0) -> None:
        """Remove all rows, including rows that are being written, and continue at `cursor`."""
        with self.lock:
            self.lock.clear(cursor)

    @property
    def writers(self) -> int:
        """Number of live writers between `reserve` and `commit`. Requires the lock."""
        return int(self.lock.writers())

    def set_counts(self, written: int, since_empty: int, drawn: int) -> None:
        """Set the counts of a checkpoint. Requires the lock."""
        for which, count in ((_ROWS_WRITTEN, written), (_SINCE_EMPTY, since_empty), (_DRAWN, drawn)):
            self.lock.add(which, count - int(self.lock.count(which)))

    # -- reading -------------------------------------------------------------------------------------------------------

    def native_state(self) -> tuple[int, int, int, int, int, int]:
        """Return the memory from which native code reads generations; see `Ring.numbers`."""
        return self._generations.data_ptr(), self.capacity, 0, 0, 0, 0

    def generations(self, slots: Tensor) -> Tensor:
        """Return the generations of slots in `[0, capacity)`, int64 of the same shape. Copy."""
        slots = slots.contiguous()
        out = torch.empty_like(slots)
        self.lock.generations_of(slots.data_ptr(), slots.numel(), out.data_ptr())
        return out

    generations_of_rows = generations

    def matches(self, slots: Tensor, stamps: Tensor) -> Tensor:
        """Return bool: which of `slots`, in `[0, capacity)`, still hold the rows with these generations."""
        return (self.generations(slots) == stamps) & (stamps > 0)

    def untouched(self, written: int) -> bool:
        """Whether no slot was reserved since the write with this serial number. To be called after a copy."""
        return bool(self.lock.unchanged_since(written))

    def changed(self, slots: Tensor, written: int) -> Tensor | None:
        """Return bool: which rows, complete at the write with this serial number, have changed; None if none have."""
        slots = slots.contiguous()
        out = torch.empty_like(slots, dtype=torch.bool)
        found = self.lock.changed(slots.data_ptr(), slots.numel(), written, out.data_ptr())
        return out if found else None

    def present(self) -> Tensor:
        """Return the slots of all complete rows in order, int64. Cost: O(rows)."""
        rows = self.rows
        out = torch.empty(rows, dtype=torch.int64, device="cpu")
        return out[: self.lock.committed_slots(out.data_ptr(), rows)]
