"""Every part of a buffer once, by its capacity, and every buffer with a state.

A new sampler, unit, storage or writer is one line here: `contracts/test_buffers.py` saves, loads and pickles it, uses
it from threads and gives it wrong calls, and `contracts/test_combinations.py` combines it with all other parts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

import ostinato as o
from ostinato.testing import BufferContract

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "BUFFERS",
    "CAPACITY",
    "LENGTH",
    "SAMPLERS",
    "STORAGES",
    "UNITS",
    "WRITERS",
    "Registered",
    "ring",
    "rows",
    "seeded",
]

CAPACITY = 24
LENGTH = 6
"""Steps of an episode."""
BATCH = 6


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ring(capacity: int, **options: Any) -> o.ReplayBuffer:
    """Return an empty buffer of so many rows in memory."""
    return o.ReplayBuffer(storage=o.LazyTensorStorage(capacity), **options)


def rows(count: int, start: int = 0, lanes: int = 1) -> TensorDict:
    """Return steps of episodes of `LENGTH` rows, `[count]` or `[count, lanes]`; `t` numbers all rows.

    The data come from numpy, so that no mode of torch has a part in them.
    """
    step = np.repeat(np.arange(start, start + count)[:, None], lanes, 1)
    t = step * lanes + np.arange(lanes)
    step, t = (step[:, 0], t[:, 0]) if lanes == 1 else (step, t)
    place, after = (number.astype(np.float32)[..., None] for number in (t, t + lanes))
    goal = np.full_like(place, -1)
    now = {"t": t, "step": step, "obs": place, "tokens": np.stack((t, t), -1)}
    now |= {"achieved_goal": place, "desired_goal": goal}
    then = {"obs": after, "achieved_goal": after, "desired_goal": goal}
    then |= {"reward": np.ones(t.shape, np.float32), "done": step % LENGTH == LENGTH - 1}
    following = TensorDict({key: torch.from_numpy(value.copy()) for key, value in then.items()}, t.shape)
    return TensorDict(
        {**{key: torch.from_numpy(value.copy()) for key, value in now.items()}, "next": following}, t.shape
    )


def reached(batch: Any) -> Tensor:
    same: Tensor = batch["next", "achieved_goal"] == batch["desired_goal"]
    return same.float()


class Half(o.StorageColumn):
    """Numbers in half of their bytes, exact for those of `rows`."""

    def allocate(self) -> None:
        narrow = torch.float32 if self.leaf.dtype is torch.float64 else torch.float16
        self._values = self.new_tensor(narrow, *self.leaf.shape)

    def set(self, slots: Tensor, values: Tensor) -> None:
        self._values[slots] = values.to(self._values.dtype)

    def get(self, slots: Tensor) -> Tensor:
        return self._values[slots].to(self.leaf.dtype)


class Part(NamedTuple):
    """How to make a part for a capacity."""

    make: Callable[[int], Any]
    law: str = ""
    """Of a sampler, its distribution: those that have one are combined with all other parts."""


_SLICES: dict[str, Any] = {"slice_len": 3, "end_key": ("next", "done")}
SAMPLERS: dict[str, Part] = {
    "RandomSampler": Part(lambda n: o.RandomSampler(), "uniform"),
    "SamplerWithoutReplacement": Part(lambda n: o.SamplerWithoutReplacement(), "once per pass"),
    "PrioritizedSampler": Part(lambda n: o.PrioritizedSampler(n, 0.7, 0.5), "by priority"),
    "SliceSampler": Part(lambda n: o.SliceSampler(**_SLICES), "episode, then start, uniform"),
    "SliceSamplerWithoutReplacement": Part(
        lambda n: o.SliceSamplerWithoutReplacement(**_SLICES), "each episode once per pass"
    ),
    "PrioritizedSliceSampler": Part(lambda n: o.PrioritizedSliceSampler(n, 0.7, 0.5, **_SLICES), "start by priority"),
    "LimitedSampler": Part(lambda n: o.LimitedSampler(4), "uniform, at most n times"),
    "QueueSampler": Part(lambda n: o.QueueSampler(), "once, in order"),
    "StreamingSliceSampler": Part(
        lambda n: o.StreamingSliceSampler(**_SLICES), "new slices once, then as SliceSampler"
    ),
    "ConsumingSampler": Part(lambda n: o.ConsumingSampler(4), "uniform, n times, then rows leave"),
    "StalenessAwareSampler": Part(lambda n: o.StalenessAwareSampler(version_key="t"), "by staleness"),
    "PromptGroupSampler": Part(
        lambda n: o.PromptGroupSampler(num_groups=1, group_key="desired_goal"), "group, then rows, uniform"
    ),
    "StackSampler": Part(lambda n: o.StackSampler(), "newest first"),
    "HeapSampler": Part(lambda n: o.HeapSampler(n), "greatest priority first"),
    "StackSampler, max_times_sampled": Part(lambda n: o.StackSampler(3), "newest first, n times, then rows leave"),
    "HeapSampler, max_times_sampled": Part(
        lambda n: o.HeapSampler(n, max_times_sampled=3), "greatest priority first, n times, then rows leave"
    ),
    "RandomSampler, each once": Part(lambda n: o.RandomSampler(replacement=False)),
    "SamplerWithoutReplacement, in order": Part(lambda n: o.SamplerWithoutReplacement(shuffle=False)),
    "SamplerWithoutReplacement, drop_last": Part(lambda n: o.SamplerWithoutReplacement(drop_last=True)),
    "SamplerWithoutReplacement, endless": Part(lambda n: o.SamplerWithoutReplacement(endless=True)),
    "PrioritizedSampler, stratified": Part(lambda n: o.PrioritizedSampler(n, 0.7, 0.5, stratified=True)),
    "PrioritizedSampler, largest priority": Part(
        lambda n: o.PrioritizedSampler(n, 1.0, 1.0, max_priority_within_buffer=True)
    ),
    "PrioritizedSampler, alpha 0": Part(lambda n: o.PrioritizedSampler(n, 0.0, 0.5, eps=0.0)),
    "SliceSampler, padded": Part(lambda n: o.SliceSampler(**_SLICES, strict_length=False, pad_output=True)),
}
UNITS: dict[str, Any] = {
    "none": lambda n: None,
    "Transition": lambda n: o.Transition(),
    "NStep": lambda n: o.NStep(3, 0.5),
    "SequenceUnit": lambda n: o.SequenceUnit(3, burn_in=1),
    "SequenceUnit, strict": lambda n: o.SequenceUnit(3, "strict"),
    "FrameStack": lambda n: o.FrameStack(2, ["obs"]),
    "Hindsight": lambda n: o.Hindsight(reached),
    "DeltaTimestamps": lambda n: o.DeltaTimestamps(steps={"obs": [-1, 0]}),
    "NStep + FrameStack": lambda n: [o.NStep(3, 0.5), o.FrameStack(2, ["obs"])],
}
STORAGES: dict[str, Any] = {
    "ListStorage": o.ListStorage,
    "CompressedListStorage": o.CompressedListStorage,
    "LazyStackStorage": o.LazyStackStorage,
    "TensorStorage": lambda n: o.TensorStorage(rows(n)),
    "LazyTensorStorage": o.LazyTensorStorage,
    "LazyTensorStorage, ndim=2": lambda n: o.LazyTensorStorage(n, ndim=2),
    "LazyMemmapStorage": o.LazyMemmapStorage,
    "LazyTensorStorage, codec": lambda n: o.LazyTensorStorage(
        n, codec={"obs": "zlib"}, kinds={("next", "obs"): Half()}
    ),
    "RaggedTensorStorage": lambda n: o.RaggedTensorStorage(
        n, ragged="tokens", layout="nested", codec={"obs": "zlib"}, kinds={("next", "obs"): Half()}
    ),
    "LazyTensorStorage, single_copy": lambda n: o.LazyTensorStorage(n, single_copy=True),
}
WRITERS: dict[str, Any] = {
    "RoundRobinWriter": lambda n: o.RoundRobinWriter(),
    "TensorDictRoundRobinWriter": lambda n: o.TensorDictRoundRobinWriter(),
    "TensorDictMaxValueWriter": lambda n: o.TensorDictMaxValueWriter(rank_key="t"),
    "ReservoirWriter": lambda n: o.ReservoirWriter(generator=seeded(3)),
    "ImmutableDatasetWriter": lambda n: o.ImmutableDatasetWriter(),
}


class Scale(torch.nn.Module):
    """A transform with a state: it counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device="cpu"))

    def forward(self, batch: Any) -> Any:
        assert isinstance(self.seen, torch.Tensor)
        self.seen += 1
        return batch


