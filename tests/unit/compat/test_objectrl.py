"""The buffer of ObjectRL: each method of its specification, and its sizes."""

from __future__ import annotations

import gc
import resource
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import LazyMemmapStorage
from ostinato.compat.objectrl import ReplayBuffer
from ostinato.errors import (
    EmptyBufferError,
    EpochEndError,
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
    SlotError,
    StorageMemoryError,
    UsageError,
)

if TYPE_CHECKING:
    from pathlib import Path


CPU = torch.device("cpu")


def rows(first: int, count: int) -> TensorDict:
    """Rows that say which they are, nested as ObjectRL's may be."""
    number = torch.arange(first, first + count)
    return TensorDict(
        {"obs": number[:, None] * torch.ones(3), "id": number, "next": TensorDict({"obs": number + 0.5}, [count])},
        [count],
    )


def ids(batch: TensorDict) -> list[int]:
    assert (batch["obs"] == batch["id"][:, None]).all()
    assert (batch["next", "obs"] == batch["id"] + 0.5).all()
    return batch["id"].tolist()  # type: ignore[no-any-return]


def filled(count: int, size: int = 10) -> ReplayBuffer:
    buffer = ReplayBuffer(device=CPU, storing_device=CPU, buffer_size=size)
    buffer.add_batch(rows(0, count))
    return buffer


# -- writing and numbers ---------------------------------------------------------------------------------------


