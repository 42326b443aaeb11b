"""`find_start_stop_traj`: forms of its arguments, and its errors. Slices of a bare storage are read by it, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import find_start_stop_traj
from ostinato.errors import KindError, UsageError


def test_forms_of_the_cursor_and_errors() -> None:
    rows = torch.zeros(5, dtype=torch.bool)
    cursors: list[Any] = [2, torch.tensor([0, 1, 2]), torch.tensor(2), range(3)]
    for cursor in cursors:
        start, stop, _ = find_start_stop_traj(end=rows, at_capacity=True, cursor=cursor)
        assert (start.tolist(), stop.tolist()) == ([[3]], [[2]])
    start, stop, lengths = find_start_stop_traj(trajectory=torch.tensor([1, 1, 0, 0, 1]), at_capacity=True)
    assert (start.tolist(), stop.tolist(), lengths.tolist()) == ([[4], [2]], [[1], [3]], [3, 2])
    wrong: list[Any] = [
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
