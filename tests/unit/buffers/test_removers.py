"""Removers: what a new row replaces in a full buffer, against rows that are written one by one to a plain list."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    ConsumingSampler,
    Episodes,
    HeapSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    LimitedSampler,
    ListStorage,
    NStep,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    StackSampler,
    TensorDictMaxValueWriter,
)
from ostinato.errors import OptionError

from ...effort import examples

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY = 6
NAMES = ("fifo", "lifo", "lowest_priority", "oldest_version")
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "add", "priorities", "delete", "edit", "patch", "load", "pickle"]),
        st.lists(st.integers(0, 4), min_size=1, max_size=9),
    ),
    max_size=25,
)


def make(name: Any, sampler: Any = None, **options: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0) if sampler is None else sampler
    storage = LazyTensorStorage(CAPACITY)
    return ReplayBuffer(storage=storage, sampler=sampler, remover=name, version_key="version", **options)


class Row(NamedTuple):
    value: int
    version: int
    priority: float
    age: int


class Model:
    """Rows by slot, in a buffer whose rows are written one by one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rb = make(name)
        self.rows: dict[int, Row] = {}
        self.free: list[int] = []
        self.used = self.serial = 0
        self.largest = 0.0

    def rank(self, slot: int) -> tuple[float, int]:
        row = self.rows[slot]
        keys = {"fifo": 0, "lifo": -row.age, "lowest_priority": row.priority, "oldest_version": row.version}
        return keys[self.name], row.age

    def place(self, version: int) -> int:
        if self.free:
            slot = self.free.pop(0)
        elif self.used < CAPACITY:
            slot, self.used = self.used, self.used + 1
        else:
            slot = min(self.rows, key=self.rank)
        self.serial += 1
        self.rows[slot] = Row(self.serial, version, self.largest or 1.0, self.serial)
        return slot

    def write(self, versions: list[int]) -> None:
        values = torch.arange(self.serial + 1, self.serial + 1 + len(versions))
        index = self.rb.extend({"value": values, "version": torch.tensor(versions)}).tolist()
        placed = [self.place(version) for version in versions]
        kept = {slot: i for i, slot in enumerate(placed)}
        assert [slot if slot >= 0 else None for slot in index] == [
            slot if kept[slot] == i else None for i, slot in enumerate(placed)
        ] or self.name == "fifo"  # a run names the slots of rows that later ones of it have replaced

    def add(self, versions: list[int]) -> None:
        for version in versions[:3]:
            value = torch.tensor(self.serial + 1)
            assert self.rb.add({"value": value, "version": torch.tensor(version)}) == self.place(version)

    def some(self, picks: list[int]) -> list[int]:
        return sorted({slot for slot in picks if slot in self.rows})

    def priorities(self, picks: list[int]) -> None:
        slots = self.some(picks)
        for i, slot in enumerate(slots):
            self.rows[slot] = self.rows[slot]._replace(priority=float(i % 3))
        if slots:
            self.rb.update_priority(torch.tensor(slots), torch.arange(len(slots)) % 3)
            self.largest = max(self.largest, *(self.rows[slot].priority for slot in slots))

    def delete(self, picks: list[int]) -> None:
        slots = self.some(picks[:2])
        assert self.rb.delete(torch.tensor(slots, dtype=torch.int64)).tolist() == [True] * len(slots)
        for slot in slots:
            del self.rows[slot]
            self.free.append(slot)

    def edit(self, picks: list[int]) -> None:
        """An edited row keeps its place, and gets the default priority."""
        for slot in self.some(picks[:1]):
            self.serial += 1
            self.rb[slot] = {"value": torch.tensor(self.serial), "version": torch.tensor(picks[-1])}
            self.rows[slot] = Row(self.serial, picks[-1], self.largest or 1.0, self.rows[slot].age)

    def patch(self, picks: list[int]) -> None:
        for slot in self.some(picks[:1]):
            generation = self.rb._engine.generations_of(torch.tensor([slot]))
            patch = {"version": torch.tensor([picks[-1]])}
            self.rb.update_if_present(index=torch.tensor([slot]), generation=generation, patch=patch)
            self.rows[slot] = self.rows[slot]._replace(version=picks[-1])

    def load(self, _: list[int]) -> None:
        state = self.rb.state_dict()
        self.rb = make(self.name)
        self.rb.load_state_dict(state)

    def pickle(self, _: list[int]) -> None:
        self.rb = pickle.loads(pickle.dumps(self.rb))

    def check(self) -> None:
        assert len(self.rb) == len(self.rows)
        found = self.rb[:]["value"].tolist() if self.used else []
        assert {slot: found[slot] for slot in self.rows} == {slot: row.value for slot, row in self.rows.items()}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", NAMES)
