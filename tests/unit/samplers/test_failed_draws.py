"""A draw that raises leaves the sampler and the generator as they were, so that the buffer can be saved and goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    LimitedSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.errors import OstinatoError

from ...tags import same_state, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT = torch.arange(16) % 2 == 1
"""Episodes of two rows each: too short for slices of four."""

SLICES: dict[str, Callable[[], Sampler]] = {
    "slices": lambda: SliceSampler(slice_len=4),
    "slices-without-replacement": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "number-of-slices": lambda: SliceSamplerWithoutReplacement(num_slices=1),
    "prioritized-slices": lambda: PrioritizedSliceSampler(16, 0.6, 0.4, slice_len=4),
    "prioritized-number": lambda: PrioritizedSliceSampler(16, 0.6, 0.4, num_slices=1),
}


def make(sampler: Sampler, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(3)
    return ReplayBuffer(
        storage=LazyTensorStorage(16), sampler=sampler, **{"batch_size": 4, "generator": generator, **options}
    )


def fails(rb: ReplayBuffer, size: int | None = None) -> None:
    """Let a draw fail, twice, and compare the whole state before and after."""
    before = snapshot(rb)
    for _ in range(2):
        with pytest.raises(OstinatoError):
            rb.sample(size)
        same_state(snapshot(rb), before)


@pytest.mark.parametrize("name", list(SLICES))
def test_episodes_too_short_for_a_slice(name: str) -> None:
    rb, x = make(SLICES[name]()), torch.arange(16)
    rb.extend({"x": x, "done": x % 4 == 3})
    rb.sample()
    rb.extend({"x": x, "done": SHORT})
    fails(rb)
    rb.extend({"x": x, "done": x % 8 == 7})
    assert rb.sample()["x"].diff().tolist() == [1, 1, 1]


def test_an_episode_less_than_a_batch_of_slices_with_drop_last() -> None:
    rb, x = make(SliceSamplerWithoutReplacement(slice_len=4, drop_last=True), batch_size=12), torch.arange(16)
    rb.extend({"x": x, "done": x % 4 == 3})
    rb.sample()
    rb.extend({"x": x, "done": x % 8 == 7})
    fails(rb)


def test_another_number_of_slices_than_there_are_rows_for() -> None:
    rb, x = make(PrioritizedSliceSampler(16, 0.6, 0.4, num_slices=1), batch_size=None), torch.arange(16)
    rb.extend({"x": x, "done": x % 4 == 3})
    rb.sample(4)
    fails(rb, 8)
    assert rb.sample(4)["x"].shape == (4,)


def test_rows_without_any_priority() -> None:
    rb = make(PrioritizedSampler(16, 1.0, 0.4, eps=0.0))
    rb.extend({"x": torch.arange(4)})
    rb.update_priority(torch.arange(4), torch.zeros(4))
    fails(rb)


@pytest.mark.parametrize("sampler", [QueueSampler, lambda: LimitedSampler(1)])
def test_rows_that_are_used_up(sampler: Callable[[], Sampler]) -> None:
    rb = make(sampler(), rate_limiter=None)
    rb.extend({"x": torch.arange(6)})
    rb.sample()
    before = snapshot(rb)["sampler"]
    with pytest.raises(OstinatoError):
        rb.sample(timeout_s=0.01) if isinstance(rb.sampler, QueueSampler) else rb.sample()
    same_state(snapshot(rb)["sampler"], before)


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_no_whole_window(sampler: Callable[[], Sampler]) -> None:
    rb = make(sampler(), sample_unit=SequenceUnit(4, "strict", "done"))
    rb.extend({"x": torch.arange(16), "done": SHORT})
    fails(rb)


def test_a_member_of_an_ensemble_that_cannot_be_drawn_from() -> None:
    first = ReplayBuffer(storage=LazyTensorStorage(16), sampler=SamplerWithoutReplacement())
    second = ReplayBuffer(storage=LazyTensorStorage(16), sampler=PrioritizedSampler(16, 1.0, 0.4, eps=0.0))
    both = ReplayBufferEnsemble(first, second, batch_size=8, generator=torch.Generator().manual_seed(0))
    for rb in both.members:
        rb.extend({"x": torch.arange(16)})
    second.update_priority(torch.arange(16), torch.zeros(16))
    before = both.state_dict()["generator"]
    with pytest.raises(OstinatoError):
        both.sample()
    same_state(both.state_dict()["generator"], before)
