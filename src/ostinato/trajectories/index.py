"""Entries of trajectories, and the files of a directory that list them.

- `trajectory_index.json`, `metadata.json`: as RLinf writes and reads them
- `ostinato_store.jsonl`: position of each field, checksums, state of the generator; may be missing
- `ostinato_journal.jsonl`: what was saved since the index was last written; removed when the buffer is closed
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeGuard, final

import numpy as np
import torch
from torch import Tensor

from ostinato.durable.arrays import DTYPES, check_shape, dtype_name, raw_view
from ostinato.durable.files import atomic_write, damaged, file_size, fsync_dir, open_file, opened, pread
from ostinato.durable.manifest import canonical, parse_json, read_lines, write_lines
from ostinato.durable.progress import TRAJECTORIES, count, counted
from ostinato.durable.tensorfile import (
    FORMATS,
    Placed,
    check_format,
    file_checksum,
    flatten,
    read_header,
    read_tree,
    write_tree,
)
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    MissingFileError,
    OptionError,
    OstinatoError,
)
from ostinato.trajectories.layout import Field, make_layout
from ostinato.trajectories.trajectory import check_weights_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ostinato.durable.tensorfile import Header
    from ostinato.trajectories.layout import Layout

__all__ = [
    "INDEX",
    "JOURNAL",
    "MAX_ID",
    "METADATA",
    "STORE",
    "DirectoryIndex",
    "Entry",
    "Head",
    "SavedFile",
    "TrajectoryData",
    "TrajectoryInfo",
    "UnverifiedError",
    "check_size",
    "entry_lines",
    "has_index",
    "id_of_name",
    "is_seed",
    "rank_directories",
    "read_index",
    "read_object",
    "trajectory_files",
    "write_index",
]

INDEX = "trajectory_index.json"
METADATA = "metadata.json"
STORE = "ostinato_store.jsonl"
JOURNAL = "ostinato_journal.jsonl"
MAX_ID = 10**18 - 1

_OLD_INDEX = "trajector_index.json"  # the spelling of older RLinf versions
_FORMAT = "ostinato-trajectories"
_VERSION = [1, 0]
_READ_TIMEOUT_S = 30.0
"""How long a reader retries while another process replaces the files; a fixed number of retries may not suffice."""
_NAME = re.compile(r"trajectory_(\d{1,18})_.*", re.DOTALL)
_RANK = re.compile(r"rank_(\d+)")
_INFO_KEYS = ("num_samples", "trajectory_id", "max_episode_length", "shape", "model_weights_id")


# -- entries ----------------------------------------------------------------------------------------------------------


class TrajectoryInfo(NamedTuple):
    """The record of a trajectory in `trajectory_index.json`."""

    trajectory_id: int
    max_episode_length: int
    shape: tuple[int, ...]
    model_weights_id: str

    @property
    def num_samples(self) -> int:
        """Number of transitions, T * B."""
        return self.shape[0] * self.shape[1]

    def file_name(self, format_name: str) -> str:
        """Return the name of its file, `trajectory_{id}_{weights}.{format}`."""
        return f"trajectory_{self.trajectory_id}_{self.model_weights_id}.{format_name}"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {name: list(self.shape) if name == "shape" else getattr(self, name) for name in _INFO_KEYS}

    @classmethod
    def from_json(cls, key: object, node: object, where: object) -> TrajectoryInfo:
        """Read the JSON object and check every value.

        Args:
            key: The id under which the object was found.
            node: The object.
            where: The file, for error messages.

        Raises:
            DamagedFileError: A value is missing or invalid.
        """
        if not isinstance(node, dict) or not set(_INFO_KEYS) <= set(node):
            damaged(where, f"trajectory {str(key)[:40]} lacks one of {', '.join(_INFO_KEYS)}")
        number, shape, length = node["trajectory_id"], check_shape(node["shape"]), node["max_episode_length"]
        good = type(number) is int and 0 <= number <= MAX_ID and str(number) == str(key)
        good = good and shape is not None and len(shape) >= 2 and type(length) in {int, type(None)}
        if not good or shape is None or node["num_samples"] != shape[0] * shape[1] or shape[0] * shape[1] < 1:
            damaged(where, f"trajectory {str(key)[:40]} has {str(node)[:300]}")
        try:  # RLinf writes an empty text if the user named no weights
            weights = check_weights_id(node["model_weights_id"]) if node["model_weights_id"] != "" else ""
        except OptionError as error:
            msg = f"{where}: trajectory {number}: {error}"
            raise DamagedFileError(msg) from error
        return cls(number, length or 0, shape, weights)


class SavedFile(NamedTuple):
    """The file of a trajectory, and the position of each field in it.

    Attributes:
        directory: Its directory.
        format_name: Its format; a buffer may hold files of several formats, since each load may add another.
        nbytes: Its size.
        checksum: XXH3-64 of the file; empty if unknown.
        offsets: Byte of the first element of each field of the layout; -1 if the file can only be read as a whole.
        strides: Bytes from index to index of each field; None if all fields are contiguous.
    """

    directory: Path
    format_name: str
    nbytes: int
    checksum: str
    offsets: tuple[int, ...]
    strides: tuple[tuple[int, ...] | None, ...] | None

    @classmethod
    def of(cls, directory: Path, format_name: str, header: Header, layout: Layout, checksum: str) -> SavedFile:
        """Return the positions of the fields of a layout in a file with this header."""
        by_path = {placed.path: placed for placed in header.tensors}
        placed = [by_path[field.path] for field in layout.fields]
        strides = tuple(p.strides for p in placed)
        offsets = _interned(tuple(p.offset for p in placed))
        return cls(directory, format_name, header.nbytes, checksum, offsets, strides if any(strides) else None)


@lru_cache(maxsize=4096)
def _interned(offsets: tuple[int, ...]) -> tuple[int, ...]:
    """Return one object for equal offsets: most files of a directory have the same, which saves memory."""
    return offsets


@final
class TrajectoryData:
    """A trajectory in memory: all its values as nested dicts, and the rows of each field of its layout as bytes."""

    __slots__ = ("nbytes", "rows", "tree")

    def __init__(self, tree: dict[str, Any], layout: Layout) -> None:
        """Keep views of the contiguous CPU tensors of `tree`; no copy."""
        leaves = flatten(tree, where="trajectory")
        self.tree = tree
        self.rows: tuple[np.ndarray, ...] = tuple(
            np.frombuffer(raw_view(leaves[field.path]), np.uint8).reshape(math.prod(field.shape[:2]), field.row_bytes)
            for field in layout.fields
        )
        """Bytes of each field of the layout, uint8 `[rows * B, bytes of a row]`."""
        self.nbytes = sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, Tensor))


@final
@dataclass(slots=True, eq=False)
class Entry:
    """One trajectory of a buffer. At least one of `file` and `data` is set."""

    info: TrajectoryInfo
    layout: Layout
    file: SavedFile | None = None
    data: TrajectoryData | None = None
    cached: bool = False
    """Whether the cache keeps `data` after the trajectory is saved."""

    @classmethod
    def of_tree(cls, tree: dict[str, Any], where: object) -> Entry:
        """Return a trajectory in memory; its id is set later. No copy.

        Args:
            tree: Nested dicts of contiguous CPU tensors and plain values, as `owned_tree` returns them.
            where: What error messages begin with.

        Raises:
            SchemaError: It is no trajectory.
        """
        leaves = flatten(tree, where=where).items()
        fields = [Field(path, dtype_name(v.dtype), tuple(v.shape)) for path, v in leaves if isinstance(v, Tensor)]
        layout = make_layout(fields, where)
        info = TrajectoryInfo(0, tree["max_episode_length"], layout.shape, tree["model_weights_id"])
        return cls(info, layout, data=TrajectoryData(tree, layout))

    @property
    def id(self) -> int:
        """Its id, unique in the buffer and never reused."""
        return self.info.trajectory_id

    def require_file(self) -> SavedFile:
        """Return its file.

        Raises:
            CheckpointError: It was not saved.
        """
        if self.file is None:
            msg = f"trajectory {self.id} is not saved"
            raise CheckpointError(msg)
        return self.file

    def path(self) -> Path:
        """Return the path of its file.

        Raises:
            CheckpointError: It was not saved.
        """
        file = self.require_file()
        return file.directory / self.info.file_name(file.format_name)

    def write(self, directory: Path, format_name: str, *, sync: bool) -> SavedFile:
        """Write a trajectory that is in memory to a new file; see `write_tree`.

        Raises:
            CheckpointError: It is not in memory.
            StorageMemoryError: The disk is full.
        """
        data = self.data
        if data is None:
            msg = f"trajectory {self.id} is neither in memory nor on disk"
            raise CheckpointError(msg)
        path = directory / self.info.file_name(format_name)
        header, checksum = write_tree(path, data.tree, format_name, sync=sync)
        return SavedFile.of(directory, format_name, header, self.layout, checksum)

    def read(self, *, allow_pickle: bool) -> TrajectoryData:
        """Return the whole trajectory, from memory or from its file.

        Raises:
            DamagedFileError: The file is missing or damaged.
            OptionError: It is a pickle, and `allow_pickle` is False.
        """
        data = self.data
        if data is not None:
            return data
        tree = read_tree(self.path(), self.require_file().format_name, allow_pickle=allow_pickle)
        return TrajectoryData(tree, self.layout)

    def to_json(self, layout_number: int) -> dict[str, Any]:
        """Return the line of a saved trajectory."""
        file = self.require_file()
        return {
            "id": self.id,
            "facts": self.info.to_json(),
            "of": layout_number,
            "bytes": file.nbytes,
            "sum": file.checksum,
            "offsets": list(file.offsets),
            "strides": None if file.strides is None else [None if s is None else list(s) for s in file.strides],
        }


# -- the index of a directory -----------------------------------------------------------------------------------------


class Head(NamedTuple):
    """What holds for a whole directory.

    Attributes:
        trajectory_format: `pt`, `pkl` or `safetensors`.
        counter: The next id.
        seed: Seed of the buffer.
        generator: State of its generator, uint8; None if unknown.
    """

    trajectory_format: str
    counter: int
    seed: int
    generator: torch.Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the first line of a store file or a journal."""
        state = None if self.generator is None else base64.b64encode(bytes(self.generator.tolist())).decode()
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "trajectory_format": self.trajectory_format,
            "counter": self.counter,
            "seed": self.seed,
            "generator": state,
        }

    @classmethod
    def from_json(cls, node: dict[str, Any], path: Path) -> Self:
        """Read the first line of a store file or a journal.

        Raises:
            CheckpointError: A newer release wrote it.
            DamagedFileError: It is not such a line.
        """
        if node.get("format") != _FORMAT or not isinstance(node.get("version"), list):
            damaged(path, "its first line is not that of a list of trajectories")
        if node["version"][:1] != _VERSION[:1]:
            msg = f"{path} has format version {str(node['version'])[:20]}; this release reads version {_VERSION[0]}"
            raise CheckpointError(msg)
        try:
            state = node["generator"]
            if state is not None:
                state = torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8, device="cpu")
            return cls(node["trajectory_format"], node["counter"], node["seed"], state).checked(path)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, DamagedFileError):
                raise
            msg = f"{path} is damaged: its first line ({error!r})"
            raise DamagedFileError(msg) from error

    def checked(self, path: Path) -> Self:
        """Return it if its values are valid; `path` is the file that they are from.

        Raises:
            DamagedFileError: A value is not.
        """
        name, counter, seed, _ = self
        if name not in FORMATS or not is_seed(seed) or type(counter) is not int or not 0 <= counter <= MAX_ID + 1:
            damaged(path, f"format {str(name)[:40]!r}, seed {str(seed)[:40]}, counter {str(counter)[:40]}")
        return self


