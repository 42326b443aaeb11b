"""Before and after the rows of a buffer are replaced by those of a checkpoint; the caller holds the engine's lock."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from ostinato.core.stamps import Stamps

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.buffers.engine import Engine
    from ostinato.transforms import Compose

__all__ = ["begin_load", "end_load", "hold", "own_tensors"]


_FIELDS = ("era", "settled", "rows_written", "rows_drawn", "rows_since_empty", "generator")


def hold(engine: Engine, transform: Compose, *, replaced: bool) -> Callable[[], None]:
    """Return what brings a buffer back to its state of now, if a load fails after it has begun to change things.

    Memory: a copy of the sampler's state, and of the rows, unless they are `replaced`; see `Storage.hold`.

    Raises:
        StorageMemoryError: if there is too little for it; nothing has changed then.
    """
    storage = engine.storage
    rows, laid_out, stamps, pending = len(storage), storage.laid_out, engine.stamps, list(engine.pending)
    parts = [(part, own_tensors(part.state_dict())) for part in (engine.sampler, engine.writer, transform)]
    fields = {name: getattr(engine, name) for name in _FIELDS}
    random = None if engine.generator is None else engine.generator.get_state()
    kept = [part.hold() for part in (engine.chronicle, engine.gate, engine.versions) if part is not None]
    bring_rows = storage.hold(replaced=replaced)

    def restore() -> None:
        bring_rows()
        if not rows and not laid_out:
            storage.forget_form()
        for part, state in parts:
            part.load_state_dict(state)
        for name, value in fields.items():
            setattr(engine, name, value)
        if random is not None and engine.generator is not None:
            engine.generator.set_state(random)
        engine.stamps = stamps
        engine.restores += 1  # gathers in flight notice that rows were away for a moment
        for bring in kept:
            bring()
        engine.pending.clear()
        engine.pending.extend(pending)
        if rows:
            engine.begin_sampler()

    return restore


def own_tensors(state: Any) -> Any:
    """Copy all tensors of a state, densely."""
    return tree_map_only(torch.Tensor, partial(torch.clone, memory_format=torch.contiguous_format), state)


def begin_load(engine: Engine) -> None:
    """Put new stamps in place before rows change, so that gathers in flight notice."""
    engine.stamps = Stamps(engine.storage.capacity, engine.storage.device)


def end_load(engine: Engine, state: dict[str, Any], capacity: int, episodes: dict[str, Any] | None) -> None:
    """Take over the stamps, and the episodes, of a checkpoint whose storage had `capacity` slots.

    Where the capacity is another one now, rows lie by age from slot 0 on, or have stamps in an array.
    """
    storage = engine.storage
    rows = len(storage)
    engine.stamps = Stamps(storage.capacity, storage.device)
    engine.settled = storage.laid_out
    if engine.versions is not None:
        engine.versions.begin(rows)
    if engine.chronicle is not None:
        engine.chronicle.load_state_dict(storage, episodes)
    if storage.capacity == capacity:
        engine.stamps.load_state_dict(state)
        engine.begin_sampler()
        return
    base = max(int(state["base"]), int(state["written"]) - rows)
    engine.stamps.load_state_dict({**state, "base": base, "cursor": rows % storage.capacity})
    cursor = engine.writer.cursor
    if cursor < rows or (engine.writer.in_order and cursor >= storage.capacity):
        engine.writer.resume(rows, rows % storage.capacity)  # fill the room that was added before replacing rows
    engine.begin_sampler()
