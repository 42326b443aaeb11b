"""Checkpoints of trajectories: a directory that appears whole, and reading one back, in full or a rank's share."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import numpy as np
import torch

from ostinato.durable.files import fsync_dir, link_or_copy, make_directories, new_token
from ostinato.durable.locks import DirectoryLock
from ostinato.durable.tensorfile import write_tree
from ostinato.errors import CheckpointError, DamagedFileError
from ostinato.trajectories.index import Entry, Head, consent, fold, place_of, read_listing, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.trajectories.index import Held, Place

__all__ = [
    "Kept",
    "Loaded",
    "State",
    "check_new",
    "generator_in",
    "load",
    "new_directory",
    "numbers",
    "save",
    "share",
]


@final
class State:
    """Shared by a buffer and its shelf; changed under the buffer's lock."""

    __slots__ = ("counter", "format_name", "generator", "seed")

    def __init__(self, seed: int, format_name: str) -> None:
        self.seed = seed
        self.counter = 0
        """The next id."""
        self.format_name = format_name
        self.generator = torch.Generator().manual_seed(seed)

    def head(self) -> Head:
        """Return what stands in front of an index now."""
        return Head(self.format_name, self.counter, self.seed, self.generator.get_state())


def generator_in(head: Head, rank: int, ranks: int, where: object) -> torch.Generator:
    """Return a generator that goes on where the saved one stopped, or begins with the seed where none was saved.

    With several ranks each gets a stream of its own that follows from the saved state and its rank.

    Raises:
        DamagedFileError: The state is not one of a generator.
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


def numbers(generator: torch.Generator, count: int, below: int, *, replace: bool) -> np.ndarray:
    """Draw `count` of the numbers `[0, below)`, int64 `[count]`.

    With `replace` each draw is uniform and independent; otherwise every ordered choice of different numbers is equally
    likely (`count <= below`).
    """
    if replace:
        return torch.randint(0, below, (count,), generator=generator, device="cpu").numpy()
    if 2 * count > below:
        return torch.randperm(below, generator=generator, device="cpu")[:count].numpy()
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:  # at least half of the numbers are still free: one or two turns
        more = torch.randint(0, below, (2 * (count - len(found)) + 16,), generator=generator, device="cpu").numpy()
        found = np.concatenate((found, more))
        _, first = np.unique(found, return_index=True)
        found = found[np.sort(first)]
    return found[:count]


_SUFFIX = ".ostinato-tmp"


class Kept(NamedTuple):
    """An entry at the moment of a checkpoint: it may be saved or leave memory meanwhile."""

    entry: Entry
    held: Held | None
    place: Place | None


class Loaded(NamedTuple):
    """What was read: the directory's head, and the trajectories that this rank gets."""

    head: Head
    entries: list[Entry]


def check_new(path: Path) -> None:
    """Refuse a target that is there already and not empty.

    Raises:
        CheckpointError: naming it.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        msg = f"{path} exists and is no directory: choose a new path"
        raise CheckpointError(msg)
    if path.is_dir() and any(path.iterdir()):
        msg = f"{path} exists and is not empty: choose a new path, or remove it first"
        raise CheckpointError(msg)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `path` that becomes `path` when the block ends well, and goes otherwise.

    What a killed process left of earlier attempts is removed.

    Raises:
        CheckpointError: The path is taken.
    """
    check_new(path)
    make_directories(path.parent)
    _sweep(path)
    temporary = path.with_name(f".{path.name}.{new_token()}{_SUFFIX}")
    temporary.mkdir()
    lock = DirectoryLock(temporary)
    try:
        lock.acquire()
        yield temporary
        fsync_dir(temporary)
        if os.name == "nt":  # there a directory with an open file cannot be renamed
            lock.release()
            if path.is_dir():
                path.rmdir()
        temporary.rename(path)
        lock.release(path)  # not before: who sweeps must not take a finished directory for a left one
    except BaseException:
        lock.release()
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_dir(path.parent)


def _sweep(path: Path) -> None:
    """Remove temporary directories of this path whose makers are gone: their locks are free."""
    for left in path.parent.iterdir():
        name = left.name
        token = name.removeprefix(f".{path.name}.").removesuffix(_SUFFIX)
        if name != f".{path.name}.{token}{_SUFFIX}" or len(token) != len(new_token()) or "." in token:
            continue  # not of this path, but of one whose name begins like it
        lock = DirectoryLock(left)
        with contextlib.suppress(CheckpointError, OSError):
            lock.acquire()
            shutil.rmtree(left, ignore_errors=True)
            lock.release()


def save(path: Path, head: Head, kept: Sequence[Kept]) -> None:
    """Write all trajectories into a new directory, by link or copy where they lie in files.

    Args:
        path: The directory.
        head: Counter, seed and generator as they are now.
        kept: The trajectories.

    Raises:
        CheckpointError: The path is taken.
        DamagedFileError: A file is missing.
        StorageMemoryError: The disk is full; nothing is left.
    """
    with new_directory(path) as temporary:
        saved = []
        for item in kept:
            entry, target = item.entry, temporary / item.entry.file_name(head.trajectory_format)
            if item.place is not None:
                link_or_copy(item.entry.path(), target)
                place = item.place
            elif item.held is not None:
                header, checksum = write_tree(target, item.held.tree, head.trajectory_format, sync=True)
                place = place_of(temporary, head.trajectory_format, header, entry.form, checksum)
            else:
                msg = f"trajectory {entry.id} is neither in memory nor on disk"
                raise CheckpointError(msg)
            saved.append(Entry(entry.facts, entry.form, place))
        fold(temporary, head, {entry.id: entry.facts for entry in saved}, saved)


def share(ids: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """Return a rank's contiguous part of a list; the sizes of all parts differ by at most one."""
    return ids[rank * len(ids) // ranks : (rank + 1) * len(ids) // ranks]


def load(path: Path, *, allow_pickle: bool, rank: int, ranks: int, on_damage: Literal["raise", "skip"]) -> Loaded:
    """Read what a directory holds; files are looked at, their rows are not read.

    Raises:
        CheckpointNotFoundError: No trajectories are there.
        CheckpointError: They are pickles without consent.
        DamagedFileError: naming a file that is missing or damaged, and its id.
    """
    listing = read_listing(path, strict=on_damage == "raise")
    consent(listing, allow_pickle=allow_pickle)
    if listing.damage:
        msg = (
            f"{path}: our own list is damaged and was left out: checksums are unknown, and the generator begins "
            f"with the seed: {listing.damage}"
        )
        warnings.warn(msg, RuntimeWarning, stacklevel=4)
    entries, damage = [], []
    for number, found in resolve(listing, share(list(listing.facts), rank, ranks), allow_pickle=allow_pickle):
        if isinstance(found, Entry):
            entries.append(found)
        elif on_damage == "raise":
            raise found
        else:
            damage.append((number, found))
    if damage:
        first = "; ".join(str(error) for _, error in damage[:5])
        msg = f"{path}: {len(damage)} damaged trajectories were left out (ids {[n for n, _ in damage[:20]]}): {first}"
        warnings.warn(msg, RuntimeWarning, stacklevel=4)
    return Loaded(listing.head, entries)
