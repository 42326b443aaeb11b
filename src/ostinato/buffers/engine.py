"""The engine: draws under the lock, gathers outside it, and redoes what a writer changed meanwhile."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.buffers.checkpoint.state import Saves
from ostinato.buffers.checks import (
    check_order,
    check_pair,
    check_single,
    checked_picks,
    checked_run,
    checked_slots,
    refuse_picks,
)
from ostinato.buffers.episode_tracker import EpisodeTracker
from ostinato.buffers.pipeline import copy, expand, expand_again
from ostinato.buffers.policy_versions import Versions, check_versions, draw_recent
from ostinato.buffers.priority_updates import as_sampler, check_sampler, priorities_of_rows
from ostinato.buffers.rate_limit import Ask, Gate, Waiters, as_counting, check_counting, give_back
from ostinato.buffers.records import Rows, Source, Ticket
from ostinato.core.episodes.keys import Marks, merge_episodes
from ostinato.core.kinds import require_eager
from ostinato.core.records import Run, View
from ostinato.core.ring import Ring
from ostinato.errors import EmptyBufferError, KeyMissingError, OptionError, SlotError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.episodes.keys import Episodes
    from ostinato.core.records import Placement
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
        self.waiters = Waiters()
        self.lock = self.waiters.lock
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
        self.restores = 0
        """Loads that failed after they had changed rows, which were brought back."""
        self.unit = unit
        self.episodes = episodes
        self.gate: Gate | None = None
        self.versions: Versions | None = None
        self.tracker = self._make_tracker(sampler)
        self.ring = Ring(storage.capacity, storage.device)
        self.settled = False
        check_pair(storage, writer)
        check_sampler(storage, sampler)
        if len(storage):
            self.ring.take_over(len(storage), storage.cursor)
            writer.begin(len(storage))
            self.begin_sampler()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock; the caller holds it. Pickled storages are copies."""
        return {k: v for k, v in self.__dict__.items() if k not in {"lock", "waiters"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a lock of its own."""
        self.__dict__.update(state)
        self.waiters = Waiters()
        self.lock = self.waiters.lock
        if self.gate is not None:
            self.gate.attach(self.waiters)

    @property
    def storage(self) -> Storage:
        """The storage."""
        return self.source.storage

    def view(self) -> View:
        """Return what samplers may see, now."""
        ring = self.ring
        if self.tracker is None or ring.rows == 0:
            return View(ring.rows, ring.capacity, ring.cursor, ring, ring.device)
        episodes, starts = self.tracker.view(self.source.storage)
        return View(ring.rows, ring.capacity, ring.cursor, ring, ring.device, episodes, starts)

    def _make_tracker(self, sampler: Sampler) -> EpisodeTracker | None:
        """Begin to keep account of episodes if anyone asks for them."""
        unit = self.unit
        check_single(unit, sampler)
        wanted = merge_episodes([self.episodes, None if unit is None else unit.episodes, sampler.episodes])
        check_counting(sampler, self.writer, unit, wanted)
        if wanted is None:
            return None
        check_order(self.writer)
        need, span = (1, 1) if unit is None else (unit.need, unit.span)
        tracker = EpisodeTracker(wanted, need, max(span, sampler.span))
        tracker.check_span(self.storage)
        return tracker

    # -- writing ----------------------------------------------------------------------------------------------

    def write(self, data: Any, lead: int, *, ranked: bool = True, timeout_s: float | None = None) -> Placement:
        """Check rows, give them slots, stamp these, copy, tell the sampler. All or nothing. No rows change nothing.

        `data` is one row (`lead=0`, of `add`) or rows (`lead=1`, of `extend`); without `ranked` they get the default
        priority, whatever they bring along. `timeout_s` is the longest wait for readers, where there is a gate; None
        is the limiter's.
        """
        require_eager("writing rows")
        with self.lock:
            storage, sampler = self.storage, self.sampler
            prioritized = sampler.prioritized
            laid_out = storage.laid_out
            payload, rows = storage.admit(data, lead)
            if rows == 0:
                return self._no_rows()
            given, marks, tracker, versions = None, Marks(), self.tracker, self.versions
            try:
                left_s = None if self.gate is None else self.hold_write(rows, timeout_s)
                if left_s is not None:  # anything may have changed meanwhile: check the rows anew
                    return self.write(data, lead, ranked=ranked, timeout_s=left_s)
                given = priorities_of_rows(self, data, rows) if prioritized and ranked else None
                if tracker is not None:
                    marks = tracker.read(storage, payload, rows)
                found = None if versions is None else versions.read(storage, payload, rows)
                placement = self._place(payload, rows)
            except Exception:
                if not laid_out:
                    storage.forget_form()
                    self.settled = False
                raise
            self._store(placement, payload)
            if tracker is not None:
                tracker.record(storage, placement, marks)
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

    def _store(self, placement: Placement, payload: Any) -> None:
        """Record a placement, then copy its rows: a reader that meets half of them sees other generations."""
        ring, storage = self.ring, self.source.storage
        if self.saves.cut is not None:
            self.saves.before(ring, placement)
        rows, cursor = ring.rows, ring.cursor
        ring.record(placement)
        try:
            storage.set(placement, payload)
        except BaseException:  # such as too little memory for the table that the first rows allocate
            if len(storage) == rows:
                ring.take_back(placement, rows, cursor)
            raise

    def _no_rows(self) -> Run:
        """Return the placement of no rows: nothing changes, no one waits; a writer that takes no rows raises."""
        if not self.writer.mutable:
            self.writer.place(0, self.ring, None)
        return Run(0, 0, self.storage.capacity)

    def _place(self, payload: Any, rows: int) -> Placement:
        """Let the writer choose slots; nothing is written if it, or a check, refuses."""
        storage, writer = self.storage, self.writer
        if not self.settled:
            self._settle()
        scores = None if writer.rank_path is None else storage.scores(payload, writer.rank_path)
        placement = writer.place(rows, self.ring, scores)
        if isinstance(placement, Run):
            return placement if placement.rows == rows and not placement.skip else checked_run(placement, rows)
        if storage.ring_only:
            refuse_picks(writer)
        return checked_picks(placement, len(storage), storage.capacity, rows)

    def _settle(self) -> None:
        """Follow a storage whose capacity (lanes) or device became known with its first rows."""
        storage = self.storage
        generator = self.generator
        if generator is not None and generator.device.type != storage.device.type:
            msg = f"the generator lives on {generator.device}, the storage on {storage.device}: draws need one device"
            raise OptionError(msg)
        if (self.ring.capacity, self.ring.device) != (storage.capacity, storage.device):
            self.ring = Ring(storage.capacity, storage.device, after=self.ring.written)
        self.settled = True

    def begin_sampler(self) -> None:
        """Let a sampler that keeps account of rows take in those that are there."""
        if self.sampler.prioritized:
            as_sampler(self.sampler).begin(self.view())
        elif self.sampler.counting:
            as_counting(self.sampler).begin(self.view())
        else:
            self.sampler.recheck()

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
            self.saves.before_clear(self.ring, len(self.storage))
            self.ring.clear()
            self.storage.clear()
            if self.tracker is not None:
                self.tracker.clear()
            self.sampler.clear()
            self.pending.clear()
            self._begin_counts()
            self.waiters.wake()

    # -- waiting ----------------------------------------------------------------------------------------------

    def may_draw(self, rows: int) -> bool:
        """Whether a draw of so many rows need not wait: it may be made, or a checkpoint has brought one along."""
        return self.gate is None or bool(self.pending) or self.gate.may_draw(self, rows)

    def hold_draw(self, rows: int, ask: Ask, queued: Callable[[], bool] = lambda: False) -> None:
        """Return once a draw of so many rows need not wait, or one is queued; the caller holds the lock.

        Raises:
            OptionError: if it could never be made.
            WaitTimeoutError: naming who waits for what.
        """
        gate = self.gate
        if gate is None or queued() or self.may_draw(rows):
            return
        begun = ask if ask.until is not None else ask.begun(gate)
        waited_s, until = begun.timeout_s or 0.0, begun.until or 0.0

        def held_by() -> Gate | None:
            gate = self.gate  # another sampler may have brought another one
            if gate is None or queued() or self.may_draw(rows):
                return None
            gate.check_draw(self, rows)
            return gate

        self.waiters.hold(
            self.waiters.readers, rows, until, held_by, lambda gate: gate.why_no_draw(self, rows, waited_s)
        )

    def hold_write(self, rows: int, timeout_s: float | None) -> float | None:
        """Return once so many rows may be written: the seconds that are left, None if no wait was needed.

        Raises:
            OptionError: if they could never be written.
            WaitTimeoutError: naming who waits for what.
        """

        def held_by() -> Gate | None:
            gate = self.gate
            if gate is None:
                return None
            gate.check_write(self, rows)
            return None if gate.may_write(self, rows) else gate

        gate = held_by()
        if gate is None:
            return None
        waited_s = gate.patience_s(timeout_s)
        until = time.monotonic() + waited_s
        self.waiters.hold(
            self.waiters.writers, rows, until, held_by, lambda gate: gate.why_no_write(self, rows, waited_s)
        )
        return max(0.0, until - time.monotonic())

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
                self.hold_draw(batch_size, ask)
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
            view = self.drawable_view()
            if max_age is None:
                draw = self.sampler.draw(view, batch_size, generator)
            else:
                draw = draw_recent(self, view, batch_size, generator, max_age)
            slots = checked_slots(draw.slots, view.device, self.sampler)
            if slots is not draw.slots:
                draw = draw._replace(slots=slots)
            return Ticket(draw, self.ring.written, self.sampler.ran_out, self.ring, self.sampler)

    def drawable_view(self) -> View:
        """Return what samplers may see, now, of a buffer that has rows to draw.

        Raises:
            EmptyBufferError: if there are none.
        """
        view = self.view()
        if view.rows == 0:
            msg = "Cannot sample from an empty storage: add rows first"
            raise EmptyBufferError(msg)
        if view.starts is not None and view.starts.rows == 0:
            need = view.starts.need
            msg = f"no row has {need} rows of its episode from itself on: add longer episodes or shorten the window"
            raise EmptyBufferError(msg)
        return view

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
        source, restores = self.source, self.restores
        payload: Any = None
        try:
            payload = copy(source.storage, ticket, pin=self.pin)
        except (IndexError, KeyMissingError):
            if self._untouched(ticket) and self.restores == restores:
                raise  # else a writer was in the middle of its work: look again under the lock
        if self.restores != restores:
            payload = None
        elif self._untouched(ticket):
            return Rows(source, payload, ticket.serial, ticket.ring, ticket)
        slots = ticket.slots_read
        with self.lock:
            if payload is None or bool(self._newer(slots, ticket.serial, ticket.ring).any()):
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
            if ticket.draw.generations is not None:
                ticket = ticket._replace(
                    draw=ticket.draw._replace(generations=self.ring.generations(ticket.draw.slots))
                )
            return Rows(source, payload, self.ring.written, self.ring, ticket)

    def _untouched(self, ticket: Ticket) -> bool:
        """Whether nothing at all was written since a draw."""
        stamps = self.ring
        return stamps is ticket.ring and stamps.written == ticket.serial

    def replaced(self, ticket: Ticket) -> bool:
        """Whether a row that a draw reads was replaced since."""
        return not self._untouched(ticket) and bool(self._newer(ticket.slots_read, ticket.serial, ticket.ring).any())

    def _newer(self, slots: Tensor, serial: int, stamps: object) -> Tensor:
        if stamps is not self.ring:
            return torch.ones_like(slots, dtype=torch.bool)
        return self.ring.changed(slots, serial)

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
            if self.ring is rows.ring and self.ring.written == rows.serial:
                return torch.zeros_like(slots, dtype=torch.bool)
            stale = self._newer(slots, rows.serial, rows.ring)
            self.rows_stale += int(stale.sum())
            return stale

    def move_cursor(self, slot: int) -> None:
        """Let the next rows go to `slot`."""
        with self.lock:
            ring = self.ring
            if not 0 <= slot <= min(ring.rows, ring.capacity - 1):
                most = min(ring.rows, ring.capacity - 1)
                msg = f"the cursor must be in [0, {most}], so that no slot between rows stays empty, got {slot}"
                raise SlotError(msg)
            ring.move(slot)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler; queued draws of the old one go."""
        check_sampler(self.storage, sampler)
        with self.lock:
            self.tracker = self._make_tracker(sampler)
            sampler.clear()  # whatever it remembers is of another buffer
            old, self.sampler = self.sampler, sampler
            self.pending.clear()
            self.begin_sampler()
            self.waiters.wake()
            return old

    def set_writer(self, writer: Writer) -> Writer:
        """Exchange the writer; the new one goes on after the newest row."""
        check_pair(self.storage, writer)
        if self.tracker is not None:
            check_order(writer)
        check_counting(self.sampler, writer, None, None)
        check_versions(writer, self.versions)
        with self.lock:
            if self.ring.rows:
                writer.begin(self.ring.rows)
            old, self.writer = self.writer, writer
            self.waiters.wake()
            return old

    def set_source(self, source: Source) -> Storage:
        """Exchange the storage and return the old one; writer, sampler and stamps follow what the new one holds."""
        storage = source.storage
        check_pair(storage, self.writer)
        check_sampler(storage, self.sampler)
        if self.tracker is not None:
            self.tracker.check_span(storage)
        with self.lock:
            if len(storage):
                self.writer.begin(len(storage))  # first: it may raise
            else:
                self.writer.clear()
            self.sampler.clear()
            self.pending.clear()
            # stamps first: a gather in flight that meets the new storage then sees that all is new
            self.ring = Ring(storage.capacity, storage.device, after=self.ring.written + 1)
            old, self.source = self.storage, source
            if self.tracker is not None:
                self.tracker.forget()
            self.settled = False
            if len(storage):
                self.ring.take_over(len(storage), storage.cursor)
                self.begin_sampler()
            self._begin_counts()
            self.waiters.wake()
            return old
