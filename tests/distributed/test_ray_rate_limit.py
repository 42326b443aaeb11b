"""Readers and writers in different processes wait for each other, and never for dead processes; threads of a handle."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    QueueSampler,
    RateLimiter,
    ReplayBuffer,
)
from ostinato.distributed import actors
from ostinato.distributed.actors import poll_once
from ostinato.distributed.deadlines import POLL_S
from ostinato.distributed.ray_client import CONCURRENCY_GROUPS, RETRY
from ostinato.errors import EmptyBufferError, OptionError, WaitTimeoutError

from .handles import LONG_S, handle_of, in_threads, kill, process_of, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostinato import RayReplayBuffer

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

LIMITER = RateLimiter(samples_per_insert=2, error_buffer=64, min_size_to_sample=32, timeout_s=LONG_S)
QUEUE = RateLimiter(timeout_s=LONG_S)


class Worker:
    """A process that writes or reads."""

    def write(self, rb: Any, first: int, last: int, size: int = 8) -> int:
        for i in range(first, last, size):
            rb.extend(rows(i, min(i + size, last)), timeout_s=LONG_S)
        return last - first

    def read(self, rb: Any) -> None:
        while True:
            rb.sample()


def rows(first: int, last: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, last)}


@pytest.fixture(scope="module")
def hire(cluster: Any) -> Iterator[Callable[[int], Any]]:
    """Return a live worker by its number; workers are reused, because starting a process takes seconds."""
    living: list[Any] = []

    def one(number: int) -> Any:
        while len(living) <= number:
            living.append(cluster.remote(num_cpus=0, max_concurrency=2)(Worker).remote())
        return living[number]

    one.bury = living.remove  # type: ignore[attr-defined]
    yield one
    for worker in living:
        cluster.kill(worker)


def _counts(buffer: Any) -> tuple[int, int]:
    with buffer._engine.lock:
        return buffer._engine.gate.flow.written, buffer._engine.gate.flow.drawn


def balance(rb: RayReplayBuffer) -> float:
    written, drawn = rb.apply(_counts)
    return float(2 * written - drawn)


# -- timeouts ---------------------------------------------------------------------------------------------------------


def test_a_timeout_raises_in_the_caller_and_changes_nothing(remote: Any) -> None:
    rb = remote()
    assert rb.rate_limiter is None
    with pytest.raises(EmptyBufferError):
        rb.sample(timeout_s=LONG_S)
    rb = remote(LIMITER)
    with pytest.raises(WaitTimeoutError, match=r"0 row\(s\) can be drawn, min_size_to_sample is 32"):
        rb.sample(timeout_s=0.05)
    rb.extend(rows(0, 64))
    before = rb.stats()
    for write in (partial(rb.extend, rows(64, 72)), partial(rb.add, {"x": torch.tensor(64)})):
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.1 s for readers.*64 row\(s\) written, 0 drawn"):
            write(timeout_s=np.float64(0.1))
    for bad in (-1.0, float("nan"), "soon", np.bool_(1)):
        with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
            rb.extend(rows(0, 8), timeout_s=bad)
    with pytest.raises(OptionError, match="raise error_buffer"):
        rb.extend(rows(0, 65))
    assert rb.stats() == before
    for _ in range(16):
        rb.sample(timeout_s=0.1)
    with pytest.raises(WaitTimeoutError, match=r"waited 0\.1 s for writers.*128 drawn"):
        rb.sample(timeout_s=0.1)
    assert rb.stats().rows_drawn - before.rows_drawn == 128


def test_a_smaller_batch_comes_with_the_last_poll(remote: Any) -> None:
    rb = remote(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=40, min_size_to_sample=4))
    assert (rb.can_sample(), rb.can_insert(40), rb.can_insert(41)) == (False, True, False)
    rb.extend(rows(0, 6), timeout_s=LONG_S)
    assert (rb.can_sample(6), rb.can_sample(7)) == (True, False)
    began, drawn = time.monotonic(), rb.stats().rows_drawn
    assert len(rb.sample(timeout_s=1.2 * POLL_S, min_batch=2)["x"]) == 6
    assert time.monotonic() - began >= 1.2 * POLL_S
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.0, min_batch=1)
    assert rb.stats().rows_drawn - drawn == 6
    with pytest.raises(OptionError, match="min_batch must be an integer in"):
        rb.sample(timeout_s=LONG_S, min_batch=9)


# -- rows that are used up --------------------------------------------------------------------------------------------


def test_readers_and_threads_divide_the_rows_of_a_queue(cluster: Any, hire: Any, remote: Any) -> None:
    rb = remote(QUEUE, QueueSampler, 32, 3)
    running = [hire(i).write.remote(rb, 1000 * i, 1000 * i + 160) for i in range(2)]
    other = handle_of(rb, prefetch=0)

    def read(handle: RayReplayBuffer) -> list[int]:
        found = [row for batch in islice(handle, 5) for row in batch["x"].tolist()]  # leaving it loses nothing
        return found + [row for _ in range(5) for row in handle.sample()["x"].tolist()]

    parts = in_threads(*[partial(read, handle) for handle in (rb, rb, other, other)])
    assert sum(cluster.get(running)) == 320
    assert sorted(row for part in parts for row in part) == [*range(160), *range(1000, 1160)]
    for part in parts[2:]:
        for mine in ([row for row in part if row < 1000], [row for row in part if row >= 1000]):
            assert mine == sorted(mine), "each writer's rows come in its order"


def test_the_timeout_of_a_prefetched_batch_begins_when_it_is_needed(remote: Any) -> None:
    """After a batch has timed out, those requested after it are not drawn when rows arrive."""
    limiter = RateLimiter(timeout_s=0.5)
    rb = remote(limiter, QueueSampler, prefetch=2)
    rb.extend(rows(0, 8))
    assert rb.sample()["x"].tolist() == list(range(8))
    time.sleep(1.5 * POLL_S)  # learn for longer than the timeout of a batch, and than a poll
    rb.extend(rows(8, 24))
    assert [rb.sample()["x"].tolist() for _ in range(2)] == [list(range(8, 16)), list(range(16, 24))]
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"waited 0\.5 s for writers"):
        rb.sample()
    assert time.monotonic() - began >= limiter.timeout_s
    rb.extend(rows(24, 48))
    assert [int(rb.sample()["x"][0]) for _ in range(3)] == [24, 32, 40]


def test_emptying_ends_requests_made_ahead(remote: Any) -> None:
    rb = remote(QUEUE, QueueSampler, prefetch=3)
    rb.extend(rows(0, 12))
    rb.sample()  # three more batches are waited for in the actor
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rb.sample)
        began = time.monotonic()
        rb.empty()
        assert time.monotonic() - began < 10, "it does not wait for waiting threads"
        rb.extend(rows(100, 132))
        found = [int(rb.sample()["x"][0]) for _ in range(3)] + [int(waiting.result(LONG_S)["x"][0])]
    assert sorted(found) == [100, 108, 116, 124]


# -- threads, and what stays behind -----------------------------------------------------------------------------------


def test_batches_are_dropped_while_threads_sample(remote: Any) -> None:
    """A thread that waits for a batch that another one drops gets a later batch."""
    rb, done = remote(prefetch=3), threading.Event()
    rb.extend(rows(0, 100))

    def read() -> int:
        count = 0
        while not done.is_set():
            assert len(rb.sample()["x"]) == 8
            count += 1
        return count

    def drop() -> int:
        for _ in range(30):
            rb._drop()
            time.sleep(0.005)
        done.set()
        return 1

    assert all(in_threads(read, read, read, drop))


def _count_streams(_: Any) -> int:
    """Count the streams in the actor, to which functions have no other access."""
    return sum(len(one) for one in gc.get_objects() if type(one) is actors.ServedStreams)


def test_a_dropped_handle_leaves_nothing_in_the_actor(cluster: Any, remote: Any) -> None:
    rb = remote(prefetch=3)
    rb.extend(rows(0, 100))
    before = rb.apply(_count_streams)

    def learn(handle: RayReplayBuffer) -> int:
        return sum(len(handle.sample()["x"]) for _ in range(5))

    task = cluster.remote(num_cpus=0)(learn)
    assert cluster.get([task.remote(handle_of(rb, prefetch=2)) for _ in range(2)]) == [40] * 2
    mine = handle_of(rb, prefetch=2)
    mine.sample()
    batches = iter(mine)
    next(batches)
    assert rb.apply(_count_streams) > before
    del mine, batches
    until(lambda: rb.apply(_count_streams) <= before)


def test_a_stream_that_the_actor_closed_is_opened_again(remote: Any) -> None:
    rb = remote(QUEUE, QueueSampler, prefetch=2)
    rb.extend(rows(0, 64))
    found = [row for _ in range(2) for row in rb.sample()["x"].tolist()]
    rb.actor.close_stream.remote(rb._stream.stream._id)
    found += [row for _ in range(6) for row in rb.sample()["x"].tolist()]
    assert Counter(found) == Counter(range(64)), "what was answered before is not lost"


# -- killed processes -------------------------------------------------------------------------------------------------


def end(cluster: Any, hire: Any, worker: Any) -> None:
    kill(cluster.get(worker.__ray_call__.remote(process_of)))
    hire.bury(worker)


def test_a_writer_killed_while_it_waits_or_writes_blocks_no_call(cluster: Any, hire: Any, remote: Any) -> None:
    rb = remote(RateLimiter(timeout_s=2.0), QueueSampler, 16)
    before, worker = rb.write_count, hire(0)
    running = worker.write.remote(rb, 0, 80_000)
    until(lambda: len(rb) == 16)
    time.sleep(0.1)  # the third write waits for room
    end(cluster, hire, worker)
    with pytest.raises(cluster.exceptions.RayActorError):
        cluster.get(running)
    time.sleep(1.5 * POLL_S)
    assert rb.sample()["x"].tolist() == list(range(8))
    assert rb.sample()["x"].tolist() == list(range(8, 16))
    assert rb.write_count == before + 16, "the write of the dead was given up"
    worker = hire(0)
    running = worker.write.remote(rb, 0, 80_000)
    found = [rb.sample(timeout_s=LONG_S)["x"].tolist() for _ in range(5)]
    threading.Timer(0.05, end, (cluster, hire, worker)).start()
    with pytest.raises(WaitTimeoutError):  # it was killed in the middle of its loop
        found.extend(batch["x"].tolist() for batch in rb)
    assert found == [list(range(i, i + 8)) for i in range(0, 8 * len(found), 8)], "its writes are whole"
    rb.extend(rows(500, 508))
    assert rb.sample()["x"].tolist() == list(range(500, 508))


def test_killed_readers_lose_the_batches_requested_ahead(cluster: Any, hire: Any, remote: Any) -> None:
    rb = remote(QUEUE, QueueSampler, 32)
    workers = [hire(0), hire(1)]
    for worker, prefetch in zip(workers, (0, 2), strict=True):
        worker.read.remote(handle_of(rb, prefetch=prefetch))
    rb.extend(rows(0, 16))
    until(lambda: rb.apply(_counts)[1] == 16)
    for worker in workers:
        end(cluster, hire, worker)
    time.sleep(1.5 * POLL_S)
    with ThreadPoolExecutor(1) as pool:
        writing = [pool.submit(rb.extend, rows(i, i + 8), timeout_s=LONG_S) for i in range(16, 96, 8)]
        found = [row for _ in range(10) for row in rb.sample(timeout_s=LONG_S)["x"].tolist()]
        assert all(task.result(LONG_S).numel() == 8 for task in writing), "writers go on"
    assert found == list(range(16, 96)), "what they were waiting for when they died was given up"
    assert rb.apply(_counts) == (96, 96), "what they had drawn counts"


# -- more calls that wait than threads --------------------------------------------------------------------------------

MANY = CONCURRENCY_GROUPS["write"] + 8


def test_calls_that_never_wait_have_their_own_threads(cluster: Any, remote: Any, tmp_path: Path) -> None:
    rb = remote(sampler=partial(PrioritizedSampler, 1000, 1.0, 1.0))
    rb.extend(rows(0, 64))
    flag = tmp_path / "go on"
    hold = rb.actor.apply.options
    held = [
        hold(concurrency_group=group).remote(_hold, str(tmp_path / f"{group}{i}"), str(flag))
        for group in ("write", "read")
        for i in range(CONCURRENCY_GROUPS[group])
    ]
    until(lambda: len(list(tmp_path.iterdir())) == len(held))  # no thread for writers or readers is free
    rb.update_priority(torch.arange(64), torch.ones(64))
    rb[0:2] = rows(70, 72)
    rb.set_at_("x", torch.tensor([7]), [2])
    assert rb[0:4]["x"].tolist() == [70, 71, 7, 3]
    assert rb.stats().rows == len(rb) == 64
    rb.dumps(tmp_path / "saved")
    rb.empty()
    assert not cluster.wait(held, timeout=0)[0]
    flag.touch()
    cluster.get(held)


def _hold(_: Any, here: str, flag: str) -> None:
    Path(here).touch()
    until(Path(flag).exists)


def test_many_waiting_writers_block_no_other_call(remote: Any) -> None:
    rb = remote(LIMITER, partial(PrioritizedSampler, 1000, 1.0, 1.0))
    rb.extend(rows(0, 64))
    index = torch.arange(64)
    with ThreadPoolExecutor(MANY + 2) as pool:
        writing = [pool.submit(rb.extend, rows(i, i + 8), timeout_s=LONG_S) for i in range(1000, 1000 + 8 * MANY, 8)]
        time.sleep(0.5)
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.2 s for readers"):
            rb.extend(rows(0, 8), timeout_s=0.2)
        assert time.monotonic() - began < 15, "one more that waits has its own time"
        assert not any(task.done() for task in writing)
        # a learner that updates before it samples
        while not all(task.done() for task in writing):
            rb.update_priority(index, torch.ones(index.numel()))
            assert rb[0]["x"] == 0
            assert len(rb) >= 64
            assert 0 <= balance(rb) <= 128
            index = rb.sample(return_info=True, timeout_s=LONG_S)[1]["index"]
        assert [task.result(LONG_S).numel() for task in writing] == [8] * MANY
    assert len(rb) == 64 + 8 * MANY


# -- polls, without Ray -----------------------------------------------------------------------------------------------


def test_a_poll_is_short_and_the_timeout_of_all_of_them_is_kept() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=QueueSampler(), batch_size=4)
    began = time.monotonic()
    assert poll_once(rb, rb.sample, 50.0, 0.0) is RETRY
    assert POLL_S <= time.monotonic() - began < 10
    with pytest.raises(WaitTimeoutError, match=r"waited 50 s for writers"):
        poll_once(rb, rb.sample, 50.0, 49.9)
    rb.extend(torch.arange(4))
    assert poll_once(rb, rb.sample, 1.0, 70.0).tolist() == [0, 1, 2, 3], "what may go ahead is not refused for its age"
