"""The storage contract, run over every storage of ours. Single copies: `unit/storages/test_single_copy_log.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RaggedTensorStorage,
    Storage,
    TensorStorage,
    ZlibCodec,
)
from ostinato.testing import StorageContract
from tests.contracts.suites import suites

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.usefixtures("backend")


STORAGES: dict[str, Any] = {
    "packed": LazyTensorStorage,
    "columns": lambda n: LazyTensorStorage(n, packed=False),
    "auto": lambda n: LazyTensorStorage(n, device="auto"),
    "mapped": LazyMemmapStorage,
    "mapped columns": lambda n: LazyMemmapStorage(n, packed=False),
    "codec": lambda n: LazyTensorStorage(n, codec={"obs": "zlib"}),
    "codec of all fields": lambda n: LazyTensorStorage(n, codec={"obs": "zlib", "id": ZlibCodec(0)}),
}
globals().update(suites(StorageContract, STORAGES, __name__))


class TestList(StorageContract):
    checks_schema = False

    def make(self, capacity: int) -> Storage:
        return ListStorage(capacity)

    def rows(self, ids: Tensor) -> Any:
        columns = super().rows(ids)
        return [{key: value[i] for key, value in columns.items()} for i in range(len(ids))]

    def row(self, number: int) -> Any:
        return self.rows(torch.tensor([number]))[0]

    test_inputs_are_copied = None  # type: ignore[assignment]  # see tests/unit/buffers/test_memory.py


class TestCompressedList(TestList):
    def make(self, capacity: int) -> Storage:
        return CompressedListStorage(capacity, codec="zlib")


class TestLazyStack(TestList):
    def make(self, capacity: int) -> Storage:
        return LazyStackStorage(capacity)

    def rows(self, ids: Tensor) -> Any:
        return [TensorDict(row) for row in super().rows(ids)]


class TestRaggedTensors(StorageContract):
    """A field that may differ in length, here always of one length, as lists of tensors."""

    def make(self, capacity: int) -> Storage:
        return RaggedTensorStorage(capacity, ragged="obs")

    def ids(self, storage: Storage, presented: Any) -> list[int]:
        values = presented["obs"]
        return super().ids(storage, {**presented, "obs": torch.stack(values) if values else torch.zeros(0, 2)})

    def wrong_rows(self, count: int) -> Any:
        return {"id": torch.zeros(count, dtype=torch.int64), "obs": torch.zeros(count, 3, 2)}


class TestTensors(StorageContract):
    """A TensorStorage is full from the start, so it begins with a poisoned table that is emptied."""

    def make(self, capacity: int) -> Storage:
        storage = TensorStorage(self.rows(torch.arange(capacity) - 7777))
        storage.clear()
        return storage

    test_the_state_of_an_empty_storage_removes_the_rows = None  # type: ignore[assignment]  # its memory is laid out from the start


class TestLanes(StorageContract):
    """Two dimensions: the laws of one dimension hold for flat slots."""

    lanes = 1

    def make(self, capacity: int) -> Storage:
        return LazyTensorStorage(capacity, ndim=2)

    def rows(self, ids: Tensor) -> Any:
        return {key: value[:, None] for key, value in super().rows(ids).items()}

    def row(self, number: int) -> Any:
        return {key: value[0] for key, value in self.rows(torch.tensor([number])).items()}

    def wrong_rows(self, count: int) -> Any:
        return {"id": torch.zeros(count, 2, dtype=torch.int64), "obs": torch.zeros(count, 2, 2)}

    def given(self, storage: Storage, first: int, count: int) -> Any:
        return StorageContract.rows(self, torch.arange(first, first + count))

    def ids(self, storage: Storage, presented: Any) -> list[int]:
        return super().ids(
            storage, {key: x.reshape(-1, *x.shape[presented["id"].ndim :]) for key, x in presented.items()}
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda(StorageContract):
    def make(self, capacity: int) -> Storage:
        return LazyTensorStorage(capacity, device="cuda")

    test_slots_out_of_range_raise = None  # type: ignore[assignment]  # the host does not see values on the device


class _Careless(LazyTensorStorage):
    """A storage that shows unwritten slots."""

    def __len__(self) -> int:
        return self.capacity


def test_the_contract_finds_the_bug():
    (suite,) = suites(StorageContract, {"broken": _Careless}, __name__).values()
    with pytest.raises(AssertionError):
        suite().test_a_new_storage_is_empty()
