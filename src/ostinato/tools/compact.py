"""Folding the patches of an incremental checkpoint into their bases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.buffers.mixing import FORMAT as ENSEMBLE
from ostinato.durable import CheckpointReader, CheckpointWriter
from ostinato.durable.manifest import format_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["CompactReport", "compact", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What compacting did."""

    path: str
    """The directory."""
    patches: int
    """Patches that were folded."""
    bytes_before: int
    """Bytes of all arrays before."""
    bytes_after: int
    """Bytes of all arrays now."""


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open the checkpoint of a buffer or of an ensemble.

    Raises:
        CheckpointNotFoundError: Neither is there.
        CheckpointError: It is of a version that this release cannot read.
        DamagedFileError: The manifest is damaged, or a file is missing or of another size.
    """
    root = Path(path)
    return CheckpointReader(root, format_name=ENSEMBLE if format_of(root) == ENSEMBLE else FORMAT)


def compact(path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None) -> CompactReport:
    """Fold each array of a checkpoint that has patches into one file.

    The checkpoint holds the same afterwards, and buffers go on from it with incremental saves as before. Whenever it is
    interrupted, the directory holds the checkpoint as it was or as it will be. Needs room on the disk for the arrays
    that have patches.

    Args:
        path: Directory that `dumps(path, incremental=True)` wrote.
        on_progress: Called with the number of bytes written and of all bytes to write.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointError: It is being saved to, or was saved over meanwhile.
        DamagedFileError: naming the damaged file; nothing is changed.
        StorageMemoryError: The disk is too small; nothing is changed.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> for rows in (80, 10, 10):
        ...     index = rb.extend({"reward": torch.rand(rows)})
        ...     rb.dumps("chain", incremental=True)
        >>> compact("chain").patches
        2
    """
    reader = open_checkpoint(path)
    arrays = reader.arrays.values()
    before = sum(record.total_bytes for record in arrays)
    chained = [record for record in arrays if record.patches]
    if not chained:
        return CompactReport(str(path), 0, before, before)
    needed = sum(record.row_bytes * record.shape[0] for record in chained)
    with CheckpointWriter(path, format_name=reader.format_name, needed_bytes=needed) as writer:
        done = 0
        for nbytes in writer.take_over(reader):
            done += nbytes
            if on_progress is not None:
                on_progress(done, needed)
        writer.finish()
    after = sum(record.total_bytes for record in open_checkpoint(path).arrays.values())
    return CompactReport(str(path), sum(len(record.patches) for record in chained), before, after)
