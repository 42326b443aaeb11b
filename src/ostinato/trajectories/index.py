"""What a directory of trajectories says that it holds: index, metadata, our own list beside them, and a journal.

trajectory_index.json, metadata.json   as RLinf writes and reads them
ostinato_store.jsonl                   where each field lies, checksums, the generator's state; may be missing
ostinato_journal.jsonl                 what was saved since the last fold; gone once the buffer is closed
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import stat
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, final

import numpy as np
import torch
from torch import Tensor

from ostinato.durable.dtypes import DTYPES, check_shape, raw_view
from ostinato.durable.files import atomic_write, fsync_dir, open_file
from ostinato.durable.headers import Placed
from ostinato.durable.journal import read_lines, write_lines
from ostinato.durable.manifest import canonical, parse_json
from ostinato.durable.tensorfile import FORMATS, check_format, read_header
from ostinato.durable.trees import flatten
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    MissingFileError,
    OptionError,
    OstinatoError,
)
from ostinato.trajectories.layout import Field, make_form
from ostinato.trajectories.trajectory import check_weights_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ostinato.durable.headers import Header
    from ostinato.trajectories.layout import Form

__all__ = [
    "INDEX",
    "JOURNAL",
    "MAX_ID",
    "METADATA",
    "STORE",
    "Entry",
    "Facts",
    "Head",
    "Held",
    "Listing",
    "Place",
    "consent",
    "entry_from_json",
    "entry_lines",
    "entry_to_json",
    "file_name",
    "fold",
    "form_from_json",
    "form_of",
    "form_to_json",
    "has_listing",
    "id_of_name",
    "is_counter",
    "is_seed",
    "look",
    "place_of",
    "read_facts",
    "read_listing",
    "resolve",
]

_NAME = re.compile(r"trajectory_(\d{1,18})_.*", re.DOTALL)
MAX_ID = 10**18 - 1
_FACT_KEYS = ("num_samples", "trajectory_id", "max_episode_length", "shape", "model_weights_id")


class Facts(NamedTuple):
    """What the index says of a trajectory."""

    trajectory_id: int
    num_samples: int
    max_episode_length: int
    shape: tuple[int, ...]
    model_weights_id: str

    def to_json(self) -> dict[str, Any]:
        """Return the object of the index."""
        return {name: list(self.shape) if name == "shape" else getattr(self, name) for name in _FACT_KEYS}


class Place(NamedTuple):
    """Where a trajectory lies on disk.

    Attributes:
        directory: Its directory.
        format_name: Format of its file, which one buffer may have several of: each load may bring another.
        nbytes: Size of its file.
        checksum: XXH3-64 of the file; empty where nobody kept one.
        offsets: Byte of the first element of each field of its form; -1 where the file can only be read as a whole.
        strides: Bytes from index to index of each field; None where all fields lie in order.
    """

    directory: Path
    format_name: str
    nbytes: int
    checksum: str
    offsets: tuple[int, ...]
    strides: tuple[tuple[int, ...] | None, ...] | None


@final
class Held:
    """A trajectory in memory: everything as nested dicts, and the rows of each field of its form as bytes."""

    __slots__ = ("nbytes", "rows", "tree")

    def __init__(self, tree: dict[str, Any], form: Form) -> None:
        """Look at the contiguous CPU tensors of `tree`; no copy."""
        leaves = flatten(tree, where="trajectory")
        self.tree = tree
        self.rows: tuple[np.ndarray, ...] = tuple(
            np.frombuffer(raw_view(leaves[field.path]), dtype=np.uint8).reshape(math.prod(field.shape[:2]), -1)
            if field.row_bytes
            else np.empty((math.prod(field.shape[:2]), 0), dtype=np.uint8)
            for field in form.fields
        )
        """Bytes of each field of the form, `[rows * B, bytes of a row]`."""
        self.nbytes = sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, Tensor))


@final
@dataclass(slots=True, eq=False)
class Entry:
    """One trajectory of a buffer. Where `held` is None, `place` is not."""

    facts: Facts
    form: Form
    place: Place | None = None
    held: Held | None = None
    cached: bool = False
    """Whether the cache wants `held` to stay once the trajectory is saved."""

    @property
    def id(self) -> int:
        """Its number in the buffer, never given twice."""
        return self.facts.trajectory_id

    def file_name(self, format_name: str) -> str:
        """Return the name of its file."""
        return file_name(self.facts, format_name)

    def saved(self) -> Place:
        """Return its place.

        Raises:
            CheckpointError: It has none.
        """
        if self.place is None:
            msg = f"trajectory {self.id} is not saved"
            raise CheckpointError(msg)
        return self.place

    def path(self) -> Path:
        """Return its file.

        Raises:
            CheckpointError: It has no place.
        """
        place = self.saved()
        return place.directory / self.file_name(place.format_name)


def file_name(facts: Facts, format_name: str) -> str:
    """Return `trajectory_{id}_{weights}.{format}`."""
    return f"trajectory_{facts.trajectory_id}_{facts.model_weights_id}.{format_name}"


def id_of_name(name: str) -> int | None:
    """Return the id in the name of a trajectory file; None for other files."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


@lru_cache(maxsize=4096)
def _shared(offsets: tuple[int, ...]) -> tuple[int, ...]:
    """Return one object for equal offsets: most files of a directory have the same."""
    return offsets


