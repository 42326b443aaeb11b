"""Every native entry point raises on numbers that make no sense and on slots out of range, and writes nothing.

Rows that are out of range for the copies of fields: `test_gather.py`, `test_write.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from .tables import address
from .test_addresses import AT, GENERATIONS, MAKERS, MEMORY, ROWS

HUGE = 2**62
BAD_SLOTS = [np.array([0, bad]) for bad in (-1, ROWS, -(2**63), 2**63 - 1)]
BAD_VALUES = [np.array([1.0, bad]) for bad in (-1.0, math.nan, math.inf, -math.inf, -5e-324)]
LISTS = [[AT]] * 2

NUMBERS: dict[str, Any] = {
    "Fields.add": [([(AT, 4)], -1, 8), ([(AT, 4)], 8, 7), ([(AT, -1)], 8, 8), ([(AT, HUGE)], 8, 8)],
    "Fields.gather": [([AT], 0, [AT, AT]), ([AT, AT], 0, [AT]), ([AT], -1, [AT])],
    "Fields.gather_each": [([AT], [], [AT]), ([AT], [-1], [AT])],
    "Fields.write_run": [(0, 0, 0, []), (0, -1, 0, [AT]), (0, 0, -2, [AT])],
    "Fields.scatter": [(AT, 0, 0, []), (AT, 0, -1, [AT])],
    "SumTree.set": [(AT, AT, -1)],
    "SumTree.get": [(AT, -1, AT)],
    "SumTree.draw": [(AT, -1, AT, AT)],
    "SumTree.sample": [(AT, -1, 1.0, GENERATIONS, AT, AT, True, AT)],
    "SumTree.update": [
        (AT, AT, False, n, 0, source, AT, 0, rows, 0.0, 1.0, False)
        for n, source, rows in ((-1, GENERATIONS, ROWS), (2, GENERATIONS, ROWS + 1), (2, (0, 0, 0), ROWS))
    ],
    "SumTree.set_run": [(0, ROWS + 1, 1.0), *((0, 2, bad) for bad in (-1.0, math.nan, math.inf))],
    "SumTree.leaves": [(AT, ROWS + 1)],
    "SumTree.load": [(AT, -1), (AT, ROWS + 1), *((address(bad), 2) for bad in BAD_VALUES)],
    "Episodes.add_need": [(0,)],
    "Episodes.start_rows": [(-1,), (7,)],
    "Episodes.start_episodes": [(7,)],
    "Episodes.draw": [(0, AT, -1, AT), (7, AT, 1, AT)],
    "Episodes.draw_episodes": [(0, AT, -1, AT)],
    "Episodes.record_write": [(0, 1, 3, 0, 0, 0), (0, 3, 2, 0, 0, 0), (0, HUGE, 0, 0, 0, 0), (0, -1, 0, 0, 0, 0)],
    "Episodes.ahead": [(AT, -1, AT)],
    "Episodes.behind": [(AT, -1, AT)],
    "Episodes.ended": [(AT, -1, AT)],
    "Episodes.shift": [(AT, AT, -1, AT)],
    "Episodes.window": [
        (AT, 1, *span, AT, AT) for span in ((-1, 0, 1), (0, -1, 1), (0, 0, 0), (2**31, 0, 1), (0, 2**63 - 1, 1))
    ],
    "Episodes.slices": [(AT, 1, 0, AT), (AT, -1, 1, AT)],
    "Episodes.steps": [(AT, 1, 2**31, AT, True, AT, AT, AT, AT, AT)],
    "Episodes.stack": [(AT, 1, 0, False, AT, AT), (AT, 1, 1, True, AT, AT)],
    "WindowReader.read": [
        ([AT], [0], [0], [0], 2, [AT]),
        ([AT], [0], [0], [1], -1, [AT]),
        ([AT], [0], [0], [1], 2, []),
        ([AT], [], [0], [1], 2, [AT]),
        ([AT], [AT], [0], [1], 2, [AT]),
    ],
    "WindowReader.add": [(AT, 0, -1, 8, 0, 0), (AT, 0, 8, 4, 0, 0), (AT, 0, 6, 8, 0, 4), (AT, 0, 8, 8, 0, 2)],
    "SingleCopy.add_group": [(AT, 4, 8)],
    "SingleCopy.add_field": [(3, 0, 1), (0, 20, 8)],
    "SingleCopy.add_chunk": [([],)],
    "SingleCopy.compare": [(0, -1, *LISTS, AT, AT), (0, 1, [], [AT], AT, AT)],
    "SingleCopy.set_rows": [(AT, 1, [])],
    "SingleCopy.gather": [([2], AT, 0, 1, [AT]), ([0], AT, 0, 1, [])],
    "weigh_rows": [(AT, AT, 1, 1, -1, True, AT)],
    "shuffle_draw": [(AT, *steps, AT, AT) for steps in ((-1, 5, 1), (0, 5, -1), (6, 5, 0), (0, 0, 1))],
    "choose_slots": [(AT, AT, -1, 5, AT)],
}
"""Calls that raise ValueError."""
SLOTS: dict[str, Any] = {
    "SumTree.set_run": [(-1, 1, 1.0), (ROWS, 1, 1.0)],
    "Episodes.record_write": [(start, 1, 0, 0, 0, 0) for start in (-1, ROWS)],
    "SingleCopy.compare": [(ROWS, 1, *LISTS, AT, AT)],
    "SingleCopy.detach_run": [(0, ROWS + 1, 0), (-1, 1, 0)],
    "SingleCopy.link_run": [(0, ROWS + 1, 0, [AT], AT, 0)],
    **{
        name: [tuple(address(bad) if value is None else value for value in call) for bad in BAD_SLOTS]
        for name, call in {
            "SumTree.set": (None, AT, 2),
            "SumTree.get": (None, 2, AT),
            "SumTree.update": (None, AT, False, 2, 0, GENERATIONS, AT, 0, ROWS, 0.0, 1.0, False),
            "Episodes.ahead": (None, 2, AT),
            "Episodes.behind": (None, 2, AT),
            "Episodes.ended": (None, 2, AT),
            "Episodes.shift": (None, AT, 2, AT),
            "Episodes.window": (None, 2, 0, 1, 1, AT, AT),
            "SingleCopy.set_rows": (None, 2, [AT]),
            "SingleCopy.link_rows": (None, 2),
            "SingleCopy.gather": ([0], None, 0, 2, [AT]),
            "choose_slots": (None, AT, 2, ROWS, AT),
        }.items()
    },
    "WindowReader.read": [([address(bad)], [0], [0], [1], 2, [AT]) for bad in BAD_SLOTS],
}
"""Calls that raise IndexError."""


@pytest.mark.parametrize(
    ("name", "error"),
    [*((name, ValueError) for name in NUMBERS), *((name, IndexError) for name in SLOTS)],
)
def test_a_wrong_call_raises_and_writes_nothing(native, name, error):
    owner, _, method = name.rpartition(".")
    made = MAKERS[owner](native)
    for call in (NUMBERS if error is ValueError else SLOTS)[name]:
        MEMORY[:] = 0
        with pytest.raises(error):
            getattr(made, method)(*call)
        assert not MEMORY.any(), call
