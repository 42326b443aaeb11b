"""Stacks and heaps: against sorted lists, with rows that leave, undone draws, states and windows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    ConsumingSampler,
    Episodes,
    HeapSampler,
    LazyTensorStorage,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SequenceUnit,
    StackSampler,
    TensorDictReplayBuffer,
)
from ostinato.core import rank_order
from ostinato.errors import (
    CapacityError,
    CheckpointError,
    EmptyBufferError,
    KindError,
    OptionError,
    PriorityError,
    SlotError,
    TooFewRowsError,
    WaitTimeoutError,
)

from ...effort import examples

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 6
KINDS: dict[str, Any] = {
    "stack": lambda most: StackSampler(most),
    "max": lambda most: HeapSampler(CAPACITY, "max", most),
    "min": lambda most: HeapSampler(CAPACITY, "min", most),
}
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "draw", "draw", "fail", "priorities", "edit", "load"]),
        st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=CAPACITY),
    ),
    max_size=30,
)


class Failing:
    """A transform that raises if it is asked to."""

    raises = False

    def __call__(self, batch: Any) -> Any:
        if self.raises:
            raise ValueError
        return batch


def make(kind: str, most: int | None, **options: Any) -> ReplayBuffer:
    sampler = ConsumingSampler(most or 3) if kind == "consuming" else KINDS[kind](most)
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, **options)


class Model:
    """Values, priorities, ages and draws by slot."""

    def __init__(self, kind: str, most: int | None) -> None:
        self.kind, self.most = kind, 3 if kind == "consuming" and most is None else most
        self.failing = Failing()
        self.rb = make(kind, most, transform=self.failing)
        self.rows: dict[int, int] = {}
        self.ages: dict[int, int] = {}
        self.priorities_of: dict[int, float] = {}
        self.uses: Counter[int] = Counter()
        self.left: list[int] = []
        self.serial = 0
        self.largest = 0.0

    def ranked(self) -> list[int]:
        key: dict[str, Any] = {
            "consuming": lambda slot: slot,
            "stack": lambda slot: -self.ages[slot],
            "max": lambda slot: (-self.priorities_of[slot], self.ages[slot]),
            "min": lambda slot: (self.priorities_of[slot], self.ages[slot]),
        }
        return sorted(self.rows, key=key[self.kind])

    def write(self, picks: list[int]) -> None:
        values = list(range(self.serial, self.serial + len(picks)))
        index = self.rb.extend(torch.tensor(values)).tolist()
        assert len(picks) == CAPACITY or index[: len(self.left)] == self.left[: len(index)]
        for slot, value in zip(index, values, strict=True):
            self.serial += 1
            self.rows[slot], self.ages[slot], self.uses[slot] = value, self.serial, 0
            self.priorities_of[slot] = self.largest or 1.0
        self.left = [slot for slot in self.left if slot not in index]

    def draw(self, picks: list[int]) -> None:
        expected = self.ranked()[: len(picks)]
        if len(expected) < (len(picks) if self.most is None else 1):
            with pytest.raises(EmptyBufferError):
                self.rb.sample(len(picks))
            return
        batch, info = self.rb.sample(len(picks), return_info=True)
        if self.kind == "consuming":  # in random order, each once
            number, expected = len(expected), info["index"].tolist()
            assert len(expected) == len({*expected} & self.rows.keys()) == number
        assert info["index"].tolist() == expected
        assert batch.tolist() == [self.rows[slot] for slot in expected]
        if self.most is not None:
            self.uses.update(expected)
            for slot in expected:
                if self.uses[slot] == self.most:
                    del self.rows[slot]
                    self.left.append(slot)

    def fail(self, picks: list[int]) -> None:
        if len(self.rows) >= len(picks):
            self.failing.raises = True
            with pytest.raises(ValueError):
                self.rb.sample(len(picks))
            self.failing.raises = False

    def priorities(self, picks: list[int]) -> None:
        if self.kind not in {"max", "min"}:
            return
        slots = sorted({slot for slot in picks if slot < len(self.rb.storage)})
        if slots:
            values = [float(pick) - 2 for pick in picks[: len(slots)]]
            self.rb.update_priority(torch.tensor(slots), torch.tensor(values))
            self.priorities_of.update(zip(slots, values, strict=True))
            self.largest = max(self.largest, *values)

    def edit(self, picks: list[int]) -> None:
        slot = picks[0]
        if slot in self.rows:
            self.rb[slot] = torch.tensor(self.serial)
            self.serial += 1
            self.rows[slot] = self.serial - 1  # in the place of the row before
            self.priorities_of[slot] = self.largest or 1.0

    def load(self, _: list[int]) -> None:
        state = self.rb.state_dict()
        self.rb = make(self.kind, self.most, transform=self.failing)
        self.rb.load_state_dict(state)

    def check(self) -> None:
        if self.most is not None:
            assert len(self.rb) == len(self.rows)
            assert len(self.rb.storage) == len(self.rows) + len(self.left)


@pytest.mark.parametrize("kind", [*KINDS, "consuming"])
@examples(0.8)
@given(most=st.sampled_from([None, 1, 2]), calls=CALLS, few=st.sampled_from([0, 2, 1024]))
def test_batches_are_those_of_a_sorted_list(
    kind: str, most: int | None, calls: list[tuple[str, list[int]]], few: int
) -> None:
    """Changes of a few rows go to a heap beside the sorted rows, of more they are sorted anew."""
    model = Model(kind, most)
    with mock.patch.object(rank_order, "_FEW", few):
        for name, picks in calls:
            getattr(model, name)(picks)
            model.check()


def test_a_stack_and_a_queue_of_priorities_as_in_reverb() -> None:
    """`reverb.Table.stack` and a table with MaxHeap, `max_times_sampled=1` and a limiter."""
    limiter = RateLimiter(samples_per_insert=1, min_diff=0, max_diff=3, timeout_s=0.0)
    stack = make("stack", 1, batch_size=1, rate_limiter=limiter)
    stack.extend(torch.arange(3))
    with pytest.raises(WaitTimeoutError):
        stack.extend(torch.tensor([3]))
    assert [stack.sample().item() for _ in range(3)] == [2, 1, 0]
    with pytest.raises(WaitTimeoutError):
        stack.sample()
    heap = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=HeapSampler(CAPACITY, "max", 1), batch_size=2, priority_key="p"
    )
    heap.extend(TensorDict({"x": torch.arange(4), "p": torch.tensor([1.0, 5.0, -3.0, 2.0])}, [4]))
    assert [batch["x"].tolist() for batch in heap] == [[1, 3], [0, 2]]
    assert len(heap) == 0
    assert not heap.can_sample()


@pytest.mark.parametrize("kind", ["stack", "min"])
def test_rows_that_were_there_before_and_windows_that_are_whole(kind: str) -> None:
    storage = LazyTensorStorage(CAPACITY)
    storage.set(range(4), torch.arange(4))
    rb = ReplayBuffer(storage=storage, sampler=KINDS[kind](None), batch_size=2)
    assert rb.sample().tolist() == ([3, 2] if kind == "stack" else [0, 1])
    other = LazyTensorStorage(CAPACITY)
    other.set(range(2), torch.arange(10, 12))
    rb.set_storage(other)
    assert rb.sample().tolist() == ([11, 10] if kind == "stack" else [10, 11])
    rb = make(kind, None, batch_size=2, sample_unit=SequenceUnit(2, "strict"), episodes=Episodes(end_key="done"))
    rb.extend({"x": torch.arange(5), "done": torch.tensor([False, False, True, False, False])})
    first = rb.sample()["x"].reshape(2, 2)[:, 0].tolist()
    assert first == ([3, 1] if kind == "stack" else [0, 1])
    with pytest.raises(TooFewRowsError):
        rb.sample(5)


def test_states_of_other_options_and_damaged_ones() -> None:
    rb = make("max", 2)
    rb.extend(torch.arange(5))
    rb.sample(2)
    for other in (make("min", 2), make("max", None), make("max", 3), make("stack", 2)):
        with pytest.raises(CheckpointError):
            other.load_state_dict(rb.state_dict())
    for name, value in (
        ("priorities", torch.full((5,), torch.inf, dtype=torch.float64)),
        ("priorities", torch.zeros(4, dtype=torch.float64)),
        ("largest", -1.0),
        ("uses", torch.full((5,), 3, dtype=torch.int32)),
        ("uses", torch.zeros(5)),
        ("free", torch.tensor([0])),
    ):
        state = rb.state_dict()
        state["sampler"]["state"][name] = value
        with pytest.raises(CheckpointError, match="damaged"):
            make("max", 2).load_state_dict(state)


WRONG: list[tuple[Callable[[], Any], type[Exception]]] = [
    (lambda: StackSampler(0), OptionError),
    (lambda: StackSampler(1.5), KindError),  # type: ignore[arg-type]
    (lambda: HeapSampler(0), CapacityError),
    (lambda: HeapSampler(8, "best"), OptionError),  # type: ignore[arg-type]
    (lambda: HeapSampler(8, reduction="sum"), OptionError),
    (lambda: ReplayBuffer(storage=LazyTensorStorage(4, ndim=2), sampler=StackSampler(1)), OptionError),
    (lambda: ReplayBuffer(sampler=StackSampler(1), writer=ReservoirWriter()), KindError),
    (lambda: ReplayBufferEnsemble(make("stack", 1), make("stack", 1), batch_size=2), OptionError),
    (lambda: ReplayBuffer(storage=LazyTensorStorage(8), sampler=HeapSampler(4)).extend(torch.arange(5)), SlotError),
    (lambda: HeapSampler(4).update_priority([0], float("nan")), PriorityError),
    (lambda: make("stack", 1, sample_unit=SequenceUnit(2)), OptionError),
    (lambda: make("max", 1, batch_size=2, prefetch=2), OptionError),
]


def test_wrong_options_and_parts_that_do_not_go_together() -> None:
    for call, error in WRONG:
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("kind", ["stack", "max", "consuming"])
def test_a_buffer_that_is_emptied_during_a_draw_delivers_it(kind: str) -> None:
    rb = make(kind, 1, batch_size=2)
    rb.extend(torch.arange(4))

    def empty_meanwhile(batch: torch.Tensor) -> torch.Tensor:
        rb.empty()
        return batch

    rb.append_transform(empty_meanwhile)
    assert rb.sample().shape == (2,)
    assert len(rb) == 0
