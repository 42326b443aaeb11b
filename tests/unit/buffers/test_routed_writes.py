"""Rows written through an ensemble: which member they reach, their names, and failed writes that change nothing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import KindError, OptionError, SchemaError, UsageError

from ...effort import examples


def ensemble(members: int = 3, capacity: int = 10, *, ranked: bool = False, **options: Any) -> ReplayBufferEnsemble:
    def sampler() -> PrioritizedSampler | None:
        return PrioritizedSampler(capacity, 1.0, 1.0, eps=0.0) if ranked else None

    rbs = [TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler()) for _ in range(members)]
    if "routing_dim" not in options:
        options.setdefault("routing_key", "task")
    return ReplayBufferEnsemble(*rbs, **options)


def rows(tasks: Any, first: int = 0) -> TensorDict:
    tasks = torch.as_tensor(tasks)
    return TensorDict({"task": tasks, "id": torch.arange(first, first + tasks.shape[0])}, [tasks.shape[0]])


def ids(member: ReplayBuffer) -> list[int]:
    return member["id"].tolist() if len(member) else []


@examples(2)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=5), st.data())
def test_rows_reach_their_members_in_order(batches: list[list[int]], data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 8))
    rb, model, first = ensemble(capacity=capacity), [list[int]() for _ in range(3)], 0
    for tasks in batches:
        names = rb.extend(rows(torch.tensor(tasks, dtype=torch.int64), first))
        assert names["buffer_ids"].tolist() == tasks
        for place, task in enumerate(tasks):
            assert int(names["index"][place]) == len(model[task]) % capacity
            model[task].append(first + place)
            assert int(names["index_generation"][place]) == len(model[task])
        first += len(tasks)
    for member, written in zip(rb.members, model, strict=True):
        slots = {place % capacity: row for place, row in enumerate(written)}
        assert ids(member) == [slots[slot] for slot in sorted(slots)]


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_a_dimension_names_the_members(dim: int) -> None:
    rb = ensemble(routing_dim=dim)
    shape = [2, 2]
    shape[dim] = 3
    data = TensorDict({"id": torch.arange(6).view(shape)}, shape)
    names = rb.extend(data)
    assert names.batch_size == (6,)
    for number, member in enumerate(rb.members):
        assert ids(member) == data["id"].select(dim, number).tolist()
        assert names["index"][names["buffer_ids"] == number].tolist() == [0, 1]


def test_numbers_may_have_a_last_dimension_of_one_and_nested_keys() -> None:
    data = TensorDict({"info": {"task": torch.tensor([[2], [0], [2]])}, "id": torch.arange(3)}, [3])
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(3)]
    rb = ReplayBufferEnsemble(*members, routing_key=("info", "task"))
    assert rb.routing_key == ("info", "task")
    assert rb.extend(data)["buffer_ids"].tolist() == [2, 0, 2]
    assert list(map(ids, rb.members)) == [[1], [], [0, 2]]


def test_one_row() -> None:
    rb = ensemble()
    made = rb.add(rows([1])[0])
    assert (made.batch_size, int(made["buffer_ids"]), int(made["index"])) == ((), 1, 0)
    with pytest.raises(SchemaError, match="scalar TensorDict"):
        rb.add(rows([1]))
    with pytest.raises(UsageError, match=r"Use extend\(\) for routing_dim"):
        ensemble(routing_dim=0).add(rows([1])[0])


def test_names_of_written_rows_set_their_priorities_unless_they_were_replaced() -> None:
    rb = ensemble(capacity=4, ranked=True)
    names = rb.extend(rows([0, 1, 0, 1]))
    rb.extend(rows([1, 1, 1], 4))  # replaces the first row of member 1
    rb.update_priority({"index": names, "index_generation": names["index_generation"]}, torch.tensor([5.0, 6, 7, 8]))
    first, second = (member.sampler.priorities[:4].tolist() for member in rb.members[:2])  # type: ignore[attr-defined]
    assert first[:2] == [5, 7]
    assert second[0] != 6
    assert second[1] == 8
    assert rb.stats().stale_updates == 1


def test_rows_that_a_writer_does_not_keep_have_no_index() -> None:
    members = [ReplayBuffer(storage=LazyTensorStorage(2), writer=ReservoirWriter()) for _ in range(2)]
    rb = ReplayBufferEnsemble(*members, routing_key="task")
    names = rb.extend(rows([0] * 40))
    kept = names["index"] >= 0
    assert (names["index_generation"][~kept] == 0).all()
    assert kept.sum() < 40
    assert len(members[0]) == 2


def test_first_priorities_come_from_the_rows() -> None:
    rb = ensemble(ranked=True)
    data = rows([0, 1, 0]).set("td_error", torch.tensor([3.0, 4.0, 5.0]))
    rb.extend(data)
    assert rb.members[0].sampler.priorities[:2].tolist() == [3, 5]  # type: ignore[attr-defined]
    other = ensemble(ranked=True)
    other.extend(data, update_priority=False)
    assert other.members[0].sampler.priorities[:2].tolist() == [1, 1]  # type: ignore[attr-defined]


def _break(number: int) -> ReplayBufferEnsemble:
    rb = ensemble()
    if number == 0:
        rb[2].extend(TensorDict({"other": torch.zeros(1)}, [1]))
    else:
        rb[2].extend(rows([2]))
        rb[2].set_writer(ImmutableDatasetWriter())
    return rb


@pytest.mark.parametrize("number", [0, 1])
def test_a_member_that_does_not_take_its_rows_leaves_all_members_as_they_were(number: int) -> None:
    rb = _break(number)
    with pytest.raises((SchemaError, UsageError)):
        rb.extend(rows([0, 1, 2]))
    assert [len(member) for member in rb.members] == [0, 0, 1]
    rb[0].extend(TensorDict({"another": torch.zeros(1)}, [1]))  # no layout is left of the rows that were not written


def test_inverse_transforms_run_first() -> None:
    class Shift:
        def forward(self, data: TensorDict) -> TensorDict:
            return data

        def inv(self, data: TensorDict) -> TensorDict:
            return data.set("task", data["task"] - 10)

    rb = ensemble(transform=Shift())
    assert rb.extend(rows([10, 12]))["buffer_ids"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"task": torch.zeros(2, dtype=torch.int64)}, KindError, "require a TensorDict"),
        (rows([0.0, 1.0]), KindError, "must be integers"),
        (rows([True, False]), KindError, "must be integers"),
        (rows([0, 3]), SchemaError, r"must lie in \[0, 2\]"),
        (rows([0, -1]), SchemaError, "got -1 to 0"),
        (TensorDict({"task": torch.zeros(2, 2, dtype=torch.int64)}, [2]), SchemaError, "one member id per record"),
        (TensorDict({"id": torch.zeros(2)}, [2]), SchemaError, "no field 'task'"),
    ],
)
def test_rows_without_a_member_are_refused(data: Any, error: type[Exception], words: str) -> None:
    rb = ensemble()
    with pytest.raises(error, match=words):
        rb.extend(data)
    assert rb.write_count == 0


def test_dimensions_that_name_no_members_are_refused() -> None:
    rb = ensemble(routing_dim=0)
    for shape, words in (([2, 3], "expected 3 ensemble members"), ([], "requires batched input")):
        with pytest.raises(SchemaError, match=words):
            rb.extend(TensorDict({"id": torch.zeros(shape)}, shape))


def test_refused_routes() -> None:
    with pytest.raises(OptionError, match="mutually exclusive"):
        ensemble(routing_dim=0, routing_key="task")
    with pytest.raises(KindError, match="must be an integer"):
        ensemble(routing_dim="task")
    with pytest.raises(OptionError, match="ndim=2"):
        ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(4, ndim=2)), routing_key="task")
    plain = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(4)))
    for write in (plain.extend, plain.add):
        with pytest.raises(UsageError, match="writes are disabled"):
            write(rows([0]))


def test_pickles_keep_the_route() -> None:
    rb = pickle.loads(pickle.dumps(ensemble()))
    rb.extend(rows([2, 2]))
    assert len(rb[2]) == 2


class Holding:
    """Keeps rows back until it has two of them, and returns the sum of both."""

    def __init__(self) -> None:
        self.kept: list[TensorDict] = []

    def forward(self, data: Any) -> Any:
        return data

    def inv(self, data: TensorDict) -> Any:
        self.kept.append(data)
        if len(self.kept) < 2:
            return None
        first, second = self.kept[0][:1], self.kept[1][:1]
        self.kept = []
        return first.set("id", first["id"] + second["id"])


def test_transforms_that_hold_rows_back() -> None:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2)]
    members[0].append_transform(Holding())
    rb = ReplayBufferEnsemble(*members, routing_key="task")
    names = rb.extend(rows([0, 1, 0]))
    assert names["index"].tolist() == [-1, 0, -1]
    assert names["index_generation"].tolist() == [0, 1, 0]
    assert rb.extend(rows([0, 0], 10))["index"].tolist() == [-1, -1]
    assert [ids(member) for member in members] == [[10], [1]]
    whole = ensemble(transform=Holding())
    assert whole.extend(rows([1, 2])).batch_size == (0,)
    assert whole.extend(rows([1, 2], 5))["buffer_ids"].tolist() == [1]
    assert ids(whole[1]) == [5]
