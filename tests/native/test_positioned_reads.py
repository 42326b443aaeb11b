"""Positioned reads: every piece is the bytes at its offset, whatever lies between; short files are told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no positioned reads there")


def read(native: ModuleType, fds: Any, offsets: Any, widths: Any, gap: int = 64) -> tuple[Any, list[bytes]]:
    columns = [np.array(column, dtype=np.int64) for column in (fds, offsets, widths)]
    out = [np.full(int(width) + 8, 255, dtype=np.uint8) for width in widths]
    targets = np.array([part.ctypes.data for part in out], dtype=np.int64)
    reached = native.read_ranges(*(column.ctypes.data for column in (*columns, targets)), len(columns[0]), gap)
    assert all((part[int(width) :] == 255).all() for part, width in zip(out, widths, strict=True))
    return reached, [bytes(part[: int(width)]) for part, width in zip(out, widths, strict=True)]


@pytest.fixture
def contents(tmp_path: Path) -> list[tuple[int, bytes]]:
    rng = np.random.default_rng(0)
    opened = []
    for number in range(3):
        data = rng.bytes(50_000)
        (tmp_path / str(number)).write_bytes(data)
        opened.append((os.open(tmp_path / str(number), os.O_RDONLY), data))
    return opened


@pytest.mark.parametrize(("gap", "count"), [(0, 7), (1, 1), (64, 1300), (4096, 1300), (64, 0)])
def test_every_piece_is_its_bytes(native: ModuleType, contents: list[tuple[int, bytes]], gap: int, count: int) -> None:
    rng = np.random.default_rng(count)
    pieces = sorted((int(rng.integers(3)), int(rng.integers(49_000)), int(rng.integers(1, 200))) for _ in range(count))
    fds = [contents[number][0] for number, _, _ in pieces]
    reached, found = read(native, fds, [p[1] for p in pieces], [p[2] for p in pieces], gap)
    assert reached == (count, 0)
    assert found == [contents[number][1][at : at + width] for number, at, width in pieces]


def test_short_files_and_errors_are_told(native: ModuleType, contents: list[tuple[int, bytes]]) -> None:
    fd, data = contents[0]
    reached, found = read(native, [fd] * 4, [10, 40, 49_990, 60_000], [5, 5, 20, 5])
    assert reached == (2, 0)
    assert found[:2] == [data[10:15], data[40:45]]

    reached, _ = read(native, [10_000], [0], [4])
    assert reached == (0, 9)  # EBADF
    with pytest.raises(ValueError, match="at least 0"):
        native.read_ranges(0, 0, 0, 0, -1, 0)
    assert native.read_ranges(0, 0, 0, 0, 0, 0) == (0, 0)
