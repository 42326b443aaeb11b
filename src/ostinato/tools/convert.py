"""Conversion of a directory of trajectories to another format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.durable.new_paths import new_directory
from ostinato.durable.tensorfile import check_format, read_tree, write_tree
from ostinato.errors import CheckpointError
from ostinato.tools.verify import check_file
from ostinato.trajectories.index import Entry, SavedFile, layout_of, read_index, write_index
from ostinato.trajectories.trajectory import Trajectory, owned_tree

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["ConvertReport", "convert"]


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
    on_progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Write all trajectories to a new directory in another format. Ids, seed and generator stay the same.

    Each file is verified as by `verify` before it is converted, so that a damaged file never gets a valid checksum.

    Args:
        source_path: Directory of trajectories, written by Ostinato or RLinf.
        save_path: New directory, which appears completely or not at all.
        trajectory_format: `safetensors`, `pt` or `pkl`.
        allow_pickle: Allow reading and writing `pkl`; reading executes the code in the files.
        on_progress: Called with the number of files done and the total.

    Raises:
        OptionError: The format does not exist, or is `pkl` without `allow_pickle`.
        CheckpointNotFoundError: There are no trajectories.
        CheckpointError: The trajectories have this format already, or the target exists.
        DamagedFileError: A file is missing, damaged, or does not match the index; the target is removed.
    """
    check_format(trajectory_format, allow_pickle=allow_pickle)
    source, target = Path(source_path).absolute(), Path(save_path).absolute()
    index = read_index(source)
    old = index.head.trajectory_format
    index.check_pickle(allow_pickle=allow_pickle)
    if old == trajectory_format:
        msg = f"the format of {source} is {old} already: nothing to convert"
        raise CheckpointError(msg)
    source_bytes = 0
    with new_directory(target) as temporary:
        entries = []
        for done, info in enumerate(index.infos.values(), 1):
            path = source / info.file_name(old)
            nbytes, _ = check_file(index, info.trajectory_id, allow_pickle=allow_pickle)
            weights = {"model_weights_id": info.model_weights_id}  # stays empty if RLinf had none
            values = read_tree(path, old, allow_pickle=allow_pickle) | weights
            tree = owned_tree(Trajectory.from_dict(values), str(path)) | weights
            new = temporary / info.file_name(trajectory_format)
            header, checksum = write_tree(new, tree, trajectory_format, sync=True)
            layout = layout_of(header, path)
            entries.append(Entry(info, layout, SavedFile.of(temporary, trajectory_format, header, layout, checksum)))
            source_bytes += nbytes
            if on_progress is not None:
                on_progress(done, len(index.infos))
        write_index(temporary, index.head._replace(trajectory_format=trajectory_format), index.infos, entries)
    written = sum(entry.file.nbytes for entry in entries if entry.file is not None)
    return ConvertReport(str(target), trajectory_format, len(entries), source_bytes, written)
