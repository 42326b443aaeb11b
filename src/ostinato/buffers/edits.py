"""Edits of rows in place, at a user's index: checked, stamped, made, and told to all who keep account of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.buffers.priority_updates import as_sampler, priorities_of_rows
from ostinato.buffers.shared import SharedEngine
from ostinato.core.index import select
from ostinato.core.kinds import require_eager
from ostinato.storages.shared import refuse_edit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.engine import Engine
    from ostinato.buffers.records import AnyEngine

__all__ = ["edit_fields", "edit_rows"]


def edit_rows(engine: AnyEngine, index: Any, data: Any, *, swap: bool) -> None:
    """Replace rows at a user's index."""
    if isinstance(engine, SharedEngine):
        refuse_edit()
    with engine.lock:
        slots, batch = _chosen(engine, index, swap=swap)
        change = engine.storage.prepare_edit(slots, data, batch)
        prioritized = engine.sampler.prioritized
        given = priorities_of_rows(engine, data, slots.shape[0]) if prioritized and slots.numel() else None
        _change(engine, slots, [change])
        if engine.versions is not None:
            engine.versions.touch(None)
        if prioritized:
            as_sampler(engine.sampler).assign(slots, given, engine.view())


def edit_fields(engine: AnyEngine, values: dict[tuple[str, ...], Any], index: Any, *, swap: bool) -> None:
    """Replace stored fields of rows at a user's index; all are checked before the first is written.

    Priorities stay: the rows are the same.
    """
    if isinstance(engine, SharedEngine):
        refuse_edit()
    with engine.lock:
        slots, batch = _chosen(engine, index, swap=swap)
        changes = [engine.storage.prepare_field(path, slots, value, batch) for path, value in values.items()]
        _change(engine, slots, changes)
        if engine.versions is not None:
            for path in values:
                engine.versions.touch(path)


def _change(engine: Engine, slots: Tensor, changes: Sequence[Callable[[], None]]) -> None:
    """Make edits that were checked; an edit of a boundary lets the episodes be read anew."""
    tracker, storage = engine.tracker, engine.storage
    before = None if tracker is None else tracker.marks_at(storage, slots)
    engine.saves.before(engine.ring, slots)
    engine.ring.record_edit(slots)
    for change in changes:
        change()
    _rerank(engine, slots)
    if tracker is not None and before is not None and tracker.compare(before, tracker.marks_at(storage, slots)):
        engine.begin_sampler()  # other rows may be drawn now


def _rerank(engine: Engine, slots: Tensor) -> None:
    """Tell a writer that ranks rows what their ranks are after an edit."""
    path = engine.writer.rank_path
    if path is not None and slots.numel():
        engine.writer.rerank(slots, engine.storage.scores_at(slots, path))


def _chosen(engine: Engine, index: Any, *, swap: bool) -> tuple[Tensor, tuple[int, ...]]:
    require_eager("writing rows")
    storage = engine.storage
    picked = select(index, storage.shape, storage.device, swap=swap)
    if picked.span is None:
        return picked.slots, picked.batch
    return torch.arange(len(storage), device=storage.device)[picked.span].contiguous(), picked.batch
