"""Edits of rows that are drawn in an order or a few times: a plain Python model says what is drawn, and after a load.

Every call is made in two buffers, of which one was saved and loaded at some moments. An edit changes the values of a
row, not its place (docs/sampling.md). Edits with all samplers: `BufferContract`.
"""

from __future__ import annotations

import pickle
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from ostinato import (
    ConsumingSampler,
    HeapSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    LimitedSampler,
    ListStorage,
    QueueSampler,
    RaggedTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    StackSampler,
)
from ostinato.core import rank_order
from ostinato.errors import OstinatoError

from ..effort import examples

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 7
SETTINGS = examples(0.8)
SAMPLERS: dict[str, Any] = {
    "queue": QueueSampler,
    "stack": StackSampler,
    "stack that pops": lambda: StackSampler(1),
    "stack of two draws": lambda: StackSampler(2),
    "heap": lambda: HeapSampler(CAPACITY),
    "heap of the least": lambda: HeapSampler(CAPACITY, "min"),
    "heap that pops": lambda: HeapSampler(CAPACITY, "max", 1),
    "limited": lambda: LimitedSampler(2),
    "consuming": lambda: ConsumingSampler(2),
}
STORAGES: dict[str, Any] = {
    "packed": lambda: LazyTensorStorage(CAPACITY),
    "columns": lambda: LazyTensorStorage(CAPACITY, packed=False),
    "mapped": lambda: LazyMemmapStorage(CAPACITY),
    "list": lambda: ListStorage(CAPACITY),
    "ragged": lambda: RaggedTensorStorage(CAPACITY, ragged="tokens"),
}
EDITS = ("row", "rows", "write_all", "set_at_", "set_", "update_", "key", "patch", "storage", "storage.set")
SIZES = st.integers(1, 4)
PICKS = st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=3)


def make(name: str, storage: str) -> ReplayBuffer:
    return ReplayBuffer(
        storage=STORAGES[storage](),
        sampler=SAMPLERS[name](),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=2,
        generator=torch.Generator().manual_seed(3),
        transform=Failing(),
    )


class Failing:
    """A transform that raises if it is asked to."""

    raises = False

    def __call__(self, batch: Any) -> Any:
        if self.raises:
            raise NotImplementedError
        return batch


@dataclass
class Row:
    """A row of the model."""

    value: int
    arrival: int
    priority: float = 1.0
    draws: int = 0


class Model:
    """The rows that may be drawn, in the order of the documentation, and the slots that are free."""

    limits = {"queue": 1, "stack that pops": 1, "heap that pops": 1}  # noqa: RUF012
    limits |= dict.fromkeys(("stack of two draws", "limited", "consuming"), 2)

    def __init__(self, name: str) -> None:
        self.name, self.limit = name, self.limits.get(name)
        self.leaves = self.limit is not None and name not in {"queue", "limited"}
        self.rows: dict[int, Row] = {}
        self.free: list[int] = []
        self.written = 0
        self.largest = 0.0

    def write(self, slots: list[int], values: list[int]) -> None:
        unused = [slot for slot in range(CAPACITY) if slot not in {*self.rows, *self.free}]
        oldest = sorted(self.rows, key=lambda slot: self.rows[slot].arrival)
        expected = self.free if self.leaves else [*self.free, *unused, *oldest]
        assert slots[: len(expected)] == expected[: len(slots)]
        self.free = self.free[len(slots) :]
        for slot, value in zip(slots, values, strict=True):
            self.written += 1
            self.rows[slot] = Row(value, self.written, self.largest or 1.0)

    def present(self) -> list[int]:
        return [slot for slot, row in self.rows.items() if not self.leaves or row.draws != self.limit]

    def rank(self, slot: int) -> tuple[float, int]:
        row = self.rows[slot]
        if self.name.startswith("stack"):
            return 0.0, -row.arrival
        keys = {"heap of the least": row.priority, "queue": 0.0}
        return keys.get(self.name, -row.priority), row.arrival

    def sample(self, size: int, found: list[int] | None) -> list[int] | None:
        """Return the values of a batch, of random ones those found; None if there are too few rows."""
        able = [slot for slot, row in self.rows.items() if self.limit is None or row.draws < self.limit]
        left = sum(2 - self.rows[slot].draws for slot in able) if self.name == "limited" else len(able)
        if not able or (left < size and not self.leaves):
            return None
        drawn = sorted(able, key=self.rank)[:size]
        if self.name in {"limited", "consuming"} and found is not None:
            assert len(found) == min(left, size)
            assert self.name == "limited" or len(set(found)) == len(found)
            by_value = {self.rows[slot].value: slot for slot in able}
            drawn = [by_value[value] for value in found]
        values = [self.rows[slot].value for slot in drawn]
        for slot in drawn:
            self.rows[slot].draws += 1
            assert self.limit is None or self.rows[slot].draws <= self.limit
            self.free += [slot] * (self.leaves and self.rows[slot].draws == self.limit)
        return values


