"""Readers and writers in different processes wait for each other, and never for dead processes."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
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
    RayReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from ostinato.distributed.actors import poll_once
from ostinato.distributed.deadlines import POLL_S
from ostinato.distributed.ray_client import CONCURRENCY_GROUPS, RETRY
from ostinato.errors import CheckpointError, EmptyBufferError, OptionError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

LONG = 60.0
"""Longer than any of these tests should wait, so that a lost call fails instead of hanging."""
BATCH = 8
LIMITER = RateLimiter(samples_per_insert=2, error_buffer=64, min_size_to_sample=32, timeout_s=LONG)


class Worker:
    """A process that writes or reads."""

    def pid(self) -> int:
        return os.getpid()

    def write(self, rb: Any, first: int, last: int, size: int = BATCH) -> int:
        for i in range(first, last, size):
            rb.extend(rows(i, min(i + size, last)), timeout_s=LONG)
        return last - first

    def read(self, rb: Any) -> None:
        while True:
            rb.sample()


def rows(first: int, last: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, last), "version": torch.arange(first, last) // 100}


@pytest.fixture(scope="module")
def hire(cluster: Any) -> Iterator[Callable[[], Any]]:
    """Return a live worker; workers are reused, because starting a process takes seconds."""
    living: list[Any] = []
    given = [0]

    def one() -> Any:
        if given[0] == len(living):
            living.append(cluster.remote(num_cpus=0, max_concurrency=2)(Worker).remote())
        given[0] += 1
        return living[given[0] - 1]

    one.reset = lambda: given.__setitem__(0, 0)  # type: ignore[attr-defined]
    one.bury = living.remove  # type: ignore[attr-defined]
    yield one
    for worker in living:
        cluster.kill(worker)


@pytest.fixture(scope="module")
def made(cluster: Any) -> Iterator[RayReplayBuffer]:
    made = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 1000),
        batch_size=BATCH,
        rate_limiter=LIMITER,
        version_key="version",
        generator=torch.Generator().manual_seed(3),
        remote_config={"num_cpus": 0},
    )
    yield made
    made.close()


@pytest.fixture
def flow(made: RayReplayBuffer, hire: Any) -> Iterator[Callable[..., RayReplayBuffer]]:
    """Empty the actor's buffer and set its parts and limiter; return a handle with `prefetch`."""
    hire.reset()
    handles = [made]

    def begin(
        limiter: RateLimiter | None = LIMITER, sampler: Any = RandomSampler, capacity: int = 1000, prefetch: int = 0
    ) -> RayReplayBuffer:
        made.set_storage(LazyTensorStorage(capacity))
        made.set_sampler(sampler())
        made.empty()
        made.apply(_set_limiter, limiter)
        made._client.describe()  # handles know whether calls wait
        handles.append(handle_of(made, prefetch))
        return handles[-1]

    yield begin
    for handle in handles:
        handle._drop()
    made.apply(_set_limiter, None)  # ends calls that still wait


def handle_of(rb: RayReplayBuffer, prefetch: int) -> RayReplayBuffer:
    handle = object.__new__(RayReplayBuffer)
    handle.__setstate__({**rb.__getstate__(), "prefetch": prefetch})
    return handle


def _set_limiter(buffer: Any, limiter: RateLimiter | None) -> None:
    with buffer._engine.lock:
        buffer._engine.begin_limiter(limiter)
        buffer._engine.waiters.wake()


def balance(rb: RayReplayBuffer) -> float:
    written, drawn = rb.apply(_counts)
    return float(2 * written - drawn)


def _counts(buffer: Any) -> tuple[int, int]:
    with buffer._engine.lock:
        return buffer._engine.gate.flow.written, buffer._engine.gate.flow.drawn


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- the band ---------------------------------------------------------------------------------------------------------


