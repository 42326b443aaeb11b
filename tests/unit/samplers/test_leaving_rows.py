"""Rows that leave the buffer after so many draws; `tests/stateful` holds them against a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from ostinato import (
    ConsumingSampler,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
)
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError

from ...stats.chi_square import p_value
from ..buffers.refusals import raises

CAPACITY = 6


def make(most: int = 1, batch_size: int = 3, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(3)
    storage = LazyTensorStorage(capacity)
    return ReplayBuffer(
        storage=storage, consume_after_n_samples=most, batch_size=batch_size, generator=generator, **options
    )


def test_draws_are_uniform_among_the_rows_left() -> None:
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


def test_iteration_ends_with_the_last_row() -> None:
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


def test_a_batch_that_is_being_made_keeps_its_slots() -> None:
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


def test_damaged_states_raise() -> None:
    buffer = make()
    buffer.extend(torch.arange(6))
    buffer.sample()
    whole = buffer.sampler.state_dict()
    for damage in ({"free": whole["free"][[0, 0]]}, {"free": whole["eligible"]}, {"max_sample_count": 0}):
        state = buffer.state_dict()
        state["sampler"]["state"].update(damage)
        with pytest.raises(CheckpointError):
            make().load_state_dict(state)


def test_what_it_does_not_go_with() -> None:
    raises(
        (lambda: make(prefetch=2), OptionError, "Prefetching is not supported when consume_after_n_samples is set"),
        (lambda: make(2**31), OptionError, "consume_after_n_samples must be below"),
        (lambda: make(0), OptionError, "must be a positive integer, got 0"),
        (lambda: make(True), KindError, "must be a positive integer, got True"),
        (lambda: make(sampler=SamplerWithoutReplacement()), OptionError, "only supports the default RandomSampler"),
        (lambda: make(sampler=ConsumingSampler(2)), OptionError, "conflicts with the provided ConsumingSampler"),
        (lambda: ReplayBufferEnsemble(make(), make()), OptionError, "uses its rows up"),
        (
            lambda: ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2, prefetch=1).set_sampler(
                ConsumingSampler()
            ),
            OptionError,
            "Prefetching",
        ),
    )
