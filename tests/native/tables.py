"""A storage made of numpy arrays, as the native extension sees it, and what each call should do to it."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Slots = NDArray[np.int64]


def address(array: NDArray[Any]) -> int:
    """Where the memory of an array begins."""
    return int(array.__array_interface__["data"][0])


def noise(rows: int, row_bytes: int, seed: int) -> Bytes:
    """Random rows, so that a byte out of place shows."""
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), dtype=np.uint8)


@dataclass
class Table:
    """Fields of one length: registered memory, and views of it by field and segment."""

    fields: Any
    memory: list[Bytes]
    views: list[list[Bytes]] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each field in one row."""
        return [segments[0].shape[1] for segments in self.views]

    def contents(self) -> list[Bytes]:
        """A copy of every field, its segments end to end."""
        return [np.concatenate(segments) for segments in self.views]

    def snapshot(self) -> list[bytes]:
        """All registered memory, gaps between fields included."""
        return [block.tobytes() for block in self.memory]

    def check(self, expected: list[Bytes]) -> None:
        """Fail unless the fields hold these rows."""
        for got, want in zip(self.contents(), expected, strict=True):
            np.testing.assert_array_equal(got, want)

    def restore(self, contents: list[Bytes]) -> None:
        """Write rows back into the memory of each field."""
        for segments, content in zip(self.views, contents, strict=True):
            at = 0
            for segment in segments:
                segment[:] = content[at : at + len(segment)]
                at += len(segment)

    def batches(self, rows: int, seed: int = 1) -> list[Bytes]:
        """Source rows for every field."""
        return [noise(rows, size, seed + f) for f, size in enumerate(self.sizes)]


def in_columns(native: ModuleType, sizes: Sequence[int], segments: Sequence[int]) -> Table:
    """Every field in memory of its own."""
    table = Table(native.Fields(), [])
    for f, size in enumerate(sizes):
        views = [noise(rows, size, 100 * f + s) for s, rows in enumerate(segments)]
        table.fields.add([(address(view), len(view)) for view in views], size, size)
        table.memory += views
        table.views.append(views)
    return table


def in_rows(native: ModuleType, sizes: Sequence[int], segments: Sequence[int], gap: int) -> Table:
    """All fields side by side in rows that end with `gap` unused bytes."""
    stride = sum(sizes) + gap
    blocks = [noise(rows, stride, s) for s, rows in enumerate(segments)]
    table = Table(native.Fields(), blocks)
    at = 0
    for size in sizes:
        table.fields.add([(address(block) + at, len(block)) for block in blocks], size, stride)
        table.views.append([block[:, at : at + size] for block in blocks])
        at += size
    return table


def make(native: ModuleType, layout: str, sizes: Sequence[int], segments: Sequence[int]) -> Table:
    """A table in one of LAYOUTS."""
    if layout == "columns":
        return in_columns(native, sizes, segments)
    return in_rows(native, sizes, segments, gap=0 if layout == "packed" else 13)


LAYOUTS = ("columns", "packed", "packed with gap")


def slots_of(values: Sequence[int]) -> Slots:
    """Contiguous int64, never empty memory."""
    return np.array(values, dtype=np.int64)


def gather(table: Table, indices: Slots | Sequence[Slots]) -> list[Bytes]:
    """Gather into fresh batches; `indices` is shared, or one array for each field."""
    arrays = [indices] if isinstance(indices, np.ndarray) else list(indices)
    n = len(arrays[0])
    outs = [np.zeros((n, size), dtype=np.uint8) for size in table.sizes]
    table.fields.gather([address(a) for a in arrays], n, [address(out) for out in outs])
    return outs


def runs_beside(work: Callable[[], object]) -> bool:
    """Whether this thread can run while another is inside the call: no thread is made to give the interpreter lock up.

    A call that is over before this thread wakes up proves nothing, so there are several attempts.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for _ in range(50):
            ended: list[object] = []
            thread = threading.Thread(target=lambda: ended.append(work()))  # noqa: B023 (joined below)
            thread.start()
            beside = not ended
            thread.join()
            if beside:
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
