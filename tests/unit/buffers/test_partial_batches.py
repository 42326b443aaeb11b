"""`can_sample` and `can_insert` as snapshots, and batches that are smaller because the time is up."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

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
    SliceSampler,
    TensorDictReplayBuffer,
)
from ostinato.errors import EmptyBufferError, OptionError, WaitTimeoutError


def buffer(sampler: Any = None, capacity: int = 64, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, **options)


def counts(rb: ReplayBuffer) -> tuple[int, int]:
    gate = rb._engine.gate
    assert gate is not None
    return gate.flow.written, gate.flow.drawn


SAMPLERS: dict[str, Any] = {
    "uniform": RandomSampler,
    "queue": QueueSampler,
    "limited": lambda: LimitedSampler(2),
    "consuming": ConsumingSampler,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(64, 0.7, 0.5),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(
    "limiter", [RateLimiter(1.5, 6, 4), RateLimiter(samples_per_insert=1, min_diff=-2, max_diff=9), RateLimiter()]
)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=30))
def test_snapshots_say_what_the_call_does(name: str, limiter: RateLimiter, calls: list[tuple[bool, int]]) -> None:
    rb = buffer(SAMPLERS[name](), 16, rate_limiter=limiter, generator=torch.Generator().manual_seed(0))
    for writes, rows in calls:
        able = rb.can_insert(rows) if writes else rb.can_sample(rows)
        assert able == (rb.can_insert(rows) if writes else rb.can_sample(rows))
        try:
            if writes:
                rb.extend(torch.zeros(rows), timeout_s=0.0)
            else:
                found = rb.sample(rows, timeout_s=0.0)
                assert len(found) == rows or name == "without"  # the end of a pass
            done = True
        except (WaitTimeoutError, OptionError, EmptyBufferError):
            done = False
        assert able == done


@pytest.mark.parametrize("name", SAMPLERS)
def test_snapshots_change_no_draw(name: str) -> None:
    def batches(*, look: bool) -> list[list[int]]:
        rb = buffer(SAMPLERS[name](), generator=torch.Generator().manual_seed(1), rate_limiter=RateLimiter())
        rb.extend(torch.arange(24))
        found = []
        for _ in range(4):
            if look:
                rb.can_sample(4), rb.can_sample(40), rb.can_insert(3), rb.can_insert(1000)
            found.append(rb.sample(4).tolist())
        return found

    assert batches(look=True) == batches(look=False)


def test_snapshots_do_not_end_an_iteration() -> None:
    rb = buffer(ConsumingSampler(), batch_size=4)
    rb.extend(torch.arange(4))
    rb.sample()
    before = rb.sampler.ran_out
    assert not rb.can_sample()
    assert rb.sampler.ran_out == before


def test_without_a_limiter_only_rows_count() -> None:
    rb = buffer(LimitedSampler(2), batch_size=4)
    assert rb.can_insert()
    assert rb.can_insert(10_000)
    rb.extend(torch.arange(2))
    assert (rb.can_sample(4), rb.can_sample(5)) == (True, False)
    with pytest.raises(OptionError, match="rows must be at least 1"):
        rb.can_insert(0)
    some = buffer(batch_size=4)
    some.extend(torch.arange(2))
    assert ReplayBufferEnsemble(some, batch_size=2).can_insert() is False  # rows have no route to a member


def test_prefetched_batches_can_be_sampled() -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=8, min_size_to_sample=8)
    rb = buffer(batch_size=4, prefetch=2, rate_limiter=limiter)
    rb.extend(torch.arange(8))
    rb.sample()  # the band holds one more, which is drawn ahead
    assert rb.stats().prefetch_ready <= 1
    assert (rb.can_sample(), rb.can_sample(5)) == (True, False)
    rb.sample(timeout_s=10.0)
    assert not rb.can_sample()
    rb.close()


# -- partial batches --------------------------------------------------------------------------------------------------


def test_a_batch_is_as_large_as_the_band_allows() -> None:
    rb = buffer(rate_limiter=RateLimiter(samples_per_insert=1, min_diff=0, max_diff=100), batch_size=8)
    rb.extend(torch.arange(5))
    began = time.monotonic()
    batch, info = rb.sample(timeout_s=0.2, min_batch=3, return_info=True)
    assert time.monotonic() - began >= 0.2
    assert len(batch) == len(info["index"]) == 5
    assert counts(rb) == (5, 5)
    with pytest.raises(WaitTimeoutError, match="a draw of 8 row"):
        rb.sample(timeout_s=0.0, min_batch=1)
    rb.extend(torch.arange(2))
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.0, min_batch=3)
    assert counts(rb) == (7, 5)
    assert len(rb.sample(timeout_s=0.0, min_batch=2)) == 2
    rb.extend(torch.arange(40))
    assert len(rb.sample(timeout_s=0.0, min_batch=2)) == 8
    assert counts(rb) == (47, 15)


def test_no_batch_below_the_first_rows() -> None:
    rb = buffer(rate_limiter=RateLimiter(min_size_to_sample=6), batch_size=4)
    rb.extend(torch.arange(5))
    with pytest.raises(WaitTimeoutError, match="min_size_to_sample is 6"):
        rb.sample(timeout_s=0.0, min_batch=1)


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_queue_gives_what_it_has(cls: Any) -> None:
    rb = cls(storage=LazyTensorStorage(8), sampler=QueueSampler(), batch_size=6)
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    assert rb.sample(timeout_s=0.05, min_batch=1)["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.05, min_batch=1)
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]), timeout_s=0.0)  # the slots are free again
    assert rb.sample(100, timeout_s=0.0, min_batch=7)["x"].tolist() == list(range(8))
    with pytest.raises(OptionError, match="a batch of 9 rows never comes together"):
        rb.sample(100, timeout_s=0.0, min_batch=9)


@pytest.mark.parametrize("limiter", [None, RateLimiter()])
def test_limited_rows_give_what_is_left(limiter: RateLimiter | None) -> None:
    rb = buffer(LimitedSampler(2), batch_size=10, rate_limiter=limiter)
    rb.extend(torch.arange(3))
    options: dict[str, Any] = {} if limiter is None else {"timeout_s": 0.0}
    kind = EmptyBufferError if limiter is None else WaitTimeoutError
    with pytest.raises(kind, match="can be drawn 6 more"):
        rb.sample(min_batch=7, **options)
    assert sorted(rb.sample(min_batch=6, **options).tolist()) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(kind):
        rb.sample(min_batch=1, **options)


def test_rows_that_leave_give_no_less_than_asked() -> None:
    rb = buffer(ConsumingSampler(), batch_size=4)
    rb.extend(torch.arange(6))
    assert len(rb.sample(min_batch=3)) == 4
    with pytest.raises(EmptyBufferError, match="can be drawn 2 more"):
        rb.sample(min_batch=3)
    assert len(rb.sample(min_batch=2)) == 2


def test_slices_stay_whole() -> None:
    limiter = RateLimiter(samples_per_insert=1, min_diff=0, max_diff=100)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=SliceSampler(slice_len=4), batch_size=16, rate_limiter=limiter
    )
    rows = TensorDict({"x": torch.arange(10), "episode": torch.zeros(10, dtype=torch.int64)}, [10])
    rb.extend(rows)
    assert len(rb.sample(timeout_s=0.0, min_batch=1)) == 8
    with pytest.raises(WaitTimeoutError):
        rb.sample(timeout_s=0.0, min_batch=1)
    assert counts(rb) == (10, 8)


def test_a_whole_batch_that_comes_in_time_is_taken_whole() -> None:
    rb = buffer(QueueSampler(), batch_size=6)
    rb.extend(torch.arange(4))
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(rb.sample(timeout_s=30.0, min_batch=1).tolist()))
    reader.start()
    rb.extend(torch.arange(4, 8), timeout_s=30.0)
    reader.join(30.0)
    assert found == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("made", "asked", "said"),
    [
        ({}, {"min_batch": 2}, "min_batch=2 has no effect"),
        ({"rate_limiter": RateLimiter(), "prefetch": 2}, {"min_batch": 2}, "does not go with prefetch"),
        ({"rate_limiter": RateLimiter()}, {"min_batch": 2, "out": torch.zeros(4)}, "does not go with out"),
        ({"rate_limiter": RateLimiter()}, {"min_batch": 5}, r"min_batch must be an integer in \[1, 4\]"),
        ({"rate_limiter": RateLimiter()}, {"min_batch": 0}, "got 0"),
        ({"rate_limiter": RateLimiter()}, {"min_batch": True}, "got True"),
        ({"rate_limiter": RateLimiter()}, {"min_batch": 1.5}, "got 1.5"),
    ],
)
def test_what_min_batch_does_not_go_with(made: dict[str, Any], asked: dict[str, Any], said: str) -> None:
    rb = buffer(batch_size=4, **made)
    rb.extend(torch.arange(8))
    with pytest.raises(OptionError, match=said):
        rb.sample(**asked)
    rb.close()
