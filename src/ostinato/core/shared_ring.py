"""The slots of a ring in memory that processes share: generations, counts, and the lock between processes.

Tensors in place of the addresses of `native.SharedRing`. Rows, and the memory of the ring, are in `storages/shared.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato._backend import backend
from ostinato.core.records import Run

if TYPE_CHECKING:
    from torch import Tensor

_DRAWN, _STALE_UPDATES, _REDONE, _PROCESSES, _LOST, _ROWS_WRITTEN, _SINCE_EMPTY, _REPAIRS = range(8)


@final
class SharedRing:
    """Slots `[0, capacity)` that several processes write and read; what `Ring` is for one process.

    A generation is the serial number of the row in a slot; 0 where there is no row, negative while the row is being
    written or if its writer died. Serial numbers are assigned when slots are reserved, in that order.

    `lock` is a lock between processes (`with ring.lock:`), which one thread may take several times. If its owner dies,
    the next process that takes it repairs the ring first. Every wait ends after 30 s, with an error that names the
    process that holds the lock.

    Args:
        memory: uint8, at least `bytes_for(capacity, prioritized=prioritized)`; zeros, or an existing ring.
        capacity: Slots.
        prioritized: Whether there are priorities.
        create: Whether to create a new ring.
    """

    device = torch.device("cpu")

    def __init__(self, memory: Tensor, capacity: int, *, prioritized: bool, create: bool) -> None:
        self.capacity = capacity
        self.nbytes = int(memory.nbytes)
        self._memory = memory
        self.lock: Any = backend.native.SharedRing(memory.data_ptr(), capacity, prioritized, create)  # type: ignore[union-attr]
        self._generations = self._words(self.lock.generations, torch.int64)
        self.priorities = (
            self._words(self.lock.priorities, torch.float64)
            if prioritized
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        """Priorities of the slots, float64 `[capacity]`, empty without priorities; a view, guarded by the lock."""
        self.tree = self.lock.tree
        """The native sum tree, guarded by the lock; None without priorities."""

    @staticmethod
    def bytes_for(capacity: int, *, prioritized: bool) -> int:
        """Return the bytes of memory that a ring needs."""
        return int(backend.native.SharedRing.bytes_for(capacity, prioritized))  # type: ignore[union-attr]

    def _words(self, address: int, dtype: torch.dtype) -> Tensor:
        start = address - self._memory.data_ptr()
        return self._memory[start : start + 8 * self.capacity].view(dtype)

    # -- counts --------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[int, int, int, int]:
        """Return what a draw needs.

        Returns:
            The last serial number; the number of slots below `rows` that hold no complete row; `rows`, the number of
            slots ever reserved; and the number of slots that hold complete rows.
        """
        state: tuple[int, int, int, int] = self.lock.state()
        return state

    @property
    def written(self) -> int:
        """The last serial number. Serial numbers are assigned when slots are reserved."""
        return self.state()[0]

    @property
    def rows(self) -> int:
        """Slots from this one on were never reserved."""
        return self.state()[2]

    @property
    def committed(self) -> int:
        """Slots that hold complete rows."""
        return self.state()[3]

    @property
    def cursor(self) -> int:
        """Slot of the next row, unless a writer is still copying to it."""
        return int(self.lock.cursor)

    @property
    def max_priority(self) -> float:
        """Largest priority ever set."""
        return float(self.lock.max_priority)

    @max_priority.setter
    def max_priority(self, value: float) -> None:
        self.lock.max_priority = value

    @property
    def drawn(self) -> int:
        """Rows sampled by all processes."""
        return int(self.lock.count(_DRAWN))

    @property
    def stale_updates(self) -> int:
        """Priority updates of overwritten rows, from all processes."""
        return int(self.lock.count(_STALE_UPDATES))

    @property
    def redone(self) -> int:
        """Batches that were copied again, in all processes."""
        return int(self.lock.count(_REDONE))

    @property
    def lost(self) -> int:
        """Rows that were never completed because their writer died, as far as was found."""
        return int(self.lock.count(_LOST))

    @property
    def repairs(self) -> int:
        """Number of repairs after a process died while it held the lock."""
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
        """Return 1, 2, ...: another number in each call of any process."""
        return int(self.lock.add(_PROCESSES, 1)) + 1

    def count_drawn(self, rows: int) -> None:
        """Add to `drawn`."""
        self.lock.add(_DRAWN, rows)

    def count_stale(self, updates: int) -> None:
        """Add to `stale_updates`."""
        self.lock.add(_STALE_UPDATES, updates)

    def count_redone(self) -> None:
        """Add 1 to `redone`."""
        self.lock.add(_REDONE, 1)

    # -- writing -------------------------------------------------------------------------------------------------------

    def reserve(self, rows: int) -> tuple[int, Run]:
        """Reserve slots for a batch. The same thread must `commit` or `abandon` it.

        These are the next slots of the ring. Slots that a living writer is still copying to are skipped.

        Returns:
            The serial number of the first row that is stored, and the slots.

        Raises:
            UsageError: Living writers left no room for 30 s.
        """
        kept = min(rows, self.capacity)
        serial, start = self.lock.reserve(kept, rows)
        return serial, Run(start, kept, self.capacity, rows - kept)

    def is_current(self, serial: int) -> bool:
        """Return whether the ring was not cleared since these rows were reserved. Needs the lock."""
        return bool(self.lock.is_current(serial))

    def commit(self, serial: int) -> None:
        """Make the rows readable: they are complete."""
        self.lock.commit(serial)

    def abandon(self, serial: int) -> None:
        """Give up a reservation; does nothing after its commit."""
        self.lock.abandon(serial)

    def clear(self, cursor: int = 0) -> None:
        """Remove all rows, those that are being written too, and continue at `cursor`."""
        with self.lock:
            self.lock.clear(cursor)

    @property
    def writers(self) -> int:
        """Number of living writers between reserve and commit. Needs the lock."""
        return int(self.lock.writers())

    def set_counts(self, written: int, since_empty: int, drawn: int) -> None:
        """Set the counts of a checkpoint. Needs the lock."""
        for which, count in ((_ROWS_WRITTEN, written), (_SINCE_EMPTY, since_empty), (_DRAWN, drawn)):
            self.lock.add(which, count - int(self.lock.count(which)))

    # -- reading -------------------------------------------------------------------------------------------------------

    def native_state(self) -> tuple[int, int, int, int, int, int]:
        """Return the generations for native calls; see `Ring.native_state`."""
        return self._generations.data_ptr(), self.capacity, 0, 0, 0, 0

    def generations(self, slots: Tensor) -> Tensor:
        """Return the generations of slots in `[0, capacity)`, int64 of the same shape. Copy."""
        slots = slots.contiguous()
        out = torch.empty_like(slots)
        self.lock.generations_of(slots.data_ptr(), slots.numel(), out.data_ptr())
        return out

    generations_of_rows = generations
    arrivals = generations
    """Rows of a shared buffer are not edited."""

    def matches(self, slots: Tensor, generations: Tensor) -> Tensor:
        """Return bool: which of `slots`, in `[0, capacity)`, still hold the rows of these generations."""
        return (self.generations(slots) == generations) & (generations > 0)

    holds = matches

    def unchanged_since(self, written: int) -> bool:
        """Return whether no slot was reserved since this serial number. For a reader, after its copy."""
        return bool(self.lock.unchanged_since(written))

    def changed(self, slots: Tensor, written: int) -> Tensor | None:
        """Return bool: which slots hold no complete row or a row newer than `written`; None if no slot does."""
        slots = slots.contiguous()
        out = torch.empty_like(slots, dtype=torch.bool)
        found = self.lock.changed(slots.data_ptr(), slots.numel(), written, out.data_ptr())
        return out if found else None

    def present(self) -> Tensor:
        """Return the slots that hold complete rows, in order, int64. Cost: O(rows)."""
        rows = self.rows
        out = torch.empty(rows, dtype=torch.int64, device="cpu")
        return out[: self.lock.committed_slots(out.data_ptr(), rows)]
