"""Looking at one trajectory file: does it hold what the index says. Shared by verify, convert, merge and split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.durable.tensorfile import file_checksum
from ostinato.errors import DamagedFileError

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.durable.headers import Header
    from ostinato.trajectories.index import DirectoryIndex, Entry

__all__ = ["check_content", "check_whole"]


def check_content(listing: DirectoryIndex, number: int, *, allow_pickle: bool) -> Entry:
    """Read the header of a file and compare it with the index; `pkl` is unpickled.

    Returns:
        The trajectory, without a checksum.

    Raises:
        DamagedFileError: The file is missing, damaged, or not the one that the index means.
        SchemaError: It is no trajectory.
    """
    entry, header = listing.inspect(number, allow_pickle=allow_pickle)
    for name in ("model_weights_id", "max_episode_length"):
        _compare(entry.path(), header, name, getattr(entry.info, name))
    return entry


def _compare(path: Path, header: Header, name: str, expected: object) -> None:
    """Compare what the file says of itself, if it does: files of one shape may have been swapped."""
    found = header.plain.get((name,))
    if type(found) is type(expected) and found != expected:
        msg = f"{path} has the {name} {str(found)[:200]!r}, the index says {str(expected)!r}: files were swapped"
        raise DamagedFileError(msg)


def check_whole(listing: DirectoryIndex, number: int, *, allow_pickle: bool) -> tuple[int, bool]:
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
    format_name, fact, known = listing.head.trajectory_format, listing.infos[number], listing.entries.get(number)
    path = listing.directory / fact.file_name(format_name)
    checksum = file_checksum(path, format_name, deep=True)
    kept = "" if known is None or known.file is None else known.file.checksum
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
