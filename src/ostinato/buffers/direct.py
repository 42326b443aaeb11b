"""Direct calls: the common buffer writes and draws in one native call each, in place of the general way in Python.

A direct call holds the lock of the buffer, as the methods of the engine do, and changes the same counts. It applies to
rows in memory of the CPU, a ring writer, and uniform or prioritized draws of single rows, or draws of windows (see
`ostinato.buffers.direct_windows`); `find_direct` lists the conditions. Where a call does not apply (other rows than
those stored, text, an error), it changes nothing and returns None, and the general way follows. So both give the same
results, and errors come from one place.

The object is made when a general call finds that it would apply, and ended by `Reader.parts_changed`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeGuard, final

import torch

from ostinato._backend import backend
from ostinato.buffers.direct_windows import direct_windows, tracked_episodes
from ostinato.buffers.observer import Observer
from ostinato.buffers.updates import GENERATIONS_PER_ERA
from ostinato.core import kinds
from ostinato.core.records import Picks, Run
from ostinato.samplers import PrioritizedSampler, RandomSampler
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, TensorStorage
from ostinato.writers import RoundRobinWriter, TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato._native import Direct, DirectNexts, DirectWindows
    from ostinato.buffers.reader import Reader
    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Schema
    from ostinato.storages import Storage
    from ostinato.storages.columns import Fields
    from ostinato.storages.table import Table


def find_direct(engine: Reader, *, draws: bool, bare: bool, env_first: bool) -> Direct | None:
    """Return the direct calls of a buffer as it is now; None if none applies. The caller holds the lock.

    Args:
        engine: of the buffer.
        draws: whether batches are the rows drawn as they are stored, made when they are asked for.
        bare: whether batches have no other fields than the stored ones and those of units.
        env_first: whether rows of several environments are given as `[environments, time]`.
    """
    native: Any = backend.native
    store, storage, ring = engine.store, engine.storage, engine.ring
    found = _plain_fields(engine)
    episodes = None if found is None else tracked_episodes(engine)
    if found is None or episodes is None or _goes_in_general(engine):
        return None
    fields, stored, schema = found
    table, nexts = fields.dense, _nexts(fields)
    arrays = ring.arrays_of_all()
    draws &= not (engine.rules or arrays)
    windows = _windows(engine, table, schema, bare=bare) if draws and nexts is None else None
    writes, draws = _may_write(engine), draws and _may_draw(engine, windows)
    if not (writes or draws):
        return None
    return native.Direct(  # type: ignore[no-any-return]
        engine.lock,
        table.batches,
        ring.counts,
        stored,
        engine.counts,
        store.counts,
        schema.keys,
        torch,
        engine.generator,
        kinds.func_transform,
        kinds.is_tracing,
        _Priorities.of(engine),
        _admits(engine) if writes else None,
        _reports(engine) if writes else None,
        store.era * GENERATIONS_PER_ERA,
        storage.num_envs if storage.ndim > 1 else 0,
        env_first,
        arrays,
        next((turns for o in store.observers.placing if (turns := o.turns(store)) is not None), None),
        writes,
        draws,
        episodes,
        windows,
        nexts,
    )


def _windows(engine: Reader, table: Table, schema: Schema, *, bare: bool) -> DirectWindows | None:
    """Return direct draws of windows, if batches need no other info of them than the slots of slices."""
    named = bare or (engine.unit is None and not engine.writer.tracks_generations)
    return direct_windows(engine, table, schema) if named and engine.tracker is not None else None


def _plain_fields(engine: Reader) -> tuple[Fields, Any, Schema] | None:
    """Return fields, counts and schema of a storage whose rows native calls can write; None of others."""
    native, storage = backend.native, engine.storage
    found = storage.plain_table() if native is not None and backend.exchange and _is_known(storage) else None
    schema = storage.schema
    if native is None or found is None or schema is None or not schema.is_plain or not engine.store.settled:
        return None
    fields, stored = found
    counts = (type(engine.ring.counts), type(stored), type(engine.counts))
    known = counts == (native.RingCounts, native.StoredRows, native.BufferCounts)
    return (fields, stored, schema) if known and fields.dense.batches is not None else None


def _nexts(fields: Fields) -> DirectNexts | None:
    """Return how direct calls write next observations that are stored once; None if there are no such fields."""
    native: Any = backend.native
    templates = [torch.empty((1, *leaf.shape), dtype=leaf.dtype, device="cpu") for leaf in fields.schema.leaves]
    return next((native.DirectNexts(*found, list(fields.kept), templates) for found in fields.native or ()), None)


def _goes_in_general(engine: Reader) -> bool:
    """Whether only some rows may be drawn, or have generations, or a look at the first ones is due."""
    due = engine.continuity is not None and engine.continuity.is_due(engine.ring)
    in_order = engine.ring.counts.in_order
    return due or (engine.store.eligible is not None if in_order else not engine.ring.arrays_of_all())


def _is_known(storage: Storage) -> TypeGuard[TensorStorage]:
    """Whether a storage is of exactly one of these classes: subclasses may read and write in another way."""
    return type(storage) in {LazyTensorStorage, LazyMemmapStorage, TensorStorage}


def defined_together(cls: type, *names: str) -> bool:
    """Whether the same class defines all of these methods, so that none was overridden without the others."""
    return len({next(base for base in cls.__mro__ if name in base.__dict__) for name in names}) == 1


def _may_write(engine: Reader) -> bool:
    """Whether every observer of the rows needs at most the slots of rows that are written in order."""
    if not engine.own or type(engine.writer) not in {RoundRobinWriter, TensorDictRoundRobinWriter}:
        return False
    return all(observer.direct(engine.store) for observer in engine.store.observers.all)


def _may_draw(engine: Reader, windows: DirectWindows | None) -> bool:
    """Whether a draw is one of `torch.randint` or of a sum tree, and its batch the rows drawn, or windows from them."""
    if engine.store.pin or engine.pending or engine.source.collate is not None:
        return False
    if windows is not None or engine.tracker is not None:
        return windows is not None  # generations are info, which general calls return
    if engine.unit is not None or engine.writer.tracks_generations or engine.storage.ndim > 1:
        return False  # with several environments an index of rows is a pair
    sampler = engine.sampler
    return type(sampler) is RandomSampler or (type(sampler) is PrioritizedSampler and not sampler.stratified)


@final
class _Priorities:
    """What direct draws and updates ask a prioritized sampler, and tell it. Called under the lock of the buffer.

    Args:
        sampler: the sampler.
        ring: of its buffer.
    """

    def __init__(self, sampler: PrioritizedSampler, ring: Ring) -> None:
        self._sampler, self._counts = sampler, ring.counts

    @classmethod
    def of(cls, engine: Reader) -> _Priorities | None:
        """Return what direct calls ask the sampler of a buffer or a view; None for uniform draws."""
        sampler = engine.sampler
        if not isinstance(sampler, PrioritizedSampler) or type(sampler) is not PrioritizedSampler:
            return None
        return cls(sampler, engine.ring)

    def ready(self) -> tuple[Any, ...] | None:
        """Return tree, beta, whether weights are float32, addresses and options; None if the sampler has to prepare."""
        return self._sampler.native_state(self._counts.rows, self._counts.capacity)

    def changed(self, given: float, before: float, after: float) -> None:
        """Track the largest priority after an update."""
        self._sampler.column.track_largest(given, before, after)


def _admits(engine: Reader) -> Callable[[int], bool] | None:
    """Return what asks the limiter of a buffer whether so many rows may be written now; None without one."""
    found = weakref.ref(engine)  # native objects are no part of a cycle that the garbage collector sees

    def admits(rows: int) -> bool:
        reader = found()
        return reader is not None and all(limit.admits(reader, rows) for limit in reader.limits)

    return admits if engine.limits else None


def _reports(engine: Reader) -> Callable[[int, int, int, Tensor | None], None] | None:
    """Return what tells observers of rows that direct calls have written; None if none of them has to know."""
    capacity, own, store = engine.ring.capacity, weakref.ref(engine), engine.store
    found = [weakref.ref(reader) for reader in store.readers if any(map(_follows_reports, reader.observers))]

    def wrote(start: int, rows: int, skip: int, kept: Tensor | None) -> None:
        run: Placement = Run(start, rows, capacity, skip)
        if kept is not None:
            run = Picks(kept[skip:], torch.arange(skip, len(kept), device="cpu"), kept)
        for ref in found:
            reader = ref()
            if reader is not None:  # else its view was dropped
                for observer in reader.observers:
                    observer.reported(reader.store, run)
        owner = own()
        if owner is not None:
            for observer in owner.store.added:
                observer.reported(owner.store, run)

    return wrote if found or any(map(_follows_reports, store.added)) else None


def _follows_reports(observer: Observer) -> bool:
    return type(observer).reported is not Observer.reported


def direct_rows(data: Any, lead: int, *, by_path: bool = False) -> Any:
    """Return rows as direct calls read them: the fields of a TensorDict whose batch has `lead` dimensions as a dict.

    Other data is returned unchanged, and so is a TensorDict of another batch, which the calls do not take.

    Args:
        data: the rows.
        lead: dimensions of the batch.
        by_path: whether keys are paths: the rows are nested dicts or TensorDicts.
    """
    is_dict = type(data) is dict
    if not is_dict and (not kinds.is_tensordict(data) or data.batch_dims != lead):
        return data
    if by_path:
        return kinds.fields_by_path(data) if is_dict or kinds.is_plain_tensordict(data) else None
    return data if is_dict else kinds.fields_of(data)
