"""One cluster for all tests, and buffers in it that many tests use one after the other.

Starting an actor takes seconds, so tests empty these buffers and replace their parts. A test that needs other options
of the constructor makes its own.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    RayReplayBuffer,
    RoundRobinWriter,
    ShardedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.buffers.portion import reseed
from ostinato.distributed.rate_limits import RateLimits
from ostinato.transforms import Compose

from .handles import LONG_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NO_CPU = {"num_cpus": 0}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of processes where actors are threads."""
    items[:] = [
        item
        for item in items
        if not ("processes" in getattr(item, "fixturenames", ()) and item.callspec.params["cluster"] == "threads")  # type: ignore[attr-defined]
    ]


@pytest.fixture(scope="package", params=["threads", pytest.param("ray", marks=pytest.mark.ray)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module `ray`, connected to a cluster; or one whose actors are threads (see `threads.py`)."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")
    if request.param == "threads":
        from .threads import ACTORS, module

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "ray", module())
            yield sys.modules["ray"]
            for one in ACTORS:
                one.die()
        return
    ray.init(
        address="local",  # a new one, even if another cluster is running
        num_cpus=4,
        object_store_memory=150_000_000,
        include_dashboard=False,
        logging_level=40,
        log_to_driver=False,
    )
    yield ray
    # A thread that calls Ray while it shuts down ends the process: those of dropped handles come to their ends first.
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("ostinato-shards"):
            thread.join(LONG_S)
    ray.shutdown()


@pytest.fixture
def processes(cluster: Any) -> Any:
    """The same, for tests of processes: actors are never threads."""
    return cluster


# -- a buffer in an actor ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="package")
def actor(cluster: Any) -> Iterator[RayReplayBuffer]:
    with closing(RayReplayBuffer(storage=partial(LazyTensorStorage, 1000), batch_size=8, remote_config=NO_CPU)) as rb:
        yield rb


@pytest.fixture
def remote(actor: RayReplayBuffer) -> Iterator[Callable[..., RayReplayBuffer]]:
    """Empty the actor's buffer and set its parts; return a handle."""
    handles: list[RayReplayBuffer] = []

    def make(
        limiter: RateLimiter | None = None,
        sampler: Any = RandomSampler,
        capacity: int = 1000,
        prefetch: int = 0,
        transform: Any = None,
    ) -> RayReplayBuffer:
        actor.set_storage(LazyTensorStorage(capacity))
        actor.set_sampler(sampler())
        actor.set_writer(RoundRobinWriter(track_generations=True))
        actor.empty()
        actor.apply(_begin_anew, limiter, transform)
        actor._client.describe()  # handles know whether calls wait
        handles.append(actor._handle(prefetch=prefetch))
        return handles[-1]

    yield make
    for handle in handles:
        handle._drop()
    actor.apply(_begin_anew, None, None)  # ends calls that still wait


def _begin_anew(buffer: Any, limiter: RateLimiter | None, transform: Any) -> None:
    reseed(buffer, 3)
    buffer._transform = Compose.of(transform)
    with buffer._engine.lock:
        buffer._engine.store.added = ()
        buffer._engine.begin_limiter(limiter)
        buffer._engine.waiters.wake()


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="package")
def fleet(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedReplayBuffer]:
    """Three prioritized shards of TensorDicts, with a directory for checkpoints."""
    made = ShardedReplayBuffer(
        3,
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(LazyTensorStorage, 4000),
        sampler=partial(PrioritizedSampler, 4000, 0.7, 0.6, 0.0),
        writer=partial(RoundRobinWriter, track_generations=True),
        batch_size=256,
        checkpoint_dir=tmp_path_factory.mktemp("fleet"),
        generator=torch.Generator().manual_seed(5),
        shard_timeout_s=120.0,
        remote_config=NO_CPU,
    )
    with closing(made):
        for shard in range(3):
            made.pinned(shard).extend(TensorDict({"x": torch.zeros(1)}, [1]))  # imports take long on a busy machine
        yield made


@pytest.fixture
def shards(fleet: ShardedReplayBuffer) -> ShardedReplayBuffer:
    """The fleet, complete and empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        until(lambda: len(fleet.apply(len)) == 3)
        fleet.reset()
    return fleet


@pytest.fixture(scope="package")
def two_shards(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    made = ShardedReplayBuffer(
        2, storage=partial(LazyTensorStorage, 2000), batch_size=16, shard_timeout_s=60.0, remote_config=NO_CPU
    )
    with closing(made):
        yield made


@pytest.fixture
def remade(cluster: Any, two_shards: ShardedReplayBuffer) -> Callable[..., ShardedReplayBuffer]:
    """Empty two shards and set their parts and limiter; return a handle."""

    def make(
        limiter: RateLimiter | None = None, sampler: Any = RandomSampler, capacity: int = 2000, **fleet: Any
    ) -> ShardedReplayBuffer:
        two_shards.reset()
        two_shards.apply(_renew, capacity, sampler)
        made = sampler()
        cluster.get(two_shards._fleet.actor.__ray_call__.remote(_set_limiter, limiter))
        info = two_shards._fleet.info._replace(
            capacity=capacity,
            counting=made.counting,
            waits=isinstance(made, QueueSampler),
            prioritized=made.prioritized,
        )
        return two_shards._handle(described=info, rate_limiter=limiter, **fleet)

    return make


def _renew(buffer: Any, capacity: int, sampler: Any) -> None:
    buffer.set_storage(LazyTensorStorage(capacity))
    buffer.set_sampler(sampler())


def _set_limiter(actor: Any, limiter: RateLimiter | None) -> None:
    RateLimits.__init__(actor, limiter or RateLimiter(), actor._fleet.shards)
