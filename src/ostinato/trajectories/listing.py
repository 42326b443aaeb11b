"""What a directory of trajectories says that it holds: index, metadata, our own list beside them, and a journal.

trajectory_index.json, metadata.json   as RLinf writes and reads them
ostinato_store.jsonl                   where each field lies, checksums, the generator's state; may be missing
ostinato_journal.jsonl                 what was saved since the last fold; gone once the buffer is closed
"""

from __future__ import annotations

import base64
import json
import os
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.durable.files import atomic_write, fsync_dir, open_file
from ostinato.durable.journal import read_lines, write_lines
from ostinato.durable.manifest import canonical, parse_json
from ostinato.durable.tensorfile import FORMATS, check_format, read_header
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    MissingFileError,
    OptionError,
    OstinatoError,
)
from ostinato.trajectories.entries import (
    Entry,
    Facts,
    entry_from_json,
    entry_to_json,
    file_name,
    form_from_json,
    form_of,
    form_to_json,
    is_counter,
    is_seed,
    place_of,
    read_facts,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ostinato.durable.headers import Header
    from ostinato.trajectories.form import Form

__all__ = [
    "INDEX",
    "JOURNAL",
    "METADATA",
    "STORE",
    "Head",
    "Listing",
    "consent",
    "entry_lines",
    "fold",
    "has_listing",
    "look",
    "read_listing",
    "resolve",
]

INDEX = "trajectory_index.json"
METADATA = "metadata.json"
STORE = "ostinato_store.jsonl"
JOURNAL = "ostinato_journal.jsonl"
_OLD_INDEX = "trajector_index.json"  # as an older RLinf spelt it
_FORMAT = "ostinato-trajectories"
_VERSION = [1, 0]
_READING_S = 30.0
"""How long a reader tries while the lists are replaced under it: on a busy machine any number of tries may fail."""


class Head(NamedTuple):
    """What holds for a whole directory.

    Attributes:
        trajectory_format: `pt`, `pkl` or `safetensors`.
        counter: The next id.
        seed: Seed of the buffer.
        generator: State of its generator, uint8; None where it was not kept.
    """

    trajectory_format: str
    counter: int
    seed: int
    generator: torch.Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the first line of a list or a journal."""
        state = None if self.generator is None else base64.b64encode(bytes(self.generator.tolist())).decode()
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "trajectory_format": self.trajectory_format,
            "counter": self.counter,
            "seed": self.seed,
            "generator": state,
        }


@final
@dataclass
class Listing:
    """What a directory says, files not looked at."""

    directory: Path
    head: Head
    facts: dict[int, Facts]
    """By id, in order."""
    known: dict[int, Entry] = field(default_factory=dict)
    """Those whose places in their files were kept."""
    damage: str = ""
    """What is wrong with our own list, which was left out then; empty where nothing is."""


def has_listing(directory: Path) -> bool:
    """Tell whether trajectories are listed in a directory, by us or by RLinf, whichever its spelling."""
    return any((directory / name).exists() for name in (INDEX, _OLD_INDEX, JOURNAL))


def read_listing(directory: Path, *, strict: bool = True) -> Listing:
    """Read what a directory says of itself; a journal found there is taken in.

    A buffer may save there meanwhile: where it has folded its journal in, old and new files would have been read side
    by side, so everything is read again.

    Args:
        directory: The directory.
        strict: Raise where our own list is damaged; otherwise go on without it.

    Raises:
        CheckpointNotFoundError: The path does not exist, or no trajectories were saved there.
        CheckpointError: The path is a file, or the lists never stay the same while they are read.
        DamagedFileError: naming the damaged file.
    """
    until = time.monotonic() + _READING_S
    while time.monotonic() < until:
        before = _versions(directory)
        try:
            listing = _read_once(directory, strict=strict)
        except OstinatoError:
            if _versions(directory) == before:
                raise
        else:
            if _versions(directory) == before:
                return listing
    msg = f"{directory} is saved to all the time, its lists were never read whole: try again later"
    raise CheckpointError(msg)


def _versions(directory: Path) -> list[tuple[int, ...] | None]:
    """Tell apart the files that a fold replaces; lines appended to a journal make no difference."""
    found: list[tuple[int, ...] | None] = []
    for name in (STORE, INDEX, _OLD_INDEX, METADATA, JOURNAL):
        try:
            status = (directory / name).stat()
        except OSError:
            found.append(None)
        else:
            grows = name == JOURNAL
            found.append((status.st_ino,) if grows else (status.st_ino, status.st_mtime_ns, status.st_size))
    return found


def _read_once(directory: Path, *, strict: bool) -> Listing:
    head, facts = _read_index(directory)
    known: dict[int, Entry] = {}
    damage = ""
    store, journal = directory / STORE, directory / JOURNAL
    if store.exists():
        try:
            stored = _Lines(store, directory, whole=True)
        except DamagedFileError as error:
            if strict:
                raise
            damage = str(error)
        else:
            if head is not None and stored.head.trajectory_format == head.trajectory_format:
                known = {e.id: e for e in stored.entries.values() if facts.get(e.id) == e.facts}
                head = head._replace(generator=stored.head.generator, counter=max(head.counter, stored.head.counter))
    if journal.exists():
        noted = _Lines(journal, directory, whole=False, base=dict.fromkeys(facts))
        head = noted.head if head is None else head
        facts = {number: facts[number] for number in facts if number in noted.entries}
        fresh = {number: entry for number, entry in noted.entries.items() if entry is not None}
        facts |= {number: entry.facts for number, entry in fresh.items()}
        known |= fresh
    if head is None:
        raise _not_found(directory)
    counter = max([head.counter, *(number + 1 for number in facts)])
    known = {number: entry for number, entry in known.items() if number in facts}
    return Listing(directory, head._replace(counter=counter), facts, known, damage)


def _not_found(directory: Path) -> CheckpointError:
    """Return the error for a path without trajectories; it says what is there instead."""
    if not directory.is_dir():
        if os.path.lexists(directory):
            return CheckpointError(f"no trajectories at {directory}: it is a file, give the directory that holds them")
        return CheckpointNotFoundError(f"no trajectories at {directory}: it does not exist")
    ranks = sorted(path.parent.name for path in directory.glob(f"rank_*/{METADATA}"))
    hint = f", but in {', '.join(ranks[:3])}: take one of these, or join them (ostinato merge)" if ranks else ""
    return CheckpointNotFoundError(
        f"no trajectories at {directory}: neither {METADATA} with {INDEX} nor {JOURNAL} is there{hint}"
    )


def _read_index(directory: Path) -> tuple[Head | None, dict[int, Facts]]:
    """Read the two JSON files."""
    path = next((directory / name for name in (INDEX, _OLD_INDEX) if (directory / name).exists()), None)
    metadata = directory / METADATA
    if path is None or not metadata.exists():
        lonely = path or (metadata if metadata.exists() else None)
        if lonely is not None and not (directory / JOURNAL).exists():
            msg = f"{directory} is damaged: it has {lonely.name}, but not both of {METADATA} and {INDEX}"
            raise MissingFileError(msg)
        return None, {}
    meta, node = _parse(metadata), _parse(path)
    index, order = node.get("trajectory_index"), node.get("trajectory_id_list")
    name, seed, counter = (meta.get(key) for key in ("trajectory_format", "seed", "trajectory_counter"))
    if name not in FORMATS or not is_seed(seed) or not is_counter(counter):
        msg = f"{metadata} is damaged: format {str(name)[:40]!r}, seed {str(seed)[:40]}, counter {str(counter)[:40]}"
        raise DamagedFileError(msg)
    if not isinstance(index, dict) or not isinstance(order, list) or sorted(map(str, order)) != sorted(index):
        msg = f"{path} is damaged: trajectory_index and trajectory_id_list must name the same trajectories"
        raise DamagedFileError(msg)
    facts = [read_facts(number, index[str(number)], path) for number in order]
    return Head(name, counter, seed), {fact.trajectory_id: fact for fact in facts}


def _parse(path: Path) -> dict[str, Any]:
    with os.fdopen(open_file(path), "rb") as stream:
        node = parse_json(stream.read(), path)
    if not isinstance(node, dict):
        msg = f"{path} is damaged: no JSON object"
        raise DamagedFileError(msg)
    return node


@final
class _Lines:
    """A list or a journal, read."""

    def __init__(self, path: Path, directory: Path, *, whole: bool, base: dict[int, None] | None = None) -> None:
        lines = read_lines(path, whole=whole)
        self.head = _read_head(next(lines, {}), path)
        self.entries: dict[int, Any] = dict(base or {})
        """By id; None for those that only `base` has."""
        forms: dict[int, Form] = {}
        for node in lines:
            try:
                self._take(node, forms, directory, path)
            except (KeyError, TypeError, ValueError) as error:
                if isinstance(error, DamagedFileError):
                    raise
                msg = f"{path} is damaged: the line {str(node)[:200]} ({error!r:.200})"
                raise DamagedFileError(msg) from error

    def _take(self, node: dict[str, Any], forms: dict[int, Form], directory: Path, path: Path) -> None:
        if "form" in node:
            forms[node["form"]] = form_from_json(node, path)
        elif "drop" in node:
            for number in node["drop"]:
                self.entries.pop(number, None)
        else:
            entry = entry_from_json(node, forms, directory, self.head.trajectory_format, path)
            self.entries[entry.id] = entry


def _read_head(node: dict[str, Any], path: Path) -> Head:
    if node.get("format") != _FORMAT or not isinstance(node.get("version"), list):
        msg = f"{path} is damaged: its first line is not that of a list of trajectories"
        raise DamagedFileError(msg)
    if node["version"][:1] != _VERSION[:1]:
        msg = f"{path} has format version {str(node['version'])[:20]}; this release reads version {_VERSION[0]}"
        raise CheckpointError(msg)
    try:
        state = node["generator"]
        state = None if state is None else torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8, device="cpu")
        head = Head(node["trajectory_format"], node["counter"], node["seed"], state)
        good = head.trajectory_format in FORMATS and is_counter(head.counter) and is_seed(head.seed)
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path} is damaged: its first line ({error!r})"
        raise DamagedFileError(msg) from error
    if not good:
        msg = f"{path} is damaged: its first line"
        raise DamagedFileError(msg)
    return head


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


def resolve(
    listing: Listing, ids: Iterable[int], *, allow_pickle: bool
) -> Iterator[tuple[int, Entry | DamagedFileError]]:
    """Look at the file of each trajectory: size, and where no size is known, its header.

    Yields:
        The id, with the trajectory, or with what is wrong.
    """
    for number in ids:
        try:
            yield number, _resolve(listing, number, allow_pickle=allow_pickle)
        except OstinatoError as error:
            kind = MissingFileError if isinstance(error, FileNotFoundError) else DamagedFileError
            yield number, kind(f"trajectory {number}: {error}")


def _resolve(listing: Listing, number: int, *, allow_pickle: bool) -> Entry:
    known = listing.known.get(number)
    path = listing.directory / file_name(listing.facts[number], listing.head.trajectory_format)
    if known is not None and known.place is not None:
        try:
            status = os.lstat(path)
        except FileNotFoundError as error:
            msg = f"{path} is missing: restore it from a copy"
            raise MissingFileError(msg) from error
        if stat.S_ISREG(status.st_mode) and status.st_size == known.place.nbytes:
            return known
    return look(listing, number, allow_pickle=allow_pickle)[0]


def look(listing: Listing, number: int, *, allow_pickle: bool) -> tuple[Entry, Header]:
    """Read the header of a file and compare its shape with the index; `pkl` is unpickled.

    Returns:
        The trajectory, without a checksum, and the header.

    Raises:
        DamagedFileError: The file is missing, damaged, or of another shape.
        SchemaError: It is no trajectory.
    """
    facts, format_name = listing.facts[number], listing.head.trajectory_format
    path = listing.directory / file_name(facts, format_name)
    header = read_header(path, format_name, allow_pickle=allow_pickle)
    form = form_of(header, path)
    if form.shape != facts.shape:
        msg = f"{path} holds {list(form.shape)}, the index says {list(facts.shape)}"
        raise DamagedFileError(msg)
    return Entry(facts, form, place_of(listing.directory, format_name, header, form, "")), header


def entry_lines(entries: Iterable[Entry], forms: dict[Form, int]) -> Iterator[dict[str, Any]]:
    """Yield the lines of saved trajectories; each form once, before the first trajectory that has it.

    Args:
        entries: The trajectories.
        forms: Numbers of the forms that have a line already; grows.
    """
    for entry in entries:
        number = forms.get(entry.form)
        if number is None:
            number = forms[entry.form] = len(forms)
            yield form_to_json(number, entry.form)
        yield entry_to_json(entry, number)


def fold(
    directory: Path, head: Head, facts: dict[int, Facts], known: Iterable[Entry], *, keep_journal: bool = False
) -> None:
    """Write list, index and metadata anew and remove the journal. After a crash the directory still says the same.

    Args:
        directory: The directory.
        head: Counter, seed and generator.
        facts: What the index says of each trajectory.
        known: Those whose places are known.
        keep_journal: Leave the journal: its lines say again what is in the index now.
    """
    write_lines(directory / STORE, (head.to_json(), *entry_lines(known, {})))
    index = {str(number): fact.to_json() for number, fact in facts.items()}
    atomic_write(directory / INDEX, canonical({"trajectory_index": index, "trajectory_id_list": list(facts)}))
    meta = {
        "trajectory_format": head.trajectory_format,
        "size": len(facts),
        "total_samples": sum(fact.num_samples for fact in facts.values()),
        "trajectory_counter": head.counter,
        "seed": head.seed,
    }
    atomic_write(directory / METADATA, json.dumps(meta).encode())
    for name in (_OLD_INDEX,) if keep_journal else (_OLD_INDEX, JOURNAL):
        (directory / name).unlink(missing_ok=True)
    fsync_dir(directory)
