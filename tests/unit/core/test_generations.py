"""`Ring` against a plain list of serial numbers; placements and views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.records import Picks, Run
from ostinato.core.ring import Ring

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
def test_generations_follow_a_list_of_serial_numbers(steps: list[tuple[str, Any]], capacity: int) -> None:
    ring, model, written, cursor, rows = Ring(capacity), [0] * capacity, 0, 0, 0
    arrivals = [0] * capacity
    for what, how in steps:
        if what == "run":
            skip = max(0, how - capacity)
            start = (cursor + skip) % capacity
            ring.record(Run(start, how - skip, capacity, skip))
            for i in range(how):
                model[(cursor + i) % capacity] = arrivals[(cursor + i) % capacity] = written + 1 + i
            rows = max(rows, min(capacity, cursor + how))
            cursor, written = (cursor + how) % capacity, written + how
        elif what == "touch":
            present = [slot for slot in how if model[slot]]
            ring.record_edit(torch.tensor(present, dtype=torch.int64))
            for i, slot in enumerate(present):
                model[slot] = written + 1 + i
            written += len(present)
        elif what == "picks":
            total = len(how) + 2
            kept = torch.tensor([*how, -1, -1])
            ring.record(Picks(torch.tensor(how, dtype=torch.int64), torch.arange(len(how)), kept))
            for i, slot in enumerate(how):
                model[slot] = arrivals[slot] = written + 1 + i
            written += total if how else 0
            rows = max([rows, *(slot + 1 for slot in how)])
        elif what == "clear":
            ring.clear()
            model, arrivals, cursor, rows, written = [0] * capacity, [0] * capacity, 0, 0, written + 1
        else:
            other, saved = Ring(capacity), ring.state_dict()
            other.load_state_dict(saved, ring.rows)
            ring.record_edit(torch.arange(min(ring.rows, 1)))  # the state is a copy
            ring = other
        assert ring.written == written
        assert ring.rows == rows
        assert ring.generations(torch.arange(capacity)).tolist() == model
        assert ring.arrivals(torch.arange(capacity)).tolist() == arrivals
        for serial in {0, written // 2, written}:
            newer = ring.changed(torch.arange(capacity), serial)
            assert newer.tolist() == [generation > serial or generation == 0 for generation in model]


@pytest.mark.parametrize("edited", [False, True])
def test_rows_that_could_not_be_stored_are_taken_back(edited: bool) -> None:
    ring = Ring(4)
    ring.record(Run(0, 2, 4))
    if edited:
        ring.record_edit(torch.tensor([0]))
    serial = ring.written
    run = Run(2, 1, 4)
    ring.record(run)
    ring.take_back(run, 2, 2)
    assert (ring.rows, ring.cursor) == (2, 2)
    assert ring.written == serial + 1
    assert ring.generations(torch.arange(2)).gt(0).all()
    ring.record(Run(2, 2, 4))
    found = ring.generations(torch.arange(4)).tolist()
    assert found[2:] == [serial + 2, serial + 3]
