"""The slots of a ring in memory that processes share: generations, counts, and the lock between processes.

Tensors in place of the addresses of `native.SharedRing`. Rows, and the memory of the ring, are in `storages/shared.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato._backend import backend
from ostinato.core.eligible import EligibleRows
from ostinato.core.records import Run
from ostinato.core.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


_DRAWN, _STALE_UPDATES, _REDONE, _, _LOST, _ROWS_WRITTEN, _SINCE_EMPTY, _REPAIRS = range(8)


_COUNTS = {_ROWS_WRITTEN: "written", _SINCE_EMPTY: "since_empty", _DRAWN: "drawn", _REDONE: "redone"}
"""The counts of a buffer, and their names in `BufferCounts`."""


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
        self._serial = 0  # of the rows of this process that are recorded and not committed
        self.nbytes = int(memory.nbytes)
        self._memory = memory
        self.lock: Any = backend.native.SharedRing(memory.data_ptr(), capacity, prioritized, create)  # type: ignore[union-attr]
        self.counts = self.lock
        """Rows, cursor and last serial number."""
        self._generations = self._words(self.lock.generations, torch.int64)
        self.priorities = self._words(self.lock.priorities, torch.float64) if prioritized else None
        """Priorities of the slots, float64 `[capacity]`, None without priorities; a view, guarded by the lock."""
        self.tree = self.lock.tree
        """The native sum tree, guarded by the lock; None without priorities."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a ring without rows: the storage of the copy has the memory."""
        return Ring, (self.capacity,)

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
        return int(self.lock.written)

    @property
    def rows(self) -> int:
        """Slots from this one on were never reserved."""
        return int(self.lock.rows)

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
    def stale_updates(self) -> int:
        """Priority updates of overwritten rows, from all processes."""
        return int(self.lock.count(_STALE_UPDATES))

    def count_stale(self, updates: int) -> None:
        """Add to `stale_updates`."""
        self.lock.add(_STALE_UPDATES, updates)

    @property
    def lost(self) -> int:
        """Rows that were never completed because their writer died, as far as was found."""
        return int(self.lock.count(_LOST))

    @property
    def repairs(self) -> int:
        """Number of repairs after a process died while it held the lock."""
        return int(self.lock.count(_REPAIRS))

    # -- writing -------------------------------------------------------------------------------------------------------

    def record(self, placement: Run) -> Run:
        """Reserve slots for the rows of a placement, which the same thread must `commit` or `abandon`.

        These are the next slots of the ring. Slots that a living writer is still copying to are skipped.

        Returns:
            The slots.

        Raises:
            UsageError: Living writers left no room for 30 s.
        """
        kept, skip = placement.rows, placement.skip
        self._serial = 0
        self._serial, start = self.lock.reserve(kept, kept + skip)
        return Run(start, kept, self.capacity, skip)

    def is_current(self) -> bool:
        """Return whether the ring was not cleared since the rows were recorded. Needs the lock."""
        return bool(self.lock.is_current(self._serial))

    def commit(self, counts: Any = None, rows: int = 0) -> None:  # noqa: ARG002
        """Make the rows recorded readable, and count them: they are complete."""
        self.lock.commit(self._serial)

    def abandon(self) -> None:
        """Give up the rows recorded; does nothing after their commit."""
        if self._serial:
            self.lock.abandon(self._serial)

    def take_back(self, *given: Any) -> bool:  # noqa: ARG002
        """Return False: rows that could not be stored are given up by `abandon`."""
        return False

    def take_over(self, rows: int, cursor: int) -> None:
        """Start with the `rows` rows that a storage holds already, the newest one just before `cursor`."""
        with self.lock:
            self.lock.clear(cursor if rows == self.capacity else 0)
            if rows:
                self.record(Run(0, rows, self.capacity))
                self.commit()

    def clear(self, cursor: int = 0) -> None:
        """Remove all rows, those that are being written too, and continue at `cursor`."""
        with self.lock:
            self.lock.clear(cursor)

    @property
    def writers(self) -> int:
        """Number of living writers between reserve and commit. Needs the lock."""
        return int(self.lock.writers())

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

    def changed(self, slots: Tensor, written: int) -> Tensor:
        """Return bool: which slots hold no complete row or a row newer than `written`."""
        slots = slots.contiguous()
        out = torch.empty_like(slots, dtype=torch.bool)
        self.lock.changed(slots.data_ptr(), slots.numel(), written, out.data_ptr())
        return out

    def present(self) -> Tensor:
        """Return the slots that hold complete rows, in order, int64. Cost: O(rows)."""
        rows = self.rows
        out = torch.empty(rows, dtype=torch.int64, device="cpu")
        return out[: self.lock.committed_slots(out.data_ptr(), rows)]

    @property
    def whole(self) -> WholeRows | None:
        """The slots that hold complete rows, where others below `rows` do not; None if all do."""
        return WholeRows(self) if self.state()[1] else None

    def saved_slots(self) -> Tensor:
        """Return the slots that are saved, int64: all, or the complete ones, the oldest first. Needs the lock."""
        if not self.state()[1]:
            return torch.from_numpy(np.arange(self.rows))  # torch's could wait for threads that a fork has left behind
        slots = self.present()
        return slots[self.generations(slots).argsort()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a `Ring` of the rows that are saved. Copy."""
        slots = self.saved_slots()
        cursor = self.cursor if slots.shape[0] == self.rows else slots.shape[0] % self.capacity
        return {"written": self.written, "base": 0, "cursor": cursor, "array": self.generations(slots)}


@final
class WholeRows(EligibleRows):
    """The rows that may be drawn while writers are at work, or after one has died: those that are complete.

    Args:
        ring: the ring; the caller holds its lock as long as it uses this.
    """

    def __init__(self, ring: SharedRing) -> None:
        self._ring, self.rows = ring, ring.committed

    def why_none(self, rows: int) -> str:
        """Say why no row may be drawn."""
        return f"none of {rows} rows is whole: all are being replaced at this moment. Add rows, or sample later"

    def allowed(self, slots: Tensor) -> Tensor:
        """Return which slots hold complete rows, bool `[n]`."""
        return self._ring.generations(slots) > 0

    def at(self, ranks: Tensor) -> Tensor:
        """Return the slots of ranks in `[0, rows)`, int64 `[n]`: the rank, unless the row of that slot is incomplete.

        These take the complete rows in the slots from `rows` on, in order. Cost: O(slots) if there are any.
        """
        holes = ~self.allowed(ranks)
        if not bool(holes.any()):
            return ranks
        present, slots = self._ring.present(), ranks[holes]
        nth = slots - torch.searchsorted(present, slots)  # of the slots without a complete row
        return ranks.masked_scatter(holes, present[nth + int(torch.searchsorted(present, self.rows))])


def _count(which: int) -> Any:
    """Return a property: a count of all processes."""

    def get(counts: SharedCounts) -> int:
        ring = counts.ring()
        return counts.before.get(which, 0) + (0 if ring is None else int(ring.lock.count(which)))

    def change(counts: SharedCounts, value: int) -> None:
        ring = counts.ring()
        if ring is not None:
            ring.lock.add(which, value - counts.before.get(which, 0) - int(ring.lock.count(which)))

    return property(get, change)


@final
class SharedCounts:
    """What the processes that share a buffer count; see `BufferCounts`. Changed under the lock of the ring.

    Args:
        ring: returns the ring; None before the first row.
        private: counts to go on from, those of the buffer before it was shared.
    """

    written = _count(_ROWS_WRITTEN)
    since_empty = _count(_SINCE_EMPTY)
    drawn = _count(_DRAWN)
    redone = _count(_REDONE)
    writes_seen = 0

    def __init__(self, ring: Callable[[], SharedRing | None], private: Any) -> None:
        self.ring = ring
        self.writes_seen = private.writes_seen
        self.before: dict[int, int] = {}
        """What was counted before the buffer was shared, but for the rows that were copied then."""
        for which, name in _COUNTS.items():
            if getattr(private, name):
                self.before[which] = getattr(private, name) - getattr(self, name)

    def load(self, counts: Any) -> None:
        """Set the counts of a checkpoint."""
        for name in _COUNTS.values():
            setattr(self, name, getattr(counts, name))
