"""The state of a buffer: gathered from its parts, checked against them, and saved through `durable`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ostinato.buffers.expansion import expand_again
from ostinato.buffers.gate import retake
from ostinato.buffers.loading import begin_load, end_load, hold, own_tensors
from ostinato.buffers.records import Ticket
from ostinato.buffers.soundness import check_counts, check_ticket, readable
from ostinato.core.draw import Draw
from ostinato.core.plan import read_plan, show_plan, turn_plan
from ostinato.core.state import decode_schema
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.chronicle import Chronicle
    from ostinato.buffers.engine import Engine
    from ostinato.core.stamps import Stamps
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.transforms import Compose
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

__all__ = [
    "FORMAT",
    "Parts",
    "Target",
    "check_saved",
    "checker",
    "engine_state",
    "load_engine_state",
    "load_engine_states",
    "own_copy",
    "own_tensors",
    "parts_of",
    "read_generator",
    "read_ticket",
    "revive",
    "saved_rows",
    "show_ticket",
    "turn_ticket",
    "unit_name",
    "with_state",
]

FORMAT = "ostinato-buffer"

_PARTS = ("storage", "sampler", "writer")


def engine_state(
    engine: Engine, queued: Sequence[Ticket], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return the whole state as nested dicts of plain values and tensors; nothing is copied."""
    parts = {name: getattr(engine, name) for name in _PARTS}
    return {
        **{name: {"class": type(part).__name__, "state": part.state_dict()} for name, part in parts.items()},
        "stamps": engine.stamps.state_dict(),
        "rows_written": engine.rows_written,
        "rows_since_empty": engine.rows_since_empty,
        "rows_drawn": engine.rows_drawn,
        "generator": None if engine.generator is None else engine.generator.get_state(),
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "unit": unit_name(engine),
        "pending": [show_ticket(ticket, engine) for ticket in (*queued, *engine.pending)],
        **({} if engine.gate is None else {"flow": engine.gate.state_dict((*queued, *engine.pending))}),
        **({} if engine.chronicle is None else {"episodes": engine.chronicle.state_dict(engine.storage)}),
    }


class Parts(NamedTuple):
    """The parts of a buffer as they are at one moment: what a state is checked against."""

    storage: Storage
    sampler: Sampler
    writer: Writer
    chronicle: Chronicle | None
    unit: SampleUnit | None
    stamps: Stamps


def parts_of(engine: Engine) -> Parts:
    """Return the parts of a buffer; the caller holds its lock."""
    return Parts(engine.storage, engine.sampler, engine.writer, engine.chronicle, engine.unit, engine.stamps)


def checker(engine: Engine) -> Callable[[dict[str, Any]], None]:
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

    engine: Engine
    transform: Compose
    batch_size: int | None


def unit_name(engine: Engine | Parts) -> str | None:
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


