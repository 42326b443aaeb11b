"""Pickling copies a buffer whole, with memory of its own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
)
from ostinato._backend import backend

from ...tags import buffer, fill, read_ids


@pytest.mark.parametrize("storage", ["packed", "mapped"])
def test_a_copy_holds_the_same_rows_in_memory_of_its_own(storage: str) -> None:
    rb = buffer(storage, 7, batch_size=3)
    fill(rb, range(9))
    for other in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert read_ids(other[:]) == read_ids(rb[:])
        fill(other, range(100, 107))
        other["obs"].fill_(-1.0)  # compiled reads and torch's views agree
        assert bool((other.sample()["obs"] == -1.0).all())
        if isinstance(other.storage, LazyMemmapStorage):
            assert other.storage.scratch_dir != rb.storage.scratch_dir  # type: ignore[attr-defined]
    assert read_ids(rb[:]) == [7, 8, 2, 3, 4, 5, 6]


def test_small_fields_that_share_memory_are_pickled_once() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000))
    rb.extend({name: torch.arange(10) for name in "abcdefgh"})
    pickled = pickle.dumps(rb)
    assert len(pickled) < 1.1 * rb.stats().nbytes + 10_000
    other = pickle.loads(pickled)
    addresses = {column.untyped_storage().data_ptr() for column in other.storage.columns.values()}
    assert len(addresses) == (8 if backend.native is None else 1)  # rows are packed for the compiled gather only
    assert other.stats().nbytes == rb.stats().nbytes
