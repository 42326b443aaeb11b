"""What the viewers show: the trajectories of a source, and the source that is a directory of trajectories."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import numpy as np
import torch

from ostinato.core.options import number_of
from ostinato.durable.tensorfile import flatten, show
from ostinato.errors import CheckpointError, OstinatoError
from ostinato.trajectories.gather import RowReader
from ostinato.trajectories.index import Entry, read_index
from ostinato.trajectories.trajectory_list import DrawnTransitions

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from ostinato.durable.tensorfile import Header, TreePath
    from ostinato.trajectories.index import TrajectoryData

__all__ = [
    "FieldRoles",
    "OpenTrajectory",
    "TrajectoryFolder",
    "TrajectorySource",
    "array_of",
    "id_range",
    "is_picture",
    "name_of",
    "parse_number",
    "picture_of",
]

_CHANNELS = (1, 3, 4)
_MAX_CACHED = 64
_CACHE_SIZE = 5
"""Number of opened trajectories to cache: their headers and short columns, never images."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FieldRoles:
    """The meaning of fields; observations are listed by the name that is displayed."""

    reward: TreePath | None = None
    action: TreePath | None = None
    ends: Mapping[str, TreePath] = field(default_factory=dict)
    """End flags by name: `done`, `terminated`, `truncated`."""
    current: Mapping[str, TreePath] = field(default_factory=dict)
    """Observations before the action."""
    following: Mapping[str, TreePath] = field(default_factory=dict)
    """Observations after the action."""
    extra: Mapping[str, TreePath] = field(default_factory=dict)
    """Further values to display for each step, such as priorities."""
    titles: tuple[str, str] = ("current observation", "next observation")
    """Above `current` and `following`."""


def _no_field(path: TreePath, steps: np.ndarray, env: int) -> NoReturn:
    del steps, env
    raise KeyError(path)


@dataclass(frozen=True, slots=True)
class OpenTrajectory:
    """One opened trajectory. If it cannot be read, `problem` says why, and it has one step without fields."""

    name: str
    """For example `trajectory 7`."""
    steps: int = 1
    envs: int = 1
    shapes: Mapping[TreePath, tuple[int, ...]] = field(default_factory=dict)
    """Shape of one transition of each field, by path."""
    read: Callable[[TreePath, np.ndarray, int], np.ndarray] = _no_field
    """Returns a field at some steps, int64 `[n]`, of one environment, as a copy `[n, ...]`. Reads only these where the
    format allows it; raises `DamagedFileError` if the file cannot be read."""
    roles: FieldRoles = field(default_factory=FieldRoles)
    facts: tuple[tuple[str, Any], ...] = ()
    """Names and values that hold for all steps; a list of `B` strings has one value per environment."""
    problem: str = ""
    _cache: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def row(self, path: TreePath, step: int, env: int) -> np.ndarray:
        """Return the value of one transition; see `read`."""
        return np.asarray(self.read(path, np.array([step]), env)[0])

    def column(self, path: TreePath, env: int) -> np.ndarray:
        """Return the values of all steps of one environment, `[T, ...]`; see `read`."""
        return self.read(path, np.arange(self.steps), env)

    def cached(self, key: object, read: Callable[[], T]) -> T:
        """Return the result of `read`, cached under `key`. The cache holds at most 64 small values."""
        found: T | None = self._cache.get(key)
        if found is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            found = self._cache[key] = read()
        return found


