"""Batch sizes, sampling from nothing, and which random numbers a sample takes from which generator."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ._script import Note, both


def _buffer(lib: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20), **options)
    rb.extend(torch.arange(10))
    return rb


@both
def test_batch_sizes(lib: Any, note: Note) -> None:
    note("none", lambda: _buffer(lib).sample())
    note("iterate", lambda: next(iter(_buffer(lib))))
    note("asked before emptiness", lambda: lib.ReplayBuffer(storage=lib.LazyTensorStorage(5)).sample())
    note("of numpy", lambda: _buffer(lib, batch_size=np.int64(2)).sample())
    rb = _buffer(lib, batch_size=4)
    for size in (2, None, np.int64(3), 64):
        note(f"sample({size})", lambda: rb.sample(size))
    note("by name", lambda: rb.sample(batch_size=3))
    note("the buffer's own", lambda: rb.batch_size)
    for bad in (-1, 2.5, "2"):
        note.refusal("sample", lambda: _buffer(lib).sample(bad))
        note.refusal("constructor", lambda: _buffer(lib, batch_size=bad).sample())
    note("prefetch without one", lambda: _buffer(lib, prefetch=2))
    note("negative prefetch", lambda: _buffer(lib, prefetch=-1, batch_size=4).sample())
    note("prefetch of zero is none", lambda: _buffer(lib, prefetch=0).sample(2))
    note("drop_last without one", lambda: _buffer(lib, sampler=lib.SamplerWithoutReplacement(drop_last=True)))
    note("positional", lambda: lib.ReplayBuffer(lib.ListStorage(3)))
    note("unknown", lambda: lib.ReplayBuffer(nonsense=1))


@pytest.mark.parametrize(
    ("storage", "sampler", "prefetch"),
    [
        ("ListStorage", "RandomSampler", None),
        ("LazyTensorStorage", "SamplerWithoutReplacement", None),
        ("LazyMemmapStorage", "RandomSampler", 2),
    ],
)
@both
def test_empty(lib: Any, note: Note, storage: str, sampler: str, prefetch: int | None) -> None:
    parts = {"storage": getattr(lib, storage)(5), "sampler": getattr(lib, sampler)()}
    rb = lib.ReplayBuffer(**parts, batch_size=2, prefetch=prefetch)
    note("never written", lambda: rb.sample())
    note("iterate", lambda: next(iter(rb)))
    rb.extend(torch.arange(3))
    rb.empty()
    note("emptied", lambda: rb.sample())


@both
def test_global_generator(lib: Any, note: Note) -> None:
    rb = _buffer(lib, batch_size=5)
    torch.manual_seed(7)
    note("uniform", lambda: [rb.sample().tolist() for _ in range(3)])
    note("nothing else was drawn", lambda: torch.rand(3))
    torch.manual_seed(7)
    note("by hand", lambda: [torch.randint(0, 10, (5,)).tolist() for _ in range(3)])


@pytest.mark.parametrize("prefetch", [None, 3])
@both
def test_own_generator(lib: Any, note: Note, prefetch: int | None) -> None:
    # with several threads TorchRL's batches may swap places: ours must give what TorchRL gives without prefetch
    ahead = prefetch if lib.name == "ostinato" else None
    rb = _buffer(lib, batch_size=5, generator=torch.Generator().manual_seed(3), prefetch=ahead)
    note("uniform", lambda: [rb.sample().tolist() for _ in range(6)])
    note("the global one is untouched", lambda: torch.rand(3))


@both
def test_digits_of_the_document(lib: Any, note: Note) -> None:
    torch.manual_seed(0)
    rb = lib.ReplayBuffer(storage=lib.ListStorage(max_size=1000), batch_size=5)
    rb.extend([torch.tensor(number) for number in range(10)])  # TorchRL 0.14 does not collate plain numbers
    note("first", rb.sample)
    note("second", lambda: rb.sample(batch_size=3))
    note("loop", lambda: [batch.tolist() for _, batch in zip(range(4), rb, strict=False)])


@both
def test_equal_seeds_equal_epochs(lib: Any, note: Note) -> None:
    def epochs() -> list[list[int]]:
        options = {"sampler": lib.SamplerWithoutReplacement(), "generator": torch.Generator().manual_seed(3)}
        rb = _buffer(lib, batch_size=5, **options)
        return [batch.tolist() for _ in range(3) for batch in rb]

    note("equal", lambda: epochs() == epochs())
    note("shuffled", lambda: epochs()[:2] != epochs()[2:4])