def is_seed(value: object) -> TypeGuard[int]:
    """Tell whether a value may seed a generator: an integer of 64 bits."""
    return type(value) is int and -(2**63) <= value < 2**63


def trajectory_files(directory: Path) -> dict[str, int]:
    """Return the ids in the names of the trajectory files of a directory, by name, sorted; listed files or not."""
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else ()
    return {name: number for name in names if (number := id_of_name(name)) is not None}


def id_of_name(name: str) -> int | None:
    """Return the id in the name of a trajectory file; None for other files."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def rank_directories(path: Path) -> list[Path]:
    """Return the directories `rank_0`, `rank_1` and so on in a directory, in the order of their numbers."""
    found = [(int(match[1]), one) for one in path.glob("rank_*") if (match := _RANK.fullmatch(one.name))]
    return [one for _, one in sorted(found) if one.is_dir()]


def check_size(path: Path, entry: Entry | None) -> None:
    """Check that there is a regular file at a path, of the size of an entry if that is given.

    Raises:
        DamagedFileError: There is not.
    """
    size = file_size(path)
    if entry is not None and size != (expected := entry.require_file().nbytes):
        damaged(path, f"{size} bytes, but the index has {expected} (run ostinato verify for details)")


class UnverifiedError(DamagedFileError):
    """Nothing tells whether a file is damaged."""


@final
@dataclass
class DirectoryIndex:
    """The trajectories listed in a directory. Reading it does not open their files."""

    directory: Path
    head: Head
    infos: dict[int, TrajectoryInfo]
    """Record of each trajectory by id, in order."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Those whose field positions are known, by id."""
    damage: str = ""
    """What is wrong with `ostinato_store.jsonl`, which is then ignored; empty if nothing is."""

    def check_pickle(self, *, allow_pickle: bool) -> None:
        """Raise if the files are pickles and pickles are not allowed.

        Raises:
            CheckpointError: The message names the directory.
        """
        try:
            check_format(self.head.trajectory_format, allow_pickle=allow_pickle)
        except OptionError as error:
            msg = f"{self.directory}: {error}"
            raise CheckpointError(msg) from error

    def check_format(self, format_name: str) -> None:
        """Raise if the directory holds trajectories of another format than a buffer saves to it.

        Raises:
            CheckpointError: The message names both formats.
        """
        found = self.head.trajectory_format
        if found != format_name:
            msg = (
                f"auto_save_path {self.directory} holds trajectories as {found}, not {format_name}: choose another "
                f"path, give trajectory_format={found!r}, or convert it (ostinato convert)"
            )
            raise CheckpointError(msg)

    def path(self, number: int) -> Path:
        """Return the path of the file of a trajectory."""
        return self.directory / self.infos[number].file_name(self.head.trajectory_format)

    def unlisted(self) -> tuple[str, ...]:
        """Return the names of trajectory files that are not in the index."""
        listed = {self.path(number).name for number in self.infos}
        return tuple(name for name in trajectory_files(self.directory) if name not in listed)

    def check_files(self, ids: Iterable[int], *, allow_pickle: bool) -> Iterator[tuple[int, Entry | DamagedFileError]]:
        """Check the file of each trajectory; see `check`.

        Yields:
            The id, with the entry or with the error.
        """
        for number in ids:
            try:
                yield number, self.check(number, allow_pickle=allow_pickle)
            except OstinatoError as error:
                kind = MissingFileError if isinstance(error, FileNotFoundError) else DamagedFileError
                yield number, kind(f"trajectory {number}: {error}")

    def check(self, number: int, *, allow_pickle: bool) -> Entry:
        """Check the size of a file, or its header if the size is unknown; see `inspect`.

        Raises:
            DamagedFileError: The file is missing or damaged, or does not match the index.
        """
        entry = self.entries.get(number)
        if entry is None:
            return self.inspect(number, allow_pickle=allow_pickle)[0]
        check_size(self.path(number), entry)
        return entry

    def check_end(self, number: int) -> None:
        """Check that a pickle ends with the opcode STOP, without unpickling it.

        Raises:
            DamagedFileError: It is missing or does not.
        """
        path = self.path(number)
        with opened(path) as fd:
            if pread(fd, 1, max(os.fstat(fd).st_size - 1, 0)) != b".":
                damaged(path, "the pickle is truncated")

    def inspect(self, number: int, *, allow_pickle: bool) -> tuple[Entry, Header]:
        """Read the header of a file and compare it with the index; `pkl` files are unpickled.

        Returns:
            The entry, without a checksum, and the header.

        Raises:
            DamagedFileError: The file is missing or damaged, or does not match the index.
            SchemaError: The file holds no trajectory.
        """
        info, format_name, path = self.infos[number], self.head.trajectory_format, self.path(number)
        header = read_header(path, format_name, allow_pickle=allow_pickle)
        layout = make_layout((Field(p.path, p.dtype, p.shape) for p in header.tensors), path)
        if layout.shape != info.shape:
            msg = f"{path} holds {list(layout.shape)}, the index says {list(info.shape)}"
            raise DamagedFileError(msg)
        for name in ("model_weights_id", "max_episode_length"):  # files of equal shape may have been swapped
            found, expected = header.plain.get((name,)), getattr(info, name)
            if type(found) is type(expected) and found != expected:
                shown = f"{str(found)[:200]!r}, but the index has {str(expected)!r}"
                msg = f"{path} has the {name} {shown}: files were swapped"
                raise DamagedFileError(msg)
        return Entry(info, layout, SavedFile.of(self.directory, format_name, header, layout, "")), header

    def verify(self, number: int, *, allow_pickle: bool) -> tuple[int, bool]:
        """Read a file and verify everything that can be verified.

        Args:
            number: Id of the trajectory.
            allow_pickle: Allow unpickling; otherwise only the checksum in the index is verified for a `pkl` file.

        Returns:
            Its size in bytes, and whether a checksum was verified: one in the index, or those in a `pt` file.

        Raises:
            DamagedFileError: The file is missing, damaged, or does not match the index.
            UnverifiedError: It is a pickle without a checksum, and `allow_pickle` is False.
            SchemaError: The file is not a trajectory.
        """
        format_name, known, path = self.head.trajectory_format, self.entries.get(number), self.path(number)
        checksum = file_checksum(path, format_name, deep=True)
        expected = "" if known is None else known.require_file().checksum
        if expected and checksum != expected:
            msg = f"{path} has the checksum {checksum}, {expected} expected: restore the file from a copy"
            raise DamagedFileError(msg)
        if format_name != "pkl" or allow_pickle:
            self.inspect(number, allow_pickle=allow_pickle)
        elif not expected:
            msg = f"{path} cannot be verified: there is no checksum in the index"
            raise UnverifiedError(msg)
        return file_size(path), bool(expected) or format_name == "pt"

    def metadata_problem(self) -> str:
        """Return how the metadata contradict the index; empty if they do not, or may be older: while files are saved.

        Raises:
            DamagedFileError: The file cannot be read.
        """
        path = self.directory / METADATA
        if not path.exists() or (self.directory / JOURNAL).exists():
            return ""
        found = read_object(path)
        expected = _metadata(self.head, self.infos)
        wrong = [
            f"{key} is {str(found.get(key))[:40]}, but the index has {expected[key]}"
            for key in ("size", "total_samples")
            if found.get(key) != expected[key]
        ]
        counter = found.get("trajectory_counter")
        if type(counter) is int and counter <= max(self.infos, default=-1):
            wrong.append(f"trajectory_counter is {counter}, but must be above every id")
        return "; ".join(wrong)


