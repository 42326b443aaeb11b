"""Storages saved without a buffer: dumps and loads, state_dict and load_state_dict, for every kind of rows."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict, is_tensorclass, tensorclass

from ostinato import Flat2TED, LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, Storage, TED2Flat
from ostinato.errors import CheckpointError, CheckpointNotFoundError, DamagedFileError, UsageError

from ...tags import fill, read_ids, rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAKERS: dict[str, Callable[..., Storage]] = {
    "tensor": LazyTensorStorage,
    "mapped": LazyMemmapStorage,
    "unpacked": partial(LazyTensorStorage, packed=False),
    "list": ListStorage,
}


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


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "batch_size"):
        return type(a) is type(b) and equal(a.to_dict(), b.to_dict())
    return bool(a == b)


KINDS = ["tensor", "tensordict", "tensorclass", "nested", "text"]


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_rows_come_back(make: Callable[[int], Storage], kind: str, written: bool, tmp_path: Path) -> None:
    storage, data = make(9), make_rows(kind)
    storage.set(range(4), data)
    storage.dumps(tmp_path / "s")
    storage.save(tmp_path / "s")
    again = make(7)
    if written:
        again.set(range(2), cut(data) if kind == "nested" else data[:2])
    elif kind in {"tensor", "nested"}:
        with pytest.raises(UsageError, match="Cannot fill a non-initialized pytree-based TensorStorage"):
            again.loads(tmp_path / "s")
        assert again.schema is None
        return
    again.load(tmp_path / "s")
    assert len(again) == 4
    assert equal(again[:], storage[:])
    assert is_tensorclass(again[:]) is (kind == "tensorclass")


def cut(data: Any, rows: int = 2) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x[:rows], data)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("count", [3, 6, 10])
def test_a_buffer_goes_on_where_the_storage_was(make: Callable[..., Storage], count: int, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=make(6))
    fill(rb, range(count), "tensordict")
    rb.storage.dump(tmp_path / "s")
    other = ReplayBuffer(storage=make(6), batch_size=5)
    other.storage.loads(tmp_path / "s")
    assert other.extend(rows([99], "tensordict")).tolist() == [count % 6]
    stored = other.storage[:]
    found = read_ids(stored if other.storage.default_collate is None else torch.stack(stored))
    assert sorted(found) == sorted([*range(max(0, count - 6 + (count >= 6)), count), 99])


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_states_go_through_torch_save(make: Callable[..., Storage], filled: bool) -> None:
    storage, file = make(6), io.BytesIO()
    if filled:
        storage.set(range(4), rows(range(4), "tensordict"))
    torch.save(storage.state_dict(), file)
    for before in (0, 2):
        file.seek(0)
        again = make(6)
        if before:
            again.set(range(before), rows(range(10, 10 + before), "tensordict"))
        state = torch.load(file, weights_only=not isinstance(storage, ListStorage))
        again.load_state_dict(state)
        assert len(again) == (4 if filled else 0)
        if filled:
            got = again[:] if again.default_collate is None else torch.stack(again[:])
            assert read_ids(got) == [0, 1, 2, 3]
            again.set(0, rows([50], "tensordict")[0])
            assert read_ids(got)[1:] == [1, 2, 3]


@pytest.mark.parametrize("also_single", [True, False])
def test_rows_stored_once_come_back(also_single: bool, tmp_path: Path) -> None:
    steps = torch.arange(6.0)
    after = torch.where(steps % 3 == 2, -steps, steps + 1)  # episodes of three
    data = {"obs": steps.view(3, 2), "next": {"obs": after.view(3, 2)}}
    storage, again = (
        LazyTensorStorage(8, ndim=2, single_copy=True),
        LazyTensorStorage(8, ndim=2, single_copy=also_single),
    )
    storage.set(range(3), data)
    again.set(range(1), cut({"obs": steps.view(3, 2), "next": {"obs": after.view(3, 2)}}, 1))
    storage.dumps(tmp_path / "s")
    again.loads(tmp_path / "s")
    assert equal(again[:], data)


def test_a_load_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    storage = LazyTensorStorage(4)
    storage.set(range(3), rows(range(3)))
    storage.dumps(tmp_path / "s")
    for other, wrong in ((LazyTensorStorage(4), torch.zeros(2, 3)), (LazyTensorStorage(2), rows(range(2)))):
        other.set(range(2), wrong)
        before = other[:]
        with pytest.raises(CheckpointError):
            other.loads(tmp_path / "s")
        assert len(other) == 2
        assert equal(other[:], before)
    with pytest.raises(CheckpointError, match="form"):
        ListStorage(4).loads(tmp_path / "s")
    with pytest.raises(CheckpointNotFoundError):
        storage.loads(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="format"):
        ReplayBuffer(storage=LazyTensorStorage(4)).loads(tmp_path / "s")


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_state_of_something_else_changes_nothing(make: Callable[[int], Storage]) -> None:
    storage, other = make(4), LazyTensorStorage(4) if make is ListStorage else ListStorage(4)
    storage.set(range(2), torch.arange(2))
    other.set(range(2), torch.arange(2))
    for state in (other.state_dict(), {"_storage": {}, "_len": 2}):
        with pytest.raises(CheckpointError, match="form"):
            storage.load_state_dict(state)
    assert [int(row) for row in storage] == [0, 1]


def test_a_damaged_file_is_found_before_rows_change(tmp_path: Path) -> None:
    storage = LazyTensorStorage(4)
    storage.set(range(3), torch.arange(3))
    storage.dumps(tmp_path / "s")
    file = next((tmp_path / "s").glob("*.bin"))
    file.write_bytes(bytes(len(file.read_bytes())))
    used = LazyTensorStorage(4)
    used.set(range(2), torch.tensor([7, 8]))
    with pytest.raises(DamagedFileError):
        used.loads(tmp_path / "s")
    assert used[:].tolist() == [7, 8]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Cannot save a non-initialized storage"):
        LazyTensorStorage(4).dumps(tmp_path / "s")
    objects = ListStorage(4)
    objects.set(0, object())
    with pytest.raises(CheckpointError, match="allow_pickle"):
        objects.dumps(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    allowed = ListStorage(4, allow_pickle=True)
    allowed.set(range(2), [{"set": {1, 2}}, None])
    allowed.dumps(tmp_path / "s")
    again = ListStorage(4, allow_pickle=True)
    again.loads(tmp_path / "s")
    assert again[0] == {"set": {1, 2}}
    with pytest.raises(CheckpointError, match="allow_pickle"):
        ListStorage(4).loads(tmp_path / "s")


def test_hooks_convert_the_rows(tmp_path: Path) -> None:
    def storage() -> LazyTensorStorage:
        made = LazyTensorStorage(6)
        made.register_save_hook(TED2Flat())
        made.register_load_hook(Flat2TED())
        return made

    steps = torch.arange(6.0)
    done = (steps % 3 == 2).unsqueeze(-1)
    after = torch.where(done.squeeze(-1), -steps, steps + 1)
    data = TensorDict({"obs": steps, "next": {"obs": after, "reward": steps.unsqueeze(-1), "done": done}}, [6])
    first, second = storage(), storage()
    first.set(range(6), data)
    first.dumps(tmp_path / "s")
    second.loads(tmp_path / "s")
    assert (second[:] == data).all()
    with pytest.raises(CheckpointError, match="hooks"):
        LazyTensorStorage(6).loads(tmp_path / "s")


def test_a_class_defined_in_a_function_is_found_again(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    data = make_rows("tensorclass")
    rb.extend(data)
    rb.dumps(tmp_path / "s")
    again = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    again.loads(tmp_path / "s")
    assert type(again.sample()) is type(data)
    third = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    third.load_state_dict(rb.state_dict())
    assert type(third[:]) is type(data)
