"""Several processes write to one prioritized buffer in shared memory while this process samples from it.

Run it with `python examples/shared_writers.py`; it needs Linux and the native extension of Ostinato.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from ostinato.errors import OptionError


def steps(number: int, count: int) -> dict[str, torch.Tensor]:
    """Return `count` random steps, as an environment of collector `number` would."""
    obs = torch.randn(count, 17)
    return {
        "obs": obs,
        "action": torch.randn(count, 6),
        "reward": obs.sum(1),
        "collector": torch.full((count,), number),
    }


def collect(rb: ReplayBuffer, number: int, batches: int) -> None:
    """Write to the shared buffer; runs in another process."""
    torch.set_num_threads(1)
    for _ in range(batches):
        rb.extend(steps(number, 64))


def learn(rb: ReplayBuffer, collectors: list[multiprocessing.process.BaseProcess]) -> int:
    """Sample and update priorities until the collectors have finished; return the number of batches."""
    batches = 0
    while batches < 100 or any(process.is_alive() for process in collectors):
        batch, info = rb.sample(return_info=True)
        error = batch["reward"].abs()
        rb.update_priority(info["index"], error, info["index_generation"])  # late updates are dropped
        batches += 1
    return batches


def main() -> None:
    """Start the collectors, sample, and print counts and speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectors", type=int, default=2)
    parser.add_argument("--batches", type=int, default=500, help="batches of 64 rows that each collector writes")
    options = parser.parse_args()
    sampler = PrioritizedSampler(100_000, alpha=0.6, beta=0.4)
    try:
        rb = ReplayBuffer(storage=LazyTensorStorage(100_000), sampler=sampler, batch_size=256, shared=True)
    except OptionError as error:  # another operating system, or no native extension
        print(error)
        return
    rb.extend(steps(0, 64))  # fixes the schema: now the buffer may be passed to other processes
    context = multiprocessing.get_context("spawn")
    collectors: list[multiprocessing.process.BaseProcess] = [
        context.Process(target=collect, args=(rb, 1 + i, options.batches)) for i in range(options.collectors)
    ]
    began = time.perf_counter()
    for process in collectors:
        process.start()
    batches = learn(rb, collectors)
    for process in collectors:
        process.join()
    seconds, stats = time.perf_counter() - began, rb.stats()
    print(f"{stats.rows_written} rows from {options.collectors} processes, {batches} batches, {seconds:.1f} s")
    print(f"{stats.stale_updates} priorities came too late; rows present: {len(rb)} of {stats.capacity}")


if __name__ == "__main__":
    main()
