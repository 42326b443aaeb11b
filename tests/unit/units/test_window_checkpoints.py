"""Checkpoints of buffers with units and slice samplers: episodes of other keys, and states that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    DeltaTimestamps,
    NStep,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.errors import CheckpointError

from ...episodes import Log
from .rings import ENDS, buffer, steps

if TYPE_CHECKING:
    from pathlib import Path


def sampled(sampler: Any, prefetch: int = 0) -> ReplayBuffer:
    rb = buffer(40, 12, sampler=sampler, prefetch=prefetch)
    Log(40, longest=6, seed=1).extend(rb, 40)
    rb.sample()
    return rb


def test_damaged_passes_and_queued_draws_are_refused() -> None:
    state = sampled(SliceSamplerWithoutReplacement(slice_len=2, end_keys=ENDS)).sampler.state_dict()
    damages: list[dict[str, Any]] = [
        {"firsts": torch.zeros(3)},
        {"firsts": torch.zeros(2, 2, dtype=torch.int64)},
        {"firsts": torch.zeros(1, dtype=torch.int64)},
        {"rows": -1},
        {"order": torch.zeros(4, dtype=torch.int64)},
        {"shuffle": False},
    ]
    for damage in damages:
        with pytest.raises(CheckpointError):
            SliceSamplerWithoutReplacement(slice_len=2, end_keys=ENDS).load_state_dict({**state, **damage})
    padded: dict[str, Any] = {"slice_len": 6, "end_keys": ENDS, "strict_length": False, "pad_output": True}
    queued = sampled(SliceSampler(**padded), prefetch=2).state_dict()
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


def test_episodes_saved_by_other_keys_are_read_anew(tmp_path: Path) -> None:
    saved = buffer(100, 64, sample_unit=NStep(4, 1.0, done_key="lap"))
    saved.extend(steps())
    saved.dumps(tmp_path / "a")
    loaded = buffer(100, 256, sample_unit=NStep(4, 1.0))
    loaded.loads(tmp_path / "a")
    batch = loaded.sample()
    assert torch.equal(batch["obs"] // 10, (batch["next_obs"] - 1) // 10)
