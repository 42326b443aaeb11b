"""Schedulers: the same values as TorchRL's, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchrl.data.replay_buffers.scheduler as theirs

import ostinato

from ._script import library

if TYPE_CHECKING:
    from collections.abc import Callable

MAKES: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda lib, obj: lib.LinearScheduler(obj, param_name="beta", final_value=1.0, num_steps=7),
    "linear down": lambda lib, obj: lib.LinearScheduler(obj, "alpha", final_value=0, num_steps=3),
    "factor": lambda lib, obj: lib.StepScheduler(obj, param_name="beta", gamma=0.9, n_steps=3),
    "factor in bounds": lambda lib, obj: lib.StepScheduler(obj, "beta", gamma=2, min_value=0.1, max_value=1.0),
    "sum": lambda lib, obj: lib.StepScheduler(obj, "beta", gamma=0.1, n_steps=2, mode="additive", max_value=0.8),
    "lambda": lambda lib, obj: lib.LambdaScheduler(obj, "beta", lambda_fn=lambda step: 0.5**step, min_value=0.05),
    "list": lambda lib, obj: lib.SchedulerList(
        [lib.LinearScheduler(obj.sampler, "beta", 1.0, 4), lib.StepScheduler(obj, "alpha", 0.5)]
    ),
}


def buffer(lib: Any) -> Any:
    """A buffer whose sampler has two numbers."""
    sampler = type("Sampler", (lib.RandomSampler,), {"alpha": 0.7, "beta": 0.6})()
    return lib.ReplayBuffer(storage=lib.ListStorage(20), sampler=sampler, batch_size=5)


@pytest.mark.parametrize("name", MAKES)
def test_values(name: str) -> None:
    found = []
    for lib, schedulers in ((library("torchrl"), theirs), (library("ostinato"), ostinato)):
        rb = buffer(lib)
        scheduler = MAKES[name](schedulers, rb)
        values = []
        for _ in range(10):
            scheduler.step()
            values.append([float(rb.sampler.alpha), float(rb.sampler.beta)])
        found.append(torch.tensor(values, dtype=torch.float64))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)
