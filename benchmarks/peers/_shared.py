"""What a buffer that processes share costs one of them, beside the same calls of a private one."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from benchmarks import data
from benchmarks.peers._torch import as_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup

__all__ = ["PLAIN", "WORKLOADS"]


def _call(setup: Setup, *, shared: bool) -> Call:
    """Return what the kind of the workload says, on a full buffer."""
    ours = import_module("ostinato")
    ranked = setup.kind == "prioritized"
    sampler = ours.PrioritizedSampler(setup.rows, 0.6, 0.4) if ranked else ours.RandomSampler()
    storage = ours.LazyTensorStorage(setup.rows)
    buffer = ours.ReplayBuffer(storage=storage, sampler=sampler, batch_size=setup.batch, shared=shared)
    for rows in data.chunks(data.transitions, setup.rows, 10_000):
        buffer.extend(as_kind(rows, "dict"))
    batches = cycle([as_kind(rows, "dict") for rows in data.pool(data.transitions, setup.batch)])
    priorities = torch.rand(setup.batch)

    def learn() -> None:
        info = buffer.sample(return_info=True)[1]
        buffer.update_priority(info["index"], priorities, info["index_generation"])

    calls: dict[str, Call] = {
        "sample": buffer.sample,
        "extend": lambda: buffer.extend(next(batches)),
        "prioritized": learn,
    }
    return calls[setup.kind]


_KINDS = ("sample", "extend", "prioritized")
WORKLOADS: dict[str, Callable[[Setup], Call]] = {f"shared.{kind}": partial(_call, shared=True) for kind in _KINDS}
PLAIN: dict[str, Callable[[Setup], Call]] = {f"shared.{kind}": partial(_call, shared=False) for kind in _KINDS}
