"""Transitions for single-copy tests: environments in lanes, a log that keeps them whole, poisoned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.storages import memory

if TYPE_CHECKING:
    import random

    import pytest

__all__ = ["Lanes", "Log", "equal", "poison_memory", "stack"]

Row = dict[str, Tensor]

FIELDS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "obs": ((3,), torch.float32),
    "image": ((5, 60), torch.uint8),
    "goal": ((), torch.float64),
}
"""Observations: a small one, a wide one, a scalar; each has a next field."""


def observation(number: int) -> Row:
    """Return the fields of an observation, which tell its number; every fifth one holds NaN."""
    obs = torch.arange(3, dtype=torch.float32) + number
    if number % 5 == 0:
        obs[1] = torch.nan
    return {
        "obs": obs,
        "image": ((torch.arange(300).view(5, 60) + number * 7) % 253).to(torch.uint8),
        "goal": torch.tensor(number / 4, dtype=torch.float64),
    }


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit."""
    same_form = one.dtype is other.dtype and one.shape == other.shape
    return same_form and one.numpy().tobytes() == other.numpy().tobytes()


def stack(rows: list[Row], batch: tuple[int, ...]) -> dict[str, Any]:
    """Stack rows to nested fields `[*batch, ...]`."""
    columns = {key: torch.stack([row[key] for row in rows]).reshape(*batch, *rows[0][key].shape) for key in rows[0]}
    nexts = {key.removeprefix("next."): columns.pop(key) for key in list(columns) if key.startswith("next.")}
    return {**columns, "next": nexts}


class Lanes:
    """Environments side by side: episodes of random lengths, final observations, now and then a row out of line."""

    def __init__(self, lanes: int, rng: random.Random) -> None:
        self.rng = rng
        self.count = 0
        self.now = [self.fresh() for _ in range(lanes)]

    def fresh(self) -> int:
        # few numbers at times, so that observations agree by chance
        self.count += 1
        return self.rng.choice([self.count, self.count, self.rng.randrange(4)])

    def step(self) -> list[Row]:
        """Return one row for each lane."""
        rows = []
        for lane, number in enumerate(self.now):
            following = self.fresh()
            ended = self.rng.random() < 0.2
            self.now[lane] = self.fresh() if ended or self.rng.random() < 0.05 else following
            rows.append(self.row(number, following, ended=ended))
        return rows

    def row(self, number: int, following: int, *, ended: bool) -> Row:
        """Return one transition."""
        self.count += 1
        return {
            **observation(number),
            "action": torch.tensor([self.count, -self.count], dtype=torch.int16),
            **{f"next.{key}": value for key, value in observation(following).items()},
            "next.done": torch.tensor(ended),
            "next.reward": torch.tensor(self.count / 2),
        }


class Log:
    """What a ring of `capacity` slots holds: every transition whole."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[Row | None] = [None] * capacity
        self.cursor = 0

    def __len__(self) -> int:
        return sum(row is not None for row in self.slots)

    def write(self, rows: list[Row]) -> None:
        """Write rows in ring order."""
        for row in rows:
            self.slots[self.cursor] = row
            self.cursor = (self.cursor + 1) % self.capacity

    def rows(self, slots: list[int]) -> list[Row]:
        """Return the rows at slots."""
        found = [self.slots[slot] for slot in slots]
        assert all(row is not None for row in found), f"no rows at some of {slots}"
        return [row for row in found if row is not None]


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all memory of storages begin as bytes of 255: NaN in every float."""
    heap, mapped = memory.HeapMemory.block, memory.MappedMemory.block

    def heap_block(self: memory.HeapMemory, name: str, nbytes: int) -> Tensor:
        return heap(self, name, nbytes).fill_(255)

    def mapped_block(self: memory.MappedMemory, name: str, nbytes: int) -> Tensor:
        return mapped(self, name, nbytes).fill_(255)

    monkeypatch.setattr(memory.HeapMemory, "block", heap_block)
    monkeypatch.setattr(memory.MappedMemory, "block", mapped_block)
