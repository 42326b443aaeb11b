"""The rows that other processes write to a shared buffer, reported to the observers of this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.buffers.observer import Incoming, Observer
from ostinato.core.records import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ostinato.buffers.store import Store
    from ostinato.core.records import Placement

_CPU = torch.device("cpu")
_ROWS_AT_ONCE = 1 << 14
"""Rows that are read and reported together at most."""


@final
class OtherProcesses(Observer):
    """Reports rows that other processes have written, or are writing, to the observers of the user's own.

    Rows are reported at the next call of this process, as `removed` once another process begins to replace them, and as
    `written` when they are complete. Cost of a call after such writes: O(capacity), and a copy of the new rows.

    Large arrays are NumPy's: in a forked process torch may wait for ever for the threads of its parent.
    """

    def __init__(self) -> None:
        self._known: NDArray[np.int64] = np.zeros(0, np.int64)
        """For each slot the generation of the row that was reported, 0 for none."""
        self._state: Any = None

    def _fit(self, capacity: int) -> None:
        """Have a generation for each slot: the capacity is that of the buffer, but known with its first rows."""
        if self._known.size < capacity:
            self._known = np.zeros(capacity, np.int64)

    def _now(self, store: Store) -> NDArray[np.int64]:
        """Return the generations of the complete rows in all slots, 0 for other slots."""
        capacity = store.ring.capacity
        self._fit(capacity)
        found: NDArray[np.int64] = store.ring.generations(torch.from_numpy(np.arange(capacity))).numpy()
        found[found < 0] = 0
        return found

    def follow(self, store: Store) -> None:
        """Report what has changed since the last call."""
        ring: Any = store.ring
        with ring.lock:
            state = ring.state()
            if state == self._state:
                return
            now = self._now(store)
            changed = np.flatnonzero(now != self._known)
            self._state, self._known = state, now
            gone = torch.from_numpy(changed[now[changed] == 0])
            if gone.numel():
                for observer in store.added:
                    observer.before_removal(store, gone)
                    observer.removed(store, gone)
            new = changed[now[changed] > 0]
            for run in _runs(new[now[new].argsort()], ring.capacity):
                self._report(store, run)

    def _report(self, store: Store, run: Run) -> None:
        payload = store.storage.gather(run.slots(_CPU))
        data = store.storage.present(payload, (run.rows,))
        incoming = Incoming(data, payload, run.rows, ranked=True)
        for observer in store.added:
            observer.written(store, run, observer.check(store, incoming))

    def written(self, store: Store, placement: Placement, found: Any) -> None:  # noqa: ARG002
        """Record that rows of this process were reported: their generations are negative until they are committed."""
        slots = placement.slots_written(_CPU)
        self._fit(store.ring.capacity)
        self._known[slots.numpy()] = np.abs(store.ring.generations(slots).numpy())

    def cleared(self, store: Store) -> None:  # noqa: ARG002
        """Record that there are no rows."""
        self._known[:] = 0

    def replaced(self, store: Store) -> None:
        """Record that all rows were reported."""
        self._known = self._now(store)


def _runs(slots: NDArray[np.int64], capacity: int) -> Iterator[Run]:
    """Return slots, int64 `[n]` in the order of writing, as runs of slots that follow each other."""
    cuts = np.flatnonzero((slots[1:] - slots[:-1]) % capacity != 1) + 1
    for part in np.split(slots, cuts):
        for first in range(0, part.size, _ROWS_AT_ONCE):
            piece = part[first : first + _ROWS_AT_ONCE]
            yield Run(int(piece[0]), piece.size, capacity)
