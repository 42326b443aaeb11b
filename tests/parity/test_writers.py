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


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "ListStorage"])
@both
def test_the_best_stay(lib: Any, note: Note, storage: str) -> None:
    rb = _best(lib, storage)
    for values in (
        [1.0, 5.0, 3.0],
        [0.0, 9.0, 4.0, 2.0],
        [-1.0, -2.0],
        [4.5],
        [200.0, 1.0, 201.0, 202.0, 3.0, 203.0],
    ):
        note(f"extend {values}", lambda: rb.extend(_ranked(values)))
        note("kept", lambda: rb[:]["key"])
    note("length", lambda: len(rb))


@both
def test_more_rows_than_room_at_once(lib: Any, note: Note) -> None:
    rb = _best(lib)
    note("extend", lambda: rb.extend(_ranked([3.0, 1.0, 2.0, 9.0, 8.0, 0.0])))
    note("kept", lambda: rb[:]["key"])


@both
def test_add(lib: Any, note: Note) -> None:
    rb = _best(lib)
    rb.extend(_ranked([1.0, 5.0, 3.0, 4.0]))
    for value in (0.0, 1.0, 2.0, 100.0):
        note(f"add {value}", lambda: rb.add(_ranked([value])[0]))
        note("kept", lambda: rb[:]["key"])


@pytest.mark.parametrize("reduction", ["sum", "max", "min", "mean", "median"])
@both
def test_reductions(lib: Any, note: Note, reduction: str) -> None:
    rb = _best(lib, reduction=reduction)
    pairs = [[1.0, 9.0], [5.0, 5.0], [4.0, 0.0], [7.0, 7.0], [2.0, 3.0], [10.0, 0.0]]
    note("extend", lambda: rb.extend(_ranked(pairs)))
    note("kept", lambda: rb[:]["key"])


@both
def test_default_rank_key(lib: Any, note: Note) -> None:
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(2), writer=lib.TensorDictMaxValueWriter())
    data = TensorDict({("next", "reward"): torch.tensor([1.0, 3.0, 2.0])}, [3])
    note("extend", lambda: rb.extend(data))
    note("kept", lambda: rb[:]["next", "reward"])


@both
def test_integers_and_empty(lib: Any, note: Note) -> None:
    rb = _best(lib)
    note("integers", lambda: rb.extend(_ranked([1, 5, 3, 4, 2], torch.int64)))
    note("kept", lambda: rb[:]["key"])
    rb.empty()
    note("emptied", lambda: rb.extend(_ranked([1], torch.int64)))
    note("kept", lambda: rb[:]["key"])


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


@pytest.mark.parametrize("buffer", ["ReplayBuffer", "TensorDictReplayBuffer"])
@both
def test_read_only(lib: Any, note: Note, buffer: str) -> None:
    rb = getattr(lib, buffer)(storage=lib.TensorStorage(rows(4)), writer=lib.ImmutableDatasetWriter(), batch_size=2)
    note("length", lambda: len(rb))
    note("sample", rb.sample)
    note("extend", lambda: rb.extend(rows(2)))
    note("add", lambda: rb.add(rows(1)[0]))
    note("empty", rb.empty)
    note("rows", lambda: rb[:])


@both
def test_tensordict_writer_needs_tensordicts(lib: Any, note: Note) -> None:
    for data in (torch.arange(3), {"a": torch.arange(3)}):
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5), writer=lib.TensorDictRoundRobinWriter())
        note.refusal(type(data).__name__, lambda: rb.extend(data))
