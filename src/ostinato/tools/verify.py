"""Verification of a checkpoint or a directory of trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.durable import CheckpointReader, read_manifest
from ostinato.durable.arrays import read_runs, verify_file
from ostinato.durable.manifest import MANIFEST_NAME, data_files
from ostinato.durable.progress import BYTES, TRAJECTORIES, Progress
from ostinato.errors import CheckpointNotFoundError, DamagedFileError, OstinatoError
from ostinato.tools.compact import format_name
from ostinato.tools.groups import check_groups
from ostinato.tools.inspect import kind_of
from ostinato.trajectories.index import INDEX, METADATA, STORE, UnverifiedError, read_index, trajectory_files

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from ostinato.durable.progress import ProgressOption

_PICKLE_ADVICE = "reading a pickle executes the code in it: give allow_pickle=True if you trust it"


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
    """`trajectories`, `buffer` or `groups`."""
    files: int
    """Number of files that are intact: read completely, and nothing wrong with them."""
    nbytes: int
    """Their bytes."""
    checksums: int
    """Number of these files whose checksum was verified."""
    unlisted: tuple[str, ...]
    """Trajectory files that are not in the index; files that are not of the log of groups."""
    damage: tuple[Damage, ...]
    """The damaged files; empty if there are none."""
    unchecked: tuple[str, ...] = ()
    """Files that could not be checked."""
    unchecked_because: str = ""
    """Why they could not; empty if all were checked."""

    @property
    def ok(self) -> bool:
        """Whether all files were checked and none is damaged."""
        return not self.damage and not self.unchecked


def verify(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, progress: ProgressOption = None
) -> VerifyReport:
    """Read all files of a directory of trajectories, of a checkpoint or of a buffer of groups, and verify them.

    Nothing is repaired. The end of a log of groups that a kill has cut counts as damage; opening the buffer repairs it.

    Args:
        path: The directory.
        allow_pickle: Allow unpickling, which executes the code in the files; otherwise only the sizes and available
            checksums of `pkl` files are verified.
        progress: The bytes of a checkpoint, or the trajectories, that were read, and their total; see
            `ostinato.ProgressOption`.

    Returns:
        What was read, all damaged files, and those that could not be checked: the files that only a damaged manifest or
        index describes, and pickles without a checksum if `allow_pickle` is False.

    Raises:
        CheckpointNotFoundError: There is no such data; the message describes what is there instead.
        CheckpointError: The format is of another release.
    """
    root = Path(path)
    kind = kind_of(root)
    if kind == "groups":
        good, wrong, other = check_groups(root)
        damage = [Damage(name, None, problem) for name, problem in wrong]
        nbytes = sum(size for _, size in good)
        return VerifyReport(str(root), kind, len(good), nbytes, len(good), other, tuple(damage))
    if kind == "buffer":
        return _verify_checkpoint(root, progress)
    files = nbytes = checksums = 0
    unchecked: list[str] = []
    with Progress(progress, "verify", unit=TRAJECTORIES) as bar:
        try:
            index = read_index(root, strict=False)
        except DamagedFileError as error:
            return _only_damage(root, "trajectories", INDEX, str(error), tuple(trajectory_files(root)))
        bar.begin(len(index.infos))
        problems = ((STORE, index.damage), (METADATA, index.metadata_problem()))
        damage = [Damage(name, None, problem) for name, problem in problems if problem]
        for number in index.infos:
            name = index.path(number).name
            try:
                read, compared = index.verify(number, allow_pickle=allow_pickle)
                files, nbytes, checksums = files + 1, nbytes + read, checksums + compared
            except UnverifiedError:
                unchecked.append(name)
            except (OstinatoError, OSError) as error:
                damage.append(Damage(name, number, str(error)))
            bar.advance()
    return VerifyReport(
        str(root),
        "trajectories",
        files,
        nbytes,
        checksums,
        index.unlisted(),
        tuple(damage),
        tuple(unchecked),
        f"there is no checksum in the index, and {_PICKLE_ADVICE}" if unchecked else "",
    )


def _only_damage(root: Path, kind: str, name: str, problem: str, unchecked: tuple[str, ...]) -> VerifyReport:
    """Return the report on a directory in which the file that describes all others cannot be read."""
    found = next((one for one in (STORE, METADATA) if f"{root / one} " in problem), name)
    because = f"only {name} says what {'it' if len(unchecked) == 1 else 'they'} must hold" if unchecked else ""
    return VerifyReport(str(root), kind, 0, 0, 0, (), (Damage(found, None, problem),), unchecked, because)


def _verify_checkpoint(root: Path, progress: ProgressOption) -> VerifyReport:
    """Verify the manifest, all arrays of a checkpoint with their patches, and the state, even if some are damaged."""
    kind = format_name(root)
    try:
        reader = CheckpointReader(root, format_name=kind, body=read_manifest(root, format_name=kind).body)
    except CheckpointNotFoundError:
        problem = f"{root / MANIFEST_NAME} is missing: restore it from a copy, or save again if no save was complete"
        return _only_damage(root, "buffer", MANIFEST_NAME, problem, data_files(root))
    except DamagedFileError as error:
        return _only_damage(root, "buffer", MANIFEST_NAME, str(error), data_files(root))
    damage: list[Damage] = []
    files, nbytes = 1, (root / MANIFEST_NAME).stat().st_size
    with Progress(progress, "verify", reader.nbytes, unit=BYTES):
        for record in reader.arrays.values():
            before = len(damage)
            for file in record.files:
                try:
                    verify_file(root, file)
                    files, nbytes = files + 1, nbytes + file.nbytes
                except (OstinatoError, OSError) as error:
                    damage.append(Damage(file.file, None, str(error)))
            if len(damage) == before:
                damage += _damage_of(record.files[0].file, lambda record=record: read_runs(root, record))  # type: ignore[misc]
        if not damage:
            damage += _damage_of(MANIFEST_NAME, reader.state)
    return VerifyReport(str(root), "buffer", files, nbytes, files, (), tuple(damage))


def _damage_of(name: str, read: Callable[[], Any]) -> list[Damage]:
    """Return what reading finds to be damaged."""
    try:
        read()
    except (OstinatoError, OSError) as error:
        return [Damage(name, None, str(error))]
    return []
