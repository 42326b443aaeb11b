"""Merging the patches of an incremental checkpoint into their base files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.buffers.checkpoint.ensembles import ENSEMBLE_FORMAT as ENSEMBLE
from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.durable import CheckpointReader, CheckpointWriter
from ostinato.durable.manifest import format_of
from ostinato.durable.progress import BYTES, Progress

if TYPE_CHECKING:
    import os

    from ostinato.durable.progress import ProgressOption


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The result of `compact`."""

    path: str
    """The directory."""
    patches: int
    """Number of patches that were merged."""
    bytes_before: int
    """Bytes of all arrays before."""
    bytes_after: int
    """Bytes of all arrays afterwards."""


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open the checkpoint of a buffer or an ensemble.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointError: The version is not supported.
        DamagedFileError: The manifest is damaged, or a file is missing or has the wrong size.
    """
    return CheckpointReader(path, format_name=format_name(path))


def format_name(path: str | os.PathLike[str]) -> str:
    """Return the kind of a checkpoint: of an ensemble if its manifest says so, else of a buffer."""
    return ENSEMBLE if format_of(Path(path)) == ENSEMBLE else FORMAT


def compact(path: str | os.PathLike[str], *, progress: ProgressOption = None) -> CompactReport:
    """Merge the patches of each array of a checkpoint into one file.

    The contents stay the same, and buffers can continue with incremental saves. The operation is atomic: if it is
    interrupted, the directory has the old or the new checkpoint. Needs disk space for the arrays that have patches.

    Args:
        path: Directory that `dumps(path, incremental=True)` wrote.
        progress: The bytes read and written, and their total; see `ostinato.ProgressOption`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointError: The checkpoint is being saved to, or was replaced meanwhile.
        DamagedFileError: A file is damaged; nothing is changed.
        StorageMemoryError: There is not enough disk space; nothing is changed.

    Examples:
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
    patched = [record for record in arrays if record.patches]
    if not patched:
        with Progress(progress, "compact", 0, unit=BYTES):
            pass
        return CompactReport(str(path), 0, before, before)
    needed = sum(record.row_bytes * record.shape[0] for record in patched)
    total = needed + sum(record.total_bytes for record in patched)
    with (
        Progress(progress, "compact", total, unit=BYTES),
        CheckpointWriter(path, format_name=reader.format_name, needed_bytes=needed) as writer,
    ):
        writer.take_over(reader)
        writer.finish()
    after = sum(record.total_bytes for record in open_checkpoint(path).arrays.values())
    return CompactReport(str(path), sum(len(record.patches) for record in patched), before, after)
