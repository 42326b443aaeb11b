"""The read path: draw, gather, dress; directly, or through the prefetch queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch.compiler import is_dynamo_compiling

from ostinato.buffers.finish import finish
from ostinato.buffers.gate import Ask, give_back
from ostinato.buffers.prefetch import Prefetcher, Steps
from ostinato.buffers.streams import CopyStream
from ostinato.core.kinds import require_eager
from ostinato.errors import EpochEndError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.buffers.records import AnyEngine, Rows, Ticket

__all__ = ["Batch", "Feed"]

_Made: TypeAlias = "tuple[Any, Rows, dict[Any, Tensor]]"
Dress: TypeAlias = "Callable[[Any, Ticket, dict[Any, Tensor]], Any]"
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

    Holds no reference to the buffer that it feeds: that hands its `dress` over with each call.

    Args:
        engine: where draws and rows come from.
        depth: batches to keep ready; 0 is no prefetch.
    """

    def __init__(self, engine: AnyEngine, depth: int) -> None:
        self._engine = engine
        # page-locked batches are on their way to a GPU: prefetched ones travel beside the learner's work
        self._stream = CopyStream() if depth and engine.pin and torch.cuda.is_available() else None
        self.prefetch: Prefetcher[Ticket] | None = Prefetcher(depth, engine.waiters) if depth else None

    def next(self, size: int, dress: Dress, *, within_epoch: bool = False, ask: Ask = _PLAIN) -> Batch:
        """Return the next batch of `size` rows.

        Args:
            size: rows.
            dress: finishes a batch (transforms, keys that subclasses add); runs in the prefetch thread if there is one.
                It gets the batch, the draw, and what slices and units have to say of each record.
            within_epoch: keep prefetch from drawing beyond the epoch's end.
            ask: how long to wait, where there is a gate, and how old rows may be.

        Raises:
            EpochEndError: with `within_epoch`, if no batch is left since rows were replaced.
        """
        if is_dynamo_compiling():  # a graph break: locks and addresses are not for a graph
            eager = torch.compiler.disable(Feed.next)  # type: ignore[no-untyped-call]
            return eager(self, size, dress, within_epoch=within_epoch, ask=ask)  # type: ignore[no-any-return]
        require_eager("sampling")
        engine, tries = self._engine, 0
        if engine.gate is not None:
            ask = ask.begun(engine.gate)  # all tries share one time
        while True:
            if self.prefetch is None:
                made = self._make_now(size, dress, ask) if tries < _FREE_TRIES else self._make_alone(size, dress, ask)
                tries += 1
            else:
                made = self._make_ahead(self.prefetch, size, dress, ask, within_epoch=within_epoch)
            if made is None:
                if within_epoch and self.over:
                    msg = "the rows left in the epoch were replaced: no batch of it is left"
                    raise EpochEndError(msg)
                continue  # emptied, or windows cut short, in between: draw again, or learn that there is nothing
            data, rows, notes = made
            engine.deliver(rows.ticket)
            if self.prefetch is not None:
                notes = {**notes, "stale": engine.stale(rows.ticket, rows)}
            return Batch(data, rows.ticket, notes)

    def _make_ahead(
        self, prefetch: Prefetcher[Ticket], size: int, dress: Dress, ask: Ask, *, within_epoch: bool
    ) -> _Made | None:
        engine = self._engine

        def may() -> bool:  # once one draw is queued no further one begins another epoch
            return engine.may_draw(size) and not (within_epoch and prefetch.filled and self._spent())

        steps = Steps(
            draw=lambda: engine.draw(size, ahead=True, ask=ask),
            make=lambda ticket: self._make(ticket, dress),
            may=may,
            wait=lambda: engine.hold_draw(size, ask, lambda: prefetch.filled),
            lost=self._lose,
        )
        ticket, made = prefetch.next(steps, within_epoch=within_epoch)
        if self._stream is not None:
            made = self._take(*made)
        if made is None:
            self._lose(ticket)
        return made  # type: ignore[no-any-return]

    def _make_alone(self, size: int, dress: Dress, ask: Ask) -> _Made | None:
        with self._engine.lock:
            return self._make_now(size, dress, ask)

    def _make_now(self, size: int, dress: Dress, ask: Ask) -> _Made | None:
        ticket, made = self._engine.draw(size, ask=ask), None
        try:
            made = self.make(ticket, dress, None)
        finally:
            if made is None:
                self._lose(ticket)
        return made

    def _make(self, ticket: Ticket, dress: Dress) -> Any:
        if self._stream is None:
            return self.make(ticket, dress, None)
        return self._stream.run(lambda: self.make(ticket, dress, None))

    def _lose(self, ticket: Ticket) -> None:
        """Take note that the batch of a draw will reach nobody."""
        engine = self._engine
        if engine.gate is not None or engine.sampler.counting:
            give_back(engine, ticket)

    def make(self, ticket: Ticket, dress: Dress, collate: Callable[[Any], Any] | None) -> _Made | None:
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
        return dress(data, rows.ticket, notes), rows, notes

    def _take(self, made: _Made | None, event: Any) -> _Made | None:
        if made is not None:
            self._stream.take(made[0], event)  # type: ignore[union-attr]
        return made

    @property
    def tickets(self) -> list[Ticket]:
        """Draws that are queued, oldest first."""
        return [] if self.prefetch is None else self.prefetch.tickets

    def _spent(self) -> bool:
        engine = self._engine
        return not engine.pending and engine.sampler.spent(engine.view())

    @property
    def over(self) -> bool:
        """Whether no batch of the epoch is left: the last one was drawn, or the rows left cannot be drawn any more."""
        with self._engine.lock:
            return not self.tickets and (self._engine.sampler.ran_out or self._spent())

    def drop(self) -> None:
        """Forget queued batches and their draws; a generator of the buffer's own goes back to before them."""
        with self._engine.lock:
            self._engine.undraw([] if self.prefetch is None else self.prefetch.clear())

    def forget(self) -> None:
        """Forget queued batches; what they were drawn from has been replaced."""
        if self.prefetch is not None:
            self.prefetch.clear()

    def redo(self) -> None:
        """Forget queued batches but keep their draws, to be made again (after the chain of transforms has changed)."""
        if self.prefetch is not None:
            with self._engine.lock:
                self._engine.pending.extendleft(reversed(self.prefetch.clear()))
                self._engine.waiters.wake()

    def restart(self) -> None:
        """Forget all queued draws and begin a new epoch."""
        with self._engine.lock:
            self.drop()
            self._engine.sampler.restart()
