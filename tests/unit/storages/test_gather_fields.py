"""Reading other rows for each field: what is refused. What is read: the units, and `test_single_copy_log.py`."""

from __future__ import annotations

import pytest
import torch

from ostinato import LazyTensorStorage, ListStorage
from ostinato.core.records import Column, Plan, Request
from ostinato.errors import OptionError, SchemaError, UsageError

ROWS = 13


def stored() -> LazyTensorStorage:
    """Two fields of one form and a third of another."""
    storage = LazyTensorStorage(ROWS)
    storage.set(range(ROWS), {"a": torch.zeros(ROWS, 3), "b": torch.ones(ROWS, 3), "c": torch.zeros(ROWS)})
    return storage


@pytest.mark.usefixtures("backend")
def test_slots_out_of_range_are_refused() -> None:
    storage = stored()
    for slot in (-1, ROWS, 2 * ROWS - 1, 2**62):
        with pytest.raises(IndexError):
            storage.fetch([Request(0, torch.tensor([0, slot]))])


@pytest.mark.usefixtures("backend")
def test_rows_of_two_fields_must_be_alike() -> None:
    storage, slots = stored(), torch.tensor([1, 2])
    plan = Plan(storage.schema, slots, slots)  # type: ignore[arg-type]
    chosen = Column(Request(0, slots), other=1, pick=torch.tensor([True, False]))
    assert storage.read_plan(plan.with_columns({0: chosen})).leaves[0].tolist() == [[1.0] * 3, [0.0] * 3]
    with pytest.raises(SchemaError):
        storage.read_plan(plan.with_columns({0: chosen._replace(other=2)}))


def test_storages_without_fields_say_so() -> None:
    with pytest.raises(OptionError):
        ListStorage(4).fetch([Request(0, torch.tensor([0]))])
    with pytest.raises(UsageError):
        LazyTensorStorage(4).fetch([Request(0, torch.tensor([0]))])
