"""What extend, add and sample return, and which keys rows and samples have."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._script import Note, both, rows

BUFFERS = ["ReplayBuffer", "TensorDictReplayBuffer"]
STORAGES = ["ListStorage", "LazyTensorStorage", "LazyMemmapStorage"]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("buffer", BUFFERS)
@both
def test_extend_and_sample(lib: Any, note: Note, buffer: str, storage: str) -> None:
    rb = getattr(lib, buffer)(storage=getattr(lib, storage)(5), batch_size=4)
    note("extend", lambda: rb.extend(rows(3)))
    note("length", lambda: len(rb))
    note.rows("all rows", lambda: rb[:])
    note("sample", rb.sample)
    note("sample and info", lambda: rb.sample(return_info=True))
    note("other batch size", lambda: rb.sample(2))
    note.rows("sampling writes nothing", lambda: rb.storage[:])
    note("locked", lambda: (rb.sample().is_locked, rb.sample()["obs"].device.type))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("buffer", BUFFERS)
@both
def test_wrap_and_longer_than_the_ring(lib: Any, note: Note, buffer: str, storage: str) -> None:
    rb = getattr(lib, buffer)(storage=getattr(lib, storage)(5), batch_size=4)
    for count, start in ((3, 0), (4, 10), (12, 20), (5, 40), (1, 50)):
        note(f"extend {count}", lambda: rb.extend(rows(count, start)))
        note.rows("rows", lambda: rb[:])
        note("length", lambda: len(rb))
    note("rows written in all", lambda: rb.write_count)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("buffer", BUFFERS)
@both
def test_add(lib: Any, note: Note, buffer: str, storage: str) -> None:
    rb = getattr(lib, buffer)(storage=getattr(lib, storage)(2), batch_size=2)
    for number in range(5):
        note("slot", lambda: rb.add(rows(1, number)[0]))
        note.rows("rows", lambda: rb[:])
    note("sample", lambda: rb.sample())


@pytest.mark.parametrize("buffer", BUFFERS)
@both
def test_data_that_has_an_index_key(lib: Any, note: Note, buffer: str) -> None:
    rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(5), batch_size=2)
    data = TensorDict({"index": torch.tensor([7, 8, 9]), "a": torch.zeros(3)}, [3])
    note("extend", lambda: rb.extend(data))
    note.rows("stored", lambda: rb[:])
    note("sample", lambda: rb.sample())
    note("the caller's data", lambda: data)


@pytest.mark.parametrize("writer", ["RoundRobinWriter", "TensorDictRoundRobinWriter"])
@both
def test_index_key_by_writer(lib: Any, note: Note, writer: str) -> None:
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(5), writer=getattr(lib, writer)(), batch_size=2)
    note("extend", lambda: rb.extend(rows(3)))
    note("add", lambda: rb.add(rows(1, 3)[0]))
    note.rows("stored", lambda: rb[:])
    note("sample", lambda: rb.sample(return_info=True))


@both
def test_what_a_sample_may_suffer(lib: Any, note: Note) -> None:
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(5), batch_size=2)
    data = rows(3)
    rb.extend(data)
    note("extend leaves the caller's data alone", lambda: data)
    note("a key set on a sample", lambda: rb.sample().set("new", torch.zeros(2)))
    view = rb[:]
    view["obs"][0] = 77.0
    view["new"] = torch.zeros(3)
    note.rows("an edit of a view shows, a new key does not", lambda: rb[:])
    sample = rb.sample()
    sample["obs"].fill_(-1)
    note.rows("an edit of a sample does not", lambda: rb[:])


@both
def test_defaults(lib: Any, note: Note) -> None:
    for buffer in BUFFERS:
        rb = getattr(lib, buffer)()
        note("parts", lambda: [type(part).__name__ for part in (rb.storage, rb.sampler, rb.writer)])
        note("capacity", lambda: rb.storage.max_size)
        note("empty", lambda: (len(rb), bool(rb)))
    note("priority key", lambda: lib.TensorDictReplayBuffer(priority_key="p").priority_key)


@both
def test_include_info(lib: Any, note: Note) -> None:
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(5), batch_size=2)
    rb.extend(rows(3))
    note("accepted", lambda: rb.sample(include_info=True))


@both
def test_tensordict_buffers_take_tensordicts(lib: Any, note: Note) -> None:
    for data in (torch.arange(4), {"a": torch.arange(4)}, (torch.arange(3),)):
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(5))
        note.refusal(f"extend {type(data).__name__}", lambda: rb.extend(data))
        note.refusal(f"add {type(data).__name__}", lambda: rb.add(data))
        note("nothing written", lambda: len(rb))


@both
def test_add_of_rows_with_a_batch_size_warns(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        note("add", lambda: rb.add(TensorDict({"a": torch.arange(2)}, [2])))
    note("warned", lambda: [one.category.__name__ for one in caught if "batch_size" in str(one.message)])
    note("rows", lambda: rb[:])
