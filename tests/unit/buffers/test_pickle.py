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
    SamplerWithoutReplacement,
)
from ostinato._backend import backend

from ...tags import buffer, fill, read_ids


@pytest.mark.parametrize(
    ("storage", "count", "way"),
    [
        ("packed", 9, "pickle"),
        ("columns", 3, "pickle"),
        ("mapped", 9, "pickle"),
        ("mapped-columns", 7, "pickle"),
        ("list", 9, "deepcopy"),
        ("packed", 0, "deepcopy"),
    ],
)
def test_a_copy_holds_the_same_rows_in_memory_of_its_own(way: str, storage: str, count: int) -> None:
    rb = buffer(storage, 7, batch_size=3, sampler=SamplerWithoutReplacement(), generator=torch.Generator())
    if count:
        fill(rb, range(count))
        rb.sample()
    other = copy.deepcopy(rb) if way == "deepcopy" else pickle.loads(pickle.dumps(rb))
    assert type(other) is type(rb)
    assert len(other) == min(count, 7)
    before = read_ids(rb[:]) if count else []
    if count:
        assert read_ids(other[:]) == before
        assert [read_ids(other.sample()) for _ in range(4)] == [read_ids(rb.sample()) for _ in range(4)]
    fill(other, range(100, 107))
    assert not count or read_ids(rb[:]) == before
    assert sorted(read_ids(other[:])) == list(range(100, 107))
    if isinstance(other.storage, LazyMemmapStorage):
        assert other.storage.scratch_dir != rb.storage.scratch_dir  # type: ignore[attr-defined]
    if storage != "list":
        other["obs"].fill_(-1.0)  # native reads and torch's views agree
        assert bool((other.sample()["obs"] == -1.0).all())


def test_small_fields_that_share_memory_are_pickled_once() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000))
    rb.extend({name: torch.arange(10) for name in "abcdefgh"})
    pickled = pickle.dumps(rb)
    assert len(pickled) < 1.1 * rb.stats().nbytes + 10_000
    other = pickle.loads(pickled)
    addresses = {column.untyped_storage().data_ptr() for column in other.storage.columns.values()}
    assert len(addresses) == (8 if backend.native is None else 1)  # rows are packed for the compiled gather only
    assert other.stats().nbytes == rb.stats().nbytes
