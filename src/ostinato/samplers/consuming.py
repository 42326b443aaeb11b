"""Samplers that use rows up: a queue, where each row is drawn once in order, and rows that retire after n draws."""

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

    A buffer with this sampler holds its writers up while the ring is full of rows that nobody has got yet, and its
    readers until a whole batch is there; without a `rate_limiter` it has `RateLimiter()`. Rows of a batch that could
    not be made (a transform raised) go back to the head of the queue. Saved states hold every row that has not been
    delivered. Cost of a draw: O(batch_size).

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
        self._returned: list[int] = []  # slots drawn in vain, oldest first
        self._drawn: dict[int, list[int]] = {}  # first stamp of a draw under way -> its slots
        self._waiting = 0  # the newest rows, which no draw has met
        self._known = False

    def __repr__(self) -> str:
        """Class and rows that wait."""
        return f"QueueSampler(waiting={self.rows_left})"

    @property
    def rows_left(self) -> int:
        """Rows that can be drawn."""
        return len(self._returned) + self._waiting

    @property
    def draws_left(self) -> int:
        """The same: each can be drawn once."""
        return self.rows_left

    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer is good for."""
        return capacity

    def room(self, view: View) -> int:
        """Return the rows that fit in before the oldest one that nobody has got is replaced."""
        held = [*self._returned[:1], *(slots[0] for slots in self._drawn.values())]  # the oldest of each
        return view.capacity - max([self._waiting, *(_age(slot, view) + 1 for slot in held)])

    def begin(self, view: View) -> None:
        """Let rows that the storage brought along wait as well."""
        if not self._known:
            self._waiting, self._known = view.rows, True

    def record(self, placement: Placement) -> None:
        """Let rows just written wait."""
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
        stamps = view.ring.generations_of_rows(slots)
        self._drawn[int(stamps[0])] = held
        return Draw(slots, generations=stamps)

    def deliver(self, draw: Draw) -> None:
        """Let the slots of a batch that reached its reader be written again."""
        self._drawn.pop(_key(draw), None)

    def undo(self, draw: Draw, view: View) -> None:
        """Put the rows of a batch that reached nobody back to where they were."""
        self._take_back([_key(draw)], view)

    def resume(self, draws: Sequence[Draw], view: View) -> None:
        """Put the rows of all draws back but those given."""
        self._take_back(list(self._drawn.keys() - {_key(draw) for draw in draws}), view)

    def _take_back(self, keys: list[int], view: View) -> None:
        slots = [slot for key in keys for slot in self._drawn.pop(key, ())]
        self._returned = sorted(self._returned + slots, key=lambda slot: -_age(slot, view))

    def clear(self) -> None:
        """Forget all rows."""
        self._returned, self._drawn, self._waiting, self._known = [], {}, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return all rows that have not been delivered."""
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
        """Refuse a damaged state.

        Raises:
            CheckpointError: if it names rows that are not there, or one twice.
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

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return a state for rows that have moved; those that wait are the newest ones as before."""
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
    """Uniform draws among the rows that have been drawn fewer than `max_times_sampled` times; then a row retires.

    The rows of a batch are drawn one after the other, so a row that is used up within a batch is not drawn again in it.
    A retired row is never drawn again; its slot is taken when the writer comes round to it, as any other. Where the
    rows left are not good for a whole batch, `sample` waits for writers if the buffer has a `rate_limiter`, and raises
    if not. Memory: 20 bytes for each slot. Cost of a draw: O(batch_size).

    Args:
        max_times_sampled: draws that each row is good for, at least 1.

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
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)  # slots of rows that may be drawn, in front
        self._place: NDArray[np.int64] = np.zeros(0, np.int64)  # where a slot stands in it, -1 for retired rows
        self._alive = self._left = self._rows = 0

    def __repr__(self) -> str:
        """Option and rows left."""
        return f"LimitedSampler(max_times_sampled={self.max_times_sampled}, left={self.rows_left})"

    @property
    def rows_left(self) -> int:
        """Rows that have not retired."""
        return self._alive

    @property
    def draws_left(self) -> int:
        """Draws that the rows are still good for."""
        return self._left

    @property
    def nbytes(self) -> int:
        """Bytes of the counts."""
        return int(self._uses.nbytes + self._order.nbytes + self._place.nbytes)

    def draws_of(self, capacity: int) -> int:
        """Return the draws that a full buffer is good for."""
        return capacity * self.max_times_sampled

    def begin(self, view: View) -> None:
        """Let rows that nothing was said of be drawn."""
        if view.rows < self._rows:
            self.clear()
        if view.rows > self._rows:
            self._renew(np.arange(self._rows, view.rows))

    def record(self, placement: Placement) -> None:
        """Let rows just written be drawn, each as often as any."""
        slots = placement.slots().numpy() if isinstance(placement, Run) else np.unique(placement.slots.cpu().numpy())
        self._renew(slots)

    def _renew(self, slots: NDArray[np.int64]) -> None:
        if not slots.size:
            return
        self._reserve(int(slots.max()) + 1)
        alive = self._place[slots] >= 0
        self._left += slots.size * self.max_times_sampled
        self._left -= int((self.max_times_sampled - self._uses[slots[alive]]).sum())
        self._uses[slots] = 0
        self._revive(slots[~alive])

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw rows one after the other, each uniform among those that have not retired by then.

        Raises:
            EmptyBufferError: if the rows are not good for so many draws; nothing is drawn.
        """
        self.begin(view)
        if batch_size > self._left:
            msg = (
                f"the {self._alive} row(s) left can be drawn {self._left} more time(s) in all, {batch_size} were asked "
                f"for (max_times_sampled={self.max_times_sampled}): write more rows, or ask for fewer"
            )
            raise EmptyBufferError(msg)
        parts, missing = [], batch_size
        while missing:
            # as if drawn one by one: a candidate that has retired by its turn is passed over
            random = torch.randint(0, self._alive, (missing,), generator=generator, device=view.device)
            found = self._use(self._order[random.cpu().numpy()])
            parts.append(found)
            missing -= found.size
        slots = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(view.device)
        return Draw(slots, generations=view.ring.generations_of_rows(slots))

    def _use(self, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count one use of each candidate that is still good for it by its turn, and return these, in order."""
        by_slot = np.argsort(candidates, kind="stable")
        ranked = candidates[by_slot]
        first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
        lengths = np.diff(np.r_[first, ranked.size])
        turn = np.arange(ranked.size) - np.repeat(first, lengths)
        good = np.empty(ranked.size, dtype=bool)
        good[by_slot] = self._uses[ranked] + turn < self.max_times_sampled
        rows = ranked[first]
        self._uses[rows] = np.minimum(self._uses[rows] + lengths, self.max_times_sampled)
        self._retire(rows[self._uses[rows] == self.max_times_sampled])
        found = candidates[good]
        self._left -= found.size
        return found

    def _retire(self, slots: NDArray[np.int64]) -> None:
        """Take rows out of the order; those at its end fill the gaps."""
        if not slots.size:
            return
        end = self._alive - slots.size
        places = self._place[slots]
        self._place[slots] = -1
        tail = self._order[end : self._alive]
        movers, gaps = tail[self._place[tail] >= 0], places[places < end]
        self._order[gaps] = movers
        self._place[movers] = gaps
        self._alive = end

    def _revive(self, slots: NDArray[np.int64]) -> None:
        end = self._alive + slots.size
        self._order[self._alive : end] = slots
        self._place[slots] = np.arange(self._alive, end)
        self._alive = end

    def _reserve(self, rows: int) -> None:
        """Have room for so many rows; it doubles, since a list storage may have no bound."""
        held = self._uses.size
        if rows > held:
            more = max(rows, 2 * held) - held
            self._uses = np.concatenate((self._uses, np.zeros(more, np.int32)))
            self._place = np.concatenate((self._place, np.full(more, -1, np.int64)))
            self._order = np.concatenate((self._order, np.zeros(more, np.int64)))
        self._rows = max(self._rows, rows)

    def undo(self, draw: Draw, view: View) -> None:
        """Take uses back that reached nobody, of rows that have not been replaced since."""
        if draw.generations is None:
            return
        there = draw.slots < view.rows
        kept = draw.slots[there]
        slots = kept[view.ring.matches(kept, draw.generations[there])].cpu().numpy()
        np.subtract.at(self._uses, slots, 1)
        self._left += slots.size
        rows = np.unique(slots)
        self._revive(rows[self._place[rows] < 0])

    def clear(self) -> None:
        """Forget all rows."""
        self._place.fill(-1)
        self._alive = self._left = self._rows = 0

    def state_dict(self) -> dict[str, Any]:
        """Return uses, and the order of the rows that may be drawn."""
        return {
            "max_times_sampled": self.max_times_sampled,
            "uses": torch.from_numpy(self._uses[: self._rows].copy()),
            "order": torch.from_numpy(self._order[: self._alive].copy()),
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Refuse a state of another option, damaged, or of another number of rows.

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
        alive = (uses < self.max_times_sampled).nonzero().flatten()
        good = uses.shape == (rows,) and not bool(((uses < 0) | (uses > self.max_times_sampled)).any())
        if not (good and torch.equal(order.sort().values, alive)):
            msg = f"the sampler's state is damaged: its uses and order are not those of {rows} rows"
            raise CheckpointError(msg)

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return a state for rows that have moved: their uses move with them."""
        uses = state["uses"]
        moved = torch.cat((uses[seam:], uses[:seam]))
        return {**state, "uses": moved, "order": (state["order"] - seam).remainder_(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.clear()
        uses: Tensor = state["uses"]
        self._reserve(uses.shape[0])
        self._uses[: self._rows] = uses.numpy()
        self._revive(state["order"].numpy())
        self._left = int((self.max_times_sampled - self._uses[: self._rows].astype(np.int64)).sum())


def _key(draw: Draw) -> int:
    """Return what tells draws of a queue apart: the stamp of their first row, which no other row ever has."""
    return -1 if draw.generations is None else int(draw.generations[0])


def _age(slot: int, view: View) -> int:
    return (view.cursor - 1 - slot) % view.capacity
