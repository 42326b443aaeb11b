"""What a sampler and the episodes of a reader follow of the rows: one observer each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ostinato.buffers.continuity import ContinuityCheck
from ostinato.buffers.observer import DrawRule, Observer
from ostinato.buffers.options import raise_for_priorities
from ostinato.buffers.rate_limit import as_counting, largest_batch
from ostinato.buffers.updates import as_sampler, priorities_of_rows
from ostinato.core.ring import no_slots
from ostinato.errors import EmptyBufferError, SlotError
from ostinato.samplers import PrioritizedSampler, PrioritizedSliceSampler, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.observer import Incoming
    from ostinato.buffers.rate_limit import Ask
    from ostinato.buffers.reader import Reader
    from ostinato.buffers.store import Store
    from ostinato.core.episodes.tracker import EpisodeTracker, Marks
    from ostinato.core.records import Draw, Placement
    from ostinato.units import SampleUnit


@final
class EpisodeRows(Observer):
    """The episodes of the rows, in step with the storage.

    Args:
        tracker: records them.
        sampler: which rows it may draw depends on them.
        unit: what a drawn row becomes.
    """

    def __init__(self, tracker: EpisodeTracker, sampler: Sampler, unit: SampleUnit | None) -> None:
        self.tracker, self._sampler = tracker, sampler
        self.continuity = ContinuityCheck.begin(tracker, unit, sampler)
        """Looks whether rows of windows follow each other; None without windows, and once it has seen enough."""

    def saved(self, store: Store, queued: Sequence[Draw]) -> dict[str, Any]:  # noqa: ARG002
        """Return the episodes."""
        return {"episodes": self.tracker.state_dict(store.storage)}

    def direct(self, store: Store) -> bool:
        """Whether flags and numbers in the rows tell the episodes, and no more rows are looked at."""
        return self.continuity is None and self.tracker.fields_read(store.storage) is not None

    def look(self, store: Store) -> None:
        """Look at the first rows, if there are enough new ones."""
        check = self.continuity
        if check is not None and check.is_due(store.ring):
            store.parts_changed()  # there are no direct calls while rows wait for the look
            self.continuity = None  # also if the warning is an error
            if not check.look(store.storage, self.tracker, store.ring):
                self.continuity = check

    def check(self, store: Store, incoming: Incoming) -> Marks:
        """Read where episodes end in new rows."""
        self.look(store)
        return self.tracker.read(store.storage, incoming.payload, incoming.rows)

    def written(self, store: Store, placement: Placement, found: Marks) -> None:
        """Record the episodes of new rows."""
        self.tracker.record(store.storage, placement, found)
        if self.continuity is not None and self.continuity.is_due(store.ring):
            store.parts_changed()  # the next call takes a look

    def before_change(self, store: Store, slots: Tensor, data: Any) -> Any:  # noqa: ARG002
        """Return where episodes end among rows that are about to be edited."""
        return self.tracker.marks_at(store.storage, slots)

    def changed(self, store: Store, slots: Tensor, paths: tuple[Any, ...] | None, found: Any) -> None:  # noqa: ARG002
        """Read the episodes again if they end in other rows now."""
        if self.tracker.compare(found, self.tracker.marks_at(store.storage, slots)):
            begin_sampler(store, self._sampler, self.tracker)  # other rows may be drawn now

    def plan_move(self, store: Store, slots: Tensor) -> Callable[[], None]:  # noqa: ARG002
        """Read the episodes again after the move."""
        return self.tracker.forget

    def cleared(self, store: Store) -> None:  # noqa: ARG002
        """Forget all episodes."""
        self.tracker.clear()

    def replaced(self, store: Store) -> None:  # noqa: ARG002
        """Read the episodes again before the next draw."""
        self.tracker.forget()

    reread = replaced


class _OfSampler(Observer):
    """What a sampler follows.

    Args:
        sampler: the sampler.
        tracker: of the episodes that it sees.
    """

    def __init__(self, sampler: Sampler, tracker: EpisodeTracker | None) -> None:
        self._sampler, self._tracker = sampler, tracker


@final
class SamplerRows(_OfSampler):
    """What every sampler follows: which rows there are."""

    def direct(self, store: Store) -> bool:  # noqa: ARG002
        """Return True: new rows are nothing to it."""
        return True

    def check_removal(self, store: Store) -> None:
        """Raise if the sampler cannot do without rows."""
        self._sampler.drop_rows(no_slots(store.ring), store.view(self._sampler, self._tracker))

    def before_removal(self, store: Store, slots: Tensor | None) -> None:
        """Let the sampler do without rows."""
        if slots is not None:
            self._sampler.drop_rows(slots, store.view(self._sampler, self._tracker))

    def plan_move(self, store: Store, slots: Tensor) -> Callable[[], None]:
        """Return what lets the sampler's state follow the rows.

        Raises:
            OptionError: if its priorities cannot.
        """
        sampler = self._sampler
        state = sampler.move_state(sampler.state_dict(), slots) if slots.shape[0] else None
        if state is None and sampler.prioritized and slots.shape[0]:
            raise_for_priorities(sampler)

        def follow() -> None:
            if state:
                sampler.load_state_dict(state)
            else:
                sampler.move()
            self.reread(store)

        return follow

    def cleared(self, store: Store) -> None:  # noqa: ARG002
        """Forget all rows."""
        self._sampler.clear()

    def replaced(self, store: Store) -> None:
        """Begin with the rows of another storage."""
        self._sampler.move()
        if store.ring.rows:
            self.reread(store)

    def reread(self, store: Store) -> None:
        """Initialize the sampler's bookkeeping from the rows present."""
        begin_sampler(store, self._sampler, self._tracker)


