"""The episodes of a dataset for the viewers and figures; rows are read, and frames decoded, when they are shown."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato.core.options import number_of
from ostinato.core.records import Request
from ostinato.datasets import open_dataset
from ostinato.errors import OstinatoError
from ostinato.tools.datasets import data_kind
from ostinato.viz.sources import (
    CACHE_SIZE,
    FieldRoles,
    OpenTrajectory,
    SavedBuffer,
    TrajectoryFolder,
    array_of,
    is_picture,
    name_of,
)

if TYPE_CHECKING:
    import os

    from ostinato.datasets import DatasetStorage
    from ostinato.durable.tensorfile import TreePath
    from ostinato.viz.sources import TrajectorySource

__all__ = ["DatasetSource", "open_source"]

_REWARDS, _ACTIONS = {"reward", "rewards"}, {"action", "actions"}
_ENDS = {"done": "done", "dones": "done", "terminated": "terminated", "truncated": "truncated"}
_NEXT = "next"
_MAX_TEXTS = 3
_CHUNK = 65_536
"""Rows read at a time."""


@final
class DatasetSource:
    """The episodes of a dataset. Thread-safe.

    Args:
        dataset: what `open_dataset` returned.
        path: where the dataset is; for the title.
    """

    unit = "episode"
    history = ""
    priorities = None

    def __init__(self, dataset: DatasetStorage, path: str | os.PathLike[str]) -> None:
        self.dataset = dataset
        self.ids: tuple[int, ...] = tuple(dataset.episode_numbers.tolist())
        self._lengths: list[int] = dataset.episode_lengths.tolist()
        self._starts: list[int] = (dataset.episode_lengths.cumsum(0) - dataset.episode_lengths).tolist()
        self._index_of = {number: index for index, number in enumerate(self.ids)}
        counts = f"{number_of(len(dataset), 'row')}, {number_of(len(self.ids), 'episode')}"
        self.title = f"{name_of(path)}, {counts}, {dataset.format}"
        self._positions: dict[TreePath, int] = {
            tuple(map(str, leaf.path)): position for position, leaf in enumerate(dataset.schema.leaves)
        }
        self.shapes: dict[TreePath, tuple[int, ...]] = {
            path: tuple(dataset.schema.leaves[position].shape) for path, position in self._positions.items()
        }
        """Shape of one row of each field, by path."""
        self.roles = _roles(self.shapes)
        """The meaning of the fields."""
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenTrajectory] = OrderedDict()

    def find(self, trajectory_id: int) -> int | None:
        """Return the index of an episode in `ids`; None if it is not there."""
        return self._index_of.get(trajectory_id)

    def extent(self, index: int) -> tuple[int, int]:
        """Return the number of rows of an episode, and 1."""
        return self._lengths[index], 1

    def open(self, index: int) -> OpenTrajectory:
        """Return an episode. One whose text cannot be read has `problem` set, and each call tries again."""
        with self._lock:
            found = self._open.get(index)
            if found is not None:
                self._open.move_to_end(index)
                return found
        name, first, count = f"episode {self.ids[index]}", self._starts[index], self._lengths[index]
        try:
            texts = self._texts(torch.arange(first, first + count, device="cpu"))
        except (OstinatoError, OSError) as error:
            return OpenTrajectory(name, problem=str(error))
        opened = OpenTrajectory(name, count, 1, _Episode(self, first, count), self.roles, texts)
        with self._lock:
            self._open[index] = opened
            while len(self._open) > CACHE_SIZE:
                self._open.popitem(last=False)
        return opened

    def _texts(self, rows: torch.Tensor) -> tuple[tuple[str, Any], ...]:
        """Return the different texts of each field of text, such as the task."""
        found = []
        for leaf in self.dataset.schema.objects:
            texts = list(dict.fromkeys(map(str, self.dataset.field_at(rows, leaf.path))))
            more = [f"... ({len(texts)} in all)"] if len(texts) > _MAX_TEXTS else []
            found.append((".".join(map(str, leaf.path)), " / ".join([*texts[:_MAX_TEXTS], *more])))
        return tuple(found)

    def returns(self, index: int) -> float | None:
        """Return the sum of the rewards of an episode; None if it has none, or they cannot be read."""
        if self.roles.reward is None:
            return None
        first = self._starts[index]
        try:
            rewards = self.at(self.roles.reward, torch.arange(first, first + self._lengths[index], device="cpu"))
        except (OstinatoError, OSError):
            return None
        return float(rewards.astype(np.float64).sum())

    def all_returns(self) -> list[float | None] | None:
        """Return the returns of all episodes, reading all rewards once; None if the dataset has no rewards."""
        if self.roles.reward is None:
            return None
        rows, starts = torch.arange(len(self.dataset), device="cpu"), np.array(self._starts)
        try:
            parts = [self.at(self.roles.reward, part) for part in torch.split(rows, _CHUNK)]
        except (OstinatoError, OSError):  # a part of them is readable
            return [self.returns(index) for index in range(len(self.ids))]
        rewards = np.concatenate(parts).astype(np.float64).reshape(len(rows), -1).sum(axis=1)
        return [float(value) for value in np.add.reduceat(rewards, starts)]

    def at(self, path: TreePath, rows: torch.Tensor) -> np.ndarray:
        """Return a field of rows, int64 `[n]`, as a copy `[n, *shape]`.

        Raises:
            DamagedFileError: if a file cannot be read.
        """
        return array_of(self.dataset.fetch([Request(self._positions[path], rows)])[0])

    def row_ages(self) -> np.ndarray:
        """Return the number of rows after each row."""
        return np.arange(len(self.dataset), dtype=np.int64)[::-1]

    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of each field, decoded."""
        rows, leaves = len(self.dataset), self.dataset.schema.leaves
        return {".".join(map(str, leaf.path)): rows * leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in leaves}