def has_index(directory: Path) -> bool:
    """Tell whether a directory lists trajectories, written by Ostinato or by RLinf in either spelling."""
    return any((directory / name).exists() for name in (INDEX, _OLD_INDEX, JOURNAL))


def read_index(directory: Path, *, strict: bool = True) -> DirectoryIndex:
    """Read the index of a directory, its journal included. A `Progress` of trajectories counts those that were read.

    If a buffer rewrites the files meanwhile, old and new ones could be mixed, so all are read again.

    Args:
        directory: The directory.
        strict: Raise if `ostinato_store.jsonl` is damaged; False ignores that file then.

    Raises:
        CheckpointNotFoundError: The path does not exist, or holds no trajectories.
        CheckpointError: The path is a file, or the files were rewritten again and again while they were read.
        DamagedFileError: A file is damaged; the message names it.
    """
    until = time.monotonic() + _READ_TIMEOUT_S
    while time.monotonic() < until:
        before = _versions(directory)
        try:
            found = _read_once(directory, strict=strict)
        except OstinatoError:
            if _versions(directory) == before:
                raise
        else:
            if _versions(directory) == before:
                return found
    msg = f"{directory} was rewritten by another process each time it was read: try again later"
    raise CheckpointError(msg)


def _versions(directory: Path) -> list[tuple[int, ...] | None]:
    """Return the identity of each file that `write_index` replaces; lines appended to a journal do not change it."""
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


