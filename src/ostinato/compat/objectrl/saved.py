"""What a saved memory is on disk: `<path>.metadata`, as ObjectRL reads it, and the experience in a directory beside it.

The metadata names the directory. A save writes a new directory, puts the new metadata in the place of the old with one
rename, and removes the old directory last: whenever it is interrupted, metadata and experience belong together.
"""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.durable import CheckpointReader, atomic_write
from ostinato.errors import CheckpointError, CheckpointNotFoundError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoadReport", "Metadata", "find_experience", "read_metadata", "write"]

_NUMBERS = ("buffer_size", "data_size", "pointer")


class Metadata(NamedTuple):
    """Capacity, rows stored, and the slot of the next row."""

    buffer_size: int
    data_size: int
    pointer: int


class LoadReport(NamedTuple):
    """What `load` found and restored; as text, a sentence that says so."""

    path: str
    """The path given to `load`."""
    metadata: Metadata
    """What the metadata file says."""
    restored: tuple[str, ...]
    """Which of `buffer_size`, `data_size`, `pointer` and `experience` the buffer has now from the files."""
    rows: int
    """Rows of experience read."""

    def __str__(self) -> str:
        """Say it in a sentence."""
        found = f"{self.rows} rows of experience" if "experience" in self.restored else "no experience"
        return f"{self.path}: restored {', '.join(self.restored) or 'nothing'} ({found} found)"


def write(path: str, metadata: Metadata, dump: Callable[[Path], None] | None) -> None:
    """Save metadata, and the experience through `dump`; None saves the metadata alone.

    Raises:
        StorageMemoryError: if the disk is too small; an earlier save stays whole.
    """
    target = _metadata_file(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    before = _named_before(path)
    name = None
    if dump is not None:
        directory = next(place for place in _places(path) if place.name != before)
        dump(directory)
        name = directory.name
    file = io.BytesIO()
    torch.save({**metadata._asdict(), "experience": name}, file)
    atomic_write(target, file.getbuffer())
    for place in _places(path) if name is not None else ():
        if place.name != name:
            shutil.rmtree(place, ignore_errors=True)


def read_metadata(path: str) -> tuple[Metadata, str | None, bool]:
    """Read `<path>.metadata`, written here or by ObjectRL; nothing in it is executed.

    Returns:
        The numbers, the name of the experience's directory (None if there is none), and whether the file says so at
        all: ObjectRL's does not.

    Raises:
        CheckpointNotFoundError: if there is no such file.
        CheckpointError: if it is a directory, or its numbers contradict each other.
        DamagedFileError: if it is damaged or something else.
    """
    file = _metadata_file(path)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        msg = f"there is no {file}: give the path that was given to save(), without '.metadata'"
        raise CheckpointNotFoundError(msg) from None
    except IsADirectoryError as error:
        msg = f"{file} is a directory, give the path that was given to save(), without '.metadata'"
        raise CheckpointError(msg) from error
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        msg = f"{file} is damaged, or no metadata: {str(error).splitlines()[0] if str(error) else error!r}"
        raise DamagedFileError(msg) from error
    if not isinstance(found, dict) or any(type(found.get(name)) is not int for name in _NUMBERS):
        msg = f"{file} must hold the integers {', '.join(_NUMBERS)}, got {_show(found)}"
        raise DamagedFileError(msg)
    numbers = Metadata(*(found[name] for name in _NUMBERS))
    size, rows, pointer = numbers
    if not (size > 0 and 0 <= rows <= size and 0 <= pointer < size and pointer <= rows):
        msg = f"{file} contradicts itself: {_show(numbers._asdict())}"
        raise CheckpointError(msg)
    name = found.get("experience")
    if name is not None and name not in {place.name for place in _places(path)}:
        msg = f"{file} names the experience {name!r}, which is not beside it under the name of this path"
        raise DamagedFileError(msg)
    return numbers, name, "experience" in found


def find_experience(path: str, metadata: Metadata, name: str | None, *, told: bool) -> Path | None:
    """Return the directory of the experience that belongs to the metadata; None, with a warning, if there is none.

    Raises:
        CheckpointError: if there is experience, but not the one that the metadata speaks of.
        DamagedFileError: if it is damaged.
    """
    candidates = [place for place in _places(path) if place.exists() and (not told or place.name == name)]
    differs = ""
    for directory in candidates:
        held = _held(directory)
        if held == metadata:
            return directory
        differs = f"{directory} holds {_show(held._asdict())}"
    if differs:
        msg = (
            f"{_metadata_file(path)} says {_show(metadata._asdict())}, but {differs}: they are not of one save; remove "
            "the wrong one"
        )
        raise CheckpointError(msg)
    missing = f" {_metadata_file(path).with_name(name)} is missing" if name is not None else ""
    msg = f"{_metadata_file(path)} comes without experience: only metadata is restored.{missing}"
    warnings.warn(msg, UserWarning, stacklevel=3)
    return None


def _held(directory: Path) -> Metadata:
    """Read off a checkpoint how many rows it holds, without reading them."""
    try:
        state = CheckpointReader(directory, format_name=FORMAT).state()
        storage = state["storage"]["state"]
        return Metadata(
            int(storage["capacity"]),
            int(storage["rows"]),
            int(state["writer"]["state"].get("cursor", state["stamps"]["cursor"])),
        )
    except (KeyError, TypeError) as error:
        msg = f"{directory} has no readable state ({error!r}): it was not written by save()"
        raise DamagedFileError(msg) from error


def _named_before(path: str) -> str | None:
    """Return the directory that an earlier save counts on, so that this one leaves it alone until it is done."""
    try:
        _, name, told = read_metadata(path)
    except CheckpointError:
        return None
    return name if told else next((place.name for place in _places(path) if place.exists()), None)


def _places(path: str) -> tuple[Path, Path]:
    """Return the two directories that saves take in turn."""
    file = Path(path)
    return file.with_name(f"{file.name}.experience-0"), file.with_name(f"{file.name}.experience-1")


def _metadata_file(path: str) -> Path:
    file = Path(path)
    return file.with_name(f"{file.name}.metadata")


def _show(found: object) -> str:
    if not isinstance(found, dict):
        return f"a {type(found).__name__}"
    return ", ".join(f"{key}={value!r}" for key, value in list(found.items())[:5]) or "an empty dict"
