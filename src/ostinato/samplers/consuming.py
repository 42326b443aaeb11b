"""Samplers whose draws use rows up: a queue, and uniform draws of each row at most `n` times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.records import Draw, Run, ring_range
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError
from ostinato.samplers.base import CountingSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.records import Placement, View

__all__ = ["LimitedSampler", "QueueSampler"]


@final
class QueueSampler(CountingSampler):
    """First in, first out: every row is drawn exactly once, in the order of writing.

    In a buffer with this sampler, writers wait while the ring is full of rows that have not been delivered, and readers
    wait for a whole batch; without a `rate_limiter` it has `RateLimiter()`. Rows of a batch that could not be made (a
    transform raised) return to the head of the queue. A saved state contains every row that has not been delivered.
    Cost of a draw: O(batch_size).

    Example:
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
        self._returned: list[int] = []  # slots of draws that were undone, oldest first
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
        held = [*self._returned[:1], *(slots[0] for slots in self._drawn.values())]  # the oldest row of each
        return view.capacity - max([self._waiting, *(_age(slot, view) + 1 for slot in held)])

    def begin(self, view: View) -> None:
        """Add the rows that a storage held before to the queue."""
        if not self._known:
            self._waiting, self._known = view.rows, True

    def record(self, placement: Placement) -> None:
        """Add rows just written to the queue."""
        self._known = True
        self._waiting += placement.total
        if isinstance(placement, Run):
            self._waiting = min(self._waiting, placement.capacity)

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:  # noqa: ARG002
        """Draw the next rows.

        Raises:
            EmptyBufferError: if there are fewer; nothing is drawn.
        """
        self.begin(view)
        if batch_size > self.rows_left:
            msg = f"the queue holds {self.rows_left} row(s), {batch_size} were asked for: write more, or ask for fewer"
            raise EmptyBufferError(msg)
        again, self._returned = self._returned[:batch_size], self._returned[batch_size:]
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
        slots = [slot for key in keys for slot in self._drawn.pop(key, ())]
        self._returned = sorted(self._returned + slots, key=lambda slot: -_age(slot, view))

    def clear(self) -> None:
        """Remove all rows."""
        self._returned, self._drawn, self._waiting, self._known = [], {}, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that have not been delivered."""
        return {
            "waiting": self._waiting,
            "returned": torch.tensor(self._returned, dtype=torch.int64, device="cpu"),
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

    def _rows_of(self, state: dict[str, Any]) -> int:
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
        self._returned = state["returned"].tolist()
        self._waiting, self._known = int(state["waiting"]), True


@final
class LimitedSampler(CountingSampler):
    """Uniform draws among the rows that have been drawn fewer than `max_times_sampled` times.

    The rows of a batch are drawn one after the other, so a row that is used up within a batch is not drawn again in it.
    A row that is used up is never drawn again; it is replaced in ring order, as any other row. If the rows left do not
    allow a whole batch, `sample` waits for writers if the buffer has a `rate_limiter`, and raises otherwise. Memory: 20
    bytes for each slot. Cost of a draw: O(batch_size).

    Args:
        max_times_sampled: draws of each row, at least 1.

    Raises:
        OptionError: if it is below 1.

    Example:
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
        self._uses: NDArray[np.int32] = np.zeros(0, np.int32)
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)  # slots; those that may be drawn come first
        self._position: NDArray[np.int64] = np.zeros(0, np.int64)  # of each slot in the order, -1 for rows used up
        self._usable = self._left = self._rows = 0

    def __repr__(self) -> str:
        """Show the option and the rows left."""
        return f"LimitedSampler(max_times_sampled={self.max_times_sampled}, left={self.rows_left})"

    @property
    def rows_left(self) -> int:
        """Rows that are not used up."""
        return self._usable

    @property
    def draws_left(self) -> int:
        """Draws that these rows allow."""
        return self._left

    @property
    def nbytes(self) -> int:
        """Bytes of counts and order."""
        return int(self._uses.nbytes + self._order.nbytes + self._position.nbytes)

    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer allows."""
        return capacity * self.max_times_sampled

    def begin(self, view: View) -> None:
        """Add rows that were not recorded."""
        if view.rows < self._rows:
            self.clear()
        if view.rows > self._rows:
            self._reset_uses(np.arange(self._rows, view.rows))

    def record(self, placement: Placement) -> None:
        """Add rows just written."""
        slots = placement.slots().numpy() if isinstance(placement, Run) else np.unique(placement.slots.cpu().numpy())
        self._reset_uses(slots)

    def _reset_uses(self, slots: NDArray[np.int64]) -> None:
        if not slots.size:
            return
        self._reserve(int(slots.max()) + 1)
        usable = self._position[slots] >= 0
        self._left += slots.size * self.max_times_sampled
        self._left -= int((self.max_times_sampled - self._uses[slots[usable]]).sum())
        self._uses[slots] = 0
        self._insert(slots[~usable])

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw rows one after the other, each uniformly among those that are not used up by then.

        Raises:
            EmptyBufferError: if the rows do not allow so many draws; nothing is drawn.
        """
        self.begin(view)
        if batch_size > self._left:
            msg = (
                f"the {self._usable} row(s) left can be drawn {self._left} more time(s) in all, {batch_size} were "
                f"asked for (max_times_sampled={self.max_times_sampled}): write more rows, or ask for fewer"
            )
            raise EmptyBufferError(msg)
        parts, missing = [], batch_size
        while missing:
            # as if drawn one by one: a candidate that is used up by its turn is skipped
            random = torch.randint(0, self._usable, (missing,), generator=generator, device=view.device)
            found = self._use(self._order[random.cpu().numpy()])
            parts.append(found)
            missing -= found.size
        slots = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(view.device)
        return Draw(slots, generations=view.ring.generations_of_rows(slots))

    def _use(self, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count one use of each candidate that is not used up by its turn, and return these candidates in order."""
        by_slot = np.argsort(candidates, kind="stable")
        ranked = candidates[by_slot]
        first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
        lengths = np.diff(np.r_[first, ranked.size])
        turn = np.arange(ranked.size) - np.repeat(first, lengths)
        good = np.empty(ranked.size, dtype=bool)
        good[by_slot] = self._uses[ranked] + turn < self.max_times_sampled
        rows = ranked[first]
        self._uses[rows] = np.minimum(self._uses[rows] + lengths, self.max_times_sampled)
        self._remove(rows[self._uses[rows] == self.max_times_sampled])
        found = candidates[good]
        self._left -= found.size
        return found

    def _remove(self, slots: NDArray[np.int64]) -> None:
        """Remove rows from the order; rows at its end fill the gaps."""
        if not slots.size:
            return
        end = self._usable - slots.size
        places = self._position[slots]
        self._position[slots] = -1
        tail = self._order[end : self._usable]
        movers, gaps = tail[self._position[tail] >= 0], places[places < end]
        self._order[gaps] = movers
        self._position[movers] = gaps
        self._usable = end

    def _insert(self, slots: NDArray[np.int64]) -> None:
        end = self._usable + slots.size
        self._order[self._usable : end] = slots
        self._position[slots] = np.arange(self._usable, end)
        self._usable = end

    def _reserve(self, rows: int) -> None:
        """Allocate for at least `rows` rows; the size doubles, since a list storage may have no bound."""
        held = self._uses.size
        if rows > held:
            more = max(rows, 2 * held) - held
            self._uses = np.concatenate((self._uses, np.zeros(more, np.int32)))
            self._position = np.concatenate((self._position, np.full(more, -1, np.int64)))
            self._order = np.concatenate((self._order, np.zeros(more, np.int64)))
        self._rows = max(self._rows, rows)

    def undo(self, draw: Draw, view: View) -> None:
        """Undo the uses of a draw that reached no reader, for rows that have not been replaced since."""
        if draw.generations is None:
            return
        there = draw.slots < view.rows
        kept = draw.slots[there]
        slots = kept[view.ring.matches(kept, draw.generations[there])].cpu().numpy()
        np.subtract.at(self._uses, slots, 1)
        self._left += slots.size
        rows = np.unique(slots)
        self._insert(rows[self._position[rows] < 0])

    def clear(self) -> None:
        """Remove all rows."""
        self._position.fill(-1)
        self._usable = self._left = self._rows = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the uses of rows, and the order of the rows that may be drawn."""
        return {
            "max_times_sampled": self.max_times_sampled,
            "uses": torch.from_numpy(self._uses[: self._rows].copy()),
            "order": torch.from_numpy(self._order[: self._usable].copy()),
        }

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
        uses, order = state["uses"], state["order"]
        usable = (uses < self.max_times_sampled).nonzero().flatten()
        good = uses.shape == (rows,) and not bool(((uses < 0) | (uses > self.max_times_sampled)).any())
        if not (good and torch.equal(order.sort().values, usable)):
            msg = f"the sampler's state is damaged: its uses and order are not those of {rows} rows"
            raise CheckpointError(msg)

    def _rows_of(self, state: dict[str, Any]) -> int:
        return int(state["uses"].shape[0])

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return the state after rows were moved to other slots: their uses move with them."""
        uses = state["uses"]
        moved = torch.cat((uses[seam:], uses[:seam]))
        return {**state, "uses": moved, "order": (state["order"] - seam).remainder_(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.clear()
        uses: Tensor = state["uses"]
        self._reserve(uses.shape[0])
        self._uses[: self._rows] = uses.numpy()
        self._insert(state["order"].numpy())
        self._left = int((self.max_times_sampled - self._uses[: self._rows].astype(np.int64)).sum())


def _key(draw: Draw) -> int:
    """Return what identifies a draw of a queue: the generation of its first row, which is unique."""
    return -1 if draw.generations is None else int(draw.generations[0])


def _age(slot: int, view: View) -> int:
    return (view.cursor - 1 - slot) % view.capacity
