"""Directories of trajectories, as RLinf and `TrajectoryReplayBuffer` write them, as datasets. Nothing is unpickled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.kinds import show_path
from ostinato.core.processes import whole_in_forks
from ostinato.datasets.columns import TensorColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.format import Format
from ostinato.durable.arrays import DTYPES
from ostinato.durable.progress import PARTS, counted
from ostinato.durable.tensorfile import flatten, show
from ostinato.errors import CheckpointError, DamagedFileError, SchemaError
from ostinato.trajectories.gather import RowReader
from ostinato.trajectories.index import has_index, rank_directories, read_index
from ostinato.trajectories.trajectory_list import TrajectoryList

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.format import Reading
    from ostinato.durable.tensorfile import TreePath
    from ostinato.trajectories.index import Entry, TrajectoryData
    from ostinato.trajectories.layout import Signature

__all__ = ["FORMAT", "read_rlinf"]

_NAMES: dict[str, FieldPath] = {
    "actions": ("action",),
    "curr_obs": ("observation",),
    "next_obs": ("next", "observation"),
    "rewards": ("next", "reward"),
    "terminations": ("next", "terminated"),
    "truncations": ("next", "truncated"),
    "dones": ("next", "done"),
}
"""Fields of trajectories by their names in datasets; other fields keep theirs."""
_ENDS = ("terminations", "truncations", "dones")
_MAX_OPEN = 64
_READ_ROWS = 65_536


def recognizes_rlinf(path: Path) -> bool:
    """Whether a path is a directory of trajectories, or holds one for each rank (`rank_0`, `rank_1`, ...)."""
    return path.is_dir() and (has_index(path) or bool(_ranks(path)))


def _ranks(path: Path) -> list[Path]:
    """Return the directories of ranks in their order."""
    return [one for one in rank_directories(path) if has_index(one)]


def read_rlinf(path: Path, reading: Reading) -> Contents:  # noqa: ARG001 (a format's signature)
    """Return the transitions of all trajectories: of each trajectory one environment after the other, in steps.

    Rows are read by their positions in the files. Opening reads the header of each file that Ostinato's index does not
    describe, and the flags of all transitions.

    Raises:
        CheckpointError: if the trajectories are pickled.
        DamagedFileError: if the index or a file is damaged.
        SchemaError: if trajectories have different fields, or there are none.
    """
    entries = [entry for folder in (_ranks(path) if not has_index(path) else [path]) for entry in _entries(folder)]
    if not entries:
        msg = f"{path} lists no trajectory"
        raise SchemaError(msg)
    rows = _Rows(entries)
    try:
        fields, notes = _common_fields(rows.trajectories)
    except SchemaError as error:
        msg = f"{path}: {error}"
        raise SchemaError(msg) from None
    lengths, flags = _lengths(rows, fields, notes)
    columns: dict[FieldPath, DatasetColumn] = {}
    for name, (dtype, shape) in fields.items():
        column: DatasetColumn = _RowColumn(rows, name, dtype, shape)
        if _path_of(name) in columns:
            msg = f"{path}: two fields would be {show_path(_path_of(name))}, one of them is {show(name)}: rename it"
            raise SchemaError(msg)
        columns[_path_of(name)] = TensorColumn(flags[name]) if name in flags else column
    metadata = {
        "trajectories": len(entries),
        "num_envs": [entry.layout.envs for entry in entries],
        "model_weights_id": [entry.info.model_weights_id for entry in entries],
    }
    return Contents("rlinf", columns, lengths, metadata=metadata, assumptions=tuple(notes))


def _entries(folder: Path) -> list[Entry]:
    """Return the trajectories of a directory in the order of their ids, with the positions of their fields."""
    index = read_index(folder.absolute())
    if index.head.trajectory_format == "pkl":
        msg = (
            f"{folder} holds pickled trajectories, which are not read since unpickling runs code: convert files that "
            "you trust with ostinato convert --allow-pickle"
        )
        raise CheckpointError(msg)
    found = []
    for _, entry in counted(index.check_files(index.infos, allow_pickle=False), PARTS):
        if isinstance(entry, DamagedFileError):
            raise entry
        found.append(entry)
    return found


def _common_fields(trajectories: TrajectoryList) -> tuple[Signature, list[str]]:
    """Return the fields that all trajectories have, and sentences on what was assumed or left out."""
    fields = trajectories.common_fields(drop=True)
    missing = trajectories.all_fields() - set(fields)
    notes = ["The end of a trajectory ends the episodes in it."]
    if missing:
        notes.append(f"Fields that some trajectories lack are left out: {', '.join(sorted(map(show, missing)))}.")
    if not any((name,) in fields for name in ("terminations", "truncations")):
        notes.append("The files do not tell terminated from truncated episodes.")
    return fields, notes


def _path_of(name: TreePath) -> FieldPath:
    return (*_NAMES.get(str(name[0]), (str(name[0]),)), *map(str, name[1:]))


@final
class _Rows:
    """Where each row of the dataset lies. Pickled without open files; usable in forked processes."""

    def __init__(self, entries: list[Entry]) -> None:
        self.trajectories = TrajectoryList(0)
        self.trajectories.append(entries)
        numbers, first = [], 0
        for layout in (entry.layout for entry in entries):
            numbers.append(first + np.arange(layout.num_samples).reshape(layout.steps, layout.envs).T.reshape(-1))
            first += layout.num_samples
        self.numbers = np.concatenate(numbers)
        """Number of each row among the transitions of all trajectories, int64 `[rows]`."""
        self._begin()

    def _begin(self) -> None:
        self._reader = RowReader(_MAX_OPEN, _read_whole)
        whole_in_forks(self, self._reader.files.lock)

    def __getstate__(self) -> dict[str, Any]:
        """The positions of rows."""
        return {"trajectories": self.trajectories, "numbers": self.numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without open files."""
        self.__dict__.update(state)
        self._begin()

    def read(self, fields: Signature, rows: np.ndarray[Any, Any]) -> dict[TreePath, Tensor]:
        """Return some fields of rows, `[n, *shape]` each. Copy."""
        drawn = self.trajectories.locate(self.numbers[rows])
        return flatten(self._reader.read(drawn, fields), where="trajectory")

    def close(self) -> None:
        """Close all files."""
        self._reader.files.close()


