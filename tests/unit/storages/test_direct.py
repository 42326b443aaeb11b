"""Storages without a buffer: set, get, item assignment, iteration, contains, flatten; and buffers that follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from ostinato.errors import (
    CapacityError,
    CheckpointError,
    KindError,
    OptionError,
    SchemaError,
    SlotError,
    UsageError,
)

from ...tags import read_ids, rows
from ..buffers.refusals import raises

MAKERS: dict[str, Any] = {
    "tensor": LazyTensorStorage,
    "mapped": LazyMemmapStorage,
    "list": ListStorage,
}
every_storage = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
CURSORS: list[Any] = [
    range(2, 5),
    slice(2, 5),
    [2, 3, 4],
    (2, 3, 4),
    torch.tensor([2, 3, 4], dtype=torch.int32),
    np.array([2, 3, 4]),
    [4, 2, 3],
]


def ids(storage: Storage) -> list[int]:
    got = storage[:]
    return read_ids(got if storage.default_collate is None or not len(storage) else storage.default_collate(got))


@every_storage
def test_rows_are_written_at_any_kind_of_cursor(make):
    for cursor in CURSORS:
        storage = make(6)
        storage.set(range(2), rows([0, 1], "tensordict"))
        storage.set(cursor, rows([12, 13, 14], "tensordict"))
        expected = [0, 1, 13, 14, 12] if cursor is CURSORS[-1] else [0, 1, 12, 13, 14]
        assert ids(storage) == expected
        storage.set(cursor, rows([22, 23, 24], "tensordict"), set_cursor=False)
        assert ids(storage) == [row + 10 if row > 1 else row for row in expected]
    for cursor, number in ((0, 7), (torch.tensor(1), 8), (np.int64(2), 9), (-1, 6)):
        storage.set(cursor, rows([number], "tensordict")[0])
    storage[3] = rows([5], "tensordict")[0]
    assert [read_ids(row.unsqueeze(0))[0] for row in storage] == [7, 8, 9, 5, 6]
    storage.set(5, rows([4], "tensordict")[0])
    storage.set([5, 0, 1], rows([3, 2, 1], "tensordict"))
    storage.set([2, 2], rows([50, 60], "tensordict"))
    storage.set(torch.tensor([False] * 3 + [True] * 2 + [False]), rows([70, 80], "tensordict"))
    assert ids(storage) == [2, 1, 60, 70, 80, 3]


@every_storage
def test_refused_writes_change_nothing(make):
    storage = make(4)
    storage.set(range(2), rows([0, 1], "tensordict"))
    three = rows([5, 6, 7], "tensordict")
    cases: list[Any] = [
        (range(3, 4), three[:1], True, SlotError, "more than one item away"),
        (range(2, 5), three, True, SlotError, "maximum capacity is 4"),
        (-3, three[0], True, SlotError, "out of range"),
        (range(2, 4), three, True, SchemaError, "one for each"),
        (2, three[0], False, SlotError, "."),
        ("here", three, True, KindError, "."),
        (torch.tensor([0.5]), three[:1], True, KindError, "."),
    ]
    for cursor, data, set_cursor, error, message in cases:
        with pytest.raises(error, match=message):
            storage.set(cursor, data, set_cursor=set_cursor)
    with pytest.raises(UsageError):
        torch.vmap(lambda x: storage.set(0, three[0]) or x)(torch.zeros(2))
    assert ids(storage) == [0, 1]
    fresh = make(4)
    with pytest.raises(SlotError):
        fresh.set(range(1, 3), three[:2])
    assert fresh.schema is None


def test_steps_of_environments_are_written():
    grid = torch.arange(12).view(4, 3)
    for kind in ("tensor", "tensordict"):
        storage = LazyTensorStorage(12, ndim=2)
        storage.set(range(3), rows(grid[:3], kind))
        assert storage.shape == torch.Size([3, 3])
        storage.set(3, rows(grid[3], kind))
        storage.set([1, 0], rows(grid[:2] + 100, kind))
        flat = storage.flatten()
        assert (flat.ndim, len(flat)) == (1, 12)
        assert read_ids(flat[:]) == [103, 104, 105, 100, 101, 102, *range(6, 12)]
        flat[0] = rows(torch.tensor(77), kind)
        assert read_ids(storage.flatten()[:])[0] == 77, "flatten() copied the rows"
        assert storage.contains(torch.tensor([[3, 2], [4, 0], [-1, 3]])).tolist() == [True, False, False]  # type: ignore[union-attr]


@every_storage
def test_contains(make):
    storage = make(9)
    assert 0 not in storage
    storage.set(range(4), rows(range(4), "tensordict"))
    assert [i for i in range(-9, 9) if i in storage] == list(range(-4, 4))
    assert storage.contains(torch.tensor([[0, 3], [4, -5]])).tolist() == [[True, True], [False, False]]
    assert torch.tensor([0, 4]) not in storage
    with pytest.raises(KindError):
        storage.contains("a")


def test_rows_of_a_single_copy_storage_are_written_in_order():
    storage, steps = LazyTensorStorage(4, single_copy=True), torch.arange(2)
    with pytest.raises(OptionError):
        storage.set([1, 0], {"obs": steps, "next": {"obs": steps + 1}})


# -- options -------------------------------------------------------------------------------------------------------


def single_in_two_dimensions() -> LazyTensorStorage:
    storage = LazyTensorStorage(8, ndim=2, single_copy=True)
    storage.set(range(2), {"obs": torch.zeros(2, 2), "next": {"obs": torch.ones(2, 2)}})
    return storage


def test_options_of_tensor_storages():
    two = torch.zeros(2)
    raises(
        (lambda: TensorStorage(None), OptionError, "Expected storage to be non-null"),
        (lambda: TensorStorage(torch.zeros(3), 4), CapacityError, "The max-size and the storage shape mismatch"),
        (lambda: TensorStorage(torch.zeros(1).expand(2)), SchemaError, "expanded"),
        (lambda: LazyTensorStorage(3).get(0), UsageError, "non-initialized"),
        (lambda: LazyTensorStorage(3, ndim=2).flatten(), UsageError, "non-initialized"),
        (lambda: single_in_two_dimensions().flatten(), UsageError, "single_copy"),
        (
            lambda: LazyTensorStorage(3, consolidated=True).set(range(2), {"a": two}),
            OptionError,
            "Cannot consolidate non-tensordict",
        ),
    )
    with pytest.raises((OptionError, RuntimeError), match="nowhere"):
        ListStorage(3, device="nowhere")
    assert len(TensorStorage(torch.zeros(3), 3)) == 3
    storage = LazyTensorStorage(3, consolidated=True)
    storage.set(range(2), TensorDict({"a": two}, [2]))
    assert storage.consolidated


def test_a_list_storage_moves_rows_to_its_device():
    storage, kept = ListStorage(3, device="meta"), ListStorage(3)
    storage.set(0, {"a": torch.zeros(2), "text": "x"})
    assert (storage[0]["a"].device.type, storage[0]["text"]) == ("meta", "x")
    kept.set(0, torch.zeros(2, device="meta"))
    assert kept[0].device.type == "meta", "without device= rows stay where they are"


def test_an_ensemble_reads_and_loads_rows_of_its_storages(tmp_path):
    parts = LazyTensorStorage(3), ListStorage(4)
    ensemble = StorageEnsemble(*parts, transforms=[lambda rows: rows + 100, None])
    parts[0].set(range(3), torch.arange(3))
    parts[1].set(range(2), [torch.tensor(7), torch.tensor(8)])
    got = ensemble.get({"buffer_ids": torch.tensor([1, 0]), "index": torch.tensor([[1, 0], [2, 2]])})
    assert got[0] == (1, [torch.tensor(8), torch.tensor(7)])
    assert (got[1][0], got[1][1].tolist()) == (0, [102, 102])
    assert (ensemble.max_size, ensemble.shape) == (7, (7,))
    for write in (ensemble.add, ensemble.extend, lambda rows: ensemble.set(0, rows)):
        with pytest.raises(UsageError):
            write(torch.zeros(1))
    state = ensemble.state_dict()
    ensemble.dumps(tmp_path / "e")
    small = StorageEnsemble(LazyTensorStorage(3), ListStorage(1))
    small[0].set(range(1), torch.tensor([5]))
    for load in (StorageEnsemble.load_state_dict, lambda target, _: target.load(tmp_path / "e")):
        again = StorageEnsemble(LazyTensorStorage(3), ListStorage(4))
        again[0].set(range(1), torch.zeros(1, dtype=torch.int64))
        load(again, state)
        assert (again[0][:].tolist(), again[1][:]) == ([0, 1, 2], [7, 8])
        for wrong in (small, StorageEnsemble(LazyTensorStorage(3))):
            with pytest.raises(CheckpointError):
                load(wrong, state)
        assert small[0][:].tolist() == [5], "a load that failed changed a member"
