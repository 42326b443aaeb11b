"""Shards that die unnoticed, cannot return, or are closed; invalid options."""

from __future__ import annotations

import threading
import time
import warnings
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from ostinato import LazyTensorStorage, RateLimiter, ReplayBuffer, SamplerWithoutReplacement, ShardedReplayBuffer
from ostinato.distributed.routing import split_index
from ostinato.errors import KindError, OptionError

from .handles import kill, until
from .rows import make_rows

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")


def make(**more: Any) -> ShardedReplayBuffer:
    storage = partial(LazyTensorStorage, 2000)
    given = {"batch_size": 16, "remote_config": {"num_cpus": 0.1}, **more}
    return ShardedReplayBuffer(2, storage=storage, **given)


def test_an_unnoticed_restart_warns_and_changes_the_distribution_at_once(cluster, shards):
    """Offers of the dead shard are invalid, even if newer offers exist."""
    rb = shards._handle(prefetch=1)
    rb.pinned(1).extend(make_rows(1000, 4))
    rb.checkpoint()
    for shard, count in enumerate([500, 496]):
        rb.pinned(shard).extend(make_rows(1000 * shard, count))
    for _ in range(4):
        rb.sample()
    for coming in rb._batches.queue.requests:
        coming.made.exception(60)  # a batch in progress would notice the dead shard

    def restarted() -> bool:
        """Ask Ray, without a call of a handle."""
        try:
            return bool(cluster.get(rb.actors[1].call.remote("__len__")) == 4)
        except cluster.exceptions.RayError:
            return False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kill(cluster, rb.actors[1])
        until(restarted, 90.0)
        other = shards._handle(prefetch=0)
        for _ in range(6):
            other.sample()  # numbers of offers are not reused
    with pytest.warns(RuntimeWarning, match=r"shard 1 of 3 was restarted: it has 4 rows \(about 500 rows"):
        drawn = [rb.sample(return_info=True)[1]["index"] for _ in range(10)]
    owners, _ = split_index(torch.cat(drawn[3:]))
    assert int((owners == 1).sum()) < 60, "of 1792 rows 14 are expected"


def test_a_shard_that_cannot_return_is_left_out_with_a_warning(cluster, tmp_path):
    with closing(make(checkpoint_dir=tmp_path, shard_timeout_s=20.0)) as rb:
        for shard in range(2):
            rb.pinned(shard).extend(make_rows(100 * shard, 50))
        rb.checkpoint()
        for file in (tmp_path / "shard-0001-of-0002").rglob("*"):
            if file.is_file() and file.stat().st_size > 200:
                held = bytearray(file.read_bytes())
                held[len(held) // 2] ^= 0xFF
                file.write_bytes(bytes(held))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            kill(cluster, rb.actors[1])

            def said() -> bool:
                assert rb.sample()["number"].max() < 150
                return any("cannot return" in str(one.message) for one in told)

            until(said)
            for _ in range(50):
                assert rb.sample()["number"].max() < 100
        assert sum("cannot return" in str(one.message) for one in told) == 1
        assert list(rb.missing) == [1]


def test_any_handle_closes_the_shards_without_waiting(cluster):
    limiter = RateLimiter(min_size_to_sample=100, timeout_s=600.0)
    rb = make(rate_limiter=limiter, prefetch=2, placement="PACK")
    raised: list[Exception] = []

    def read() -> None:
        try:
            rb.sample()
        except Exception as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.5)
    began = time.monotonic()
    rb.empty()
    with rb.pinned(1) as handle:
        assert handle.num_shards == 2
    assert time.monotonic() - began < 20
    handle.close()
    reader.join(60)
    assert len(raised) == 1


def test_invalid_options_and_indices(shards):
    own = partial(ReplayBuffer, rate_limiter=RateLimiter(min_size_to_sample=2))
    options: list[Any] = [
        ({"placement": "STRICT_SPREAD"}, "needs a node for each of 2 shards, the cluster has 1"),
        ({"remote_config": {"max_restarts": 0}}, "max_restarts"),
        ({"sampler": SamplerWithoutReplacement}, "drawn from as one buffer"),
        ({"replay_buffer_cls": own}, "itself"),
    ]
    for given, words in options:
        with pytest.raises(OptionError, match=words):
            make(**given)
    for shard in (1.5, True, "1", 3):
        with pytest.raises(OptionError, match="shard must be an integer"):
            shards.pinned(shard)
    for wrong in (slice(0, 3), "x"):
        with pytest.raises(KindError):
            shards[wrong]
