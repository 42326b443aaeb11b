"""Samplers whose batches are the first rows of an order: a stack, and a heap of priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch

from ostinato.core.rank_order import RankOrder
from ostinato.core.records import Draw, Run
from ostinato.core.rows_left import FreeSlots, slots_of
from ostinato.errors import CheckpointError, EmptyBufferError, OptionError, PriorityError, SlotError, TooFewRowsError
from ostinato.samplers.base import CountingSampler, PrioritySampler, check_not_negative
from ostinato.samplers.consuming import check_count, check_leaving
from ostinato.samplers.priorities import check_capacity, check_reduction, reduce_items
from ostinato.samplers.standalone import read_index, read_values, steps_of_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.rank_order import ReadKeys
    from ostinato.core.records import Picks, Placement, View
    from ostinato.core.ring import Ring
    from ostinato.samplers.base import StorageShape, WriterOrder
    from ostinato.samplers.standalone import BareStorage

__all__ = ["HeapSampler", "StackSampler"]

_GROWTH = 2
_SHOWN = 8
_LARGEST = float(np.finfo(np.float64).max)


@final
class _TopRows:
    """The rows of a sampler in the order in which it draws them, and how often each was drawn.

    Memory: that of the order, and with a limit 16 bytes for each slot.

    Args:
        limit: draws after which a row leaves; None for any number.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.order = RankOrder()
        self.free = FreeSlots()
        self.ran_out = False
        self.rows = 0
        """Slots that were seen."""
        self._uses: NDArray[np.int32] = np.zeros(0, np.int32)
        self._under_way: NDArray[np.int32] = np.zeros(0, np.int32)  # draws that have not been delivered
        self._drawn: NDArray[np.int64] = np.zeros(0, np.int64)  # generation at the last draw, -1 before it

    @property
    def nbytes(self) -> int:
        """Bytes of order and counts."""
        return self.order.nbytes + int(self._uses.nbytes + self._under_way.nbytes + self._drawn.nbytes)

    def begin(self, rows: int) -> None:
        """Add rows that were not recorded."""
        if rows < self.rows:
            self.clear()
        if rows > self.rows:
            self.record(np.arange(self.rows, rows))

    def record(self, slots: NDArray[np.int64]) -> None:
        """Add rows just written; each may be drawn `limit` times from now on."""
        if not slots.size:
            return
        rows = int(slots.max()) + 1
        if rows - self.rows > np.count_nonzero(slots >= self.rows):
            self.record(np.setdiff1d(np.arange(self.rows, rows), slots))  # rows between that were not recorded
        self.rows = max(self.rows, rows)
        self.order.add(slots)
        self.ran_out = False
        if self.limit is not None:
            self._reserve(rows)
            self._uses[slots], self._under_way[slots], self._drawn[slots] = 0, 0, -1
            self.free.discard(slots)

    def draw(self, view: View, batch_size: int, read: ReadKeys) -> NDArray[np.int64]:
        """Return the slots of the next batch, and count their draws.

        Raises:
            EmptyBufferError: if no row is left, or there are fewer than a batch and rows do not leave.
        """
        self.check_draw(view, batch_size)
        slots = self._allowed(view, batch_size, read)
        if self.limit is None:
            return slots
        self._uses[slots] += 1
        self._under_way[slots] += 1
        self._drawn[slots] = view.ring.generations_of_rows(torch.from_numpy(slots).to(view.device)).cpu().numpy()
        self.order.remove(slots[self._uses[slots] >= self.limit])
        self.ran_out = self.order.count == 0
        return slots

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise, except where only some rows may be drawn."""
        self.begin(view.rows)
        if self.order.count == 0 and self.limit is not None:
            self.ran_out = True
            msg = (
                f"Cannot sample from an empty storage: all {view.rows} rows were drawn {self.limit} time(s) and have "
                "left: add rows first"
            )
            raise EmptyBufferError(msg)
        if self.order.count < batch_size and self.limit is None:
            raise TooFewRowsError(_too_few(self.order.count, batch_size))

    def _allowed(self, view: View, count: int, read: ReadKeys) -> NDArray[np.int64]:
        """Return the first rows that the view allows to be drawn."""
        found = self.order.first(count, read)
        if view.starts is None:
            if self.limit is None and found.size < count:  # rows were deleted
                raise TooFewRowsError(_too_few(found.size, count))
            return found
        asked = count
        while True:
            allowed = view.starts.allowed(torch.from_numpy(found).to(view.device)).cpu().numpy()
            if np.count_nonzero(allowed) >= count:
                top: NDArray[np.int64] = found[allowed][:count]
                return top
            if asked >= self.order.count:
                raise TooFewRowsError(_too_few(int(np.count_nonzero(allowed)), count))
            asked *= _GROWTH
            found = self.order.first(asked, read)

    def _mine(self, draw: Draw) -> NDArray[np.int64]:
        """Return the rows of a draw that were not replaced, each of which it has once."""
        if draw.generations is None:
            return np.zeros(0, np.int64)
        slots: NDArray[np.int64] = draw.slots.cpu().numpy()
        known = slots < self._drawn.size  # of a buffer that was emptied since none are
        slots, generations = slots[known], draw.generations.cpu().numpy()[known]
        mine: NDArray[np.int64] = slots[self._drawn[slots] == generations]
        return mine

    def deliver(self, draw: Draw) -> None:
        """Free the slots of the rows that have left."""
        if self.limit is not None:
            slots = self._mine(draw)
            self._under_way[slots] -= 1
            self.free.add(slots[(self._uses[slots] >= self.limit) & (self._under_way[slots] == 0)])

    def undo(self, draw: Draw) -> None:
        """Let the rows of a batch that reached no reader be drawn again, unless they have been replaced since."""
        if self.limit is None:
            return
        slots = self._mine(draw)
        self._under_way[slots] -= 1
        self._uses[slots] -= 1
        self.order.add(slots)
        self.ran_out = self.order.count == 0

    def drop(self, slots: NDArray[np.int64]) -> None:
        """Let rows leave that are deleted."""
        self.order.remove(slots)
        if self.limit is not None:
            self._uses[slots], self._under_way[slots], self._drawn[slots] = self.limit, 0, -1
            self.free.add(slots)

    def _reserve(self, rows: int) -> None:
        held = self._uses.size
        if rows > held:
            more = max(rows, _GROWTH * held) - held
            self._uses = np.concatenate((self._uses, np.zeros(more, np.int32)))
            self._under_way = np.concatenate((self._under_way, np.zeros(more, np.int32)))
            self._drawn = np.concatenate((self._drawn, np.full(more, -1, np.int64)))

    def clear(self) -> None:
        """Remove all rows."""
        self.__init__(self.limit)

    def state_dict(self) -> dict[str, Any]:
        """Return the draws of each row and the free slots; without a limit the number of draws alone."""
        state: dict[str, Any] = {"max_times_sampled": self.limit}
        if self.limit is not None:
            state["uses"] = torch.from_numpy(self._uses[: self.rows].copy())
            state["free"] = self.free.state()
            state["ran_out"] = self.ran_out
        return state

    def check_state(self, state: dict[str, Any], rows: int, name: str) -> None:
        """Check that a state is complete, of the same limit, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        limit = state["max_times_sampled"]
        if limit != self.limit:
            msg = (
                f"the state is that of a {name} with max_times_sampled={limit!r}, this one has {self.limit!r}: make it "
                "with the same number"
            )
            raise CheckpointError(msg)
        if limit is None:
            return
        uses, free = state["uses"], state["free"]
        good = uses.dtype is torch.int32 and uses.shape == (rows,) and not bool(((uses < 0) | (uses > limit)).any())
        left = (uses == limit).nonzero().flatten() if good else None
        if left is None or free.unique().shape != free.shape or not bool(torch.isin(free, left).all()):
            msg = f"the sampler's state is damaged: its draws and free slots are not those of {rows} rows"
            raise CheckpointError(msg)

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return the state after rows were moved to other slots."""
        if self.limit is None:
            return state
        uses, free = state["uses"], (state["free"] - seam).remainder_(rows)
        return {**state, "uses": torch.cat((uses[seam:], uses[:seam])), "free": free}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; rows of batches that were under way then have left."""
        self.clear()
        if self.limit is None:
            return
        uses: NDArray[np.int32] = state["uses"].numpy()
        self._reserve(uses.size)
        self._uses[: uses.size], self.rows = uses, uses.size
        self.order.add(np.flatnonzero(uses < self.limit))
        self.free.load(state["free"])
        self.free.add(np.flatnonzero(uses == self.limit))
        self.ran_out = bool(state["ran_out"])


