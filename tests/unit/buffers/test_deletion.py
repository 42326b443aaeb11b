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
    Episodes,
    HeapSampler,
    LazyTensorStorage,
    LimitedSampler,
    NStep,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    StackSampler,
)
from ostinato.buffers.as_dataset import buffer_as_dataset
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    KeyMissingError,
    OptionError,
    SchemaError,
    SlotError,
    UsageError,
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


@pytest.mark.parametrize("kind", list(SAMPLERS))
@examples(0.5)
@given(calls=CALLS)
def test_rows_are_those_of_a_model(kind: str, calls: list[tuple[str, list[int]]]) -> None:
    model = Model(kind)
    for name, picks in calls:
        getattr(model, name)(picks)
        model.check()


def test_a_pass_goes_on_without_the_deleted_rows() -> None:
    rb = make("passes", batch_size=2)
    rb.extend(torch.arange(7))
    first = rb.sample().tolist()
    gone = [i for i in range(7) if i not in first][:2]
    rb.delete(torch.tensor(gone))
    rest = [rb.sample().tolist(), rb.sample(1).tolist()]
    assert sorted([*first, *rest[0], *rest[1]]) == [i for i in range(7) if i not in gone]
    assert sorted(row for batch in rb for row in batch.tolist()) == [i for i in range(7) if i not in gone]


def test_prefetched_batches_with_deleted_rows_are_drawn_again() -> None:
    with make("uniform", batch_size=3, prefetch=3) as rb:
        rb.extend(torch.arange(7))
        for start in range(4):
            rb.sample()
            rb.delete(torch.tensor([start]))
            assert all(start < int(rb.sample().min()) for _ in range(6))


def test_a_sample_names_the_rows_to_delete() -> None:
    rb = make("prioritized", batch_size=2)
    rb.extend(torch.arange(7))
    _, info = rb.sample(return_info=True)
    rb.extend(torch.arange(7, 10))  # replaces slots 0 to 2
    found = rb.delete(info)
    assert torch.equal(found, info["index"] > 2)
    assert rb.delete({"index": [3], "index_generation": [4]}).tolist() == [3 not in info["index"]]
    with pytest.raises(KeyMissingError):
        rb.delete({"slot": torch.arange(2)})


def test_a_deleted_row_gets_no_priority_and_sets_no_default() -> None:
    rb = make("prioritized", batch_size=2)
    index = rb.extend(torch.arange(4))
    rb.update_priority(index, [1.0, 2.0, 9.0, 3.0])
    rb.delete(2)
    rb.update_priority(2, 50.0)
    rb.mark_update(2)
    assert rb.sampler.default_priority == 3.0
    assert rb.extend(torch.tensor([4])).tolist() == [2]
    assert set(rb.sample(64).tolist()) == {0, 1, 3, 4}
    assert rb.delete([3, 3, -1]).tolist() == [True, True, False]


def test_what_is_written_to_the_slot_of_a_deleted_row_is_no_row() -> None:
    for kind in ("uniform", "prioritized", "heap", "stack", "limited"):
        rb = make(kind, batch_size=2)
        rb.extend(torch.arange(4))
        rb.delete([1, 2])
        rb[:] = torch.arange(10, 14)
        assert rb[:].tolist() == [10, 11, 12, 13]
        assert len(rb) == 2
        assert set(rb.sample(2).tolist()) | set(rb.sample(2).tolist()) <= {10, 13}
        assert rb.extend(torch.tensor([5, 6])).tolist() == [1, 2]
        assert set(rb.sample(4).tolist()) <= {10, 13, 5, 6}


