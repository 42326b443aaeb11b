"""A buffer as a member of an ensemble: draws, rows and priorities that go through the ensemble."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.buffers import priorities
from ostinato.buffers.checkpoint import Target
from ostinato.buffers.engine import Engine
from ostinato.buffers.expansion import expand
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.records import Rows, Ticket
    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.core.draw import Draw

__all__ = ["Member", "locked"]


@final
class Member:
    """What an ensemble needs of one of its buffers.

    Args:
        buffer: the buffer.
        collate: takes the place of the buffer's own `collate_fn`; None keeps that.
    """

    def __init__(self, buffer: ReplayBuffer, collate: Callable[[Any], Any] | None) -> None:
        # one room: an ensemble draws from its buffers' engines and hears of their loads
        engine = buffer._engine  # noqa: SLF001
        if not isinstance(engine, Engine):
            msg = "the members of an ensemble belong to one process, got a shared buffer: make it without shared=True"
            raise OptionError(msg)
        self.engine = engine
        self._feed = buffer._feed  # noqa: SLF001
        self._dress = buffer._dress  # noqa: SLF001
        self._slots = buffer._index  # noqa: SLF001
        self.show = buffer._state  # noqa: SLF001
        self.buffer = buffer
        self.collate = collate

    def draw(self, rows: int, generator: torch.Generator | None, *, ranked: bool) -> Ticket:
        """Draw slots; where a pass over the rows ends, the next one begins.

        Args:
            rows: how many.
            generator: where chance comes from; None is the buffer's own source.
            ranked: give rows of samplers without priorities the weight 1, and stamps.

        Raises:
            EmptyBufferError: if there are no rows.
        """
        engine = self.engine
        device = engine.storage.device
        with engine.lock:
            source = engine.generator if generator is None else generator
            tickets = [engine.fresh(rows, source)]
            left = rows - _rows(tickets[0])
            while left > 0 and tickets[-1].last:
                tickets.append(engine.fresh(left, source))
                left -= _rows(tickets[-1])
            draw = tickets[0].draw if len(tickets) == 1 else _joined([ticket.draw for ticket in tickets])
            if ranked and draw.weights is None:
                weights = torch.ones(draw.slots.shape[0], dtype=torch.float32, device=device)
                draw = draw._replace(weights=weights, stamps=engine.stamps.of_present(draw.slots))
            return expand(engine, tickets[-1]._replace(draw=draw), source)

    def check_draw(self, rows: int, generator: torch.Generator | None) -> None:
        """Raise what `draw` would raise, before any member of a batch has drawn; the caller holds the engine's lock.

        Raises:
            EmptyBufferError: if there is nothing to draw before more rows are written.
            OptionError: if generator and storage are on different devices, or the sampler's passes cannot be cut.
            PriorityError: if no row has a priority above 0.
            UsageError: if the sampler cannot make `rows` rows of whole slices.
        """
        engine = self.engine
        device = engine.storage.device
        if generator is not None and generator.device.type != device.type:
            msg = (
                f"the ensemble's generator lives on {generator.device}, a member's storage on {device}: use one device"
            )
            raise OptionError(msg)
        if engine.sampler.epochal and engine.sampler.episodes is not None:
            msg = (
                f"{type(engine.sampler).__name__} is not available in an ensemble: a pass that ends in the middle of a "
                "part would cut its slices; use SliceSampler"
            )
            raise OptionError(msg)
        engine.sampler.check_draw(engine.drawable_view(), rows)

    def make(self, ticket: Ticket) -> tuple[Any, Rows, dict[Any, Tensor]] | None:
        """Return the batch of a draw, its rows, and what there is to say of them; None if it cannot be made now."""
        return self._feed.make(ticket, self._dress, self.collate)

    def index(self, ticket: Ticket) -> Tensor:
        """Return the index of a draw's rows, int64 `[B]`, with `ndim=2` `[B, 2]`."""
        return self.as_index(ticket.records)

    def as_index(self, slots: Tensor) -> Tensor:
        """Return slots as users see them, int64 `[B]`, with `ndim=2` `[B, 2]`."""
        index = self._slots(slots)
        return torch.stack(index, -1) if isinstance(index, tuple) else index

    def ranks(self, ticket: Ticket) -> dict[str, Tensor]:
        """Return weights and stamps of a ranked draw's rows as samples carry them, `[R]` each."""
        return priorities.ranks(self.engine, ticket)

    @property
    def target(self) -> Target:
        """Where a state goes."""
        return Target(self.engine, self.buffer.transform, self.buffer.batch_size)

    def loaded(self) -> None:
        """Take note that a state was loaded: batches made ahead are of rows that are gone."""
        self._feed.forget()


def _joined(draws: Sequence[Draw]) -> Draw:
    """Put several draws of one sampler together; what a draw says of its batch as a whole does not add up and goes."""
    columns = [[getattr(draw, name) for draw in draws] for name in ("weights", "stamps", "lengths")]
    weights, stamps, lengths = (torch.cat(column) if column[0] is not None else None for column in columns)
    slots = torch.cat([draw.slots for draw in draws])
    return draws[0]._replace(slots=slots, weights=weights, info=None, stamps=stamps, lengths=lengths)


def _rows(ticket: Ticket) -> int:
    """Return the records that a draw will become, before units."""
    draw = ticket.draw
    return draw.slots.shape[0] * (draw.length or 1) if draw.lengths is None else int(draw.lengths.sum())


def locked(members: Sequence[Member]) -> ExitStack:
    """Take the locks of all members, in an order that is the same for every ensemble; the result gives them back."""
    stack = ExitStack()
    for member in sorted(members, key=lambda member: member.engine.waiters.place):
        stack.enter_context(member.engine.lock)
    return stack
