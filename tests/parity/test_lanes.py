"""Storages with two batch dimensions: where time goes, capacities, indices and samples."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from ._script import Note, both


def _block(*shape: int, start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + shape[0] * shape[1])
    return TensorDict({"a": numbers.view(*shape), "o": torch.zeros(*shape, 2)}, list(shape))


def _sizes(rb: Any) -> object:
    return len(rb), len(rb.storage), tuple(rb.storage.shape), tuple(rb[:].shape), rb.storage.ndim


@both
def test_rows_by_index(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20, ndim=2))
    rb.extend(_block(4, 3))
    every = slice(None)
    for index in (
        (0, 1),
        (every, 1),
        (1, every),
        (torch.tensor([0, 1]), torch.tensor([1, 2])),
        ...,
        every,
        slice(0, 2),
        (-1, -1),
        (0, slice(1, 3)),
    ):
        note(f"rb[{index}]", lambda: rb[index]["a"])
    for index in ((0, 5), (7, 0)):
        note(f"rb[{index}]", lambda: rb[index])


@both
def test_dim_extend(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), dim_extend=0, batch_size=4)
    for shape in ((4, 3), (2, 3)):
        note(f"extend {shape}", lambda: rb.extend(_block(*shape, start=100)))
        note("sizes", lambda: _sizes(rb))
        note("rows", lambda: rb[:]["a"])
    note.refusal("one dimension", lambda: rb.extend(torch.arange(3)))
    one = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12), dim_extend=1, batch_size=4)
    note("extend", lambda: one.extend(_block(2, 4)))
    note("storage", lambda: one.storage[:])
    note("negative", lambda: lib.ReplayBuffer(storage=lib.LazyTensorStorage(12), dim_extend=-1))


@both
def test_samples_are_cells(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), batch_size=64)
    rb.extend(_block(4, 3))
    sample, info = rb.sample(return_info=True)
    step, lane = info["index"]
    note("index", lambda: (type(info["index"]).__name__, step.shape, step.dtype, lane.shape, lane.dtype))
    note("index finds the row", lambda: bool((rb.storage[step, lane]["a"] == sample["a"]).all()))
    note("every cell", lambda: sorted(set(sample["a"].tolist())))
    tagged = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), batch_size=64)
    tagged.extend(_block(4, 3))
    note("index key", lambda: (tuple(tagged.sample()["index"].shape), tagged.sample()["index"].dtype))
    sampler = lib.SamplerWithoutReplacement(shuffle=False)
    ordered = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), batch_size=5, sampler=sampler)
    ordered.extend(_block(4, 3))
    note("a pass", lambda: [batch["a"] for batch in ordered])
