"""What any screen asks of a trajectory, wherever it lies: columns, single rows of them, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from ostinato.durable.trees import TreePath

__all__ = [
    "Columns",
    "Reel",
    "Reels",
    "Roles",
    "array_of",
    "is_picture",
    "name_of",
    "number_in",
    "picture_of",
    "plural",
    "span",
]

_CHANNELS = (1, 3, 4)
_MOST_KEPT = 64
T = TypeVar("T")


class Columns(Protocol):
    """The fields of one trajectory of `T` steps and `B` environments."""

    @property
    def shapes(self) -> Mapping[TreePath, tuple[int, ...]]:
        """Shape of one row's value, by path."""
        ...

    def row(self, path: TreePath, step: int, env: int) -> np.ndarray:
        """Return the value of one transition, a copy; reads no more than it must.

        Raises:
            DamagedFileError: It cannot be read.
        """
        ...

    def column(self, path: TreePath, env: int) -> np.ndarray:
        """Return the values of all steps of one environment, `[T, ...]`.

        Raises:
            DamagedFileError: They cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class Roles:
    """Which fields play which part; observations by the name that they are shown under."""

    reward: TreePath | None = None
    action: TreePath | None = None
    ends: Mapping[str, TreePath] = field(default_factory=dict)
    """Flags by what they are called: `done`, `terminated`, `truncated`."""
    current: Mapping[str, TreePath] = field(default_factory=dict)
    """Observations before the action."""
    following: Mapping[str, TreePath] = field(default_factory=dict)
    """Observations after it."""
    extra: Mapping[str, TreePath] = field(default_factory=dict)
    """Numbers worth a word beside reward and action, such as priorities."""


@dataclass(frozen=True, slots=True)
class Reel:
    """One trajectory, open to be looked at; `problem` says why it cannot be, and then it has one empty step."""

    name: str
    """Such as `trajectory 7`."""
    steps: int = 1
    envs: int = 1
    columns: Columns | None = None
    roles: Roles = field(default_factory=Roles)
    words: tuple[tuple[str, Any], ...] = ()
    """Facts that hold for all steps; a value of `B` texts says one for each environment."""
    problem: str = ""
    _kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: object, read: Callable[[], T]) -> T:
        """Return what `read` returns, from the call before where there was one; what is kept is small and bounded."""
        found: T | None = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = read()
        return found


class Reels(Protocol):
    """All trajectories of one place, in order. May be used from several threads."""

    @property
    def title(self) -> str:
        """What they are, in a few words."""
        ...

    @property
    def history(self) -> str:
        """What was done with the rows so far, where known; else empty."""
        ...

    @property
    def unit(self) -> str:
        """What one of them is called: trajectory, episode, rows."""
        ...

    @property
    def ids(self) -> tuple[int, ...]:
        """The id of each."""
        ...

    def find(self, trajectory_id: int) -> int | None:
        """Return the position of an id in `ids`; None where there is none."""
        ...

    def extent(self, index: int) -> tuple[int, int]:
        """Return steps and environments as the index says them, without opening anything."""
        ...

    def open(self, index: int) -> Reel:
        """Open one, or take it from the cache. What is broken comes back with its problem: nothing is raised."""
        ...

    def returns(self, index: int) -> float | None:
        """Return the sum of rewards, the mean over environments; None where it cannot be read."""
        ...

    @property
    def priorities(self) -> np.ndarray | None:
        """Priority of each row, float `[rows]`; None where there are none."""
        ...

    def row_ages(self) -> np.ndarray:
        """Return how many rows were added after each row, int64 `[rows]`."""
        ...

    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of each field, by its name."""
        ...


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor as numpy array; dtypes that numpy has not become float32."""
    if tensor.dtype == torch.bfloat16 or (tensor.is_floating_point() and tensor.element_size() == 1):
        tensor = tensor.float()
    found: np.ndarray = tensor.detach().cpu().numpy()
    return found


def is_picture(shape: tuple[int, ...]) -> bool:
    """Tell whether a row of this shape is a picture `[H, W, C]` (or `[C, H, W]`), or several `[V, H, W, C]`."""
    if len(shape) not in {3, 4} or 0 in shape:
        return False
    return (shape[-1] in _CHANNELS or shape[-3] in _CHANNELS) and min(sorted(shape[-3:])[1:]) >= 4


def plural(unit: str) -> str:
    """Return the plural of what a place holds."""
    return "trajectories" if unit == "trajectory" else f"{unit}s"


def name_of(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path; for `.` the name of the directory that it stands for."""
    return Path(path).name or Path(path).resolve().name


def span(reels: Reels) -> str:
    """Say which ids there are, in few words."""
    return f"ids are {min(reels.ids)} to {max(reels.ids)}, {len(reels.ids):,} in all"


def number_in(text: str) -> int | None:
    """Return the number that a text writes in plain digits, below 10^18; None where it writes none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def picture_of(row: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the pictures in a row, each uint8 `[H, W, 3]`.

    `[4, H, W]` are four grey frames. Floats in [0, 1] are stretched to 0..255, all other numbers are clipped to it;
    alpha is dropped.
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
