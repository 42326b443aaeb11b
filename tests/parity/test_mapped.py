"""Memory-mapped storage: what samples are, where files may go, and directories that exist already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ._script import Note, both, rows

if TYPE_CHECKING:
    from pathlib import Path


@both
def test_directory(lib: Any, note: Note, tmp_path: Path) -> None:
    home = tmp_path / lib.name
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10, scratch_dir=str(home / "new" / "deep")), batch_size=2)
    note("extend", lambda: rb.extend(rows(3)))
    note("rows", lambda: rb[:])
    note("files appear", lambda: any(path.is_file() for path in home.rglob("*")))
    (home / "empty").mkdir()
    other = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10, scratch_dir=home / "empty"))
    note("an empty directory", lambda: other.extend(rows(3)))


@both
def test_directory_in_use(lib: Any, note: Note, tmp_path: Path) -> None:
    home = tmp_path / lib.name
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10, scratch_dir=home))
    rb.extend(rows(3))
    note.refusal("again", lambda: lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10, scratch_dir=home)).extend(rows(2)))
    note("the first is unharmed", lambda: rb[:])


@both
def test_samples_are_plain_tensors(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10), batch_size=2)
    rb.extend(rows(3))
    note("sample", lambda: type(rb.sample()["obs"]).__name__)
    note("by tensor", lambda: type(rb[torch.tensor([0, 1])]["obs"]).__name__)
    note("a sample may gain keys", lambda: rb.sample().set("new", torch.zeros(2)))
    sample = rb.sample()
    sample["obs"].fill_(-1)
    note("a sample is a copy", lambda: rb[:])
    rb[:]["obs"].fill_(-1)
    note("a slice is a view", lambda: rb[:])


@pytest.mark.parametrize("kind", ["tensor", "pytree"])
@both
def test_other_data(lib: Any, note: Note, kind: str) -> None:
    tree = {"a": torch.arange(2), "b": (torch.zeros(2), [torch.ones(2)]), 30: torch.zeros(2)}
    rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(4), batch_size=2)
    note("extend", lambda: rb.extend(torch.arange(2) if kind == "tensor" else tree))
    note("sample", rb.sample)
    note("rows", lambda: rb[:])


@both
def test_device(lib: Any, note: Note) -> None:
    note("cpu", lambda: str(lib.LazyMemmapStorage(4, device="cpu").device))
    note("auto", lambda: str(lib.LazyMemmapStorage(4, device="auto").device))