@examples(1.0)
@given(calls=CALLS)
def test_rows_are_those_of_a_model(name: str, calls: list[tuple[str, list[int]]]) -> None:
    model = Model(name)
    for call, picks in calls:
        getattr(model, call)(picks)
        model.check()


def rows(*values: int, version: int = 0) -> dict[str, torch.Tensor]:
    return {"value": torch.tensor(values), "version": torch.full((len(values),), version)}


def test_a_batch_is_placed_row_by_row() -> None:
    rb = make("lifo")
    assert rb.extend(rows(*range(8))).tolist() == [0, 1, 2, 3, 4, -1, -1, 5]
    assert rb[:]["value"].tolist() == [0, 1, 2, 3, 4, 7]
    best = make("lowest_priority")
    index = best.extend(rows(*range(6)))
    best.update_priority(index, [5.0, 1.0, 4.0, 1.0, 3.0, 9.0])
    assert best.extend(rows(6, 7)).tolist() == [1, 3]  # of equal priorities the oldest
    assert len(best) == 6


def test_a_late_priority_does_not_reach_the_row_that_came() -> None:
    rb = make("lowest_priority")
    index = rb.extend(rows(*range(6)))
    generations = rb._engine.generations_of(index)
    rb.update_priority(index, [5.0, 1.0, 4.0, 2.0, 3.0, 9.0])
    assert rb.extend(rows(6)).tolist() == [1]
    rb.update_priority(index, torch.full((6,), 7.0), generations)
    assert rb.stats().stale_updates == 1
    assert isinstance(rb.sampler, PrioritizedSampler)
    assert rb.sampler.priorities.tolist() == [7.0, 9.0, 7.0, 7.0, 7.0, 7.0]


@pytest.mark.parametrize("sampler", [HeapSampler(CAPACITY, "max", 1), ConsumingSampler(1), StackSampler(1)])
def test_rows_that_leave_by_draws_make_room_first(sampler: Any) -> None:
    """Reverb's table with a selector, a remover and `max_times_sampled=1`."""
    rb = make("lowest_priority" if sampler.prioritized else "oldest_version", sampler=sampler)
    index = rb.extend({"value": torch.arange(6), "version": torch.tensor([6, 2, 5, 1, 4, 3])})
    if sampler.prioritized:
        rb.update_priority(index, [6.0, 2.0, 5.0, 1.0, 4.0, 3.0])
    _, info = rb.sample(2, return_info=True)
    gone = set(info["index"].tolist())
    assert len(rb) == 4
    placed = rb.extend(rows(6, 7, 8, version=9)).tolist()
    assert set(placed[:2]) == gone
    left = [slot for slot in (3, 1, 5) if slot not in gone]
    assert placed[2] == left[0]
    assert len(rb) == 6


def test_views_and_other_samplers_go_with_a_remover() -> None:
    rb = make("oldest_version", sampler=LimitedSampler(2))
    rb.extend({"value": torch.arange(6), "version": torch.tensor([6, 2, 5, 1, 4, 3])})
    assert rb.extend(rows(6, version=7)).tolist() == [3]
    drawn = torch.cat([rb.sample(6)["value"], rb.sample(6)["value"]])
    assert sorted(drawn.tolist()) == sorted([0, 1, 2, 6, 4, 5] * 2)
    other = make("lifo", sampler=RandomSampler())
    view = other.view(sampler=PrioritizedSampler(CAPACITY, 1.0, 1.0))
    other.extend(rows(*range(8)))
    assert set(view.sample(64)["value"].tolist()) == {0, 1, 2, 3, 4, 7}


