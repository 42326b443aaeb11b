"""A handle in many threads, with a stopped actor, and after it is dropped: no call hangs, and nothing leaks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import LazyTensorStorage, QueueSampler, RandomSampler, RateLimiter, RayReplayBuffer, ReplayBuffer
from ostinato.distributed import actors
from ostinato.distributed.deadlines import POLL_S
from ostinato.errors import NoAnswerError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

LONG = 60.0
BATCH = 8


@pytest.fixture(scope="module")
def made(cluster: Any) -> Iterator[RayReplayBuffer]:
    made = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 1000),
        batch_size=BATCH,
        rate_limiter=RateLimiter(timeout_s=LONG),
        remote_config={"num_cpus": 0},
    )
    yield made
    made.close()


@pytest.fixture
def handle(made: RayReplayBuffer) -> Callable[..., RayReplayBuffer]:
    """Empty the actor's buffer, set its sampler and limiter; return a handle with prefetch."""

    def make(sampler: Any = RandomSampler, prefetch: int = 3, timeout_s: float = LONG) -> RayReplayBuffer:
        until(lambda: not made.apply(_waiting))  # requests of an earlier handle would take the first rows
        made.set_sampler(sampler())
        made.empty()
        made.apply(_set_timeout, timeout_s)
        return another(made, prefetch)

    return make


def another(rb: RayReplayBuffer, prefetch: int) -> RayReplayBuffer:
    one = object.__new__(RayReplayBuffer)
    one.__setstate__({**rb.__getstate__(), "prefetch": prefetch})
    return one


def _waiting(buffer: Any) -> int:
    with buffer._engine.lock:
        return len(buffer._engine.waiters.readers)


def _set_timeout(buffer: Any, timeout_s: float) -> None:
    with buffer._engine.lock:
        buffer._engine.begin_limiter(RateLimiter(timeout_s=timeout_s))


def rows(first: int, last: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, last)}


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def in_threads(count: int, work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [task.result(LONG) for task in [pool.submit(work) for _ in range(count)]]


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_share_a_handle(handle: Any) -> None:
    rb = handle()
    rb.extend(rows(0, 100))
    sizes = in_threads(4, lambda: [len(rb.sample()["x"]) for _ in range(200)])
    assert sizes == [[BATCH] * 200] * 4


def test_threads_that_share_a_handle_share_the_rows_of_a_queue(handle: Any) -> None:
    rb, each = handle(QueueSampler), 25
    start = threading.Barrier(5)

    def read() -> list[int]:
        start.wait()
        return [row for _ in range(each) for row in rb.sample()["x"].tolist()]

    def write() -> list[int]:
        start.wait()
        for i in range(0, 4 * each * BATCH, 40):
            rb.extend(rows(i, i + 40))
        return []

    with ThreadPoolExecutor(5) as pool:
        parts = [task.result(LONG) for task in [*(pool.submit(read) for _ in range(4)), pool.submit(write)]]
    assert sorted(row for part in parts for row in part) == list(range(4 * each * BATCH))


def test_batches_are_dropped_while_threads_sample(handle: Any) -> None:
    """A thread that waits for a batch that another one drops gets a later batch."""
    rb, done = handle(), threading.Event()
    rb.extend(rows(0, 100))

    def read() -> int:
        count = 0
        while not done.is_set():
            assert len(rb.sample()["x"]) == BATCH
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read) for _ in range(3)]
        for _ in range(30):
            rb._drop()
            time.sleep(0.005)
        done.set()
        assert all(task.result(LONG) for task in reading)


