"""Processes of a fleet that are killed with SIGKILL, where no other file has the case; see the table in failures.md."""

from __future__ import annotations

import threading
import time
import warnings
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ostinato import LazyTensorStorage, RateLimiter, RayReplayBuffer, ReplayBuffer, ShardedReplayBuffer
from ostinato.errors import LostBufferError, WaitTimeoutError

from .handles import kill, outcome, process_of, stopped, until
from .rows import Calls, check_rows, make_rows, sample_until, stored

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


def wait_for_restart(rb: ShardedReplayBuffer, *killed: int) -> None:
    """Sample until other processes hold the shards."""

    def restarted() -> bool:
        now = rb.apply(process_of)
        return not rb.missing and len(now) == rb.num_shards and not set(killed) & set(now)

    sample_until(rb, Calls(LIMIT_S), restarted)


class Learner:
    """Samples until it is killed."""

    def learn(self, rb: ShardedReplayBuffer) -> None:
        while True:
            check_rows(rb.sample())


def test_a_killed_learner_costs_the_batches_on_their_way(cluster: Any, rb: ShardedReplayBuffer) -> None:
    learner = cluster.remote(Learner).options(num_cpus=0, max_concurrency=2).remote()
    process, before = cluster.get(learner.__ray_call__.remote(process_of)), rb.apply(process_of)
    drawn = rb.stats().rows_drawn
    running = learner.learn.remote(rb._handle(prefetch=4))
    until(lambda: rb.stats().rows_drawn >= drawn + 1024, LIMIT_S)
    kill(process)
    with pytest.raises(cluster.exceptions.RayActorError):
        cluster.get(running)
    assert rb.apply(process_of) == before
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


def test_a_shard_killed_during_a_checkpoint_returns_with_the_previous_one(
    rb: ShardedReplayBuffer, tmp_path: Path
) -> None:
    rb.pinned(0).extend(make_rows(100_000, 1000))
    process, flag = rb.apply(process_of)[0], tmp_path / "saving"
    rb.apply(_slow_saves, flag)
    saving = threading.Thread(target=outcome, args=(rb._handle().checkpoint,), daemon=True)
    saving.start()
    until(flag.exists)
    kill(process)
    wait_for_restart(rb, process)
    saving.join(LIMIT_S)
    assert not saving.is_alive()
    assert stored(rb) == SAVED


def test_shards_that_are_all_killed_return_with_their_checkpoints(rb: ShardedReplayBuffer) -> None:
    rb.extend(make_rows(500_000, 10))  # not saved
    killed = rb.apply(process_of)
    kill(*killed)
    check_rows(Calls(LIMIT_S)(rb._handle(call_timeout_s=LIMIT_S).sample))
    wait_for_restart(rb, *killed)
    assert stored(rb) == SAVED


# -- clients and the limiter ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    """Shards of 64 rows each under a limiter; the last test ends the limiter."""
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
    yield made
    with stopped(*made.apply(process_of)):
        assert outcome(made.close).took_s < LIMIT_S / 2


def _acquire_and_die(rb: ShardedReplayBuffer, kind: Any) -> None:
    """Get what the limiter allows, and never reach a shard."""
    assert rb._limiter is not None
    rb._limiter.acquire(kind, 16, 30.0)
    kill(process_of(rb))


def test_a_client_killed_between_the_limiter_and_its_shard_stays_counted(
    cluster: Any, limited: ShardedReplayBuffer
) -> None:
    client = cluster.remote(num_cpus=0, max_retries=0)(_acquire_and_die)
    for kind in ("write", "draw"):
        with pytest.raises(cluster.exceptions.WorkerCrashedError):
            cluster.get(client.remote(limited, kind))
    assert limited.limiter_counts == (144, 16)
    assert len(limited) == 128
    for first in range(200, 456, 16):
        limited.extend(make_rows(first, 16), timeout_s=LIMIT_S)
        check_rows(limited.sample(timeout_s=LIMIT_S))


def drain(rb: ShardedReplayBuffer, message: str) -> None:
    """Sample until the limiter raises `message`: it may be restarting, or not know yet that a shard is lost."""
    deadline, last = time.monotonic() + LIMIT_S, "no call timed out"
    while message not in last:
        assert time.monotonic() < deadline, last
        try:
            rb.sample(timeout_s=0.1)
        except WaitTimeoutError as error:
            last = str(error)


def test_a_restarted_limiter_counts_anew(cluster: Any, limited: ShardedReplayBuffer) -> None:
    limited.sample()
    cluster.kill(limited._connection.fleet.actor, no_restart=False)
    limited.sample(timeout_s=LIMIT_S)
    drain(limited, "96 row(s) written, 1600 drawn")
    limited.extend(make_rows(1000, 16))
    limited.sample(timeout_s=LIMIT_S)


def test_the_rows_of_a_lost_shard_do_not_count(cluster: Any, limited: ShardedReplayBuffer) -> None:
    limited.empty()
    for shard in range(2):
        limited.pinned(shard).extend(make_rows(64 * shard, 64))
    limited.sample()
    kill(cluster.get(limited.actors[1].apply.remote(process_of)))
    drain(limited, "min_size_to_sample is 96")
    limited.pinned(0).extend(make_rows(2000, 96), timeout_s=5.0)  # with too few rows no write waits
    assert check_rows(limited.sample(timeout_s=30.0))


def sample_on(rb: ShardedReplayBuffer) -> None:
    """Sample until something is raised: permits that a limiter had lent are used up first."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        rb.sample()


def test_the_error_of_a_dead_limiter_says_what_to_do(cluster: Any, limited: ShardedReplayBuffer) -> None:
    cluster.kill(limited._connection.fleet.actor)
    with pytest.raises(LostBufferError, match=r"rate limiter is gone for good .* shards keep their rows") as caught:
        sample_on(limited)
    assert "its rows" not in str(caught.value)
    assert len(limited) > 0


def test_the_rows_of_a_killed_ray_buffer_are_those_of_its_checkpoint(cluster: Any, tmp_path: Path) -> None:
    storage = partial(LazyTensorStorage, 1000)
    with closing(RayReplayBuffer(storage=storage, batch_size=8, remote_config={"num_cpus": 0})) as rb:
        rb.extend(make_rows(0, 100))
        rb.dumps(tmp_path / "saved")
        rb.extend(make_rows(100, 100))
        kill(rb.apply(process_of))
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
