"""A line gives its batches in the order of the calls, whatever share each asks for, and where it ends or fails."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.distributed.host import END, Line

if TYPE_CHECKING:
    from collections.abc import Callable


def counting(script: list[str]) -> Callable[[], object]:
    """Make batches 0, 1, ... by a script of "batch" and "error"; the end after it."""
    steps = iter(enumerate(script))

    def make() -> object:
        number, step = next(steps, (0, "end"))
        if step == "error":
            raise ValueError(number)
        return END if step == "end" else number

    return make


@given(script=st.lists(st.sampled_from(["batch", "batch", "error"]), max_size=12), counts=st.lists(st.integers(1, 5)))
def test_calls_give_what_was_made_in_order(script: list[str], counts: list[int]) -> None:
    line, got = Line(counting(script)), list[object]()
    calls = [*counts, *[3] * (2 * len(script) + 1)]
    for number, count in enumerate(calls):
        try:
            found = line.take(number, count)
        except ValueError as error:
            got.append(("error", error.args[0]))
            continue
        assert len(found) <= count
        got += [("batch", one) for one in found]
    assert got == [(step, number) for number, step in enumerate(script)]
    assert line.take(len(calls), 2) == []


def test_a_call_waits_for_those_before_it() -> None:
    line, found = Line(counting(["batch"] * 6)), dict[int, list[object]]()
    threads = [threading.Thread(target=lambda n=n: found.__setitem__(n, line.take(n, 2))) for n in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {0: [0, 1], 1: [2, 3], 2: [4, 5]}


def test_an_error_holds_nobody_up() -> None:
    line = Line(counting(["error", "batch"]))
    with pytest.raises(ValueError, match="0"):
        line.take(0, 2)
    assert line.take(1, 2) == [1]
