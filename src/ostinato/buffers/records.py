"""What passes between engine, pipeline and checkpoints: draws, sources, gathered rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ostinato._native import Direct
    from ostinato.buffers.drawn_ahead import HeldRows
    from ostinato.buffers.rate_limit import Ask, Gate
    from ostinato.buffers.reader import Reader
    from ostinato.core.episodes.tracker import EpisodeTracker
    from ostinato.core.records import Draw, Plan
    from ostinato.core.ring import Ring
    from ostinato.core.shared_ring import SharedRing
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.units import SampleUnit

Engine: TypeAlias = "Reader"
"""What stands behind a `ReplayBuffer`. Hold its `lock` to read several attributes."""


class Ticket(NamedTuple):
    """A draw that was made but not gathered: what prefetch queues and checkpoints hold."""

    draw: Draw
    serial: int
    """Number of the last write before the draw."""
    last: bool
    """Whether the draw ended an epoch."""
    ring: Ring | SharedRing
    """The ring that `serial` counts in; a load or another storage brings a new one."""
    sampler: Sampler
    """The sampler that drew; it adds fields to slices."""
    rng: Tensor | None = None
    """State of the buffer's generator before the draw, if it was asked for: where to go back to if it is dropped."""
    plan: Plan | None = None
    """What slices and units make of the rows drawn; None where each is a record of the batch."""
    dice: Tensor | None = None
    """The random numbers of the unit: with them a draw can be expanded again."""
    held: HeldRows | None = None
    """The rows at the draw, if it was made ahead."""

    @property
    def records(self) -> Tensor:
        """Slots of the batch's records, int64 `[R]`."""
        return self.draw.slots if self.plan is None else self.plan.records

    @property
    def slots_read(self) -> Tensor:
        """Slots of all rows that the batch is made of, int64 `[n]`."""
        return self.draw.slots if self.plan is None else self.plan.slots_read()

    @property
    def info(self) -> dict[str, Any]:
        """Entries of the info that the sampler adds; tensors with one value for each row drawn are repeated."""
        found, rows = self.draw.info or {}, self.draw.slots.shape[0]
        if self.plan is None:
            return found
        alike = {key: getattr(value, "shape", ())[:1] == (rows,) for key, value in found.items()}
        return {key: self.plan.per_record(value) if alike[key] else value for key, value in found.items()}

    def per_record(self, values: Tensor) -> Tensor:
        """Repeat values of the rows drawn for the records that they became."""
        return values if self.plan is None else self.plan.per_record(values)


class Mix(NamedTuple):
    """A draw of an ensemble: which member each part of the batch comes from, and the draw of each part."""

    members: list[int]
    tickets: list[Any]
    """The `Ticket` of each part; of members that draw by themselves the number of its rows."""
    rng: Tensor | None = None
    """As in `Ticket`."""
    owed: list[float] | None = None
    """What the batch left of the exact share of each member; see `Split`."""
    last: bool = False
    """Ensembles have no epochs."""


class Draws:
    """Base of what stands behind a buffer, a shared one, and an ensemble: where no call waits, and draws made ahead."""

    direct: Direct | None = None
    """Native calls that write and draw in place of the methods; see `ostinato.buffers.direct`."""
    direct_tried = True
    """Whether `direct` was looked for since the parts changed."""
    gate: Gate | None = None
    """The counts of a rate limiter, or of a queue."""
    unit: SampleUnit | None = None
    tracker: EpisodeTracker | None = None
    lock: Any
    generator: torch.Generator | None
    pending: deque[Any]
    """Draws that a checkpoint left; they are delivered first."""

    def may_draw(self, rows: int) -> bool:  # noqa: ARG002
        """Whether a draw of so many rows need not wait."""
        return True

    def wait_to_draw(self, rows: int, ask: Ask, queued: Callable[[], bool] = lambda: False) -> int:  # noqa: ARG002
        """Return the rows to draw, once they may be drawn."""
        return rows

    def give_back(self, ticket: Any) -> None:
        """Undo the counts of a draw whose batch was not delivered."""

    def undraw(self, queued: list[Any]) -> None:
        """Drop draws that were made ahead, the oldest first, and those of a checkpoint, as if they were never made."""
        with self.lock:
            dropped = [*queued, *self.pending]
            for ticket in dropped:
                self.give_back(ticket)
            self.pending.clear()
            if dropped and dropped[0].rng is not None and self.generator is not None:
                self.generator.set_state(dropped[0].rng)


class Source(NamedTuple):
    """A storage and its collate function, which are exchanged together."""

    storage: Storage
    collate: Callable[[Any], Any] | None


class Rows(NamedTuple):
    """Rows gathered for a ticket, whole as of the write number `serial`."""

    source: Source
    payload: Any
    serial: int
    ring: Ring | SharedRing
    ticket: Ticket
    """The draw; its generations and plan are those of the rows gathered."""
    stale: Tensor | None = None
    """bool `[R]`: which rows had been replaced when they were loaded from a checkpoint; None if none was."""
