"""What an incremental save writes of an array: nothing, a patch, one patch in the place of many, or all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from ostinato.durable.chains import read_runs
from ostinato.durable.dtypes import raw_view
from ostinato.durable.runs import join_runs, one_run, place

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ostinato.durable.records import ArrayRecord
    from ostinato.durable.runs import Runs

__all__ = ["MOST_PATCHES", "Plan", "Print", "changed_rows", "plan", "print_of"]

MOST_PATCHES = 16
"""A chain of so many patches is folded into one by the next save."""
_PRINT_BYTES = 64 * 1024


class Plan(NamedTuple):
    """What to write of an array that a checkpoint holds already."""

    kept: ArrayRecord | None
    """What stays of the older checkpoint, and what a patch is added to; None writes everything."""
    runs: Runs
    """The rows of the patch; none where nothing has changed."""


EVERYTHING = Plan(None, one_run(0, 0))


def plan(root: Path, old: ArrayRecord | None, dtype: str, shape: tuple[int, ...], changed: Runs) -> Plan:
    """Decide what to write.

    The patches of an array never take more bytes than its base: where they would, everything is written. So a chain
    takes at most twice the bytes of the array, and a save at most what a whole one takes.

    Args:
        root: Directory of the older checkpoint.
        old: What it holds of the array.
        dtype: Its dtype now.
        shape: Its shape now.
        changed: Rows that have changed since then.
    """
    if old is None or old.dtype != dtype or not shape or old.shape[1:] != shape[1:] or old.shape[0] > shape[0]:
        return EVERYTHING
    if old.nbytes == 0:
        return Plan(old, one_run(0, 0)) if old.shape == shape else EVERYTHING
    runs = join_runs(changed, one_run(old.shape[0], shape[0] - old.shape[0]))
    if not len(runs):
        return Plan(old, runs)
    patches = old.patches
    if len(patches) >= MOST_PATCHES:
        runs, patches = join_runs(runs, *read_runs(root, old)), ()
    if place(runs, old.row_bytes).nbytes + sum(patch.nbytes for patch in patches) > old.nbytes:
        return EVERYTHING
    return Plan(replace(old, shape=shape, patches=patches), runs)


class Print(NamedTuple):
    """What is remembered of an array between saves: its form, and a checksum of every 64 KiB."""

    dtype: Any
    shape: tuple[int, ...]
    sums: np.ndarray


def print_of(tensor: Tensor) -> Print:
    """Return the print of a contiguous tensor on the CPU. Cost: one pass over its bytes."""
    raw = raw_view(tensor)
    starts = range(0, len(raw), _PRINT_BYTES)
    sums = np.fromiter((xxhash.xxh3_64_intdigest(raw[i : i + _PRINT_BYTES]) for i in starts), np.uint64, len(starts))
    return Print(tensor.dtype, tuple(tensor.shape), sums)


def changed_rows(old: Print | None, new: Print, row_bytes: int) -> Runs:
    """Return rows that cover every block that differs; all rows that are new; everything if the form differs."""
    rows = new.shape[0] if new.shape else 0
    if old is None or old.dtype != new.dtype or old.shape[1:] != new.shape[1:] or not row_bytes:
        return one_run(0, rows)
    common = min(len(old.sums), len(new.sums))
    differ = np.flatnonzero(old.sums[:common] != new.sums[:common])
    first = differ * _PRINT_BYTES // row_bytes
    last = np.minimum(-(-(differ + 1) * _PRINT_BYTES // row_bytes), rows)
    runs = np.stack([first, last - first], axis=1)[first < last]
    start = common * _PRINT_BYTES // row_bytes
    return join_runs(runs.astype(np.int64), one_run(start, max(0, rows - start)))
