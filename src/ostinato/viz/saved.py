"""A buffer's checkpoint as reels: its episodes, or its rows in blocks where nothing says where episodes end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.core.episodes.keys import Episodes, as_flags
from ostinato.core.episodes.table import EpisodeTable
from ostinato.core.records import Run
from ostinato.core.ring import Ring
from ostinato.core.rows import column_name
from ostinato.durable import CheckpointReader
from ostinato.errors import CheckpointError, DamagedFileError, OstinatoError
from ostinato.viz.reel import Reel, Roles, array_of, name_of, plural
from ostinato.viz.scene import number

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from ostinato.durable.trees import TreePath

__all__ = ["SavedBuffer"]

_BLOCK = 1000
_PRIORITY, _AGE, _SLOT = ("(priority)",), ("(age)",), ("(slot)",)
_FLAGS = {"done": ("done", "dones"), "terminated": ("terminated",), "truncated": ("truncated",)}
_REWARDS, _ACTIONS = ("reward", "rewards"), ("action", "actions")
_NEXT = "next"


@final
class SavedBuffer:
    """What `dumps` wrote, to be looked at: files are mapped, not read, and their checksums not compared."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the manifest.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointError: It is not of a buffer, is empty, or holds Python objects instead of fields.
            DamagedFileError: It is damaged.
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
        self.columns = _mapped(reader, storage)
        self._late = {".".join(path): reader.open_mapped(name).nbytes for path, name, _ in storage["late"]}
        self._lanes = max(1, int(storage["lanes"]))
        stamps = Ring(self.capacity)
        stamps.load_state_dict(state["stamps"], self.rows)
        slots = torch.arange(self.rows, device="cpu")
        self.ages = array_of(stamps.written - stamps.generations(slots))
        """Rows written after each row, int64 `[rows]`."""
        kept = state["sampler"]["state"]
        priorities = kept.get("priorities") if isinstance(kept, dict) else None
        self.priorities: np.ndarray | None = None if priorities is None else array_of(priorities)[: self.rows]
        """Priority of each row, float `[rows]`; None where the sampler has none."""
        self.rows_drawn, self.rows_written = int(state["rows_drawn"]), int(state["rows_written"])
        self._roles = _roles(self.columns, prioritized=self.priorities is not None)
        self.unit, self._slots, self.ids = self._parts(_table(state, storage, self.columns, self.rows))
        self._places = {number: index for index, number in enumerate(self.ids)}
        what = self.unit if len(self.ids) == 1 else plural(self.unit)
        self.title = f"{name_of(path)}, {self.rows:,} of {self.capacity:,} rows, {len(self.ids):,} {what}"
        self.history = _history(self.rows_drawn, self.rows_written)
        hidden = [f"{', '.join(self._late)} (only some rows have it)"] if self._late else []
        objects = [name.partition(".")[2] for name in storage.get("objects", ())]
        hidden += [f"{', '.join(objects)} (Python objects)"] if objects else []
        self._words = tuple(("not shown", text) for text in hidden)
        self._open: tuple[int, Reel] | None = None

    def _parts(self, table: EpisodeTable | None) -> tuple[str, tuple[Tensor, ...], tuple[int, ...]]:
        """Return what a part is called, the slots of each and its id: episodes, or blocks where there are none."""
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

    def find(self, trajectory_id: int) -> int | None:
        """Return the position of an episode's number in `ids`; None where there is none."""
        return self._places.get(trajectory_id)

    def extent(self, index: int) -> tuple[int, int]:
        """Return the rows of an episode, and 1."""
        return len(self._slots[index]), 1

    def open(self, index: int) -> Reel:
        """Return an episode; nothing is read yet. The last one is kept."""
        kept = self._open
        if kept is None or kept[0] != index:
            slots = self._slots[index]
            name = f"{self.unit} {self.ids[index]}"
            kept = self._open = index, Reel(name, len(slots), 1, _Rows(self, slots), self._roles, self._words)
        return kept[1]

    def returns(self, index: int) -> float | None:
        """Return the sum of an episode's rewards; None where there are no rewards."""
        if self._roles.reward is None:
            return None
        return float(array_of(self.at(self._roles.reward, self._slots[index])).astype(np.float64).sum())

    def at(self, path: TreePath, slots: Tensor) -> Tensor:
        """Return the values of a field at slots, `[N, ...]`, a copy."""
        after = (slots + self._lanes).remainder(self.capacity).clamp(max=self.rows - 1)
        return self.columns[path].rows(slots, after)

    def row_ages(self) -> np.ndarray:
        """Return how many rows were written after each row."""
        return self.ages

    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of each field."""
        return {".".join(path) or "(data)": column.nbytes for path, column in self.columns.items()} | self._late


@final
class _Rows:
    """Rows of a checkpoint by their slots."""

    def __init__(self, saved: SavedBuffer, slots: Tensor) -> None:
        self._saved, self._slots = saved, slots
        computed = {_AGE: saved.ages, _SLOT: np.arange(saved.rows)}
        self._computed = computed if saved.priorities is None else {**computed, _PRIORITY: saved.priorities}
        known = {path: column.shape for path, column in saved.columns.items()}
        self.shapes: dict[TreePath, tuple[int, ...]] = {**known, **dict.fromkeys(self._computed, ())}

    def row(self, path: TreePath, step: int, env: int) -> np.ndarray:
        """Return the value of one row."""
        del env
        if path in self._computed:
            return np.asarray(self._computed[path][self._slots[step]])
        return array_of(self._saved.at(path, self._slots[step : step + 1])[0])

    def column(self, path: TreePath, env: int) -> np.ndarray:
        """Return the values of all rows."""
        del env
        if path in self._computed:
            found: np.ndarray = self._computed[path][self._slots.numpy()]
            return found
        return array_of(self._saved.at(path, self._slots))


@final
class _Column:
    """One field of all rows, mapped. Single copies are read off the row that follows, except where they lie apart."""

    def __init__(self, mapped: Tensor, apart: Tensor | None = None, nexts: Tensor | None = None) -> None:
        self._mapped, self._apart, self._nexts = mapped, apart, nexts
        self._rank = None if apart is None else apart.cumsum(0) - 1
        self.shape = tuple(mapped.shape[1:])
        self.nbytes = mapped.nbytes if nexts is None else nexts.nbytes

    def rows(self, slots: Tensor, after: Tensor) -> Tensor:
        """Return the values at `slots`, `[N, ...]`; `after` are the slots that follow them."""
        if self._apart is None or self._rank is None or self._nexts is None:
            return self._mapped.index_select(0, slots)
        found = self._mapped.index_select(0, after)
        aside = self._apart[slots]
        found[aside] = self._nexts[self._rank[slots[aside]]]
        return found


def _history(drawn: int, written: int) -> str:
    if not drawn:
        return "no row drawn so far"
    each = number(drawn / max(written, 1))
    return f"{drawn:,} rows drawn so far, {each} for each row written (counted in all, not row by row)"


def _mapped(reader: CheckpointReader, storage: dict[str, Any]) -> dict[TreePath, _Column]:
    """Map the columns that every row has; those that came later are left out."""
    leaves = storage["schema"]["leaves"]
    paths = [tuple(str(key) for key in leaf["path"]) for leaf in leaves]
    names = [column_name(leaf["path"], position) for position, leaf in enumerate(leaves)]
    mates = dict(storage.get("single_copy") or ())
    apart = reader.read("apart") if mates else None
    found = {}
    for position, (path, name) in enumerate(zip(paths, names, strict=True)):
        mate = mates.get(position)
        if mate is None:
            found[path] = _Column(reader.open_mapped(name))
        else:
            found[path] = _Column(reader.open_mapped(names[mate]), apart, reader.read(f"{name}.apart"))
    return found


def _table(
    state: dict[str, Any], storage: dict[str, Any], columns: dict[TreePath, _Column], rows: int
) -> EpisodeTable | None:
    """Return the episodes as they were saved, else as the usual flags tell them; None where there are none."""
    table = EpisodeTable(int(storage["capacity"]), max(1, int(storage["lanes"])))
    if state.get("episodes"):
        table.load_state_dict({key: value for key, value in state["episodes"].items() if key != "read"})
        return table
    try:
        wanted = Episodes().resolve(set(columns))
    except OstinatoError:
        return None
    full = rows == table.capacity
    run = Run(int(storage["cursor"]) if full else 0, rows, table.capacity)
    everything, ends = torch.arange(rows, device="cpu"), torch.zeros(rows, dtype=torch.bool, device="cpu")
    for path in wanted.end_paths:
        column = columns[tuple(str(key) for key in path)]
        ends |= as_flags(column.rows(everything, everything), path, rows)
    table.record(run, ends[run.slots(torch.device("cpu"))], None, None)
    return table


def _roles(columns: dict[TreePath, _Column], *, prioritized: bool) -> Roles:
    """Tell fields apart by TorchRL's names, and the plain ones that others use."""

    def find(names: tuple[str, ...]) -> TreePath | None:
        places = [(_NEXT, name) for name in names] + [(name,) for name in names]
        return next((place for place in places if place in columns), None)

    reward, action = find(_REWARDS), find(_ACTIONS)
    ends = {word: place for word, names in _FLAGS.items() if (place := find(names)) is not None}
    flags = {name for names in _FLAGS.values() for name in names}
    current, following = {}, {}
    for path in columns:
        last = path[-1] if path else "(data)"
        if last in {*_REWARDS, *_ACTIONS, *flags}:
            continue
        if path[:1] == (_NEXT,) and len(path) > 1:
            following[".".join(path[1:])] = path
        elif len(path) == 1 and last.startswith("next_"):
            following[last.removeprefix("next_")] = path
        else:
            current[".".join(path) or last] = path
    extra = {"priority": _PRIORITY} if prioritized else {}
    return Roles(reward, action, ends, current, following, {**extra, "rows since": _AGE, "slot": _SLOT})
