"""Ring writes and scatters change exactly the rows asked for, and nothing if one is out of range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import LAYOUTS, address, make, slots_of
from .test_gather import field_sizes, layouts, segment_rows


@given(layout=layouts, sizes=field_sizes, segments=segment_rows, data=st.data())
def test_writes_change_the_rows_asked_for_alone(native, layout, sizes, segments, data):
    """A run that wraps around, then single rows, of which the last of one slot wins; gaps keep their bytes."""
    table, rows = make(native, layout, sizes, segments), sum(segments)
    whole, before, expected = table.snapshot(), table.contents(), table.contents()
    start, n, skip = data.draw(st.tuples(st.integers(0, rows - 1), st.integers(0, rows), st.integers(0, 5)))
    sources = table.batches(skip + n)
    for field, source in zip(expected, sources, strict=True):
        field[(start + np.arange(n)) % rows] = source[skip:]
    assert table.fields.write_run(start, n, skip, [address(source) for source in sources])
    table.check(expected)
    slots = slots_of(data.draw(st.lists(st.integers(0, rows - 1), max_size=60)))
    n = len(slots)
    picks = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=n, max_size=n).map(slots_of))
    sources = table.batches(max(n, 10), seed=50)
    for field, source in zip(expected, sources, strict=True):
        for i, slot in enumerate(slots):
            field[slot] = source[i if picks is None else picks[i]]
    chosen = 0 if picks is None else address(picks)
    assert table.fields.scatter(address(slots), chosen, n, [address(source) for source in sources])
    table.check(expected)
    table.restore(before)
    assert table.snapshot() == whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_out_of_range_leave_the_table_untouched(native, layout):
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
