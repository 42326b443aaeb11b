"""Registering fields, bad arguments, and the interpreter lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from .tables import address, make, noise, slots_of

if TYPE_CHECKING:
    from types import ModuleType


def test_fields_are_numbered_in_order(native: ModuleType) -> None:
    fields, memory = native.Fields(), noise(6, 12, 0)
    at = [fields.add([(address(memory) + offset, 6)], 4, 12) for offset in (8, 0, 4)]
    assert at == [0, 1, 2]
    assert (fields.count, fields.rows) == (3, 6)
    outs = [np.zeros((2, 4), np.uint8) for _ in at]
    fields.gather([address(slots_of([5, 0]))], 2, [address(out) for out in outs])
    for out, offset in zip(outs, (8, 0, 4), strict=True):
        np.testing.assert_array_equal(out, memory[[5, 0], offset : offset + 4])


def test_impossible_layouts_and_calls_raise(native: ModuleType) -> None:
    fields = native.Fields()
    for rows, row_bytes, stride, message in (
        (4, -1, 8, "row_bytes must be at least 0 and stride at least row_bytes, got -1 and 8"),
        (4, 8, 7, "row_bytes must be at least 0 and stride at least row_bytes, got 8 and 7"),
        (-1, 8, 8, "rows of a segment must be at least 0 and fit the address space, got -1"),
        (2**62, 8, 8, "rows of a segment must be at least 0 and fit the address space"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            fields.add([(4096, rows)], row_bytes, stride)
    assert fields.count == 0
    fields = make(native, "columns", [4, 4, 4], [6]).fields
    calls: list[tuple[str, tuple[object, ...], str]] = [
        ("gather", ([0], 0, [0, 0]), "outs must hold 3 addresses .number of fields., got 2"),
        ("gather", ([0, 0], 0, [0, 0, 0]), "indices must hold 1 or 3 entries .number of fields., got 2"),
        ("gather", ([0], -1, [0, 0, 0]), "n must be at least 0, got -1"),
        ("gather_each", ([0], [], [0, 0, 0]), "counts must hold 1 or 3 entries .number of fields., got 0"),
        ("gather_each", ([0], [0, -1, 0], [0, 0, 0]), "n must be at least 0, got -1"),
        ("write_run", (0, 0, 0, [0]), "srcs must hold 3 addresses .number of fields., got 1"),
        ("write_run", (0, -1, 0, [0, 0, 0]), "n must be at least 0, got -1"),
        ("write_run", (0, 0, -2, [0, 0, 0]), "skip must be at least 0, got -2"),
        ("scatter", (0, 0, 0, [0]), "srcs must hold 3 addresses .number of fields., got 1"),
        ("scatter", (0, 0, -1, [0, 0, 0]), "n must be at least 0, got -1"),
    ]
    for name, arguments, message in calls:
        with pytest.raises(ValueError, match=f"^{message}$"):
            getattr(fields, name)(*arguments)
    for indices in (["0"], [-8], (0,)):
        with pytest.raises(TypeError):
            fields.gather(indices, 0, [0, 0, 0])
