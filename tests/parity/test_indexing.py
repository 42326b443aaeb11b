"""Reading and writing by index: which rows are meant, views and copies, and what is refused."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ._script import Note, both, rows

STORAGES = ["LazyTensorStorage", "LazyMemmapStorage"]
INDICES: dict[str, Any] = {
    "first": 0,
    "last": -1,
    "slice": slice(2, 5),
    "all": slice(None),
    "past the end": slice(0, 9),
    "last two": slice(-2, None),
    "every second": slice(None, None, 2),
    "empty slice": slice(3, 3),
    "tensor": torch.tensor([0, 3, 3]),
    "negative tensor": torch.tensor([-1, -6]),
    "int32 tensor": torch.tensor([1, 2], dtype=torch.int32),
    "0-d tensor": torch.tensor(1),
    "2-d tensor": torch.tensor([[0, 1], [2, 3]]),
    "mask": torch.tensor([True, False, True, False, False, False]),
    "list": [1, 2],
    "list of bools": [True, False, True, False, False, False],
    "array": np.array([1, 2]),
    "numpy integer": np.int64(2),
    "range": range(2),
    "ellipsis": ...,
    "none": None,
    "tuple of one": (1,),
    "tuple of a tensor": (torch.tensor([1, 2]),),
    "tuple of a slice": (slice(0, 2),),
    "empty list": [],
    "empty tensor": torch.zeros(0, dtype=torch.int64),
}
BAD = {
    "between length and capacity": 7,
    "past the capacity": 12,
    "too negative": -7,
    "tensor past the length": torch.tensor([0, 7]),
    "mask of the capacity": torch.zeros(10, dtype=torch.bool),
    "two indices": (1, 2),
    "float": 1.0,
}


def _filled(lib: Any, storage: str, data: Any) -> Any:
    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), batch_size=3)
    rb.extend(data)
    return rb


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("index", INDICES)
@both
def test_read(lib: Any, note: Note, storage: str, index: str) -> None:
    rb = _filled(lib, storage, rows(6))
    note("rb", lambda: rb[INDICES[index]])
    note("storage", lambda: rb.storage[INDICES[index]])
    tree = _filled(lib, storage, {"a": torch.arange(6), "b": (torch.zeros(6, 2), [torch.ones(6)]), 30: torch.ones(6)})
    note("pytree", lambda: tree[INDICES[index]])
    tensor = _filled(lib, storage, torch.arange(12).view(6, 2))
    note("tensor", lambda: tensor[INDICES[index]])


@pytest.mark.parametrize("index", BAD)
@both
def test_read_refused(lib: Any, note: Note, index: str) -> None:
    rb = _filled(lib, "LazyTensorStorage", rows(6))
    note(index, lambda: rb[BAD[index]])


@both
def test_read_by_key(lib: Any, note: Note) -> None:
    rb = _filled(lib, "LazyTensorStorage", rows(6))
    note("field", lambda: rb["obs"])
    note("nested field", lambda: rb["next", "obs"])
    note("no such field", lambda: rb["nothing"])
    tree = _filled(lib, "LazyTensorStorage", {"a": torch.arange(4)})
    note("field of a dict", lambda: tree["a"])


@pytest.mark.parametrize(
    "index", ["first", "slice", "all", "every second", "ellipsis", "tensor", "mask", "list", "array"]
)
@both
def test_view_or_copy(lib: Any, note: Note, index: str) -> None:
    rb = _filled(lib, "LazyTensorStorage", rows(6))
    rb[INDICES[index]]["obs"].fill_(-1.0)
    note("an edit shows in the storage", lambda: rb[:]["obs"])


@both
def test_a_field_is_a_view(lib: Any, note: Note) -> None:
    rb = _filled(lib, "LazyTensorStorage", rows(6))
    rb["obs"].fill_(-1.0)
    note("an edit shows in the storage", lambda: rb[:]["obs"])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "index",
    [
        "first",
        "slice",
        "tensor",
        "int32 tensor",
        "0-d tensor",
        "list",
        "array",
        "range",
        "numpy integer",
        "tuple of one",
    ],
)
@both
def test_write(lib: Any, note: Note, storage: str, index: str) -> None:
    rb = _filled(lib, storage, rows(6))
    shape = tuple(rb[INDICES[index]].batch_size)
    count = int(np.prod(shape)) if shape else 1
    rb[INDICES[index]] = rows(count, 90).reshape(shape) if shape else rows(1, 90)[0]
    note("rows", lambda: rb[:])
    note("length", lambda: len(rb))
    tree = _filled(lib, storage, {"a": torch.arange(6), "b": (torch.zeros(6, 2), [torch.ones(6)])})
    new = {"a": torch.full(shape, 9), "b": (torch.full((*shape, 2), 8.0), [torch.full(shape, 7.0)])}

    def assign() -> object:
        tree[INDICES[index]] = new
        return tree[:]

    note("pytree", assign)


@both
def test_write_refused(lib: Any, note: Note) -> None:
    for index, data in (
        (12, rows(1)[0]),
        (-11, rows(1)[0]),
        (slice(0, 3), rows(6)),
        (slice(1, 3), rows(1)[0]),
        (slice(0, 2), {"obs": 1}),
    ):
        rb = _filled(lib, "LazyTensorStorage", rows(6))
        note.refusal(f"rb[{index}]", lambda: rb.__setitem__(index, data))
        note("unchanged", lambda: rb[:])


@both
def test_cells_of_a_tensor(lib: Any, note: Note) -> None:
    rb = _filled(lib, "LazyTensorStorage", torch.arange(8).view(4, 2))
    note("step", lambda: list(rb.storage))
    note("a row", lambda: rb[2])

    def assign() -> object:
        rb[0] = torch.tensor([7, 7])
        return rb[:]

    note("write a row", assign)


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage", "ListStorage"])
@both
def test_nothing_stored(lib: Any, note: Note, storage: str) -> None:
    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(5), batch_size=2)
    note.refusal("rb[0]", lambda: rb[0])
    note.refusal("rb['obs']", lambda: rb["obs"])
    note("length", lambda: len(rb))


@both
def test_iterating_a_storage(lib: Any, note: Note) -> None:
    rb = _filled(lib, "LazyTensorStorage", rows(4))
    note("rows", lambda: list(rb.storage))
    note("a batch size of rows", lambda: [TensorDict(row.to_dict(), []) for row in rb.storage])