@given(size=st.integers(1, 8), script=st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_it_is_a_ring(size: int, script: list[int]) -> None:
    """0 adds a single row, other numbers batches."""
    buffer, model, total = ReplayBuffer(CPU, CPU, size), dict[int, int](), 0
    for count in script:
        if count == 0:
            buffer.add(rows(total, 1)[0])
        else:
            buffer.add_batch(rows(total, count))
        for _ in range(max(count, 1)):
            model[total % size] = total
            total += 1
        assert (len(buffer), buffer.size, buffer.data_size) == (len(model),) * 3
        assert buffer.pointer == total % size
        assert ids(buffer.sample_all()) == [model[slot] for slot in range(len(model))]


def test_setting_the_capacity_keeps_the_newest_rows() -> None:
    buffer = filled(13)
    buffer.buffer_size = 4
    assert (ids(buffer.sample_all()), buffer.pointer, buffer.buffer_size) == ([9, 10, 11, 12], 0, 4)
    buffer.buffer_size = 6
    buffer.add_batch(rows(13, 3))
    assert ids(buffer.sample_all()) == [15, 10, 11, 12, 13, 14]
    with pytest.raises(OptionError, match="buffer_size must be at least 1, got 0"):
        buffer.buffer_size = 0
    buffer.storing_device = CPU
    assert ids(buffer.sample_all()) == [10, 11, 12, 13, 14, 15]


def test_setting_the_pointer_moves_the_next_write(tmp_path: Path) -> None:
    buffer, other = filled(5), filled(0)
    buffer.pointer = 2
    buffer.add_batch(rows(20, 2))
    assert (ids(buffer.sample_all()), buffer.pointer) == ([0, 1, 20, 21, 4], 4)
    buffer.save(str(tmp_path / "buffer"))
    other.load(str(tmp_path / "buffer"))
    other.add(rows(40, 1)[0])
    assert (ids(other.sample_all()), other.pointer) == ([0, 1, 20, 21, 40], 5)
    buffer.pointer = 5
    buffer.add(rows(30, 1)[0])
    assert ids(buffer.sample_all()) == [0, 1, 20, 21, 4, 30]
    for bad in (7, -1, 1.0, True):
        with pytest.raises(OptionError, match=r"pointer must be in \[0, 6\]"):
            buffer.pointer = bad  # type: ignore[assignment]


def test_reset_forgets_rows_form_and_capacity() -> None:
    buffer = filled(7)
    buffer.reset()
    assert (len(buffer), buffer.pointer, buffer.buffer_size) == (0, 0, 10)
    buffer.add_batch(TensorDict({"other": torch.zeros(3, 2)}, [3]))
    buffer.reset(4)
    assert (len(buffer), buffer.buffer_size) == (0, 4)
    buffer.add_batch(rows(0, 9))
    assert len(buffer) == 4


class _Cycle:
    """Garbage that holds what a write needs: the limit on file sizes is lifted when it goes."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits, self.me = (soft, hard), self

    def __del__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.mark.parametrize("told", [False, True])
def test_a_write_that_fails_is_tried_again_after_garbage_collection(told: bool) -> None:
    buffer = ReplayBuffer(CPU, CPU, 1000, print_gc_warning=told)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.disable()
    try:
        _Cycle(*limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            buffer.add_batch(rows(0, 5))
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ids(buffer.sample_all()) == [0, 1, 2, 3, 4]
    said = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert (len(said) == 1 and "repeating it after garbage collection" in said[0]) if told else not said
    buffer = ReplayBuffer(CPU, CPU, 1000)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        with pytest.raises(StorageMemoryError, match="bytes needed"):  # twice
            buffer.add_batch(rows(0, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (len(buffer), buffer.pointer) == (0, 0)


def test_fields_by_index_are_a_tensor_or_a_tuple() -> None:
    buffer = filled(6)
    one = buffer.sample_by_index_fields([0, 5], fields=["id"])
    assert isinstance(one, torch.Tensor)
    assert one.tolist() == [0, 5]
    several = buffer.sample_by_index_fields(range(2), ["obs", ("next", "obs")])  # type: ignore[list-item]
    assert isinstance(several, tuple)
    assert [x.tolist() for x in several] == [[[0.0] * 3, [1.0] * 3], [0.5, 1.5]]
    one.fill_(9)
    assert ids(buffer.sample_all()) == list(range(6))


# -- epochs --------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 12), batch=st.integers(1, 15), epochs=st.integers(1, 3))
def test_epochs_give_every_row_once_and_as_many_batches_as_announced(count: int, batch: int, epochs: int) -> None:
    buffer = filled(count, 12)
    steps = buffer.get_steps_and_iterator(n_epochs=epochs, max_iter=7, batch_size=batch)
    assert steps == epochs * buffer.calculate_num_batches(batch)
    drawn = [ids(buffer.get_next_batch(99)) for _ in range(steps)]
    with pytest.raises(EpochEndError, match=f"all {steps} batches were returned"):
        buffer.get_next_batch(99)
    for epoch in range(epochs):
        batches = drawn[epoch * steps // epochs : (epoch + 1) * steps // epochs]
        assert sorted(row for one in batches for row in one) == list(range(count))
        assert {len(one) for one in batches[:-1]} <= {batch}


def test_the_iterator_and_next_batch_are_one() -> None:
    buffer = filled(9)
    iterator = buffer.create_epoch_iterator(batch_size=3)
    drawn = ids(next(iterator)) + ids(buffer.get_next_batch(1)) + ids(next(iterator))
    assert sorted(drawn) == list(range(9))
    assert list(iterator) == []
    with pytest.raises(StopIteration):  # old loops catch this
        buffer.get_next_batch(1)


def test_rows_added_in_an_epoch_wait_for_the_next_call() -> None:
    buffer = filled(6)
    iterator = buffer.create_epoch_iterator(4)
    drawn = ids(next(iterator))
    buffer.add_batch(rows(6, 2))
    assert sorted(drawn + [row for batch in iterator for row in ids(batch)]) == list(range(6))
    assert buffer.calculate_num_batches(4) == 2


def test_an_iterator_over_rows_that_are_gone_says_so() -> None:
    buffer = filled(6)
    iterator = buffer.create_epoch_iterator(4)
    buffer.reset()
    with pytest.raises(UsageError, match="reset, resized or loaded since"):
        next(iterator)
    buffer.add_batch(rows(0, 2))
    assert len(ids(buffer.get_next_batch(3))) == 3  # random: its iterator is gone


def test_reads_by_index_are_copies() -> None:
    buffer = filled(6)
    many: list[Any] = [[4, 0, 0, -1], torch.tensor([4, 0, 0, 5]), torch.tensor([4, 0, 0, 5]).int()]
    for indices in many:
        assert ids(buffer.sample_by_index(indices)) == [4, 0, 0, 5]
    assert ids(buffer.sample_by_index(range(1, 6, 2))) == [1, 3, 5]
    assert ids(buffer.sample_by_index([])) == []
    batch = buffer.sample_batch(200)
    assert set(ids(batch)) == set(ids(buffer.sample_random(200))) == set(range(6))
    assert torch.equal(batch["index"], batch["id"])
    for batch in (buffer.sample_all(), buffer.sample_batch(6), buffer.sample_by_index(range(6))):
        batch["id"].fill_(-1)
    assert ids(buffer.sample_all()) == list(range(6))
    assert type(buffer._memory.storage) is LazyMemmapStorage
    buffer.device = torch.device("meta")
    assert buffer.sample_batch(2).device == torch.device("meta")
    assert buffer.sample_by_index_fields([0], ["id"]).device == torch.device("meta")  # type: ignore[union-attr]


def test_errors_change_nothing() -> None:
    empty, buffer = filled(0), filled(6)
    two = rows(0, 2)
    calls: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: ReplayBuffer(CPU, torch.device("meta"), 10),
            OptionError,
            "storing_device must be a CPU or CUDA device",
        ),
        (lambda: setattr(buffer, "storing_device", torch.device("meta")), OptionError, "got meta"),
        (lambda: buffer.add_batch({"obs": torch.zeros(2, 3)}), KindError, "takes TensorDicts"),
        (lambda: buffer.add_batch(two.select("obs")), KeyMissingError, "missing"),
        (lambda: buffer.add_batch(two.set("obs", torch.zeros(2, 4))), SchemaError, "field 'obs' must be float32"),
        (
            lambda: setattr(buffer, "data_size", 7),
            OptionError,
            r"data_size must be in \[0, 6\], got 7: add rows, or load",
        ),
        (lambda: buffer.sample_by_index_fields([0], ["action"]), KeyMissingError, "no field 'action'"),
        (lambda: empty.sample_batch(2), EmptyBufferError, "empty"),
        (lambda: empty.get_next_batch(2), EmptyBufferError, "empty"),
        (lambda: empty.sample_all(), UsageError, "holds no rows"),
        (lambda: buffer.get_steps_and_iterator(-1, 0, 4), OptionError, "must be"),
        (lambda: buffer.get_steps_and_iterator(1, 0, 0), OptionError, "must be"),
        (lambda: buffer.get_steps_and_iterator(0, -1, 4), OptionError, "must be"),
    ]
    for indices, error in (
        ([0, 6], SlotError),
        ([-7], SlotError),
        (2, KindError),
        (torch.zeros(2, 2).long(), KindError),
    ):
        calls.append((lambda indices=indices: buffer.sample_by_index(indices), error, ""))
        calls.append((lambda indices=indices: buffer.sample_by_index_fields(indices, ["id"]), error, ""))
    refused: list[Any] = ["obs", [], None]
    calls += [
        (lambda bad=bad: buffer.sample_by_index_fields([0], bad), KindError, "fields must be a list of names")
        for bad in refused
    ]
    for call, kind, says in calls:
        with pytest.raises(kind, match=says):
            call()
    assert (ids(buffer.sample_all()), buffer.pointer, buffer.storing_device) == (list(range(6)), 6, CPU)
    assert (empty.calculate_num_batches(4), list(empty.create_epoch_iterator(4))) == (0, [])
    assert empty.get_steps_and_iterator(3, 0, 4) == 0
    buffer.data_size = 3
    assert (ids(buffer.sample_all()), buffer.pointer) == ([0, 1, 2], 3)


def test_without_an_iterator_batches_are_random() -> None:
    buffer = filled(9)
    assert buffer.get_next_batch(20).batch_size == torch.Size([20])
    first, second = (ids(batch) for batch in buffer.create_epoch_iterator(9, 2))
    assert first != second
    assert buffer.get_steps_and_iterator(n_epochs=0, max_iter=5, batch_size=3) == 5
    assert buffer.get_next_batch(20).batch_size == torch.Size([20])
