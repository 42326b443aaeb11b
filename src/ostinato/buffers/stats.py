"""`BufferStats`: counts of a buffer at one moment."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from ostinato.buffers.priority_updates import as_sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.buffers.pipeline import Prefetcher
    from ostinato.buffers.records import Engine

__all__ = ["BufferStats", "combine", "measure"]


@dataclass(frozen=True, slots=True)
class BufferStats:
    """Counts of a buffer at one moment."""

    rows: int
    """Rows present (cells with `ndim=2`)."""
    capacity: int
    """Most rows that fit."""
    nbytes: int
    """Bytes held for rows, the whole capacity included, and for what the sampler keeps of each."""
    rows_written: int
    """Rows ever added (edits in place are not counted); survives `empty`."""
    rows_drawn: int
    """Rows ever delivered by `sample`."""
    row_age_mean: float
    """Mean age of the rows present, in rows written since; NaN when empty."""
    row_age_max: int
    """Age of the oldest row present, in rows written since."""
    draws_per_insert: float
    """`rows_drawn / rows_written`; 0 before the first write."""
    stale_rows: int
    """Rows delivered by prefetch although they had been replaced meanwhile (`info["stale"]` marks them)."""
    stale_updates: int
    """Priority updates dropped because their rows had been replaced."""
    redone_gathers: int
    """Batches read once more because a writer replaced some of their rows during the copy."""
    prefetch_ready: int
    """Batches that wait ready in the prefetch queue."""
    prefetch_waits: int
    """Times `sample` had to wait for a prefetched batch."""
    rows_lost: int
    """Rows never finished, as their process died; counted when another one comes upon them; 0 unless shared."""
    repairs: int
    """Times a process died holding the shared lock, and the next one repaired counts, generations and tree; 0 unless
    shared."""


def combine(parts: Sequence[BufferStats], prefetch: Prefetcher[Any] | None) -> BufferStats:
    """Add up the counts of several buffers and of the queue of what is drawn from all of them."""
    total = {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(BufferStats)}
    rows, written = total["rows"], total["rows_written"]
    ages = sum(part.row_age_mean * part.rows for part in parts if part.rows)
    total["row_age_mean"] = ages / rows if rows else float("nan")
    total["row_age_max"] = max(part.row_age_max for part in parts)
    total["draws_per_insert"] = total["rows_drawn"] / written if written else 0.0
    if prefetch is not None:
        total["prefetch_ready"] += prefetch.ready
        total["prefetch_waits"] += prefetch.waits
    return BufferStats(**total)


def measure(engine: Engine, prefetch: Prefetcher[Any] | None) -> BufferStats:
    """Count, under the engine's lock. Cost: O(rows), for the ages."""
    with engine.lock:
        if engine.sampler.prioritized:
            as_sampler(engine.sampler).raise_deferred()
        storage, ring = engine.storage, engine.ring
        rows = len(storage)
        known = ring.generations(torch.arange(engine.view().rows, device=storage.device))
        ages = ring.written - known[known > 0] if rows else None
        return BufferStats(
            rows=rows,
            capacity=storage.capacity,
            nbytes=storage.nbytes + ring.nbytes + engine.sampler.nbytes,
            rows_written=engine.rows_written,
            rows_drawn=engine.rows_drawn,
            row_age_mean=float("nan") if ages is None else float(ages.double().mean()),
            row_age_max=0 if ages is None else int(ages.max()),
            draws_per_insert=engine.rows_drawn / engine.rows_written if engine.rows_written else 0.0,
            stale_rows=engine.rows_stale,
            stale_updates=int(engine.stale_updates),
            redone_gathers=engine.redone,
            prefetch_ready=0 if prefetch is None else prefetch.ready,
            prefetch_waits=0 if prefetch is None else prefetch.waits,
            rows_lost=ring.lost,
            repairs=ring.repairs,
        )
