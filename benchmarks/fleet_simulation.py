"""Fleets of 100 and 1,000 shards, simulated with the costs of calls that were measured on this machine.

    python -m benchmarks.fleet_simulation [--shards 100,1000] [--network-ms 0.2,1] [--batches 300] [--seed 0]
                                          [--costs FILE] [--real 16] [--json FILE]

Measured: what a call costs the learner, the shard and the rate limiter, and what joining a batch costs, as
distributions (`benchmarks/fleet_costs.py`). `--costs FILE` reads them from a file, or writes them there first.
Simulated: everything else, event by event. Every shard, learner, writer and the rate limiter has a core of its own and
does one thing at a time; calls wait in the order of their arrival; the network adds a uniform delay each way.
`--real N` runs a fleet of N shards on this machine, too, beside a simulation whose processes share its cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.fleet_costs import WRITE_ROWS, Costs, measure, ray, transitions
from ostinato import LazyTensorStorage, ShardedReplayBuffer
from ostinato.distributed.snapshot import batches_per_round, draws_per_offer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

__all__ = ["Call", "Fleet", "Result", "Simulation", "run"]

LIMITER = -1
_AGE_S = 1.0
_WRITES_PER_S = 50.0
"""Calls of one writer, if the rate limiter and its shard answer in time."""


@dataclasses.dataclass(frozen=True)
class Fleet:
    """What is simulated."""

    shards: int
    batch: int
    prefetch: int = 0
    learners: int = 1
    writers: int = 0
    limiter: bool = False
    age_s: float = _AGE_S
    network_s: tuple[float, float] = (0.0, 0.0)
    cores: int | None = None
    """Cores that all processes share; None gives each its own."""

    @property
    def batches_per_round(self) -> int:
        """Batches that are drawn together."""
        return 1 if self.limiter else batches_per_round(self.prefetch, self.shards)


class Call(NamedTuple):
    """A call of an actor, and what it costs besides the way there and back."""

    actor: int
    submit_s: float
    busy_s: float
    get_s: float


class Result(NamedTuple):
    """What learners and writers saw."""

    latencies_s: list[float]
    """From `sample()` to the batch, for each batch."""
    seconds: float
    rows: int
    calls: int
    """Calls of learners to shards."""
    asked: int
    """Calls to the rate limiter."""
    writes: int

    def row(self) -> dict[str, float]:
        """Return the columns of the table."""
        batches = len(self.latencies_s)
        p50, p99 = np.quantile(self.latencies_s, [0.5, 0.99])
        return {
            "calls_per_batch": self.calls / batches,
            "p50_ms": 1e3 * float(p50),
            "p99_ms": 1e3 * float(p99),
            "batches_per_s": batches / self.seconds,
            "rows_per_s": self.rows / self.seconds,
            "limiter_calls_per_s": self.asked / self.seconds,
            "written_per_s": self.writes * WRITE_ROWS / self.seconds,
        }


class _Pending:
    """Calls that were made together, and when their answers are there."""

    def __init__(self, calls: Sequence[Call], resume: Callable[[float], None]) -> None:
        self.calls = calls
        self.resume = resume
        self.ready = [0.0] * len(calls)
        self.open = len(calls)
        self.submitted = 0.0


class Simulation:
    """Events in the order of time: calls that arrive at actors, and processes that go on.

    Args:
        costs: Measured costs.
        fleet: What is simulated.
        seed: Seed of all random numbers.
    """

    def __init__(self, costs: Costs, fleet: Fleet, seed: int) -> None:
        self.costs = costs
        self.fleet = fleet
        self.now = 0.0
        self.random = np.random.default_rng(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._free: dict[int, float] = {}
        self._cores = [0.0] * (fleet.cores or 0)
        self._samples = {name: np.asarray(x) for name, x in dataclasses.asdict(costs).items() if isinstance(x, list)}

    def cost(self, name: str) -> float:
        """Draw a cost from its measured distribution."""
        values = self._samples[name]
        return float(values[self.random.integers(len(values))])

    def spawn(self, process: Generator[Any, None, None], at: float = 0.0) -> None:
        """Start a process. It yields seconds to work, a list of calls to make together, or a time to wait for."""
        self._at(at, partial(self._step, process))

    def run(self) -> float:
        """Handle events until there are none; return the time of the last one."""
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self.now

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _step(self, process: Generator[Any, None, None]) -> None:
        done = next(process, None)
        if done is None:
            return
        resume = partial(self._step, process)
        if isinstance(done, list):
            self._make(done, lambda when: self._at(when, resume))
        else:
            self._at(self._work(self.now, done), resume)

    def _work(self, begin: float, seconds: float) -> float:
        """Occupy a core; return the end."""
        if not self._cores:
            return begin + seconds
        end = max(begin, heapq.heappop(self._cores)) + seconds
        heapq.heappush(self._cores, end)
        return end

    def _way(self) -> float:
        return self.cost("wire") / 2 + float(self.random.uniform(*self.fleet.network_s))

    def _make(self, calls: list[Call], resume: Callable[[float], None]) -> None:
        pending, when = _Pending(calls, resume), self.now
        for number, call in enumerate(calls):
            when = self._work(when, call.submit_s)
            self._at(when + self._way(), partial(self._arrive, pending, number))
        pending.submitted = when

    def _arrive(self, pending: _Pending, number: int) -> None:
        call = pending.calls[number]
        end = self._work(max(self.now, self._free.get(call.actor, 0.0)), call.busy_s)
        self._free[call.actor] = end
        pending.ready[number] = end + self._way()
        pending.open -= 1
        if not pending.open:  # answers are taken in the order of the calls
            when = pending.submitted
            for ready, one in zip(pending.ready, pending.calls, strict=True):
                when = self._work(max(when, ready), one.get_s)
            pending.resume(max(when, self.now))


class _Permits:
    """The permits of one process: one call for each."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.calls = 0

    def take(self) -> Generator[Any, None, None]:
        """Ask the limiter for a permit."""
        simulation = self._simulation
        if simulation.fleet.limiter:
            self.calls += 1
            yield [Call(LIMITER, simulation.cost("submit"), simulation.cost("permit"), simulation.cost("get"))]


