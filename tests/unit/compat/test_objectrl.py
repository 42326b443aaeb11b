"""The buffer of ObjectRL: each method of its specification, and its sizes."""

from __future__ import annotations

import gc
import resource
import warnings
from typing import Any

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
    SlotError,
    StorageMemoryError,
    UsageError,
)

from ..buffers.refusals import raises

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
def test_it_is_a_ring(size, script):
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


def test_setting_sizes_and_resetting():
    buffer = filled(13)
    buffer.buffer_size = 4  # keeps the newest rows
    assert (ids(buffer.sample_all()), buffer.pointer, buffer.buffer_size) == ([9, 10, 11, 12], 0, 4)
    buffer.buffer_size = 6
    buffer.add_batch(rows(13, 3))
    assert ids(buffer.sample_all()) == [15, 10, 11, 12, 13, 14]
    buffer.storing_device = CPU
    assert ids(buffer.sample_all()) == [10, 11, 12, 13, 14, 15]
    buffer.data_size = 3  # keeps the first slots
    assert (ids(buffer.sample_all()), buffer.pointer) == ([10, 11, 12], 3)
    buffer.reset()
    assert (len(buffer), buffer.pointer, buffer.buffer_size) == (0, 0, 6)
    buffer.add_batch(TensorDict({"other": torch.zeros(3, 2)}, [3]))
    buffer.reset(4)
    assert (len(buffer), buffer.buffer_size) == (0, 4)
    buffer.add_batch(rows(0, 9))
    assert len(buffer) == 4


def test_setting_the_pointer_moves_the_next_write(tmp_path):
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


