"""Rows of list storages whose shapes differ: lazy stacks of TensorDicts, other layouts, errors for other kinds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from ostinato import (
    LazyStackStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from ostinato.errors import KindError, OptionError, SchemaError


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
def test_samples_and_reads_are_lazy_stacks(kind):
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


def test_a_batch_shares_no_memory_with_the_rows_stored():
    kinds: list[Any] = [row, lambda n: TensorDict({"n": {"x": torch.arange(n + 1)}, "y": torch.zeros(2)})]
    for storage, make in itertools.product((ListStorage, LazyStackStorage), kinds):
        rb, given = ReplayBuffer(storage=storage(10), batch_size=6), [make(n) for n in range(3)]
        rb.extend(given)
        given[2].zero_()
        for batch in (rb.sample(), rb[0:3], rb[[0, 1, 1]]):
            for one in batch.unbind(0):
                one.apply_(lambda leaf: leaf.fill_(-1))
        for n in range(3):
            assert (rb[n] == make(n)).all()
            assert (rb.storage[n] == make(n)).all()


OTHERS: list[Any] = [
    (lambda n: {"x": torch.arange(n + 1)}, "equal size"),
    (lambda n: np.arange(n + 1), "equal size"),
    (lambda n: "a" * n, "the data itself holds str"),
    (lambda n: {"t": None}, "field 't' holds NoneType"),
    (lambda n: {n: 1}, "the same keys"),
    (lambda _: None, "holds NoneType"),
    (lambda _: torch.zeros(2).to_sparse(), "sparse"),
]


def test_other_rows_need_a_collate_fn_and_the_error_says_so():
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


# -- LazyStackStorage: lazy stacks, nested tensors, or padded with masks -------------------------------------------

LENGTHS = [3, 1, 4, 2]


def sequences(lengths: list[int] = LENGTHS) -> list[TensorDict]:
    return [
        TensorDict({"tokens": torch.arange(1, n + 1), "reward": torch.tensor(float(n)), "text": "x" * n})
        for n in lengths
    ]


@pytest.mark.parametrize("layout", ["lazy", "nested", "padded"])
def test_batches_have_the_rows_in_every_layout(layout):
    storage, sampler = LazyStackStorage(10, layout=layout), SamplerWithoutReplacement(shuffle=False)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4, sampler=sampler)
    for one in sequences():
        rb.add(one)
    for batch in (rb.sample(), rb[:], rb.storage[:], rb.storage.get(torch.arange(4))):
        assert batch.batch_size == torch.Size([4])
        assert batch["reward"].tolist() == LENGTHS
        assert batch.get("text").tolist() == ["x" * n for n in LENGTHS]
        if layout == "lazy":
            assert isinstance(batch, LazyStackedTensorDict)
            tokens = [row["tokens"] for row in batch.unbind(0)]
        elif layout == "nested":
            tokens = list(batch["tokens"].unbind(0))
        else:
            assert batch["tokens"].shape == (4, 4)
            mask = batch["masks", "tokens"]
            assert mask.sum(-1).tolist() == LENGTHS
            assert batch["tokens"][~mask].abs().sum() == 0
            tokens = [row[row_mask] for row, row_mask in zip(batch["tokens"], mask, strict=True)]
        assert [row.tolist() for row in tokens] == [list(range(1, n + 1)) for n in LENGTHS]


def test_stack_dim_counts_among_the_batch_dimensions():
    storage = LazyStackStorage(4, stack_dim=-1)
    storage.set(range(2), [TensorDict({"a": torch.zeros(3, 5) + i}, [3]) for i in range(2)])
    assert storage[:].batch_size == torch.Size([3, 2])
    assert storage[:]["a"][:, 1].eq(1).all()
    wrong = LazyStackStorage(4, stack_dim=2)
    assert wrong.get(slice(0)) == []
    wrong.set(0, TensorDict({"a": torch.zeros(3)}, [3]))
    with pytest.raises(SchemaError, match="stack_dim=2"):
        wrong[:]


def test_options_and_rows_that_raise():
    with pytest.raises(OptionError, match="stack_dim"):
        LazyStackStorage(4, layout="padded", stack_dim=1)
    storage = LazyStackStorage(4)
    with pytest.raises(KindError):
        storage.set(0, torch.zeros(3))
    storage.set(range(2), sequences()[:2])
    with pytest.raises(KindError):
        storage[0] = {"tokens": torch.zeros(2)}
    wide = [TensorDict({"a": torch.zeros(1, 2)}), TensorDict({"a": torch.zeros(1, 3)})]
    other = [TensorDict({"a": torch.zeros(1)}), TensorDict({"b": torch.zeros(1)})]
    cases: list[Any] = [("padded", wide), ("padded", other), ("nested", other)]
    for layout, rows in cases:
        dense = LazyStackStorage(4, layout=layout)
        dense.set(range(2), rows)
        with pytest.raises(SchemaError, match=layout):
            dense[:]
