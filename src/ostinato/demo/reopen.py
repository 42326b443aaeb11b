"""Saving the demo's buffer, opening it again, and proving that nothing was lost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ostinato.demo.training import make_buffer
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    import os

    from ostinato.demo.config import Report

__all__ = ["Reopened", "save_and_reopen"]

_BATCHES = 5


@dataclass(frozen=True, slots=True)
class Reopened:
    """A checkpoint that was written, read into a fresh buffer and compared."""

    path: Path
    """Its directory."""
    rows: int
    """Rows in it."""
    nbytes: int
    """Bytes of all its files."""
    save_s: float
    """Seconds to write it."""
    load_s: float
    """Seconds to read it."""
    batches: int
    """Batches that both buffers then drew, equal in every field."""


def save_and_reopen(report: Report, path: str | os.PathLike[str]) -> Reopened:
    """Save a run's buffer, load it into a fresh one and let both go on sampling.

    Args:
        report: What `train` returned; its buffer is sampled from.
        path: Directory of the checkpoint; an older one there is replaced.

    Raises:
        CheckpointError: if the reopened buffer draws other batches than the one that was saved.
    """
    target = Path(path)
    start = time.perf_counter()
    report.buffer.dumps(target)
    saved = time.perf_counter()
    reopened = make_buffer(report.config)
    reopened.loads(target)
    loaded = time.perf_counter()
    for number in range(_BATCHES):
        mine, theirs = report.buffer.sample(), reopened.sample()
        different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
        if different:
            msg = f"batch {number} after reopening {target} differs from the original in the fields {different}"
            raise CheckpointError(msg)
    nbytes = sum(file.stat().st_size for file in target.iterdir())
    return Reopened(target, len(reopened), nbytes, saved - start, loaded - saved, _BATCHES)
