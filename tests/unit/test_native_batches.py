"""Gathers into tensors, and what direct calls read: arguments that do not fit raise, and nothing is read or written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato._backend import Backend, backend

pytestmark = pytest.mark.skipif(not backend.exchange, reason="torch's exchange API is missing")


def make(rows: int = 100) -> tuple[list[torch.Tensor], Any]:
    native: Any = backend.installed
    columns = [
        torch.rand(rows, 3),
        torch.arange(rows),
        torch.rand(rows) < 0.5,
        torch.rand(rows, 2, 2).to(torch.bfloat16),
    ]
    fields = native.Fields()
    for column in columns:
        width = column[0].numel() * column.itemsize
        fields.add([(column.data_ptr(), rows)], width, width)
    return columns, native.Batches(fields, columns)


def test_gather_makes_ordinary_tensors():
    columns, batches = make()
    for n in (0, 7, 1000):
        slots = torch.randint(0, 100, (n,))
        for column, found in zip(columns, batches.gather(slots), strict=True):
            assert type(found) is torch.Tensor
            assert found.dtype is column.dtype
            assert found.is_contiguous()
            assert torch.equal(found, column[slots])
    found = batches.gather(torch.arange(50))[0]
    found.clone().requires_grad_().sum().backward()
    found.add_(1)
    assert found.numpy().flags.writeable
    found.share_memory_()
    assert found.is_shared()
    with torch.inference_mode():
        assert batches.gather(torch.arange(5))[0].is_inference()


def test_memory_kept_for_later_batches_is_bounded():
    native: Any = backend.installed
    rows = 64
    column = torch.zeros(rows, 1 << 20, dtype=torch.uint8)
    fields = native.Fields()
    fields.add([(column.data_ptr(), rows)], 1 << 20, 1 << 20)
    batches = native.Batches(fields, [column])
    held = [batches.gather(torch.arange(n)) for n in range(1, 40)]
    del held
    assert 0 < native.kept_bytes() <= 128 << 20


def test_a_closed_exchange_refuses_other_capsules():
    with pytest.raises((ValueError, TypeError)):
        backend.installed.open_exchange(torch.Tensor, object())  # type: ignore[union-attr]
    _columns, batches = make()  # which own the memory
    assert len(batches.gather(torch.arange(2))) == 4
    assert not Backend(None).exchange, "without the extension there is none"
