"""The engine: draws under the lock, gathers outside it, and redoes what a writer changed meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.buffers import priorities
from ostinato.buffers.checks import check_order, check_pair, check_single, checked_picks, refuse_picks
from ostinato.buffers.chronicle import Chronicle
from ostinato.buffers.cut import Saves
from ostinato.buffers.expansion import copy, expand, expand_again
from ostinato.buffers.gate import Ask, Gate, as_counting, check_counting, give_back
from ostinato.buffers.priorities import as_sampler, check_sampler
from ostinato.buffers.records import Rows, Source, Ticket
from ostinato.buffers.versions import Versions, check_versions, draw_recent
from ostinato.core.boundaries import Marks, merge_episodes
from ostinato.core.draw import Run, View
from ostinato.core.stamps import Stamps
from ostinato.errors import EmptyBufferError, KeyMissingError, OptionError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.boundaries import Episodes
    from ostinato.core.draw import Placement
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

__all__ = ["Engine"]

_PLAIN = Ask()


@final
class Engine:
    """Owner of the parts, the one lock, the generator and the stamps.

    Thread-safe. Sampling threads hold the lock only for the draw (microseconds); the copy runs outside it. A row
    that is replaced while it is copied is noticed by its stamp, and the batch is copied once more under the lock, so
    that no batch holds a torn row. Writers announce (stamp) before they copy; the native calls fence both sides.
    """

    def __init__(
        self,
        source: Source,
        sampler: Sampler,
        writer: Writer,
        generator: torch.Generator | None,
        unit: SampleUnit | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.saves = Saves()
        storage = source.storage
        self.source = source
        self.sampler = sampler
        self.writer = writer
        self.generator = generator
        self.pin = False
        self.pending: deque[Ticket] = deque()
        self.rows_written = 0
        self.rows_since_empty = 0
        self.rows_drawn = 0
        self.rows_stale = 0
        self.redone = 0
        self.stale_updates: int | Tensor = 0
        self.priority_path: tuple[str, ...] | None = None
        self.era = 0
        self.unit = unit
        self.episodes = episodes
        self.gate: Gate | None = None
        self.versions: Versions | None = None
        self.chronicle = self._begin_chronicle(sampler)
        self.stamps = Stamps(storage.capacity, storage.device)
        self.settled = False
        check_pair(storage, writer)
        check_sampler(storage, sampler)
        if len(storage):
            self.stamps.resume(len(storage), storage.cursor)
            writer.resume(len(storage), storage.cursor)
            self.begin_sampler()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock; the caller holds it. Pickled storages are copies."""
        return {k: v for k, v in self.__dict__.items() if k != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a lock of its own."""
        self.__dict__.update(state)
        self.lock = threading.RLock()
        if self.gate is not None:
            self.gate.attach(self.lock)

    @property
    def storage(self) -> Storage:
        """The storage."""
        return self.source.storage

    def view(self) -> View:
        """Return what samplers may see, now."""
        storage = self.storage
        view = View(len(storage), storage.capacity, self.writer.cursor, self.stamps, storage.device)
        if self.chronicle is None or view.rows == 0:
            return view
        return View(*view[:5], *self.chronicle.look(storage))

    def _begin_chronicle(self, sampler: Sampler) -> Chronicle | None:
        """Begin to keep account of episodes if anyone asks for them."""
        unit = self.unit
        check_single(unit, sampler)
        wanted = merge_episodes([self.episodes, None if unit is None else unit.episodes, sampler.episodes])
        check_counting(sampler, self.writer, unit, wanted)
        if wanted is None:
            return None
        check_order(self.writer)
        need, span = (1, 1) if unit is None else (unit.need, unit.span)
        chronicle = Chronicle(wanted, need, max(span, sampler.span))
        chronicle.check_span(self.storage)
        return chronicle

    # -- writing ----------------------------------------------------------------------------------------------

    def write(self, data: Any, lead: int, *, ranked: bool = True, timeout_s: float | None = None) -> Placement:
        """Check rows, give them slots, stamp these, copy, tell the sampler. All or nothing. No rows change nothing.

        `data` is one row (`lead=0`, of `add`) or rows (`lead=1`, of `extend`); without `ranked` they get the default
        priority, whatever they bring along. `timeout_s` is the longest wait for readers, where there is a gate; None
        is the limiter's.
        """
        with self.lock:
            storage, sampler = self.storage, self.sampler
            prioritized = sampler.prioritized
            laid_out = storage.laid_out
            payload, rows = storage.admit(data, lead)
            if rows == 0:
                return self._no_rows()
            given, marks, chronicle, versions = None, Marks(), self.chronicle, self.versions
            try:
                if self.gate is not None and self.gate.hold_write(self, rows, timeout_s):
                    return self.write(data, lead, ranked=ranked)  # others have written: check the rows anew
                given = priorities.from_rows(self, data, rows) if prioritized and ranked else None
                if chronicle is not None:
                    marks = chronicle.read(storage, payload, rows)
                found = None if versions is None else versions.read(storage, payload, rows)
                placement = self._place(payload, rows)
            except Exception:
                if not laid_out:
                    storage.forget_form()
                    self.settled = False
                raise
            self.saves.before(self.stamps, placement)
            self.stamps.note(placement)
            storage.set(placement, payload)
            if chronicle is not None:
                chronicle.note(storage, placement, marks)
            if versions is not None and found is not None:
                versions.note(placement, found)
            self.rows_written += rows
            self.rows_since_empty += rows
            if prioritized:
                as_sampler(sampler).receive(placement, given, self.view())
            else:
                sampler.hear(placement)
            if self.gate is not None:
                self.gate.wrote(rows)
            return placement

    def _no_rows(self) -> Run:
        """Return the placement of no rows: nothing changes, no one waits; a writer that takes no rows raises."""
        if not self.writer.mutable:
            self.writer.place(0, self.storage.capacity, None)
        return Run(0, 0, self.storage.capacity)

    def _place(self, payload: Any, rows: int) -> Placement:
        """Let the writer choose slots; nothing is written if it, or a check, refuses."""
        storage, writer = self.storage, self.writer
        if not self.settled:
            self._settle()
        scores = None if writer.rank_path is None else storage.scores(payload, writer.rank_path)
        placement = writer.place(rows, storage.capacity, scores)
        if isinstance(placement, Run):
            return placement
        if storage.ring_only:
            refuse_picks(writer)
        return checked_picks(placement, len(storage), storage.capacity)

    def _settle(self) -> None:
        """Follow a storage whose capacity (lanes) or device became known with its first rows."""
        storage = self.storage
        generator = self.generator
        if generator is not None and generator.device.type != storage.device.type:
            msg = f"the generator lives on {generator.device}, the storage on {storage.device}: draws need one device"
            raise OptionError(msg)
        if (self.stamps.capacity, self.stamps.device) != (storage.capacity, storage.device):
            self.stamps = Stamps(storage.capacity, storage.device, after=self.stamps.written)
        self.settled = True

    def begin_sampler(self) -> None:
        """Let a sampler that keeps account of rows take in those that are there."""
        if self.sampler.prioritized:
            as_sampler(self.sampler).begin(self.view())
        elif self.sampler.counting:
            as_counting(self.sampler).begin(self.view())

    def _begin_counts(self) -> None:
        """Let counts and versions begin anew with the rows that are there."""
        if self.gate is not None:
            self.gate.begin(self)
        if self.versions is not None:
            self.versions.begin(len(self.storage))

    def learn(self, slots: Tensor, values: Tensor, stamps: Tensor | None) -> None:
        """Give rows the priorities learned for them, but those replaced since; the caller holds the lock."""
        self.stale_updates = self.stale_updates + as_sampler(self.sampler).learn(slots, values, stamps, self.view())

    def clear(self) -> None:
        """Forget all rows and queued draws."""
        with self.lock:
            if not self.writer.mutable:
                msg = f"this dataset does not allow writing ({type(self.writer).__name__}): it cannot be emptied"
                raise UsageError(msg)
            self.writer.clear()
            self.rows_since_empty = 0
            self.saves.before_clear(self.stamps, len(self.storage))
            self.stamps.clear()
            self.storage.clear()
            if self.chronicle is not None:
                self.chronicle.clear()
            self.sampler.clear()
            self.pending.clear()
            self._begin_counts()

    # -- reading ----------------------------------------------------------------------------------------------

    def draw(self, batch_size: int, *, ahead: bool = False, ask: Ask = _PLAIN) -> Ticket:
        """Draw slots under the lock; draws that a checkpoint brought along come first.

        Args:
            batch_size: rows.
            ahead: the draw is queued and may be dropped: remember where the generator was.
            ask: how long to wait, where there is a gate, and how old rows may be.

        Raises:
            EmptyBufferError: if there are no rows.
            WaitTimeoutError: if the gate did not open in time.
        """
        with self.lock:
            if self.gate is not None:
                self.gate.hold_draw(self, batch_size, ask.timeout_s)
            if self.pending:
                return self.pending.popleft()
            rng = self.generator.get_state() if ahead and self.generator is not None else None
            ticket = self.fresh(batch_size, self.generator, ask.max_age)
            if rng is not None:
                ticket = ticket._replace(rng=rng)
            ticket = expand(self, ticket, self.generator)
            if self.gate is not None:
                self.gate.drew(ticket)
            return ticket

    def fresh(self, batch_size: int, generator: torch.Generator | None, max_age: int | None = None) -> Ticket:
        """Draw slots with the randomness given, whatever draws a checkpoint brought along; not yet expanded.

        Raises:
            EmptyBufferError: if there are no rows.
        """
        with self.lock:
            view = self.view()
            if view.rows == 0:
                msg = "Cannot sample from an empty storage: add rows first"
                raise EmptyBufferError(msg)
            if view.starts is not None and view.starts.rows == 0:
                need = view.starts.need
                msg = f"no row has {need} rows of its episode from itself on: add longer episodes or shorten the window"
                raise EmptyBufferError(msg)
            if max_age is None:
                draw = self.sampler.draw(view, batch_size, generator)
            else:
                draw = draw_recent(self, view, batch_size, generator, max_age)
            if draw.slots.dtype is not torch.int64 or not draw.slots.is_contiguous():
                draw = draw._replace(slots=draw.slots.to(torch.int64).contiguous())  # native code reads addresses
            return Ticket(draw, self.stamps.written, self.sampler.ran_out, self.stamps, self.sampler)

    def undraw(self, queued: list[Ticket]) -> None:
        """Forget draws that were made ahead, the oldest first, and those of a checkpoint: as if never made."""
        with self.lock:
            dropped = [*queued, *self.pending]
            for ticket in dropped if self.gate is not None or self.sampler.counting else ():
                give_back(self, ticket)
            self.pending.clear()
            if dropped and dropped[0].rng is not None and self.generator is not None:
                self.generator.set_state(dropped[0].rng)

    def gather(self, ticket: Ticket) -> Rows | None:
        """Copy the rows of a ticket; None if the buffer was emptied since, so that there is nothing to copy."""
        source = self.source
        payload: Any = None
        try:
            payload = copy(source.storage, ticket, pin=self.pin)
        except (IndexError, KeyMissingError):
            if self._untouched(ticket):
                raise  # else a writer was in the middle of its work: look again under the lock
        if self._untouched(ticket):
            return Rows(source, payload, ticket.serial, ticket.stamps, ticket)
        slots = ticket.slots_read
        with self.lock:
            if payload is None or bool(self._newer(slots, ticket.serial, ticket.stamps).any()):
                if int(slots.max()) >= len(self.storage):
                    return None  # emptied, or given another storage, since the draw
                if self.sampler.counting:
                    return None  # the rows drawn were counted, not those that have replaced them
                again = expand_again(self, ticket)
                if again is None:
                    return None  # a window would not be whole any more
                source, ticket = self.source, again
                payload = copy(source.storage, ticket, pin=self.pin)
                self.redone += 1
            if ticket.draw.stamps is not None:
                ticket = ticket._replace(draw=ticket.draw._replace(stamps=self.stamps.of(ticket.draw.slots)))
            return Rows(source, payload, self.stamps.written, self.stamps, ticket)

    def _untouched(self, ticket: Ticket) -> bool:
        """Whether nothing at all was written since a draw."""
        stamps = self.stamps
        return stamps is ticket.stamps and stamps.written == ticket.serial

    def _newer(self, slots: Tensor, serial: int, stamps: object) -> Tensor:
        if stamps is not self.stamps:
            return torch.ones_like(slots, dtype=torch.bool)
        return self.stamps.newer(slots, serial)

    def deliver(self, ticket: Ticket) -> None:
        """Count the rows of a batch that reached the caller."""
        with self.lock:
            self.rows_drawn += ticket.records.shape[0]
            if self.gate is not None:
                self.gate.delivered(self, ticket)

    def stale(self, ticket: Ticket, rows: Rows) -> Tensor:
        """Return bool `[R]`: which rows were replaced since they were gathered."""
        slots = ticket.records
        with self.lock:
            if self.stamps is rows.stamps and self.stamps.written == rows.serial:
                return torch.zeros_like(slots, dtype=torch.bool)
            stale = self._newer(slots, rows.serial, rows.stamps)
            self.rows_stale += int(stale.sum())
            return stale

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler; queued draws of the old one go."""
        check_sampler(self.storage, sampler)
        with self.lock:
            self.chronicle = self._begin_chronicle(sampler)
            sampler.clear()  # whatever it remembers is of another buffer
            old, self.sampler = self.sampler, sampler
            self.pending.clear()
            self.begin_sampler()
            return old

    def set_writer(self, writer: Writer) -> Writer:
        """Exchange the writer; the new one goes on after the newest row."""
        check_pair(self.storage, writer)
        if self.chronicle is not None:
            check_order(writer)
        check_counting(self.sampler, writer, None, None)
        check_versions(writer, self.versions)
        with self.lock:
            if len(self.storage):
                writer.resume(len(self.storage), self.storage.cursor)
            old, self.writer = self.writer, writer
            return old

    def set_source(self, source: Source) -> Storage:
        """Exchange the storage and return the old one; writer, sampler and stamps follow what the new one holds."""
        storage = source.storage
        check_pair(storage, self.writer)
        check_sampler(storage, self.sampler)
        if self.chronicle is not None:
            self.chronicle.check_span(storage)
        with self.lock:
            if len(storage):
                self.writer.resume(len(storage), storage.cursor)  # first: it may refuse
            else:
                self.writer.clear()
            self.sampler.clear()
            self.pending.clear()
            # stamps first: a gather in flight that meets the new storage then sees that all is new
            self.stamps = Stamps(storage.capacity, storage.device, after=self.stamps.written + 1)
            old, self.source = self.storage, source
            if self.chronicle is not None:
                self.chronicle.forget()
            self.settled = False
            if len(storage):
                self.stamps.resume(len(storage), storage.cursor)
                self.begin_sampler()
            self._begin_counts()
            return old
