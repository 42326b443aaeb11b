"""Stamps against a plain list of serial numbers, and the records that cross walls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.records import Picks, Run, View, ring_range
from ostinato.core.ring import Stamps

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(1, 14)),
        st.tuples(st.just("touch"), st.lists(st.integers(0, 5), min_size=1, max_size=5)),
        st.tuples(st.just("picks"), st.lists(st.integers(0, 5), min_size=0, max_size=5, unique=True)),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("reload"), st.none()),
    ),
    max_size=12,
)


@given(steps=STEPS, capacity=st.integers(6, 7))
def test_stamps_follow_a_list_of_serials(steps: list[tuple[str, Any]], capacity: int) -> None:
    stamps, model, written, cursor = Stamps(capacity), [0] * capacity, 0, 0
    for what, how in steps:
        if what == "run":
            skip = max(0, how - capacity)
            start = (cursor + skip) % capacity
            stamps.note(Run(start, how - skip, capacity, skip))
            for i in range(how):
                model[(cursor + i) % capacity] = written + 1 + i
            cursor, written = (cursor + how) % capacity, written + how
        elif what == "touch":
            stamps.touch(torch.tensor(how))
            for i, slot in enumerate(how):
                model[slot] = written + 1 + i
            written += len(how)
        elif what == "picks":
            total = len(how) + 2
            kept = torch.tensor([*how, -1, -1])
            stamps.note(Picks(torch.tensor(how, dtype=torch.int64), torch.arange(len(how)), kept))
            for i, slot in enumerate(how):
                model[slot] = written + 1 + i
            written += total if how else 0
        elif what == "clear":
            stamps.clear()
            model, cursor, written = [0] * capacity, 0, written + 1
        else:
            other = Stamps(capacity)
            other.load_state_dict(stamps.state_dict())
            stamps = other
        assert stamps.written == written
        assert stamps.of(torch.arange(capacity)).tolist() == model
        for serial in {0, written // 2, written}:
            newer = stamps.newer(torch.arange(capacity), serial)
            assert newer.tolist() == [stamp > serial or stamp == 0 for stamp in model]


def test_no_memory_is_spent_while_rows_are_written_in_ring_order() -> None:
    stamps = Stamps(10**12)
    for start in range(0, 100, 10):
        stamps.note(Run(start, 10, 10**12))
    assert stamps.nbytes == 0
    stamps.touch(torch.tensor([3]))
    assert 0 < stamps.nbytes <= 8 * 200
    assert stamps.of(torch.tensor([2, 3, 4, 99, 10**9])).tolist() == [3, 101, 5, 100, 0]


def test_serials_never_repeat_after_clearing() -> None:
    """A row drawn before `clear` is not mistaken for the row that takes its slot afterwards."""
    stamps = Stamps(4)
    stamps.note(Run(0, 4, 4))
    serial = stamps.written
    stamps.clear()
    assert stamps.newer(torch.arange(4), serial).all()
    stamps.note(Run(0, 4, 4))
    assert stamps.newer(torch.arange(4), serial).all()


def test_rows_brought_along_have_ages() -> None:
    stamps = Stamps(5)
    stamps.resume(3, 3)
    assert stamps.of(torch.arange(5)).tolist() == [1, 2, 3, 0, 0]
    full = Stamps(3, after=10)
    full.resume(3, 1)
    assert full.of(torch.arange(3)).tolist() == [13, 11, 12]


def test_a_loaded_state_is_a_copy() -> None:
    stamps, other = Stamps(4), Stamps(4)
    stamps.touch(torch.tensor([0]))
    other.load_state_dict(stamps.state_dict())
    stamps.touch(torch.tensor([0]))
    assert other.of(torch.tensor([0])).tolist() == [1]


@pytest.mark.parametrize(
    ("run", "slots", "positions"),
    [
        (Run(0, 3, 5), [0, 1, 2], [0, 1, 2]),
        (Run(3, 4, 5), [3, 4, 0, 1], [3, 4, 0, 1]),
        (Run(2, 5, 5, 7), [2, 3, 4, 0, 1], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]),
        (Run(0, 1, 1, 3), [0], [0, 0, 0, 0]),
    ],
)
def test_runs_name_slots_and_positions(run: Run, slots: list[int], positions: list[int]) -> None:
    assert run.slots().tolist() == slots
    assert run.positions().tolist() == positions
    assert run.total == len(positions)


def test_picks_name_positions() -> None:
    picks = Picks(torch.tensor([4, 2]), torch.tensor([0, 2]), torch.tensor([4, -1, 2]))
    assert picks.positions().tolist() == [4, -1, 2]
    assert picks.total == 3


@given(capacity=st.integers(1, 9), start=st.integers(0, 8), rows=st.integers(0, 30))
def test_ring_ranges_wrap(capacity: int, start: int, rows: int) -> None:
    assert ring_range(start, rows, capacity).tolist() == [(start + i) % capacity for i in range(rows)]


def test_views_cannot_be_changed() -> None:
    view = View(3, 5, 3, Stamps(5), torch.device("cpu"))
    with pytest.raises(AttributeError):
        view.rows = 5  # type: ignore[misc]
