"""What the samplers' options do; their laws are in tests/stats."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ostinato import (
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from ostinato.errors import CheckpointError, KindError, OstinatoError
from ostinato.testing import make_view

from ...registry import ring, seeded
from ...tags import same_state, snapshot


def test_random_sampling_without_replacement_is_the_other_class():
    for options in ({"drop_last": True}, {"shuffle": False}, {}):
        made = RandomSampler(replacement=False, **options)
        assert type(made) is SamplerWithoutReplacement
        assert made.drop_last == options.get("drop_last", False)
        assert made.shuffle == options.get("shuffle", True)
    by_position = SamplerWithoutReplacement(True, False)
    assert (by_position.drop_last, by_position.shuffle) == (True, False)


class Mine(RandomSampler):
    pass


class MineOfSlices(SliceSampler):
    pass


ONE_VARIANT: list[Any] = [
    Mine,
    partial(MineOfSlices, num_slices=2),
    partial(PrioritizedSampler, 10, 0.6, 0.4),
    partial(PrioritizedSliceSampler, 10, 0.6, 0.4, slice_len=2),
    partial(SamplerEnsemble, RandomSampler()),
    ConsumingSampler,
    StalenessAwareSampler,
    partial(PromptGroupSampler, num_groups=2),
    partial(StreamingSliceSampler, slice_len=2),
]


@pytest.mark.parametrize("make", ONE_VARIANT, ids=str)
def test_samplers_without_a_variant_without_replacement(make):
    with pytest.raises(KindError):
        make(replacement=False)
    assert type(make(replacement=True)) is getattr(make, "func", make)


def test_states_that_are_not_permutations_are_refused():
    """Compiled code swaps entries of the order without looking: it must be a permutation of the rows."""
    sampler, other = SamplerWithoutReplacement(), SamplerWithoutReplacement()
    sampler.draw(make_view(5, 9), 2, None)
    orders = [
        torch.arange(3),
        torch.tensor([1, 2, 3, 4, 5]),
        torch.zeros(5, dtype=torch.int64),
        torch.arange(5).int(),
        None,
    ]
    damages: list[dict[str, object]] = [{"order": order} for order in [*orders, torch.arange(5).view(5, 1)]]
    damages += [{"at": 6}, {"at": -1}, {"rows": 4}, {"shuffle": False}, {"drop_last": True}, {"endless": True}]
    for damage in damages:
        with pytest.raises(CheckpointError):
            other.load_state_dict({**sampler.state_dict(), **damage})
        assert sorted(other.draw(make_view(3, 9), 3, None).slots.tolist()) == [0, 1, 2]


def test_no_permutation_is_made_before_it_is_needed():
    """The first draw of a large buffer consumes as much randomness as it draws rows, not as there are rows."""
    generator = seeded()
    SamplerWithoutReplacement().draw(make_view(100_000, 100_000), 4, generator)
    same = seeded()
    torch.randint(0, 2**63 - 1, (4,), generator=same)
    assert torch.equal(generator.get_state(), same.get_state())


@pytest.mark.parametrize(
    ("sampler", "each"),
    [
        (StalenessAwareSampler(5000, version_key="x"), 32),
        (PromptGroupSampler(num_groups=1, group_key="y"), 0),
        (PromptGroupSampler(num_groups=1, group_key="y", strategy="reward", reward_key="x"), 0),
        (StreamingSliceSampler(slice_len=1, end_key="done"), 0),
    ],
)
def test_memory_is_counted(sampler, each):
    """Versions, slots, sums and weights take 32 bytes for each row; groups and streams at most as many."""
    rb = ring(1000, sampler=sampler, batch_size=4)
    rb.extend({"x": torch.arange(1000), "y": torch.zeros(1000), "done": torch.ones(1000, dtype=torch.bool)})
    rb.sample()
    assert 1000 * (each or 4) <= sampler.nbytes <= 1000 * (each or 32)


# -- a draw that raises leaves sampler and generator as they were, so that the buffer can be saved and goes on ------

STRICT = SequenceUnit(4, "strict", "done")
CASES: dict[str, Any] = {
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
    options = {"batch_size": 4, "generator": seeded(3), **options}
    return ring(16, sampler=sampler, **options)


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
def test_episodes_too_short_for_a_slice(name):
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
