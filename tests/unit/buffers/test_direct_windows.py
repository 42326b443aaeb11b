"""Direct calls of buffers that track episodes give what the general way gives, also while buffers change."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import (
    Episodes,
    FrameStack,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    SliceSampler,
)
from ostinato._backend import backend

from .test_direct import CAPACITY, General, Operations, agree, rows

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not backend.exchange, reason="the native extension or torch's exchange API is missing")

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "slices of one length": lambda: {"sampler": SliceSampler(slice_len=3, end_key="done")},
    "number of slices": lambda: {"sampler": SliceSampler(num_slices=2, end_keys=["done", "truncated"])},
    "n-step": lambda: {"sample_unit": NStep(3, 0.9)},
    "n-step, float64": lambda: {"sample_unit": NStep(4, 0.5, reward_key="exact", next_keys=["done"])},
    "frames": lambda: {"sample_unit": FrameStack(3, ["image"], merge=True)},
    "frames without next": lambda: {"sample_unit": FrameStack(2, ["obs"])},
    "episodes alone": lambda: {"episodes": Episodes()},
}


def make(kind: type[ReplayBuffer], parts: str) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(3)
    return kind(storage=LazyTensorStorage(CAPACITY), batch_size=6, generator=generator, **PARTS[parts]())


@pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")
@pytest.mark.parametrize("parts", PARTS)
def test_windows_are_those_of_the_general_way(parts: str) -> None:
    agree(Operations(len(parts)), make(ReplayBuffer, parts), make(General, parts))


def test_the_direct_calls_apply() -> None:
    for parts in PARTS:
        rb, rng = make(ReplayBuffer, parts), np.random.default_rng(0)
        for _ in range(2):
            rb.extend(rows(rng, 30))
            rb.sample()
        found = rb._engine.direct
        assert found is not None
        assert found.extend(rows(rng, 3)) is not None
        assert found.add({key: value[0] for key, value in rows(rng, 1).items()}) is not None
        assert (found.sample(6) is None) == (parts == "episodes alone")
        assert found.sample(7) is None or "n-step" in parts or "frames" in parts
        assert found.has_more_info == (parts != "episodes alone"), "slices and units have more info than slots"


@pytest.mark.parametrize("parts", ["slices", "n-step"])
def test_no_window_is_torn_while_rows_are_replaced(parts: str) -> None:
    """Rows say their number in every element, episodes have ten rows."""
    options: dict[str, Any] = {"sampler": SliceSampler(slice_len=4, end_key="done")}
    if parts == "n-step":
        options = {"sample_unit": NStep(4, 1.0, next_keys=["last", "done"])}
    rb = ReplayBuffer(storage=LazyTensorStorage(400), batch_size=64, **options)

    def batch(first: int, n: int = 40) -> dict[str, torch.Tensor]:
        number = torch.arange(first, first + n)
        frame = number[:, None].repeat(1, 200)
        done = number % 10 == 9
        return {"number": number, "last": number.clone(), "frame": frame, "reward": torch.ones(n), "done": done}

    rb.extend(batch(0, 400))
    rb.sample()
    ended = threading.Event()

    def write() -> None:
        first = 400
        while not ended.is_set():
            rb.extend(batch(first))
            first += 40

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(150):
            found = rb.sample()
            assert torch.equal(found["frame"], found["number"][:, None].expand(-1, 200))
            if parts == "slices":
                numbers = found["number"].view(-1, 4)
                assert bool((numbers.diff() == 1).all())
                assert bool((numbers[:, 0] // 10 == numbers[:, 3] // 10).all())
            else:
                assert torch.equal(found["last"], found["number"] + found["steps_to_next_obs"] - 1)
                assert torch.equal(found["reward"], found["steps_to_next_obs"].float())
    finally:
        ended.set()
        writer.join()
    assert rb._engine.direct is not None
