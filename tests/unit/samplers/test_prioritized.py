"""The prioritized sampler by itself: options, the rule of the default priority, exponents, state."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from ostinato import (
    PrioritizedSampler,
    ReplayBuffer,
)
from ostinato.errors import CapacityError, CheckpointError, OptionError, PriorityError
from ostinato.testing.views import make_view

from ...registry import ring, seeded
from ...tags import priorities
from ..buffers.refusals import refuses


def filled(rows: int = 5, capacity: int = 8, **options: Any) -> ReplayBuffer:
    """A buffer of `rows` rows under a prioritized sampler."""
    settings = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, **options}
    sampler = PrioritizedSampler(capacity, **settings)
    rb = ring(
        capacity,
        sampler=sampler,
        batch_size=4,
        generator=seeded(),
    )
    rb.extend(torch.arange(rows))
    return rb


def test_options_out_of_range_are_refused_also_if_they_are_set_later():
    made: Any = partial(PrioritizedSampler, max_capacity=10, alpha=0.6, beta=0.4)
    refuses(
        {
            CapacityError: {
                "max_capacity must be in": lambda: made(max_capacity=0),
                "give the storage a max_size": lambda: made(max_capacity=2**60),
            },
            OptionError: {
                r"alpha must be greater or equal than 0, got alpha=-0\.1": lambda: made(alpha=-0.1),
                r"beta must be in \[0, 2\], .* got beta=40": lambda: made(beta=40),
                "eps must be": lambda: made(eps=-1e-9),
                "dtype must be a floating dtype": lambda: made(dtype=torch.int64),
                r"reduction must be one of .*got 'sum'": lambda: made(reduction="sum"),
            },
        }
    )
    sampler = PrioritizedSampler(10, 0.6, 0.4)
    for name, wrong in (("alpha", -1), ("beta", math.nan), ("beta", 40)):
        with pytest.raises(OptionError, match=name):
            setattr(sampler, name, wrong)
    assert (sampler.alpha, sampler.beta) == (0.6, 0.4)
    sampler.beta, sampler.alpha = 1.0000001, -5e-17  # a schedule whose last step was rounded
    assert (sampler.alpha, sampler.beta) == (0.0, 1.0000001)


def test_the_device_is_that_of_the_storage():
    rb = ring(5, sampler=PrioritizedSampler(5, 0.6, 0.4, device="cpu"), batch_size=2)
    rb.extend(torch.arange(3))
    other = PrioritizedSampler(5, 0.6, 0.4, device="cuda:1")
    assert other.device == torch.device("cuda:1")
    with pytest.raises(OptionError, match=r"device of its storage, cpu, .* was made with device='cu"):
        rb.set_sampler(other)
    late = ring(5, sampler=other)
    with pytest.raises(OptionError):
        late.extend(torch.arange(3))
    assert len(late) == 0


def test_new_rows_get_the_largest_priority_ever_given_to_the_last_digit():
    """1 before the first; then the largest given, though its row is no more; an emptied buffer begins anew."""
    rb, odd = filled(2), 0.1 + 0.2
    sampler: Any = rb.sampler
    assert sampler.default_priority == 1.0
    rb.update_priority([0, 1], [odd, 0.1])
    rb.update_priority([0], [0.05])
    rb.extend(torch.arange(1))
    assert priorities(rb) == [0.05, 0.1, odd], "below 1, exactly, neither rounded nor made float32"
    rb.empty()
    rb.extend(torch.arange(2))
    assert priorities(rb) == [1.0, 1.0]
    rb.update_priority([0, 1], 0.0)
    with pytest.raises(PriorityError):
        rb.sample()
    assert repr(sampler) == (
        "PrioritizedSampler(max_capacity=8, alpha=1, beta=1, eps=0, reduction='max', stratified=False, rows=2)"
    )


def test_priorities_of_items_with_steps_are_reduced():
    expected = {"max": [4.0, 9.0], "min": [1.0, 0.0], "mean": [2.5, 3.0], "median": [2.0, 0.0]}
    for reduction, wanted in expected.items():
        rb = filled(2, reduction=reduction)
        rb.update_priority([0, 1], torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 3.0, 9.0, 0.0]]))
        assert priorities(rb) == wanted


def test_too_large_priorities_are_refused_before_sums_overflow():
    rb = filled(2, alpha=2.0)
    with pytest.raises(PriorityError):
        rb.update_priority(0, 1e200)
    assert priorities(rb) == [1.0, 1.0]
    rb.sampler.alpha = 1.0  # type: ignore[attr-defined]
    rb.update_priority(0, 1e200)
    rb.sampler.alpha = 2.0  # type: ignore[attr-defined]
    with pytest.raises(PriorityError, match="alpha=2"):
        rb.sample()


def test_damaged_state_is_refused_and_changes_nothing():
    rb = filled(3)
    whole = rb.state_dict()
    rb.update_priority([0, 1, 2], [3.0, 2.0, 1.0])
    damages: list[Any] = [
        {"priorities": torch.ones(2, dtype=torch.float64)},
        {"values": torch.full((3,), math.nan, dtype=torch.float64)},
        {"priorities": -torch.ones(3, dtype=torch.float64)},
        {"priorities": torch.ones(3)},
        {"largest": math.inf},
        {"alpha": -1.0},
        {"beta": -1.0},
        {"values": None},
    ]
    for damage in damages:
        sampler = {**whole["sampler"], "state": {**whole["sampler"]["state"], **damage}}
        with pytest.raises(CheckpointError):
            rb.load_state_dict({**whole, "sampler": sampler})
        assert priorities(rb) == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("bad", [(0, -1.0), (0, math.nan), (0, math.inf), (99, 1.0), (-5, 1.0)])
def test_bad_values_on_a_device_have_no_effect_and_are_told_later(bad):
    sampler, view = PrioritizedSampler(8, 1.0, 0.4, 0.0), make_view(4, 8)
    sampler.begin(view)
    slots, given = torch.tensor([bad[0], 2]), torch.tensor([bad[1], 0.5], dtype=torch.float64)
    sampler.column.set_on_device(slots, given, torch.tensor([False, True]), 4)
    sampler.raise_deferred()
    sampler.column.set_on_device(slots, given, None, 4)
    assert sampler.priorities.tolist() == [1.0, 1.0, 0.5, 1.0]
    assert sampler.default_priority == 0.5
    with pytest.raises(PriorityError):
        sampler.raise_deferred()
    sampler.raise_deferred()


def test_weights_have_the_dtype_asked_for():
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert filled(4, dtype=dtype).sample(return_info=True)[1]["priority_weight"].dtype is dtype
