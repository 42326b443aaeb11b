"""Rows that consist of text and other Python objects only, or of nothing, in storages of tensors."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
)
from ostinato.errors import KeyMissingError, SchemaError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("backend")

STORAGES = [LazyTensorStorage, LazyMemmapStorage]


def rows(count: int, first: int = 0) -> TensorDict:
    return TensorDict({"text": NonTensorStack(*[f"row {i}" for i in range(first, first + count)])}, [count])


def buffer(storage: Any = LazyTensorStorage, capacity: int = 6, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage(capacity), batch_size=4, **options)


def texts(data: Any) -> list[str]:
    return list(data["text"])


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_written_read_and_replaced(storage: Any) -> None:
    rb = buffer(storage)
    assert rb.extend(rows(4)).tolist() == [0, 1, 2, 3]
    assert rb.add(rows(1, 4)[0]) == 4
    rb.extend(rows(2, 5))
    assert texts(rb[:]) == ["row 6", "row 1", "row 2", "row 3", "row 4", "row 5"]
    assert texts(rb[2:4]) == texts(rb[[2, 3]]) == ["row 2", "row 3"]
    assert rb[3]["text"] == "row 3"
    assert rb["text"] == texts(rb[:])
    rb[:2] = rows(2, 90)
    assert texts(rb[:3]) == ["row 90", "row 91", "row 2"]


def test_samples_hold_the_rows_that_their_index_names() -> None:
    rb = buffer()
    rb.extend(rows(5))
    for _ in range(5):
        batch = rb.sample()
        assert texts(batch) == [f"row {i}" for i in batch["index"].tolist()]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("door", ["dumps", "state_dict", "pickle"])
def test_sampling_goes_on_where_it_was(tmp_path: Path, storage: Any, door: str) -> None:
    rb, again = (buffer(storage, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    rb.extend(rows(8))
    if door == "dumps":
        rb.dumps(tmp_path / "saved")
        again.loads(tmp_path / "saved")
    elif door == "state_dict":
        again.load_state_dict(rb.state_dict())
    else:
        again = pickle.loads(pickle.dumps(rb))
    assert texts(again[:]) == texts(rb[:])
    assert texts(again.sample()) == texts(rb.sample())
    again.extend(rows(1, 50))
    assert "row 50" in texts(again[:])


def test_dicts_of_lists_of_text() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=3)
    rb.extend({"name": ["a", "b"], "of": ["c", "d"]})
    assert rb[:] == {"name": ["a", "b"], "of": ["c", "d"]}
    batch = rb.sample()
    assert set(zip(batch["name"], batch["of"], strict=True)) <= {("a", "c"), ("b", "d")}
    with pytest.raises(SchemaError):
        rb.extend({"name": ["a", "b"], "of": ["c"]})
    with pytest.raises(KeyMissingError):
        rb.extend({"name": ["a"]})
    assert len(rb) == 2


def test_rows_of_two_dimensions() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), batch_size=3)
    rb.extend(TensorDict({"text": NonTensorData("x", batch_size=[2, 3])}, [2, 3]))
    assert len(rb) == 6
    assert texts(rb.sample()) == ["x"] * 3


def test_tensordicts_without_fields() -> None:
    rb = buffer()
    rb.extend(TensorDict({}, [3]))
    assert len(rb) == 3
    assert rb[:].batch_size == (3,)
    assert list(rb.sample().keys()) == ["index"]


def test_fixed_rows() -> None:
    rb = ReplayBuffer(storage=TensorStorage(rows(3)), batch_size=50)
    assert set(texts(rb.sample())) == {"row 0", "row 1", "row 2"}


def test_members_of_an_ensemble() -> None:
    members = [buffer(storage) for storage in STORAGES]
    for number, member in enumerate(members):
        member.extend(rows(5, 10 * number))
    batch = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=6).sample()
    assert batch.batch_size == (2, 3)
    for part, base in zip(batch.unbind(0), (0, 10), strict=True):
        assert texts(part) == [f"row {base + i}" for i in part["index", "index"].tolist()]


def test_rows_without_a_number_or_a_name_are_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    with pytest.raises(SchemaError, match="no fields"):
        rb.extend({})
    with pytest.raises(SchemaError, match="single Python objects: give them a name"):
        rb.extend(NonTensorData("x", batch_size=[4]))
    rb.extend({"obs": torch.zeros(2)})
    assert len(rb) == 2
