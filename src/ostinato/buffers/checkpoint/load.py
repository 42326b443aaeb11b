"""Loading: open a checkpoint with its rows read or mapped, check it, and restore buffers and ensembles from it."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ostinato.buffers.checkpoint.state import (
    FORMAT,
    check_form,
    check_state,
    each_storage,
    own_tensors,
    restoring,
    saved_rows,
    view_states,
)
from ostinato.buffers.drawn_ahead import HeldRows
from ostinato.core.records import Plan
from ostinato.core.ring import Ring
from ostinato.core.rows import NAME_LENGTH, Schema
from ostinato.durable import CheckpointReader, progress
from ostinato.errors import CheckpointError, OptionError
from ostinato.storages.checkpoint import get_objects, hooks_of, readable
from ostinato.storages.object_columns import unpack
from ostinato.storages.tensor import raise_mapped_ring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.buffers.engine import LocalEngine
    from ostinato.buffers.records import Ticket
    from ostinato.storages import Storage
    from ostinato.transforms import Compose


class Reading(NamedTuple):
    """How a checkpoint is read."""

    format_name: str
    verify: bool
    mmap: bool


def load_buffer(
    path: str | Path, restore: Callable[[dict[str, Any]], None], storages: Sequence[Storage], reading: Reading
) -> str | None:
    """Read a directory and hand its state to `restore`; rows are read straight into the storages' memory.

    A storage that holds rows already is only touched once every file is open and every checksum was compared: its rows
    are then copied out of the open files, whatever others save to the directory meanwhile.

    Returns:
        The name of the save that was loaded, from which an incremental save can go on.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CheckpointError: if it does not fit.
        DamagedFileError: naming the damaged file.
        OptionError: if rows of a storage cannot be mapped.
    """
    for storage in storages if reading.mmap else ():
        hooks = hooks_of(storage, "load_hooks")
        if not storage.mappable or hooks:
            msg = (
                "mmap=True needs a LazyTensorStorage on the CPU without single_copy and loading hooks, got "
                f"{storage!r} with {len(hooks)} hooks: load without it"
            )
            raise OptionError(msg)
    reader = CheckpointReader(path, format_name=reading.format_name)
    used = not reading.mmap and any(map(len, storages))
    progress.begin(reader.nbytes * (1 + (used and reading.verify)))
    with readable(f"a replay buffer in {path}"):
        state = open_state(reader, storages, reading, opened=used)
    if used and reading.verify:
        reader.verify_arrays()
    for mine, storage in zip(state.get("members", [state]), storages, strict=False) if reading.mmap else ():
        with readable("this storage"):
            saved = mine["storage"]["state"]
            seam = storage.seam(saved)
        if seam:
            raise_mapped_ring(saved, seam, storage.capacity)
    restoring(restore, storages)(state)
    return reader.save


def check_loadable(path: str | Path, engine: LocalEngine, batch_size: int | None) -> Schema | None:
    """Check that a buffer can load a directory, without reading its rows; nothing is changed.

    What load hooks make of the rows, and damage in the files of rows, is only found when the rows are loaded.

    Returns:
        The schema of the rows; None if they have none.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CheckpointError: if it does not fit.
    """
    storage, reading = engine.storage, Reading(FORMAT, verify=False, mmap=False)
    reader = CheckpointReader(path, format_name=FORMAT)
    with readable(f"a replay buffer in {path}"):
        state = open_state(reader, [storage], reading, objects=False)
        saved = state["storage"]["state"]
        if not hooks_of(storage, "load_hooks"):
            check_state(engine, state, batch_size)
            storage.check_state(saved)
        return None if saved.get("schema") is None else Schema.from_json(saved["schema"], known=storage.schema)


def open_state(
    reader: CheckpointReader, storages: Sequence[Any], reading: Reading, *, objects: bool = True, opened: bool = False
) -> dict[str, Any]:
    """Return the state of a buffer, or an ensemble, with its rows where their names stand.

    Columns are read when they are copied, out of files that are open already if `opened`. Without `objects`, Python
    objects are only counted.
    """
    change = partial(_get_rows, reader, reading, objects=objects, opened=opened)
    return each_storage(reader.state(), storages, change)


def _get_rows(
    reader: CheckpointReader,
    reading: Reading,
    saved: dict[str, Any],
    storage: Any,
    prefix: str,
    *,
    objects: bool,
    opened: bool,
) -> dict[str, Any]:
    """Return the state of a storage with its rows where their names stand."""
    saved = dict(saved)
    if "columns" in saved:
        names = saved["columns"]
        # versions before names were cut wrote up to 1022 characters; suffixes follow a name that was cut
        kept = [n if n.endswith((".has", ".apart", ".blobs", ".values", ".ends")) else n[:NAME_LENGTH] for n in names]
        found = reader.columns([f"{prefix}{name}" for name in names], verify=reading.verify, opened=opened)
        saved["columns"] = dict(zip(kept, found, strict=True))
        saved["mapped"] = reading.mmap
    allow = bool(getattr(storage, "allow_pickle", False))
    if "objects" in saved:
        forms = saved["objects"]
        saved["objects"] = {
            name: get_objects(reader, f"{prefix}{name}", form, allow_pickle=allow)
            if objects
            else [None] * math.prod(reader.record(f"{prefix}{name}.ends").shape)
            for name, form in forms.items()
        }
    if "items" in saved and not objects:
        saved["items"] = range(int(saved["items"]))
    elif "items" in saved:
        saved["items"] = [unpack(item, allow_pickle=allow) for item in reader.values(f"{prefix}items")]
    return saved


_FIELDS = ("era", "settled", "left", "remover")
_COUNTS = ("written", "drawn", "since_empty")


def hold(engine: LocalEngine, transform: Compose, *, replaced: bool) -> Callable[[], None]:
    """Return what brings a buffer and its views back to their state of now, if a load fails after it has begun.

    Memory: a copy of the samplers' states, and of the rows, unless they are `replaced`; see `Storage.hold`.

    Raises:
        StorageMemoryError: if there is too little for it; nothing has changed then.
    """
    storage = engine.storage
    rows, laid_out, ring = len(storage), storage.laid_out, engine.ring
    writer = own_tensors(engine.writer.state_dict())
    fields = {name: getattr(engine, name) for name in _FIELDS}
    kept = [part.hold() for part in (engine.gate, engine.versions) if part is not None]
    readers = [_hold_reader(engine, transform), *(_hold_reader(view, view.transform) for view in engine.views.live())]
    bring_rows = storage.hold(replaced=replaced)

    def restore() -> None:
        bring_rows()
        if not rows and not laid_out:
            storage.forget_form()
        engine.writer.load_state_dict(writer)
        for name, value in fields.items():
            setattr(engine, name, value)
        engine.ring = ring
        engine.restores += 1  # gathers in flight notice that rows were away for a moment
        for bring in (*readers, *kept):
            bring()
        if rows:
            for reader in engine.readers:
                reader.begin_sampler()

    return restore


def _hold_reader(engine: LocalEngine, transform: Compose) -> Callable[[], None]:
    """Return what brings back sampler, transforms, draws, generator and episodes of a buffer or a view."""
    parts = [(part, own_tensors(part.state_dict())) for part in (engine.sampler, transform)]
    counts = {name: getattr(engine.counts, name) for name in _COUNTS}
    generator, pending = engine.generator, list(engine.pending)
    random = None if generator is None else generator.get_state()
    bring_episodes = None if engine.tracker is None else engine.tracker.hold()

    def restore() -> None:
        for part, state in parts:
            part.load_state_dict(state)
        for name, count in counts.items():
            setattr(engine.counts, name, count)
        engine.generator = generator
        if random is not None and generator is not None:
            generator.set_state(random)
        if bring_episodes is not None:
            bring_episodes()
        engine.pending.clear()
        engine.pending.extend(pending)

    return restore


def begin_load(engine: LocalEngine) -> None:
    """Replace the ring before rows change, so that gathers in flight notice."""
    engine.ring = Ring(engine.storage.capacity, engine.storage.device)


def end_load(engine: LocalEngine, state: dict[str, Any], capacity: int, deleted: dict[str, Tensor] | None) -> None:
    """Restore the generations of a checkpoint whose storage had `capacity` slots, and the order of deleted rows.

    With another capacity, rows are in the order of their age from slot 0 on, or have generations in an array.
    """
    storage = engine.storage
    rows = len(storage)
    engine.ring = Ring(storage.capacity, storage.device)
    engine.settled = storage.laid_out
    engine.storage_followed()
    if engine.versions is not None:
        engine.versions.begin(rows)
    if storage.capacity != capacity:  # the room that was added is filled before rows are replaced
        base = max(int(state["base"]), int(state["written"]) - rows)
        state = {**state, "base": base, "cursor": rows % storage.capacity}
    engine.ring.load_state_dict(state, rows)
    engine.begin_left(deleted)


class Target(NamedTuple):
    """A buffer that a state is to be loaded into."""

    engine: LocalEngine
    transform: Compose
    batch_size: int | None


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
        readers = [*pairs, *(view for target, state in pairs for view in _views_of(target.engine, state))]
        checked = [check_state(t.engine, state, t.batch_size) for t, state in readers]
    for target, state in pairs:
        with readable("this storage"):
            target.engine.storage.check_state(state["storage"]["state"])
    held = [hold(t.engine, t.transform, replaced=bool(state["storage"]["state"].get("mapped"))) for t, state in pairs]
    used = [target.engine.ring.written > 0 for target in targets]
    for target in targets:
        target.engine.parts_changed()
    try:
        _load_parts(pairs, readers)
        for (target, state), was_used in zip(pairs, used, strict=True):
            engine = target.engine
            engine.era += was_used  # batches drawn before the load are of other rows, whatever their generations
            capacity = int(state["storage"]["state"]["capacity"])
            end_load(engine, state["stamps"], capacity, state.get("deleted"))
            engine.counts.written = int(state["rows_written"])
            engine.counts.since_empty = int(state["rows_since_empty"])
        for (target, state), (pending, generator) in zip(readers, checked, strict=True):
            _end_load(target.engine, state, pending, generator)
        if then is not None:
            then()
        progress.finish()  # after this nothing can fail
    except BaseException:
        for restore in held:
            restore()
        raise
    for target, _ in readers:
        if target.engine.queue is not None:
            target.engine.queue.clear()


def _views_of(engine: LocalEngine, state: dict[str, Any]) -> list[tuple[Target, dict[str, Any]]]:
    """Return the views of a buffer, each with its part of the buffer's state.

    Raises:
        CheckpointError: if it is the state of other views.
    """
    views = engine.views.live()
    targets = [Target(view, view.transform, view.batch_size) for view in views]
    return list(zip(targets, view_states(state, len(views)), strict=True))


def _end_load(
    engine: LocalEngine, state: dict[str, Any], pending: list[Ticket], generator: torch.Generator | None
) -> None:
    """Take over episodes, queued draws, counts and the generator of a buffer or a view."""
    if engine.tracker is not None:
        engine.tracker.load_state_dict(engine.storage, state.get("episodes"))
    engine.begin_sampler()
    engine.pending.clear()
    for ticket in engine.retake(pending):
        again = revive(engine, ticket)
        if again is not None:
            engine.pending.append(again)
    if engine.gate is not None:
        engine.gate.load_state_dict(state.get("flow"), engine.ring, engine.pending)
    engine.counts.drawn = int(state["rows_drawn"])
    engine.generator = with_state(engine.generator, generator)


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
    check_form(engine, state)
    seam = engine.storage.seam(saved)
    if not seam:
        return state
    check_state(engine, state, target.batch_size)
    if engine.tracker is not None and engine.tracker.wanted.fixed:
        msg = f"{engine.tracker.wanted!r} tells the episodes of rows by their slots: load with the same max_size"
        raise CheckpointError(msg)
    rows, ring_state = saved_rows(state), {**state["stamps"], "cursor": 0}
    for name in ("array", "arrivals"):
        if ring_state.get(name) is not None:
            ring_state[name] = torch.cat((ring_state[name][seam:], ring_state[name][:seam]))
    turned = {**_turn_reader(engine, state, seam, rows), "stamps": ring_state}
    if "deleted" in state:
        turned["deleted"] = {name: (slots - seam).remainder_(rows) for name, slots in state["deleted"].items()}
    if "views" in state:
        views = _views_of(engine, state)
        for view, mine in views:
            check_state(view.engine, mine, view.batch_size)
        pairs = zip(views, state["views"], strict=True)
        turned["views"] = [_turn_reader(view.engine, saved, seam, rows) for (view, _), saved in pairs]
    return turned


def _turn_reader(engine: LocalEngine, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
    """Return the state of a buffer or a view with slots and draws of rows that were turned by `seam`."""
    sampler = engine.sampler.turn_state(state["sampler"]["state"], seam, rows)
    return {
        **{name: value for name, value in state.items() if name != "episodes"},  # they are read off the rows
        "sampler": {**state["sampler"], "state": sampler},
        "pending": [turn_ticket(ticket, seam, rows) for ticket in state["pending"]],
    }


def turn_ticket(ticket: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
    """Return a queued draw for rows of which the one in slot `seam` is in slot 0 now."""
    if not seam:
        return ticket
    plan = {"plan": Plan.turn_state(ticket["plan"], seam, rows)} if "plan" in ticket else {}
    return {**ticket, "slots": (ticket["slots"] - seam).remainder_(rows), **plan}


def with_state(mine: torch.Generator | None, saved: torch.Generator | None) -> torch.Generator | None:
    """Bring the buffer's generator to the saved state; a buffer without one gets one: torch's own is never set."""
    if mine is None or saved is None:
        return mine or saved
    mine.set_state(saved.get_state())
    return mine


def _load_parts(
    pairs: Sequence[tuple[Target, dict[str, Any]]], readers: Sequence[tuple[Target, dict[str, Any]]]
) -> None:
    """Load the parts of buffers (`pairs`), and of these and their views (`readers`); the storages last."""
    for target, state in pairs:
        begin_load(target.engine)
        with readable("this writer"):
            target.engine.writer.load_state_dict(state["writer"]["state"])
    for target, state in readers:
        with readable("this sampler"):
            target.engine.sampler.load_state_dict(state["sampler"]["state"])
        with readable("these transforms"):
            target.transform.load_state_dict(state["transforms"])
    for target, state in pairs:
        with readable("this storage"):
            target.engine.storage.load_state_dict(state["storage"]["state"])


def revive(engine: LocalEngine, ticket: Ticket) -> Ticket | None:
    """Return a draw that was read for a buffer just loaded, expanded; None if its windows are not whole."""
    ring, schema, held = engine.ring, engine.storage.schema, ticket.held
    plan = ticket.plan if ticket.plan is None or schema is None else ticket.plan._replace(schema=schema)
    drawn = ticket._replace(serial=ring.written, ring=ring, plan=plan, held=None)
    if held is not None and held.rows is not None:
        rows = held.rows._replace(source=engine.source, serial=ring.written, ring=ring, ticket=drawn)
        return drawn._replace(held=HeldRows(drawn, rows))
    found = engine.expand_again(drawn) if plan is None else drawn
    return None if found is None else engine.hold(found)
