"""The state of a buffer or an ensemble: gathered from the parts, and checked against them before a load."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ostinato.buffers.drawn_ahead import HeldRows
from ostinato.buffers.records import Rows, Source, Ticket
from ostinato.core.records import Draw, Plan
from ostinato.core.rows import Schema
from ostinato.errors import CheckpointError
from ostinato.storages.checkpoint import convert_rows, readable, restore_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ostinato.buffers.engine import LocalEngine
    from ostinato.core.episodes.tracker import EpisodeTracker
    from ostinato.core.ring import Ring
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.transforms import Compose
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer


def converted(state: dict[str, Any], storages: Sequence[Storage]) -> dict[str, Any]:
    """Return the state of a buffer, or of an ensemble, with the rows as the save hooks of its storages make them.

    Memory: whatever the hooks return.

    Raises:
        CheckpointError: if a hook returns something that a checkpoint cannot hold.
    """
    return each_storage(state, storages, lambda saved, storage, _: convert_rows(saved, storage))


def restoring(
    restore: Callable[[dict[str, Any]], None], storages: Sequence[Storage]
) -> Callable[[dict[str, Any]], None]:
    """Return `restore` for states read from a checkpoint: the load hooks give the rows the form that they had.

    It raises `CheckpointError` if rows were converted and there is no load hook, or the other way round, or what the
    load hooks return is not rows of the form saved; nothing is changed then.
    """
    return lambda state: restore(each_storage(state, storages, lambda saved, it, _: restore_rows(saved, it)))


def each_storage(
    state: dict[str, Any], storages: Sequence[Any], change: Callable[[dict[str, Any], Any, str], dict[str, Any]]
) -> dict[str, Any]:
    """Return the state of a buffer, or of an ensemble, with the states of its storages changed.

    Args:
        state: of the buffer.
        storages: its storage, or those of the members; with another number of members nothing is changed.
        change: gets the state of a storage, the storage, and the beginning of the names of its arrays.
    """

    def of_one(mine: dict[str, Any], storage: Any, prefix: str) -> dict[str, Any]:
        part = mine["storage"]
        return {**mine, "storage": {**part, "state": change(part["state"], storage, prefix)}}

    members = state.get("members")
    if members is None:
        return of_one(state, storages[0], "")
    if len(members) != len(storages):
        return state  # the ensemble says so itself
    pairs = enumerate(zip(members, storages, strict=True))
    return {**state, "members": [of_one(mine, storage, f"{i}:") for i, (mine, storage) in pairs]}


_COUNTS = ("rows_written", "rows_since_empty", "rows_drawn")
_MOST = 2**62


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
    written = _whole("the number of rows written", ring_state["written"], 0, _MOST)
    base = _whole("the first generation", ring_state["base"], 0, written + 1)
    _whole("the cursor of the ring", ring_state["cursor"], 0, capacity)
    array = ring_state["array"]
    if array is not None:
        sound = isinstance(array, Tensor) and array.dtype is torch.int64 and array.ndim == 1
        sound = sound and rows <= array.shape[0] <= capacity
        if not sound or (array.numel() and not 0 <= int(array.min()) <= int(array.max()) <= written):
            msg = f"the checkpoint's generations are not those of {rows} rows: it is damaged"
            raise CheckpointError(msg)
        _check_arrivals(ring_state.get("arrivals", array), array, rows)
        _check_deleted(state.get("deleted"), array[:rows])
    elif rows > written - base:
        msg = f"the checkpoint holds {rows} rows, of which {written - base} were written: it is damaged"
        raise CheckpointError(msg)
    cursors = {"storage's": storage.get("cursor"), "writer's": state["writer"]["state"].get("cursor")}
    for whose, cursor in cursors.items():
        if cursor is not None:
            # where the ring is not full yet, its rows end at the cursor: a gap would hold rows that were never written
            # (unless ObjectRL's `pointer` has moved it among rows: the ring then keeps generations in an array)
            low, high = (rows, rows + 1) if rows < capacity and array is None else (0, capacity)
            _whole(f"the {whose} cursor", cursor, low, high)


def _check_arrivals(arrivals: Any, generations: Tensor, rows: int) -> None:
    """Check that no row came after it was edited, and that every row of a generation came at some time."""
    sound = isinstance(arrivals, Tensor) and arrivals.dtype is torch.int64 and arrivals.shape == generations.shape
    if not sound or not torch.equal(arrivals > 0, generations > 0) or bool((arrivals > generations).any()):
        msg = f"the checkpoint's arrivals are not those of {rows} rows: it is damaged"
        raise CheckpointError(msg)


def _check_deleted(deleted: Any, generations: Tensor) -> None:
    """Check that the slots of deleted rows are those without a generation."""
    if deleted is None:
        return
    there = generations.cpu() > 0
    for name, expected in (("free", ~there), ("order", there)):
        found, slots = deleted[name], expected.nonzero().reshape(-1)
        sound = isinstance(found, Tensor) and found.dtype is torch.int64 and found.ndim == 1
        if not sound or not torch.equal(found.cpu().sort().values, slots):
            msg = (
                f"the checkpoint's deleted rows ({name}) are not those of {int((~there).sum())} rows without a "
                "generation: it is damaged"
            )
            raise CheckpointError(msg)


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


def own_tensors(state: Any) -> Any:
    """Copy all tensors of a state, densely."""
    return tree_map_only(torch.Tensor, partial(torch.clone, memory_format=torch.contiguous_format), state)


FORMAT = "ostinato-buffer"


def engine_state(
    engine: LocalEngine, queued: Sequence[Ticket], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return the whole state as nested dicts of plain values and tensors; nothing is copied."""
    views = [
        _reader_state(view, () if view.queue is None else view.queue.tickets, view.transform, view.batch_size)
        for view in engine.views.live()
    ]
    return {
        **{name: _part_state(part) for name, part in (("storage", engine.storage), ("writer", engine.writer))},
        "stamps": engine.ring.state_dict(),
        "rows_written": engine.rows_written,
        "rows_since_empty": engine.rows_since_empty,
        **_reader_state(engine, queued, transform, batch_size),
        **({} if engine.left is None else {"deleted": engine.left.state()}),
        **({"views": views} if views else {}),
    }


