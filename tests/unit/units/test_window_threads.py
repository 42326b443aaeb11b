"""Windows while other threads write: each one is whole, in rings that wrap all the time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
)
from ostinato.errors import EmptyBufferError

if TYPE_CHECKING:
    from collections.abc import Callable


LENGTH = 5


def rows(stream: int, first: int, count: int) -> dict[str, Any]:
    """Rows of one writer: episodes of `LENGTH` rows, every field a function of stream and step."""
    step = torch.arange(first, first + count)
    code = (step + stream * 1_000_000).to(torch.float64)
    done = step % LENGTH == LENGTH - 1
    return {
        "stream": torch.full((count,), stream),
        "step": step,
        "obs": code[:, None].repeat(1, 40),
        "next": {
            "obs": (code + 1)[:, None].repeat(1, 40),
            "reward": torch.ones(count, dtype=torch.float64),
            "done": done,
        },
    }


def check_nstep(batch: Any, info: dict[Any, Any]) -> None:
    obs, after, steps = batch["obs"], batch["next"]["obs"], batch["steps_to_next_obs"]
    assert (obs == obs[:, :1]).all()
    assert (after == after[:, :1]).all(), "a torn row"
    assert torch.equal(after[:, 0] - obs[:, 0], steps.to(torch.float64)), "the end of another window"
    assert torch.equal(batch["next"]["reward"], steps.to(torch.float64))
    assert (batch["step"] % LENGTH + steps <= LENGTH).all(), "a window over an episode's end"
    assert torch.equal(obs[:, 0], (batch["step"] + batch["stream"] * 1_000_000).to(torch.float64))


def check_windows(batch: Any, info: dict[Any, Any]) -> None:
    step, valid = batch["step"].view(-1, 3), info["validity_mask"].view(-1, 3)
    stream = batch["stream"].view(-1, 3)
    assert (stream == stream[:, :1]).all()
    assert torch.equal(step.diff(dim=1), valid[:, 1:].long())
    assert (step[:, 0] // LENGTH == step[:, -1] // LENGTH).all()
    assert torch.equal(batch["obs"][:, 0], (batch["step"] + batch["stream"] * 1_000_000).to(torch.float64))


def check_slices(batch: Any, info: dict[Any, Any]) -> None:
    step, stream = batch["step"].view(-1, 3), batch["stream"].view(-1, 3)
    assert (stream == stream[:, :1]).all()
    assert (step.diff(dim=1) == 1).all()
    assert (step[:, 0] // LENGTH == step[:, -1] // LENGTH).all()
    assert info["next", "truncated"].view(-1, 3)[:, -1].all()
    assert torch.equal(batch["obs"][:, 39], (batch["step"] + batch["stream"] * 1_000_000).to(torch.float64))


CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any, dict[Any, Any]], None]]] = {
    "nstep": (lambda: {"sample_unit": NStep(3, 1.0)}, check_nstep),
    "windows": (lambda: {"sample_unit": SequenceUnit(3)}, check_windows),
    "strict": (lambda: {"sample_unit": SequenceUnit(3, "strict")}, check_windows),
    "slices": (lambda: {"sampler": SliceSampler(slice_len=3)}, check_slices),
}


@pytest.mark.parametrize(
    ("name", "prefetch"),
    [("nstep", 0), ("nstep", 3), ("windows", 3), ("strict", 0), ("slices", 0), ("slices", 3)],
)
def test_every_window_is_whole_while_others_write(name: str, prefetch: int) -> None:
    make, check = CASES[name]
    rb = ReplayBuffer(
        storage=LazyTensorStorage(64),
        batch_size=24,
        prefetch=prefetch,
        episodes=Episodes([("next", "done")], "stream"),
        **make(),
    )
    for stream in (0, 1):
        rb.extend(rows(stream, 0, 2 * LENGTH))
    stop, failures = threading.Event(), []
    written = [2 * LENGTH, 2 * LENGTH]

    def write(stream: int) -> None:
        sizes = (1, 7, 3, 30, 2, 70, 5)
        try:
            turn = 0
            while not stop.is_set():
                count = sizes[turn % len(sizes)]
                rb.extend(rows(stream, written[stream], count))
                written[stream] += count
                turn += 1
        except Exception as error:  # shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=write, args=(stream,)) for stream in (0, 1)]
    for thread in threads:
        thread.start()
    drawn, until = 0, time.monotonic() + 60
    try:
        while (drawn < 40 or min(written) <= 256) and not failures:
            assert time.monotonic() < until, "the ring was to wrap"
            try:
                batch, info = rb.sample(return_info=True)
            except EmptyBufferError:
                continue  # for a moment no episode was long enough
            check(batch, info)
            drawn += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