class TrajectorySource(ABC):
    """The trajectories of one path, in order. Opens them on demand. Thread-safe.

    Args:
        unit: What one item is called: trajectory, episode or block.
        ids: The id of each trajectory.
        title: Short description of the source.
    """

    history = ""
    """How many rows were sampled so far, if known; otherwise empty."""
    priorities: np.ndarray | None = None
    """Priority of each row, float `[rows]`; None if there are no priorities."""

    def __init__(self, unit: str, ids: Iterable[int], title: str) -> None:
        self.unit, self.ids, self.title = unit, tuple(ids), title
        self._index_of = {number: index for index, number in enumerate(self.ids)}
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenTrajectory] = OrderedDict()

    def find(self, trajectory_id: int) -> int | None:
        """Return the index of an id in `ids`; None if it is not there."""
        return self._index_of.get(trajectory_id)

    def open(self, index: int) -> OpenTrajectory:
        """Open a trajectory or return it from the cache. A damaged one has `problem` set; nothing is raised.

        A damaged one is not cached, so each call tries again.
        """
        with self._lock:
            found = self._open.get(index)
            if found is not None:
                self._open.move_to_end(index)
                return found
        found = self._read(index)
        if not found.problem:
            with self._lock:
                self._open[index] = found
                while len(self._open) > _CACHE_SIZE:
                    self._open.popitem(last=False)
        return found

    def returns(self, index: int) -> float | None:
        """Return the sum of rewards, averaged over environments; None if it cannot be read. Caches nothing."""
        trajectory = self._read(index)
        reward = trajectory.roles.reward
        if reward is None:
            return None
        try:
            sums = [trajectory.column(reward, env).astype(np.float64).sum() for env in range(trajectory.envs)]
        except (OstinatoError, OSError):
            return None
        return float(np.mean(sums))

    def all_returns(self) -> list[float | None]:
        """Return `returns` of all trajectories."""
        return [self.returns(index) for index in range(len(self.ids))]

    @abstractmethod
    def _read(self, index: int) -> OpenTrajectory:
        """Open a trajectory. A damaged one has `problem` set; nothing is raised."""

    @abstractmethod
    def extent(self, index: int) -> tuple[int, int]:
        """Return the numbers of steps and environments from the index, without opening the trajectory."""

    @abstractmethod
    def row_ages(self) -> np.ndarray:
        """Return the number of rows that were added after each row, int64 `[rows]`."""

    @abstractmethod
    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of each field, by name."""


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array; dtypes that NumPy lacks are converted to float32."""
    if tensor.dtype == torch.bfloat16 or (tensor.is_floating_point() and tensor.element_size() == 1):
        tensor = tensor.float()
    found: np.ndarray = tensor.detach().cpu().numpy()
    return found


def is_picture(shape: tuple[int, ...]) -> bool:
    """Return whether a transition of this shape is an image `[H, W, C]` or `[C, H, W]`, or several `[V, H, W, C]`."""
    if len(shape) not in {3, 4} or 0 in shape:
        return False
    return (shape[-1] in _CHANNELS or shape[-3] in _CHANNELS) and min(sorted(shape[-3:])[1:]) >= 4


def name_of(path: str | os.PathLike[str]) -> str:
    """Return the last component of a path; for `.` the name of the current directory."""
    return Path(path).name or Path(path).resolve().name


def id_range(source: TrajectorySource) -> str:
    """Describe the range of ids."""
    return f"ids are {min(source.ids)} to {max(source.ids)}, {len(source.ids):,} in all"


def parse_number(text: str) -> int | None:
    """Parse a non-negative decimal integer below 10^18; return None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def picture_of(row: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the images in a transition, each uint8 `[H, W, 3]`.

    `[4, H, W]` is read as four grey frames. Floats in [0, 1] are scaled to 0..255; all other values are clipped to that
    range. The alpha channel is dropped.
    """
    views = row if row.ndim == 4 else row[None]
    if views.shape[-1] not in _CHANNELS:
        views = views.reshape(-1, *views.shape[-2:], 1) if views.shape[-3] == 4 else np.moveaxis(views, -3, -1)
    if views.dtype.kind == "f":
        views = np.nan_to_num(views)
        views = views * 255 if views.size and views.min() >= 0 and views.max() <= 1 else views
    elif views.dtype.kind == "b":
        views = views * 255
    views = np.clip(views, 0, 255).astype(np.uint8)[..., :3]
    if views.shape[-1] == 1:
        views = np.repeat(views, 3, axis=-1)
    return tuple(np.ascontiguousarray(view) for view in views)


_ENDS = {"done": "dones", "terminated": "terminations", "truncated": "truncations"}


