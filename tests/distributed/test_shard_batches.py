"""Joining batches of shards, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.distributed.routing import join_index
from ostinato.distributed.sampling import Part, join_parts
from ostinato.errors import KindError, SchemaError


def rows(first: int, count: int) -> tuple[Any, dict[str, Any]]:
    """Rows of a shard that hold numbers from `first` on, and their info."""
    values = torch.arange(first, first + count)
    info = {"index": values, "priority_weight": torch.full((count,), 0.5), "index_generation": values + 100}
    text = [f"t{i}" for i in values.tolist()]
    return {"x": values.float(), "pair": {"y": values[:, None].repeat(1, 3)}, "t": text}, info


@pytest.mark.parametrize("many", [2, 20])
def test_parts_get_their_positions(many):
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


def test_parts_of_different_schemas_raise_and_dtypes_are_promoted():
    """Rows of a `ListStorage` may have different dtypes, in one buffer as in several shards."""

    def joined(*data: Any) -> Any:
        where, info = (torch.tensor([3, 0]), torch.tensor([1, 2])), {"index": torch.arange(2)}
        return join_parts([Part(i, one, info, at) for i, (one, at) in enumerate(zip(data, where, strict=True))])[0]

    one = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([1, 2])}
    batch = joined(one, {"y": torch.tensor([3.5, 4.5]), "x": torch.tensor([3.0, 0.1], dtype=torch.float64)})
    assert batch["x"].dtype is torch.float64
    assert (batch["x"].tolist(), batch["y"].tolist()) == ([2.0, 3.0, 0.1, 1.0], [2.0, 3.5, 4.5, 1.0])
    for other in ({"x": torch.zeros(2, 3), "y": torch.zeros(2)}, {"x": torch.zeros(2)}):
        with pytest.raises(SchemaError, match=r"shards 0 and 1 hold rows of different schemas"):
            joined(one, other)
    with pytest.raises(KindError):
        joined(["a", "b"], ["a", "b"])
