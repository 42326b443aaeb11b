"""`find_start_stop_traj`: forms of its arguments, and its errors. Slices of a bare storage are read by it, too."""

from __future__ import annotations

from typing import Any

import torch

from ostinato import find_start_stop_traj
from ostinato.errors import KindError, UsageError

from ..buffers.refusals import refuses


def test_forms_of_the_cursor_and_errors():
    rows = torch.zeros(5, dtype=torch.bool)
    cursors: list[Any] = [2, torch.tensor([0, 1, 2]), torch.tensor(2), range(3)]
    for cursor in cursors:
        start, stop, _ = find_start_stop_traj(end=rows, at_capacity=True, cursor=cursor)
        assert (start.tolist(), stop.tolist()) == ([[3]], [[2]])
    start, stop, lengths = find_start_stop_traj(trajectory=torch.tensor([1, 1, 0, 0, 1]), at_capacity=True)
    assert (start.tolist(), stop.tolist(), lengths.tolist()) == ([[4], [2]], [[1], [3]], [3, 2])
    refuses(
        {
            KindError: {
                "Exactly one of `trajectory` and `end` must be provided": lambda: find_start_stop_traj(
                    at_capacity=True,
                ),
                "Exactly one": lambda: find_start_stop_traj(at_capacity=True, trajectory=rows, end=rows),
            },
            UsageError: {
                "at least 1-dimensional": lambda: find_start_stop_traj(at_capacity=True, end=rows[0]),
                r"empty \(T=0\) input": lambda: find_start_stop_traj(at_capacity=True, trajectory=rows[:0]),
                "must not be an empty tensor": lambda: find_start_stop_traj(
                    at_capacity=True, end=rows, cursor=torch.zeros(0)
                ),
                "must not be an empty range": lambda: find_start_stop_traj(at_capacity=True, end=rows, cursor=range(0)),
                "should be an integer or a 1d tensor or a range": lambda: find_start_stop_traj(
                    at_capacity=True,
                    end=rows,
                    cursor=1.5,  # type: ignore[arg-type]
                ),
                r"must be a step in \[0, 5\)": lambda: find_start_stop_traj(at_capacity=True, end=rows, cursor=5),
            },
        }
    )
