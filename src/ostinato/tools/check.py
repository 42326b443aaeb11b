"""Looking at one trajectory file: does it hold what the index says. Shared by verify, convert, merge and split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.durable.tensorfile import check_format, file_checksum, read_header
from ostinato.errors import CheckpointError, DamagedFileError, OptionError
from ostinato.trajectories.entries import Entry, file_name, form_of, place_of

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.durable.headers import Header
    from ostinato.trajectories.entries import Facts
    from ostinato.trajectories.listing import Listing

__all__ = ["check_content", "check_whole", "consent"]


def consent(listing: Listing, *, allow_pickle: bool) -> None:
    """Refuse to go on with pickles that nobody allowed.

    Raises:
        CheckpointError: naming the directory.
    """
    try:
        check_format(listing.head.trajectory_format, allow_pickle=allow_pickle)
    except OptionError as error:
        msg = f"{listing.directory}: {error}"
        raise CheckpointError(msg) from error


def check_content(path: Path, format_name: str, fact: Facts, *, allow_pickle: bool) -> Entry:
    """Read the header of a file and compare it with the index; `pkl` is unpickled.

    Returns:
        The trajectory, without a checksum.

    Raises:
        DamagedFileError: The file is missing, damaged, or not the one that the index means.
        SchemaError: It is no trajectory.
    """
    header = read_header(path, format_name, allow_pickle=allow_pickle)
    form = form_of(header, path)
    if form.shape != fact.shape or form.num_samples != fact.num_samples:
        msg = f"{path} holds {list(form.shape)}, the index says {list(fact.shape)}, {fact.num_samples} transitions"
        raise DamagedFileError(msg)
    for name in ("model_weights_id", "max_episode_length"):
        _compare(path, header, name, getattr(fact, name))
    return Entry(fact, form, place_of(path.parent, header, form, ""))


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
        check_content(path, format_name, fact, allow_pickle=allow_pickle)
    elif not kept:
        msg = (
            f"{path} is a pickle without a kept checksum and cannot be checked: give allow_pickle=True "
            "(--allow-pickle) if it comes from you"
        )
        raise DamagedFileError(msg)
    return path.stat().st_size, bool(kept) or format_name == "pt"
