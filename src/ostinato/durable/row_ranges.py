"""Runs of rows `[first, count]`, and their positions in a patch file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ostinato.durable.files import damaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Runs: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
"""int64 `[n, 2]`: first row and number of rows of each run, ascending and disjoint."""

PAGE_BYTES = 4096
_LARGE_BYTES = 2 * PAGE_BYTES
"""Smallest run that is aligned to pages in the file, so that it can be mapped."""


class Places(NamedTuple):
    """Runs of rows, and their positions in a file."""

    runs: Runs
    at: np.ndarray
    """Offset of each run in the file, int64 `[n]`."""
    large: np.ndarray
    """Runs with a place of their own, bool `[n]`; the others follow each other at the end of the file."""
    small_start: int
    """Offset of the first of the other runs."""
    nbytes: int
    """Size of the file."""

    def large_runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first row, the number of rows and the offset of each run with a place of its own."""
        for (first, count), at in zip(self.runs[self.large].tolist(), self.at[self.large].tolist(), strict=True):
            yield first, count, at

    def small_rows(self) -> np.ndarray:
        """Return the rows of the other runs, int64; they are adjacent in the file."""
        return rows_of(self.runs[~self.large])

    def offsets(self, rows: np.ndarray, row_bytes: int) -> np.ndarray:
        """Return the offsets of rows (int64, ascending) in the file; -1 for rows that it does not hold."""
        if not len(self.runs):
            return np.full(len(rows), -1, dtype=np.int64)
        run = np.searchsorted(self.runs[:, 0], rows, side="right") - 1
        return np.where(contains(self.runs, rows), self.at[run] + (rows - self.runs[run, 0]) * row_bytes, -1)


def one_run(first: int, count: int) -> Runs:
    """Return a single run, or none if it has no rows."""
    return np.array([[first, count]] if count else [], dtype=np.int64).reshape(-1, 2)


def as_runs(slots: np.ndarray) -> Runs:
    """Return the runs of ascending distinct slots."""
    if not len(slots):
        return one_run(0, 0)
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = np.concatenate([[0], cuts])
    counts = np.diff(np.concatenate([starts, [len(slots)]]))
    return np.stack([slots[starts], counts], axis=1).astype(np.int64)


def join_runs(*many: Runs) -> Runs:
    """Return the union of runs."""
    runs = np.concatenate([one_run(0, 0), *many])
    if not len(runs):
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(runs.sum(1))
    fresh = np.concatenate([[True], runs[1:, 0] > ends[:-1]])
    starts = np.flatnonzero(fresh)
    lasts = np.concatenate([starts[1:], [len(runs)]]) - 1
    return np.stack([runs[starts, 0], ends[lasts] - runs[starts, 0]], axis=1)


def rows_of(runs: Runs) -> np.ndarray:
    """Return all rows of runs, int64."""
    total = int(runs[:, 1].sum()) if len(runs) else 0
    before = np.cumsum(runs[:, 1]) - runs[:, 1]
    rows: np.ndarray[Any, Any] = np.arange(total) + np.repeat(runs[:, 0] - before, runs[:, 1])
    return rows


def contains(runs: Runs, rows: np.ndarray) -> np.ndarray:
    """Return which rows are in one of the runs, bool."""
    if not len(runs):
        return np.zeros(len(rows), dtype=bool)
    run = np.searchsorted(runs[:, 0], rows, side="right") - 1
    inside: np.ndarray[Any, Any] = (run >= 0) & (rows < runs[run].sum(1))
    return inside


def place_all(rows: int, row_bytes: int) -> Places:
    """Return the position of all rows in a file that holds nothing else."""
    runs, nbytes = one_run(0, rows), rows * row_bytes
    return Places(runs, np.zeros(len(runs), dtype=np.int64), np.ones(len(runs), dtype=bool), nbytes, nbytes)


def place(runs: Runs, row_bytes: int) -> Places:
    """Return the positions of runs in a patch file: the table, large runs on pages of their own, then small runs."""
    sizes = runs[:, 1] * row_bytes
    large = sizes >= _LARGE_BYTES
    lead = runs[:, 0] * row_bytes % PAGE_BYTES
    extents = np.where(large, -(-(lead + sizes) // PAGE_BYTES) * PAGE_BYTES, 0)
    start = runs.size * 8
    if large.any():
        start = -(-start // PAGE_BYTES) * PAGE_BYTES
    small_start = start + int(extents.sum())
    small = np.where(large, 0, sizes)
    at = np.where(large, start + np.cumsum(extents) - extents + lead, small_start + np.cumsum(small) - small)
    return Places(runs, at, large, small_start, small_start + int(small.sum()))


def check_runs(runs: Runs, path: Path, *, rows: int, row_bytes: int, nbytes: int) -> Places:
    """Check that a table from a file fits the file and the array, and return the positions of its runs.

    Raises:
        DamagedFileError: naming the file.
    """
    first, count = runs[:, 0], runs[:, 1]
    good = bool((first >= 0).all() and (count > 0).all() and (first < rows).all() and (count <= rows).all())
    good = good and bool((first + count <= rows).all() and (first[1:] >= (first + count)[:-1]).all())
    places = place(runs, row_bytes) if good else None
    if places is None or places.nbytes != nbytes:
        damaged(path, f"its table of rows does not fit {rows} rows and {nbytes} bytes", "in the block at byte 0")
    return places
