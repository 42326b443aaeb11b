"""Processes of a fleet that are killed with SIGKILL, where no other file has the case; see the table in failures.md."""

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

from ostinato import LazyTensorStorage, RateLimiter, RayReplayBuffer, ShardedReplayBuffer
from ostinato.errors import LostBufferError

from .rows import Calls, check_rows, make_rows, sample_until, stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

LIMIT_S = 90.0
"""Longest time of a call: that of an actor's restart on a busy machine."""
SAVED = dict.fromkeys(range(20_000), 1)


def make(**more: Any) -> ShardedReplayBuffer:
    storage = partial(LazyTensorStorage, 60_000)
    return ShardedReplayBuffer(2, storage=storage, **{"batch_size": 16, "shard_timeout_s": 60.0, **more})


@pytest.fixture(scope="module")
def rb(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedReplayBuffer]:
    """Shards with 10,000 rows each, which are saved."""
    with closing(make(checkpoint_dir=tmp_path_factory.mktemp("deaths"))) as made:
        for shard in range(2):
            made.pinned(shard).extend(make_rows(10_000 * shard, 10_000))
        made.checkpoint()
        yield made


@pytest.fixture(autouse=True)
def no_warnings_of_lost_shards() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def pids(rb: ShardedReplayBuffer) -> list[int]:
    return [int(pid) for pid in rb.apply(_pid)]


def _pid(_: Any) -> int:
    return os.getpid()


def wait_for_restart(rb: ShardedReplayBuffer, killed: list[int]) -> None:
    """Sample until other processes hold the shards."""
    calls = Calls(LIMIT_S)
    sample_until(rb, calls, lambda: not rb.missing and len(now := pids(rb)) == 2 and not set(killed) & set(now))


class Learner:
    """Samples until it is killed."""

    def __init__(self, rb: ShardedReplayBuffer) -> None:
        self._rb = rb

    def pid(self) -> int:
        return os.getpid()

    def learn(self) -> None:
        while True:
            check_rows(self._rb.sample())


def test_a_killed_learner_costs_the_batches_on_their_way(cluster: Any, rb: ShardedReplayBuffer) -> None:
    learner = cluster.remote(Learner).options(num_cpus=0).remote(rb._handle(prefetch=4))
    pid, before = cluster.get(learner.pid.remote()), pids(rb)
    running = learner.learn.remote()
    drawn = rb.stats().rows_drawn
    end = time.monotonic() + LIMIT_S
    while rb.stats().rows_drawn < drawn + 64 and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(cluster.exceptions.RayActorError):
        cluster.get(running)
    assert pids(rb) == before
    check_rows(rb.sample())
    assert stored(rb) == SAVED


def _ask_and_die(rb: ShardedReplayBuffer, kind: Any) -> None:
    """Get what the limiter allows, and never reach a shard."""
    assert rb._limiter is not None
    rb._limiter.acquire(kind, 16, 30.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_client_killed_between_the_limiter_and_its_shard_stays_counted(cluster: Any) -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=64, min_size_to_sample=16)
    with closing(make(rate_limiter=limiter)) as rb:
        rb.extend(make_rows(0, 64))
        client = cluster.remote(num_cpus=0, max_retries=0)(_ask_and_die)
        for kind in ("write", "draw"):
            with pytest.raises(cluster.exceptions.WorkerCrashedError):
                cluster.get(client.remote(rb, kind))
        assert cluster.get(rb._connection.fleet.actor.totals.remote()) == (80, 16)
        assert len(rb) == 64
        for first in range(100, 420, 16):
            rb.extend(make_rows(first, 16), timeout_s=LIMIT_S)
            check_rows(rb.sample(timeout_s=LIMIT_S))


def test_a_shard_killed_during_a_checkpoint_returns_with_the_previous_one(rb: ShardedReplayBuffer) -> None:
    for turn in range(2):
        rb.pinned(0).extend(make_rows(100_000 * (turn + 1), 10_000))
        before = pids(rb)
        saving = threading.Thread(target=rb._handle().checkpoint, daemon=True)
        saving.start()
        time.sleep(0.01 + 0.03 * turn)
        os.kill(before[0], signal.SIGKILL)
        wait_for_restart(rb, before[:1])
        saving.join(LIMIT_S)
        assert not saving.is_alive()
        assert stored(rb).keys() >= SAVED.keys()


def test_shards_that_are_all_killed_return_with_their_checkpoints(rb: ShardedReplayBuffer) -> None:
    rb.empty()
    for shard in range(2):
        rb.pinned(shard).extend(make_rows(10_000 * shard, 10_000))
    rb.checkpoint()
    rb.extend(make_rows(500_000, 10))  # not saved
    killed = pids(rb)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    check_rows(Calls(LIMIT_S)(rb.sample))
    wait_for_restart(rb, killed)
    assert stored(rb) == SAVED


def test_the_rows_of_a_killed_ray_buffer_are_those_of_its_checkpoint(cluster: Any, tmp_path: Path) -> None:
    def make_buffer() -> RayReplayBuffer:
        return RayReplayBuffer(storage=partial(LazyTensorStorage, 1000), batch_size=8)

    with closing(make_buffer()) as rb:
        rb.extend(make_rows(0, 100))
        rb.dumps(tmp_path / "saved")
        rb.extend(make_rows(100, 100))
        os.kill(rb.apply(_pid), signal.SIGKILL)
        calls: tuple[Any, ...] = (
            rb.sample,
            lambda: rb.extend(make_rows(0, 1)),
            lambda: len(rb),
            rb.stats,
            lambda: rb[0],
        )
        for call in calls:
            with pytest.raises(LostBufferError):
                Calls(LIMIT_S)(call)
    with closing(make_buffer()) as rb:
        rb.loads(tmp_path / "saved")
        assert check_rows(rb[:]) == list(range(100))
