"""Draws made ahead of their batches: the rows are those of the moment of the draw, whenever they are copied.

Prefetch copies the rows of a draw later, in another thread. Without more, the batch would hold a row as it was before
or after a write, as threads happen to run. Here a write first copies the rows of those draws that it would change, so
what a batch holds depends on the order of the calls alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

import torch

from ostinato.buffers.observer import Observer
from ostinato.core.counts import NEVER
from ostinato.core.records import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.buffers.records import Rows
    from ostinato.buffers.store import Store
    from ostinato.core.records import Draw, Placement
    from ostinato.core.ring import Ring


@final
class HeldRows:
    """The rows of a draw made ahead, once they were copied because the buffer was about to change them.

    Args:
        draw: whose rows they are.
        rows: its rows; None as long as the buffer has them unchanged.
    """

    __slots__ = ("__weakref__", "draw", "rows")

    def __init__(self, draw: Draw, rows: Rows | None = None) -> None:
        self.draw = draw
        self.rows = rows


@final
class DrawnAhead(Observer):
    """The draws of a buffer and its views whose batches are not delivered yet. The buffer's lock guards it.

    Refers to draws weakly: those that were delivered or dropped are forgotten. Cost of a write in ring order: one
    comparison of integers, unless it replaces a row of such a draw; of other writes and edits: O(rows of the draws). On
    an accelerator any write copies the rows of all draws, so that the host waits for nothing.
    """

    def __init__(self) -> None:
        self._draws: WeakSet[HeldRows] = WeakSet()

    def __bool__(self) -> bool:
        """Whether there are such draws."""
        return len(self._draws) > 0

    def add(self, draw: Draw, ring: Ring) -> Draw:
        """Return a draw that keeps its rows as they are now."""
        held = draw.held or HeldRows(draw)
        if held.rows is None:
            self._draws.add(held)
            ring.counts.reserved_from = min(ring.counts.reserved_from, _first_write(draw, ring))
        return draw._replace(held=held)

    def direct(self, store: Store) -> bool:  # noqa: ARG002
        """Return True: native calls leave writes that replace a row of a draw (`RingCounts.reserved_from`)."""
        return True

    def before_write(self, store: Store, placement: Placement) -> None:
        """Copy the rows that a placement replaces, before the ring records it."""
        ring = store.ring
        if ring.counts.reserved_from == NEVER:
            return  # there are no such draws
        if not isinstance(placement, Run):
            self.before_change(store, placement.slots)
            self.cursor_moves(ring)
            return
        in_order = (placement.start - placement.skip - ring.cursor) % ring.capacity == 0
        if in_order and ring.written + placement.total < ring.counts.reserved_from:
            return
        self._copy(store, lambda slots: (slots - placement.start).remainder(ring.capacity) < placement.rows)
        if not in_order:
            self.cursor_moves(ring)

    def before_change(self, store: Store, slots: Tensor, data: Any = None) -> None:  # noqa: ARG002
        """Copy the rows that an edit changes, int64 `[n]`."""
        self.before_removal(store, slots)

    def before_removal(self, store: Store, slots: Tensor | None) -> None:
        """Copy rows that leave, int64 `[n]`; None stands for all rows."""
        self._copy(store, None if slots is None else lambda read: torch.isin(read, slots))

    def before_move(self, store: Store) -> None:
        """Copy all rows: they get other slots."""
        self.before_removal(store, None)

    def cursor_moves(self, ring: Ring) -> None:
        """Let the next write look at all draws: the cursor is about to be moved."""
        ring.counts.reserved_from = 0 if self._draws else NEVER

    def _copy(self, store: Store, changed: Callable[[Tensor], Tensor] | None) -> None:
        """Copy the rows of the draws of this ring that read slots which `changed` finds among them; None finds all.

        On an accelerator what it finds is not looked at: copying the rows costs less.
        """
        ring, waiting = store.ring, []
        for held in self._draws:
            if held.rows is not None or held.draw.ring is not ring:
                continue
            found = None if changed is None else changed(held.draw.slots_read)
            if found is None or not found.is_cpu or bool(found.any()):
                held.rows = store.read_rows(held.draw)
            else:
                waiting.append(held)
        self._draws = WeakSet(waiting)
        first = min((_first_write(held.draw, ring) for held in waiting), default=NEVER)
        if first != ring.counts.reserved_from:
            ring.counts.reserved_from = first


def _first_write(draw: Draw, ring: Ring) -> int:
    """Return the serial number of the first row that replaces one of a draw, if rows are written in ring order.

    0 for slots on an accelerator, whose values the host would have to wait for.
    """
    if not draw.slots_read.is_cpu:
        return 0
    slots = draw.slots_read.numpy()  # NumPy keeps the interpreter lock, for which the worker would wait
    distance = int(((slots - ring.cursor) % ring.capacity).min())
    return min(ring.written + 1 + distance, NEVER)
