"""Buffers in Ray actors: samples and rows by the second, beside a local buffer and TorchRL's `RayReplayBuffer`.

    python -m benchmarks.distributed [--rounds 7] [--seconds 0.5] [--writers 1,2,4] [--forms vectors] [--json FILE]

Needs the extra ray; TorchRL is left out, with the reason, where it is not installed. All run in one Ray cluster, in
turns, and another one begins each round. Numbers are medians over the rounds; ratios are those of one round each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray as _ray
import torch
from tensordict import TensorDict

from ostinato import LazyTensorStorage, RayReplayBuffer, ReplayBuffer, ShardedReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ray: Any = _ray
PREFETCH = 4
MORE = 16
FORMS = ("vectors", "images")
BATCH = {"vectors": 256, "images": 32}
CAPACITY = {"vectors": 100_000, "images": 2_000}


def rows(form: str, count: int) -> TensorDict:
    """Transitions of a control task (165 bytes), or of two stacks of four frames (56 kB)."""
    if form == "images":
        shape = (count, 84, 84, 4)
        fields = {name: torch.randint(0, 256, shape, dtype=torch.uint8) for name in ("obs", "next_obs")}
    else:
        fields = {"obs": torch.randn(count, 17), "next_obs": torch.randn(count, 17), "action": torch.randn(count, 6)}
    fields |= {"reward": torch.randn(count), "done": torch.zeros(count, dtype=torch.bool)}
    return TensorDict(fields, [count])


class Clock:
    """Calls something for a while and counts."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.rates: list[float] = []

    def run(self, seconds: float) -> None:
        for _ in range(5):
            self.call()
        start, calls = time.perf_counter(), 0
        while (now := time.perf_counter()) < start + seconds or calls < 5:
            self.call()
            calls += 1
        self.rates.append(calls / (now - start))


class Nothing:
    """An actor that does nothing: what a round trip takes."""

    def nothing(self) -> int:
        return 1


class Writer:
    """Writes batches as fast as they are taken."""

    def __init__(self, buffer: Any, form: str, batch: int) -> None:
        torch.set_num_threads(1)
        self.buffer, self.data, self.batch = buffer, rows(form, batch), batch

    def ready(self) -> bool:
        return True

    def write(self, seconds: float) -> float:
        start, count = time.perf_counter(), 0
        while (now := time.perf_counter()) < start + seconds:
            self.buffer.extend(self.data)
            count += self.batch
        return count / (now - start)


