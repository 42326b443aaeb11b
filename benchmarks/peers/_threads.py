"""Several threads on one buffer: samples in parallel, and samples beside a writer that never pauses."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from benchmarks import data
from benchmarks.adapter import Loaded, Seconds
from benchmarks.peers._composable import filled
from benchmarks.peers._torch import as_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup

__all__ = ["ONE_THREAD", "together", "workloads"]

_SAMPLES = 200


def together(work: Call, threads: int, times: int) -> Call:
    """Return a call that does `work` so many times in each thread; seconds per time of all of them together."""

    def run(ready: threading.Barrier) -> None:
        ready.wait()
        for _ in range(times):
            work()

    def call() -> Seconds:
        ready = threading.Barrier(threads + 1)
        workers = [threading.Thread(target=run, args=(ready,)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        ready.wait()
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        return Seconds((time.perf_counter() - start) / (times * threads))

    return call


def sampling(module: str, setup: Setup, threads: int) -> Call:
    """Sample transitions uniformly in several threads."""
    return together(filled(module, setup, data.transitions).sample, threads, _SAMPLES)


def latency(module: str, setup: Setup) -> Call:
    """Sample transitions uniformly while another thread writes batches without pause."""
    buffer = filled(module, setup, data.transitions)
    batches = cycle([as_kind(rows, setup.kind) for rows in data.pool(data.transitions, setup.batch)])
    return Loaded(buffer.sample, lambda: buffer.extend(next(batches)))


def workloads(module: str) -> dict[str, Callable[[Setup], Call]]:
    """Return the workloads of a module that has TorchRL's names."""
    return {
        "threads.4": partial(sampling, module, threads=4),
        "latency.dict": partial(latency, module),
    }


ONE_THREAD: dict[str, Callable[[Setup], Call]] = {"threads.4": partial(sampling, "ostinato", threads=1)}