@final
class RecordedRows(_OfSampler):
    """New rows, for a sampler that records them."""

    def direct(self, store: Store) -> bool:  # noqa: ARG002
        """Return True: it needs their slots alone."""
        return True

    def reported(self, store: Store, placement: Placement) -> None:
        """Record new rows."""
        self.written(store, placement, None)

    def written(self, store: Store, placement: Placement, found: Any) -> None:  # noqa: ARG002
        """Record new rows."""
        if self._sampler.watches:
            self._sampler.watch(placement, store.view(self._sampler, self._tracker))
        else:
            self._sampler.record(placement)


@final
class UsedRows(DrawRule):
    """Draws that use rows up, and rows that have left, for a sampler that counts draws.

    Args:
        sampler: the sampler.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = as_counting(sampler)

    def place(self, store: Store, incoming: Incoming) -> Placement | None:
        """Return their slots, which new rows take."""
        return self._sampler.place(incoming.rows, store.ring)

    def can_draw(self, reader: Reader, rows: int) -> bool:  # noqa: ARG002
        """Whether the rows present allow so many draws, or a smaller batch comes out."""
        return self._sampler.leaves or rows <= self._sampler.draws_left

    def most_draws(self, reader: Reader, rows: int) -> int:  # noqa: ARG002
        """Return how many of so many rows may be drawn."""
        return min(rows, self._sampler.draws_left)

    def wait_to_draw(self, reader: Reader, rows: int, ask: Ask, queued: Callable[[], bool]) -> int:  # noqa: ARG002
        """Return the rows of the largest batch that the rows present allow, of at least `ask.min_rows`.

        Raises:
            EmptyBufferError: if these are fewer.
        """
        if ask.min_rows is None or reader.pending:
            return rows
        most = largest_batch(reader, rows, ask.min_rows)
        if not most:
            msg = (
                f"the rows present can be drawn {self._sampler.draws_left} more time(s), and at least "
                f"min_batch={ask.min_rows} were asked for: write more rows, or ask for fewer"
            )
            raise EmptyBufferError(msg)
        return most

    def canceled(self, reader: Reader, draw: Draw) -> None:
        """Undo the counts of a draw."""
        if draw.ring is reader.ring and draw.sampler is self._sampler:  # else its rows are gone
            self._sampler.undo(draw, reader.view())

    def delivered(self, reader: Reader, draw: Draw) -> None:
        """Count the rows of a batch as used; tell the remover which of them have left."""
        sampler, remover = self._sampler, reader.store.remover
        if draw.sampler is not sampler or not self.knows(draw, reader.ring):
            return
        sampler.deliver(draw)
        if remover is not None and sampler.leaves:
            slots = draw.slots.cpu().numpy()  # some may be of another batch that is being made
            remover.used_up(slots[sampler.eligible.free.has(slots)])

    def resumed(self, reader: Reader, draws: list[Draw]) -> list[Draw]:
        """Return the draws whose rows are present, or were kept."""
        view, kept = reader.view(), []
        for draw in draws:
            generations = draw.generations
            here = generations is not None and bool(reader.ring.holds(draw.slots, generations).all())
            if here or draw.held is not None:
                kept.append(draw)
            else:
                self._sampler.undo(draw, view)
        self._sampler.resume(kept, view)
        return kept


@final
class PriorityRows(Observer):
    """The priorities of rows, for a prioritized sampler.

    Args:
        sampler: the sampler.
        tracker: of the episodes that it sees.
        path: field of the rows that holds their first priorities.
    """

    def __init__(self, sampler: Sampler, tracker: EpisodeTracker | None, path: tuple[str, ...] | None) -> None:
        self._sampler, self._tracker, self._path = as_sampler(sampler), tracker, path

    def direct(self, store: Store) -> bool:
        """Whether all new rows get the default priority, and there is room for it."""
        sampler, schema = self._sampler, store.storage.schema
        given = schema is None or self._path in schema.paths  # rows may hold their first priorities
        known = type(sampler) in {PrioritizedSampler, PrioritizedSliceSampler}
        return known and sampler.max_capacity >= store.storage.capacity and not given

    def reported(self, store: Store, placement: Placement) -> None:
        """Give new rows the default priority."""
        self.written(store, placement, None)

    def check(self, store: Store, incoming: Incoming) -> Tensor | None:
        """Return the first priorities of new rows, checked; None for the default priority."""
        return self._read(store, incoming.data, incoming.rows) if incoming.ranked else None

    def _read(self, store: Store, data: Any, rows: int) -> Tensor | None:
        return priorities_of_rows(data, self._path, rows, self._sampler, store.storage.device)

    def check_placement(self, store: Store, placement: Placement) -> None:
        """Check that there can be priorities for these slots.

        Raises:
            SlotError: for a slot at or beyond `max_capacity`.
        """
        try:
            self._sampler.check_placement(placement, store.storage)
        except SlotError:
            store.writer.take_back()
            raise

    def written(self, store: Store, placement: Placement, found: Tensor | None) -> None:
        """Set the first priorities of new rows."""
        self._sampler.record_rows(placement, found, store.view(self._sampler, self._tracker))

    def before_change(self, store: Store, slots: Tensor, data: Any) -> Tensor | None:
        """Return the priorities in rows that replace others, checked."""
        return None if data is None or not slots.shape[0] else self._read(store, data, int(slots.shape[0]))

    def changed(self, store: Store, slots: Tensor, paths: tuple[Any, ...] | None, found: Tensor | None) -> None:
        """Set the priorities of rows that replace others; those of rows with other fields stay."""
        if paths is None:
            present = store.ring.generations(slots) > 0  # without the slots of deleted rows
            given = None if found is None else found[present]
            self._sampler.set_priorities(slots[present], given, store.view(self._sampler, self._tracker))


def followers(
    sampler: Sampler, tracker: EpisodeTracker | None, unit: SampleUnit | None, path: tuple[str, ...] | None
) -> tuple[Observer, ...]:
    """Return what a reader with these parts follows; see `Reader`."""
    episodes = () if tracker is None else (EpisodeRows(tracker, sampler, unit),)
    writes: tuple[Observer, ...] = ()
    if sampler.prioritized:
        writes = (PriorityRows(sampler, tracker, path),)
    elif sampler.watches or type(sampler).record is not Sampler.record:
        writes = (RecordedRows(sampler, tracker),)
    return (*episodes, SamplerRows(sampler, tracker), *used_rows(sampler), *writes)


def used_rows(sampler: Sampler) -> tuple[UsedRows, ...]:
    """Return what counts the draws of a sampler; nothing unless it uses rows up."""
    return (UsedRows(sampler),) if sampler.counting else ()


def begin_sampler(store: Store, sampler: Sampler, tracker: EpisodeTracker | None) -> None:
    """Initialize a sampler's bookkeeping from the rows present."""
    if sampler.prioritized:
        as_sampler(sampler).begin(store.view(sampler, tracker))
    elif sampler.counting:
        as_counting(sampler).begin(store.view(sampler, tracker))
    else:
        sampler.recheck()
    gone = store.deleted_slots() if tracker is None else no_slots(store.ring)
    if gone.numel():
        sampler.drop_rows(gone, store.view(sampler, tracker))
