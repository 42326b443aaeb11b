"""The read path: draw, gather, dress; directly, or through the prefetch queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch.compiler import is_dynamo_compiling

from ostinato.buffers.finish import finish
from ostinato.buffers.gate import Ask, give_back
from ostinato.buffers.prefetch import Prefetcher
from ostinato.buffers.streams import CopyStream
from ostinato.core.kinds import require_eager

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.buffers.records import AnyEngine, Rows, Ticket

__all__ = ["Batch", "Feed"]

_Made: TypeAlias = "tuple[Any, Rows, dict[Any, Tensor]]"
_PLAIN = Ask()
_FREE_TRIES = 2
"""Batches that writers may spoil before the next one is made with the writers waiting."""


class Batch(NamedTuple):
    """A finished batch, the draw it came from, and what there is to say of its records."""

    data: Any
    ticket: Ticket
    notes: dict[Any, Any]


@final
class Feed:
    """Turns draws into batches.

    Args:
        engine: where draws and rows come from.
        dress: finishes a batch (transforms, keys that subclasses add); runs in the prefetch thread if there is one. It
            gets the batch, the draw, and what slices and units have to say of each record.
        depth: batches to keep ready; 0 is no prefetch.
    """

    def __init__(self, engine: AnyEngine, dress: Callable[[Any, Ticket, dict[Any, Tensor]], Any], depth: int) -> None:
        self._engine = engine
        self._dress = dress
        # page-locked batches are on their way to a GPU: prefetched ones travel beside the learner's work
        self._stream = CopyStream() if depth and engine.pin and torch.cuda.is_available() else None
        work = self._make if self._stream is None else self._make_aside
        self.prefetch = Prefetcher(depth, work, engine.lock) if depth else None

    def next(self, size: int, *, within_epoch: bool = False, ask: Ask = _PLAIN) -> Batch:
        """Return the next batch of `size` rows.

        Args:
            size: rows.
            within_epoch: keep prefetch from drawing beyond the epoch's end.
            ask: how long to wait, where there is a gate, and how old rows may be.
        """
        if is_dynamo_compiling():  # a graph break: locks and addresses are not for a graph
            eager = torch.compiler.disable(Feed.next)  # type: ignore[no-untyped-call]
            return eager(self, size, within_epoch=within_epoch, ask=ask)  # type: ignore[no-any-return]
        require_eager("sampling")
        engine, tries = self._engine, 0
        while True:
            if self.prefetch is None:
                made = self._make_now(size, ask) if tries < _FREE_TRIES else self._make_alone(size, ask)
                tries += 1
            else:
                made = self._make_ahead(self.prefetch, size, ask, within_epoch=within_epoch)
            if made is None:
                continue  # emptied, or windows cut short, in between: draw again, or learn that there is nothing
            data, rows, notes = made
            engine.deliver(rows.ticket)
            if self.prefetch is not None:
                notes = {**notes, "stale": engine.stale(rows.ticket, rows)}
            return Batch(data, rows.ticket, notes)

    def _make_ahead(self, prefetch: Prefetcher[Ticket], size: int, ask: Ask, *, within_epoch: bool) -> _Made | None:
        engine, gate = self._engine, self._engine.gate
        ticket, made = prefetch.next(
            lambda: engine.draw(size, ahead=True, ask=ask),
            within_epoch=within_epoch,
            more=None if gate is None else lambda: gate.may_draw(engine, size),
            lost=self._lose,
        )
        if self._stream is not None:
            made = self._take(*made)
        if made is None:
            self._lose(ticket)
        return made  # type: ignore[no-any-return]

    def _make_alone(self, size: int, ask: Ask) -> _Made | None:
        with self._engine.lock:
            return self._make_now(size, ask)

    def _make_now(self, size: int, ask: Ask) -> _Made | None:
        ticket, made = self._engine.draw(size, ask=ask), None
        try:
            made = self.make(ticket, None)
        finally:
            if made is None:
                self._lose(ticket)
        return made

    def _make(self, ticket: Ticket) -> _Made | None:
        return self.make(ticket, None)

    def _lose(self, ticket: Ticket) -> None:
        """Take note that the batch of a draw will reach nobody."""
        engine = self._engine
        if engine.gate is not None or engine.sampler.counting:
            give_back(engine, ticket)

    def make(self, ticket: Ticket, collate: Callable[[Any], Any] | None) -> _Made | None:
        """Make the batch of a draw, with another `collate` if one is given; None if it cannot be made any more."""
        engine = self._engine
        rows = engine.gather(ticket)
        if rows is None:
            return None
        notes: dict[Any, Tensor] = {}
        data = rows.present()
        if rows.ticket.plan is not None:
            data, notes = finish(data, rows.ticket.plan, engine.unit, rows.ticket.sampler)
        data = rows.collate(data) if collate is None else collate(data)
        return self._dress(data, rows.ticket, notes), rows, notes

    def _make_aside(self, ticket: Ticket) -> Any:
        return self._stream.run(lambda: self._make(ticket))  # type: ignore[union-attr]

    def _take(self, made: _Made | None, event: Any) -> _Made | None:
        if made is not None:
            self._stream.take(made[0], event)  # type: ignore[union-attr]
        return made

    @property
    def tickets(self) -> list[Ticket]:
        """Draws that are queued, oldest first."""
        return [] if self.prefetch is None else self.prefetch.tickets

    def drop(self) -> None:
        """Forget queued batches and their draws; a generator of the buffer's own goes back to before them."""
        self._engine.undraw([] if self.prefetch is None else self.prefetch.clear())

    def forget(self) -> None:
        """Forget queued batches; what they were drawn from has been replaced."""
        if self.prefetch is not None:
            self.prefetch.clear()

    def redo(self) -> None:
        """Forget queued batches but keep their draws, to be made again (after the chain of transforms has changed)."""
        if self.prefetch is not None:
            self._engine.pending.extendleft(reversed(self.prefetch.clear()))

    def restart(self) -> None:
        """Forget all queued draws and begin a new epoch."""
        with self._engine.lock:
            self.drop()
            self._engine.sampler.restart()
