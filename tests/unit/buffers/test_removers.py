"""Removers: what a new row replaces in a full buffer, against rows that are written one by one to a plain list."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    ConsumingSampler,
    Episodes,
    HeapSampler,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    TensorDictMaxValueWriter,
)
from ostinato.errors import OptionError

from ...effort import examples
from .refusals import raises

CAPACITY = 6
NAMES = ("fifo", "lifo", "lowest_priority", "oldest_version")
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "priorities", "delete", "patch"]),
        st.lists(st.integers(0, 4), min_size=1, max_size=9),
    ),
    max_size=16,
)


def make(name: Any, sampler: Any = None, **options: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0) if sampler is None else sampler
    storage = LazyTensorStorage(CAPACITY)
    return ReplayBuffer(storage=storage, sampler=sampler, remover=name, version_key="version", **options)


class Row(NamedTuple):
    value: int
    version: int
    priority: float


class Model:
    """Rows by slot, in a buffer whose rows are written one by one; values number the rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rb = make(name)
        self.rows: dict[int, Row] = {}
        self.free: list[int] = []
        self.used = self.written = 0
        self.largest = 0.0

    def rank(self, slot: int) -> tuple[float, int]:
        row = self.rows[slot]
        keys = {"fifo": 0, "lifo": -row.value, "lowest_priority": row.priority, "oldest_version": row.version}
        return keys[self.name], row.value

    def place(self, version: int) -> int:
        if self.free:
            slot = self.free.pop(0)
        elif self.used < CAPACITY:
            slot, self.used = self.used, self.used + 1
        else:
            slot = min(self.rows, key=self.rank)
        self.written += 1
        self.rows[slot] = Row(self.written, version, self.largest or 1.0)
        return slot

    def write(self, versions: list[int]) -> None:
        values = torch.arange(self.written + 1, self.written + 1 + len(versions))
        index = self.rb.extend({"value": values, "version": torch.tensor(versions)}).tolist()
        placed = [self.place(version) for version in versions]
        kept = {slot: i for i, slot in enumerate(placed)}
        assert index == [slot if kept[slot] == i else -1 for i, slot in enumerate(placed)] or self.name == "fifo"

    def some(self, picks: list[int], most: int) -> list[int]:
        return sorted({slot for slot in picks if slot in self.rows})[:most]

    def priorities(self, picks: list[int]) -> None:
        slots = self.some(picks, CAPACITY)
        for i, slot in enumerate(slots):
            self.rows[slot] = self.rows[slot]._replace(priority=float(i % 3))
            self.largest = max(self.largest, i % 3)
        self.rb.update_priority(torch.tensor(slots, dtype=torch.int64), torch.arange(len(slots)) % 3)

    def delete(self, picks: list[int]) -> None:
        slots = self.some(picks, 2)
        assert self.rb.delete(torch.tensor(slots, dtype=torch.int64)).all()
        self.free += slots
        self.rows = {slot: row for slot, row in self.rows.items() if slot not in slots}

    def patch(self, picks: list[int]) -> None:
        for slot in self.some(picks, 1):
            generation = self.rb._engine.generations_of(torch.tensor([slot]))
            patch = {"version": torch.tensor([picks[-1]])}
            self.rb.update_if_present(index=torch.tensor([slot]), generation=generation, patch=patch)
            self.rows[slot] = self.rows[slot]._replace(version=picks[-1])

    def check(self) -> None:
        assert len(self.rb) == len(self.rows)
        found = self.rb[:]["value"].tolist() if self.used else []
        assert {slot: found[slot] for slot in self.rows} == {slot: row.value for slot, row in self.rows.items()}


@pytest.mark.parametrize("name", NAMES)
@examples(1.0)
@given(calls=CALLS)
def test_rows_are_those_of_a_model(name: str, calls: list[tuple[str, list[int]]]) -> None:
    model = Model(name)
    model.write([0, 3, 1])
    for call, picks in calls:
        getattr(model, call)(picks)
    model.check()


def rows(*values: int, version: int = 0) -> dict[str, torch.Tensor]:
    return {"value": torch.tensor(values), "version": torch.full((len(values),), version)}


def test_lists_and_lanes() -> None:
    listed = ReplayBuffer(storage=ListStorage(3), remover="lifo")
    for i in range(5):
        listed.add(torch.tensor(i))
    assert listed[:].tolist() == [0, 1, 4]
    lanes = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2), remover="fifo")
    lanes.extend(torch.arange(6).view(2, 3))
    assert lanes[:].tolist() == [[2, 1], [5, 4]]


@pytest.mark.parametrize("sampler", [HeapSampler(CAPACITY, "max", 1), ConsumingSampler(1)])
def test_rows_that_leave_by_draws_make_room_first(sampler: Any) -> None:
    """Reverb's table with a selector, a remover and `max_times_sampled=1`."""
    rb = make("lowest_priority" if sampler.prioritized else "oldest_version", sampler=sampler)
    ranks = [6, 2, 5, 1, 4, 3]
    index = rb.extend({"value": torch.arange(6), "version": torch.tensor(ranks)})
    if sampler.prioritized:
        rb.update_priority(index, ranks)
    gone = set(rb.sample(2, return_info=True)[1]["index"].tolist())
    assert len(rb) == 4
    placed = rb.extend(rows(6, 7, 8, version=9)).tolist()
    assert set(placed[:2]) == gone
    assert placed[2] == next(slot for slot in (3, 1, 5) if slot not in gone)
    assert len(rb) == 6


REFUSED: list[tuple[Any, str, dict[str, Any]]] = [
    ("oldest", "'oldest_version'", {}),
    ("lowest_priority", "PrioritizedSampler", {}),
    ("oldest_version", "version_key", {"version_key": None}),
    ("fifo", "RoundRobinWriter", {"writer": TensorDictMaxValueWriter()}),
    ("lifo", "ndim=1", {"storage": LazyTensorStorage(8, ndim=2)}),
    ("lifo", "single_copy", {"storage": LazyTensorStorage(8, single_copy=True)}),
    ("lifo", "windows or episodes", {"episodes": Episodes(end_key="done")}),
    ("lifo", "sample_unit", {"sample_unit": NStep(2, 0.9), "episodes": Episodes(end_key="done")}),
    ("lifo", "order of writing", {"sampler": QueueSampler()}),
    ("lifo", "ring order", {"shared": True, "version_key": None}),
]


def test_what_does_not_go_with_a_remover() -> None:
    for name, words, options in REFUSED:
        parts = {"storage": LazyTensorStorage(8), "sampler": RandomSampler(), **options}
        with pytest.raises(OptionError, match=words):
            ReplayBuffer(remover=name, **parts)
    rb = make("lowest_priority")
    sampler = rb.sampler
    raises(
        (lambda: rb.set_sampler(RandomSampler()), OptionError, "lowest_priority"),
        (lambda: rb.set_writer(ReservoirWriter()), OptionError, "ReservoirWriter"),
        (lambda: ReplayBuffer(storage=LazyTensorStorage(4), remover="lifo").share(), OptionError, "ring order"),
    )
    assert rb.sampler is sampler