def fill(buffer: Any, form: str) -> Any:
    for _ in range(CAPACITY[form] // 1000):
        buffer.extend(rows(form, 1000))
    return buffer


def peer(form: str, size: int) -> Any:
    """TorchRL's buffer; ImportError and the like where there is none that works."""
    from torchrl.data import LazyTensorStorage as PeerStorage
    from torchrl.data import RayReplayBuffer as Peer

    return Peer(storage=partial(PeerStorage, CAPACITY[form]), batch_size=size)


def members(form: str) -> tuple[dict[str, Any], str | None]:
    """Return the buffers, full, and why TorchRL's is not among them."""
    size = BATCH[form]
    storage = partial(LazyTensorStorage, CAPACITY[form])
    found: dict[str, Any] = {
        "local": ReplayBuffer(storage=storage, batch_size=size),
        "ray": RayReplayBuffer(storage=storage, batch_size=size),
        f"ray, prefetch {PREFETCH}": RayReplayBuffer(storage=storage, batch_size=size, prefetch=PREFETCH),
        f"ray, prefetch {MORE}": RayReplayBuffer(storage=storage, batch_size=size, prefetch=MORE),
        "2 shards": ShardedReplayBuffer(2, storage=storage, batch_size=size, route="round_robin"),
        f"2 shards, prefetch {PREFETCH}": ShardedReplayBuffer(
            2, storage=storage, batch_size=size, route="round_robin", prefetch=PREFETCH
        ),
    }
    why = None
    try:
        found["torchrl"] = peer(form, size)
    except Exception as error:  # noqa: BLE001 (whatever keeps a peer from running is its reason)
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    return {name: fill(buffer, form) for name, buffer in found.items()}, why


def touch(batch: TensorDict) -> None:
    """Look at a batch, so that none comes for free."""
    batch["reward"].sum()


def measure_samples(form: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Batches by the second, of a learner that does nothing else."""
    buffers, why = members(form)
    bare = ray.remote(Nothing).remote()
    clocks = {"bare round trip": Clock(lambda: ray.get(bare.nothing.remote()))}
    for name, buffer in buffers.items():
        clocks[name] = Clock(lambda buffer=buffer: touch(buffer.sample()))  # type: ignore[misc]
    turns = list(clocks)
    for number in range(rounds):
        for name in turns[number % len(turns) :] + turns[: number % len(turns)]:
            clocks[name].run(seconds)
    rates = {name: statistics.median(clock.rates) for name, clock in clocks.items()}
    for buffer in buffers.values():
        getattr(buffer, "close", lambda: None)()
    ray.kill(bare)
    found = {"batches_per_s": rates, "rows": BATCH[form], "torchrl_missing": why}
    if "torchrl" in clocks:
        peer_rates = clocks["torchrl"].rates
        found["beside_torchrl"] = {
            name: statistics.median(own / other for own, other in zip(clock.rates, peer_rates, strict=True))
            for name, clock in clocks.items()
        }
    return found


@contextmanager
def closing(buffer: Any) -> Iterator[Any]:
    try:
        yield buffer
    finally:
        buffer.close()


def measure_writers(form: str, writers: int, seconds: float) -> dict[str, Any]:
    """Rows by the second from several writers, and batches by the second of the learner beside them."""
    size = BATCH[form]
    storage = partial(LazyTensorStorage, CAPACITY[form])
    makers: dict[str, Callable[[], Any]] = {
        "ray": lambda: RayReplayBuffer(storage=storage, batch_size=size, prefetch=PREFETCH),
        "2 shards": lambda: ShardedReplayBuffer(2, storage=storage, batch_size=size, prefetch=PREFETCH),
        "torchrl": lambda: peer(form, size),
    }
    found: dict[str, Any] = {}
    for name, make in makers.items():
        try:
            made = make()
        except Exception as error:  # noqa: BLE001
            found[name] = {"missing": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        with closing(made) as buffer:
            fill(buffer, form)
            handle = buffer.client() if name == "torchrl" else buffer  # TorchRL's buffer itself cannot be pickled
            actors = [ray.remote(Writer).remote(handle, form, size) for _ in range(writers)]
            ray.get([actor.ready.remote() for actor in actors])
            found[name] = measure_turns(actors, Clock(lambda buffer=buffer: touch(buffer.sample())), seconds)  # type: ignore[misc]
            for actor in actors:
                ray.kill(actor)
    return found


def measure_turns(writers: list[Any], learner: Clock, seconds: float) -> dict[str, float]:
    """Rates of writers that are warm, alone and beside the learner in turns: medians of three."""
    ray.get([writer.write.remote(seconds / 4) for writer in writers])
    alone, beside = [], []
    for _ in range(3):
        alone.append(sum(ray.get([writer.write.remote(seconds) for writer in writers])))
        running = [writer.write.remote(seconds) for writer in writers]
        learner.run(seconds * 0.8)
        beside.append(sum(ray.get(running)))
    return {
        "rows_per_s": statistics.median(alone),
        "beside_rows_per_s": statistics.median(beside),
        "beside_batches_per_s": statistics.median(learner.rates),
    }


def local_writer(form: str, seconds: float) -> dict[str, float]:
    """What one process does with a local buffer, in one thread."""
    buffer = fill(ReplayBuffer(storage=LazyTensorStorage(CAPACITY[form]), batch_size=BATCH[form]), form)
    data = rows(form, BATCH[form])
    clock = Clock(lambda: buffer.extend(data))
    clock.run(seconds)
    return {"rows_per_s": clock.rates[0] * BATCH[form]}


def show_samples(form: str, found: dict[str, Any]) -> None:
    rates = found["batches_per_s"]
    print(f"\nsample({found['rows']}) of {form}, batches per second")
    for name, rate in rates.items():
        beside = f"{found['beside_torchrl'][name]:6.2f} x TorchRL" if "beside_torchrl" in found else ""
        print(f"  {name:20}{rate:10.0f}{1e3 / rate:10.2f} ms{beside:>20}")
    if found["torchrl_missing"]:
        print(f"  torchrl is missing: {found['torchrl_missing']}")
    sys.stdout.flush()


def show_writers(form: str, count: str, found: dict[str, Any]) -> None:
    print(f"\n{count} writers, extend({BATCH[form]}) of {form}: rows/s alone / beside a learner, its batches/s")
    for name, numbers in found.items():
        words = numbers.get("missing") or " / ".join(f"{number:10.0f}" for number in numbers.values())
        print(f"  {name:20}{words}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--writers", default="1,2,4")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(
        num_cpus=16, object_store_memory=2_000_000_000, include_dashboard=False, logging_level=40, log_to_driver=False
    )
    report: dict[str, Any] = {"samples": {}, "writers": {}}
    for form in given.forms.split(","):
        report["samples"][form] = measure_samples(form, given.rounds, given.seconds)
        show_samples(form, report["samples"][form])
    for form in given.forms.split(","):
        found = {"1, local": {"local": local_writer(form, given.seconds)}}
        for count in filter(None, given.writers.split(",")):
            found[count] = measure_writers(form, int(count), 2 * given.seconds)
        for count, numbers in found.items():
            show_writers(form, count, numbers)
        report["writers"][form] = found
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
