"""Readers and writers of an actor wait for each other, and never for dead processes; threads of a handle."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import PrioritizedSampler, QueueSampler, RateLimiter
from ostinato.distributed import actors
from ostinato.distributed.deadlines import POLL_S
from ostinato.distributed.ray_client import CONCURRENCY_GROUPS
from ostinato.errors import WaitTimeoutError

from ..threads import together
from .handles import LONG_S, kill, until

if TYPE_CHECKING:
    from ostinato import RayReplayBuffer

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

LIMITER = RateLimiter(samples_per_insert=2, error_buffer=64, min_size_to_sample=32, timeout_s=LONG_S)
QUEUE = RateLimiter(timeout_s=LONG_S)


def rows(first: int, last: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, last)}


def write(rb: Any, first: int, last: int) -> int:
    for i in range(first, last, 8):
        rb.extend(rows(i, i + 8), timeout_s=LONG_S)
    return 0


def _counts(buffer: Any) -> tuple[int, int]:
    with buffer._engine.lock:
        return buffer._engine.limits[0].flow.written, buffer._engine.limits[0].flow.drawn


# -- timeouts ---------------------------------------------------------------------------------------------------------


def test_a_smaller_batch_comes_with_the_last_poll(remote):
    rb = remote(RateLimiter(samples_per_insert=1, min_diff=0, max_diff=40, min_size_to_sample=4))
    rb.extend(rows(0, 6), timeout_s=LONG_S)
    assert (rb.can_insert(34), rb.can_insert(35)) == (True, False)
    before = rb.stats()
    for late in (partial(rb.extend, rows(0, 35)), partial(rb.sample, 7)):
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.1 s for .*6 row\(s\) written, 0 drawn"):
            late(timeout_s=0.1)
    assert rb.stats() == before
    began = time.monotonic()
    assert len(rb.sample(timeout_s=1.2 * POLL_S, min_batch=2)["x"]) == 6
    assert time.monotonic() - began >= 1.2 * POLL_S
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.0, min_batch=1)


# -- rows that are used up --------------------------------------------------------------------------------------------


def test_readers_and_threads_divide_the_rows_of_a_queue(remote):
    """Each writer's rows come in its order to a reader without prefetch.

    Four batches are left: a handle with prefetch takes up to three more than its threads read, which no other one gets.
    """
    rb = remote(QUEUE, QueueSampler, 32, 3)
    other = rb._handle(prefetch=0)

    def read(handle: RayReplayBuffer) -> list[int]:
        found = [row for batch in islice(handle, 5) for row in batch["x"].tolist()]  # leaving it loses nothing
        return found + [row for _ in range(5) for row in handle.sample()["x"].tolist()]

    writers = [partial(write, rb._handle(), 1000 * i, 1000 * i + 176) for i in range(2)]
    _, _, *parts = together(*writers, *[partial(read, handle) for handle in (rb, rb, other, other)])
    left = [row for _ in range(4) for row in rb.sample()["x"].tolist()]
    assert sorted(left + [row for part in parts for row in part]) == [*range(176), *range(1000, 1176)]
    for part in parts[2:]:
        for mine in ([row for row in part if row < 1000], [row for row in part if row >= 1000]):
            assert mine == sorted(mine)


def test_the_timeout_of_a_prefetched_batch_begins_when_it_is_needed(remote):
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


def test_emptying_ends_requests_made_ahead(remote):
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


# -- streams, and what stays behind -----------------------------------------------------------------------------------


def _count_streams(_: Any) -> int:
    """Count the streams in the actor, to which functions have no other access."""
    return sum(len(one) for one in gc.get_objects() if type(one) is actors.ServedStreams)


def test_a_dropped_handle_leaves_nothing_and_a_closed_stream_is_opened_again(remote):
    rb = remote(QUEUE, QueueSampler, prefetch=2)
    rb.extend(rows(0, 96))
    before = rb.apply(_count_streams)
    mine = rb._handle(prefetch=2)
    mine.sample()
    batches = iter(mine)
    next(batches)
    assert rb.apply(_count_streams) > before
    del mine, batches
    until(lambda: rb.apply(_count_streams) <= before)
    rb.empty()
    rb.extend(rows(0, 64))
    found = [row for _ in range(2) for row in rb.sample()["x"].tolist()]
    rb.actor.close_stream.remote(rb._batches.stream.name)
    found += [row for _ in range(6) for row in rb.sample()["x"].tolist()]
    assert Counter(found) == Counter(range(64)), "what was answered before is not lost"


# -- killed processes -------------------------------------------------------------------------------------------------


class Worker:
    """A process that writes or reads until it is killed."""

    def write(self, rb: Any) -> None:
        write(rb, 0, 80_000)

    def read(self, rb: Any) -> None:
        while True:
            rb.sample()


def hired(cluster: Any) -> Any:
    return cluster.remote(num_cpus=0, max_concurrency=2)(Worker).remote()


def test_a_writer_killed_while_it_waits_or_writes_blocks_no_call(processes, remote):
    rb = remote(RateLimiter(timeout_s=2.0), QueueSampler, 16)
    before, worker = rb.write_count, hired(processes)
    running = worker.write.remote(rb)
    until(lambda: len(rb) == 16)
    time.sleep(0.1)  # the third write waits for room
    kill(processes, worker)
    with pytest.raises(processes.exceptions.RayActorError):
        processes.get(running)
    time.sleep(1.5 * POLL_S)
    assert [rb.sample()["x"].tolist() for _ in range(2)] == [list(range(8)), list(range(8, 16))]
    assert rb.write_count == before + 16, "the write of the dead was given up"
    worker = hired(processes)
    worker.write.remote(rb)
    found = [rb.sample(timeout_s=LONG_S)["x"].tolist() for _ in range(5)]
    threading.Timer(0.05, kill, (processes, worker)).start()
    with pytest.raises(WaitTimeoutError):  # it was killed in the middle of its loop
        found.extend(batch["x"].tolist() for batch in rb)
    assert found == [list(range(i, i + 8)) for i in range(0, 8 * len(found), 8)], "its writes are whole"
    rb.extend(rows(500, 508))
    assert rb.sample()["x"].tolist() == list(range(500, 508))


def test_killed_readers_lose_the_batches_requested_ahead(processes, remote):
    rb = remote(QUEUE, QueueSampler, 32)
    workers = [hired(processes), hired(processes)]
    for worker, prefetch in zip(workers, (0, 2), strict=True):
        worker.read.remote(rb._handle(prefetch=prefetch))
    rb.extend(rows(0, 16))
    until(lambda: rb.apply(_counts)[1] == 16)
    for worker in workers:
        kill(processes, worker)
    time.sleep(1.5 * POLL_S)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, rb, 16, 96)
        found = [row for _ in range(10) for row in rb.sample(timeout_s=LONG_S)["x"].tolist()]
        assert writing.result(LONG_S) == 0, "writers go on"
    assert found == list(range(16, 96)), "what they were waiting for when they died was given up"
    assert rb.apply(_counts) == (96, 96), "what they had drawn counts"


# -- more calls that wait than threads --------------------------------------------------------------------------------

MANY = CONCURRENCY_GROUPS["write"] + 8


def test_many_waiting_writers_block_no_other_call(remote):
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
            written, drawn = rb.apply(_counts)
            assert 0 <= 2 * written - drawn <= 128
            index = rb.sample(return_info=True, timeout_s=LONG_S)[1]["index"]
        assert [task.result(LONG_S).numel() for task in writing] == [8] * MANY
    assert len(rb) == 64 + 8 * MANY
