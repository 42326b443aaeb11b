"""Two dimensions, time x environments: the capacity, and indices that follow the order of the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from ostinato.errors import SchemaError, SlotError

from ...tags import read_ids, table

STORAGES: dict[str, Any] = {
    "packed": lambda capacity: LazyTensorStorage(capacity, ndim=2),
    "columns": lambda capacity: LazyTensorStorage(capacity, ndim=2, packed=False),
    "mapped": lambda capacity: LazyMemmapStorage(capacity, ndim=2),
}


def grid(lanes: int, first: int, steps: int) -> torch.Tensor:
    """Ids `[lanes, steps]`: the hundreds are the lane, the rest the time."""
    return torch.arange(first, first + steps)[None] + 100 * torch.arange(lanes)[:, None]


def ids(batch: Any) -> list[list[int]]:
    read_ids(batch)
    return batch["id"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("asked", "lanes", "effective"), [(10, 4, 12), (12, 4, 12), (1, 4, 4), (13, 1, 13)])
def test_the_capacity_rounds_up_to_whole_steps(asked, lanes, effective):
    rb = ReplayBuffer(storage=LazyTensorStorage(asked, ndim=2))
    rb.extend(table(grid(lanes, 0, 1)))
    assert (rb.storage.capacity, rb.storage.max_size) == (effective, asked)
    assert f"capacity={effective}" in repr(rb.storage)
    rb.extend(table(grid(lanes, 1, 40)))
    assert len(rb) == effective


INDICES: dict[str, Any] = {
    "cell": (1, 2),
    "negative cell": (-1, -1),
    "lane": 1,
    "time": (slice(None), 1),
    "window": (slice(1, 3), slice(0, 2)),
    "cells": (torch.tensor([0, 3, 1]), torch.tensor([2, 0, 0])),
    "tensor": torch.tensor([2, 0]),
    "mask": torch.tensor([[True, False, True]] + [[False] * 3] * 3),
    "all": ...,
}


@pytest.mark.parametrize(("dim", "storage"), [(0, "packed"), (1, "columns"), (1, "mapped")])
@pytest.mark.parametrize("case", list(INDICES))
def test_indices_address_the_dimensions_of_the_data(case, dim, storage):
    index = INDICES[case]
    data = grid(4, 0, 3)
    rb = ReplayBuffer(storage=STORAGES[storage](12), dim_extend=dim)
    if dim == 0:
        data = data.t()
        if case == "mask":
            index = index.t()
        if case in {"cell", "cells", "window"}:
            index = tuple(reversed(index))
    rb.extend(table(data))
    assert ids(rb[index]) == data[index].tolist()
    expected = data.clone()
    expected[index] += 1000
    rb[index] = table(data[index] + 1000)
    assert ids(rb[:]) == expected.tolist()


def test_slices_are_views_and_cells_beyond_those_present_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2))
    rb.extend(table(grid(4, 0, 3)))
    outside: list[Any] = [(4, 0), (0, 3), 4, (0, 0, 0), torch.tensor([4])]
    for index in outside:
        with pytest.raises(SlotError):
            rb[index]
    with pytest.raises(SchemaError, match=r"use add\(\) for one step"):
        rb.extend(table(grid(4, 0, 1)[:, 0]))
    rb[:, 0]["obs"].fill_(-2.0)
    assert bool((rb["obs"][:, 0] == -2.0).all())
