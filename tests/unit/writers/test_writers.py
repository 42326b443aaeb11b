"""What the writers choose; their laws are in tests/contracts."""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReservoirWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from ostinato.core.records import Run
from ostinato.errors import CheckpointError, KindError, OptionError
from ostinato.protocols import Ring

from ...tags import STORAGES, buffer, read_ids, rows

if TYPE_CHECKING:
    from pathlib import Path


def ranked(values: list[float]) -> TensorDict:
    return TensorDict({"r": torch.tensor(values), "tag": torch.tensor(values) * 10}, [len(values)])


def best(storage: str = "packed", capacity: int = 4, **options: Any) -> ReplayBuffer:
    return buffer(storage, capacity, writer=TensorDictMaxValueWriter("r", **options))


def test_a_ring_skips_the_rows_that_it_would_overwrite() -> None:
    writer, ring = RoundRobinWriter(), Ring(5)
    for count, run in ((3, Run(0, 3, 5, 0)), (4, Run(3, 4, 5, 0)), (12, Run(4, 5, 5, 7))):
        assert writer.place(count, ring, None) == run
        ring.record(run)
    assert ring.cursor == 4
    assert repr(writer) == "RoundRobinWriter()"


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


# -- ranks: cost, edits, states ------------------------------------------------------------------------------


class Counted(float):
    """A rank that counts how often it is compared."""

    seen = 0

    def __lt__(self, other: object) -> bool:
        Counted.seen += 1
        return float.__lt__(self, other)  # type: ignore[operator]

    def __gt__(self, other: object) -> bool:
        Counted.seen += 1
        return float.__gt__(self, other)  # type: ignore[operator]


