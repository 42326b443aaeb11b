"""How a buffer learns where episodes begin and end: which fields say so, or fixed tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ostinato.core.kinds import show_path
from ostinato.errors import KeyMissingError, OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.rows import Path

__all__ = ["Episodes", "Key", "Marks", "as_flags", "as_ids", "as_path", "merge_episodes"]

Key: TypeAlias = "str | tuple[str, ...]"


class Marks(NamedTuple):
    """What rows say of episodes, on the CPU, one entry per row; None where there is nothing to say."""

    ends: Tensor | None = None
    """bool: the row is the last one of its episode."""
    trajectories: Tensor | None = None
    """int64: the episode that the row belongs to."""
    mask: Tensor | None = None
    """bool: False for a row of no episode, which is never drawn."""


@dataclass(frozen=True, eq=False)
class Episodes:
    """Where episodes begin and end: what a buffer reads off its rows as they are written.

    A row ends its episode if any of the end keys holds True in it. With a trajectory key rows of one id are one
    episode, however they are interleaved with others; an end closes it, so that the same id may come again. Without
    one, the rows of a storage (of each lane, with `ndim=2`) follow each other. The write cursor ends an episode as
    well: what has not been written yet is in no window.

    `Episodes()`, without arguments, takes the flags that rows have: `done`, `terminated` and `truncated` under `next`,
    or where there are none, at the root.

    Args:
        end_key: field of one bool per row, or several of them (a list; an empty one stands for rows without ends).
        traj_key: field of one integer per row; with `optional` a list: the first that rows have counts.
        mask_key: field of one bool per row: rows with False belong to no episode, and are never drawn.
        ends: bool `[rows]`, instead of an end key, for a storage whose rows stay as they are.
        trajectories: integers `[rows]`, instead of a trajectory key, likewise.
        optional: fields that the rows do not have are left out, as long as one of end and trajectory key is there.

    Raises:
        OptionError: if tensors and keys are given together.

    Example:
        >>> from ostinato import Episodes
        >>> Episodes(end_key=["terminated", "truncated"])
        Episodes(end_key=['terminated', 'truncated'])
    """

    end_key: Key | Sequence[Key] | None = None
    traj_key: Key | Sequence[Key] | None = None
    mask_key: Key | None = None
    ends: Tensor | None = None
    trajectories: Tensor | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        """Refuse what excludes each other."""
        fixed = [name for name in ("ends", "trajectories") if getattr(self, name) is not None]
        keys = [name for name in ("end_key", "traj_key", "mask_key") if getattr(self, name) is not None]
        if len(fixed) > 1 or (fixed and keys):
            msg = f"{' and '.join([*fixed, *keys])} exclude each other: give tensors or keys, not both"
            raise OptionError(msg)

    def __repr__(self) -> str:
        """What was given."""
        names = ("end_key", "traj_key", "mask_key")
        given = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None]
        given += [f"{name}=tensor" for name in ("ends", "trajectories") if getattr(self, name) is not None]
        return f"Episodes({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        """Compare what is read, tensors by identity."""
        return isinstance(other, Episodes) and self._identity() == other._identity()

    def __hash__(self) -> int:
        """Hash what is read."""
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        keys = (self.end_key is None, frozenset(self.end_paths), self.traj_path, self.mask_path)
        return (*keys, id(self.ends), id(self.trajectories))

    @property
    def end_paths(self) -> tuple[Path, ...]:
        """The end keys as paths."""
        if self.end_key is None:
            return ()
        keys = self.end_key if isinstance(self.end_key, list) else [self.end_key]
        return tuple(as_path(key) for key in keys)

    @property
    def traj_path(self) -> Path | None:
        """The trajectory key as a path; the first of several."""
        return None if self.traj_key is None else as_path(self._traj_keys[0])

    @property
    def _traj_keys(self) -> list[Any]:
        return self.traj_key if isinstance(self.traj_key, list) else [self.traj_key]

    @property
    def mask_path(self) -> Path | None:
        """The mask key as a path."""
        return None if self.mask_key is None else as_path(self.mask_key)

    @property
    def fixed(self) -> bool:
        """Whether tensors say it all."""
        return self.ends is not None or self.trajectories is not None

    @property
    def soft(self) -> bool:
        """Whether nothing, or nothing binding, was said of where episodes end."""
        by_usual_names = self.end_key is None and (self.traj_key is None or self.optional)
        return by_usual_names and self.mask_key is None and not self.fixed

    @property
    def paths(self) -> tuple[Path, ...]:
        """All fields that are read."""
        return (*self.end_paths, *(path for path in (self.traj_path, self.mask_path) if path is not None))

    def resolve(self, known: set[Path]) -> Episodes:
        """Return the boundaries for rows that have the fields `known`.

        Raises:
            KeyMissingError: naming the fields that rows lack.
        """
        if self.fixed:
            return self
        trajs = [as_path(key) for key in self._traj_keys if key is not None and as_path(key) in known]
        if self.end_key is None and (self.traj_key is None or self.optional):
            ends = _usual_flags(known) if trajs else _flags(known)
        else:
            ends = [as_path(path) for path in self.end_paths if path in known]
        traj = trajs[0] if trajs else None
        missing = [path for path in self.paths if path not in known]
        if not missing or (self.optional and (ends or traj) and self.mask_path not in missing):
            return replace(self, end_key=list(ends), traj_key=traj, optional=False)
        names = ", ".join(show_path(path) for path in missing)
        msg = (
            f"rows have no field {names} to tell where episodes end; they have "
            f"{', '.join(sorted(show_path(path) for path in known))}: name the field that does (end_key, traj_key, "
            "done_key)"
        )
        raise KeyMissingError(msg)


def merge_episodes(given: Sequence[Episodes | None]) -> Episodes | None:
    """Return what a buffer, its unit and its sampler say of episodes, the first binding word; None if nobody asks.

    Raises:
        OptionError: if two of them contradict each other.
    """
    said = [episodes for episodes in given if episodes is not None]
    binding = [episodes for episodes in said if not episodes.soft]
    for other in binding[1:]:
        if other != binding[0]:
            msg = f"a buffer has one kind of episodes, got {binding[0]!r} and {other!r}: give both the same keys"
            raise OptionError(msg)
    optional = [episodes for episodes in said if episodes.optional]
    return next(iter(binding or optional or said), None)


_FLAGS = ("done", "terminated", "truncated")


def _usual_flags(known: set[Path]) -> list[Key]:
    for level in (("next",), ()):
        found: list[Key] = [(*level, name) for name in _FLAGS if (*level, name) in known]
        if found:
            return found
    return []


def _flags(known: set[Path]) -> list[Key]:
    """Return the flags that end an episode, by their usual names.

    Raises:
        KeyMissingError: if there are none.
    """
    found = _usual_flags(known)
    if found:
        return found
    msg = (
        f"rows have no field done, terminated or truncated, under 'next' or at the root, to tell where episodes end; "
        f"they have {', '.join(sorted(show_path(path) for path in known))}: name the field that does, as in "
        "episodes=Episodes(end_key='last')"
    )
    raise KeyMissingError(msg)


def as_path(key: Any) -> tuple[str, ...]:
    """Return a key as a path: a text, or a tuple or list of texts.

    Raises:
        OptionError: for anything else.
    """
    path = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (tuple, list)) else ()
    if not path or not all(isinstance(part, str) for part in path):
        msg = f"a key is a text, or a tuple of texts for a nested field, got {key!r}"
        raise OptionError(msg)
    return path


def as_flags(values: Tensor, path: Path, rows: int) -> Tensor:
    """Return one bool per row, on the CPU.

    Raises:
        SchemaError: if a row has several values.
    """
    return _one_each(values, path, rows).to("cpu", torch.bool)


def as_ids(values: Tensor, path: Path, rows: int) -> Tensor:
    """Return one int64 per row, on the CPU.

    Raises:
        SchemaError: if a row has several values, or they are no integers.
    """
    ids = _one_each(values, path, rows).cpu()
    floats = ids.is_floating_point()
    if ids.is_complex() or (floats and not bool(((ids.abs() < 2.0**63) & (ids == ids.floor())).all())):
        msg = f"{show_path(path)} must hold integers (the episode of each row), got {values.dtype}"
        raise SchemaError(msg)
    return ids.to(torch.int64)


def _one_each(values: Tensor, path: Path, rows: int) -> Tensor:
    if values.numel() != rows:
        msg = f"{show_path(path)} must hold one value per row ({rows} rows), got shape {list(values.shape)}"
        raise SchemaError(msg)
    return values.reshape(rows)
