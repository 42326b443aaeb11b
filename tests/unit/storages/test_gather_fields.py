"""Reading other rows for each field: what is refused. What is read: the units, and `test_single_copy_log.py`."""

from __future__ import annotations

import pytest
import torch

from ostinato import LazyTensorStorage, ListStorage
from ostinato.core.records import Request
from ostinato.errors import OptionError, UsageError

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
        for other, pick in ((None, None), (1, torch.tensor([True, False]))):
            with pytest.raises(IndexError):
                storage.fetch([Request(0, torch.tensor([0, slot]), other, pick)])


WRONG = [
    (Request(0, torch.tensor([1]), 2, torch.tensor([True])), "one dtype and shape"),
    (Request(0, torch.tensor([1]), 1), "no pick"),
    (Request(0, torch.tensor([1]), None, torch.tensor([True])), "together"),
    (Request(0, torch.tensor([1]), 1, torch.tensor([True, False])), r"bool\[1\]"),
    (Request(0, torch.tensor([1]), 1, torch.tensor([1])), r"int64\[1\]"),
]


def test_requests_that_fit_nothing_are_refused() -> None:
    for request, message in WRONG:
        with pytest.raises(OptionError, match=message):
            stored().fetch([request])


def test_storages_without_fields_say_so() -> None:
    with pytest.raises(OptionError, match="ListStorage cannot read single fields"):
        ListStorage(4).fetch([Request(0, torch.tensor([0]))])
    with pytest.raises(UsageError, match="holds no rows"):
        LazyTensorStorage(4).fetch([Request(0, torch.tensor([0]))])
