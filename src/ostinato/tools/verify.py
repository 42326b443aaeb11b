"""Verification of a checkpoint or a directory of trajectories."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.durable import verify_array
from ostinato.durable.files import open_file
from ostinato.durable.manifest import parse_json
from ostinato.durable.progress import BYTES, TRAJECTORIES, Progress
from ostinato.durable.tensorfile import file_checksum
from ostinato.errors import DamagedFileError, OstinatoError
from ostinato.tools.compact import open_checkpoint
from ostinato.tools.inspect import kind_of, unlisted
from ostinato.trajectories.index import JOURNAL, METADATA, STORE, DirectoryIndex, Entry, read_index

if TYPE_CHECKING:
    from ostinato.durable.headers import Header
    from ostinato.durable.progress import ProgressOption

__all__ = ["Damage", "VerifyReport", "check_file", "check_header", "verify"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file."""

    file: str
    """Its name."""
    trajectory_id: int | None
    """Id of its trajectory; None if it has none."""
    problem: str
    """Description of the damage."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`."""

    path: str
    """The directory."""
    kind: str
    """`trajectories` or `buffer`."""
    files: int
    """Number of files read."""
    nbytes: int
    """Number of bytes read."""
    checksums: int
    """Number of files whose checksum was verified."""
    unlisted: tuple[str, ...]
    """Trajectory files that are not in the index."""
    damage: tuple[Damage, ...]
    """The damaged files; empty if there are none."""


def verify(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, progress: ProgressOption = None
) -> VerifyReport:
    """Read all files of a directory of trajectories or of the checkpoint of a buffer, and verify them.

    Args:
        path: The directory.
        allow_pickle: Allow unpickling, which executes the code in the files; otherwise only the sizes and available
            checksums of `pkl` files are verified.
        progress: The bytes of a checkpoint, or the trajectories, that were read, and their total; see
            `ostinato.ProgressOption`.

    Returns:
        What was read, and all damaged files.

    Raises:
        CheckpointNotFoundError: There is no such data; the message describes what is there instead.
        CheckpointError: The index cannot be read.
    """
    root = Path(path)
    if kind_of(root) == "buffer":
        return _verify_checkpoint(root, progress)
    nbytes = checksums = 0
    with Progress(progress, "verify", unit=TRAJECTORIES) as bar:
        index = read_index(root, strict=False)
        bar.begin(len(index.infos))
        damage = [Damage(STORE, None, index.damage)] if index.damage else []
        damage += _metadata_damage(index)
        for number, info in index.infos.items():
            name = info.file_name(index.head.trajectory_format)
            try:
                read, compared = check_file(index, number, allow_pickle=allow_pickle)
                nbytes, checksums = nbytes + read, checksums + compared
            except (OstinatoError, OSError) as error:
                damage.append(Damage(name, number, str(error)))
            bar.advance()
    return VerifyReport(str(root), "trajectories", len(index.infos), nbytes, checksums, unlisted(index), tuple(damage))


def _metadata_damage(index: DirectoryIndex) -> list[Damage]:
    """Compare the counts in the metadata with the index. While there is a journal, the metadata may be older."""
    path = index.directory / METADATA
    if not path.exists() or (index.directory / JOURNAL).exists():
        return []
    with os.fdopen(open_file(path), "rb") as stream:
        meta = parse_json(stream.read(), path)
    expected = {
        "size": len(index.infos),
        "total_samples": sum(info.num_samples for info in index.infos.values()),
    }
    wrong = [
        f"{key} is {str(meta.get(key))[:40]}, but the index has {n}"
        for key, n in expected.items()
        if meta.get(key) != n
    ]
    if type(meta.get("trajectory_counter")) is int and meta["trajectory_counter"] <= max(index.infos, default=-1):
        wrong.append(f"trajectory_counter is {meta['trajectory_counter']}, but must be above every id")
    return [Damage(METADATA, None, "; ".join(wrong))] if wrong else []


def _verify_checkpoint(root: Path, progress: ProgressOption) -> VerifyReport:
    """Verify all arrays of a checkpoint with their patches, and the state, even if some are damaged."""
    reader = open_checkpoint(root)
    damage, files, nbytes = [], 0, 0
    with Progress(progress, "verify", reader.nbytes, unit=BYTES):
        for record in reader.arrays.values():
            try:
                verify_array(root, record)
                nbytes += record.total_bytes
            except (OstinatoError, OSError) as error:
                damage.append(Damage(record.file, None, str(error)))
            files += len(record.files)
        if not damage:
            reader.state()
    return VerifyReport(str(root), "buffer", files, nbytes, files, (), tuple(damage))


def check_header(index: DirectoryIndex, number: int, *, allow_pickle: bool) -> Entry:
    """Read the header of a file and compare it with the index; a `pkl` file is unpickled.

    Returns:
        The trajectory, without a checksum.

    Raises:
        DamagedFileError: The file is missing, damaged, or does not match the index.
        SchemaError: The file is not a trajectory.
    """
    entry, header = index.inspect(number, allow_pickle=allow_pickle)
    for name in ("model_weights_id", "max_episode_length"):
        _compare(entry.path(), header, name, getattr(entry.info, name))
    return entry


def _compare(path: Path, header: Header, name: str, expected: object) -> None:
    """Compare an entry of the file with the index, if the file has it: files of equal shape may have been swapped."""
    found = header.plain.get((name,))
    if type(found) is type(expected) and found != expected:
        msg = f"{path} has the {name} {str(found)[:200]!r}, but the index has {str(expected)!r}: files were swapped"
        raise DamagedFileError(msg)


def check_file(index: DirectoryIndex, number: int, *, allow_pickle: bool) -> tuple[int, bool]:
    """Read a file and verify everything that can be verified.

    Args:
        index: The index of the directory.
        number: Id of the trajectory.
        allow_pickle: Allow unpickling; otherwise only the checksum in the index is verified for a `pkl` file.

    Returns:
        Its size in bytes, and whether a checksum was verified: one in the index, or those in a `pt` file.

    Raises:
        DamagedFileError: The file is missing, damaged, or does not match the index.
        SchemaError: The file is not a trajectory.
    """
    format_name, info, known = index.head.trajectory_format, index.infos[number], index.entries.get(number)
    path = index.directory / info.file_name(format_name)
    checksum = file_checksum(path, format_name, deep=True)
    kept = "" if known is None or known.file is None else known.file.checksum
    if kept and checksum != kept:
        msg = f"{path} has the checksum {checksum}, {kept} expected: restore the file from a copy"
        raise DamagedFileError(msg)
    if format_name != "pkl" or allow_pickle:
        check_header(index, number, allow_pickle=allow_pickle)
    elif not kept:
        msg = (
            f"{path} is a pickle without a checksum in the index and cannot be verified: give allow_pickle=True "
            "(--allow-pickle) if you trust it"
        )
        raise DamagedFileError(msg)
    return path.stat().st_size, bool(kept) or format_name == "pt"
