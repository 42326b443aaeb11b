"""Frame stacks: padding at the start of an episode, dtypes, next observations."""

from __future__ import annotations

import pytest
import torch

from ostinato import (
    FrameStack,
    LazyTensorStorage,
    ReplayBuffer,
)

from ...episodes import Log, batch_of
from ...windows import check_frames
from .rings import buffer, episode, written

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("padding", ["repeat", "zeros"])
def test_stacks_take_no_frame_of_an_episode_that_was_truncated(padding: str) -> None:
    rb = buffer(20, 60, sample_unit=FrameStack(4, ["obs"], padding=padding))
    rb.extend(batch_of([*episode(1, 5, truncated=True), *episode(2, 5, first_id=5)]))
    batch = rb.sample()
    first = batch["obs"][(batch["episode"] == 2) & (batch["t"] == 0)]
    assert first.numel()
    assert first[:, -1].unique(dim=0).tolist() == [[0, 2, 0]]
    expected = [0, 2, 0] if padding == "repeat" else [0, 0, 0]
    assert (first[:, :-1] == torch.tensor(expected)).all()


def test_a_stack_of_obs_and_next_obs_is_one_stack() -> None:
    rb = buffer(20, 4, sample_unit=FrameStack(3, ["obs", ("next", "obs")]))
    log = Log(20, longest=3)
    written(log, rb, 15)
    check_frames(log, *rb.sample(return_info=True), k=3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float8_e4m3fn])
def test_stacks_are_filled_with_zeros_whatever_the_dtype(dtype: torch.dtype) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20), sample_unit=FrameStack(3, ["obs"], padding="zeros"), batch_size=32
    )
    buffer.extend({"obs": torch.ones(10, 2).to(dtype), "done": torch.arange(10) % 5 == 4})
    stacks = buffer.sample()["obs"].float()
    assert bool((stacks[:, -1] == 1).all())
    assert bool((stacks == 0).any())
