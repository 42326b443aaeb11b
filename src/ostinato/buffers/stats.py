"""`BufferStats`: counts of a buffer at one moment."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from ostinato.buffers.updates import as_sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.buffers.prefetch import Prefetcher
    from ostinato.buffers.reader import Reader


@dataclass(frozen=True)
class BufferStats(dict[str, "int | float | bool"]):
    """Counts of a buffer at one moment: as attributes, and as a dict of numbers, for loggers and `json.dumps`.

    The dict has a key for each attribute (not `row_age_mean` of an empty buffer, which is no number), and TorchRL's
    `size`, `write_count`, `prefetch_queue_size` and `utilization` (not of a buffer without a known capacity).
    """

    rows: int = 0
    """Rows present (cells with `ndim=2`), without those that have left the buffer (`ConsumingSampler`, `delete`)."""
    capacity: int = 0
    """Most rows that fit."""
    nbytes: int = 0
    """Bytes held for rows, the whole capacity included, and for what the sampler keeps of each."""
    rows_written: int = 0
    """Rows ever added (edits in place are not counted); survives `empty`."""
    rows_drawn: int = 0
    """Rows ever delivered by `sample`."""
    row_age_mean: float = math.nan
    """Mean age of the rows present, in rows written since; NaN when empty."""
    row_age_max: int = 0
    """Age of the oldest row present, in rows written since."""
    draws_per_insert: float = 0.0
    """`rows_drawn / rows_written`; 0 before the first write."""
    stale_rows: int = 0
    """Rows delivered by prefetch although they had been replaced meanwhile (`info["stale"]` marks them)."""
    stale_updates: int = 0
    """Priority updates dropped because their rows had been replaced."""
    redone_gathers: int = 0
    """Batches read once more because a writer replaced some of their rows during the copy."""
    prefetch_ready: int = 0
    """Batches that wait ready in the prefetch queue."""
    prefetch_waits: int = 0
    """Times `sample` had to wait for a prefetched batch."""
    rows_lost: int = 0
    """Rows never finished, as their process died; counted when another one comes upon them; 0 unless shared."""
    repairs: int = 0
    """Times a process died holding the shared lock, and the next one repaired counts, generations and tree; 0 unless
    shared."""
    write_count: int = 0
    """Rows written since the buffer was made or emptied."""
    prefetch_queue_size: int = 0
    """Batches that are queued, ready or not."""
    initialized: bool = True
    """Whether the parts of the buffer are made."""
    num_buffers: int = 1
    """Buffers that are counted: more than one for an ensemble."""

    def __post_init__(self) -> None:
        """Fill the dict."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self)}
        if math.isnan(self.row_age_mean):
            del numbers["row_age_mean"]
        if self.capacity:
            numbers["utilization"] = self.rows / self.capacity
        else:
            del numbers["capacity"]
        self.update(numbers, size=self.rows)

    def __reduce__(self) -> tuple[type[BufferStats], tuple[Any, ...]]:
        """Pickle the attributes: the dict follows from them."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    __hash__ = None


def combine(parts: Sequence[BufferStats], prefetch: Prefetcher) -> BufferStats:
    """Add up the counts of several buffers and of the queue of what is drawn from all of them."""
    total = {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(BufferStats)}
    rows, written = total["rows"], total["rows_written"]
    ages = sum(part.row_age_mean * part.rows for part in parts if part.rows)
    total["row_age_mean"] = ages / rows if rows else float("nan")
    total["row_age_max"] = max(part.row_age_max for part in parts)
    total["initialized"] = all(part.initialized for part in parts)
    total["draws_per_insert"] = total["rows_drawn"] / written if written else 0.0
    total["prefetch_ready"] += prefetch.ready
    total["prefetch_waits"] += prefetch.waits
    total["prefetch_queue_size"] += prefetch.queued
    return BufferStats(**total)


def measure(engine: Reader, prefetch: Prefetcher) -> BufferStats:
    """Count, under the engine's lock. Cost: O(rows), for the ages."""
    with engine.lock:
        if engine.sampler.prioritized:
            as_sampler(engine.sampler).raise_deferred()
        engine.store.follow_storage()
        storage, ring = engine.storage, engine.ring
        rows = engine.rows_present
        known = ring.generations(torch.arange(engine.view().rows, device=storage.device))
        ages = ring.written - known[known > 0] if bool((known > 0).any()) else None
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
            rows_lost=ring.lost,
            repairs=ring.repairs,
            write_count=engine.rows_since_empty,
            prefetch_ready=prefetch.ready,
            prefetch_waits=prefetch.waits,
            prefetch_queue_size=prefetch.queued,
        )