def test_checkpoints_keep_the_order(tmp_path: Path) -> None:
    for name in NAMES:
        one, two = make(name), make(name)
        one.extend({"value": torch.arange(6), "version": torch.tensor([6, 2, 5, 1, 4, 3])})
        one.update_priority(torch.arange(6), [6.0, 2.0, 5.0, 1.0, 4.0, 3.0])
        one.extend(rows(6, 7, version=4))
        one.dumps(tmp_path / name)
        two.loads(tmp_path / name)
        for value in range(8, 20):
            given = rows(value, version=value % 5)
            assert one.extend(given).tolist() == two.extend(given).tolist()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("oldest", {}, "'oldest_version'"),
        ("lowest_priority", {"sampler": RandomSampler()}, "PrioritizedSampler"),
        ("oldest_version", {"version_key": None}, "version_key"),
        ("lifo", {"writer": ReservoirWriter()}, "ReservoirWriter"),
        ("fifo", {"writer": TensorDictMaxValueWriter()}, "RoundRobinWriter"),
        ("lifo", {"storage": LazyTensorStorage(8, ndim=2)}, "ndim=1"),
        ("lifo", {"storage": LazyTensorStorage(8, single_copy=True)}, "single_copy"),
        ("lifo", {"episodes": Episodes(end_key="done")}, "windows or episodes"),
        ("lifo", {"sample_unit": NStep(2, 0.9), "episodes": Episodes(end_key="done")}, "sample_unit"),
        ("lifo", {"sampler": QueueSampler()}, "order of writing"),
        ("lifo", {"shared": True, "version_key": None}, "ring order"),
    ],
)
def test_what_does_not_go_with_a_remover(name: Any, options: dict[str, Any], words: str) -> None:
    parts = {"storage": LazyTensorStorage(8), "sampler": RandomSampler(), **options}
    with pytest.raises(OptionError, match=words):
        ReplayBuffer(remover=name, **parts)


def test_parts_that_do_not_go_with_the_remover_are_not_exchanged() -> None:
    rb = make("lowest_priority")
    sampler = rb.sampler
    with pytest.raises(OptionError, match="lowest_priority"):
        rb.set_sampler(RandomSampler())
    with pytest.raises(OptionError, match="ReservoirWriter"):
        rb.set_writer(ReservoirWriter())
    assert rb.sampler is sampler
    with pytest.raises(OptionError, match="ring order"):
        ReplayBuffer(storage=LazyTensorStorage(4), remover="lifo").share()


@pytest.mark.parametrize("kind", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_all_storages(kind: Any) -> None:
    rb = ReplayBuffer(storage=kind(3), remover="lifo")
    assert rb.extend(torch.arange(3)).tolist() == [0, 1, 2]
    assert rb.add(torch.tensor(3)) == 2
    assert [int(x) for x in rb[:]] == [0, 1, 3]


def test_fifo_is_the_order_of_the_ring() -> None:
    found = []
    for name in ("fifo", None):
        rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), remover=name)
        for start in (0, 7, 14):
            rb.extend(torch.arange(start, start + 14).reshape(2, 7))
        found.append(rb[:].tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("remover", ["lifo", "fifo", None])
@pytest.mark.parametrize("sampler", [lambda: ConsumingSampler(2), lambda: StackSampler(2)])
def test_rows_of_a_batch_that_is_being_made_can_be_replaced(remover: Any, sampler: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler(), batch_size=4, remover=remover)
    rb.extend(torch.arange(4))
    rb.extend(torch.arange(4, 6))
    made: list[torch.Tensor] = []

    def write_meanwhile(batch: torch.Tensor) -> torch.Tensor:
        made.append(batch)
        if len(made) == 1:
            rb.sample()  # the second and last draw of the same rows is delivered first
            rb.extend(torch.arange(10, 12))
        return batch

    rb.append_transform(write_meanwhile)
    assert sorted(rb.sample().tolist()) == sorted(made[1].tolist())
    rb.extend(torch.arange(20, 23))
    assert len(rb) == 4
    assert 22 in rb.sample().tolist()  # a remover may have replaced the others by it
