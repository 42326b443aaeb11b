"""Registering fields, bad arguments, and the interpreter lock."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from .tables import address, gather, in_columns, make, moments_beside, noise, slots_of

if TYPE_CHECKING:
    from collections.abc import Callable
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


def test_fields_added_later_take_part(native: ModuleType) -> None:
    table = in_columns(native, [8], [5])
    late = noise(5, 3, 9)
    table.fields.add([(address(late), 5)], 3, 3)
    table.views.append([late])
    np.testing.assert_array_equal(gather(table, slots_of([4, 4, 0]))[1], late[[4, 4, 0]])


@pytest.mark.parametrize(
    ("rows", "row_bytes", "stride", "message"),
    [
        (4, -1, 8, "row_bytes must be at least 0 and stride at least row_bytes, got -1 and 8"),
        (4, 8, 7, "row_bytes must be at least 0 and stride at least row_bytes, got 8 and 7"),
        (-1, 8, 8, "rows of a segment must be at least 0 and fit the address space, got -1"),
        (2**62, 8, 8, f"rows of a segment must be at least 0 and fit the address space, got {2**62}"),
    ],
)
def test_impossible_layouts_are_refused(
    native: ModuleType, rows: int, row_bytes: int, stride: int, message: str
) -> None:
    fields = native.Fields()
    with pytest.raises(ValueError, match=f"^{message}$"):
        fields.add([(4096, rows)], row_bytes, stride)
    assert fields.count == 0


def test_a_null_address_is_refused(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="the base of a segment with rows must be an address in CPU memory, got 0"):
        native.Fields().add([(0, 4)], 8, 8)


def test_wrong_numbers_of_addresses_are_refused(native: ModuleType) -> None:
    fields = make(native, "columns", [4, 4, 4], [6]).fields
    with pytest.raises(ValueError, match=r"^outs must hold 3 addresses \(number of fields\), got 2$"):
        fields.gather([0], 0, [0, 0])
    with pytest.raises(ValueError, match=r"^indices must hold 1 or 3 entries \(number of fields\), got 2$"):
        fields.gather([0, 0], 0, [0, 0, 0])
    with pytest.raises(ValueError, match=r"^counts must hold 1 or 3 entries \(number of fields\), got 0$"):
        fields.gather_each([0], [], [0, 0, 0])
    with pytest.raises(ValueError, match=r"^n must be at least 0, got -1$"):
        fields.gather_each([0], [0, -1, 0], [0, 0, 0])
    calls: list[Callable[[], object]] = [
        lambda: fields.write_run(0, 0, 0, [0]),
        lambda: fields.scatter(0, 0, 0, [0]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^srcs must hold 3 addresses \(number of fields\), got 1$"):
            call()


def test_negative_counts_are_refused(native: ModuleType) -> None:
    fields = make(native, "columns", [4], [6]).fields
    calls: list[Callable[[], object]] = [
        lambda: fields.gather([0], -1, [0]),
        lambda: fields.write_run(0, -1, 0, [0]),
        lambda: fields.scatter(0, 0, -1, [0]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^n must be at least 0, got -1$"):
            call()
    with pytest.raises(ValueError, match=r"^skip must be at least 0, got -2$"):
        fields.write_run(0, 0, -2, [0])


def test_addresses_are_numbers(native: ModuleType) -> None:
    fields = make(native, "columns", [4], [6]).fields
    with pytest.raises(TypeError):
        fields.gather(["0"], 0, [0])
    with pytest.raises(TypeError):
        fields.gather([-8], 0, [0])
    with pytest.raises(TypeError):
        fields.gather((0,), 0, [0])


def test_a_large_gather_lets_other_threads_run(native: ModuleType) -> None:
    """While one call copies, this thread must count; the copy takes many times the switch interval."""
    table = in_columns(native, [4096], [2000])
    indices = np.random.default_rng(0).integers(0, 2000, 40_000)
    out = np.zeros((40_000, 4096), np.uint8)
    assert moments_beside(lambda: table.fields.gather([address(indices)], 40_000, [address(out)])) > 10


def test_threads_may_gather_and_write_at_once(native: ModuleType) -> None:
    """Different slots, one table: every thread finds its own rows again."""
    table = make(native, "packed", [68, 24, 4, 68, 1], [4000])
    failures: list[int] = []

    def work(part: int) -> None:
        slots = np.arange(part * 1000, part * 1000 + 1000, dtype=np.int64)
        sources = table.batches(1000, seed=part)
        for _ in range(20):
            table.fields.scatter(address(slots), 0, 1000, [address(source) for source in sources])
            outs = gather(table, slots)
            failures.extend(part for out, want in zip(outs, sources, strict=True) if not np.array_equal(out, want))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_any_range_may_be_advised(native: ModuleType) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    for offset, size in ((0, 1 << 16), (1, 5000), (4095, 1), (0, 0), (77, 1 << 15)):
        native.advise_huge_pages(address(memory) + offset, size)
    assert not memory.any()
    native.advise_huge_pages(0, 0)
    native.advise_huge_pages(2**64 - 4096, 4096)  # nobody's memory: advice that is not taken
    with pytest.raises(ValueError, match=r"^nbytes must be at least 0, got -1$"):
        native.advise_huge_pages(address(memory), -1)


def smaps_flags(at: int) -> list[str]:
    """What the system notes about the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if line[0] in "0123456789abcdef" and "-" in words[0]:
            begin, end = (int(part, 16) for part in words[0].split("-"))
            inside = begin <= at < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here")
def test_whole_pages_inside_a_range_are_advised(native: ModuleType) -> None:
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 16 * page) as memory:
        view = np.frombuffer(memory, np.uint8)
        begin = address(view)
        del view
        if not smaps_flags(begin):
            pytest.skip("this system does not say what it noted")
        native.advise_huge_pages(begin + 4 * page + 1, 4 * page)
        advised = [i for i in range(16) if "hg" in smaps_flags(begin + i * page)]
    assert advised == [5, 6, 7]
