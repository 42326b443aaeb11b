"""`close` and `with`: buffers give back the thread that they own, and go on working."""

from __future__ import annotations

import threading

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ostinato-prefetch")}


def make(**options: object) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, **options)  # type: ignore[arg-type]
    rb.extend({"id": torch.arange(20)})
    return rb


def test_closing_ends_the_prefetch_thread():
    before = workers()
    with pytest.raises(ZeroDivisionError), make(prefetch=3) as rb:  # noqa: PT012
        rb.sample()
        assert len(workers() - before) == 1
        raise ZeroDivisionError
    assert not workers() - before
    rb.close()
    assert rb.sample()["id"].shape == (4,)
    assert len(workers() - before) == 1
    rb.close()
    assert not workers() - before


def test_an_ensemble_closes_its_members():
    before = workers()
    members = [make(prefetch=1), make(prefetch=1)]
    for rb in members:
        rb.sample()
    with ReplayBufferEnsemble(*members, batch_size=4, prefetch=2) as both:
        assert both.sample()["id"].numel() == 4
        assert len(workers() - before) == 3
    assert not workers() - before
