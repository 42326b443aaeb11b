"""Batch sizes, random numbers, epochs without replacement, and slices of bare storages."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ._script import Note, both, raw


def _buffer(lib: Any, count: int = 10, **options: Any) -> Any:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(20), **options)
    rb.extend(torch.arange(count))
    return rb


def _ours_only(note: Note, prefetch: int | None) -> int | None:
    """Our prefetching must give what TorchRL gives without: with several threads, TorchRL's batches may swap places."""
    return prefetch if note.library == "ostinato" else None


@both
def test_batch_sizes(lib: Any, note: Note) -> None:
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
def test_random_numbers(lib: Any, note: Note) -> None:
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
def test_epochs(lib: Any, note: Note, prefetch: int | None, drop_last: bool) -> None:
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


# -- bare storages ----------------------------------------------------------------------------------------------------

_LENGTHS = (30, 25, 15, 30)


def _stored(lib: Any, **more: Any) -> Any:
    """A bare storage with 100 rows of four episodes."""
    number = torch.arange(4).repeat_interleave(torch.tensor(_LENGTHS))
    steps = torch.cat([torch.arange(n) for n in _LENGTHS])
    done = torch.cat([torch.arange(n) == n - 1 for n in _LENGTHS])[:, None]
    storage = lib.LazyTensorStorage(100)
    storage.set(range(100), TensorDict({"number": number, "steps": steps, "next": {"done": done}, **more}, [100]))
    return storage


@pytest.mark.parametrize(
    ("make", "options"),
    [
        ("SliceSampler", {"traj_key": "number", "slice_len": 5}),
        ("SliceSampler", {"end_key": ("next", "done"), "num_slices": 4}),
        ("SliceSamplerWithoutReplacement", {"num_slices": 4}),
        ("SliceSamplerWithoutReplacement", {"traj_key": "absent", "end_key": ("next", "done"), "slice_len": 5}),
    ],
)
@both
def test_slices_and_their_info(lib: Any, note: Note, make: str, options: dict[str, Any]) -> None:
    """With both keys, one of them is enough."""
    storage = raw(_stored(lib, is_init=torch.zeros(100, 1, dtype=torch.bool)))
    sampler = raw(getattr(lib, make)(**options))
    for _ in range(10):
        index, info = sampler.sample(storage, 20)
        rows = storage[index].view(4, 5)
        assert rows["number"].unique(dim=1).shape == (4, 1)
        assert bool((rows["steps"].diff() == 1).all())
        last = info["next", "truncated"]
        assert torch.equal(info["next", "done"], rows["next", "done"].view(20, 1) | last)
        note([type(index).__name__, last, info["is_init"], ("collector", "mask") in info])
