"""Snapshots: their distribution, the number of calls of a batch, and what is seen of later writes; without Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, QueueSampler, ReplayBuffer
from ostinato.distributed.snapshot import MANY_SHARDS, Snapshot, read_age
from ostinato.errors import EmptyBufferError

from ..stats.chi_square import p_value
from .local_shards import LocalShards, sampler_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ostinato import Sampler
    from ostinato.distributed.sampling import ShardSampler

LONG_S = 1e6


def fleet(sizes: Iterable[int], sampler: Callable[[], Sampler] | None = None, capacity: int = 400) -> LocalShards:
    """Shards of so many rows; rows hold their number among all rows."""
    buffers, first = [], 0
    for i, rows in enumerate(sizes):
        made = None if sampler is None else sampler()
        generator = torch.Generator().manual_seed(i)
        rb = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=made, generator=generator)
        if rows:
            rb.extend({"x": torch.arange(first, first + rows)})
        buffers.append(rb)
        first += rows
    return LocalShards(buffers)


def prioritized(beta: float = 0.5) -> PrioritizedSampler:
    return PrioritizedSampler(400, alpha=1.0, beta=beta, eps=0.0)


def batches(sampler: ShardSampler, number: int, size: int, snapshot: Snapshot | None = None) -> list[Any]:
    return [sampler.draw(size, sampler.uniforms(size), None, None, snapshot) for _ in range(number)]


def rows_of(found: list[Any]) -> torch.Tensor:
    return torch.cat([batch["x"] for batch, _ in found])


# -- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age_s", "ahead"), [(0.0, True), (LONG_S, False)])
def test_uniform_draws_of_unequal_shards(age_s, ahead):
    """They are mixed over the positions of a batch."""
    shards = fleet([1, 0, 7, 20, 100, 0])
    found = rows_of(batches(sampler_of(shards, age_s), 500, 16, Snapshot() if ahead else None))
    for part in (found, found.view(500, 16)[:, ::2].flatten()):
        assert p_value(torch.bincount(part, minlength=128).tolist()) > 1e-4


# -- calls ------------------------------------------------------------------------------------------------------------


def calls_of(shards: LocalShards, number: int, draw: Callable[[], Any]) -> float:
    """Return the calls of each of `number` batches, after a first one."""
    draw()
    shards.calls.clear()
    for _ in range(number):
        draw()
    return sum(shards.calls.values()) / number


def test_a_batch_calls_only_the_shards_that_are_drawn():
    shards = fleet([20] * 100)
    sampler = sampler_of(shards, LONG_S)
    # 100 * (1 - 0.99 ** 32) = 27.5 shards have rows in a batch of 32; every 32nd batch calls all of them
    assert calls_of(shards, 128, lambda: batches(sampler, 1, 32)) < 27.5 + 100 / 32 + 2
    fresh = sampler_of(shards, 0.0)
    assert calls_of(shards, 16, lambda: batches(fresh, 1, 32)) > 100


def test_few_shards_have_offers_of_their_own_for_each_batch():
    assert [read_age(*given) for given in ((None, MANY_SHARDS - 1), (None, MANY_SHARDS), (5, 2))] == [0.0, 1.0, 5.0]


# -- what is seen of writes -------------------------------------------------------------------------------------------


def test_a_learner_that_changes_most_shards_gets_offers_of_one_batch():
    """Draws for later batches would be made in vain; as soon as it changes fewer, offers are long again."""
    shards = fleet([10] * 20, prioritized)
    sampler = sampler_of(shards, LONG_S)
    for number in range(6):
        batches(sampler, 1, 64)
        assert {rows for _, _, rows in shards.offered} == {64 * 32 if number in {0, 5} else 64}
        shards.offered.clear()
        if number < 4:
            shards.changes.add(range(20))
    shards.calls.clear()
    batches(sampler, 10, 64)
    assert shards.calls["offer"] == 0


# -- rows that draws use up -------------------------------------------------------------------------------------------


def test_a_queue_calls_the_shards_that_have_rows():
    """Another reader takes rows, too: nothing is lost, and nothing is read twice."""
    shards = fleet([300, 0, 200, 0, 100] + [0] * 95, QueueSampler)
    reader = sampler_of(shards, LONG_S, consuming=True)
    found = rows_of(batches(reader, 10, 20)).tolist()
    assert sum(shards.calls.values()) <= 100 + 3 * 10
    found += [row for i in (0, 2) for row in shards.buffers[i].sample(90)["x"].tolist()]
    found += rows_of(batches(reader, 11, 20)).tolist()
    with pytest.raises(EmptyBufferError):
        batches(reader, 1, 20)
    assert sorted(found) == list(range(600))
    shards.buffers[50].extend({"x": torch.arange(600, 620)})
    assert sorted(rows_of(batches(reader, 1, 20)).tolist()) == list(range(600, 620))
