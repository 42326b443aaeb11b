"""D4RL's HDF5 files: flat arrays with one row per step, and flags where episodes end."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.datasets.arrays import ends_of, same_rows
from ostinato.datasets.checks import READ_ERRORS, FirstFault, Place, check_fields
from ostinato.datasets.columns import BlockColumn, MovedColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.format import Format
from ostinato.datasets.hdf5 import (
    Hdf5File,
    Hdf5Source,
    datasets_of,
    describe,
    is_hdf5,
    plain_values,
    read_all,
    resembles_hdf5,
)
from ostinato.datasets.stored import Ends, as_flags
from ostinato.errors import DamagedFileError, KindError, OptionError, UsageError

if TYPE_CHECKING:
    from ostinato.core.rows import Path as Key
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.examination import Examination
    from ostinato.datasets.format import Reading

_KEYS: dict[str, Key] = {"observations": ("observation",), "actions": ("action",), "rewards": ("next", "reward")}
_NEEDED = (*_KEYS, "terminals")
_FLAGS = ("terminals", "timeouts")


def recognizes_d4rl(source: Any) -> bool:
    """Return whether a path or an object is an HDF5 file with the arrays of D4RL, or one that cannot be read."""
    if not is_hdf5(source):
        return False
    try:
        names = Hdf5File.find(source).children("/")
    except UsageError:  # a group that cannot be opened again: reading it raises
        return True
    return not names or not {"observations", "actions"}.isdisjoint(names)


def read_d4rl(source: Any, reading: Reading) -> Contents:
    """Return the contents of a D4RL file.

    Args:
        source: path of the file, or an `h5py.File` or `h5py.Group`.
        reading: how files are read; `max_episode_steps` ends episodes of files without `timeouts`.

    Raises:
        DamagedFileError: if one is missing, or they differ in their number of rows.
        OptionError: for `max_episode_steps` with a file that has `timeouts`.
    """
    file = Hdf5File.find(source)
    names = file.names()
    found = set(names)
    check_fields(found, _NEEDED, "the file", Place(), FirstFault(Path(str(file))))
    rows = describe(file, "observations").shape[0]
    if not rows:
        msg = f"{file} has no rows: observations is empty"
        raise DamagedFileError(msg)
    ends, stops, said = _ends(file, rows, reading.max_episode_steps, found)

    def stored(name: str) -> DatasetColumn:
        return BlockColumn(Hdf5Source(file, [""], name, np.array([rows]), stops=stops), reading.cache)

    columns: dict[Key, DatasetColumn] = {}
    observations = stored("observations")
    columns["observation",] = ends.place(observations)
    columns["action",] = ends.place(stored("actions"))
    columns["next", "observation"] = (
        ends.place(stored("next_observations"))
        if "next_observations" in found
        else MovedColumn(observations, ends.after)
    )
    columns["next", "reward"] = ends.place(stored("rewards"))
    columns |= ends.flags
    for name in _others(file, names, rows, said):
        key = ("info", *name.split("/")[1:]) if name.startswith("infos/") else tuple(name.split("/"))
        columns[key] = ends.place(stored(name))
    metadata = plain_values(file, [name for name in names if name.startswith("metadata/")])
    return Contents(
        "d4rl",
        columns,
        ends.lengths,
        metadata={name[9:]: value for name, value in metadata.items()},
        assumptions=tuple(said),
        rows_left_out=ends.left_out,
        left_out_because=ends.reason("next_observations"),
    )


def _ends(file: Hdf5File, rows: int, most: int | None, found: set[str]) -> tuple[Ends, Any, list[str]]:
    """Return the rows of the dataset, the rows after those of each episode, and what was assumed of them."""
    terminated = as_flags(read_all(file, "terminals", rows), f"{file}, terminals")
    said: list[str] = []
    if "timeouts" in found:
        if most is not None:
            msg = f"{file} has timeouts, which say where episodes were cut off: leave out max_episode_steps={most}"
            raise OptionError(msg)
        truncated = as_flags(read_all(file, "timeouts", rows), f"{file}, timeouts")
    elif most is None:
        truncated = np.zeros(rows, bool)
        said.append(
            "The file has no timeouts: an episode that was cut off cannot be told from the next one, so that rows from "
            "one terminal to the next are one episode. Give max_episode_steps= if the environment had a time limit."
        )
    else:
        truncated = _time_limits(terminated, most)
        said.append(f"The file has no timeouts: episodes are cut off after {most} steps, as max_episode_steps says.")
    stops = np.flatnonzero(terminated | truncated) + 1
    if not stops.shape[0] or stops[-1] != rows:
        rest = rows - (int(stops[-1]) if stops.shape[0] else 0)
        said.append(f"The rows after the last flag ({number_of(rest, 'row')}) are an episode that was cut off.")
        stops = np.append(stops, rows)
    drop = "next_observations" not in found
    ends = Ends.of(np.diff(stops, prepend=0), terminated, truncated, drop=drop)
    said += ends.assumed("next_observations")
    return ends, stops, said


def _time_limits(terminated: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return where episodes reach a number of steps since the last end, bool `[rows]`."""
    rows = np.arange(terminated.shape[0])
    starts = np.concatenate([[0], np.flatnonzero(terminated[:-1]) + 1])
    first = starts[np.searchsorted(starts, rows, side="right") - 1]
    cut: np.ndarray[Any, np.dtype[np.bool_]] = ((rows - first + 1) % most == 0) & ~terminated
    return cut


