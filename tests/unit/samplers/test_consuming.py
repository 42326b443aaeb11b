"""Queue and limited sampling against plain lists: random writes, draws, deliveries, draws taken back, loads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import LazyTensorStorage, LimitedSampler, QueueSampler, ReplayBuffer, TensorStorage
from ostinato.core.records import Draw, Run, View
from ostinato.core.ring import Ring
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError

from ...effort import examples
from ...stats.chi_square import p_value

CAPACITY = 7


class Held:
    """A ring of row numbers, written in order; what a sampler sees of it."""

    def __init__(self, sampler: QueueSampler | LimitedSampler) -> None:
        self.sampler = sampler
        self.ring = Ring(CAPACITY)
        self.held: list[int] = []
        self.cursor = 0
        self.count = 0

    @property
    def view(self) -> View:
        return View(len(self.held), CAPACITY, self.cursor, self.ring, torch.device("cpu"))

    def write(self, rows: int) -> None:
        placement = Run(self.cursor, rows, CAPACITY)
        for slot in placement.slots().tolist():
            self.held[slot : slot + 1] = [self.count]
            self.count += 1
        self.cursor = (self.cursor + rows) % CAPACITY
        self.ring.record(placement)
        self.sampler.record(placement)

    def draw(self, rows: int, generator: torch.Generator | None = None) -> tuple[Draw, list[int]]:
        draw = self.sampler.draw(self.view, rows, generator)
        return draw, [self.held[slot] for slot in draw.slots.tolist()]

    def move(self, other: QueueSampler | LimitedSampler) -> None:
        """Let another sampler go on from the state of this one."""
        state = self.sampler.state_dict()
        other.check_state(state, len(self.held))
        other.load_state_dict(state)
        self.sampler = other


CALLS = st.lists(
    st.tuples(st.sampled_from(["write", "draw", "deliver", "undo", "load", "resume"]), st.integers(0, 6)), max_size=60
)


@examples(1)
@given(CALLS)
def test_a_queue_gives_every_row_once_and_in_order(calls: list[tuple[str, int]]) -> None:
    ring = Held(QueueSampler())
    waiting: list[int] = []
    under_way: list[tuple[Draw, list[int]]] = []
    delivered: list[int] = []
    for call, number in calls:
        oldest = min([*waiting, *(row for _, rows in under_way for row in rows)], default=ring.count)
        room = CAPACITY - (ring.count - oldest)
        assert ring.sampler.room(ring.view) == room
        assert ring.sampler.rows_left == ring.sampler.draws_left == len(waiting)
        if call == "write" and 0 < number <= room:
            waiting += range(ring.count, ring.count + number)
            ring.write(number)
        elif call == "draw" and number:
            if number > len(waiting):
                with pytest.raises(EmptyBufferError, match=rf"holds {len(waiting)} row\(s\), {number} were asked"):
                    ring.draw(number)
                continue
            draw, rows = ring.draw(number)
            assert rows == waiting[:number]
            waiting = waiting[number:]
            under_way.append((draw, rows))
        elif call in {"deliver", "undo"} and under_way:
            draw, rows = under_way.pop(number % len(under_way))
            if call == "deliver":
                ring.sampler.deliver(draw)
                delivered += rows
            else:
                ring.sampler.undo(draw, ring.view)
                waiting = sorted(waiting + rows)
        elif call == "load":
            ring.move(QueueSampler())
        elif call == "resume":
            kept, lost = under_way[:number], under_way[number:]
            ring.sampler.resume([draw for draw, _ in kept], ring.view)
            waiting = sorted(waiting + [row for _, rows in lost for row in rows])
            under_way = kept
    assert len(set(delivered)) == len(delivered)
    assert sorted(delivered + waiting + [row for _, rows in under_way for row in rows]) == list(range(ring.count))


@examples(1)
@given(CALLS, st.integers(1, 4))
def test_a_row_retires_after_exactly_so_many_draws(calls: list[tuple[str, int]], most: int) -> None:
    ring, generator = Held(LimitedSampler(most)), torch.Generator().manual_seed(1)
    uses: Counter[int] = Counter()
    draws: list[tuple[Draw, list[int]]] = []
    for call, number in calls:
        left = {row: most - uses[row] for row in ring.held}
        assert ring.sampler.rows_left == sum(count > 0 for count in left.values())
        assert ring.sampler.draws_left == sum(left.values())
        if call == "write" and number:
            ring.write(number)
        elif call == "draw" and number and ring.held:
            if number > sum(left.values()):
                with pytest.raises(EmptyBufferError, match=rf"can be drawn {sum(left.values())} more time"):
                    ring.draw(number)
                continue
            draw, rows = ring.draw(number, generator)
            uses.update(rows)
            draws.append((draw, rows))
        elif call == "undo" and draws:
            draw, rows = draws.pop(number % len(draws))
            ring.sampler.undo(draw, ring.view)
            uses.subtract(row for row in rows if row in ring.held)
        elif call == "load":
            ring.move(LimitedSampler(most))
        assert max(uses.values(), default=0) <= most


def test_limited_batches_follow_the_law_of_single_draws() -> None:
    # of 3 rows with 2 uses each, 4 draws: compare the counts of the first row with all sequences, weighed exactly
    expected: Counter[int] = Counter()

    def go(left: tuple[int, ...], drawn: int, first: int, chance: float) -> None:
        if drawn == 4:
            expected[first] += chance  # type: ignore[assignment]
            return
        alive = [i for i, n in enumerate(left) if n]
        for i in alive:
            rest = tuple(n - (j == i) for j, n in enumerate(left))
            go(rest, drawn + 1, first + (i == 0), chance / len(alive))

    go((2, 2, 2), 0, 0, 1.0)
    generator, seen = torch.Generator().manual_seed(4), Counter[int]()
    for _ in range(1500):
        ring = Held(LimitedSampler(2))
        ring.write(3)
        seen[ring.draw(4, generator)[1].count(0)] += 1
    assert 1e-4 < p_value([seen[i] for i in range(3)], [expected[i] for i in range(3)]) < 1 - 1e-4


def test_states_of_other_rows_or_options_are_refused() -> None:
    ring, queue = Held(LimitedSampler(2)), Held(QueueSampler())
    for each in (ring, queue):
        each.write(3)
    ring.draw(4)
    state, saved = ring.sampler.state_dict(), queue.sampler.state_dict()
    wrong: list[tuple[Any, dict[str, Any], int, str]] = [
        (LimitedSampler(3), state, 3, r"max_times_sampled=2\), this one has 3"),
        (LimitedSampler(2), state, 4, "not those of 4 rows"),
        (LimitedSampler(2), {**state, "order": torch.tensor([0, 0])}, 3, "damaged"),
        (QueueSampler(), {**saved, "waiting": 4}, 3, "queue's state is damaged"),
        (QueueSampler(), {**saved, "returned": torch.tensor([3])}, 3, "queue's state is damaged"),
        (QueueSampler(), {**saved, "sizes": torch.tensor([1])}, 3, "queue's state is damaged"),
    ]
    for sampler, given_, rows, words in wrong:
        with pytest.raises(CheckpointError, match=words):
            sampler.check_state(given_, rows)
    with pytest.raises(OptionError, match="at least 1, got 0"):
        LimitedSampler(0)
    with pytest.raises(KindError, match=r"must be an integer, got 1\.5"):
        LimitedSampler(1.5)  # type: ignore[arg-type]


def test_rows_that_were_there_are_limited_and_consumed_ones_return_if_they_are_marked_as_updated() -> None:
    limited = ReplayBuffer(storage=TensorStorage(torch.arange(4)), sampler=LimitedSampler(1), batch_size=4)
    assert sorted(limited.sample().tolist()) == [0, 1, 2, 3]
    rb = ReplayBuffer(storage=LazyTensorStorage(6), consume_after_n_samples=1, batch_size=6)
    rb.extend(torch.arange(6))
    rb.sample()
    assert len(rb) == rb.stats()["size"] == rb.stats().rows == 0
    rb.mark_update(torch.tensor([4, 1]))
    assert len(rb) == rb.stats()["size"] == 2
    slots = rb.extend(torch.arange(10, 14))  # into the slots of rows that are still out
    assert sorted(slots.tolist()) == [0, 2, 3, 5]
    assert sorted(rb.sample().tolist()) == [1, 4, 10, 11, 12, 13]
    assert len(rb) == 0
