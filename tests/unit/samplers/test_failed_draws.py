"""A draw that raises leaves the sampler and the generator as they were, so that the buffer can be saved and goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
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

STRICT = SequenceUnit(4, "strict", "done")
CASES: dict[str, tuple[Callable[[], Sampler], dict[str, Any]]] = {
    "slices": (lambda: SliceSampler(slice_len=4), {}),
    "slices-without-replacement": (lambda: SliceSamplerWithoutReplacement(slice_len=4), {}),
    "number-of-slices": (lambda: SliceSamplerWithoutReplacement(num_slices=1), {}),
    "slices-dropped": (lambda: SliceSamplerWithoutReplacement(slice_len=4, drop_last=True), {"batch_size": 12}),
    "prioritized-slices": (lambda: PrioritizedSliceSampler(16, 0.6, 0.4, slice_len=4), {}),
    "prioritized-number": (lambda: PrioritizedSliceSampler(16, 0.6, 0.4, num_slices=1), {}),
    "windows": (RandomSampler, {"sample_unit": STRICT}),
    "windows-without-replacement": (SamplerWithoutReplacement, {"sample_unit": STRICT}),
}


def make(sampler: Sampler, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(3)
    return ReplayBuffer(
        storage=LazyTensorStorage(16), sampler=sampler, **{"batch_size": 4, "generator": generator, **options}
    )


def fails(rb: ReplayBuffer, **options: Any) -> None:
    """Let a draw fail, twice, and compare the state before and after."""
    before = snapshot(rb)
    for _ in range(2):
        with pytest.raises(OstinatoError):
            rb.sample(**options)
        after = snapshot(rb)
        same_state(after["sampler"], before["sampler"])
        same_state(after["generator"], before["generator"])


@pytest.mark.parametrize("name", CASES)
def test_episodes_too_short_for_a_slice(name: str) -> None:
    sampler, options = CASES[name]
    rb, x = make(sampler(), **options), torch.arange(16)
    rb.extend({"x": x, "done": x % 4 == 3})
    rb.sample()
    rb.extend({"x": x, "done": x % 2 == 1})
    fails(rb)
    rb.extend({"x": x, "done": x % 4 == 3})
    assert (rb.sample()["x"].view(-1, 4).diff(dim=1) == 1).all()
    if name == "prioritized-number":
        fails(rb, batch_size=8)  # another length of slices
