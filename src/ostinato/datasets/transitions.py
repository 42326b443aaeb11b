"""Transitions of a dataset as reinforcement learning formats hold them: read by episode, and checked."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.kinds import show_path
from ostinato.errors import SchemaError

if TYPE_CHECKING:
    from ostinato.core.rows import Leaf
    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.dataset import DatasetStorage

_NUMBERED = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Fields that LeRobot adds to every row."""

Array = np.ndarray[Any, Any]


def with_nested_names(dataset: DatasetStorage, *, infos: bool) -> DatasetStorage:
    """Return a dataset with LeRobot's flat names nested: `observation.state` becomes `("observation", "state")`.

    A dataset with the nested names of this library is returned as it is.

    Args:
        dataset: the rows.
        infos: whether the numbers that LeRobot adds to rows become infos.
    """
    paths = [leaf.path for leaf in dataset.schema.leaves] + [leaf.path for leaf in dataset.schema.objects]
    names = [str(path[0]) for path in paths if len(path) == 1]
    if not any(name.startswith("observation.") for name in names):
        return dataset
    fields: dict[FieldPath, FieldPath] = {}
    for path in paths:
        top, _, rest = str(path[0]).partition(".")
        nested = len(path) == 1 and top in {"observation", "next"} and rest
        new: FieldPath = (top, rest) if nested else path
        if infos and len(path) == 1 and path[0] in _NUMBERED:
            new = ("info", path[0])
        if path == ("done",) and marks_ends(dataset):
            continue  # every format has the ends of episodes
        fields[new] = path
    return dataset.select(fields=fields)


def read_rows(dataset: DatasetStorage, path: FieldPath, first: int, last: int) -> Array:
    """Return a field of the rows `[first, last)`, texts as objects."""
    found = dataset.field_at(torch.arange(first, last, device="cpu"), path)
    values: Array = np.asarray(found.numpy() if isinstance(found, torch.Tensor) else found)
    return values


def spans_of(dataset: DatasetStorage) -> list[tuple[int, int]]:
    """Return the first row of each episode and the row after its last one."""
    return list(itertools.pairwise([0, *dataset.episode_lengths.cumsum(0).tolist()]))


def marks_ends(dataset: DatasetStorage) -> bool:
    """Whether the field `done` says no more than where episodes end, as readers of formats without flags add it."""
    found: Any = dataset.field_at(torch.arange(len(dataset), device="cpu"), ("done",))
    ends: Any = dataset.episode_ends
    return torch.equal(found.reshape(-1).bool(), ends)


@final
class Transitions:
    """Observations, actions, rewards and ends of the episodes of a dataset.

    Args:
        dataset: the rows.
        name: of the format, for messages.
        reward: whether the format needs rewards.
        text: whether it has a place for text.

    Raises:
        SchemaError: if rows lack an observation, an action, or a reward that is needed.
    """

    def __init__(self, dataset: DatasetStorage, name: str, *, reward: bool = True, text: bool = True) -> None:
        self.dataset, self.name = dataset, name
        self.leaves = {leaf.path: leaf for leaf in dataset.schema.leaves}
        self.observations = self.below("observation")
        """Leaves of the observation."""
        self.actions = self.below("action")
        """Leaves of the action."""
        needed = {"observation": self.observations, "action": self.actions}
        if reward:
            needed["next', 'reward"] = self.below("next", "reward")
        for field, found in needed.items():
            if not found:
                known = ", ".join(map(show_path, self.leaves))
                msg = f"{name} needs the field '{field}', rows have {known}: name it with fields="
                raise SchemaError(msg)
        self.texts = [leaf.path for leaf in dataset.schema.objects]
        """Fields of text."""
        if self.texts and not text:
            msg = (
                f"{name} is written without text, and {show_path(self.texts[0])} holds text: leave it out with fields="
            )
            raise SchemaError(msg)
        self.check_arrays()
        self._flags()

    def check_arrays(self) -> None:
        """Check that NumPy has the dtypes."""
        for path, leaf in self.leaves.items():
            if leaf.dtype is torch.bfloat16 or leaf.dtype.is_complex or str(leaf.dtype).startswith("torch.float8"):
                msg = f"{self.name} cannot hold {show_path(path)}, which is {leaf.dtype}: leave it out with fields="
                raise SchemaError(msg)

    def below(self, *path: str) -> list[Leaf]:
        """Return the leaves at a path and below it."""
        return [leaf for leaf in self.leaves.values() if leaf.path[: len(path)] == path]

    def _flags(self) -> None:
        """Read the flags of all rows; every episode ends, by a cut if nothing else."""
        dataset, rows = self.dataset, len(self.dataset)
        places: dict[str, FieldPath] = {name: ("next", name) for name in ("terminated", "truncated", "done")}
        found = {name: path for name, path in places.items() if path in self.leaves}
        if not found:
            found = {name: (name,) for name in places if (name,) in self.leaves}
        flags: dict[str, Array] = {
            name: np.asarray(self.whole(path).reshape(rows, -1).any(1)) for name, path in found.items()
        }
        self.flag_paths = set(found.values())
        """Fields that are flags."""
        ends: Any = dataset.episode_ends
        self.terminated: Array = flags.get("terminated", np.zeros(rows, bool))
        """bool `[rows]`."""
        done = flags.get("done")
        if "terminated" not in flags and "truncated" not in flags and done is not None:
            warnings.warn(
                f"rows have done, and neither terminated nor truncated: {self.name} gets done as terminated",
                UserWarning,
                stacklevel=2,
            )
            self.terminated = done
        self.truncated: Array = flags.get("truncated", np.zeros(rows, bool)).copy()
        """bool `[rows]`; True as well for a last row that is not terminated."""
        self.truncated |= ends.numpy() & ~self.terminated
        early = np.flatnonzero((self.terminated | self.truncated) & ~ends.numpy())
        if early.shape[0]:
            msg = (
                f"row {early[0]} ends its episode by its flags, and is not the last row of the episode: "
                f"{self.name} would divide it there"
            )
            raise SchemaError(msg)

    def whole(self, path: FieldPath) -> Array:
        """Return a field of all rows."""
        return self.rows(path, 0, len(self.dataset))

    def rows(self, path: FieldPath, first: int, last: int) -> Array:
        """Return a field of the rows `[first, last)`."""
        return read_rows(self.dataset, path, first, last)

    def spans(self) -> list[tuple[int, int]]:
        """Return the first row of each episode and the row after its last one."""
        return spans_of(self.dataset)

    def with_last(self, path: FieldPath, episode: int, first: int, last: int) -> Array:
        """Return a field of an episode and its value after the last step, `[steps + 1, *shape]`.

        Raises:
            SchemaError: if the next value of a step is not the value of the next step.
        """
        now = self.rows(path, first, last)
        after_path = ("next", *path)
        if after_path not in self.leaves:
            return np.concatenate([now, now[-1:]])
        after = self.rows(after_path, first, last)
        same = (after[:-1] == now[1:]) | ((after[:-1] != after[:-1]) & (now[1:] != now[1:]))
        if not same.all():
            step = int(np.flatnonzero(~same.reshape(len(same), -1).all(1))[0])
            msg = (
                f"episode {episode}, step {step}: {show_path(after_path)} is not {show_path(path)} of step {step + 1}, "
                f"and {self.name} holds each observation once: leave out the next observation, or divide the episode"
            )
            raise SchemaError(msg)
        return np.concatenate([now, after[-1:]])
