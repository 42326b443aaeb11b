"""Actors and clients of a fleet that are killed or stopped, where no other file has the case; see failures.md."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from ostinato import LazyTensorStorage, RateLimiter, RayReplayBuffer, ReplayBuffer, ShardedReplayBuffer
from ostinato.errors import LostBufferError, WaitTimeoutError

from .handles import kill, outcome, stopped, until
from .rows import Calls, Writer, check_rows, make_rows, stored, writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

LIMIT_S = 90.0
"""Longest time of a call: that of an actor's restart on a busy machine."""
SAVED = dict.fromkeys(range(3000), 1)


@pytest.fixture
def rb(shards: ShardedReplayBuffer) -> ShardedReplayBuffer:
    """Shards with 1000 rows each, which are saved."""
    for shard in range(3):
        shards.pinned(shard).extend(make_rows(1000 * shard, 1000))
    shards.checkpoint()
    return shards


@pytest.fixture(autouse=True)
def no_warnings_of_lost_shards() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def sample_until_back(rb: ShardedReplayBuffer, number: int) -> None:
    """Sample until row `number`, which was not saved, is gone, and all shards answer."""

    def back() -> bool:
        check_rows(Calls(LIMIT_S)(rb.sample))
        return not rb.missing and number not in stored(rb) and not rb.missing

    until(back, LIMIT_S)


class Learner:
    """Samples until it is killed."""

    def learn(self, rb: ShardedReplayBuffer) -> None:
        while True:
            check_rows(rb.sample())


def test_a_killed_learner_costs_the_batches_on_their_way(processes, rb):
    learner = processes.remote(Learner).options(num_cpus=0, max_concurrency=2).remote()
    drawn = rb.stats().rows_drawn
    running = learner.learn.remote(rb._handle(prefetch=4))
    until(lambda: rb.stats().rows_drawn >= drawn + 1024, LIMIT_S)
    kill(processes, learner)
    with pytest.raises(processes.exceptions.RayActorError):
        processes.get(running)
    check_rows(rb.sample())
    assert stored(rb) == SAVED


def _slow_saves(buffer: Any, flag: Path) -> None:
    """Let the save of a shard with unsaved rows take long, and say when it has begun."""

    def hook(data: Any, **_: Any) -> Any:
        flag.touch()
        time.sleep(LIMIT_S)
        return data

    if len(buffer) > 1000:
        buffer.register_save_hook(hook)


def test_a_shard_killed_during_a_checkpoint_returns_with_the_previous_one(processes, rb, tmp_path):
    rb.pinned(0).extend(make_rows(100_000, 1000))
    flag = tmp_path / "saving"
    rb.apply(_slow_saves, flag)
    saving = threading.Thread(target=outcome, args=(rb._handle().checkpoint,), daemon=True)
    saving.start()
    until(flag.exists)
    kill(processes, rb.actors[0])
    sample_until_back(rb, 100_000)
    saving.join(LIMIT_S)
    assert not saving.is_alive()
    assert stored(rb) == SAVED


def test_shards_that_are_all_killed_return_with_their_checkpoints(cluster, rb):
    for shard in range(3):
        rb.pinned(shard).extend(make_rows(500_000, 10))  # not saved
    kill(cluster, *rb.actors)
    check_rows(Calls(LIMIT_S)(rb._handle(call_timeout_s=LIMIT_S).sample))
    sample_until_back(rb, 500_000)
    assert stored(rb) == SAVED


def test_a_shard_that_dies_again_before_it_is_back_returns(cluster, rb):
    cluster.kill(rb.actors[0], no_restart=False)
    until(lambda: not rb.sample().batch_size or 0 in rb.missing)
    cluster.kill(rb.actors[0], no_restart=False)
    until(lambda: len(rb.apply(len)) == 3)
    assert stored(rb) == SAVED


def test_a_shard_that_is_silent_for_a_while_loses_nothing(cluster, rb):
    """Its rows are back; writes that it had received, and did not confirm, may be stored twice."""
    calls, handle = Calls(LIMIT_S), rb._handle(shard_timeout_s=0.3)
    writers = [Writer(handle.pinned(shard), 100_000 * (shard + 1), calls) for shard in range(2)]
    with writing(writers):
        until(lambda: all(writer.acknowledged for writer in writers))
        with stopped(cluster, rb.actors[1]):
            until(lambda: check_rows(calls(handle.sample)) != [] and list(handle.missing) == [1])
        until(lambda: check_rows(calls(handle.sample)) != [] and not handle.missing)
    held = stored(rb)
    acknowledged = {number for writer in writers for number in writer.acknowledged}
    assert SAVED.keys() | acknowledged <= held.keys()
    assert max(held.values()) <= 2
    assert sum(times > 1 for times in held.values()) <= 2 * 16


def test_a_shard_that_is_slow_delays_calls_only(cluster, rb):
    with stopped(cluster, rb.actors[1]):
        writing = threading.Thread(target=rb.pinned(1).extend, args=(make_rows(5000, 16),))
        writing.start()
        writing.join(0.4)
        assert writing.is_alive()
    writing.join(LIMIT_S)
    assert not rb.missing
    assert stored(rb) == SAVED | dict.fromkeys(range(5000, 5016), 1)