def _others(file: Hdf5File, names: list[str], rows: int, said: list[str]) -> list[str]:
    """Return the other datasets with one number or array per row; add a sentence for each that has none.

    Raises:
        DamagedFileError: if an array of infos has another number of rows.
    """
    out: list[str] = []
    known = {*_KEYS, *_FLAGS, "next_observations"}
    groups = {name.rpartition("/")[0] for name in names}
    for name in names:
        if name in known | groups or name.startswith("metadata/") or name == "metadata":
            continue
        count = int(file.row_counts([name])[0])
        if count != rows and name.startswith("infos/") and count >= 0:
            msg = f"{file}, {name} has {count} rows, but observations has {rows}"
            raise DamagedFileError(msg)
        kind = describe(file, name).dtype if count >= 0 else None
        if count != rows or kind is None or kind.kind not in "biuf":
            what = "one row per step" if count != rows else f"numbers ({kind})"
            said.append(f"{name} does not have {what}, and is left out.")
        else:
            out.append(name)
    return out


# -- checks ------------------------------------------------------------------------------------------------------------


def examine_d4rl(path: Path, look: Examination) -> str:
    """Examine a file of D4RL.

    Raises:
        KindError: if it has none of the arrays.
    """
    with require("h5py", "h5").File(path, "r") as file:
        if not any(name in file for name in _NEEDED):
            msg = (
                f"{path} has neither the arrays of D4RL (observations, ...) nor the groups of robomimic (data/demo_0, "
                "...)"
            )
            raise KindError(msg)
        arrays = {k: v for k, v in datasets_of(file).items() if not k.startswith(("metadata", "states"))}
        check_fields(arrays, _NEEDED, "the file", Place(path.name), look)
        if "timeouts" not in arrays:
            text = "without timeouts, an episode that was cut off runs into the next one"
            look.add("flag-missing", text, Place(path.name, field="timeouts"))
        used, rows = same_rows(arrays, look, path.name)
        if rows:
            look.whole(used, _flagged(used, rows), path.name)
    return "d4rl"


def _flagged(arrays: dict[str, Any], rows: int) -> list[int]:
    """Return the row after the last one of each episode."""
    flags = [np.zeros(rows, bool)]
    for name in _FLAGS:
        with contextlib.suppress(*READ_ERRORS):  # the pass over all arrays reports it
            flags += [np.asarray(arrays[name][:])] if name in arrays else []
    ends: list[int] = ends_of(flags).tolist()
    return ends


FORMAT = Format(
    "D4RL",
    recognizes_d4rl,
    read_d4rl,
    objects=("h5py.Group",),
    options=("max_episode_steps",),
    examine=examine_d4rl,
    resembles=resembles_hdf5,
)