def test_writers_and_a_learner_stay_inside_the_band(cluster: Any, hire: Any, flow: Any) -> None:
    rb = flow()
    before = rb.stats()
    low, high = rb.rate_limiter.band
    assert (low, high) == (0, 128)
    with pytest.raises(WaitTimeoutError, match=r"0 row\(s\) can be drawn, min_size_to_sample is 32"):
        rb.sample(timeout_s=0.05)
    running = [hire().write.remote(rb, 1000 * i, 1000 * i + 160) for i in range(3)]
    until(lambda: len(rb) == 64)
    time.sleep(0.2)
    assert balance(rb) == high, "without a reader writers stop at the top"
    drawn = 0
    while drawn < 2 * 480 - 128:  # after so many draws all writes are allowed
        assert len(rb.sample(timeout_s=LONG)["x"]) == BATCH
        drawn += BATCH
        assert low <= balance(rb) <= high
    assert sum(cluster.get(running)) == 480
    assert balance(rb) == high
    for _ in range(128 // BATCH):
        rb.sample(timeout_s=LONG)
    assert balance(rb) == low
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.05)
    after = rb.stats()
    assert (after.rows_written - before.rows_written, after.rows_drawn - before.rows_drawn) == (480, 960)


def test_a_timeout_raises_in_the_caller_and_changes_nothing(flow: Any) -> None:
    rb = flow()
    rb.extend(rows(0, 64))
    before = rb.stats()
    for write in (partial(rb.extend, rows(64, 72)), partial(rb.add, {k: v[0] for k, v in rows(64, 65).items()})):
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.1 s for readers.*64 row\(s\) written, 0 drawn") as found:
            write(timeout_s=0.1)
        assert type(found.value) is WaitTimeoutError
        assert isinstance(found.value, TimeoutError)
    for bad in (-1.0, float("nan"), "soon"):
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


def test_a_wait_of_several_polls_ends_in_time(flow: Any) -> None:
    rb = flow()
    rb.extend(rows(0, 64))
    long = 2.25 * POLL_S
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=rf"waited {long:g} s for readers"):
        rb.extend(rows(64, 72), timeout_s=long)
    assert long <= time.monotonic() - began < long + 10
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rb.extend, rows(64, 72), timeout_s=LONG)
        time.sleep(1.5 * POLL_S)
        assert not waiting.done()
        rb.sample(16)
        assert waiting.result().tolist() == list(range(64, 72))


def test_without_a_limiter_the_timeout_is_that_of_the_answer(flow: Any) -> None:
    rb = flow(limiter=None)
    assert rb.rate_limiter is None
    with pytest.raises(EmptyBufferError):
        rb.sample(timeout_s=LONG)
    rb.extend(rows(0, 8), timeout_s=LONG)
    assert len(rb.sample(timeout_s=LONG)["x"]) == BATCH


def test_with_prefetch_neither_timeout_nor_age_is_allowed(flow: Any) -> None:
    rb = flow(prefetch=2)
    rb.extend(rows(0, 64))
    for asked in ({"timeout_s": 1.0}, {"max_age": 1}):
        with pytest.raises(UsageError, match="do not apply to batches that were requested earlier"):
            rb.sample(**asked)


# -- rows that are used up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_queue_returns_every_row_once_in_order(cluster: Any, hire: Any, flow: Any, prefetch: int) -> None:
    rb = flow(limiter=None, sampler=QueueSampler, capacity=24, prefetch=prefetch)
    assert rb.rate_limiter == RateLimiter()
    running = hire().write.remote(rb, 0, 240, 5)
    found = [row for _ in range(10) for row in rb.sample()["x"].tolist()]
    found += [row for batch in islice(rb, 10) for row in batch["x"].tolist()]  # leaving an iteration loses nothing
    found += [row for _ in range(5) for row in rb.sample()["x"].tolist()]
    found += [row for batch in islice(rb, 5) for row in batch["x"].tolist()]
    assert cluster.get(running) == 240
    assert found == list(range(240))


def test_a_queue_divides_rows_among_readers(cluster: Any, hire: Any, flow: Any) -> None:
    rb = flow(limiter=None, sampler=QueueSampler, capacity=32)
    running = [hire().write.remote(rb, 1000 * i, 1000 * i + 160) for i in range(2)]
    other = handle_of(rb, 0)

    def read(handle: RayReplayBuffer) -> list[int]:
        return [row for _ in range(20) for row in handle.sample(timeout_s=LONG)["x"].tolist()]

    with ThreadPoolExecutor(2) as pool:
        halves = [task.result(LONG) for task in [pool.submit(read, rb), pool.submit(read, other)]]
    assert sum(cluster.get(running)) == 320
    assert sorted(halves[0] + halves[1]) == sorted([*range(160), *range(1000, 1160)])
    for half in halves:
        for mine in ([row for row in half if row < 1000], [row for row in half if row >= 1000]):
            assert mine == sorted(mine), "each writer's rows come in its order"