class _Learner:
    """Draws batches as fast as it can, by the rules of `Snapshot` and `ShardBatches`."""

    def __init__(self, simulation: Simulation, batches: int) -> None:
        self._simulation = simulation
        self._fleet = simulation.fleet
        self._batches = batches
        self._left = 0
        self._began = 0.0
        self._asked = 0.0  # when the learner has called sample()
        self.latencies: list[float] = []
        self.calls = 0
        self.permits = _Permits(simulation)

    def process(self) -> Generator[Any, None, None]:
        """Draw rounds of batches."""
        simulation, fleet = self._simulation, self._fleet
        count = fleet.batches_per_round
        while len(self.latencies) < self._batches:
            yield from self.permits.take()
            yield from self._round(count * fleet.batch)
            for _ in range(count):
                self.latencies.append(max(0.0, simulation.now - self._asked))
                self._asked = max(self._asked, simulation.now)

    def _round(self, size: int) -> Generator[Any, None, None]:
        simulation, fleet = self._simulation, self._fleet
        age_s, ahead = fleet.age_s, fleet.prefetch > 0
        draws = draws_per_offer(size, age_s)
        now = simulation.now
        if size > self._left or (age_s and now - self._began > age_s):
            self._left, self._began = draws, now
            yield self._calls(dict.fromkeys(range(fleet.shards), 0), draws)
        self._left -= size
        chosen = np.bincount(simulation.random.integers(fleet.shards, size=size), minlength=fleet.shards)
        rows = {int(shard): int(chosen[shard]) for shard in chosen.nonzero()[0]}
        renew = (ahead or age_s > 0) and (not age_s or self._left < size or now - self._began > age_s / 2)
        if renew:
            self._left, self._began = draws, now
            yield self._calls({shard: rows.get(shard, 0) for shard in range(fleet.shards)}, draws)
        else:
            yield self._calls(rows, 0)
        costs = simulation.costs
        yield costs.part * len(rows) + costs.row_join * size

    def _calls(self, rows: dict[int, int], draws: int) -> list[Call]:
        """Return calls that take rows of shards, and draw their next offers."""
        simulation, costs = self._simulation, self._simulation.costs
        self.calls += len(rows)
        return [
            Call(
                shard,
                simulation.cost("submit"),
                simulation.cost("call") + costs.row_call * max(0, count - 1) + costs.draw * draws,
                simulation.cost("get") + costs.row_get * max(0, count - 1),
            )
            for shard, count in rows.items()
        ]


class _Writer:
    """Writes to one shard at a steady rate, or as fast as it is allowed to, until the learners have ended."""

    def __init__(self, simulation: Simulation, shard: int, learners: Sequence[_Learner], batches: int) -> None:
        self._simulation = simulation
        self._shard = shard
        self._learners = learners
        self._batches = batches
        self.writes = 0
        self.permits = _Permits(simulation)

    def process(self) -> Generator[Any, None, None]:
        """Write until the learners have their batches."""
        simulation = self._simulation
        due = float(simulation.random.uniform(0, 1 / _WRITES_PER_S))
        while any(len(learner.latencies) < self._batches for learner in self._learners):
            if simulation.now < due:
                yield due - simulation.now
            due += 1 / _WRITES_PER_S
            yield from self.permits.take()
            yield [Call(self._shard, simulation.cost("submit_write"), simulation.cost("write"), simulation.cost("get"))]
            self.writes += 1


def run(costs: Costs, fleet: Fleet, batches: int, seed: int = 0) -> Result:
    """Simulate a fleet until each learner has drawn `batches` batches."""
    simulation = Simulation(costs, fleet, seed)
    learners = [_Learner(simulation, batches) for _ in range(fleet.learners)]
    writers = [_Writer(simulation, i % fleet.shards, learners, batches) for i in range(fleet.writers)]
    for process in [one.process() for one in learners] + [one.process() for one in writers]:
        simulation.spawn(process)
    seconds = simulation.run()
    latencies = [each for learner in learners for each in learner.latencies]
    permits = [learner.permits for learner in learners] + [writer.permits for writer in writers]
    asked = sum(one.calls for one in permits)
    calls, writes = sum(learner.calls for learner in learners), sum(writer.writes for writer in writers)
    return Result(latencies, seconds, len(latencies) * fleet.batch, calls, asked, writes)


