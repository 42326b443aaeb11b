"""Records of the read path: a draw that was made, a storage with what collates its rows, and rows gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.buffers.engine import Engine
    from ostinato.buffers.shared import SharedEngine
    from ostinato.core.records import Draw, Plan
    from ostinato.core.ring import Ring
    from ostinato.core.shared_ring import SharedRing
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage

__all__ = ["AnyEngine", "Mix", "Rows", "Source", "Ticket"]

AnyEngine: TypeAlias = "Engine | SharedEngine"
"""What stands behind a buffer: the engine of one process, or of one among several."""


class Ticket(NamedTuple):
    """A draw that was made but not gathered: what prefetch queues and checkpoints hold."""

    draw: Draw
    serial: int
    """Number of the last write before the draw."""
    last: bool
    """Whether the draw ended an epoch."""
    ring: Ring | SharedRing
    """The stamps that `serial` counts in; a load or another storage brings new ones."""
    sampler: Sampler
    """Who drew; it says what the slices of the batch are marked with."""
    rng: Tensor | None = None
    """State of the buffer's generator before the draw, if it was asked for: where to go back to if it is dropped."""
    plan: Plan | None = None
    """What slices and units make of the rows drawn; None where each is a record of the batch."""
    dice: Tensor | None = None
    """The random numbers of the unit: with them a draw can be expanded again."""

    @property
    def records(self) -> Tensor:
        """Slots of the batch's records, int64 `[R]`."""
        return self.draw.slots if self.plan is None else self.plan.records

    @property
    def slots_read(self) -> Tensor:
        """Slots of all rows that the batch is made of, int64 `[n]`."""
        return self.draw.slots if self.plan is None else self.plan.slots_read()

    def per_record(self, values: Tensor) -> Tensor:
        """Repeat values of the rows drawn for the records that they became."""
        return values if self.plan is None else self.plan.per_record(values)


class Mix(NamedTuple):
    """A draw of an ensemble: which member each part of the batch comes from, and the draw of each part."""

    members: list[int]
    tickets: list[Ticket]
    rng: Tensor | None = None
    """As in `Ticket`."""
    last: bool = False
    """Ensembles have no epochs."""


class Source(NamedTuple):
    """A storage and what collates its rows: exchanged together, so that nobody meets one with the other's partner."""

    storage: Storage
    collate: Callable[[Any], Any] | None


class Rows(NamedTuple):
    """Rows gathered for a ticket, whole as of the write number `serial`."""

    source: Source
    payload: Any
    serial: int
    ring: Ring | SharedRing
    ticket: Ticket
    """The draw; its stamps and plan are those of the rows gathered."""

    def present(self) -> Any:
        """Nest the rows, as the storage that they came from does."""
        return self.source.storage.present(self.payload, (self.ticket.records.shape[0],))

    def collate(self, data: Any) -> Any:
        """Collate what was presented."""
        return data if self.source.collate is None else self.source.collate(data)
