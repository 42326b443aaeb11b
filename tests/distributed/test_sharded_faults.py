"""Shards that are used by threads, die unnoticed, or cannot return; invalid options."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections import Counter
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, QueueSampler, RateLimiter, ShardedReplayBuffer
from ostinato.distributed.routing import split_index
from ostinato.errors import KindError, OptionError, SlotError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")


def make(**more: Any) -> ShardedReplayBuffer:
    storage = partial(LazyTensorStorage, 2000)
    return ShardedReplayBuffer(2, storage=storage, **{"batch_size": 16, "shard_timeout_s": 60.0, **more})


def rows(first: int, n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + n)}


def kill(rb: ShardedReplayBuffer, cluster: Any, shard: int) -> None:
    """Kill a shard's process and wait until Ray has restarted it, without a call of a handle."""
    pid = cluster.get(rb.actors[shard].apply.remote(_pid))
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 90
    while time.monotonic() < until:
        try:
            if cluster.get(rb.actors[shard].apply.remote(_pid)) != pid:
                return
        except cluster.exceptions.RayError:
            time.sleep(0.1)
    pytest.fail("the shard was not restarted")


def _pid(_: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize("depth", [0, 3])
def test_threads_share_a_handle_and_get_each_row_once(cluster: Any, depth: int) -> None:
    with closing(make(sampler=QueueSampler)) as made:
        rb = made._handle(prefetch=depth)
        for shard in range(2):
            rb.pinned(shard).extend(rows(2000 * shard, 1600))
        found: list[int] = []

        def read() -> None:
            try:
                while True:
                    found.extend(rb.sample(timeout_s=0.5)["x"].tolist())  # extending a list is atomic
            except WaitTimeoutError:
                pass

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(Counter(found).values()) == {1}
        assert len(found) == 3200


def test_an_unnoticed_restart_warns_and_changes_the_distribution_at_once(cluster: Any, tmp_path: Path) -> None:
    """Offers of the dead shard are invalid, even if newer offers exist."""
    with closing(make(checkpoint_dir=tmp_path, generator=torch.Generator().manual_seed(2))) as made:
        rb = made._handle(prefetch=1)
        rb.pinned(1).extend(rows(1000, 4))
        rb.checkpoint()
        for shard, count in enumerate([500, 496]):
            rb.pinned(shard).extend(rows(1000 * shard, count))
        for _ in range(4):
            rb.sample()
        for coming in rb._batches._jobs:
            coming.future.exception(60)  # a batch in progress would notice the dead shard
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kill(rb, cluster, 1)
            other = made._handle(prefetch=0)
            for _ in range(6):
                other.sample()  # numbers of offers are not reused
        with pytest.warns(RuntimeWarning, match=r"shard 1 of 2 was restarted: it has 4 rows \(about 500 rows"):
            drawn = [rb.sample(return_info=True)[1]["index"] for _ in range(10)]
        shards, _ = split_index(torch.cat(drawn[3:]))
        assert int((shards == 1).sum()) < 20, "of 112 rows one is expected"


def test_a_shard_that_cannot_return_is_left_out_with_a_warning(cluster: Any, tmp_path: Path) -> None:
    with closing(make(checkpoint_dir=tmp_path, shard_timeout_s=20.0)) as rb:
        for shard in range(2):
            rb.pinned(shard).extend(rows(100 * shard, 50))
        rb.checkpoint()
        for file in (tmp_path / "shard-0001-of-0002").rglob("*"):
            if file.is_file() and file.stat().st_size > 200:
                held = bytearray(file.read_bytes())
                held[len(held) // 2] ^= 0xFF
                file.write_bytes(bytes(held))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            os.kill(cluster.get(rb.actors[1].apply.remote(_pid)), signal.SIGKILL)
            until = time.monotonic() + 60
            while not any("cannot return" in str(one.message) for one in told) and time.monotonic() < until:
                assert rb.sample()["x"].max() < 150
                time.sleep(0.05)
            for _ in range(50):
                assert rb.sample()["x"].max() < 100
        assert sum("cannot return" in str(one.message) for one in told) == 1
        assert list(rb.missing) == [1]


def test_rows_that_replace_others_after_emptying_are_saved(cluster: Any, tmp_path: Path) -> None:
    """As many rows as were saved, but different ones."""
    with closing(make(checkpoint_dir=tmp_path, checkpoint_every_s=0.3)) as rb:
        writer = rb.pinned(0)
        for value in (0, 1):
            rb.empty()
            writer.extend({"x": torch.full((50,), value)})
            wait_for_save(rb, 50)
        time.sleep(1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kill(rb, cluster, 0)
            assert rb.sample()["x"].tolist() == [1] * 16


def wait_for_save(rb: ShardedReplayBuffer, written: int) -> None:
    until = time.monotonic() + 30
    while rb.report()[0].saved_write_count != written and time.monotonic() < until:
        time.sleep(0.05)


def test_a_directory_of_other_shards_raises(cluster: Any, tmp_path: Path) -> None:
    with closing(make(checkpoint_dir=tmp_path)) as rb:
        rb.extend(rows(0, 10))
        rb.checkpoint()
    storage = partial(LazyTensorStorage, 100)
    for resume in (True, False):
        with pytest.raises(OptionError, match="another number of shards, such as shard-0000-of-0002"):
            ShardedReplayBuffer(3, storage=storage, checkpoint_dir=tmp_path, resume=resume)
    with pytest.raises(OptionError, match="resume=True begins with them"):
        make(checkpoint_dir=tmp_path)
    with pytest.warns(UserWarning, match="finds 0 of 1 checkpoints"):
        ShardedReplayBuffer(1, storage=storage, checkpoint_dir=tmp_path / "nowhere", resume=True).close()


def test_any_handle_closes_the_shards_without_waiting(cluster: Any) -> None:
    limiter = RateLimiter(min_size_to_sample=100, timeout_s=600.0)
    rb = make(rate_limiter=limiter, prefetch=2, placement="PACK", remote_config={"num_cpus": 0.1})
    raised: list[Exception] = []

    def read() -> None:
        try:
            rb.sample()
        except Exception as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(1.0)
    began = time.monotonic()
    rb.empty()
    with rb.pinned(1) as handle:
        assert handle.num_shards == 2
    assert time.monotonic() - began < 20
    handle.close()
    reader.join(60)
    assert len(raised) == 1


def test_invalid_options_and_indices(cluster: Any) -> None:
    for name, value in [("shard_timeout_s", -1.0), ("shard_timeout_s", float("nan")), ("shard_timeout_s", "x")]:
        with pytest.raises(OptionError, match=name):
            make(**{name: value})
    for seconds in (0.0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(OptionError, match="checkpoint_every_s"):
            make(checkpoint_dir="nowhere", checkpoint_every_s=seconds)
    with pytest.raises(OptionError, match="max_restarts"):
        make(remote_config={"max_restarts": 0})
    with closing(make(sampler=partial(PrioritizedSampler, 2000, 1.0, 1.0))) as rb:
        index = rb.pinned(1).extend(rows(0, 4))
        for shard in (1.5, True, "1"):
            with pytest.raises(OptionError, match="shard must be an integer"):
                rb.pinned(shard)  # type: ignore[arg-type]
        for wrong in (slice(0, 3), "x"):
            with pytest.raises(KindError, match="are read by what"):
                rb[wrong]
        with pytest.raises(SlotError, match=rf"index {2**40 + 2000} is of no row"):
            rb.update_priority(torch.tensor([int(index[0]), 2**40 + 2000]), torch.tensor([9.0, 9.0]))
        assert rb.sample(return_info=True)[1]["priority_weight"].tolist() == [1.0] * 16, "nothing was changed"
        with pytest.raises(UsageError):
            next(iter(rb._handle(info=rb._connection.info._replace(batch_size=None))))
