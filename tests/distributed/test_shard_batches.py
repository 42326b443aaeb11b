"""Batches that are put together, and priorities that are taken apart, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato.distributed.routing import join_index
from ostinato.distributed.sampling import Part, join, split
from ostinato.distributed.writing import About, one_shard, route, unpack_batch, unpack_shares
from ostinato.errors import KeyMissingError, KindError, PriorityError, SchemaError, SlotError, UsageError

ABOUT = About(None, True, "td_error", "max", capacity=100, counting=False, waits=False)
INDEX = torch.cat((join_index(2, torch.tensor([5, 7])), join_index(0, torch.tensor([1])), torch.tensor([-1])))


def part(first: int, rows: int, each: int = 1) -> tuple[Any, dict[str, Any]]:
    """Rows of a shard that hold numbers from `first` on, and their info."""
    values = torch.arange(first, first + rows * each)
    info = {"index": values, "priority_weight": torch.full((rows * each,), 0.5), "index_generation": values + 100}
    return {"x": values.float(), "pair": {"y": values[:, None].repeat(1, 3)}}, info


@pytest.mark.parametrize("each", [1, 4])
def test_parts_come_to_their_places(each: int) -> None:
    spots = {1: torch.tensor([0, 3, 4]), 6: torch.tensor([1, 2])}
    batch, info = join([Part(1, *part(0, 3, each), spots[1]), Part(6, *part(100, 2, each), spots[6], 0.5)])
    starts = [0, 100, 100 + each, each, 2 * each]
    expected = torch.tensor([start + i for start in starts for i in range(each)])
    assert torch.equal(batch["x"], expected.float())
    assert torch.equal(batch["pair"]["y"], expected[:, None].repeat(1, 3))
    owner = torch.tensor([1, 6, 6, 1, 1]).repeat_interleave(each)
    whole = torch.stack([join_index(int(s), v) for s, v in zip(owner, expected, strict=True)])
    assert torch.equal(info["index"], whole)
    assert torch.equal(info["index_generation"], expected + 100)
    assert torch.equal(info["priority_weight"], torch.where(owner == 6, 0.25, 0.5))


def test_tensordicts_carry_the_names_of_the_whole() -> None:
    def made(first: int) -> tuple[Any, dict[str, Any]]:
        data, info = part(first, 2)
        return TensorDict({**data, **info}, [2]), info

    spots = torch.tensor([[1, 2], [0, 3]])
    batch, info = join([Part(0, *made(0), spots[0]), Part(3, *made(50), spots[1], 0.5)])
    assert batch.batch_size == (4,)
    for key in info:
        assert torch.equal(batch[key], info[key])


@pytest.mark.parametrize("kind", ["dict", "tensordict"])
def test_a_batch_is_split_and_its_parts_are_one_again(kind: str) -> None:
    data, info = part(0, 5)
    data = TensorDict({**data, **info}, [5]) if kind == "tensordict" else data
    halves = split(data, info, [2, 3])
    assert [half["x"].tolist() for half, _ in halves] == [[0, 1], [2, 3, 4]]
    spots = (torch.arange(2), torch.arange(2, 5))
    batch, said = join([Part(0, *half, at) for half, at in zip(halves, spots, strict=True)])
    assert torch.equal(batch["pair"]["y"], data["pair"]["y"])
    assert all(torch.equal(said[key], info[key]) for key in info)


def test_parts_of_other_forms_are_refused() -> None:
    spots = torch.tensor([[0], [1]])
    other = ({"z": torch.zeros(1)}, {"index": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(SchemaError, match=r"shards 0 and 1 hold rows of different forms.*missing"):
        join([Part(0, *part(0, 1), spots[0]), Part(1, *other, spots[1])])
    text = (["a"], {"index": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(KindError, match="tensors"):
        join([Part(0, *text, spots[0]), Part(1, *text, spots[1])])


def test_priorities_go_to_their_shards() -> None:
    change = unpack_shares(ABOUT, INDEX, [1.0, 2.0, 3.0, 4.0], [10, 11, 12, 13])
    assert change is not None
    parts = route(change, 3, 100)
    assert sorted(parts) == [0, 2]
    slots, values, stamps = parts[2]
    assert slots.tolist() == [5, 7]
    assert values.tolist() == [1.0, 2.0]
    assert stamps is not None
    assert stamps.tolist() == [10, 11]


def test_one_priority_is_for_all_and_more_dimensions_are_reduced() -> None:
    values = torch.rand(4, 6)
    one = unpack_shares(ABOUT, INDEX, 0.5, None)
    wide = unpack_shares(ABOUT, {"index": INDEX, "index_generation": INDEX}, values, None)
    assert one is not None
    assert wide is not None
    assert route(one, 3, 100)[2][1].tolist() == [0.5, 0.5]
    assert torch.equal(route(wide, 3, 100)[2][1], values.double().amax(1)[:2])
    assert route(wide, 3, 100)[2][2] is not None


def test_a_batch_brings_its_priorities() -> None:
    batch = TensorDict({"index": INDEX, "td_error": torch.arange(4.0)}, [4])
    change = unpack_batch(ABOUT, batch)
    assert change is not None
    assert route(change, 3, 100)[0][1].tolist() == [2.0]
    with pytest.raises(KeyMissingError, match="td_error"):
        unpack_batch(ABOUT, batch.exclude("td_error"))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_priorities_are_named_before_anything_is_sent(bad: float) -> None:
    with pytest.raises(PriorityError, match=r"at the positions \[2\] of 4"):
        unpack_shares(ABOUT, INDEX, torch.tensor([1.0, 1.0, bad, 1.0]), None)


def test_what_cannot_be_routed_is_refused() -> None:
    with pytest.raises(SlotError, match="of no shard"):
        route(unpack_shares(ABOUT, INDEX, 1.0, None), 2, 100)  # type: ignore[arg-type]
    with pytest.raises(SlotError, match="of no shard"):
        one_shard(-7, 2)
    with pytest.raises(SlotError, match="one shard"):
        one_shard(INDEX[:3], 3)
    with pytest.raises(UsageError, match="needs the new priorities"):
        unpack_shares(ABOUT, INDEX, None, None)
    with pytest.raises(SchemaError, match="priorities must be one number"):
        unpack_shares(ABOUT, INDEX, torch.rand(3), None)
    with pytest.raises(SchemaError, match="one integer for each"):
        unpack_shares(ABOUT, INDEX, 1.0, [1, 2])
    with pytest.raises(KindError, match="index must hold integers"):
        unpack_shares(ABOUT, torch.rand(3), 1.0, None)
    with pytest.warns(UserWarning, match="has no priorities"):
        assert unpack_shares(ABOUT._replace(prioritized=False), INDEX, 1.0, None) is None


def test_an_index_reads_one_shard() -> None:
    assert one_shard(int(INDEX[0]), 3) == (2, 5)
    shard, slots = one_shard(INDEX[:2], 3)
    assert (shard, slots.tolist()) == (2, [5, 7])


@pytest.mark.parametrize("as_dict", [True, False])
def test_text_of_shards_is_joined_and_split(as_dict: bool) -> None:
    def part(shard: int, first: int, spots: list[int]) -> Part:
        x = torch.arange(first, first + len(spots))
        rows = {"x": x, "t": [f"t{i}" for i in x.tolist()]}
        return Part(shard, rows if as_dict else TensorDict(rows, x.shape), {"index": x}, torch.tensor(spots))

    batch, said = join([part(0, 0, [3, 0]), part(1, 10, [1, 2, 4])])
    assert list(batch["t"]) == [f"t{i}" for i in batch["x"].tolist()] == ["t1", "t10", "t11", "t0", "t12"]
    for rows, _ in split(batch, said, [2, 3]):
        assert list(rows["t"]) == [f"t{i}" for i in rows["x"].tolist()]
