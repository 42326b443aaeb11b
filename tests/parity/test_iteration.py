"""Epochs without replacement, endless uniform loops, and what breaks, writes and prefetch do to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ._script import Note, both


def _ours_only(lib: Any, prefetch: int | None) -> int | None:
    """Our prefetching must give what TorchRL gives without: with several threads, TorchRL's batches may swap places."""
    return prefetch if lib.name == "ostinato" else None


def _buffer(lib: Any, count: int = 10, batch_size: int | None = 4, **options: Any) -> Any:
    sampler = lib.SamplerWithoutReplacement(**options.pop("sampler", {"shuffle": False}))
    options["prefetch"] = _ours_only(lib, options.get("prefetch"))
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20), sampler=sampler, batch_size=batch_size, **options)
    rb.extend(torch.arange(count))
    return rb


def _epoch(rb: Any, most: int = 30) -> list[list[int]]:
    out = []
    for number, batch in enumerate(rb):
        out.append(batch.tolist())
        if number + 1 == most:
            break
    return out


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [8, 10])
@both
def test_epochs_in_order(lib: Any, note: Note, prefetch: int | None, drop_last: bool, count: int) -> None:
    rb = _buffer(lib, count, sampler={"shuffle": False, "drop_last": drop_last}, prefetch=prefetch)
    for number in range(3):
        note(f"epoch {number}", lambda: _epoch(rb))


@pytest.mark.parametrize("drop_last", [False, True])
@both
def test_ran_out(lib: Any, note: Note, drop_last: bool) -> None:
    rb = _buffer(lib, sampler={"shuffle": False, "drop_last": drop_last})
    for number in range(7):
        note(f"sample {number}", lambda: (rb.sample(), rb.sampler.ran_out))


@pytest.mark.parametrize("prefetch", [None, 2])
@both
def test_batch_larger_than_the_buffer(lib: Any, note: Note, prefetch: int | None) -> None:
    rb = _buffer(lib, 3, batch_size=5, prefetch=prefetch)
    note("sample", rb.sample)
    rb = _buffer(lib, 3, batch_size=5, prefetch=prefetch)
    note("epoch", lambda: _epoch(rb, 3))
    strict = _buffer(lib, 3, batch_size=5, prefetch=prefetch, sampler={"drop_last": True})
    note("drop_last", strict.sample)


@both
def test_empty_ends_the_epoch(lib: Any, note: Note) -> None:
    rb = _buffer(lib)
    rb.sample()
    rb.empty()
    note("nothing to sample", rb.sample)
    rb.extend(torch.arange(5))
    note("a new epoch", rb.sample)
    note("its end", rb.sample)