def test_another_sampler_goes_on_without_the_deleted_rows() -> None:
    rb = make("uniform")
    rb.extend(torch.arange(6))
    rb.delete([1, 4])
    for kind in [*SAMPLERS, "uniform"]:
        rb.set_sampler(SAMPLERS[kind]())
        assert len(rb) == 4
        assert set(rb.sample(4).tolist()) <= {0, 2, 3, 5}
    rb.delete([0])
    assert sorted(rb.extend(torch.arange(6, 9)).tolist()) == [0, 1, 4]
    with pytest.raises(OptionError, match="drop_last"):
        ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2, sampler=SamplerWithoutReplacement(True)).delete([0])
    with pytest.raises(OptionError, match="ReservoirWriter"):
        rb.set_writer(ReservoirWriter())


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "limited", "stack", "heap"])
def test_a_buffer_of_another_size_takes_deleted_rows_over(kind: str) -> None:
    rb = make(kind)
    rb.extend(torch.arange(10))
    rb.delete([1, 5])
    sized: dict[str, Any] = {
        "heap": HeapSampler(12),
        "prioritized": PrioritizedSampler(12, alpha=1.0, beta=1.0, max_priority_within_buffer=True),
    }
    sampler = sized.get(kind) or SAMPLERS[kind]()
    big = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=2)
    big.load_state_dict(rb.state_dict())
    assert len(big) == 5
    assert set(big.sample(5).tolist()) <= {3, 4, 6, 7, 9}
    index = big.extend(torch.arange(10, 20)).tolist()
    assert {big[slot].item() for slot in index} == set(range(10, 20))


def test_damaged_checkpoints_are_refused() -> None:
    rb, other = make("uniform"), make("uniform")
    rb.extend(torch.arange(7))
    rb.delete([1, 5])
    other.extend(torch.arange(3))
    other.delete([0])
    for wrong in (torch.tensor([1]), torch.tensor([1, 4]), torch.tensor([1.0, 5.0]), torch.tensor([1, 5, 5])):
        state = rb.state_dict()
        state["deleted"]["free"] = wrong
        with pytest.raises(CheckpointError, match="deleted rows"):
            other.load_state_dict(state)
        assert len(other) == 2
    assert other.extend(torch.tensor([9])).tolist() == [0]


def test_what_rows_cannot_be_deleted_from() -> None:
    unit = {"sample_unit": NStep(2, 0.9, reward_key="gain"), "episodes": Episodes(end_key="done")}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"storage": LazyTensorStorage(8, single_copy=True)}, OptionError, "single_copy"),
        ({"writer": ReservoirWriter()}, OptionError, "ReservoirWriter"),
        ({"episodes": Episodes(end_key="done")}, OptionError, "mask_key"),
        (unit, OptionError, "sample_unit"),
        ({"sampler": SliceSampler(slice_len=2, end_key="done")}, OptionError, "slice samplers"),
        ({"sampler": SamplerWithoutReplacement(endless=True)}, OptionError, "endless"),
        ({"sampler": SamplerWithoutReplacement(drop_last=True), "batch_size": 2}, OptionError, "drop_last"),
        ({"shared": True}, UsageError, "shared=True"),
    ]
    for options, error, words in cases:
        rb = ReplayBuffer(**{"storage": LazyTensorStorage(8), **options})
        done = torch.zeros(4, dtype=torch.bool)
        rb.extend({"x": torch.arange(4), "next_x": torch.arange(1, 5), "gain": torch.ones(4), "done": done})
        with pytest.raises(error, match=words):
            rb.delete([0, 1])
        assert len(rb) == 4
    grid = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    grid.extend({"x": torch.zeros(2, 4)})
    with pytest.raises(OptionError, match="ndim=1"):
        grid.delete([[0, 1]])
    assert len(grid) == 8


def test_wrong_arguments_change_nothing() -> None:
    rb = make("uniform")
    rb.extend(torch.arange(4))
    with pytest.raises(SlotError, match="out of range"):
        rb.delete([0, CAPACITY])
    with pytest.raises(SlotError):
        rb.delete([-2])
    with pytest.raises(SchemaError, match="generation"):
        rb.delete([0, 1], [1])
    with pytest.raises(TypeError):
        rb.delete(0.5)
    assert rb.delete([CAPACITY - 1]).tolist() == [False]
    assert rb.delete(torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert len(rb) == 4
    assert make("uniform").delete([0]).tolist() == [False]


def test_trajectories_are_those_of_the_rows_present() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend({"episode": torch.tensor([0, 0, 1, 1, 1, 2]), "x": torch.arange(6)})
    rb.delete([3, 5])
    rb.extend({"episode": torch.tensor([2, 2]), "x": torch.arange(6, 8)})
    assert [found.get("x").tolist() for found in rb.query()] == [[0, 1], [2, 4], [6, 7]]
    with pytest.raises(UsageError, match="left this buffer"):
        buffer_as_dataset(rb)
