"""Joining batches of shards and routing priorities to shards, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato.distributed.routing import join_index
from ostinato.distributed.sampling import Part, join_parts, split_batch
from ostinato.distributed.writing import ShardInfo, one_shard, parse_batch_update, parse_shard_update, split_update
from ostinato.errors import KeyMissingError, KindError, PriorityError, SchemaError, SlotError, UsageError

SHARDS = ShardInfo(None, True, "td_error", "max", capacity=100, counting=False, waits=False, least_index=-1)
INDEX = torch.cat((join_index(2, torch.tensor([5, 7])), join_index(0, torch.tensor([1])), torch.tensor([-1])))


def rows(first: int, count: int) -> tuple[Any, dict[str, Any]]:
    """Rows of a shard that hold numbers from `first` on, and their info."""
    values = torch.arange(first, first + count)
    info = {"index": values, "priority_weight": torch.full((count,), 0.5), "index_generation": values + 100}
    text = [f"t{i}" for i in values.tolist()]
    return {"x": values.float(), "pair": {"y": values[:, None].repeat(1, 3)}, "t": text}, info


def test_parts_get_their_positions() -> None:
    """Each position of a draw is a window of four rows."""
    positions = {1: torch.tensor([0, 3, 4]), 6: torch.tensor([1, 2])}
    batch, info = join_parts([Part(1, *rows(0, 12), positions[1]), Part(6, *rows(100, 8), positions[6], 0.5)])
    expected = torch.tensor([start + i for start in (0, 100, 104, 4, 8) for i in range(4)])
    assert torch.equal(batch["x"], expected.float())
    assert torch.equal(batch["pair"]["y"], expected[:, None].repeat(1, 3))
    assert list(batch["t"]) == [f"t{i}" for i in expected.tolist()]
    owner = torch.tensor([1, 6, 6, 1, 1]).repeat_interleave(4)
    whole = torch.stack([join_index(int(s), v) for s, v in zip(owner, expected, strict=True)])
    assert torch.equal(info["index"], whole)
    assert torch.equal(info["index_generation"], expected + 100)
    assert torch.equal(info["priority_weight"], torch.where(owner == 6, 0.25, 0.5))


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_batch_is_split_and_joined_again(as_dict: bool) -> None:
    data, info = rows(0, 5)
    data = data if as_dict else TensorDict({**data, **info}, [5])
    halves = split_batch(data, info, [2, 3])
    assert [half["x"].tolist() for half, _ in halves] == [[0, 1], [2, 3, 4]]
    assert list(halves[1][0]["t"]) == ["t2", "t3", "t4"]
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


# -- priorities -------------------------------------------------------------------------------------------------------


def test_priorities_go_to_their_shards() -> None:
    def parts(update: Any) -> Any:
        assert update is not None
        return split_update(update, 3, 100)

    found = parts(parse_shard_update(SHARDS, INDEX, [1.0, 2.0, 3.0, 4.0], [10, 11, 12, 13]))
    assert sorted(found) == [0, 2]
    slots, values, generations = found[2]
    assert (slots.tolist(), values.tolist(), generations.tolist()) == ([5, 7], [1.0, 2.0], [10, 11])
    assert parts(parse_shard_update(SHARDS, INDEX, 0.5, None))[2][1].tolist() == [0.5, 0.5], "one for all"
    wide = torch.rand(4, 6)  # further dimensions are reduced
    found = parts(parse_shard_update(SHARDS, {"index": INDEX, "index_generation": INDEX}, wide, None))
    assert torch.equal(found[2][1], wide.double().amax(1)[:2])
    assert found[2][2] is not None
    batch = TensorDict({"index": INDEX, "td_error": torch.arange(4.0)}, [4])
    assert parts(parse_batch_update(SHARDS, batch))[0][1].tolist() == [2.0]
    with pytest.raises(KeyMissingError, match="td_error"):
        parse_batch_update(SHARDS, batch.exclude("td_error"))


WRONG: list[tuple[Any, Any, Any, type[Exception], str]] = [
    (INDEX, torch.tensor([1.0, 1.0, -1.0, 1.0]), None, PriorityError, r"at the positions \[2\] of 4"),
    (INDEX, torch.tensor([1.0, 1.0, float("nan"), 1.0]), None, PriorityError, r"at the positions \[2\] of 4"),
    (INDEX, torch.tensor([1.0, 1.0, float("inf"), 1.0]), None, PriorityError, r"at the positions \[2\] of 4"),
    (INDEX, torch.rand(4, 4), None, SchemaError, r"use \.squeeze\(-1\)"),
    (INDEX, None, None, UsageError, "needs the new priorities"),
    (INDEX, torch.rand(3), None, SchemaError, "a number or an iterable of the same length"),
    (INDEX, 1.0, [1, 2], SchemaError, "one integer for each"),
    (torch.rand(3), 1.0, None, KindError, "index must hold integers"),
]


@pytest.mark.parametrize(("index", "priority", "generation", "error", "words"), WRONG)
def test_invalid_updates_raise_before_anything_is_sent(
    index: Any, priority: Any, generation: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        parse_shard_update(SHARDS, index, priority, generation)


def test_an_index_names_one_shard_or_raises() -> None:
    assert one_shard(int(INDEX[0]), 3) == (2, 5)
    shard, slots = one_shard(INDEX[:2], 3)
    assert (shard, slots.tolist()) == (2, [5, 7])
    with pytest.raises(SlotError, match="of no shard"):
        one_shard(-7, 2)
    with pytest.raises(SlotError, match="one shard"):
        one_shard(INDEX[:3], 3)
    update = parse_shard_update(SHARDS, INDEX, 1.0, None)
    assert update is not None
    with pytest.raises(SlotError, match="of no shard"):
        split_update(update, 2, 100)
    with pytest.raises(SlotError, match="index -1 is out of range"):  # each row is kept
        parse_shard_update(SHARDS._replace(least_index=0), INDEX, 1.0, None)
    with pytest.warns(UserWarning, match="has no priorities"):
        assert parse_shard_update(SHARDS._replace(prioritized=False), INDEX, 1.0, None) is None
