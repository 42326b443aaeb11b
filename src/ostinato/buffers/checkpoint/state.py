"""The state of a buffer or an ensemble: gathered from the parts, checked against them, and loaded by an exchange."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ostinato.buffers.drawn_ahead import HeldRows
from ostinato.buffers.records import Rows, Source
from ostinato.core.records import Draw, Plan
from ostinato.core.ring import Ring
from ostinato.core.rows import Schema
from ostinato.durable import CheckpointReader, progress
from ostinato.errors import CheckpointError, OptionError, SavedOverError
from ostinato.samplers.base import moved
from ostinato.storages.checkpoint import (
    UNREADABLE,
    check_schema,
    clear_filled,
    get_rows,
    hooks_of,
    raise_unreadable,
    readable,
    require_form,
    restore_rows,
    seam_of,
)
from ostinato.storages.tensor import raise_mapped_ring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ostinato.buffers.mixing import EnsembleEngine
    from ostinato.buffers.observer import Observer
    from ostinato.buffers.reader import Reader
    from ostinato.buffers.store import Store
    from ostinato.samplers import Sampler
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
_ATTEMPTS = 3


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
        ("rows_written", state["rows_written"], 0, _MOST),
        ("rows_since_empty", state["rows_since_empty"], 0, _MOST),
        ("rows_drawn", state["rows_drawn"], 0, _MOST),
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


FORMAT = "ostinato-buffer"


def engine_state(engine: Reader, queued: Sequence[Draw], transform: Compose, batch_size: int | None) -> dict[str, Any]:
    """Return the whole state as nested dicts of plain values and tensors; nothing is copied."""
    views = [
        _reader_state(view, () if view.queue is None else view.queue.draws, view.transform, view.batch_size)
        for view in (engine.store.readers[1:] if engine.own else ())
    ]
    remover = engine.store.remover
    return {
        **{name: _part_state(part) for name, part in (("storage", engine.storage), ("writer", engine.writer))},
        "stamps": engine.ring.state_dict(),
        "rows_written": engine.rows_written,
        "rows_since_empty": engine.rows_since_empty,
        **_reader_state(engine, queued, transform, batch_size),
        **({} if remover is None or remover.eligible is None else {"deleted": remover.eligible.state()}),
        **({"views": views} if views else {}),
        **(
            {"observers": [_observer_state(engine.store, one) for one in engine.store.added]}
            if engine.store.added
            else {}
        ),
    }


def _observer_state(store: Store, observer: Observer) -> dict[str, Any]:
    """Return the state of an observer, with the values of the rows that are saved."""
    part, ring = _part_state(observer), cast("Any", store.ring)
    if store.storage.shared and ring.rows:
        part["state"] = moved(part["state"], ring.saved_slots(), observer.row_values, ())
    return part


def _part_state(part: Any) -> dict[str, Any]:
    return {"class": type(part).__name__, "state": part.state_dict()}


def _reader_state(engine: Reader, queued: Sequence[Draw], transform: Compose, batch_size: int | None) -> dict[str, Any]:
    """Return what a buffer or a view has of its own: sampler, queued draws, generator, transforms, episodes."""
    drawn = [*queued, *engine.pending]
    generator = generator_state(engine.generator)
    if engine.storage.shared and drawn:  # their rows are replaced meanwhile: a load makes other draws
        generator, drawn = drawn[0].rng, []
    state = {
        "sampler": _part_state(engine.sampler),
        "rows_drawn": engine.rows_drawn,
        "generator": generator,
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "unit": _unit_name(engine),
        "pending": [show_draw(draw, engine) for draw in drawn],
    }
    for observer in engine.observers:
        state.update(observer.saved(engine.store, drawn))
    return state


_OF_ROWS = ("storage", "writer", "stamps", "rows_written", "rows_since_empty", "deleted", "observers")
"""Entries of the state of a buffer that its views share; the others they have themselves."""


def view_states(state: dict[str, Any], views: int) -> list[dict[str, Any]]:
    """Return the states of the views in the state of a buffer, each as that of a buffer with the view's sampler.

    Args:
        state: of the buffer.
        views: views that it is to be loaded into.

    Raises:
        CheckpointError: if it has another number of views.
    """
    with readable("a replay buffer"):
        saved = state.get("views", [])
        if len(saved) != views:
            msg = (
                f"the checkpoint is of a buffer with {len(saved)} views, this one has {views}: make the same views in "
                "the same order before it is loaded (rb.view), and others afterwards"
            )
            raise CheckpointError(msg)
        rows = {name: state[name] for name in _OF_ROWS if name in state}
        return [{**rows, **mine} for mine in saved]


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
) -> tuple[dict[str, Any], list[Draw], torch.Generator | None]:
    """Check what can be checked before anything is loaded.

    Returns:
        The state with its schema read, the queued draws, and a generator in the saved state.

    Raises:
        CheckpointError: naming the part that differs.
    """
    part, storage = "a replay buffer", engine.store.source.storage
    try:
        state = _with_schema(state, storage)
        _check_parts(engine, state)
        if engine.tracker is not None:
            engine.tracker.check_state(state["storage"]["state"], state.get("episodes"))
        check_queued(state, engine, batch_size)
        rows = saved_rows(state)
        part = "this sampler"
        engine.sampler.check_state(state["sampler"]["state"], rows)
        part = "this writer"
        engine.store.writer.check_state(state["writer"]["state"])
        part = "a replay buffer"
        check_counts(state, rows)
        pending = [read_draw(draw, state, engine) for draw in state["pending"]]
        return state, pending, read_generator(state["generator"], storage.device)
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
    if "deleted" in state and (engine.tracker is not None or engine.storage.shared):
        msg = (
            "the checkpoint's rows were deleted one by one, this buffer, or a view of it, is shared or has windows or "
            "episodes"
        )
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
    if state["pending"] and engine.storage.shared:
        msg = "the checkpoint holds queued draws, which a shared buffer cannot take: save it without prefetch"
        raise CheckpointError(msg)
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


def generator_state(generator: torch.Generator | None) -> Tensor | None:
    """Return the state of a generator, if there is one."""
    return None if generator is None else generator.get_state()


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


_SAVED = {
    **{name: name for name in ("slots", "weights", "info", "lengths", "pad", "length", "last", "rng", "dice")},
    "generations": "stamps",
}
"""Fields of a draw that checkpoints hold, by their names there; a field that is None is left out."""


def show_draw(draw: Draw, engine: Reader) -> dict[str, Any]:
    """Return a queued draw as plain values and tensors.

    Its windows are saved as they were drawn: episodes may have gone on since. So are its rows, if the buffer has
    replaced one of them.
    """
    plan, kept = draw.plan, None if draw.held is None else draw.held.rows
    state = {key: value for name, key in _SAVED.items() if (value := getattr(draw, name)) is not None}
    if plan is not None:
        state["plan"] = plan.state_dict()
    if kept is not None:
        payload = kept.source.storage.show_payload(kept.payload)
        state["rows"] = {"payload": payload, "stale": engine.stale_rows(kept.draw, kept)}
    return state


def read_draw(state: dict[str, Any], buffer: dict[str, Any], engine: Reader) -> Draw:
    """Return what `show_draw` gave, not of the buffer's writes yet, and expanded only if its windows were saved.

    Args:
        state: of the draw.
        buffer: state of the buffer.
        engine: which it is loaded into.

    Raises:
        CheckpointError: if it does not fit.
    """
    rows, storage, device = saved_rows(buffer), buffer["storage"]["state"], engine.storage.device
    schema, seam = storage.get("schema"), seam_of(storage, engine.storage)
    if seam:  # the row in slot `seam` will be in slot 0
        turned = {"plan": Plan.turn_state(state["plan"], seam, rows)} if "plan" in state else {}
        state = {**state, "slots": (state["slots"] - seam).remainder_(rows), **turned}
    if "rows" in state:
        rows = max(rows, engine.ring.capacity)  # rows that were replaced: nothing is read at their slots
    values = {name: state[key] for name, key in _SAVED.items() if key in state}
    draw = Draw(**tree_map_only(Tensor, lambda value: value.to(device).clone(), values))
    draw = draw._replace(rng=state.get("rng"), ring=engine.ring, sampler=engine.sampler)
    _check_draw(draw, rows, episodes=engine.tracker is not None)
    if "plan" in state:
        plan = Plan.from_state(state["plan"], Schema.from_json(schema), draw.slots, rows)
        if engine.unit is not None and not plan.fields.keys() >= set(engine.unit.plan_fields):
            msg = f"a queued draw of the checkpoint lacks fields of {engine.unit!r}: it is damaged"
            raise CheckpointError(msg)
        draw = draw._replace(plan=plan)
    return _with_rows(draw, state["rows"], engine.storage, schema) if "rows" in state else draw


def _check_draw(draw: Draw, rows: int, *, episodes: bool) -> None:
    """Check a draw of a checkpoint of so many rows; `episodes` says whether the buffer can tell slices from each other.

    Raises:
        CheckpointError: naming what is wrong.
    """
    slots, weights, info, generations, lengths, pad, length, *_ = draw
    alike, problem, dice, rng = (weights, generations, lengths, *(info or {}).values()), "", draw.dice, draw.rng
    if (type(pad), type(length), type(draw.last)) != (int, int, bool):
        problem = "has no numbers of rows"
    elif slots.dtype is not torch.int64 or slots.ndim != 1 or not slots.numel():
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


def _with_rows(draw: Draw, saved: dict[str, Any], storage: Storage, schema: Any) -> Draw:
    """Return a draw with the rows that it had, which the buffer has replaced."""
    count, stale = draw.records.shape[0], saved["stale"]
    if not isinstance(stale, Tensor) or stale.dtype is not torch.bool or stale.shape != (count,):
        msg = "a queued draw of the checkpoint does not say which of its rows were replaced: it is damaged"
        raise CheckpointError(msg)
    payload = storage.read_payload(saved["payload"], None if schema is None else Schema.from_json(schema), count)
    rows = Rows(Source(storage, None), payload, 0, draw.ring, draw, stale.to(storage.device).clone())
    return draw._replace(held=HeldRows(draw, rows))


# -- loading: read or mapped columns, checked, in copies of the parts, whose contents are exchanged -------------------


def load_buffer(
    path: str | Path,
    restore: Callable[[dict[str, Any]], None],
    storages: Sequence[Storage],
    *,
    format_name: str = FORMAT,
    verify: bool,
    mmap: bool,
) -> str | None:
    """Read a directory and hand its state to `restore`, with columns that are read when they are copied.

    If another process saves to the directory meanwhile, the load begins again with the newer checkpoint.

    Args:
        path: the directory.
        restore: loads a state, or changes nothing.
        storages: which the rows are loaded into.
        format_name: kind of checkpoint.
        verify: compare the checksums of columns.
        mmap: map the files of the rows.

    Returns:
        The name of the save that was loaded, from which an incremental save can go on.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CheckpointError: if it does not fit.
        DamagedFileError: naming the damaged file.
        OptionError: if rows of a storage cannot be mapped.
    """
    for storage in storages if mmap else ():
        hooks = hooks_of(storage, "load_hooks")
        if not storage.mappable or hooks:
            msg = (
                "mmap=True needs a LazyTensorStorage on the CPU without single_copy, codec, kinds and loading hooks, "
                f"got {storage!r} with {len(hooks)} hooks: load without it"
            )
            raise OptionError(msg)
    for left in reversed(range(_ATTEMPTS)):
        reader = CheckpointReader(path, format_name=format_name)
        progress.begin(reader.nbytes)
        try:
            with readable(f"a replay buffer in {path}"):
                state = open_state(reader, storages, verify=verify, objects=True)
            if mmap:
                state = each_storage(state, storages, _to_map)
            restore(each_storage(state, storages, lambda saved, storage, _: restore_rows(saved, storage)))
        except SavedOverError:
            if not left:
                raise
        else:
            return reader.save
    return None


def load_saved(
    engine: Reader | EnsembleEngine,
    path: str | Path,
    restore: Callable[[dict[str, Any]], None],
    *,
    verify: bool,
    mmap: bool,
) -> None:
    """Read what `save_buffer` wrote, and hand the state to `restore`; see `load_buffer`."""
    engines, name = engine.saved, engine.format_name
    save = load_buffer(path, restore, [e.storage for e in engines], format_name=name, verify=verify, mmap=mmap)
    for each in engines:
        each.saves.loaded(save, each.ring, each.storage)


def _to_map(saved: dict[str, Any], storage: Storage, _: str) -> dict[str, Any]:
    with readable("this storage"):
        seam = seam_of(saved, storage)
    if seam:
        raise_mapped_ring(saved, seam, storage.capacity)
    return {**saved, "mapped": True}


def check_loadable(path: str | Path, engine: Reader, batch_size: int | None) -> Schema | None:
    """Check that a buffer can load a directory, without reading its rows; nothing is changed.

    What load hooks make of the rows, and damage in the files of rows, is only found when the rows are loaded.

    Returns:
        The schema of the rows; None if they have none.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CheckpointError: if it does not fit.
    """
    storage = engine.storage
    reader = CheckpointReader(path, format_name=FORMAT)
    with readable(f"a replay buffer in {path}"):
        state = open_state(reader, [storage])
        saved = state["storage"]["state"]
        if not hooks_of(storage, "load_hooks"):
            check_state(engine, state, batch_size)
            storage.check_state(saved)
        return None if saved.get("schema") is None else Schema.from_json(saved["schema"], known=storage.schema)


def open_state(
    reader: CheckpointReader, storages: Sequence[Any], *, verify: bool = False, objects: bool = False
) -> dict[str, Any]:
    """Return the state of a buffer, or an ensemble, with its rows where their names stand; see `get_rows`."""
    change = partial(get_rows, reader, verify=verify, objects=objects)
    return each_storage(reader.state(), storages, change)


_EXCHANGED = ("ring", "ahead", "remover", "versions", "settled")
"""Fields of a store that a load exchanges."""


def _of(engine: Reader, draw: Draw) -> Draw:
    """Return a draw of an engine, or of its copy, as one of the other."""
    drawn, held = draw._replace(sampler=engine.sampler), draw.held
    if held is not None:
        held.draw = held.draw._replace(sampler=engine.sampler)
        if held.rows is not None:
            held.rows = held.rows._replace(source=engine.source, draw=held.draw)
    return drawn


def load_engine_states(
    targets: Sequence[tuple[Reader, Compose, int | None]],
    states: Sequence[dict[str, Any]],
    queued: Sequence[tuple[int, Draw]] = (),
    transforms: Sequence[tuple[Compose, dict[str, Any]]] = (),
) -> list[Draw | None]:
    """Restore the states of several buffers, all or none; the caller holds their locks.

    The states are loaded into copies of the engines, whose contents take the place of the present ones at the end.

    Args:
        targets: the buffers, with their transforms and batch sizes.
        states: theirs.
        queued: draws of these buffers, by their numbers, that something else has queued.
        transforms: further transforms, and their states.

    Returns:
        These draws, expanded; None for one whose windows are not whole.

    Raises:
        CheckpointError: naming the part that differs.
        OptionError: if a part cannot be copied.
        StorageMemoryError: if there is too little memory for the rows beside those that the buffers hold.
    """
    loads: list[_Load] = []
    taking = ExitStack()
    try:
        for (engine, transform, batch_size), state in zip(targets, states, strict=True):
            loads.append(whole := _Load(engine, transform, batch_size, state))
            views = engine.store.readers[1:]
            for view, saved in zip(views, view_states(whole.state, len(views)), strict=True):
                loads.append(_Load(view, view.transform, view.batch_size, saved, whole.made.store))
        for load in loads:
            load.parts()
            load.draws()
        made = [load.made for load in loads if load.made.own]
        found = [revive(made[i], _of(made[i], draw)) for i, draw in queued]
        chains = [load.chain for load in loads] + [*transforms]
        _check_transforms(chains)
        _take(taking, loads)
        progress.finish()  # after this nothing can fail
    except BaseException:
        taking.close()
        for load in loads:
            if load.made.own:
                clear_filled([load.made.storage], [load.engine.storage])
        raise
    with taking:
        for transform, state in chains:
            if state:
                transform.load_state_dict(state)
        for load in loads:
            load.exchange()
    pairs = zip(queued, found, strict=True)
    return [None if one is None else _of(targets[i][0], one) for (i, _), one in pairs]


def _take(stack: ExitStack, loads: Sequence[_Load]) -> None:
    for load in loads:
        storage = load.engine.storage
        stack.enter_context(storage.sharing.taking(storage, load.made.storage))


@final
class _Load:
    """A state that is loaded into the copy of an engine: of a buffer, or of a view over the copy `store`.

    Raises:
        CheckpointError: if the state does not fit the engine.
        OptionError: if a part cannot be copied.
    """

    def __init__(
        self,
        engine: Reader,
        transform: Compose,
        batch_size: int | None,
        state: dict[str, Any],
        store: Store | None = None,
    ) -> None:
        self.engine = engine
        self.state, self._pending, self._generator = check_state(engine, state, batch_size)
        self._saved = saved = self.state["storage"]["state"]
        if store is None and saved.get("schema") is not None:
            with readable("this storage"):
                check_schema(engine.storage, saved["schema"], max(1, int(saved["lanes"])))
        with readable("a replay buffer"):
            self.chain = transform, self.state["transforms"]
        self.made = engine.without_rows(store)
        self._storage: Storage = self.made.store.source.storage

    def parts(self) -> None:
        """Load rows, sampler and writer, and what the buffer knows of its rows.

        Rows that fill a ring of another capacity come in the order of their age, and what refers to them follows: a
        ring that went on where its newest row lies before the oldest one would make windows of both, and replace
        other rows than the oldest.
        """
        made, state, part = self.made, self.state, "this storage"
        sampler, order = state["sampler"]["state"], None
        try:
            seam = seam_of(self._saved, self._storage)
            if seam:
                self._check_turn()
                order = torch.arange(saved_rows(state), device="cpu").roll(-seam)
            if made.own:
                self._storage.load_state_dict(self._saved)
            part = "this sampler"
            made.sampler.load_state_dict(sampler if order is None else _moved_sampler(made.sampler, sampler, order))
            if not made.own:
                return
            part = "this writer"
            made.store.writer.load_state_dict(state["writer"]["state"])
            part = "this observer"
            for observer, own in zip(made.store.added, state.get("observers", []), strict=True):
                values = own["state"] if order is None else moved(own["state"], order, observer.row_values, ())
                observer.load_state_dict(values)
        except UNREADABLE as error:
            raise_unreadable(part, error)
        self._ring(order)
        made.counts.written = int(state["rows_written"])
        made.counts.since_empty = int(state["rows_since_empty"])

    def _check_turn(self) -> None:
        tracker = self.made.tracker
        if tracker is not None and tracker.wanted.fixed:
            msg = f"{tracker.wanted!r} tells the episodes of rows by their slots: load with the same max_size"
            raise CheckpointError(msg)

    def _ring(self, order: Tensor | None) -> None:
        """Restore generations, and the order of deleted rows; those of row `order[i]` are in slot `i` now."""
        made, ring, deleted = self.made, self.state["stamps"], self.state.get("deleted")
        store, storage, rows = made.store, self._storage, len(self._storage)
        store.ring = Ring(storage.capacity, storage.device)
        store.settled = storage.laid_out
        if order is not None:
            arrays = {name: ring[name] for name in ("array", "arrivals") if ring.get(name) is not None}
            ring = {**ring, **{name: array[order.to(array.device)] for name, array in arrays.items()}}
            if deleted is not None:
                deleted = {name: (slots - int(order[0])).remainder_(rows) for name, slots in deleted.items()}
        if storage.capacity != self._saved["capacity"]:
            # the room that was added is filled before rows are replaced
            base = max(int(ring["base"]), int(ring["written"]) - rows)
            ring = {**ring, "base": base, "cursor": rows % storage.capacity}
        store.ring.load_state_dict(ring, rows)
        store.begin_removal(deleted)

    def draws(self) -> None:
        """Take over episodes, queued draws and counts."""
        made, state = self.made, self.state
        if made.tracker is not None:
            turned = seam_of(self._saved, self._storage)
            made.tracker.load_state_dict(self._storage, None if turned else state.get("episodes"))
        made.begin_sampler()
        for draw in made.resumed([_of(made, draw) for draw in self._pending]):
            found = revive(made, draw)
            if found is not None:
                made.pending.append(found)
        for limit in made.limits:
            limit.load_state(state.get("flow"), made.ring, made.pending)
        made.counts.drawn = int(state["rows_drawn"])

    def exchange(self) -> None:
        """Give the engine what was loaded into its copy; the parts stay the same objects. Raises nothing."""
        engine, made = self.engine, self.made
        store = engine.store
        if engine.own:
            # batches drawn before are of other rows; a ring of several processes goes on, instead
            store.era += store.ring.written > 0 and not store.storage.shared
            for name in _EXCHANGED:
                setattr(store, name, getattr(made.store, name))
            store.source.storage.take(self._storage)
            store.counts = made.counts = store.storage.sharing.load_counts(store.counts, made.counts)
            vars(store.writer).update(vars(made.writer))
            store.writer.follow(store.generations_of)
            store.storage_followed()
            for observer, loaded in zip(store.added, made.store.added, strict=True):
                vars(observer).update(vars(loaded))
        vars(engine.sampler).update(vars(made.sampler))
        engine.counts, engine.tracker, engine.limits = made.counts, made.tracker, made.limits
        engine.follow()
        if store.storage.sharing.follow_ring(store.storage, store.ring) is not store.ring:
            store.settle()
            store.follow_processes()
        if engine.queue is not None:
            engine.queue.clear()
        engine.pending.clear()
        engine.pending.extend([_of(engine, draw) for draw in made.pending])
        engine.generator = with_state(engine.generator, self._generator)
        engine.waiters.wake()


def _moved_sampler(sampler: Sampler, state: dict[str, Any], order: Tensor) -> dict[str, Any]:
    """Return the state of a sampler after row `order[i]` has moved to slot `i`.

    Raises:
        CheckpointError: if the sampler cannot say how its state follows.
    """
    found = sampler.move_state(state, order)
    if found is None:
        msg = (
            f"{type(sampler).__name__} does not say how its state follows rows to other slots (move_state): "
            "load into a buffer of the same max_size"
        )
        raise CheckpointError(msg)
    return found


def _check_transforms(chains: Sequence[tuple[Compose, Any]]) -> None:
    """Load states into copies of transforms: optimizers may hold the parameters, which are written in the end.

    Raises:
        CheckpointError: if a state does not fit.
        OptionError: if a transform with a state cannot be copied.
    """
    for chain, state in chains:
        bare = isinstance(state, dict) and not state  # without a state nothing is changed
        tried = chain if bare else copy_part(chain)
        try:
            tried.load_state_dict(state)
        except UNREADABLE as error:
            raise_unreadable("these transforms", error)


def with_state(mine: torch.Generator | None, saved: torch.Generator | None) -> torch.Generator | None:
    """Bring the buffer's generator to the saved state; a buffer without one gets one: torch's own is never set."""
    if mine is None or saved is None:
        return mine or saved
    mine.set_state(saved.get_state())
    return mine


def revive(engine: Reader, draw: Draw) -> Draw | None:
    """Return a draw that was read for a buffer just loaded, expanded; None if its windows are not whole."""
    ring, schema, held = engine.ring, engine.storage.schema, draw.held
    plan = draw.plan if draw.plan is None or schema is None else draw.plan._replace(schema=schema)
    drawn = draw._replace(serial=ring.written, ring=ring, plan=plan, held=None)
    if held is not None and held.rows is not None:
        rows = held.rows._replace(source=engine.source, serial=ring.written, ring=ring, draw=drawn)
        return drawn._replace(held=HeldRows(drawn, rows))
    found = engine.expand_again(drawn) if plan is None else drawn
    return None if found is None else engine.hold(found)
