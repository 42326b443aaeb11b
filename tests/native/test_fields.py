"""Registering fields, bad arguments, and the interpreter lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .tables import address, noise, slots_of

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
