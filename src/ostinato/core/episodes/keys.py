"""Where episodes begin and end: the fields, or fixed tensors, that a buffer reads it from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ostinato.core.kinds import show_path
from ostinato.errors import EpisodesError, KeyMissingError, OptionError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.rows import Path

Key: TypeAlias = "str | tuple[str, ...]"


class Marks(NamedTuple):
    """The ends, trajectory ids and mask of rows, on the CPU, one entry per row; None where there are none."""

    ends: Tensor | None = None
    """bool: True for the last row of an episode."""
    trajectories: Tensor | None = None
    """int64: the id of the trajectory that the row belongs to."""
    mask: Tensor | None = None
    """bool: False for a row of no episode; it is never drawn."""
    steps: Tensor | None = None
    """int64: the step number of the row in its trajectory."""


@dataclass(frozen=True, eq=False)
class Episodes:
    """Where episodes begin and end; a buffer reads it from its rows as they are written.

    A row ends its episode if any of its end fields is True. With a trajectory key, all rows of one id form an episode,
    even if rows of other episodes lie between them; an end closes it, and later rows of the same id form a new one.
    Without a trajectory key, consecutive rows (of each environment, with `ndim=2`) form an episode. The newest row is
    the last one of an episode that continues: no window contains rows that have not been written yet.

    `Episodes()`, without arguments, uses the flags that rows have: `done`, `terminated` and `truncated` under `next`,
    or at the root if there are none under `next`.

    Args:
        end_key: field of one bool per row, or a list of such fields. An empty list: no row ends an episode.
        traj_key: field of one integer per row. With `optional` it may be a list: the first field that rows have is
            used.
        mask_key: field of one bool per row: rows with False belong to no episode, and are never drawn.
        ends: bool `[rows]`, instead of an end key, for a storage with fixed rows.
        trajectories: integers `[rows]`, instead of a trajectory key, for a storage with fixed rows.
        step_key: field of one integer per row, with a trajectory key: a row whose step is not one more than that of the
            last row of its id begins a new episode.
        optional: ignore fields that the rows do not have, as long as they have an end field or a trajectory field.

    Raises:
        OptionError: if tensors and keys are given together, or a step key without a trajectory key.

    Examples:
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
    step_key: Key | None = None

    def __post_init__(self) -> None:
        """Check that tensors and keys are not given together."""
        fixed = [name for name in ("ends", "trajectories") if getattr(self, name) is not None]
        keys = [name for name in ("end_key", "traj_key", "mask_key") if getattr(self, name) is not None]
        if len(fixed) > 1 or (fixed and keys):
            msg = f"{' and '.join([*fixed, *keys])} are mutually exclusive: give one tensor, or keys"
            raise OptionError(msg)
        if self.step_key is not None and (fixed or self.traj_key is None):
            msg = f"step_key={self.step_key!r} divides trajectories: give traj_key, the field of their ids, as well"
            raise OptionError(msg)

    def __repr__(self) -> str:
        """The arguments that were given."""
        names = ("end_key", "traj_key", "mask_key", "step_key")
        given = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None]
        given += [f"{name}=tensor" for name in ("ends", "trajectories") if getattr(self, name) is not None]
        return f"Episodes({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        """Compare the fields that are read, and tensors by identity."""
        return isinstance(other, Episodes) and self._identity() == other._identity()

    def __hash__(self) -> int:
        """Hash the fields that are read."""
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        keys = (self.end_key is None, frozenset(self.end_paths), self.traj_path, self.mask_path, self.step_path)
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
    def step_path(self) -> Path | None:
        """The step key as a path."""
        return None if self.step_key is None else as_path(self.step_key)

    @property
    def fixed(self) -> bool:
        """Whether tensors give the episodes, not fields."""
        return self.ends is not None or self.trajectories is not None

    @property
    def soft(self) -> bool:
        """Whether no field or tensor is required: fields are found by their usual names."""
        by_usual_names = self.end_key is None and (self.traj_key is None or self.optional)
        return by_usual_names and self.mask_key is None and self.step_key is None and not self.fixed

    @property
    def paths(self) -> tuple[Path, ...]:
        """The fields that are read."""
        others = (self.traj_path, self.mask_path, self.step_path)
        return (*self.end_paths, *(path for path in others if path is not None))

    def resolve(self, known: set[Path]) -> Episodes:
        """Return the episodes of rows that have the fields `known`, without optional fields that they lack.

        Raises:
            KeyMissingError: if required fields are missing; the message names them.
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
        found = traj is not None or (bool(ends) and self.step_key is None)
        if not missing or (self.optional and found and not {self.mask_path, self.step_path} & set(missing)):
            return replace(self, end_key=list(ends), traj_key=traj, optional=False)
        names = ", ".join(show_path(path) for path in missing)
        msg = (
            f"rows have no field {names} to tell where episodes end; they have "
            f"{', '.join(sorted(show_path(path) for path in known))}: name an existing field (end_key, traj_key, "
            "done_key)"
        )
        raise KeyMissingError(msg)


