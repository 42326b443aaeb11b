"""Where episodes begin and end: the fields or tensors that say it, and the tracker that reads them.

The tracker records episodes as rows are written, and reads them from the storage otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor

from ostinato.core.episodes.table import EpisodeTable
from ostinato.core.kinds import show_path
from ostinato.core.records import Request, Run, ring_range
from ostinato.core.rows import Schema
from ostinato.errors import (
    CapacityError,
    CheckpointError,
    EpisodesError,
    KeyMissingError,
    OptionError,
    SchemaError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ostinato._native import Episodes as NativeEpisodes
    from ostinato.core.episodes.table import Starts
    from ostinato.core.records import Placement
    from ostinato.core.rows import Path

Key: TypeAlias = "str | tuple[str, ...]"
_FLAGS = ("done", "terminated", "truncated")
_LEVELS = (("next",), ())
"""Where these flags are looked for."""


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

    @cached_property
    def end_paths(self) -> tuple[Path, ...]:
        """The end keys as paths."""
        return _paths(self.end_key)

    @cached_property
    def traj_path(self) -> Path | None:
        """The trajectory key as a path; the first of several."""
        return next(iter(self._traj_paths), None)

    @cached_property
    def _traj_paths(self) -> tuple[tuple[str, ...], ...]:
        return _paths(self.traj_key)

    @cached_property
    def mask_path(self) -> Path | None:
        """The mask key as a path."""
        return next(iter(_paths(self.mask_key)), None)

    @cached_property
    def step_path(self) -> Path | None:
        """The step key as a path."""
        return next(iter(_paths(self.step_key)), None)

    @property
    def fixed(self) -> bool:
        """Whether tensors give the episodes, not fields."""
        return self.ends is not None or self.trajectories is not None

    @property
    def soft(self) -> bool:
        """Whether no field or tensor is required: fields are found by their usual names."""
        by_usual_names = self.end_key is None and (self.traj_key is None or self.optional)
        return by_usual_names and self.mask_key is None and self.step_key is None and not self.fixed

    @cached_property
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
        trajs = [path for path in self._traj_paths if path in known]
        if self.end_key is None and (self.traj_key is None or self.optional):
            ends = next(filter(None, ([(*level, x) for x in _FLAGS if (*level, x) in known] for level in _LEVELS)), [])
            if not ends and not trajs:
                msg = (
                    "rows have no field done, terminated or truncated, under 'next' or at the root, to tell where "
                    f"episodes end; they have {_shown(known)}: name an existing field, as in "
                    "episodes=Episodes(end_key='last')"
                )
                raise KeyMissingError(msg)
        else:
            ends = [as_path(path) for path in self.end_paths if path in known]
        traj = trajs[0] if trajs else None
        missing = [path for path in self.paths if path not in known]
        found = traj is not None or (bool(ends) and self.step_key is None)
        if not missing or (self.optional and found and not {self.mask_path, self.step_path} & set(missing)):
            return replace(self, end_key=list(ends), traj_key=traj, optional=False)
        names = ", ".join(show_path(path) for path in missing)
        msg = (
            f"rows have no field {names} to tell where episodes end; they have {_shown(known)}: name an existing field "
            "(end_key, traj_key, done_key)"
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


def _shown(known: set[Path]) -> str:
    return ", ".join(sorted(map(show_path, known)))


def _paths(keys: Any) -> tuple[tuple[str, ...], ...]:
    """Return a key, a list of keys, or none, as paths."""
    return tuple(as_path(key) for key in (keys if isinstance(keys, list) else [keys]) if key is not None)


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


_MORE = ("read", "runs")
"""Entries of the state that are not those of the table."""
_MOST_IDS = 4
"""Trajectory ids that are remembered, for each slot of the storage; then the rows present are read again."""


class TrackedRows(Protocol):
    """What the tracker reads of a storage."""

    @property
    def capacity(self) -> int:
        """Slots."""

    @property
    def max_size(self) -> int:
        """The requested capacity."""

    @property
    def num_envs(self) -> int:
        """Environments whose rows are interleaved."""

    @property
    def cursor(self) -> int:
        """Slot after the newest row."""

    @property
    def device(self) -> torch.device:
        """Device of the rows."""

    @property
    def schema(self) -> Schema | None:
        """Schema of a row; None for storages without fields, and before the first row."""

    @property
    def episode_ends(self) -> Tensor | None:
        """Bool `[rows]`: the last rows of episodes, of a storage that knows them without its fields; else None."""

    def __len__(self) -> int:
        """Rows present: the slots `[0, len)`."""

    def fetch(self, requests: Sequence[Request]) -> list[Tensor]:
        """Return the rows of single fields."""

    def scores(self, payload: Any, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return a field of rows that are about to be written."""


