"""The rows of a buffer: storage, ring and writer under one lock, and what observes them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast, final

import torch

from ostinato.buffers.checkpoint.save import Saves
from ostinato.buffers.checkpoint.state import copy_part
from ostinato.buffers.continuity import warn_of_order
from ostinato.buffers.drawn_ahead import DrawnAhead
from ostinato.buffers.observer import Incoming, Observer, Observers, RowValues, nothing
from ostinato.buffers.options import (
    check_budget_parts,
    check_pair,
    check_same_device,
    checked_picks,
    checked_run,
    raise_for_picks,
)
from ostinato.buffers.other_processes import OtherProcesses
from ostinato.buffers.part_owners import check_free, forget_rows, record_owner
from ostinato.buffers.policy_versions import Versions, check_versions
from ostinato.buffers.rate_limit import Waiters
from ostinato.buffers.records import Rows, Source
from ostinato.buffers.remover import Remover, check_deletable
from ostinato.buffers.updates import (
    GENERATIONS_PER_ERA,
    check_sampler,
    generations_at,
    read_generations,
)
from ostinato.core.counts import BufferCounts, make_counts
from ostinato.core.eligible import Eligible
from ostinato.core.index import read_slots, select
from ostinato.core.kinds import require_eager
from ostinato.core.records import Run, View
from ostinato.core.ring import Ring, no_slots
from ostinato.errors import SlotError, UsageError
from ostinato.samplers.base import check_not_negative, check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.reader import Reader
    from ostinato.core.episodes.tracker import EpisodeTracker
    from ostinato.core.records import Draw, Placement
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.storages.coded import Budget
    from ostinato.writers import Writer


@final
class RankedRows(Observer):
    """The scores of rows, for a writer that ranks them."""

    def changed(self, store: Store, slots: Tensor, paths: tuple[Any, ...] | None, found: Any) -> None:  # noqa: ARG002
        """Rank edited rows again."""
        path = store.writer.rank_path
        if path is not None and slots.numel():
            store.writer.rerank(slots, store.storage.scores_at(slots, path))

    def reread(self, store: Store) -> None:
        """Rank all rows again."""
        self.changed(store, torch.arange(store.ring.rows, device=store.ring.device), None, None)


@final
class Store:
    """The rows of a buffer in one process: storage, ring and writer under one lock, and what observes them.

    Samplers draw from it through a `Reader` each: that of the buffer, and one for each view. What follows the rows (the
    sampler and episodes of each reader, versions, removal, the rate limiter, draws made ahead, a save in progress) is
    an `Observer`; a store without an option has no observer for it.

    Thread-safe. The ring records a write before its rows are copied; generations then tell a reader, who copies without
    the lock, which rows were replaced meanwhile. Native calls fence both sides.

    Args:
        source: the storage and its collate function.
        writer: where new rows go.

    Raises:
        OptionError: if they do not go together.
    """

    era = 0
    """Loads into the buffer when it had rows."""
    pin = False
    """Whether batches are gathered into page-locked memory."""
    versions: Versions | None = None
    added: tuple[Observer, ...] = ()
    """Observers of the user's own."""
    others: OtherProcesses | None = None
    """Reports the rows of other processes to observers of the user's own."""
    remover: Remover | None = None
    """What chooses the rows that new ones replace; None leaves that to the writer."""
    edits_seen = 0
    """Edits of the storage itself (`Storage.edits`) that the buffer knows of."""

    def __init__(self, source: Source, writer: Writer) -> None:
        self._begin_threads()
        self.saves = Saves()
        self.source, self.writer = source, writer
        self.ring = Ring(source.storage.capacity, source.storage.device)
        self.settled = False
        """Whether capacity and device are those of rows that are laid out."""
        self.counts: BufferCounts = source.storage.sharing.follow_counts(source.storage, make_counts(BufferCounts))
        """Rows written and drawn, which native calls count, too."""
        self.storage_followed()
        writer.follow(self.generations_of)

    def _begin_threads(self) -> None:
        self.waiters = Waiters()
        self.lock = self.waiters.lock
        self.ahead = DrawnAhead()
        self._readers: list[weakref.ref[Reader]] = []
        self._observers: Observers | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but lock, readers and draws; the caller holds the lock. Pickled storages are copies."""
        fresh = {"lock", "waiters", "ahead", "_readers", "_observers"}
        return {k: v for k, v in self.__dict__.items() if k not in fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a lock of its own; readers that were pickled too join again."""
        self.__dict__.update(state)
        self.settled = False  # rows in shared memory are found again
        self._begin_threads()
        self.storage_followed()
        self.writer.follow(self.generations_of)

    def without_rows(self) -> Store:
        """Return a store with copies of the parts and without rows and readers, which a state is loaded into.

        Raises:
            OptionError: if a part cannot be copied.
        """
        made = object.__new__(Store)
        vars(made).update(vars(self), ahead=DrawnAhead(), _readers=[], _observers=None)
        made.source = self.source._replace(storage=self.source.storage.blank())
        made.writer, made.added = copy_part(self.writer), tuple(map(copy_part, self.added))
        made.versions = None if self.versions is None else Versions(self.versions.path)
        remover = self.remover
        made.remover = None if remover is None or remover.implied else Remover(remover.name)
        made.ring, made.counts = Ring(self.ring.capacity, self.ring.device), make_counts(BufferCounts)
        made.writer.follow(made.generations_of)
        return made

    @property
    def storage(self) -> Storage:
        """The storage."""
        return self.source.storage

    def require_private(self, what: str) -> None:
        """Check that one process alone has the rows and the parts.

        Raises:
            UsageError: if they are shared.
        """
        if self.storage.shared:
            msg = f"a buffer with shared=True cannot {what}: other processes have its rows and parts. Use a private one"
            raise UsageError(msg)

    # -- readers and observers ----------------------------------------------------------------------------------------

    def join(self, reader: Reader) -> None:
        """Let a reader follow the rows from now on; the reference to it is weak."""
        self.parts_changed()
        self._readers.insert(0 if reader.own else len(self._readers), weakref.ref(reader))

    @property
    def readers(self) -> list[Reader]:
        """The reader of the buffer, then those of its views, as long as they are in use."""
        return [reader for ref in self._readers if (reader := ref()) is not None]

    @property
    def own(self) -> Reader:
        """The reader of the buffer itself."""
        return cast("Reader", self._readers[0]())

    @property
    def observers(self) -> Observers:
        """What follows the rows, in the order in which events are reported."""
        found = self._observers
        if found is None or (len(self._readers) > 1 and any(ref() is None for ref in self._readers)):
            self._readers = [ref for ref in self._readers if ref() is not None]
            self.parts_changed()  # direct calls may write again
            options = (self.saves.snapshot, self.remover, self.versions, self.others)
            found = self._observers = Observers.of(
                self.ahead,
                *(option for option in options if option is not None),
                *(RankedRows() for path in (self.writer.rank_path,) if path is not None),
                *(observer for reader in self.readers for observer in reader.observers),
                *self.added,
            )
        return found

    def observe(self, observer: Observer) -> None:
        """Report events to an observer of the user's own from now on, first the rows that are there."""
        with self.lock:
            self.follow_storage()
            self.added = (*self.added, observer)
            self.follow_processes()
            observer.replaced(self)

    def follow_processes(self) -> None:
        """From now on report rows that other processes write to observers of the user's own."""
        self.parts_changed()
        if self.storage.shared and self.added:
            self.others = self.others or OtherProcesses()
            self.others.replaced(self)

    def parts_changed(self) -> None:
        """End direct calls: parts of the buffer are about to change. Under the lock, or where no call can be made."""
        self._observers = None
        for reader in self.readers:
            reader.end_direct()

    def view(self, sampler: Sampler, tracker: EpisodeTracker | None) -> View:
        """Return what a sampler may see, now."""
        ring, storage = self.ring, self.source.storage
        counts, stored = ring.counts, storage if sampler.reads else None
        rows, capacity, cursor = counts.rows, counts.capacity, counts.cursor
        values = self._values() if self.added else None
        if tracker is None or rows == 0:
            some = None if self.remover is None else self.remover.eligible
            if some is None or not some.free:
                some = ring.whole
            return View(rows, capacity, cursor, ring, ring.device, None, some, stored, (), values)
        episodes, starts = tracker.view(storage)
        return View(rows, capacity, cursor, ring, ring.device, episodes, starts, stored, tracker.ends, values)

    def _values(self) -> dict[str, Tensor]:
        """Return the numbers that `RowValues` keep, by name, as of now."""
        for observer in self.observers.following:
            observer.follow(self)
        return {observer.name: observer.values for observer in self.added if isinstance(observer, RowValues)}

    @property
    def eligible(self) -> Eligible | None:
        """The rows that were neither deleted nor used up, and the free slots; None while all rows are there."""
        sampler: Any = self.own.sampler
        if sampler.leaves:
            return sampler.eligible  # type: ignore[no-any-return]
        return None if self.remover is None else self.remover.eligible

    # -- the storage --------------------------------------------------------------------------------------------------

    def storage_followed(self) -> None:
        """Record that the buffer knows of all writes to its storage."""
        self.counts.writes_seen, self.edits_seen = self.storage.writes, self.storage.edits

    def follow_storage(self) -> None:
        """Take over what something else has written to the storage, `storage.set` or another buffer; under the lock."""
        storage = self.source.storage
        if not self.settled and storage.laid_out:
            self.settle()
        if self.settled:
            for observer in (self._observers or self.observers).following:
                observer.follow(self)
        writes = storage.writes - self.counts.writes_seen
        if not writes:
            return
        if storage.edits - self.edits_seen != writes:
            self.set_source(self.source)
            return
        self.storage_followed()
        self.parts_changed()
        self._drop_queues()  # what they hold would depend on when their rows were copied
        if self.ring.rows:
            self.reread()

    def reread(self) -> None:
        """Read episodes, and what samplers and writer know of rows, again; the caller holds the lock."""
        for observer in self.observers.all:
            observer.reread(self)

    def set_source(self, source: Source) -> Storage:
        """Exchange the storage and return the old one; ring, writer and samplers follow what the new one holds."""
        storage = source.storage
        for reader in self.readers:
            reader.check_storage(storage, self.writer)
        with self.lock:
            if len(storage):
                self.writer.begin(len(storage))  # first: it may raise
            else:
                self.writer.clear()
            self._drop_queues()
            self.ahead.before_removal(self, None)
            # the ring first: a gather in flight that meets the new storage then sees that all rows are new
            self.ring = Ring(storage.capacity, storage.device, after=self.ring.written + 1)
            old, self.source = self.storage, source
            self.storage_followed()
            self.settled = False
            if len(storage):
                self.ring.take_over(len(storage), storage.cursor)
            self.begin_removal()
            self.parts_changed()
            for observer in self.observers.all:
                observer.replaced(self)
            self.waiters.wake()
            return old

    def set_writer(self, writer: Writer) -> Writer:
        """Exchange the writer; the new one goes on after the newest row."""
        own = self.own
        self.require_private("exchange its writer")
        check_free(writer, own)
        check_pair(self.storage, writer)
        for reader in self.readers:
            reader.check_writer(writer)
        check_versions(writer, self.versions)
        with self.lock:
            own.check_removal(own.sampler, writer)
            forget_rows(writer, own)
            if self.ring.rows:
                writer.begin(self.ring.rows)
            self.parts_changed()
            old, self.writer = self.writer, writer
            record_owner(own, writer)
            writer.follow(self.generations_of)
            self.waiters.wake()
            return old

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
            self.follow_storage()
            storage = self.source.storage
            laid_out = self.settled or storage.laid_out
            payload, rows = storage.admit(data, lead)
            if rows == 0:
                return self._no_rows()
            try:
                observers = self.observers
                for observer in observers.waiting:
                    left_s = observer.wait(self, rows, timeout_s)
                    if left_s is not None:  # anything may have changed meanwhile: check the rows again
                        return self.write(data, lead, ranked=ranked, timeout_s=left_s)
                if not self.ring.rows:
                    self._check_first_rows(payload, laid_out=laid_out, lead=lead)
                incoming = Incoming(data, payload, rows, ranked)
                found = [observer.check(self, incoming) for observer in observers.writing]
                placement = self._place(incoming, observers)
            except Exception:
                if not laid_out:
                    self._forget_schema()
                raise
            ring = self.ring
            try:
                placement = self._put(placement, payload, observers)
                with ring.lock:
                    if found and ring.is_current():
                        for observer, what in zip(observers.writing, found, strict=True):
                            observer.written(self, placement, what)
                    ring.commit(self.counts, rows)
            except BaseException:
                ring.abandon()
                raise
            return placement

    def _check_first_rows(self, payload: Any, *, laid_out: bool, lead: int) -> None:
        """Check the first rows that are about to be written: their fields, and with `ndim=2` their order."""
        storage, own = self.source.storage, self.own
        if not laid_out:
            for reader in self.readers:
                reader.check_unit(storage)
        wanted = None if own.tracker is None else own.tracker.wanted
        if storage.ndim > 1 and lead and warn_of_order(storage, payload, wanted):
            own.end_continuity()  # it would say the same

    def _forget_schema(self) -> None:
        self.source.storage.forget_form()
        self.settled = False

    def check_rows(self, data: Any, *, ranked: bool = True) -> Callable[[], None]:
        """Check rows as `write` does before it chooses slots: for several buffers that are written together.

        Returns:
            A function that drops the layout, where these are the first rows and are not written after all.
        """
        with self.lock:
            storage = self.source.storage
            laid_out = self.settled or storage.laid_out
            undo = nothing if laid_out else self._forget_schema
            try:
                if not self.writer.mutable:
                    self.writer.place(1, self.ring, None)  # says that it takes no rows
                payload, rows = storage.admit(data, 1)
                if rows and not laid_out:
                    self.own.check_unit(storage)
                if rows:
                    for observer in self.observers.writing:
                        observer.check(self, Incoming(data, payload, rows, ranked))
            except Exception:
                undo()
                raise
            return undo

    def _no_rows(self) -> Run:
        """Return the placement of no rows: nothing changes, no call waits; a writer that takes no rows raises."""
        if not self.writer.mutable:
            self.writer.place(0, self.ring, None)
        return Run(0, 0, self.storage.capacity)

    def _make_room(self, budget: Budget, payload: Any) -> None:
        """Let the oldest rows leave if new rows would exceed the budget of bytes of the storage.

        Raises:
            OptionError: if the parts of the buffer cannot follow rows that leave.
            StorageMemoryError: if the new rows alone exceed the budget; nothing has changed.
        """
        storage: Any = self.source.storage  # a LazyTensorStorage: others have no budget
        ring, own = self.ring, self.own
        check_budget_parts(budget, own.sampler, self.writer, tracked=own.tracker is not None)
        if not self.writer.mutable:
            return
        oldest = ring.cursor if ring.rows == ring.capacity else 0
        episodes = own.tracker.table(storage) if own.tracker is not None and budget.episodes else None
        slots = storage.rows_that_stay(payload, oldest, episodes)
        if slots is None:
            return
        plans = [observer.plan_move(self, slots) for observer in self.observers.all]
        for observer in self.observers.all:
            observer.before_move(self)
        ring.keep(slots.shape[0])
        storage.keep(slots)
        for follow in plans:
            follow()
        self.parts_changed()

    def _place(self, incoming: Incoming, observers: Observers) -> Placement:
        """Let observers or the writer choose slots. Nothing has changed if one of them, or a check, raises."""
        storage, writer, rows = self.source.storage, self.writer, incoming.rows
        if not self.settled:
            self.settle()
        if storage.budget is not None:
            self._make_room(storage.budget, incoming.payload)
        scores = None if writer.rank_path is None else storage.scores(incoming.payload, writer.rank_path)
        placement = None
        for observer in observers.placing:
            offer = observer.place(self, incoming)  # a queue counts rows there
            placement = offer if placement is None else placement
        chosen = placement is not None
        if placement is None:
            placement = writer.place(rows, self.ring, scores)
        for observer in observers.placing:
            observer.check_placement(self, placement)
        if chosen:
            return placement
        if isinstance(placement, Run):
            return placement if placement.rows == rows and not placement.skip else checked_run(placement, rows)
        if storage.ring_only:
            raise_for_picks(writer)
        return checked_picks(placement, self.ring.rows, storage.capacity, rows)

    def settle(self) -> None:
        """Follow a storage whose capacity (`num_envs`), device or memory became known with its first rows."""
        storage = self.source.storage
        for reader in self.readers:
            if reader.generator is not None:
                check_same_device(reader.generator, storage)
            check_sampler(storage, reader.sampler)
        self.ring = storage.sharing.follow_ring(storage, self.ring)
        self.counts = self.own.counts = storage.sharing.follow_counts(storage, self.counts)
        for reader in self.readers:
            reader.sampler.share(self.ring)
        self.settled = True

    def _put(self, placement: Placement, payload: Any, observers: Observers) -> Placement:
        """Record a placement, then copy its rows: a reader that meets half of them sees other generations.

        Returns:
            The placement, as the ring has it.
        """
        ring, storage = self.ring, self.source.storage
        for observer in observers.copying:
            observer.before_write(self, placement)
        rows, cursor = ring.rows, ring.cursor
        storage.writes = self.counts.writes_seen = storage.writes + 1
        placement = ring.record(placement)
        try:
            storage.write(placement, payload)
        except BaseException:  # such as too little memory for the table that the first rows allocate
            if len(storage) == rows and ring.take_back(placement, rows, cursor):
                self.writer.take_back()
            raise
        return placement

    def move_cursor(self, slot: int) -> None:
        """Write the next rows to `slot`.

        Raises:
            SlotError: if a slot between rows would stay empty.
            UsageError: if other processes write at the cursor.
        """
        self.require_private("move its cursor")
        with self.lock:
            ring = self.ring
            most = min(ring.rows, ring.capacity - 1)
            if not 0 <= slot <= most:
                msg = f"the cursor must be in [0, {most}], so that no slot between rows stays empty, got {slot}"
                raise SlotError(msg)
            self.parts_changed()
            self.ahead.cursor_moves(ring)
            ring.move(slot)

    # -- removing -----------------------------------------------------------------------------------------------------

    def clear(self, *, keep_count: bool = False) -> None:
        """Remove all rows and queued draws; with `keep_count` the number of rows written since goes on."""
        with self.lock:
            if not self.writer.mutable:
                msg = f"This dataset doesn't allow writing ({type(self.writer).__name__}): it cannot be emptied"
                raise UsageError(msg)
            for observer in self.observers.all:
                observer.before_removal(self, None)
            with self.ring.lock:
                since = self.counts.since_empty
                self.storage.clear()  # before other parts: it raises if it is read-only
                self.writer.clear()
                self.ring.clear()
                self.counts.since_empty = since if keep_count else 0
            self.storage.writes += 1
            self.storage_followed()
            self.begin_removal()
            self.own.pending.clear()
            self._drop_queues(views_only=True)
            self.parts_changed()
            for observer in self.observers.all:
                observer.cleared(self)
            self.waiters.wake()

    def _drop_queues(self, *, views_only: bool = False) -> None:
        """Drop draws that prefetch made ahead, as if they were never made."""
        for reader in self.readers[views_only:]:
            reader.undraw([] if reader.queue is None else reader.queue.clear())

    def delete(self, index: Any, generation: Any) -> Tensor:
        """Delete rows at a user's index that are still those of the generations, and drop draws made ahead.

        See `ReplayBuffer.delete`.
        """
        self.require_private("delete rows, which are in ring order (give them the priority 0, with eps=0)")
        with self.lock:
            self.follow_storage()
            check_deletable(self.storage, self.writer, tracked=any(reader.tracked for reader in self.readers))
            slots, batch = read_slots(index, self.storage)
            check_not_negative(slots, least=self.least_index)
            generations = None if generation is None else read_generations(generation, slots)
            here = self._is_there(slots, generations)
            gone = torch.unique(slots[here])
            for observer in self.observers.all:  # first: they may raise
                observer.check_removal(self)
            if gone.numel():
                self._drop_queues()
                if self.remover is None and not self.own.sampler.leaves:
                    self.remover = Remover("fifo", implied=True)
                self.parts_changed()
                for observer in self.observers.all:
                    observer.before_removal(self, gone)
                self.ring.record_delete(gone)
                for observer in self.observers.all:
                    observer.removed(self, gone)
                self.waiters.wake()
            return here.reshape(batch)

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
        eligible = self.eligible
        return here if eligible is None else here & eligible.allowed(where)

    def begin_removal(self, state: dict[str, Tensor] | None = None) -> None:
        """Follow the rows that were deleted, which have the generation 0, with a new sampler or after a load.

        Args:
            state: of `Eligible`; None for the order of slots.
        """
        remover = self.remover
        if remover is not None:
            remover.eligible = None
            remover.reread(self)
            self.remover = None if remover.implied else remover
        if self.own.sampler.leaves:
            return
        gone = self.deleted_slots()
        if state is not None or gone.numel():
            self.remover = self.remover or Remover("fifo", implied=True)
            if state is not None:
                self.remover.eligible = Eligible.of_state(state)
            else:
                self.remover.removed(self, gone)

    def deleted_slots(self) -> Tensor:
        """Return the slots of deleted rows, which have the generation 0."""
        ring = self.ring
        if ring.counts.in_order or not ring.rows or self.own.tracker is not None:
            return no_slots(ring)
        return (ring.generations(torch.arange(ring.rows, device=ring.device)) == 0).nonzero().reshape(-1)

    @property
    def least_index(self) -> int:
        """Smallest slot in an index of rows to update: 0, or -1 where that marks a row that was not kept."""
        every = self.writer.in_order and self.remover is None and not self.own.sampler.leaves
        return 0 if every else -1

    def present(self, slots: Tensor) -> Tensor:
        """Return slots with -1 for those of deleted rows."""
        eligible = self.eligible
        if self.ring.whole is None and (eligible is None or not eligible.free):
            return slots
        known = (slots >= 0) & (slots < self.ring.rows)
        return torch.where(known & (self.ring.generations(torch.where(known, slots, 0)) <= 0), -1, slots)

    # -- editing ------------------------------------------------------------------------------------------------------

    def edit_rows(self, index: Any, data: Any, *, swap: bool) -> None:
        """Replace rows at a user's index. Checks come first: if one fails, nothing has changed."""
        with self.lock:
            slots, batch = _chosen(self.storage, index, swap=swap)
            change = self.storage.prepare_edit(slots, data, batch)
            self.storage.check_new_fields(index, slots, data)
            self.edit(slots, [change], None, data)

    def edit_fields(self, values: dict[tuple[str, ...], Any], index: Any, *, swap: bool, same: bool = False) -> None:
        """Replace stored fields of rows at a user's index; all are checked before the first is written.

        Priorities stay: the rows are the same. With `same` generations stay, too: drawn rows remain valid.
        """
        with self.lock:
            slots, batch = _chosen(self.storage, index, swap=swap)
            edits = [self.storage.prepare_field(path, slots, value, batch) for path, value in values.items()]
            self.edit(slots, edits, tuple(values), same=same)

    def edit(
        self,
        slots: Tensor,
        changes: Sequence[Callable[[], None]],
        paths: tuple[Any, ...] | None,
        data: Any = None,
        *,
        same: bool = False,
    ) -> None:
        """Make edits that were checked: rows get other values and keep their places in every order.

        Args:
            slots: of the rows, int64 `[n]`.
            changes: write the values.
            paths: the fields; None for whole rows.
            data: the rows that replace these, where they are whole.
            same: the rows keep their generations: priorities of their former values are valid for them.
        """
        self.parts_changed()
        observers = self.observers.all
        found = [observer.before_change(self, slots, data) for observer in observers]
        if same:
            self.ring.record_patch(slots)
        else:
            self.ring.record_edit(slots)
        for change in changes:
            change()
        for observer, what in zip(observers, found, strict=True):
            observer.changed(self, slots, paths, what)

    def generations_of(self, index: Any) -> Tensor:
        """Return the generations of the rows at an index, as samples have them; -1 where there is no row."""
        with self.lock:
            self.follow_storage()
            return generations_at(self.ring, self.era, index, self.storage)

    def read_rows(self, draw: Draw) -> Rows:
        """Copy the rows of a draw as they are now; the caller holds the lock."""
        return Rows(self.source, copied(self.storage, draw, pin=self.pin), self.ring.written, self.ring, draw)


def copied(storage: Storage, draw: Draw, *, pin: bool) -> Any:
    """Read the rows of a draw, and do what arithmetic is left."""
    plan = draw.plan
    if plan is None:
        return storage.gather(draw.slots, pin=pin)
    if not plan.changed:
        return storage.gather(plan.records, pin=pin)
    return storage.read_plan(plan, pin=pin)


def _chosen(storage: Storage, index: Any, *, swap: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Return the slots of rows to edit, int64 `[n]`, and the shape of their index."""
    require_eager("writing rows")
    picked = select(index, storage.shape, storage.device, swap=swap)
    if picked.span is None:
        return picked.slots, picked.batch
    return torch.arange(len(storage), device=storage.device)[picked.span].contiguous(), picked.batch
