"""Rows written through an ensemble: which member they reach, their names, and failed writes that change nothing."""

from __future__ import annotations

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
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from ostinato.errors import KindError, OptionError, SchemaError, UsageError

from .refusals import refuses


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


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=5), st.integers(1, 8))
def test_rows_reach_their_members_in_order(batches, capacity):
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


def test_names_of_written_rows_set_their_priorities_unless_they_were_replaced():
    def priorities() -> list[list[float]]:
        samplers: list[Any] = [member.sampler for member in rb.members]
        return [sampler.priorities[:2].tolist() for sampler in samplers]

    rb = ensemble(2, 4, ranked=True)
    names = rb.extend(rows([0, 1, 0, 1]).set("td_error", torch.tensor([3.0, 1.0, 4.0, 1.0])))
    assert priorities() == [[3, 4], [1, 1]]  # first priorities come from the rows
    rb.extend(rows([1, 1, 1], 4).set("td_error", torch.ones(3)), update_priority=False)  # replaces a row of member 1
    rb.update_priority({"index": names, "index_generation": names["index_generation"]}, torch.tensor([5.0, 6, 7, 8]))
    assert priorities() == [[5, 7], [1, 8]]
    assert rb.stats().stale_updates == 1


@pytest.mark.parametrize("fault", ["schema", "writer"])
def test_a_member_that_does_not_take_its_rows_leaves_all_members_as_they_were(fault):
    rb = ensemble()
    rb[2].extend(TensorDict({"other": torch.zeros(1)}, [1]) if fault == "schema" else rows([2]))
    if fault == "writer":
        rb[2].set_writer(ImmutableDatasetWriter())
    with pytest.raises((SchemaError, UsageError)):
        rb.extend(rows([0, 1, 2]))
    assert [len(member) for member in rb.members] == [0, 0, 1]
    rb[0].extend(TensorDict({"another": torch.zeros(1)}, [1]))  # no layout is left of the rows that were not written


def test_rows_without_a_member_are_refused():
    """More of them: `tests/parity/test_ensembles.py`."""
    rb, columns = ensemble(), ensemble(routing_dim=0)
    two = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    refuses(
        {
            SchemaError: {
                "got -1 to 0": lambda: rb.extend(rows([0, -1])),
                "one member id per record": lambda: rb.extend(rows(torch.zeros(2, 2, dtype=torch.int64))),
                "no field 'task'": lambda: rb.extend(rows([0]).exclude("task")),
                "scalar TensorDict": lambda: rb.add(rows([1])),
                "expected 3 ensemble members": lambda: columns.extend(rows([0, 0])),
                "requires batched input": lambda: columns.extend(rows([0])[0]),
            },
            UsageError: {
                r"Use extend\(\) for routing_dim": lambda: columns.add(rows([1])[0]),
            },
            OptionError: {
                "ndim=2": lambda: ReplayBufferEnsemble(two, routing_key="task"),
            },
        }
    )
    assert rb.write_count == columns.write_count == 0


# -- updates of rows that were written -----------------------------------------------------------------------------


def tracked(capacity: int = 4, **options: Any) -> ReplayBufferEnsemble:
    rb = ensemble(2, capacity, **options)
    for member in rb.members:
        member.set_writer(TensorDictRoundRobinWriter(track_generations=True))
    return rb


def test_updates_reach_the_rows_that_are_still_there_or_none_of_any_member():
    rb = tracked()
    names = rb.extend(rows([0, 1, 0]))
    generation = names["index_generation"]
    given: Any = {"index": names, "generation": generation}
    wrong: list[Any] = [
        ({"patch": {"other": torch.zeros(3)}}, SchemaError),
        ({"patch": {"id": torch.zeros(2, dtype=torch.int64)}}, SchemaError),
        ({"patch": {}, "index": names["index"]}, KindError),
    ]
    for options, error in wrong:
        with pytest.raises(error):
            rb.update_if_present(**{**given, **options})
    assert [ids(member) for member in rb.members] == [[0, 2], [1]]
    assert rb.update_if_present(**given, patch={"id": torch.tensor([10, 11, 12])}).updated.tolist() == [True] * 3
    assert [ids(member) for member in rb.members] == [[10, 12], [11]]
    rb.extend(rows([0, 0, 0], 50))  # replaces the first row of member 0
    result = rb.update_if_present(**given, patch=TensorDict({"id": torch.tensor([20, 21, 22])}, [3]))
    assert (result.updated.tolist(), result.stale_count) == ([False, True, True], 1)
    assert [ids(member) for member in rb.members] == [[52, 22, 50, 51], [21]]
