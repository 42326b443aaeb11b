"""Small buffers of many kinds, what they do next, and the fingerprint of a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import xxhash
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ostinato import (
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KINDS", "extend", "fill", "fingerprint", "go_on", "read_all", "rows", "seeded"]

CAPACITY = 24
EPISODE = 5
END = ("next", "done")


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator."""
    return torch.Generator().manual_seed(seed)


def rows(start: int, count: int) -> TensorDict:
    """Return steps `[count]` of episodes of `EPISODE` rows."""
    t = torch.arange(start, start + count)
    here, after = ((t + offset).float()[:, None] * torch.ones(3) for offset in (0, 1))
    done, wide = t % EPISODE == EPISODE - 1, (t[:, None] * 7 + torch.arange(70)).to(torch.int32)
    following = {"obs": after, "achieved_goal": after, "done": done, "reward": t.float() / 2}
    row = {"t": t, "obs": here, "achieved_goal": here, "desired_goal": -here, "wide": wide}
    return TensorDict({**row, "next": TensorDict(following, [count])}, [count])


class Scale(torch.nn.Module):
    """A transform with a state: it counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Any:
        assert isinstance(self.seen, Tensor)
        self.seen += 1
        return batch


def _make(storage: Any = LazyTensorStorage, **options: Any) -> TensorDictReplayBuffer:
    made = storage(CAPACITY) if isinstance(storage, type) else storage
    return TensorDictReplayBuffer(storage=made, batch_size=6, generator=seeded(), **options)


def _ensemble(**mix: Any) -> ReplayBufferEnsemble:
    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5)),
        TensorDictReplayBuffer(storage=ListStorage(CAPACITY), sampler=SamplerWithoutReplacement()),
        TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=RandomSampler(), writer=_reservoir()),
    ]
    return ReplayBufferEnsemble(*members, **(mix or {"p": [1, 2, 3]}), batch_size=6, generator=seeded(1))


def reached(batch: Any) -> Tensor:
    same: Tensor = batch["next", "achieved_goal"] == batch["desired_goal"]
    return same.all(-1).float()


def _reservoir() -> ReservoirWriter:
    return ReservoirWriter(generator=seeded(3))


KINDS: dict[str, Callable[[], Any]] = {
    "prioritized": lambda: _make(sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5), transform=Scale()),
    "list": lambda: _make(ListStorage, sampler=SamplerWithoutReplacement()),
    "ensemble": _ensemble,
    "exact ratio, ahead": lambda: _ensemble(ratio={0: [3, 1, 1], 20: ["1/3", 2, 4]}, prefetch=2),
    "single_copy, n-step": lambda: _make(LazyTensorStorage(CAPACITY, single_copy=True), sample_unit=NStep(2, 0.5)),
    "mapped, slices": lambda: _make(LazyMemmapStorage, sampler=SliceSampler(slice_len=2, end_key=END)),
    "slices in passes": lambda: _make(sampler=SliceSamplerWithoutReplacement(slice_len=2, end_key=END)),
    "prioritized slices": lambda: _make(sampler=PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=2, end_key=END)),
    "max value": lambda: _make(writer=TensorDictMaxValueWriter(rank_key="t")),
    "passes, ahead": lambda: _make(sampler=SamplerWithoutReplacement(), prefetch=2),
    "reservoir": lambda: _make(writer=_reservoir(), sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5)),
    "hindsight, ahead": lambda: _make(sample_unit=Hindsight(reached), prefetch=2),
    "lanes, sequences": lambda: _make(LazyTensorStorage(CAPACITY, ndim=2), sample_unit=SequenceUnit(3), dim_extend=0),
}
"""Makers of empty buffers that cover every part of a state."""


def _each(rb: Any, start: int, count: int) -> list[tuple[ReplayBuffer, TensorDict]]:
    """Return what each buffer is to be given."""
    if isinstance(rb, ReplayBufferEnsemble):
        return [(member, rows(start + 100 * i, count)) for i, member in enumerate(rb.members)]
    if getattr(rb.storage, "ndim", 1) == 2:
        both = [rows(start, count // 2), rows(start + 1000, count // 2)]
        return [(rb, torch.stack(both, 1))]
    return [(rb, rows(start, count))]


def extend(rb: Any, start: int, count: int) -> None:
    """Write `count` rows, the first of which is number `start`, to a buffer or to each member of an ensemble."""
    for buffer, batch in _each(rb, start, count):
        buffer.extend(batch)


def fill(rb: Any, start: int = 0) -> Any:
    """Write more rows than there is room for, learn and sample a little; return the buffer."""
    extend(rb, start, 20)
    extend(rb, start + 20, 10)
    go_on(rb, 2)
    return rb


def _prioritized(rb: Any) -> bool:
    if isinstance(rb, ReplayBufferEnsemble):
        return any(member.sampler.prioritized for member in rb.members)
    return bool(rb.sampler.prioritized)


def go_on(rb: Any, draws: int) -> list[Any]:
    """Sample, and give priorities where there are some; return what was drawn."""
    seen = []
    learns = _prioritized(rb)
    for _ in range(draws):
        batch = rb.sample()
        seen.append(batch)
        if learns:
            rb.update_priority(batch, (batch["t"] % 7 + 1).double())
    return seen


def read_all(rb: Any) -> list[Any]:
    """Return all rows, without collate or transforms."""
    members = rb.members if isinstance(rb, ReplayBufferEnsemble) else [rb]
    return [member.storage[:] if len(member) else None for member in members]


def fingerprint(*values: Any) -> str:
    """Return a checksum of nested states, samples and rows: types, keys, dtypes, shapes and every bit."""
    state = xxhash.xxh3_128()
    for value in values:
        _feed(state, value)
    return state.hexdigest()


def _feed(state: xxhash.xxh3_128, value: Any) -> None:
    if isinstance(value, TensorDictBase):
        value = value.to_dict()
    if isinstance(value, Tensor) and value.is_nested:
        value = list(value.unbind())
    if isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    elif isinstance(value, dict):
        state.update(f"dict{len(value)}".encode())
        for key, item in value.items():
            state.update(repr(key).encode())
            _feed(state, item)
    elif isinstance(value, (list, tuple)):
        state.update(f"list{len(value)}".encode())
        for item in value:
            _feed(state, item)
    else:
        state.update(f"{type(value).__name__}:{value!r}".encode())
