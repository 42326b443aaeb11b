"""Indices of the kinds that `tests/stateful` does not draw read and write the rows that they name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ...tags import buffer, fill, read_ids, rows, table

INDICES: list[tuple[Any, list[int]]] = [
    (torch.tensor([3, 0], dtype=torch.uint8), [3, 0]),
    (torch.tensor([3, 9, 0, 9, 1, 9])[::2], [3, 0, 1]),
    (np.array([3, 0, -1], dtype=np.int16), [3, 0, 4]),
    (range(1, 5, 2), [1, 3]),
    (np.array([True, False, True, False, False]), [0, 2]),
    ([True, False, True, False, False], [0, 2]),
    (..., [0, 1, 2, 3, 4]),
    ((torch.tensor([1, 2]),), [1, 2]),
]


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_indices_of_every_kind_read_and_write_the_same_rows(storage: str) -> None:
    for index, slots in INDICES:
        rb, model = buffer(storage, 8), list(range(5))
        fill(rb, range(5))
        assert read_ids(rb[index]) == slots
        rb[index] = rows([100 + i for i in range(len(slots))], "dicts" if storage == "list" else "dict")
        for i, slot in enumerate(slots):
            model[slot] = 100 + i
        assert read_ids(rb[:]) == model
    one: list[Any] = [2, -3, np.int64(2), torch.tensor(2), (2,)]
    for index in one:
        rb = buffer(storage, 8)
        fill(rb, range(5))
        assert rb[index]["obs"].shape == (3,)
        assert read_ids(rb[index]) == [2]
        rb[index] = table(torch.tensor(50))
        assert read_ids(rb[:]) == [0, 1, 50, 3, 4]
    assert read_ids(rb[torch.tensor([[0, 1], [4, 3]])]) == [0, 1, 4, 3]
