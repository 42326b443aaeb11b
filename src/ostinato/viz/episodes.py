"""Rows in episodes for the viewers and figures: what buffers and datasets share, and the checkpoint of a buffer."""

from __future__ import annotations

import math
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.core.options import number_of
from ostinato.core.ring import Ring
from ostinato.datasets.checkpoints import map_fields, saved_episodes
from ostinato.durable import CheckpointReader
from ostinato.errors import CheckpointError, DamagedFileError, OstinatoError
from ostinato.viz.figures import format_number
from ostinato.viz.sources import FieldRoles, OpenTrajectory, TrajectorySource, array_of, is_picture, name_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.durable.tensorfile import TreePath

__all__ = ["EpisodeSource", "SavedBuffer"]

_REWARDS, _ACTIONS = {"reward", "rewards"}, {"action", "actions"}
_ENDS = {"done": "done", "dones": "done", "terminated": "terminated", "truncated": "truncated"}
_NEXT, _DATA = "next", "(data)"
_BLOCK = 1000
_PRIORITY, _AGE, _SLOT = ("(priority)",), ("(age)",), ("(slot)",)


class EpisodeSource(TrajectorySource):
    """Rows in episodes. Rows are read when they are shown.

    Args:
        unit: What one item is called.
        ids: The id of each item.
        title: Short description of the source.
        lengths: The number of rows of each item.
        shapes: Shape of one row of each field, by path.
    """

    def __init__(
        self,
        unit: str,
        ids: Sequence[int],
        title: str,
        lengths: Sequence[int],
        shapes: Mapping[TreePath, tuple[int, ...]],
    ) -> None:
        super().__init__(unit, ids, title)
        self.lengths, self.shapes = lengths, shapes
        self.roles = _roles(shapes)
        """The meaning of the fields."""

    @abstractmethod
    def rows_of(self, index: int) -> Tensor:
        """Return the rows of an item, int64 `[n]`."""

    @abstractmethod
    def at(self, path: TreePath, rows: Tensor) -> np.ndarray:
        """Return a field of rows, int64 `[n]`, as a copy `[n, *shape]`.

        Raises:
            DamagedFileError: A file cannot be read.
        """

    @abstractmethod
    def texts(self, rows: Tensor) -> tuple[tuple[str, Any], ...]:
        """Return facts that hold for all rows of an item."""

    def extent(self, index: int) -> tuple[int, int]:
        """Return the number of rows of an item, and 1."""
        return self.lengths[index], 1

    def _read(self, index: int) -> OpenTrajectory:
        name, rows = f"{self.unit} {self.ids[index]}", self.rows_of(index)
        try:
            texts = self.texts(rows)
        except (OstinatoError, OSError) as error:
            return OpenTrajectory(name, problem=str(error))

        def read(path: TreePath, steps: np.ndarray, env: int) -> np.ndarray:
            del env
            return self.at(path, rows[torch.from_numpy(steps)])

        return OpenTrajectory(name, len(rows), 1, self.shapes, read, self.roles, texts)


class _Named(NamedTuple):
    """A field, by the words of its name: `("next", "reward")` for the key `"next.reward"`, too."""

    path: TreePath
    following: bool
    words: tuple[str, ...]
    """Without `next`."""
    shown: str
    """The name that is displayed and that `--camera` takes."""


def _named(path: TreePath) -> _Named:
    name = ".".join(path) or _DATA
    words = tuple(name.split("."))
    if words[0] == _NEXT and len(words) > 1:
        return _Named(path, following=True, words=words[1:], shown=name.removeprefix(f"{_NEXT}."))
    if len(words) == 1 and name.startswith(f"{_NEXT}_"):
        flat = name.removeprefix(f"{_NEXT}_")
        return _Named(path, following=True, words=(flat,), shown=flat)
    return _Named(path, following=False, words=words, shown=name)


def _roles(shapes: Mapping[TreePath, tuple[int, ...]]) -> FieldRoles:
    """Assign roles to fields by usual names. Numbers that are no observations are shown as facts.

    Rewards and flags below `next` come before others.
    """
    reward, action = None, None
    ends: dict[str, TreePath] = {}
    current: dict[str, TreePath] = {}
    following: dict[str, TreePath] = {}
    extra: dict[str, TreePath] = {}
    for name in sorted(map(_named, shapes), key=lambda each: not each.following):
        path, first, alone = name.path, name.words[0], len(name.words) == 1
        if path in {_PRIORITY, _AGE, _SLOT}:
            continue
        if alone and first in _REWARDS:
            reward = reward or path
        elif alone and first in _ACTIONS and not name.following:
            action = action or path
        elif alone and first in _ENDS:
            ends.setdefault(_ENDS[first], path)
        elif math.prod(shapes[path]) == 1 and not (first.startswith(("obs", _DATA)) or is_picture(shapes[path])):
            extra[".".join(path)] = path
        else:
            (following if name.following else current)[name.shown] = path
    if not current:  # numbers alone are the observation
        current, extra = extra, {}
    computed = {"priority": _PRIORITY, "rows since": _AGE, "slot": _SLOT}
    extra |= {word: path for word, path in computed.items() if path in shapes}
    return FieldRoles(reward, action, ends, current, following, extra)


