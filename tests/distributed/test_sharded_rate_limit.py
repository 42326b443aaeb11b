"""Shards under one rate limiter, and shards whose rows are consumed."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    LimitedSampler,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ShardedReplayBuffer,
)
from ostinato.distributed.actor_names import FLEET
from ostinato.distributed.fleet import start_fleet_actor
from ostinato.distributed.routing import split_index
from ostinato.errors import EmptyBufferError, KindError, OptionError, WaitTimeoutError

from ..stats.chi_square import p_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

CAPACITY = 2000


def make(**more: Any) -> ShardedReplayBuffer:
    storage = partial(LazyTensorStorage, CAPACITY)
    return ShardedReplayBuffer(2, storage=storage, **{"batch_size": 16, "shard_timeout_s": 60.0, **more})


@pytest.fixture(scope="module")
def shards(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    with closing(make()) as made:
        yield made


@pytest.fixture
def remade(cluster: Any, shards: ShardedReplayBuffer) -> Iterator[Callable[..., ShardedReplayBuffer]]:
    """The same actors as another buffer, because starting actors takes seconds."""

    def remake(
        limiter: RateLimiter | None = None, sampler: Any = RandomSampler, capacity: int = CAPACITY, prefetch: int = 0
    ) -> ShardedReplayBuffer:
        shards.apply(_renew, partial(LazyTensorStorage, capacity), sampler)
        connection = shards._connection
        made = sampler()
        info = connection.info._replace(
            capacity=capacity,
            counting=made.counting,
            waits=isinstance(made, QueueSampler),
            prioritized=made.prioritized,
        )
        fleet = connection.fleet._replace(rate_limiter=limiter, prefetch=prefetch)
        if limiter is not None:
            cluster.kill(started[-1])
            fleet.names.wait_until_free([FLEET])
            started.append(start_fleet_actor(fleet, {}))
            cluster.get(started[-1].ready.remote(), timeout=120)
        return shards._handle(info=info, fleet=fleet._replace(actor=started[-1]))

    started = [shards._connection.fleet.actor]
    yield remake
    shards._connection = shards._connection._replace(fleet=shards._connection.fleet._replace(actor=started[-1]))


def _renew(buffer: Any, storage: Any, sampler: Any) -> None:
    buffer.empty()
    buffer.set_storage(storage())
    buffer.set_sampler(sampler())


def repeat(call: Callable[[], Any]) -> None:
    """Call until it raises."""
    for _ in range(300):
        call()


def rows(first: int, n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + n), "y": torch.rand(n, 3)}


class Writer:
    """Writes as fast as the limiter allows."""

    def use(self, buffer: ShardedReplayBuffer) -> None:
        self.buffer = buffer

    def pid(self) -> int:
        return os.getpid()

    def write(self, calls: int, n: int = 8, first: int = 0) -> int:
        for call in range(calls):
            self.buffer.extend(rows(first + call * n, n))
        return calls * n


@pytest.fixture(scope="module")
def staff(cluster: Any) -> Iterator[list[Any]]:
    actors = [cluster.remote(Writer).options(num_cpus=0).remote() for _ in range(3)]
    yield actors
    for actor in actors:
        cluster.kill(actor)


@pytest.fixture
def writers(cluster: Any, staff: list[Any]) -> Callable[..., list[Any]]:
    """Actors that write to a buffer."""

    def hire(rb: ShardedReplayBuffer, number: int) -> list[Any]:
        cluster.get([actor.use.remote(rb) for actor in staff[:number]])
        return staff[:number]

    return hire


@pytest.mark.parametrize("prefetch", [0, 2])
def test_neither_side_overtakes_the_other(cluster: Any, remade: Any, writers: Any, prefetch: int) -> None:
    limiter = RateLimiter(samples_per_insert=4, error_buffer=128, min_size_to_sample=40)
    low, high = limiter.band
    sampler = partial(PrioritizedSampler, CAPACITY, 0.6, 0.4)
    rb = remade(limiter, sampler, prefetch=prefetch)
    assert rb.rate_limiter == limiter
    before, actors = rb.stats(), writers(rb, 3)
    running = [actor.write.remote(25) for actor in actors]
    balances = []
    for _ in range(120):
        _, info = rb.sample(return_info=True, timeout_s=60.0)
        rb.update_priority(info, torch.rand(16))
        written, drawn = cluster.get(rb._connection.fleet.actor.totals.remote())
        balances.append(4 * written - drawn)
    assert low <= min(balances) <= max(balances) <= high
    assert max(balances) > high - 4 * 8 * 3, "writers were never held back"
    while any(cluster.wait(running, num_returns=len(running), timeout=0)[1]):
        rb.sample()
    with pytest.raises(WaitTimeoutError, match=r"row\(s\) must be written before 16 can be drawn"):
        repeat(lambda: rb.sample(timeout_s=0.05))
    stats = rb.stats()
    written, drawn = stats.rows_written - before.rows_written, stats.rows_drawn - before.rows_drawn
    assert written == 3 * 25 * 8
    assert low <= 4 * written - drawn < low + 16


def test_errors_of_timeouts_say_who_waits_for_what(cluster: Any, remade: Any) -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=16, min_size_to_sample=8, timeout_s=0.05)
    rb = remade(limiter)
    with pytest.raises(WaitTimeoutError, match=r"0 row\(s\) can be drawn, min_size_to_sample is 8"):
        rb.sample()
    rb.extend(rows(0, 16))
    rb.extend(rows(16, 8))
    with pytest.raises(WaitTimeoutError, match=r"8 more row\(s\) must be drawn before 8 can be written; 24 row"):
        rb.extend(rows(24, 8), timeout_s=0.1)
    assert len(rb) == rb.write_count == 24
    assert rb.sample()["x"].shape == (16,)
    assert rb.add({"x": torch.tensor(99), "y": torch.rand(3)}, timeout_s=5.0) is not None
    with pytest.raises(OptionError, match="more than the band"):
        rb.extend(rows(0, 33))
    with pytest.raises(ValueError, match="'y'"):
        rb.extend({"x": torch.arange(4)})  # is not counted
    until = time.monotonic() + 30
    while (counts := cluster.get(rb._connection.fleet.actor.totals.remote())) != (25, 16):
        assert time.monotonic() < until, counts
    rb.empty()
    with pytest.raises(WaitTimeoutError):
        rb.sample()
    rb.extend(rows(0, 8))
    assert rb.sample(timeout_s=5.0)["x"].max() < 8


def test_a_killed_writer_blocks_no_other_call(cluster: Any, remade: Any, writers: Any) -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=64, min_size_to_sample=16)
    rb = remade(limiter)
    (other,) = writers(rb, 1)
    doomed = cluster.remote(Writer).options(num_cpus=0).remote()
    cluster.get(doomed.use.remote(rb))
    pid = cluster.get(doomed.pid.remote())
    doomed.write.remote(1000)
    time.sleep(0.5)  # it waits for readers by now
    os.kill(pid, signal.SIGKILL)
    time.sleep(2.0)  # its call ends
    running = other.write.remote(10)
    for _ in range(5):
        rb.sample(timeout_s=30.0)
    assert cluster.get(running, timeout=60) == 80


def test_a_restarted_limiter_counts_anew(cluster: Any, remade: Any) -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=32, min_size_to_sample=16)
    rb = remade(limiter)
    rb.extend(rows(0, 16))
    rb.extend(rows(16, 24))
    rb.sample()
    cluster.kill(rb._connection.fleet.actor, no_restart=False)
    rb.sample(timeout_s=60.0)
    assert "16 row(s) written, 32 drawn" in drained(rb)
    rb.extend(rows(40, 16))
    rb.sample(timeout_s=60.0)


def drained(rb: ShardedReplayBuffer) -> str:
    """Sample until the limiter raises, and return the message; it may be restarting for a while."""
    for _ in range(300):
        try:
            rb.sample(timeout_s=0.1)
        except WaitTimeoutError as error:
            if "does not answer" not in str(error):
                return str(error)
    return "nothing was refused"


def test_the_rows_of_a_lost_shard_do_not_count(cluster: Any) -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=5000, min_size_to_sample=48)
    with closing(make(rate_limiter=limiter)) as rb, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for shard in range(2):
            rb.pinned(shard).extend(rows(32 * shard, 32))
        rb.sample()
        pid = cluster.get(rb.actors[1].apply.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WaitTimeoutError, match="min_size_to_sample is 48"):
            repeat(lambda: rb.sample(timeout_s=0.05))
        writer = rb.pinned(0)
        writer.extend(rows(64, 32), timeout_s=5.0)  # with too few rows no write waits
        assert rb.sample(timeout_s=30.0)["x"].shape == (16,)


def in_turn(shard: int, index: torch.Tensor, values: torch.Tensor) -> list[int]:
    shards, _ = split_index(index)
    return values[shards == shard].tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_queue_returns_each_row_once_in_the_order_of_its_shard(
    cluster: Any, remade: Any, writers: Any, prefetch: int
) -> None:
    rb = remade(None, QueueSampler, 64, prefetch)
    actors = writers(rb, 2)
    running = [actor.write.remote(40, 8, 1000 * number) for number, actor in enumerate(actors)]
    seen: list[list[int]] = [[], []]
    for _ in range(40):
        batch, info = rb.sample(return_info=True, timeout_s=60.0)
        for shard in range(2):
            seen[shard] += in_turn(shard, info["index"], batch["x"])
    assert cluster.get(running) == [320, 320]
    assert sorted(seen) == [list(range(320)), list(range(1000, 1320))]
    with pytest.raises(WaitTimeoutError, match=r"allow 0 more draw\(s\)"):
        rb.sample(timeout_s=0.05)
    with pytest.raises(WaitTimeoutError, match="there is room for"):
        repeat(lambda: rb.pinned(0).extend(rows(0, 8), timeout_s=0.05))


def test_rows_that_a_reader_has_taken_are_not_lost(remade: Any) -> None:
    rb = remade(None, QueueSampler)
    rb.pinned(0).extend(rows(0, 10))
    counted = rb._batches.sampler.consumer
    assert counted is not None
    counted._take(counted_offers(rb), 6, torch.rand(6))  # as if another shard had been emptied by another reader
    with pytest.raises(WaitTimeoutError, match=r"16 row.* 6 are taken already, .* allow 4 more draw"):
        rb.sample(timeout_s=0.0)
    first, info = rb.sample(4, return_info=True)
    assert first["x"].tolist() == [0, 1, 2, 3]
    assert rb[info["index"]]["x"].tolist() == [0, 1, 2, 3]
    assert rb.sample(6)["x"].tolist() == [4, 5, 6, 7, 8, 9]


def counted_offers(rb: ShardedReplayBuffer) -> Any:
    return rb._shards.request_offers(dict.fromkeys(range(2), (1,)))


@pytest.mark.parametrize("times", [1, 3])
def test_rows_are_removed_after_their_draws_with_two_readers(remade: Any, times: int) -> None:
    rb = remade(None, partial(LimitedSampler, times))
    for shard in range(2):
        rb.pinned(shard).extend(rows(100 * shard, 100 - 40 * shard))
    counts = torch.zeros(200, dtype=torch.int64)
    gate = threading.Lock()

    def read(handle: ShardedReplayBuffer) -> None:
        while True:
            try:
                drawn = handle.sample(16)["x"]
            except EmptyBufferError:
                return
            with gate:
                counts.index_add_(0, drawn, torch.ones_like(drawn))

    threads = [threading.Thread(target=read, args=(rb.pinned(0),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = times * 160 - int(counts.sum())
    assert counts.max() <= times
    assert 0 <= left < 16 + 2 * 15  # rows that fill no batch, and rows that the readers have taken
    with pytest.raises(EmptyBufferError):  # without a limiter nothing waits for writers
        rb.sample(64, timeout_s=30.0)


def test_a_limiter_with_consumed_rows(cluster: Any, remade: Any, writers: Any) -> None:
    limiter = RateLimiter(min_size_to_sample=32, timeout_s=30.0)
    rb = remade(limiter, partial(LimitedSampler, 1))
    (actor,) = writers(rb, 1)
    running = actor.write.remote(20)
    drawn = torch.cat([rb.sample()["x"] for _ in range(8)])
    assert cluster.get(running) == 160
    assert len(set(drawn.tolist())) == 128
    rest = rb.sample(16)["x"].tolist()
    assert not set(rest) & set(drawn.tolist())


def test_counts_are_reset_by_a_load(remade: Any, tmp_path: Path) -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=20, min_size_to_sample=10, timeout_s=0.05)
    rb = remade(limiter)
    rb.extend(rows(0, 10))
    rb.dumps(tmp_path)
    rb.sample()
    with pytest.raises(WaitTimeoutError):
        rb.sample()
    rb.loads(tmp_path)
    assert rb.sample()["x"].max() < 10


def test_only_rows_of_the_newest_policies_are_drawn(cluster: Any) -> None:
    """The newest version of all shards counts; draws are uniform over the recent rows."""
    with closing(make(version_key="version", batch_size=512)) as rb:
        for shard, versions in enumerate([[3, 4, 5, 5], [1, 2, 3, 4]]):
            for version in versions:
                rb.pinned(shard).extend({"version": torch.full((10,), version), "x": torch.arange(10) + 100 * shard})
        batch = rb.sample(max_age=1)
        counts = torch.bincount(batch["version"], minlength=6)
        assert counts[:4].sum() == 0
        assert p_value([int(counts[4]), int(counts[5])], [20, 20]) > 1e-4
        first = int((batch["x"] < 100).sum())
        assert p_value([first, 512 - first], [30, 10]) > 1e-4
        assert set(rb.sample(max_age=0)["version"].tolist()) == {5}
        assert set(rb.sample(max_age=9)["version"].tolist()) == {1, 2, 3, 4, 5}
        rb.pinned(1).extend({"version": torch.full((10,), 8), "x": torch.arange(10)})
        assert set(rb.sample(max_age=2)["version"].tolist()) == {8}
        with pytest.raises(OptionError, match="prefetched"):
            rb._handle(prefetch=1).sample(max_age=2)


def test_a_maximum_age_needs_versions(remade: Any) -> None:
    rb = remade()
    rb.extend(rows(0, 8))
    with pytest.raises(OptionError, match="version_key"):
        rb.sample(max_age=2)
    with pytest.raises(OptionError, match="used up"):
        remade(None, QueueSampler).sample(max_age=2)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rate_limiter": 3}, KindError, "RateLimiter or None, got int"),
        ({"rate_limiter": RateLimiter(min_size_to_sample=5000)}, OptionError, "2 shards hold 2000 each"),
        (
            {"replay_buffer_cls": partial(ReplayBuffer, rate_limiter=RateLimiter(min_size_to_sample=2))},
            OptionError,
            "itself",
        ),
    ],
)
def test_invalid_options_and_calls_raise(
    cluster: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(**options)
