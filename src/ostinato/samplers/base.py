"""Base classes of samplers: what a buffer calls to draw slots, and to keep a sampler's state up to date."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
import torch

from ostinato.core.index import Slots, read_slots
from ostinato.core.options import LARGEST
from ostinato.core.records import View
from ostinato.core.ring import Ring
from ostinato.durable import load_part, save_part
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    KindError,
    OptionError,
    PriorityError,
    SlotError,
    UsageError,
)
from ostinato.samplers.priorities import read_values, reduce_items, steps_of_rows
from ostinato.samplers.standalone import (
    Standalone,
    as_picks,
    check_request,
    index_and_info,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from ostinato.core.eligible import Eligible
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.core.records import Draw, Placement, Plan
    from ostinato.core.rows import Path
    from ostinato.samplers.standalone import BareStorage

_CPU = torch.device("cpu")


class StorageShape(Protocol):
    """What `Sampler.check_parts` sees of a storage."""

    ndim: int
    ring_only: bool


class WriterOrder(Protocol):
    """What `Sampler.check_parts` sees of a writer."""

    in_order: bool
    mutable: bool


class Sampler(ABC):
    """Base of all samplers; a sampler of your own subclasses it and implements `draw`.

    The buffer calls every method under its lock, so a sampler needs none.

    Without a buffer, `sample` draws from a bare storage. The storage does not report its writes to the sampler: call
    `add`, `extend` or `mark_update` after them. This use is not thread-safe.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, SamplerWithoutReplacement
        >>> storage = LazyTensorStorage(10)
        >>> storage.set(range(4), {"obs": torch.arange(4)})
        >>> index, info = SamplerWithoutReplacement(shuffle=False).sample(storage, 3)
        >>> storage[index]["obs"]
        tensor([0, 1, 2])
    """

    prioritized: bool = False
    """Whether the sampler keeps priorities, and so is a `PrioritySampler`."""
    counting: bool = False
    """Whether draws use rows up, so that the sampler is a `CountingSampler`."""
    ran_out: bool = False
    """Whether the last draw ended an epoch; always False for endless samplers."""
    episodes: Episodes | None = None
    """Where episodes begin and end, for a sampler that needs them; its view then has `episodes`."""
    slices: bool = False
    """Whether it draws slices (`Draw.length`, `Draw.lengths`), not single rows."""
    slice_steps: int = 1
    """Steps of one environment that a slice covers, which a storage must have."""
    cache_values: bool = False
    """Whether `sample` keeps the episodes of a storage until its length or cursor changes, or a write is reported."""
    _standalone: Standalone | None = None
    reads: bool = False
    """Whether it reads stored fields; its view then has `stored`."""
    watches: bool = False
    """Whether the buffer calls `watch` as rows are written."""
    by_age: bool = False
    """Whether it draws only rows of `View.allowed`, so that `sample(max_age=)` is available."""
    leaves: bool = False
    """Whether rows that are used up leave the buffer, so that `len` counts only the others (`rows_left`)."""
    row_values: tuple[str, ...] | None = None
    """Entries of the state with one value for each row; None if it is not known how the state follows rows."""
    row_slots: tuple[str, ...] = ()
    """Entries of the state that list slots."""
    drop_last: bool = False
    """Whether an epoch leaves out its last, smaller batch; the buffer then needs a batch size from the start."""

    @abstractmethod
    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw up to `batch_size` slots.

        Args:
            view: the buffer now; `view.rows` is at least 1. If it has `starts`, all slots must be among those.
            batch_size: at least 1.
            generator: the only source of random numbers; None stands for torch's global one.

        Returns:
            Slots int64 `[B]` on `view.device`, in `[0, view.rows)`; `B` is `batch_size`, or less where an epoch ends.
        """

    def check_parts(self, storage: StorageShape, writer: WriterOrder) -> None:  # noqa: B027
        """Check that the sampler works with a storage and a writer.

        Raises:
            OptionError: naming what it does not work with.
        """

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: B027
        """Raise what `draw` would raise, and change nothing: for several samplers that draw one batch together.

        Args:
            view: as of `draw`.
            batch_size: as of `draw`.

        Raises:
            EmptyBufferError: if there is nothing to draw before more rows are written.
        """

    @property
    def keeps_rows(self) -> bool:
        """Whether it keeps a state of the rows of its buffer, and so serves one buffer at a time: it has a `clear`."""
        return type(self).clear is not Sampler.clear

    @property
    def epochal(self) -> bool:
        """Whether the sampler goes through the rows in epochs; iteration over the buffer then ends with the epoch."""
        return False

    def spent(self, view: View) -> bool:  # noqa: ARG002
        """Return whether an epoch that has begun ended after its last draw, since the rows left cannot be drawn now."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes used for each row of the buffer; 0 for samplers without such state."""
        return 0

    def mass(self, view: View) -> tuple[float, float, float] | None:  # noqa: ARG002
        """Return the sum of the values of rows, where each draw takes row `i` with probability `v_i / sum v`.

        Several buffers with such samplers can be drawn from as one buffer, whatever machine each is on.

        Args:
            view: the buffer.

        Returns:
            The sum of the values of all rows that can be drawn, the smallest above zero, and the exponent of weights;
            None if draws depend on each other, or are not of single rows.
        """
        return None

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:  # noqa: ARG002
        """Return the fields that slices add to their batch, `[R]` by path; may run in another thread.

        Args:
            plan: the slices.
            data: the batch, nested.
        """
        return {}

    def restart(self) -> None:  # noqa: B027
        """Begin a new epoch with the next draw."""

    def recheck(self) -> None:  # noqa: B027
        """Update the state after an edit that has changed which rows may be drawn."""

    def record(self, placement: Placement) -> None:  # noqa: B027
        """Record rows just written."""

    def watch(self, placement: Placement, view: View) -> None:  # noqa: B027
        """Record rows just written, with the view that has them; called in place of `record` if `watches`."""

    def share(self, ring: Any) -> None:  # noqa: B027
        """Move what is kept of each row to the memory of a ring that processes share."""

    def drop_rows(self, slots: Tensor, view: View) -> None:  # noqa: ARG002
        """Record that rows are about to be deleted; `View.starts` does not have them from then on.

        Called again for rows deleted before, after the sampler was exchanged or loaded.

        Args:
            slots: int64 `[n]`, each once.
            view: the buffer, before rows are deleted.

        Raises:
            OptionError: if the sampler cannot do without rows; nothing changes then.
        """
        self.recheck()

    def clear(self) -> None:  # noqa: B027
        """Forget all rows: the buffer was emptied."""

    def move(self) -> None:
        """Forget all rows: the sampler now belongs to another buffer, or the buffer has another storage."""
        self.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state; tensors are not copied."""
        return {}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: B027
        """Raise what `load_state_dict` would raise: buffers call this before they load, and before they save.

        Args:
            state: what `state_dict` returned.
            rows: rows of the buffer.

        Raises:
            CheckpointError: if the state is damaged, of other options, or of another number of rows.
        """

    def move_state(self, state: dict[str, Any], order: Tensor) -> dict[str, Any] | None:
        """Return the state after rows were moved: the row of slot `order[i]` is in slot `i` now, and all others left.

        A full ring is moved so when it is loaded into a buffer of another capacity, and rows leave a buffer with
        `max_bytes`. A sampler of your own whose state contains slots, or a value for each row, sets `row_values` and
        `row_slots`, or overrides this method.

        Args:
            state: what `state_dict` returned.
            order: int64 `[n]`, ascending in age.

        Returns:
            The state; None if it cannot follow: the sampler then begins anew where rows leave, and a load raises.
        """
        if self.row_values is None:
            return None if state else state
        return moved(state, order, self.row_values, self.row_slots)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned."""

    # -- without a buffer ----------------------------------------------------------------------------------------------

    @final
    def sample(
        self, storage: BareStorage, batch_size: int, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor | tuple[Tensor, ...], dict[Any, Any]]:
        """Draw rows of a bare storage. Cost: that of `draw`; samplers of slices also read the episodes, O(rows).

        Args:
            storage: the storage, which no buffer writes at the same time.
            batch_size: rows to draw.
            generator: the only source of random numbers; None stands for torch's global one.

        Returns:
            The index of the rows, and the info. The index is int64 `[B]` on the device of the storage, or a pair of
            these with `ndim=2`; that of slices is always a tuple. The info has `priority_weight` `[B]` of prioritized
            samplers, and the flags of slices (see `SliceSampler`).

        Raises:
            EmptyBufferError: if there is no row to draw.
            KindError: if `storage` is no storage, or `batch_size` no integer.
            OptionError: if `batch_size` is below 0.
        """
        check_request(storage, batch_size)
        view = self._view_of(storage)
        if not view.rows:
            msg = "Cannot sample from an empty storage: write rows first"
            raise EmptyBufferError(msg)
        self.begin_standalone(view, storage)
        draw = self.draw(view, batch_size, generator)
        if isinstance(self, CountingSampler):
            self.deliver(draw)
        return index_and_info(draw, view, storage, self.marks)

    def can_sample(self, storage: BareStorage, batch_size: int) -> bool:
        """Return whether `sample` can draw a batch now. Cost: see `sample`."""
        view = self._view_of(storage)
        if not view.rows:
            return False
        try:
            self.begin_standalone(view, storage)
            self.check_draw(view, batch_size)
        except (EmptyBufferError, PriorityError):
            return False
        return True

    def begin_standalone(self, view: View, storage: BareStorage) -> None:  # noqa: B027
        """Prepare a draw from a bare storage, for samplers that keep a state of its rows."""

    def _view_of(self, storage: BareStorage) -> View:
        if self._standalone is None:
            self._standalone = Standalone()
        if self.reads:
            self.recheck()  # a storage does not report its edits
        return self._standalone.view(storage, self.episodes, reads=self.reads, keep=self.cache_values)

    def add(self, index: int | Tensor | tuple[Any, ...]) -> None:
        """Record that a row of a bare storage was written; see `extend`."""
        self.extend(index)

    def extend(self, index: Any) -> None:
        """Record that rows of a bare storage were written: a sampler in a buffer is told by the buffer.

        Args:
            index: their slots: an integer, or a range, list or integer tensor; with `ndim=2` an index as `sample`
                returns it.
        """
        if self._standalone is not None:
            self._standalone.written()
        if self.counting or not isinstance(index, tuple) or len(index) == 1:
            self.record(as_picks(_slots_of(index, None, _CPU)[0]))

    def mark_update(self, index: Any, *, storage: BareStorage | None = None) -> None:  # noqa: ARG002
        """Record that rows of a bare storage were changed; prioritized samplers give them the default priority."""
        if self._standalone is not None:
            self._standalone.written()

    @property
    def default_priority(self) -> float:
        """Priority of the next new row; 1 for samplers without priorities."""
        return 1.0

    def update_priority(self, index: Any, priority: Any, *, storage: BareStorage | None = None) -> None:  # noqa: ARG002
        """Set the priorities of rows of a bare storage; only prioritized samplers have any, others warn."""
        warnings.warn(
            f"Calling update_priority() on a sampler {type(self).__name__} that is not prioritized has no effect: use "
            "a PrioritizedSampler",
            UserWarning,
            stacklevel=2,
        )

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the state to a directory; that of a sampler in a buffer is part of `ReplayBuffer.dumps`.

        Args:
            path: the directory, which may hold an older state. It is replaced atomically.

        Raises:
            CheckpointError: if the state cannot be saved, or the path holds other things.
        """
        save_part(path, self, "sampler")

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore what `dumps` saved. No code is executed; checksums are verified.

        Raises:
            CheckpointError: if there is no state, it is damaged, or of another sampler or other options; nothing has
                changed then.
        """
        load_part(path, self, "sampler", self._check_saved)

    def _check_saved(self, state: dict[str, Any]) -> None:
        sizes = [state[entry].shape[0] for entry in self.row_values or () if entry in state]
        self.check_state(state, sizes[0] if sizes else LARGEST)