# -- clients and the limiter ------------------------------------------------------------------------------------------


def make_limited() -> ShardedReplayBuffer:
    """Return shards of 64 rows each under a limiter."""
    made = ShardedReplayBuffer(
        2,
        storage=partial(LazyTensorStorage, 2000),
        batch_size=16,
        shard_timeout_s=60.0,
        rate_limiter=RateLimiter(samples_per_insert=1, error_buffer=1600, min_size_to_sample=96),
        remote_config={"num_cpus": 0},
    )
    for shard in range(2):
        made.pinned(shard).extend(make_rows(64 * shard, 64))
    return made


@pytest.fixture(scope="module")
def limited(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    made = make_limited()
    yield made
    with stopped(cluster, *made.actors):
        assert outcome(made.close).took_s < LIMIT_S / 2


def _acquire_and_die(rb: ShardedReplayBuffer, kind: Any) -> None:
    """Get what the limiter allows, and never reach a shard."""
    assert rb._limiter is not None
    rb._limiter.acquire(kind, 16, 30.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_client_killed_between_the_limiter_and_its_shard_stays_counted(processes, limited):
    client = processes.remote(num_cpus=0, max_retries=0)(_acquire_and_die)
    assert limited.limiter_counts is not None
    (written, drawn), held = limited.limiter_counts, len(limited)
    for kind in ("write", "draw"):
        with pytest.raises(processes.exceptions.WorkerCrashedError):
            processes.get(client.remote(limited, kind))
    assert limited.limiter_counts == (written + 16, drawn + 16)
    assert len(limited) == held
    for first in range(200, 456, 16):
        limited.extend(make_rows(first, 16), timeout_s=LIMIT_S)
        check_rows(limited.sample(timeout_s=LIMIT_S))


class _Full:
    """Stands for the handle of a shard on a machine whose object store is full."""

    def __init__(self, error: Exception) -> None:
        self.write, self._error = self, error

    def options(self, **_: Any) -> Any:
        return self

    def remote(self, *_: Any) -> None:
        raise self._error


def test_rows_that_cannot_be_sent_are_not_counted(cluster, limited):
    counts, handle = limited.limiter_counts, limited.pinned(0)
    shard, handle._shards.actors[0] = handle._shards.actors[0], _Full(cluster.exceptions.ObjectStoreFullError("full"))
    with pytest.raises(cluster.exceptions.ObjectStoreFullError):
        handle.extend(make_rows(3000, 16))
    until(lambda: limited.limiter_counts == counts)  # the limiter is told without waiting for it
    handle._shards.actors[0] = shard
    handle.extend(make_rows(3000, 16))
    assert stored(limited)[3000] == 1


def drain(rb: ShardedReplayBuffer, message: str) -> None:
    """Sample until the limiter raises `message`: it may be restarting, or not know yet that a shard is lost."""
    deadline, last = time.monotonic() + LIMIT_S, "no call timed out"
    while message not in last:
        assert time.monotonic() < deadline, last
        try:
            rb.sample(timeout_s=0.1)
        except WaitTimeoutError as error:
            last = str(error)


def test_a_restarted_limiter_counts_anew(cluster, limited):
    limited.sample()
    cluster.kill(limited._fleet.actor, no_restart=False)
    limited.sample(timeout_s=LIMIT_S)
    drain(limited, "96 row(s) written, 1600 drawn")
    limited.extend(make_rows(1000, 16))
    limited.sample(timeout_s=LIMIT_S)


def test_the_rows_of_a_lost_shard_do_not_count(cluster, limited):
    limited.empty()
    for shard in range(2):
        limited.pinned(shard).extend(make_rows(64 * shard, 64))
    limited.sample()
    recount = Mock(wraps=limited._shards.on_change)
    limited._shards.on_change = recount
    kill(cluster, limited.actors[1])
    drain(limited, "min_size_to_sample is 96")
    assert recount.called, "the limiter counts the rows at once"
    limited.pinned(0).extend(make_rows(2000, 96), timeout_s=5.0)  # with too few rows no write waits
    assert check_rows(limited.sample(timeout_s=30.0))


def test_the_error_of_a_dead_limiter_says_what_to_do(cluster):
    with closing(make_limited()) as limited:
        cluster.kill(limited._fleet.actor)
        with pytest.raises(LostBufferError, match=r"rate limiter is gone for good .* shards keep their rows"):
            limited.sample()
        assert len(limited) == 128


def test_the_rows_of_a_killed_ray_buffer_are_those_of_its_checkpoint(cluster, tmp_path):
    storage = partial(LazyTensorStorage, 1000)
    with closing(RayReplayBuffer(storage=storage, batch_size=8, remote_config={"num_cpus": 0})) as rb:
        rb.extend(make_rows(0, 100))
        rb.dumps(tmp_path / "saved")
        rb.extend(make_rows(100, 100))
        kill(cluster, rb.actor)
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
    local = ReplayBuffer(storage=storage())
    local.loads(tmp_path / "saved")
    assert check_rows(local[:]) == list(range(100))
