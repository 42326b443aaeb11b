"""Buffers in Ray: what a call would do now, and batches that are smaller because the time is up."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    LimitedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    RayReplayBuffer,
    ShardedReplayBuffer,
)
from ostinato.distributed.deadlines import POLL_S
from ostinato.errors import EmptyBufferError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

LONG = 60.0
EDGES = RateLimiter(samples_per_insert=1, min_diff=0, max_diff=40, min_size_to_sample=4)


def rows(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(n)}


@pytest.fixture(scope="module")
def limited(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    made = ShardedReplayBuffer(
        2, storage=partial(LazyTensorStorage, 100), batch_size=8, rate_limiter=EDGES, route="round_robin"
    )
    with closing(made):
        yield made


@pytest.fixture(scope="module")
def queues(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    made = ShardedReplayBuffer(
        2, storage=partial(LazyTensorStorage, 8), sampler=QueueSampler, batch_size=12, route="round_robin"
    )
    with closing(made):
        yield made


def test_shards_give_as_many_rows_as_the_limiter_allows(limited: ShardedReplayBuffer) -> None:
    rb = limited
    assert (rb.can_sample(), rb.can_sample(1), rb.can_insert(40), rb.can_insert(41)) == (False, False, True, False)
    rb.extend(rows(3), timeout_s=LONG)
    assert not rb.can_sample(1)  # below min_size_to_sample
    rb.extend(rows(3), timeout_s=LONG)
    assert (rb.can_sample(6), rb.can_sample(7), rb.can_insert(34), rb.can_insert(35)) == (True, False, True, False)
    batch, info = rb.sample(timeout_s=0.1, min_batch=2, return_info=True)
    assert len(batch["x"]) == len(info["index"]) == 6
    with pytest.raises(WaitTimeoutError, match="a draw of 8 row"):
        rb.sample(timeout_s=0.0, min_batch=1)
    rb.extend(rows(20), timeout_s=0.0)
    assert len(rb.sample(timeout_s=0.0, min_batch=1)["x"]) == 8
    assert (rb.can_sample(12), rb.can_sample(13), rb.can_insert(28), rb.can_insert(29)) == (True, False, True, False)
    for asked, said in ((9, r"min_batch must be an integer in \[1, 8\]"), (0, "got 0")):
        with pytest.raises(OptionError, match=said):
            rb.sample(timeout_s=0.0, min_batch=asked)


def test_queue_shards_give_what_they_have(queues: ShardedReplayBuffer) -> None:
    rb = queues.pinned(0)
    assert not rb.can_sample(1)
    rb.extend(rows(5), timeout_s=LONG)
    queues.pinned(1).extend(rows(4), timeout_s=LONG)
    assert (rb.can_sample(9), rb.can_sample(10), rb.can_insert(3), rb.can_insert(4)) == (True, False, True, False)
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.05, min_batch=10)
    found = rb.sample(timeout_s=0.05, min_batch=9)["x"]
    assert sorted(found.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.05, min_batch=1)
    assert rb.can_insert(8)


def test_an_actor_gives_a_smaller_batch_in_its_last_poll(cluster: Any) -> None:
    buffer = RayReplayBuffer(storage=partial(LazyTensorStorage, 100), batch_size=8, rate_limiter=EDGES)
    with closing(buffer) as rb:
        assert (rb.can_sample(), rb.can_insert(40), rb.can_insert(41)) == (False, True, False)
        rb.extend(rows(6), timeout_s=LONG)
        assert (rb.can_sample(6), rb.can_sample(7)) == (True, False)
        began = time.monotonic()
        assert len(rb.sample(timeout_s=1.5 * POLL_S, min_batch=2)["x"]) == 6
        assert time.monotonic() - began >= 1.5 * POLL_S
        with pytest.raises(WaitTimeoutError):
            rb.sample(timeout_s=0.0, min_batch=1)
        assert rb.stats().rows_drawn == 6
        with pytest.raises(OptionError, match="min_batch must be an integer in"):
            rb.sample(timeout_s=LONG, min_batch=9)


@pytest.mark.slow
def test_what_min_batch_does_not_go_with(cluster: Any) -> None:
    with closing(
        ShardedReplayBuffer(1, storage=partial(LazyTensorStorage, 8), sampler=partial(LimitedSampler, 2), batch_size=6)
    ) as rb:
        rb.extend(rows(2))
        assert (rb.can_sample(4), rb.can_sample(5), rb.can_insert(1000)) == (True, False, True)
        assert sorted(rb.sample(min_batch=3)["x"].tolist()) == [0, 0, 1, 1]
        with pytest.raises(EmptyBufferError):
            rb.sample(min_batch=1)
    with closing(
        ShardedReplayBuffer(1, storage=partial(LazyTensorStorage, 8), sampler=RandomSampler, batch_size=6, prefetch=2)
    ) as rb:
        rb.extend(rows(2))
        with pytest.raises(OptionError, match="does not go with prefetch"):
            rb.sample(min_batch=1)
        assert (rb.can_sample(), rb.can_sample(3)) == (True, False)