def make(n: int, *, storage: Any = "LazyTensorStorage", **options: Any) -> o.TensorDictReplayBuffer:
    """Return an empty buffer; parts may be given by their names."""
    for name, table in (("sample_unit", UNITS), ("writer", WRITERS)):
        if isinstance(options.get(name), str):
            options[name] = table[options[name]](n)
    if isinstance(options.get("sampler"), str):
        options["sampler"] = SAMPLERS[options["sampler"]].make(n)
    options = {"batch_size": BATCH, "dim_extend": 0, "generator": seeded(), **options}
    return o.TensorDictReplayBuffer(storage=STORAGES[storage](n) if isinstance(storage, str) else storage, **options)


def _ensemble(n: int, **mix: Any) -> o.ReplayBufferEnsemble:
    parts: list[Any] = [
        {"sampler": "PrioritizedSampler"},
        {"sampler": "SamplerWithoutReplacement", "storage": "ListStorage"},
        {"writer": "ReservoirWriter"},
    ]
    members = [make(n, **part) for part in parts]
    return o.ReplayBufferEnsemble(*members, batch_size=BATCH, generator=seeded(1), **mix)


def _viewed(n: int) -> o.TensorDictReplayBuffer:
    buffer: Any = make(n)
    parts: list[Any] = [
        {"sampler": SAMPLERS["PrioritizedSampler"].make(n), "prefetch": 3},
        {"sampler": o.SamplerWithoutReplacement()},
        {"sampler": o.SliceSampler(**_SLICES), "prefetch": 1},
        {"sample_unit": o.NStep(2, 0.9)},
    ]
    buffer.handles = [buffer.view(generator=seeded(i), **part) for i, part in enumerate(parts, 1)]
    return buffer  # type: ignore[no-any-return]


