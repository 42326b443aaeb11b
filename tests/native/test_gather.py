"""Gather gives exactly the rows asked for, whatever the layout, and touches nothing if one is out of range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import LAYOUTS, address, gather, in_rows, make, slots_of

# Sizes with a kernel of their own, their neighbours, and those where prefetching changes its pace.
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 68, 96, 112, 127, 128, 129]
SIZES += [192, 205, 255, 256, 257, 300, 511, 512, 513, 1000, 1024, 2049, 4096, 4097, 9000]

field_sizes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=7)
segment_rows = st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any)
layouts = st.sampled_from(LAYOUTS)


@given(layout=layouts, sizes=field_sizes, segments=segment_rows, data=st.data())
def test_gather_gives_the_rows_asked_for(native, layout, sizes, segments, data):
    """Indices that all fields share, indices of each field's own, and another number of rows for each field."""
    table = make(native, layout, sizes, segments)
    n = data.draw(st.integers(0, 90))
    column = st.lists(st.integers(0, sum(segments) - 1), min_size=n, max_size=n).map(slots_of)
    pool = data.draw(st.lists(column, min_size=1, max_size=2))
    indices = [data.draw(st.sampled_from(pool)) for _ in sizes]
    contents = table.contents()
    for got, field in zip(gather(table, pool[0]), contents, strict=True):
        np.testing.assert_array_equal(got, field[pool[0]])
    for got, field, picked in zip(gather(table, indices), contents, indices, strict=True):
        np.testing.assert_array_equal(got, field[picked])
    counts = [data.draw(st.integers(0, n)) for _ in sizes]
    outs = [np.zeros((count, size), dtype=np.uint8) for count, size in zip(counts, sizes, strict=True)]
    table.fields.gather_each([address(pool[0])], counts, [address(out) for out in outs])
    for got, field, count in zip(outs, contents, counts, strict=True):
        np.testing.assert_array_equal(got, field[pool[0][:count]])


def test_every_row_size_at_every_block_edge(native):
    for size in SIZES:
        table = in_rows(native, [3, size, 1], [50, 9], gap=2)
        contents = table.contents()
        for n in (1, 3, 4, 5, 16, 17, 20, 21, 37, 64, 257):
            indices = np.random.default_rng(n).integers(0, 59, n)
            for got, field in zip(gather(table, indices), contents, strict=True):
                assert np.array_equal(got, field[indices]), (size, n)


@given(layout=layouts, sizes=field_sizes, segments=segment_rows, data=st.data())
def test_an_index_out_of_range_leaves_every_batch_untouched(native, layout, sizes, segments, data):
    table = make(native, layout, sizes, segments)
    rows = sum(segments)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=40))
    bad = data.draw(st.sampled_from([-1, rows, rows + 7, -(2**63), 2**63 - 1]))
    picked.insert(data.draw(st.integers(0, len(picked))), bad)
    indices = slots_of(picked)
    outs = [np.full((len(picked), size), 7, dtype=np.uint8) for size in sizes]
    with pytest.raises(IndexError, match=f"^index {bad} is out of range for {rows} rows$"):
        table.fields.gather([address(indices)], len(picked), [address(out) for out in outs])
    assert all((out == 7).all() for out in outs)
