"""Reading and writing by index: which rows are meant, views and copies, and what is refused."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ._script import Note, both, rows

STORAGES = ["LazyTensorStorage", "LazyMemmapStorage"]
INDICES: dict[str, Any] = {
    "first": 0,
    "last": -1,
    "slice": slice(2, 5),
    "all": slice(None),
    "every second": slice(None, None, 2),
    "empty slice": slice(3, 3),
    "tensor": torch.tensor([0, 3, 3]),
    "int32 tensor": torch.tensor([1, 2], dtype=torch.int32),
    "0-d tensor": torch.tensor(1),
    "mask": torch.tensor([True, False, True, False, False, False]),
    "list": [1, 2],
    "list of bools": [True, False, True, False, False, False],
    "array": np.array([1, 2]),
    "numpy integer": np.int64(2),
    "range": range(2),
    "ellipsis": ...,
    "none": None,
    "tuple of one": (1,),
    "empty list": [],
}
BAD = {
    "between length and capacity": 7,
    "past the capacity": 12,
    "mask of the capacity": torch.zeros(10, dtype=torch.bool),
    "two indices": (1, 2),
    "float": 1.0,
}


def _filled(lib: Any, storage: str, data: Any) -> Any:
    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), batch_size=3)
    rb.extend(data)
    return rb


@pytest.mark.parametrize("storage", STORAGES)
@both
def test_read(lib: Any, note: Note, storage: str) -> None:
    rb = _filled(lib, storage, rows(6))
    tree = _filled(lib, storage, {"a": torch.arange(6), "b": (torch.zeros(6, 2), [torch.ones(6)]), 30: torch.ones(6)})
    tensor = _filled(lib, storage, torch.arange(12).view(6, 2))
    for name, index in INDICES.items():
        for kind, table in (("rb", rb), ("storage", rb.storage), ("pytree", tree), ("tensor", tensor)):
            note(f"{kind}, {name}", lambda: table[index])
    for name, index in BAD.items():
        note(name, lambda: rb[index])
    note("iterated", lambda: list(rb.storage))
    empty = lib.ReplayBuffer(storage=getattr(lib, storage)(5), batch_size=2)
    note.refusal("nothing stored", lambda: empty[0])
    note.refusal("no fields", lambda: empty["obs"])


@both
def test_view_or_copy(lib: Any, note: Note) -> None:
    """Whether an edit of what was read shows in the storage."""
    for index in ("first", "slice", "every second", "ellipsis", "tensor", "mask", "list", "array"):
        rb = _filled(lib, "LazyTensorStorage", rows(6))
        rb[INDICES[index]]["obs"].fill_(-1.0)
        note(index, lambda: rb[:]["obs"])
    rb["obs"].fill_(-2.0)
    note("a field", lambda: rb[:]["obs"])


@pytest.mark.parametrize("storage", STORAGES)
@both
def test_write(lib: Any, note: Note, storage: str) -> None:
    for name in ("first", "slice", "int32 tensor", "0-d tensor", "list", "array", "range", "numpy integer"):
        index = INDICES[name]
        rb = _filled(lib, storage, rows(6))
        shape = tuple(rb[index].batch_size)
        rb[index] = rows(int(np.prod(shape)), 90).reshape(shape) if shape else rows(1, 90)[0]
        note(name, lambda: rb[:])
        tree = _filled(lib, storage, {"a": torch.arange(6), "b": (torch.zeros(6, 2), [torch.ones(6)])})
        tree[index] = {"a": torch.full(shape, 9), "b": (torch.full((*shape, 2), 8.0), [torch.full(shape, 7.0)])}
        note(f"pytree, {name}", lambda: tree[:])


@both
def test_read_by_key(lib: Any, note: Note) -> None:
    rb = _filled(lib, "LazyTensorStorage", rows(6))
    note("field", lambda: rb["obs"])
    note("nested field", lambda: rb["next", "obs"])
    note("no such field", lambda: rb["nothing"])
    tree = _filled(lib, "LazyTensorStorage", {"a": torch.arange(4)})
    note("field of a dict", lambda: tree["a"])