@final
class EpisodeTracker:
    """Records episodes as rows are written. After edits and loads it reads them from the storage again.

    The engine calls every method under its lock.

    Args:
        wanted: where episodes begin and end.
        need: rows that a row must have in its episode, counted from itself, to be drawn.
        span: rows of one environment that a window takes; a storage with fewer steps raises `CapacityError`.
    """

    def __init__(self, wanted: Episodes, need: int, span: int) -> None:
        self.wanted = wanted
        self.ends = wanted.end_paths
        self.need = need
        self.span = span
        self._resolved: Episodes | None = None
        self._schema: Schema | None = None  # that `_resolved` was resolved for
        self._end: Path | None = None  # the only field that `_resolved` reads, if it is a flag
        self._table: EpisodeTable | None = None  # None: read from the storage before the next draw
        self._runs = _Runs()

    @property
    def native_table(self) -> NativeEpisodes | Literal[False] | None:
        """The native table of the rows present; None before the rows are read again, False if it is not native."""
        return None if self._table is None else self._table.native or False

    def fields_read(self, storage: TrackedRows) -> tuple[list[int], int, int] | None:
        """Return the positions of the end fields, of the number of the episode and of the mask, -1 for none.

        None if these are not one bool per row, of the number one int64, or if more is read.
        """
        if self.wanted.fixed or storage.schema is None:
            return None
        resolved, schema = self._resolve(storage), storage.schema
        found = {path: schema.find(path) for path in resolved.paths}
        for path, position in found.items():
            leaf, dtype = schema.leaves[position], torch.int64 if path == resolved.traj_path else torch.bool
            if leaf.dtype is not dtype or leaf.nbytes != dtype.itemsize or path == resolved.step_path:
                return None
        ids, mask = (-1 if path is None else found[path] for path in (resolved.traj_path, resolved.mask_path))
        return None if resolved.fixed else ([found[path] for path in resolved.end_paths], ids, mask)

    # -- writing ------------------------------------------------------------------------------------------------------

    def read(self, storage: TrackedRows, payload: Any, rows: int) -> Marks:
        """Return the marks of rows that are about to be written. Nothing is recorded yet.

        Raises:
            UsageError: if fixed tensors give the episodes.
            KeyMissingError: if the rows lack a field.
            SchemaError: if a field does not hold one value per row.
            CapacityError: if the storage is smaller than one window of each environment.
        """
        if self.wanted.fixed:
            msg = (
                f"{self.wanted!r} gives the episodes of fixed rows, {rows} row(s) were to be written: "
                "name a field instead (end_key, traj_key)"
            )
            raise UsageError(msg)
        self.check_span(storage)
        resolved = self._resolve(storage)
        if self._end is not None:
            return Marks(as_flags(storage.scores(payload, self._end), self._end, rows))  # type: ignore[arg-type]
        return _marks(resolved, {path: storage.scores(payload, path) for path in resolved.paths}, rows)

    def record(self, storage: TrackedRows, placement: Placement, marks: Marks) -> None:
        """Record rows that were just written."""
        table = self._table
        if table is None:
            return
        fits = (table.capacity, table.num_envs) == (storage.capacity, storage.num_envs)
        if fits and isinstance(placement, Run) and len(self._runs.last) <= _MOST_IDS * table.capacity:
            table.record(placement, marks.ends, self._streams(marks), marks.mask)
        else:
            self._table = None

    def _streams(self, marks: Marks) -> Tensor | None:
        """Return the streams of rows that were just written: their trajectories, divided where a step is missing."""
        if marks.steps is None or marks.trajectories is None:
            return marks.trajectories
        return self._runs.record(marks.trajectories, marks.steps)

    def clear(self) -> None:
        """Remove all rows."""
        self._runs = _Runs()
        if self._table is not None:
            self._table.clear()

    # -- reading ------------------------------------------------------------------------------------------------------

    def table(self, storage: TrackedRows) -> EpisodeTable:
        """Return the episodes of the rows present. Cost: O(1); O(rows) after a load, or an edit of an end."""
        return self._rebuild(storage) if self._table is None else self._table

    def view(self, storage: TrackedRows) -> tuple[EpisodeTable, Starts | None]:
        """Return the episodes, and the rows that can be drawn; None means all rows. Cost: see `table`."""
        table = self._rebuild(storage) if self._table is None else self._table
        return table, table.starts(self.need) if self.need > 1 or table.masked else None

    def _rebuild(self, storage: TrackedRows) -> EpisodeTable:
        """Read the episodes of all rows from the storage, in the order in which the rows were written."""
        self.check_span(storage)
        table = EpisodeTable(storage.capacity, storage.num_envs)
        self._runs = _Runs()
        rows = len(storage)
        if rows:
            run = Run(storage.cursor if rows == storage.capacity else 0, rows, storage.capacity)
            fixed = self._resolve(storage).fixed
            marks = self._fixed(storage, run) if fixed else self.marks_at(storage, run.slots(storage.device))
            table.record(run, marks.ends, self._streams(marks), marks.mask)
            table.read_from = self._resolve(storage)
        self._table = table
        return table

    def _fixed(self, storage: TrackedRows, run: Run) -> Marks:
        """Return the marks that fixed tensors give, in the order of writing."""
        resolved, order = self._resolve(storage), ring_range(run.start, run.rows, run.capacity)
        if resolved.trajectories is not None:
            return Marks(None, as_ids(resolved.trajectories, ("trajectories",), run.rows)[order])
        return Marks(None if resolved.ends is None else as_flags(resolved.ends, ("ends",), run.rows)[order])

    def _resolve(self, storage: TrackedRows) -> Episodes:
        if self.wanted.fixed:
            return self.wanted
        schema = storage.schema
        if self._resolved is None or self._schema is not schema:
            if self.wanted.soft and storage.episode_ends is not None:
                self._resolved, self._schema = Episodes(ends=storage.episode_ends), schema
                return self._resolved
            if schema is None:
                msg = (
                    "Could not get a tensordict out of the storage, which is required for SliceSampler to compute the "
                    "trajectories: a tensordict-backed storage is needed, and "
                    f"{type(storage).__name__} has no fields that tell where episodes end, use LazyTensorStorage or "
                    "LazyMemmapStorage"
                )
                raise EpisodesError(msg)
            self._resolved = self.wanted.resolve({leaf.path for leaf in schema.leaves})
            self._schema = schema
            paths = self._resolved.paths
            self._end = paths[0] if len(paths) == len(self._resolved.end_paths) == 1 else None
        return self._resolved

    def check_span(self, storage: TrackedRows) -> None:
        """Check that the storage holds one window of each environment.

        Raises:
            CapacityError: if it does not; the message has the numbers.
        """
        num_envs = storage.num_envs
        steps = storage.capacity // num_envs
        if steps < self.span:
            msg = (
                f"max_size={storage.max_size} cannot hold one window: it keeps {steps} steps of each of {num_envs} "
                f"environment(s), a window takes {self.span}: use max_size >= {self.span * num_envs}, or a shorter "
                "window"
            )
            raise CapacityError(msg)

    # -- edits --------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Discard the table: the episodes are read from the storage again before the next draw."""
        self._table = self._resolved = None

    def marks_at(self, storage: TrackedRows, slots: Tensor) -> Marks:
        """Return the marks of the rows at `slots`: to compare them before and after an edit."""
        resolved = self._resolve(storage)
        if resolved.fixed or not slots.numel():
            return Marks()
        requests = [Request(storage.schema.find(path), slots) for path in resolved.paths]  # type: ignore[union-attr]
        found: dict[Any, Tensor | None] = dict(zip(resolved.paths, storage.fetch(requests), strict=True))
        return _marks(resolved, found, slots.shape[0])

    def compare(self, before: Marks, after: Marks) -> bool:
        """Return whether an edit has changed the marks of rows; the episodes are then read from the storage again."""
        pairs = zip(before, after, strict=True)
        same = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
        if not same:
            self._table = None
        return not same

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self, storage: TrackedRows) -> dict[str, Any]:
        """Return the state of the table, and the names of the fields that it was read from."""
        if not len(storage):
            return {}
        state = {**self.table(storage).state_dict(), "read": self._read_from(storage)}
        return state if self.wanted.step_key is None else {**state, "runs": self._runs.state_dict()}

    def _read_from(self, storage: TrackedRows) -> str | None:
        """Name the fields that the table is read from; None where fixed tensors give the episodes."""
        resolved = self._resolve(storage)
        paths = [list(map(list, resolved.end_paths)), resolved.traj_path, resolved.mask_path]
        paths += [] if resolved.step_path is None else [resolved.step_path]
        return None if resolved.fixed else repr(paths)

    def check_state(self, state: dict[str, Any], table: dict[str, Any] | None) -> None:
        """Check a checkpoint before anything is loaded: its table, and that its rows have the fields needed.

        Args:
            state: of the storage.
            table: of the episodes, if the buffer that was saved tracked them.

        Raises:
            CheckpointError: if the rows lack a field, or the table is damaged.
        """
        self._check_rows(state)
        if not table or self.wanted.fixed:
            return
        _Runs().load_state_dict(table.get("runs"))
        found = EpisodeTable(int(state["capacity"]), max(1, int(state["lanes"])))
        found.load_state_dict({key: value for key, value in table.items() if key not in _MORE})
        if found.rows + found.masked != int(state["rows"]) or int(table["cursor"]) != int(state["cursor"]):
            msg = f"the checkpoint's episodes are not those of its {state['rows']} rows: it is damaged"
            raise CheckpointError(msg)

    def _check_rows(self, state: dict[str, Any]) -> None:
        if self.wanted.fixed or not state.get("rows") or (self.wanted.soft and state.get("knows_episodes")):
            return
        if state.get("schema") is None:
            msg = f"the checkpoint's rows have no fields that tell where episodes end, which {self.wanted!r} needs"
            raise CheckpointError(msg)
        try:
            leaves = Schema.from_json(state["schema"]).leaves
            paths = self.wanted.resolve({leaf.path for leaf in leaves}).paths
            wide = [leaf for leaf in leaves if leaf.path in paths and leaf.nbytes != leaf.dtype.itemsize]
            if wide:
                msg = f"{wide[0]} must hold one value per row to tell where episodes end"
                raise SchemaError(msg)
        except SchemaError as error:
            msg = f"the checkpoint does not fit this buffer: {error}"
            raise CheckpointError(msg) from error

    def load_state_dict(self, storage: TrackedRows, state: dict[str, Any] | None) -> None:
        """Restore a saved table if it fits the storage; otherwise the episodes are read from the rows later."""
        self.forget()
        if not state or not len(storage) or state.get("read") is None:
            return
        if int(state["capacity"]) != storage.capacity or state["read"] != self._read_from(storage):
            return
        table = EpisodeTable(storage.capacity, storage.num_envs)
        table.load_state_dict({key: value for key, value in state.items() if key not in _MORE})
        self._runs.load_state_dict(state.get("runs"))
        table.read_from = self._resolve(storage)
        self._table = table


