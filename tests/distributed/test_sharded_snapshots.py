"""Snapshots of shards in actors: what other handles, processes and restarts change; more is in `test_snapshots`."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, QueueSampler, ShardedReplayBuffer
from ostinato.distributed.routing import split_index
from ostinato.errors import EmptyBufferError, OptionError

from ..stats.chi_square import p_value

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")


def make(**more: Any) -> ShardedReplayBuffer:
    storage = partial(LazyTensorStorage, 2000)
    return ShardedReplayBuffer(
        3, storage=storage, snapshot_age_s=1e6, remote_config={"num_cpus": 0}, **{"batch_size": 64, **more}
    )


@pytest.fixture(scope="module")
def shards(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    made = make(sampler=partial(PrioritizedSampler, 2000, 1.0, 1.0, 0.0), generator=torch.Generator().manual_seed(1))
    yield made
    made.close()


def rows(first: int, n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + n)}


def write_elsewhere(rb: ShardedReplayBuffer, cluster: Any, shard: int, data: Any) -> None:
    """Write as another process does, unnoticed by this one."""
    cluster.get(rb.actors[shard].call.remote("extend", data))


def drawn(rb: ShardedReplayBuffer, batches: int) -> torch.Tensor:
    return torch.cat([rb.sample()["x"] for _ in range(batches)])


def test_a_snapshot_serves_many_batches(shards: ShardedReplayBuffer, cluster: Any) -> None:
    shards.empty()
    for shard, size in enumerate((5, 60, 200)):
        shards.pinned(shard).extend(rows(300 * shard, size))
    counts = torch.bincount(drawn(shards, 80), minlength=900)
    present = torch.cat([torch.arange(300 * i, 300 * i + n) for i, n in enumerate((5, 60, 200))])
    assert int(counts.sum()) == int(counts[present].sum())
    assert p_value(counts[present].tolist()) > 1e-4
    shards.sample(17)  # sizes may change within a snapshot
    write_elsewhere(shards, cluster, 0, rows(5000, 1500))
    assert int(drawn(shards, 5).max()) < 5000


def test_changes_by_any_handle_of_this_process_are_seen_at_once(shards: ShardedReplayBuffer) -> None:
    shards.empty()
    index = torch.cat([shards.pinned(shard).extend(rows(100 * shard, 10)) for shard in range(3)])
    shards.sample()
    other = pickle.loads(pickle.dumps(shards))
    other.update_priority(index[:29], torch.zeros(29))
    batch, info = shards.sample(return_info=True)
    assert set(batch["x"].tolist()) == {209}
    torch.testing.assert_close(info["priority_weight"], torch.ones(64))
    other.pinned(0).extend(rows(1000, 500))
    assert 1000 <= int(drawn(shards, 2).max()) < 1500
    other.empty()
    with pytest.raises(EmptyBufferError):
        shards.sample()


@pytest.mark.parametrize("depth", [3, 8])
def test_prefetched_batches_come_from_snapshots(shards: ShardedReplayBuffer, depth: int) -> None:
    shards.empty()
    for shard, size in enumerate((20, 0, 70)):
        if size:
            shards.pinned(shard).extend(rows(300 * shard, size))
    handle = shards._handle(prefetch=depth)
    present = torch.cat([torch.arange(20), torch.arange(600, 670)])
    found: list[int] = []

    def read() -> None:
        for _ in range(30):
            found.extend(handle.sample()["x"].tolist())

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert p_value(torch.bincount(torch.tensor(found), minlength=900)[present].tolist()) > 1e-4
    assert len(found) == 60 * 64


def test_offers_of_a_shard_that_was_restarted_are_replaced(cluster: Any) -> None:
    with make() as rb:
        for shard in range(3):
            rb.pinned(shard).extend(rows(100 * shard, 50))
        rb.sample()
        os.kill(cluster.get(rb.actors[1].apply.remote(_pid)), signal.SIGKILL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            owners = [split_index(rb.sample(return_info=True)[1]["index"])[0] for _ in range(5)]
        assert 1 not in torch.cat(owners[1:])
        assert p_value(torch.bincount(torch.cat(owners), minlength=3)[[0, 2]].tolist()) > 1e-4


def _pid(_: Any) -> int:
    return os.getpid()


def test_a_queue_hands_out_every_row_once(cluster: Any) -> None:
    with make(sampler=QueueSampler) as rb:
        for shard in range(3):
            rb.pinned(shard).extend(rows(400 * shard, 300))
        readers, found = [rb, *rb.clients(2)], []
        for number in range(14):
            found += readers[number % 3].sample(timeout_s=30.0)["x"].tolist()
        assert len(found) == 14 * 64
        assert len(set(found)) == len(found)


def test_an_invalid_age_raises_before_an_actor_is_started() -> None:
    with pytest.raises(OptionError, match="snapshot_age_s must be a number of seconds"):
        ShardedReplayBuffer(2, storage=partial(LazyTensorStorage, 10), snapshot_age_s=-1.0)
