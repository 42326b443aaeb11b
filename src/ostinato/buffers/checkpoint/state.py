"""The state of a buffer or an ensemble: gathered from the parts, and checked against them before a load."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ostinato.buffers.drawn_ahead import HeldRows
from ostinato.buffers.records import Mix, Rows, Source, Ticket
from ostinato.core.records import Draw, Plan
from ostinato.core.rows import Schema
from ostinato.errors import CheckpointError, OptionError
from ostinato.storages.checkpoint import UNREADABLE, raise_unreadable, require_form

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.mixing import EnsembleEngine
    from ostinato.buffers.reader import Reader
    from ostinato.storages import Storage
    from ostinato.transforms import Compose

PartT = TypeVar("PartT")


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


_MOST = 2**62


def check_counts(state: dict[str, Any], rows: int) -> None:
    """Check the counts, cursors and generations of a state with so many rows.

    Raises:
        CheckpointError: naming the first of them.
    """
    storage, ring_state = state["storage"]["state"], state["stamps"]
    capacity, written, base = storage["capacity"], ring_state["written"], ring_state["base"]
    array, cursor = ring_state["array"], storage.get("cursor")
    # where the ring is not full yet, its rows end at the cursor: a gap would hold rows that were never written
    # (unless ObjectRL's `pointer` has moved it among rows: the ring then keeps generations in an array)
    ends = (0, capacity) if rows >= capacity or array is not None or cursor is None else (rows, rows + 1)
    for what, value, low, high in (
        ("the storage's capacity", capacity, 1, _MOST * 2),
        ("the number of rows", rows, 0, capacity + 1),
        *((name, state[name], 0, _MOST) for name in ("rows_written", "rows_since_empty", "rows_drawn")),
        ("the number of rows written", written, 0, _MOST),
        ("the first generation", base, 0, written + 1),
        ("the cursor of the ring", ring_state["cursor"], 0, capacity),
        ("the storage's cursor", 0 if cursor is None else cursor, *ends),
    ):
        if type(value) is not int or not low <= value < high:
            msg = f"{what} must be an integer in [{low}, {high}), the checkpoint has {value!r:.80}: it is damaged"
            raise CheckpointError(msg)
    if array is None and rows > written - base:
        msg = f"the checkpoint holds {rows} rows, of which {written - base} were written: it is damaged"
        raise CheckpointError(msg)
    if array is not None:
        sound = isinstance(array, Tensor) and array.dtype is torch.int64 and array.ndim == 1
        sound = sound and rows <= array.shape[0] <= capacity
        if not sound or (array.numel() and not 0 <= int(array.min()) <= int(array.max()) <= written):
            msg = f"the checkpoint's generations are not those of {rows} rows: it is damaged"
            raise CheckpointError(msg)
        _check_arrivals(ring_state.get("arrivals", array), array, rows)
        _check_deleted(state.get("deleted"), array[:rows])


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


def own_tensors(state: Any) -> Any:
    """Copy all tensors of a state, densely."""
    return tree_map_only(torch.Tensor, partial(torch.clone, memory_format=torch.contiguous_format), state)


def tensor_bytes(state: Any) -> int:
    """Return the bytes of the tensors of a state, without Python objects."""
    nbytes, waiting = 0, [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            nbytes += value.nbytes
        elif isinstance(value, dict):
            for key, item in value.items():
                if key not in {"items", "objects"}:
                    waiting.append(item)
        elif isinstance(value, (list, tuple)):
            waiting += value
    return nbytes


FORMAT = "ostinato-buffer"
ENSEMBLE_FORMAT = "ostinato-ensemble"


def engine_state(
    engine: Reader, queued: Sequence[Ticket], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return the whole state as nested dicts of plain values and tensors; nothing is copied."""
    views = [
        _reader_state(view, () if view.queue is None else view.queue.tickets, view.transform, view.batch_size)
        for view in (engine.store.readers[1:] if engine.own else ())
    ]
    return {
        **{name: _part_state(part) for name, part in (("storage", engine.storage), ("writer", engine.writer))},
        "stamps": engine.ring.state_dict(),
        "rows_written": engine.rows_written,
        "rows_since_empty": engine.rows_since_empty,
        **_reader_state(engine, queued, transform, batch_size),
        **({} if engine.store.left is None else {"deleted": engine.store.left.state()}),
        **({"views": views} if views else {}),
        **({"observers": list(map(_part_state, engine.store.added))} if engine.store.added else {}),
    }


