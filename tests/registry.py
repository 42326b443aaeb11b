"""Everything that has a state, with a maker: `tests/contracts/test_resume.py` runs the contract of resuming over each.

A new sampler, unit, storage, writer or option is tested by one line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato import (
    CompressedListStorage,
    ConsumingSampler,
    DeltaTimestamps,
    FrameStack,
    HeapSampler,
    Hindsight,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    LimitedSampler,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    QueueSampler,
    RaggedTensorStorage,
    RandomSampler,
    ReservoirWriter,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackSampler,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.crash.kinds import Scale, reached, seeded

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STATEFUL", "Stateful"]

END = ("next", "done")
BATCH = 6


class Stateful(NamedTuple):
    """How to make something with a state, and what is particular about it."""

    make: Callable[[int], Any]
    """Returns an empty buffer of a capacity."""
    lanes: int = 1


def _buffer(storage: Any, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage, generator=seeded(), **{"batch_size": BATCH, **options})


def _with(**options: Callable[[int], Any]) -> Stateful:
    """A buffer of tensors whose options are made for its capacity."""
    return Stateful(lambda n: _buffer(LazyTensorStorage(n), **{name: make(n) for name, make in options.items()}))


def _on(storage: Callable[[int], Any]) -> Stateful:
    return Stateful(lambda n: _buffer(storage(n)))


def _prioritized(n: int) -> PrioritizedSampler:
    return PrioritizedSampler(n, 0.7, 0.5)


STATEFUL: dict[str, Stateful] = {
    # samplers
    "uniform": _with(sampler=lambda n: RandomSampler()),
    "uniform, each once": _with(sampler=lambda n: RandomSampler(replacement=False)),
    "passes": _with(sampler=lambda n: SamplerWithoutReplacement()),
    "passes in order": _with(sampler=lambda n: SamplerWithoutReplacement(shuffle=False)),
    "passes, drop_last": _with(sampler=lambda n: SamplerWithoutReplacement(drop_last=True)),
    "prioritized": _with(sampler=_prioritized),
    "prioritized, stratified": _with(sampler=lambda n: PrioritizedSampler(n, 0.7, 0.5, stratified=True)),
    "slices": _with(sampler=lambda n: SliceSampler(slice_len=3, end_key=END)),
    "slices in passes": _with(sampler=lambda n: SliceSamplerWithoutReplacement(slice_len=3, end_key=END)),
    "prioritized slices": _with(sampler=lambda n: PrioritizedSliceSampler(n, 0.7, 0.5, slice_len=3, end_key=END)),
    "streaming slices": _with(sampler=lambda n: StreamingSliceSampler(slice_len=3, end_key=END)),
    "limited": _with(sampler=lambda n: LimitedSampler(4)),
    "consuming": _with(sampler=lambda n: ConsumingSampler(4)),
    "queue": _with(sampler=lambda n: QueueSampler(), batch_size=lambda n: 2),
    "stack": _with(sampler=lambda n: StackSampler()),
    "stack that pops": _with(sampler=lambda n: StackSampler(3)),
    "heap": _with(sampler=lambda n: HeapSampler(n)),
    "heap that pops": _with(sampler=lambda n: HeapSampler(n, max_times_sampled=3)),
    "staleness": _with(sampler=lambda n: StalenessAwareSampler(version_key="t")),
    "prompt groups": _with(sampler=lambda n: PromptGroupSampler(num_groups=1, group_key="desired_goal")),
    # units
    "n-step": _with(sample_unit=lambda n: NStep(3, 0.5)),
    "sequences": _with(sample_unit=lambda n: SequenceUnit(3, burn_in=1)),
    "frames": _with(sample_unit=lambda n: FrameStack(2, ["obs"])),
    "timestamps": _with(sample_unit=lambda n: DeltaTimestamps(steps={"obs": [-1, 0]})),
    "hindsight": _with(sample_unit=lambda n: Hindsight(reached)),
    "n-step of frames": _with(sample_unit=lambda n: [NStep(3, 0.5), FrameStack(2, ["obs"])]),
    "n-step, prioritized": _with(sample_unit=lambda n: NStep(3, 0.5), sampler=_prioritized),
    # storages
    "list": _on(ListStorage),
    "compressed list": _on(CompressedListStorage),
    "lazy stacks": _on(LazyStackStorage),
    "mapped": _on(LazyMemmapStorage),
    "environments": Stateful(lambda n: _buffer(LazyTensorStorage(n, ndim=2), dim_extend=0), lanes=2),
    "codec": _on(lambda n: LazyTensorStorage(n, codec={"obs": "zlib", ("next", "obs"): "zlib"})),
    "ragged": _on(lambda n: RaggedTensorStorage(n, ragged="tokens", layout="nested")),
    "single copy": _on(lambda n: LazyTensorStorage(n, single_copy=True)),
    # writers
    "ring": _with(writer=lambda n: TensorDictRoundRobinWriter()),
    "greatest": _with(writer=lambda n: TensorDictMaxValueWriter(rank_key="t")),
    "reservoir": _with(writer=lambda n: ReservoirWriter(generator=seeded(3))),
    # options
    "a transform with a state": _with(transform=lambda n: Scale()),
    "prefetch": _with(prefetch=lambda n: 2),
    "prefetch, prioritized": _with(prefetch=lambda n: 2, sampler=_prioritized),
    "remover": _with(remover=lambda n: "lowest_priority", sampler=_prioritized),
    "rows that leave": _with(consume_after_n_samples=lambda n: 5),
}
