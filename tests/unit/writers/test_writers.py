"""What the writers choose; their laws are in tests/contracts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ReplayBuffer,
    ReservoirWriter,
    TensorDictMaxValueWriter,
)
from ostinato.errors import CheckpointError, KindError, OptionError

from ...registry import seeded
from ...tags import buffer


def ranked(values: list[float]) -> TensorDict:
    return TensorDict({"r": torch.tensor(values), "tag": torch.tensor(values) * 10}, [len(values)])


def best(storage: str = "packed", capacity: int = 4, **options: Any) -> ReplayBuffer:
    return buffer(storage, capacity, writer=TensorDictMaxValueWriter("r", **options))


def test_the_best_rows_stay():
    rb = best()
    assert rb.extend(ranked([3, 1, 2])).tolist() == [0, 1, 2]
    assert rb.extend(ranked([0, 9, 4, 2])).tolist() == [-1, 3, 1, -1]
    got = rb[:]
    assert sorted(got["r"].tolist()) == [2, 3, 4, 9]
    assert torch.equal(got["tag"], got["r"] * 10)
    rb.empty()
    assert rb.extend(ranked([3, 1, 2, 9, 8, 0])).tolist() == [0, -1, 2, 3, 1, -1], "some are outranked in their batch"
    state = rb.state_dict()
    state["writer"]["state"]["slot"][0] = 2
    with pytest.raises(CheckpointError, match="damaged"):
        best().load_state_dict(state)
    infinite = best(capacity=2)
    infinite.extend(ranked([float("-inf"), 0.0, float("inf")]))
    assert sorted(infinite[:]["r"].tolist()) == [0.0, float("inf")]


def test_ties_keep_the_older_row():
    def rows(ranks: list[float], first: int) -> TensorDict:
        return TensorDict({"r": torch.tensor(ranks), "id": torch.arange(first, first + len(ranks))}, [len(ranks)])

    rb = best(capacity=2)
    rb.extend(rows([1.0, 1.0], 0))
    assert rb.extend(rows([1.0] * 3, 2)).tolist() == [-1, -1, -1]
    assert rb.add(rows([1.0], 9)[0]) is None
    assert rb.extend(rows([2.0], 7)).tolist() == [1]
    assert rb[:]["id"].tolist() == [0, 7], "of equal ranks the newer row goes first"


def test_ranks_of_several_values_are_reduced():
    values = torch.tensor([[5.0, 5.0, 5.0], [0.0, 0.0, 14.0], [1.0, 1.0, 1.0], [8.0, 8.0, -2.0]])
    data = TensorDict({"r": values, "id": torch.arange(4), "next": {"reward": torch.tensor([[1], [5], [9], [3]])}}, [4])
    writers = {
        reduction: TensorDictMaxValueWriter("r", reduction=reduction) for reduction in ("sum", "mean", "max", "min")
    }
    writers |= {"median": TensorDictMaxValueWriter("r", reduction="median"), "next reward": TensorDictMaxValueWriter()}
    for (name, writer), winner in zip(writers.items(), (0, 0, 1, 0, 3, 2), strict=True):
        rb = buffer("packed", 1, writer=writer)
        rb.extend(data)
        assert rb[:]["id"].item() == winner, name
    with pytest.raises(OptionError, match=r"'sum'.*got 'prod'"):
        TensorDictMaxValueWriter("r", reduction="prod")


# -- ranks: cost, edits, states ------------------------------------------------------------------------------


def test_edited_rows_are_ranked_anew():
    rb = best(capacity=3)
    rb.extend(ranked([1.0, 2.0, 3.0]))
    rb[0] = ranked([9.0])[0]
    assert rb.extend(ranked([2.5])).tolist() == [1], "slot 0 is the best now, slot 1 the lowest"
    rb[:] = ranked([30.0, 20.0, 10.0])
    assert rb.extend(ranked([15.0, 5.0])).tolist() == [2, -1]
    rb.set_at_("r", torch.tensor([float("nan")]), [2])
    assert rb.extend(ranked([0.5])).tolist() == [2], "a row that lost its rank goes first"
    rb.set_("r", torch.tensor([7.0, 8.0, 6.0]))
    rb.set_("tag", torch.zeros(3))
    assert rb.extend(ranked([6.5])).tolist() == [2]
    rb.storage[2] = ranked([90.0])[0]
    assert rb.extend(ranked([7.5])).tolist() == [0], "edits of the storage itself count as well"


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_random_ranks_and_edits_follow_a_sorted_list(storage):
    """Many more edits than rows, so that outdated entries are let go; the state continues at any time."""
    rng = random.Random(1)
    rb = best(storage, capacity=5)
    model: list[float] = []
    for step in range(200):
        value = float(rng.randrange(10_000))
        if len(model) == 5 and rng.random() < 0.8:
            slot = rng.randrange(5)
            rb[slot] = ranked([value])[0]
            model[slot] = value
        else:
            slot = -1 if rb.add(ranked([value])[0]) is None else 0
            if len(model) < 5:
                model.append(value)
            elif value > min(model):
                model[model.index(min(model))] = value
            assert slot == -1 or value in model
        assert rb[:]["r"].tolist() == model
        if step % 50 == 0:
            again = best(storage, capacity=5)
            again.load_state_dict(rb.state_dict())
            rb = again
    assert len(rb.writer._heap) < 200  # type: ignore[attr-defined]


# -- reservoirs ----------------------------------------------------------------------------------------------


def reservoir(storage: str = "packed", capacity: int = 5, seed: int = 0) -> ReplayBuffer:
    return buffer(storage, capacity, writer=ReservoirWriter(generator=seeded(seed)))


def test_a_reservoir_in_a_larger_buffer_fills_it_first():
    rb = reservoir(capacity=4)
    rb.extend(torch.arange(50))
    larger = reservoir(capacity=6, seed=1)
    larger.load_state_dict(rb.state_dict())
    assert larger.extend(torch.arange(2)).tolist() == [4, 5]
    assert larger.writer.offered == 6  # type: ignore[attr-defined]


def test_a_reservoir_takes_over_a_filled_buffer_and_forgets_an_emptied_one():
    rb = buffer("packed", 4)
    rb.extend(torch.arange(9))
    rb.set_writer(ReservoirWriter(generator=seeded()))
    rb.extend(torch.arange(10, 12))
    assert rb.writer.offered == 6  # type: ignore[attr-defined]
    rb.empty()
    assert rb.extend(torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_a_reservoir_refuses():
    with pytest.raises(KindError, match="generator"):
        ReservoirWriter(generator=3)  # type: ignore[arg-type]
    state = ReservoirWriter(generator=torch.Generator()).state_dict()
    for damage in ({"offered": -1}, {"generator": torch.zeros(3, dtype=torch.uint8)}):
        with pytest.raises(CheckpointError, match="damaged"):
            ReservoirWriter().load_state_dict({**state, **damage})


def test_rows_that_could_not_be_stored_are_taken_back(monkeypatch):
    """A write that fails leaves the ranks of the rows present, in a buffer with room and in a full one."""

    def no_memory(*_: object) -> None:
        raise MemoryError

    for before in (2, 4):
        rb, other = best(), reservoir()
        for each in (rb, other):
            each.extend(ranked([float(i) for i in range(before)]))
            shown = repr(each.writer)
            with monkeypatch.context() as patch:
                patch.setattr(type(each.storage), "write", no_memory)
                with pytest.raises(MemoryError):
                    each.extend(ranked([10.0, 11.0, 12.0]))
            assert (len(each), repr(each.writer)) == (before, shown)
        assert other.writer.offered == before  # type: ignore[attr-defined]
        rb.extend(ranked([1.5, 2.5, 0.5]))
        kept = sorted([*map(float, range(before)), 1.5, 2.5, 0.5])[-4:]
        assert sorted(rb[:]["r"].flatten().tolist()) == kept
