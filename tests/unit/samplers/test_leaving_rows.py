"""Rows that are drawn so many times, and may leave then; `tests/stateful` holds them against a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from ostinato import (
    ConsumingSampler,
    LimitedSampler,
    QueueSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorStorage,
)
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError

from ...registry import ring, seeded
from ...stats.chi_square import p_value
from ..buffers.refusals import refuses

CAPACITY = 6


def make(most: int = 1, batch_size: int = 3, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    options = {"consume_after_n_samples": most, "batch_size": batch_size, "generator": seeded(3), **options}
    return ring(capacity, **options)


def test_draws_are_uniform_among_the_rows_left():
    pairs: Counter[tuple[int, ...]] = Counter()
    buffer = make(batch_size=2, capacity=40)
    sampler = buffer.sampler
    for _ in range(500):  # 2 of 20 are drawn one by one, not from an order of all
        buffer.set_sampler(sampler)
        buffer.empty()
        buffer.extend(torch.arange(20))
        pairs[tuple(int(row) // 5 for row in buffer.sample())] += 1
    same, other = 5 * 4 * 2, 25 * 2
    expected = {(a, b): same if a == b else other for a in range(4) for b in range(4)}
    assert 1e-4 < p_value([pairs[pair] for pair in expected], list(expected.values())) < 1 - 1e-4


def test_iteration_ends_with_the_last_row():
    buffer = make(2, batch_size=4)
    buffer.extend(torch.arange(6))
    batches = [batch.tolist() for batch in buffer]
    assert Counter(row for batch in batches for row in batch) == dict.fromkeys(range(6), 2)
    assert len(buffer) == 0
    assert buffer[:].tolist() == list(range(6))  # rows that have left can be read
    with pytest.raises(EmptyBufferError):
        next(iter(buffer))
    buffer.extend(torch.arange(6, 8))
    assert sorted(row for batch in buffer for row in batch.tolist()) == [6, 6, 7, 7]


def test_a_batch_that_is_being_made_keeps_its_slots():
    written: list[int] = []

    def write(batch: Any) -> Any:
        written.extend(buffer.extend(torch.tensor([7])).tolist())
        return batch

    buffer = make(batch_size=2)
    buffer.extend(torch.arange(4))
    buffer.append_transform(write)
    batch, info = buffer.sample(return_info=True)
    assert written == [4]
    assert batch.tolist() == info["index"].tolist()
    assert buffer.extend(torch.tensor([8, 9])).tolist() == info["index"].tolist()


def test_damaged_states_raise():
    buffer = make()
    buffer.extend(torch.arange(6))
    buffer.sample()
    whole = buffer.sampler.state_dict()
    for damage in ({"free": whole["free"][[0, 0]]}, {"free": whole["eligible"]}, {"max_sample_count": 0}):
        state = buffer.state_dict()
        state["sampler"]["state"].update(damage)
        with pytest.raises(CheckpointError):
            make().load_state_dict(state)


def test_what_it_does_not_go_with():
    refuses(
        {
            OptionError: {
                "Prefetching is not supported when consume_after_n_samples is set": lambda: make(prefetch=2),
                "consume_after_n_samples must be below": lambda: make(2**31),
                "must be a positive integer, got 0": lambda: make(0),
                "only supports the default RandomSampler": lambda: make(sampler=SamplerWithoutReplacement()),
                "conflicts with the provided ConsumingSampler": lambda: make(sampler=ConsumingSampler(2)),
                "uses its rows up": lambda: ReplayBufferEnsemble(make(), make()),
                "Prefetching": lambda: ring(4, batch_size=2, prefetch=1).set_sampler(ConsumingSampler()),
            },
            KindError: {
                "must be a positive integer, got True": lambda: make(True),
            },
        }
    )


# -- queues and limited draws ----------------------------------------------------------------------------------


def filled(sampler: Any, **options: Any) -> ReplayBuffer:
    rb = ring(CAPACITY, sampler=sampler, **options)
    rb.extend(torch.arange(3))
    return rb


def test_draws_of_rows_that_were_replaced_are_not_given_back():
    def fail(_: Any) -> Any:
        rb.extend(torch.arange(3, 3 + CAPACITY - 1))
        raise ValueError

    rb = filled(LimitedSampler(2), transform=fail)
    with pytest.raises(ValueError):
        rb.sample(6)
    sampler: Any = rb.sampler
    assert (sampler.rows_left, sampler.draws_left) == (CAPACITY, 2 * CAPACITY)


def test_limited_batches_follow_the_law_of_single_draws():
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
    generator, seen = seeded(4), Counter[int]()
    for _ in range(1500):
        seen[filled(LimitedSampler(2), generator=generator).sample(4).tolist().count(0)] += 1
    assert 1e-4 < p_value([seen[i] for i in range(3)], [expected[i] for i in range(3)]) < 1 - 1e-4


def test_states_of_other_rows_or_options_are_refused():
    limited, queue = filled(LimitedSampler(2)), filled(QueueSampler())
    limited.sample(4)
    state, saved = limited.sampler.state_dict(), queue.sampler.state_dict()
    wrong: list[Any] = [
        (LimitedSampler(3), state, 3, r"max_times_sampled=2\), this one has 3"),
        (LimitedSampler(2), state, 4, "not those of 4 rows"),
        (LimitedSampler(2), {**state, "eligible": torch.tensor([0, 0])}, 3, "damaged"),
        (QueueSampler(), {**saved, "waiting": torch.tensor([0, 0])}, 3, "queue's state is damaged"),
        (QueueSampler(), {**saved, "drawn": torch.tensor([3])}, 3, "queue's state is damaged"),
        (QueueSampler(), {**saved, "sizes": torch.tensor([1])}, 3, "queue's state is damaged"),
    ]
    for sampler, given_, rows, words in wrong:
        with pytest.raises(CheckpointError, match=words):
            sampler.check_state(given_, rows)
    with pytest.raises(OptionError, match="a positive integer, got 0"):
        LimitedSampler(0)


def test_rows_that_were_there_are_limited_and_consumed_ones_return_if_they_are_marked_as_updated():
    limited = ReplayBuffer(storage=TensorStorage(torch.arange(4)), sampler=LimitedSampler(1), batch_size=4)
    assert sorted(limited.sample().tolist()) == [0, 1, 2, 3]
    rb = ring(6, consume_after_n_samples=1, batch_size=6)
    rb.extend(torch.arange(6))
    rb.sample()
    assert len(rb) == rb.stats()["size"] == rb.stats().rows == 0
    rb.mark_update(torch.tensor([4, 1]))
    assert len(rb) == rb.stats()["size"] == 2
    slots = rb.extend(torch.arange(10, 14))  # into the slots of rows that are still out
    assert sorted(slots.tolist()) == [0, 2, 3, 5]
    assert sorted(rb.sample().tolist()) == [1, 4, 10, 11, 12, 13]
    assert len(rb) == 0
