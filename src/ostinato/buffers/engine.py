"""The engine of a buffer: storage, sampler, writer and ring under one lock."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ostinato.buffers.checkpoint.load import Target, load_buffer, load_engine_states
from ostinato.buffers.checkpoint.save import Saves, save_buffer
from ostinato.buffers.checkpoint.state import engine_state
from ostinato.buffers.checks import (
    check_budget_parts,
    check_order,
    check_pair,
    check_single,
    check_view_parts,
    checked_picks,
    checked_run,
    checked_slots,
    raise_for_picks,
    raise_for_priorities,
    require_tracking,
)
from ostinato.buffers.continuity import ContinuityCheck, warn_of_order
from ostinato.buffers.drawn_ahead import DrawnAhead
from ostinato.buffers.options import check_same_device
from ostinato.buffers.part_owners import check_free, forget_rows, record_owner
from ostinato.buffers.policy_versions import begin_versions, check_versions, no_versions
from ostinato.buffers.priority_updates import (
    GENERATIONS_PER_ERA,
    as_sampler,
    check_sampler,
    generations_at,
    priorities_of_rows,
    read_generations,
    read_slots,
)
from ostinato.buffers.rate_limit import Ask, Gate, Stock, Waiters, as_counting, check_counting
from ostinato.buffers.records import Rows, Source, Ticket
from ostinato.buffers.remover import Remover, check_deletable, make_remover
from ostinato.buffers.view_list import ViewList
from ostinato.core.counts import BufferCounts, make_counts
from ostinato.core.eligible import Eligible
from ostinato.core.episodes.keys import Marks, merge_episodes
from ostinato.core.episodes.tracker import EpisodeTracker
from ostinato.core.index import select
from ostinato.core.kinds import require_eager
from ostinato.core.records import Plan, Run, View
from ostinato.core.ring import Ring
from ostinato.errors import (
    EmptyBufferError,
    KeyMissingError,
    OptionError,
    OstinatoError,
    SlotError,
    UsageError,
    WaitTimeoutError,
)
from ostinato.samplers.base import check_not_negative, check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato._native import Direct
    from ostinato.buffers.conditional_updates import ConditionalUpdate, ConditionalUpdateResult
    from ostinato.buffers.pipeline import Prefetcher
    from ostinato.buffers.priority_updates import PriorityUpdate
    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.buffers.remover import RemoverName
    from ostinato.core.episodes.keys import Episodes
    from ostinato.core.records import Placement
    from ostinato.samplers import PrioritySampler, Sampler
    from ostinato.storages import Storage
    from ostinato.transforms import Compose
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

_PLAIN = Ask()


class LocalEngine:
    """The engine of a buffer in one process: it owns the parts, the lock, the generator and the ring.

    A view of the buffer has an engine of its own, a `ViewEngine`, to which this one reports what happens to rows.

    Thread-safe. Sampling threads hold the lock only for the draw (microseconds); the copy runs outside it. The ring
    records a write before its rows are copied. After a copy, generations tell whether a row was replaced meanwhile; the
    batch is then copied again under the lock, so that no batch holds a torn row. Native calls fence both sides.

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

    owner: LocalEngine | None = None
    """The engine of the buffer, for that of a view."""
    pickles_queue = True
    direct: Direct | None = None
    """Native calls that write and draw in place of the methods here; see `ostinato.buffers.direct`."""
    left: Eligible | None = None
    """Rows present and free slots, once rows were deleted; None with a sampler that keeps them itself."""
    remover: Remover | None = None
    """What chooses the rows that new ones replace; None leaves that to the writer."""
    continuity: ContinuityCheck | None = None
    """Looks whether rows of windows follow each other; None without windows, and once it has seen enough."""
    direct_tried = False
    """Whether `direct` was looked for since the parts changed."""
    edits_seen = 0
    """Edits of the storage itself (`Storage.edits`) that the buffer knows of."""

    def __init__(
        self,
        source: Source,
        sampler: Sampler,
        writer: Writer,
        generator: torch.Generator | None,
        unit: SampleUnit | None = None,
        episodes: Episodes | None = None,
        limiter: RateLimiter | None = None,
        version_key: str | tuple[str, ...] | None = None,
        remover: RemoverName | None = None,
    ) -> None:
        storage = source.storage
        self.waiters = Waiters()
        self.lock = self.waiters.lock
        self.saves = Saves()
        self.source = source
        self.sampler, self.writer, self.generator = sampler, writer, generator
        self.unit = unit
        self.episodes = episodes
        self.ring = Ring(storage.capacity, storage.device)
        self.settled = False
        """Whether capacity and device are those of rows that are laid out."""
        self.counts: BufferCounts = make_counts(BufferCounts)
        """Rows written and drawn, which native calls count, too."""
        self.storage_followed()
        self.pin = False
        self.pending: deque[Ticket] = deque()
        self.queue: Prefetcher | None = None
        self.views, self.ahead = ViewList(), DrawnAhead()
        self.priority_path: tuple[str, ...] | None = None
        self.era = 0
        self.rows_stale = 0
        self.stale_updates: int | Tensor = 0
        self.tracker = self._make_tracker(sampler)
        self.begin_continuity()
        check_pair(storage, writer)
        check_sampler(storage, sampler)
        sampler.check_parts(storage, writer)
        self._check_unit(storage)
        if len(storage):
            self.ring.take_over(len(storage), storage.cursor)
            writer.begin(len(storage))
            self.begin_sampler()
        self._limiter = limiter
        self.gate: Gate | None = None
        self.begin_limiter(limiter)
        self.versions = begin_versions(version_key, writer, len(storage))
        self.remover = make_remover(remover, storage, sampler, writer, self.versions, tracked=self._is_tracked())
        writer.follow(self.generations_of)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but lock, threads and views; the caller holds the lock. Pickled storages are copies."""
        state = {k: v for k, v in self.__dict__.items() if k not in {"lock", "waiters", "views", "ahead"}}
        return {**state, "direct": None, "direct_tried": False, "queue": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a lock of its own; views that were pickled too join again."""
        self.__dict__.update(state)
        self.views = ViewList()
        self.ahead = DrawnAhead()
        self.storage_followed()
        self.waiters = Waiters()
        self.lock = self.waiters.lock
        if self.gate is not None:
            self.gate.attach(self.waiters)
        self.writer.follow(self.generations_of)
        record_owner(self, self.sampler, self.writer)

    @property
    def storage(self) -> Storage:
        """The storage."""
        return self.source.storage

    @property
    def rows_present(self) -> int:
        """Rows present, without those that have left."""
        if self.sampler.leaves:
            return as_counting(self.sampler).rows_left
        return len(self.source.storage) - (0 if self.left is None else len(self.left.free))

    @property
    def rows_written(self) -> int:
        """Rows ever written."""
        return self.counts.written

    @property
    def rows_since_empty(self) -> int:
        """Rows written since the buffer was made or emptied."""
        return self.counts.since_empty

    @property
    def rows_drawn(self) -> int:
        """Rows delivered."""
        return self.counts.drawn

    @property
    def redone(self) -> int:
        """Batches copied again because a writer replaced some of their rows."""
        return self.counts.redone

    def parts_changed(self) -> None:
        """End direct calls: parts of the buffer are about to change. Under the lock, or where no call can be made."""
        if self.direct is not None:
            self.direct.close()
        self.direct, self.direct_tried = None, False
        for view in self.views.live() if self.views else ():
            view.parts_changed()

    @property
    def readers(self) -> list[LocalEngine]:
        """This engine and those of its views: each has a sampler, and episodes, that follow the rows."""
        return [self, *self.views.live()]

    def view(self) -> View:
        """Return what samplers may see, now."""
        ring = self.ring
        if self.tracker is None or ring.rows == 0:
            stored, left = self.source.storage if self.sampler.reads else None, self.left
            some = None if left is None or not left.free else left
            return View(ring.rows, ring.capacity, ring.cursor, ring, ring.device, None, some, stored)
        episodes, starts = self.tracker.view(self.source.storage)
        stored = self.source.storage if self.sampler.reads else None
        ends = self.tracker.ends
        return View(ring.rows, ring.capacity, ring.cursor, ring, ring.device, episodes, starts, stored, ends=ends)

    def stock(self) -> Stock:
        """Return what there is for readers and writers now; the caller holds the lock."""
        if not self.sampler.counting:
            return Stock(self.rows_present)
        sampler = as_counting(self.sampler)
        return Stock(sampler.rows_left, sampler.draws_left, sampler.room(self.view()))

    def begin_limiter(self, limiter: RateLimiter | None) -> None:
        """Follow a rate limiter, or that of a queue; counts that go on are kept.

        Raises:
            KindError: if it is no `RateLimiter`.
            OptionError: if sampling could never begin.
        """
        sampler = self.sampler
        if limiter is None and not (sampler.counting and as_counting(sampler).bounded):
            self.gate = None
        elif limiter is not None or self.gate is None:
            gate = Gate(limiter, self.storage.max_size, self.waiters)
            gate.begin(self.ring)
            self.gate = gate

    def _make_tracker(self, sampler: Sampler) -> EpisodeTracker | None:
        """Track episodes if unit, sampler or the user ask for them."""
        unit = self.unit
        check_single(unit, sampler)
        wanted = merge_episodes([self.episodes, None if unit is None else unit.episodes, sampler.episodes])
        check_counting(sampler, self.writer, unit, wanted)
        if wanted is None:
            return None
        check_order(self.writer)
        need, span = (1, 1) if unit is None else (unit.need, unit.span)
        tracker = EpisodeTracker(wanted, need, max(span, sampler.slice_steps))
        tracker.check_span(self.storage)
        return tracker

    def _check_unit(self, storage: Storage) -> None:
        """Check that the unit can be used with the rows of a storage, as soon as their schema is known."""
        if self.unit is not None and storage.schema is not None:
            self.unit.check_schema(storage.schema, () if self.tracker is None else self.tracker.ends)

    def begin_continuity(self) -> None:
        """Look at the first rows, if the parts form windows."""
        self.continuity = ContinuityCheck.begin(self.tracker, self.unit, self.sampler)

    def _catch_up(self) -> None:
        """Take over rows that something else has written, and look at the first rows if there are new ones."""
        if self.source.storage.writes != self.counts.writes_seen:
            self._follow()
        check = self.continuity
        if check is not None and self.tracker is not None and check.is_due(self.ring):
            self.parts_changed()  # there are no direct calls while rows wait for the look
            self.continuity = None  # also if the warning is an error
            if not check.look(self.storage, self.tracker, self.ring):
                self.continuity = check

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, data: Any, lead: int, *, ranked: bool = True, timeout_s: float | None = None) -> Placement:
        """Check rows, choose their slots, record and copy them. If a check fails, nothing has changed.

        Args:
            data: one row (`lead=0`, of `add`) or rows (`lead=1`, of `extend`); no rows change nothing.
            lead: batch dimensions of the data.
            ranked: whether priorities in the rows are used; else the rows get the default priority.
            timeout_s: longest wait for readers, where there is a rate limiter; None is the limiter's.
        """
        require_eager("writing rows")
        with self.lock:
            self._catch_up()
            storage, sampler = self.source.storage, self.sampler
            laid_out = self.settled or storage.laid_out
            payload, rows = storage.admit(data, lead)
            if rows == 0:
                return self._no_rows()
            given, marks, tracker, versions = None, None, self.tracker, self.versions
            reports: Sequence[Callable[[Placement], None]] = ()
            try:
                if self.gate is not None:
                    left_s = self.wait_to_write(rows, timeout_s)
                    if left_s is not None:  # anything may have changed meanwhile: check the rows again
                        return self.write(data, lead, ranked=ranked, timeout_s=left_s)
                if not self.ring.rows:
                    self._check_first_rows(payload, laid_out=laid_out, lead=lead)
                if sampler.prioritized and ranked:
                    given = self._first_priorities(data, rows)
                if tracker is not None:
                    marks = tracker.read(storage, payload, rows)
                found = None if versions is None else versions.read(storage, payload, rows)
                reports = self._admit_for_views(data, payload, rows, ranked=ranked) if self.views else ()
                placement = self._place(payload, rows, given, found)
            except Exception:
                if not laid_out:
                    storage.forget_form()
                    self.settled = False
                raise
            self._store(placement, payload)
            self.counts.written += rows
            self.counts.since_empty += rows
            alone = not (sampler.prioritized or sampler.watches or self.gate is not None or reports)
            if alone and tracker is None and versions is None:
                sampler.record(placement)
            else:
                self._report_written(placement, given, marks, found, reports)
            return placement

    def _check_first_rows(self, payload: Any, *, laid_out: bool, lead: int) -> None:
        """Check the first rows that are about to be written: their fields, and with `ndim=2` their order."""
        storage = self.source.storage
        if not laid_out:
            for reader in self.readers:
                reader._check_unit(storage)  # noqa: SLF001 (the same class)
        wanted = None if self.tracker is None else self.tracker.wanted
        if storage.ndim > 1 and lead and warn_of_order(storage, payload, wanted):
            self.continuity = None  # it would say the same

    def _admit_for_views(
        self, data: Any, payload: Any, rows: int, *, ranked: bool
    ) -> list[Callable[[Placement], None]]:
        """Check rows for the samplers of the views, and return what records their placement."""
        if self.views.prune():
            self.parts_changed()  # direct calls may write again
        return [view.admit(data, payload, rows, ranked=ranked) for view in self.views.live()]

    def check_rows(self, data: Any, *, ranked: bool = True) -> Callable[[], None]:
        """Check rows as `write` does before it chooses slots: for several buffers that are written together.

        Returns:
            A function that drops the layout, where these are the first rows and are not written after all.
        """
        with self.lock:
            storage = self.source.storage
            laid_out = self.settled or storage.laid_out

            def undo() -> None:
                if not laid_out:
                    storage.forget_form()
                    self.settled = False

            try:
                if not self.writer.mutable:
                    self.writer.place(1, self.ring, None)  # says that it takes no rows
                payload, rows = storage.admit(data, 1)
                if rows and not laid_out:
                    self._check_unit(storage)
                if rows and ranked and self.sampler.prioritized:
                    self._first_priorities(data, rows)
                if rows and self.tracker is not None:
                    self.tracker.read(storage, payload, rows)
                if rows and self.versions is not None:
                    self.versions.read(storage, payload, rows)
                if rows and self.views:
                    self._admit_for_views(data, payload, rows, ranked=ranked)
            except Exception:
                undo()
                raise
            return undo

    def _no_rows(self) -> Run:
        """Return the placement of no rows: nothing changes, no call waits; a writer that takes no rows raises."""
        if not self.writer.mutable:
            self.writer.place(0, self.ring, None)
        return Run(0, 0, self.storage.capacity)

    def _make_room(self, payload: Any) -> None:
        """Let the oldest rows leave if the storage has a budget of bytes that new rows would exceed.

        Raises:
            OptionError: if the parts of the buffer cannot follow rows that leave.
            StorageMemoryError: if the new rows alone exceed the budget; nothing has changed.
        """
        storage, tracker, ring = self.source.storage, self.tracker, self.ring
        check_budget_parts(storage, self.sampler, self.writer, tracked=tracker is not None)
        if not self.writer.mutable:
            return
        oldest = ring.cursor if ring.rows == ring.capacity else 0
        episodes = tracker.table(storage) if tracker is not None and storage.evicts_episodes else None
        slots = storage.rows_that_stay(payload, oldest, episodes)
        if slots is None:
            return
        follow = [reader.plan_keep(slots) for reader in self.readers]
        if self.saves.snapshot is not None:
            self.saves.before(ring, torch.arange(ring.rows, device=ring.device))
        rows = slots.shape[0]
        self.parts_changed()
        self.ahead.before_change(None, ring, self.read_rows)
        ring.keep(rows)
        storage.keep(slots)
        if self.versions is not None:
            self.versions.touch(None)
        for keep in follow:
            keep()

    def plan_keep(self, slots: Tensor) -> Callable[[], None]:
        """Return what lets sampler and episodes follow, once the rows at `slots` were moved to the first slots.

        Raises:
            OptionError: if the sampler cannot follow.
        """
        sampler = self.sampler
        state = sampler.move_state(sampler.state_dict(), slots) if slots.shape[0] else None
        if state is None and sampler.prioritized and slots.shape[0]:
            raise_for_priorities(sampler)

        def keep() -> None:
            if self.tracker is not None:
                self.tracker.forget()
            if not state:
                sampler.move()
            else:
                sampler.load_state_dict(state)
            self.begin_sampler()

        return keep

    def _place(self, payload: Any, rows: int, given: Tensor | None, versions: NDArray[np.int64] | None) -> Placement:
        """Let remover, sampler or writer choose slots. Nothing has changed if one of them, or a check, raises."""
        storage, writer = self.source.storage, self.writer
        if not self.settled:
            self.settle()
        if storage.budget:
            self._make_room(payload)
        scores = None if writer.rank_path is None else storage.scores(payload, writer.rank_path)
        chosen = as_counting(self.sampler).place(rows, self.ring) if self.sampler.counting else None
        if self.remover is not None:
            chosen = self._replace(self.remover, rows, given, versions)
            if chosen is not None and not self.sampler.prioritized:
                return chosen
        placement = writer.place(rows, self.ring, scores) if chosen is None else chosen
        if self.sampler.prioritized or self.views:
            self._check_priorities(placement)
        if isinstance(placement, Run):
            return placement if placement.rows == rows and not placement.skip else checked_run(placement, rows)
        if storage.ring_only:
            raise_for_picks(writer)
        return checked_picks(placement, self.ring.rows, storage.capacity, rows)

    def _replace(
        self, remover: Remover, rows: int, given: Tensor | None, versions: NDArray[np.int64] | None
    ) -> Placement | None:
        """Return the slots that the remover chooses for new rows; None leaves them to the writer."""
        keys = np.zeros(0) if versions is None else versions.astype(np.float64)
        if remover.name == "lowest_priority":
            default = np.full(rows, as_sampler(self.sampler).default_priority)
            keys = default if given is None else given.cpu().numpy()
        left = as_counting(self.sampler).free if self.sampler.leaves else self.left and self.left.free
        return remover.place(rows, self.ring, left, keys, self._read_keys)

    def _read_keys(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the keys by which the remover orders rows present, and their arrivals."""
        where = torch.from_numpy(slots).to(self.ring.device)
        ages: NDArray[np.int64] = self.ring.arrivals(where).cpu().numpy()
        name = "fifo" if self.remover is None else self.remover.name
        if name == "lifo":
            return -ages.astype(np.float64), ages
        if name == "lowest_priority":
            return as_sampler(self.sampler).priorities_at(where, self.view()).cpu().numpy(), ages
        if name == "oldest_version" and self.versions is not None:
            return self.versions.at(self.source.storage, where).astype(np.float64), ages
        return np.zeros(slots.size), ages

    def _check_priorities(self, placement: Placement) -> None:
        """Check that samplers can keep priorities for these slots, before a row is stored.

        Raises:
            SlotError: for a slot at or beyond the `max_capacity` of one.
        """
        try:
            for reader in self.readers:
                if reader.sampler.prioritized:
                    as_sampler(reader.sampler).check_placement(placement, self.source.storage)
        except SlotError:
            self.writer.take_back()
            raise

    def settle(self) -> None:
        """Follow a storage whose capacity (`num_envs`) or device became known with its first rows."""
        storage, ring = self.source.storage, self.ring
        for reader in self.readers:
            if reader.generator is not None:
                check_same_device(reader.generator, storage)
            check_sampler(storage, reader.sampler)
        if (ring.capacity, ring.device) != (storage.capacity, storage.device):
            self.ring = Ring(storage.capacity, storage.device, after=ring.written)
        self.settled = True

    def _store(self, placement: Placement, payload: Any) -> None:
        """Record a placement, then copy its rows: a reader that meets half of them sees other generations."""
        ring, storage = self.ring, self.source.storage
        if self.saves.snapshot is not None:
            self.saves.before(ring, placement)
        if self.ahead:
            self.ahead.before_write(placement, ring, self.read_rows)
        rows, cursor = ring.rows, ring.cursor
        storage.writes = self.counts.writes_seen = storage.writes + 1
        ring.record(placement)
        try:
            storage.write(placement, payload)
        except BaseException:  # such as too little memory for the table that the first rows allocate
            if len(storage) == rows:
                ring.take_back(placement, rows, cursor)
                self.writer.take_back()
            raise
        if self.left is not None:
            self.left.record(placement)
        if self.remover is not None:
            self.remover.record(placement)

    def _report_written(
        self,
        placement: Placement,
        given: Tensor | None,
        marks: Marks | None,
        versions: NDArray[np.int64] | None,
        reports: Sequence[Callable[[Placement], None]] = (),
    ) -> None:
        """Report rows just written to episodes, versions, sampler and rate limiter, and to views by their `reports`."""
        if self.tracker is not None:
            self.tracker.record(self.storage, placement, marks or Marks())
            if self.continuity is not None and self.continuity.is_due(self.ring):
                self.parts_changed()  # the next call takes a look
        if self.versions is not None and versions is not None:
            self.versions.record(placement, versions)
        if self.sampler.prioritized:
            as_sampler(self.sampler).record_rows(placement, given, self.view())
        elif self.sampler.watches:
            self.sampler.watch(placement, self.view())
        else:
            self.sampler.record(placement)
        if self.gate is not None:
            self.gate.wrote(placement.total)
        for report in reports:
            report(placement)

    def begin_left(self, state: dict[str, Tensor] | None = None) -> None:
        """Follow the rows that were deleted, which have the generation 0, with a new sampler or after a load.

        Args:
            state: of `Eligible`; None for the order of slots.
        """
        self.left = None
        if self.remover is not None:
            self.remover.restart()
            self.remover = None if self.remover.implied else self.remover
        if self.sampler.leaves:
            return
        gone = self._gone()
        if state is not None:
            self.left = Eligible.of_state(state)
            self.remover = self.remover or Remover("fifo", implied=True)
        elif gone.numel():
            self._delete(gone)

    def begin_sampler(self) -> None:
        """Initialize the sampler's bookkeeping from the rows already stored."""
        if self.remover is not None:
            self.remover.restart()
        if self.sampler.prioritized:
            as_sampler(self.sampler).begin(self.view())
        elif self.sampler.counting:
            as_counting(self.sampler).begin(self.view())
        else:
            self.sampler.recheck()
        gone = self._gone()
        if gone.numel():
            self.sampler.drop_rows(gone, self.view())

    def _gone(self) -> Tensor:
        """Return the slots of deleted rows, which have the generation 0."""
        if self.left is not None:
            return self.left.free.state().to(self.ring.device)
        ring = self.ring
        if ring.counts.in_order or not ring.rows or self.tracker is not None:
            return self._no_slots()
        return (ring.generations(torch.arange(ring.rows, device=ring.device)) == 0).nonzero().reshape(-1)

    def _begin_counts(self) -> None:
        """Start the counts of limiter and versions from the rows present."""
        if self.gate is not None:
            self.gate.begin(self.ring)
        if self.versions is not None:
            self.versions.begin(self.ring.rows)

    def _first_priorities(self, data: Any, rows: int) -> Tensor | None:
        """Return the priorities in rows about to be written, checked; None if the rows have none."""
        return priorities_of_rows(data, self.priority_path, rows, as_sampler(self.sampler), self.storage.device)

    @property
    def least_index(self) -> int:
        """Smallest slot in an index of rows to update: 0, or -1 where that marks a row that was not kept."""
        every = self.writer.in_order and self.remover is None and not self.sampler.leaves
        return 0 if every else -1

    def count_stale(self, count: int) -> None:
        """Count priorities that were dropped because their rows had been replaced."""
        if count:
            with self.lock:
                self.stale_updates = self.stale_updates + count

    def update_priorities(self, update: PriorityUpdate) -> None:
        """Set the priorities of rows, except those replaced since they were drawn, which are counted."""
        with self.lock:
            if self.source.storage.writes != self.counts.writes_seen:
                self._follow()
            if not update.slots.shape[0]:
                return
            slots, priorities, generations = update.of_era(self.era) if self.era else update
            if slots.is_cpu:
                check_not_negative(slots, least=self.least_index)
            elif self.least_index == 0:
                slots = torch.where(slots == -1, -2, slots)  # invalid, which `raise_deferred` raises
            if generations is None:
                slots = self._present(slots)
            sampler = cast("PrioritySampler", self.sampler)
            if self.remover is not None:
                self.remover.touch(slots)
            self.stale_updates = self.stale_updates + sampler.update(slots, priorities, generations, self.view())

    def clear(self, *, keep_count: bool = False) -> None:
        """Remove all rows and queued draws; with `keep_count` the number of rows written since goes on."""
        with self.lock:
            if not self.writer.mutable:
                msg = f"This dataset doesn't allow writing ({type(self.writer).__name__}): it cannot be emptied"
                raise UsageError(msg)
            self.parts_changed()
            self.ahead.before_change(None, self.ring, self.read_rows)
            self.storage.clear()  # before other parts: it raises if it is read-only
            self.writer.clear()
            self.counts.since_empty = self.counts.since_empty if keep_count else 0
            self.ring.clear()
            self.begin_left()
            self.storage.writes += 1
            self.storage_followed()
            if self.tracker is not None:
                self.tracker.clear()
            self.sampler.clear()
            self.pending.clear()
            self._begin_counts()
            for view in self.views.live():
                view.forget_rows(moved=False)
            self.waiters.wake()

    def move_cursor(self, slot: int) -> None:
        """Write the next rows to `slot`.

        Raises:
            SlotError: if a slot between rows would stay empty.
        """
        with self.lock:
            ring = self.ring
            most = min(ring.rows, ring.capacity - 1)
            if not 0 <= slot <= most:
                msg = f"the cursor must be in [0, {most}], so that no slot between rows stays empty, got {slot}"
                raise SlotError(msg)
            self.parts_changed()
            self.ahead.before_move(ring)
            ring.move(slot)

    def _no_slots(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.ring.device)

    # -- deleting -----------------------------------------------------------------------------------------------------

    def delete(self, index: Any, generation: Any) -> Tensor:
        """Delete rows at a user's index that are still those of the generations, and drop draws made ahead.

        See `ReplayBuffer.delete`.
        """
        with self.lock:
            if self.source.storage.writes != self.counts.writes_seen:
                self._follow()
            check_deletable(self.storage, self.writer, tracked=self._is_tracked())
            slots, batch = read_slots(index, self.storage)
            check_not_negative(slots, least=self.least_index)
            generations = None if generation is None else read_generations(generation, slots)
            here = self._is_there(slots, generations)
            gone = torch.unique(slots[here])
            for reader in self.readers:  # first: they may raise
                reader.sampler.drop_rows(gone[:0], reader.view())
            if gone.numel():
                self._drop_draws()
                for reader in self.readers:
                    reader.sampler.drop_rows(gone, reader.view())
                self.ahead.before_change(gone, self.ring, self.read_rows)
                self.ring.record_delete(gone)
                self._delete(gone)
                self.waiters.wake()
            return here.reshape(batch)

    def _is_tracked(self) -> bool:
        """Whether rows belong to windows or episodes."""
        return any(reader.tracker is not None or reader.unit is not None for reader in self.readers)

    def _is_there(self, slots: Tensor, generations: Tensor | None) -> Tensor:
        """Return which slots hold rows, those of the generations if there are some, bool `[n]`."""
        check_rows(slots, self.storage.capacity)
        inside = (slots >= 0) & (slots < self.ring.rows)
        where = torch.where(inside, slots, 0)
        if not self.ring.rows:
            return inside
        known = self.ring.generations(where)
        here = inside & (known > 0)
        if generations is not None:
            here &= known + self.era * GENERATIONS_PER_ERA == generations
        return here & as_counting(self.sampler).holds(where) if self.sampler.leaves else here

    def _delete(self, gone: Tensor) -> None:
        """Free the slots of rows that have the generation 0 now, and that the sampler knows of."""
        self.parts_changed()
        slots: NDArray[np.int64] = gone.cpu().numpy()
        if not self.sampler.leaves:
            self.left = self.left or Eligible(self.ring.rows)
            self.left.delete(slots)
            self.remover = self.remover or Remover("fifo", implied=True)
        if self.remover is not None:
            self.remover.remove(slots)

    def _present(self, slots: Tensor) -> Tensor:
        """Return slots with -1 for those of deleted rows."""
        if not self.sampler.leaves and (self.left is None or not self.left.free):
            return slots
        known = (slots >= 0) & (slots < self.ring.rows)
        return torch.where(known & (self.ring.generations(torch.where(known, slots, 0)) == 0), -1, slots)

    # -- editing ------------------------------------------------------------------------------------------------------

    def edit_rows(self, index: Any, data: Any, *, swap: bool) -> None:
        """Replace rows at a user's index. Checks come first: if one fails, nothing has changed."""
        with self.lock:
            slots, batch = self._chosen(index, swap=swap)
            change = self.storage.prepare_edit(slots, data, batch)
            self.storage.check_new_fields(index, slots, data)
            rows = int(slots.shape[0])
            first = [
                (reader, reader._first_priorities(data, rows) if rows else None)  # noqa: SLF001 (the same class)
                for reader in self.readers
                if reader.sampler.prioritized
            ]
            self._edit(slots, [change])
            if self.versions is not None:
                self.versions.touch(None)
            present = self.ring.generations(slots) > 0  # without the slots of deleted rows
            for reader, given in first:
                priorities = None if given is None else given[present]
                as_sampler(reader.sampler).set_priorities(slots[present], priorities, reader.view())

    def edit_fields(self, values: dict[tuple[str, ...], Any], index: Any, *, swap: bool, same: bool = False) -> None:
        """Replace stored fields of rows at a user's index; all are checked before the first is written.

        Priorities stay: the rows are the same. With `same` generations stay, too: drawn rows remain valid.
        """
        with self.lock:
            slots, batch = self._chosen(index, swap=swap)
            edits = [self.storage.prepare_field(path, slots, value, batch) for path, value in values.items()]
            self._edit(slots, edits, same=same)
            if self.versions is not None:
                for path in values:
                    self.versions.touch(path)

    def update_present(self, update: ConditionalUpdate) -> ConditionalUpdateResult:
        """Change fields and priorities of the rows of an update that are still there; see `update_if_present`."""
        require_eager("writing rows")
        with self.lock:
            storage = self.storage
            if not self.sampler.prioritized:
                require_tracking(self.writer)
            present = update.present(self.ring, self.era)
            accepted = update.accepted(present, storage.scores_at)
            at = update.chosen(accepted)
            slots, rows = update.slots[at], int(at.shape[0])
            fields = update.fields if rows else {}
            changes = [storage.prepare_field(path, slots, value[at], (rows,)) for path, value in fields.items()]
            if changes:
                self._edit(slots, changes, same=True)
                if self.versions is not None:
                    for path in fields:
                        self.versions.touch(path)
            if update.priorities is not None and rows:
                as_sampler(self.sampler).set_priorities(slots, update.priorities[at], self.view())
                if self.remover is not None:
                    self.remover.touch(slots)
            return update.result(present, accepted)

    def reset_priorities(self, index: Any) -> None:
        """Give rows at an index the default priority; rows that have left return."""
        with self.lock:
            if not self.sampler.prioritized and not self.sampler.leaves:
                return
            slots, _ = read_slots(index, self.storage)
            check_not_negative(slots, least=self.least_index)
            check_rows(slots, self.ring.rows)
            slots = self._present(slots)
            if self.remover is not None:
                self.remover.touch(slots)
            if self.sampler.leaves:
                slots = slots[slots >= 0]
                self.sampler.mark_update(slots[self.ring.generations(slots) > 0])
                return
            as_sampler(self.sampler).set_priorities(slots[slots >= 0], None, self.view())

    def generations_of(self, index: Any) -> Tensor:
        """Return the generations of the rows at an index, as samples have them; -1 where there is no row."""
        with self.lock:
            return generations_at(self.ring, self.era, index, self.storage)

    def _edit(self, slots: Tensor, changes: Sequence[Callable[[], None]], *, same: bool = False) -> None:
        """Make edits that were checked: rows get other values and keep their places in every order.

        With `same` they keep their generations, too: priorities of their former values are valid for them. After an
        edit of an episode's end the episodes are read again.
        """
        self.parts_changed()
        storage, path = self.storage, self.writer.rank_path
        before = [
            (reader, tracker, tracker.marks_at(storage, slots))
            for reader, tracker in ((reader, reader.tracker) for reader in self.readers)
            if tracker is not None
        ]
        if self.saves.snapshot is not None:
            self.saves.before(self.ring, slots)
        if self.ahead:
            self.ahead.before_change(slots, self.ring, self.read_rows)
        if same:
            self.ring.record_patch(slots)
        else:
            self.ring.record_edit(slots)
        for change in changes:
            change()
        if self.remover is not None:
            self.remover.touch(slots if self.left is None else slots[self.left.allowed(slots)])
        if path is not None and slots.numel():
            self.writer.rerank(slots, storage.scores_at(slots, path))
        for reader, tracker, marks in before:
            if tracker.compare(marks, tracker.marks_at(storage, slots)):
                reader.begin_sampler()  # other rows may be drawn now

    def _chosen(self, index: Any, *, swap: bool) -> tuple[Tensor, tuple[int, ...]]:
        require_eager("writing rows")
        storage = self.storage
        picked = select(index, storage.shape, storage.device, swap=swap)
        if picked.span is None:
            return picked.slots, picked.batch
        return torch.arange(len(storage), device=storage.device)[picked.span].contiguous(), picked.batch

    # -- waiting ------------------------------------------------------------------------------------------------------

    def may_draw(self, rows: int) -> bool:
        """Whether a draw of so many rows need not wait: it is permitted, or a draw is left from a checkpoint."""
        return self.gate is None or bool(self.pending) or self.gate.flow.may_draw(rows, self.stock())

    def can_draw(self, rows: int) -> bool:
        """Whether a draw of so many rows returns at once, and does not raise."""
        with self.lock:
            if self.source.storage.writes != self.counts.writes_seen:
                self._follow()
            if self.pending:
                return True
            view, sampler, stock = self.view(), self.sampler, self.stock()
            ran_out = sampler.ran_out
            try:
                self.check_drawable(view)
                sampler.check_draw(view, rows)
            except OstinatoError:
                return False
            finally:
                if sampler.ran_out != ran_out:
                    sampler.ran_out = ran_out  # nothing was drawn
            if stock.draws is not None and rows > stock.draws and not sampler.leaves:
                return False
            return self.may_draw(rows) and not (sampler.drop_last and rows > view.rows)

    def can_write(self, rows: int) -> bool:
        """Whether a write of so many rows goes ahead at once, as far as writer and rate limiter are concerned."""
        with self.lock:
            if self.source.storage.writes != self.counts.writes_seen:
                self._follow()
            try:
                return self.writer.mutable and self._held_writer(rows) is None
            except OptionError:  # it could never be written
                return False

    def _held_writer(self, rows: int) -> Gate | None:
        """Return the gate that does not let a write of so many rows go on now; None if nothing holds it.

        Raises:
            OptionError: if they could never be written.
        """
        gate = self.gate
        if gate is None:
            return None
        bounded = self.sampler.counting and as_counting(self.sampler).bounded
        gate.flow.check_write(rows, self.storage.capacity if bounded else None)
        return None if gate.flow.may_write(rows, self.stock()) else gate

    def wait_to_draw(self, rows: int, ask: Ask, queued: Callable[[], bool] = lambda: False) -> int:
        """Return once a draw of so many rows need not wait, or one is queued; the caller holds the lock.

        Returns:
            The rows to draw: fewer if the time is up, and at least `ask.min_rows` may be drawn.

        Raises:
            OptionError: if it could never be made.
            WaitTimeoutError: naming what the call waits for.
        """
        gate = self.gate
        if gate is None or queued() or self.may_draw(rows):
            return rows
        begun = ask if ask.until is not None else ask.begun(gate)
        waited_s, until = begun.timeout_s or 0.0, begun.until or 0.0

        def held_by() -> Gate | None:
            gate = self.gate  # a new sampler may have brought another one
            if gate is None or queued() or self.may_draw(rows):
                return None
            sampler = self.sampler
            most = as_counting(sampler).draws_of(self.storage.capacity) if sampler.counting else None
            gate.flow.check_draw(ask.min_rows or rows, most)
            return gate

        try:
            self.waiters.wait(
                self.waiters.readers, rows, until, held_by, lambda gate: gate.why_no_draw(rows, self.stock(), waited_s)
            )
        except WaitTimeoutError:
            fewer = 0 if ask.min_rows is None else self._most_rows(rows, ask.min_rows)
            if not fewer:
                raise
            return fewer
        return rows

    def _most_rows(self, rows: int, least: int) -> int:
        """Return the rows of the largest batch of `least` to `rows` rows that may be drawn now; 0 if none may."""
        stock, view = self.stock(), self.view()
        if self.gate is not None:
            most = self.gate.flow.most_draws(rows, stock)
        else:
            most = rows if stock.draws is None else min(rows, stock.draws)
        for size in range(most, least - 1, -1):
            try:
                self.sampler.check_draw(view, size)
            except (OptionError, UsageError):
                continue  # slices and groups are drawn in whole numbers of rows
            return size
        return 0

    def _rows_present(self, rows: int, least: int) -> int:
        """Return the rows of the largest batch that may be drawn where no call waits.

        Raises:
            EmptyBufferError: if these are fewer than `least`.
        """
        most = self._most_rows(rows, least)
        if not most:
            msg = (
                f"the rows present can be drawn {self.stock().draws} more time(s), and at least min_batch={least} were "
                "asked for: write more rows, or ask for fewer"
            )
            raise EmptyBufferError(msg)
        return most

    def wait_to_write(self, rows: int, timeout_s: float | None) -> float | None:
        """Return once so many rows may be written: the seconds that are left, None if no wait was needed.

        Raises:
            OptionError: if they could never be written.
            WaitTimeoutError: naming what the call waits for.
        """
        gate = self._held_writer(rows)
        if gate is None:
            return None
        waited_s = gate.patience_s(timeout_s)
        until = time.monotonic() + waited_s
        self.waiters.wait(
            self.waiters.writers,
            rows,
            until,
            lambda: self._held_writer(rows),
            lambda gate: gate.why_no_write(rows, self.stock(), waited_s),
        )
        return max(0.0, until - time.monotonic())

    # -- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, batch_size: int, *, ahead: bool = False, ask: Ask = _PLAIN) -> Ticket:
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
            self._catch_up()
            if self.gate is not None:
                batch_size = self.wait_to_draw(batch_size, ask)
            elif ask.min_rows is not None and not self.pending:
                batch_size = self._rows_present(batch_size, ask.min_rows)
            if self.pending:
                return self.pending.popleft()
            generator = self.generator
            rng = generator.get_state() if ahead and generator is not None else None
            view = self.view()
            ticket = self.fresh(batch_size, generator, ask.max_age, view)
            if self.unit is not None or ticket.draw.length or ticket.draw.lengths is not None:
                ticket = self.expand(ticket, generator, view)
            if rng is not None:
                ticket = ticket._replace(rng=rng)
            if self.gate is not None:
                self.gate.drew(ticket)
            return self.hold(ticket) if ahead else ticket

    def fresh(
        self,
        batch_size: int,
        generator: torch.Generator | None,
        max_age: int | None = None,
        view: View | None = None,
    ) -> Ticket:
        """Draw slots with this generator, whatever draws a checkpoint left; not yet expanded.

        Raises:
            EmptyBufferError: if there are no rows.
        """
        with self.lock:
            sampler, ring = self.sampler, self.ring
            view = self.view() if view is None else view
            if view.rows == 0 or view.starts is not None:
                self.check_drawable(view)
            if max_age is not None:
                view = self._recent(view, max_age)
            draw = sampler.draw(view, batch_size, generator)
            slots = draw.slots
            if slots.dtype is not torch.int64 or slots.device != view.device or not slots.is_contiguous():
                draw = draw._replace(slots=checked_slots(slots, view.device, sampler))
            if draw.generations is None and self.writer.tracks_generations:
                draw = draw._replace(generations=ring.generations_of_rows(draw.slots))
            return Ticket(draw, ring.written, sampler.ran_out, ring, sampler)

    def _recent(self, view: View, max_age: int) -> View:
        """Return a view of which only rows young enough may be drawn."""
        if self.versions is None:
            raise OptionError(no_versions(max_age))
        if view.starts is not None and not self.sampler.by_age:
            msg = "max_age does not go with windows that only some rows can start, nor with masked rows: leave one out"
            raise OptionError(msg)
        return view._replace(starts=self.versions.recent(self.storage, view, max_age))

    def check_drawable(self, view: View) -> None:
        """Raise if there is no row to draw.

        Raises:
            EmptyBufferError: if there are no rows, or no row can start a window.
        """
        if view.rows == 0:
            msg = "Cannot sample from an empty storage: add rows first"
            raise EmptyBufferError(msg)
        if view.starts is not None and view.starts.rows == 0 and self.left is not None:
            msg = f"Cannot sample from an empty storage: all {view.rows} rows were deleted: add rows first"
            raise EmptyBufferError(msg)
        if view.starts is not None and view.starts.rows == 0:
            need = view.starts.need
            msg = f"no row has {need} rows of its episode from itself on: add longer episodes or shorten the window"
            raise EmptyBufferError(msg)

    def expand(self, ticket: Ticket, generator: torch.Generator | None, view: View | None = None) -> Ticket:
        """Plan what slices and units make of the rows drawn; the caller holds the lock.

        Raises:
            OptionError: if the storage has no fields.
        """
        unit, draw, dice = self.unit, ticket.draw, ticket.dice
        each = draw.length or draw.lengths
        if (unit is None or unit.plain) and each is None:
            return ticket
        storage = self.source.storage
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
        return ticket._replace(plan=plan, dice=dice)

    def expand_again(self, ticket: Ticket, generator: torch.Generator | None = None) -> Ticket | None:
        """Expand a draw as the buffer is now; None if a window no longer fits in its episode, or a row is masked now.

        The random numbers are those of the first time; `generator` is for draws that have not been expanded yet.
        """
        draw, each = ticket.draw, ticket.draw.rows_each
        if self.unit is None and each is None:
            return ticket if self.tracker is None and self.left is None else self._unmasked(ticket)
        if ticket.sampler is not self.sampler:
            return None  # the sampler was exchanged
        view = self.view()
        ahead = None if view.episodes is None else view.episodes.ahead(draw.slots)
        need = 1 if view.starts is None else view.starts.need
        if ahead is not None and bool((ahead + 1 < (need if each is None else each)).any()):
            return None
        return self.expand(ticket, generator)

    def _unmasked(self, ticket: Ticket) -> Ticket | None:
        """Return a draw of single rows without those masked or deleted now; None if it is to be made again.

        A pass without replacement does not draw its rows again: the batch goes without the rows that were replaced.
        """
        draw, view = ticket.draw, self.view()
        keep = None if view.episodes is None or not view.episodes.masked else view.episodes.ahead(draw.slots) >= 0
        if self.left is not None:
            keep = self.left.allowed(draw.slots)
        if keep is None or bool(keep.all()):
            return ticket
        if not ticket.sampler.epochal or not bool(keep.any()):
            return None
        return ticket._replace(draw=draw._replace(slots=draw.slots[keep]))

    def undraw(self, queued: list[Ticket]) -> None:
        """Drop draws that were made ahead, the oldest first, and those of a checkpoint, as if they were never made."""
        with self.lock:
            dropped = [*queued, *self.pending]
            for ticket in dropped:
                self.give_back(ticket)
            self.pending.clear()
            if dropped and dropped[0].rng is not None and self.generator is not None:
                self.generator.set_state(dropped[0].rng)

    def _drop_draws(self) -> None:
        """Drop draws that the buffer and its views made ahead, as if they were never made."""
        for reader in self.readers:
            reader.undraw([] if reader.queue is None else reader.queue.clear())

    def give_back(self, ticket: Ticket) -> None:
        """Undo the counts of a draw whose batch was not delivered."""
        if self.gate is None and not self.sampler.counting:
            return
        with self.lock:
            mine = ticket.ring is self.ring and ticket.sampler is self.sampler  # else its rows are gone
            if mine and self.sampler.counting:
                as_counting(self.sampler).undo(ticket.draw, self.view())
            if self.gate is not None:
                self.gate.undrew(ticket, self.ring)

    def retake(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Return the draws of a checkpoint that are still to be delivered; the counts of void ones are undone."""
        if not self.sampler.counting:
            return list(tickets)
        sampler, view, kept = as_counting(self.sampler), self.view(), []
        for ticket in tickets:
            generations, held = ticket.draw.generations, ticket.held
            here = generations is not None and bool(self.ring.holds(ticket.draw.slots, generations).all())
            if here or held is not None:
                kept.append(ticket)
            else:
                sampler.undo(ticket.draw, view)
        sampler.resume([ticket.draw for ticket in kept], view)
        return kept

    # -- gathering ----------------------------------------------------------------------------------------------------

    def gather(self, ticket: Ticket) -> Rows | None:
        """Copy the rows of a draw; None if the buffer was emptied since, so that there is nothing to copy.

        The rows of a draw made ahead are those at the draw.
        """
        held = ticket.held
        if held is not None and held.rows is not None:
            return held.rows
        source = self.source
        payload: Any = None
        try:
            payload = self._copied(source.storage, ticket)
        except (IndexError, KeyMissingError):
            if self._untouched(ticket):
                raise  # else a writer is at work: look again under the lock
        ring = self.ring
        if ring is ticket.ring and ring.written == ticket.serial:
            return Rows(source, payload, ticket.serial, ring, ticket)
        return self._gather_again(ticket, source, payload)

    def hold(self, ticket: Ticket) -> Ticket:
        """Return a draw made ahead, which keeps its rows as they are now; the caller holds the lock."""
        return self.ahead.add(ticket, self.ring)

    def read_rows(self, ticket: Ticket) -> Rows:
        """Copy the rows of a draw as they are now; the caller holds the lock."""
        return Rows(self.source, self._copied(self.storage, ticket), self.ring.written, self.ring, ticket)

    def _copied(self, storage: Storage, ticket: Ticket) -> Any:
        """Read the rows of a draw, and do what arithmetic is left."""
        plan = ticket.plan
        if plan is None:
            return storage.gather(ticket.draw.slots, pin=self.pin)
        if not plan.changed:
            return storage.gather(plan.records, pin=self.pin)
        leaves = storage.read_plan(plan, pin=self.pin)
        return storage.assemble(leaves, plan.records, plan.elsewhere)

    def _gather_again(self, ticket: Ticket, source: Source, payload: Any) -> Rows | None:
        """Copy the rows again, under the lock, if one of them was replaced during the first copy."""
        slots, held = ticket.slots_read, ticket.held
        with self.lock:
            if held is not None and held.rows is not None:
                return held.rows
            if payload is None or bool(self._changed(slots, ticket.serial, ticket.ring).any()):
                if int(slots.max()) >= len(self.storage):
                    return None  # emptied, or given another storage, since the draw
                if self.sampler.counting:
                    return None  # the rows drawn were counted, not those that have replaced them
                again = self.expand_again(ticket)
                if again is None:
                    return None
                source, ticket = self.source, again
                payload = self._copied(source.storage, ticket)
                self.counts.redone += 1
            if ticket.draw.generations is not None:
                generations = self.ring.generations(ticket.draw.slots)
                ticket = ticket._replace(draw=ticket.draw._replace(generations=generations))
            return Rows(source, payload, self.ring.written, self.ring, ticket)

    def _untouched(self, ticket: Ticket) -> bool:
        """Whether nothing at all was written since a draw."""
        ring = self.ring
        return ring is ticket.ring and ring.written == ticket.serial

    def replaced(self, ticket: Ticket) -> bool:
        """Whether a row that a draw reads was replaced since."""
        return not self._untouched(ticket) and bool(self._changed(ticket.slots_read, ticket.serial, ticket.ring).any())

    def _changed(self, slots: Tensor, serial: int, ring: object) -> Tensor:
        if ring is not self.ring:
            return torch.ones_like(slots, dtype=torch.bool)
        return self.ring.changed(slots, serial)

    def deliver(self, ticket: Ticket) -> None:
        """Count the rows of a batch that reached the caller."""
        with self.lock:
            self.counts.drawn += (ticket.draw.slots if ticket.plan is None else ticket.plan.records).shape[0]
            known = ticket.ring is self.ring if self.gate is None else self.gate.delivered(ticket, self.ring)
            if known and self.sampler.counting and ticket.sampler is self.sampler:
                as_counting(self.sampler).deliver(ticket.draw)
                free = as_counting(self.sampler).free
                if self.remover is not None and free is not None:
                    slots = ticket.draw.slots.cpu().numpy()  # some may be of another batch that is being made
                    self.remover.remove(slots[free.has(slots)])
            if self.gate is not None:
                self.waiters.wake()

    def stale(self, ticket: Ticket, rows: Rows) -> Tensor:
        """Return bool `[R]`, and count, which rows were replaced since they were gathered."""
        with self.lock:
            stale = self.stale_rows(ticket, rows)
            if rows.stale is not None or not self._is_as_of(rows):  # else none is, and a device need not be waited for
                self.rows_stale += int(stale.sum())
            return stale

    def _is_as_of(self, rows: Rows) -> bool:
        """Whether nothing was written since rows were gathered."""
        return self.ring is rows.ring and self.ring.written == rows.serial

    def stale_rows(self, ticket: Ticket, rows: Rows) -> Tensor:
        """Return bool `[R]`: which rows were replaced since they were gathered; the caller holds the lock."""
        slots = ticket.records
        if self._is_as_of(rows):
            changed = torch.zeros_like(slots, dtype=torch.bool)
        else:
            changed = self._changed(slots, rows.serial, rows.ring)
        return changed if rows.stale is None else changed | rows.stale

    # -- exchanging parts ---------------------------------------------------------------------------------------------

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler; queued draws of the old one are dropped."""
        check_free(sampler, self)
        check_sampler(self.storage, sampler)
        sampler.check_parts(self.storage, self.writer)
        if self.views.live():
            check_view_parts(sampler, sampler)
        with self.lock:
            self._check_remover(sampler, self.writer)
            tracked, self.tracker = self.tracker is not None, self._make_tracker(sampler)
            self.parts_changed()
            sampler.move()
            old, self.sampler = self.sampler, sampler
            if not tracked:
                self.begin_continuity()
            record_owner(self, sampler)
            self.pending.clear()
            self.begin_left()
            self.begin_sampler()
            if self._limiter is None:  # a queue makes its writers wait, other samplers do not
                self.begin_limiter(None)
            self.waiters.wake()
            return old

    def _check_remover(self, sampler: Sampler, writer: Writer) -> None:
        """Check that a new sampler or writer goes with the remover, and with rows that were deleted."""
        tracked = self._make_tracker(sampler) is not None or self.unit is not None
        if self.left is not None:
            check_deletable(self.storage, writer, tracked=tracked)
            self._check_left(sampler)
        if self.remover is not None:
            make_remover(self.remover.name, self.storage, sampler, writer, self.versions, tracked=tracked)

    def _check_left(self, sampler: Sampler) -> None:
        """Check that a new sampler can do without the rows that were deleted."""
        if self.left is not None:
            sampler.drop_rows(self._no_slots(), self.view())

    def set_writer(self, writer: Writer) -> Writer:
        """Exchange the writer; the new one goes on after the newest row."""
        check_free(writer, self)
        check_pair(self.storage, writer)
        for reader in self.readers:
            if reader.tracker is not None:
                check_order(writer)
            check_counting(reader.sampler, writer, None, None)
            reader.sampler.check_parts(self.storage, writer)
        check_versions(writer, self.versions)
        with self.lock:
            self._check_remover(self.sampler, writer)
            forget_rows(writer, self)
            if self.ring.rows:
                writer.begin(self.ring.rows)
            self.parts_changed()
            old, self.writer = self.writer, writer
            record_owner(self, writer)
            writer.follow(self.generations_of)
            self.waiters.wake()
            return old

    def set_source(self, source: Source) -> Storage:
        """Exchange the storage and return the old one; ring, writer and sampler follow what the new one holds."""
        storage = source.storage
        check_pair(storage, self.writer)
        for reader in self.readers:
            check_sampler(storage, reader.sampler)
            reader.sampler.check_parts(storage, self.writer)
            if reader.tracker is not None:
                reader.tracker.check_span(storage)
            reader._check_unit(storage)  # noqa: SLF001 (the same class)
        with self.lock:
            if len(storage):
                self.writer.begin(len(storage))  # first: it may raise
            else:
                self.writer.clear()
            self.undraw([] if self.queue is None else self.queue.clear())
            self.ahead.before_change(None, self.ring, self.read_rows)
            self.sampler.move()
            # the ring first: a gather in flight that meets the new storage then sees that all rows are new
            self.ring = Ring(storage.capacity, storage.device, after=self.ring.written + 1)
            self.begin_left()
            old, self.source = self.storage, source
            self.storage_followed()
            self.parts_changed()
            if self.tracker is not None:
                self.tracker.forget()
            self.settled = False
            if len(storage):
                self.ring.take_over(len(storage), storage.cursor)
                self.begin_sampler()
            self._begin_counts()
            for view in self.views.live():
                view.forget_rows(moved=True)
            self.waiters.wake()
            return old

    def _follow(self) -> None:
        """Take over what something else has written to the storage: `storage.set`, or another buffer."""
        edits = self.storage.edits - self.edits_seen
        if edits and edits == self.storage.writes - self.counts.writes_seen:
            self._read_again()
        else:
            self.set_source(self.source)

    def storage_followed(self) -> None:
        """Record that the buffer knows of all writes to its storage."""
        self.counts.writes_seen, self.edits_seen = self.storage.writes, self.storage.edits

    def _read_again(self) -> None:
        """Read what parts know of the values of rows again: rows were edited in the storage itself."""
        self.storage_followed()
        self.parts_changed()
        self._drop_draws()  # what they hold would depend on when their rows were copied
        if not self.ring.rows:
            return
        path, slots = self.writer.rank_path, torch.arange(self.ring.rows, device=self.ring.device)
        if path is not None:
            self.writer.rerank(slots, self.storage.scores_at(slots, path))
        if self.versions is not None:
            self.versions.touch(None)
        self.read_episodes()

    def follow_storage(self) -> None:
        """Take over the rows of the storage if something else has written them; the caller holds the lock."""
        if self.storage.writes != self.counts.writes_seen:
            self._follow()

    def read_episodes(self) -> None:
        """Read episodes and what samplers know of rows again before the next draw; the caller holds the lock."""
        for reader in self.readers:
            if reader.tracker is not None:
                reader.tracker.forget()
            reader.begin_sampler()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self, queued: Sequence[Ticket], transform: Compose, batch_size: int | None) -> dict[str, Any]:
        """Return the whole state, with draws that are queued; nothing is copied. The caller holds the lock."""
        if self.storage.writes != self.counts.writes_seen:
            self._follow()
            queued = []  # they were dropped
        return engine_state(self, queued, transform, batch_size)

    def load_state(self, state: dict[str, Any], transform: Compose, batch_size: int | None) -> None:
        """Restore a state, by copy. If it does not fit, nothing has changed.

        Raises:
            CheckpointError: naming the part that differs.
        """
        with self.lock:
            load_engine_states([Target(self, transform, batch_size)], [state])

    def save(self, path: str | Path, state: Callable[[], dict[str, Any]], *, incremental: bool) -> None:
        """Save `state()` to a directory; see `ReplayBuffer.dumps`."""
        save_buffer(path, [self], state, incremental=incremental)

    def load(self, path: str | Path, restore: Callable[[dict[str, Any]], None], *, verify: bool, mmap: bool) -> None:
        """Read a directory and hand its state to `restore`; see `ReplayBuffer.loads`."""
        save = load_buffer(path, restore, [self.storage], verify=verify, mmap=mmap)
        self.saves.loaded(save, self.ring, self.storage)
