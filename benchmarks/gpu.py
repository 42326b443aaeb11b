"""Buffers whose rows are on a GPU, beside TorchRL's and beside bare indexing: `python -m benchmarks.gpu`.

Each figure is the time of a call in microseconds: the median over rounds of calls that end with one wait for
the device, so it holds the work of the host and that of the GPU, whichever takes longer.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from benchmarks.data import transitions

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call

ROUNDS = 15
CALLS = 100
EPISODE = 100


def rows(count: int, device: str) -> TensorDict:
    """Return transitions on the device, in episodes of the same length."""
    made = {key: torch.as_tensor(value, device=device) for key, value in transitions(count + 1).items()}
    step = torch.arange(count + 1, device=device)
    data = TensorDict({**made, "done": step % EPISODE == EPISODE - 1, "episode": step // EPISODE}, [count + 1])
    return data[:-1].set("next_obs", data["obs"][1:]).clone()


def limit(capacity: int, batch: int, device: str) -> dict[str, Callable[[], Call]]:
    """Index each field with drawn rows, or copy a batch to where the cursor is: nothing else."""
    stored, new, start = rows(capacity, device), rows(batch, device), 0

    def sample() -> object:
        index = torch.randint(capacity, (batch,), device=device)
        return [value.index_select(0, index) for value in stored.values()]

    def extend() -> None:
        nonlocal start
        for key, value in stored.items():
            value[start : start + batch].copy_(new[key])
        start = (start + batch) % (capacity - batch)

    return {"sample": lambda: sample, "extend": lambda: extend}


def library(name: str, capacity: int, batch: int, device: str) -> dict[str, Callable[[], Call]]:
    """Return what prepares the same calls of Ostinato (`ostinato`) or TorchRL (`torchrl.data`)."""
    parts = importlib.import_module(name)
    new = rows(batch, device)

    def buffer(**options: Any) -> Any:
        storage = parts.LazyTensorStorage(capacity, device=device)
        made = parts.TensorDictReplayBuffer(storage=storage, batch_size=batch, **options)
        made.extend(rows(capacity, device))
        return made

    def learner() -> Call:
        sampler = parts.PrioritizedSampler(capacity, 0.7, 0.5)
        ranked, error = buffer(sampler=sampler, priority_key="td_error"), torch.rand(batch, device=device)

        def learn() -> None:
            drawn = ranked.sample()
            drawn["td_error"] = error
            ranked.update_tensordict_priority(drawn)

        return learn

    def slices() -> Call:
        sampler = parts.SliceSampler(slice_len=16, traj_key="episode", strict_length=False)
        return buffer(sampler=sampler).sample  # type: ignore[no-any-return]

    return {
        "sample": lambda: buffer().sample,
        "sample, no replacement": lambda: buffer(sampler=parts.SamplerWithoutReplacement()).sample,
        "extend": lambda: partial(buffer().extend, new),
        "prioritized sample + update": learner,
        "slices of 16": slices,
    }


def microseconds(prepare: Callable[[], Call]) -> str:
    """Return the median time of a call, or the kind of the error that prevents it."""
    try:
        call = prepare()
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) / CALLS * 1e6)
    except (RuntimeError, ImportError) as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return type(error).__name__
    return f"{statistics.median(times):.1f}"


def main() -> None:
    """Print one table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="capacity in rows, all filled")
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 4096], help="rows a call")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.rows:,} rows")
    for batch in given.batches:
        size = (given.rows, batch, "cuda")
        columns = [limit(*size), library("ostinato", *size), library("torchrl.data", *size)]
        print(f"\n{f'batch {batch}, us a call':30}{'bare indexing':>15}{'ostinato':>15}{'torchrl':>15}")
        for call in columns[1]:
            times = [microseconds(column[call]) if call in column else "-" for column in columns]
            print(f"{call:30}" + "".join(f"{time_us:>15}" for time_us in times))


if __name__ == "__main__":
    main()