def _part_state(part: Any) -> dict[str, Any]:
    return {"class": type(part).__name__, "state": part.state_dict()}


def _reader_state(
    engine: LocalEngine, queued: Sequence[Ticket], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return what a buffer or a view has of its own: sampler, queued draws, generator, transforms, episodes."""
    return {
        "sampler": _part_state(engine.sampler),
        "rows_drawn": engine.rows_drawn,
        "generator": None if engine.generator is None else engine.generator.get_state(),
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "unit": unit_name(engine),
        "pending": [show_ticket(ticket, engine) for ticket in (*queued, *engine.pending)],
        **({} if engine.gate is None else {"flow": engine.gate.state_dict((*queued, *engine.pending))}),
        **({} if engine.tracker is None else {"episodes": engine.tracker.state_dict(engine.storage)}),
    }


_READER = ("sampler", "rows_drawn", "generator", "transforms", "batch_size", "unit", "pending", "flow", "episodes")
"""Entries of the state that a view has of its own."""


def view_states(state: dict[str, Any], views: int) -> list[dict[str, Any]]:
    """Return the states of the views in the state of a buffer, each as that of a buffer with the view's sampler.

    Args:
        state: of the buffer.
        views: views that it is to be loaded into.

    Raises:
        CheckpointError: if it has another number of views.
    """
    saved = state.get("views", [])
    if len(saved) != views:
        msg = (
            f"the checkpoint is of a buffer with {len(saved)} views, this one has {views}: make the same views in the "
            "same order before it is loaded (rb.view), and others afterwards"
        )
        raise CheckpointError(msg)
    rest = {key: value for key, value in state.items() if key not in {*_READER, "views"}}
    return [{**rest, **mine} for mine in saved]


class Parts(NamedTuple):
    """The parts of a buffer as they are at one moment: what a state is checked against."""

    storage: Storage
    sampler: Sampler
    writer: Writer
    tracker: EpisodeTracker | None
    unit: SampleUnit | None
    ring: Ring
    views: tuple[Parts, ...] = ()


def parts_of(engine: LocalEngine) -> Parts:
    """Return the parts of a buffer; the caller holds its lock."""
    views = tuple(map(parts_of, engine.views.live()))
    return Parts(engine.storage, engine.sampler, engine.writer, engine.tracker, engine.unit, engine.ring, views)


def checker(engine: LocalEngine) -> Callable[[dict[str, Any]], None]:
    """Return what checks a saved state against the parts as they are now; the caller holds the lock."""
    return partial(check_saved, parts_of(engine))


def check_saved(parts: Parts, state: dict[str, Any]) -> None:
    """Raise if a load into these parts would not take a state.

    Raises:
        CheckpointError: naming what it would not take.
    """
    saved = state["storage"]["state"]
    check_state(parts, state, state["batch_size"])
    for view, mine in zip(parts.views, view_states(state, len(parts.views)), strict=True):
        check_state(view, mine, mine["batch_size"])
    if "hooked" not in saved:  # what hooks made of the rows is theirs to read
        parts.storage.check_state(saved)


def unit_name(engine: LocalEngine | Parts) -> str | None:
    """Return what a buffer's unit is, with its options."""
    return None if engine.unit is None else engine.unit.shown_options()


def own_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state, so that later draws and writes do not change it, and `torch.save` finds plain dense tensors."""
    if "members" in state:
        members, rest = state["members"], {key: value for key, value in state.items() if key != "members"}
        return {"members": [own_copy(mine) for mine in members], **own_tensors(rest)}
    storage = state["storage"]
    if "columns" in storage["state"]:
        columns = dict(storage["state"]["columns"])
        storage = {**storage, "state": {**storage["state"], "columns": columns}}
        state = {**state, "storage": storage}
    items = storage["state"].get("items")
    if items is not None:  # objects are owned by the storage and never edited in place
        storage = {**storage, "state": {**storage["state"], "items": list(items)}}
        state = {**state, "storage": None}
    copied: dict[str, Any] = own_tensors(state)
    return copied if items is None else {**copied, "storage": storage}


def check_state(
    engine: LocalEngine | Parts, state: dict[str, Any], batch_size: int | None
) -> tuple[list[Ticket], torch.Generator | None]:
    """Check what can be checked before anything is loaded; return queued draws, and a generator in the saved state."""
    check_form(engine, state)
    for name in ("sampler", "writer"):
        saved, mine = state[name]["class"], type(getattr(engine, name)).__name__
        if not isinstance(saved, str) or saved != mine:
            shown = saved if isinstance(saved, str) else type(saved).__name__
            msg = f"the checkpoint's {name} is a {shown}, this buffer's a {mine}: make the buffer with matching parts"
            raise CheckpointError(msg)
    if engine.tracker is not None:
        if "deleted" in state and len(state["deleted"]):
            msg = "the checkpoint's rows were deleted one by one, this buffer, or a view of it, has windows or episodes"
            raise CheckpointError(msg)
        engine.tracker.check_state(state["storage"]["state"], state.get("episodes"))
    check_queued(state, engine, batch_size)
    rows = saved_rows(state)
    with readable("this sampler"):
        engine.sampler.check_state(state["sampler"]["state"], rows)
    with readable("this writer"):
        engine.writer.check_state(state["writer"]["state"])
    check_counts(state, rows)
    pending = [read_ticket(ticket, state, engine) for ticket in state["pending"]]
    return pending, read_generator(state["generator"], engine.storage.device)


def check_queued(state: dict[str, Any], engine: LocalEngine | Parts, batch_size: int | None) -> None:
    """Check that draws queued in a state are of the unit and the batch size that a buffer has.

    Raises:
        CheckpointError: if they are not.
    """
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


def saved_rows(state: dict[str, Any]) -> int:
    """Return how many rows a buffer's state holds."""
    storage = state["storage"]["state"]
    return int(storage["rows"]) if "rows" in storage else len(storage.get("items", ()))


def check_form(engine: LocalEngine | Parts, state: dict[str, Any]) -> None:
    """Raise `CheckpointError` if the rows of a state are in another form than those of a storage."""
    mine, saved = engine.storage.form, state["storage"]["state"]["form"]
    if mine != saved:
        msg = (
            f"the checkpoint's storage is a {state['storage']['class']} ({saved}), this buffer's a "
            f"{type(engine.storage).__name__} ({mine}): make the buffer with a matching storage"
        )
        raise CheckpointError(msg)


def show_ticket(ticket: Ticket, engine: LocalEngine) -> dict[str, Any]:
    """Return a queued draw as plain values and tensors.

    Its windows are saved as they were drawn: episodes may have gone on since. So are its rows, if the buffer has
    replaced one of them.
    """
    draw, plan, kept = ticket.draw, ticket.plan, None if ticket.held is None else ticket.held.rows
    state = {"slots": draw.slots, "weights": draw.weights, "last": ticket.last, "rng": ticket.rng}
    more = {"stamps": draw.generations, "lengths": draw.lengths, "dice": ticket.dice}
    held: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
    if draw.info:
        held["info"] = draw.info
    if plan is not None:
        held["plan"] = plan.state_dict()
    if kept is not None:
        payload = kept.source.storage.show_payload(kept.payload)
        held["rows"] = {"payload": payload, "stale": engine.stale_rows(kept.ticket, kept)}
    return {**state, "pad": draw.pad, "length": draw.length, **held}


def read_ticket(state: dict[str, Any], buffer: dict[str, Any], engine: LocalEngine | Parts) -> Ticket:
    """Return what `show_ticket` gave, not of the buffer's writes yet, and expanded only if its windows were saved.

    Args:
        state: of the draw.
        buffer: state of the buffer.
        engine: which it is loaded into.

    Raises:
        CheckpointError: if it does not fit.
    """
    check_ticket(state, episodes=engine.tracker is not None)
    rows, storage = saved_rows(buffer), buffer["storage"]["state"]
    schema, seam = storage.get("schema"), engine.storage.seam(storage)
    if seam:  # the row in slot `seam` will be in slot 0
        plan = {"plan": Plan.turn_state(state["plan"], seam, rows)} if "plan" in state else {}
        state = {**state, "slots": (state["slots"] - seam).remainder_(rows), **plan}
    device = engine.storage.device
    slots = state["slots"].to(device, torch.int64).clone()
    if "rows" in state:
        rows = max(rows, engine.ring.capacity)  # rows that were replaced: nothing is read at their slots
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < rows:
        msg = f"the checkpoint holds queued draws of slots beyond its {rows} rows: it is damaged"
        raise CheckpointError(msg)
    kept = [state["weights"], *(state.get(name) for name in ("stamps", "lengths", "dice"))]
    weights, generations, lengths, dice = (None if x is None else x.to(device).clone() for x in kept)
    info = state.get("info")
    if any(x is not None and x.shape != slots.shape for x in (weights, generations, lengths, *(info or {}).values())):
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
    draw = Draw(
        slots,
        weights,
        None if info is None else {key: value.to(device).clone() for key, value in info.items()},
        generations,
        lengths,
        pad,
        length,
    )
    plan = None
    if "plan" in state:
        plan = Plan.from_state(state["plan"], Schema.from_json(schema), slots, rows)
    ticket = Ticket(draw, 0, bool(state["last"]), engine.ring, engine.sampler, state["rng"], plan, dice)
    return _with_rows(ticket, state["rows"], engine.storage, schema) if "rows" in state else ticket


def _with_rows(ticket: Ticket, saved: dict[str, Any], storage: Storage, schema: Any) -> Ticket:
    """Return a draw with the rows that it had, which the buffer has replaced."""
    count, stale = ticket.records.shape[0], saved["stale"]
    if not isinstance(stale, Tensor) or stale.dtype is not torch.bool or stale.shape != (count,):
        msg = "a queued draw of the checkpoint does not say which of its rows were replaced: it is damaged"
        raise CheckpointError(msg)
    payload = storage.read_payload(saved["payload"], None if schema is None else Schema.from_json(schema), count)
    rows = Rows(Source(storage, None), payload, 0, ticket.ring, ticket, stale.to(storage.device).clone())
    return ticket._replace(held=HeldRows(ticket, rows))


@contextlib.contextmanager
def one_at_a_time(engines: Sequence[LocalEngine]) -> Iterator[None]:
    """Keep other saves and loads of these buffers out; taken before any engine's lock, in an order that is the same."""
    with contextlib.ExitStack() as stack:
        for engine in sorted(engines, key=id):
            stack.enter_context(engine.saves.lock)
        yield
