"""Rows of a list storage whose shapes differ: lazy stacks of TensorDicts, and errors that help for other kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from ostinato import (
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from ostinato.errors import KindError

if TYPE_CHECKING:
    from collections.abc import Callable


def row(n: int) -> TensorDict:
    return TensorDict({"x": torch.arange(n + 1), "y": torch.full((2,), float(n))})


def filled(kind: type[ReplayBuffer] = ReplayBuffer, **options: Any) -> ReplayBuffer:
    rb = kind(storage=ListStorage(10), **{"batch_size": 6, **options})
    rb.extend([row(n) for n in range(3)])
    return rb


def check(batch: Any, index: Any = None) -> list[int]:
    """Return which rows a batch holds, having compared both fields."""
    found = []
    for one in batch.unbind(0):
        n = int(one["y"][0])
        assert one["x"].tolist() == list(range(n + 1))
        found.append(n)
    assert index is None or found == torch.as_tensor(index).tolist()
    return found


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_samples_and_reads_are_lazy_stacks(kind: type[ReplayBuffer]) -> None:
    rb = filled(kind)
    lazy = 0
    for _ in range(5):
        batch, info = rb.sample(return_info=True)
        lazy += isinstance(batch, LazyStackedTensorDict)
        check(batch, info["index"])
        if kind is TensorDictReplayBuffer:
            assert torch.equal(batch["index"], info["index"])
    assert lazy >= 4
    indices: list[Any] = [slice(0, 3), [2, 0], torch.tensor([1, 1]), torch.tensor([True, False, True])]
    for index in indices:
        assert check(rb[index]) == torch.arange(3)[index].tolist()


def test_a_batch_shares_no_memory_with_the_rows_stored() -> None:
    for make in (row, lambda n: TensorDict({"n": {"x": torch.arange(n + 1)}, "y": torch.zeros(2)})):
        rb = ReplayBuffer(storage=ListStorage(10), batch_size=6)
        rb.extend([make(n) for n in range(3)])
        for batch in (rb.sample(), rb[0:3], rb[[0, 1, 1]]):
            for one in batch.unbind(0):
                one.apply_(lambda leaf: leaf.fill_(-1))
        for n in range(3):
            assert (rb[n] == make(n)).all()
            assert (rb.storage[n] == make(n)).all()


OTHERS: list[tuple[Callable[[int], Any], str]] = [
    (lambda n: {"x": torch.arange(n + 1)}, "equal size"),
    (lambda n: np.arange(n + 1), "equal size"),
    (lambda n: "a" * n, "the data itself holds str"),
    (lambda n: {"t": None}, "field 't' holds NoneType"),
    (lambda n: {n: 1}, "the same keys"),
    (lambda _: None, "holds NoneType"),
    (lambda _: torch.zeros(2).to_sparse(), "sparse"),
]


def test_other_rows_need_a_collate_fn_and_the_error_says_so() -> None:
    for make, reason in OTHERS:
        rb, listed = (ReplayBuffer(storage=ListStorage(10), batch_size=8, collate_fn=fn) for fn in (None, list))
        for each in (rb, listed):
            each.extend([make(n) for n in range(3)])
        for read in (rb.sample, lambda rb=rb: rb[0:3], lambda rb=rb: next(iter(rb))):
            torch.manual_seed(0)
            with pytest.raises(KindError, match=reason) as caught:
                read()
            assert "collate_fn=list" in f"{caught.value} {caught.value.__cause__}"
        assert len(listed.sample()) == 8
    twins = [ReplayBuffer(storage=ListStorage(10), collate_fn=list) for _ in range(2)]
    for twin in twins:
        twin.extend(["a", "b"])
    members = ReplayBufferEnsemble(*twins, p=[0.5, 0.5], batch_size=4)
    with pytest.raises(KindError, match="give the ensemble a collate_fn"):
        members.sample()
