"""Snapshots: their distribution, the number of calls of a batch, and what is seen of later writes; without Ray."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, LimitedSampler, PrioritizedSampler, QueueSampler, ReplayBuffer
from ostinato.distributed.batch_stream import ShardPrefetcher
from ostinato.distributed.snapshot import MANY_SHARDS, ChangeCounts, Snapshot, batches_per_round, read_age
from ostinato.errors import EmptyBufferError, OptionError, PriorityError

from ..stats.chi_square import p_value
from .handles import in_threads
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
def test_uniform_draws_of_unequal_shards(age_s: float, ahead: bool) -> None:
    """They are mixed over the positions of a batch."""
    shards = fleet([1, 0, 7, 20, 100, 0])
    found = rows_of(batches(sampler_of(shards, age_s), 500, 16, Snapshot() if ahead else None))
    for part in (found, found.view(500, 16)[:, ::2].flatten()):
        assert p_value(torch.bincount(part, minlength=128).tolist()) > 1e-4


def test_priorities_of_the_snapshot_decide_while_others_change_them() -> None:
    """Between the snapshot and its last batch another process gives every row another priority."""
    sizes = [3, 0, 20, 90]
    shards = fleet(sizes, prioritized)
    values = [torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.05 for n in sizes]
    values[2][:5] = 0.0
    sampler, counts = sampler_of(shards, LONG_S), torch.zeros(sum(sizes), dtype=torch.int64)
    whole = torch.cat(values)
    for turn in range(16):
        for rb, value in zip(shards.buffers, values, strict=True):
            if len(value):
                rb.update_priority(torch.arange(len(value)), value)
        sampler.forget()
        for number in range(32):
            batch, info = sampler.draw(16, sampler.uniforms(16), None)
            expected = (whole[batch["x"]] / whole[whole > 0].min()) ** -0.5
            torch.testing.assert_close(info["priority_weight"], expected.float(), rtol=1e-4, atol=0)
            counts += torch.bincount(batch["x"], minlength=sum(sizes))
            changed = shards.buffers[(turn + number) % 3 + 1]
            if len(changed):
                changed.update_priority(torch.arange(len(changed)), torch.rand(len(changed)) * 9)
    drawn = whole > 0
    assert int(counts[~drawn].sum()) == 0
    assert p_value(counts[drawn].tolist(), whole[drawn].tolist()) > 1e-4


def test_renewals_do_not_depend_on_the_choices() -> None:
    """Another seed chooses other shards, and offers are renewed at the same batches."""
    patterns = []
    for seed in (1, 2):
        shards = fleet([1, 300])
        batches(sampler_of(shards, LONG_S, seed), 200, 16)
        patterns.append([(number, method) for number, (method, _) in enumerate(shards.called) if method != "take"])
    assert patterns[0] == patterns[1]
    assert len(patterns[0]) == 1 + 200 // 32


# -- draws are used once ----------------------------------------------------------------------------------------------


def test_an_offer_is_taken_in_parts() -> None:
    """The parts together are one sample, and the offer ends with its last draw or the next offer."""
    made = partial(fleet, [50], prioritized)
    portion, local = made().portions[0], made().buffers[0]
    offer = portion.offer(100)
    parts = [portion.take(offer.number, rows, keep=True) for rows in (30, 1, 69)]
    batch, info = local.sample(100, return_info=True)
    assert torch.equal(torch.cat([part[0]["x"] for part in parts if part]), batch["x"])
    for key in ("index", "priority_weight", "index_generation"):
        assert torch.equal(torch.cat([part[1][key] for part in parts if part]), info[key])
    assert portion.take(offer.number, 1, keep=True) is None
    short = portion.offer(8)
    assert portion.take(short.number, 5, keep=True) is not None
    assert portion.take(short.number, 4, keep=True) is None
    first = portion.offer(8)
    portion.offer(8, drop=first.number)
    assert portion.take(first.number, 1) is None
    large, last = portion.offer(1 << 19), portion.offer(1 << 19)  # as of readers that have died
    portion.offer(1)
    assert portion.take(large.number, 1) is None, "they take bounded memory"
    assert portion.take(last.number, 1) is not None


def test_no_offer_is_used_more_than_its_draws() -> None:
    shards = fleet([30, 1, 200])
    sampler = sampler_of(shards, 0.02)

    def read() -> list[int]:
        return [sampler.draw(8, sampler.uniforms(8), None)[0]["x"].shape[0] for _ in range(100)]

    assert in_threads(*[read] * 4) == [[8] * 100] * 4
    offered = {(shard, offer.number): rows for shard, offer, rows in shards.offered}
    assert all(taken <= offered[key] for key, taken in shards.taken.items())


# -- calls ------------------------------------------------------------------------------------------------------------


def calls_of(shards: LocalShards, number: int, draw: Callable[[], Any]) -> float:
    """Return the calls of each of `number` batches, after a first one."""
    draw()
    shards.calls.clear()
    for _ in range(number):
        draw()
    return sum(shards.calls.values()) / number


def test_a_batch_calls_only_the_shards_that_are_drawn() -> None:
    shards = fleet([20] * 100)
    sampler = sampler_of(shards, LONG_S)
    # 100 * (1 - 0.99 ** 32) = 27.5 shards have rows in a batch of 32; every 32nd batch calls all of them
    assert calls_of(shards, 128, lambda: batches(sampler, 1, 32)) < 27.5 + 100 / 32 + 2
    fresh = sampler_of(shards, 0.0)
    assert calls_of(shards, 16, lambda: batches(fresh, 1, 32)) > 100


@pytest.mark.parametrize("age_s", [0.0, LONG_S])
def test_prefetch_draws_many_batches_with_each_call(age_s: float) -> None:
    shards = fleet([20] * 100)
    prefetcher = ShardPrefetcher(sampler_of(shards, age_s), 64)
    assert calls_of(shards, 256, lambda: prefetcher.next(256, None, None)) < 8
    prefetcher.drop()


def test_few_shards_have_offers_of_their_own_for_each_batch() -> None:
    assert read_age(None, MANY_SHARDS - 1) == 0.0
    assert read_age(None, MANY_SHARDS) == 1.0
    assert read_age(5, 2) == 5.0
    assert [batches_per_round(k, 2) for k in (0, 1, 8, 64)] == [1, 1, 4, 8]
    assert [batches_per_round(k, 100) for k in (0, 1, 8, 64, 1000)] == [1, 1, 4, 32, 32]
    for bad in (-1.0, float("nan"), True, "1"):
        with pytest.raises(OptionError, match="snapshot_age_s must be a number of seconds"):
            read_age(bad, 2)


# -- what is seen of writes -------------------------------------------------------------------------------------------


def test_a_process_sees_its_own_writes_at_once_and_those_of_others_later() -> None:
    shards = fleet([10] * 20)
    sampler = sampler_of(shards, LONG_S)
    batches(sampler, 1, 64)
    shards.buffers[3].extend({"x": torch.full((300,), 1000)})  # by another process
    assert int(rows_of(batches(sampler, 10, 64)).max()) < 1000
    shards.calls.clear()
    shards.write(4, {"x": torch.full((300,), 2000)})
    found = rows_of(batches(sampler, 4, 64))
    assert shards.calls["offer"] == 1
    assert 0.4 < (found == 2000).float().mean() < 0.8
    assert 1000 not in found
    old = sampler_of(shards, 0.05)
    batches(old, 1, 64)
    shards.buffers[5].extend({"x": torch.full((300,), 3000)})
    time.sleep(0.06)
    assert 3000 in rows_of(batches(old, 1, 64))


def test_a_learner_that_changes_most_shards_gets_offers_of_one_batch() -> None:
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


def test_handles_of_one_process_share_what_they_have_written() -> None:
    actors = [object(), object()]
    first, other = ChangeCounts.of(actors), ChangeCounts.of([object(), object()])
    assert ChangeCounts.of(list(actors)) is first
    assert other is not first
    first.record("call", {1: ("update_priority", 0, 1)})
    first.record("call", {0: ("__len__",)})
    first.record("take", {0: (1, 2)})
    first.record("load", {0: ("path",)})
    assert [first[0], first[1]] == [1, 1]


def test_rows_of_an_empty_fleet_are_seen_as_soon_as_they_are_written() -> None:
    shards = fleet([0] * 20)
    sampler = sampler_of(shards, LONG_S)
    with pytest.raises(EmptyBufferError, match="20 shards that answer"):
        batches(sampler, 1, 4)
    shards.buffers[7].extend({"x": torch.arange(5)})
    assert int(rows_of(batches(sampler, 1, 4)).max()) < 5
    ranked = fleet([5, 5], prioritized)
    for rb in ranked.buffers:
        rb.update_priority(torch.arange(5), torch.zeros(5))
    with pytest.raises(PriorityError, match="none of the 10 rows"):
        batches(sampler_of(ranked, LONG_S), 1, 4)


def test_shards_that_are_missing_or_emptied_are_left_out() -> None:
    shards = fleet([50] * 20)
    sampler = sampler_of(shards, LONG_S)
    batches(sampler, 3, 64)
    shards.gone = {0, 1, 2}
    shards.buffers[3].empty()  # by another process
    found = rows_of(batches(sampler, 40, 64))
    assert int(found.min()) >= 200
    shards.gone = set()
    assert int(rows_of(batches(sampler, 40, 64)).min()) < 150


# -- rows that draws use up -------------------------------------------------------------------------------------------


def test_a_queue_calls_the_shards_that_have_rows() -> None:
    """Another reader takes rows, too: nothing is lost, and nothing is read twice."""
    shards = fleet([300, 0, 200, 0, 100] + [0] * 95, QueueSampler)
    reader = sampler_of(shards, LONG_S, consuming=True)
    found = rows_of(batches(reader, 10, 20)).tolist()
    assert sum(shards.calls.values()) <= 100 + 3 * 10
    found += [row for i in (0, 2) for row in shards.buffers[i].sample(90)["x"].tolist()]
    found += rows_of(batches(reader, 11, 20)).tolist()
    with pytest.raises(EmptyBufferError, match="20 row"):
        batches(reader, 1, 20)
    assert sorted(found) == list(range(600))
    shards.buffers[50].extend({"x": torch.arange(600, 620)})
    assert sorted(rows_of(batches(reader, 1, 20)).tolist()) == list(range(600, 620))


def test_a_queue_sees_what_its_process_writes() -> None:
    shards = fleet([100, 0, 0], partial(LimitedSampler, 100))
    reader = sampler_of(shards, LONG_S, consuming=True)
    batches(reader, 1, 10)
    shards.write(1, {"x": torch.full((300,), 1000)})
    assert 1000 in rows_of(batches(reader, 2, 64))
