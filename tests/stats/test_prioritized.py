"""The law of prioritized sampling: drawn frequencies, weights, and both again while threads write and learn."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedReplayBuffer, PrioritizedSampler, ReplayBuffer

from ..registry import seeded
from ..unit.background import in_background
from .chi_square import p_value


def priorities(shape: str, rows: int) -> torch.Tensor:
    """Priorities float64 `[rows]` of a shape: equal, over five orders of magnitude, or 90 % zeros."""
    generator = seeded(11)
    if shape == "uniform":
        return torch.full((rows,), 0.7, dtype=torch.float64)
    skewed = 10 ** (5 * torch.rand(rows, dtype=torch.float64, generator=generator) - 3)
    if shape == "skewed":
        return skewed
    return torch.where(torch.rand(rows, generator=generator) < 0.9, 0.0, skewed)


def law(given: torch.Tensor, alpha: float, eps: float) -> torch.Tensor:
    """The probabilities by the paper's equation 1, by brute force."""
    exact = [((p + eps) ** alpha if p + eps > 0 else 0.0) for p in given.tolist()]
    total = math.fsum(exact)
    return torch.tensor([value / total for value in exact], dtype=torch.float64)


def made(given: torch.Tensor, *, alpha: float, eps: float = 0.0, **options: Any) -> ReplayBuffer:
    """A buffer whose rows have these priorities."""
    rows = given.shape[0]
    sampler = PrioritizedSampler(rows + 13, alpha, 0.5, eps, **options)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(rows + 13),
        sampler=sampler,
        generator=seeded(5),
    )
    rb.update_priority(rb.extend(torch.arange(rows)), given)
    return rb


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("shape", "alpha"), [("uniform", 1.0), ("skewed", 0.6), ("zeros", 0.0), ("zeros", 0.6)])
def test_rows_are_drawn_by_their_exact_law(shape, alpha):
    rows, draws = 300, 60_000
    given = priorities(shape, rows)
    rb = made(given, alpha=alpha)
    drawn = torch.cat([rb.sample(10_000) for _ in range(draws // 10_000)])
    counts = torch.bincount(drawn, minlength=rows)
    assert not counts[given == 0].any()
    due = law(given, alpha, 0.0) * draws
    often = due >= 5
    assert 1e-4 < p_value(counts[often].tolist(), due[often].tolist()) < 1 - 1e-4
    assert abs(int(counts[~often].sum()) - float(due[~often].sum())) < 20


@pytest.mark.parametrize("shape", ["skewed", "zeros"])
def test_stratified_draws_have_the_same_law_and_less_variance(shape):
    rows, size, batches = 200, 400, 300
    given = priorities(shape, rows)
    exact = law(given, 0.6, 0.0) * size
    rb = made(given, alpha=0.6, stratified=True)
    counts = torch.stack([torch.bincount(rb.sample(size), minlength=rows) for _ in range(batches)]).double()
    assert bool(((counts - exact).abs() < 2).all()), "a row never misses its expected count by two"
    error = (counts.mean(0) - exact).abs()
    assert bool((error < 5 / math.sqrt(batches)).all()), "each count varies by less than one"


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("shape", "eps", "beta"), [("uniform", 1e-3, 0.4), ("skewed", 0.0, 1.0), ("zeros", 0.0, 0.4), ("zeros", 1e-3, 0.0)]
)
def test_weights_agree_with_brute_force(shape, eps, beta):
    """`(N P(i)) ** -beta`, divided by the largest of all rows that can be drawn (Schaul et al. 2016, 3.4)."""
    given = priorities(shape, 300)
    rb = made(given, alpha=0.6, eps=eps, dtype=torch.float64)
    rb.sampler.beta = beta  # type: ignore[attr-defined]
    exact = law(given, 0.6, eps)
    raw = torch.where(exact > 0, (300 * exact) ** -beta, 0.0)
    _, info = rb.sample(2_000, return_info=True)
    assert torch.allclose(info["priority_weight"], raw[info["index"]] / raw.max(), rtol=1e-12)
    assert float(info["priority_weight"].max()) <= 1.0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_update_crosses_over_to_another_row_while_threads_write(prefetch):
    """Learners give row `r` the priority `r`, writers overwrite: each row has its own priority or the default."""
    capacity, first = 128, 1_000.0
    rb = PrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(capacity), batch_size=32, prefetch=prefetch
    )
    rb.extend(torch.arange(capacity))
    rb.update_priority(torch.arange(capacity), first)  # the largest ever: the default from now on
    written = [capacity]

    def write() -> None:
        rb.extend(torch.arange(written[0], written[0] + 16))
        written[0] += 16

    def learn() -> None:
        batch, info = rb.sample(return_info=True)
        rb.update_priority(info, (batch % 499 + 1).double())

    deadline, waiting = time.monotonic() + 60, threading.Event()
    with in_background(write, learn, learn):
        while written[0] < 20 * capacity or not rb.stats().stale_updates:
            assert time.monotonic() < deadline
            waiting.wait(0.01)
    for _ in range(4):  # the first batches may have been drawn before the last writes
        learn()
    kept = rb.sampler.state_dict()["priorities"]
    own = (rb[:] % 499 + 1).double()
    assert bool(((kept == own) | (kept == first)).all())
    assert bool((kept == own).any())
    assert rb.stats().stale_updates > 0
