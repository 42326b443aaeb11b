"""The parts that draw from the rows of a buffer, and what they follow of these."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from ostinato.buffers.followers import EpisodeRows, UsedRows, begin_sampler, followers
from ostinato.buffers.options import check_order, check_pair, check_single
from ostinato.buffers.rate_limit import Stock, as_counting, check_counting
from ostinato.buffers.records import Draws, Source
from ostinato.buffers.remover import check_deletable, make_remover
from ostinato.buffers.updates import check_sampler
from ostinato.core.counts import BufferCounts, make_counts
from ostinato.core.episodes.tracker import EpisodeTracker, merge_episodes
from ostinato.core.ring import no_slots
from ostinato.errors import EmptyBufferError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ostinato.buffers.observer import Observer
    from ostinato.buffers.prefetch import Prefetcher
    from ostinato.buffers.store import Store
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.core.records import Draw, View
    from ostinato.core.ring import Ring
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer


class Parts(Draws):
    """Base of `Reader`: sampler, unit, episodes and limiter, checked with each other and with the rows.

    Args:
        store: the rows.
        sampler: which rows come next.
        generator: source of all draws; None is torch's global generator.
        unit: what a drawn row becomes; None leaves it a row.
        episodes: where episodes end; None takes what unit and sampler say.
        own: whether it is the reader of the buffer itself, else that of a view.

    Raises:
        OptionError: if parts do not go together.
    """

    def __init__(
        self,
        store: Store,
        sampler: Sampler,
        generator: torch.Generator | None,
        unit: SampleUnit | None = None,
        episodes: Episodes | None = None,
        *,
        own: bool = True,
    ) -> None:
        self.store, self.lock, self.waiters, self.saves = store, store.lock, store.waiters, store.saves
        self.own, self.sampler, self.generator, self.unit, self.episodes = own, sampler, generator, unit, episodes
        self.counts: BufferCounts = store.counts if own else make_counts(BufferCounts)
        self.pending: deque[Draw] = deque()
        self.queue: Prefetcher | None = None
        self.priority_path: tuple[str, ...] | None = None if own else store.own.priority_path
        self.rows_stale = 0
        self._stale_updates: int | Tensor = 0
        self._episodes: EpisodeRows | None = None
        self.tracker = self.make_tracker(sampler)
        self.check_removal(sampler, store.writer)
        self.check_storage(store.storage, store.writer)
        self.follow()

    def follow(self) -> None:
        """Follow the rows by the parts that there are now."""
        before = self._episodes
        parts = (*followers(self.sampler, self.tracker, self.unit, self.priority_path), *self.limits)
        self.observers: tuple[Observer, ...] = parts
        self.rules = (*self.limits, *(part for part in parts if isinstance(part, UsedRows)))
        self._episodes = next((part for part in parts if isinstance(part, EpisodeRows)), None)
        if before is not None and self._episodes is not None:
            self._episodes.continuity = before.continuity
        self.store.parts_changed()

    # -- what belongs to the store ------------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        """The storage."""
        return self.store.source.storage

    @property
    def source(self) -> Source:
        """The storage and its collate function."""
        return self.store.source

    @property
    def ring(self) -> Ring:
        """Rows, cursor and generations."""
        return self.store.ring

    @property
    def writer(self) -> Writer:
        """The writer."""
        return self.store.writer

    def own_store(self, what: str) -> Store:
        """Return the store, for calls that concern all samplers of a buffer.

        Args:
            what: the call, for the message.

        Raises:
            UsageError: if this is the reader of a view.
        """
        if not self.own:
            _raise_for_view(what)
        return self.store

    @property
    def rows_present(self) -> int:
        """Rows present, without those that have left."""
        eligible = self.store.eligible
        return len(self.storage) if eligible is None else eligible.rows

    @property
    def rows_written(self) -> int:
        """Rows ever written."""
        return self.store.counts.written

    @property
    def rows_since_empty(self) -> int:
        """Rows written since the buffer was made or emptied."""
        return self.store.counts.since_empty

    @property
    def rows_drawn(self) -> int:
        """Rows delivered."""
        return self.counts.drawn

    @property
    def redone(self) -> int:
        """Batches copied again because a writer replaced some of their rows."""
        return self.counts.redone

    def parts_changed(self) -> None:
        """End direct calls; see `Store.parts_changed`."""
        self.store.parts_changed()

    def end_direct(self) -> None:
        """End the direct calls of this reader."""
        if self.direct is not None:
            self.direct.close()
        self.direct, self.direct_tried = None, False

    def view(self) -> View:
        """Return what the sampler may see, now."""
        return self.store.view(self.sampler, self.tracker)

    # -- checks -------------------------------------------------------------------------------------------------------

    def make_tracker(self, sampler: Sampler) -> EpisodeTracker | None:
        """Track episodes if unit, sampler or the user ask for them."""
        unit, writer = self.unit, self.store.writer
        check_single(unit, sampler)
        wanted = merge_episodes([self.episodes, None if unit is None else unit.episodes, sampler.episodes])
        check_counting(sampler, writer, unit, wanted)
        if wanted is None:
            return None
        check_order(writer)
        need, span = (1, 1) if unit is None else (unit.need, unit.span)
        tracker = EpisodeTracker(wanted, need, max(span, sampler.slice_steps))
        tracker.check_span(self.storage)
        return tracker

    @property
    def tracked(self) -> bool:
        """Whether rows belong to windows or episodes."""
        return self.tracker is not None or self.unit is not None

    def check_storage(self, storage: Storage, writer: Writer) -> None:
        """Check that the parts go with a storage and a writer, and these with each other."""
        check_pair(storage, writer)
        check_sampler(storage, self.sampler)
        self.sampler.check_parts(storage, writer)
        if self.tracker is not None:
            self.tracker.check_span(storage)
        self.check_unit(storage)

    def check_writer(self, writer: Writer) -> None:
        """Check that the parts go with another writer."""
        if self.tracker is not None:
            check_order(writer)
        check_counting(self.sampler, writer, None, None)
        self.sampler.check_parts(self.storage, writer)

    def check_unit(self, storage: Storage) -> None:
        """Check that the unit can be used with the rows of a storage, as soon as their schema is known."""
        if self.unit is not None and storage.schema is not None:
            self.unit.check_schema(storage.schema, () if self.tracker is None else self.tracker.ends)

    def check_removal(self, sampler: Sampler, writer: Writer) -> None:
        """Check that another sampler or writer goes with the remover, and with rows that were deleted."""
        store, remover = self.store, self.store.remover
        if remover is None:
            return
        tracked = self.make_tracker(sampler) is not None or self.unit is not None
        if remover.eligible is not None:
            if self.own or tracked:
                check_deletable(store.storage, writer, tracked=tracked)
            sampler.drop_rows(no_slots(store.ring), self.view())
        if self.own or tracked:
            mains = sampler if self.own else store.own.sampler
            make_remover(remover.name, store.storage, mains, writer, store.versions, tracked=tracked)

    # -- what is followed ---------------------------------------------------------------------------------------------

    def begin_sampler(self) -> None:
        """Initialize the sampler's bookkeeping from the rows already stored."""
        begin_sampler(self.store, self.sampler, self.tracker)

    @property
    def continuity(self) -> Any:
        """What looks whether rows of windows follow each other; None without windows, or once it has seen enough."""
        return None if self._episodes is None else self._episodes.continuity

    def set_priority_path(self, path: tuple[str, ...] | None) -> None:
        """Take first priorities from another field of new rows; the caller holds the lock."""
        self.priority_path = path
        self.follow()

    def end_continuity(self) -> None:
        """Do not look whether rows of windows follow each other."""
        if self._episodes is not None:
            self._episodes.continuity = None

    def stock(self) -> Stock:
        """Return what there is for readers and writers now; the caller holds the lock."""
        if not self.sampler.counting:
            return Stock(self.rows_present)
        sampler = as_counting(self.sampler)
        return Stock(sampler.rows_left, sampler.draws_left, sampler.room(self.view()))

    def check_drawable(self, view: View) -> None:
        """Raise if there is no row to draw.

        Raises:
            EmptyBufferError: if there are no rows, or no row can start a window.
        """
        if view.rows == 0:
            msg = "Cannot sample from an empty storage: add rows first"
            raise EmptyBufferError(msg)
        if view.starts is not None and not view.starts.rows:
            raise EmptyBufferError(view.starts.why_none(view.rows))


def _raise_for_view(what: str) -> NoReturn:
    msg = f"a view cannot {what}, which concerns all samplers of the buffer: do it with the buffer that it is a view of"
    raise UsageError(msg)
