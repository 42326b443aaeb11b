"""Checkpoints of trajectories: writing one as a whole, and loading one in full or a rank's share of it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal, final

import torch

from ostinato.durable import progress
from ostinato.durable.files import link_or_copy, new_directory
from ostinato.durable.progress import TRAJECTORIES
from ostinato.errors import DamagedFileError
from ostinato.trajectories.index import Entry, Head, read_index, write_index

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["BufferState", "load", "save"]


@final
class BufferState:
    """Seed, generator, id counter and format of a buffer; shared with its store and changed under the store's lock."""

    __slots__ = ("counter", "format_name", "generator", "seed")

    def __init__(self, seed: int, format_name: str, counter: int = 0, generator: torch.Generator | None = None) -> None:
        self.seed = seed
        self.format_name = format_name
        self.counter = counter
        """The next id."""
        self.generator = torch.Generator().manual_seed(seed) if generator is None else generator

    def head(self) -> Head:
        """Return the head of an index, with a copy of the generator's state."""
        return Head(self.format_name, self.counter, self.seed, self.generator.get_state())

    def restore(self, loaded: BufferState, lowest_free_id: int) -> None:
        """Continue from a checkpoint; ids that were given before are not reused."""
        self.generator, self.seed, self.format_name = loaded.generator, loaded.seed, loaded.format_name
        self.counter = max(self.counter, loaded.counter, lowest_free_id)


def save(path: Path, head: Head, entries: Sequence[Entry]) -> None:
    """Write trajectories into a new directory; files are linked, or copied if the file system cannot link.

    Args:
        path: The directory.
        head: Format, counter, seed and generator.
        entries: The trajectories, copies: those of a buffer may leave memory meanwhile. They become those of `path`.

    Raises:
        CheckpointError: The path exists and is not an empty directory.
        DamagedFileError: A file is missing.
        StorageMemoryError: The disk is full; nothing is left at `path`.
    """
    progress.begin(len(entries), TRAJECTORIES)
    with new_directory(path) as temporary:
        for entry in entries:
            if entry.file is None:
                entry.file = entry.write(temporary, head.trajectory_format, sync=True)
            else:
                link_or_copy(entry.path(), temporary / entry.info.file_name(head.trajectory_format))
            entry.data = None
            progress.count(1, TRAJECTORIES)
        progress.finish(TRAJECTORIES)
        write_index(temporary, head, {entry.id: entry.info for entry in entries}, entries)


def load(
    path: Path, *, allow_pickle: bool, rank: int, ranks: int, on_damage: Literal["raise", "skip"]
) -> tuple[BufferState, list[Entry]]:
    """Read the index of a directory and check its files, without reading their rows.

    Args:
        path: The directory.
        allow_pickle: Whether files may be unpickled.
        rank: Which contiguous share of the trajectories to take, in `[0, ranks)`; sizes differ by at most one.
        ranks: Number of shares.
        on_damage: Raise for missing or damaged files, or skip them with a warning.

    Returns:
        The state, whose generator continues where the saved one stopped, and the trajectories of this rank.

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
    head = index.head
    return BufferState(head.seed, head.trajectory_format, head.counter, _generator_of(head, rank, ranks, path)), entries


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
