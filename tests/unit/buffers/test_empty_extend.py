"""`extend` of no rows: nothing happens, for each kind of buffer, storage and writer; the schema is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ReplayBuffer,
)
from ostinato.errors import OstinatoError, SchemaError

from ...tags import buffer, fill, read_ids, rows, same_state, snapshot
from .refusals import raises

KINDS = ["dict", "tuple", "tensor", "tensordict"]


def is_empty_index(index: Any, *shape: int) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.int64 and tuple(index.shape) == (shape or (0,))


def test_no_rows_change_nothing():
    """Neither the first rows, whose schema stays open, nor later ones."""
    for storage, kind in (*(("packed", kind) for kind in KINDS), ("mapped-columns", "dict"), ("list", "dict")):
        rb, open_rb = buffer(storage, 8), buffer(storage, 8)
        fill(rb, range(5), kind)
        before = snapshot(rb)
        nothing: list[Any] = [[]] if storage == "list" else [rows([], kind), []]
        for none in nothing:
            assert is_empty_index(rb.extend(none))
            assert is_empty_index(open_rb.extend(none))
            rb[2:2] = none
            rb[torch.zeros(5, dtype=torch.bool)] = none
        same_state(snapshot(rb), before)
        assert fill(rb, range(5, 7), kind).tolist() == [5, 6]
        assert read_ids(rb[:]) == list(range(7))
        assert len(open_rb) == open_rb.write_count == open_rb.storage.nbytes == 0
        assert open_rb.storage.schema is None
        if storage != "list":
            assert not open_rb.storage.laid_out
            open_rb.extend({"other": torch.arange(3)})
            assert open_rb[:]["other"].tolist() == [0, 1, 2]


def test_the_form_of_no_rows_is_checked():
    rb, first = (ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2) for _ in range(2))
    rb.extend({"x": torch.zeros(2, 3), "y": torch.zeros(2)})
    none: dict[str, Any] = {"x": torch.zeros(0, 3), "y": torch.zeros(0)}
    wrong: list[Any] = [
        ({**none, "x": torch.zeros(0, 4)}, SchemaError, r"'x' must be float32\[0, 3\]"),
        ({**none, "z": torch.zeros(0)}, SchemaError, r"unknown \['z'\]"),
        ({}, OstinatoError, "missing"),
    ]
    raises(*((lambda data=data: rb.extend(data), error, words) for data, error, words in wrong))
    assert is_empty_index(rb.extend({"x": np.zeros((0, 3)), "y": np.zeros(0, np.int64)}))
    disagree: list[Any] = [{"x": torch.zeros(0, 4), "y": torch.zeros(1)}, {}, {"x": None}, {"x": []}]
    raises(*((lambda data=data: first.extend(data), OstinatoError, "") for data in disagree))
    assert not first.storage.laid_out
    with pytest.raises(SchemaError, match="2 rows are chosen, an empty list"):
        rb[0:2] = []


def test_no_rows_of_text_change_nothing():
    """An empty list of text is a tensor of floats once a TensorDict or NumPy has it."""
    text: dict[str, Any] = {"text": ["a", "b"], "x": torch.arange(2)}
    for none in (
        {"text": [], "x": torch.arange(0)},
        {"text": np.array([]), "x": torch.arange(0)},
        TensorDict({"text": [], "x": torch.arange(0)}, [0]),
    ):
        rb = buffer("packed", 8)
        rb.extend(text if isinstance(none, dict) else TensorDict(text, [2]))
        assert is_empty_index(rb.extend(none))
        assert (len(rb), rb[1]["text"]) == (2, "b")
