"""Samplers whose batches are the first rows of an order: a stack, and a heap of priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch

from ostinato.core.eligible import each_once, grown
from ostinato.core.options import check_choice, check_integer
from ostinato.core.rank_order import RankOrder
from ostinato.errors import PriorityError, TooFewRowsError
from ostinato.samplers.base import PrioritySampler, check_not_negative, check_rows, require, require_options
from ostinato.samplers.consuming import MOST_DRAWS, UsesSampler
from ostinato.samplers.priorities import check_capacity, check_reduction

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.rank_order import ReadKeys
    from ostinato.core.records import Draw, Placement, View
    from ostinato.samplers.standalone import BareStorage

_GROWTH = 2
_SHOWN = 8
_LARGEST = float(np.finfo(np.float64).max)


class _TopSampler(UsesSampler):
    """What a stack and a heap have in common: the rows of an order, which leave after `max_times_sampled` draws.

    Raises:
        KindError: if `max_times_sampled` is no integer.
        OptionError: if it is below 1.
    """

    eligible: RankOrder

    def __init__(self, max_times_sampled: int | None) -> None:
        limit = max_times_sampled
        if limit is not None:
            limit = check_integer("max_times_sampled", limit, 1, below=MOST_DRAWS)
        self.max_times_sampled = limit
        self.counting = limit is not None
        super().__init__(limit, RankOrder(), leaves=self.counting)

    def recheck(self) -> None:
        """Do nothing: which rows may be drawn is looked up at each draw."""

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise, except where only some rows may be drawn.

        Raises:
            EmptyBufferError: if no row is left.
            TooFewRowsError: where rows stay, if there are fewer than a batch.
        """
        if self.leaves:
            super().check_draw(view, batch_size)
            return
        self.begin(view)
        if self.eligible.rows < batch_size:
            raise TooFewRowsError(_too_few(self.eligible.rows, batch_size))

    def _first(self, view: View, count: int, read: ReadKeys) -> Draw:
        """Draw the first rows of the order that may be drawn.

        Raises:
            EmptyBufferError: see `check_draw`.
            TooFewRowsError: where rows stay, if there are fewer.
        """
        self.check_draw(view, count)
        asked = count
        while True:
            found = self.eligible.first(asked, read)
            if view.starts is not None:
                found = found[view.starts.allowed(torch.from_numpy(found).to(view.device)).cpu().numpy()]
            if found.size >= count or self.leaves:
                return self._take(found[:count], view)
            if asked >= self.eligible.rows:
                raise TooFewRowsError(_too_few(found.size, count))
            asked *= _GROWTH


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

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:  # noqa: ARG002
        """Draw the newest rows.

        Raises:
            EmptyBufferError: if no row is left.
            TooFewRowsError: where rows stay, if there are fewer.
        """

        def read(slots: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
            ages = _arrivals(view, slots)
            return -ages.astype(np.float64), ages

        return self._first(view, batch_size, read)


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

    row_values = ("uses", "priorities")

    def __init__(
        self,
        max_capacity: int,
        order: Literal["max", "min"] = "max",
        max_times_sampled: int | None = None,
        reduction: str = "max",
    ) -> None:
        self.max_capacity = check_capacity(max_capacity)
        self.order = check_choice("order", order, ("max", "min"))
        self.reduction = check_reduction(reduction)
        _TopSampler.__init__(self, max_times_sampled)
        self._priorities: NDArray[np.float64] = np.zeros(0, np.float64)
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
        return super().nbytes + int(self._priorities.nbytes)

    # -- priorities ----------------------------------------------------------------------------------------------------

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
        UsesSampler.begin(self, view)

    def record_rows(self, placement: Placement, priorities: Tensor | None, view: View) -> None:  # noqa: ARG002
        """Record rows just written, with their first priorities. Cost: O(rows written)."""
        slots: NDArray[np.int64] = placement.slots_written().cpu().numpy()
        self._write(slots, None if priorities is None else placement.of_rows_written(priorities).cpu().numpy())
        self._add(slots)
        self.ran_out = False

    def _write(self, slots: NDArray[np.int64], priorities: NDArray[np.float64] | None) -> None:
        """Set priorities; of equal slots the last one wins."""
        if not slots.size:
            return
        default, rows = self.default_priority, int(slots.max()) + 1
        self._priorities = grown(self._priorities, rows)
        self._priorities[self._rows : rows] = default
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
        check_not_negative(slots.cpu())
        check_rows(slots.cpu(), view.rows)
        where: NDArray[np.int64] = slots.cpu().numpy()
        self._write(where, None if priorities is None else priorities.cpu().numpy())
        self.eligible.include(where[self.eligible.has(where)])

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

        draw = self._first(view, batch_size, read)
        return draw._replace(weights=torch.ones_like(draw.slots, dtype=torch.float32))

    def clear(self) -> None:
        """Remove all rows, and forget the largest priority."""
        super().clear()
        self._largest = 0.0

    # -- without a buffer ----------------------------------------------------------------------------------------------

    def _set_by_index(self, index: Any, priority: Any, storage: BareStorage | None, *, least: int = 0) -> Tensor:
        slots = super()._set_by_index(index, priority, storage, least=least)
        if priority is None:  # rows just written: those that have left return
            self._add(each_once(slots.numpy()))
        return slots

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return options, priorities, draws of each row and free slots; the order follows from these and arrivals."""
        options = {"order": self.order, "reduction": self.reduction, "largest": self._largest}
        return {**options, "priorities": self.priorities, **super().state_dict()}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same options, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        require_options(self, state, ("order", "reduction"))
        known, largest = state["priorities"], state["largest"]
        good = known.dtype is torch.float64 and known.shape == (rows,) and bool(known.isfinite().all())
        good = good and isinstance(largest, float) and 0.0 <= largest <= _LARGEST
        require(good, f"it does not hold {rows} finite priorities")
        UsesSampler.check_state(self, state, rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy."""
        super().load_state_dict(state)
        self._priorities = state["priorities"].cpu().numpy().copy()
        self._largest = float(state["largest"])
        self._add(np.arange(self._rows, self._priorities.size))


def _arrivals(view: View, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = view.ring.arrivals(torch.from_numpy(slots).to(view.device)).cpu().numpy()
    return found


def _too_few(rows: int, batch_size: int) -> str:
    return (
        f"{rows} row(s) can be drawn, a batch of {batch_size} different rows was asked for: add rows first, or lower "
        "batch_size"
    )
