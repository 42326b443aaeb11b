"""Reading and rewriting everything: read_all_in_order, write_all, set_, set_at_, update_, new fields."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._script import Note, both, rows

STORAGES = ["LazyTensorStorage", "ListStorage"]


@both
def test_new_field_over_all_rows(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=3)
    rb.extend(rows(4))
    data = rb[:]
    data["value"] = torch.arange(8.0).view(4, 2)
    rb.write_all(data)
    note.rows("rows", lambda: rb[:])
    note("sample", lambda: rb.sample())
    note("one row", lambda: rb[1])
    data["value"] = data["value"] + 100
    rb.write_all(data)
    note("rewritten", lambda: rb[:]["value"])
    note("with the field", lambda: rb.extend(rows(2, 50).set("value", torch.ones(2, 2))))
    note.rows("rows", lambda: rb[:])


@both
def test_in_place(lib: Any, note: Note) -> None:
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10))
    rb.extend(rows(3))
    calls = {
        "set_": lambda: rb.set_("obs", torch.arange(3.0) + 5) is rb,
        "set_ nested": lambda: rb.set_(("next", "obs"), torch.arange(3.0) + 50) is rb,
        "set_at_ slice": lambda: rb.set_at_("obs", torch.tensor([7.0, 8.0]), slice(0, 2)) is rb,
        "set_at_ tensor": lambda: rb.set_at_("obs", torch.tensor([17.0, 18.0]), torch.tensor([0, 2])) is rb,
        "update_ dict": lambda: rb.update_({"obs": torch.arange(3.0) * 3}) is rb,
        "update_ tensordict": lambda: rb.update_(TensorDict({"obs": torch.arange(3.0) * 4}, [3])) is rb,
    }
    for name, call in calls.items():
        note(name, call)
        note.rows("rows", lambda: rb[:])
    note("unknown key", lambda: rb.set_at_("nothing", torch.tensor(1.0), 0))
    note.refusal("too many rows", lambda: rb.set_("obs", torch.arange(10.0)))
    note.refusal("too many rows", lambda: rb.update_({"obs": torch.arange(10.0)}))
    note.rows("rows", lambda: rb[:])


@pytest.mark.parametrize("storage", STORAGES)
@both
def test_all_in_order(lib: Any, note: Note, storage: str) -> None:
    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10))
    note.refusal("nothing to read", rb.read_all_in_order)
    rb.extend(rows(4))
    for end in (None, 2, 4):
        note(f"end={end}", lambda: rb.read_all_in_order(end))
    note("write", lambda: rb.write_all(rows(4, 10)))
    note.rows("rows", lambda: rb[:])
    note("the first two", lambda: rb.write_all(rows(2, 20), end=2))
    note.rows("rows", lambda: rb[:])
