"""`close` and `with`: buffers give back the thread that they own, and go on working."""

from __future__ import annotations

import threading

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SamplerWithoutReplacement


def workers() -> int:
    return sum(thread.name.startswith("ostinato-prefetch") for thread in threading.enumerate())


def make(**options: object) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, **options)  # type: ignore[arg-type]
    rb.extend({"id": torch.arange(20)})
    return rb


def test_closing_ends_the_prefetch_thread() -> None:
    before = workers()
    with make(prefetch=3) as rb:
        rb.sample()
        assert workers() == before + 1
    assert workers() == before
    rb.close()
    assert rb.sample()["id"].shape == (4,)
    assert workers() == before + 1
    rb.close()
    assert workers() == before


def test_a_buffer_is_closed_when_the_block_raises() -> None:
    before = workers()
    with pytest.raises(ZeroDivisionError), make(prefetch=2) as rb:  # noqa: PT012
        rb.sample()
        raise ZeroDivisionError
    assert workers() == before


def test_draws_made_ahead_are_made_again_after_closing() -> None:
    """A pass without replacement still draws every row exactly once."""
    rb = make(prefetch=2, sampler=SamplerWithoutReplacement(), generator=torch.Generator().manual_seed(0))
    other = make(sampler=SamplerWithoutReplacement(), generator=torch.Generator().manual_seed(0))
    assert torch.equal(rb.sample()["id"], other.sample()["id"])
    rb.close()
    assert len(rb) == 20
    rb.close()


def test_an_ensemble_closes_its_members() -> None:
    before = workers()
    members = [make(prefetch=1), make(prefetch=1)]
    for rb in members:
        rb.sample()
    with ReplayBufferEnsemble(*members, batch_size=4, prefetch=2) as both:
        assert both.sample()["id"].numel() == 4
        assert workers() > before
    assert workers() == before