class _TopSampler(CountingSampler):
    """What a stack and a heap have in common: the rows of an order, which leave after `max_times_sampled` draws.

    Raises:
        KindError: if `max_times_sampled` is no integer.
        OptionError: if it is below 1.
    """

    def __init__(self, max_times_sampled: int | None) -> None:
        limit = None if max_times_sampled is None else check_count("max_times_sampled", max_times_sampled)
        self.max_times_sampled = limit
        self.counting = self.leaves = limit is not None
        self._top = _TopRows(limit)

    @property
    def free(self) -> FreeSlots:  # type: ignore[override]
        """Slots of the rows that have left."""
        return self._top.free

    @property
    def ran_out(self) -> bool:
        """Whether the last draw took the last row; always False where rows stay."""
        return self._top.ran_out

    @ran_out.setter
    def ran_out(self, ran_out: bool) -> None:
        self._top.ran_out = ran_out

    @property
    def epochal(self) -> bool:
        """Iteration ends with the last row, where rows leave."""
        return self.leaves

    @property
    def rows_left(self) -> int:
        """Rows that can be drawn."""
        return self._top.order.count

    @property
    def draws_left(self) -> int:
        """Draws of different rows that these rows allow at once."""
        return self._top.order.count

    def draws_of(self, capacity: int) -> int:
        """Return the rows of the largest batch."""
        return capacity

    def check_parts(self, storage: StorageShape, writer: WriterOrder) -> None:
        """Check that rows can leave; see `ConsumingSampler`."""
        if self.leaves:
            check_leaving(type(self).__name__, storage, writer)

    def place(self, rows: int, ring: Ring) -> Picks | None:
        """Return slots of rows that have left, then those from the cursor on; None if there are none of the first."""
        return self._top.free.place(rows, ring)

    def deliver(self, draw: Draw) -> None:
        """Free the slots of the rows that have left."""
        self._top.deliver(draw)

    def undo(self, draw: Draw, view: View) -> None:  # noqa: ARG002
        """Let the rows of a batch that reached no reader be drawn again, unless they have been replaced since."""
        self._top.undo(draw)

    def holds(self, slots: Tensor) -> Tensor:
        """Return which rows can still be drawn."""
        return torch.from_numpy(self._top.order.has(slots.cpu().numpy())).to(slots.device)

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Draw rows that are deleted no more."""
        self.begin(view)
        self._top.drop(slots.cpu().numpy())


@final
class StackSampler(_TopSampler):
    """Last in, first out: a batch has the newest rows, the newest first.

    A batch of `n` has `n` different rows: the draws of one batch are made one after the other, each among the rows that
    are not in it yet. Without `max_times_sampled` rows stay: the next batch has them again, unless rows were written in
    between, and a batch of more rows than there are raises. With it a row leaves the buffer after so many draws
    (`max_times_sampled=1` pops it, as a Reverb table with a LIFO selector), its slot is written next, and the last
    batch is shorter, as with `ConsumingSampler`, which needs the same parts. An edit (`rb[i] = row`) does not change
    the place of a row. Of a buffer with windows only rows that can start one are drawn. No random numbers are used.
    Memory: 26 bytes for each slot, with `max_times_sampled` 42. Cost: O(log rows) for each row drawn or written.

    Args:
        max_times_sampled: draws of a row before it leaves, at least 1; None for any number.

    Raises:
        KindError: if it is no integer.
        OptionError: if it is below 1.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, StackSampler
        >>> sampler = StackSampler(max_times_sampled=1)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=2)
        >>> index = rb.extend(torch.arange(5))
        >>> rb.sample(), len(rb), rb.sample()
        (tensor([4, 3]), 3, tensor([2, 1]))
    """

    def __init__(self, max_times_sampled: int | None = None) -> None:
        super().__init__(max_times_sampled)

    def __repr__(self) -> str:
        """Show the option."""
        return f"StackSampler(max_times_sampled={self.max_times_sampled})"

    @property
    def nbytes(self) -> int:
        """Bytes of order and counts."""
        return self._top.nbytes

    def begin(self, view: View) -> None:
        """Add rows that were not recorded."""
        self._top.begin(view.rows)

    def recheck(self) -> None:
        """Do nothing: which rows may be drawn is looked up at each draw."""

    def record(self, placement: Placement) -> None:
        """Add rows just written."""
        self._top.record(slots_of(placement))

    def mark_update(self, index: Any, *, storage: BareStorage | None = None) -> None:
        """Let rows return that have left, as if they were just written."""
        super().mark_update(index, storage=storage)
        if self.leaves:
            self.extend(index)

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:  # noqa: ARG002
        """Draw the newest rows.

        Raises:
            EmptyBufferError: if no row is left.
            TooFewRowsError: where rows stay, if there are fewer.
        """

        def read(slots: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
            ages = _arrivals(view, slots)
            return -ages.astype(np.float64), ages

        return _as_draw(self._top.draw(view, batch_size, read), view)

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise."""
        self._top.check_draw(view, batch_size)

    def clear(self) -> None:
        """Remove all rows."""
        self._top.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the draws of each row and the free slots; the order follows from the arrivals of the rows."""
        return self._top.state_dict()

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same option, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        self._top.check_state(state, rows, type(self).__name__)

    def _rows_of_state(self, state: dict[str, Any]) -> int:
        return int(state["uses"].shape[0]) if "uses" in state else 0

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return the state after rows were moved to other slots."""
        return self._top.turn_state(state, seam, rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._top.load_state_dict(state)


@final
class HeapSampler(PrioritySampler, _TopSampler):
    """A priority queue: a batch has the rows with the greatest (or least) priorities, in this order.

    Of equal priorities the oldest row comes first. A batch of `n` has `n` different rows: the draws of one batch are
    made one after the other, each among the rows that are not in it yet. Without `max_times_sampled` rows stay, and a
    batch of more rows than there are raises; with it a row leaves the buffer after so many draws (Reverb's priority
    queue is `max_times_sampled=1`), as with `StackSampler`. Priorities are set like those of `PrioritizedSampler`:
    `update_priority`, `priority_key`, and for new rows the largest one ever given, or 1; they may be any finite
    numbers. Weights are 1. Of a buffer with windows only rows that can start one are drawn. Priorities are kept on the
    CPU. Memory: 34 bytes for each slot, with `max_times_sampled` 50. Cost: O(log rows) for each row drawn, written or
    updated.

    Args:
        max_capacity: most rows that can be written: a row in a slot from this one on raises `SlotError`.
        order: "max" draws the greatest priorities first, "min" the least.
        max_times_sampled: draws of a row before it leaves, at least 1; None for any number.
        reduction: how the priorities of an item's steps become one: "max", "min", "mean" or "median".

    Raises:
        CapacityError: if `max_capacity` is not a positive integer.
        KindError: if a number is no integer.
        OptionError: for another option out of its range.

    Examples:
        >>> import torch
        >>> from ostinato import HeapSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=HeapSampler(8, order="min"), batch_size=2)
        >>> index = rb.extend(torch.arange(5))
        >>> rb.update_priority(index, [3.0, 1.0, 2.0, 1.0, 4.0])
        >>> rb.sample()
        tensor([1, 3])
    """

    def __init__(
        self,
        max_capacity: int,
        order: Literal["max", "min"] = "max",
        max_times_sampled: int | None = None,
        reduction: str = "max",
    ) -> None:
        self.max_capacity = check_capacity(max_capacity)
        if order not in ("max", "min"):
            msg = f"order must be 'max' or 'min', got {order!r}"
            raise OptionError(msg)
        self.order = order
        self.reduction = check_reduction(reduction)
        super().__init__(max_times_sampled)
        self._priorities: NDArray[np.float64] = np.zeros(0, np.float64)
        self._rows = 0
        self._largest = 0.0

    def __repr__(self) -> str:
        """Show the options."""
        return (
            f"HeapSampler(max_capacity={self.max_capacity}, order={self.order!r}, "
            f"max_times_sampled={self.max_times_sampled}, reduction={self.reduction!r})"
        )

    @property
    def priorities(self) -> Tensor:
        """Priorities of the rows present, as they were given: float64 `[rows]`, a copy."""
        return torch.from_numpy(self._priorities[: self._rows].copy())

    @property
    def default_priority(self) -> float:
        """Priority of the next new row: the largest one ever given, or 1 if there is none above 0."""
        return self._largest if self._largest > 0 else 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of priorities, order and counts."""
        return self._top.nbytes + int(self._priorities.nbytes)

    # -- priorities ----------------------------------------------------------------------------------------------------

    def reduce(self, items: Tensor) -> Tensor:
        """Reduce the values of each item to one priority, float64 `[n]` of `[n, *shape]`."""
        return reduce_items(items, self.reduction)

    def check(self, priorities: Tensor) -> None:
        """Check that priorities are finite.

        Raises:
            PriorityError: naming the positions of those that are not.
        """
        bad = (~priorities.isfinite()).nonzero().flatten()[:_SHOWN].tolist()
        if bad:
            msg = f"priorities must be finite numbers, got others at the positions {bad} of {len(priorities)}"
            raise PriorityError(msg)

    def priorities_at(self, slots: Tensor, view: View) -> Tensor:
        """Return the priorities of rows, float64 `[n]`. Copy."""
        self.begin(view)
        return torch.from_numpy(self._priorities[slots.cpu().numpy()]).to(slots.device)

    def begin(self, view: View) -> None:
        """Give rows that have none the default priority."""
        if view.rows < self._rows:
            self.clear()
        if view.rows > self._rows:
            self.check_rows(view.rows, max(view.capacity, self.max_capacity))
            self._write(np.arange(self._rows, view.rows), None)
        self._top.begin(view.rows)

    def record_rows(self, placement: Placement, priorities: Tensor | None, view: View) -> None:  # noqa: ARG002
        """Record rows just written, with their first priorities. Cost: O(rows written)."""
        run = isinstance(placement, Run)
        slots: NDArray[np.int64] = (placement.slots() if run else placement.slots.cpu()).numpy()  # type: ignore[operator, union-attr]
        if priorities is not None:
            priorities = priorities[placement.skip :] if isinstance(placement, Run) else priorities[placement.rows]
        self._write(slots, None if priorities is None else priorities.cpu().numpy())
        self._top.record(slots)

    def record(self, placement: Placement) -> None:
        """Give rows just written the default priority."""
        slots = slots_of(placement)
        self._write(slots, None)
        self._top.record(slots)

    def _write(self, slots: NDArray[np.int64], priorities: NDArray[np.float64] | None) -> None:
        """Set priorities; of equal slots the last one wins."""
        if not slots.size:
            return
        default, rows, held = self.default_priority, int(slots.max()) + 1, self._priorities.size
        if rows > held:
            more = np.zeros(max(rows, _GROWTH * held) - held)
            self._priorities = np.concatenate((self._priorities, more))
        if rows > self._rows:
            self._priorities[self._rows : rows] = default
            self._rows = rows
        self._priorities[slots] = default if priorities is None else priorities
        if priorities is not None:
            self._largest = max(self._largest, float(priorities.max()))

    def set_priorities(self, slots: Tensor, priorities: Tensor | None, view: View, keep: Tensor | None = None) -> None:
        """Set priorities; None gives the default priority. Of equal slots the last one wins. Cost: O(n log rows).

        Raises:
            PriorityError: for invalid priorities; nothing is changed.
            SlotError: if a slot is beyond the buffer; nothing is changed.
        """
        self.begin(view)
        if keep is not None:
            slots, priorities = slots[keep], None if priorities is None else priorities[keep]
        if not slots.numel():
            return
        if priorities is not None:
            self.check(priorities)
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= view.rows:
            msg = f"index {high if high >= view.rows else low} is out of range for {view.rows} rows"
            raise SlotError(msg)
        where: NDArray[np.int64] = slots.cpu().numpy()
        self._write(where, None if priorities is None else priorities.cpu().numpy())
        self._top.order.add(where[self._top.order.has(where)])

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:  # noqa: ARG002
        """Draw the rows with the greatest priorities, or the least.

        Raises:
            EmptyBufferError: if no row is left.
            TooFewRowsError: where rows stay, if there are fewer.
        """
        self.begin(view)

        def read(slots: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
            keys = self._priorities[slots]
            return (-keys if self.order == "max" else keys), _arrivals(view, slots)

        draw = _as_draw(self._top.draw(view, batch_size, read), view)
        return draw._replace(weights=torch.ones_like(draw.slots, dtype=torch.float32))

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise."""
        self.begin(view)
        self._top.check_draw(view, batch_size)

    def clear(self) -> None:
        """Remove all rows, and forget the largest priority."""
        self._top.clear()
        self._rows, self._largest = 0, 0.0

    # -- without a buffer ----------------------------------------------------------------------------------------------

    def begin_standalone(self, view: View, storage: BareStorage) -> View:
        """Give rows of a bare storage that have none the default priority.

        Raises:
            SlotError: if the storage has more than `max_capacity` rows.
        """
        self.check_rows(view.rows, self.max_rows(storage))
        self.begin(view)
        return view

    def update_priority(self, index: Any, priority: Any, *, storage: BareStorage | None = None) -> None:
        """Set the priorities of rows of a bare storage; for rows of a buffer use its method, which checks generations.

        Args:
            index: slots, or an index as `sample` returns it.
            priority: one number, or one for each row; further dimensions are reduced.
            storage: needed for an index with `ndim=2`.

        Raises:
            PriorityError: for invalid priorities; nothing is changed.
            SlotError: for a negative slot, or one at or beyond `max_capacity`; nothing is changed.
        """
        slots, shape = read_index(index, storage, torch.device("cpu"))
        check_not_negative(slots)
        steps = steps_of_rows(None if storage is None else storage.schema)
        given = read_values(priority, shape, self.reduce, steps).cpu()
        if slots.numel():
            self.check(given)
            self.check_rows(int(slots.max()) + 1, self.max_capacity)
            where: NDArray[np.int64] = slots.numpy()
            new = where[where >= self._rows]
            self._write(where, given.numpy())
            self._top.record(np.unique(new))
            self._top.order.add(where[self._top.order.has(where)])

    def mark_update(self, index: Any, *, storage: BareStorage | None = None) -> None:
        """Treat rows as just written: they get the default priority, and return if they have left."""
        super().mark_update(index, storage=storage)
        self.extend(index)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return options, priorities, draws of each row and free slots; the order follows from these and arrivals."""
        options = {"order": self.order, "reduction": self.reduction, "largest": self._largest}
        return {**options, "priorities": self.priorities, **self._top.state_dict()}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same options, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        for name in ("order", "reduction"):
            if state[name] != getattr(self, name):
                msg = (
                    f"the state is that of a HeapSampler with {name}={state[name]!r}, this one has "
                    f"{name}={getattr(self, name)!r}: make it with the same options"
                )
                raise CheckpointError(msg)
        known, largest = state["priorities"], state["largest"]
        good = known.dtype is torch.float64 and known.shape == (rows,) and bool(known.isfinite().all())
        if not good or not isinstance(largest, float) or not 0.0 <= largest <= _LARGEST:
            msg = f"the sampler's state is damaged: it does not hold {rows} finite priorities"
            raise CheckpointError(msg)
        self._top.check_state(state, rows, type(self).__name__)

    def _rows_of_state(self, state: dict[str, Any]) -> int:
        return int(state["priorities"].shape[0])

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return the state after rows were moved to other slots."""
        known = state["priorities"]
        return {**self._top.turn_state(state, seam, rows), "priorities": torch.cat((known[seam:], known[:seam]))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy."""
        self._top.load_state_dict(state)
        self._priorities = state["priorities"].cpu().numpy().copy()
        self._rows, self._largest = self._priorities.size, float(state["largest"])
        self._top.begin(self._rows)


def _arrivals(view: View, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = view.ring.arrivals(torch.from_numpy(slots).to(view.device)).cpu().numpy()
    return found


def _as_draw(slots: NDArray[np.int64], view: View) -> Draw:
    drawn = torch.from_numpy(slots).to(view.device)
    return Draw(drawn, generations=view.ring.generations_of_rows(drawn))


def _too_few(rows: int, batch_size: int) -> str:
    return (
        f"{rows} row(s) can be drawn, a batch of {batch_size} different rows was asked for: add rows first, or lower "
        "batch_size"
    )
