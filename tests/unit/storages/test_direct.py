"""Storages without a buffer: set, get, item assignment, iteration, contains, flatten; and buffers that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    Storage,
    StorageEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
)
from ostinato.errors import (
    CapacityError,
    CheckpointError,
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
    SlotError,
    UsageError,
)

from ...tags import read_ids, rows

if TYPE_CHECKING:
    from collections.abc import Callable

MAKERS: dict[str, Callable[[int], Storage]] = {
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
def test_rows_are_written_at_any_kind_of_cursor(make: Callable[[int], Storage]) -> None:
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
def test_refused_writes_change_nothing(make: Callable[[int], Storage]) -> None:
    storage = make(4)
    storage.set(range(2), rows([0, 1], "tensordict"))
    three = rows([5, 6, 7], "tensordict")
    cases: list[tuple[Any, Any, bool, type[Exception], str]] = [
        (range(3, 4), three[:1], True, SlotError, "more than one item away"),
        (range(2, 5), three, True, SlotError, "maximum capacity is 4"),
        (-3, three[0], True, SlotError, "out of range"),
        (range(2, 4), three, True, SchemaError, "one for each"),
        (range(2), three, True, SchemaError, "."),
        (2, three[0], False, SlotError, "."),
        ("here", three, True, KindError, "."),
        (torch.tensor([0.5]), three[:1], True, KindError, "."),
    ]
    for cursor, data, set_cursor, error, message in cases:
        with pytest.raises(error, match=message):
            storage.set(cursor, data, set_cursor=set_cursor)
    assert ids(storage) == [0, 1]
    fresh = make(4)
    with pytest.raises(SlotError):
        fresh.set(range(1, 3), three[:2])
    assert fresh.schema is None


def test_steps_of_environments_are_written() -> None:
    grid = torch.arange(12).view(4, 3)
    for kind in ("tensor", "tuple", "tensordict"):
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


def test_flatten_of_one_dimension_and_of_nothing() -> None:
    storage = LazyTensorStorage(3)
    assert storage.flatten() is storage
    with pytest.raises(UsageError, match="Cannot flatten a non-initialized storage"):
        LazyTensorStorage(3, ndim=2).flatten()
    single = LazyTensorStorage(8, ndim=2, single_copy=True)
    single.set(range(2), {"obs": torch.zeros(2, 2), "next": {"obs": torch.ones(2, 2)}})
    with pytest.raises(UsageError, match="single_copy"):
        single.flatten()


@every_storage
def test_contains(make: Callable[[int], Storage]) -> None:
    storage = make(9)
    assert 0 not in storage
    storage.set(range(4), rows(range(4), "tensordict"))
    assert [i for i in range(-9, 9) if i in storage] == list(range(-4, 4))
    assert storage.contains(torch.tensor([[0, 3], [4, -5]])).tolist() == [[True, True], [False, False]]  # type: ignore[union-attr]
    assert torch.tensor([0, 3]) in storage
    assert torch.tensor([0, 4]) not in storage
    with pytest.raises(KindError):
        storage.contains("a")


def test_a_new_key_of_rows_that_are_present_becomes_a_field() -> None:
    storage = LazyTensorStorage(5)
    storage.set(range(3), {"a": torch.arange(3)})
    storage.set(range(3), {"a": torch.arange(3), "b": torch.ones(3)})
    assert storage["b"].tolist() == [1, 1, 1]
    storage[:2] = {"a": torch.tensor([8, 9]), "c": torch.tensor([4, 5])}
    with pytest.raises(KeyMissingError):
        storage[torch.tensor([1, 2])]
    with pytest.raises(SchemaError, match="unknown"):
        storage.set(range(3, 5), {"a": torch.arange(2), "d": torch.ones(2)})


def test_lazy_stacks_are_written_row_by_row_and_in_two_dimensions() -> None:
    parts = [TensorDict({"obs": torch.full((3,), i), "in": {"x": torch.tensor(i)}}) for i in range(6)]
    storage = LazyTensorStorage(6)
    storage.set(slice(0, 6), LazyStackedTensorDict.lazy_stack(parts))
    assert storage["obs"][:, 0].tolist() == storage["in", "x"].tolist() == list(range(6))
    for dim in (0, 1):
        batches = [TensorDict({"obs": torch.arange(4) + 10 * i}, [4]) for i in range(3)]
        stacked = LazyStackedTensorDict.lazy_stack(batches, dim=dim)
        for cls in (ReplayBuffer, TensorDictReplayBuffer):
            rb: ReplayBuffer = cls(storage=LazyTensorStorage(12, ndim=2), batch_size=5)
            rb.extend(stacked)
            assert torch.equal(rb[:]["obs"], stacked["obs"])
            assert rb.sample()["obs"].shape == (5,)


def test_rows_of_a_single_copy_storage_are_written_in_order() -> None:
    storage = LazyTensorStorage(4, single_copy=True)
    now = torch.arange(5)
    steps = [{"obs": now[i : i + 1], "next": {"obs": now[i : i + 1] + 1}} for i in range(4)]
    storage.set(range(3), {"obs": now[:3], "next": {"obs": now[1:4]}})
    with pytest.raises(SlotError):
        storage.set([4], steps[3])
    storage.set([3], steps[3])
    storage.set(1, {"obs": torch.tensor(50), "next": {"obs": torch.tensor(51)}})
    assert storage[:]["next"]["obs"].tolist() == [1, 51, 3, 4]
    with pytest.raises(OptionError, match="ring order"):
        LazyTensorStorage(4, single_copy=True).set([1, 0], {"obs": now[:2], "next": {"obs": now[:2]}})


# -- buffers on such storages --------------------------------------------------------------------------------------


@every_storage
def test_a_buffer_takes_over_rows_written_without_it(make: Callable[[int], Storage]) -> None:
    storage = make(8)
    rb = ReplayBuffer(storage=storage, batch_size=50, sampler=PrioritizedSampler(8, 1.0, 1.0))
    storage.set(range(5), rows(range(5), "tensordict"))
    assert len(rb) == 5
    assert set(read_ids(rb.sample())) == set(range(5))
    assert rb.extend(rows([5, 6], "tensordict")).tolist() == [5, 6]
    storage.set([7], rows([7], "tensordict"))
    assert rb.extend(rows([8], "tensordict")).tolist() == [0]
    assert set(read_ids(rb.sample(400))) == {8, *range(1, 8)}


def test_edits_of_the_storage_reach_samples_and_incremental_saves(tmp_path: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4)
    rb.extend(torch.arange(4))
    rb.dumps(tmp_path / "s")
    rb.storage[1:3] = torch.tensor([11, 12])
    rb.dumps(tmp_path / "s", incremental=True)
    again = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4)
    again.loads(tmp_path / "s")
    assert again[:].tolist() == [0, 11, 12, 3]


# -- options -------------------------------------------------------------------------------------------------------


def test_options_of_tensor_storages() -> None:
    with pytest.raises(OptionError, match="Expected storage to be non-null"):
        TensorStorage(None)
    with pytest.raises(CapacityError, match="The max-size and the storage shape mismatch"):
        TensorStorage(torch.zeros(3), 4)
    assert len(TensorStorage(torch.zeros(3), 3)) == 3
    with pytest.raises(UsageError, match="non-initialized"):
        LazyTensorStorage(3).get(0)
    storage = LazyTensorStorage(3, consolidated=True)
    with pytest.raises(OptionError, match="Cannot consolidate non-tensordict"):
        storage.set(range(2), {"a": torch.zeros(2)})
    storage.set(range(2), TensorDict({"a": torch.zeros(2)}, [2]))
    assert storage.consolidated


def test_the_state_of_a_list_storage_does_not_follow_later_writes() -> None:
    storage = ListStorage(4)
    empty = storage.state_dict()
    storage.set(range(2), ["a", "b"])
    half = storage.state_dict()
    storage.set(range(1, 3), ["c", "d"])
    storage.load_state_dict(half)
    assert storage.get(slice(None)) == ["a", "b"]
    storage.load_state_dict(empty)
    assert len(storage) == 0


def test_a_list_storage_moves_rows_to_its_device() -> None:
    storage, kept = ListStorage(3, device="meta"), ListStorage(3)
    storage.set(0, {"a": torch.zeros(2), "text": "x"})
    assert (storage[0]["a"].device.type, storage[0]["text"]) == ("meta", "x")
    kept.set(0, torch.zeros(2, device="meta"))
    assert kept[0].device.type == "meta", "without device= rows stay where they are"
    with pytest.raises((OptionError, RuntimeError)):
        ListStorage(3, device="nowhere")


def test_the_base_class_takes_a_capacity_and_a_checkpointer(tmp_path: Any) -> None:
    own: Any = type("Own", (Storage,), dict.fromkeys(Storage.__abstractmethods__))
    assert own(5, compilable=True).capacity == 5
    with pytest.raises(CapacityError):
        own(0)
    with pytest.raises(KindError, match="checkpointer"):
        own(5, checkpointer=3)

    class Remembers:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def dumps(self, storage: Any, path: Any) -> None:
            self.calls.append(("dumps", storage, path))

        def loads(self, storage: Any, path: Any) -> None:
            self.calls.append(("loads", storage, path))

    storage, saver = LazyTensorStorage(3), Remembers()
    assert storage.checkpointer is None
    storage.checkpointer = saver
    storage.dumps(tmp_path / "a")
    storage.loads(tmp_path / "b")
    with pytest.raises(CheckpointError, match="Remembers has no save_hooks"):
        ReplayBuffer(storage=storage).dumps(tmp_path / "c")
    assert saver.calls == [("dumps", storage, tmp_path / "a"), ("loads", storage, tmp_path / "b")]
    assert own(5, saver).checkpointer is saver
    storage.attach(ReplayBuffer(storage=storage))


def test_an_ensemble_reads_rows_of_its_storages(tmp_path: Any) -> None:
    parts = LazyTensorStorage(3), ListStorage(4)
    ensemble = StorageEnsemble(*parts, transforms=[lambda rows: rows + 100, None])
    parts[0].set(range(3), torch.arange(3))
    parts[1].set(range(2), [torch.tensor(7), torch.tensor(8)])
    got = ensemble.get({"buffer_ids": torch.tensor([1, 0]), "index": torch.tensor([[1, 0], [2, 2]])})
    assert got[0] == (1, [torch.tensor(8), torch.tensor(7)])
    assert (got[1][0], got[1][1].tolist()) == (0, [102, 102])
    assert (ensemble.max_size, ensemble.shape) == (7, (7,))
    for write in (ensemble.add, ensemble.extend, lambda rows: ensemble.set(0, rows)):
        with pytest.raises(UsageError, match="through a storage"):
            write(torch.zeros(1))
    state = ensemble.state_dict()
    ensemble.dumps(tmp_path / "e")
    again, small = (StorageEnsemble(LazyTensorStorage(3), ListStorage(size)) for size in (4, 1))
    small[0].set(range(1), torch.tensor([5]))
    for load in (StorageEnsemble.load_state_dict, lambda target, _: target.load(tmp_path / "e")):
        again[0].set(range(1), torch.zeros(1, dtype=torch.int64))
        load(again, state)
        assert (again[0][:].tolist(), again[1][:]) == ([0, 1, 2], [7, 8])
        with pytest.raises(CheckpointError, match="room for 1"):
            load(small, state)
        assert small[0][:].tolist() == [5], "a load that failed changed a member"
        with pytest.raises(CheckpointError):
            load(StorageEnsemble(LazyTensorStorage(3)), state)
