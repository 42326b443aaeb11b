"""Where a batch size may and must be given, and what sampling from nothing says."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ._script import Note, both


def _buffer(lib: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), **options)
    rb.extend(torch.arange(5))
    return rb


@both
def test_none_given(lib: Any, note: Note) -> None:
    note("sample", lambda: _buffer(lib).sample())
    note("iterate", lambda: next(iter(_buffer(lib))))
    note("sample(2)", lambda: _buffer(lib).sample(2))
    note("by name", lambda: _buffer(lib).sample(batch_size=3))
    note("asked before emptiness", lambda: lib.ReplayBuffer(storage=lib.LazyTensorStorage(5)).sample())


@both
def test_both_given(lib: Any, note: Note) -> None:
    rb = _buffer(lib, batch_size=4)
    for size in (2, 4, None, 7):
        note(f"sample({size})", lambda: rb.sample(size))
    note("the buffer's own", lambda: rb.batch_size)


@both
def test_prefetch(lib: Any, note: Note) -> None:
    note("no batch size", lambda: _buffer(lib, prefetch=2))
    note("negative", lambda: _buffer(lib, prefetch=-1, batch_size=4).sample())
    note("zero is none", lambda: _buffer(lib, prefetch=0).sample(2))


@both
def test_drop_last(lib: Any, note: Note) -> None:
    note("no batch size", lambda: _buffer(lib, sampler=lib.SamplerWithoutReplacement(drop_last=True)))
    note(
        "without drop_last",
        lambda: sorted(_buffer(lib, sampler=lib.SamplerWithoutReplacement()).sample(5).tolist()),
    )


@pytest.mark.parametrize("size", [-1, 2.5, "2"])
@both
def test_no_batch_size_at_all(lib: Any, note: Note, size: Any) -> None:
    note.refusal("sample", lambda: _buffer(lib).sample(size))
    note.refusal("constructor", lambda: _buffer(lib, batch_size=size).sample())


@both
def test_numpy_integers(lib: Any, note: Note) -> None:
    note("sample", lambda: _buffer(lib).sample(np.int64(2)))
    note("constructor", lambda: _buffer(lib, batch_size=np.int64(2)).sample())


@pytest.mark.parametrize("storage", ["ListStorage", "LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("sampler", ["RandomSampler", "SamplerWithoutReplacement"])
@pytest.mark.parametrize("prefetch", [None, 2])
@both
def test_empty(lib: Any, note: Note, storage: str, sampler: str, prefetch: int | None) -> None:
    parts = {"storage": getattr(lib, storage)(5), "sampler": getattr(lib, sampler)()}
    rb = lib.ReplayBuffer(**parts, batch_size=2, prefetch=prefetch)
    note("never written", lambda: rb.sample())
    rb.extend(torch.arange(3))
    rb.empty()
    note("emptied", lambda: rb.sample())


@both
def test_arguments_by_name_only(lib: Any, note: Note) -> None:
    note("positional", lambda: lib.ReplayBuffer(lib.ListStorage(3)))
    note("unknown", lambda: lib.ReplayBuffer(nonsense=1))


@pytest.mark.parametrize("size", [1, 5, 64])
@both
def test_uniform_batches_may_be_larger_than_the_buffer(lib: Any, note: Note, size: int) -> None:
    note("sample", lambda: _buffer(lib).sample(size))
