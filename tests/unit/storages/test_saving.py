"""Storages saved without a buffer: dumps and loads, state_dict and load_state_dict, for every kind of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict, is_tensorclass, tensorclass

from ostinato import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, Storage
from ostinato.errors import CheckpointError, CheckpointNotFoundError, DamagedFileError, UsageError

from ...tags import rows, same_state
from ..buffers.refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def local_class() -> Any:
    class Rows:
        a: torch.Tensor
        b: torch.Tensor

    return tensorclass(Rows)


def make_rows(kind: str) -> Any:
    """Return four rows."""
    steps = torch.arange(4)
    if kind == "tensorclass":
        return local_class()(a=steps, b=TensorDict({"c": steps * 2.0}, [4]), batch_size=[4])
    if kind == "text":
        return TensorDict({"a": steps, "name": ["k", "l", "m", "n"]}, [4])
    if kind == "nested":
        return {"a": steps, 30: (steps * 2.0, [steps == 1])}
    return {"tensor": steps, "tensordict": TensorDict({"a": steps, "b": {"c": steps * 2.0}}, [4])}[kind]


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_rows_come_back(make: Callable[[int], Storage], tmp_path: Path) -> None:
    for kind in ("tensor", "tensordict", "tensorclass", "nested", "text"):
        storage, empty, used, given = make(9), make(7), make(7), make_rows(kind)
        storage.set(range(4), given)
        used.set(range(4), given)
        used.clear()
        storage.dumps(tmp_path / kind)
        storage.save(tmp_path / kind)
        if kind in {"tensor", "nested"}:
            with pytest.raises(UsageError):
                empty.loads(tmp_path / kind)
            assert empty.schema is None
        for again in (used,) if kind in {"tensor", "nested"} else (empty, used):
            again.load(tmp_path / kind)
            assert len(again) == 4
            assert type(again[:]) is type(storage[:])
            same_state(*(x.to_tensordict() if is_tensorclass(x) else x for x in (again[:], given)))


def test_a_load_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    storage, items = LazyTensorStorage(4), ListStorage(4)
    storage.set(range(3), rows(range(3)))
    storage.dumps(tmp_path / "s")
    items.set(range(2), torch.arange(2))
    for other, data in ((LazyTensorStorage(4), torch.zeros(2, 3)), (LazyTensorStorage(2), rows(range(2)))):
        other.set(range(2), data)
        with pytest.raises(CheckpointError):
            other.loads(tmp_path / "s")
        same_state(other[:], data)
    for made, from_other in ((items, storage), (storage, items)):
        for wrong in (from_other.state_dict(), {"_storage": {}, "_len": 2}):
            with pytest.raises(CheckpointError):
                made.load_state_dict(wrong)
    raises(
        (lambda: items.loads(tmp_path / "s"), CheckpointError, "form"),
        (lambda: storage.loads(tmp_path / "nothing"), CheckpointNotFoundError, ""),
        (lambda: ReplayBuffer(storage=LazyTensorStorage(4)).loads(tmp_path / "s"), CheckpointError, "format"),
    )
    file = max((tmp_path / "s").glob("*.bin"), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(DamagedFileError):
        storage.loads(tmp_path / "s")
    same_state(storage[:], rows(range(3)))
    assert [int(row) for row in items] == [0, 1]
