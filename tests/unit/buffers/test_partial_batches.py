"""`can_sample` and `can_insert` as snapshots, and batches that are smaller because the time is up."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    ConsumingSampler,
    LazyTensorStorage,
    LimitedSampler,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
)
from ostinato.errors import EmptyBufferError, OptionError, WaitTimeoutError

from ...effort import examples
from .refusals import refuses


def buffer(sampler: Any = None, capacity: int = 64, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(**{"storage": LazyTensorStorage(capacity), "sampler": sampler, "batch_size": 4, **options})


def counts(rb: ReplayBuffer) -> tuple[int, int]:
    (limit,) = rb._engine.limits
    return limit.flow.written, limit.flow.drawn


SAMPLERS: dict[str, Any] = {
    "uniform": RandomSampler,
    "queue": QueueSampler,
    "limited": lambda: LimitedSampler(2),
    "consuming": ConsumingSampler,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(64, 0.7, 0.5),
}


LIMITERS = [RateLimiter(1.5, 6, 4), RateLimiter(samples_per_insert=1, min_diff=-2, max_diff=9), RateLimiter()]


@pytest.mark.parametrize("name", SAMPLERS)
@examples(0.4)
@given(st.sampled_from(LIMITERS), st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=30))
def test_snapshots_say_what_the_call_does(name, limiter, calls):
    """And change no draw: the twin, which nothing looks at, gives the same."""
    rb, twin = (
        buffer(SAMPLERS[name](), 16, rate_limiter=limiter, generator=torch.Generator().manual_seed(0)) for _ in range(2)
    )
    written = 0
    for writes, rows in calls:
        able = rb.can_insert(rows) if writes else rb.can_sample(rows)
        try:
            if writes:
                written += rows
                for one in (rb, twin):
                    one.extend(torch.arange(written, written + rows), timeout_s=0.0)
            else:
                found = rb.sample(rows, timeout_s=0.0)
                assert torch.equal(found, twin.sample(rows, timeout_s=0.0))
                assert len(found) == rows or name == "without"  # the end of a pass
            done = True
        except (WaitTimeoutError, OptionError, EmptyBufferError):
            done = False
        assert able == done


# -- partial batches --------------------------------------------------------------------------------------------------


def test_a_batch_is_as_large_as_the_band_allows():
    rb = buffer(rate_limiter=RateLimiter(samples_per_insert=1, min_diff=0, max_diff=100), batch_size=8)
    rb.extend(torch.arange(5))
    began = time.monotonic()
    batch, info = rb.sample(timeout_s=0.2, min_batch=3, return_info=True)
    assert time.monotonic() - began >= 0.2
    assert len(batch) == len(info["index"]) == 5
    rb.extend(torch.arange(2))
    with pytest.raises(WaitTimeoutError, match="a draw of 8 row"):
        rb.sample(timeout_s=0.0, min_batch=3)
    assert counts(rb) == (7, 5)
    assert len(rb.sample(timeout_s=0.0, min_batch=2)) == 2
    rb.extend(torch.arange(40))
    assert len(rb.sample(timeout_s=0.0, min_batch=2)) == 8
    assert counts(rb) == (47, 15)


@pytest.mark.parametrize(("sampler", "rows"), [(LimitedSampler(2), 3), (ConsumingSampler(), 6)])
@pytest.mark.parametrize("limiter", [None, RateLimiter(timeout_s=0.0)])
def test_limited_rows_give_what_is_left(sampler, rows, limiter):
    rb = buffer(copy.deepcopy(sampler), rate_limiter=limiter)
    assert rb.can_insert(10_000)
    rb.extend(torch.arange(rows))
    kind = EmptyBufferError if limiter is None else WaitTimeoutError
    first = rb.sample(min_batch=3)
    with pytest.raises(kind, match="can be drawn 2 more"):
        rb.sample(min_batch=3)
    rest = rb.sample(min_batch=2)
    assert (len(first), set(torch.bincount(torch.cat([first, rest])).tolist())) == (4, {6 // rows})
    with pytest.raises(kind):
        rb.sample(min_batch=1)


def test_what_min_batch_does_not_go_with():
    plain, limited, ahead = buffer(), buffer(rate_limiter=RateLimiter()), buffer(rate_limiter=RateLimiter(), prefetch=2)
    queue = buffer(QueueSampler(), 8)
    for rb in (plain, limited, ahead):
        rb.extend(torch.arange(8))
    refuses(
        {
            OptionError: {
                "min_batch=2 has no effect": lambda: plain.sample(4, min_batch=2),
                "does not go with prefetch": lambda: ahead.sample(4, min_batch=2),
                "does not go with out": lambda: limited.sample(4, min_batch=2, out=torch.zeros(4)),
                r"min_batch must be an integer in \[1, 4\]": lambda: limited.sample(4, min_batch=5),
                "a batch of 9 rows never comes together": lambda: queue.sample(100, min_batch=9),
                "rows must be a positive integer": lambda: plain.can_insert(0),
            },
        }
    )
    assert ReplayBufferEnsemble(plain, batch_size=2).can_insert() is False
    ahead.close()
