"""Direct calls of buffers that track episodes give what the general way gives, also while buffers change."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    FrameStack,
    LazyTensorStorage,
    NStep,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)
from ostinato._backend import backend

from .test_direct import General, as_tensors, outcome, same

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not backend.exchange, reason="the native extension or torch's exchange API is missing")
CAPACITY = 41

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "slices of one length": lambda: {"sampler": SliceSampler(slice_len=3, end_key="done")},
    "number of slices": lambda: {"sampler": SliceSampler(num_slices=2, end_keys=["done", "truncated"])},
    "n-step": lambda: {"sample_unit": NStep(3, 0.9)},
    "n-step, float64": lambda: {"sample_unit": NStep(4, 0.5, reward_key="exact", next_keys=["done"])},
    "frames": lambda: {"sample_unit": FrameStack(3, ["image"], merge=True)},
    "frames without next": lambda: {"sample_unit": FrameStack(2, ["obs"])},
    "episodes alone": lambda: {"episodes": Episodes()},
}


def rows(rng: np.random.Generator, n: int) -> dict[str, Any]:
    return {
        "obs": rng.random((n, 3), dtype=np.float32),
        "reward": rng.random(n, dtype=np.float32),
        "exact": rng.random(n),
        "done": rng.random(n) < 0.15,
        "truncated": rng.random(n) < 0.05,
        "image": rng.integers(0, 256, (n, 2, 150), dtype=np.uint8),
        "next_image": rng.integers(0, 256, (n, 2, 150), dtype=np.uint8),
    }


def make(kind: type[ReplayBuffer], parts: str) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(3)
    return kind(storage=LazyTensorStorage(CAPACITY), batch_size=6, generator=generator, **PARTS[parts]())


def operation(dice: random.Random, rng: np.random.Generator) -> Any:
    """Return a random operation on a buffer; the same one for each buffer that it is called with."""
    n = dice.choice([0, 1, 3, 8, 20, CAPACITY, CAPACITY + 7])
    batch, seed = rows(rng, n), dice.randrange(10**6)
    one = {key: value[0] for key, value in rows(rng, 1).items()}
    given = dice.choice([batch, as_tensors(batch), TensorDict(as_tensors(batch), batch_size=[n])])
    size = dice.choice([6, 12, 18])
    column = {**batch, "done": batch["done"].astype(np.uint8)}

    def load(rb: ReplayBuffer) -> None:
        rb.load_state_dict(rb.state_dict())

    def edit(rb: ReplayBuffer) -> None:
        if len(rb):
            rb[seed % len(rb)] = as_tensors({key: value[None] for key, value in one.items()})

    def steps(rb: ReplayBuffer) -> None:
        if isinstance(rb.sample_unit, NStep):
            rb.sample_unit.n, rb.sample_unit.gamma = 1 + seed % 5, 0.3 + seed % 3 / 10

    common = [
        lambda rb: rb.extend(given),
        lambda rb: rb.extend(given),
        lambda rb: rb.add(one),
        lambda rb: rb.sample(),
        lambda rb: rb.sample(),
        lambda rb: rb.sample(size),
        lambda rb: rb.sample(7),
        lambda rb: rb.sample(return_info=True)[0],
    ]
    rare = [
        load,
        edit,
        steps,
        lambda rb: rb.extend(column),
        lambda rb: rb.empty(),
        lambda rb: rb.set_rng(torch.Generator().manual_seed(seed)),
        lambda rb: rb.set_sampler(RandomSampler()) and None,
    ]
    return dice.choice(rare if dice.random() < 0.1 else common)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("seed", range(2))
def test_windows_are_those_of_the_general_way(parts: str, seed: int) -> None:
    dice, rng = random.Random(seed), np.random.default_rng(seed)
    direct, general = make(ReplayBuffer, parts), make(General, parts)
    used = 0
    for number in range(150):
        call = operation(dice, rng)
        results = [outcome(call, rb) for rb in (direct, general)]
        assert same(*results), (number, results)
        used += direct._engine.direct is not None
        counts = [(len(rb), rb.write_count, rb.cursor, rb._engine.rows_drawn) for rb in (direct, general)]
        assert counts[0] == counts[1]
        trackers = [rb._engine.tracker for rb in (direct, general)]
        if len(direct) and trackers[0] is not None:
            tables = [
                tracker.table(rb.storage) for tracker, rb in zip(trackers, (direct, general), strict=True) if tracker
            ]
            assert same(*[table.state_dict() for table in tables])
    assert used
    assert general._engine.direct is None


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


def test_other_windows_are_drawn_in_the_general_way() -> None:
    cases: list[dict[str, Any]] = [
        {"sampler": SliceSampler(slice_len=2, end_key="done", strict_length=False)},
        {"sampler": SliceSampler(slice_len=2, end_key="done", span=1)},
        {"sample_unit": FrameStack(2, ["obs"], padding="zeros")},
        {"sample_unit": FrameStack(1, ["image"])},
        {"sample_unit": NStep(2, 0.9), "episodes": Episodes("done", mask_key="truncated")},
    ]
    for options in cases:
        rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=6, **options)
        for _ in range(2):
            rb.extend(rows(np.random.default_rng(0), 30))
            rb.sample()
        assert rb._engine.direct is None or rb._engine.direct.sample(6) is None


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
