"""The rate limiter of shards, and full shards: how rows are counted, and how waits end in time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import warnings
from collections import Counter
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    LimitedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ShardedReplayBuffer,
)
from ostinato.distributed.actor_names import FLEET
from ostinato.distributed.deadlines import GRACE_S
from ostinato.distributed.fleet import start_fleet_actor
from ostinato.distributed.permits import LEASE_S
from ostinato.distributed.rate_limits import RowCounter
from ostinato.errors import LostBufferError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

CAPACITY = 1000


@pytest.fixture(scope="module")
def shards(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    made = ShardedReplayBuffer(2, storage=partial(LazyTensorStorage, CAPACITY), batch_size=16, shard_timeout_s=60.0)
    with closing(made):
        yield made


@pytest.fixture
def remade(cluster: Any, shards: ShardedReplayBuffer) -> Iterator[Callable[..., ShardedReplayBuffer]]:
    """The same actors as another buffer, because starting actors takes seconds."""

    def remake(
        limiter: RateLimiter | None = None,
        sampler: Any = RandomSampler,
        capacity: int = CAPACITY,
        shard_timeout_s: float = 60.0,
    ) -> ShardedReplayBuffer:
        shards.apply(_renew, partial(LazyTensorStorage, capacity), sampler)
        made, connection = sampler(), shards._connection
        info = connection.info._replace(
            capacity=capacity, counting=made.counting, waits=isinstance(made, QueueSampler), prioritized=False
        )
        fleet = connection.fleet._replace(rate_limiter=limiter, shard_timeout_s=shard_timeout_s)
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


def rows(n: int, first: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + n)}


def scalar(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(n)}


def ask(cluster: Any, rb: ShardedReplayBuffer, name: str) -> Any:
    assert rb._connection.fleet.rate_limiter is not None
    return cluster.get(getattr(rb._connection.fleet.actor, name).remote())


def pid_of_limiter(cluster: Any, rb: ShardedReplayBuffer) -> int:
    assert rb._connection.fleet.rate_limiter is not None
    return int(cluster.get(rb._connection.fleet.actor.__ray_call__.remote(lambda _: os.getpid())))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pid_of(cluster: Any, rb: ShardedReplayBuffer, shard: int) -> int:
    return int(cluster.get(rb.actors[shard].apply.remote(lambda _: os.getpid())))


def all_at_once(number: int, call: Callable[[int], Any]) -> tuple[list[Any], float]:
    """Call from several threads; return results and errors, and how long all took."""
    found: list[Any] = [None] * number

    def run(i: int) -> None:
        try:
            found[i] = call(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, time.monotonic() - began


def test_rows_are_counted_at_a_fixed_interval(cluster: Any, remade: Any) -> None:
    rb = remade(RateLimiter(min_size_to_sample=64))
    with pytest.raises(WaitTimeoutError, match=r"0 row\(s\) can be drawn"):
        rb.sample(timeout_s=0.0)
    before = ask(cluster, rb, "num_counts")
    readers = [rb.pinned(0) for _ in range(40)]
    found, took = all_at_once(40, lambda i: readers[i].sample(timeout_s=0.8))
    assert all(isinstance(error, WaitTimeoutError) for error in found)
    assert 2 <= ask(cluster, rb, "num_counts") - before <= took / 0.02 + 2
    time.sleep(0.1)
    before = ask(cluster, rb, "num_counts")
    time.sleep(0.3)
    assert ask(cluster, rb, "num_counts") == before  # no call waits
    for _ in range(8):
        rb.extend(rows(8))
    assert ask(cluster, rb, "num_counts") == before  # nor does a write request a count, without a ratio
    assert rb.sample(timeout_s=0.0)["x"].shape == (16,)  # what was written before the call still counts


def test_writes_below_the_minimum_request_counts_only_when_it_may_be_reached(cluster: Any, remade: Any) -> None:
    rb = remade(RateLimiter(samples_per_insert=1, error_buffer=16, min_size_to_sample=64))
    rb.extend(rows(8))
    before = ask(cluster, rb, "num_counts")
    for _ in range(9):
        rb.extend(rows(8))  # to the top of the band: 64 + 16
    assert ask(cluster, rb, "num_counts") == before
    with pytest.raises(WaitTimeoutError, match="8 more row"):
        rb.extend(rows(8), timeout_s=0.0)
    assert ask(cluster, rb, "num_counts") > before
    rb.sample(timeout_s=0.0)
    rb.extend(rows(8), timeout_s=0.0)


def test_a_stopped_shard_delays_no_decision(cluster: Any, remade: Any) -> None:
    rb = remade(RateLimiter(min_size_to_sample=64))
    rb.pinned(1).extend(rows(64))
    rb.pinned(0).extend(rows(32))
    ask(cluster, rb, "begin")
    with stopped(pid_of(cluster, rb, 1)):
        ask(cluster, rb, "begin")  # waits for it, once
        took = []
        for _ in range(5):
            began = time.monotonic()
            with pytest.raises(WaitTimeoutError, match=r"32 row\(s\) can be drawn"):
                rb.sample(timeout_s=0.0)
            took.append(time.monotonic() - began)
        assert min(took) < 0.3
        took = []
        for _ in range(3):  # the fastest counts: the machine may be busy
            began = time.monotonic()
            ask(cluster, rb, "begin")
            took.append(time.monotonic() - began)
        assert min(took) < 0.9
    assert rb.sample(timeout_s=30.0)["x"].shape == (16,)


@pytest.mark.parametrize("sampler", [partial(LimitedSampler, 1), QueueSampler])
def test_the_minimum_holds_if_draws_consume_rows(cluster: Any, remade: Any, sampler: Any) -> None:
    rb = remade(RateLimiter(min_size_to_sample=48), sampler)
    rb.extend(rows(96))
    for _ in range(4):  # 96, 80, 64 and 48 rows are there
        rb.sample(timeout_s=5.0)
    with pytest.raises(WaitTimeoutError, match=r"32 row\(s\) can be drawn, min_size_to_sample is 48"):
        rb.sample(timeout_s=0.3)
    rb.extend(rows(16, 96))
    rb.sample(timeout_s=5.0)
    with pytest.raises(WaitTimeoutError, match=r"32 row\(s\) can be drawn"):
        rb.sample(timeout_s=0.0)


def test_waits_for_the_limiter_and_for_room_share_one_time(cluster: Any, remade: Any) -> None:
    rb = remade(RateLimiter(samples_per_insert=1, error_buffer=1000, min_size_to_sample=8), QueueSampler, 16)
    writer = rb.pinned(0)
    writer.extend(rows(16), timeout_s=5.0)
    before = ask(cluster, rb, "totals")
    for timeout_s in (0.0, 1.5):
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=rf"waited {timeout_s:g} s for readers: there is room for 0 of 8"):
            writer.extend(rows(8), timeout_s=timeout_s)
        assert timeout_s <= time.monotonic() - began < timeout_s + 3.0
    assert before == (16, 0)
    until = time.monotonic() + 20
    while (counts := ask(cluster, rb, "totals")) != before:  # given back, which no call waits for
        assert time.monotonic() < until, counts
    assert rb.sample(timeout_s=5.0)["x"].tolist() == list(range(16))
    writer.extend(rows(8), timeout_s=5.0)


def test_many_writers_wait_for_room_and_time_out(remade: Any) -> None:
    rb = remade(None, QueueSampler, 16)
    rb.pinned(0).extend(rows(16))
    writers = [rb.pinned(0) for _ in range(100)]
    found, took = all_at_once(100, lambda i: writers[i].extend(rows(8), timeout_s=4.0))
    assert all(isinstance(error, WaitTimeoutError) for error in found), found
    assert took < 4.0 + 100 / 32 + 5.0  # a poll for each, and Ray's overhead: not 4 s for each 32 of them
    assert len(rb) == 16


class Doomed:
    """Writes to a full queue."""

    def pid(self) -> int:
        return os.getpid()

    def write(self, buffer: ShardedReplayBuffer) -> None:
        buffer.extend(rows(8, 1000))


def test_the_call_of_a_dead_writer_ends_at_a_full_queue(cluster: Any, remade: Any) -> None:
    rb = remade(None, QueueSampler, 16)
    rb.pinned(0).extend(rows(16))
    doomed = cluster.remote(Doomed).options(num_cpus=0).remote()
    pid = cluster.get(doomed.pid.remote())
    doomed.write.remote(rb.pinned(0))
    time.sleep(1.0)  # it waits by now
    os.kill(pid, signal.SIGKILL)
    time.sleep(2.5)
    assert rb.sample(timeout_s=5.0)["x"].tolist() == list(range(16))
    with pytest.raises(WaitTimeoutError, match=r"allow 0 more draw"):
        rb.sample(8, timeout_s=0.3)  # the dead writer has written nothing


def test_a_write_skips_a_stopped_shard(cluster: Any, remade: Any) -> None:
    rb = remade(shard_timeout_s=0.5)
    rb.pinned(1).extend(rows(8))  # fixes the schema, for which all shards are asked
    with stopped(pid_of(cluster, rb, 0)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.monotonic()
        index = rb.pinned(0).extend(rows(8))
        assert time.monotonic() - began < 0.5 + GRACE_S + 3.0
    assert (index >> 40).tolist() == [1] * 8
    assert "shard 0 of 2 does not answer" in str(caught[0].message)


def test_a_write_to_a_stopped_queue_times_out(cluster: Any, remade: Any) -> None:
    rb = remade(None, QueueSampler, 16)
    rb.pinned(1).extend(rows(16))
    with stopped(pid_of(cluster, rb, 0)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.5 s for readers: there is room for 0"):
            rb.pinned(0).extend(rows(8), timeout_s=0.5)
        assert time.monotonic() - began < 0.5 + GRACE_S + 3.0


def test_a_busy_shard_gets_its_rows_once(cluster: Any, remade: Any) -> None:
    rb = remade(shard_timeout_s=0.2)
    shut = [rb.actors[0].apply.options(concurrency_group="write").remote(_sleep) for _ in range(32)]
    index = rb.pinned(0).extend(rows(8))  # behind them, long after its timeout
    assert (index >> 40).tolist() == [0] * 8
    assert not rb.missing
    assert len(rb) == 8
    cluster.get(shut)


def _sleep(_: Any) -> None:
    time.sleep(1.5)


def test_calls_time_out_while_the_limiter_is_stopped(cluster: Any, remade: Any) -> None:
    rb = remade(RateLimiter(samples_per_insert=1, error_buffer=1000))
    rb.extend(rows(16))
    with stopped(pid_of_limiter(cluster, rb)):
        for call in (partial(rb.sample, timeout_s=0.5), partial(rb.extend, rows(8), timeout_s=0.5)):
            began = time.monotonic()
            with pytest.raises(WaitTimeoutError, match=r"waited 0\.5 s for the rate limiter, .* does not answer"):
                call()
            assert time.monotonic() - began < 0.5 + GRACE_S + 3.0
    assert rb.sample(timeout_s=30.0)["x"].shape == (16,)
    until = time.monotonic() + 20
    while (counts := ask(cluster, rb, "totals")) != (16, 16):  # abandoned calls do not count
        assert time.monotonic() < until, counts
        time.sleep(0.05)


def test_rows_of_any_kind_pass_the_limiter(remade: Any) -> None:
    for limiter in (RateLimiter(), None):
        rb = remade(limiter)
        assert rb.add(3.0) is not None
        assert rb.sample(1).tolist() == [3.0]
        rb = remade(limiter)
        assert rb.extend(iter([scalar(1), scalar(2), scalar(3)])).shape == (3,)
        assert set(rb.sample()["x"].tolist()) == {1, 2, 3}


def test_the_error_of_a_dead_limiter_says_what_to_do(cluster: Any, remade: Any) -> None:
    rb = remade(RateLimiter())
    rb.extend(rows(16))
    cluster.kill(rb._connection.fleet.actor)
    with pytest.raises(LostBufferError, match=r"rate limiter is gone for good .* shards keep their rows") as caught:
        rb.sample()
    assert "its rows" not in str(caught.value)
    assert len(rb) == 16


def test_calls_allowed_during_a_count_are_counted() -> None:
    class Slow:
        """A slow shard with 10 rows."""

        def __init__(self) -> None:
            self.asked, self.gate = asyncio.Event(), asyncio.Event()
            self.drawable = self

        def remote(self) -> Any:
            return self._answer()

        async def _answer(self) -> tuple[int, bool]:
            self.asked.set()
            await self.gate.wait()
            return 10, True

    async def run() -> None:
        shard = Slow()
        counter = RowCounter([shard], lambda: False, lambda: None)
        shard.gate.set()
        await counter.wait_for(counter.request())
        assert (counter.least, counter.most) == (10, 10)
        counter.add_written(3)
        counter.add_drawn(2)
        shard.gate.clear()
        shard.asked.clear()
        number = counter.request()
        await shard.asked.wait()
        assert (counter.least, counter.most) == (8, 13)  # the count is not finished
        counter.add_written(1)
        counter.add_drawn(4)
        assert (counter.least, counter.most) == (4, 14)
        shard.gate.set()
        await counter.wait_for(number - 1)
        assert (counter.least, counter.most) == (4, 11)  # draws allowed before it may not have arrived yet
        await counter.wait_for(counter.request())
        assert (counter.least, counter.most) == (10, 10)

    asyncio.run(run())


def test_calls_on_lent_permits_are_counted(cluster: Any, remade: Any) -> None:
    rb = remade(RateLimiter(samples_per_insert=1, error_buffer=20_000, min_size_to_sample=8))
    rb.extend(rows(8), timeout_s=60.0)
    client, (written, drawn) = rb._writer._limiter, ask(cluster, rb, "totals")
    requests = Counter[int]()
    request = client._request

    def counted(*given: Any) -> Any:
        requests[threading.get_ident()] += 1
        return request(*given)

    client._request = counted

    def work(i: int) -> None:
        for _ in range(100):
            client.acquire("write" if i % 2 else "draw", 3, 60.0)

    found, _ = all_at_once(4, work)
    assert found == [None] * 4
    assert requests.total() < 400  # the others used permits that were lent
    assert ask(cluster, rb, "totals") == (written + 600, drawn + 600)  # waits for reports
    copy = rb.pinned(0)._writer._limiter
    copy.acquire("write", 5, 60.0)
    assert ask(cluster, rb, "totals") == (written + 605, drawn + 600)


@pytest.mark.slow
def test_permits_of_a_killed_writer_return(cluster: Any, remade: Any) -> None:
    most = 10**8
    rb = remade(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=most))
    rb.extend(rows(8), timeout_s=60.0)

    class Writer:
        def pid(self) -> int:
            return os.getpid()

        def write(self, handle: ShardedReplayBuffer) -> None:
            limiter: Any = handle._writer._limiter
            while True:
                limiter.acquire("write", 3, 60.0)

    writer = cluster.remote(num_cpus=0, max_concurrency=2)(Writer).remote()
    pid = cluster.get(writer.pid.remote())
    writer.write.remote(rb)
    before = ask(cluster, rb, "totals")[0]
    while ask(cluster, rb, "totals")[0] < before + 3000:
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    time.sleep(LEASE_S + 0.5)
    written, drawn = ask(cluster, rb, "totals")
    assert rb.can_insert(most - written + drawn)
    assert not rb.can_insert(most - written + drawn + 1)
    assert rb.can_sample(written - drawn)
