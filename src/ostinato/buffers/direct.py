"""Direct calls: the common buffer writes and draws in one native call each, in place of the general way in Python.

A direct call holds the lock of the buffer, as the methods of the engine do, and changes the same counts. It applies to
rows in memory of the CPU, a ring writer, and uniform draws of single rows; `find_direct` lists the conditions. Where a
call does not apply (other rows than those stored, text, an error), it changes nothing and returns None, and the general
way follows. So both give the same results, and errors come from one place.

The object is made when a general call finds that it would apply, and ended by `LocalEngine.parts_changed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from ostinato._backend import backend
from ostinato.buffers.direct_windows import direct_windows, tracked_episodes
from ostinato.core import kinds
from ostinato.samplers import RandomSampler, SamplerWithoutReplacement, SliceSampler
from ostinato.storages import LazyMemmapStorage, LazyTensorStorage, TensorStorage
from ostinato.writers import RoundRobinWriter

if TYPE_CHECKING:
    from ostinato._native import Direct, DirectWindows
    from ostinato.buffers.engine import LocalEngine
    from ostinato.core.rows import Schema
    from ostinato.storages import Storage

__all__ = ["direct_rows", "find_direct"]

_CPU = torch.device("cpu")


def find_direct(engine: LocalEngine, *, draws: bool) -> Direct | None:
    """Return the direct calls of a buffer as it is now; None if none applies. The caller holds the lock.

    Args:
        engine: of the buffer.
        draws: whether batches are the rows drawn as they are stored, made when they are asked for.
    """
    native, storage = backend.native, engine.storage
    if native is None or not backend.exchange or not _is_known(storage) or storage.ndim > 1:
        return None
    found, ring = storage.plain_table(), engine.ring
    schema = storage.schema
    if found is None or schema is None or not engine.settled or not isinstance(ring.counts, native.RingCounts):
        return None
    table, stored = found
    if table.batches is None or not schema.is_flat or not isinstance(stored, native.StoredRows):
        return None
    watched = engine.gate is not None or engine.versions is not None or engine.saves.snapshot is not None
    if watched or not ring.counts.in_order or not isinstance(engine.counts, native.BufferCounts):
        return None
    episodes = tracked_episodes(engine)
    if engine.tracker is not None and episodes is None:
        return None
    windows = None if episodes is None or not draws else direct_windows(engine, table, schema)
    writes = _may_write(engine)
    draws = draws and _may_draw(engine, windows)
    if not (writes or draws):
        return None
    return native.Direct(  # type: ignore[no-any-return]
        engine.lock,
        table.batches,
        ring.counts,
        stored,
        engine.counts,
        _keys(schema),
        torch.randint,
        engine.generator,
        _CPU,
        kinds.func_transform,
        kinds.is_tracing,
        np.ndarray,
        np.generic,
        writes,
        draws,
        episodes,
        windows,
    )


def _is_known(storage: Storage) -> TypeGuard[TensorStorage]:
    """Whether a storage is of exactly one of these classes: subclasses may read and write in another way."""
    return type(storage) in {LazyTensorStorage, LazyMemmapStorage, TensorStorage}


def _may_write(engine: LocalEngine) -> bool:
    """Whether a write changes nothing but rows and counts."""
    writer = engine.writer
    plain = type(writer) is RoundRobinWriter
    return plain and type(engine.sampler) in {RandomSampler, SamplerWithoutReplacement, SliceSampler}


def _may_draw(engine: LocalEngine, windows: DirectWindows | None) -> bool:
    """Whether a draw is one of `torch.randint`, and its batch the rows drawn, or windows from them."""
    if engine.pin or engine.pending or engine.source.collate is not None:
        return False
    if windows is not None or engine.tracker is not None:
        return windows is not None and not engine.writer.tracks_generations
    return type(engine.sampler) is RandomSampler and engine.unit is None and not engine.writer.tracks_generations


def _keys(schema: Schema) -> tuple[Any, ...] | None:
    """Return the keys of a row in the order of the leaves; None for rows that are single tensors."""
    return None if schema.tree is None else tuple(leaf.path[0] for leaf in schema.leaves)


def direct_rows(data: Any, lead: int) -> Any:
    """Return rows as direct calls read them: the fields of a TensorDict whose batch has `lead` dimensions as a dict.

    Other data is returned unchanged, and so is a TensorDict of another batch, which the calls do not take.
    """
    if type(data) is dict or not kinds.is_tensordict(data) or data.batch_dims != lead:
        return data
    return kinds.fields_of(data)