def _read_once(directory: Path, *, strict: bool) -> DirectoryIndex:
    head, infos = _read_json_files(directory)
    entries: dict[int, Entry] = {}
    damage = ""
    store, journal = directory / STORE, directory / JOURNAL
    if store.exists():
        try:
            stored = _EntryFile(store, directory, whole=True)
        except DamagedFileError as error:
            if strict:
                raise
            damage = str(error)
        else:
            if head is not None and stored.head.trajectory_format == head.trajectory_format:
                entries = {e.id: e for e in stored.entries.values() if infos.get(e.id) == e.info}
                head = head._replace(generator=stored.head.generator, counter=max(head.counter, stored.head.counter))
    if journal.exists():
        logged = _EntryFile(journal, directory, whole=False, base=dict.fromkeys(infos))
        head = logged.head if head is None else head
        infos = {number: infos[number] for number in infos if number in logged.entries}
        new = {number: entry for number, entry in logged.entries.items() if entry is not None}
        infos |= {number: entry.info for number, entry in new.items()}
        entries |= new
    if head is None:
        raise _not_found(directory)
    counter = max([head.counter, *(number + 1 for number in infos)])
    entries = {number: entry for number, entry in entries.items() if number in infos}
    return DirectoryIndex(directory, head._replace(counter=counter), infos, entries, damage)


