"""Writers: the keep-the-best writer, the read-only writer, and what they refuse."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._script import Note, both, rows


def _ranked(values: list[Any], dtype: torch.dtype = torch.float32) -> TensorDict:
    return TensorDict({"key": torch.tensor(values, dtype=dtype), "obs": torch.arange(len(values))}, [len(values)])


def _best(lib: Any, storage: str = "LazyTensorStorage", buffer: str = "ReplayBuffer", **options: Any) -> Any:
    writer = lib.TensorDictMaxValueWriter(**{"rank_key": "key", **options})
    return getattr(lib, buffer)(storage=getattr(lib, storage)(4), batch_size=3, writer=writer)


@both
def test_refused(lib: Any, note: Note) -> None:
    for data in (torch.arange(3), {"key": torch.zeros(3)}):
        note(f"extend {type(data).__name__}", lambda: _best(lib).extend(data))
    note("add dict", lambda: _best(lib).add({"key": torch.tensor(1.0)}))
    note.refusal("no rank key", lambda: _best(lib).extend(rows(3)))
    note(
        "two dimensions",
        lambda: lib.ReplayBuffer(storage=lib.LazyTensorStorage(4, ndim=2), writer=lib.TensorDictMaxValueWriter()),
    )


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "ListStorage"])
@both
def test_the_best_stay(lib: Any, note: Note, storage: str) -> None:
    rb = _best(lib, storage)
    for values in ([1.0, 5.0, 3.0], [0.0, 9.0, 4.0, 2.0], [-1.0], [4.5], [200.0, 1.0, 201.0, 202.0, 3.0, 203.0]):
        note(f"extend {values}", lambda: rb.extend(_ranked(values)))
        note("kept", lambda: (len(rb), rb[:]["key"]))
    for value in (0.0, 202.5):
        note(f"add {value}", lambda: rb.add(_ranked([value])[0]))
        note("kept", lambda: rb[:]["key"])
    rb.empty()
    note("emptied", lambda: rb.extend(_ranked([3.0, 1.0, 2.0, 9.0, 8.0, 0.0])))
    note("kept", lambda: rb[:]["key"])


@both
def test_ranks(lib: Any, note: Note) -> None:
    for reduction in ("sum", "max", "min", "mean", "median"):
        rb = _best(lib, reduction=reduction)
        pairs = [[1.0, 9.0], [5.0, 5.0], [4.0, 0.0], [7.0, 7.0], [2.0, 3.0], [10.0, 0.0]]
        note("extend", lambda: rb.extend(_ranked(pairs)))
        note("kept", lambda: rb[:]["key"])
    rb = _best(lib)
    note("integers", lambda: (rb.extend(_ranked([1, 5, 3, 4, 2], torch.int64)), rb[:]["key"]))
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(2), writer=lib.TensorDictMaxValueWriter())
    rewards = TensorDict({("next", "reward"): torch.tensor([1.0, 3.0, 2.0])}, [3])
    note("default rank key", lambda: (rb.extend(rewards), rb[:]["next", "reward"]))


@both
def test_read_only(lib: Any, note: Note) -> None:
    storage, writer = lib.TensorStorage(rows(4)), lib.ImmutableDatasetWriter()
    rb = lib.TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=2)
    note("sample", rb.sample)
    note("extend", lambda: rb.extend(rows(2)))
    note("add", lambda: rb.add(rows(1)[0]))
    note("empty", rb.empty)
    note("rows", lambda: rb[:])
