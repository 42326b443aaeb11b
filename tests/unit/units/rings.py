"""Small buffers, and the histories that they are filled with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
)

if TYPE_CHECKING:
    from ...episodes import Log


def steps(count: int = 40, episode: int = 10) -> dict[str, torch.Tensor]:
    t = torch.arange(count)
    lap = t % 7 == 6
    done = t % episode == episode - 1
    return {"t": t, "obs": t.float(), "next_obs": t.float() + 1, "reward": torch.ones(count), "done": done, "lap": lap}


ENDS = [("next", "terminated"), ("next", "truncated")]


def buffer(capacity: int, size: int = 12, **options: Any) -> ReplayBuffer:
    ndim = options.pop("ndim", 1)
    options.setdefault("generator", torch.Generator().manual_seed(0))
    return ReplayBuffer(storage=LazyTensorStorage(capacity, ndim=ndim), batch_size=size, **options)


def slices(length: int = 3, **options: Any) -> SliceSampler:
    return SliceSampler(slice_len=length, end_keys=ENDS, **options)


def written(log: Log, rb: ReplayBuffer, *rows: int) -> ReplayBuffer:
    for count in rows:
        log.extend(rb, count)
    return rb