def _not_found(directory: Path) -> CheckpointError:
    """Return the error for a path without trajectories; the message says what is there instead."""
    if not directory.is_dir():
        if os.path.lexists(directory):
            return CheckpointError(f"no trajectories at {directory}: it is a file, give the directory that holds them")
        return CheckpointNotFoundError(f"no trajectories at {directory}: it does not exist")
    ranks = [path.name for path in rank_directories(directory) if has_index(path)]
    hint = f", but in {', '.join(ranks[:3])}: take one of these, or join them (ostinato merge)" if ranks else ""
    return CheckpointNotFoundError(
        f"no trajectories at {directory}: neither {METADATA} with {INDEX} nor {JOURNAL} is there{hint}"
    )


def _read_json_files(directory: Path) -> tuple[Head | None, dict[int, TrajectoryInfo]]:
    """Read `metadata.json` and `trajectory_index.json`; None without them."""
    path = next((directory / name for name in (INDEX, _OLD_INDEX) if (directory / name).exists()), None)
    metadata = directory / METADATA
    if path is None or not metadata.exists():
        lonely = path or (metadata if metadata.exists() else None)
        if lonely is not None and not (directory / JOURNAL).exists():
            missing = METADATA if path is not None else INDEX
            msg = f"{directory / missing} is missing, and {lonely.name} needs it: restore it from a copy"
            raise MissingFileError(msg)
        return None, {}
    meta, node = read_object(metadata), read_object(path)
    index, order = node.get("trajectory_index"), node.get("trajectory_id_list")
    values: Any = (meta.get(key) for key in ("trajectory_format", "trajectory_counter", "seed"))
    head = Head(*values).checked(metadata)
    if not isinstance(index, dict) or not isinstance(order, list) or sorted(map(str, order)) != sorted(index):
        damaged(path, "trajectory_index and trajectory_id_list must name the same trajectories")
    if not (directory / STORE).exists():  # whose lines are counted instead
        order = counted(order, TRAJECTORIES)
    infos = [TrajectoryInfo.from_json(number, index[str(number)], path) for number in order]
    return head, {info.trajectory_id: info for info in infos}


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        DamagedFileError: It is missing or damaged.
    """
    with os.fdopen(open_file(path), "rb") as stream:
        node = parse_json(stream.read(), path)
    if not isinstance(node, dict):
        damaged(path, "no JSON object")
    return node


@final
class _EntryFile:
    """The content of `ostinato_store.jsonl` or of a journal.

    Args:
        path: The file.
        directory: Its directory.
        whole: Whether the file must end with a complete line; a journal may not, after a crash.
        base: Ids that were listed before.
    """

    def __init__(self, path: Path, directory: Path, *, whole: bool, base: dict[int, None] | None = None) -> None:
        self._path = path
        self._directory = directory
        self._layouts: dict[int, Layout] = {}
        lines = read_lines(path, whole=whole)
        self.head = Head.from_json(next(lines, {}), path)
        self.entries: dict[int, Any] = dict(base or {})
        """By id; None for those of `base` without a line."""
        for node in lines:
            try:
                self._apply(node)
            except (KeyError, TypeError, ValueError, OstinatoError) as error:
                if isinstance(error, DamagedFileError):
                    raise
                msg = f"{path} is damaged: the line {str(node)[:200]} ({error!r:.200})"
                raise DamagedFileError(msg) from error

    def _apply(self, node: dict[str, Any]) -> None:
        if "form" in node:
            self._layouts[node["form"]] = self._read_layout(node)
        elif "drop" in node:
            for number in node["drop"]:
                self.entries.pop(number, None)
        else:
            entry = self._read_entry(node)
            self.entries[entry.id] = entry
            count(1, TRAJECTORIES)

    def _read_layout(self, node: dict[str, Any]) -> Layout:
        fields = []
        for path, dtype, sizes in node["fields"]:
            shape = check_shape(sizes)
            if shape is None or dtype not in DTYPES or not path or not all(isinstance(key, str) for key in path):
                msg = f"field {str(path)[:80]}"
                raise ValueError(msg)
            fields.append(Field(tuple(path), dtype, shape))
        return make_layout(fields, self._path)

    def _read_entry(self, node: dict[str, Any]) -> Entry:
        """Read the line of a trajectory; fields that reach outside the file raise."""
        info = TrajectoryInfo.from_json(node["id"], node["facts"], self._path)
        layout = self._layouts[node["of"]]
        file = self._read_file(node)
        if info.shape != layout.shape:
            msg = "the shapes of the index and of the layout differ"
            raise ValueError(msg)
        fits = file.strides is None and all(  # the common case, checked quickly
            0 <= offset <= file.nbytes - size for offset, size in zip(file.offsets, layout.field_bytes, strict=True)
        )
        if not fits:
            strides = file.strides or (None,) * len(file.offsets)
            for field, offset, step in zip(layout.fields, file.offsets, strides, strict=True):
                if offset != -1:
                    Placed(field.path, field.dtype, field.shape, offset, step).check(file.nbytes, self._directory)
        return Entry(info._replace(shape=layout.shape), layout, file)

    def _read_file(self, node: dict[str, Any]) -> SavedFile:
        offsets, nbytes, checksum = tuple(node["offsets"]), node["bytes"], node["sum"]
        strides = None if node["strides"] is None else tuple(None if s is None else tuple(s) for s in node["strides"])
        good = type(nbytes) is int and isinstance(checksum, str) and all(type(offset) is int for offset in offsets)
        if not good or not all(type(step) is int for steps in strides or () for step in steps or ()):
            msg = "size, checksum, offsets or strides have a wrong type"
            raise ValueError(msg)
        format_name = self.head.trajectory_format
        return SavedFile(self._directory, format_name, nbytes, checksum, _interned(offsets), strides)


def entry_lines(entries: Iterable[Entry], layouts: dict[Layout, int]) -> Iterator[dict[str, Any]]:
    """Yield the lines of saved trajectories; each layout once, before the first trajectory that has it.

    Args:
        entries: The trajectories.
        layouts: Numbers of the layouts that have a line already; new ones are added.
    """
    for entry in entries:
        number = layouts.get(entry.layout)
        if number is None:
            number = layouts[entry.layout] = len(layouts)
            fields = [[list(field.path), field.dtype, list(field.shape)] for field in entry.layout.fields]
            yield {"form": number, "fields": fields}
        yield entry.to_json(number)


def write_index(
    directory: Path,
    head: Head,
    infos: dict[int, TrajectoryInfo],
    entries: Iterable[Entry],
    *,
    keep_journal: bool = False,
) -> None:
    """Write the index files anew and remove the journal. A crash at any point loses no listed trajectory.

    A `Progress` of trajectories counts those that were written.

    Args:
        directory: The directory.
        head: Format, counter, seed and generator.
        infos: The record of each trajectory by id.
        entries: Those whose field positions are known.
        keep_journal: Leave the journal, whose lines repeat what is in the index now.
    """
    write_lines(directory / STORE, (head.to_json(), *entry_lines(counted(entries, TRAJECTORIES), {})))
    index = {str(number): info.to_json() for number, info in infos.items()}
    atomic_write(directory / INDEX, canonical({"trajectory_index": index, "trajectory_id_list": list(infos)}))
    atomic_write(directory / METADATA, json.dumps(_metadata(head, infos)).encode())
    for name in (_OLD_INDEX,) if keep_journal else (_OLD_INDEX, JOURNAL):
        (directory / name).unlink(missing_ok=True)
    fsync_dir(directory)


def _metadata(head: Head, infos: dict[int, TrajectoryInfo]) -> dict[str, Any]:
    return {
        "trajectory_format": head.trajectory_format,
        "size": len(infos),
        "total_samples": sum(info.num_samples for info in infos.values()),
        "trajectory_counter": head.counter,
        "seed": head.seed,
    }
