"""What the writers choose; their laws are in tests/contracts."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from ostinato.core.draw import Run
from ostinato.errors import OptionError

from ...tags import STORAGES, buffer


def ranked(values: list[float]) -> TensorDict:
    return TensorDict({"r": torch.tensor(values), "tag": torch.tensor(values) * 10}, [len(values)])


def best(storage: str = "packed", capacity: int = 4, **options: Any) -> ReplayBuffer:
    return buffer(storage, capacity, writer=TensorDictMaxValueWriter("r", **options))


def test_a_ring_skips_the_rows_that_it_would_overwrite() -> None:
    writer = RoundRobinWriter()
    assert writer.place(3, 5, None) == Run(0, 3, 5, 0)
    assert writer.place(4, 5, None) == Run(3, 4, 5, 0)
    assert writer.place(12, 5, None) == Run(4, 5, 5, 7)
    assert writer.cursor == 4
    assert repr(writer) == "RoundRobinWriter(cursor=4)"


def test_skipped_rows_have_positions_too() -> None:
    """`extend` returns one slot for each row, also for those that later rows of the same batch replace."""
    rb = buffer("packed", 5)
    rb.extend(torch.arange(2))
    assert rb.extend(torch.arange(12)).tolist() == [2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3]


@pytest.mark.parametrize("storage", list(STORAGES))
def test_the_best_rows_stay(storage: str) -> None:
    rb = best(storage)
    assert rb.extend(ranked([3, 1, 2])).tolist() == [0, 1, 2]
    assert rb.extend(ranked([0, 9, 4, 2])).tolist() == [-1, 3, 1, -1]
    got = rb[:]
    assert sorted(got["r"].tolist()) == [2, 3, 4, 9]
    assert torch.equal(got["tag"], got["r"] * 10)


def test_rows_outranked_within_their_batch_are_not_kept() -> None:
    rb = best()
    assert rb.extend(ranked([3, 1, 2, 9, 8, 0])).tolist() == [0, -1, 2, 3, 1, -1]
    assert rb[:]["r"].tolist() == [3, 8, 2, 9]


def test_ties_keep_the_older_row() -> None:
    rb = best(capacity=2)
    rb.extend(TensorDict({"r": torch.ones(2), "id": torch.arange(2)}, [2]))
    assert rb.extend(TensorDict({"r": torch.ones(3), "id": torch.arange(2, 5)}, [3])).tolist() == [-1, -1, -1]
    assert rb.add(TensorDict({"r": torch.tensor(1.0), "id": torch.tensor(9)})) is None
    assert rb.extend(TensorDict({"r": torch.tensor([2.0]), "id": torch.tensor([7])}, [1])).tolist() == [1]
    assert rb[:]["id"].tolist() == [0, 7], "of equal ranks the newer row goes first"


def test_ties_among_rows_that_replaced_others_keep_the_older_one() -> None:
    rb = best(capacity=3)

    def put(rank: float, number: int) -> list[int]:
        slots = rb.extend(TensorDict({"r": torch.tensor([rank]), "id": torch.tensor([number])}, [1]))
        return slots.tolist()

    for number in range(3):
        put(1.0, number)
    for number in range(3, 6):
        put(2.0, number)  # the newest of equal ranks goes first: slots 2, 1, 0
    assert rb[:]["id"].tolist() == [5, 4, 3]
    assert [put(3.0, number) for number in range(6, 9)] == [[0], [1], [2]]


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_random_ranks_follow_a_heap(storage: str) -> None:
    rng = random.Random(0)
    rb = best(storage, capacity=6)
    model: list[float] = []
    for _ in range(40):
        values = [float(rng.randrange(1000)) for _ in range(rng.randrange(1, 9))]
        slots = rb.extend(ranked(values)).tolist()
        assert len(slots) == len(values)
        model = heapq.nlargest(6, model + values)
        assert sorted(rb[:]["r"].tolist(), reverse=True) == model
        now = rb[:]["r"].tolist()
        assert all(slot == -1 or now[slot] == value for slot, value in zip(slots, values, strict=True))


@pytest.mark.parametrize(("reduction", "winner"), [("sum", 0), ("mean", 0), ("max", 1), ("min", 0), ("median", 3)])
def test_ranks_of_several_values_are_reduced(reduction: str, winner: int) -> None:
    values = torch.tensor([[5.0, 5.0, 5.0], [0.0, 0.0, 14.0], [1.0, 1.0, 1.0], [8.0, 8.0, -2.0]])
    rb = best(capacity=1, reduction=reduction)
    rb.extend(TensorDict({"r": values, "id": torch.arange(4)}, [4]))
    assert rb[:]["id"].item() == winner


def test_the_default_rank_is_the_next_reward() -> None:
    rb = buffer("packed", 2, writer=TensorDictMaxValueWriter())
    reward = torch.tensor([[1.0], [5.0], [3.0]])
    data = TensorDict({"id": torch.arange(3), "next": TensorDict({"reward": reward}, [3])}, [3])
    rb.extend(data)
    assert sorted(rb[:]["id"].tolist()) == [1, 2]


def test_infinite_ranks_have_their_place() -> None:
    rb = best(capacity=2)
    rb.extend(ranked([float("-inf"), 0.0, float("inf")]))
    assert sorted(rb[:]["r"].tolist()) == [0.0, float("inf")]


def test_integers_rank_rows() -> None:
    rb = best(capacity=2)
    rb.extend(TensorDict({"r": torch.tensor([5, 2, 9])}, [3]))
    assert sorted(rb[:]["r"].tolist()) == [5, 9]


def test_unknown_reductions_are_refused() -> None:
    with pytest.raises(OptionError, match=r"'sum'.*got 'prod'"):
        TensorDictMaxValueWriter("r", reduction="prod")


def test_emptying_forgets_the_ranks() -> None:
    rb = best(capacity=2)
    rb.extend(ranked([5, 6]))
    rb.empty()
    assert rb.extend(ranked([1, 2])).tolist() == [0, 1]


def test_samples_know_where_ranked_rows_are() -> None:
    rb = TensorDictReplayBuffer(
        storage=ListStorage(4), writer=TensorDictMaxValueWriter("r"), batch_size=10, generator=torch.Generator()
    )
    rb.extend(ranked([3, 1, 2, 9, 8, 0]))
    batch = rb.sample()
    assert torch.equal(batch["r"], rb[:]["r"][batch["index"]])


def test_a_tensordict_ring_is_a_ring() -> None:
    rb = buffer("packed", 3, writer=TensorDictRoundRobinWriter())
    assert rb.extend(ranked([1, 2, 3, 4])).tolist() == [0, 1, 2, 0]
    assert rb[:]["r"].tolist() == [4, 2, 3]
