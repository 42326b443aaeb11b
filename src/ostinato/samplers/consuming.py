"""Samplers whose draws use rows up: a queue, and uniform draws of each row at most `n` times.

After its last draw a row stays in its slot (`LimitedSampler`), or leaves the buffer (`ConsumingSampler`).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch

from ostinato.core.eligible import DELETED, USED_UP, Eligible, each_once, grown, slots_of
from ostinato.core.options import check_integer
from ostinato.core.records import Draw, ring_range
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError
from ostinato.samplers.base import CountingSampler, check_replacement, require, require_options
from ostinato.samplers.uniform import RandomSampler, draw_distinct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.records import Picks, Placement, View
    from ostinato.core.ring import Ring
    from ostinato.samplers.base import Sampler, StorageShape, WriterOrder
    from ostinato.samplers.standalone import BareStorage

    Slots: TypeAlias = NDArray[np.int64]

MOST_DRAWS = 2**31
"""Draws of a row are below it: they are counted in 32 bits."""


@final
class QueueSampler(CountingSampler):
    """First in, first out: every row is drawn exactly once, in the order of writing.

    In a buffer with this sampler, writers wait while the ring is full of rows that have not been delivered, and readers
    wait for a whole batch; without a `rate_limiter` it has `RateLimiter()`. Rows of a batch that could not be made (a
    transform raised) return to the head of the queue. An edit (`rb[i] = row`) does not change the place of a row, and
    does not return a row that was delivered. A saved state contains every row that has not been delivered.
    Cost of a draw: O(batch_size). To delete rows costs O(rows waiting). Memory: 8 bytes for each row written.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, QueueSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=QueueSampler(), batch_size=3)
        >>> index = rb.extend(torch.arange(6))
        >>> rb.sample(), rb.sample()
        (tensor([0, 1, 2]), tensor([3, 4, 5]))
    """

    in_order = True
    bounded = True
    row_values = ()
    row_slots = ("waiting", "drawn")

    def __init__(self) -> None:
        self._slots = array("q")  # from `_at` on, slots of the rows that wait, the oldest first
        self._at = 0
        self._drawn: dict[int, Sequence[int]] = {}  # first generation of a draw under way -> its slots
        self._known = False

    def __repr__(self) -> str:
        """Show the number of rows that can be drawn."""
        return f"QueueSampler(waiting={self.rows_left})"

    @property
    def rows_left(self) -> int:
        """Rows that can be drawn."""
        return len(self._slots) - self._at

    @property
    def draws_left(self) -> int:
        """Draws that these rows allow: one for each."""
        return self.rows_left

    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer allows."""
        return capacity

    def room(self, view: View) -> int:
        """Return the rows that can be written before the oldest row that was not delivered is replaced."""
        oldest_drawn = (slots[0] for slots in self._drawn.values())
        held = [*self._slots[self._at : self._at + 1], *oldest_drawn]
        if not held:
            return view.capacity
        if view.starts is None and view.ring.native_state()[0] == 0:
            return min((slot - view.cursor) % view.capacity for slot in held)
        known = view.ring.arrivals(torch.arange(view.rows, device=view.device))
        oldest = known[torch.tensor(held, dtype=torch.int64, device=view.device)].min()
        return view.capacity - int((known >= oldest).sum())

    def begin(self, view: View) -> None:
        """Add the rows that a storage held before to the queue."""
        if not self._known:
            first = (view.cursor - view.rows) % view.capacity
            self._wait(ring_range(first, view.rows, view.capacity).tolist())
            self._known = True

    def _wait(self, slots: Iterable[int]) -> None:
        """Set the slots of the rows that wait."""
        self._slots, self._at = array("q", slots), 0

    def record(self, placement: Placement) -> None:
        """Add rows just written to the queue."""
        self._known = True
        self._slots.frombytes(placement.slots_written().cpu().numpy().tobytes())

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Remove rows that are deleted from the queue."""
        self.begin(view)
        gone = set(slots.tolist())
        self._wait(slot for slot in self._slots[self._at :] if slot not in gone)
        kept = {key: [slot for slot in held if slot not in gone] for key, held in self._drawn.items()}
        self._drawn = {key: held for key, held in kept.items() if held}

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:  # noqa: ARG002
        """Draw the next rows.

        Raises:
            EmptyBufferError: if there are fewer; nothing is drawn.
        """
        self.begin(view)
        if batch_size > self.rows_left:
            msg = f"the queue holds {self.rows_left} row(s), {batch_size} were asked for: write more, or ask for fewer"
            raise EmptyBufferError(msg)
        held = self._slots[self._at : self._at + batch_size]
        self._at += batch_size
        if 2 * self._at > len(self._slots):
            self._wait(self._slots[self._at :])
        slots = torch.from_numpy(np.array(held)).to(view.device)
        generations = view.ring.generations_of_rows(slots)
        self._drawn[int(generations[0])] = held
        return Draw(slots, generations=generations)

    def deliver(self, draw: Draw) -> None:
        """Release the slots of a batch that has reached its reader."""
        self._drawn.pop(_key(draw), None)

    def undo(self, draw: Draw, view: View) -> None:
        """Return the rows of a batch that reached no reader to the queue."""
        self._requeue([_key(draw)], view)

    def resume(self, draws: Sequence[Draw], view: View) -> None:
        """Return the rows of all draws to the queue, except those given."""
        self._requeue(list(self._drawn.keys() - {_key(draw) for draw in draws}), view)

    def _requeue(self, keys: list[int], view: View) -> None:
        """Return rows to the places in the queue that they had. Cost: O(rows waiting)."""
        slots = [slot for key in keys for slot in self._drawn.pop(key, ())]
        if slots:
            slots += self._slots[self._at :]
            arrivals = view.ring.arrivals(torch.tensor(slots, dtype=torch.int64, device=view.device))
            self._wait(np.array(slots)[arrivals.argsort().cpu().numpy()])

    def clear(self) -> None:
        """Remove all rows."""
        self._wait(())
        self._drawn, self._known = {}, False

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that have not been delivered."""
        return {
            "waiting": torch.from_numpy(np.array(self._slots[self._at :])),
            "keys": torch.tensor(list(self._drawn), dtype=torch.int64, device="cpu"),
            "sizes": torch.tensor([len(slots) for slots in self._drawn.values()], dtype=torch.int64, device="cpu"),
            "drawn": torch.tensor(
                [slot for slots in self._drawn.values() for slot in slots], dtype=torch.int64, device="cpu"
            ),
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete.

        Raises:
            CheckpointError: if it contains a row that is not present, or one row twice.
        """
        sizes, drawn = state["sizes"].tolist(), state["drawn"].tolist()
        held = [*state["waiting"].tolist(), *drawn]
        good = (
            len(set(held)) == len(held)
            and all(0 <= slot < rows for slot in held)
            and all(size > 0 for size in sizes)
            and sum(sizes) == len(drawn)
            and len(set(state["keys"].tolist())) == len(sizes)
        )
        if not good:
            msg = f"the queue's state is damaged: its {len(held)} rows waiting or drawn are not of {rows}"
            raise CheckpointError(msg)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        slots = state["drawn"].tolist()
        ends = np.cumsum([0, *state["sizes"].tolist()]).tolist()
        pairs = zip(state["keys"].tolist(), ends[:-1], ends[1:], strict=True)
        self._drawn = {key: slots[a:b] for key, a, b in pairs}
        self._wait(state["waiting"].tolist())
        self._known = True


class UsesSampler(CountingSampler):
    """Base of samplers of rows that are drawn a limited number of times, and are no longer eligible then.

    With `leaves` a row that is used up leaves the buffer: its slot is free once all batches with the row were
    delivered. Memory: 4 bytes for each slot, and 12 more with `leaves`, besides those of the set.

    Args:
        limit: draws of each row; None for any number.
        eligible: the set that the rows with draws left are kept in.
        leaves: whether rows leave.
    """

    row_values: tuple[str, ...] | None = ("uses",)
    row_slots: tuple[str, ...] = ("eligible", "free")
    limit_name = "max_times_sampled"
    """The option with the draws of a row, None for any number."""

    def __init__(self, limit: int | None, eligible: Eligible, *, leaves: bool) -> None:
        self._limit, self.eligible, self.leaves = limit, eligible, leaves
        self._begin()

    def _begin(self) -> None:
        self.ran_out = False
        self._rows = 0  # slots that were seen
        self._total = 0  # draws of all rows, with the limit for each that was deleted
        self._counts: NDArray[np.int32] = np.zeros(0, np.int32)  # draws of each row
        self._under_way: NDArray[np.int32] = np.zeros(0, np.int32)  # draws that have not been delivered
        self._generation: Slots = np.zeros(0, np.int64)  # at the last draw, -1 before it

    @property
    def epochal(self) -> bool:
        """Iteration ends with the last row, where rows leave."""
        return self.leaves

    @property
    def rows_left(self) -> int:
        """Rows that can be drawn."""
        return self.eligible.rows

    @property
    def draws_left(self) -> int:
        """Draws of different rows that these rows allow at once."""
        return self.eligible.rows

    @property
    def nbytes(self) -> int:
        """Bytes of counts and order."""
        counts = (self._counts, self._under_way, self._generation)
        return self.eligible.nbytes + sum(int(array.nbytes) for array in counts)

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
        if view.rows < self._rows:
            self.clear()
        if view.rows > self._rows:
            self._add(np.arange(self._rows, view.rows))

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: ARG002
        """Raise if all rows have left.

        Raises:
            EmptyBufferError: if rows leave, and none is left.
        """
        self.begin(view)
        if self.leaves and not self.eligible.rows:
            self.ran_out = True
            msg = (
                f"Cannot sample from an empty storage: all {view.rows} rows were drawn {self._limit} time(s) and "
                "have left: add rows first"
            )
            raise EmptyBufferError(msg)

    def place(self, rows: int, ring: Ring) -> Picks | None:
        """Return slots of rows that have left, then those from the cursor on; None if there are none of the first."""
        return self.eligible.free.place(rows, ring)

    def record(self, placement: Placement) -> None:
        """Add rows just written."""
        self._add(slots_of(placement))
        self.ran_out = False

    def _add(self, slots: Slots) -> None:
        """Let rows be drawn `limit` times from now on, as those just written; each once."""
        if not slots.size:
            return
        rows = int(slots.max()) + 1
        if rows > self._rows:
            if rows - self._rows > np.count_nonzero(slots >= self._rows):
                slots = np.union1d(np.arange(self._rows, rows), slots)  # rows between that were not recorded
            self._reserve(rows)
        if self._limit is not None:
            self._total -= int(self._counts[slots].sum())
            self._counts[slots] = 0
        if self.leaves:
            self._under_way[slots], self._generation[slots] = 0, -1
        self.eligible.include(slots)

    def _reserve(self, rows: int) -> None:
        self._rows = rows
        if self._limit is not None and rows > self._counts.size:
            self._counts = grown(self._counts, rows)
            if self.leaves:
                self._under_way, self._generation = grown(self._under_way, rows), grown(self._generation, rows, -1)

    def _use(self, slots: Slots, times: NDArray[np.int64] | int, total: int) -> None:
        """Count draws of rows, each of which is listed once, `total` draws in all."""
        self._counts[slots] += times
        self._total += total
        self.eligible.exclude(slots[self._counts[slots] == self._limit], USED_UP)

    def _take(self, slots: Slots, view: View) -> Draw:
        """Return a draw of different rows, which is counted if there is a limit."""
        drawn = torch.from_numpy(slots).to(view.device)
        generations = view.ring.generations_of_rows(drawn)
        if self.leaves:
            self._use(slots, 1, slots.size)
            self._under_way[slots] += 1
            self._generation[slots] = generations.cpu().numpy()
            self.ran_out = self.eligible.rows == 0
        return Draw(drawn, generations=generations)

    def mark_update(self, index: Any, *, storage: BareStorage | None = None) -> None:
        """Let rows that leave be drawn as often as if they were just written."""
        super().mark_update(index, storage=storage)
        if self.leaves:
            self.extend(index)

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
        if self.leaves:
            slots = self._end(draw)
            self.eligible.free.add(slots[(self._counts[slots] == self._limit) & (self._under_way[slots] == 0)])

    def undo(self, draw: Draw, view: View) -> None:
        """Let the rows of a batch that reached no reader be drawn again, unless they have been replaced since."""
        if self.leaves:
            slots = self._end(draw)
        elif draw.generations is None:
            return
        else:
            there = draw.slots < view.rows
            kept = draw.slots[there]
            slots = kept[view.ring.holds(kept, draw.generations[there])].cpu().numpy()
        np.subtract.at(self._counts, slots, 1)
        self._total -= slots.size
        self.eligible.include(each_once(slots), USED_UP)
        self.ran_out = self.leaves and self.eligible.rows == 0

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Draw rows that are deleted no more."""
        self.begin(view)
        gone: Slots = slots.cpu().numpy()
        self.eligible.exclude(gone, DELETED)
        if self._limit is not None:
            self._total += gone.size * self._limit - int(self._counts[gone].sum())
            self._counts[gone] = self._limit
        if self.leaves:
            self._under_way[gone], self._generation[gone] = 0, -1
            self.eligible.free.add(gone)

    def clear(self) -> None:
        """Remove all rows."""
        self._begin()
        self.eligible.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the draws of each row, the ranks of eligible ones if they have some, and the free slots. Copy."""
        state: dict[str, Any] = {self.limit_name: self._limit}
        if self._limit is not None:
            state["uses"] = torch.from_numpy(self._counts[: self._rows].copy())
            state["eligible"] = self.eligible.order()
        return {**state, "free": self.eligible.free.state(), "ran_out": self.ran_out} if self.leaves else state

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same option, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        require_options(self, state, (self.limit_name,))
        self._check_uses(state, rows, self._limit)

    def _check_uses(self, state: dict[str, Any], rows: int, limit: int | None) -> None:
        """Check that a state is of `rows` rows that may be drawn `limit` times."""
        if limit is None:
            return
        uses: Tensor = state["uses"]
        good = uses.dtype is torch.int32 and uses.shape == (rows,) and not bool(((uses < 0) | (uses > limit)).any())
        require(good, f"its draws are not those of {rows} rows")
        left = (uses < limit).nonzero().flatten()
        same = torch.equal(state["eligible"].sort().values, left)
        require(same, f"its rows are not the {left.numel()} that can be drawn")
        if self.leaves:
            free, gone = state["free"], (uses == limit).nonzero().flatten()
            good = free.dtype is torch.int64 and free.unique().shape == free.shape
            good = good and bool(torch.isin(free, gone).all())
            require(good, f"its free slots are not those of rows drawn {limit} time(s)")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; rows of batches that were under way then have left."""
        self.clear()
        self._limit = limit = state[self.limit_name]
        if limit is None:
            return
        counts: NDArray[np.int32] = state["uses"].numpy()
        self._reserve(counts.size)
        self._counts[: counts.size] = counts
        self._total = int(counts.sum())
        used = np.flatnonzero(counts == limit)  # slots of all rows are known, as if they were written
        self.eligible.include(np.concatenate((state["eligible"].numpy(), used)))
        self.eligible.exclude(used, USED_UP)
        if self.leaves:
            self.eligible.free.add(state["free"].numpy())
            self.eligible.free.add(used)
            self.ran_out = bool(state["ran_out"])


@final
class LimitedSampler(UsesSampler):
    """Uniform draws among the rows that have been drawn fewer than `max_times_sampled` times.

    The rows of a batch are drawn one after the other, so a row may be in it more than once, and a row that is used up
    within a batch is not drawn again in it. A row that is used up stays where it is, and is replaced in ring order, as
    any other row. If the rows left do not allow a whole batch, `sample` waits for writers if the buffer has a
    `rate_limiter`, and raises otherwise. `ConsumingSampler` is the variant whose rows leave the buffer. Memory: 21
    bytes for each slot. Cost of a draw: O(batch_size).

    Args:
        max_times_sampled: draws of each row, at least 1.

    Raises:
        OptionError: if it is below 1.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, LimitedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=LimitedSampler(2), batch_size=4)
        >>> index = rb.extend(torch.arange(2))
        >>> sorted(rb.sample().tolist())
        [0, 0, 1, 1]
    """

    def __init__(self, max_times_sampled: int) -> None:
        self.max_times_sampled = check_integer("max_times_sampled", max_times_sampled, 1, below=MOST_DRAWS)
        super().__init__(self.max_times_sampled, Eligible(), leaves=False)

    def __repr__(self) -> str:
        """Show the option and the rows left."""
        return f"LimitedSampler(max_times_sampled={self.max_times_sampled}, left={self.rows_left})"

    @property
    def draws_left(self) -> int:
        """Draws that these rows allow."""
        return self._rows * self.max_times_sampled - self._total

    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer allows."""
        return capacity * self.max_times_sampled

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw rows one after the other, each uniformly among those that are not used up by then.

        Raises:
            EmptyBufferError: if the rows do not allow so many draws; nothing is drawn.
        """
        self.begin(view)
        left = self.draws_left
        if batch_size > left:
            msg = (
                f"the {self.rows_left} row(s) left can be drawn {left} more time(s) in all, {batch_size} "
                f"were asked for (max_times_sampled={self.max_times_sampled}): write more rows, or ask for fewer"
            )
            raise EmptyBufferError(msg)
        parts, missing = [], batch_size
        while missing:
            # as if drawn one by one: a candidate that is used up by its turn is skipped
            picked = self.eligible.pick(missing, generator, view.device)
            found = self._use_in_turn(picked.cpu().numpy())
            parts.append(found)
            missing -= found.size
        slots = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(view.device)
        return Draw(slots, generations=view.ring.generations_of_rows(slots))

    def _use_in_turn(self, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count one draw of each candidate that is not used up by its turn, and return these candidates in order."""
        by_slot = np.argsort(candidates, kind="stable")
        slots, first, times = np.unique(candidates[by_slot], return_index=True, return_counts=True)
        left = self.max_times_sampled - self._counts[slots]
        good = np.empty(candidates.size, dtype=bool)
        good[by_slot] = np.arange(candidates.size) < np.repeat(first + left, times)
        found = candidates[good]
        self._use(slots, np.minimum(times, left), found.size)
        return found


@final
class ConsumingSampler(UsesSampler):
    """Uniform draws of distinct rows, each of which leaves the buffer after `max_sample_count` draws.

    A batch has no row twice. It is shorter if fewer rows are left (with a `rate_limiter`, `sample` waits for whole
    batches), and iteration over the buffer ends with the last row. `len` counts the rows left; the rows that have left
    can still be read by index. New rows are written to the slots of these first, in the order in which they left, and
    the remaining ones continue at the cursor, so no row that is left is replaced while a slot is free.

    `ReplayBuffer(consume_after_n_samples=n)` makes a buffer with this sampler. It needs a storage of one dimension, a
    round-robin writer, and no prefetch. Memory: 33 bytes for each slot, and about 150 for each free slot. Cost of a
    draw: O(batch_size); O(rows) if the batch has a quarter of the rows left or more.

    Args:
        max_sample_count: draws of each row, at least 1.
        replacement: must be True; a batch has no row twice in any case.

    Raises:
        KindError: if it is no integer, or for `replacement=False`.
        OptionError: if it is below 1.

    Examples:
        >>> import torch
        >>> from ostinato import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=ConsumingSampler(), batch_size=3)
        >>> index = rb.extend(torch.arange(4))
        >>> len(rb.sample()), len(rb), len(rb.sample()), len(rb)
        (3, 1, 1, 0)
    """

    eligible: Eligible
    limit_name = "max_sample_count"

    def __init__(self, max_sample_count: int = 1, *, replacement: bool = True) -> None:
        check_replacement(type(self), replacement=replacement)
        self.max_sample_count = check_integer("max_sample_count", max_sample_count, 1, below=MOST_DRAWS)
        super().__init__(self.max_sample_count, Eligible(), leaves=True)

    def __repr__(self) -> str:
        """Show the option and the rows left."""
        return f"ConsumingSampler(max_sample_count={self.max_sample_count}, left={self.rows_left})"

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw distinct rows among those left, all of them if there are fewer.

        Raises:
            EmptyBufferError: if no row is left.
        """
        self.check_draw(view, batch_size)
        rows = self.eligible.rows
        picked = draw_distinct(rows, min(batch_size, rows), generator, view.device)
        return self._take(self.eligible.at(picked).cpu().numpy(), view)

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, and of `rows` rows; `max_sample_count` becomes that of the state.

        Raises:
            CheckpointError: if it is not.
        """
        limit = state["max_sample_count"]
        require(type(limit) is int and 1 <= limit < MOST_DRAWS, f"max_sample_count is {limit!r}")
        self._check_uses(state, rows, limit)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; `max_sample_count` becomes that of the state."""
        super().load_state_dict(state)
        self.max_sample_count = int(state["max_sample_count"])


def with_limit(sampler: Sampler, limit: int | None, prefetch: int | None) -> Sampler:
    """Return the sampler of a buffer with `consume_after_n_samples=limit`; the one given without.

    Raises:
        KindError: if the limit is no integer.
        OptionError: if it is below 1, or does not go with the sampler or with prefetch.
    """
    if limit is not None:
        count = check_integer("consume_after_n_samples", limit, 1, below=MOST_DRAWS)
        if prefetch:
            msg = (
                f"Prefetching is not supported when consume_after_n_samples is set, got prefetch={prefetch}: leave "
                "one of them out"
            )
            raise OptionError(msg)
        if isinstance(sampler, ConsumingSampler):
            if sampler.max_sample_count != count:
                msg = (
                    f"consume_after_n_samples={count} conflicts with the provided ConsumingSampler.max_sample_count="
                    f"{sampler.max_sample_count}: leave one of them out"
                )
                raise OptionError(msg)
        elif type(sampler) is not RandomSampler:
            msg = (
                "consume_after_n_samples only supports the default RandomSampler or an explicit ConsumingSampler, got "
                f"{sampler!r}: leave one of them out"
            )
            raise OptionError(msg)
        else:
            sampler = ConsumingSampler(count)
    if prefetch and sampler.leaves:
        msg = f"Prefetching is not supported with {type(sampler).__name__}, got prefetch={prefetch}: leave one out"
        raise OptionError(msg)
    return sampler


def _key(draw: Draw) -> int:
    """Return what identifies a draw of a queue: the generation of its first row, which is unique."""
    return -1 if draw.generations is None else int(draw.generations[0])
