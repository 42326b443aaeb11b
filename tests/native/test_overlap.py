"""A write whose source lies in the fields' own memory changes nothing and says so; any other one goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from .tables import address, slots_of

if TYPE_CHECKING:
    from .tables import Slots

Span = tuple[int, int]


def meet(a: Span, b: Span) -> bool:
    """Whether two ranges of bytes share one."""
    return a[0] < b[1] and b[0] < a[1]


@given(data=st.data())
def test_overlap_is_found_for_any_set_of_fields(native, data):
    """Fields anywhere in one block, in any order, one on another too; sources anywhere in it."""
    block = np.zeros(600, np.uint8)
    fields, spans, sizes = native.Fields(), [], []
    rows = 3
    for _ in range(data.draw(st.integers(1, 6))):
        size = data.draw(st.integers(0, 12))
        stride = size + data.draw(st.integers(0, 20))
        at = data.draw(st.integers(0, 500))
        fields.add([(address(block) + at, rows)], size, stride)
        if size:
            spans.append((at, at + (rows - 1) * stride + size))
        sizes.append(size)
    sources = [data.draw(st.integers(0, 550)) for _ in sizes]
    n = data.draw(st.integers(0, rows))
    skip = data.draw(st.integers(0, 1)) if n else 0
    addresses = [address(block) + at for at in sources]

    def clash(total: int) -> bool:
        reads = [(at, at + total * size) for at, size in zip(sources, sizes, strict=True) if total * size]
        return any(meet(read, span) for read in reads for span in spans)

    assert fields.write_run(0, n, skip, addresses) is not clash(n + skip if n else 0)
    slots: Slots = slots_of(range(n))
    picks = slots_of(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    total = int(picks.max()) + 1 if n else 0
    assert fields.scatter(address(slots), address(picks), n, addresses) is not clash(total)
