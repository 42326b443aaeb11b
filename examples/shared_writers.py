"""Several processes write to one prioritized buffer in shared memory while this process samples from it.

Environments that are simulated in several processes have to hand their rows to the process that learns. With
`shared=True` the buffer itself lies in shared memory: it is passed to the processes as an argument, they write to it,
and no queue or extra copy is needed. Each row here contains the sum of its observation, so that the script can check
that no sampled row is half-written. Priorities that arrive after their row was replaced are dropped, and counted.

    python examples/shared_writers.py                   # writes shared_writers.png
    python examples/shared_writers.py --collectors 4
    python examples/shared_writers.py --quick           # a few seconds

Needs Linux, the native extension of Ostinato, and `pip install 'ostinato[viz]'`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from matplotlib.figure import Figure

from ostinato import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY, ROWS, BATCH = 100_000, 64, 256
"""Rows of the buffer, rows of each write, rows of each batch."""
SIMULATION_S = 0.004
"""Time that an environment takes for the rows of one write."""
COLORS = ("#0072B2", "#B36B00", "#00795C", "#7B3294", "#52606D")


class Moment(NamedTuple):
    """Counts at one moment."""

    seconds: float
    rows: int
    """Rows written so far by all collectors."""
    batches: int
    """Batches sampled so far."""


def steps(number: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random steps of collector `number`, as an environment would; the reward is the sum of the observation."""
    time.sleep(SIMULATION_S)
    obs = torch.randint(-9, 10, (ROWS, 17), generator=generator).float()  # whole numbers: their sum is exact
    action = torch.randn(ROWS, 6, generator=generator)
    return {"obs": obs, "action": action, "reward": obs.sum(1), "collector": torch.full((ROWS,), number)}


def collect(rb: ReplayBuffer, number: int, writes: int, seed: int) -> None:
    """Write to the shared buffer; runs in another process."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed + number)
    for _ in range(writes):
        rb.extend(steps(number, generator))


def learn(rb: ReplayBuffer, total: int, alive: Callable[[], bool]) -> tuple[list[Moment], int]:
    """Sample and update priorities until `total` rows were written; return counts and the number of torn rows."""
    first, batches, torn = rb.stats().rows_written, 0, 0
    while rb.stats().rows_written == first and alive():
        time.sleep(0.01)  # processes take seconds to import torch
    start, moments = time.perf_counter(), [Moment(0.0, 0, 0)]
    while batches < 20 or (rb.stats().rows_written - first < total and alive()):
        batch, info = rb.sample(return_info=True)
        torn += int((batch["obs"].sum(1) != batch["reward"]).sum())
        error = batch["reward"].abs()  # a learner would give its TD errors
        rb.update_priority(info["index"], error, info["index_generation"])
        batches += 1
        elapsed = time.perf_counter() - start
        if elapsed > moments[-1].seconds + 0.25:
            moments.append(Moment(elapsed, rb.stats().rows_written - first, batches))
            if len(moments) % 4 == 0:
                show(moments[-1])
    moments.append(Moment(time.perf_counter() - start, rb.stats().rows_written - first, batches))
    return moments, torn


def show(moment: Moment) -> None:
    """Print counts and mean speeds."""
    seconds, rows, batches = moment
    print(
        f"{seconds:5.1f} s: {rows:9,} rows written ({rows / seconds:8,.0f}/s), "
        f"{batches:7,} batches sampled ({batches / seconds:6,.0f}/s)",
        flush=True,
    )


def draw(path: Path, moments: list[Moment], present: list[int]) -> None:
    """Plot rows written and batches sampled over time, and the collectors of the rows in the buffer."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    seconds = [moment.seconds for moment in moments]
    left.plot(seconds, [moment.rows / 1e3 for moment in moments], color=COLORS[0])
    left.set(xlabel="seconds", ylabel="thousand rows", title="written")
    middle.plot(seconds, [moment.batches / 1e3 for moment in moments], color=COLORS[1])
    middle.set(xlabel="seconds", ylabel=f"thousand batches of {BATCH}", title="sampled meanwhile")
    right.bar([str(1 + i) for i in range(len(present))], [rows / 1e3 for rows in present], color=COLORS[2])
    right.set(xlabel="collector", ylabel="thousand rows", title="in the buffer at the end")
    for axes in (left, middle, right):
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def run(count: int, rows: int, seed: int, picture: Path) -> None:
    """Start the collectors, sample until they end, print a table and draw."""
    generator = torch.Generator().manual_seed(seed)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=PrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4),
        batch_size=BATCH,
        shared=True,
        generator=generator,
    )
    rb.extend(steps(0, generator))  # fixes the schema: now the buffer may be passed to other processes
    context = multiprocessing.get_context("spawn")
    collectors: list[multiprocessing.process.BaseProcess] = [
        context.Process(target=collect, args=(rb, 1 + i, rows // ROWS, seed)) for i in range(count)
    ]
    print(f"starting {count} collectors, each writes {rows // ROWS * ROWS:,} rows", flush=True)
    for process in collectors:
        process.start()
    moments, torn = learn(rb, count * (rows // ROWS) * ROWS, lambda: any(p.is_alive() for p in collectors))
    for process in collectors:
        process.join()
    show(moments[-1])
    stats, present = rb.stats(), torch.bincount(rb[:]["collector"], minlength=count + 1)[1:].tolist()
    print(f"\nrows from {count} processes  {moments[-1].rows:11,}")
    print(f"batches of {BATCH}         {moments[-1].batches:11,}")
    print(f"half-written rows      {torn:11,}")
    print(f"priorities too late    {stats.stale_updates:11,} of {stats.rows_drawn:,}")
    print(f"rows in the buffer     {len(rb):11,} of {stats.capacity:,}; by collector {present}")
    draw(picture, moments, present)
    print(f"picture: {picture}")


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectors", type=int, default=2, help="writing processes (default 2)")
    parser.add_argument("--steps", type=int, default=100_000, help="rows that each of them writes (default 100000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of rows and draws")
    parser.add_argument("--quick", action="store_true", help="one collector, 1,280 rows")
    parser.add_argument("--picture", type=Path, default=Path("shared_writers.png"), help="where to write it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    count, rows = (1, 1_280) if given.quick else (given.collectors, given.steps)
    try:
        run(count, rows, given.seed, given.picture)
    except OptionError as error:  # another operating system, or no native extension
        print(error)


if __name__ == "__main__":
    main()
