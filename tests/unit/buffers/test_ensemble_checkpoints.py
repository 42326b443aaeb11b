"""Saved ensembles go on draw for draw, come back whole or not at all, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from ostinato.errors import CheckpointError

from ...registry import BUFFERS, rows, seeded
from ...tags import same_state
from .refusals import raises


def made(count: int = 12, **options: Any) -> ReplayBufferEnsemble:
    """A prioritized member, one with a reservoir, and one in passes; `count` rows were written to each."""
    names = ("PrioritizedSampler", "writer ReservoirWriter", "SamplerWithoutReplacement")
    members = [BUFFERS[name](10) for name in names]
    rb = ReplayBufferEnsemble(*members, **{"generator": seeded(1), "batch_size": 6, "p": [1, 2, 3], **options})
    for member in members:
        member.extend(rows(count))
    return rb


def smaller(name: str) -> Any:
    """An ensemble that the state of `made()` does not fit; where it is the form of rows, only in its last member."""
    if name == "members":
        return made(2)[[0, 1]]
    if name == "parts":
        return made(2, num_buffer_sampled=2)
    if name == "law":
        return made(2, sample_from_all=True, p=None)
    rb, odd = made(2), TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement())
    odd.extend(TensorDict({"other": torch.zeros(3)}, [3]))
    return ReplayBufferEnsemble(rb[0], rb[1], odd, generator=seeded(1), batch_size=6, p=[1, 2, 3])


@pytest.mark.parametrize("name", ["members", "parts", "law", "form"])
def test_what_does_not_fit_changes_nothing(tmp_path, name):
    rb, other = made(), smaller(name)
    before = other.state_dict()
    rb.dumps(tmp_path / "all")
    for load, source in ((other.loads, tmp_path / "all"), (other.load_state_dict, rb.state_dict())):
        with pytest.raises(CheckpointError):
            load(source)
        same_state(other.state_dict(), before)


def test_buffers_and_ensembles_do_not_load_each_other(tmp_path):
    rb = made()
    rb.dumps(tmp_path / "all")
    rb[0].dumps(tmp_path / "one")
    raises(
        (lambda: rb[0].loads(tmp_path / "all"), CheckpointError, "ostinato-ensemble"),
        (lambda: rb.loads(tmp_path / "one"), CheckpointError, "ostinato-buffer"),
        (lambda: rb.load_state_dict(rb[0].state_dict()), CheckpointError, "this is not the state of an ensemble"),
    )