@pytest.mark.parametrize("prefetch", [0, 3])
def test_every_row_is_drawn_a_limited_number_of_times(cluster: Any, hire: Any, flow: Any, prefetch: int) -> None:
    limiter = RateLimiter(min_size_to_sample=1, timeout_s=LONG)
    rb = flow(limiter=limiter, sampler=partial(LimitedSampler, 3), prefetch=prefetch)
    running = [hire().write.remote(rb, 100 * i, 100 * i + 40) for i in range(2)]
    drawn = Counter(row for batch in islice(rb, 30) for row in batch["x"].tolist())
    assert sum(cluster.get(running)) == 80
    assert drawn == dict.fromkeys([*range(40), *range(100, 140)], 3)
    rb._drop()
    with pytest.raises(WaitTimeoutError, match="can be drawn"):
        handle_of(rb, 0).sample(timeout_s=0.05)


def test_batches_requested_ahead_take_no_rows_after_a_timeout(flow: Any) -> None:
    """After a batch has timed out, those requested after it are not drawn when rows arrive."""
    limiter = RateLimiter(timeout_s=1.5 * POLL_S)
    rb = flow(limiter=limiter, sampler=QueueSampler, prefetch=3)
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=rf"waited {limiter.timeout_s:g} s for writers"):
        rb.sample()
    assert time.monotonic() - began >= limiter.timeout_s
    rb.extend(rows(0, 40))
    assert [rb.sample()["x"].tolist() for _ in range(5)] == [list(range(i, i + 8)) for i in range(0, 40, 8)]


def test_the_timeout_of_a_prefetched_batch_begins_when_it_is_needed(flow: Any) -> None:
    """The timeout of a batch begins when its reader needs it, not when it was requested ahead."""
    limiter = RateLimiter(timeout_s=1.5 * POLL_S)
    rb = flow(limiter=limiter, sampler=QueueSampler, prefetch=2)
    rb.extend(rows(0, 8))
    assert rb.sample()["x"].tolist() == list(range(8))
    time.sleep(2.5 * POLL_S)  # learn for longer than the timeout of a batch
    rb.extend(rows(8, 40))
    assert [rb.sample()["x"].tolist() for _ in range(4)] == [list(range(i, i + 8)) for i in range(8, 40, 8)]


def test_emptying_ends_requests_made_ahead(flow: Any) -> None:
    rb = flow(limiter=None, sampler=QueueSampler, prefetch=3)
    rb.extend(rows(0, 12))
    rb.sample()  # three more batches are waited for in the actor
    rb.empty()
    rb.extend(rows(100, 132))
    assert [int(rb.sample()["x"][0]) for _ in range(4)] == [100, 108, 116, 124]


def test_an_epoch_waits_for_writers_too(cluster: Any, hire: Any, flow: Any) -> None:
    rb = flow(limiter=RateLimiter(min_size_to_sample=40, timeout_s=LONG), sampler=SamplerWithoutReplacement, prefetch=2)
    running = hire().write.remote(rb, 0, 40)
    assert sorted(row for batch in rb for row in batch["x"].tolist()) == list(range(40))
    assert cluster.get(running) == 40


# -- those who die ----------------------------------------------------------------------------------------------------


def kill(cluster: Any, hire: Any, worker: Any) -> None:
    os.kill(cluster.get(worker.pid.remote()), signal.SIGKILL)
    hire.bury(worker)


