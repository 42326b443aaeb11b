"""Ring writes and scatters change exactly the rows asked for, and nothing if one is out of range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import LAYOUTS, address, make, noise, slots_of
from .test_gather import SIZES, field_sizes, layouts, segment_rows

if TYPE_CHECKING:
    from types import ModuleType


@given(layout=layouts, sizes=field_sizes, segments=segment_rows, data=st.data())
def test_a_run_wraps_around(
    native: ModuleType, layout: str, sizes: list[int], segments: list[int], data: st.DataObject
) -> None:
    table = make(native, layout, sizes, segments)
    rows = sum(segments)
    start, n = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, rows))
    skip = data.draw(st.integers(0, 5))
    sources, expected = table.batches(skip + n), table.contents()
    for field, source in zip(expected, sources, strict=True):
        field[(start + np.arange(n)) % rows] = source[skip:]
    assert table.fields.write_run(start, n, skip, [address(source) for source in sources])
    for got, want in zip(table.contents(), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@given(layout=layouts, sizes=field_sizes, segments=segment_rows, data=st.data())
def test_scatter_writes_in_order(
    native: ModuleType, layout: str, sizes: list[int], segments: list[int], data: st.DataObject
) -> None:
    table = make(native, layout, sizes, segments)
    slots = slots_of(data.draw(st.lists(st.integers(0, sum(segments) - 1), max_size=60)))
    n = len(slots)
    picks = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=n, max_size=n).map(slots_of))
    sources, expected = table.batches(max(n, 10)), table.contents()
    for field, source in zip(expected, sources, strict=True):
        for i, slot in enumerate(slots):
            field[slot] = source[i if picks is None else picks[i]]
    rows = 0 if picks is None else address(picks)
    assert table.fields.scatter(address(slots), rows, n, [address(source) for source in sources])
    for got, want in zip(table.contents(), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_fields_of_unequal_length_have_no_common_ring(native: ModuleType) -> None:
    fields = native.Fields()
    long, short = noise(5, 2, 0), noise(4, 2, 1)
    fields.add([(address(long), 5)], 2, 2)
    fields.add([(address(short), 4)], 2, 2)
    with pytest.raises(ValueError, match="fields of one length, got 5 and 4 rows"):
        fields.write_run(0, 1, 0, [address(long), address(short)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_size_goes_in_and_comes_out(native: ModuleType, layout: str) -> None:
    for size in SIZES:
        table = make(native, layout, [size, 5], [30, 7])
        gaps = [block[:, size + 5 :].copy() for block in table.memory if layout == "packed with gap"]
        for n, start in ((37, 36), (17, 25), (4, 0)):
            sources, expected = table.batches(n, seed=n), table.contents()
            table.fields.write_run(start, n, 0, [address(source) for source in sources])
            for got, want, source in zip(table.contents(), expected, sources, strict=True):
                want[(start + np.arange(n)) % 37] = source
                assert np.array_equal(got, want), size
        for block, gap in zip(table.memory, gaps, strict=False):
            assert np.array_equal(block[:, size + 5 :], gap), size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_out_of_range_leave_the_table_untouched(native: ModuleType, layout: str) -> None:
    table = make(native, layout, [68, 1, 300], [7, 5])
    sources, before = table.batches(13), table.snapshot()
    batch = [address(source) for source in sources]
    for bad in (-1, 12, 2**63 - 1, -(2**63)):
        slots = slots_of([1, 2, bad])
        with pytest.raises(IndexError, match=f"^index {bad} is out of range for 12 rows$"):
            table.fields.scatter(address(slots), 0, 3, batch)
        with pytest.raises(IndexError, match=f"^index {bad} is out of range for 12 rows$"):
            table.fields.write_run(bad, 1, 0, batch)
    slots, picks = slots_of([0, 1]), slots_of([1, -1])
    with pytest.raises(IndexError, match=r"^index -1 is out of range"):
        table.fields.scatter(address(slots), address(picks), 2, batch)
    with pytest.raises(IndexError, match=r"^a run of 13 rows is out of range for 12 rows$"):
        table.fields.write_run(0, 13, 0, batch)
    table.fields.write_run(3, 0, 0, [0, 0, 0])
    table.fields.scatter(0, 0, 0, [0, 0, 0])
    assert table.snapshot() == before