class PrioritySampler(Sampler):
    """Base of samplers that keep a priority for each row; the buffer passes priorities on as rows are written.

    Rows without a priority have the default priority.
    """

    prioritized = True
    max_capacity: int
    """Most rows that it can keep priorities for: a row in a slot from this one on raises `SlotError`."""
    _rows = 0

    def check_device(self, device: torch.device) -> None:
        """Raise if it cannot keep priorities of rows on this device.

        Raises:
            OptionError: naming both devices.
        """

    @property
    def device(self) -> torch.device:
        """Where priorities are kept."""
        return _CPU

    def max_rows(self, storage: BareStorage) -> int:
        """Return how many rows of a storage it can keep priorities for.

        With `ndim=2` a storage may have a few more slots than its `max_size`, which are included.
        """
        return storage.capacity if self.max_capacity >= storage.max_size else self.max_capacity

    def check_placement(self, placement: Placement, storage: BareStorage) -> None:
        """Check that rows about to be written can have a priority.

        Raises:
            SlotError: for a slot at or beyond `max_capacity`.
        """
        self.check_rows(placement.end, self.max_rows(storage))

    def check_rows(self, rows: int, room: int) -> None:
        """Check that `rows` rows can have a priority, where there is room for `room`.

        Raises:
            SlotError: if there are more.
        """
        if rows > room:
            msg = (
                f"slot {rows - 1} is out of range: {type(self).__name__} keeps priorities for max_capacity="
                f"{self.max_capacity} rows: give it the max_size of the storage"
            )
            raise SlotError(msg)

    def begin_standalone(self, view: View, storage: BareStorage) -> None:
        """Give rows of a bare storage that have no priority the default priority.

        Raises:
            SlotError: if the storage has more than `max_capacity` rows.
        """
        self.check_rows(view.rows, self.max_rows(storage))
        self.begin(view)

    def extend(self, index: Any, *, storage: BareStorage | None = None) -> None:
        """Record that rows of a bare storage were written: they get the default priority.

        Args:
            index: their slots, or an index as `sample` returns it; -1 marks a row that was not kept.
            storage: needed for an index with `ndim=2`, which is otherwise only noted: set its priorities next.
        """
        super().mark_update(index, storage=storage)
        if not isinstance(index, tuple) or len(index) == 1 or storage is not None:
            self._set_by_index(index, None, storage, least=-1)

    def mark_update(self, index: Any, *, storage: BareStorage | None = None) -> None:
        """Give rows of a bare storage the default priority, as new rows get it; see `update_priority`."""
        super().mark_update(index, storage=storage)
        self._set_by_index(index, None, storage)

    def update_priority(self, index: Any, priority: Any, *, storage: BareStorage | None = None) -> None:
        """Set the priorities of rows of a bare storage; for rows of a buffer use its method, which checks generations.

        Args:
            index: slots, or an index as `sample` returns it. Of equal slots the last one wins.
            priority: one number, or one for each row; further dimensions are reduced.
            storage: needed for an index with `ndim=2`.

        Raises:
            PriorityError: for invalid priorities; nothing is changed.
            SlotError: for a negative slot, or one at or beyond `max_capacity`; nothing is changed.
            UsageError: if the number of priorities is not that of rows, or the storage is missing.
        """
        self._set_by_index(index, priority, storage)

    def _set_by_index(self, index: Any, priority: Any, storage: BareStorage | None, *, least: int = 0) -> Tensor:
        """Set priorities, or the default priority for None, of an index with slots from `least` on, -1 for no row.

        Returns:
            The slots, without -1.
        """
        device = self.device if storage is None else storage.device
        slots, shape = _slots_of(index, storage, device)
        check_not_negative(slots.cpu(), least=least)
        steps = None if self.slices else steps_of_rows(None if storage is None else storage.schema)
        given = None if priority is None else read_values(priority, shape, self.reduce, steps).to(device)
        kept = slots >= 0
        slots, given = slots[kept].contiguous(), None if given is None else given[kept].contiguous()
        if not slots.numel():
            return slots
        if given is not None:
            self.check(given)
        room = self.max_capacity if storage is None else self.max_rows(storage)
        known, capacity = self._extent()
        rows = max(known, int(slots.max()) + 1)
        self.check_rows(rows, max(room, known))
        capacity = capacity if capacity >= rows else max(room, known)
        self.set_priorities(slots, given, View(rows, capacity, rows % capacity, Ring(capacity, device), device))
        return slots

    def _extent(self) -> tuple[int, int]:
        """Return the rows with a priority, and the slots of the buffer, as far as they are known."""
        return self._rows, 0

    def priorities_at(self, slots: Tensor, view: View) -> Tensor:  # noqa: ARG002
        """Return the priorities of rows, float64 `[n]`, for `remover="lowest_priority"`.

        Raises:
            OptionError: unless a subclass overrides this method.
        """
        msg = f"{type(self).__name__} does not tell the priorities of rows (priorities_at): override that method"
        raise OptionError(msg)

    reduction: str = "max"
    """How several priorities of an item become one: "max", "min", "mean" or "median"."""

    def reduce(self, items: Tensor) -> Tensor:
        """Reduce the values of each item to one priority.

        Args:
            items: `[n, *shape]`, any real dtype.

        Returns:
            float64 `[n]`.
        """
        return reduce_items(items, self.reduction)

    @abstractmethod
    def check(self, priorities: Tensor) -> None:
        """Check priorities before anything changes.

        Raises:
            PriorityError: for invalid priorities; names their positions in `priorities`, float64 `[n]`.
        """

    @abstractmethod
    def begin(self, view: View) -> None:
        """Initialize the state from the rows of the buffer that the sampler now belongs to."""

    @abstractmethod
    def record_rows(self, placement: Placement, priorities: Tensor | None, view: View) -> None:
        """Record rows just written, with their first priorities.

        Args:
            placement: their slots.
            priorities: float64 `[placement.total]`, checked; None gives them the default priority.
            view: the buffer, the new rows included.
        """

    @abstractmethod
    def set_priorities(self, slots: Tensor, priorities: Tensor | None, view: View, keep: Tensor | None = None) -> None:
        """Set the priorities of rows; of equal slots the last one wins.

        Args:
            slots: int64 `[n]` on the view's device, in `[0, view.rows)`.
            priorities: float64 `[n]` on the view's device; None gives the rows the default priority.
            view: the buffer.
            keep: bool `[n]`, False where nothing is to change; on devices where filtering would be a host sync.
        """

    def update(self, slots: Tensor, priorities: Tensor, generations: Tensor | None, view: View) -> int | Tensor:
        """Set the priorities that a learner computed, except those of rows replaced since they were drawn.

        Args:
            slots: int64 `[n]` on the view's device, contiguous; without generations, -1 marks a row that was not kept.
            priorities: float32 or float64 `[n]` on the view's device, contiguous.
            generations: generations of the rows when they were drawn, int64 `[n]`; None sets the priority of whatever
                row is in the slot.
            view: the buffer.

        Returns:
            Number of rows that had been replaced; 0-dim on devices other than the CPU.

        Raises:
            PriorityError: for invalid priorities; nothing is changed.
            SlotError: without generations, on the CPU: if a slot is beyond the rows; nothing is changed.
        """
        if generations is None:
            keep = slots >= 0 if slots.is_cpu else slots != -1
            check_rows(slots, view.rows)
        else:
            keep = view.ring.matches(slots, generations)
        priorities = priorities.to(torch.float64)
        if not slots.is_cpu:
            self.set_priorities(slots, priorities, view, keep)
            return (~keep).sum() if generations is not None else 0
        if bool(keep.all()):
            self.set_priorities(slots, priorities, view)
            return 0
        self.check(torch.where(keep, priorities, 0.0))  # all of them, so that positions are those in `priorities`
        self.set_priorities(slots[keep], priorities[keep], view)
        return int((~keep).sum()) if generations is not None else 0

    @abstractmethod
    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same options, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """

    def raise_deferred(self) -> None:
        """Raise errors found on a device since the last call: to raise them at once would have been a host sync."""


class CountingSampler(Sampler):
    """Base of samplers whose draws use rows up: each row can be drawn a limited number of times.

    The buffer reports which draws reached a reader. Draws carry the generations of their rows. A draw with a row that
    was replaced before it was read is undone and made again, since the row that replaced it was not counted.
    """

    counting = True
    in_order: bool = False
    """Whether rows must be in the order of writing."""
    bounded: bool = False
    """Whether writers wait for room (`room`)."""
    eligible: Eligible
    """The rows that have not left, and the slots of the others, for samplers with `leaves`."""

    def place(self, rows: int, ring: Ring) -> Placement | None:  # noqa: ARG002
        """Return the slots of `rows` new rows; None leaves them to the writer. Nothing changes before `record`."""
        return None

    @property
    @abstractmethod
    def rows_left(self) -> int:
        """Rows that can be drawn."""

    @property
    @abstractmethod
    def draws_left(self) -> int:
        """Draws that these rows allow."""

    @abstractmethod
    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer allows."""

    @abstractmethod
    def begin(self, view: View) -> None:
        """Initialize the state from rows that a storage held before."""

    def room(self, view: View) -> int | None:  # noqa: ARG002
        """Return how many rows may be written now; None for any number."""
        return None

    def deliver(self, draw: Draw) -> None:
        """Record that the batch of a draw has reached its reader."""

    def drop_rows(self, slots: Tensor, view: View) -> None:  # noqa: ARG002
        """Record that rows are about to be deleted; see `Sampler.drop_rows`.

        Raises:
            OptionError: always, unless a subclass overrides this method.
        """
        msg = (
            f"{type(self).__name__} does not say how its counts do without deleted rows (drop_rows): override that "
            "method, or use another sampler"
        )
        raise OptionError(msg)

    @abstractmethod
    def undo(self, draw: Draw, view: View) -> None:
        """Undo a draw whose batch reached no reader."""

    def resume(self, draws: Sequence[Draw], view: View) -> None:
        """Undo, after a load, all draws under way except those given, which are still to be delivered."""

    @abstractmethod
    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same options, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """


def _slots_of(index: Any, storage: BareStorage | None, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Return slots int64 `[n]`, and the shape of the index, which needs the storage if it has several dimensions.

    Raises:
        UsageError: if the storage is missing.
    """
    try:
        columns = len(index) if isinstance(index, tuple) else np.shape(index)[-1] if np.ndim(index) > 1 else 1
    except (ValueError, RuntimeError):
        columns = 1  # no index: `read_slots` says so
    if columns == 1:
        return read_slots(index, Slots(device))
    if storage is None:
        msg = (
            "storage should be provided to update_priority() when the storage has more than one dimension, got an "
            f"index of {columns} columns: pass storage=rb.storage"
        )
        raise UsageError(msg)
    return read_slots(index, storage)


