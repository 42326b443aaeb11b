"""Joining batches of shards, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato.distributed.routing import join_index
from ostinato.distributed.sampling import Part, join_parts, split_batch
from ostinato.errors import KindError, SchemaError


def rows(first: int, count: int) -> tuple[Any, dict[str, Any]]:
    """Rows of a shard that hold numbers from `first` on, and their info."""
    values = torch.arange(first, first + count)
    info = {"index": values, "priority_weight": torch.full((count,), 0.5), "index_generation": values + 100}
    text = [f"t{i}" for i in values.tolist()]
    return {"x": values.float(), "pair": {"y": values[:, None].repeat(1, 3)}, "t": text}, info


@pytest.mark.parametrize("many", [2, 20])
def test_parts_get_their_positions(many: int) -> None:
    """Each position of a draw is a window of four rows."""
    where = torch.randperm(3 * many, generator=torch.Generator().manual_seed(many)).view(many, 3)
    parts = [Part(i, *rows(100 * i, 12), at, 0.5**i) for i, at in enumerate(where)]
    batch, info = join_parts(parts)
    expected = torch.empty(3 * many, 4, dtype=torch.int64)
    for i, at in enumerate(where):
        expected[at] = 100 * i + torch.arange(12).view(3, 4)
    owner, number = (expected // 100).flatten(), expected.flatten()
    assert torch.equal(batch["x"], number.float())
    assert torch.equal(batch["pair"]["y"], number[:, None].repeat(1, 3))
    assert list(batch["t"]) == [f"t{i}" for i in number.tolist()]
    assert info["index"].tolist() == [int(join_index(int(s), v)) for s, v in zip(owner, number, strict=True)]
    assert torch.equal(info["index_generation"], number + 100)
    assert torch.equal(info["priority_weight"], 0.5 ** (owner + 1).float())


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_batch_is_split_and_joined_again(as_dict: bool) -> None:
    data, info = rows(0, 5)
    data = data if as_dict else TensorDict({**data, **info}, [5])
    halves = split_batch(data, info, [2, 3])
    positions = (torch.tensor([3, 0]), torch.tensor([1, 2, 4]))
    batch, said = join_parts([Part(i, *half, at) for i, (half, at) in enumerate(zip(halves, positions, strict=True))])
    order = torch.tensor([1, 2, 3, 0, 4])
    assert torch.equal(batch["pair"]["y"], data["pair"]["y"][order])
    assert list(batch["t"]) == ["t1", "t2", "t3", "t0", "t4"]
    assert torch.equal(said["index"] & 0xFF, order)
    if not as_dict:
        assert batch.batch_size == (5,)
        assert all(torch.equal(batch[key], said[key]) for key in said), "indices of the whole buffer"


def test_parts_of_different_schemas_raise_and_dtypes_are_promoted() -> None:
    """Rows of a `ListStorage` may have different dtypes, in one buffer as in several shards."""
    info = {"index": torch.arange(2)}
    where = torch.tensor([3, 0]), torch.tensor([1, 2])
    one = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([1, 2])}
    two = {"y": torch.tensor([3.5, 4.5]), "x": torch.tensor([3.0, 0.1], dtype=torch.float64)}
    batch, _ = join_parts([Part(i, data, info, where[i]) for i, data in enumerate((one, two))])
    assert batch["x"].dtype is torch.float64
    assert batch["x"].tolist() == [2.0, 3.0, 0.1, 1.0]
    assert batch["y"].tolist() == [2.0, 3.5, 4.5, 1.0]
    for other in ({"x": torch.zeros(2, 3), "y": torch.zeros(2)}, {"x": torch.zeros(2)}):
        with pytest.raises(SchemaError, match=r"shards 0 and 1 hold rows of different schemas"):
            join_parts([Part(0, one, info, where[0]), Part(1, other, info, where[1])])
    with pytest.raises(KindError, match="tensors of one shape"):
        join_parts([Part(i, ["a", "b"], info, where[i]) for i in range(2)])
