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


def part(first: int, rows: int, each: int = 1) -> tuple[Any, dict[str, Any]]:
    """Rows of a shard that hold numbers from `first` on, and their info."""
    values = torch.arange(first, first + rows * each)
    info = {"index": values, "priority_weight": torch.full((rows * each,), 0.5), "index_generation": values + 100}
    return {"x": values.float(), "pair": {"y": values[:, None].repeat(1, 3)}}, info


@pytest.mark.parametrize("each", [1, 4])
def test_parts_get_their_positions(each: int) -> None:
    positions = {1: torch.tensor([0, 3, 4]), 6: torch.tensor([1, 2])}
    batch, info = join_parts(
        [Part(1, *part(0, 3, each), positions[1]), Part(6, *part(100, 2, each), positions[6], 0.5)]
    )
    starts = [0, 100, 100 + each, each, 2 * each]
    expected = torch.tensor([start + i for start in starts for i in range(each)])
    assert torch.equal(batch["x"], expected.float())
    assert torch.equal(batch["pair"]["y"], expected[:, None].repeat(1, 3))
    owner = torch.tensor([1, 6, 6, 1, 1]).repeat_interleave(each)
    whole = torch.stack([join_index(int(s), v) for s, v in zip(owner, expected, strict=True)])
    assert torch.equal(info["index"], whole)
    assert torch.equal(info["index_generation"], expected + 100)
    assert torch.equal(info["priority_weight"], torch.where(owner == 6, 0.25, 0.5))


def test_tensordicts_hold_indices_of_the_whole_buffer() -> None:
    def made(first: int) -> tuple[Any, dict[str, Any]]:
        data, info = part(first, 2)
        return TensorDict({**data, **info}, [2]), info

    positions = torch.tensor([[1, 2], [0, 3]])
    batch, info = join_parts([Part(0, *made(0), positions[0]), Part(3, *made(50), positions[1], 0.5)])
    assert batch.batch_size == (4,)
    for key in info:
        assert torch.equal(batch[key], info[key])


@pytest.mark.parametrize("kind", ["dict", "tensordict"])
def test_a_batch_is_split_and_joined_again(kind: str) -> None:
    data, info = part(0, 5)
    data = TensorDict({**data, **info}, [5]) if kind == "tensordict" else data
    halves = split_batch(data, info, [2, 3])
    assert [half["x"].tolist() for half, _ in halves] == [[0, 1], [2, 3, 4]]
    positions = (torch.arange(2), torch.arange(2, 5))
    batch, said = join_parts([Part(0, *half, at) for half, at in zip(halves, positions, strict=True)])
    assert torch.equal(batch["pair"]["y"], data["pair"]["y"])
    assert all(torch.equal(said[key], info[key]) for key in info)


