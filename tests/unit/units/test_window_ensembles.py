"""Windows and slices of ensembles: priorities, generations, infos."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SequenceUnit,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from ostinato.errors import OptionError

from .rings import steps


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def prioritized(sampler: Any = None, unit: Any = None) -> TensorDictReplayBuffer:
    made = PrioritizedSampler(100, 1.0, 1.0, 0.0) if sampler is None else sampler
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=made, sample_unit=unit)
    buffer.extend(TensorDict(steps(), [40]))
    return buffer


def test_windows_of_an_ensemble_give_their_anchors_the_largest_valid_priority() -> None:
    members = [prioritized(unit=SequenceUnit(4)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=16, generator=seeded())
    sample = ensemble.sample()
    assert sample["validity_mask"].shape == sample["learning_mask"].shape == sample["index", "index"].shape
    sample["td_error"] = torch.where(sample["validity_mask"], 1.0, 100.0)
    ensemble.update_tensordict_priority(sample)
    assert all(member.sampler.priorities.max() == 1.0 for member in members)  # type: ignore[attr-defined]
    assert sum(member.stats().stale_updates for member in members) == 0


def test_slices_without_replacement_are_refused_in_ensembles() -> None:
    members = []
    for _ in range(2):
        sampler = SliceSamplerWithoutReplacement(num_slices=4, end_key="done")
        members.append(ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler))
        members[-1].extend(steps())
    ensemble = ReplayBufferEnsemble(*members, batch_size=16)
    with pytest.raises(OptionError, match="SliceSampler"):
        ensemble.sample()
