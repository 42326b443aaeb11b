"""What one call between a learner, a shard and the rate limiter costs: measured in a Ray cluster of this machine."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import ray as _ray
import torch

from ostinato import LazyTensorStorage, RateLimiter, ShardedReplayBuffer
from ostinato.distributed.rate_limits import RateLimits
from ostinato.distributed.routing import ShardWeight, allot, positions_by_shard, weight_factors
from ostinato.distributed.sampling import Part, join_parts
from ostinato.distributed.serialization import Serialized

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["WRITE_ROWS", "Costs", "measure", "transitions"]

ray: Any = _ray
WRITE_ROWS = 1000
"""Rows of one write."""
_BURST = 64
_MANY_DRAWS = 16384
_MANY_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds. Lists are samples of a distribution; numbers are medians of what each further row or shard adds."""

    submit: list[float]
    """A call, in the learner."""
    wire: list[float]
    """A call and its answer on their way, beyond the work of both processes; on one machine."""
    call: list[float]
    """A call of one row, in the shard: one shard answers the reciprocal in a second."""
    get: list[float]
    """An answer of one row, in the learner."""
    permit: list[float]
    """A call, in the rate limiter."""
    submit_write: list[float]
    """A write of `WRITE_ROWS` rows, in the writer."""
    write: list[float]
    """The same in the shard."""
    row_call: float
    """Each further row of an answer, in the shard."""
    row_get: float
    """Each further row of an answer, in the learner."""
    draw: float
    """Each row drawn for an offer, in the shard."""
    part: float
    """Each part of a batch when it is joined, in the learner."""
    row_join: float
    """Each row of a batch when it is joined, in the learner."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        """Write the costs, for simulations that can be repeated."""
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n")

    def show(self) -> str:
        """Return the medians and 99th percentiles as text."""
        lines = []
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, list):
                p50, p99 = (1e6 * sorted(value)[int(q * (len(value) - 1))] for q in (0.5, 0.99))
                lines.append(f"  {name:14}{p50:10.1f} us (p50) {p99:10.1f} us (p99)")
            else:
                lines.append(f"  {name:14}{1e6 * value:10.3f} us")
        return "\n".join(lines)


def transitions(count: int) -> dict[str, torch.Tensor]:
    """Transitions of a control task, 165 bytes each."""
    shapes = {"obs": (count, 17), "next_obs": (count, 17), "action": (count, 6), "reward": (count,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | {"done": torch.zeros(count, dtype=torch.bool)}


def _clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _bursts(submit: Callable[[], Any], number: int) -> list[float]:
    """Return the seconds per call of bursts: what a call keeps the actor busy."""

    def burst() -> None:
        ray.get([submit() for _ in range(_BURST)])

    burst()
    return [_clock(burst) / _BURST for _ in range(number)]


def _added(many: list[float], one: list[float], more: int) -> float:
    return max(0.0, statistics.median(many) - statistics.median(one)) / more


def _join_seconds(parts: int, rows: int) -> float:
    """Return the seconds that a learner takes to choose shards and to join a batch of `rows` rows of `parts` shards."""
    weights = {i: ShardWeight(1000, 1000.0, 1.0, 0.4) for i in range(parts)}
    each = rows // parts
    data, index = transitions(each), torch.arange(each)
    info = {"index": index, "index_generation": index, "priority_weight": torch.ones(each)}

    def join() -> None:
        positions_by_shard(allot([weight.mass for weight in weights.values()], torch.rand(rows, dtype=torch.float64)))
        factors = weight_factors(weights)
        join_parts([Part(i, data, info, index * parts + i, factors[i]) for i in range(parts)])

    join()
    return statistics.median(_clock(join) for _ in range(9))


def _measure_reads(shard: Any, number: int) -> dict[str, Any]:
    take, offer = (getattr(shard, name).options(concurrency_group="read") for name in ("take", "offer"))

    def offered() -> int:
        return int(ray.get(offer.remote(2 * _BURST * _MANY_ROWS * (number + 2)))[0])

    def takes(rows: int) -> list[float]:
        draws = offered()
        return _bursts(lambda: take.remote(draws, rows, True), number)

    def gets(rows: int) -> list[float]:
        draws = offered()
        found = [take.remote(draws, rows, True) for _ in range(_BURST)]
        ray.wait(found, num_returns=len(found))
        time.sleep(0.2)  # until the answers are here
        return [_clock(partial(ray.get, one)) for one in found]

    submitted: list[Any] = []
    submit = [_clock(lambda: submitted.append(shard.drawable.remote())) for _ in range(_BURST)]
    ray.get(submitted)
    one, many = takes(1), takes(_MANY_ROWS)
    got, got_many = gets(1) + gets(1), gets(_MANY_ROWS)
    trips = [_clock(lambda: ray.get(shard.drawable.remote())) for _ in range(4 * _BURST)]
    work = statistics.median(_bursts(shard.drawable.remote, number)) + statistics.median(submit)
    few, all_draws = _bursts(partial(offer.remote, 1), number), _bursts(partial(offer.remote, _MANY_DRAWS), number)
    return {
        "submit": submit,
        "wire": [max(2e-5, trip - work - statistics.median(got)) for trip in trips],
        "call": one,
        "get": got,
        "row_call": _added(many, one, _MANY_ROWS - 1),
        "row_get": _added(got_many, got, _MANY_ROWS - 1),
        "draw": _added(all_draws, few, _MANY_DRAWS - 1),
    }


def _measure_writes(shard: Any, number: int) -> dict[str, list[float]]:
    """Measure calls that write `WRITE_ROWS` rows."""
    data, write = transitions(WRITE_ROWS), shard.call.options(concurrency_group="write")
    sent: list[Any] = []
    submit = [_clock(lambda: sent.append(write.remote("extend", Serialized(data)))) for _ in range(_BURST)]
    ray.get(sent)
    return {"submit_write": submit, "write": _bursts(lambda: write.remote("extend", Serialized(data)), number)}


def _measure_limiter(shard: Any, number: int) -> list[float]:
    """Measure permits of a rate limiter that is asked by many clients at once."""
    limiter = ray.remote(num_cpus=0)(RateLimits).remote(RateLimiter(min_size_to_sample=1), [shard])
    try:
        return _bursts(lambda: limiter.acquire.remote("draw", 1, 10.0, 0.0), number)
    finally:
        ray.kill(limiter)


def measure(number: int = 20) -> Costs:
    """Measure the costs with one shard and a rate limiter; Ray must have been started.

    Args:
        number: Bursts of each kind.
    """
    torch.set_num_threads(1)
    rb = ShardedReplayBuffer(1, storage=partial(LazyTensorStorage, 100_000), remote_config={"num_cpus": 0})
    try:
        for _ in range(20):
            rb.extend(transitions(WRITE_ROWS))
        shard = rb.actors[0]
        found = _measure_reads(shard, number)
        found |= _measure_writes(shard, number)
        found["permit"] = _measure_limiter(shard, number)
    finally:
        rb.close()
    small, parts, rows = _join_seconds(20, 400), _join_seconds(200, 400), _join_seconds(20, 8000)
    return Costs(**found, part=max(0.0, parts - small) / 180, row_join=max(0.0, rows - small) / 7600)
