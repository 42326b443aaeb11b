"""What a save takes beside the rows: the peak of the process, as Linux counts it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyMemmapStorage, LazyTensorStorage
from ostinato.tools import compact, inspect_checkpoint

from ...tags import buffer

if TYPE_CHECKING:
    from collections.abc import Callable


ROWS = 160_000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")


def rows(count: int) -> dict[str, Any]:
    return {"obs": torch.rand(count, 60), "wide": torch.zeros(count, 300, dtype=torch.uint8)}


def status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak(work: Callable[[], object]) -> int:
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return status("VmHWM") - before


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_saves_and_what_reads_them_stay_below_64_mb(storage, tmp_path):
    small = buffer(storage(8))
    small.extend(rows(8))
    small.dumps(tmp_path / "small")
    compact(tmp_path / "small")  # they import what they need
    inspect_checkpoint(tmp_path / "small")
    rb = buffer(storage(ROWS))
    for _ in range(4):
        rb.extend(rows(ROWS // 4))
    path = tmp_path / "save"
    assert 1.2 * 64e6 < rb.storage.nbytes == sum(x.row_bytes for x in rb.storage.dense.row_arrays()) * ROWS  # type: ignore[union-attr, misc]
    assert peak(lambda: rb.dumps(path)) < 64e6
    rb.extend(rows(ROWS // 8))
    assert peak(lambda: rb.dumps(path, incremental=True)) < 64e6
    if storage is LazyTensorStorage:
        assert peak(lambda: compact(path)) < 64e6
        assert peak(lambda: inspect_checkpoint(path)) < 64e6
        other = buffer(LazyTensorStorage(ROWS))
        assert peak(lambda: other.loads(path, mmap=True)) < 16e6
