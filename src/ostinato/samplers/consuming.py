"""Samplers whose draws use rows up: a queue, and uniform draws of each row at most `n` times.

After its last draw a row stays in its slot (`LimitedSampler`), or leaves the buffer (`ConsumingSampler`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.eligible import Eligible
from ostinato.core.options import check_integer
from ostinato.core.records import Draw, Run, ring_range
from ostinato.errors import CheckpointError, EmptyBufferError, OptionError
from ostinato.samplers.base import CountingSampler, check_replacement
from ostinato.samplers.distinct import draw_distinct
from ostinato.samplers.state import require
from ostinato.samplers.uniform import RandomSampler
from ostinato.samplers.uses import MOST_DRAWS, Uses, UsesSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.records import Placement, View
    from ostinato.core.ring import Ring
    from ostinato.samplers.base import Sampler


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
    row_values = ()
    row_slots = ("returned", "drawn")

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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        slots = state["drawn"].tolist()
        ends = np.cumsum([0, *state["sizes"].tolist()]).tolist()
        pairs = zip(state["keys"].tolist(), ends[:-1], ends[1:], strict=True)
        self._drawn = {key: slots[a:b] for key, a, b in pairs}
        self._returned = deque(state["returned"].tolist())
        self._waiting, self._known = int(state["waiting"]), True


@final
class LimitedSampler(UsesSampler):
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
        self.max_times_sampled = check_integer("max_times_sampled", max_times_sampled, 1, below=MOST_DRAWS)
        self._eligible = Eligible()
        super().__init__(Uses(self.max_times_sampled, self._eligible, leave=False))

    def __repr__(self) -> str:
        """Show the option and the rows left."""
        return f"LimitedSampler(max_times_sampled={self.max_times_sampled}, left={self.rows_left})"

    @property
    def draws_left(self) -> int:
        """Draws that these rows allow."""
        return self._uses.rows * self.max_times_sampled - self._uses.total

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
            random = torch.randint(0, self._eligible.rows, (missing,), generator=generator, device=view.device)
            found = self._use(self._eligible.select(random.cpu().numpy()))
            parts.append(found)
            missing -= found.size
        slots = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(view.device)
        return Draw(slots, generations=view.ring.generations_of_rows(slots))

    def _use(self, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count one draw of each candidate that is not used up by its turn, and return these candidates in order."""
        by_slot = np.argsort(candidates, kind="stable")
        ranked = candidates[by_slot]
        first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
        lengths = np.diff(np.r_[first, ranked.size])
        turn = np.arange(ranked.size) - np.repeat(first, lengths)
        left = self.max_times_sampled - self._uses.counts[ranked]
        good = np.empty(ranked.size, dtype=bool)
        good[by_slot] = turn < left
        found = candidates[good]
        self._uses.add(ranked[first], np.minimum(lengths, left[first]), found.size)
        return found


@final
class ConsumingSampler(UsesSampler):
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

    limit_name = "max_sample_count"

    def __init__(self, max_sample_count: int = 1, *, replacement: bool = True) -> None:
        check_replacement(type(self), replacement=replacement)
        self.max_sample_count = check_integer("max_sample_count", max_sample_count, 1, below=MOST_DRAWS)
        self._eligible = Eligible()
        super().__init__(Uses(self.max_sample_count, self._eligible, leave=True))

    def __repr__(self) -> str:
        """Show the option and the rows left."""
        return f"ConsumingSampler(max_sample_count={self.max_sample_count}, left={self.rows_left})"

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw distinct rows among those left, all of them if there are fewer.

        Raises:
            EmptyBufferError: if no row is left.
        """
        self.check_draw(view, batch_size)
        picked = draw_distinct(self.rows_left, min(batch_size, self.rows_left), generator, view.device)
        draw = self._uses.take(self._eligible.select(picked.cpu().numpy()), view)
        self.ran_out = self.rows_left == 0
        return draw

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Check that a state is complete, and of `rows` rows; `max_sample_count` becomes that of the state.

        Raises:
            CheckpointError: if it is not.
        """
        limit = state["max_sample_count"]
        require(type(limit) is int and 1 <= limit < MOST_DRAWS, f"max_sample_count is {limit!r}")
        self._uses.check_state(state, rows, limit)

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


def _age(slot: int, view: View) -> int:
    return (view.cursor - 1 - slot) % view.capacity
