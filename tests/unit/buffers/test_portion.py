"""A buffer as a portion of a larger one: offers, and what becomes of them when rows change in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    ConsumingSampler,
    LazyTensorStorage,
    LimitedSampler,
    PrioritizedSampler,
    PromptGroupSampler,
    RateLimiter,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    StalenessAwareSampler,
)
from ostinato.buffers.portion import Offer, Portion, begin_era
from ostinato.errors import OptionError

from .refusals import raises


def made(rows: int, sampler: Sampler | None = None, **options: Any) -> ReplayBuffer:
    """A buffer of 100 slots; rows hold their number, and episodes end every ten rows."""
    generator = torch.Generator().manual_seed(4)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, generator=generator, **options)
    steps = torch.arange(rows)
    if rows:
        rb.extend({"x": steps, "done": steps % 10 == 9})
    return rb


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(100, alpha=1.0, beta=0.5, eps=0.0)


def test_rows_that_are_gone_are_not_to_be_had():
    for unit in (None, SequenceUnit(4, episode_boundary="strict")):
        rb = made(100, sample_unit=unit)
        portion = Portion(rb)
        offer = portion.offer(64)
        if unit is None:
            rb.empty()
        else:  # windows that are not whole any more
            rb.extend({"x": torch.arange(90), "done": torch.ones(90, dtype=torch.bool)})
        assert portion.take(offer.number, 64) is None


def test_draws_that_depend_on_each_other_are_refused():
    for sampler in (
        SamplerWithoutReplacement(),
        PrioritizedSampler(100, 1.0, 1.0, stratified=True),
        SliceSampler(slice_len=2),
        ConsumingSampler(),
        StalenessAwareSampler(),
        PromptGroupSampler(num_groups=1),
    ):
        with pytest.raises(OptionError):
            Portion(made(10, sampler))
    limiter = RateLimiter(samples_per_insert=4.0, error_buffer=100.0)
    raises(
        (lambda: Portion(made(10, rate_limiter=limiter)), OptionError, "for all shards together"),
        (lambda: Portion(ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))), OptionError, "ndim=1"),
        (lambda: Portion(made(10)).offer(4, 1), OptionError, "version_key"),
    )


def test_rows_that_are_used_up_are_drawn_when_they_are_asked_for():
    """An offer is no draw: others draw meanwhile, and who comes too late gets nothing."""
    rb = made(10, LimitedSampler(3))
    portion = Portion(rb)
    assert portion.drawable == 10
    assert portion.offer(8) == Offer(0, 10, 10.0, 1.0, 0.0, 30)
    for _ in range(3):
        found = portion.take(0, 9)
        assert found is not None
        assert found[1]["index"].shape == (9,)
    assert portion.take(0, 4) is None
    assert portion.offer(8).draws == 3
    assert rb.stats().rows_drawn == 27


def test_generations_of_another_incarnation_fit_no_row():
    """A buffer that begins anew counts its writes from one again: a batch of the lost one must not reach its rows."""
    lost, new = made(50, prioritized()), made(50, prioritized())
    begin_era(lost, 7)
    begin_era(new, 8)
    _, info = lost.sample(16, return_info=True)
    _, mine = new.sample(16, return_info=True)
    for drawn, changed in ((info, False), (mine, True)):
        new.update_priority(drawn, torch.full((16,), 9.0))
        assert bool((new.sampler.priorities == 9.0).any()) == changed  # type: ignore[attr-defined]
        assert new.stats().stale_updates == 16