def _part_state(part: Any) -> dict[str, Any]:
    return {"class": type(part).__name__, "state": part.state_dict()}


def _reader_state(
    engine: Reader, queued: Sequence[Ticket], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return what a buffer or a view has of its own: sampler, queued draws, generator, transforms, episodes."""
    return {
        "sampler": _part_state(engine.sampler),
        "rows_drawn": engine.rows_drawn,
        "generator": None if engine.generator is None else engine.generator.get_state(),
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "unit": _unit_name(engine),
        "pending": [show_ticket(ticket, engine) for ticket in (*queued, *engine.pending)],
        **({} if engine.gate is None else {"flow": engine.gate.state((*queued, *engine.pending))}),
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


def checker(engine: Reader) -> Callable[[dict[str, Any]], None]:
    """Return what checks a saved state against the parts as they are now; the caller holds the lock.

    It raises `CheckpointError`, naming what a load into these parts would not take.
    """
    engines, store = [], object.__new__(type(engine.store))
    vars(store).update(vars(engine.store))
    for each in engine.store.readers:
        now: Reader = object.__new__(type(each))
        vars(now).update(vars(each), store=store)
        engines.append(now)

    def check(state: dict[str, Any]) -> None:
        for mine, saved in zip(engines, [state, *view_states(state, len(engines) - 1)], strict=True):
            check_state(mine, saved, saved["batch_size"])
        rows = state["storage"]["state"]
        if "hooked" not in rows:  # what hooks made of the rows is theirs to read
            engines[0].storage.check_state(rows)

    return check


def own_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state, so that later draws and writes do not change it, and `torch.save` finds plain dense tensors."""
    if "members" in state:
        members, rest = state["members"], {key: value for key, value in state.items() if key != "members"}
        return {"members": [own_copy(mine) for mine in members], **own_tensors(rest)}
    rows = dict(state["storage"]["state"])
    items = rows.pop("items", None)  # objects are owned by the storage and never edited in place
    if "columns" in rows:
        rows["columns"] = dict(rows["columns"])
    copied: dict[str, Any] = own_tensors({**state, "storage": {**state["storage"], "state": rows}})
    if items is not None:
        copied["storage"]["state"]["items"] = list(items)
    return copied


def check_state(
    engine: Reader, state: dict[str, Any], batch_size: int | None
) -> tuple[dict[str, Any], list[Ticket], torch.Generator | None]:
    """Check what can be checked before anything is loaded.

    Returns:
        The state with its schema read, the queued draws, and a generator in the saved state.

    Raises:
        CheckpointError: naming the part that differs.
    """
    part = "a replay buffer"
    try:
        state = _with_schema(state, engine.storage)
        _check_parts(engine, state)
        if engine.tracker is not None:
            engine.tracker.check_state(state["storage"]["state"], state.get("episodes"))
        check_queued(state, engine, batch_size)
        rows = saved_rows(state)
        part = "this sampler"
        engine.sampler.check_state(state["sampler"]["state"], rows)
        part = "this writer"
        engine.writer.check_state(state["writer"]["state"])
        part = "a replay buffer"
        check_counts(state, rows)
        pending = [read_ticket(ticket, state, engine) for ticket in state["pending"]]
        return state, pending, read_generator(state["generator"], engine.storage.device)
    except UNREADABLE as error:
        raise_unreadable(part, error)


def _with_schema(state: dict[str, Any], storage: Storage) -> dict[str, Any]:
    """Return a state whose schema is read once."""
    saved = state["storage"]["state"]
    require_form(saved, storage)
    if saved.get("schema") is None:
        return state
    schema = Schema.from_json(saved["schema"], known=storage.schema)
    return {**state, "storage": {**state["storage"], "state": {**saved, "schema": schema}}}


def _check_parts(engine: Reader, state: dict[str, Any]) -> None:
    """Check that a state is of a buffer with parts of these classes."""
    store = engine.store
    for name, part in (("sampler", engine.sampler), ("writer", store.writer)):
        saved, mine = state[name]["class"], type(part).__name__
        if not isinstance(saved, str) or saved != mine:
            shown = saved if isinstance(saved, str) else type(saved).__name__
            msg = f"the checkpoint's {name} is a {shown}, this buffer's a {mine}: make the buffer with matching parts"
            raise CheckpointError(msg)
    observers = [part["class"] for part in state.get("observers", [])]
    if observers != [type(observer).__name__ for observer in store.added]:
        msg = f"the checkpoint is of a buffer with the observers {observers}: add the same ones (rb.observe) first"
        raise CheckpointError(msg)
    if engine.tracker is not None and "deleted" in state and len(state["deleted"]):
        msg = "the checkpoint's rows were deleted one by one, this buffer, or a view of it, has windows or episodes"
        raise CheckpointError(msg)


def copy_part(part: PartT) -> PartT:
    """Return a deep copy of a part of a buffer.

    Raises:
        OptionError: if it cannot be copied.
    """
    try:
        return copy.deepcopy(part)
    except Exception as error:
        msg = (
            f"a load is made into a copy of the {type(part).__name__}, which cannot be copied ({error!r:.200}): give "
            "it __deepcopy__, or __getstate__ without what cannot be copied"
        )
        raise OptionError(msg) from error


def _unit_name(engine: Reader) -> str | None:
    return None if engine.unit is None else engine.unit.shown_options()


def check_queued(state: dict[str, Any], engine: Reader, batch_size: int | None) -> None:
    """Check that draws queued in a state are of the unit and the batch size that a buffer has.

    Raises:
        CheckpointError: if they are not.
    """
    for what, saved, mine in (
        ("sample_unit", state.get("unit"), _unit_name(engine)),
        ("batch_size", state["batch_size"], batch_size),
    ):
        if state["pending"] and saved != mine:
            msg = (
                f"the checkpoint holds queued draws of {what}={saved}, this buffer has {what}={mine}: load it with the "
                f"same {what}"
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


def show_ticket(ticket: Ticket, engine: Reader) -> dict[str, Any]:
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


def read_ticket(state: dict[str, Any], buffer: dict[str, Any], engine: Reader) -> Ticket:
    """Return what `show_ticket` gave, not of the buffer's writes yet, and expanded only if its windows were saved.

    Args:
        state: of the draw.
        buffer: state of the buffer.
        engine: which it is loaded into.

    Raises:
        CheckpointError: if it does not fit.
    """
    rows, storage, device = saved_rows(buffer), buffer["storage"]["state"], engine.storage.device
    schema, seam = storage.get("schema"), engine.storage.seam(storage)
    if seam:  # the row in slot `seam` will be in slot 0
        turned = {"plan": Plan.turn_state(state["plan"], seam, rows)} if "plan" in state else {}
        state = {**state, "slots": (state["slots"] - seam).remainder_(rows), **turned}
    if "rows" in state:
        rows = max(rows, engine.ring.capacity)  # rows that were replaced: nothing is read at their slots
    arrays = [state.get(name) for name in ("weights", "stamps", "lengths", "dice")]
    weights, generations, lengths, dice = (None if x is None else x.to(device).clone() for x in arrays)
    info = {key: value.to(device).clone() for key, value in (state.get("info") or {}).items()} or None
    slots, pad, length = state["slots"].to(device).clone(), int(state["pad"]), int(state["length"])
    ticket = Ticket(
        Draw(slots, weights, info, generations, lengths, pad, length),
        0,
        bool(state["last"]),
        engine.ring,
        engine.sampler,
        state["rng"],
        dice=dice,
    )
    _check_ticket(ticket, rows, episodes=engine.tracker is not None)
    if "plan" in state:
        ticket = ticket._replace(plan=Plan.from_state(state["plan"], Schema.from_json(schema), slots, rows))
    return _with_rows(ticket, state["rows"], engine.storage, schema) if "rows" in state else ticket


def _check_ticket(ticket: Ticket, rows: int, *, episodes: bool) -> None:
    """Check a draw of a checkpoint of so many rows; `episodes` says whether the buffer can tell slices from each other.

    Raises:
        CheckpointError: naming what is wrong.
    """
    slots, weights, info, generations, lengths, pad, length = ticket.draw
    alike, problem, dice, rng = (weights, generations, lengths, *(info or {}).values()), "", ticket.dice, ticket.rng
    if slots.dtype is not torch.int64 or slots.ndim != 1 or not slots.numel():
        problem = "has no slots"
    elif not 0 <= int(slots.min()) <= int(slots.max()) < rows:
        problem = f"has slots beyond its {rows} rows"
    elif any(x is not None and x.shape != slots.shape for x in alike):
        problem = f"of {slots.shape[0]} rows has other numbers of weights or generations"
    elif (dice is not None and not bool(dice.isfinite().all())) or (rng is not None and rng.dtype is not torch.uint8):
        problem = "has no random numbers, or no state of a generator"
    elif (length or lengths is not None) and not episodes:
        problem = "is of slices, and this buffer has none"
    elif lengths is not None and (lengths.dtype is not torch.int64 or int(lengths.min()) < 1):
        problem = "is of slices without rows"
    elif not 0 <= length <= rows or (pad and (lengths is None or int(lengths.max()) > pad)):
        problem = f"is of slices that are longer than its {rows} rows, or than their pad={pad}"
    if problem:
        msg = f"a queued draw of the checkpoint {problem}: it is damaged"
        raise CheckpointError(msg)


def _with_rows(ticket: Ticket, saved: dict[str, Any], storage: Storage, schema: Any) -> Ticket:
    """Return a draw with the rows that it had, which the buffer has replaced."""
    count, stale = ticket.records.shape[0], saved["stale"]
    if not isinstance(stale, Tensor) or stale.dtype is not torch.bool or stale.shape != (count,):
        msg = "a queued draw of the checkpoint does not say which of its rows were replaced: it is damaged"
        raise CheckpointError(msg)
    payload = storage.read_payload(saved["payload"], None if schema is None else Schema.from_json(schema), count)
    rows = Rows(Source(storage, None), payload, 0, ticket.ring, ticket, stale.to(storage.device).clone())
    return ticket._replace(held=HeldRows(ticket, rows))


# -- ensembles: the state of each member, and what is the ensemble's own ----------------------------------------------


def ensemble_state(
    engine: EnsembleEngine, queued: Sequence[Mix], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return the whole state of an ensemble, with draws that are queued; nothing is copied.

    The caller holds the locks.
    """
    return {
        "members": [member.buffer._state() for member in engine.own],  # noqa: SLF001 (one package)
        "mixing": engine.sampler.state_dict(),
        "generator": None if engine.generator is None else engine.generator.get_state(),
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "pending": [_show(mix, engine.engines) for mix in (*queued, *engine.pending)],
    }


def _show(mix: Mix, engines: Sequence[Reader]) -> dict[str, Any]:
    tickets = [show_ticket(ticket, engines[i]) for i, ticket in zip(mix.members, mix.tickets, strict=True)]
    owed = {} if mix.owed is None else {"owed": mix.owed}
    return {"members": mix.members, "tickets": tickets, "rng": mix.rng, **owed}


def ensemble_checker(engine: EnsembleEngine) -> Callable[[dict[str, Any]], None]:
    """Return what checks a saved state against the members as they are now; the caller holds the locks."""
    checks, sampler, engines = [checker(member) for member in engine.engines], engine.sampler, engine.engines

    def check(state: dict[str, Any]) -> None:
        sampler.check_state(state["mixing"])
        for check_member, saved in zip(checks, state["members"], strict=True):
            check_member(saved)
        read_queue(state, engines)

    return check


def read_queue(state: dict[str, Any], parts: Sequence[Any]) -> list[Mix]:
    """Return the draws made ahead in a state of members that have these parts.

    Raises:
        CheckpointError: if one is damaged.
    """
    queue = []
    for mix in state["pending"]:
        chosen, owed = [int(i) for i in mix["members"]], None
        if len(chosen) != len(mix["tickets"]) or any(not 0 <= i < len(parts) for i in chosen):
            msg = f"the checkpoint holds a queued draw from the members {chosen}: it is damaged"
            raise CheckpointError(msg)
        if "owed" in mix:
            owed = list(map(float, mix["owed"]))
            if len(owed) != len(parts):
                msg = f"the checkpoint holds a queued draw that owes rows {mix['owed']!r:.80}: it is damaged"
                raise CheckpointError(msg)
        pairs = zip(chosen, mix["tickets"], strict=True)
        draws = [read_ticket(ticket, state["members"][i], parts[i]) for i, ticket in pairs]
        queue.append(Mix(chosen, draws, mix["rng"], owed))
    return queue
