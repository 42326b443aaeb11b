"""The episodes of a dataset for the viewers and figures, and `open_source` for any path."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.options import number_of
from ostinato.core.records import Request
from ostinato.datasets import open_dataset
from ostinato.errors import OstinatoError
from ostinato.tools.datasets import data_kind
from ostinato.viz.episodes import EpisodeSource, SavedBuffer
from ostinato.viz.groups import GroupFolder
from ostinato.viz.sources import TrajectoryFolder, array_of, name_of

if TYPE_CHECKING:
    import os

    from ostinato.datasets import DatasetStorage
    from ostinato.durable.tensorfile import TreePath
    from ostinato.viz.sources import TrajectorySource

__all__ = ["DatasetSource", "open_source"]

_MAX_TEXTS = 3
_CHUNK = 65_536
"""Rows read at a time."""


@final
class DatasetSource(EpisodeSource):
    """The episodes of a dataset. Thread-safe.

    Args:
        dataset: what `open_dataset` returned.
        path: where the dataset is; for the title.
    """

    def __init__(self, dataset: DatasetStorage, path: str | os.PathLike[str]) -> None:
        self.dataset = dataset
        lengths = dataset.episode_lengths
        self._starts: list[int] = (lengths.cumsum(0) - lengths).tolist()
        self._positions: dict[TreePath, int] = {
            tuple(map(str, leaf.path)): position for position, leaf in enumerate(dataset.schema.leaves)
        }
        shapes = {path: tuple(dataset.schema.leaves[position].shape) for path, position in self._positions.items()}
        counts = f"{number_of(len(dataset), 'row')}, {number_of(len(lengths), 'episode')}"
        title = f"{name_of(path)}, {counts}, {dataset.format}"
        super().__init__("episode", dataset.episode_numbers.tolist(), title, lengths.tolist(), shapes)

    def rows_of(self, index: int) -> torch.Tensor:
        """Return the rows of an episode."""
        return torch.arange(self._starts[index], self._starts[index] + self.lengths[index], device="cpu")

    def texts(self, rows: torch.Tensor) -> tuple[tuple[str, Any], ...]:
        """Return the different texts of each field of text, such as the task."""
        found = []
        for leaf in self.dataset.schema.objects:
            texts = list(dict.fromkeys(map(str, self.dataset.field_at(rows, leaf.path))))
            more = [f"... ({len(texts)} in all)"] if len(texts) > _MAX_TEXTS else []
            found.append((".".join(map(str, leaf.path)), " / ".join([*texts[:_MAX_TEXTS], *more])))
        return tuple(found)

    def all_returns(self) -> list[float | None]:
        """Return `returns` of all episodes, reading all rewards once."""
        if self.roles.reward is None:
            return [None] * len(self.ids)
        rows, starts = torch.arange(len(self.dataset), device="cpu"), np.array(self._starts)
        try:
            parts = [self.at(self.roles.reward, part) for part in torch.split(rows, _CHUNK)]
        except (OstinatoError, OSError):  # a part of them is readable
            return super().all_returns()
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


def open_source(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> TrajectorySource:
    """Open a directory of trajectories, the checkpoint of a buffer, groups, or a dataset, for the viewers and figures.

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
    if kind == "groups":
        return GroupFolder(path)
    return DatasetSource(open_dataset(path), path) if kind == "dataset" else SavedBuffer(path)
