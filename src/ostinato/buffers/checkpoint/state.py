"""The state of a buffer: gathered from its parts, checked against them, and saved through `durable`."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ostinato.buffers.records import Ticket
from ostinato.core import kinds
from ostinato.core.kinds import Node, show_path
from ostinato.core.records import Draw, Run, read_plan, show_plan, turn_plan
from ostinato.core.ring import Ring
from ostinato.core.rows import Schema, column_name, describe
from ostinato.durable.checkpoint_writer import PIECE_BYTES, can_write_ahead
from ostinato.durable.dtypes import raw_view
from ostinato.durable.row_ranges import as_runs, contains, join_runs, one_run
from ostinato.errors import CheckpointError, OptionError, OstinatoError, StorageMemoryError
from ostinato.storages.table import read_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from ostinato.buffers.engine import LocalEngine
    from ostinato.buffers.episode_tracker import EpisodeTracker
    from ostinato.core.records import Placement
    from ostinato.durable.checkpoint_writer import Piece, RowFile
    from ostinato.durable.patched_arrays import Print
    from ostinato.durable.row_ranges import Runs
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.storages.table import RowArray
    from ostinato.transforms import Compose
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

__all__ = [
    "FORMAT",
    "Lineage",
    "Parts",
    "Saves",
    "Snapshot",
    "Target",
    "begin_load",
    "check_counts",
    "check_saved",
    "check_ticket",
    "checker",
    "converted",
    "end_load",
    "engine_state",
    "hold",
    "load_engine_state",
    "load_engine_states",
    "own_copy",
    "own_tensors",
    "parts_of",
    "read_generator",
    "read_ticket",
    "readable",
    "remember_load",
    "restoring",
    "revive",
    "rows_since",
    "saved_rows",
    "show_ticket",
    "turn_ticket",
    "unit_name",
    "with_state",
]

_BLOCK_ROWS = 2**20
_MOST_LINEAGES = 8
_ROOMS = 4
"""Pieces that are filled while others are on their way to the file."""


class Lineage(NamedTuple):
    """What a buffer knows of a save that it goes on from."""

    ring: Ring
    serial: int
    """Number of the last write before it."""
    storage: Storage
    prints: dict[str, Print]
    """What its other arrays looked like."""


@final
class Saves:
    """Of one buffer: the save in progress, and the saves that an incremental one can go on from."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """One save or load at a time; taken before the engine's lock."""
        self.snapshot: Snapshot | None = None
        self.lineages: dict[str, Lineage] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy has no saves."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without saves."""
        self.__init__()

    def before(self, ring: Ring, where: Placement | Tensor) -> None:
        """Keep the rows of slots that are about to be written; before the ring records it, under the engine's lock."""
        if self.snapshot is not None:
            slots = where if isinstance(where, torch.Tensor) else _slots(where, ring.device)
            self.snapshot.keep(ring, slots)

    def before_clear(self, ring: Ring) -> None:
        """Keep which rows were replaced, before the ring is cleared, under the engine's lock."""
        if self.snapshot is not None:
            self.snapshot.note_replaced(ring, ring.rows)

    def remember(self, save: str, lineage: Lineage, instead: str | None) -> None:
        """Remember a save, in the place of the one that it was written over."""
        self.lineages.pop(instead or "", None)
        self.lineages[save] = lineage
        while len(self.lineages) > _MOST_LINEAGES:
            self.lineages.pop(next(iter(self.lineages)))


def _slots(placement: Placement, device: torch.device) -> Tensor:
    return placement.slots(device) if isinstance(placement, Run) else placement.slots


def rows_since(ring: Ring, serial: int, rows: int) -> Runs:
    """Return which of the first `rows` rows were written after the write number `serial`.

    Cost: O(1) while rows are written in ring order, else O(rows).
    """
    if ring.nbytes == 0:
        fresh = min(ring.written - serial, ring.capacity)
        first = (ring.cursor - fresh) % ring.capacity if fresh > 0 else 0
        head = one_run(first, max(0, min(fresh, ring.capacity - first)))
        tail = one_run(0, max(0, first + fresh - ring.capacity) if fresh > 0 else 0)
        runs = join_runs(head, tail)
        runs = runs[runs[:, 0] < rows]
        return np.stack([runs[:, 0], np.minimum(runs[:, 1], rows - runs[:, 0])], axis=1)
    found = []
    for start in range(0, rows, _BLOCK_ROWS):
        slots = torch.arange(start, min(rows, start + _BLOCK_ROWS), device=ring.device)
        found.append(as_runs(slots[ring.generations(slots) > serial].cpu().numpy()))
    return join_runs(*found)