@final
class _Episode:
    """The fields of one episode."""

    def __init__(self, source: DatasetSource, first: int, count: int) -> None:
        self._source, self._first, self._count = source, first, count
        self.shapes = source.shapes

    def row(self, path: TreePath, step: int, env: int) -> np.ndarray:
        """Return the value of one row."""
        del env
        row: np.ndarray = self._source.at(path, torch.tensor([self._first + step], dtype=torch.int64, device="cpu"))[0]
        return np.asarray(row)

    def column(self, path: TreePath, env: int) -> np.ndarray:
        """Return the values of all rows."""
        del env
        return self._source.at(path, torch.arange(self._first, self._first + self._count, device="cpu"))


def open_source(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> TrajectorySource:
    """Open a directory of trajectories, the checkpoint of a buffer, or a dataset, for the viewers and figures.

    Args:
        path: The file or directory.
        allow_pickle: Allow unpickling trajectories. Reading a `pkl` file executes the code in it.

    Raises:
        CheckpointNotFoundError: It is none of these; the message describes what is there instead.
        CheckpointError: There is nothing to show, or trajectories are pickled and `allow_pickle` is False.
        DamagedFileError: A file is damaged; the message names it.
    """
    kind = data_kind(path)
    if kind == "trajectories":
        return TrajectoryFolder(path, allow_pickle=allow_pickle)
    return DatasetSource(open_dataset(path), path) if kind == "dataset" else SavedBuffer(path)


class _Named(NamedTuple):
    """A field, by the words of its name: `("next", "reward")` for the key `"next.reward"`, too."""

    path: TreePath
    following: bool
    words: tuple[str, ...]
    """Without `next`."""
    shape: tuple[int, ...]

    @property
    def shown(self) -> str:
        """The name that is displayed and that `--camera` takes."""
        name = ".".join(self.path)
        return name.removeprefix(f"{_NEXT}.") if self.following else name


def _named(path: TreePath, shape: tuple[int, ...]) -> _Named:
    words = tuple(word for key in path for word in key.split("."))
    following = words[0] == _NEXT and len(words) > 1
    return _Named(path, following, words[1:] if following else words, shape)


def _roles(shapes: dict[TreePath, tuple[int, ...]]) -> FieldRoles:
    """Assign roles to fields by the names that datasets use. Numbers that are no observations are shown as facts."""
    reward, action = None, None
    ends: dict[str, TreePath] = {}
    current: dict[str, TreePath] = {}
    following: dict[str, TreePath] = {}
    extra: dict[str, TreePath] = {}
    for path, shape in shapes.items():
        name = _named(path, shape)
        first, alone = name.words[0], len(name.words) == 1
        if alone and first in _REWARDS and reward is None:
            reward = path
        elif alone and first in _ACTIONS and not name.following and action is None:
            action = path
        elif alone and first in _ENDS:
            ends.setdefault(_ENDS[first], path)
        elif math.prod(shape) == 1 and not (first.startswith("obs") or is_picture(shape)):
            extra[".".join(path)] = path
        elif name.following:
            following[name.shown] = path
        else:
            current[name.shown] = path
    return FieldRoles(reward, action, ends, current, following, extra)
