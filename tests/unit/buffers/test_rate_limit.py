"""Rate limits and queues: readers and writers that wait for each other, checkpoints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    LimitedSampler,
    QueueSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from ostinato.buffers.rate_limit import Flow
from ostinato.errors import EmptyBufferError, KindError, OptionError, WaitTimeoutError

from ...registry import ring
from ...threads import together
from .refusals import raises, refuses
from .test_threads import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable


SOON = 0.05


def queue(capacity: int = 8, **options: Any) -> ReplayBuffer:
    return ring(capacity, sampler=QueueSampler(), **options)


def interrupted(rows: int, act: Callable[[ReplayBuffer], Any], **options: Any) -> ReplayBuffer:
    """A buffer of these rows, with which something happens during its first draw."""
    storage = Interrupted(max(rows, 4))
    rb = ReplayBuffer(storage=storage, **options)
    rb.extend(torch.arange(rows))
    storage.before = lambda: act(rb)
    return rb


def test_a_draw_whose_rows_were_replaced_is_void():
    rb = interrupted(4, lambda rb: rb.extend(torch.arange(4, 6)), sampler=LimitedSampler(1), batch_size=4)
    assert sorted(rb.sample().tolist()) == [2, 3, 4, 5]  # each once: those drawn first were given back
    with pytest.raises(EmptyBufferError, match=r"0 row\(s\) left can be drawn 0 more time"):
        rb.sample()


def test_a_call_is_told_what_it_waits_for():
    limiter = RateLimiter(2.0, 20.0, 10, timeout_s=SOON)
    rb = ring(50, batch_size=8, rate_limiter=limiter)
    rb.extend(torch.arange(6))
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError) as caught:
        rb.sample()
    assert time.monotonic() - began >= SOON
    assert str(caught.value) == (
        "a draw of 8 row(s) waited 0.05 s for writers: 6 row(s) can be drawn, min_size_to_sample is 10; 6 row(s) "
        "written, 0 drawn; 2 x 6 - 0 = 12 must stay in [0, 40]; 6 row(s) can be drawn (min_size_to_sample=10); "
        "waiting now: 0 writer(s), 1 reader(s): raise timeout_s, or see what became of the other side"
    )
    assert isinstance(caught.value, TimeoutError)
    rb.extend(torch.arange(4))
    rb.sample()
    rb.sample()
    full = queue(4, batch_size=2)
    full.extend(torch.arange(3))
    raises(
        (lambda: rb.sample(timeout_s=0), WaitTimeoutError, r": 2 more row\(s\) must be written before 8 can be drawn"),
        (lambda: full.extend(torch.arange(2), timeout_s=0), WaitTimeoutError, "room for 1 of 2 rows until queued ones"),
    )
    rb.extend(torch.arange(18))
    before = str(rb.state_dict())
    with pytest.raises(WaitTimeoutError, match=r": 2 more row\(s\) must be drawn before 1 can be written"):
        rb.add(torch.tensor(1), timeout_s=SOON)
    assert str(rb.state_dict()) == before
    rb.sample(2)
    rb.add(torch.tensor(1), timeout_s=0)


def test_both_sides_hear_that_the_band_is_too_narrow():
    rb = ring(99, batch_size=12, rate_limiter=RateLimiter(1.0, 8.0, 10))
    rb.extend(torch.arange(10))
    rb.extend(torch.arange(6))
    said: list[str] = []

    def wait(call: Callable[[], Any]) -> None:
        with pytest.raises(WaitTimeoutError) as caught:
            call()
        said.append(str(caught.value))

    rb.sample(8)  # balance 8, band [2, 18]
    together(
        lambda: wait(lambda: rb.extend(torch.arange(12), timeout_s=0.2)),
        lambda: wait(lambda: rb.sample(timeout_s=0.3)),
    )
    assert any("the band is too narrow for these calls, make error_buffer 12 or more" in text for text in said)


def test_a_batch_on_its_way_is_in_the_checkpoint():
    states: list[dict[str, Any]] = []
    rb = interrupted(6, lambda rb: states.append(rb.state_dict()), sampler=QueueSampler(), batch_size=4)
    assert rb.sample().tolist() == [0, 1, 2, 3]  # its rows had not arrived when the state was taken
    other = queue(6, batch_size=6)
    other.load_state_dict(states[0])
    assert other.sample(timeout_s=SOON).tolist() == [0, 1, 2, 3, 4, 5]
    assert states[0]["flow"]["drawn"] == 0


def test_another_limiter_holds_after_a_load_and_never_hangs():
    rb, other, without = (
        ring(50, batch_size=8, rate_limiter=limiter)
        for limiter in (RateLimiter(8.0, 100.0, 10), RateLimiter(0.5, 20.0, 10), None)
    )
    rb.extend(torch.arange(20))
    with pytest.warns(UserWarning, match=r"max_diff=180.0 \(now 25.0\), .* samples_per_insert=8.0 \(now 0.5\)"):
        other.load_state_dict(rb.state_dict())
    other.extend(torch.arange(4), timeout_s=0)  # the balance begins in the middle: both sides may go on
    other.sample(timeout_s=0)
    without.load_state_dict(rb.state_dict())
    without.extend(torch.arange(50))
    other.load_state_dict(without.state_dict())
    other.sample(timeout_s=0)


def test_two_dimensional_queues_count_cells():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=QueueSampler(), batch_size=4, dim_extend=0)
    rows = torch.arange(10).reshape(5, 2)
    rb.extend(rows[:3])
    with pytest.raises(WaitTimeoutError, match="room for 2 of 4 rows"):
        rb.extend(rows[3:], timeout_s=0)
    assert rb.sample().tolist() == [0, 1, 2, 3]
    rb.extend(rows[3:], timeout_s=0)
    assert rb.sample(6).tolist() == [4, 5, 6, 7, 8, 9]


def test_a_queue_takes_over_rows_that_are_there_in_order():
    storage = LazyTensorStorage(6)
    ReplayBuffer(storage=storage).extend(torch.arange(8))
    rb = ReplayBuffer(storage=storage, sampler=QueueSampler())
    assert rb.sample(4).tolist() == [2, 3, 4, 5]
    rb.set_sampler(RandomSampler())
    assert rb.rate_limiter is None
    rb.extend(torch.arange(6))
    rb.set_sampler(QueueSampler())
    assert rb.sample(5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(WaitTimeoutError, match="2 rows were asked for, and the rows present can be drawn 1 more"):
        rb.sample(2, timeout_s=SOON)


def test_what_cannot_go_together_is_refused():
    """Samplers, units and writers: `tests/contracts/test_combinations.py`."""

    def made(**options: Any) -> ReplayBuffer:
        return ring(8, **options)

    rows, plain, rb = torch.arange(9), made(batch_size=2), queue(8, batch_size=2)
    plain.extend(rows)
    refuses(
        {
            KindError: {
                r"must be an ostinato.RateLimiter or None, got float": lambda: made(rate_limiter=2.0),
            },
            OptionError: {
                "9 rows are never there": lambda: made(rate_limiter=RateLimiter(min_size_to_sample=9)),
                "leave out episodes": lambda: made(sampler=LimitedSampler(2), episodes=Episodes(end_key="done")),
                "no call waits in a buffer without rate_limiter": lambda: plain.extend(rows, timeout_s=1.0),
                "no call waits": lambda: plain.sample(timeout_s=1.0),
                "timeout_s must be a number of seconds": lambda: rb.sample(timeout_s=-1.0),
                "never fits into a queue of 8": lambda: rb.extend(rows),
                "a full buffer is good for 8 draws": lambda: rb.sample(9),
                "an ensemble does not know of": lambda: ReplayBufferEnsemble(rb, plain),
            },
        }
    )


def test_calls_that_could_never_go_ahead_are_refused():
    flow = Flow(RateLimiter(2.0, 10.0, 5))
    flow.check_write(10, 10)
    flow.check_draw(20, 20)
    wide = r"a write of 11 rows .* by 2 each, more than the band \[0, 20\] is wide"
    raises(
        (lambda: flow.check_write(11, None), OptionError, wide),
        (lambda: flow.check_draw(21, None), OptionError, "a batch of 21 rows moves the balance by 1 each"),
    )
