"""Observers of the user's own: numbers of rows that follow them, are saved, loaded and moved with the buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import Observer, ReplayBuffer, ReplayBufferEnsemble, RowValues, TensorStorage
from ostinato._backend import backend
from ostinato.errors import CheckpointError, KindError, UsageError

from ...registry import ring


class Copies(RowValues):
    """The rows themselves: the numbers must always be those of the storage."""

    def __init__(self) -> None:
        super().__init__("copies", dtype=torch.int64)

    def first(self, store: Any, incoming: Any) -> Any:
        if int(incoming.data.max()) > 99:
            msg = "too large"
            raise ValueError(msg)
        return incoming.data


def made(capacity: int = 8, **options: Any) -> tuple[ReplayBuffer, Copies]:
    rb = ring(capacity, batch_size=4, **options)
    copies = Copies()
    rb.observe(copies)
    return rb, copies


def follows(rb: ReplayBuffer, copies: Copies) -> bool:
    return bool(torch.equal(copies.values[: len(rb.storage)], rb[:]))


def test_numbers_follow_rows(tmp_path):
    rb, copies = made()
    for first in range(0, 20, 5):
        rb.extend(torch.arange(first, first + 5))
        rb.sample()
        assert follows(rb, copies)
    with pytest.raises(ValueError, match="too large"):
        rb.extend(torch.tensor([1, 100]))
    assert follows(rb, copies)
    rb.dumps(tmp_path)
    for capacity in (8, 13):
        other, theirs = made(capacity)
        other.extend(torch.arange(3))
        other.loads(tmp_path)
        assert follows(other, theirs)
        other.extend(torch.arange(50, 57))
        assert follows(other, theirs)
    with pytest.raises(CheckpointError, match="observers"):
        ring(8, batch_size=4).loads(tmp_path)
    assert rb.delete([2]).item()
    assert copies.values[2] == 0
    rb.empty()
    assert not copies.values.any()
    weights = RowValues("weight", 2.0)
    rb.observe(weights)
    rb.set_storage(TensorStorage(torch.arange(5)))
    assert weights.values[:5].tolist() == [2.0] * 5


def test_default_numbers_are_set_beside_native_writes():
    rb = ring(8, batch_size=4)
    weights = RowValues("weight", 2.0)
    rb.observe(weights)
    rb.extend(torch.arange(5))
    assert (rb._engine.direct is not None) == backend.exchange
    weights.values[:] = 1.0
    rb.extend(torch.arange(2))
    rb.add(torch.tensor(7))
    rb.add(torch.tensor(8))
    assert weights.values.tolist() == [2, 1, 1, 1, 1, 2, 2, 2]


def test_what_cannot_be_observed():
    rb, _ = made()
    for buffer in (rb.view(), ReplayBufferEnsemble(rb, batch_size=2)):
        with pytest.raises(UsageError):
            buffer.observe(Observer())
    with pytest.raises(KindError, match="Observer"):
        rb.observe(object())  # type: ignore[arg-type]
