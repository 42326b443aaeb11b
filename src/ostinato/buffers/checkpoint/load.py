"""Loading: open a checkpoint with its rows read or mapped, check it, and restore buffers and ensembles from it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.buffers.checkpoint.state import (
    FORMAT,
    check_queued,
    check_state,
    copy_part,
    each_storage,
    read_generator,
    read_queue,
    saved_rows,
    view_states,
)
from ostinato.buffers.drawn_ahead import HeldRows
from ostinato.core.ring import Ring
from ostinato.core.rows import Schema
from ostinato.durable import CheckpointReader, progress
from ostinato.errors import CheckpointError, OptionError, SavedOverError
from ostinato.samplers.base import moved
from ostinato.storages.checkpoint import (
    UNREADABLE,
    clear_filled,
    get_rows,
    hooks_of,
    raise_unreadable,
    readable,
    restore_rows,
)
from ostinato.storages.tensor import raise_mapped_ring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.buffers.mixing import EnsembleEngine
    from ostinato.buffers.reader import Reader
    from ostinato.buffers.records import Ticket
    from ostinato.buffers.store import Store
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.transforms import Compose

_ATTEMPTS = 3


def load_buffer(
    path: str | Path,
    restore: Callable[[dict[str, Any]], None],
    storages: Sequence[Storage],
    *,
    format_name: str = FORMAT,
    verify: bool = True,
    mmap: bool = False,
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
                "mmap=True needs a LazyTensorStorage on the CPU without single_copy and loading hooks, got "
                f"{storage!r} with {len(hooks)} hooks: load without it"
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


def _to_map(saved: dict[str, Any], storage: Storage, _: str) -> dict[str, Any]:
    with readable("this storage"):
        seam = storage.seam(saved)
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


_EXCHANGED = ("ring", "ahead", "remover", "versions", "settled", "counts")
"""Fields of a store that a load exchanges."""


def _of(engine: Reader, ticket: Ticket) -> Ticket:
    """Return a draw of an engine, or of its copy, as one of the other."""
    drawn, held = ticket._replace(sampler=engine.sampler), ticket.held
    if held is not None:
        held.ticket = held.ticket._replace(sampler=engine.sampler)
        if held.rows is not None:
            held.rows = held.rows._replace(source=engine.source, ticket=held.ticket)
    return drawn


class Target(NamedTuple):
    """A buffer that a state is to be loaded into."""

    engine: Reader
    transform: Compose
    batch_size: int | None


def load_engine_states(
    targets: Sequence[Target],
    states: Sequence[dict[str, Any]],
    queues: Sequence[Sequence[Ticket]] = (),
    transforms: Sequence[tuple[Compose, dict[str, Any]]] = (),
) -> list[list[Ticket | None]]:
    """Restore the states of several buffers, all or none; the caller holds their locks.

    The states are loaded into copies of the engines, whose contents take the place of the present ones at the end.

    Args:
        targets: the buffers.
        states: theirs.
        queues: draws of each buffer that something else has queued.
        transforms: further transforms, and their states.

    Returns:
        These draws, expanded; None for one whose windows are not whole.

    Raises:
        CheckpointError: naming the part that differs.
        OptionError: if a part cannot be copied.
        StorageMemoryError: if there is too little memory for the rows beside those that the buffers hold.
    """
    loads: list[_Load] = []
    try:
        for target, state in zip(targets, states, strict=True):
            loads.append(whole := _Load(target, state))
            views = target.engine.store.readers[1:]
            for view, saved in zip(views, view_states(whole.state, len(views)), strict=True):
                loads.append(_Load(Target(view, view.transform, view.batch_size), saved, whole.made.store))
        for load in loads:
            load.parts()
            load.draws()
        made = [load.made for load in loads if load.made.own]
        found = [[revive(m, _of(m, ticket)) for ticket in queue] for m, queue in zip(made, queues, strict=False)]
        chains = [*((load.target.transform, load.state["transforms"]) for load in loads), *transforms]
        _check_transforms(chains)
        progress.finish()  # after this nothing can fail
    except BaseException:
        for load in loads:
            if load.made.own:
                clear_filled([load.made.storage], [load.target.engine.storage])
        raise
    for transform, state in chains:
        transform.load_state_dict(state)
    for load in loads:
        load.exchange()
    pairs_of_queues = zip(targets, found, strict=False)
    return [[None if one is None else _of(target.engine, one) for one in queue] for target, queue in pairs_of_queues]


@final
class _Load:
    """A state that is loaded into the copy of an engine: of a buffer, or of a view over the copy `store`.

    Raises:
        CheckpointError: if the state does not fit the engine.
        OptionError: if a part cannot be copied.
    """

    def __init__(self, target: Target, state: dict[str, Any], store: Store | None = None) -> None:
        self.target = target
        self.state, self._pending, self._generator = check_state(target.engine, state, target.batch_size)
        saved = self.state["storage"]["state"]
        if store is None and saved.get("schema") is not None:
            target.engine.storage.check_schema(saved["schema"], max(1, int(saved["lanes"])))
        self.made = target.engine.without_rows(store)

    def parts(self) -> None:
        """Load rows, sampler and writer, and what the buffer knows of its rows.

        Rows that fill a ring of another capacity come in the order of their age, and what refers to them follows: a
        ring that went on where its newest row lies before the oldest one would make windows of both, and replace
        other rows than the oldest.
        """
        made, state, saved, part = self.made, self.state, self.state["storage"]["state"], "this storage"
        sampler, order = state["sampler"]["state"], None
        try:
            seam = made.storage.seam(saved)
            if seam:
                self._check_turn()
                order = torch.arange(saved_rows(state), device="cpu").roll(-seam)
            if made.own:
                made.storage.load_state_dict(saved)
            part = "this sampler"
            made.sampler.load_state_dict(sampler if order is None else _moved_sampler(made.sampler, sampler, order))
            if not made.own:
                return
            part = "this writer"
            made.writer.load_state_dict(state["writer"]["state"])
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
        store, storage, rows = made.store, made.storage, len(made.storage)
        store.ring = Ring(storage.capacity, storage.device)
        store.settled = storage.laid_out
        if store.versions is not None:
            store.versions.begin(rows)
        if order is not None:
            arrays = {name: ring[name] for name in ("array", "arrivals") if ring.get(name) is not None}
            ring = {**ring, **{name: array[order.to(array.device)] for name, array in arrays.items()}}
            if deleted is not None:
                deleted = {name: (slots - int(order[0])).remainder_(rows) for name, slots in deleted.items()}
        if storage.capacity != self.state["storage"]["state"]["capacity"]:
            # the room that was added is filled before rows are replaced
            base = max(int(ring["base"]), int(ring["written"]) - rows)
            ring = {**ring, "base": base, "cursor": rows % storage.capacity}
        store.ring.load_state_dict(ring, rows)
        store.begin_removal(deleted)

    def draws(self) -> None:
        """Take over episodes, queued draws and counts."""
        made, state = self.made, self.state
        if made.tracker is not None:
            turned = made.storage.seam(state["storage"]["state"])
            made.tracker.load_state_dict(made.storage, None if turned else state.get("episodes"))
        made.begin_sampler()
        revived = (revive(made, ticket) for ticket in made.retake([_of(made, ticket) for ticket in self._pending]))
        made.pending.extend(ticket for ticket in revived if ticket is not None)
        if made.gate is not None:
            made.gate.load_state(state.get("flow"), made.ring, made.pending)
        made.counts.drawn = int(state["rows_drawn"])

    def exchange(self) -> None:
        """Give the engine what was loaded into its copy; the parts stay the same objects. Raises nothing."""
        engine, made = self.target.engine, self.made
        store = engine.store
        if engine.own:
            store.era += store.ring.written > 0  # batches drawn before are of other rows
            for name in _EXCHANGED:
                setattr(store, name, getattr(made.store, name))
            store.storage.take(made.storage)
            vars(store.writer).update(vars(made.writer))
            store.writer.follow(store.generations_of)
            store.storage_followed()
            for observer, loaded in zip(store.added, made.store.added, strict=True):
                vars(observer).update(vars(loaded))
        vars(engine.sampler).update(vars(made.sampler))
        engine.counts, engine.tracker, engine.gate = made.counts, made.tracker, made.gate
        engine.follow()
        if engine.queue is not None:
            engine.queue.clear()
        engine.pending.clear()
        engine.pending.extend(_of(engine, ticket) for ticket in made.pending)
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


def _check_transforms(chains: Sequence[tuple[Compose, dict[str, Any]]]) -> None:
    """Load states into copies of transforms: optimizers may hold the parameters, which are written in the end.

    Raises:
        CheckpointError: if a state does not fit.
        OptionError: if a transform with a state cannot be copied.
    """
    for chain, state in chains:
        tried = copy_part(chain) if state else chain  # one without a state changes nothing
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


def revive(engine: Reader, ticket: Ticket) -> Ticket | None:
    """Return a draw that was read for a buffer just loaded, expanded; None if its windows are not whole."""
    ring, schema, held = engine.ring, engine.storage.schema, ticket.held
    plan = ticket.plan if ticket.plan is None or schema is None else ticket.plan._replace(schema=schema)
    drawn = ticket._replace(serial=ring.written, ring=ring, plan=plan, held=None)
    if held is not None and held.rows is not None:
        rows = held.rows._replace(source=engine.source, serial=ring.written, ring=ring, ticket=drawn)
        return drawn._replace(held=HeldRows(drawn, rows))
    found = engine.expand_again(drawn) if plan is None else drawn
    return None if found is None else engine.hold(found)


def load_ensemble_state(
    engine: EnsembleEngine, state: dict[str, Any], transform: Compose, batch_size: int | None
) -> None:
    """Restore a state, by copy; if it does not fit, nothing has changed. The caller holds the locks.

    Raises:
        CheckpointError: naming what differs.
    """
    engines, sampler = engine.engines, engine.sampler
    with readable("an ensemble"):
        members = state["members"]
        if len(members) != len(engines):
            msg = f"the checkpoint holds {len(members)} members, this ensemble {len(engines)}"
            raise CheckpointError(msg)
        sampler.check_state(state["mixing"])
        for mine, saved in zip(engines, members, strict=True):
            check_queued({**state, "unit": saved.get("unit")}, mine, batch_size)
        queue = read_queue(state, engines)
        device = engines[0].storage.device if engine.generator is None else engine.generator.device
        generator = read_generator(state["generator"], device)
    queues: list[list[Any]] = [[] for _ in engines]
    for mix in queue:
        for i, ticket in zip(mix.members, mix.tickets, strict=True):
            queues[i].append(ticket)
    targets = [Target(member.engine, member.buffer.transform, member.buffer.batch_size) for member in engine.own]
    with readable("an ensemble"):
        own = [(transform, state["transforms"])]
    revived = [iter(found) for found in load_engine_states(targets, members, queues, own)]
    sampler.load_state_dict(state["mixing"])  # it was checked
    engine.pending.clear()
    for mix in queue:
        found = [next(revived[i]) for i in mix.members]
        tickets = [ticket for ticket in found if ticket is not None]
        if len(tickets) == len(found):
            engine.pending.append(mix._replace(tickets=tickets))
        else:  # windows that are not whole
            sampler.drew(mix.owed, -1)
    engine.generator = with_state(engine.generator, generator)
