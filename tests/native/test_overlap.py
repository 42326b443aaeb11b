"""A write whose source lies in the fields' own memory changes nothing and says so; any other one goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import address, noise, slots_of

if TYPE_CHECKING:
    from types import ModuleType

    from .tables import Bytes, Slots

Span = tuple[int, int]


def one_field(native: ModuleType, rows: int = 10, row_bytes: int = 8) -> tuple[Any, Bytes, int]:
    """A field in the middle of a block of noise: the block, and where the field begins."""
    block = noise(1, 3 * rows * row_bytes, 0)[0]
    fields = native.Fields()
    at = address(block) + rows * row_bytes
    fields.add([(at, rows)], row_bytes, row_bytes)
    return fields, block, at


@pytest.mark.parametrize(
    ("offset", "goes"),
    [(-32, True), (-31, False), (0, False), (79, False), (80, True)],
)
def test_a_source_may_touch_a_field_but_not_overlap_it(native: ModuleType, offset: int, goes: bool) -> None:
    slots = slots_of([9, 0, 1, 2])
    fields, block, at = one_field(native)
    for write in ("write_run", "scatter"):
        before, source = block.copy(), block[80 + offset :][:32].copy()
        if write == "write_run":
            done = fields.write_run(9, 4, 0, [at + offset])
        else:
            done = fields.scatter(address(slots), 0, 4, [at + offset])
        assert done is goes
        if goes:
            before[80:160].reshape(10, 8)[slots] = source.reshape(4, 8)
        np.testing.assert_array_equal(block, before)
    if goes:
        return
    assert fields.write_run(0, 1, 2**63 - 2, [at - 8]) is False  # a source of endless rows reaches all above
    assert fields.scatter(address(slots_of([0])), address(slots_of([2**63 - 2])), 1, [at - 8]) is False
    for write in ("write_run", "scatter"):  # errors come first
        arguments = (10, 1, 0) if write == "write_run" else (address(slots_of([10])), 0, 1)
        with pytest.raises(IndexError, match=r"^index 10 is out of range for 10 rows$"):
            getattr(fields, write)(*arguments, [at])


def meet(a: Span, b: Span) -> bool:
    """Whether two ranges of bytes share one."""
    return a[0] < b[1] and b[0] < a[1]


@given(data=st.data())
def test_overlap_is_found_for_any_set_of_fields(native: ModuleType, data: st.DataObject) -> None:
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