class _Cycle:
    """Garbage that holds what a write needs: the limit on file sizes is lifted when it goes."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits, self.me = (soft, hard), self

    def __del__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.mark.parametrize("told", [False, True])
def test_a_write_that_fails_is_tried_again_after_garbage_collection(told):
    buffer, other = (ReplayBuffer(CPU, CPU, 1000, print_gc_warning=told) for _ in range(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.disable()
    try:
        _Cycle(*limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            buffer.add_batch(rows(0, 5))
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
            said = [str(w.message) for w in caught if w.category is RuntimeWarning]
            with pytest.raises(StorageMemoryError):  # there is no garbage
                other.add_batch(rows(0, 5))
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ids(buffer.sample_all()) == [0, 1, 2, 3, 4]
    assert (len(said) == 1 and "repeating it after garbage collection" in said[0]) if told else not said
    assert (len(other), other.pointer) == (0, 0)


# -- epochs --------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 12), batch=st.integers(1, 15), epochs=st.integers(1, 3))
def test_epochs_give_every_row_once_and_as_many_batches_as_announced(count, batch, epochs):
    buffer = filled(count, 12)
    steps = buffer.get_steps_and_iterator(n_epochs=epochs, max_iter=7, batch_size=batch)
    assert steps == epochs * buffer.calculate_num_batches(batch)
    drawn = [ids(buffer.get_next_batch(99)) for _ in range(steps)]
    with pytest.raises(EpochEndError) as ended:
        buffer.get_next_batch(99)
    assert isinstance(ended.value, StopIteration)  # old loops catch this
    for epoch in range(epochs):
        batches = drawn[epoch * steps // epochs : (epoch + 1) * steps // epochs]
        assert sorted(row for one in batches for row in one) == list(range(count))
        assert {len(one) for one in batches[:-1]} <= {batch}


def test_an_iterator_shares_its_epochs_with_next_batch_and_ends_with_its_rows():
    buffer = filled(9, 12)
    iterator = buffer.create_epoch_iterator(batch_size=3)
    drawn = ids(next(iterator)) + ids(buffer.get_next_batch(1))
    buffer.add_batch(rows(9, 2))  # rows added in an epoch wait for the next one
    assert sorted(drawn + ids(next(iterator))) == list(range(9))
    assert list(iterator) == []
    assert buffer.calculate_num_batches(4) == 3
    first, second = (ids(batch) for batch in buffer.create_epoch_iterator(11, 2))
    assert first != second
    iterator = buffer.create_epoch_iterator(4)
    buffer.reset()
    with pytest.raises(UsageError):
        next(iterator)
    buffer.add_batch(rows(0, 2))
    assert len(ids(buffer.get_next_batch(20))) == 20  # random: its iterator is gone
    buffer.create_epoch_iterator(2)
    assert buffer.get_steps_and_iterator(n_epochs=0, max_iter=5, batch_size=3) == 5
    assert buffer.get_next_batch(20).batch_size == torch.Size([20])


# -- reading -------------------------------------------------------------------------------------------------


def test_reads_by_index_are_copies():
    buffer = filled(6)
    many: list[Any] = [[4, 0, 0, -1], torch.tensor([4, 0, 0, 5]), torch.tensor([4, 0, 0, 5]).int()]
    for indices in many:
        assert ids(buffer.sample_by_index(indices)) == [4, 0, 0, 5]
    assert ids(buffer.sample_by_index(range(1, 6, 2))) == [1, 3, 5]
    assert ids(buffer.sample_by_index([])) == []
    batch = buffer.sample_batch(200)
    assert set(ids(batch)) == set(ids(buffer.sample_random(200))) == set(range(6))
    assert torch.equal(batch["index"], batch["id"])
    one = buffer.sample_by_index_fields([0, 5], fields=["id"])
    assert isinstance(one, torch.Tensor)
    assert one.tolist() == [0, 5]
    several = buffer.sample_by_index_fields(range(2), ["obs", ("next", "obs")])  # type: ignore[list-item]
    assert isinstance(several, tuple)
    assert [x.tolist() for x in several] == [[[0.0] * 3, [1.0] * 3], [0.5, 1.5]]
    for copied in (buffer.sample_all()["id"], buffer.sample_batch(6)["id"], buffer.sample_by_index([0, 1])["id"], one):
        copied.fill_(-1)
    assert ids(buffer.sample_all()) == list(range(6))
    assert type(buffer._memory.storage) is LazyMemmapStorage
    buffer.device = torch.device("meta")
    assert buffer.sample_batch(2).device == torch.device("meta")
    assert buffer.sample_by_index_fields([0], ["id"]).device == torch.device("meta")  # type: ignore[union-attr]


def test_errors_change_nothing():
    empty, buffer = filled(0), filled(6)
    meta = torch.device("meta")
    two = rows(0, 2)

    def put(name: str, value: Any) -> Any:
        return lambda: setattr(buffer, name, value)

    raises(
        (lambda: ReplayBuffer(CPU, meta, 10), OptionError, "storing_device must be a CPU or CUDA device"),
        (put("buffer_size", 0), OptionError, "buffer_size must be a positive integer, got 0"),
        (put("data_size", 7), OptionError, r"data_size must be in \[0, 6\], got 7: add rows, or load"),
        *((put("pointer", bad), OptionError, r"pointer must be in \[0, 6\]") for bad in (7, -1, 1.0, True)),
        (lambda: buffer.add_batch({"obs": torch.zeros(2, 3)}), KindError, "takes TensorDicts"),
        (lambda: buffer.add_batch(two.select("obs")), KeyMissingError, "missing"),
        (lambda: buffer.sample_by_index_fields([0], ["action"]), KeyMissingError, "no field 'action'"),
        (lambda: empty.sample_batch(2), EmptyBufferError, "empty"),
        (lambda: empty.sample_all(), UsageError, "holds no rows"),
        (lambda: buffer.get_steps_and_iterator(-1, 0, 4), OptionError, "n_epochs must be"),
        (lambda: buffer.get_steps_and_iterator(1, 0, 0), OptionError, "batch_size must be"),
        (lambda: buffer.get_steps_and_iterator(0, -1, 4), OptionError, "max_iter must be"),
        (lambda: buffer.sample_by_index([0, 6]), SlotError, ""),
        (lambda: buffer.sample_by_index(2), KindError, ""),  # type: ignore[arg-type]
        (lambda: buffer.sample_by_index_fields([0], "obs"), KindError, ""),  # type: ignore[arg-type]
        (lambda: buffer.sample_by_index_fields([0], []), KindError, ""),
    )
    assert (ids(buffer.sample_all()), buffer.pointer, buffer.storing_device) == (list(range(6)), 6, CPU)
    assert (empty.calculate_num_batches(4), list(empty.create_epoch_iterator(4))) == (0, [])
    assert empty.get_steps_and_iterator(3, 0, 4) == 0
