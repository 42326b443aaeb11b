"""Conversion of a directory of trajectories to another format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.durable.files import new_directory
from ostinato.durable.progress import TRAJECTORIES, Progress
from ostinato.durable.tensorfile import check_format, read_tree
from ostinato.errors import CheckpointError
from ostinato.trajectories.index import Entry, read_index, write_index
from ostinato.trajectories.trajectory import Trajectory, owned_tree

if TYPE_CHECKING:
    import os

    from ostinato.durable.progress import ProgressOption


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of `convert`."""

    path: str
    """The new directory."""
    trajectory_format: str
    """The new format."""
    trajectories: int
    """Number of trajectories."""
    source_bytes: int
    """Bytes of the files read."""
    nbytes: int
    """Bytes of the files written."""


def convert(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    trajectory_format: str,
    *,
    allow_pickle: bool = False,
    overwrite: bool = False,
    progress: ProgressOption = None,
) -> ConvertReport:
    """Write all trajectories to a new directory in another format. Ids, seed and generator stay the same.

    Each file is verified as by `verify` before it is converted, so that a damaged file never gets a valid checksum.

    Args:
        source_path: Directory of trajectories, written by Ostinato or RLinf.
        save_path: New directory, which appears completely or not at all.
        trajectory_format: `safetensors`, `pt` or `pkl`.
        allow_pickle: Allow reading and writing `pkl`; reading executes the code in the files.
        overwrite: Replace what is at `save_path`, when the new directory is complete.
        progress: The trajectories done and their total; see `ostinato.ProgressOption`.

    Raises:
        OptionError: The format does not exist, or is `pkl` without `allow_pickle`.
        CheckpointNotFoundError: There are no trajectories.
        CheckpointError: The trajectories have this format already, or the target exists.
        DamagedFileError: A file is missing, damaged, or does not match the index; the target is removed.
    """
    check_format(trajectory_format, allow_pickle=allow_pickle)
    source, target = Path(source_path).absolute(), Path(save_path).absolute()
    source_bytes = 0
    with Progress(progress, "convert", unit=TRAJECTORIES) as bar:
        index = read_index(source)
        old = index.head.trajectory_format
        index.check_pickle(allow_pickle=allow_pickle)
        if old == trajectory_format:
            msg = f"the format of {source} is {old} already: nothing to convert"
            raise CheckpointError(msg)
        bar.begin(len(index.infos))
        with new_directory(target, overwrite=overwrite) as temporary:
            entries = []
            for info in index.infos.values():
                path = index.path(info.trajectory_id)
                nbytes, _ = index.verify(info.trajectory_id, allow_pickle=allow_pickle)
                weights = {"model_weights_id": info.model_weights_id}  # stays empty if RLinf had none
                values = read_tree(path, old, allow_pickle=allow_pickle) | weights
                entry = Entry.of_tree(owned_tree(Trajectory.from_dict(values), str(path)) | weights, path)
                entry.info = info
                entry.file, entry.data = entry.write(temporary, trajectory_format, sync=True), None
                entries.append(entry)
                source_bytes += nbytes
                bar.advance()
            bar.finish()
            write_index(temporary, index.head._replace(trajectory_format=trajectory_format), index.infos, entries)
    written = sum(entry.file.nbytes for entry in entries if entry.file is not None)
    return ConvertReport(str(target), trajectory_format, len(entries), source_bytes, written)
