"""Exchanging parts, state, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ._script import Note, both, raw, rows

if TYPE_CHECKING:
    from pathlib import Path


@both
def test_parts_are_made_and_exchanged(lib: Any, note: Note) -> None:
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
def test_dumps_and_loads(lib: Any, note: Note, storage: str, tmp_path: Path) -> None:
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
