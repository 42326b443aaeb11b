"""Discounted sums, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import address

DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@given(n=st.integers(0, 5), width=st.integers(0, 4), cells=st.integers(0, 3), seed=st.integers(0, 99))
def test_rows_without_weight_do_not_count(native, dtype, n, width, cells, seed):
    rng = np.random.default_rng(seed)
    rows, weights = rng.normal(size=(n, width, cells)).astype(dtype), rng.random((n, width)).astype(dtype)
    weights[rng.random((n, width)) < 0.4] = 0
    exact = np.einsum("ik,ikc->ic", weights.astype(np.float64), rows.astype(np.float64))
    rows[weights == 0] = rng.choice([np.inf, np.nan])
    out = np.full((n, cells), -1, dtype)
    native.weigh_rows(address(rows), address(weights), n, width, cells, dtype is np.float32, address(out))
    np.testing.assert_allclose(out, exact, rtol=1e-6 if dtype is np.float32 else 1e-14, atol=1e-12)


def test_windows_leave_out_rows_without_weight(native):
    rows = np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)
    slots, weights, out = np.array([[0, 1]]), np.array([[0.5, 0.0]], np.float32), np.zeros((1, 2), np.float32)
    reader = native.WindowReader(2)
    reader.add(address(rows), 0, 8, 8, 0, 4)
    reader.read([address(slots)], [0], [address(weights)], [2], 1, [address(out)])
    assert out.tolist() == [[0.5, 1.0]]
