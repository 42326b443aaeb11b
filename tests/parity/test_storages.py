"""Storages without a buffer: set, get, contains, flatten, states and files, beside TorchRL's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from ._script import Note, both, library, rows

if TYPE_CHECKING:
    from pathlib import Path


LAZY = ["LazyTensorStorage", "LazyMemmapStorage"]
EVERY = [*LAZY, "ListStorage"]


@pytest.mark.parametrize("name", EVERY)
@both
def test_rows_are_written_and_read_by_index(lib: Any, note: Note, name: str) -> None:
    storage = getattr(lib, name)(6)
    storage.set(range(4), rows(4))
    note("length", lambda: len(storage))
    for index in (0, -1, slice(1, 3), [2, 0], torch.tensor([3, 3])):
        note.rows(f"get({index})", lambda index=index: storage.get(index))  # type: ignore[misc]
    storage.set(4, rows(1, 9)[0])
    storage[1] = rows(1, 20)[0]
    note.rows("rows", lambda: list(storage))
    note("contains", lambda: [i in storage for i in range(-6, 6)])
    note("contains, tensor", lambda: storage.contains(torch.tensor([-6, -5, 4, 5])))
    note.refusal("get out of range", lambda: storage.get(5))
    note.refusal("set out of range", lambda: storage.set(range(5, 9), rows(4)))


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("stack_dim", [0, 1])
@both
def test_lazy_stacks_and_two_dimensions(lib: Any, note: Note, name: str, stack_dim: int) -> None:
    parts = [TensorDict({"obs": torch.arange(3.0) + 10 * i}, [3]) for i in range(3)]
    storage = getattr(lib, name)(12, ndim=2)
    note.refusal("flatten, empty", storage.flatten)
    storage.set(slice(0, 3), LazyStackedTensorDict.lazy_stack(parts, stack_dim))
    note("shape", lambda: storage.shape)
    note.rows("rows", lambda: storage[:])
    flat = storage.flatten()
    note("flat", lambda: (len(flat), flat.ndim, flat.shape))
    note.rows("flat rows", lambda: flat[:])


@pytest.mark.parametrize("kind", ["tensordict", "tensor", "dict"])
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("name", LAZY)
@both
def test_files(lib: Any, note: Note, name: str, written: bool, kind: str, tmp_path: Path) -> None:
    data: Any = {
        "tensordict": rows(3),
        "tensor": torch.arange(3),
        "dict": {"a": torch.arange(3), 30: torch.ones(3)},
    }
    zeros = {"tensordict": rows(3).zero_(), "tensor": torch.zeros(3, dtype=torch.int64)}
    storage, again = getattr(lib, name)(6), getattr(lib, name)(6)
    note.refusal("dumps, empty", lambda: storage.dumps(tmp_path / f"{lib.name} empty"))
    storage.set(range(3), data[kind])
    for _ in range(2):
        storage.dumps(tmp_path / lib.name)
    if written:
        again.set(range(3), zeros.get(kind, {"a": torch.zeros(3, dtype=torch.int64), 30: torch.zeros(3)}))
    note("loads", lambda: again.loads(tmp_path / lib.name))
    note("length", lambda: len(again))
    if written or kind == "tensordict":
        note.rows("rows", lambda: again[:])


@both
def test_arguments_that_raise(lib: Any, note: Note) -> None:
    note("no data", lambda: lib.TensorStorage(None))
    note("another size", lambda: lib.TensorStorage(torch.zeros(3), max_size=4))
    note("mapped on another device", lambda: lib.LazyMemmapStorage(3, device="meta"))
    note("other lengths of transforms", lambda: lib.StorageEnsemble(lib.ListStorage(3), transforms=[]))
    note("rows of an ensemble", lambda: lib.StorageEnsemble(lib.ListStorage(3)).extend([1]))


@both
def test_a_directory_in_use_needs_existsok_at_the_first_write(lib: Any, note: Note, tmp_path: Path) -> None:
    for existsok in (False, False, True):
        storage = lib.LazyMemmapStorage(5, scratch_dir=tmp_path / lib.name, existsok=existsok)
        note(f"existsok={existsok}", lambda storage=storage: storage.set(range(2), rows(2)))  # type: ignore[misc]


def test_difference_rows_that_are_replaced_do_not_count_twice() -> None:
    lengths = {}
    for name in ("torchrl", "ostinato"):
        storage = library(name).LazyTensorStorage(10)
        storage.set(range(3), torch.arange(3))
        storage.set(range(3), torch.arange(3))
        lengths[name] = len(storage)
    assert lengths == {"torchrl": 6, "ostinato": 3}


def test_difference_positions_leave_no_empty_slots() -> None:
    theirs, ours = library("torchrl").LazyTensorStorage(10), library("ostinato").LazyTensorStorage(10)
    theirs.set(range(5, 8), torch.arange(3))
    assert len(theirs) == 3
    with pytest.raises(IndexError):
        ours.set(range(5, 8), torch.arange(3))


def test_difference_list_storages_are_saved(tmp_path: Path) -> None:
    theirs, ours = library("torchrl").ListStorage(4), library("ostinato").ListStorage(4)
    for storage in (theirs, ours):
        storage.set(0, torch.ones(2))
    with pytest.raises(NotImplementedError):
        theirs.dumps(tmp_path / "a")
    ours.dumps(tmp_path / "b")
    again = library("ostinato").ListStorage(4)
    again.loads(tmp_path / "b")
    assert again[0].tolist() == [1, 1]


def test_difference_lazy_stacks_are_copies() -> None:
    for name, kept in (("torchrl", 0.0), ("ostinato", 1.0)):
        storage = library(name).LazyStackStorage(4)
        storage.set(0, TensorDict({"a": torch.ones(2)}))
        storage.set(1, TensorDict({"a": torch.ones(3)}))
        storage[:].zero_()
        assert float(storage[0]["a"][0]) == kept