def merge_episodes(given: Sequence[Episodes | None]) -> Episodes | None:
    """Return the episodes of a buffer from those of the buffer, its unit and its sampler; None if none has any.

    Episodes with required fields take precedence over those with optional ones, and these over the usual names.

    Raises:
        OptionError: if two of them require different fields.
    """
    found = [episodes for episodes in given if episodes is not None]
    required = [episodes for episodes in found if not episodes.soft]
    for other in required[1:]:
        if other != required[0]:
            msg = f"a buffer has one kind of episodes, got {required[0]!r} and {other!r}: give both the same keys"
            raise OptionError(msg)
    optional = [episodes for episodes in found if episodes.optional]
    return next(iter(required or optional or found), None)


_FLAGS = ("done", "terminated", "truncated")


def _usual_flags(known: set[Path]) -> list[Key]:
    """Return the flags that end an episode, by their usual names."""
    for level in (("next",), ()):
        found: list[Key] = [(*level, name) for name in _FLAGS if (*level, name) in known]
        if found:
            return found
    return []


def _flags(known: set[Path]) -> list[Key]:
    """Return the flags that end an episode, by their usual names; raise `KeyMissingError` if there are none."""
    found = _usual_flags(known)
    if found:
        return found
    msg = (
        f"rows have no field done, terminated or truncated, under 'next' or at the root, to tell where episodes end; "
        f"they have {', '.join(sorted(show_path(path) for path in known))}: name an existing field, as in "
        "episodes=Episodes(end_key='last')"
    )
    raise KeyMissingError(msg)


def as_path(key: Any) -> tuple[str, ...]:
    """Return a key (a string, or a tuple or list of strings) as a path.

    Raises:
        OptionError: for other keys.
    """
    path = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (tuple, list)) else ()
    if not path or not all(isinstance(part, str) for part in path):
        msg = f"a key is a string, or a tuple of strings for a nested field, got {key!r}"
        raise OptionError(msg)
    return path


def as_flags(values: Tensor, path: Path, rows: int) -> Tensor:
    """Return one bool per row, on the CPU.

    Raises:
        EpisodesError: if a row has several values.
    """
    flags = _one_each(values, path, rows)
    return flags if flags.dtype is torch.bool and flags.is_cpu else flags.to("cpu", torch.bool)


def as_ids(values: Tensor, path: Path, rows: int) -> Tensor:
    """Return one int64 per row, on the CPU.

    Raises:
        EpisodesError: if a row has several values.
        SchemaError: if the values are not integers.
    """
    ids = _one_each(values, path, rows).cpu()
    floats = ids.is_floating_point()
    if ids.is_complex() or (floats and not bool(((ids.abs() < 2.0**63) & (ids == ids.floor())).all())):
        msg = f"{show_path(path)} must hold integers (the episode of each row), got {values.dtype}"
        raise SchemaError(msg)
    return ids.to(torch.int64)


def _one_each(values: Tensor, path: Path, rows: int) -> Tensor:
    if values.numel() != rows:
        msg = (
            f"Expected the end-of-trajectory signal to be 1-dimensional: {show_path(path)} must hold one value per row "
            f"({rows} rows), got shape {list(values.shape)}"
        )
        raise EpisodesError(msg)
    return values if values.dim() == 1 else values.reshape(rows)
