"""Windows of frames drawn at random from a LeRobot dataset, and the first batch after opening a large one."""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.adapter import Seconds
from benchmarks.recordings import offsets, recording

if TYPE_CHECKING:
    from benchmarks.adapter import Call, Setup

LITTLE = 1 << 20
"""Budget of decoded frames where they are not to be kept: less than those of one batch."""


def _buffer(setup: Setup, **options: Any) -> Any:
    package: Any = import_module("ostinato")
    dataset = package.open_dataset(recording(setup.kind, setup.rows), **options)
    unit = package.DeltaTimestamps(offsets(setup.kind), fps=dataset.fps)
    return package.ReplayBuffer(storage=dataset, sample_unit=unit, batch_size=setup.batch)


def windows(setup: Setup) -> Call:
    """Sample windows; no decoded frame is kept."""
    sample: Call = _buffer(setup, max_bytes=LITTLE).sample
    return sample


def cached(setup: Setup) -> Call:
    """Sample windows of frames that were all decoded before."""
    buffer = _buffer(setup, cache="memory")
    buffer[:]
    sample: Call = buffer.sample
    return sample


def first(setup: Setup) -> Call:
    """Open the dataset and sample once."""
    recording(setup.kind, setup.rows)

    def call() -> Seconds:
        before = time.perf_counter()
        batch = _buffer(setup).sample()
        taken = Seconds(time.perf_counter() - before)
        del batch
        return taken

    return call


WORKLOADS = {
    **{f"dataset.{size}": windows for size in ("96", "480")},
    **{f"dataset.{size}-cached": cached for size in ("96", "480")},
    "dataset.open": first,
}
