"""How often rows were drawn, for samplers that draw each row a limited number of times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import numpy as np
import torch

from ostinato.core.eligible import Eligible, FreeSlots, grown, slots_of
from ostinato.core.records import Draw
from ostinato.errors import EmptyBufferError, KindError, OptionError
from ostinato.samplers.base import CountingSampler
from ostinato.samplers.state import require, require_options

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.records import Picks, Placement, View
    from ostinato.core.ring import Ring
    from ostinato.samplers.base import StorageShape, WriterOrder
    from ostinato.samplers.standalone import BareStorage

    Slots: TypeAlias = NDArray[np.int64]


MOST_DRAWS = 2**31
"""Draws of a row are below it: they are counted in 32 bits."""


class RowSet(Protocol):
    """A set of slots: `Eligible`, or a `RankOrder`."""

    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes."""

    def include(self, slots: Slots) -> None:
        """Add slots, each once."""

    def exclude(self, slots: Slots) -> None:
        """Remove slots."""

    def has(self, slots: Slots) -> NDArray[np.bool_]:
        """Return which slots are in the set, bool `[n]`."""

    def clear(self) -> None:
        """Remove all slots."""


@final
class Uses:
    """The draws of each row. A row that was drawn `limit` times is used up, and no longer eligible.

    With `leave` a row that is used up leaves the buffer: its slot is free once all batches with the row were delivered.
    Memory: 4 bytes for each slot, and 12 more with `leave`.

    Args:
        limit: draws of each row; None for any number.
        eligible: the set that the rows with draws left are kept in.
        leave: whether rows leave.
    """

    def __init__(self, limit: int | None, eligible: RowSet, *, leave: bool) -> None:
        self.limit = limit
        self.leave = leave
        self.eligible = eligible
        self._begin()

    def _begin(self) -> None:
        self.free = FreeSlots()
        """Slots of rows that have left."""
        self.rows = 0
        """Slots that were seen."""
        self.total = 0
        """Draws of all rows, with `limit` for each that was deleted."""
        self.counts: NDArray[np.int32] = np.zeros(0, np.int32)
        """Draws of each row."""
        self._under_way: NDArray[np.int32] = np.zeros(0, np.int32)  # draws that have not been delivered
        self._generation: Slots = np.zeros(0, np.int64)  # at the last draw, -1 before it

    @property
    def nbytes(self) -> int:
        """Bytes of the counts."""
        return int(self.counts.nbytes + self._under_way.nbytes + self._generation.nbytes)

    def begin(self, rows: int) -> None:
        """Add rows that were not recorded."""
        if rows < self.rows:
            self.clear()
        if rows > self.rows:
            self.record(np.arange(self.rows, rows))

    def record(self, slots: Slots) -> None:
        """Let rows be drawn `limit` times from now on, as those just written; each once."""
        if not slots.size:
            return
        rows = int(slots.max()) + 1
        if rows > self.rows:
            if rows - self.rows > np.count_nonzero(slots >= self.rows):
                slots = np.union1d(np.arange(self.rows, rows), slots)  # rows between that were not recorded
            self._reserve(rows)
        if self.limit is not None:
            self.total -= int(self.counts[slots].sum())
            self.counts[slots] = 0
        if self.leave:
            self._under_way[slots], self._generation[slots] = 0, -1
            self.free.discard(slots)
        self.eligible.include(slots)

    def _reserve(self, rows: int) -> None:
        self.rows = rows
        if self.limit is not None and rows > self.counts.size:
            self.counts = grown(self.counts, rows)
            if self.leave:
                self._under_way, self._generation = grown(self._under_way, rows), grown(self._generation, rows, -1)

    def add(self, slots: Slots, times: NDArray[np.int64] | int, total: int) -> None:
        """Count draws of rows, each of which is listed once, `total` draws in all."""
        self.counts[slots] += times
        self.total += total
        self.eligible.exclude(slots[self.counts[slots] == self.limit])

    def take(self, slots: Slots, view: View) -> Draw:
        """Return a draw of different rows, which is counted if there is a limit."""
        drawn = torch.from_numpy(slots).to(view.device)
        generations = view.ring.generations_of_rows(drawn)
        if self.leave:
            self.add(slots, 1, slots.size)
            self._under_way[slots] += 1
            self._generation[slots] = generations.cpu().numpy()
        return Draw(drawn, generations=generations)

    def _end(self, draw: Draw) -> Slots:
        """End a draw under way of rows that leave; return those of its rows that were not replaced."""
        if draw.generations is None:
            return np.zeros(0, np.int64)
        slots: Slots = draw.slots.cpu().numpy()
        known = slots < self._generation.size  # of a buffer that was emptied since none are
        slots = slots[known]
        slots = slots[self._generation[slots] == draw.generations.cpu().numpy()[known]]
        self._under_way[slots] -= 1
        return slots

    def deliver(self, draw: Draw) -> None:
        """Free the slots of the rows of a delivered batch that have left."""
        slots = self._end(draw)
        self.free.add(slots[(self.counts[slots] == self.limit) & (self._under_way[slots] == 0)])

    def undo(self, draw: Draw, view: View) -> None:
        """Undo a draw that reached no reader, for rows that have not been replaced since."""
        if self.leave:
            slots = self._end(draw)
        elif draw.generations is None:
            return
        else:
            there = draw.slots < view.rows
            kept = draw.slots[there]
            slots = kept[view.ring.holds(kept, draw.generations[there])].cpu().numpy()
        np.subtract.at(self.counts, slots, 1)
        self.total -= slots.size
        self.eligible.include(np.unique(slots))

    def drop(self, slots: Slots) -> None:
        """Use up rows that are deleted, each once: they are not drawn again."""
        self.eligible.exclude(slots)
        if self.limit is not None:
            self.total += slots.size * self.limit - int(self.counts[slots].sum())
            self.counts[slots] = self.limit
        if self.leave:
            self._under_way[slots], self._generation[slots] = 0, -1
            self.free.add(slots)

    def clear(self) -> None:
        """Remove all rows."""
        self._begin()
        self.eligible.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the draws of each row, the ranks of eligible ones if they have some, and the free slots. Copy."""
        state = {"uses": torch.from_numpy(self.counts[: self.rows].copy())}
        if isinstance(self.eligible, Eligible):
            state["order"] = self.eligible.order()
        return {**state, "free": self.free.state()} if self.leave else state

    def check_state(self, state: dict[str, Any], rows: int, limit: int) -> None:
        """Check a state.

        Raises:
            CheckpointError: if it is not that of `rows` rows that may be drawn `limit` times.
        """
        uses: Tensor = state["uses"]
        good = uses.dtype is torch.int32 and uses.shape == (rows,) and not bool(((uses < 0) | (uses > limit)).any())
        require(good, f"its draws are not those of {rows} rows")
        if isinstance(self.eligible, Eligible):
            left = (uses < limit).nonzero().flatten()
            require(torch.equal(state["order"].sort().values, left), f"its order is not that of {left.numel()} rows")
        if self.leave:
            free, gone = state["free"], (uses == limit).nonzero().flatten()
            good = free.dtype is torch.int64 and free.unique().shape == free.shape
            good = good and bool(torch.isin(free, gone).all())
            require(good, f"its free slots are not those of rows drawn {limit} time(s)")

    def load_state_dict(self, state: dict[str, Any], limit: int) -> None:
        """Restore what `state_dict` returned; rows of batches that were under way then have left."""
        self.clear()
        self.limit = limit
        counts: NDArray[np.int32] = state["uses"].numpy()
        self._reserve(counts.size)
        self.counts[: counts.size] = counts
        self.total = int(counts.sum())
        ranked = isinstance(self.eligible, Eligible)
        self.eligible.include(state["order"].numpy() if ranked else np.flatnonzero(counts < limit))
        if self.leave:
            self.free.add(state["free"].numpy())
            self.free.add(np.flatnonzero(counts == limit))


class UsesSampler(CountingSampler):
    """Base of samplers of rows that are drawn `limit` times at most: how they follow the rows of their buffer."""

    row_values: tuple[str, ...] | None = ("uses",)
    row_slots: tuple[str, ...] = ("order", "free")
    limit_name = "max_times_sampled"
    """The option with the draws of a row, None for any number."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self.leaves = uses.leave
        self.ran_out = False

    @property
    def epochal(self) -> bool:
        """Iteration ends with the last row, where rows leave."""
        return self.leaves

    @property
    def free(self) -> FreeSlots | None:
        """Slots of rows that have left."""
        return self._uses.free

    @property
    def rows_left(self) -> int:
        """Rows that can be drawn."""
        return self._uses.eligible.rows

    @property
    def draws_left(self) -> int:
        """Draws of different rows that these rows allow at once."""
        return self._uses.eligible.rows

    @property
    def nbytes(self) -> int:
        """Bytes of counts and order."""
        return self._uses.nbytes + self._uses.eligible.nbytes

    def draws_of(self, capacity: int) -> int:
        """Return the rows of the largest batch."""
        return capacity

    def check_parts(self, storage: StorageShape, writer: WriterOrder) -> None:
        """Check that rows can be written to the slots of rows that have left, where rows leave.

        Raises:
            OptionError: for a storage of two dimensions, or one that needs ring order.
            KindError: for a writer that chooses slots itself.
        """
        name = type(self).__name__
        if not self.leaves:
            return
        if storage.ndim != 1:
            msg = f"{name} only supports 1-dimensional storages, got ndim={storage.ndim}: use ndim=1"
            raise OptionError(msg)
        if storage.ring_only:
            msg = (
                f"{name} lets new rows take the slots of rows that have left, and the storage (single_copy) takes rows "
                "in ring order only: leave single_copy out, or use LimitedSampler"
            )
            raise OptionError(msg)
        if not (writer.in_order and writer.mutable):
            msg = (
                f"{name} requires a writer that leaves the choice of slots to it, got {type(writer).__name__}: use "
                "RoundRobinWriter, or LimitedSampler"
            )
            raise KindError(msg)

    def begin(self, view: View) -> None:
        """Add rows that were not recorded."""
        self._uses.begin(view.rows)

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: ARG002
        """Raise if all rows have left.

        Raises:
            EmptyBufferError: if rows leave, and none is left.
        """
        self.begin(view)
        if self.leaves and not self.rows_left:
            self.ran_out = True
            msg = (
                f"Cannot sample from an empty storage: all {view.rows} rows were drawn {self._uses.limit} time(s) and "
                "have left: add rows first"
            )
            raise EmptyBufferError(msg)

    def place(self, rows: int, ring: Ring) -> Picks | None:
        """Return slots of rows that have left, then those from the cursor on; None if there are none of the first."""
        return self._uses.free.place(rows, ring)

    def record(self, placement: Placement) -> None:
        """Add rows just written."""
        self._uses.record(slots_of(placement))
        self.ran_out = False

    def mark_update(self, index: Any, *, storage: BareStorage | None = None) -> None:
        """Let rows that leave be drawn as often as if they were just written."""
        super().mark_update(index, storage=storage)
        if self.leaves:
            self.extend(index)

    def deliver(self, draw: Draw) -> None:
        """Free the slots of the rows that have left."""
        if self.leaves:
            self._uses.deliver(draw)

    def holds(self, slots: Tensor) -> Tensor:
        """Return which rows can still be drawn."""
        return torch.from_numpy(self._uses.eligible.has(slots.cpu().numpy())).to(slots.device)

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Draw rows that are deleted no more."""
        self.begin(view)
        self._uses.drop(slots.cpu().numpy())

    def undo(self, draw: Draw, view: View) -> None:
        """Let the rows of a batch that reached no reader be drawn again, unless they have been replaced since."""
        self._uses.undo(draw, view)
        self.ran_out = self.leaves and self.rows_left == 0

    def clear(self) -> None:
        """Remove all rows."""
        self._uses.clear()
        self.ran_out = False

    def state_dict(self) -> dict[str, Any]:
        """Return the draws of each row, and where rows leave the free slots in their order. Copy."""
        limit = self._uses.limit
        state = {self.limit_name: limit, **({} if limit is None else self._uses.state_dict())}
        return {**state, "ran_out": self.ran_out} if self.leaves else state

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same option, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        require_options(self, state, (self.limit_name,))
        if self._uses.limit is not None:
            self._uses.check_state(state, rows, self._uses.limit)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; rows of batches that were under way then have left."""
        self.clear()
        limit = state[self.limit_name]
        if limit is not None:
            self._uses.load_state_dict(state, limit)
            self.ran_out = bool(state.get("ran_out", False))
