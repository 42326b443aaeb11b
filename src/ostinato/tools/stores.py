"""What a directory of trajectories holds, and whether all of it is whole. Changes nothing, prints nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ostinato.durable import verify_array
from ostinato.durable.files import open_file
from ostinato.durable.manifest import MANIFEST_NAME, parse_json
from ostinato.durable.trees import show
from ostinato.errors import CheckpointError, CheckpointNotFoundError, OstinatoError
from ostinato.tools.check import check_whole
from ostinato.tools.compact import open_checkpoint
from ostinato.trajectories.index import (
    JOURNAL,
    METADATA,
    STORE,
    DirectoryIndex,
    Entry,
    has_index,
    id_of_name,
    read_index,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Damage", "KeyReport", "StoreReport", "VerifyReport", "inspect_store", "is_store", "kind_of", "verify"]

_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One key of the trajectories."""

    name: str
    """Keys from the root, joined by dots."""
    dtype: str
    """Dtype."""
    shape: tuple[int, ...]
    """Shape of one transition's value."""
    trajectories: int
    """Trajectories that have it in this dtype and shape."""
    nbytes: int
    """Bytes of its rows in all of them."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """One directory of trajectories."""

    path: str
    """The directory."""
    trajectory_format: str
    """`pt`, `pkl` or `safetensors`."""
    trajectories: int
    """How many are listed."""
    total_samples: int
    """Transitions: the sum of T * B."""
    trajectory_counter: int
    """The next id."""
    seed: int
    """Seed of the buffer."""
    exact_resume: bool
    """Whether the state of a generator was saved, so that sampling goes on with the same rows."""
    journal: bool
    """Whether a journal waits to be folded in: the directory is in use, or its process was killed."""
    models: int
    """Different weights that acted."""
    shapes: tuple[tuple[int, ...], ...]
    """Different `[T, B]`."""
    unlisted: tuple[str, ...]
    """Trajectory files that no list names: cleared, or never finished."""
    nbytes: int | None = None
    """Bytes of the files; None where they were not looked at."""
    keys: tuple[KeyReport, ...] = ()
    """Keys of the batches; empty where the files were not looked at."""


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


def is_store(path: str | os.PathLike[str]) -> bool:
    """Tell whether a directory holds trajectories (and not a buffer's checkpoint)."""
    root = Path(path)
    return (root / METADATA).exists() or has_index(root)


def kind_of(path: str | os.PathLike[str]) -> Literal["trajectories", "buffer"]:
    """Tell what a directory holds: trajectories, or the checkpoint that `dumps` of a buffer wrote.

    Raises:
        CheckpointNotFoundError: Neither; the message says what is there instead, such as a directory for each rank.
        CheckpointError: The path is a file.
    """
    root = Path(path)
    if is_store(root):
        return "trajectories"
    if (root / MANIFEST_NAME).exists():
        return "buffer"
    if not root.is_dir():
        if root.exists():
            msg = f"{root} is a file: give a directory of trajectories, or one that dumps() wrote"
            raise CheckpointError(msg)
        msg = f"there is no directory {root}"
        raise CheckpointNotFoundError(msg)
    if (root / "storage" / "storage_metadata.json").exists():
        msg = f"{root} is a checkpoint of TorchRL: write it as one of ours first (ostinato convert)"
        raise CheckpointNotFoundError(msg)
    inside = sorted(child.name for child in root.iterdir() if is_store(child) or (child / MANIFEST_NAME).exists())
    if inside:
        names = ", ".join(inside[:_MOST_NAMES]) + (", ..." if len(inside) > _MOST_NAMES else "")
        msg = f"{root} is a directory of others that hold data: give one of {names} in it"
        if all(is_store(root / name) and name.startswith("rank_") for name in inside):
            msg += ", or join them first (ostinato merge)"
    else:
        msg = f"{root} holds neither trajectories nor a checkpoint that dumps() wrote"
    raise CheckpointNotFoundError(msg)


def inspect_store(
    path: str | os.PathLike[str], *, read_headers: bool = True, allow_pickle: bool = False
) -> StoreReport:
    """Report on a directory of trajectories.

    Args:
        path: The directory.
        read_headers: Look at each file, too: its size and its keys (for `pkl` that means to unpickle it). Otherwise
            only the index is read.
        allow_pickle: Consent to unpickle.

    Raises:
        CheckpointNotFoundError: No trajectories are there.
        CheckpointError: They are pickles without consent.
        DamagedFileError: naming the file that is damaged.
    """
    root = Path(path)
    listing = read_index(root)
    facts = listing.infos.values()
    entries: list[Entry] = []
    if read_headers:
        listing.check_pickle(allow_pickle=allow_pickle)
        for _, found in listing.check_files(listing.infos, allow_pickle=allow_pickle):
            if not isinstance(found, Entry):
                raise found
            entries.append(found)
    return StoreReport(
        path=str(root),
        trajectory_format=listing.head.trajectory_format,
        trajectories=len(listing.infos),
        total_samples=sum(fact.num_samples for fact in facts),
        trajectory_counter=listing.head.counter,
        seed=listing.head.seed,
        exact_resume=listing.head.generator is not None,
        journal=(root / JOURNAL).exists(),
        models=len({fact.model_weights_id for fact in facts}),
        shapes=tuple(sorted({fact.shape[:2] for fact in facts})),
        unlisted=_unlisted(listing),
        nbytes=sum(e.file.nbytes for e in entries if e.file is not None) if read_headers else None,
        keys=_keys(entries),
    )


def _unlisted(listing: DirectoryIndex) -> tuple[str, ...]:
    listed = {fact.file_name(listing.head.trajectory_format) for fact in listing.infos.values()}
    names = (path.name for path in listing.directory.iterdir())
    return tuple(sorted(name for name in names if id_of_name(name) is not None and name not in listed))


def _keys(entries: list[Entry]) -> tuple[KeyReport, ...]:
    found: dict[Any, list[int]] = {}
    for entry in entries:
        for path, (dtype, shape) in entry.layout.signature.items():
            counts = found.setdefault((path, dtype, shape), [0, 0])
            counts[0] += 1
        for field in entry.layout.fields:
            found[field.path, field.dtype, field.row_shape][1] += field.row_bytes * field.shape[0] * field.shape[1]
    return tuple(KeyReport(show(path), dtype, shape, *counts) for (path, dtype, shape), counts in found.items())


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
    listing = read_index(root, strict=False)
    damage = [Damage(STORE, None, listing.damage)] if listing.damage else []
    damage += _metadata_damage(listing)
    nbytes = checksums = 0
    for done, (number, fact) in enumerate(listing.infos.items(), 1):
        name = fact.file_name(listing.head.trajectory_format)
        try:
            read, compared = check_whole(listing, number, allow_pickle=allow_pickle)
            nbytes, checksums = nbytes + read, checksums + compared
        except (OstinatoError, OSError) as error:
            damage.append(Damage(name, number, str(error)))
        if on_progress is not None:
            on_progress(done, len(listing.infos))
    return VerifyReport(
        str(root), "trajectories", len(listing.infos), nbytes, checksums, _unlisted(listing), tuple(damage)
    )


def _metadata_damage(listing: DirectoryIndex) -> list[Damage]:
    """Compare the counts of the metadata with the index; while a journal waits they may lag."""
    path = listing.directory / METADATA
    if not path.exists() or (listing.directory / JOURNAL).exists():
        return []
    with os.fdopen(open_file(path), "rb") as stream:
        meta = parse_json(stream.read(), path)
    expected = {
        "size": len(listing.infos),
        "total_samples": sum(fact.num_samples for fact in listing.infos.values()),
    }
    wrong = [
        f"{key} is {str(meta.get(key))[:40]}, the index has {n}" for key, n in expected.items() if meta.get(key) != n
    ]
    if type(meta.get("trajectory_counter")) is int and meta["trajectory_counter"] <= max(listing.infos, default=-1):
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