_OPTIONS: dict[str, Any] = {
    "NStep, PrioritizedSampler": lambda n: make(n, sample_unit="NStep", sampler="PrioritizedSampler"),
    "all kinds of columns": lambda n: make(
        n,
        storage=o.RaggedTensorStorage(
            n,
            ragged="tokens",
            layout="nested",
            single_copy=True,
            codec={"obs": "zlib"},
            kinds={"achieved_goal": Half()},
        ),
        sampler="SliceSampler",
        prefetch=2,
    ),
    "SliceSampler, mapped": lambda n: make(n, sampler="SliceSampler", storage="LazyMemmapStorage"),
    "SequenceUnit, ndim=2": lambda n: make(n, sample_unit="SequenceUnit", storage="LazyTensorStorage, ndim=2"),
    "ReservoirWriter, PrioritizedSampler": lambda n: make(n, writer="ReservoirWriter", sampler="PrioritizedSampler"),
    "transform": lambda n: make(n, sampler="PrioritizedSampler", transform=Scale()),
    "prefetch": lambda n: make(n, sampler="SamplerWithoutReplacement", prefetch=2),
    "prefetch, PrioritizedSampler": lambda n: make(n, sampler="PrioritizedSampler", prefetch=2),
    "prefetch, Hindsight": lambda n: make(n, sample_unit="Hindsight", prefetch=2),
    "prefetch, NStep + FrameStack": lambda n: make(n, sample_unit="NStep + FrameStack", prefetch=2),
    "remover": lambda n: make(n, sampler="PrioritizedSampler", remover="lowest_priority"),
    "consume_after_n_samples": lambda n: make(n, consume_after_n_samples=5),
    "rate_limiter": lambda n: make(n, rate_limiter=o.RateLimiter(1.5, error_buffer=500, min_size_to_sample=6)),
    "max_bytes": lambda n: make(
        n,
        storage=o.LazyTensorStorage(n, codec={"obs": "zlib"}, max_bytes=1100, evict="episodes"),
        sampler="SliceSampler",
    ),
    "hindsight": lambda n: o.HERReplayBuffer(
        reached, storage=o.LazyTensorStorage(n), batch_size=BATCH, generator=seeded()
    ),
    "views": _viewed,
    "ensemble": lambda n: _ensemble(n, p=[1, 2, 3]),
    "ensemble, ratio": lambda n: _ensemble(n, ratio={0: [3, 1, 1], 20: [1 / 3, 2, 4]}, prefetch=2),
}


