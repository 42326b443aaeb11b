"""A line gives its batches in the order of the calls, whatever share each asks for, and where it ends or fails."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import LazyTensorStorage, QueueSampler, ReplayBuffer
from ostinato.distributed.line import END, Line, maker
from ostinato.distributed.turns import AGAIN
from ostinato.errors import WaitTimeoutError

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
