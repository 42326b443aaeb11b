"""Snapshots: their distribution, the number of calls of a batch, and what is seen of later writes; without Ray."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, LimitedSampler, PrioritizedSampler, QueueSampler, ReplayBuffer
from ostinato.buffers.portion import Portion
from ostinato.distributed.batch_stream import ShardPrefetcher
from ostinato.distributed.routing import split_index
from ostinato.distributed.snapshot import MANY_SHARDS, ChangeCounts, Snapshot, batches_per_round, read_age
from ostinato.errors import EmptyBufferError, OptionError, PriorityError

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


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("age_s", [0.0, LONG_S])
def test_uniform_draws_of_unequal_shards(age_s: float, ahead: bool) -> None:
    shards = fleet([1, 0, 7, 40, 200, 0])
    found = batches(sampler_of(shards, age_s), 1200, 16, Snapshot() if ahead else None)
    assert p_value(torch.bincount(rows_of(found), minlength=248).tolist()) > 1e-4


def test_priorities_of_the_snapshot_decide_while_others_change_them() -> None:
    """Between the snapshot and its last batch another process gives every row another priority."""
    sizes = [3, 0, 20, 90]
    shards = fleet(sizes, prioritized)
    values = [torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.05 for n in sizes]
    values[2][:5] = 0.0
    sampler, counts = sampler_of(shards, LONG_S), torch.zeros(sum(sizes), dtype=torch.int64)
    whole = torch.cat(values)
    for turn in range(40):
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


def test_each_batch_follows_the_masses_of_its_snapshot_while_others_write() -> None:
    """The share of each batch that a shard gets, against its mass when the offer was made."""
    shards = fleet([5, 5], capacity=40_000)
    sampler, excess, variance = sampler_of(shards, LONG_S), 0.0, 0.0
    for number in range(640):
        if number % 3 == 0:  # in bursts that do not keep step with snapshots of 32 batches
            shards.buffers[number // 100 % 2].extend({"x": torch.zeros(number % 40 + 1, dtype=torch.int64)})
        _, info = sampler.draw(8, sampler.uniforms(8), None)
        held = {shard: offer.mass for shard, offer, _ in shards.offered[-2:]}
        if sampler._snapshot is not None and sampler._snapshot._left == 32 * 8:  # the next offers came with this batch
            held = {shard: offer.mass for shard, offer, _ in shards.offered[-4:-2]}
        share = held[0] / (held[0] + held[1])
        excess += float((split_index(info["index"])[0] == 0).sum()) - 8 * share
        variance += 8 * share * (1 - share)
    assert abs(excess) < 4.5 * variance**0.5


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
    """The parts together are one sample, and the offer ends with its last draw."""
    made = partial(fleet, [50], prioritized)
    portion, local = made().portions[0], made().buffers[0]
    offer = portion.offer(100)
    parts = [portion.take(offer.number, rows, keep=True) for rows in (30, 1, 69)]
    batch, info = local.sample(100, return_info=True)
    assert torch.equal(torch.cat([part[0]["x"] for part in parts if part]), batch["x"])
    for key in ("index", "priority_weight", "index_generation"):
        assert torch.equal(torch.cat([part[1][key] for part in parts if part]), info[key])
    assert portion.take(offer.number, 1, keep=True) is None


def test_an_offer_that_is_too_short_gives_no_rows() -> None:
    portion = fleet([50]).portions[0]
    offer = portion.offer(8)
    assert portion.take(offer.number, 5, keep=True) is not None
    assert portion.take(offer.number, 4, keep=True) is None


def test_the_next_offer_replaces_the_last_one() -> None:
    portion = fleet([50]).portions[0]
    first = portion.offer(8)
    portion.offer(8, drop=first.number)
    assert portion.take(first.number, 1) is None


def test_offers_of_dead_readers_take_bounded_memory() -> None:
    portion = Portion(fleet([50]).buffers[0])
    first = portion.offer(1 << 19)
    second = portion.offer(1 << 19)
    portion.offer(1)
    assert portion.take(first.number, 1) is None
    assert portion.take(second.number, 1) is not None


@pytest.mark.parametrize("threads", [1, 4])
def test_no_offer_is_used_more_than_its_draws(threads: int) -> None:
    shards = fleet([30, 1, 200])
    sampler = sampler_of(shards, 0.02)
    uniforms = [[sampler.uniforms(8) for _ in range(150)] for _ in range(threads)]
    found: list[int] = []

    def read(mine: list[torch.Tensor]) -> None:
        found.extend(sampler.draw(8, each, None)[0]["x"].shape[0] for each in mine)

    readers = [threading.Thread(target=read, args=(mine,)) for mine in uniforms]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == [8] * 150 * threads
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


def test_writes_of_others_are_seen_when_the_snapshot_is_old() -> None:
    shards = fleet([10] * 4)
    sampler = sampler_of(shards, 0.05)
    batches(sampler, 1, 64)
    shards.buffers[3].extend({"x": torch.full((300,), 1000)})
    time.sleep(0.06)
    assert 1000 in rows_of(batches(sampler, 1, 64))


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


@pytest.mark.parametrize("sampler", [QueueSampler, partial(LimitedSampler, 1)])
def test_a_queue_calls_the_shards_that_have_rows(sampler: Callable[[], Sampler]) -> None:
    """Another reader takes rows, too: nothing is lost, and nothing is read twice."""
    shards = fleet([300, 0, 200, 0, 100] + [0] * 95, sampler)
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
