"""Before and after the rows of a buffer are replaced by those of a checkpoint; the caller holds the engine's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.core.stamps import Stamps

if TYPE_CHECKING:
    from ostinato.buffers.engine import Engine

__all__ = ["begin_load", "end_load"]


def begin_load(engine: Engine) -> Stamps:
    """Put new stamps in place before rows change, so that gathers in flight notice; return the old ones."""
    old, engine.stamps = engine.stamps, Stamps(engine.storage.capacity, engine.storage.device)
    return old


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
