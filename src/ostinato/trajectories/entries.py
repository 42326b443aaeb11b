"""`Entry`: all that memory keeps of a trajectory besides the cache; and how the files of a directory say it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, final

import numpy as np
from torch import Tensor

from ostinato.durable.dtypes import DTYPES, check_shape, raw_view
from ostinato.durable.headers import Placed
from ostinato.durable.trees import flatten
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, OstinatoError
from ostinato.trajectories.form import Field, make_form
from ostinato.trajectories.trajectory import check_weights_id

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.durable.headers import Header
    from ostinato.trajectories.form import Form

__all__ = [
    "MAX_ID",
    "Entry",
    "Facts",
    "Held",
    "Place",
    "entry_from_json",
    "entry_to_json",
    "file_name",
    "form_from_json",
    "form_of",
    "form_to_json",
    "id_of_name",
    "is_counter",
    "is_seed",
    "place_of",
    "read_facts",
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
