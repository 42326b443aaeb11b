"""Which random numbers a sample takes, and from which generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ._script import Note, both


def _buffer(lib: Any, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20), batch_size=5, **options)
    rb.extend(torch.arange(10))
    return rb


@both
def test_global_generator(lib: Any, note: Note) -> None:
    rb = _buffer(lib)
    torch.manual_seed(7)
    note("uniform", lambda: [rb.sample().tolist() for _ in range(3)])
    note("nothing else was drawn", lambda: torch.rand(3))
    torch.manual_seed(7)
    note("by hand", lambda: [torch.randint(0, 10, (5,)).tolist() for _ in range(3)])


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@both
def test_own_generator(lib: Any, note: Note, prefetch: int | None) -> None:
    # with several threads TorchRL's batches may swap places: ours must give what TorchRL gives without prefetch
    ahead = prefetch if lib.name == "ostinato" else None
    rb = _buffer(lib, generator=torch.Generator().manual_seed(3), prefetch=ahead)
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
    torch.manual_seed(0)
    objects = lib.ReplayBuffer(storage=lib.ListStorage(100), collate_fn=lambda x: x)
    objects.extend(["a", 1, None])
    note("objects", lambda: objects.sample(3))


@both
def test_part_filled_and_full(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(6), batch_size=8)
    for count in (1, 3, 4, 11):
        rb.extend(torch.arange(count))
        note(f"{len(rb)} rows", lambda: rb.sample(return_info=True))


@both
def test_equal_seeds_equal_epochs(lib: Any, note: Note) -> None:
    epochs = []
    for _ in range(2):
        sampler = lib.SamplerWithoutReplacement()
        rb = _buffer(lib, sampler=sampler, generator=torch.Generator().manual_seed(3))
        epochs.append([batch.tolist() for _ in range(3) for batch in rb])
    note("equal", lambda: epochs[0] == epochs[1])
    note("shuffled", lambda: epochs[0][:2] != epochs[0][2:4])