# -- a real fleet -----------------------------------------------------------------------------------------------------


def run_real(shards: int, sizes: Sequence[int], prefetch: int, batches: int) -> list[Result]:
    """Draw batches of each size from shards in actors of this machine; calls are not counted."""
    buffer = ShardedReplayBuffer(
        shards,
        storage=partial(LazyTensorStorage, 2000),
        batch_size=sizes[0],
        prefetch=prefetch,
        snapshot_age_s=_AGE_S,
        remote_config={"num_cpus": 0},
    )
    with buffer as rb:
        for shard in range(shards):
            rb.pinned(shard).extend(transitions(1000))
        return [_draw_real(rb, size, 2 * prefetch + 2, batches) for size in sizes]


def _draw_real(rb: ShardedReplayBuffer, size: int, warm: int, batches: int) -> Result:
    for _ in range(warm):
        rb.sample(size)
    latencies, start = [], time.perf_counter()
    for _ in range(batches):
        began = time.perf_counter()
        rb.sample(size)
        latencies.append(time.perf_counter() - began)
    return Result(latencies, time.perf_counter() - start, batches * size, 0, 0, 0)


# -- the command line -------------------------------------------------------------------------------------------------

_HEAD = (
    f"{'fleet':46}{'calls/batch':>12}{'p50 ms':>9}{'p99 ms':>9}{'batches/s':>11}{'rows/s':>12}{'limiter/s':>11}"
    f"{'written/s':>12}"
)


def _show(name: str, result: Result) -> dict[str, float]:
    row = result.row()
    print(
        f"{name:46}{row['calls_per_batch']:12.1f}{row['p50_ms']:9.2f}{row['p99_ms']:9.2f}{row['batches_per_s']:11.0f}"
        f"{row['rows_per_s']:12.0f}{row['limiter_calls_per_s']:11.0f}"
        f"{row['written_per_s']:12.0f}",
        flush=True,
    )
    return row


def _fleets(shards: Sequence[int], network_s: tuple[float, float]) -> dict[str, Fleet]:
    found = {}
    for number in shards:
        for batch in (256, 2048):
            fresh = Fleet(number, batch, age_s=0.0, network_s=network_s)
            found[f"{number} shards, batch {batch}, offers for each batch"] = fresh
            for prefetch in (0, 8, 32, 64):
                name = f"{number} shards, batch {batch}, prefetch {prefetch}"
                found[name] = Fleet(number, batch, prefetch, network_s=network_s)
        loaded = Fleet(number, 256, 32, learners=4, writers=100, network_s=network_s)
        found[f"{number} shards, 4 learners, 100 writers"] = loaded
        found[f"{number} shards, the same with a rate limiter"] = dataclasses.replace(loaded, limiter=True)
        some = dataclasses.replace(loaded, limiter=True, writers=20)
        found[f"{number} shards, the same with 20 writers"] = some
    return found


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    return [kind(word) for word in text.split(",") if word]


def _start_ray() -> None:
    ray.init(
        num_cpus=4, object_store_memory=500_000_000, include_dashboard=False, logging_level=40, log_to_driver=False
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", default="100,1000")
    parser.add_argument("--network-ms", default="0.2,1", help="shortest and longest delay of one way")
    parser.add_argument("--batches", type=int, default=300, help="of each learner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, help="measured costs: read from this file if it exists, else written")
    parser.add_argument("--real", type=int, default=0, metavar="N", help="run N shards on this machine, too")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    shortest, longest = (1e-3 * each for each in _numbers(given.network_ms, float))
    if given.costs is not None and given.costs.exists():
        costs = Costs.load(given.costs)
    else:
        _start_ray()
        costs = measure()
        if given.costs is not None:
            costs.save(given.costs)
    print(f"measured on this machine\n{costs.show()}\n\nsimulated\n{_HEAD}")
    table = {}
    for name, fleet in _fleets(_numbers(given.shards, int), (shortest, longest)).items():
        table[name] = _show(name, run(costs, fleet, given.batches, given.seed))
    if given.real:
        print(f"\n{given.real} shards on this machine, and simulated with its {os.cpu_count()} cores\n{_HEAD}")
        if not ray.is_initialized():
            _start_ray()
        for sizes, prefetch in (((256, 2048), 0), ((256,), 32)):
            for batch, real in zip(sizes, run_real(given.real, sizes, prefetch, given.batches), strict=True):
                name = f"batch {batch}, prefetch {prefetch}"
                fleet = Fleet(given.real, batch, prefetch, cores=os.cpu_count())
                table[f"real: {name}"] = _show(f"{name}, real", real)
                table[f"beside: {name}"] = _show(f"{name}, simulated", run(costs, fleet, given.batches, given.seed))
    if given.json is not None:
        given.json.write_text(json.dumps({"costs": dataclasses.asdict(costs), "table": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
