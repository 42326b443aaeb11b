"""Storages without a buffer: set, get, contains, flatten, states and files, beside TorchRL's."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_map

from ._differences import Difference, Fails, check
from ._script import Note, both, rows

if TYPE_CHECKING:
    from pathlib import Path


LAZY = ["LazyTensorStorage", "LazyMemmapStorage"]
EVERY = [*LAZY, "ListStorage"]


@pytest.mark.parametrize("name", EVERY)
@both
def test_rows_are_written_and_read_by_index(lib: Any, note: Note, name: str) -> None:
    storage = getattr(lib, name)(6)
    storage.set(range(4), rows(4))
    note("length", lambda: len(storage))
    for index in (0, -1, slice(1, 3), [2, 0], torch.tensor([3, 3])):
        note.rows(f"get({index})", lambda: storage.get(index))
    storage.set(4, rows(1, 9)[0])
    storage[1] = rows(1, 20)[0]
    note.rows("rows", lambda: list(storage))
    note("contains", lambda: [i in storage for i in range(-6, 6)])
    note("contains, tensor", lambda: storage.contains(torch.tensor([-6, -5, 4, 5])))
    note.refusal("get out of range", lambda: storage.get(5))
    note.refusal("set out of range", lambda: storage.set(range(5, 9), rows(4)))


@pytest.mark.parametrize("name", LAZY)
@both
def test_files(lib: Any, note: Note, name: str, tmp_path: Path) -> None:
    kinds: dict[str, Any] = {
        "tensordict": rows(3),
        "tensor": torch.arange(3),
        "dict": {"a": torch.arange(3), 30: torch.ones(3)},
    }
    for kind, data in kinds.items():
        folder = tmp_path / f"{lib.name} {kind}"
        storage, fresh, written = (getattr(lib, name)(6) for _ in range(3))
        note.refusal("dumps, empty", lambda: storage.dumps(tmp_path / f"{lib.name} empty"))
        storage.set(range(3), data)
        written.set(range(3), tree_map(torch.zeros_like, data))
        for _ in range(2):
            storage.dumps(folder)
        for again in (fresh, written) if kind == "tensordict" else (written,):  # TorchRL's others need rows before
            note("loads", lambda: again.loads(folder))
            note.rows("rows", lambda: (len(again), again[:]))


@both
def test_mapped_files(lib: Any, note: Note, tmp_path: Path) -> None:
    home = tmp_path / lib.name / "new" / "deep"
    for existsok in (False, False, True):
        storage = lib.LazyMemmapStorage(5, scratch_dir=home, existsok=existsok)
        note(f"existsok={existsok}", lambda: storage.set(range(2), rows(2)))
    note("files appear", lambda: any(path.is_file() for path in home.iterdir()))
    rb = lib.ReplayBuffer(
        storage=lib.LazyMemmapStorage(10, scratch_dir=str(tmp_path / lib.name / "other")), batch_size=2
    )
    rb.extend(rows(3))
    note(
        "a sample is of plain tensors", lambda: [type(x["obs"]).__name__ for x in (rb.sample(), rb[torch.tensor([0])])]
    )
    note("a sample may gain keys", lambda: rb.sample().set("new", torch.zeros(2)))
    rb.sample()["obs"].fill_(-1)
    note("a sample is a copy", lambda: rb[:])
    rb[:]["obs"].fill_(-1)
    note("a slice is a view", lambda: rb[:])
    for device in ("cpu", "auto", "meta"):
        note("device", lambda: str(lib.LazyMemmapStorage(4, device=device).device))


def _counted(lib: Any) -> int:
    storage = lib.LazyTensorStorage(10)
    for _ in range(2):
        storage.set(range(3), torch.arange(3))
    return len(storage)


def _beyond(lib: Any) -> int:
    storage = lib.LazyTensorStorage(10)
    storage.set(range(5, 8), torch.arange(3))
    return len(storage)


def _stacked(lib: Any) -> float:
    storage = lib.LazyStackStorage(4)
    for length in (2, 3):
        storage.set(length - 2, TensorDict({"a": torch.ones(length)}))
    storage[:].zero_()
    return float(storage[0]["a"][0])


DIFFERENCES = [
    Difference("rows that are replaced do not count twice", _counted, 6, 3),
    Difference("positions leave no empty slots", _beyond, 3, Fails("SlotError")),
    Difference("lazy stacks are copies", _stacked, 0.0, 1.0),
]


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.reason)
def test_differences(difference: Difference) -> None:
    check(difference)
