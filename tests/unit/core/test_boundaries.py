"""`find_start_stop_traj` compared with a walk over rows, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import find_start_stop_traj
from ostinato.errors import KindError, UsageError

from ...effort import examples


def walk(ends: list[bool]) -> list[tuple[int, int, int]]:
    """Start, stop and length of each trajectory of a ring, by following rows; sorted by the stop."""
    found = []
    for stop, end in enumerate(ends):
        if end:
            start, length = stop, 1
            while not ends[start - 1] and length < len(ends):
                start, length = (start - 1) % len(ends), length + 1
            found.append((start, stop, length))
    return found


@examples(3)
@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=9), st.booleans(), st.data())
def test_a_ring_of_environments(rows: list[list[int]], full: bool, data: Any) -> None:
    by_ids = data.draw(st.booleans())
    newest = data.draw(st.none() | st.integers(0, len(rows) - 1)) if full else len(rows) - 1
    values = torch.tensor(rows)
    if by_ids:
        got = find_start_stop_traj(trajectory=values, at_capacity=full, cursor=newest)
    else:
        got = find_start_stop_traj(end=values == 0, at_capacity=full, cursor=newest)
    expected = []
    for env in range(3):
        column = values[:, env].tolist()
        flags = [a != b for a, b in zip(column, column[1:] + column[:1], strict=True)]
        ends = flags if by_ids else [value == 0 for value in column]
        if newest is not None:
            ends[newest] = True
        if not any(ends):
            ends[-1] = True
        expected += [(start, env, stop, env, length) for start, stop, length in walk(ends)]
    assert torch.cat([got[0], got[1], got[2].unsqueeze(1)], 1).tolist() == [list(row) for row in expected]
    assert int(got[2].sum()) == values.numel()


def test_forms_of_the_cursor_and_errors() -> None:
    rows = torch.zeros(5, dtype=torch.bool)
    cursors: list[Any] = [2, torch.tensor([0, 1, 2]), torch.tensor(2), range(3)]
    for cursor in cursors:
        start, stop, _ = find_start_stop_traj(end=rows, at_capacity=True, cursor=cursor)
        assert (start.tolist(), stop.tolist()) == ([[3]], [[2]])
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, KindError, "Exactly one of `trajectory` and `end` must be provided"),
        ({"trajectory": rows, "end": rows}, KindError, "Exactly one"),
        ({"end": rows[0]}, UsageError, "at least 1-dimensional"),
        ({"trajectory": rows[:0]}, UsageError, r"empty \(T=0\) input"),
        ({"end": rows, "cursor": torch.zeros(0)}, UsageError, "must not be an empty tensor"),
        ({"end": rows, "cursor": range(0)}, UsageError, "must not be an empty range"),
        ({"end": rows, "cursor": 1.5}, UsageError, "should be an integer or a 1d tensor or a range"),
        ({"end": rows, "cursor": 5}, UsageError, r"must be a step in \[0, 5\)"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            find_start_stop_traj(at_capacity=True, **options)
