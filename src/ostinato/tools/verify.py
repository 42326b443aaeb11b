"""Looking at one trajectory file: does it hold what the index says. Shared by verify, convert, merge and split."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.durable import verify_array
from ostinato.durable.files import open_file
from ostinato.durable.manifest import parse_json
from ostinato.durable.tensorfile import file_checksum
from ostinato.errors import DamagedFileError, OstinatoError
from ostinato.tools.compact import open_checkpoint
from ostinato.tools.inspect import kind_of, unlisted
from ostinato.trajectories.index import (
    JOURNAL,
    METADATA,
    STORE,
    Entry,
    Listing,
    file_name,
    look,
    read_listing,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.durable.headers import Header

__all__ = ["Damage", "VerifyReport", "check_content", "check_whole", "verify"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One file that is not as it should be."""

    file: str
    """Its name."""
    trajectory_id: int | None
    """The trajectory that it holds."""
    problem: str
    """What is wrong."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading everything found."""

    path: str
    """The directory."""
    kind: str
    """`trajectories` or `buffer`."""
    files: int
    """Files read."""
    nbytes: int
    """Bytes read."""
    checksums: int
    """Files whose bytes were compared with a checksum kept elsewhere or in the file itself."""
    unlisted: tuple[str, ...]
    """Trajectory files that no list names."""
    damage: tuple[Damage, ...]
    """What is damaged; empty where all is whole."""


def verify(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, on_progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Read every file of a directory of trajectories, or of a buffer's checkpoint, and compare what can be compared.

    Args:
        path: The directory.
        allow_pickle: Consent to unpickle; without it `pkl` files are compared by size and checksum alone, where kept.
        on_progress: Called with the number of files done and of all files.

    Returns:
        What was read, and every damaged file.

    Raises:
        CheckpointNotFoundError: Neither kind is there; the message names what is.
        CheckpointError: Its lists cannot be read at all.
    """
    root = Path(path)
    if kind_of(root) == "buffer":
        return _verify_checkpoint(root, on_progress)
    listing = read_listing(root, strict=False)
    damage = [Damage(STORE, None, listing.damage)] if listing.damage else []
    damage += _metadata_damage(listing)
    nbytes = checksums = 0
    for done, (number, fact) in enumerate(listing.facts.items(), 1):
        name = file_name(fact, listing.head.trajectory_format)
        try:
            read, compared = check_whole(listing, number, allow_pickle=allow_pickle)
            nbytes, checksums = nbytes + read, checksums + compared
        except (OstinatoError, OSError) as error:
            damage.append(Damage(name, number, str(error)))
        if on_progress is not None:
            on_progress(done, len(listing.facts))
    return VerifyReport(
        str(root), "trajectories", len(listing.facts), nbytes, checksums, unlisted(listing), tuple(damage)
    )


def _metadata_damage(listing: Listing) -> list[Damage]:
    """Compare the counts of the metadata with the index; while a journal waits they may lag."""
    path = listing.directory / METADATA
    if not path.exists() or (listing.directory / JOURNAL).exists():
        return []
    with os.fdopen(open_file(path), "rb") as stream:
        meta = parse_json(stream.read(), path)
    expected = {
        "size": len(listing.facts),
        "total_samples": sum(fact.num_samples for fact in listing.facts.values()),
    }
    wrong = [
        f"{key} is {str(meta.get(key))[:40]}, the index has {n}" for key, n in expected.items() if meta.get(key) != n
    ]
    if type(meta.get("trajectory_counter")) is int and meta["trajectory_counter"] <= max(listing.facts, default=-1):
        wrong.append(f"trajectory_counter is {meta['trajectory_counter']}, not above every id")
    return [Damage(METADATA, None, "; ".join(wrong))] if wrong else []


def _verify_checkpoint(root: Path, on_progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Read every array of a checkpoint with its patches, and the state; a damaged one does not hide the next."""
    reader = open_checkpoint(root)
    damage, files, nbytes = [], 0, 0
    for done, record in enumerate(reader.arrays.values(), 1):
        try:
            verify_array(root, record)
            nbytes += record.total_bytes
        except (OstinatoError, OSError) as error:
            damage.append(Damage(record.file, None, str(error)))
        files += len(record.files)
        if on_progress is not None:
            on_progress(done, len(reader.arrays))
    if not damage:
        reader.state()
    return VerifyReport(str(root), "buffer", files, nbytes, files, (), tuple(damage))


def check_content(listing: Listing, number: int, *, allow_pickle: bool) -> Entry:
    """Read the header of a file and compare it with the index; `pkl` is unpickled.

    Returns:
        The trajectory, without a checksum.

    Raises:
        DamagedFileError: The file is missing, damaged, or not the one that the index means.
        SchemaError: It is no trajectory.
    """
    entry, header = look(listing, number, allow_pickle=allow_pickle)
    for name in ("model_weights_id", "max_episode_length"):
        _compare(entry.path(), header, name, getattr(entry.facts, name))
    return entry


def _compare(path: Path, header: Header, name: str, expected: object) -> None:
    """Compare what the file says of itself, if it does: files of one shape may have been swapped."""
    found = header.plain.get((name,))
    if type(found) is type(expected) and found != expected:
        msg = f"{path} has the {name} {str(found)[:200]!r}, the index says {str(expected)!r}: files were swapped"
        raise DamagedFileError(msg)


def check_whole(listing: Listing, number: int, *, allow_pickle: bool) -> tuple[int, bool]:
    """Read one file and compare everything that can be compared.

    Args:
        listing: The directory.
        number: Id of the trajectory.
        allow_pickle: Consent to unpickle; without it a `pkl` file is compared with its kept checksum alone.

    Returns:
        Its bytes, and whether a checksum was compared: one kept in our list, or those that `pt` files hold themselves.

    Raises:
        DamagedFileError: The file is missing, damaged, or not the one that the index means.
        SchemaError: It is no trajectory.
    """
    format_name, fact, known = listing.head.trajectory_format, listing.facts[number], listing.known.get(number)
    path = listing.directory / file_name(fact, format_name)
    checksum = file_checksum(path, format_name, deep=True)
    kept = "" if known is None or known.place is None else known.place.checksum
    if kept and checksum != kept:
        msg = f"{path} has the checksum {checksum}, {kept} expected: restore the file from a copy"
        raise DamagedFileError(msg)
    if format_name != "pkl" or allow_pickle:
        check_content(listing, number, allow_pickle=allow_pickle)
    elif not kept:
        msg = (
            f"{path} is a pickle without a kept checksum and cannot be checked: give allow_pickle=True "
            "(--allow-pickle) if it comes from you"
        )
        raise DamagedFileError(msg)
    return path.stat().st_size, bool(kept) or format_name == "pt"