def test_a_writer_killed_while_it_waits_or_writes_blocks_no_call(cluster: Any, hire: Any, flow: Any) -> None:
    rb = flow(limiter=RateLimiter(timeout_s=2.0), sampler=QueueSampler, capacity=16)
    worker = hire()
    running = worker.write.remote(rb, 0, 80_000)
    until(lambda: len(rb) == 16)
    time.sleep(0.1)  # the third write waits for room
    kill(cluster, hire, worker)
    with pytest.raises(cluster.exceptions.RayActorError):
        cluster.get(running)
    time.sleep(1.5 * POLL_S)
    assert rb.sample()["x"].tolist() == list(range(8))
    assert rb.sample()["x"].tolist() == list(range(8, 16))
    assert rb.write_count == 16, "the write of the dead was given up"
    hire.reset()
    worker = hire()
    running = worker.write.remote(rb, 0, 80_000)
    found = [rb.sample(timeout_s=LONG)["x"].tolist() for _ in range(5)]
    threading.Timer(0.05, kill, (cluster, hire, worker)).start()
    with pytest.raises(WaitTimeoutError):  # it was killed in the middle of its loop
        found.extend(batch["x"].tolist() for batch in rb)
    assert found == [list(range(i, i + 8)) for i in range(0, 8 * len(found), 8)], "its writes are whole"
    rb.extend(rows(500, 508))
    assert rb.sample()["x"].tolist() == list(range(500, 508))


def test_killed_readers_lose_the_batches_requested_ahead(cluster: Any, hire: Any, flow: Any) -> None:
    rb = flow(limiter=None, sampler=QueueSampler, capacity=32)
    workers = [hire(), hire()]
    for worker, prefetch in zip(workers, (0, 2), strict=True):
        worker.read.remote(handle_of(rb, prefetch))
    rb.extend(rows(0, 16))
    until(lambda: rb.apply(_counts)[1] == 16)
    for worker in workers:
        kill(cluster, hire, worker)
    time.sleep(1.5 * POLL_S)
    with ThreadPoolExecutor(1) as pool:
        writing = [pool.submit(rb.extend, rows(i, i + 8), timeout_s=LONG) for i in range(16, 176, 8)]
        found = [row for _ in range(20) for row in rb.sample(timeout_s=LONG)["x"].tolist()]
        assert all(task.result(LONG).numel() == 8 for task in writing), "writers go on"
    assert found == list(range(16, 176)), "what they were waiting for when they died was given up"
    assert rb.apply(_counts) == (176, 176), "what they had drawn counts"


# -- more who wait than there are threads -----------------------------------------------------------------------------

MANY = CONCURRENCY_GROUPS["write"] + 8


def test_calls_that_never_wait_have_their_own_threads(cluster: Any, flow: Any, tmp_path: Path) -> None:
    rb = flow(limiter=None, sampler=partial(PrioritizedSampler, 1000, 1.0, 1.0))
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
    rb.register_save_hook(_negate)
    rb.dumps(tmp_path / "saved")
    rb.empty()
    assert not cluster.wait(held, timeout=0)[0]
    flag.touch()
    cluster.get(held)


def _hold(_: Any, here: str, flag: str) -> None:
    Path(here).touch()
    end = time.monotonic() + LONG
    while not Path(flag).exists() and time.monotonic() < end:
        time.sleep(0.01)


def test_many_waiting_writers_block_no_other_call(flow: Any) -> None:
    rb = flow(sampler=partial(PrioritizedSampler, 1000, 1.0, 1.0))
    rb.extend(rows(0, 64))
    index = torch.arange(64)
    with ThreadPoolExecutor(MANY + 2) as pool:
        writing = [pool.submit(rb.extend, rows(i, i + 8), timeout_s=LONG) for i in range(1000, 1000 + 8 * MANY, 8)]
        time.sleep(0.5)
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.2 s for readers"):
            rb.extend(rows(0, 8), timeout_s=0.2)
        assert time.monotonic() - began < 15, "one more who waits has its own time"
        assert not any(task.done() for task in writing)
        # a learner that updates before it samples
        while not all(task.done() for task in writing):
            rb.update_priority(index, torch.ones(index.numel()))
            assert rb[0]["x"] == 0
            rb.set_at_("x", torch.tensor([0]), [0])
            assert len(rb) >= 64
            assert 0 <= balance(rb) <= 128
            index = rb.sample(return_info=True, timeout_s=LONG)[1]["index"]
        assert [task.result(LONG).numel() for task in writing] == [8] * MANY
    assert len(rb) == 64 + 8 * MANY


