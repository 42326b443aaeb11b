"""Shards under one rate limiter, shards whose rows are consumed, and full shards: who waits, and for how long."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    QueueSampler,
    RateLimiter,
    ShardedReplayBuffer,
)
from ostinato.distributed.deadlines import GRACE_S
from ostinato.distributed.routing import split_index
from ostinato.errors import NoAnswerError, NoPermitError, OptionError, WaitTimeoutError

from ..stats.chi_square import p_value
from ..threads import together
from .handles import LONG_S, kill, outcome, stopped, until

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")


def rows(n: int, first: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + n)}


def totals(cluster: Any, rb: ShardedReplayBuffer) -> tuple[int, int]:
    """Return the rows written and drawn, as the limiter counts them."""
    found: tuple[int, int] = cluster.get(rb._fleet.actor.totals.remote())
    return found


def write(rb: ShardedReplayBuffer, shard: int, calls: int, first: int = 0) -> None:
    """Write 8 rows at a time, as fast as the limiter allows."""
    handle = rb.pinned(shard)
    for call in range(calls):
        handle.extend(rows(8, first + call * 8), timeout_s=LONG_S)


class Writer:
    """A process that writes until it is killed."""

    def write(self, rb: ShardedReplayBuffer) -> None:
        write(rb, 0, 1000, 100_000)


def kill_a_writer(cluster: Any, rb: ShardedReplayBuffer) -> None:
    """Let a process write, kill it while it waits, and wait until its call has ended."""
    doomed = cluster.remote(Writer).options(num_cpus=0, max_concurrency=2).remote()
    doomed.write.remote(rb)
    time.sleep(3.0)  # it waits by now
    kill(cluster, doomed)
    time.sleep(2.0)


# -- the limiter ------------------------------------------------------------------------------------------------------


def test_shards_give_as_many_rows_as_the_limiter_allows_and_errors_say_why(cluster, remade):
    rb = remade(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=40, min_size_to_sample=4), sticky=False)
    assert (rb.can_sample(), rb.can_sample(1), rb.can_insert(40), rb.can_insert(41)) == (False, False, True, False)
    with pytest.raises(WaitTimeoutError, match=r"0 row\(s\) can be drawn, min_size_to_sample is 4"):
        rb.sample(timeout_s=0.05)
    rb.extend(rows(3), timeout_s=LONG_S)
    assert not rb.can_sample(1)  # below min_size_to_sample
    assert rb.add({"x": torch.tensor(3)}, timeout_s=5.0) is not None
    rb.extend(rows(2), timeout_s=LONG_S)
    assert (rb.can_sample(6), rb.can_sample(7), rb.can_insert(34), rb.can_insert(35)) == (True, False, True, False)
    with pytest.raises(WaitTimeoutError, match=r"1 more row\(s\) must be drawn before 35 can be written; 6 row"):
        rb.extend(rows(35), timeout_s=0.1)
    batch, info = rb.sample(timeout_s=0.1, min_batch=2, return_info=True)
    assert len(batch["x"]) == len(info["index"]) == 6
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.0, min_batch=1)
    for asked, said in ((17, r"min_batch must be an integer in \[1, 16\]"), (0, "got 0")):
        with pytest.raises(OptionError, match=said):
            rb.sample(timeout_s=0.0, min_batch=asked)
    with pytest.raises(OptionError, match="does not go with prefetch"):
        rb._handle(prefetch=2).sample(min_batch=1)
    with pytest.raises(OptionError, match="more than the band"):
        rb.extend(rows(41))
    with pytest.raises(ValueError, match="'y'"):
        rb.extend({"y": torch.arange(4)})  # is not counted
    until(lambda: totals(cluster, rb) == (6, 6))
    assert len(rb) == 6


def test_a_killed_writer_blocks_no_other_call(processes, remade):
    rb = remade(RateLimiter(samples_per_insert=1, error_buffer=64, min_size_to_sample=16))
    kill_a_writer(processes, rb)
    writer = threading.Thread(target=write, args=(rb, 0, 10))
    writer.start()
    for _ in range(5):
        rb.sample(timeout_s=30.0)
    writer.join(LONG_S)
    assert not writer.is_alive()


def test_calls_time_out_while_the_limiter_is_stopped(cluster, remade):
    rb = remade(RateLimiter(samples_per_insert=1, error_buffer=1000))
    rb.extend(rows(16))
    quick = rb._handle(call_timeout_s=1.0)
    with stopped(cluster, rb._fleet.actor):
        assert rb.stats().rows == len(rb) == 16, "the shards answer"
        for call in (partial(quick.sample, timeout_s=0.5), partial(quick.extend, rows(8), timeout_s=0.5)):
            found = outcome(call)
            assert found.took_s < 0.5 + GRACE_S + 3.0
            assert isinstance(found.result, NoPermitError)
            assert isinstance(found.result, WaitTimeoutError)
            assert isinstance(found.result, NoAnswerError)
    assert rb.sample(timeout_s=30.0)["x"].shape == (16,)
    until(lambda: totals(cluster, rb) == (16, 16))  # abandoned calls do not count


def test_calls_of_threads_are_counted(cluster, remade):
    rb = remade(RateLimiter(samples_per_insert=1, error_buffer=20_000, min_size_to_sample=8))
    rb.extend(rows(8), timeout_s=60.0)
    client, (written, drawn) = rb._writer._limiter, totals(cluster, rb)

    def work(kind: Any) -> None:
        for _ in range(100):
            client.acquire(kind, 3, 60.0)

    together(*[partial(work, kind) for kind in ("write", "draw") * 2])
    assert totals(cluster, rb) == (written + 600, drawn + 600)


# -- rows that draws use up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_queue_returns_each_row_once_in_the_order_of_its_shard(remade, prefetch):
    rb = remade(None, QueueSampler, 64, prefetch=prefetch)
    writers = [threading.Thread(target=write, args=(rb, i, 20, 1000 * i)) for i in range(2)]
    for writer in writers:
        writer.start()
    seen: list[list[int]] = [[], []]
    for _ in range(20):
        batch, info = rb.sample(return_info=True, timeout_s=LONG_S)
        shards, _ = split_index(info["index"])
        for shard in range(2):
            seen[shard] += batch["x"][shards == shard].tolist()
    assert sorted(seen) == [list(range(160)), list(range(1000, 1160))]
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.05)
    until(lambda: all(one.made.done() for one in rb._batches.queue.requests))  # else draws ahead could free room below
    first = rb.pinned(0)
    first.extend(rows(60))
    rb.pinned(1).extend(rows(4))
    assert (first.can_insert(4), first.can_insert(5)) == (True, False)
    if not prefetch:
        assert (rb.can_sample(64), rb.can_sample(65)) == (True, False)
        with pytest.raises(WaitTimeoutError):
            rb.sample(128, timeout_s=0.05, min_batch=65)
        assert sorted(rb.sample(65, timeout_s=0.05, min_batch=64)["x"].tolist()) == sorted([*range(60), *range(4)])
        first.extend(rows(60))
    first.extend(rows(4))
    with pytest.raises(WaitTimeoutError):
        first.extend(rows(8), timeout_s=0.05)


# -- full, stopped and busy shards ------------------------------------------------------------------------------------


def test_waits_for_the_limiter_and_for_room_share_one_time(cluster, remade):
    rb = remade(RateLimiter(samples_per_insert=1, error_buffer=1000, min_size_to_sample=8), QueueSampler, 16)
    writer = rb.pinned(0)
    writer.extend(rows(16), timeout_s=5.0)
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"waited 1\.2 s for readers: there is room for 0 of 8"):
        writer.extend(rows(8), timeout_s=1.2)
    assert 1.2 <= time.monotonic() - began < 4.2
    until(lambda: totals(cluster, rb) == (16, 0))  # uncounted, which no call waits for
    assert rb.sample(timeout_s=5.0)["x"].tolist() == list(range(16))


def test_the_call_of_a_dead_writer_ends_at_a_full_queue(processes, remade):
    rb = remade(None, QueueSampler, 16)
    rb.pinned(0).extend(rows(16))
    kill_a_writer(processes, rb)
    assert rb.sample(timeout_s=5.0)["x"].tolist() == list(range(16))
    with pytest.raises(WaitTimeoutError):
        rb.sample(8, timeout_s=0.3)  # the dead writer has written nothing


def test_a_write_skips_a_stopped_shard(cluster, remade):
    rb = remade(shard_timeout_s=0.5)
    rb.pinned(1).extend(rows(8))  # fixes the schema, for which all shards are asked
    with stopped(cluster, rb.actors[0]), pytest.warns(RuntimeWarning, match="shard 0 of 2 does not answer"):
        found = outcome(partial(rb.pinned(0).extend, rows(8)))
    assert found.took_s < 0.5 + GRACE_S + 3.0
    assert (found.result >> 40).tolist() == [1] * 8


def test_a_busy_shard_gets_its_rows_once(cluster, remade):
    rb = remade(shard_timeout_s=0.2)
    held = [rb.actors[0].apply.options(concurrency_group="write").remote(_sleep) for _ in range(32)]
    index = rb.pinned(0).extend(rows(8))  # behind them, long after its timeout
    assert (index >> 40).tolist() == [0] * 8
    assert not rb.missing
    assert len(rb) == 8
    cluster.get(held)


def _sleep(_: Any) -> None:
    time.sleep(1.0)


# -- versions ---------------------------------------------------------------------------------------------------------


def test_only_rows_of_the_newest_policies_are_drawn(cluster, remade):
    """The newest version of all shards counts; draws are uniform over the recent rows."""
    storage = partial(LazyTensorStorage, 200)
    made = ShardedReplayBuffer(2, storage=storage, version_key="version", batch_size=512, remote_config={"num_cpus": 0})
    with closing(made) as rb:
        for shard, versions in enumerate([[3, 4, 5, 5], [1, 2, 3, 4]]):
            for version in versions:
                rb.pinned(shard).extend({"version": torch.full((10,), version), "x": torch.full((10,), shard)})
        batch = rb.sample(max_age=1)
        counts = torch.bincount(batch["version"] * 2 + batch["x"], minlength=12).tolist()
        assert counts[:8] == [0] * 8
        assert p_value(counts[8:11], [10, 10, 20]) > 1e-4
        assert set(rb.sample(max_age=0)["version"].tolist()) == {5}
        with pytest.raises(OptionError, match="prefetched"):
            rb._handle(prefetch=1).sample(max_age=2)
    with pytest.raises(OptionError, match="used up"):
        remade(None, QueueSampler).sample(max_age=2)