def check_replacement(cls: type, *, replacement: bool) -> None:
    """Check that a sampler that can only draw with replacement is not asked for the other variant.

    Raises:
        KindError: if it is.
    """
    if not replacement:
        msg = f"{cls.__name__} has no without-replacement variant, got replacement=False: leave it out"
        raise KindError(msg)


def check_rows(slots: Tensor, rows: int) -> None:
    """Check that slots on the CPU are below `rows`; -1 marks a row that was not kept.

    Raises:
        SlotError: naming a slot out of range.
    """
    if not (slots.is_cpu and slots.numel()):
        return
    check_not_negative(slots, least=-1)
    high = int(slots.max())
    if high >= rows:
        msg = f"index {high} is out of range for {rows} rows: use an index in [0, {rows})"
        raise SlotError(msg)


def check_not_negative(slots: Tensor, *, least: int = 0) -> None:
    """Check that slots on the CPU are not negative: updates do not count from the end, as `rb[-1]` does.

    Args:
        slots: int64 `[n]`.
        least: -1 where -1 marks a row that was not kept, which the caller leaves out.

    Raises:
        SlotError: naming a negative slot.
    """
    if slots.is_cpu and slots.numel() and (low := int(slots.min())) < least:
        msg = (
            f"index {low} is out of range: updates name rows by slots of at least 0, as extend() and sample() return "
            f"them; negative ones do not count from the end, as in rb[{low}]"
        )
        raise SlotError(msg)