def form_of(header: Header, where: object) -> Form:
    """Work out the form of a file.

    Raises:
        SchemaError: It is no trajectory.
    """
    return make_form((Field(p.path, p.dtype, p.shape) for p in header.tensors), where)


def place_of(directory: Path, format_name: str, header: Header, form: Form, checksum: str) -> Place:
    """Return where the fields of a form lie in a file of a directory."""
    by_path = {placed.path: placed for placed in header.tensors}
    placed = [by_path[field.path] for field in form.fields]
    strides = tuple(p.strides for p in placed)
    offsets = _shared(tuple(p.offset for p in placed))
    return Place(directory, format_name, header.nbytes, checksum, offsets, strides if any(strides) else None)


def read_facts(key: object, node: object, where: object) -> Facts:
    """Read an object of the index; every value is checked.

    Raises:
        DamagedFileError: It is not as it should be.
    """
    if not isinstance(node, dict) or not set(_FACT_KEYS) <= set(node):
        msg = f"{where} is damaged: trajectory {str(key)[:40]} lacks one of {', '.join(_FACT_KEYS)}"
        raise DamagedFileError(msg)
    number, shape, length = node["trajectory_id"], check_shape(node["shape"]), node["max_episode_length"]
    good = type(number) is int and 0 <= number <= MAX_ID and str(number) == str(key)
    good = good and shape is not None and len(shape) >= 2 and type(length) in {int, type(None)}
    if not good or shape is None or node["num_samples"] != shape[0] * shape[1] or shape[0] * shape[1] < 1:
        msg = f"{where} is damaged: trajectory {str(key)[:40]} has {str(node)[:300]}"
        raise DamagedFileError(msg)
    try:  # RLinf leaves it empty where nobody named the weights
        weights = check_weights_id(node["model_weights_id"]) if node["model_weights_id"] != "" else ""
    except OptionError as error:
        msg = f"{where}: trajectory {number}: {error}"
        raise DamagedFileError(msg) from error
    return Facts(number, shape[0] * shape[1], length or 0, shape, weights)


def is_counter(value: object) -> TypeGuard[int]:
    """Tell whether a value of a file may be the next id."""
    return type(value) is int and 0 <= value <= MAX_ID + 1


def is_seed(value: object) -> TypeGuard[int]:
    """Tell whether a value of a file may seed a generator: an integer of 64 bits."""
    return type(value) is int and -(2**63) <= value < 2**63


def form_to_json(number: int, form: Form) -> dict[str, Any]:
    """Return the line that describes a form."""
    return {"form": number, "fields": [[list(field.path), field.dtype, list(field.shape)] for field in form.fields]}


def form_from_json(node: dict[str, Any], where: object) -> Form:
    """Read such a line.

    Raises:
        DamagedFileError: It is not as it should be.
    """
    try:
        fields = []
        for path, dtype, sizes in node["fields"]:
            shape = check_shape(sizes)
            if shape is None or dtype not in DTYPES or not path or not all(isinstance(key, str) for key in path):
                msg = f"field {str(path)[:80]}"
                raise ValueError(msg)
            fields.append(Field(tuple(path), dtype, shape))
        return make_form(fields, where)
    except (KeyError, TypeError, ValueError, OstinatoError) as error:
        msg = f"{where} is damaged: a form cannot be read ({str(error)[:200]})"
        raise DamagedFileError(msg) from error


def entry_to_json(entry: Entry, form_number: int) -> dict[str, Any]:
    """Return the line that describes a saved trajectory."""
    place = entry.saved()
    return {
        "id": entry.id,
        "facts": entry.facts.to_json(),
        "of": form_number,
        "bytes": place.nbytes,
        "sum": place.checksum,
        "offsets": list(place.offsets),
        "strides": None if place.strides is None else [None if s is None else list(s) for s in place.strides],
    }


def entry_from_json(
    node: dict[str, Any], forms: dict[int, Form], directory: Path, format_name: str, where: object
) -> Entry:
    """Read such a line of a directory of a format.

    Raises:
        DamagedFileError: It is not as it should be, or leads outside its file.
    """
    try:
        facts, form = read_facts(node["id"], node["facts"], where), forms[node["of"]]
        offsets = tuple(node["offsets"])
        strides = None if node["strides"] is None else tuple(None if s is None else tuple(s) for s in node["strides"])
        nbytes, checksum = node["bytes"], node["sum"]
        good = type(nbytes) is int and isinstance(checksum, str) and all(type(offset) is int for offset in offsets)
        good = good and all(type(step) is int for field_strides in strides or () for step in field_strides or ())
        if not good or facts.shape != form.shape:
            msg = "its parts do not fit"
            raise ValueError(msg)
        if strides is None and all(  # the common case, said quickly
            0 <= offset <= nbytes - size for offset, size in zip(offsets, form.field_bytes, strict=True)
        ):
            place = Place(directory, format_name, nbytes, checksum, _shared(offsets), None)
            return Entry(facts._replace(shape=form.shape), form, place)
        for field, offset, step in zip(form.fields, offsets, strides or (None,) * len(offsets), strict=True):
            if offset != -1:
                Placed(field.path, field.dtype, field.shape, offset, step).check(nbytes, directory)
    except DamagedFileError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{where} is damaged: the line of trajectory {str(node.get('id'))[:40]} ({str(error)[:200]})"
        raise DamagedFileError(msg) from error
    return Entry(facts, form, Place(directory, format_name, nbytes, checksum, offsets, strides))


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
