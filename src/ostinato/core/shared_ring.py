"""The ring of slots that processes share, in tensors instead of addresses: stamps, counts, and who writes where.

What lives here: the words around `native.SharedRing`. What does not: rows, and the memory that it lies in.
"""

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
    """Slots `[0, capacity)` that several processes write and read; does for them what `Ring` does for one.

    A stamp is the serial number of the row in a slot; 0 where there is none, and below 0 while it is being written, or
    if its writer died. Serial numbers are given out when slots are reserved, so they follow the order of reserving.

    `lock` is a lock between processes (`with ring.lock:`), which one thread may take several times. If its owner dies,
    the next one who takes it first brings the ring in order. Every wait ends after 30 s, with an error that says who
    waits for what.

    Args:
        memory: uint8, at least `bytes_for(capacity, ranked=ranked)`; zeros, or a ring that is there.
        capacity: slots.
        ranked: whether there are priorities.
        fresh: whether to begin a new ring.
    """

    device = torch.device("cpu")

    def __init__(self, memory: Tensor, capacity: int, *, ranked: bool, fresh: bool) -> None:
        self.capacity = capacity
        self.nbytes = int(memory.nbytes)
        self._memory = memory
        self.lock: Any = backend.native.SharedRing(memory.data_ptr(), capacity, ranked, fresh)  # type: ignore[union-attr]
        self._stamps = self._words(self.lock.generations, torch.int64)
        self.priorities = (
            self._words(self.lock.priorities, torch.float64)
            if ranked
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        """Priorities of the slots, float64 `[capacity]`, empty without priorities; a view, guarded by the lock."""
        self.tree = self.lock.tree
        """The native tree of their values, guarded by the lock."""

    @staticmethod
    def bytes_for(capacity: int, *, ranked: bool) -> int:
        """Return the bytes that a ring takes."""
        return int(backend.native.SharedRing.bytes_for(capacity, ranked))  # type: ignore[union-attr]

    def _words(self, address: int, dtype: torch.dtype) -> Tensor:
        start = address - self._memory.data_ptr()
        return self._memory[start : start + 8 * self.capacity].view(dtype)

    # -- counts --------------------------------------------------------------------------------------------------------

    def now(self) -> tuple[int, int, int, int]:
        """Return what a draw must know.

        Returns:
            The number of the last write; how many slots below `rows` hold no whole row; `rows`, the slots ever
            reserved; and how many hold whole rows.
        """
        moment: tuple[int, int, int, int] = self.lock.state()
        return moment

    @property
    def written(self) -> int:
        """Number of the last write; batches number their rows when they reserve."""
        return self.now()[0]

    @property
    def rows(self) -> int:
        """Slots from here on were never reserved."""
        return self.now()[2]

    @property
    def committed(self) -> int:
        """Slots that hold whole rows."""
        return self.now()[3]

    @property
    def cursor(self) -> int:
        """Slot that the next row takes, unless somebody is still writing there."""
        return int(self.lock.cursor)

    @property
    def largest(self) -> float:
        """Largest priority ever given."""
        return float(self.lock.max_priority)

    @largest.setter
    def largest(self, value: float) -> None:
        self.lock.max_priority = value

    @property
    def drawn(self) -> int:
        """Rows delivered, to all processes."""
        return int(self.lock.count(_DRAWN))

    @property
    def stale_updates(self) -> int:
        """Priorities that came too late, from all processes."""
        return int(self.lock.count(_STALE_UPDATES))

    @property
    def redone(self) -> int:
        """Batches copied once more, in all processes."""
        return int(self.lock.count(_REDONE))

    @property
    def lost(self) -> int:
        """Rows that were never finished, because their writer died, as far as was found out."""
        return int(self.lock.count(_LOST))

    @property
    def repairs(self) -> int:
        """How often somebody died with the lock, and the next one brought the ring in order."""
        return int(self.lock.count(_REPAIRS))

    @property
    def rows_written(self) -> int:
        """Rows written by all processes."""
        return int(self.lock.count(_ROWS_WRITTEN))

    @property
    def rows_since_empty(self) -> int:
        """The same, since the buffer was emptied."""
        return int(self.lock.count(_SINCE_EMPTY))

    def number_process(self) -> int:
        """Return another number each time, from 1, whichever process asks."""
        return int(self.lock.add(_PROCESSES, 1)) + 1

    def note_drawn(self, rows: int) -> None:
        """Count rows delivered."""
        self.lock.add(_DRAWN, rows)

    def note_stale(self, updates: int) -> None:
        """Count priorities that came too late."""
        self.lock.add(_STALE_UPDATES, updates)

    def note_redone(self) -> None:
        """Count a batch copied once more."""
        self.lock.add(_REDONE, 1)

    # -- writing -------------------------------------------------------------------------------------------------------

    def reserve(self, rows: int) -> tuple[int, Run]:
        """Take slots for a batch; the thread that does must `commit` or `abandon` it.

        The next slots of the ring, but those that a living writer is still copying to are passed over.

        Returns:
            The serial number of the first row that is kept, and the slots.

        Raises:
            UsageError: if living writers are in the way of all places for 30 s.
        """
        kept = min(rows, self.capacity)
        serial, start = self.lock.reserve(kept, rows)
        return serial, Run(start, kept, self.capacity, rows - kept)

    def holds(self, serial: int) -> bool:
        """Whether the rows are still wanted: not so if the ring was emptied meanwhile. Under the lock."""
        return bool(self.lock.is_current(serial))

    def commit(self, serial: int) -> None:
        """Let the rows be read: they are whole."""
        self.lock.commit(serial)

    def abandon(self, serial: int) -> None:
        """Give slots back empty; does nothing if they were committed."""
        self.lock.abandon(serial)

    def clear(self, cursor: int = 0) -> None:
        """Forget all rows, and go on at `cursor`; rows that are being written go with them."""
        with self.lock:
            self.lock.clear(cursor)

    @property
    def writers(self) -> int:
        """Living writers between reserve and commit. Under the lock."""
        return int(self.lock.writers())

    def set_counts(self, written: int, since_empty: int, drawn: int) -> None:
        """Take over the counts of a checkpoint. Under the lock."""
        for which, count in ((_ROWS_WRITTEN, written), (_SINCE_EMPTY, since_empty), (_DRAWN, drawn)):
            self.lock.add(which, count - int(self.lock.count(which)))

    # -- reading -------------------------------------------------------------------------------------------------------

    def native_state(self) -> tuple[int, int, int, int, int, int]:
        """Return what compiled code reads stamps from; see `Ring.numbers`."""
        return self._stamps.data_ptr(), self.capacity, 0, 0, 0, 0

    def generations(self, slots: Tensor) -> Tensor:
        """Return the stamps of slots in `[0, capacity)`, int64 of the same shape. Copy."""
        slots = slots.contiguous()
        out = torch.empty_like(slots)
        self.lock.generations_of(slots.data_ptr(), slots.numel(), out.data_ptr())
        return out

    generations_of_rows = generations

    def matches(self, slots: Tensor, stamps: Tensor) -> Tensor:
        """Return bool: which of `slots`, in `[0, capacity)`, still hold the rows whose stamps these are."""
        return (self.generations(slots) == stamps) & (stamps > 0)

    def untouched(self, written: int) -> bool:
        """Whether no slot was reserved since the write of this number. To be asked after a copy."""
        return bool(self.lock.unchanged_since(written))

    def changed(self, slots: Tensor, written: int) -> Tensor | None:
        """Return bool: which rows, whole at the write of this number, are not the same now; None stands for none."""
        slots = slots.contiguous()
        out = torch.empty_like(slots, dtype=torch.bool)
        found = self.lock.changed(slots.data_ptr(), slots.numel(), written, out.data_ptr())
        return out if found else None

    def present(self) -> Tensor:
        """Return the slots that hold whole rows, in order, int64. Cost: O(rows)."""
        rows = self.rows
        out = torch.empty(rows, dtype=torch.int64, device="cpu")
        return out[: self.lock.committed_slots(out.data_ptr(), rows)]
