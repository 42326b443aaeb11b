"""Frame stacks: padding at the start of an episode, dtypes, next observations."""

from __future__ import annotations

import pytest
import torch

from ostinato import (
    FrameStack,
    LazyTensorStorage,
    ReplayBuffer,
)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float8_e4m3fn])
def test_stacks_are_filled_with_zeros_whatever_the_dtype(dtype: torch.dtype) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20), sample_unit=FrameStack(3, ["obs"], padding="zeros"), batch_size=32
    )
    buffer.extend({"obs": torch.ones(10, 2).to(dtype), "done": torch.arange(10) % 5 == 4})
    stacks = buffer.sample()["obs"].float()
    assert bool((stacks[:, -1] == 1).all())
    assert bool((stacks == 0).any())
