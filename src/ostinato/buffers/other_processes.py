"""The rows that other processes write to a shared buffer, reported to the observers of this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.buffers.observer import Incoming, Observer
from ostinato.core.records import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ostinato.buffers.store import Store
    from ostinato.core.records import Placement

_CPU = torch.device("cpu")
_ROWS_AT_ONCE = 1 << 16
"""Rows that are read and reported together at most."""


@final
class OtherProcesses(Observer):
    """Reports rows that other processes have written, or are writing, to the observers of the user's own.

    Rows are reported at the next call of this process, as `removed` once another process begins to replace them, and as
    `written` when they are complete. Cost of a call after such writes: O(rows), and a copy of the new rows.
    """

    def __init__(self) -> None:
        self._known = torch.zeros(0, dtype=torch.int64, device="cpu")
        """For each slot the generation of the row that was reported, 0 for none."""
        self._state: Any = None

    def _now(self, store: Store) -> Tensor:
        """Return the generations of all slots; not above 0 without a complete row. Have room for them."""
        ring = store.ring
        if self._known.shape[0] < ring.capacity:
            self._known = torch.zeros(ring.capacity, dtype=torch.int64, device="cpu")
        return ring.generations(torch.arange(ring.capacity, device="cpu"))

    def follow(self, store: Store) -> None:
        """Report what has changed since the last call."""
        ring: Any = store.ring
        with ring.lock:
            state = ring.state()
            if state == self._state:
                return
            now = self._now(store).clamp_(min=0)
            changed = (now != self._known).nonzero().reshape(-1)
            self._state, self._known = state, now
            gone = changed[now[changed] == 0]
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
        self._now(store)
        self._known[slots] = store.ring.generations(slots).abs()

    def cleared(self, store: Store) -> None:  # noqa: ARG002
        """Record that there are no rows."""
        self._known.zero_()

    def replaced(self, store: Store) -> None:
        """Record that all rows were reported."""
        self._known = self._now(store).clamp_(min=0)


def _runs(slots: Tensor, capacity: int) -> Iterator[Run]:
    """Return slots, int64 `[n]` in the order of writing, as runs of slots that follow each other."""
    numbers = slots.numpy()
    cuts = np.flatnonzero((numbers[1:] - numbers[:-1]) % capacity != 1) + 1
    for part in np.split(numbers, cuts):
        for first in range(0, part.size, _ROWS_AT_ONCE):
            piece = part[first : first + _ROWS_AT_ONCE]
            yield Run(int(piece[0]), piece.size, capacity)
