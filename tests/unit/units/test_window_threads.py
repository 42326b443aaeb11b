"""Windows while other threads write: each one is whole, in rings that wrap all the time."""

from __future__ import annotations

import contextlib
import itertools
import time
from functools import partial
from typing import Any

import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    ReplayBuffer,
    SequenceUnit,
)
from ostinato.errors import EmptyBufferError

from ..background import in_background

LENGTH = 5


def rows(stream: int, first: int, count: int) -> dict[str, Any]:
    """Rows of one writer: episodes of `LENGTH` rows, every field a function of stream and step."""
    step = torch.arange(first, first + count)
    code = (step + stream * 1_000_000).to(torch.float64)[:, None].repeat(1, 40)
    return {"stream": torch.full((count,), stream), "step": step, "obs": code, "done": step % LENGTH == LENGTH - 1}


def check_windows(batch: Any, info: dict[Any, Any]) -> None:
    step, valid = batch["step"].view(-1, 3), info["validity_mask"].view(-1, 3)
    stream = batch["stream"].view(-1, 3)
    assert (stream == stream[:, :1]).all()
    assert torch.equal(step.diff(dim=1), valid[:, 1:].long())
    assert (step[:, 0] // LENGTH == step[:, -1] // LENGTH).all()
    code = (batch["step"] + batch["stream"] * 1_000_000).to(torch.float64)
    assert torch.equal(batch["obs"], code[:, None].expand(-1, 40)), "a torn row"


@pytest.mark.parametrize(("boundary", "prefetch"), [("pad", 3), ("strict", 0)])
def test_every_window_is_whole_while_others_write(boundary: Any, prefetch: int) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(64),
        batch_size=24,
        prefetch=prefetch,
        episodes=Episodes("done", "stream"),
        sample_unit=SequenceUnit(3, boundary),
    )
    for stream in (0, 1):
        rb.extend(rows(stream, 0, 2 * LENGTH))
    written = [2 * LENGTH, 2 * LENGTH]
    sizes = itertools.cycle((1, 7, 3, 30, 2, 70, 5))

    def write(stream: int) -> None:
        count = next(sizes)
        rb.extend(rows(stream, written[stream], count))
        written[stream] += count

    drawn, until = 0, time.monotonic() + 60
    with in_background(partial(write, 0), partial(write, 1)):
        while drawn < 40 or min(written) <= 256:
            assert time.monotonic() < until, "the ring was to wrap"
            with contextlib.suppress(EmptyBufferError):  # for a moment no episode was long enough
                check_windows(*rb.sample(return_info=True))
                drawn += 1