def _marks(resolved: Episodes, found: dict[Any, Tensor | None], rows: int) -> Marks:
    """Return the marks of rows from their fields by path."""
    ends: Tensor | None = None
    for path in resolved.end_paths:
        flags = as_flags(found[path], path, rows)  # type: ignore[arg-type]
        ends = flags if ends is None else ends | flags
    traj, mask, step = resolved.traj_path, resolved.mask_path, resolved.step_path
    return Marks(
        ends,
        None if traj is None else as_ids(found[traj], traj, rows),  # type: ignore[arg-type]
        None if mask is None else as_flags(found[mask], mask, rows),  # type: ignore[arg-type]
        None if step is None else as_ids(found[step], step, rows),  # type: ignore[arg-type]
    )


@final
class _Runs:
    """Streams of rows with step numbers: a row that does not follow the last row of its id begins a new stream."""

    def __init__(self) -> None:
        self.last: dict[int, tuple[int, int]] = {}
        """The last step of each trajectory id, and the stream that it belongs to."""
        self._next = 0

    def record(self, ids: Tensor, steps: Tensor) -> Tensor:
        """Return the streams of rows in the order of writing, int64 `[n]`. Cost: O(n)."""
        streams = torch.empty_like(ids)
        found = streams.numpy()
        for i, (key, step) in enumerate(zip(ids.tolist(), steps.tolist(), strict=True)):
            before, stream = self.last.get(key, (None, 0))
            if before is None or before + 1 != step:
                stream, self._next = self._next, self._next + 1
            self.last[key] = step, stream
            found[i] = stream
        return streams

    def state_dict(self) -> dict[str, Any]:
        rows = [(key, *value) for key, value in self.last.items()]
        return {"next": self._next, "last": torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 3)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        rows = [] if state is None else state["last"].tolist()
        self._next = 0 if state is None else int(state["next"])
        self.last = {key: (step, stream) for key, step, stream in rows}
