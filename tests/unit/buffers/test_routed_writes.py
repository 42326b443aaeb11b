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
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
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


# -- updates of rows that were written -----------------------------------------------------------------------------


def tracked(members: int = 2, capacity: int = 4, **options: Any) -> ReplayBufferEnsemble:
    def writer() -> TensorDictRoundRobinWriter:
        return TensorDictRoundRobinWriter(track_generations=True)

    rbs = [TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), writer=writer()) for _ in range(members)]
    return ReplayBufferEnsemble(*rbs, routing_key="task", **options)


def test_updates_reach_the_rows_that_are_still_there() -> None:
    rb = tracked()
    names = rb.extend(rows([0, 1, 0]))
    result = rb.update_if_present(
        index=names, generation=names["index_generation"], patch={"id": torch.tensor([10, 11, 12])}
    )
    assert result.updated.tolist() == [True, True, True]
    assert [ids(member) for member in rb.members] == [[10, 12], [11]]
    rb.extend(rows([0, 0, 0], 50))  # replaces the first row of member 0
    result = rb.update_if_present(
        index=names, generation=names["index_generation"], patch=TensorDict({"id": torch.tensor([20, 21, 22])}, [3])
    )
    assert result.updated.tolist() == [False, True, True]
    assert result.stale_count == 1
    assert [ids(member) for member in rb.members] == [[52, 22, 50, 51], [21]]


def test_updates_of_samples_with_versions_and_nested_fields() -> None:
    rb = tracked(capacity=8, batch_size=4, sample_from_all=True)
    for member in rb.members:
        member.set_sampler(SamplerWithoutReplacement())  # no slot twice in a batch
    data = rows([0, 1] * 6).set("state", TensorDict({"h": torch.zeros(12, 2)}, [12]))
    rb.extend(data.set("version", torch.ones(12, dtype=torch.int64)))
    batch = rb.sample()
    names = {"index": batch["index", "index"], "buffer_ids": batch["index", "buffer_ids"]}
    generations = torch.stack(
        [member.writer.generations_of(at) for member, at in zip(rb.members, names["index"], strict=True)]
    )
    values = torch.arange(8.0).view(2, 2, 2) + 1
    version = torch.tensor([[2, 2], [0, 0]])
    result = rb.update_if_present(
        index=names,
        generation=generations,
        patch={("state", "h"): values},
        version_key="version",
        version=version,
    )
    assert result.updated.shape == (2, 2)
    assert not result.updated[1].any()
    assert result.version_rejected is not None
    assert result.version_rejected.tolist() == [[False, False], [True, True]]
    stored = rb[0][:]["state", "h"]
    slots = names["index"][0].tolist()
    assert torch.equal(stored[slots[1]], values[0, 1])
    assert (rb[1][:]["state", "h"] == 0).all()


def test_updates_that_a_member_refuses_change_no_member() -> None:
    rb = tracked()
    names = rb.extend(rows([0, 1]))
    rb[1].empty()
    rb[1].extend(TensorDict({"task": torch.tensor([1]), "id": torch.tensor([5])}, [1]))
    generation = names["index_generation"]
    for patch in ({"other": torch.zeros(2)}, {"id": torch.zeros(2)}, {"id": torch.zeros(3, dtype=torch.int64)}):
        with pytest.raises(SchemaError):
            rb.update_if_present(index=names, generation=generation, patch=patch)
    with pytest.raises(OptionError, match="same number of records"):
        rb.update_if_present(index=names, generation=generation[:1], patch={})
    with pytest.raises(KindError, match="buffer_ids"):
        rb.update_if_present(index=names["index"], generation=generation, patch={})
    assert [ids(member) for member in rb.members] == [[0], [5]]


def streams(*lengths: int, **options: Any) -> ReplayBufferEnsemble:
    members = []
    for length in lengths:
        sampler = SliceSampler(slice_len=2, end_key=("next", "done"), **options)
        writer = TensorDictRoundRobinWriter(track_generations=True)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, writer=writer)
        off = torch.zeros(length, 1, dtype=torch.bool)
        after = {"done": off, "terminated": off.clone(), "truncated": off.clone()}
        if length:
            rb.extend(TensorDict({"t": torch.zeros(length), "next": after}, [length]))
        members.append(rb)
    return ReplayBufferEnsemble(*members)


def test_the_newest_row_of_each_member_ends_its_episode() -> None:
    rb = streams(3, 0, 8)
    rb[2].extend(rb[2][:2])  # the newest row is in slot 1
    before = [rb[i].writer.generations_of(torch.arange(len(rb[i]))).tolist() for i in (0, 2)]
    rb.end_streams()
    assert rb[0][:]["next", "done"].flatten().tolist() == [False, False, True]
    assert rb[2][:]["next", "done"].flatten().nonzero().flatten().tolist() == [1]
    for i in (0, 2):
        assert torch.equal(rb[i][:]["next", "truncated"], rb[i][:]["next", "done"])
        assert not rb[i][:]["next", "terminated"].any()
    assert [rb[i].writer.generations_of(torch.arange(len(rb[i]))).tolist() for i in (0, 2)] == before
    assert rb[0].write_count == 3
    rb[0].extend(rb[0][:3])
    pairs = rb[0].sample(400)["index"].view(-1, 2)
    assert {2, 3} not in map(set, pairs.tolist())


def test_a_terminated_row_is_not_truncated() -> None:
    rb = streams(3)
    rb[0].set_at_(("next", "terminated"), torch.tensor([[True]]), [2])
    rb.end_streams()
    assert rb[0][:]["next", "done"].flatten().tolist() == [False, False, True]
    assert not rb[0][:]["next", "truncated"].any()


def test_streams_that_cannot_be_ended_change_no_member() -> None:
    rb = streams(3)
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    plain.extend(rb[0][:])
    with pytest.raises(UsageError, match="end_streams requires one-dimensional"):
        ReplayBufferEnsemble(rb[0], plain).end_streams()
    with pytest.raises(UsageError, match="end_streams requires"):
        rb.end_streams(end_key="done")
    with pytest.raises(OptionError, match="distinct"):
        rb.end_streams(truncated_key=("next", "done"))
    several = streams(3, traj_key="t")
    several[0].set_at_("t", torch.tensor([1.0]), [0])
    with pytest.raises(UsageError, match="same trajectory id"):
        several.end_streams()
    assert not rb[0][:]["next", "done"].any()
    assert not several[0][:]["next", "done"].any()