def test_many_waiting_readers_block_no_other_call(flow: Any) -> None:
    rb = flow(limiter=None, sampler=QueueSampler)
    with ThreadPoolExecutor(MANY) as pool:
        reading = [pool.submit(rb.sample, timeout_s=LONG) for _ in range(MANY)]
        time.sleep(0.5)
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.2 s for writers"):
            rb.sample(timeout_s=0.2)
        assert time.monotonic() - began < 15
        for i in range(0, 8 * MANY, 8):
            rb.extend(rows(i, i + 8), timeout_s=LONG)
            assert len(rb) >= 8
        found = [row for task in reading for row in task.result(LONG)["x"].tolist()]
    assert sorted(found) == list(range(8 * MANY))


# -- versions ---------------------------------------------------------------------------------------------------------


def test_rows_of_new_policies(flow: Any) -> None:
    rb = flow(limiter=RateLimiter())
    for i in range(0, 1000, 50):
        rb.extend(rows(i, i + 50))
    seen = Counter(v for _ in range(20) for v in rb.sample(32, max_age=2)["version"].tolist())
    assert set(seen) == {7, 8, 9}
    assert set(rb.sample(64, max_age=0, timeout_s=1.0)["version"].tolist()) == {9}
    with pytest.raises(OptionError, match="max_age must be an integer"):
        rb.sample(max_age=-1)
    rb.set_at_("version", torch.full((1,), 30), [5])
    assert set(rb.sample(max_age=3)["x"].tolist()) == {5}, "edits through the handle are noticed"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_counts_continue_after_a_load(flow: Any, tmp_path: Path) -> None:
    rb = flow()
    rb.extend(rows(0, 64))
    rb.sample()
    rb.dumps(tmp_path / "saved")
    assert rb.rate_limiter == LIMITER
    rb.extend(rows(64, 68))
    rb.dumps(tmp_path / "saved", incremental=True)
    rb.empty()
    for options in ({}, {"verify": False}, {"mmap": True}):
        rb.loads(tmp_path / "saved", **options)
        assert rb[:]["x"].tolist() == list(range(68))
        with pytest.raises(WaitTimeoutError, match=r"68 row\(s\) written, 8 drawn; 2 x 68 - 8 = 128"):
            rb.add({"x": torch.tensor(1), "version": torch.tensor(0)}, timeout_s=0.0)
        rb.empty()
    local = ReplayBuffer(storage=LazyTensorStorage(1000), rate_limiter=LIMITER, batch_size=8, version_key="version")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local.loads(tmp_path / "saved")
    assert (local._engine.gate.flow.written, local._engine.gate.flow.drawn) == (68, 8)  # type: ignore[union-attr]


def test_a_queue_continues_after_a_load(flow: Any, tmp_path: Path) -> None:
    rb = flow(limiter=None, sampler=QueueSampler, capacity=32)
    rb.extend(rows(0, 32))
    rb.sample()
    rb.dumps(tmp_path / "saved")
    rb.sample()
    rb.loads(tmp_path / "saved", verify=False)
    assert [int(rb.sample()["x"][0]) for _ in range(3)] == [8, 16, 24]


def test_hooks_run_in_the_actor(flow: Any, tmp_path: Path) -> None:
    rb = flow()
    rb.extend(rows(0, 64))
    rb.register_save_hook(_negate)
    rb.register_load_hook(_negate)
    rb.dumps(tmp_path / "saved")
    rb.empty()
    rb.loads(tmp_path / "saved")
    assert rb[:]["x"].tolist() == list(range(64))
    local = ReplayBuffer(storage=LazyTensorStorage(1000), rate_limiter=LIMITER, version_key="version")
    with pytest.raises(CheckpointError, match="hook"):
        local.loads(tmp_path / "saved")


def _negate(data: Any, **_: Any) -> Any:
    return {**data, "x": -data["x"]}


# -- turns, without Ray -----------------------------------------------------------------------------------------------


def test_a_poll_is_short_and_the_timeout_of_all_of_them_is_kept() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=QueueSampler(), batch_size=4)
    began = time.monotonic()
    assert poll_once(rb, rb.sample, 50.0, 0.0) is RETRY
    assert POLL_S <= time.monotonic() - began < 10
    with pytest.raises(WaitTimeoutError, match=r"waited 50 s for writers"):
        poll_once(rb, rb.sample, 50.0, 49.9)
    rb.extend(torch.arange(4))
    assert poll_once(rb, rb.sample, 1.0, 70.0).tolist() == [0, 1, 2, 3], "what may go ahead is not refused for its age"
