"""Rows by index: which are read and written, views and copies, edits in place, and two dimensions."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_map

from ._script import both, rows

TENSORS = pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
WRITTEN: list[Any] = [
    0,
    slice(2, 5),
    torch.tensor([1, 2], dtype=torch.int32),
    torch.tensor(1),
    [1, 2],
    np.array([1, 2]),
    range(2),
    np.int64(2),
]
READ: list[Any] = [
    *WRITTEN,
    -1,
    slice(None),
    slice(None, None, 2),
    slice(3, 3),
    torch.tensor([0, 3, 3]),
    torch.tensor([True, False, True, False, False, False]),
    [True, False, True, False, False, False],
    ...,
    None,
    (1,),
    [],
]
BAD = [7, 12, torch.zeros(10, dtype=torch.bool), (1, 2), 1.0]


def _filled(lib: Any, storage: str, data: Any) -> Any:
    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), batch_size=3)
    rb.extend(data)
    return rb


def _tree() -> dict[Any, Any]:
    return {"a": torch.arange(6), "b": (torch.zeros(6, 2), [torch.ones(6)]), 30: torch.ones(6)}


def _nines(shape: tuple[int, ...], column: torch.Tensor) -> torch.Tensor:
    return torch.full((*shape, *column.shape[1:]), 9, dtype=column.dtype)


@TENSORS
@both
def test_read(lib, note, storage):
    tables = [_filled(lib, storage, data) for data in (rows(6), _tree(), torch.arange(12).view(6, 2))]
    for index in READ:
        for table in (*tables, tables[0].storage):
            table[index]
    for index in BAD:
        tables[0][index]
    for key in ("obs", ("next", "obs"), "nothing"):
        tables[0][key]
    tables[1]["a"]
    list(tables[0].storage)
    empty = lib.ReplayBuffer(storage=getattr(lib, storage)(5), batch_size=2)
    with note.refusals():
        empty[0]
        empty["obs"]


@both
def test_view_or_copy(lib, note):
    """Whether an edit of what was read shows in the storage."""
    for index in (0, slice(2, 5), slice(None, None, 2), ..., [1, 2], np.array([1, 2]), torch.arange(6) < 2, "obs"):
        rb = _filled(lib, "LazyTensorStorage", rows(6))
        found = rb[index]
        (found if isinstance(found, torch.Tensor) else found["obs"]).fill_(-1.0)
        rb["obs"]
    for index in (slice(None), torch.tensor([0])):
        rb = _filled(lib, "LazyMemmapStorage", rows(6))
        rb.sample().set("new", torch.zeros(3))["obs"].fill_(-1)
        rb[index]["obs"].fill_(-1)
        note([type(found["obs"]).__name__ for found in (rb.sample(), rb[torch.tensor([0])])])
        rb[:]


@TENSORS
@both
def test_write(lib, note, storage):
    for index in WRITTEN:
        rb, tree = _filled(lib, storage, rows(6)), _filled(lib, storage, _tree())
        shape = tuple(rb[index].batch_size)
        rb[index] = rows(int(np.prod(shape)), 90).reshape(shape) if shape else rows(1, 90)[0]
        tree[index] = tree_map(partial(_nines, shape), _tree())
        rb[:]
        tree[:]


@both
def test_in_place(lib, note):
    rb = _filled(lib, "LazyTensorStorage", rows(3))
    rb.set_("obs", torch.arange(3.0) + 5)
    rb.set_(("next", "obs"), torch.arange(3.0) + 50)
    rb[:]
    rb.set_at_("obs", torch.tensor([7.0, 8.0]), slice(0, 2))
    rb[:]
    rb.set_at_("obs", torch.tensor([17.0, 18.0]), torch.tensor([0, 2]))
    rb[:]
    rb.update_({"obs": torch.arange(3.0) * 3})
    rb[:]
    rb.update_(TensorDict({"obs": torch.arange(3.0) * 4}, [3]))
    rb.set_at_("nothing", torch.tensor(1.0), 0)
    with note.refusals():
        rb.set_("obs", torch.arange(10.0))
        rb.update_({"obs": torch.arange(10.0)})
    rb[:]


def _block(*shape: int, start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + shape[0] * shape[1])
    return TensorDict({"a": numbers.view(*shape), "o": torch.zeros(*shape, 2)}, list(shape))


@both
def test_two_dimensions(lib, note):
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20, ndim=2))
    rb.extend(_block(4, 3))
    every = slice(None)
    some = torch.tensor([0, 1]), torch.tensor([1, 2])
    for index in (
        (0, 1),
        (every, 1),
        (1, every),
        some,
        ...,
        every,
        slice(0, 2),
        (-1, -1),
        (0, slice(1, 3)),
        (0, 5),
        (7, 0),
    ):
        rb[index]
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), dim_extend=0, batch_size=4)
    for shape in ((4, 3), (2, 3)):
        rb.extend(_block(*shape, start=100))
        note((len(rb), len(rb.storage), rb.storage.shape, rb.storage.ndim))
        rb[:]
    with note.refusals():
        rb.extend(torch.arange(3))
    one = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12), dim_extend=1, batch_size=4)
    one.extend(_block(2, 4))
    one.storage[:]
    lib.ReplayBuffer(storage=lib.LazyTensorStorage(12), dim_extend=-1)
