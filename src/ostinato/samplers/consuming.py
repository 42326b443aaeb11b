"""Samplers whose draws use rows up: a queue, and uniform draws of each row at most `n` times.

After its last draw a row stays in its slot (`LimitedSampler`), or leaves the buffer (`ConsumingSampler`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.records import Draw, Run, ring_range
from ostinato.core.rows_left import FreeSlots, SlotSet, slots_of
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError
from ostinato.samplers.base import CountingSampler, check_replacement
from ostinato.samplers.distinct import draw_distinct
from ostinato.samplers.uniform import RandomSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.records import Picks, Placement, View
    from ostinato.core.ring import Ring
    from ostinato.samplers.base import Sampler, StorageShape, WriterOrder
    from ostinato.samplers.standalone import BareStorage

__all__ = ["ConsumingSampler", "LimitedSampler", "QueueSampler", "check_count", "check_leaving", "with_limit"]

_BOUND = 2**62
"""Counts below it fit int64."""


@final
class QueueSampler(CountingSampler):
    """First in, first out: every row is drawn exactly once, in the order of writing.

    In a buffer with this sampler, writers wait while the ring is full of rows that have not been delivered, and readers
    wait for a whole batch; without a `rate_limiter` it has `RateLimiter()`. Rows of a batch that could not be made (a
    transform raised) return to the head of the queue. An edit (`rb[i] = row`) does not change the place of a row, and
    does not return a row that was delivered. A saved state contains every row that has not been delivered.
    Cost of a draw: O(batch_size). To delete rows costs O(rows waiting), and writes cost O(rows) from then on.

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

    def __init__(self) -> None:
        self._returned: deque[int] = deque()  # rows before the newest ones: of undone draws, or not in ring order
        self._drawn: dict[int, list[int]] = {}  # first generation of a draw under way -> its slots
        self._waiting = 0  # number of the newest rows, which have not been drawn
        self._known = False

    def __repr__(self) -> str:
        """Show the number of rows that can be drawn."""
        return f"QueueSampler(waiting={self.rows_left})"

    @property
    def rows_left(self) -> int:
        """Rows that can be drawn."""
        return len(self._returned) + self._waiting

    @property
    def draws_left(self) -> int:
        """Draws that these rows allow: one for each."""
        return self.rows_left

    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer allows."""
        return capacity

    def room(self, view: View) -> int:
        """Return the rows that can be written before the oldest row that was not delivered is replaced."""
        first = [self._returned[0]] if self._returned else []
        held = first + [slots[0] for slots in self._drawn.values()]  # the oldest row of each
        if view.starts is None and view.ring.native_state()[0] == 0:
            return view.capacity - max([self._waiting, *(_age(slot, view) + 1 for slot in held)])
        if not held:
            return view.capacity - self._waiting
        known = view.ring.arrivals(torch.arange(view.rows, device=view.device))
        oldest = known[torch.tensor(held, dtype=torch.int64, device=view.device)].min()
        return view.capacity - int((known >= oldest).sum())

    def begin(self, view: View) -> None:
        """Add the rows that a storage held before to the queue."""
        if not self._known:
            self._waiting, self._known = view.rows, True

    def place(self, rows: int, ring: Ring) -> None:  # noqa: ARG002
        """Return None; rows that wait in ring order are listed if new rows may go elsewhere."""
        if self._waiting and not ring.counts.in_order:
            self._list(ring.cursor, ring.capacity)

    def _list(self, cursor: int, capacity: int) -> None:
        """List the rows that wait in ring order, up to the cursor."""
        self._returned.extend(ring_range((cursor - self._waiting) % capacity, self._waiting, capacity).tolist())
        self._waiting = 0

    def record(self, placement: Placement) -> None:
        """Add rows just written to the queue."""
        self._known = True
        if isinstance(placement, Run):
            self._waiting = min(self._waiting + placement.total, placement.capacity)
        else:
            self._returned.extend(placement.slots.tolist())

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Remove rows that are deleted from the queue."""
        self.begin(view)
        self._list(view.cursor, view.capacity)
        gone = set(slots.tolist())
        self._returned = deque(slot for slot in self._returned if slot not in gone)
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
        again = [self._returned.popleft() for _ in range(min(batch_size, len(self._returned)))]
        fresh = batch_size - len(again)
        slots = ring_range((view.cursor - self._waiting) % view.capacity, fresh, view.capacity)
        self._waiting -= fresh
        if again:
            slots = torch.cat((torch.tensor(again, dtype=torch.int64, device="cpu"), slots))
        held = slots.tolist()
        slots = slots.to(view.device)
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
        slots = [*self._returned, *(slot for key in keys for slot in self._drawn.pop(key, ()))]
        listed = torch.tensor(slots, dtype=torch.int64, device=view.device)
        self._returned = deque(listed[view.ring.arrivals(listed).argsort()].tolist())

    def clear(self) -> None:
        """Remove all rows."""
        self._returned, self._drawn, self._waiting, self._known = deque(), {}, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that have not been delivered."""
        return {
            "waiting": self._waiting,
            "returned": torch.tensor(list(self._returned), dtype=torch.int64, device="cpu"),
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
        held = [*state["returned"].tolist(), *state["drawn"].tolist()]
        sizes, waiting = state["sizes"].tolist(), int(state["waiting"])
        good = (
            len(set(held)) == len(held)
            and all(0 <= slot < rows for slot in held)
            and 0 <= waiting <= rows - len(held)
            and all(size > 0 for size in sizes)
            and sum(sizes) == len(state["drawn"])
            and len(set(state["keys"].tolist())) == len(sizes)
        )
        if not good:
            msg = f"the queue's state is damaged: its {len(held)} rows drawn and {waiting} waiting are not of {rows}"
            raise CheckpointError(msg)

    def _rows_of_state(self, state: dict[str, Any]) -> int:
        held = [*state["returned"].tolist(), *state["drawn"].tolist()]
        return int(max([int(state["waiting"]) + len(held), *(slot + 1 for slot in held)]))

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return the state after rows were moved to other slots; rows not yet drawn are the newest ones as before."""
        return {**state, **{name: (state[name] - seam).remainder_(rows) for name in ("returned", "drawn")}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        slots = state["drawn"].tolist()
        ends = np.cumsum([0, *state["sizes"].tolist()]).tolist()
        pairs = zip(state["keys"].tolist(), ends[:-1], ends[1:], strict=True)
        self._drawn = {key: slots[a:b] for key, a, b in pairs}
        self._returned = deque(state["returned"].tolist())
        self._waiting, self._known = int(state["waiting"]), True


@final
class _Uses:
    """How often each row was drawn, and the rows that were drawn fewer than `limit` times, in an order to draw from.

    Memory: 20 bytes for each slot.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = 0
        """Draws that the rows allow."""
        self.rows = 0
        self.uses: NDArray[np.int32] = np.zeros(0, np.int32)
        self._set = SlotSet()  # rows that may be drawn

    @property
    def usable(self) -> int:
        """Rows that may be drawn: the first ones of `order`."""
        return self._set.count

    @property
    def order(self) -> NDArray[np.int64]:
        """Slots of the rows that may be drawn, then others."""
        return self._set.order

    @property
    def nbytes(self) -> int:
        """Bytes of counts and order."""
        return int(self.uses.nbytes + self._set.nbytes)

    def begin(self, view: View) -> None:
        """Add rows that were not recorded."""
        if view.rows < self.rows:
            self.clear()
        if view.rows > self.rows:
            self.reset(np.arange(self.rows, view.rows))

    def reset(self, slots: NDArray[np.int64]) -> None:
        """Let rows be drawn `limit` times from now on."""
        if not slots.size:
            return
        self._reserve(int(slots.max()) + 1)
        usable = self._set.has(slots)
        self.left += slots.size * self.limit
        self.left -= int((self.limit - self.uses[slots[usable]]).sum())
        self.uses[slots] = 0
        self._set.insert(slots[~usable])

    def drop(self, slots: NDArray[np.int64]) -> None:
        """Use up rows that are deleted, each once: they are not drawn again."""
        slots = slots[self._set.has(slots)]
        self.left -= int((self.limit - self.uses[slots].astype(np.int64)).sum())
        self.uses[slots] = self.limit
        self._set.remove(slots)

    def usable_at(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows may be drawn, bool `[n]`."""
        return self._set.has(slots)

    def use(self, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count one use of each candidate that is not used up by its turn, and return these candidates in order."""
        by_slot = np.argsort(candidates, kind="stable")
        ranked = candidates[by_slot]
        first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
        lengths = np.diff(np.r_[first, ranked.size])
        turn = np.arange(ranked.size) - np.repeat(first, lengths)
        good = np.empty(ranked.size, dtype=bool)
        good[by_slot] = self.uses[ranked] + turn < self.limit
        rows = ranked[first]
        self.uses[rows] = np.minimum(self.uses[rows] + lengths, self.limit)
        self._set.remove(rows[self.uses[rows] == self.limit])
        found = candidates[good]
        self.left -= found.size
        return found

    def undo(self, draw: Draw, view: View) -> None:
        """Undo the uses of a draw, for rows that have not been replaced since."""
        if draw.generations is None:
            return
        there = draw.slots < view.rows
        kept = draw.slots[there]
        slots = kept[view.ring.holds(kept, draw.generations[there])].cpu().numpy()
        np.subtract.at(self.uses, slots, 1)
        self.left += slots.size
        rows = np.unique(slots)
        self._set.insert(rows[~self._set.has(rows)])

    def _reserve(self, rows: int) -> None:
        """Allocate for at least `rows` rows; the size doubles, since a list storage may have no bound."""
        held = self.uses.size
        if rows > held:
            more = max(rows, 2 * held) - held
            self.uses = np.concatenate((self.uses, np.zeros(more, np.int32)))
            self._set.reserve(held + more)
        self.rows = max(self.rows, rows)

    def clear(self) -> None:
        """Remove all rows."""
        self._set.clear()
        self.left = self.rows = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the uses of rows, and the order of the rows that may be drawn. Copy."""
        return {
            "uses": torch.from_numpy(self.uses[: self.rows].copy()),
            "order": torch.from_numpy(self.order[: self.usable].copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.clear()
        uses: Tensor = state["uses"]
        self._reserve(uses.shape[0])
        self.uses[: self.rows] = uses.numpy()
        self._set.insert(state["order"].numpy())
        self.left = int((self.limit - self.uses[: self.rows].astype(np.int64)).sum())


def _check_uses(state: dict[str, Any], rows: int, limit: int) -> None:
    """Check the state of `_Uses`.

    Raises:
        CheckpointError: if it is not that of `rows` rows.
    """
    uses, order = state["uses"], state["order"]
    usable = (uses < limit).nonzero().flatten()
    good = uses.shape == (rows,) and not bool(((uses < 0) | (uses > limit)).any())
    if not (good and torch.equal(order.sort().values, usable)):
        msg = f"the sampler's state is damaged: its uses and order are not those of {rows} rows"
        raise CheckpointError(msg)


def _turn_uses(state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
    """Return the state of `_Uses` after rows were moved to other slots: their uses move with them."""
    uses = state["uses"]
    moved = torch.cat((uses[seam:], uses[:seam]))
    return {**state, "uses": moved, "order": (state["order"] - seam).remainder_(rows)}


@final
class LimitedSampler(CountingSampler):
    """Uniform draws among the rows that have been drawn fewer than `max_times_sampled` times.

    The rows of a batch are drawn one after the other, so a row may be in it more than once, and a row that is used up
    within a batch is not drawn again in it. A row that is used up stays where it is, and is replaced in ring order, as
    any other row. If the rows left do not allow a whole batch, `sample` waits for writers if the buffer has a
    `rate_limiter`, and raises otherwise. `ConsumingSampler` is the variant whose rows leave the buffer. Memory: 20
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
        if isinstance(max_times_sampled, bool) or not hasattr(max_times_sampled, "__index__"):
            msg = f"max_times_sampled must be an integer, got {max_times_sampled!r}"
            raise KindError(msg)
        if max_times_sampled < 1:
            msg = f"max_times_sampled must be at least 1, got {max_times_sampled}"
            raise OptionError(msg)
        self.max_times_sampled: int = int(max_times_sampled)
        self._uses = _Uses(self.max_times_sampled)

    def __repr__(self) -> str:
        """Show the option and the rows left."""
        return f"LimitedSampler(max_times_sampled={self.max_times_sampled}, left={self.rows_left})"

    @property
    def rows_left(self) -> int:
        """Rows that are not used up."""
        return self._uses.usable

    @property
    def draws_left(self) -> int:
        """Draws that these rows allow."""
        return self._uses.left

    @property
    def nbytes(self) -> int:
        """Bytes of counts and order."""
        return self._uses.nbytes

    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer allows."""
        return capacity * self.max_times_sampled

    def begin(self, view: View) -> None:
        """Add rows that were not recorded."""
        self._uses.begin(view)

    def record(self, placement: Placement) -> None:
        """Add rows just written."""
        self._uses.reset(slots_of(placement))

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw rows one after the other, each uniformly among those that are not used up by then.

        Raises:
            EmptyBufferError: if the rows do not allow so many draws; nothing is drawn.
        """
        self.begin(view)
        uses = self._uses
        if batch_size > uses.left:
            msg = (
                f"the {uses.usable} row(s) left can be drawn {uses.left} more time(s) in all, {batch_size} were "
                f"asked for (max_times_sampled={self.max_times_sampled}): write more rows, or ask for fewer"
            )
            raise EmptyBufferError(msg)
        parts, missing = [], batch_size
        while missing:
            # as if drawn one by one: a candidate that is used up by its turn is skipped
            random = torch.randint(0, uses.usable, (missing,), generator=generator, device=view.device)
            found = uses.use(uses.order[random.cpu().numpy()])
            parts.append(found)
            missing -= found.size
        slots = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(view.device)
        return Draw(slots, generations=view.ring.generations_of_rows(slots))

    def undo(self, draw: Draw, view: View) -> None:
        """Undo the uses of a draw that reached no reader, for rows that have not been replaced since."""
        self._uses.undo(draw, view)

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Draw rows that are deleted no more."""
        self.begin(view)
        self._uses.drop(slots.cpu().numpy())

    def clear(self) -> None:
        """Remove all rows."""
        self._uses.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the uses of rows, and the order of the rows that may be drawn."""
        return {"max_times_sampled": self.max_times_sampled, **self._uses.state_dict()}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, of the same option, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        if state["max_times_sampled"] != self.max_times_sampled:
            msg = (
                f"the state is that of LimitedSampler(max_times_sampled={state['max_times_sampled']}), this one has "
                f"{self.max_times_sampled}: make it with the same number"
            )
            raise CheckpointError(msg)
        _check_uses(state, rows, self.max_times_sampled)

    def _rows_of_state(self, state: dict[str, Any]) -> int:
        return int(state["uses"].shape[0])

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return the state after rows were moved to other slots: their uses move with them."""
        return _turn_uses(state, seam, rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._uses.load_state_dict(state)


@final
class ConsumingSampler(CountingSampler):
    """Uniform draws of distinct rows, each of which leaves the buffer after `max_sample_count` draws.

    A batch has no row twice. It is shorter if fewer rows are left (with a `rate_limiter`, `sample` waits for whole
    batches), and iteration over the buffer ends with the last row. `len` counts the rows left; the rows that have left
    can still be read by index. New rows are written to the slots of these first, in the order in which they left, and
    the remaining ones continue at the cursor, so no row that is left is replaced while a slot is free.

    `ReplayBuffer(consume_after_n_samples=n)` makes a buffer with this sampler. It needs a storage of one dimension, a
    round-robin writer, and no prefetch. Memory: 20 bytes for each slot, and about 150 for each free slot. Cost of a
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

    leaves = True

    def __init__(self, max_sample_count: int = 1, *, replacement: bool = True) -> None:
        check_replacement(type(self), replacement=replacement)
        self.max_sample_count = check_count("max_sample_count", max_sample_count)
        self.ran_out = False
        self._uses = _Uses(self.max_sample_count)
        self.free: FreeSlots = FreeSlots()
        self._drawn: dict[int, NDArray[np.int64]] = {}  # draw under way -> the rows that leave when it is delivered

    def __repr__(self) -> str:
        """Show the option and the rows left."""
        return f"ConsumingSampler(max_sample_count={self.max_sample_count}, left={self.rows_left})"

    @property
    def epochal(self) -> bool:
        """Iteration ends with the last row."""
        return True

    @property
    def rows_left(self) -> int:
        """Rows that can be drawn."""
        return self._uses.usable

    @property
    def draws_left(self) -> int:
        """Draws of distinct rows that these rows allow at once."""
        return self._uses.usable

    @property
    def nbytes(self) -> int:
        """Bytes of counts and order."""
        return self._uses.nbytes

    def draws_of(self, capacity: int) -> int:
        """Return the rows of the largest batch."""
        return capacity

    def check_parts(self, storage: StorageShape, writer: WriterOrder) -> None:
        """Check that rows can be written to the slots of rows that have left.

        Raises:
            OptionError: for a storage of two dimensions, or one that needs ring order.
            KindError: for a writer that chooses slots itself.
        """
        check_leaving(type(self).__name__, storage, writer)

    def begin(self, view: View) -> None:
        """Add rows that were not recorded."""
        if view.rows < self._uses.rows:
            self.clear()
        self._uses.begin(view)

    def place(self, rows: int, ring: Ring) -> Picks | None:
        """Return slots of rows that have left, then those from the cursor on; None if there are none of the first."""
        return self.free.place(rows, ring)

    def record(self, placement: Placement) -> None:
        """Add rows just written."""
        slots = slots_of(placement)
        self.free.discard(slots)
        for key, held in self._drawn.items():
            self._drawn[key] = held[~np.isin(held, slots)]
        self._uses.reset(slots)
        self.ran_out = False

    def mark_update(self, index: Any, *, storage: BareStorage | None = None) -> None:
        """Let rows be drawn `max_sample_count` times from now on, as if they were just written."""
        super().mark_update(index, storage=storage)
        self.extend(index)

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw distinct rows among those left, all of them if there are fewer.

        Raises:
            EmptyBufferError: if no row is left.
        """
        self.check_draw(view, batch_size)
        uses = self._uses
        picked = draw_distinct(uses.usable, min(batch_size, uses.usable), generator, view.device)
        found = uses.use(uses.order[picked.cpu().numpy()])
        slots = torch.from_numpy(found).to(view.device)
        draw = Draw(slots, generations=view.ring.generations_of_rows(slots))
        left = found[uses.uses[found] == uses.limit]
        if left.size:
            self._drawn[_key(draw)] = left
        self.ran_out = uses.usable == 0
        return draw

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: ARG002
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no row is left.
        """
        self.begin(view)
        if not self._uses.usable:
            self.ran_out = True
            msg = (
                f"Cannot sample from an empty storage: all {view.rows} rows were drawn {self.max_sample_count} "
                "time(s) and have left: add rows first"
            )
            raise EmptyBufferError(msg)

    def deliver(self, draw: Draw) -> None:
        """Free the slots of the rows that have left."""
        left = self._drawn.pop(_key(draw), None)
        if left is not None:
            self.free.add(left)

    def holds(self, slots: Tensor) -> Tensor:
        """Return which rows can still be drawn."""
        return torch.from_numpy(self._uses.usable_at(slots.cpu().numpy())).to(slots.device)

    def drop_rows(self, slots: Tensor, view: View) -> None:
        """Let rows leave that are deleted, and free their slots."""
        self.begin(view)
        gone = slots.cpu().numpy()
        self._uses.drop(gone)
        self.free.add(gone)

    def undo(self, draw: Draw, view: View) -> None:
        """Let the rows of a batch that reached no reader be drawn again, unless they have been replaced since."""
        self._drawn.pop(_key(draw), None)
        self._uses.undo(draw, view)
        self.ran_out = self._uses.usable == 0

    def clear(self) -> None:
        """Remove all rows."""
        self._uses.clear()
        self.free.clear()
        self._drawn = {}
        self.ran_out = False

    def state_dict(self) -> dict[str, Any]:
        """Return the draws of each row, the order of the rows left, and the free slots in their order."""
        return {
            "max_sample_count": self.max_sample_count,
            **self._uses.state_dict(),
            "free": self.free.state(),
            "ran_out": self.ran_out,
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, and of `rows` rows.

        Raises:
            CheckpointError: naming what differs.
        """
        limit = state["max_sample_count"]
        if type(limit) is not int or not 1 <= limit < _BOUND:
            msg = f"the sampler's state is damaged: max_sample_count is {limit!r}"
            raise CheckpointError(msg)
        _check_uses(state, rows, limit)
        free, left = state["free"], (state["uses"] == limit).nonzero().flatten()
        if free.dtype is not torch.int64 or free.unique().shape != free.shape or not torch.isin(free, left).all():
            msg = f"the sampler's state is damaged: its free slots are not those of rows drawn {limit} time(s)"
            raise CheckpointError(msg)

    def _rows_of_state(self, state: dict[str, Any]) -> int:
        return int(state["uses"].shape[0])

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return the state after rows were moved to other slots."""
        return {**_turn_uses(state, seam, rows), "free": (state["free"] - seam).remainder_(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; `max_sample_count` becomes that of the state.

        Rows of batches that were under way then have left.
        """
        self.max_sample_count = int(state["max_sample_count"])
        self._uses = _Uses(self.max_sample_count)
        self._uses.load_state_dict(state)
        self.free.load(state["free"])
        self._drawn = {}
        self.free.add(np.flatnonzero(self._uses.uses[: self._uses.rows] == self.max_sample_count))
        self.ran_out = bool(state["ran_out"])


def check_leaving(name: str, storage: StorageShape, writer: WriterOrder) -> None:
    """Check that rows can be written to the slots of rows that have left.

    Args:
        name: of the sampler.
        storage: of the buffer.
        writer: of the buffer.

    Raises:
        OptionError: for a storage of two dimensions, or one that needs ring order.
        KindError: for a writer that chooses slots itself.
    """
    if storage.ndim != 1:
        msg = f"{name} only supports 1-dimensional storages, got ndim={storage.ndim}: use ndim=1"
        raise OptionError(msg)
    if storage.ring_only:
        msg = (
            f"{name} lets new rows take the slots of rows that have left, and the storage (single_copy) takes rows in "
            "ring order only: leave single_copy out, or use LimitedSampler"
        )
        raise OptionError(msg)
    if not (writer.in_order and writer.mutable):
        msg = (
            f"{name} requires a writer that leaves the choice of slots to it, got {type(writer).__name__}: use "
            "RoundRobinWriter, or LimitedSampler"
        )
        raise KindError(msg)


def check_count(name: str, value: Any) -> int:
    """Return a number of draws.

    Raises:
        KindError: if it is no integer.
        OptionError: if it is below 1.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        msg = f"{name} must be a positive integer, got {value!r} of type {type(value).__name__}"
        raise KindError(msg)
    if value < 1:
        msg = f"{name} must be a positive integer, got {value!r}"
        raise OptionError(msg)
    if value >= _BOUND:
        msg = f"{name} must be below 2 ** 62, got {value}"
        raise OptionError(msg)
    return int(value)


def with_limit(sampler: Sampler, limit: int | None, prefetch: int | None) -> Sampler:
    """Return the sampler of a buffer with `consume_after_n_samples=limit`; the one given without.

    Raises:
        KindError: if the limit is no integer.
        OptionError: if it is below 1, or does not go with the sampler or with prefetch.
    """
    if limit is not None:
        count = check_count("consume_after_n_samples", limit)
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


def _age(slot: int, view: View) -> int:
    return (view.cursor - 1 - slot) % view.capacity
