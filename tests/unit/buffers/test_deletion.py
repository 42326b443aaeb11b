"""Deletion by index and generation: against a plain model, its distribution, checkpoints, and what it excludes."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    ConsumingSampler,
    HeapSampler,
    LazyTensorStorage,
    LimitedSampler,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    StackSampler,
)
from ostinato.errors import (
    EmptyBufferError,
    WaitTimeoutError,
)

from ...effort import examples

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 7
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": RandomSampler,
    "passes": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0, max_priority_within_buffer=True),
    "limited": lambda: LimitedSampler(2),
    "queue": QueueSampler,
    "stack": StackSampler,
    "heap": lambda: HeapSampler(CAPACITY),
    "popped stack": lambda: StackSampler(1),
    "popped heap": lambda: HeapSampler(CAPACITY, "min", 2),
    "consuming": lambda: ConsumingSampler(2),
}
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["write", "delete", "late", "draw", "priorities", "load", "pickle"]),
        st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=CAPACITY, unique=True),
    ),
    max_size=25,
)


def make(kind: str = "uniform", **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(3)
    storage = LazyTensorStorage(CAPACITY)
    return ReplayBuffer(
        storage=storage,
        sampler=SAMPLERS[kind](),
        writer=RoundRobinWriter(track_generations=True),
        generator=generator,
        **options,
    )


class Model:
    """Rows by slot with their generations, and free slots in the order in which rows left."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rb = make(kind)
        self.rows: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.uses: Counter[int] = Counter()
        self.queue: list[int] = []
        self.free: list[int] = []
        self.old: list[tuple[int, int]] = []
        self.used = 0
        self.next = 0

    @property
    def leaves(self) -> bool:
        return self.rb.sampler.leaves

    def leave(self, slot: int) -> None:
        self.old.append((slot, self.generations.pop(slot)))
        del self.rows[slot]
        self.free.append(slot)

    def slot(self) -> int:
        if self.free:
            return self.free.pop(0)
        if self.used < CAPACITY:
            self.used += 1
            return self.used - 1
        return min(self.rows, key=lambda slot: self.generations[slot])

    def write(self, picks: list[int]) -> None:
        values = list(range(self.next, self.next + len(picks)))
        if self.kind == "queue" and len(self.queue) + len(picks) > CAPACITY:
            with pytest.raises(WaitTimeoutError):
                self.rb.extend(torch.tensor(values), timeout_s=0.0)
            return
        self.next += len(picks)
        index = self.rb.extend(torch.tensor(values)).tolist()
        if self.leaves:  # free slots first, then at the cursor
            known = min(len(self.free), len(picks)) if len(picks) < CAPACITY else 0
            assert index[:known] == self.free[:known]
            self.free = [slot for slot in self.free if slot not in index]
        else:
            assert index == [self.slot_of(value) for value in values]
        self.store(index, values)

    def slot_of(self, value: int) -> int:
        slot = self.slot()
        self.store([slot], [value])
        return slot

    def store(self, index: list[int], values: list[int]) -> None:
        for slot, value in zip(index, values, strict=True):
            if slot in self.generations and self.rows[slot] != value:
                self.old.append((slot, self.generations[slot]))
            if self.rows.get(slot) != value:
                self.rows[slot] = value
                self.uses[slot] = 0
                self.queue.append(value)
            self.generations[slot] = value + 10**6  # ordered as they were written; read below
        found = self.rb.writer.generations_of(torch.tensor(index)).tolist()
        self.generations.update(zip(index, found, strict=True))

    def delete(self, picks: list[int]) -> None:
        picks = [slot for slot in picks if slot < len(self.rb.storage)]
        if not picks:
            return
        expected = [slot in self.rows for slot in picks]
        assert self.rb.delete(torch.tensor(picks)).tolist() == expected
        self.remove([slot for slot in picks if slot in self.rows])

    def remove(self, slots: list[int]) -> None:
        for slot in sorted(slots):
            if self.rows[slot] in self.queue:
                self.queue.remove(self.rows[slot])
            self.leave(slot)

    def late(self, picks: list[int]) -> None:
        """Rows that were replaced or deleted, and the first that is there."""
        named = self.old[-len(picks) :]
        there = [(slot, self.generations[slot]) for slot in list(self.rows)[:1]]
        named = [*named, *there]
        if named:
            index, generations = (torch.tensor(column) for column in zip(*named, strict=True))
            found = self.rb.delete(index, generations)
            assert found.tolist() == [False] * (len(named) - len(there)) + [True] * len(there)
            self.remove([slot for slot, _ in there])

    def draw(self, picks: list[int]) -> None:
        size = len(picks)
        if self.kind == "queue":
            if size <= len(self.queue):
                assert self.rb.sample(size).tolist() == self.queue[:size]
                del self.queue[:size]
            return
        limit = {"limited": 2, "popped heap": 2, "consuming": 2, "popped stack": 1}.get(self.kind)
        left = {slot: limit - self.uses[slot] for slot in self.rows} if limit else dict.fromkeys(self.rows, 1)
        enough = sum(left.values()) >= size if self.kind == "limited" else len(self.rows) >= size
        if not self.rows or (not enough and self.kind in {"limited", "stack", "heap"}):
            with pytest.raises(EmptyBufferError):
                self.rb.sample(size)
            return
        batch, info = self.rb.sample(size, return_info=True)
        drawn = info["index"].tolist()
        assert [self.rows[slot] for slot in drawn] == batch.tolist()
        if "stack" in self.kind:
            assert batch.tolist() == sorted(self.rows.values(), reverse=True)[:size]
        if limit:
            self.uses.update(drawn)
            assert all(self.uses[slot] <= limit for slot in drawn)
        if self.leaves:
            for slot in drawn:
                if self.uses[slot] == limit:
                    self.leave(slot)

    def priorities(self, picks: list[int]) -> None:
        if not self.rb.sampler.prioritized:
            return
        picks = [slot for slot in picks if slot < len(self.rb.storage)]
        if picks:
            self.rb.update_priority(torch.tensor(picks), torch.arange(1.0, 1.0 + len(picks)))
            late = torch.tensor([slot for slot, _ in self.old] or [0])
            generations = torch.tensor([generation for _, generation in self.old] or [-5])
            self.rb.update_priority(late, torch.full(late.shape, 1000.0), generations)

    def load(self, _: list[int]) -> None:
        state = self.rb.state_dict()
        self.rb = make(self.kind)
        self.rb.load_state_dict(state)

    def pickle(self, _: list[int]) -> None:
        self.rb = pickle.loads(pickle.dumps(self.rb))

    def check(self) -> None:
        assert len(self.rb) == len(self.rows)
        assert self.rb.stats().rows == len(self.rows)
        expected = [self.generations.get(slot, -1) for slot in range(self.used)]
        if not self.leaves:
            assert self.rb.writer.generations_of(torch.arange(self.used)).tolist() == expected
        if self.kind == "prioritized" and self.rows and len(self.rows) < self.used:
            seen = set(self.rb.sample(64).tolist())
            assert seen <= set(self.rows.values())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", list(SAMPLERS))
@examples(0.5)
@given(calls=CALLS)
def test_rows_are_those_of_a_model(kind: str, calls: list[tuple[str, list[int]]]) -> None:
    model = Model(kind)
    for name, picks in calls:
        getattr(model, name)(picks)
        model.check()