def test_ranks_cost_a_few_comparisons_for_each_row_whatever_the_capacity() -> None:
    """Comparisons are counted, not time: replacing a row takes at most some multiple of log2(capacity) of them."""
    for bits in (6, 10, 14):
        capacity = 2**bits
        writer = TensorDictMaxValueWriter("r")
        ring = Ring(capacity)
        ring.record(writer.place(capacity, ring, torch.arange(float(capacity))))
        writer._live = [(Counted(rank), age, slot) for rank, age, slot in writer._live]
        writer._heap = writer._live.copy()
        Counted.seen = 0
        slots = torch.arange(0, capacity, max(1, capacity // 50))
        writer.rerank(slots, torch.full((len(slots),), 2.0 * capacity))
        assert len(slots) <= Counted.seen <= 4 * bits * len(slots)
        Counted.seen = 0
        placed = writer.place(100, ring, torch.arange(100.0) + 3 * capacity)
        assert (placed.kept >= 0).sum() == min(100, capacity)
        assert 100 <= Counted.seen <= 4 * bits * (100 + len(slots))


def test_rows_below_a_full_buffer_cost_no_heap_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TensorDictMaxValueWriter("r")
    ring = Ring(100)
    ring.record(writer.place(100, ring, torch.arange(100.0) + 5))
    for name in ("heappush", "heappop"):
        monkeypatch.setattr(heapq, name, None)
    assert (writer.place(100_000, ring, torch.rand(100_000)).kept == -1).all()


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_edited_rows_are_ranked_anew(storage: str) -> None:
    rb = best(storage, capacity=3)
    rb.extend(ranked([1.0, 2.0, 3.0]))
    rb[0] = ranked([9.0])[0]
    assert rb.extend(ranked([2.5])).tolist() == [1], "slot 0 is the best now, slot 1 the lowest"
    rb[:] = ranked([30.0, 20.0, 10.0])
    assert rb.extend(ranked([15.0, 5.0])).tolist() == [2, -1]


def test_edits_of_the_ranking_field_count() -> None:
    rb = best(capacity=3)
    rb.extend(ranked([1.0, 2.0, 3.0]))
    rb.set_at_("r", torch.tensor([float("nan")]), [2])
    assert rb.extend(ranked([0.5])).tolist() == [2], "a row that lost its rank goes first"
    rb.set_("r", torch.tensor([7.0, 8.0, 6.0]))
    rb.set_("tag", torch.zeros(3))
    assert rb.extend(ranked([6.5])).tolist() == [2]


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_random_ranks_and_edits_follow_a_sorted_list(storage: str) -> None:
    """Many more edits than rows, so that outdated entries are let go; the state continues at any time."""
    rng = random.Random(1)
    rb = best(storage, capacity=5)
    model: list[float] = []
    for step in range(400):
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


def test_damaged_ranks_are_refused() -> None:
    rb = best(capacity=3)
    rb.extend(ranked([1, 2, 3]))
    state = rb.state_dict()
    state["writer"]["state"]["slot"][0] = 2
    with pytest.raises(CheckpointError, match="damaged"):
        best(capacity=3).load_state_dict(state)


# -- reservoirs ----------------------------------------------------------------------------------------------


def reservoir(storage: str = "packed", capacity: int = 5, seed: int = 0) -> ReplayBuffer:
    return buffer(storage, capacity, writer=ReservoirWriter(generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("kind", ["dict", "tensordict"])
def test_a_reservoir_keeps_the_rows_that_it_says(storage: str, kind: str) -> None:
    rb, model, first = reservoir(storage), {}, 0
    for size in (1, 3, 2, 9, 1, 30, 2):
        ids = range(first, first + size)
        slots = rb.extend(rows(ids, f"{kind}s" if storage == "list" else kind)).tolist()
        assert len({slot for slot in slots if slot >= 0}) == len([slot for slot in slots if slot >= 0])
        model.update({slot: row for slot, row in zip(slots, ids, strict=True) if slot >= 0})
        first += size
        assert read_ids(rb[:]) == [model[slot] for slot in range(len(model))]
    assert rb.writer.offered == first  # type: ignore[attr-defined]
    assert rb.add(rows(torch.tensor(first), kind)) in {None, 0, 1, 2, 3, 4}


def test_a_reservoir_without_generator_follows_the_global_one() -> None:
    chosen = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            chosen.append(ReservoirWriter().place(100, Ring(10), None).kept.tolist())
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("saved", [True, False])
def test_a_reservoir_goes_on_bit_for_bit(tmp_path: Path, saved: bool) -> None:
    rb, again = reservoir(), buffer("packed", 5, writer=ReservoirWriter())
    rb.extend(torch.arange(20))
    if saved:
        rb.dumps(tmp_path / "rb")
        again.loads(tmp_path / "rb")
    else:
        again.load_state_dict(rb.state_dict())
    for size in (1, 7, 20):
        assert torch.equal(rb.extend(torch.arange(size)), again.extend(torch.arange(size)))
        assert torch.equal(rb[:], again[:])


def test_a_reservoir_in_a_larger_buffer_fills_it_first() -> None:
    rb = reservoir(capacity=4)
    rb.extend(torch.arange(50))
    larger = reservoir(capacity=6, seed=1)
    larger.load_state_dict(rb.state_dict())
    assert larger.extend(torch.arange(2)).tolist() == [4, 5]
    assert larger.writer.offered == 6  # type: ignore[attr-defined]


def test_a_reservoir_takes_over_a_filled_buffer_and_forgets_an_emptied_one() -> None:
    rb = buffer("packed", 4)
    rb.extend(torch.arange(9))
    rb.set_writer(ReservoirWriter(generator=torch.Generator().manual_seed(0)))
    rb.extend(torch.arange(10, 12))
    assert rb.writer.offered == 6  # type: ignore[attr-defined]
    rb.empty()
    assert rb.extend(torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_a_reservoir_refuses() -> None:
    with pytest.raises(KindError, match="generator"):
        ReservoirWriter(generator=3)  # type: ignore[arg-type]
    for writer in (ReservoirWriter(), TensorDictMaxValueWriter()):
        with pytest.raises(OptionError, match="ndim"):
            buffer(LazyTensorStorage(4, ndim=2), writer=writer)
    state = ReservoirWriter(generator=torch.Generator()).state_dict()
    for damage in ({"offered": -1}, {"generator": torch.zeros(3, dtype=torch.uint8)}):
        with pytest.raises(CheckpointError, match="damaged"):
            ReservoirWriter().load_state_dict({**state, **damage})


@pytest.mark.parametrize("rows_before", [2, 4])
def test_ranks_of_rows_that_could_not_be_stored_are_taken_back(
    rows_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails leaves the ranks of the rows present, in a buffer with room and in a full one."""
    rb = best()
    rb.extend(ranked([float(i) for i in range(rows_before)]))
    before = repr(rb.writer)
    with monkeypatch.context() as patch:
        patch.setattr(type(rb.storage), "write", _no_memory)
        with pytest.raises(MemoryError):
            rb.extend(ranked([10.0, 11.0, 12.0]))
    assert (len(rb), repr(rb.writer)) == (rows_before, before)
    rb.extend(ranked([1.5, 2.5, 0.5]))
    kept = sorted([*map(float, range(rows_before)), 1.5, 2.5, 0.5])[-4:]
    assert sorted(rb[:]["r"].flatten().tolist()) == kept


def test_a_reservoir_counts_rows_that_could_not_be_stored_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = reservoir()
    rb.extend(rows(range(7)))
    assert isinstance(rb.writer, ReservoirWriter)
    with monkeypatch.context() as patch:
        patch.setattr(type(rb.storage), "write", _no_memory)
        with pytest.raises(MemoryError):
            rb.extend(rows(range(7, 10)))
    assert rb.writer.offered == 7


def _no_memory(*_: object) -> None:
    raise MemoryError
