"""Checkpoints of trajectories: writing one as a whole, and loading one in full or a rank's share of it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import torch

from ostinato.durable import progress
from ostinato.durable.files import link_or_copy, new_directory
from ostinato.durable.progress import TRAJECTORIES
from ostinato.durable.tensorfile import write_tree
from ostinato.errors import CheckpointError, DamagedFileError
from ostinato.trajectories.index import Entry, Head, SavedFile, read_index, write_index

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.trajectories.index import TrajectoryData

__all__ = ["BufferState", "LoadedCheckpoint", "Snapshot", "load", "save"]


@final
class BufferState:
    """Seed, generator, id counter and format of a buffer; shared with its store and changed under the store's lock."""

    __slots__ = ("counter", "format_name", "generator", "seed")

    def __init__(self, seed: int, format_name: str) -> None:
        self.seed = seed
        self.counter = 0
        """The next id."""
        self.format_name = format_name
        self.generator = torch.Generator().manual_seed(seed)

    def head(self) -> Head:
        """Return the head of an index, with a copy of the generator's state."""
        return Head(self.format_name, self.counter, self.seed, self.generator.get_state())

    def restore(self, head: Head, generator: torch.Generator, lowest_free_id: int) -> None:
        """Continue from a checkpoint; ids that were given before are not reused."""
        self.generator, self.seed, self.format_name = generator, head.seed, head.trajectory_format
        self.counter = max(self.counter, head.counter, lowest_free_id)


class Snapshot(NamedTuple):
    """An entry at the time of a checkpoint; it may be saved, or leave memory, while the checkpoint is written."""

    entry: Entry
    data: TrajectoryData | None
    file: SavedFile | None


def save(path: Path, head: Head, snapshots: Sequence[Snapshot]) -> None:
    """Write trajectories into a new directory; files are linked, or copied if the file system cannot link.

    Args:
        path: The directory.
        head: Format, counter, seed and generator.
        snapshots: The trajectories.

    Raises:
        CheckpointError: The path exists and is not an empty directory.
        DamagedFileError: A file is missing.
        StorageMemoryError: The disk is full; nothing is left at `path`.
    """
    progress.begin(len(snapshots), TRAJECTORIES)
    with new_directory(path) as temporary:
        saved = []
        for snapshot in snapshots:
            saved.append(_save_entry(temporary, head.trajectory_format, *snapshot))
            progress.count(1, TRAJECTORIES)
        progress.finish(TRAJECTORIES)
        write_index(temporary, head, {entry.id: entry.info for entry in saved}, saved)


def _save_entry(
    directory: Path, format_name: str, entry: Entry, data: TrajectoryData | None, file: SavedFile | None
) -> Entry:
    target = directory / entry.info.file_name(format_name)
    if file is not None:
        link_or_copy(entry.path(), target)
        return Entry(entry.info, entry.layout, file)
    if data is None:
        msg = f"trajectory {entry.id} is neither in memory nor on disk"
        raise CheckpointError(msg)
    header, checksum = write_tree(target, data.tree, format_name, sync=True)
    return Entry(entry.info, entry.layout, SavedFile.of(directory, format_name, header, entry.layout, checksum))


class LoadedCheckpoint(NamedTuple):
    """Head of the directory, trajectories of this rank, and a generator that continues where the saved one stopped."""

    head: Head
    entries: list[Entry]
    generator: torch.Generator


def load(
    path: Path, *, allow_pickle: bool, rank: int, ranks: int, on_damage: Literal["raise", "skip"]
) -> LoadedCheckpoint:
    """Read the index of a directory and check its files, without reading their rows.

    Args:
        path: The directory.
        allow_pickle: Whether files may be unpickled.
        rank: Which contiguous share of the trajectories to take, in `[0, ranks)`; sizes differ by at most one.
        ranks: Number of shares.
        on_damage: Raise for missing or damaged files, or skip them with a warning.

    Raises:
        CheckpointNotFoundError: The directory holds no trajectories.
        CheckpointError: The files are pickles and `allow_pickle` is False.
        DamagedFileError: A file is missing or damaged; the message names it and the id.
    """
    index = read_index(path, strict=on_damage == "raise")
    index.check_pickle(allow_pickle=allow_pickle)
    if index.damage:
        msg = (
            f"{path}: the file of field positions is damaged and was ignored: checksums are unknown, and the generator "
            f"begins with the seed: {index.damage}"
        )
        warnings.warn(msg, RuntimeWarning, stacklevel=3)
    ids = list(index.infos)
    share = ids[rank * len(ids) // ranks : (rank + 1) * len(ids) // ranks]
    entries, damage = [], []
    progress.begin(len(share), TRAJECTORIES)
    for number, found in index.check_files(share, allow_pickle=allow_pickle):
        if isinstance(found, Entry):
            entries.append(found)
            progress.count(1, TRAJECTORIES)
        elif on_damage == "raise":
            raise found
        else:
            damage.append((number, found))
    if damage:
        first = "; ".join(str(error) for _, error in damage[:5])
        msg = f"{path}: {len(damage)} damaged trajectories were left out (ids {[n for n, _ in damage[:20]]}): {first}"
        warnings.warn(msg, RuntimeWarning, stacklevel=3)
    return LoadedCheckpoint(index.head, entries, _generator_of(index.head, rank, ranks, path))


def _generator_of(head: Head, rank: int, ranks: int, where: object) -> torch.Generator:
    """Return a generator with the saved state, or with the seed if no state was saved.

    With several ranks each gets its own stream, derived from the saved state and the rank.

    Raises:
        DamagedFileError: The saved state is invalid.
    """
    generator = torch.Generator().manual_seed(head.seed)
    if head.generator is not None:
        try:
            generator.set_state(head.generator)
        except (RuntimeError, TypeError) as error:
            msg = f"{where} is damaged: the state of the generator: {error}"
            raise DamagedFileError(msg) from error
    if ranks > 1:
        seeds: Tensor = torch.randint(0, 2**62, (rank + 1,), generator=generator, device="cpu")
        generator = torch.Generator().manual_seed(int(seeds[rank]))
    return generator
