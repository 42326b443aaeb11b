"""robomimic's HDF5 files: a group of arrays for each demonstration, and filter keys that name some of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.datasets.checks import READ_ERRORS, FirstFault, Place, first_line, usual_rows
from ostinato.datasets.columns import BlockColumn, MovedColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.format import Format
from ostinato.datasets.hdf5 import WRITE, Hdf5File, Hdf5Source, datasets_of, describe, is_hdf5, read_part
from ostinato.datasets.stored import Ends, as_flags
from ostinato.errors import DamagedFileError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ostinato.core.rows import Path as Key
    from ostinato.datasets.checks import Faults
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.examination import Examination
    from ostinato.datasets.format import Reading

_DEMO = re.compile(r"demo_(\d+)")
_NEEDED = ("obs", "next_obs", "actions", "rewards", "dones", "states")
"""Fields, or groups of them, that every demonstration must have if one has them."""


def recognizes_robomimic(source: Any) -> bool:
    """Return whether a path or an object is an HDF5 file with the group `data/demo_N`. Does not raise."""
    if not is_hdf5(source):
        return False
    try:
        return any(_DEMO.fullmatch(name) for name in Hdf5File.find(source).children("data"))
    except UsageError:  # a group that cannot be opened again: reading it raises
        return False


class _Demos(NamedTuple):
    """The demonstrations that are used, and their datasets."""

    file: Hdf5File
    groups: list[str]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    names: list[str]
    """Datasets with one row per step in all of them, such as `obs/object`."""

    def column(self, name: str, reading: Reading) -> DatasetColumn:
        """Return a dataset of all demonstrations."""
        return BlockColumn(Hdf5Source(self.file, self.groups, name, self.lengths), reading.cache)


def read_robomimic(source: Any, reading: Reading) -> Contents:
    """Return the contents of a robomimic file.

    Args:
        source: path of the file, or an `h5py.File` or `h5py.Group`.
        reading: how files are read; `filter_key` chooses the demonstrations that `mask/<filter_key>` names.

    Raises:
        OptionError: if there is no such filter key.
        DamagedFileError: if a demonstration lacks a field, or its fields differ in their number of rows.
    """
    file = Hdf5File.find(source)
    names = file.names()
    groups = _groups(file, names, reading.filter_key)
    demos, said = _demos(file, names, groups)
    current = [name for name in demos.names if name.startswith("obs/")]
    unknown = [name for name in current if f"next_{name}" not in demos.names]
    ends = _ends(demos, said, drop=bool(unknown))
    columns: dict[Key, DatasetColumn] = {}
    for name in demos.names:
        if name == "dones":
            continue
        stored = demos.column(name, reading)
        columns[_key(name)] = ends.place(stored)
        if name in unknown:
            columns["next", *_key(name)] = MovedColumn(stored, ends.after)
    columns |= ends.flags
    masks = sorted(name[5:] for name in names if name.startswith("mask/"))
    metadata = {**_attributes(file), "filter_keys": masks, "demos": [group[5:] for group in groups]}
    return Contents(
        "robomimic",
        columns,
        ends.lengths,
        metadata=metadata,
        assumptions=tuple(said),
        rows_left_out=ends.left_out,
        left_out_because=ends.reason("next_obs"),
        selection=reading.filter_key or "",
    )


def _key(name: str) -> Key:
    """Return the path of a dataset: observations, actions and rewards have the names of the library."""
    top, *rest = name.split("/")
    known: dict[str, Key] = {
        "obs": ("observation",),
        "next_obs": ("next", "observation"),
        "actions": ("action",),
        "rewards": ("next", "reward"),
    }
    return (*known.get(top, (top,)), *rest)


def _groups(file: Hdf5File, names: list[str], filter_key: str | None) -> list[str]:
    """Return the demonstrations in the order of their numbers."""
    there = [name for name in names if name.startswith("data/") and _DEMO.fullmatch(name[5:])]
    if filter_key is not None:
        masks = sorted(name[5:] for name in names if name.startswith("mask/"))
        if filter_key not in masks:
            msg = f"{file} has no filter key {filter_key!r}: it has {', '.join(masks) or 'none'}"
            raise OptionError(msg)
        chosen = file.use(lambda group: _texts(group[f"mask/{filter_key}"][()]))
        place, known = Place(f"mask/{filter_key}"), {name[5:] for name in there}
        _check_mask(chosen, known, place, FirstFault(Path(str(file))))
        if not chosen:
            msg = f"{file}: the filter key {filter_key} names no demonstration"
            raise DamagedFileError(msg)
        there = [f"data/{name}" for name in chosen]
    return sorted(there, key=_number)


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def _texts(values: Any) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in np.asarray(values).reshape(-1)]


def _demos(file: Hdf5File, names: list[str], groups: list[str]) -> tuple[_Demos, list[str]]:
    """Return demonstrations whose fields have the same rows, and what was left out."""
    inner: dict[str, list[str]] = {group: [] for group in groups}
    parents = {name.rpartition("/")[0] for name in names}
    for name in names:
        group = "/".join(name.split("/", 2)[:2])
        if group in inner and name != group and name not in parents:
            inner[group].append(name[len(group) + 1 :])
    counts = Counter(name for found in inner.values() for name in found)
    rows = {name: file.row_counts([f"{group}/{name}" for group in groups]) for name in sorted({"actions", *counts})}
    samples = file.use(lambda root: [root[group].attrs.get("num_samples") for group in groups])
    faults = FirstFault(Path(str(file)))
    for at, group in enumerate(groups):
        sizes = {name: int(found[at]) for name, found in rows.items()}
        _check_demo(sizes, rows, samples[at], Place(group, at), faults)
    kept: list[str] = []
    said: list[str] = []
    for name in sorted(counts):
        reason = None
        if counts[name] != len(groups):
            reason = f"is in {counts[name]} of {len(groups)} demonstrations"
        elif (rows[name] != rows["actions"]).any():
            reason = "does not have one row per step"
        elif (kind := describe(file, f"{groups[0]}/{name}").dtype).kind not in "biuf":
            reason = f"does not hold numbers ({kind})"
        if reason is None:
            kept.append(name)
        else:
            said.append(f"{name} {reason}, and is left out.")
    return _Demos(file, groups, rows["actions"], kept), said


def _ends(demos: _Demos, said: list[str], *, drop: bool) -> Ends:
    """Return the rows of the dataset; add what was assumed of their ends."""
    rows = int(demos.lengths.sum())
    terminated = np.zeros(rows, bool)
    stops = np.cumsum(demos.lengths)
    if "dones" in demos.names:
        parts = demos.file.use(lambda root: _read_dones(root, demos))
        terminated = np.concatenate(parts)
        said.append(
            "dones are read as terminations: robomimic sets them at success, at the end of each demonstration, or both "
            "(done_mode); a demonstration whose last row is not done was cut off."
        )
        early = np.delete(terminated, stops - 1)
        if bool(early.any()):
            said.append(
                "Rows before the last one of their demonstration are done, too "
                f"({number_of(int(early.sum()), 'row')}); an episode is a whole demonstration."
            )
    else:
        said.append("The file has no dones: every demonstration was cut off at its last row.")
    ends = Ends.of(demos.lengths, terminated, np.zeros(rows, bool), drop=drop)
    said += ends.assumed("next_obs")
    return ends


def _read_dones(root: Any, demos: _Demos) -> Sequence[np.ndarray[Any, np.dtype[np.bool_]]]:
    out = []
    for group, length in zip(demos.groups, demos.lengths, strict=True):
        name = f"{group}/dones"
        rows = int(length)
        out.append(as_flags(read_part(root, name, str(demos.file), rows, 0, rows), f"{demos.file}, {name}"))
    return out


def _attributes(file: Hdf5File) -> dict[str, Any]:
    """Return the attributes of the group `data` as plain values; `env_args` is decoded."""
    found: dict[str, Any] = file.use(lambda root: dict(root["data"].attrs))
    out: dict[str, Any] = {}
    for name, value in found.items():
        plain = value.tolist() if hasattr(value, "tolist") else value
        if name == "env_args" and isinstance(plain, (str, bytes)):
            try:
                plain = json.loads(plain)
            except ValueError as error:
                msg = f"{file}: the attribute env_args of data is not JSON: {error}"
                raise DamagedFileError(msg) from error
        out[name] = plain
    return out


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_demo(rows: Mapping[str, int], names: Iterable[str], samples: Any, place: Place, faults: Faults) -> None:
    """Check that the fields of a demonstration have one row for each action.

    Args:
        rows: rows of the fields that it has; -1 for what has none.
        names: fields of all demonstrations. Those of other names than robomimic's may be missing, or have other rows.
        samples: its attribute `num_samples`; None if it has none.
        place: where it is.
        faults: takes what is wrong.
    """
    count = rows.get("actions", -1)
    if count < 1:
        text = "it has no actions" + ("" if count else ": it has no rows")
        faults.add("field-missing", text, place._replace(field="actions"))
    if samples is not None and int(samples) != count:
        text = f"it has {count} actions, but its attribute num_samples says {samples}"
        faults.add("episode-length", text, place._replace(field="num_samples"))
    for name in names:
        found, needed = rows.get(name, -1), name.partition("/")[0] in _NEEDED
        if needed and found == -1:
            faults.add("field-missing", f"{name} is missing", place._replace(field=name))
        elif needed and found != count:
            text = f"{name} has {number_of(found, 'row')}, but the demonstration has {count} actions"
            faults.add("episode-length", text, place._replace(field=name))


def _check_mask(listed: list[str], names: Iterable[str], place: Place, faults: Faults) -> None:
    unknown = [name for name in listed if name not in names]
    if unknown:
        text = f"it names {unknown[0]}, which is missing ({number_of(len(unknown), 'such name')})"
        faults.add("split-invalid", text, place)


def examine_robomimic(path: Path, look: Examination) -> str:
    """Examine a file of robomimic."""
    look.rows.end_flags = False  # they mean success, which may last
    with require("h5py", "h5").File(path, "r") as file:
        data = file["data"]
        demos = sorted((name for name in data if _DEMO.fullmatch(name)), key=_number)
        look.expect(len(demos))
        names: set[str] = set()
        for number, name in enumerate(demos):
            place = Place(f"{path.name}/data/{name}", number)
            try:
                arrays = {key: array for key, array in datasets_of(data[name]).items() if array.ndim}
                names |= set(arrays)
                sizes = {key: int(array.shape[0]) for key, array in arrays.items()}
                _check_demo(sizes, sorted(names), data[name].attrs.get("num_samples"), place, look)
                arrays.pop("states", None)
                look.episode(number, arrays, usual_rows(sizes.values()), place.file)
            except READ_ERRORS as error:
                look.add("file-unreadable", first_line(error), place)
        look.pictures()
        total = data.attrs.get("total")
        if total is not None and int(total) != look.total:
            text = f"total is {int(total):,}, the demonstrations have {number_of(look.total, 'row')}"
            look.add("count-mismatch", text, Place(f"{path.name}/data", field="total"))
        for key, array in datasets_of(file["mask"]).items() if "mask" in file else ():
            _check_mask(_texts(array[:]), demos, Place(f"{path.name}/mask/{key}"), look)
    return "robomimic"


FORMAT = Format(
    "robomimic",
    recognizes_robomimic,
    read_robomimic,
    objects=("h5py.Group",),
    options=("filter_key",),
    examine=examine_robomimic,
    write=WRITE,  # files of D4RL, too, by an option
)