def test_parts_of_different_schemas_raise() -> None:
    positions = torch.tensor([[0], [1]])
    other = ({"z": torch.zeros(1)}, {"index": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(SchemaError, match=r"shards 0 and 1 hold rows of different schemas.*missing"):
        join_parts([Part(0, *part(0, 1), positions[0]), Part(1, *other, positions[1])])
    text = (["a"], {"index": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(KindError, match="tensors"):
        join_parts([Part(0, *text, positions[0]), Part(1, *text, positions[1])])


def test_parts_of_different_dtypes_are_promoted() -> None:
    """Rows of a `ListStorage` may have different dtypes, in one buffer as in several shards."""
    info = {"index": torch.arange(2)}
    one = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([1, 2])}
    two = {"y": torch.tensor([3.5, 4.5]), "x": torch.tensor([3.0, 0.1], dtype=torch.float64)}
    where = torch.tensor([3, 0]), torch.tensor([1, 2])
    batch, _ = join_parts([Part(i, data, info, at) for i, (data, at) in enumerate(zip((one, two), where, strict=True))])
    assert batch["x"].tolist() == [2.0, 3.0, 0.1, 1.0]
    assert batch["y"].tolist() == [2.0, 3.5, 4.5, 1.0]
    three = {"x": torch.zeros(2, 3), "y": torch.zeros(2)}
    with pytest.raises(SchemaError, match="different schemas"):
        join_parts([Part(0, one, info, where[0]), Part(1, three, info, where[1])])


def test_priorities_go_to_their_shards() -> None:
    change = parse_shard_update(SHARDS, INDEX, [1.0, 2.0, 3.0, 4.0], [10, 11, 12, 13])
    assert change is not None
    parts = split_update(change, 3, 100)
    assert sorted(parts) == [0, 2]
    slots, values, stamps = parts[2]
    assert slots.tolist() == [5, 7]
    assert values.tolist() == [1.0, 2.0]
    assert stamps is not None
    assert stamps.tolist() == [10, 11]


def test_one_priority_is_for_all_and_further_dimensions_are_reduced() -> None:
    values = torch.rand(4, 6)
    one = parse_shard_update(SHARDS, INDEX, 0.5, None)
    wide = parse_shard_update(SHARDS, {"index": INDEX, "index_generation": INDEX}, values, None)
    assert one is not None
    assert wide is not None
    assert split_update(one, 3, 100)[2][1].tolist() == [0.5, 0.5]
    assert torch.equal(split_update(wide, 3, 100)[2][1], values.double().amax(1)[:2])
    assert split_update(wide, 3, 100)[2][2] is not None


def test_a_batch_holds_its_priorities() -> None:
    batch = TensorDict({"index": INDEX, "td_error": torch.arange(4.0)}, [4])
    change = parse_batch_update(SHARDS, batch)
    assert change is not None
    assert split_update(change, 3, 100)[0][1].tolist() == [2.0]
    with pytest.raises(KeyMissingError, match="td_error"):
        parse_batch_update(SHARDS, batch.exclude("td_error"))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_invalid_priorities_raise_before_anything_is_sent(bad: float) -> None:
    with pytest.raises(PriorityError, match=r"at the positions \[2\] of 4"):
        parse_shard_update(SHARDS, INDEX, torch.tensor([1.0, 1.0, bad, 1.0]), None)


def test_indices_and_priorities_that_cannot_be_routed_raise() -> None:
    with pytest.raises(SlotError, match="of no shard"):
        split_update(parse_shard_update(SHARDS, INDEX, 1.0, None), 2, 100)  # type: ignore[arg-type]
    with pytest.raises(SlotError, match="index -1 is out of range"):  # each row is kept
        parse_shard_update(SHARDS._replace(least_index=0), INDEX, 1.0, None)
    with pytest.raises(SchemaError, match=r"use \.squeeze\(-1\)"):
        parse_shard_update(SHARDS, INDEX, torch.rand(4, 4), None)
    with pytest.raises(SlotError, match="of no shard"):
        one_shard(-7, 2)
    with pytest.raises(SlotError, match="one shard"):
        one_shard(INDEX[:3], 3)
    with pytest.raises(UsageError, match="needs the new priorities"):
        parse_shard_update(SHARDS, INDEX, None, None)
    with pytest.raises(SchemaError, match="priority should be a number or an iterable of the same length"):
        parse_shard_update(SHARDS, INDEX, torch.rand(3), None)
    with pytest.raises(SchemaError, match="one integer for each"):
        parse_shard_update(SHARDS, INDEX, 1.0, [1, 2])
    with pytest.raises(KindError, match="index must hold integers"):
        parse_shard_update(SHARDS, torch.rand(3), 1.0, None)
    with pytest.warns(UserWarning, match="has no priorities"):
        assert parse_shard_update(SHARDS._replace(prioritized=False), INDEX, 1.0, None) is None


def test_an_index_reads_one_shard() -> None:
    assert one_shard(int(INDEX[0]), 3) == (2, 5)
    shard, slots = one_shard(INDEX[:2], 3)
    assert (shard, slots.tolist()) == (2, [5, 7])


@pytest.mark.parametrize("as_dict", [True, False])
def test_text_of_shards_is_joined_and_split(as_dict: bool) -> None:
    def part(shard: int, first: int, positions: list[int]) -> Part:
        x = torch.arange(first, first + len(positions))
        rows = {"x": x, "t": [f"t{i}" for i in x.tolist()]}
        return Part(shard, rows if as_dict else TensorDict(rows, x.shape), {"index": x}, torch.tensor(positions))

    batch, said = join_parts([part(0, 0, [3, 0]), part(1, 10, [1, 2, 4])])
    assert list(batch["t"]) == [f"t{i}" for i in batch["x"].tolist()] == ["t1", "t10", "t11", "t0", "t12"]
    for rows, _ in split_batch(batch, said, [2, 3]):
        assert list(rows["t"]) == [f"t{i}" for i in rows["x"].tolist()]