def load_engine_state(engine: Engine, state: dict[str, Any], transform: Compose, batch_size: int | None) -> None:
    """Restore a state, by copy; what does not fit is refused before anything changes.

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
        pairs = [(t, _in_order(t, state)) for t, state in zip(targets, states, strict=True)]
        checked = [_check_state(t.engine, state, t.batch_size) for t, state in pairs]
    for target, state in pairs:
        with readable("this storage"):
            target.engine.storage.check_state(state["storage"]["state"])
    held = [hold(t.engine, t.transform, replaced=bool(state["storage"]["state"].get("mapped"))) for t, state in pairs]
    used = [target.engine.stamps.written > 0 for target in targets]
    try:
        _load_parts(pairs)
        for (target, state), was_used, (pending, generator) in zip(pairs, used, checked, strict=True):
            engine = target.engine
            engine.era += was_used  # batches drawn before the load are of other rows, whatever their stamps
            end_load(engine, state["stamps"], int(state["storage"]["state"]["capacity"]), state.get("episodes"))
            _end_load(engine, state, pending, generator)
        if then is not None:
            then()
    except BaseException:
        for restore in held:
            restore()
        raise


def _end_load(engine: Engine, state: dict[str, Any], pending: list[Ticket], generator: torch.Generator | None) -> None:
    """Take over queued draws, counts and the generator."""
    engine.pending.clear()
    for ticket in retake(engine, pending):
        again = revive(engine, ticket)
        if again is not None:
            engine.pending.append(again)
    if engine.gate is not None:
        engine.gate.load_state_dict(engine, state.get("flow"))
    engine.rows_written, engine.rows_drawn = int(state["rows_written"]), int(state["rows_drawn"])
    engine.rows_since_empty = int(state["rows_since_empty"])
    if generator is not None:
        engine.generator = with_state(engine.generator, generator)


def _check_state(
    engine: Engine | Parts, state: dict[str, Any], batch_size: int | None
) -> tuple[list[Ticket], torch.Generator | None]:
    """Check what can be checked before anything is loaded; return queued draws, and a generator in the saved state."""
    _check_form(engine, state)
    for name in ("sampler", "writer"):
        saved, mine = state[name]["class"], type(getattr(engine, name)).__name__
        if saved != mine:
            msg = f"the checkpoint's {name} is a {saved}, this buffer's a {mine}: make the buffer with matching parts"
            raise CheckpointError(msg)
    if engine.chronicle is not None:
        engine.chronicle.check_state(state["storage"]["state"], state.get("episodes"))
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
    if engine.chronicle is not None and engine.chronicle.wanted.fixed:
        msg = f"{engine.chronicle.wanted!r} tells the episodes of rows by their slots: load with the same max_size"
        raise CheckpointError(msg)
    rows, stamps, writer = saved_rows(state), state["stamps"], state["writer"]
    array = stamps["array"]
    if array is not None:
        array = torch.cat((array[seam:], array[:seam]))
    sampler = engine.sampler.turn_state(state["sampler"]["state"], seam, rows)
    cursor = {"cursor": 0} if "cursor" in writer["state"] else {}
    return {
        **{name: value for name, value in state.items() if name != "episodes"},  # they are read off the rows
        "sampler": {**state["sampler"], "state": sampler},
        "writer": {**writer, "state": {**writer["state"], **cursor}},
        "stamps": {**stamps, "cursor": 0, "array": array},
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


def _check_form(engine: Engine | Parts, state: dict[str, Any]) -> None:
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


def revive(engine: Engine, ticket: Ticket) -> Ticket | None:
    """Return a draw that was read for a buffer just loaded, expanded; None if its windows are not whole."""
    draw = ticket.draw
    if draw.stamps is not None:  # rows replaced since the draw are read as they are now
        draw = draw._replace(stamps=engine.stamps.of(draw.slots))
    plan, schema = ticket.plan, engine.storage.schema
    if plan is not None and schema is not None:
        plan = plan._replace(schema=schema)
        return ticket._replace(draw=draw, serial=engine.stamps.written, stamps=engine.stamps, plan=plan)
    return expand_again(engine, ticket._replace(draw=draw, serial=engine.stamps.written, stamps=engine.stamps))


def show_ticket(ticket: Ticket, engine: Engine) -> dict[str, Any]:
    """Return a queued draw as plain values and tensors.

    Its windows are saved as they were drawn: episodes may have gone on since. Those of which a row has been replaced
    are not: they are made again from the rows that are there.
    """
    draw, plan = ticket.draw, ticket.plan
    state = {"slots": draw.slots, "weights": draw.weights, "last": ticket.last, "rng": ticket.rng}
    more = {"stamps": draw.stamps, "lengths": draw.lengths, "dice": ticket.dice}
    held: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
    if plan is not None and not engine.replaced(ticket):
        held["plan"] = show_plan(plan)
    return {**state, "pad": draw.pad, "length": draw.length, **held}


def read_ticket(state: dict[str, Any], rows: int, engine: Engine | Parts, schema: Any) -> Ticket:
    """Return what `show_ticket` gave, not of the buffer's writes yet, and expanded only if its windows were saved.

    Args:
        state: of the draw.
        rows: of the buffer.
        engine: its parts.
        schema: of its rows, encoded.

    Raises:
        CheckpointError: if it does not fit.
    """
    check_ticket(state, episodes=engine.chronicle is not None)
    device = engine.storage.device
    slots = state["slots"].to(device, torch.int64).clone()
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < rows:
        msg = f"the checkpoint holds queued draws of slots beyond its {rows} rows: it is damaged"
        raise CheckpointError(msg)
    kept = [state["weights"], *(state.get(name) for name in ("stamps", "lengths", "dice"))]
    weights, stamps, lengths, dice = (None if x is None else x.to(device).clone() for x in kept)
    if any(x is not None and x.shape != slots.shape for x in (weights, stamps, lengths)):
        msg = f"the checkpoint holds a queued draw of {slots.shape[0]} rows with other numbers of weights or stamps"
        raise CheckpointError(msg)
    pad = int(state.get("pad", 0))
    if pad and (lengths is None or int(lengths.max()) > pad):
        msg = f"the checkpoint holds a queued draw of slices that are longer than their pad={pad}: it is damaged"
        raise CheckpointError(msg)
    length = int(state.get("length", 0))
    if not 0 <= length <= rows:
        msg = f"the checkpoint holds a queued draw of slices of {length} rows out of {rows}: it is damaged"
        raise CheckpointError(msg)
    draw = Draw(slots, weights, None, stamps, lengths, pad, length)
    plan = None
    if "plan" in state:
        plan = read_plan(state["plan"], decode_schema(schema), slots, rows)
    return Ticket(draw, 0, bool(state["last"]), engine.stamps, engine.sampler, state["rng"], plan, dice)