@final
class SavedBuffer(EpisodeSource):
    """The checkpoint of a replay buffer as episodes, or as blocks of rows if no field marks the ends of episodes.

    Files are memory-mapped, and checksums are not compared.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the manifest.

        Args:
            path: Directory that `dumps` wrote.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointError: The checkpoint is not of a buffer, is empty, or has Python objects instead of fields.
            DamagedFileError: The checkpoint is damaged.
        """
        reader = CheckpointReader(Path(path), format_name=FORMAT)
        try:
            state = reader.state()
            self._take(Path(path), reader, state)
        except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
            if isinstance(error, OstinatoError):
                raise
            msg = f"the manifest of {path} does not describe a replay buffer ({error!r})"
            raise DamagedFileError(msg) from error

    def _take(self, path: Path, reader: CheckpointReader, state: dict[str, Any]) -> None:
        storage = state["storage"]["state"]
        if "items" in storage or not storage.get("rows"):
            what = "Python objects, which have no fields to show" if storage.get("items") else "no rows"
            msg = f"{path} holds {what}: there is nothing to show"
            raise CheckpointError(msg)
        if "hooked" in storage:
            msg = f"{path} holds rows that saving hooks have converted: load it, and save it without hooks to see it"
            raise CheckpointError(msg)
        self.rows, self.capacity = int(storage["rows"]), int(storage["capacity"])
        self._fields = map_fields(reader, storage)
        self._late = {".".join(path): reader.open_mapped(name).nbytes for path, name, _ in storage["late"]}
        self._num_envs = max(1, int(storage["lanes"]))
        ring = Ring(self.capacity)
        ring.load_state_dict(state["stamps"], self.rows)
        slots = torch.arange(self.rows, device="cpu")
        self.ages = array_of(ring.written - ring.generations(slots))
        """Number of rows written after each row, int64 `[rows]`."""
        kept = state["sampler"]["state"]
        priorities = kept.get("priorities") if isinstance(kept, dict) else None
        self.priorities = None if priorities is None else array_of(priorities)[: self.rows]
        self._computed = {_AGE: self.ages, _SLOT: np.arange(self.rows)}
        self._computed |= {} if self.priorities is None else {_PRIORITY: self.priorities}
        self.rows_drawn, self.rows_written = int(state["rows_drawn"]), int(state["rows_written"])
        unit, self._slots, ids = self._split(saved_episodes(state.get("episodes"), storage, self._fields))
        shapes = {path: field.shape for path, field in self._fields.items()} | dict.fromkeys(self._computed, ())
        counts = f"{self.rows:,} of {number_of(self.capacity, 'row')}, {number_of(len(ids), unit)}"
        super().__init__(unit, ids, f"{name_of(path)}, {counts}", [len(slots) for slots in self._slots], shapes)
        self.history = _history(self.rows_drawn, self.rows_written)
        hidden = [f"{', '.join(self._late)} (only some rows have it)"] if self._late else []
        objects = [name.partition(".")[2] for name in storage.get("objects", ())]
        hidden += [f"{', '.join(objects)} (Python objects)"] if objects else []
        self._texts = tuple(("not shown", text) for text in hidden)

    def _split(self, table: EpisodeTable | None) -> tuple[str, tuple[Tensor, ...], tuple[int, ...]]:
        """Return the unit, the slots of each item and the ids: episodes, or blocks of rows without episodes."""
        if table is None:
            order = torch.from_numpy(np.argsort(-self.ages, kind="stable"))
            blocks = torch.split(order, _BLOCK)
            return "block", blocks, tuple(range(len(blocks)))
        spans = table.episodes()
        slots = tuple(
            table.shift(first.expand(int(count)), torch.arange(int(count), device="cpu"))
            for first, count in zip(spans.first, spans.rows, strict=True)
        )
        return "episode", slots, tuple(spans.serial.tolist())

    def rows_of(self, index: int) -> Tensor:
        """Return the slots of an item."""
        return self._slots[index]

    def texts(self, rows: Tensor) -> tuple[tuple[str, Any], ...]:
        """Return the fields that are not shown."""
        del rows
        return self._texts

    def at(self, path: TreePath, rows: Tensor) -> np.ndarray:
        """Return the values of a field at slots, `[n, *shape]`, as a copy."""
        if path in self._computed:
            return np.asarray(self._computed[path][rows.numpy()])
        after = (rows + self._num_envs).remainder(self.capacity).clamp(max=self.rows - 1)
        return array_of(self._fields[path].rows(rows, after))

    def row_ages(self) -> np.ndarray:
        """Return the number of rows that were written after each row."""
        return self.ages

    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of each field."""
        return {".".join(path) or _DATA: field.nbytes for path, field in self._fields.items()} | self._late


def _history(drawn: int, written: int) -> str:
    if not drawn:
        return "no row drawn so far"
    each = format_number(drawn / max(written, 1))
    return f"{number_of(drawn, 'row')} drawn so far, {each} for each row written (counted in all, not row by row)"
