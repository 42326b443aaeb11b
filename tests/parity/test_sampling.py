"""Batch sizes, random numbers, epochs without replacement; exchanging parts, checkpoints."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from ._script import Note, both, raw, rows


def _buffer(lib: Any, count: int = 10, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20), **options)
    rb.extend(torch.arange(count))
    return rb


def _ours_only(note: Note, prefetch: int | None) -> int | None:
    """Our prefetching must give what TorchRL gives without: with several threads, TorchRL's batches may swap places."""
    return prefetch if note.library == "ostinato" else None


@both
def test_batch_sizes(lib, note):
    plain = _buffer(lib)
    plain.sample()
    list(islice(plain, 1))
    lib.ReplayBuffer(storage=lib.LazyTensorStorage(5)).sample()
    rb = _buffer(lib, batch_size=4)
    for size in (2, None, np.int64(3), 64):
        rb.sample(size)
    rb.sample(batch_size=3)
    note(rb.batch_size)
    _buffer(lib, batch_size=np.int64(2)).sample()
    _buffer(lib, prefetch=0).sample(2)
    with note.refusals():
        for bad in (-1, 2.5, "2"):
            plain.sample(bad)
    for options in ({"prefetch": 2}, {"sampler": lib.SamplerWithoutReplacement(drop_last=True)}, {"nonsense": 1}):
        lib.ReplayBuffer(storage=lib.LazyTensorStorage(20), **options)
    lib.ReplayBuffer(lib.ListStorage(3))


@both
def test_random_numbers(lib, note):
    rb = _buffer(lib, batch_size=5)
    torch.manual_seed(7)
    drawn = [rb.sample().tolist() for _ in range(3)]
    note(torch.rand(3))  # nothing else was drawn
    torch.manual_seed(7)
    assert drawn == [torch.randint(0, 10, (5,)).tolist() for _ in range(3)]
    for prefetch in (None, 3):
        generator = torch.Generator().manual_seed(3)
        rb = _buffer(lib, batch_size=5, generator=generator, prefetch=_ours_only(note, prefetch))
        for _ in range(6):
            rb.sample()
        note(torch.rand(3))
    torch.manual_seed(0)  # the digits of the document
    rb = lib.ReplayBuffer(storage=lib.ListStorage(max_size=1000), batch_size=5)
    rb.extend([torch.tensor(number) for number in range(10)])  # TorchRL 0.14 does not collate plain numbers
    rb.sample()
    rb.sample(batch_size=3)
    list(islice(rb, 4))


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@both
def test_epochs(lib, note, prefetch, drop_last):
    def buffer(count: int, size: int = 4) -> Any:
        sampler = lib.SamplerWithoutReplacement(shuffle=False, drop_last=drop_last)
        return _buffer(lib, count, sampler=sampler, batch_size=size, prefetch=_ours_only(note, prefetch))

    for count in (8, 10):
        rb = buffer(count)
        for _ in range(3):
            list(rb)
    if prefetch is None:
        rb = buffer(10)
        for _ in range(7):
            rb.sample()
            note(rb.sampler.ran_out)
        rb.empty()
        rb.sample()
        rb.extend(torch.arange(5))
        rb.sample()
        rb.sample()
    buffer(3, size=5).sample()  # a batch larger than the buffer
    list(islice(buffer(3, size=5), 3))


@both
def test_parts_are_made_and_exchanged(lib, note):
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5), batch_size=2)
    rb.extend(rows(3))
    note((rb.storage, rb.sampler, rb.writer))
    rb.set_sampler(lib.SamplerWithoutReplacement())
    rb.set_writer(lib.TensorDictRoundRobinWriter())
    rb.set_storage(lib.ListStorage(7))
    note((rb.storage, rb.sampler, rb.writer))
    rb.storage, rb.sampler, rb.writer = None, None, None
    made = raw(lib.ListStorage)
    rb = lib.ReplayBuffer(storage=lambda: made(3), sampler=lib.RandomSampler, writer=lib.RoundRobinWriter)
    note((rb.storage, rb.sampler, rb.writer, rb.storage.max_size))
    lib.RandomSampler(replacement=True)
    for sampler in (lib.RandomSampler(replacement=False, drop_last=True), lib.SamplerWithoutReplacement(True, False)):
        note((isinstance(raw(sampler), raw(lib.SamplerWithoutReplacement)), sampler.drop_last, sampler.shuffle))
    for wrong in ({"storage": "x"}, {"sampler": "x"}, {"writer": "x"}, {"storage": lib.RandomSampler()}):
        lib.ReplayBuffer(**wrong)
    with note.refusals():
        lib.ReplayBuffer(transform=5)


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@both
def test_dumps_and_loads(lib, note, storage, tmp_path):
    kinds: list[Any] = [rows(7), torch.arange(7), {"a": torch.arange(7), "b": (torch.zeros(7, 2),)}]
    for number, data in enumerate(kinds):
        rb, other = (lib.ReplayBuffer(storage=getattr(lib, storage)(5), batch_size=2) for _ in range(2))
        path = tmp_path / f"{note.library} {number}"
        rb.extend(data)
        rb.dumps(path)
        rb.dumps(str(path))
        other.extend(data)
        other.loads(path)
        other[:]
        other.extend(data)
        small = lib.ReplayBuffer(storage=getattr(lib, storage)(2))
        with note.refusals():
            small.loads(path)
            rb.loads(tmp_path / "nothing")
