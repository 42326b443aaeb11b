"""LazyStackStorage: rows of different lengths come back as lazy stacks, nested tensors, or padded with masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from ostinato import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, TensorDictReplayBuffer
from ostinato.errors import KindError, OptionError, SchemaError

LENGTHS = [3, 1, 4, 2]


def sequences(lengths: list[int] = LENGTHS) -> list[TensorDict]:
    return [
        TensorDict({"tokens": torch.arange(1, n + 1), "reward": torch.tensor(float(n)), "text": "x" * n})
        for n in lengths
    ]


def filled(layout: Any, cls: type[ReplayBuffer] = ReplayBuffer) -> ReplayBuffer:
    rb = cls(
        storage=LazyStackStorage(10, layout=layout), batch_size=4, sampler=SamplerWithoutReplacement(shuffle=False)
    )
    for row in sequences():
        rb.add(row)
    return rb


@pytest.mark.parametrize("layout", ["lazy", "nested", "padded"])
def test_batches_have_the_rows_in_every_layout(layout: str) -> None:
    rb = filled(layout, TensorDictReplayBuffer)
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


def test_batches_are_copies_and_rows_are_owned() -> None:
    rows = sequences()
    rb = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    rb.extend(rows)
    rows[0]["tokens"].zero_()
    rb.sample().zero_()
    rb[:].zero_()
    assert rb.storage[0]["tokens"].tolist() == [1, 2, 3]


def test_stack_dim_counts_among_the_batch_dimensions() -> None:
    storage = LazyStackStorage(4, stack_dim=-1)
    storage.set(range(2), [TensorDict({"a": torch.zeros(3, 5) + i}, [3]) for i in range(2)])
    assert storage[:].batch_size == torch.Size([3, 2])
    assert storage[:]["a"][:, 1].eq(1).all()
    wrong = LazyStackStorage(4, stack_dim=2)
    assert wrong.get(slice(0)) == []
    wrong.set(0, TensorDict({"a": torch.zeros(3)}, [3]))
    with pytest.raises(SchemaError, match="stack_dim=2"):
        wrong[:]


def test_options_and_rows_that_raise() -> None:
    with pytest.raises(OptionError, match="layout"):
        LazyStackStorage(4, layout="ragged")  # type: ignore[arg-type]
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
    cases: list[tuple[Any, Any]] = [("padded", wide), ("padded", other), ("nested", other)]
    for layout, rows in cases:
        dense = LazyStackStorage(4, layout=layout)
        dense.set(range(2), rows)
        with pytest.raises(SchemaError, match=layout):
            dense[:]
