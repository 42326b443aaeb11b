"""Removers: what a new row replaces in a full buffer, against rows that are written one by one to a plain list."""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    ConsumingSampler,
    Episodes,
    HeapSampler,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    TensorDictMaxValueWriter,
)
from ostinato.errors import OptionError
from ostinato.samplers import PrioritySampler

from ...effort import examples
from .refusals import refuses

CAPACITY = 6


def make(name: Any, sampler: Any = None, **options: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(CAPACITY, alpha=1.0, beta=1.0) if sampler is None else sampler
    storage = LazyTensorStorage(CAPACITY)
    return ReplayBuffer(storage=storage, sampler=sampler, remover=name, version_key="version", **options)


class Row(NamedTuple):
    number: int
    version: int
    priority: float


RANKS: dict[str, Any] = {
    "fifo": lambda _: 0,
    "lifo": lambda row: -row.number,
    "lowest_priority": lambda row: row.priority,
    "oldest_version": lambda row: row.version,
}
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "priorities", "delete", "patch", "empty"]),
        st.lists(st.integers(0, 4), min_size=1, max_size=9),
    ),
    max_size=16,
)


@pytest.mark.parametrize("name", RANKS)
@examples(1.0)
@given(calls=CALLS)
def test_rows_are_those_of_a_model(name, calls):
    """Rows by slot, as if they were written one by one: into slots that are free, else into that of the least rank."""
    rb, model, largest, numbers = make(name), dict[int, Row](), 0.0, count()
    freed, unused = list[int](), list(range(CAPACITY))
    for call, picks in [("write", [0, 3, 1]), *calls]:
        slots = sorted(model.keys() & set(picks))
        index = torch.tensor(slots, dtype=torch.int64)
        if call == "write":
            placed = []
            for version in picks:
                free = freed or unused
                placed.append(free.pop(0) if free else min(model, key=lambda s: (RANKS[name](model[s]), model[s])))
                model[placed[-1]] = Row(next(numbers), version, largest or 1.0)
            first = model[placed[-1]].number + 1 - len(picks)
            values = torch.arange(first, first + len(picks))
            given_back = rb.extend({"value": values, "version": torch.tensor(picks)}).tolist()
            kept = [slot if slot not in placed[i + 1 :] else -1 for i, slot in enumerate(placed)]
            assert given_back == kept or name == "fifo"
        elif call == "priorities":
            rb.update_priority(index, torch.arange(len(slots)) % 3)
            for i, slot in enumerate(slots):
                model[slot] = model[slot]._replace(priority=i % 3)
                largest = max(largest, i % 3)
        elif call == "delete":
            assert rb.delete(index[:2]).all()
            freed += slots[:2]
            for slot in slots[:2]:
                del model[slot]
        elif call == "empty":
            rb.empty()
            model, largest, freed, unused = {}, 0.0, [], list(range(CAPACITY))
        elif slots:
            names: dict[str, Any] = {"index": index[:1], "generation": rb._engine.store.generations_of(index[:1])}
            rb.update_if_present(**names, patch={"version": torch.tensor(picks[-1:])})
            model[slots[0]] = model[slots[0]]._replace(version=picks[-1])
        assert len(rb) == len(model)
    found = rb[:]["value"].tolist() if model else []
    assert {slot: found[slot] for slot in model} == {slot: row.number for slot, row in model.items()}


def rows(*values: int, version: int = 0) -> dict[str, torch.Tensor]:
    return {"value": torch.tensor(values), "version": torch.full((len(values),), version)}


def test_lists_and_lanes():
    listed = ReplayBuffer(storage=ListStorage(3), remover="lifo")
    for i in range(5):
        listed.add(torch.tensor(i))
    assert listed[:].tolist() == [0, 1, 4]
    lanes = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2), remover="fifo")
    lanes.extend(torch.arange(6).view(2, 3))
    assert lanes[:].tolist() == [[2, 1], [5, 4]]


@pytest.mark.parametrize("sampler", [HeapSampler(CAPACITY, "max", 1), ConsumingSampler(1)])
def test_rows_that_leave_by_draws_make_room_first(sampler):
    """Reverb's table with a selector, a remover and `max_times_sampled=1`."""
    rb = make("lowest_priority" if sampler.prioritized else "oldest_version", sampler=sampler)
    ranks = [6, 2, 5, 1, 4, 3]
    index = rb.extend({"value": torch.arange(6), "version": torch.tensor(ranks)})
    if sampler.prioritized:
        rb.update_priority(index, ranks)
    gone = set(rb.sample(2, return_info=True)[1]["index"].tolist())
    assert len(rb) == 4
    placed = rb.extend(rows(6, 7, 8, version=9)).tolist()
    assert set(placed[:2]) == gone
    assert placed[2] == next(slot for slot in (3, 1, 5) if slot not in gone)
    assert len(rb) == 6


REFUSED: list[Any] = [
    ("oldest", "'oldest_version'", {}),
    ("lowest_priority", "PrioritizedSampler", {}),
    ("oldest_version", "version_key", {"version_key": None}),
    ("fifo", "RoundRobinWriter", {"writer": TensorDictMaxValueWriter()}),
    ("lifo", "ndim=1", {"storage": LazyTensorStorage(8, ndim=2)}),
    ("lifo", "single_copy", {"storage": LazyTensorStorage(8, single_copy=True)}),
    ("lifo", "windows or episodes", {"episodes": Episodes(end_key="done")}),
    ("lifo", "sample_unit", {"sample_unit": NStep(2, 0.9), "episodes": Episodes(end_key="done")}),
    ("lifo", "order of writing", {"sampler": QueueSampler()}),
    ("lifo", "ring order", {"shared": True, "version_key": None}),
]


class Silent(PrioritizedSampler):
    """Priorities that no remover can read."""

    priorities_at = PrioritySampler.priorities_at


def test_what_does_not_go_with_a_remover():
    for name, words, options in REFUSED:
        parts = {"storage": LazyTensorStorage(8), "sampler": RandomSampler(), **options}
        with pytest.raises(OptionError, match=words):
            ReplayBuffer(remover=name, **parts)
    rb, silent = (make("lowest_priority", sampler=kind(CAPACITY, 1.0, 1.0)) for kind in (PrioritizedSampler, Silent))
    silent.extend(rows(*range(CAPACITY)))
    sampler = rb.sampler
    refuses(
        {
            OptionError: {
                "lowest_priority": lambda: rb.set_sampler(RandomSampler()),
                "Silent does not tell the priorities of rows": lambda: silent.extend(rows(9)),
                "ReservoirWriter": lambda: rb.set_writer(ReservoirWriter()),
                "ring order": lambda: ReplayBuffer(storage=LazyTensorStorage(4), remover="lifo").share(),
            },
        }
    )
    assert rb.sampler is sampler
