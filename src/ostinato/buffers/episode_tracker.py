"""The chronicle: keeps the episode table in step with the storage. The engine calls it under its lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core.episodes.keys import Marks, as_flags, as_ids
from ostinato.core.episodes.table import EpisodeTable
from ostinato.core.records import Request, Run, ring_range
from ostinato.core.rows import decode_schema
from ostinato.errors import CapacityError, CheckpointError, OptionError, SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.episodes.keys import Episodes
    from ostinato.core.episodes.table import Starts
    from ostinato.core.records import Placement
    from ostinato.core.rows import Schema
    from ostinato.storages import Storage

__all__ = ["Chronicle"]


@final
class Chronicle:
    """Notes episodes as rows are written, and reads them off the storage again after edits and loads.

    Args:
        wanted: where episodes begin and end.
        need: rows that a row must have in its episode, itself and those after it, to be drawn.
        span: rows of one lane that a window takes; a smaller capacity is refused.
    """

    def __init__(self, wanted: Episodes, need: int, span: int) -> None:
        self.wanted = wanted
        self.need = need
        self.span = span
        self._resolved: Episodes | None = None
        self._schema: Schema | None = None
        self._table: EpisodeTable | None = None
        self._stale = True

    def read(self, storage: Storage, payload: Any, rows: int) -> Marks:
        """Return what rows about to be written say of episodes; nothing changes if they are refused.

        Raises:
            KeyMissingError: if they lack a field.
            SchemaError: if a field does not hold one value per row.
        """
        if self.wanted.fixed:
            msg = (
                f"{self.wanted!r} tells the episodes of rows that stay as they are, {rows} row(s) were to be written: "
                "name a field instead (end_key, traj_key)"
            )
            raise UsageError(msg)
        self.check_span(storage)
        resolved = self._resolve(storage)
        found = {path: storage.scores(payload, path) for path in resolved.paths}
        return _marks(resolved, found, rows)

    def note(self, storage: Storage, placement: Placement, marks: Marks) -> None:
        """Take note of rows just written."""
        table = self._fitting(storage)
        if table is None:
            return  # read off the storage when it is next asked for
        if not isinstance(placement, Run):
            self._stale = True
            return
        table.note(placement, marks.ends, marks.trajectories, marks.mask)

    def table(self, storage: Storage) -> EpisodeTable:
        """Return the episodes of the rows present. Cost: O(1); O(rows) after an edit of boundaries or a load."""
        table = self._fitting(storage)
        return self._rebuild(storage) if table is None else table

    def look(self, storage: Storage) -> tuple[EpisodeTable, Starts | None]:
        """Return the episodes, and the rows that may be drawn; None stands for all."""
        table = self.table(storage)
        return table, table.starts(self.need) if self.need > 1 or table.masked else None

    def forget(self) -> None:
        """Take note that rows have changed otherwise: the table is made anew when it is next asked for."""
        self._stale = True
        self._resolved = None

    def clear(self) -> None:
        """Take note that the buffer was emptied."""
        if self._table is not None:
            self._table.clear()

    def at(self, storage: Storage, slots: Tensor) -> Marks:
        """Return what the rows at `slots` say of episodes; to compare before and after an edit."""
        resolved = self._resolve(storage)
        if resolved.fixed or not slots.numel():
            return Marks()
        requests = [Request(storage.schema.find(path), slots) for path in resolved.paths]  # type: ignore[union-attr]
        found: dict[Any, Tensor | None] = dict(zip(resolved.paths, storage.fetch(requests), strict=True))
        return _marks(resolved, found, slots.shape[0])

    def moved(self, before: Marks, after: Marks) -> bool:
        """Return whether an edit has moved a boundary; the table is read anew then."""
        pairs = zip(before, after, strict=True)
        same = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
        self._stale = self._stale or not same
        return not same

    def hold(self) -> Callable[[], None]:
        """Return what brings the table of now back: a load makes one of its own."""
        kept = self._table, self._stale, self._resolved, self._schema

        def restore() -> None:
            self._table, self._stale, self._resolved, self._schema = kept

        return restore

    def state_dict(self, storage: Storage) -> dict[str, Any]:
        """Return the table's state, and what it was read from."""
        return {**self.table(storage).state_dict(), "read": self._read_from(storage)} if len(storage) else {}

    def _read_from(self, storage: Storage) -> str | None:
        """Name the fields that the table is read from; None where fixed tensors say it."""
        resolved = self._resolve(storage)
        paths = [list(map(list, resolved.end_paths)), resolved.traj_path, resolved.mask_path]
        return None if resolved.fixed else repr(paths)

    def check_state(self, state: dict[str, Any], table: dict[str, Any] | None) -> None:
        """Refuse rows that could not tell where their episodes end, and a damaged table, before anything is loaded.

        Args:
            state: of the storage.
            table: of the episodes, if the buffer that was saved kept account of them.

        Raises:
            CheckpointError: naming what they lack.
        """
        self._check_rows(state)
        if not table or self.wanted.fixed:
            return
        found = EpisodeTable(int(state["capacity"]), max(1, int(state["lanes"])))
        found.load_state_dict({key: value for key, value in table.items() if key != "read"})
        if found.rows + found.masked != int(state["rows"]) or int(table["cursor"]) != int(state["cursor"]):
            msg = f"the checkpoint's episodes are not those of its {state['rows']} rows: it is damaged"
            raise CheckpointError(msg)

    def _check_rows(self, state: dict[str, Any]) -> None:
        if self.wanted.fixed or not state.get("rows"):
            return
        if state.get("schema") is None:
            msg = f"the checkpoint's rows have no fields to tell where episodes end, which {self.wanted!r} asks for"
            raise CheckpointError(msg)
        try:
            leaves = decode_schema(state["schema"]).leaves
            paths = self.wanted.resolve({leaf.path for leaf in leaves}).paths
            wide = [leaf for leaf in leaves if leaf.path in paths and leaf.nbytes != leaf.dtype.itemsize]
            if wide:
                msg = f"{wide[0]} must hold one value per row to tell where episodes end"
                raise SchemaError(msg)
        except SchemaError as error:
            msg = f"the checkpoint does not fit this buffer: {error}"
            raise CheckpointError(msg) from error

    def load_state_dict(self, storage: Storage, state: dict[str, Any] | None) -> None:
        """Take over a saved table where it fits the storage; else read it off the rows."""
        self.forget()
        if not state or not len(storage) or state.get("read") is None:
            return
        if int(state["capacity"]) != storage.capacity or state["read"] != self._read_from(storage):
            return
        table = EpisodeTable(storage.capacity, storage.num_envs)
        table.load_state_dict({key: value for key, value in state.items() if key != "read"})
        self._table, self._stale = table, False

    def _fitting(self, storage: Storage) -> EpisodeTable | None:
        table = self._table
        if self._stale or table is None or (table.capacity, table.lanes) != (storage.capacity, storage.num_envs):
            return None
        return table

    def _resolve(self, storage: Storage) -> Episodes:
        schema = storage.schema
        if self._resolved is None or self._schema is not schema:
            if schema is None:
                msg = (
                    f"{type(storage).__name__} has no fields to tell where episodes end: use LazyTensorStorage or "
                    "LazyMemmapStorage"
                )
                raise OptionError(msg)
            self._resolved = self.wanted.resolve({leaf.path for leaf in schema.leaves})
            self._schema = schema
        return self._resolved

    def check_span(self, storage: Storage) -> None:
        """Refuse a storage that has not room for one window of each lane.

        Raises:
            CapacityError: naming the numbers.
        """
        steps = storage.capacity // storage.num_envs
        if steps < self.span:
            msg = (
                f"max_size={storage.max_size} keeps {steps} steps of each of {storage.num_envs} environment(s), a "
                f"window takes {self.span}: use max_size >= {self.span * storage.num_envs}, or a shorter window"
            )
            raise CapacityError(msg)

    def _rebuild(self, storage: Storage) -> EpisodeTable:
        """Read the episodes of all rows off the storage, in the order in which they were written."""
        self.check_span(storage)
        table = EpisodeTable(storage.capacity, storage.num_envs)
        rows = len(storage)
        if rows:
            run = Run(storage.cursor if rows == storage.capacity else 0, rows, storage.capacity)
            marks = self._fixed(run) if self.wanted.fixed else self.at(storage, run.slots(storage.device))
            table.note(run, marks.ends, marks.trajectories, marks.mask)
        self._table, self._stale = table, False
        return table

    def _fixed(self, run: Run) -> Marks:
        ends, trajectories = self.wanted.ends, self.wanted.trajectories
        given = trajectories if ends is None else ends
        if given is None or given.numel() != run.rows:
            msg = (
                f"{self.wanted!r} must hold one value for each of the {run.rows} rows of the storage, got "
                f"{0 if given is None else given.numel()}"
            )
            raise SchemaError(msg)
        order = ring_range(run.start, run.rows, run.capacity)
        if ends is not None:
            return Marks(as_flags(ends, ("ends",), run.rows)[order])
        return Marks(None, as_ids(given, ("trajectories",), run.rows)[order])


def _marks(resolved: Episodes, found: dict[Any, Tensor | None], rows: int) -> Marks:
    ends: Tensor | None = None
    for path in resolved.end_paths:
        flags = as_flags(found[path], path, rows)  # type: ignore[arg-type]
        ends = flags if ends is None else ends | flags
    traj, mask = resolved.traj_path, resolved.mask_path
    return Marks(
        ends,
        None if traj is None else as_ids(found[traj], traj, rows),  # type: ignore[arg-type]
        None if mask is None else as_flags(found[mask], mask, rows),  # type: ignore[arg-type]
    )
