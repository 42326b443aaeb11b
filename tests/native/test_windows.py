"""Windows of rows in one pass, against numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from .tables import address

if TYPE_CHECKING:
    from types import ModuleType

ROWS = 50


@given(n=st.integers(0, 70), width=st.integers(1, 5), cells=st.integers(1, 40), seed=st.integers(0, 99))
def test_all_sources_are_read_in_one_pass(native: ModuleType, n: int, width: int, cells: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (ROWS, 8 + 8 * cells), np.uint8)  # a float64, then a field that is read twice
    packed[:, :8] = rng.normal(size=(ROWS, 1)).view(np.uint8)
    wide, other = (rng.normal(size=(ROWS, 3)).astype(np.float32) for _ in range(2))
    at, many = rng.integers(0, ROWS, n), rng.integers(0, ROWS, (n, width))
    pick, weights = rng.random((n, width)) < 0.5, rng.random((n, width))
    weights[rng.random((n, width)) < 0.4] = 0
    reader = native.WindowReader(ROWS)
    stride = packed.shape[1]
    reader.add(address(packed), 0, 8, stride, 2, 8)
    reader.add(address(packed) + 8, 0, 8 * cells, stride, 0, 0)
    reader.add(address(packed) + 8, 0, 8 * cells, stride, 2, 0)
    reader.add(address(wide), address(other), 12, 12, 1, 0)
    outs: list[Any] = [
        np.full(n, -1.0),
        np.zeros((n, 8 * cells), np.uint8),
        np.zeros((n, width, 8 * cells), np.uint8),
        np.zeros((n, width, 3), np.float32),
    ]
    slots = [address(at), address(many), address(many)]
    reader.read(slots, [0, address(pick), 0], [0, 0, address(weights)], [1, width, width], n, [*map(address, outs)])
    numbers = packed[:, :8].copy().view(np.float64)[:, 0]
    expected = np.zeros(n)
    for k in range(width):  # in the order of the windows, so that sums are equal bit by bit
        expected += np.where(weights[:, k] == 0, 0, weights[:, k] * numbers[many[:, k]])
    assert outs[0].tobytes() == expected.tobytes()
    np.testing.assert_array_equal(outs[1], packed[at, 8:])
    np.testing.assert_array_equal(outs[2], packed[many][:, :, 8:])
    np.testing.assert_array_equal(outs[3], np.where(pick[:, :, None], other[many], wide[many]))