# -- states ----------------------------------------------------------------------------------------------------------


def require(good: bool, problem: str) -> None:  # noqa: FBT001
    """Check a part of a state.

    Raises:
        CheckpointError: if it is not good, naming the problem.
    """
    if not good:
        msg = f"the sampler's state is damaged: {problem}"
        raise CheckpointError(msg)


def require_options(sampler: Any, state: dict[str, Any], names: Iterable[str]) -> None:
    """Check that a state has the options of a sampler (or a part of one), which are attributes of it.

    Raises:
        CheckpointError: naming the first that differs.
    """
    for name in names:
        if state[name] != getattr(sampler, name):
            msg = (
                f"the state is that of {type(sampler).__name__}({name}={state[name]!r}), this one has "
                f"{getattr(sampler, name)!r}: make it with the same options"
            )
            raise CheckpointError(msg)


def new_slots(order: Tensor, slots: Tensor) -> Tensor:
    """Return the slots of rows that were moved, int64 `[n]`, -1 for rows that have left.

    Args:
        order: int64 `[rows]`: the row of slot `order[i]` is in slot `i` now, and all others have left.
        slots: int64 `[n]`, where they were before.
    """
    order = order.to(slots.device)
    size = 1 + max(int(x.max()) if x.numel() else -1 for x in (order, slots))
    places = torch.full((size,), -1, dtype=torch.int64, device=slots.device)
    places[order] = torch.arange(order.shape[0], device=slots.device)
    return places[slots]


def moved(state: dict[str, Any], order: Tensor, values: Iterable[str], slots: Iterable[str]) -> dict[str, Any]:
    """Return a state after rows were moved.

    Args:
        state: of a sampler.
        order: see `new_slots`.
        values: entries with one value for each row, if the state has them.
        slots: entries that list slots; those of rows that have left are dropped.
    """
    changed = {name: state[name][order.to(state[name].device)] for name in values if name in state}
    for name in slots:
        if name in state:
            found = new_slots(order, state[name])
            changed[name] = found[found >= 0]
    return {**state, **changed}
