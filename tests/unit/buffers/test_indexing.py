"""Indices of every kind read and write the rows that they name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ...tags import STORAGES, TENSORS, buffer, fill, read_ids, rows, table

pytestmark = pytest.mark.usefixtures("backend")

INDICES: dict[str, tuple[Any, list[int]]] = {
    "int64": (torch.tensor([3, 0, -1]), [3, 0, 4]),
    "int32": (torch.tensor([3, 0, -1], dtype=torch.int32), [3, 0, 4]),
    "uint8": (torch.tensor([3, 0], dtype=torch.uint8), [3, 0]),
    "strided": (torch.tensor([3, 9, 0, 9, 1, 9])[::2], [3, 0, 1]),
    "list": ([3, 0, -1], [3, 0, 4]),
    "array": (np.array([3, 0, -1], dtype=np.int16), [3, 0, 4]),
    "range": (range(1, 5, 2), [1, 3]),
    "mask": (torch.tensor([True, False, True, False, False]), [0, 2]),
    "mask of numpy": (np.array([True, False, True, False, False]), [0, 2]),
    "mask as a list": ([True, False, True, False, False], [0, 2]),
    "slice": (slice(1, 4), [1, 2, 3]),
    "slice beyond": (slice(3, 99), [3, 4]),
    "slice with a step": (slice(None, None, 2), [0, 2, 4]),
    "slice from behind": (slice(-2, None), [3, 4]),
    "ellipsis": (..., [0, 1, 2, 3, 4]),
    "duplicates": (torch.tensor([2, 2, 2]), [2, 2, 2]),
    "tuple of one": ((torch.tensor([1, 2]),), [1, 2]),
    "nothing chosen": (torch.zeros(5, dtype=torch.bool), []),
    "empty list": ([], []),
    "empty slice": (slice(3, 3), []),
}


@pytest.mark.parametrize("case", list(INDICES))
@pytest.mark.parametrize("storage", list(TENSORS))
def test_indices_of_every_kind_read_and_write_the_same_rows(case: str, storage: str) -> None:
    index, slots = INDICES[case]
    rb = buffer(storage, 8)
    fill(rb, range(5))
    assert read_ids(rb[index]) == slots
    ids = [100 + i for i in range(len(slots))]
    rb[index] = rows(ids)
    model = list(range(5))
    for slot, i in zip(slots, ids, strict=True):
        model[slot] = i  # of equal slots the last one wins
    assert read_ids(rb[:]) == model


@pytest.mark.parametrize("case", [c for c in INDICES if INDICES[c][1]])
def test_indices_of_every_kind_read_and_write_lists(case: str) -> None:
    index, slots = INDICES[case]
    rb = buffer("list", 8)
    fill(rb, range(5))
    assert read_ids(rb[index]) == slots
    rb[index] = rows([100 + i for i in range(len(slots))], "dicts")
    model = list(range(5))
    for i, slot in enumerate(slots):
        model[slot] = 100 + i
    assert read_ids(rb[:]) == model


@pytest.mark.parametrize("index", [2, -3, np.int64(2), torch.tensor(2), (2,)])
@pytest.mark.parametrize("storage", list(STORAGES))
def test_one_row_is_read_and_written_without_a_batch_dimension(index: Any, storage: str) -> None:
    rb = buffer(storage, 8)
    fill(rb, range(5))
    row = rb[index]
    assert row["obs"].shape == (3,)
    assert read_ids(row) == [2]
    rb[index] = table(torch.tensor(50))
    assert read_ids(rb[:]) == [0, 1, 50, 3, 4]


def test_an_index_of_two_dimensions_gives_a_batch_of_two() -> None:
    rb = buffer("packed", 8)
    fill(rb, range(5))
    batch = rb[torch.tensor([[0, 1], [4, 3]])]
    assert batch["obs"].shape == (2, 2, 3)
    assert read_ids(batch) == [0, 1, 4, 3]


def test_fields_are_read_by_name() -> None:
    rb = buffer("packed", 8)
    fill(rb, range(5))
    assert rb["id"].tolist() == [0, 1, 2, 3, 4]
    assert rb["next", "done"].shape == (5,)
    assert rb["next", "obs"].shape == (5, 2)


def test_fields_are_read_by_name_through_transforms() -> None:
    rb = buffer("packed", 8, transform=lambda batch: {**batch, "id": batch["id"] + 10})
    fill(rb, range(5))
    assert rb["id"].tolist() == [10, 11, 12, 13, 14]
    assert rb["next", "obs"].shape == (5, 2)
