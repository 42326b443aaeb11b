"""Schedulers set a parameter of a sampler step by step, within bounds, and continue from a saved state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    LambdaScheduler,
    LazyTensorStorage,
    LinearScheduler,
    ParameterScheduler,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SchedulerList,
    StepScheduler,
)
from ostinato.errors import CheckpointError, KindError, OptionError

from .refusals import refuses


class Beside(RandomSampler):
    """A sampler with a tensor as a parameter."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.heat = value


def values(scheduler: ParameterScheduler, steps: int) -> list[Any]:
    found = []
    for _ in range(steps):
        scheduler.step()
        found.append(scheduler.value)
    return found


def make(alpha: float = 0.5, beta: float = 0.5) -> PrioritizedSampler:
    return PrioritizedSampler(100, alpha=alpha, beta=beta)


def test_values_of_each_kind_and_their_bounds():
    assert values(LinearScheduler(make(), "beta", 1.0, 4), 6) == [0.625, 0.75, 0.875, 1.0, 1.0, 1.0]
    assert values(LinearScheduler(make(), "alpha", 0.0, 2), 3) == [0.25, 0.0, 0.0]
    assert values(StepScheduler(make(), "beta", 0.5, min_value=0.1), 3) == [0.25, 0.125, 0.1]
    assert values(StepScheduler(make(), "beta", 0.25, 2, "additive", max_value=0.9), 5) == [0.5, 0.75, 0.75, 0.9, 0.9]
    half = LambdaScheduler(make(), "alpha", lambda step: step * 0.5, min_value=0.3, max_value=0.7)
    assert values(half, 3) == [0.3, 0.5, 0.7]


def test_a_buffer_stands_for_its_sampler_and_draws_use_the_value():
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), batch_size=400)
    rb.extend(torch.arange(4.0))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 1000.0]))
    SchedulerList([StepScheduler(rb, "alpha", 0.0), StepScheduler(rb, "beta", 0.0)]).step()
    assert (rb.sampler.alpha, rb.sampler.beta) == (0.0, 0.0)  # type: ignore[attr-defined]
    batch, info = rb.sample(return_info=True)
    assert torch.equal(info["priority_weight"], torch.ones(400))
    assert bool((torch.bincount(batch.long(), minlength=4) > 50).all())  # uniform with alpha 0: 100 each


def test_tensor_parameters_keep_dtype_and_the_initial_value():
    start = torch.tensor(2.0, dtype=torch.float64)
    sampler = Beside(start)
    linear = LinearScheduler(sampler, "heat", 4, 2)
    start += 100  # the scheduler has its own copy
    assert [value.item() for value in values(linear, 3)] == [3.0, 4.0, 4.0]
    assert sampler.heat.dtype == torch.float64
    step = StepScheduler(sampler, "heat", 2.0, max_value=10.0)
    assert [value.item() for value in values(step, 2)] == [8.0, 10.0]


def test_state_continues_where_it_was():
    def schedule(sampler: PrioritizedSampler) -> SchedulerList:
        made = SchedulerList(LinearScheduler(sampler, "beta", 1.0, 10))
        made.append(StepScheduler(sampler, "alpha", 0.5, 3))
        return made

    first, second = make(), make(beta=0.9)  # the initial value comes from the state, too
    mine, other = schedule(first), schedule(second)
    for _ in range(4):
        mine.step()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(mine.state_dict())
    for _ in range(4):
        mine.step()
        other.step()
        assert (first.alpha, first.beta) == (second.alpha, second.beta)
    assert LambdaScheduler(make(), "beta", float).state_dict().keys().isdisjoint({"lambda_fn", "sampler"})


def test_a_state_of_something_else_raises_and_changes_nothing():
    scheduler = LinearScheduler(make(), "beta", 1.0, 10)
    before = scheduler.state_dict()
    for state in (
        StepScheduler(make(), "beta").state_dict(),
        LinearScheduler(make(), "alpha", 1.0, 10).state_dict(),
        {},
    ):
        with pytest.raises(CheckpointError, match="this is not the state of a LinearScheduler of 'beta'"):
            scheduler.load_state_dict(state)
    assert scheduler.state_dict() == before
    with pytest.raises(CheckpointError, match="the state holds 0 schedulers, this list has 1"):
        SchedulerList([scheduler]).load_state_dict({"schedulers": []})


def test_wrong_arguments():
    buffers: Any = ReplayBufferEnsemble(ReplayBuffer(), ReplayBuffer())
    wrong: Any = "many"
    refuses(
        {
            KindError: {
                "only supports Sampler class": lambda: LinearScheduler(wrong, "beta", 1.0, 4),
                "lambda_fn": lambda: LambdaScheduler(make(), "beta", wrong),
                "takes schedulers, got str": lambda: SchedulerList(wrong),
            },
            OptionError: {
                "does not have an attribute gamma": lambda: LinearScheduler(make(), "gamma", 1.0, 4),
                "has reduction='max'": lambda: StepScheduler(make(), "reduction"),
                "does not have an attribute beta": lambda: StepScheduler(buffers, "beta"),
                "mode: linear": lambda: StepScheduler(make(), "beta", mode="linear"),
                "n_steps": lambda: StepScheduler(make(), "beta", n_steps=0),
                "min_value": lambda: StepScheduler(make(), "beta", min_value=2, max_value=1),
                "num_steps": lambda: LinearScheduler(make(), "beta", 1.0, 0),
            },
        }
    )
    scheduler = StepScheduler(make(), "beta", -1.0, mode="additive")
    with pytest.raises(OptionError, match="beta"):
        scheduler.step()
    assert scheduler.value == 0.5