def test_dropping_batches_does_not_wait_for_waiting_threads(handle: Any) -> None:
    rb = handle(QueueSampler)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rb.sample)
        until(lambda: rb._stream.stream is not None)
        began = time.monotonic()
        rb.empty()
        assert time.monotonic() - began < 10
        rb.extend(rows(0, BATCH))
        assert waiting.result(LONG)["x"].tolist() == list(range(BATCH))


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_batch_requested_ahead_has_its_own_timeout(handle: Any) -> None:
    """The limit is shorter than a poll, and the reader pauses for longer than both."""
    rb = handle(QueueSampler, prefetch=2, timeout_s=0.5)
    rb.extend(rows(0, BATCH))
    assert rb.sample()["x"].tolist() == list(range(8))
    time.sleep(1.5 * POLL_S)
    rb.extend(rows(8, 24))
    assert [rb.sample()["x"].tolist() for _ in range(2)] == [list(range(8, 16)), list(range(16, 24))]
    with pytest.raises(WaitTimeoutError, match=r"waited 0\.5 s for writers"):
        rb.sample()


@pytest.mark.parametrize("call", ["sample", "extend", "prefetch"])
def test_waiting_for_a_stopped_actor_ends_after_the_grace_period(handle: Any, call: str) -> None:
    rb = handle(prefetch=2 if call == "prefetch" else 0)
    rb._client.info = {**rb._client.info, "limit_s": 0.2}  # as if the buffer had this limit
    rb._client.call_timeout_s = 0.5
    rb.extend(rows(0, 100))
    rb.sample()
    calls: dict[str, Callable[[], Any]] = {
        "sample": partial(rb.sample, timeout_s=0.2),
        "extend": partial(rb.extend, rows(0, 8)),
        "prefetch": lambda: [rb.sample() for _ in range(4)],
    }
    pid = rb.apply(lambda _: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(NoAnswerError, match=r"did not answer (sample|extend) .* 0\.2 s of which it may wait"):
            calls[call]()
        assert 0.7 <= time.monotonic() - began < 20
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(another(rb, 0).sample(timeout_s=LONG)["x"]) == BATCH, "it goes on when it may"


def test_timeouts_may_be_any_numbers(handle: Any) -> None:
    rb = handle(QueueSampler, prefetch=0)
    buffers: list[Any] = [rb, ReplayBuffer(storage=LazyTensorStorage(10), sampler=QueueSampler(), batch_size=2)]
    for buffer in buffers:
        for timeout_s in (np.float32(0.25), np.int64(0)):
            with pytest.raises(WaitTimeoutError, match=f"waited {timeout_s:g} s for writers"):
                buffer.sample(timeout_s=timeout_s)
        with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
            buffer.sample(timeout_s=np.bool_(1))
    with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
        RateLimiter(timeout_s="1")  # type: ignore[arg-type]


# -- what stays behind ------------------------------------------------------------------------------------------------


def streams(rb: RayReplayBuffer) -> int:
    """Count the streams in the actor, to which functions have no other access."""
    return int(rb.apply(_count_streams))


def _count_streams(_: Any) -> int:
    return sum(len(one) for one in gc.get_objects() if type(one) is actors.ServedStreams)


def test_a_dropped_handle_leaves_nothing_in_the_actor(cluster: Any, handle: Any) -> None:
    rb = handle()
    rb.extend(rows(0, 100))
    before = streams(rb)

    def learn(handle: RayReplayBuffer) -> int:
        return sum(len(handle.sample()["x"]) for _ in range(5))

    task = cluster.remote(num_cpus=0)(learn)
    assert cluster.get([task.remote(another(rb, 2)) for _ in range(3)]) == [5 * BATCH] * 3
    mine = another(rb, 2)
    mine.sample()
    batches = iter(mine)
    next(batches)
    assert streams(rb) > before
    del mine, batches
    until(lambda: streams(rb) <= before)


def test_a_stream_that_the_actor_closed_is_opened_again(handle: Any) -> None:
    rb = handle(QueueSampler, prefetch=2)
    rb.extend(rows(0, 64))
    found = [row for _ in range(2) for row in rb.sample()["x"].tolist()]
    rb.actor.close_stream.remote(rb._stream.stream._id)
    found += [row for _ in range(6) for row in rb.sample()["x"].tolist()]
    assert Counter(found) == Counter(range(64)), "what was answered before is not lost"
