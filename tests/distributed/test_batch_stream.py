"""Streams of an actor: batches come in the order of the requests, and what happens at the end and after errors."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import LazyTensorStorage, QueueSampler, RateLimiter, ReplayBuffer, SamplerWithoutReplacement
from ostinato.buffers.pipeline import END
from ostinato.distributed.actors import ServedStream, ServedStreams, batch_maker
from ostinato.distributed.ray_client import CLOSED, RETRY
from ostinato.errors import UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


def counting(script: list[str]) -> Callable[[float | None], object]:
    """Make batches 0, 1, ... by a script of "batch", "wait" and "error"; the end after it."""
    steps = iter(enumerate(script))

    def make(waited_s: float | None) -> object:
        number, step = next(steps, (0, "end"))
        if step == "error":
            raise ValueError(number)
        return END if step == "end" else RETRY if step == "wait" else number

    return make


@given(
    script=st.lists(st.sampled_from(["batch", "batch", "batch", "wait", "error"]), max_size=12),
    counts=st.lists(st.integers(1, 5)),
)
def test_requests_get_batches_in_order(script, counts):
    """A request that has to wait is made again; an error follows the batches made before it, and ends the stream."""
    stream, got, number = ServedStream(counting(script)), list[object](), 0
    for count in [*counts, *[3] * (2 * len(script) + 1)]:
        try:
            found = stream.take(number, count)
        except ValueError as error:
            got.append(("error", error.args[0]))
            number += 1
            continue
        if found is RETRY:
            continue
        number += 1
        assert isinstance(found, list)
        assert len(found) <= count
        got += [("batch", one) for one in found]
    made = [(step, number) for number, step in enumerate(script) if step != "wait"]
    ends = [at for at, (step, _) in enumerate(made) if step == "error"]
    assert got == (made[: ends[0] + 1] if ends else made)
    assert stream.take(number, 2) == []


@pytest.mark.parametrize(("number", "waited_s"), [(0, -2.0), (3, 1.5)])
def test_a_request_whose_turn_never_comes_ends_the_stream(number, waited_s):
    """One that was answered before, and one whose reader waits for it although earlier ones were never made."""
    stream = ServedStream(lambda _: 0)
    assert stream.take(1, 1) is RETRY, "it waits one poll for the one before"
    assert stream.take(0, 1) == stream.take(1, 1) == [0]
    with pytest.raises(UsageError, match=rf"request {number} for batches does not follow the 2 that were answered"):
        stream.take(number, 1, waited_s)
    assert stream.take(2, 1) == []
    closed = ServedStream(lambda _: 0)
    closed.close()
    assert closed.take(0, 1) is CLOSED


@pytest.mark.parametrize(("limit_s", "epoch"), [(0.0, False), (0.3, True)])
def test_a_batch_requested_ahead_never_times_out(limit_s, *, epoch):
    sampler = SamplerWithoutReplacement() if epoch else QueueSampler()
    limiter = RateLimiter(min_size_to_sample=4, timeout_s=limit_s)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4, rate_limiter=limiter)
    stream = ServedStream(batch_maker(rb, epoch=epoch))
    assert stream.take(0, 1, -2.0) is RETRY
    with pytest.raises(WaitTimeoutError, match=rf"waited {limit_s:g} s for writers"):
        ServedStream(batch_maker(rb, epoch=epoch)).take(0, 1, 1.0)
    rb.extend(list(range(4)))
    found = stream.take(0, 2, 1.0)
    assert isinstance(found, list)
    batches = found if epoch else [batch for batch, _ in found]
    assert [sorted(batch.tolist()) for batch in batches] == [[0, 1, 2, 3]], (
        "a request that has a batch waits for no more"
    )


# -- the streams of all readers ---------------------------------------------------------------------------------------


def test_the_stream_idle_for_longest_is_closed_when_there_are_many(monkeypatch):
    monkeypatch.setattr("ostinato.distributed.actors.MOST_STREAMS", 3)
    streams = ServedStreams()
    for i in range(3):
        streams.open(str(i), ServedStream(counting(["batch"] * 9)))
    assert streams.take("0", 0, 1, 0.0) == [0]
    streams.open("new", ServedStream(counting([])))
    assert len(streams) == 3
    assert streams.take("0", 1, 1, 0.0) == [1], "who asks is kept"
    assert streams.take("1", 0, 1, 0.0) is streams.take("never", 0, 1, 0.0) is CLOSED
    streams.close("0")
    streams.close("0")
    assert streams.take("0", 2, 1, 0.0) is CLOSED


def test_whoever_closes_a_stream_waits_for_the_batch_that_is_being_made():
    begun, go, streams = threading.Event(), threading.Event(), ServedStreams()

    def make(_: float | None) -> str:
        begun.set()
        assert go.wait(60)
        return "batch"

    streams.open("one", ServedStream(make))
    threads = [threading.Thread(target=streams.take, args=("one", 0, 1, 0.0), daemon=True)]
    threads += [threading.Thread(target=streams.close, args=("one",), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert begun.wait(60)
    threads[2].join(0.05)
    assert threads[2].is_alive()
    go.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