def _read_whole(entry: Entry) -> TrajectoryData:
    msg = f"{entry.path()} has no positions of fields: convert it with ostinato convert"
    raise CheckpointError(msg)


@final
class _RowColumn:
    """One field of the trajectories; each row is read by its position in its file."""

    def __init__(self, rows: _Rows, name: TreePath, dtype: str, shape: tuple[int, ...]) -> None:
        self._rows, self._name, self._form = rows, name, (dtype, shape)
        self.dtype: torch.dtype = DTYPES[dtype]
        """Dtype of the field."""
        self.shape = shape
        """Shape of the field in one row."""

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Return a function that reads rows; see `DatasetColumn`."""
        return lambda: self._rows.read({self._name: self._form}, rows.numpy())[self._name]

    def close(self) -> None:
        """Close files."""
        self._rows.close()


def _lengths(rows: _Rows, fields: Signature, notes: list[str]) -> tuple[Tensor, dict[TreePath, Tensor]]:
    """Return the rows of each episode, int64 `[episodes]`, and the flags, which stay in memory."""
    count = rows.numbers.shape[0]
    wanted: Signature = {(name,): fields[name,] for name in _ENDS if (name,) in fields}
    parts = [
        rows.read(wanted, np.arange(first, min(first + _READ_ROWS, count)))
        for first in counted(range(0, count, _READ_ROWS), PARTS)
    ]
    flags: dict[TreePath, Tensor] = {name: torch.cat([part[name] for part in parts]) for name in wanted}
    ends = torch.zeros(count, dtype=torch.bool, device="cpu")
    for values in flags.values():
        ends |= values.reshape(count, -1).bool().any(1)
    if not flags:
        names = ", ".join(show_path((name,)) for name in _ENDS)
        notes.append(f"No trajectory has {names}: each environment of a trajectory is one episode.")
    layouts = [entry.layout for entry in rows.trajectories.entries]
    steps = np.repeat([layout.steps for layout in layouts], [layout.envs for layout in layouts])
    ends[torch.from_numpy(np.cumsum(steps) - 1)] = True
    at = ends.nonzero().flatten() + 1
    return at.diff(prepend=at.new_zeros(1)), flags


FORMAT = Format("RLinf", recognizes_rlinf, read_rlinf)
