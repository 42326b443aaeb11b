"""What lets several processes share a buffer without a server: checks, the exchange of memory, draws of each process.

The rows, their ring and priorities lie in shared memory (`storages/shared.py`, `core/shared_ring.py`). A writer
reserves slots, copies its rows, and commits them; only the first and the last step take the lock between processes, for
microseconds. What was drawn is copied without it; then generations are compared, and the batch is copied again if a
row was replaced. So no batch holds a torn or unfinished row, and a process that dies loses only the rows that it was
writing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from ostinato.buffers.records import Source
from ostinato.buffers.updates import as_sampler, check_sampler
from ostinato.errors import OptionError, UsageError
from ostinato.samplers import PrioritizedSampler, RandomSampler, Sampler
from ostinato.storages import LazyMemmapStorage
from ostinato.storages.shared import SharedStorage, check_shareable
from ostinato.writers import RoundRobinWriter, TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.buffers.reader import Reader
    from ostinato.storages import Storage
    from ostinato.writers import Writer

_WRITERS = {RoundRobinWriter, TensorDictRoundRobinWriter}
_readers: WeakSet[Reader] = WeakSet()
"""Those of shared buffers in this process."""


def share_storage(storage: Storage, sampler: Sampler, writer: Writer, *tracked: Any) -> SharedStorage:
    """Return a storage in shared memory, with the rows of one of a single process, for these parts.

    Args:
        storage: rows in files stay there, others are copied.
        sampler: of the buffer.
        writer: of the buffer.
        tracked: see `_check_followed`.

    Raises:
        OptionError: if the parts do not go together with sharing.
    """
    _check_followed(*tracked)
    _check_parts(sampler, writer)
    _check_room(storage, sampler)
    return SharedStorage(storage, ranked=sampler.prioritized)


def share(engine: Reader, drop: Callable[[], None]) -> None:
    """Move the rows, priorities and counts of a buffer to memory that processes share; the caller holds the lock.

    Args:
        engine: of the buffer.
        drop: drops the draws that were made ahead; called once nothing stands in the way.

    Raises:
        OptionError: if the parts do not go together with sharing; nothing has changed.
        UsageError: if the cursor was moved.
    """
    store, storage, cursor = engine.store, engine.storage, engine.ring.cursor
    check_shareable(storage)
    if cursor != len(storage) % storage.capacity and len(storage) != storage.capacity:
        msg = f"the cursor was moved to {cursor} of {len(storage)} rows: fill the buffer before it is shared"
        raise UsageError(msg)
    tracked = (engine.limits, store.versions, engine.unit, engine.tracker, store.remover)
    shared = share_storage(storage, engine.sampler, engine.writer, *tracked)
    drop()
    store.source = Source(shared, store.source.collate)
    store.storage_followed()
    store.parts_changed()
    store.settled = False
    store.follow_storage()
    store.follow_processes()
    draw_apart(engine)


def draw_apart(engine: Reader, *, copied: bool = False) -> None:
    """Let each process that gets a shared buffer draw from a generator of its own seed, not the same batches.

    Args:
        engine: of the buffer.
        copied: whether this process got it as an argument.
    """
    if engine.storage.shared:
        _readers.add(engine)
        if copied:
            _seed(engine)


def _seed(engine: Reader) -> None:
    storage, generator = engine.storage, engine.generator
    if generator is not None and isinstance(storage, SharedStorage):
        engine.generator = torch.Generator().manual_seed(generator.initial_seed() + storage.number_process())


def _seed_all() -> None:
    for engine in _readers:
        _seed(engine)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_seed_all)


def _check_followed(limits: Any, versions: Any, unit: Any, episodes: Any, remover: Any) -> None:
    """Check that nothing is counted or tracked that one process alone would know.

    Raises:
        OptionError: naming what.
    """
    if limits or versions is not None:
        msg = "shared=True does not count reads and versions: leave out rate_limiter and version_key"
        raise OptionError(msg)
    if unit is not None or episodes is not None:
        msg = "shared=True does not track episodes: leave out sample_unit and episodes"
        raise OptionError(msg)
    if remover is not None:
        msg = f"shared=True writes in ring order, got {remover!r} (a remover, or rows that were deleted): leave it out"
        raise OptionError(msg)


def goes_shared(engine: Reader) -> bool:
    """Return whether a private buffer begins to be shared when it is passed to a process: if its rows are in files.

    Raises:
        UsageError: if the rows are in a list, or in files and cannot be shared.
    """
    storage, sampler, writer = engine.storage, engine.sampler, engine.writer
    if storage.form == "objects":
        msg = (
            f"Cannot share a storage of type {type(storage).__name__} between processes: its objects are in the memory "
            "of one. Use LazyMemmapStorage, or LazyTensorStorage with shared=True; or pass rb.state_dict()"
        )
        raise UsageError(msg)
    if not isinstance(storage, LazyMemmapStorage):
        return False
    if type(writer) not in _WRITERS:
        msg = (
            f"Writers of type {type(writer).__name__} cannot be shared between processes: each would choose slots from "
            "what it has written alone. Use RoundRobinWriter()"
        )
        raise UsageError(msg)
    if type(sampler) is not RandomSampler:
        msg = (
            f"Samplers of type {type(sampler).__name__} cannot be shared between processes without being asked for: "
            "use RandomSampler(), or PrioritizedSampler with shared=True, whose priorities all processes keep"
        )
        raise UsageError(msg)
    if not storage.laid_out and not storage.shared_init:
        msg = (
            f"Cannot share a storage of type {type(storage).__name__} between processes while it has not been "
            "initialized yet: write a row first, or make it with shared_init=True, or call rb.share()"
        )
        raise UsageError(msg)
    try:
        check_shareable(storage)
        store = engine.store
        _check_followed(engine.limits, store.versions, engine.unit, engine.tracker, store.remover)
    except OptionError as error:
        msg = f"this buffer cannot be shared between processes ({error}): pass a copy, pickle.loads(pickle.dumps(rb))"
        raise UsageError(msg) from error
    return True


def _check_room(storage: Storage, sampler: Sampler) -> None:
    """Check that a sampler keeps priorities for every slot: processes reserve slots before rows are checked.

    Raises:
        OptionError: if the storage has more slots, or the sampler was made for another device.
    """
    if sampler.prioritized and as_sampler(sampler).max_capacity < storage.capacity:
        msg = (
            f"{type(sampler).__name__} keeps priorities for max_capacity={as_sampler(sampler).max_capacity} rows, the "
            f"shared storage has room for {storage.capacity}: give the sampler the storage's max_size"
        )
        raise OptionError(msg)
    check_sampler(storage, sampler)


def _check_parts(sampler: Sampler, writer: Writer) -> None:
    """Check that no part keeps in one process what all processes would need.

    Raises:
        OptionError: naming the part.
    """
    keeps = sampler.keeps_rows or sampler.watches or type(sampler).record is not Sampler.record
    free = sampler.by_age and sampler.episodes is None and not sampler.reads and not keeps
    if not free and type(sampler) not in {RandomSampler, PrioritizedSampler}:
        msg = (
            "shared=True takes the samplers RandomSampler and PrioritizedSampler, and those that keep nothing of rows, "
            f"read none, and have by_age=True, got {type(sampler).__name__}: other processes write to such a buffer "
            "through its own one, as ostinato.compat.torchrl.for_collector lets them"
        )
        raise OptionError(msg)
    if isinstance(sampler, PrioritizedSampler) and sampler.max_priority_within_buffer:
        msg = "shared=True does not go with max_priority_within_buffer=True: leave it out"
        raise OptionError(msg)
    if type(writer) not in _WRITERS:
        msg = f"shared=True takes the writer RoundRobinWriter, got {type(writer).__name__}"
        raise OptionError(msg)