@final
class Snapshot:
    """The rows at the moment when this was made, under the engine's lock.

    Args:
        ring: the buffer's.
        arrays: where rows lie, and the files that they go to.
    """

    def __init__(self, ring: Ring, arrays: list[tuple[RowArray, RowFile]]) -> None:
        self._ring = ring
        self._serial = ring.written
        self._arrays = arrays
        self._earlier: Runs = one_run(0, 0)
        """Rows replaced since the snapshot whose ring were forgotten since."""
        self._error: Exception | None = None

    def keep(self, ring: Ring, slots: Tensor) -> None:
        """Put rows down that are about to be replaced. A disk that is full ends the save, not the write."""
        if ring is not self._ring or self._error is not None:
            return
        try:
            here = torch.unique(slots).cpu().numpy()
            here = here[~self._replaced(here)]
            for array, file in self._arrays:
                _put_ahead(array, file, here)
        except (OSError, OstinatoError) as error:
            self._error = error

    def note_replaced(self, ring: Ring, rows: int) -> None:
        """Remember which rows were replaced since the snapshot, before their ring are forgotten."""
        if ring is self._ring:
            self._earlier = join_runs(self._earlier, rows_since(ring, self._serial, rows))

    def write_out(self, lock: Any) -> None:
        """Write all rows, taking the engine's lock for one piece (at most 2 MiB, or one row) at a time.

        Raises:
            StorageMemoryError: if the disk is full.
        """
        with nullcontext() if can_write_ahead() else lock, ThreadPoolExecutor(1) as writer:
            for array, file in self._arrays:
                rows = min(max(1, PIECE_BYTES // max(1, file.row_bytes)), int(file.runs[:, 1].sum()))
                count = _ROOMS if rows * file.row_bytes <= PIECE_BYTES else 1
                rooms = torch.zeros((count, rows, file.row_bytes), dtype=torch.uint8, device="cpu")
                under_way: deque[Future[None]] = deque()
                for number, piece in enumerate(file.pieces()):
                    if len(under_way) == len(rooms):
                        under_way.popleft().result()
                    room = rooms[number % len(rooms), : len(piece.rows)]
                    self._take(array, file, piece, room, lock)
                    under_way.append(writer.submit(file.append, piece.offset, raw_view(room)))
                for last in under_way:
                    last.result()

    def _take(self, array: RowArray, file: RowFile, piece: Piece, room: Tensor, lock: Any) -> None:
        n = len(piece.rows)
        with lock:
            if self._error is not None:
                raise self._error
            where = torch.from_numpy(piece.rows) if piece.first is None else slice(piece.first, piece.first + n)
            array.copy(room, where)
            same = self._ring.written == self._serial
            replaced = piece.rows[:0] if same else np.flatnonzero(self._replaced(piece.rows))
            file.done = piece.offset + n * file.row_bytes
        for first, count in as_runs(replaced).tolist():
            file.read_back(piece.offset + first * file.row_bytes, raw_view(room[first : first + count]))

    def _replaced(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows (ascending) were replaced since the snapshot, bool: what was there lies in the file."""
        slots = torch.from_numpy(rows).to(self._ring.device)
        replaced: np.ndarray[Any, Any] = (self._ring.generations(slots) > self._serial).cpu().numpy()
        both: np.ndarray[Any, Any] = replaced | contains(self._earlier, rows)
        return both


def _put_ahead(array: RowArray, file: RowFile, slots: np.ndarray) -> None:
    places = file.places(slots)
    waiting = places >= file.done
    slots, places = slots[waiting], places[waiting]
    most = max(1, PIECE_BYTES // max(1, file.row_bytes))
    for start in range(0, len(slots), most):
        part, at = torch.from_numpy(slots[start : start + most]), places[start : start + most]
        room = torch.empty((len(part), file.row_bytes), dtype=torch.uint8, device="cpu")
        array.copy(room, part)
        cuts = [0, *(np.flatnonzero(np.diff(at) != file.row_bytes) + 1).tolist(), len(at)]
        for first, last in pairwise(cuts):
            file.put_ahead(int(at[first]), raw_view(room[first:last]))


_MAX_DEPTH = 100
_NODES = frozenset({"dict", "list", "tuple", "tensordict"})


def converted(state: dict[str, Any], storages: Sequence[Storage]) -> dict[str, Any]:
    """Return the state of a buffer, or of an ensemble, with the rows as the save hooks of its storages make them.

    Memory: whatever the hooks return.

    Raises:
        CheckpointError: if a hook returns something that a checkpoint cannot hold.
    """
    return _each(state, storages, _convert)


def restoring(
    restore: Callable[[dict[str, Any]], None], storages: Sequence[Storage]
) -> Callable[[dict[str, Any]], None]:
    """Return `restore` for states read from a checkpoint: the load hooks give the rows the form that they had.

    It raises `CheckpointError` if rows were converted and there is no load hook, or the other way round, or what the
    load hooks return is not rows of the form saved; nothing is changed then.
    """
    return lambda state: restore(_each(state, storages, _restore))


def _each(
    state: dict[str, Any], storages: Sequence[Storage], change: Callable[[dict[str, Any], Storage], dict[str, Any]]
) -> dict[str, Any]:
    members = state.get("members")
    if members is None:
        part = state["storage"]
        return {**state, "storage": {**part, "state": change(part["state"], storages[0])}}
    if len(members) != len(storages):
        return state  # the ensemble says so itself
    return {**state, "members": [_each(m, [s], change) for m, s in zip(members, storages, strict=True)]}


def _convert(saved: dict[str, Any], storage: Storage) -> dict[str, Any]:
    if not storage.save_hooks or len(storage) == 0:
        return saved
    schema = storage.schema
    if schema is not None and schema.objects:
        fields = ", ".join(show_path(leaf.path) for leaf in schema.objects)
        msg = f"saving hooks convert tensors, and the rows have Python objects ({fields}): save without hooks"
        raise CheckpointError(msg)
    steps, newest = storage.shape[0], storage.cursor // storage.num_envs
    rows = storage.read(slice(None))
    form = describe(rows, storage.ndim).to_json()
    for hook in storage.save_hooks:
        for name, value in (("is_full", True), ("shift", newest or steps)):
            if hasattr(hook, name):
                setattr(hook, name, value)
        rows = hook(rows, path=None)
    columns: dict[str, Tensor] = {}
    names = [getattr(hook, "__name__", type(hook).__name__) for hook in storage.save_hooks]
    note = {"hooks": names, "form": form, "tree": _take_apart(rows, (), columns)}
    return {**saved, "columns": columns, "hooked": note}


def _restore(saved: dict[str, Any], storage: Storage) -> dict[str, Any]:
    note = saved.get("hooked")
    if note is None and (not storage.load_hooks or not saved.get("rows")):
        return saved
    mine = [getattr(hook, "__name__", type(hook).__name__) for hook in storage.load_hooks]
    if note is None:
        msg = (
            f"the checkpoint holds rows as they are, and the storage has the loading hooks {mine}, which convert rows "
            "back that saving hooks have converted: load it into a buffer without loading hooks"
        )
        raise CheckpointError(msg)
    if not storage.load_hooks:
        msg = (
            f"the rows of the checkpoint were converted by the saving hooks {note['hooks']}: register the loading "
            "hooks that convert them back (register_load_hook) before loads()"
        )
        raise CheckpointError(msg)
    try:
        rows = _rebuild(note["tree"], saved["columns"], 0)
        count, num_envs = int(saved["rows"]), max(1, int(saved["lanes"]))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        msg = f"the checkpoint does not say how its converted rows nest ({error!r}): it is damaged"
        raise CheckpointError(msg) from error
    for hook in storage.load_hooks:
        rows = hook(rows, out=None)
    shape = (count,) if storage.ndim == 1 else (count // num_envs, num_envs)
    columns = _columns(rows, note, shape, saved, mine)
    plain = {key: value for key, value in saved.items() if key != "hooked"}
    return {**plain, "columns": columns, "single_copy": None}


def _columns(
    rows: Any, note: dict[str, Any], shape: tuple[int, ...], saved: dict[str, Any], hooks: list[str]
) -> dict[str, Tensor]:
    """Return the columns that a plain state has, having checked that the rows have the fields that were saved."""
    form = Schema.from_json(note["form"])
    try:
        got = {leaf.path for leaf in describe(rows, len(shape)).leaves}
    except OstinatoError as error:
        msg = f"the loading hooks {hooks} returned no rows: {error}"
        raise CheckpointError(msg) from error
    wanted = {leaf.path: leaf for leaf in form.leaves}
    problem = [f"lack {show_path(path)}" for path in wanted.keys() - got]
    problem += [f"have {show_path(path)} besides" for path in got - wanted.keys()]
    values: dict[Any, Tensor] = {}
    for path in wanted.keys() & got:
        leaf, value = wanted[path], kinds.as_tensor(kinds.find_field(rows, path), path)
        if value.dtype is leaf.dtype and tuple(value.shape) == (*shape, *leaf.shape):
            values[path] = value.reshape(saved["rows"], *leaf.shape)
        else:
            problem.append(f"have {show_path(path)} as {value.dtype}{list(value.shape)}")
    if problem:
        msg = (
            f"after the loading hooks {hooks} the rows {', '.join(sorted(problem)[:4])}; {note['hooks']} had been "
            f"given {list(shape)} rows of {form}: register the hooks that convert back, with the same options"
        )
        raise CheckpointError(msg)
    schema = Schema.from_json(saved["schema"])
    columns = {column_name(leaf.path, i): values[leaf.path] for i, leaf in enumerate(schema.leaves)}
    for path, name, has in saved["late"]:  # hooks run where all rows have them, else reading the rows raises
        columns[name], columns[has] = (
            values[tuple(path)],
            torch.ones(int(saved["rows"]), dtype=torch.bool, device="cpu"),
        )
    return columns


def _take_apart(data: Any, path: tuple[Any, ...], columns: dict[str, Tensor]) -> dict[str, Any]:
    """Return how what a hook returned nests, with its tensors by name in `columns`."""
    if len(path) > _MAX_DEPTH:
        msg = f"a saving hook returned data nested more than {_MAX_DEPTH} deep"
        raise CheckpointError(msg)
    if isinstance(data, torch.Tensor):
        if data.is_nested or data.layout is not torch.strided:
            msg = f"a saving hook returned a nested or sparse tensor at {show_path(path)}: return dense tensors"
            raise CheckpointError(msg)
        name = f"hooked {len(columns)}: {'.'.join(map(str, path))}"[:200]
        columns[name] = data.detach()
        return {"kind": "tensor", "name": name}
    opened = kinds.open_node(data, 0)
    if opened is None:
        if kinds.is_non_tensor(data) and kinds.is_tensordict(data):
            msg = f"a saving hook returned a NonTensorStack at {show_path(path)}: return tensors and NonTensorData"
            raise CheckpointError(msg)
        value = data.data if kinds.is_tensor_collection(data) else data  # what a TensorDict wraps that is no tensor
        return {"kind": "value", "value": value}
    node, children = opened
    if node.kind not in _NODES:
        msg = f"a saving hook returned a {node.kind} at {show_path(path)}: return a TensorDict or a dict"
        raise CheckpointError(msg)
    below = [_take_apart(child, (*path, key), columns) for key, child in zip(node.keys, children, strict=True)]
    return {"kind": node.kind, "keys": list(node.keys), "batch": list(node.extra), "children": below}


def _rebuild(tree: dict[str, Any], columns: dict[str, Any], depth: int) -> Any:
    """Return the data that `_take_apart` was given; its tensors are read now, on the CPU."""
    kind = tree["kind"]
    if kind == "tensor":
        return read_column(columns[tree["name"]])
    if kind == "value":
        return tree["value"]
    if kind not in _NODES or depth > _MAX_DEPTH or len(tree["keys"]) != len(tree["children"]):
        msg = f"the checkpoint says of its converted rows that they are a {str(kind)[:40]!r}: it is damaged"
        raise CheckpointError(msg)
    made = [_rebuild(child, columns, depth + 1) for child in tree["children"]]
    device = torch.device("cpu")
    if kind != "tensordict":
        return kinds.make(Node(kind, tuple(tree["keys"])), made, (), device)
    plain = {i for i, child in enumerate(tree["children"]) if child["kind"] not in {"tensor", "tensordict"}}
    keys = tuple(key for i, key in enumerate(tree["keys"]) if i not in plain)
    parts = [part for i, part in enumerate(made) if i not in plain]
    batch = tuple(tree["batch"])
    if any(tuple(part.shape[: len(batch)]) != batch for part in parts):
        msg = f"the checkpoint says of its converted rows that {keys} have the batch size {list(batch)}: it is damaged"
        raise CheckpointError(msg)
    rows = kinds.make(Node("tensordict", keys, None, batch), parts, (), device)
    for i in plain:
        rows.set_non_tensor(tree["keys"][i], made[i])
    return rows


_COUNTS = ("rows_written", "rows_since_empty", "rows_drawn")
_MOST = 2**62
_FOREIGN = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError, OstinatoError)


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise a `CheckpointError` for what unexpected values in a state raise in a part."""
    try:
        yield
    except (CheckpointError, StorageMemoryError):
        raise
    except OptionError as error:  # an option of this part, which the rows do not suit
        msg = f"the checkpoint does not fit {what}: {error}"
        raise CheckpointError(msg) from error
    except _FOREIGN as error:
        msg = f"this is not the state of {what} ({error!r:.300}): it is damaged, or of something else"
        raise CheckpointError(msg) from error


def check_counts(state: dict[str, Any], rows: int) -> None:
    """Check the counts, cursors and generations of a state with so many rows.

    Raises:
        CheckpointError: naming the first of them.
    """
    storage, ring_state = state["storage"]["state"], state["stamps"]
    capacity = _whole("the storage's capacity", storage["capacity"], 1, _MOST * 2)
    _whole("the number of rows", rows, 0, capacity + 1)
    for name in _COUNTS:
        _whole(name, state[name], 0, _MOST)
    written = _whole("the number of stamps", ring_state["written"], 0, _MOST)
    base = _whole("the first generation", ring_state["base"], 0, written + 1)
    _whole("the cursor of the stamps", ring_state["cursor"], 0, capacity)
    array = ring_state["array"]
    if array is not None:
        sound = isinstance(array, Tensor) and array.dtype is torch.int64 and array.ndim == 1
        sound = sound and rows <= array.shape[0] <= capacity
        if not sound or (array.numel() and not 0 <= int(array.min()) <= int(array.max()) <= written):
            msg = f"the checkpoint's generations are not those of {rows} rows: it is damaged"
            raise CheckpointError(msg)
    elif rows > written - base:
        msg = f"the checkpoint holds {rows} rows, of which {written - base} were written: it is damaged"
        raise CheckpointError(msg)
    cursors = {"storage's": storage.get("cursor"), "writer's": state["writer"]["state"].get("cursor")}
    for whose, cursor in cursors.items():
        if cursor is not None:
            # where the ring is not full yet, its rows end at the cursor: a gap would hold rows that were never written
            low, high = (rows, rows + 1) if rows < capacity else (0, capacity)
            _whole(f"the {whose} cursor", cursor, low, high)


def check_ticket(state: dict[str, Any], *, episodes: bool) -> None:
    """Check that a queued draw holds what draws hold.

    Args:
        state: of the draw.
        episodes: whether the buffer can tell slices from each other.

    Raises:
        CheckpointError: naming what is wrong.
    """
    problem = ""
    slots, rng, dice = state["slots"], state["rng"], state.get("dice")
    if not isinstance(slots, Tensor) or slots.dtype is not torch.int64 or slots.ndim != 1 or not slots.numel():
        problem = "has no slots"
    elif type(state["last"]) is not bool:
        problem = "does not say whether it ended a pass"
    elif rng is not None and not (isinstance(rng, Tensor) and rng.dtype is torch.uint8):
        problem = "has no state of a generator"
    elif dice is not None and not (isinstance(dice, Tensor) and bool(dice.isfinite().all())):
        problem = "has random numbers that are none"
    elif (state.get("length") or state.get("lengths") is not None) and not episodes:
        problem = "is of slices, and this buffer has none"
    for name in ("weights", "stamps", "lengths"):
        value = state.get(name)
        if value is not None and not (isinstance(value, Tensor) and value.ndim == 1):
            problem = f"has no {name}"
    lengths = state.get("lengths")
    if lengths is not None and not problem and (lengths.dtype is not torch.int64 or int(lengths.min()) < 1):
        problem = "is of slices without rows"
    if problem:
        msg = f"a queued draw of the checkpoint {problem}: it is damaged"
        raise CheckpointError(msg)


def _whole(what: str, value: Any, low: int, high: int) -> int:
    """Return an integer in `[low, high)`."""
    if type(value) is not int or not low <= value < high:
        msg = f"{what} must be an integer in [{low}, {high}), the checkpoint has {value!r:.80}: it is damaged"
        raise CheckpointError(msg)
    return value


_FIELDS = ("era", "settled", "rows_written", "rows_drawn", "rows_since_empty", "generator")


def hold(engine: LocalEngine, transform: Compose, *, replaced: bool) -> Callable[[], None]:
    """Return what brings a buffer back to its state of now, if a load fails after it has begun to change things.

    Memory: a copy of the sampler's state, and of the rows, unless they are `replaced`; see `Storage.hold`.

    Raises:
        StorageMemoryError: if there is too little for it; nothing has changed then.
    """
    storage = engine.storage
    rows, laid_out, ring, pending = len(storage), storage.laid_out, engine.ring, list(engine.pending)
    parts = [(part, own_tensors(part.state_dict())) for part in (engine.sampler, engine.writer, transform)]
    fields = {name: getattr(engine, name) for name in _FIELDS}
    random = None if engine.generator is None else engine.generator.get_state()
    kept = [part.hold() for part in (engine.tracker, engine.gate, engine.versions) if part is not None]
    bring_rows = storage.hold(replaced=replaced)

    def restore() -> None:
        bring_rows()
        if not rows and not laid_out:
            storage.forget_form()
        for part, state in parts:
            part.load_state_dict(state)
        for name, value in fields.items():
            setattr(engine, name, value)
        if random is not None and engine.generator is not None:
            engine.generator.set_state(random)
        engine.ring = ring
        engine.restores += 1  # gathers in flight notice that rows were away for a moment
        for bring in kept:
            bring()
        engine.pending.clear()
        engine.pending.extend(pending)
        if rows:
            engine.begin_sampler()

    return restore


def own_tensors(state: Any) -> Any:
    """Copy all tensors of a state, densely."""
    return tree_map_only(torch.Tensor, partial(torch.clone, memory_format=torch.contiguous_format), state)


def begin_load(engine: LocalEngine) -> None:
    """Replace the ring before rows change, so that gathers in flight notice."""
    engine.ring = Ring(engine.storage.capacity, engine.storage.device)


def remember_load(engine: LocalEngine, save: str | None) -> None:
    """Let incremental saves go on from the save that was just loaded."""
    engine.saves.remember(save or "", Lineage(engine.ring, engine.ring.written, engine.storage, {}), None)


def end_load(engine: LocalEngine, state: dict[str, Any], capacity: int, episodes: dict[str, Any] | None) -> None:
    """Restore generations and episodes of a checkpoint whose storage had `capacity` slots.

    With another capacity, rows are in the order of their age from slot 0 on, or have generations in an array.
    """
    storage = engine.storage
    rows = len(storage)
    engine.ring = Ring(storage.capacity, storage.device)
    engine.settled = storage.laid_out
    if engine.versions is not None:
        engine.versions.begin(rows)
    if engine.tracker is not None:
        engine.tracker.load_state_dict(storage, episodes)
    if storage.capacity != capacity:  # the room that was added is filled before rows are replaced
        base = max(int(state["base"]), int(state["written"]) - rows)
        state = {**state, "base": base, "cursor": rows % storage.capacity}
    engine.ring.load_state_dict(state, rows)
    engine.begin_sampler()


FORMAT = "ostinato-buffer"

_PARTS = ("storage", "sampler", "writer")


def engine_state(
    engine: LocalEngine, queued: Sequence[Ticket], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return the whole state as nested dicts of plain values and tensors; nothing is copied."""
    parts = {name: getattr(engine, name) for name in _PARTS}
    return {
        **{name: {"class": type(part).__name__, "state": part.state_dict()} for name, part in parts.items()},
        "stamps": engine.ring.state_dict(),
        "rows_written": engine.rows_written,
        "rows_since_empty": engine.rows_since_empty,
        "rows_drawn": engine.rows_drawn,
        "generator": None if engine.generator is None else engine.generator.get_state(),
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "unit": unit_name(engine),
        "pending": [show_ticket(ticket, engine) for ticket in (*queued, *engine.pending)],
        **({} if engine.gate is None else {"flow": engine.gate.state_dict((*queued, *engine.pending))}),
        **({} if engine.tracker is None else {"episodes": engine.tracker.state_dict(engine.storage)}),
    }


class Parts(NamedTuple):
    """The parts of a buffer as they are at one moment: what a state is checked against."""

    storage: Storage
    sampler: Sampler
    writer: Writer
    tracker: EpisodeTracker | None
    unit: SampleUnit | None
    ring: Ring


def parts_of(engine: LocalEngine) -> Parts:
    """Return the parts of a buffer; the caller holds its lock."""
    return Parts(engine.storage, engine.sampler, engine.writer, engine.tracker, engine.unit, engine.ring)


def checker(engine: LocalEngine) -> Callable[[dict[str, Any]], None]:
    """Return what checks a saved state against the parts as they are now; the caller holds the lock."""
    return partial(check_saved, parts_of(engine))


def check_saved(parts: Parts, state: dict[str, Any]) -> None:
    """Raise if a load into these parts would not take a state.

    Raises:
        CheckpointError: naming what it would not take.
    """
    saved = state["storage"]["state"]
    _check_state(parts, state, state["batch_size"])
    if "hooked" not in saved:  # what hooks made of the rows is theirs to read
        parts.storage.check_state(saved)


class Target(NamedTuple):
    """A buffer that a state is to be loaded into."""

    engine: LocalEngine
    transform: Compose
    batch_size: int | None


def unit_name(engine: LocalEngine | Parts) -> str | None:
    """Return what a buffer's unit is, with its options."""
    return None if engine.unit is None else repr(engine.unit)


def own_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state, so that later draws and writes do not change it, and `torch.save` finds plain dense tensors."""
    storage = state["storage"]
    items = storage["state"].get("items")
    if items is not None:  # objects are owned by the storage and never edited in place
        storage = {**storage, "state": {**storage["state"], "items": list(items)}}
        state = {**state, "storage": None}
    copied: dict[str, Any] = own_tensors(state)
    return copied if items is None else {**copied, "storage": storage}


def load_engine_state(engine: LocalEngine, state: dict[str, Any], transform: Compose, batch_size: int | None) -> None:
    """Restore a state, by copy; if it does not fit, nothing has changed.

    Raises:
        CheckpointError: naming the part that differs.
    """
    with engine.lock:
        load_engine_states([Target(engine, transform, batch_size)], [state])


def load_engine_states(
    targets: Sequence[Target], states: Sequence[dict[str, Any]], then: Callable[[], None] | None = None
) -> None:
    """Restore the states of several buffers, all or none; the caller holds their locks.

    Args:
        targets: the buffers.
        states: theirs.
        then: what else belongs to the load; if it fails, the buffers are brought back, too.

    Raises:
        CheckpointError: naming the part that differs.
        StorageMemoryError: if there is too little memory for a copy of the rows that the buffers hold.
    """
    with readable("a replay buffer"):
        pairs = [(t, _in_order(t, _with_cursor(state))) for t, state in zip(targets, states, strict=True)]
        checked = [_check_state(t.engine, state, t.batch_size) for t, state in pairs]
    for target, state in pairs:
        with readable("this storage"):
            target.engine.storage.check_state(state["storage"]["state"])
    held = [hold(t.engine, t.transform, replaced=bool(state["storage"]["state"].get("mapped"))) for t, state in pairs]
    used = [target.engine.ring.written > 0 for target in targets]
    try:
        _load_parts(pairs)
        for (target, state), was_used, (pending, generator) in zip(pairs, used, checked, strict=True):
            engine = target.engine
            engine.era += was_used  # batches drawn before the load are of other rows, whatever their generations
            end_load(engine, state["stamps"], int(state["storage"]["state"]["capacity"]), state.get("episodes"))
            _end_load(engine, state, pending, generator)
        if then is not None:
            then()
    except BaseException:
        for restore in held:
            restore()
        raise


def _end_load(
    engine: LocalEngine, state: dict[str, Any], pending: list[Ticket], generator: torch.Generator | None
) -> None:
    """Take over queued draws, counts and the generator."""
    engine.pending.clear()
    for ticket in engine.retake(pending):
        again = revive(engine, ticket)
        if again is not None:
            engine.pending.append(again)
    if engine.gate is not None:
        engine.gate.load_state_dict(state.get("flow"), engine.ring, engine.pending)
    engine.rows_written, engine.rows_drawn = int(state["rows_written"]), int(state["rows_drawn"])
    engine.rows_since_empty = int(state["rows_since_empty"])
    if generator is not None:
        engine.generator = with_state(engine.generator, generator)


def _check_state(
    engine: LocalEngine | Parts, state: dict[str, Any], batch_size: int | None
) -> tuple[list[Ticket], torch.Generator | None]:
    """Check what can be checked before anything is loaded; return queued draws, and a generator in the saved state."""
    _check_form(engine, state)
    for name in ("sampler", "writer"):
        saved, mine = state[name]["class"], type(getattr(engine, name)).__name__
        if saved != mine:
            msg = f"the checkpoint's {name} is a {saved}, this buffer's a {mine}: make the buffer with matching parts"
            raise CheckpointError(msg)
    if engine.tracker is not None:
        engine.tracker.check_state(state["storage"]["state"], state.get("episodes"))
    if state["pending"] and state.get("unit") != unit_name(engine):
        msg = (
            f"the checkpoint holds queued draws of the unit {state.get('unit')}, this buffer has {unit_name(engine)}: "
            "load it with the same sample_unit"
        )
        raise CheckpointError(msg)
    if state["pending"] and state["batch_size"] != batch_size:
        msg = (
            f"the checkpoint holds queued draws of batch_size={state['batch_size']}, this buffer has "
            f"batch_size={batch_size}: load it with the same batch_size"
        )
        raise CheckpointError(msg)
    rows = saved_rows(state)
    with readable("this sampler"):
        engine.sampler.check_state(state["sampler"]["state"], rows)
    with readable("this writer"):
        engine.writer.check_state(state["writer"]["state"])
    check_counts(state, rows)
    schema = state["storage"]["state"].get("schema")
    pending = [read_ticket(ticket, rows, engine, schema) for ticket in state["pending"]]
    return pending, read_generator(state["generator"], engine.storage.device)


def _with_cursor(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose ring has the cursor that older checkpoints (format 1.2 and before) keep with the writer."""
    cursor = state["writer"]["state"].get("cursor")
    return state if cursor is None else {**state, "stamps": {**state["stamps"], "cursor": int(cursor)}}


def _in_order(target: Target, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with its rows numbered by age, if they fill a ring of another capacity than the buffer's.

    The storage turns its rows when it loads them. A ring that went on where its newest row lies before the oldest one
    would make windows of both, and replace other rows than the oldest.

    Raises:
        CheckpointError: if a part cannot follow.
    """
    engine, saved = target.engine, state["storage"]["state"]
    _check_form(engine, state)
    seam = engine.storage.seam(saved)
    if not seam:
        return state
    _check_state(engine, state, target.batch_size)
    if engine.tracker is not None and engine.tracker.wanted.fixed:
        msg = f"{engine.tracker.wanted!r} tells the episodes of rows by their slots: load with the same max_size"
        raise CheckpointError(msg)
    rows, ring_state = saved_rows(state), state["stamps"]
    array = ring_state["array"]
    if array is not None:
        array = torch.cat((array[seam:], array[:seam]))
    sampler = engine.sampler.turn_state(state["sampler"]["state"], seam, rows)
    return {
        **{name: value for name, value in state.items() if name != "episodes"},  # they are read off the rows
        "sampler": {**state["sampler"], "state": sampler},
        "stamps": {**ring_state, "cursor": 0, "array": array},
        "pending": [turn_ticket(ticket, seam, rows) for ticket in state["pending"]],
    }


def turn_ticket(ticket: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
    """Return a queued draw for rows of which the one in slot `seam` is in slot 0 now."""
    if not seam:
        return ticket
    plan = {"plan": turn_plan(ticket["plan"], seam, rows)} if "plan" in ticket else {}
    return {**ticket, "slots": (ticket["slots"] - seam).remainder_(rows), **plan}


def read_generator(state: Tensor | None, device: torch.device) -> torch.Generator | None:
    """Return a generator in a saved state, or None where none was saved.

    Raises:
        CheckpointError: if it is the state of another device's generator, or damaged.
    """
    if state is None:
        return None
    generator = torch.Generator(device)
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        msg = f"the checkpoint's generator state cannot be used on {device}: {error}"
        raise CheckpointError(msg) from error
    return generator


def with_state(mine: torch.Generator | None, saved: torch.Generator) -> torch.Generator:
    """Bring the buffer's generator to the saved state; a buffer without one gets one: torch's own is never set."""
    if mine is None:
        return saved
    mine.set_state(saved.get_state())
    return mine


def saved_rows(state: dict[str, Any]) -> int:
    """Return how many rows a buffer's state holds."""
    storage = state["storage"]["state"]
    return int(storage["rows"]) if "rows" in storage else len(storage.get("items", ()))


def _check_form(engine: LocalEngine | Parts, state: dict[str, Any]) -> None:
    mine, saved = engine.storage.form, state["storage"]["state"]["form"]
    if mine != saved:
        msg = (
            f"the checkpoint's storage is a {state['storage']['class']} ({saved}), this buffer's a "
            f"{type(engine.storage).__name__} ({mine}): make the buffer with a matching storage"
        )
        raise CheckpointError(msg)


def _load_parts(pairs: Sequence[tuple[Target, dict[str, Any]]]) -> None:
    """Load the parts, the storages last."""
    for target, state in pairs:
        begin_load(target.engine)
        with readable("this sampler"):
            target.engine.sampler.load_state_dict(state["sampler"]["state"])
        with readable("this writer"):
            target.engine.writer.load_state_dict(state["writer"]["state"])
        with readable("these transforms"):
            target.transform.load_state_dict(state["transforms"])
    for target, state in pairs:
        with readable("this storage"):
            target.engine.storage.load_state_dict(state["storage"]["state"])


def revive(engine: LocalEngine, ticket: Ticket) -> Ticket | None:
    """Return a draw that was read for a buffer just loaded, expanded; None if its windows are not whole."""
    draw = ticket.draw
    if draw.generations is not None:  # rows replaced since the draw are read as they are now
        draw = draw._replace(generations=engine.ring.generations(draw.slots))
    plan, schema = ticket.plan, engine.storage.schema
    if plan is not None and schema is not None:
        plan = plan._replace(schema=schema)
        return ticket._replace(draw=draw, serial=engine.ring.written, ring=engine.ring, plan=plan)
    return engine.expand_again(ticket._replace(draw=draw, serial=engine.ring.written, ring=engine.ring))


def show_ticket(ticket: Ticket, engine: LocalEngine) -> dict[str, Any]:
    """Return a queued draw as plain values and tensors.

    Its windows are saved as they were drawn: episodes may have gone on since. Those of which a row has been replaced
    are not: they are made again from the rows that are there.
    """
    draw, plan = ticket.draw, ticket.plan
    state = {"slots": draw.slots, "weights": draw.weights, "last": ticket.last, "rng": ticket.rng}
    more = {"stamps": draw.generations, "lengths": draw.lengths, "dice": ticket.dice}
    held: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
    if plan is not None and not engine.replaced(ticket):
        held["plan"] = show_plan(plan)
    return {**state, "pad": draw.pad, "length": draw.length, **held}


def read_ticket(state: dict[str, Any], rows: int, engine: LocalEngine | Parts, schema: Any) -> Ticket:
    """Return what `show_ticket` gave, not of the buffer's writes yet, and expanded only if its windows were saved.

    Args:
        state: of the draw.
        rows: of the buffer.
        engine: its parts.
        schema: of its rows, encoded.

    Raises:
        CheckpointError: if it does not fit.
    """
    check_ticket(state, episodes=engine.tracker is not None)
    device = engine.storage.device
    slots = state["slots"].to(device, torch.int64).clone()
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < rows:
        msg = f"the checkpoint holds queued draws of slots beyond its {rows} rows: it is damaged"
        raise CheckpointError(msg)
    kept = [state["weights"], *(state.get(name) for name in ("stamps", "lengths", "dice"))]
    weights, generations, lengths, dice = (None if x is None else x.to(device).clone() for x in kept)
    if any(x is not None and x.shape != slots.shape for x in (weights, generations, lengths)):
        msg = (
            f"the checkpoint holds a queued draw of {slots.shape[0]} rows with other numbers of weights or generations"
        )
        raise CheckpointError(msg)
    pad = int(state.get("pad", 0))
    if pad and (lengths is None or int(lengths.max()) > pad):
        msg = f"the checkpoint holds a queued draw of slices that are longer than their pad={pad}: it is damaged"
        raise CheckpointError(msg)
    length = int(state.get("length", 0))
    if not 0 <= length <= rows:
        msg = f"the checkpoint holds a queued draw of slices of {length} rows out of {rows}: it is damaged"
        raise CheckpointError(msg)
    draw = Draw(slots, weights, None, generations, lengths, pad, length)
    plan = None
    if "plan" in state:
        plan = read_plan(state["plan"], Schema.from_json(schema), slots, rows)
    return Ticket(draw, 0, bool(state["last"]), engine.ring, engine.sampler, state["rng"], plan, dice)
