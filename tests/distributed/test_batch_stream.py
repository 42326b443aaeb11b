"""A line gives its batches in the order of the calls, whatever share each asks for, and where it ends or fails."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import LazyTensorStorage, QueueSampler, RateLimiter, ReplayBuffer, SamplerWithoutReplacement
from ostinato.distributed.actors import END, IDLE_S, MANY_LINES, Line, Lines, maker
from ostinato.distributed.ray_client import AGAIN, GONE
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
        return END if step == "end" else AGAIN if step == "wait" else number

    return make


@given(
    script=st.lists(st.sampled_from(["batch", "batch", "batch", "wait", "error"]), max_size=12),
    counts=st.lists(st.integers(1, 5)),
)
def test_calls_give_what_was_made_in_order(script: list[str], counts: list[int]) -> None:
    """A call that has to wait is made once more; an error comes after what was made before it, and ends the line."""
    line, got, number = Line(counting(script)), list[object](), 0
    for count in [*counts, *[3] * (2 * len(script) + 1)]:
        try:
            found = line.take(number, count)
        except ValueError as error:
            got.append(("error", error.args[0]))
            number += 1
            continue
        if found is AGAIN:
            continue
        number += 1
        assert len(found) <= count
        got += [("batch", one) for one in found]
    made = [(step, number) for number, step in enumerate(script) if step != "wait"]
    ends = [at for at, (step, _) in enumerate(made) if step == "error"]
    assert got == (made[: ends[0] + 1] if ends else made)
    assert line.take(number, 2) == []


def test_a_call_waits_for_those_before_it() -> None:
    line, found = Line(counting(["batch"] * 6)), dict[int, object]()
    threads = [threading.Thread(target=lambda n=n: found.__setitem__(n, line.take(n, 2))) for n in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {0: [0, 1], 1: [2, 3], 2: [4, 5]}


def test_nothing_is_made_after_an_error_or_the_close() -> None:
    asked = []

    def make(waited_s: float | None) -> object:
        asked.append(waited_s)
        raise KeyError

    line = Line(make)
    with pytest.raises(KeyError):
        line.take(0, 2)
    assert line.take(1, 2) == line.take(2, 1) == []
    closed = Line(make)
    closed.close()
    assert closed.take(0, 1) == []
    assert asked == [0.0]


def test_a_call_that_has_a_batch_does_not_wait_for_more() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=QueueSampler(), batch_size=4)
    rb.extend(list(range(10)))
    line = Line(maker(rb, epoch=False))
    found = line.take(0, 5)
    assert found is not AGAIN
    assert [batch.tolist() for batch, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert line.take(1, 2) is AGAIN
    rb.extend(list(range(10, 14)))
    found = line.take(1, 2)
    assert found is not AGAIN
    assert [batch.tolist() for batch, _ in found] == [[8, 9, 10, 11]]
    with pytest.raises(WaitTimeoutError, match="waited 60 s"):
        line.take(2, 2, waited_s=60.0)
    assert rb.sample(2).tolist() == [12, 13]


def test_a_call_waits_one_turn_for_those_that_nobody_makes() -> None:
    stalled = Line(lambda _: 0)
    assert stalled.take(1, 1) is AGAIN
    assert stalled.take(0, 1) == stalled.take(1, 1) == [0]


@pytest.mark.parametrize(("number", "waited_s"), [(0, -2.0), (3, 1.5)])
def test_a_call_whose_turn_never_comes_ends_the_line(number: int, waited_s: float) -> None:
    """One that was answered before, and one whose reader waits for it though those before it were never made."""
    line = Line(lambda _: 0)
    assert line.take(0, 1) == line.take(1, 1) == [0]
    with pytest.raises(UsageError, match=rf"call {number} for batches does not follow the 2 that were answered"):
        line.take(number, 1, waited_s)
    assert line.take(2, 1) == []


@pytest.mark.parametrize("limit_s", [0.0, 0.3])
@pytest.mark.parametrize("epoch", [False, True])
def test_a_batch_that_nobody_waits_for_is_never_late(limit_s: float, *, epoch: bool) -> None:
    sampler = SamplerWithoutReplacement() if epoch else QueueSampler()
    limiter = RateLimiter(min_size_to_sample=4, timeout_s=limit_s)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4, rate_limiter=limiter)
    line = Line(maker(rb, epoch=epoch))
    assert line.take(0, 1, -2.0) is AGAIN
    with pytest.raises(WaitTimeoutError, match=rf"waited {limit_s:g} s for writers"):
        Line(maker(rb, epoch=epoch)).take(0, 1, 1.0)
    rb.extend(list(range(4)))
    found = line.take(0, 2, 1.0)
    assert found is not AGAIN
    batches = found if epoch else [batch for batch, _ in found]
    assert [sorted(batch.tolist()) for batch in batches] == [[0, 1, 2, 3]]


def test_a_pass_is_one_epoch_though_it_waits_in_turns() -> None:
    limiter = RateLimiter(samples_per_insert=1, error_buffer=4, min_size_to_sample=4, timeout_s=50.0)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8), sampler=SamplerWithoutReplacement(), batch_size=4, rate_limiter=limiter
    )
    rb.extend(list(range(8)))
    rb.sample(4)
    line, seen, number = Line(maker(rb, epoch=True)), list[int](), 0
    while found := line.take(number, 1):
        if found is AGAIN:
            rb.extend(list(range(8, 12)))  # lets the second half be drawn
            continue
        seen += found[0].tolist()
        number += 1
    assert len(seen) == 8


# -- the lines of all readers -----------------------------------------------------------------------------------------


def test_idle_lines_are_closed_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("ostinato.distributed.actors.time.monotonic", lambda: now[0])
    lines = Lines()
    for i in range(MANY_LINES + 10):
        lines.begin(str(i), Line(counting(["batch"] * 9)))
    assert len(lines) == MANY_LINES + 10, "none was idle for long"
    now[0] += IDLE_S + 1
    assert lines.take("3", 0, 1, 0.0) == [0]
    lines.begin("new", Line(counting([])))
    assert len(lines) == MANY_LINES
    assert lines.take("3", 1, 1, 0.0) == [1], "who asks is kept"
    assert lines.take("0", 0, 1, 0.0) is lines.take("never", 0, 1, 0.0) is GONE
    assert lines.take("70", 0, 1, 0.0) == [0], "no more are closed than there are too many"
    lines.end("3")
    lines.end("3")
    assert lines.take("3", 2, 1, 0.0) is GONE