def outcome(call: Callable[[ReplayBuffer], Any], rb: ReplayBuffer) -> Any:
    """What a call returns, as plain values, or the name of what it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return plain(call(rb))
    except (OstinatoError, NotImplementedError) as error:
        return type(error).__name__


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    return None if isinstance(value, ReplayBuffer) else value


class EditMachine(RuleBasedStateMachine):
    """Two buffers: `live` is never loaded, `twin` is again and again."""

    name: str

    @initialize(
        storage=st.sampled_from(sorted(STORAGES)), count=st.integers(1, CAPACITY), few=st.sampled_from([0, 2, 1024])
    )
    def begin(self, storage: str, count: int, few: int) -> None:
        """Changes of a `few` rows go to a heap beside the sorted rows, of more they are sorted anew."""
        self.storage = storage
        self.patch = mock.patch.object(rank_order, "_FEW", few)
        self.patch.start()
        self.directory = tempfile.TemporaryDirectory()
        self.live, self.twin = make(self.name, storage), make(self.name, storage)
        self.model = Model(self.name)
        self.next = 0
        self.used: list[int] = []
        self.saved = False
        self.extend(count=count, seed=count)

    def both(self, call: Callable[[ReplayBuffer], Any]) -> Any:
        """Make a call in both buffers, which must give the same."""
        first, second = outcome(call, self.live), outcome(call, self.twin)
        assert first == second
        return first

    def given(self, count: int, seed: int) -> Any:
        """Rows of new ids, with the other fields out of a seed."""
        ids = torch.arange(self.next, self.next + count)
        self.next += count
        data: dict[str, Any] = {
            "id": ids,
            "reward": ((ids * 7 + seed) % 5).float(),
        }
        if self.storage == "ragged":
            data["tokens"] = [torch.arange(int(number) % 3) for number in ids]
        return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)] if self.listed else data

    @property
    def wait(self) -> float | None:
        return 0.0 if self.name == "queue" else None

    @property
    def listed(self) -> bool:
        return self.storage == "list"

    # -- calls -----------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5), seed=st.integers(0, 9))
    def extend(self, count: int, seed: int) -> None:
        first, data = self.next, self.given(count, seed)
        slots = self.both(lambda rb: rb.extend(data, timeout_s=self.wait))
        if isinstance(slots, list):
            self.written(slots, first)

    @rule(seed=st.integers(0, 9))
    def add(self, seed: int) -> None:
        first, data = self.next, self.given(1, seed)
        row = data[0] if self.listed else {key: value[0] for key, value in data.items()}
        slot = self.both(lambda rb: rb.add(row, timeout_s=self.wait))
        if isinstance(slot, int):
            self.written([slot], first)

    def written(self, slots: list[int], first: int) -> None:
        self.used = sorted({*self.used, *(slot for slot in slots if slot >= 0)})
        self.model.write(slots, list(range(first, first + len(slots))))

    @rule(size=SIZES)
    def sample(self, size: int) -> None:
        found = self.both(lambda rb: rb.sample(size, return_info=True, timeout_s=self.wait))
        ids = None if isinstance(found, str) else found[0]["id"]
        assert self.model.sample(size, ids) == ids

    @rule(size=SIZES)
    def fail(self, size: int) -> None:
        """What was drawn is taken back."""
        with mock.patch.object(Failing, "raises", new=True):
            assert isinstance(self.both(lambda rb: rb.sample(size, timeout_s=self.wait)), str)

    @rule(size=SIZES)
    def compare(self, size: int) -> None:
        """Compare two batches, and all rows."""
        for _ in range(2):
            self.sample(size)
        assert self.both(len) == len(self.model.present())
        self.both(lambda rb: rb[:] if self.used else None)
        present = self.both(lambda rb: rb.writer.generations_of(torch.arange(CAPACITY)) > 0)
        assert self.model.leaves or present == [slot in self.model.rows for slot in range(CAPACITY)]

    @precondition(lambda self: self.used)
    @rule(way=st.sampled_from(EDITS), picks=PICKS, seed=st.integers(0, 9))
    def edit(self, way: str, picks: list[int], seed: int) -> None:
        slots = self.used if way in {"write_all", "set_", "update_", "key"} else self.some(picks)
        slots = slots[:1] if way == "row" else slots
        first, rows = self.next, self.given(len(slots), seed)
        index = torch.tensor(slots)
        fields = {} if self.listed else {key: value for key, value in rows.items() if key != "tokens"}
        patch = {(key,): value for key, value in fields.items()}
        ways: dict[str, Any] = {
            "row": lambda rb: put(rb, slots[0], one(rows)),
            "rows": lambda rb: put(rb, index, rows),
            "write_all": lambda rb: rb.write_all(rows),
            "set_at_": lambda rb: [rb.set_at_(key, fields[key], index) for key in fields],
            "set_": lambda rb: [rb.set_(key, fields[key]) for key in fields],
            "update_": lambda rb: rb.update_(fields),
            "key": lambda rb: [put(rb, key, fields[key]) for key in fields],
            "patch": lambda rb: (
                rb.update_if_present(index=index, generation=rb.writer.generations_of(index), patch=patch).updated
            ),
            "storage": lambda rb: put(rb.storage, index, rows),
            "storage.set": lambda rb: rb.storage.set(index, rows),
        }
        if self.listed and way not in {"row", "rows", "write_all", "storage", "storage.set"}:
            return
        done = self.both(ways[way])
        if isinstance(done, str):
            assert way == "patch"
            return
        accepted = done if way == "patch" else [True] * len(slots)
        for slot, value, there in zip(slots, range(first, self.next), accepted, strict=True):
            row = self.model.rows.get(slot)
            if row is not None and there:
                row.value = value
                if way in {"row", "rows", "write_all"}:
                    row.priority = self.model.largest or 1.0

    def some(self, picks: list[int]) -> list[int]:
        """Different slots that hold rows, or held rows that have left, in any order."""
        return list(dict.fromkeys(self.used[pick % len(self.used)] for pick in picks))

    @precondition(lambda self: self.used)
    @rule(picks=PICKS, values=st.lists(st.integers(0, 4), min_size=3, max_size=3), bare=st.booleans())
    def update_priority(self, picks: list[int], values: list[int], bare: bool) -> None:
        slots = self.some(picks)
        values = values[: len(slots)]
        given = torch.tensor(values, dtype=torch.float32)

        def call(rb: ReplayBuffer) -> None:
            rb.update_priority(slots, given, None if bare else rb.writer.generations_of(torch.tensor(slots)))

        if isinstance(self.both(call), str) or not self.name.startswith("heap"):
            return
        for slot, value in zip(slots, values, strict=True):
            if slot in self.model.rows:
                self.model.rows[slot].priority = float(value)
                self.model.largest = max(self.model.largest, float(value))

    @precondition(lambda self: self.used)
    @rule(picks=PICKS)
    def delete(self, picks: list[int]) -> None:
        slots = self.some(picks[:2])
        gone = self.both(lambda rb: rb.delete(torch.tensor(slots)))
        if isinstance(gone, list):
            deleted = sorted(slot for slot, there in zip(slots, gone, strict=True) if there)
            self.model.free += deleted
            for slot in deleted:
                del self.model.rows[slot]

    @rule()
    def empty(self) -> None:
        self.both(lambda rb: rb.empty())
        self.model.rows.clear()
        self.model.free.clear()
        self.model.largest = 0.0
        self.used = []

    @rule(way=st.sampled_from(["dumps", "incremental", "state_dict", "pickle"]), of=st.sampled_from(["live", "twin"]))
    def load(self, way: str, of: str) -> None:
        """Let the twin be a copy of the live buffer, or of itself."""
        self.live.state_dict()
        source: ReplayBuffer = getattr(self, of)
        if way == "pickle":
            self.twin = pickle.loads(pickle.dumps(source))
            return
        fresh = make(self.name, self.storage)
        if way == "state_dict":
            fresh.load_state_dict(source.state_dict())
        else:
            path = Path(self.directory.name) / of
            source.dumps(path, incremental=way == "incremental" and self.saved)
            self.saved = True
            fresh.loads(path)
        self.twin = fresh

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()
            self.patch.stop()


def put(rb: Any, index: Any, rows: Any) -> int:
    rb[index] = rows
    return len(rb)


def one(rows: Any) -> Any:
    return rows[0] if isinstance(rows, list) else {key: value[0] for key, value in rows.items()}


@pytest.mark.timeout(1800)  # the slow profile takes minutes
@pytest.mark.parametrize("name", SAMPLERS)
def test_an_edited_buffer_goes_on_as_saved(name):
    machine = type("Machine", (EditMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=SETTINGS)
