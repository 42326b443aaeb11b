"""Streaming slices: the queue against a plain model, the draws after it, copies, and what it does not go with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import LazyTensorStorage, ReplayBuffer, SliceSampler, StreamingSliceSampler
from ostinato.errors import (
    CapacityError,
    CheckpointError,
    EmptyBufferError,
    OptionError,
    UsageError,
)

from ...effort import examples
from ...registry import seeded
from ..buffers.refusals import raises

CAPACITY = 8


def make(slice_len: int = 3, slices: int = 1, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    sampler = StreamingSliceSampler(slice_len=slice_len, **({"end_key": "done"} | options))
    storage, size = LazyTensorStorage(capacity), slice_len * slices
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=size, generator=seeded(2))


def rows(first: int, done: list[bool], **more: Any) -> dict[str, Any]:
    return {"t": torch.arange(first, first + len(done)), "done": torch.tensor(done), **more}


class Model:
    """The windows of one stream, in the order of writing."""

    def __init__(self, length: int) -> None:
        self.length, self.queue = length, list[list[int]]()
        self.pending: list[int] = []
        self.count = 0

    def write(self, done: list[bool]) -> None:
        kept = range(max(0, len(done) - CAPACITY), len(done))
        end = self.count + len(done)
        if self.pending and self.pending[0] < end - CAPACITY:
            self.pending = []  # rows of it were replaced: the next window begins with the new rows
        for i in kept:
            self.pending.append(self.count + i)
            if len(self.pending) == self.length:
                self.queue.append(self.pending)
                self.pending = []
            if done[i]:
                self.pending = []
        self.count = end
        self.queue = [window for window in self.queue if window[0] >= end - CAPACITY]


WRITES = st.lists(st.booleans() | st.just(False), min_size=1, max_size=CAPACITY + 2)


@examples(1)
@given(st.lists(WRITES | st.integers(1, 3), max_size=20), st.integers(1, 4), st.sampled_from([0, 4]))
def test_new_windows_come_first_each_once(calls, length, larger):
    buffer, model = make(length), Model(length)
    for call in calls:
        if isinstance(call, list):
            buffer.extend(rows(model.count, call))
            model.write(call)
            continue
        expected, model.queue = model.queue[:call], model.queue[call:]
        if len(expected) == call:
            assert buffer.sample(call * length)["t"].tolist() == [row for window in expected for row in window]
        elif expected:
            found = buffer.sample(call * length)["t"].view(call, length)
            assert found[: len(expected)].tolist() == expected
            assert bool((found.diff() == 1).all())
    state = buffer.state_dict()
    other = make(length, capacity=CAPACITY + larger)
    other.load_state_dict(state)
    for window in model.queue:
        assert other.sample()["t"].tolist() == window


def test_after_the_queue_draws_are_those_of_a_slice_sampler():
    buffer, plain = make(2, capacity=20), SliceSampler(slice_len=2, end_key="done")
    buffer.extend(rows(0, [False, False, True, False, False, False, False, True]))
    with pytest.raises(UsageError):
        buffer.sample(3)
    assert [buffer.sample()["t"].tolist() for _ in range(3)] == [[0, 1], [3, 4], [5, 6]]  # row 7 is in no window
    buffer.extend(rows(8, [False, True]))
    generator: Any = buffer._engine.generator
    same = torch.Generator().set_state(generator.get_state())
    found = buffer.sample(80)["t"].view(40, 2)
    assert found[0].tolist() == [8, 9]
    assert found[1:, 0].tolist() == plain.draw(buffer._engine.view(), 78, same).slots.tolist()


def test_flags_and_masks_are_those_of_slices():
    buffer = make(3, 2, capacity=20, strict_length=False, pad_output=True)
    buffer.extend({**rows(0, [False, False, False, True]), "is_init": torch.zeros(4, dtype=torch.bool)})
    batch, info = buffer.sample(return_info=True)
    assert batch["t"][:3].tolist() == [0, 1, 2]
    assert info["collector", "mask"].shape == (6,)
    assert info["next", "truncated"].flatten()[:3].tolist() == [False, False, True]
    assert info["is_init"].flatten()[:3].tolist() == [True, False, False]


def test_interleaved_episodes_have_windows_of_their_own():
    buffer = make(2, capacity=20, end_key=None, traj_key="episode")
    buffer.extend({"t": torch.arange(8), "episode": torch.tensor([0, 1, 0, 1, 2, 0, 1, 0])})
    assert buffer.sample(6)["t"].tolist() == [0, 2, 1, 3, 5, 7]
    buffer.extend({"t": torch.arange(8, 10), "episode": torch.tensor([2, 1])})
    assert buffer.sample(4)["t"].tolist() == [4, 8, 6, 9]


def test_edits_of_ends_drop_windows_and_rows_that_were_there_before_are_in_no_window():
    buffer = make(2)
    buffer.extend(rows(0, [False] * 5))
    buffer.set_at_("done", torch.tensor([True]), [0])  # the window 0, 1 is in two episodes now
    assert buffer.sample()["t"].tolist() == [2, 3]
    buffer.set_at_("done", torch.tensor([True]), [4])  # the stream ends: row 4 is in no window
    buffer.extend(rows(5, [False] * 2))
    assert buffer.sample()["t"].tolist() == [5, 6]
    other = make(2)
    other.set_storage(buffer.storage)
    other.extend(rows(7, [False] * 2))
    assert other.sample()["t"].tolist() == [7, 8]
    other.empty()
    with pytest.raises(EmptyBufferError):
        other.sample()


def test_errors():
    raises(
        (lambda: StreamingSliceSampler(slice_len=0), OptionError, "slice_len must be a positive integer"),
        (lambda: make(3, capacity=2), CapacityError, "max_size >= 3"),
    )


def test_states_are_checked(tmp_path):
    buffer = make(2)
    buffer.extend(rows(0, [False] * 5))
    buffer.sampler.dumps(tmp_path)
    windows = [buffer.sample()["t"].tolist() for _ in range(2)]
    buffer.sampler.loads(tmp_path)
    assert windows == [buffer.sample()["t"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    sampler = make(2).sampler
    state = sampler.state_dict()
    with pytest.raises(UsageError):
        StreamingSliceSampler(slice_len=3).load_state_dict(state)
    with pytest.raises(CheckpointError):
        StreamingSliceSampler(slice_len=3).check_state(state, 4)
    for damage in ({"queue": torch.tensor([[9, 1]])}, {"places": torch.tensor([2], dtype=torch.int32)}):
        with pytest.raises(CheckpointError):
            sampler.check_state({**state, **damage}, 4)
