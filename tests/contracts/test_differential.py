"""The native extension against torch alone: the same calls with the same seeds give the same bytes, or the same errors.

Each combination of parts runs one program of calls, drawn by a seed, once each way. What a call returns, or the type of
what it raises, is compared call by call; at the end the states are.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from ostinato._backend import backend, use_backend
from ostinato.errors import OstinatoError
from ostinato.testing.views import bits
from tests.combinations import CELLS, LANES, empty, spread
from tests.registry import CAPACITY, SAMPLERS, STORAGES, rows, seeded

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(backend.installed is None, reason="there is one way without the extension")

WAYS: tuple[Literal["native", "torch"], ...] = ("native", "torch")
CALLS = 12
EVERY = 23
"""One in so many combinations runs in `make test`, one in two in `make test-all`."""


class Program:
    """Calls of a buffer and what they gave."""

    def __init__(self, buffer: Any, seed: str, lanes: int, *, plain: bool = False) -> None:
        self.buffer = buffer
        self.random = random.Random(seed)
        self.lanes = lanes
        self.plain = plain
        self.written = 0
        self.given: list[Any] = []
        self.info: dict[Any, Any] = {}

    def run(self, calls: int) -> list[Any]:
        names = ["extend"] * 6 + ["add"] * 3 + ["sample"] * 8 + ["update"] * 5 + ["edit", "delete", "empty", "move"]
        self.call("extend")
        for _ in range(calls):
            self.call(self.random.choice(names))
        self.given.append(bits(_rounded(self.buffer.state_dict())))
        return self.given

    def call(self, name: str) -> None:
        try:
            value = getattr(self, name)()
        except OstinatoError as error:
            value = type(error).__name__
        self.given.append((name, bits(value), len(self.buffer)))

    def rows(self, count: int) -> Any:
        """The next rows of the stream."""
        batch = rows(count, self.written, self.lanes)
        self.written += count
        return {key: batch[key] for key in ("t", "obs", "tokens")} if self.plain else batch

    def extend(self) -> Any:
        return self.buffer.extend(self.rows(self.random.choice([1, 2, 5, 8, CAPACITY // self.lanes, CAPACITY + 3])))

    def add(self) -> Any:
        batch = self.rows(1)
        return self.buffer.add({key: value[0] for key, value in batch.items()} if self.plain else batch[0])

    def sample(self) -> Any:
        batch, self.info = self.buffer.sample(self.random.choice([None, 1, 3, 30]), return_info=True)
        return batch, {str(key): value for key, value in self.info.items()}

    def update(self) -> Any:
        """Priorities of the last batch: usual ones, zeros, and one that raises."""
        index = self.info.get("index")
        if not self.buffer.sampler.prioritized or index is None:
            return None
        count = len(index[0] if isinstance(index, tuple) else index)
        values = [self.random.choice([0.0, 1e-30, 0.25, 1.0, 3.5]) for _ in range(count)]
        if self.random.random() < 0.1:
            values[-1] = float("nan")
        return self.buffer.update_priority(self.info, torch.tensor(values, dtype=torch.float64))

    def edit(self) -> Any:
        if not len(self.buffer) or self.lanes > 1:
            return None
        slots = [self.random.randrange(len(self.buffer)) for _ in range(2)]
        self.buffer[slots] = self.rows(2)
        return slots

    def delete(self) -> Any:
        if len(self.buffer) < 3:
            return None
        return self.buffer.delete(torch.tensor([self.random.randrange(len(self.buffer))]))

    def empty(self) -> Any:
        return self.buffer.empty() if self.random.random() < 0.3 else None

    def move(self) -> Any:
        state = self.buffer.state_dict()
        return self.buffer.load_state_dict(state)


def _rounded(state: Any) -> Any:
    """Leave out the last bits of float64: both ways raise priorities to a power by libraries of their own."""
    if isinstance(state, dict):
        return {key: _rounded(value) for key, value in state.items()}
    return state.float() if isinstance(state, torch.Tensor) and state.dtype is torch.float64 else state


def both(make: Callable[[], Any], seed: str, lanes: int = 1, **options: Any) -> list[list[Any]]:
    found = []
    for way in WAYS:
        with use_backend(way):
            found.append(Program(make(), seed, lanes, **options).run(CALLS))
    return found


@pytest.mark.parametrize("every", [EVERY, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("storage", STORAGES)
def test_combinations_give_the_same_both_ways(storage, every):
    left_out = {"QueueSampler", "ImmutableDatasetWriter"}  # writes to a full queue wait
    cells = [c for c in CELLS if c.storage == storage and not c.refusal and not {c.sampler, c.writer} & left_out]
    chosen = spread(cells, every)
    assert len(chosen) > 3
    for cell in chosen:
        native, alone = both(partial(empty, cell, batch_size=9), str(cell), LANES if "ndim=2" in storage else 1)
        assert native == alone, cell


READING = ("Slice", "Queue", "Prompt", "Staleness")
"""Samplers that read fields, or wait."""


@pytest.mark.parametrize("name", [name for name in SAMPLERS if not any(word in name for word in READING)])
@pytest.mark.parametrize("seed", range(3))
def test_plain_rows_give_the_same_both_ways(name, seed):
    """Dictionaries of tensors go through one native call where TensorDicts do not."""

    def make() -> ReplayBuffer:
        sampler = SAMPLERS[name].make(CAPACITY)
        storage = LazyTensorStorage(CAPACITY)
        return ReplayBuffer(storage=storage, sampler=sampler, batch_size=9, generator=seeded(seed))

    native, alone = both(make, f"{name} {seed}", plain=True)
    assert native == alone
