"""Readers of the rows of a buffer: what its handle, and each of its views, draw and gather."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast, final

import torch

from ostinato.buffers.checkpoint.save import checker, save_buffer
from ostinato.buffers.checkpoint.state import FORMAT, copy_part, engine_state, load_engine_states, load_saved
from ostinato.buffers.drawn_ahead import HeldRows
from ostinato.buffers.followers import used_rows
from ostinato.buffers.options import (
    check_view_parts,
    checked_slots,
    require_tracking,
)
from ostinato.buffers.part_owners import check_free, record_owner
from ostinato.buffers.parts import Parts
from ostinato.buffers.pipeline import make_batch
from ostinato.buffers.policy_versions import Versions, check_versions, no_versions
from ostinato.buffers.rate_limit import Ask, limits_of
from ostinato.buffers.records import Rows, Source
from ostinato.buffers.remover import make_remover
from ostinato.buffers.store import Store, copied
from ostinato.buffers.updates import as_sampler, check_sampler, parse_conditional, slots_of_rows
from ostinato.core.counts import BufferCounts, make_counts
from ostinato.core.kinds import require_eager
from ostinato.core.records import Draw, Plan, View
from ostinato.errors import (
    KeyMissingError,
    OptionError,
    OstinatoError,
    UsageError,
)
from ostinato.samplers.base import check_not_negative

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.buffers.remover import RemoverName
    from ostinato.buffers.updates import ConditionalUpdate, ConditionalUpdateResult, PriorityUpdate
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.samplers import PrioritySampler, Sampler
    from ostinato.transforms import Compose
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

_PLAIN = Ask()


@final
class Reader(Parts):
    """Draws and gathers rows of a store: sampler, unit, episodes, generator and queue of a buffer, or of a view of one.

    The store has a weak reference to each reader, and reports to its `observers` what happens to rows: a view that is
    dropped costs nothing more. Thread-safe: a draw holds the lock of the store (microseconds); the copy runs outside
    it. After a copy, generations tell whether a row was replaced meanwhile; the batch is then copied again under the
    lock, so that no batch holds a torn row.
    """

    direct_tried = False
    limiter: RateLimiter | None = None
    transform: Compose
    """The chain of transforms of a view."""
    batch_size: int | None = None
    """Rows of a batch of a view, if it is known."""

    def __getstate__(self) -> dict[str, Any]:
        """Everything but threads and direct calls; the store goes along. The caller holds the lock."""
        state = {k: v for k, v in self.__dict__.items() if k not in {"lock", "waiters"}}
        return {**state, "direct": None, "direct_tried": False, "queue": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Join the copy of the store."""
        self.__dict__.update(state)
        self.lock, self.waiters = self.store.lock, self.store.waiters
        for limit in self.limits:
            limit.attach(self.waiters)
        self.store.join(self)
        record_owner(self, self.sampler, *([self.store.writer] if self.own else []))

    # -- parts --------------------------------------------------------------------------------------------------------

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler; queued draws of the old one are dropped."""
        store = self.store
        store.require_private("exchange its sampler")
        check_free(sampler, self)
        check_sampler(store.storage, sampler)
        sampler.check_parts(store.storage, store.writer)
        if len(store.readers) > 1:
            check_view_parts(store.own.sampler if not self.own else sampler, sampler)
        with self.lock:
            self.check_removal(sampler, store.writer)
            self.tracker = self.make_tracker(sampler)
            sampler.move()
            old, self.sampler = self.sampler, sampler
            record_owner(self, sampler)
            self.pending.clear()
            if self.own and self.limiter is None:  # a queue makes its writers wait, other samplers do not
                self.limits = limits_of(self, None)
            self.follow()
            if self.own:
                store.begin_removal()
            self.begin_sampler()
            self.waiters.wake()
            return old

    def begin_limiter(self, limiter: RateLimiter | None) -> None:
        """Follow a rate limiter, or that of a queue; see `limits_of`."""
        self.limits = limits_of(self, limiter)
        self.follow()

    def without_rows(self, store: Store | None = None) -> Reader:
        """Return a reader with copies of the parts, over a store without rows, which a state is loaded into.

        Args:
            store: the copy of the store, for the reader of a view.

        Raises:
            OptionError: if a part cannot be copied.
        """
        made = object.__new__(Reader)
        vars(made).update(self.__getstate__())
        made.store = self.store.without_rows() if store is None else store
        made.store.join(made)
        made.lock, made.waiters, made.observers = self.lock, self.waiters, ()
        made.counts, made.pending = made.store.counts if self.own else make_counts(BufferCounts), deque()
        made.counts.redone = self.counts.redone
        made.sampler = copy_part(self.sampler)
        made.tracker = None if self.tracker is None else self.make_tracker(made.sampler)
        made.limits = ()
        made.limits = limits_of(made, self.limiter) if self.limits else ()
        made.rules = (*made.limits, *used_rows(made.sampler))
        return made

    # -- priorities ---------------------------------------------------------------------------------------------------

    @property
    def least_index(self) -> int:
        """Smallest slot in an index of rows to update; see `Store.least_index`."""
        return self.store.least_index

    @property
    def stale_updates(self) -> int | Tensor:
        """Priorities that were dropped because their rows had been replaced."""
        return self._stale_updates + self.ring.stale_updates

    def count_stale(self, count: int) -> None:
        """Count priorities that were dropped because their rows had been replaced."""
        if count:
            with self.lock:
                self._stale_updates = self._stale_updates + count

    def _tell_ranked(self, slots: Tensor) -> None:
        for observer in self.store.observers.ranking if self.own else ():
            observer.ranked(slots)

    def update_priorities(self, update: PriorityUpdate) -> None:
        """Set the priorities of rows, except those replaced since they were drawn, which are counted."""
        store = self.store
        with self.lock:
            store.follow_storage()
            if not update.slots.shape[0]:
                return
            slots, priorities, generations = update.of_era(store.era) if store.era else update
            if slots.is_cpu:
                check_not_negative(slots, least=store.least_index)
            elif store.least_index == 0:
                slots = torch.where(slots == -1, -2, slots)  # invalid, which `raise_deferred` raises
            sampler = cast("PrioritySampler", self.sampler)
            with store.ring.lock:
                if generations is None:
                    slots = store.present(slots)
                self._tell_ranked(slots)
                self._stale_updates = self._stale_updates + sampler.update(slots, priorities, generations, self.view())

    parse_conditional = parse_conditional
    make = make_batch

    def update_present(self, update: ConditionalUpdate) -> ConditionalUpdateResult:
        """Change fields and priorities of the rows of an update that are still there; see `update_if_present`."""
        require_eager("writing rows")
        with self.lock:
            self.store.follow_storage()
        with self.lock, self.ring.lock:
            store, storage = self.store, self.storage
            if update.fields:
                store.require_private("update fields, of which another process could read half")
            if not self.sampler.prioritized:
                require_tracking(store.writer)
            present = update.present(store.ring, store.era)
            accepted = update.accepted(present, storage.scores_at)
            at = update.chosen(accepted)
            slots, rows = update.slots[at], int(at.shape[0])
            fields = update.fields if rows else {}
            changes = [storage.prepare_field(path, slots, value[at], (rows,)) for path, value in fields.items()]
            if changes:
                store.edit(slots, changes, tuple(fields), same=True)
            if update.priorities is not None and rows:
                as_sampler(self.sampler).set_priorities(slots, update.priorities[at], self.view())
                self._tell_ranked(slots)
            return update.result(present, accepted)

    def reset_priorities(self, index: Any) -> None:
        """Give rows at an index the default priority; rows that have left return."""
        with self.lock, self.ring.lock:
            store, sampler = self.store, self.sampler
            if not sampler.prioritized and not sampler.leaves:
                return
            slots = store.present(slots_of_rows(self, index))
            self._tell_ranked(slots)
            slots = slots[slots >= 0]
            if sampler.leaves:
                sampler.mark_update(slots[store.ring.generations(slots) > 0])
            else:
                as_sampler(sampler).set_priorities(slots, None, self.view())

    # -- waiting ------------------------------------------------------------------------------------------------------

    def may_draw(self, rows: int) -> bool:
        """Whether a draw of so many rows need not wait: it is permitted, or a draw is left from a checkpoint."""
        return not self.limits or bool(self.pending) or all(limit.may_draw(self, rows) for limit in self.limits)

    def can_draw(self, rows: int) -> bool:
        """Whether a draw of so many rows returns at once, and does not raise."""
        with self.lock:
            self.store.follow_storage()
            if self.pending:
                return True
            view, sampler = self.view(), self.sampler
            ran_out = sampler.ran_out
            try:
                self.check_drawable(view)
                sampler.check_draw(view, rows)
            except OstinatoError:
                return False
            finally:
                if sampler.ran_out != ran_out:
                    sampler.ran_out = ran_out  # nothing was drawn
            allowed = all(rule.can_draw(self, rows) for rule in self.rules)
            return allowed and not (sampler.drop_last and rows > view.rows)

    def can_write(self, rows: int) -> bool:
        """Whether a write of so many rows goes ahead at once, as far as writer and rate limiter are concerned."""
        with self.lock:
            self.store.follow_storage()
            return self.store.writer.mutable and all(limit.admits(self, rows) for limit in self.limits)

    def wait_to_draw(self, rows: int, ask: Ask, queued: Callable[[], bool] = lambda: False) -> int:
        """Return once a draw of so many rows need not wait, or one is queued; the caller holds the lock.

        Returns:
            The rows to draw: fewer if the time is up, and at least `ask.min_rows` may be drawn.

        Raises:
            OptionError: if it could never be made.
            WaitTimeoutError: naming what the call waits for.
            EmptyBufferError: where no call waits, if too few draws are left.
        """
        for rule in self.rules:
            rows = rule.wait_to_draw(self, rows, ask, queued)
        return rows

    # -- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, batch_size: int, *, ahead: bool = False, ask: Ask = _PLAIN) -> Draw:
        """Draw slots; draws that a checkpoint left come first.

        Args:
            batch_size: rows.
            ahead: the draw is queued and may be dropped: remember the state of the generator.
            ask: how long to wait, where there is a limiter, and how old rows may be.

        Raises:
            EmptyBufferError: if there are no rows.
            WaitTimeoutError: if the limiter did not permit the draw in time.
        """
        with self.lock:
            self.store.follow_storage()
            if self._episodes is not None and self._episodes.continuity is not None:
                self._episodes.look(self.store)
            if self.rules:
                batch_size = self.wait_to_draw(batch_size, ask)
            if self.pending:
                return self.pending.popleft()
            generator = self.generator
            rng = generator.get_state() if ahead and generator is not None else None
            with self.store.ring.lock:
                view = self.store.view(self.sampler, self.tracker)
                draw = self.fresh(batch_size, generator, ask.max_age, view)
            if self.unit is not None or draw.length or draw.lengths is not None:
                draw = self.expand(draw, generator, view)
            if rng is not None:
                draw = draw._replace(rng=rng)
            for rule in self.rules:
                rule.drew(draw)
            return self.hold(draw) if ahead else draw

    def fresh(
        self,
        batch_size: int,
        generator: torch.Generator | None,
        max_age: int | None = None,
        view: View | None = None,
    ) -> Draw:
        """Draw slots with this generator, whatever draws a checkpoint left; not yet expanded.

        Raises:
            EmptyBufferError: if there are no rows.
        """
        ring = self.store.ring
        with self.lock, ring.lock:
            sampler = self.sampler
            view = self.view() if view is None else view
            if view.rows == 0 or view.starts is not None:
                self.check_drawable(view)
            if max_age is not None:
                view = self._recent(view, max_age)
            drawn = sampler.draw(view, batch_size, generator)
            slots, weights, info, generations, lengths, pad, length, *_ = drawn
            if slots.dtype is not torch.int64 or slots.device != view.device or not slots.is_contiguous():
                slots = checked_slots(slots, view.device, sampler)
            if generations is None and self.store.writer.tracks_generations:
                generations = ring.generations_of_rows(slots)
            serial, last = ring.counts.written, sampler.ran_out
            return Draw(slots, weights, info, generations, lengths, pad, length, serial, last, ring, sampler)

    def _recent(self, view: View, max_age: int) -> View:
        """Return a view of which only rows young enough may be drawn."""
        versions = self.store.versions
        if versions is None:
            raise OptionError(no_versions(max_age))
        if view.starts is not None and not self.sampler.by_age:
            msg = "max_age does not go with windows that only some rows can start, nor with masked rows: leave one out"
            raise OptionError(msg)
        return view._replace(starts=versions.recent(self.store, view, max_age))

    def expand(self, draw: Draw, generator: torch.Generator | None, view: View | None = None) -> Draw:
        """Plan what slices and units make of the rows drawn; the caller holds the lock.

        Raises:
            OptionError: if the storage has no fields.
        """
        unit, dice, each = self.unit, draw.dice, draw.length or draw.lengths
        if (unit is None or unit.plain) and each is None:
            return draw
        storage = self.store.source.storage
        schema, view = storage.schema, self.view() if view is None else view
        if schema is None:
            msg = f"{type(storage).__name__} has no fields for {unit or self.sampler!r}: use LazyTensorStorage"
            raise OptionError(msg)
        if each is None:
            plan = Plan(schema, draw.slots, draw.slots)
        else:
            plan = Plan.of_slices(schema, view.require_episodes(), draw.slots, each, draw.pad)
        if unit is not None:
            dice = unit.roll(plan.records.shape[0], view, generator) if dice is None else dice
            plan = unit.expand(plan, view, dice)
            records = checked_slots(plan.records, view.device, unit)
            plan = plan if records is plan.records else plan._replace(records=records)
        if draw.generations is not None and plan.records is not draw.slots:
            plan = plan._replace(generations=view.ring.generations_of_rows(plan.records))
        return draw._replace(plan=plan, dice=dice)

    def expand_again(self, draw: Draw, generator: torch.Generator | None = None) -> Draw | None:
        """Expand a draw as the buffer is now; None if a window no longer fits in its episode, or a row is masked now.

        The random numbers are those of the first time; `generator` is for draws that have not been expanded yet.
        """
        each = draw.rows_each
        if self.unit is None and each is None:
            return self._unmasked(draw)
        if draw.sampler is not self.sampler:
            return None  # the sampler was exchanged
        view = self.view()
        ahead = None if view.episodes is None else view.episodes.ahead(draw.slots)
        need = 1 if view.starts is None else view.starts.need
        if ahead is not None and bool((ahead + 1 < (need if each is None else each)).any()):
            return None
        return self.expand(draw, generator)

    def _unmasked(self, draw: Draw) -> Draw | None:
        """Return a draw of single rows without those masked or deleted now; None if it is to be made again.

        A pass without replacement does not draw its rows again: the batch goes without the rows that were replaced.
        """
        starts = self.view().starts
        if starts is None or bool((keep := starts.allowed(draw.slots)).all()):
            return draw
        if not draw.sampler.epochal or not bool(keep.any()):
            return None
        return draw._replace(slots=draw.slots[keep])

    def give_back(self, draw: Draw) -> None:
        """Undo the counts of a draw whose batch was not delivered."""
        if self.rules:
            with self.lock:
                for rule in self.rules:
                    rule.canceled(self, draw)

    def resumed(self, draws: list[Draw]) -> list[Draw]:
        """Return the draws of a checkpoint that are still to be delivered; the counts of void ones are undone."""
        for rule in self.rules:
            draws = rule.resumed(self, draws)
        return draws

    # -- gathering ----------------------------------------------------------------------------------------------------

    def gather(self, draw: Draw) -> Rows | None:
        """Copy the rows of a draw; None if the buffer was emptied since, so that there is nothing to copy.

        The rows of a draw made ahead are those at the draw.
        """
        held: HeldRows | None = draw.held
        if held is not None and held.rows is not None:
            return held.rows
        source = self.store.source
        payload: Any = None
        try:
            payload = copied(source.storage, draw, pin=self.store.pin)
        except (IndexError, KeyMissingError):
            if self._untouched(draw):
                raise  # else a writer is at work: look again under the lock
        ring = self.store.ring
        if ring is draw.ring and ring.counts.written == draw.serial:
            return Rows(source, payload, draw.serial, ring, draw)
        return self._gather_again(draw, source, payload)

    def hold(self, draw: Draw) -> Draw:
        """Return a draw made ahead, which keeps its rows as they are now; the caller holds the lock."""
        ring = self.store.ring
        if not self.storage.shared:
            return self.store.ahead.add(draw, ring)
        rows = cast("Rows", self.gather(draw))
        return rows.draw._replace(held=HeldRows(rows.draw, rows))

    def _gather_again(self, draw: Draw, source: Source, payload: Any) -> Rows | None:
        """Copy the rows again, under the lock, if one of them was replaced during the first copy."""
        slots = draw.slots_read
        held: HeldRows | None = draw.held
        with self.lock, self.store.ring.lock:
            if held is not None and held.rows is not None:
                return held.rows
            if payload is None or bool(self._changed(slots, draw.serial, draw.ring).any()):
                again = self._drawn_again(draw)
                if again is None:
                    return None
                source, draw = self.store.source, again
                payload = copied(source.storage, draw, pin=self.store.pin)
                self.counts.redone += 1
            if draw.generations is not None:
                generations = self.store.ring.generations(draw.slots)
                draw = draw._replace(generations=generations)
            return Rows(source, payload, self.store.ring.written, self.store.ring, draw)

    def _drawn_again(self, draw: Draw) -> Draw | None:
        """Return a draw in the place of one whose rows were replaced; None if its rows, or windows, are gone.

        From rows that processes share other ones are drawn then, while no process can replace them.
        """
        gone = int(draw.slots_read.max()) >= self.store.ring.rows  # emptied, or given another storage
        # the rows drawn were counted, not those that have replaced them
        again = None if gone or self.sampler.counting else self.expand_again(draw)
        if again is None and self.storage.shared:
            again = self.fresh(draw.records.shape[0], self.generator)._replace(rng=draw.rng)
            if bool((self.store.ring.generations(again.slots) <= 0).any()):
                msg = f"{self.sampler!r} draws rows that are being written: it may draw where view.allowed() is True"
                raise UsageError(msg)
        return again

    def _untouched(self, draw: Draw) -> bool:
        """Whether nothing at all was written since a draw."""
        ring = self.store.ring
        return ring is draw.ring and ring.written == draw.serial

    def replaced(self, draw: Draw) -> bool:
        """Whether a row that a draw reads was replaced since."""
        return not self._untouched(draw) and bool(self._changed(draw.slots_read, draw.serial, draw.ring).any())

    def _changed(self, slots: Tensor, serial: int, ring: object) -> Tensor:
        if ring is not self.store.ring:
            return torch.ones_like(slots, dtype=torch.bool)
        return self.store.ring.changed(slots, serial)

    def deliver(self, draw: Draw) -> None:
        """Count the rows of a batch that reached the caller."""
        with self.lock, self.store.ring.lock:
            self.counts.drawn += (draw.slots if draw.plan is None else draw.plan.records).shape[0]
            for rule in self.rules:
                rule.delivered(self, draw)

    def stale(self, draw: Draw, rows: Rows) -> Tensor:
        """Return bool `[R]`, and count, which rows were replaced since they were gathered."""
        with self.lock:
            stale = self.stale_rows(draw, rows)
            if rows.stale is not None or not self._is_as_of(rows):  # else none is, and a device need not be waited for
                self.rows_stale += int(stale.sum())
            return stale

    def _is_as_of(self, rows: Rows) -> bool:
        """Whether nothing was written since rows were gathered."""
        return self.store.ring is rows.ring and self.store.ring.written == rows.serial

    def stale_rows(self, draw: Draw, rows: Rows) -> Tensor:
        """Return bool `[R]`: which rows were replaced since they were gathered; the caller holds the lock."""
        slots = draw.records
        if self._is_as_of(rows):
            changed = torch.zeros_like(slots, dtype=torch.bool)
        else:
            changed = self._changed(slots, rows.serial, rows.ring)
        return changed if rows.stale is None else changed | rows.stale

    # -- checkpoints --------------------------------------------------------------------------------------------------

    format_name = FORMAT
    checker, save, load = checker, save_buffer, load_saved

    @property
    def saved(self) -> list[Reader]:
        """The engines whose rows a save writes."""
        self.own_store("save or load a checkpoint")
        return [self]

    def state(self, queued: Sequence[Draw], transform: Compose, batch_size: int | None) -> dict[str, Any]:
        """Return the whole state, with draws that are queued; nothing is copied. The caller holds the lock."""
        store = self.own_store("save or copy the state")
        seen = store.storage.writes == store.counts.writes_seen
        store.follow_storage()
        with self.ring.lock:
            store.follow_storage()  # what other processes wrote before they had to wait
            return engine_state(self, queued if seen else [], transform, batch_size)

    def load_state(self, state: dict[str, Any], transform: Compose, batch_size: int | None) -> None:
        """Restore a state, by copy. If it does not fit, nothing has changed.

        Raises:
            CheckpointError: naming the part that differs.
        """
        self.own_store("load a state")
        with self.lock:
            load_engine_states([(self, transform, batch_size)], [state])


def make_reader(
    source: Source,
    sampler: Sampler,
    writer: Writer,
    generator: torch.Generator | None,
    unit: SampleUnit | None = None,
    episodes: Episodes | None = None,
    limiter: RateLimiter | None = None,
    version_key: str | tuple[str, ...] | None = None,
    remover: RemoverName | None = None,
) -> Reader:
    """Return the reader of a new buffer.

    Args:
        source: the storage and its collate function.
        sampler: which rows come next.
        writer: where new rows go.
        generator: source of all draws; None is torch's global generator.
        unit: what a drawn row becomes; None leaves it a row.
        episodes: where episodes end; None takes what unit and sampler say.
        limiter: when readers and writers wait for each other.
        version_key: field that holds the version of the policy.
        remover: which row leaves when the buffer is full; None is up to the writer.

    Raises:
        OptionError: if parts do not go together.
    """
    store, storage = Store(source, writer), source.storage
    reader = Reader(store, sampler, generator, unit, episodes)
    store.join(reader)
    if len(storage):
        store.ring.take_over(len(storage), storage.cursor)
        writer.begin(len(storage))
        reader.begin_sampler()
    reader.limiter = limiter
    reader.begin_limiter(limiter)
    store.versions = None if version_key is None else Versions(version_key)
    check_versions(writer, store.versions)
    store.remover = make_remover(remover, storage, sampler, writer, store.versions, tracked=reader.tracked)
    store.parts_changed()
    return reader