@final
class TrajectoryFolder(TrajectorySource):
    """A directory that `TrajectoryReplayBuffer` or RLinf wrote. Opens trajectories on demand. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        """Read the index; no trajectory is opened.

        Args:
            path: The directory.
            allow_pickle: Allow unpickling. Reading a `pkl` file executes the code in it.

        Raises:
            CheckpointNotFoundError: The directory has no trajectories.
            CheckpointError: The trajectories are pickled and `allow_pickle` is False, or the index is empty.
            DamagedFileError: The index is damaged.
        """
        self._index = read_index(Path(path).absolute(), strict=False)
        self._index.check_pickle(allow_pickle=allow_pickle)
        if not self._index.infos:
            msg = f"the index of {path} has no trajectories: there is nothing to show"
            raise CheckpointError(msg)
        self._pickle = allow_pickle
        count = number_of(len(self._index.infos), "trajectory")
        super().__init__(
            "trajectory", self._index.infos, f"{name_of(path)}, {count} as {self._index.head.trajectory_format}"
        )

    def extent(self, index: int) -> tuple[int, int]:
        """Return the numbers of steps and environments from the index."""
        shape = self._index.infos[self.ids[index]].shape
        return shape[0], shape[1]

    def _read(self, index: int) -> OpenTrajectory:
        number = self.ids[index]
        name = f"trajectory {number}"
        try:
            entry, header = self._index.inspect(number, allow_pickle=self._pickle)
        except (OstinatoError, OSError) as error:
            return OpenTrajectory(name, problem=str(error))
        layout = entry.layout

        def read(path: TreePath, steps: np.ndarray, env: int) -> np.ndarray:
            drawn = DrawnTransitions([entry], np.zeros_like(steps), steps * layout.envs + env)
            reader = RowReader(1, self._read_whole)  # the file is closed with it
            found = reader.read(drawn, {path: layout.signature[path]})
            return array_of(flatten(found, where="trajectory")[path])

        shapes = {path: shape for path, (_, shape) in layout.signature.items()}
        texts = (("weights", entry.info.model_weights_id), *_texts(header))
        return OpenTrajectory(name, layout.steps, layout.envs, shapes, read, _roles(shapes), texts)

    def _read_whole(self, entry: Entry) -> TrajectoryData:
        entry.data = entry.read(allow_pickle=self._pickle)
        return entry.data

    def row_ages(self) -> np.ndarray:
        """Return the number of transitions that were added after each transition, int64 `[transitions]`."""
        counts = np.array([info.num_samples for info in self._index.infos.values()])
        return np.repeat(counts.sum() - np.cumsum(counts), counts)

    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of each field over all trajectories that can be opened."""
        found: Counter[str] = Counter()
        for _, entry in self._index.check_files(self.ids, allow_pickle=self._pickle):
            if isinstance(entry, Entry):
                layout = entry.layout
                found.update({show(f.path): n for f, n in zip(layout.fields, layout.field_bytes, strict=True)})
        return dict(found)


def _roles(shapes: Mapping[TreePath, Any]) -> FieldRoles:
    def under(root: str) -> dict[str, TreePath]:
        return {show(path[1:]): path for path in shapes if path[0] == root and len(path) > 1}

    def root(name: str) -> TreePath | None:
        return (name,) if (name,) in shapes else None

    return FieldRoles(
        reward=root("rewards"),
        action=root("actions"),
        ends={word: (name,) for word, name in _ENDS.items() if (name,) in shapes},
        current=under("curr_obs"),
        following=under("next_obs"),
        extra={"intervention": ("intervene_flags",)} if ("intervene_flags",) in shapes else {},
    )


def _texts(header: Header) -> tuple[tuple[str, Any], ...]:
    """Return the strings in a file, such as task descriptions."""
    names = {"model_weights_id", "max_episode_length"}
    return tuple(
        (path[-1], value)
        for path, value in header.plain.items()
        if path[-1] not in names and (isinstance(value, str) or (isinstance(value, list) and value))
    )
