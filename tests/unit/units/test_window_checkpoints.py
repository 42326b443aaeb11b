"""Checkpoints of buffers with units and slice samplers: episodes of other keys, and states that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    DeltaTimestamps,
    NStep,
    SliceSampler,
)
from ostinato.errors import CheckpointError

from ...episodes import Log
from .rings import ENDS, buffer, steps


def test_damaged_padding_and_draws_of_other_units_are_refused():
    padded: dict[str, Any] = {"slice_len": 6, "end_keys": ENDS, "strict_length": False, "pad_output": True}
    full = buffer(40, 12, sampler=SliceSampler(**padded), prefetch=2)
    Log(40, longest=6, seed=1).extend(full, 40)
    full.sample()
    queued = full.state_dict()
    queued["pending"][0]["pad"] = 1
    with pytest.raises(CheckpointError, match="damaged"):
        buffer(40, 12, sampler=SliceSampler(**padded), prefetch=2).load_state_dict(queued)
    other = buffer(100, 4, sample_unit=NStep(2, 0.9), prefetch=2)
    saved = buffer(100, 4, sample_unit=DeltaTimestamps(steps={"t": [0]}), prefetch=2)
    saved.extend(steps())
    saved.sample()
    with pytest.raises(CheckpointError, match="same sample_unit"):
        other.load_state_dict(saved.state_dict())
    assert len(other) == 0


def test_episodes_saved_by_other_keys_are_read_anew(tmp_path):
    saved = buffer(100, 64, sample_unit=NStep(4, 1.0, done_key="lap"))
    saved.extend(steps())
    saved.dumps(tmp_path / "a")
    loaded = buffer(100, 256, sample_unit=NStep(4, 1.0))
    loaded.loads(tmp_path / "a")
    batch = loaded.sample()
    assert torch.equal(batch["obs"] // 10, (batch["next_obs"] - 1) // 10)
