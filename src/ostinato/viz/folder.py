"""Trajectories of a directory as reels: opened one by one, the last five stay open; pictures are read when shown."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato.durable.files import open_file
from ostinato.durable.headers import Placed
from ostinato.durable.positioned_reads import read_strided, read_tensor
from ostinato.durable.tensorfile import check_format, read_header, read_tree
from ostinato.durable.trees import flatten, show
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, OstinatoError
from ostinato.trajectories.index import layout_of, read_index
from ostinato.viz.reel import Reel, Roles, array_of, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ostinato.durable.headers import Header
    from ostinato.durable.trees import TreePath
    from ostinato.trajectories.layout import Layout

__all__ = ["CACHE_SIZE", "TrajectoryFolder"]

CACHE_SIZE = 5
"""Trajectories held open: their headers and short columns, never their pictures."""
_ENDS = {"done": "dones", "terminated": "terminations", "truncated": "truncations"}


@final
class TrajectoryFolder:
    """A directory that `TrajectoryReplayBuffer` or RLinf wrote, to be looked at. May be used from several threads."""

    unit = "trajectory"
    history = ""
    priorities = None

    def __init__(self, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        """Read the index; no trajectory is opened.

        Args:
            path: The directory.
            allow_pickle: Consent to unpickle: reading a `pkl` file runs whatever code it brings.

        Raises:
            CheckpointNotFoundError: No trajectories are there.
            CheckpointError: They are pickles without consent.
            DamagedFileError: The index is damaged.
        """
        self._listing = read_index(Path(path).absolute(), strict=False)
        try:
            self._format = check_format(self._listing.head.trajectory_format, allow_pickle=allow_pickle)
        except OptionError as error:
            msg = f"{path}: {error}"
            raise CheckpointError(msg) from error
        if not self._listing.infos:
            msg = f"{path} lists no trajectory: there is nothing to show"
            raise CheckpointError(msg)
        self._pickle = allow_pickle
        self.ids = tuple(self._listing.infos)
        what = "trajectory" if len(self.ids) == 1 else "trajectories"
        self.title = f"{name_of(path)}, {len(self.ids):,} {what} as {self._format}"
        self._places = {number: index for index, number in enumerate(self.ids)}
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Reel] = OrderedDict()

    def find(self, trajectory_id: int) -> int | None:
        """Return the position of an id in `ids`; None where there is none."""
        return self._places.get(trajectory_id)

    def extent(self, index: int) -> tuple[int, int]:
        """Return steps and environments as the index says them."""
        shape = self._listing.infos[self.ids[index]].shape
        return shape[0], shape[1]

    def open(self, index: int) -> Reel:
        """Open a trajectory, or take it from the cache. A broken one is not kept: the next call looks once more."""
        with self._lock:
            reel = self._open.get(index)
            if reel is not None:
                self._open.move_to_end(index)
                return reel
        reel = self._read(index)
        if not reel.problem:
            with self._lock:
                self._open[index] = reel
                while len(self._open) > CACHE_SIZE:
                    self._open.popitem(last=False)
        return reel

    def _read(self, index: int) -> Reel:
        number = self.ids[index]
        facts = self._listing.infos[number]
        path = self._listing.directory / facts.file_name(self._format)
        name = f"trajectory {number}"
        try:
            columns = _FileColumns(path, self._format, allow_pickle=self._pickle)
            if columns.layout.shape[:2] != facts.shape[:2]:
                msg = f"{path} holds {list(columns.layout.shape[:2])}, the index says {list(facts.shape[:2])} [T, B]"
                raise DamagedFileError(msg)
        except (OstinatoError, OSError) as error:
            return Reel(name, problem=str(error))
        words = (("weights", facts.model_weights_id), *columns.words)
        return Reel(name, columns.layout.steps, columns.layout.envs, columns, _roles(columns.shapes), words)

    def returns(self, index: int) -> float | None:
        """Return the sum of rewards, the mean over environments; reads the rewards alone where the index knows them."""
        number = self.ids[index]
        known = self._listing.entries.get(number)
        try:
            if known is None or known.file is None or known.file.strides or -1 in known.file.offsets:
                return _mean_return(self.open(index))
            path = self._listing.directory / known.info.file_name(self._format)
            if path.stat().st_size != known.file.nbytes:
                return None
            for field, offset in zip(known.layout.fields, known.file.offsets, strict=True):
                if field.path == ("rewards",):
                    placed = Placed(field.path, field.dtype, field.shape, offset)
                    return float(array_of(_read(path, placed)).astype(np.float64).sum() / known.layout.envs)
        except (OstinatoError, OSError):
            return None
        return None

    def row_ages(self) -> np.ndarray:
        """Return how many transitions were added after each trajectory's, once for each of them."""
        counts = np.array([fact.num_samples for fact in self._listing.infos.values()])
        return np.repeat(counts.sum() - np.cumsum(counts), counts)

    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of each field over all trajectories that can be opened."""
        found: Counter[str] = Counter()
        for index, number in enumerate(self.ids):
            known = self._listing.entries.get(number)
            columns = None if known is not None else self.open(index).columns
            layout = columns.layout if isinstance(columns, _FileColumns) else None if known is None else known.layout
            if layout is not None:
                found.update({show(f.path): n for f, n in zip(layout.fields, layout.field_bytes, strict=True)})
        return dict(found)


def _mean_return(reel: Reel) -> float | None:
    if reel.columns is None or reel.roles.reward is None:
        return None
    sums = [reel.columns.column(reel.roles.reward, env).astype(np.float64).sum() for env in range(reel.envs)]
    return float(np.mean(sums))


def _roles(shapes: Mapping[TreePath, Any]) -> Roles:
    def under(root: str) -> dict[str, TreePath]:
        return {show(path[1:]): path for path in shapes if path[0] == root and len(path) > 1}

    def root(name: str) -> TreePath | None:
        return (name,) if (name,) in shapes else None

    return Roles(
        reward=root("rewards"),
        action=root("actions"),
        ends={word: (name,) for word, name in _ENDS.items() if (name,) in shapes},
        current=under("curr_obs"),
        following=under("next_obs"),
        extra={"intervention": ("intervene_flags",)} if ("intervene_flags",) in shapes else {},
    )


def _read(path: Path, placed: Placed) -> Tensor:
    """Read one tensor of a file, or one row where `placed` says so."""
    fd = open_file(path)
    try:
        return read_tensor(fd, placed, path) if placed.strides is None else read_strided(fd, placed, path)
    finally:
        os.close(fd)


@final
class _FileColumns:
    """The fields of one file. Pickles, which have no places, are held whole."""

    def __init__(self, path: Path, format_name: str, *, allow_pickle: bool) -> None:
        self._path = path
        header = read_header(path, format_name, allow_pickle=allow_pickle)
        self.layout: Layout = layout_of(header, path)
        self._tree: dict[TreePath, Any] = {}
        if format_name == "pkl":
            self._tree = flatten(read_tree(path, format_name, allow_pickle=allow_pickle), where=path)
        placed = {item.path: item for item in header.tensors}
        self._placed = [placed[field.path] for field in self.layout.fields]
        self._number = {field.path: number for number, field in enumerate(self.layout.fields)}
        self._whole: dict[TreePath, Tensor] = {}
        self.shapes = {field.path: field.row_shape for field in self.layout.fields}
        self.words = _words(header)

    def row(self, path: TreePath, step: int, env: int) -> np.ndarray:
        """Return the value of one transition."""
        number = self._number[path]
        place = int(self.layout.rows(np.array([step * self.layout.envs + env]))[0, number])
        whole = self._tree.get(path, self._whole.get(path))
        if whole is not None:
            return array_of(whole.flatten(0, 1)[place]).copy()
        placed, row_bytes = self._placed[number], self.layout.fields[number].row_bytes
        if placed.strides is None:
            offset, strides = placed.offset + place * row_bytes, None
        else:
            first, second = divmod(place, self.layout.envs)
            offset = placed.offset + first * placed.strides[0] + second * placed.strides[1]
            strides = placed.strides[2:]
        return array_of(_read(self._path, Placed(path, placed.dtype, placed.shape[2:], offset, strides)))

    def column(self, path: TreePath, env: int) -> np.ndarray:
        """Return the values of all steps of one environment; the tensor stays in memory with the reel."""
        number = self._number[path]
        whole = self._tree.get(path, self._whole.get(path))
        if whole is None:
            whole = self._whole[path] = _read(self._path, self._placed[number])
        transitions = np.arange(self.layout.steps) * self.layout.envs + env
        return array_of(whole.flatten(0, 1)[self.layout.rows(transitions)[:, number]])


def _words(header: Header) -> tuple[tuple[str, Any], ...]:
    """Return the texts of a file, such as what the robot was told to do."""
    names = {"model_weights_id", "max_episode_length"}
    return tuple(
        (path[-1], value)
        for path, value in header.plain.items()
        if path[-1] not in names and (isinstance(value, str) or (isinstance(value, list) and value))
    )
