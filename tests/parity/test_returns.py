"""What extend, add and sample return, and which keys rows and samples have."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._script import Note, both, rows

BUFFERS = ["ReplayBuffer", "TensorDictReplayBuffer"]


@both
def test_defaults(lib: Any, note: Note) -> None:
    for buffer in BUFFERS:
        rb = getattr(lib, buffer)()
        note("parts", lambda: [type(part).__name__ for part in (rb.storage, rb.sampler, rb.writer)])
        note("capacity", lambda: rb.storage.max_size)
        note("empty", lambda: (len(rb), bool(rb)))
    note("priority key", lambda: lib.TensorDictReplayBuffer(priority_key="p").priority_key)


@pytest.mark.parametrize("storage", ["ListStorage", "LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("buffer", BUFFERS)
@both
def test_writes_and_samples(lib: Any, note: Note, buffer: str, storage: str) -> None:
    rb = getattr(lib, buffer)(storage=getattr(lib, storage)(5), batch_size=4)
    for count, start in ((3, 0), (4, 10), (12, 20), (5, 40), (1, 50)):
        note(f"extend {count}", lambda: rb.extend(rows(count, start)))
        note.rows("rows", lambda: (len(rb), rb[:]))
        note("sample and info", lambda: rb.sample(return_info=True))
    for number in range(3):
        note("add", lambda: rb.add(rows(1, number)[0]))
    note("other batch size", lambda: rb.sample(2))
    note.rows("sampling writes nothing", lambda: rb.storage[:])
    note("locked", lambda: (rb.sample().is_locked, rb.sample()["obs"].device.type))
    note("rows written in all", lambda: rb.write_count)


@both
def test_the_index(lib: Any, note: Note) -> None:
    data = TensorDict({"index": torch.tensor([7, 8, 9]), "a": torch.zeros(3)}, [3])
    for buffer, writer in zip(BUFFERS, ("TensorDictRoundRobinWriter", "RoundRobinWriter"), strict=True):
        for rb in (
            getattr(lib, buffer)(storage=lib.LazyTensorStorage(5), batch_size=2),
            getattr(lib, buffer)(storage=lib.LazyTensorStorage(5), writer=getattr(lib, writer)(), batch_size=2),
        ):
            note("extend", lambda: rb.extend(data.clone()))
            note.rows("stored", lambda: rb[:])
            note("sample", lambda: rb.sample(include_info=True))