def _parts() -> dict[str, Callable[[int], Any]]:
    """Return a buffer for each part: the ones that cannot be filled are left out."""
    found: dict[str, Callable[[int], Any]] = {}
    for name in SAMPLERS:
        size = 2 if name == "QueueSampler" else BATCH  # of the rows of a queue each is drawn once
        found[name] = partial(make, sampler=name, batch_size=size)
    for option, names in (("unit", UNITS), ("storage", STORAGES), ("writer", WRITERS)):
        for name in names:
            part: dict[str, Any] = {"sample_unit" if option == "unit" else option: name}
            found[f"{option} {name}"] = partial(make, **part)
    for name in ("unit none", "unit Transition", "storage LazyTensorStorage", "storage TensorStorage"):
        del found[name]
    for name in ("writer RoundRobinWriter", "writer ImmutableDatasetWriter"):
        del found[name]
    return found


BUFFERS: dict[str, Any] = {**_parts(), **_OPTIONS}
"""Makers of empty buffers by capacity: each part with a state once, and options that change a state."""


class Registered(BufferContract):
    """The contract of buffers for one of `BUFFERS`."""

    name = ""
    capacity = CAPACITY

    def make(self, capacity: int) -> Any:
        return BUFFERS[self.name](capacity)

    def rows(self, count: int, start: int) -> Any:
        lanes = 2 if self.name.endswith("ndim=2") else 1
        return rows(count // lanes, start // lanes, lanes)

    def extend(self, buffer: Any, count: int, start: int) -> None:
        for number, member in enumerate(getattr(buffer, "members", [buffer])):
            member.extend(self.rows(count, start + 100 * number))

    def use(self, buffer: Any) -> Any:
        if hasattr(buffer, "handles"):  # slots: rows of batches drawn ahead may have been replaced
            slots = [handle.sample(return_info=True)[1] for handle in buffer.handles]
            ranked = buffer.handles[0]
            ranked.update_priority(slots[0], (slots[0]["index"] % 5 + 1).double())
            return buffer.sample(), [info["index"] for info in slots], ranked.sampler.priorities
        if not hasattr(buffer, "members"):
            return super().use(buffer)
        batch, info = buffer.sample(return_info=True)
        buffer.update_priority(info, (batch["t"] % 5 + 1).double())
        return batch, info

    def wrong_rows(self) -> Any:
        lists = "ListStorage" in self.name or "LazyStack" in self.name or self.name.startswith("ensemble")
        return None if lists else self.rows(6, 0).exclude("tokens")

    def check(self, batch: Any) -> None:
        frames = batch["obs"] if batch["obs"].ndim == batch["t"].ndim + 1 else batch["obs"][:, -1]
        assert torch.equal(frames[..., 0], batch["t"].float()), "rows are torn"


def registered(name: str) -> Registered:
    """Return the contract of one of `BUFFERS`."""
    contract = Registered()
    contract.name = name
    return contract
