"""Indices mean what they mean for numpy, or raise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ostinato.core.index import select
from ostinato.errors import KindError, SlotError

CPU = torch.device("cpu")


def chosen(index: Any, shape: tuple[int, ...], *, swap: bool = False) -> np.ndarray[Any, Any]:
    """Slots as an array of the shape of the result."""
    picked = select(index, shape, CPU, swap=swap)
    if picked.span is not None:
        return np.arange(shape[0])[picked.span].reshape(picked.batch)
    assert picked.slots.is_contiguous()
    assert picked.slots.dtype is torch.int64
    return picked.slots.numpy().reshape(picked.batch)


@given(rows=st.integers(1, 7), data=st.data())
def test_one_dimension_follows_numpy(rows: int, data: st.DataObject) -> None:
    ints = st.integers(-rows, rows - 1)
    index = data.draw(
        st.one_of(
            ints,
            st.slices(rows).filter(lambda s: s.step is None or s.step > 0),
            st.lists(ints, min_size=1, max_size=5),
            arrays.arrays(np.bool_, rows),
            arrays.arrays(np.uint8, st.integers(0, 5), elements=st.integers(0, rows - 1)),  # an index, not a mask
            arrays.arrays(np.int32, st.integers(0, 5), elements=ints),
            arrays.arrays(np.int64, st.tuples(st.integers(1, 3), st.integers(1, 3)), elements=ints),
            st.just(...),
            st.tuples(ints),
        )
    )
    expected = np.arange(rows)[index]
    assert np.array_equal(chosen(index, (rows,)), expected)
    if isinstance(index, np.ndarray):
        assert np.array_equal(chosen(torch.from_numpy(index), (rows,)), expected)


@given(steps=st.integers(1, 4), lanes=st.integers(1, 3), swap=st.booleans(), data=st.data())
def test_two_dimensions_follow_numpy(steps: int, lanes: int, swap: bool, data: st.DataObject) -> None:
    grid = np.arange(steps * lanes).reshape(steps, lanes)
    grid = grid.T if swap else grid
    one, two = (
        st.one_of(st.integers(-n, n - 1), st.slices(n).filter(lambda s: s.step is None or s.step > 0))
        for n in grid.shape
    )
    index = data.draw(st.one_of(one, st.tuples(one, two), st.just(...), arrays.arrays(np.bool_, grid.shape)))
    picked = select(index, (steps, lanes), CPU, swap=swap)
    assert np.array_equal(picked.slots.numpy().reshape(picked.batch), grid[index])
    assert picked.slots.is_contiguous()


def test_indices_out_of_range_and_other_things_raise() -> None:
    ranges: list[Any] = [3, -4, [0, 3], torch.tensor([-4]), np.array([99]), torch.ones(4, dtype=torch.bool), (0, 0)]
    for index in ranges:
        with pytest.raises(SlotError, match="3"):
            select(index, (3,), CPU)
    others: list[Any] = [torch.tensor([0.5]), np.array(["a"]), slice(None, None, -1), {"a": 1}, torch.tensor([1j])]
    for index in others:
        with pytest.raises((KindError, SlotError)):
            select(index, (3,), CPU)
