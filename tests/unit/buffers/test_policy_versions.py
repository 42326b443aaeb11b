"""Draws by policy version: rows young enough against a plain list, the law by chi-square, after edits and loads."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReservoirWriter,
    SequenceUnit,
    TensorDictReplayBuffer,
)
from ostinato.buffers.policy_versions import Runs
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError

from ...stats.chi_square import p_value
from .refusals import refuses

if TYPE_CHECKING:
    from collections.abc import Callable

LOW, HIGH = 1e-4, 1 - 1e-4


def rows_of(versions: list[int], first: int = 0) -> dict[str, torch.Tensor]:
    return {"version": torch.tensor(versions), "id": torch.arange(first, first + len(versions))}


def make(capacity: int = 10, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=LazyTensorStorage(capacity), version_key="version", generator=generator, **options)


@pytest.mark.parametrize(
    "versions", [[i // 4 for i in range(26)], [0, 2, 1, 2, 0, 3, 3, 1, 3, 2, 3, 0, 2, 3], [7 * i % 5 for i in range(9)]]
)
def test_draws_are_uniform_among_the_young_rows_alone(versions):
    """Exact, too, if rows of older versions come late."""
    rb = make(batch_size=4000)
    for first in range(0, len(versions), 3):
        rb.extend(rows_of(versions[first : first + 3], first))
        held = dict([*enumerate(versions[: first + 3])][-10:])
        for max_age in (0, 1, 2, 50):
            young = [i for i, version in held.items() if version >= max(held.values()) - max_age]
            ids = rb.sample(max_age=max_age)["id"]
            assert set(ids.tolist()) == set(young)
            counts = [int((ids == i).sum()) for i in young]
            assert len(young) == 1 or LOW < p_value(counts) < HIGH


def test_a_long_life_takes_the_memory_of_the_runs_present():
    runs = Runs()
    for version in range(200):
        runs.record(np.array([version]))
        runs.forget(10)
    assert len(runs) == 10
    assert len(runs._values) < 50


def test_edits_count_from_the_next_draw_on():
    rb = make(batch_size=300)

    def young(max_age: int = 0) -> set[int]:
        return set(rb.sample(max_age=max_age)["id"].tolist())

    rb.extend(rows_of([1] * 6 + [2] * 6))
    rb.set_at_("version", torch.tensor([9, 9]), torch.tensor([4, 5]))
    assert young() == {4, 5}
    rb[3] = {"version": torch.tensor(10), "id": torch.tensor(33)}
    assert (young(), young(1)) == ({33}, {33, 4, 5})
    rb.extend(rows_of([10], 50))
    assert young() == {33, 50}
    rb.empty()
    rb.extend(rows_of([0, 1], 500))
    assert young() == {501}


def test_versions_survive_loads_copies_and_other_storages():
    rb, again, larger, moved = (make(capacity, batch_size=200) for capacity in (10, 10, 16, 10))
    rb.extend(rows_of([i // 4 for i in range(25)]))
    again.extend(rows_of([70]))
    for other in (again, larger):
        other.load_state_dict(rb.state_dict())
    over = ReplayBuffer(storage=rb.storage, version_key="version", batch_size=200)
    moved.set_storage(rb.storage)
    for other in (rb, again, larger, pickle.loads(pickle.dumps(rb)), over, moved):
        assert set(other.sample(max_age=1)["id"].tolist()) == set(range(20, 25))
    larger.extend(rows_of([9], 100))
    assert set(larger.sample(max_age=0)["id"].tolist()) == {100}


def test_lists_lanes_and_nested_keys_have_versions_too():
    listed = ReplayBuffer(storage=ListStorage(5), version_key="version", collate_fn=list)
    listed.extend([{"version": i // 2, "id": i} for i in range(7)])
    assert {row["id"] for row in listed.sample(50, max_age=1)} == {4, 5, 6}
    storage = LazyTensorStorage(8, ndim=2)
    lanes = TensorDictReplayBuffer(storage=storage, version_key=("next", "v"), dim_extend=0)
    steps = torch.arange(6)[:, None]
    lanes.extend(TensorDict({"next": {"v": steps.expand(6, 2)}, "id": 2 * steps + torch.arange(2)}, [6, 2]))
    assert set(lanes.sample(60, max_age=1)["id"].tolist()) == {8, 9, 10, 11}


def test_what_cannot_be_told_is_refused_before_anything_changes():
    def asked(age: Any = 1, **options: Any) -> Callable[[], Any]:
        rb = ReplayBuffer(**{"storage": LazyTensorStorage(10), "version_key": "version", "batch_size": 2, **options})
        rb.extend({**rows_of([1, 2, 3]), "done": torch.tensor([False] * 3)})
        return lambda: rb.sample(max_age=age)

    ranked, rb, ids = PrioritizedSampler(10, 0.5, 0.5), make(), torch.arange(3)
    strict: dict[str, Any] = {"sample_unit": SequenceUnit(2, "strict"), "episodes": Episodes(end_key="done")}
    one_each = "must hold one integer for each of 3 rows"
    refuses(
        {
            OptionError: {
                "make the buffer with version_key": asked(version_key=None),
                "make the buffer without prefetch": asked(prefetch=1),
                r"available with RandomSampler, .*, this buffer has PrioritizedSampler": asked(sampler=ranked),
                "windows that only some rows can start": asked(**strict),
                "max_age must be an integer of at least 0": asked(-1),
                "does not keep rows in the order": lambda: rb.set_writer(ReservoirWriter()),
            },
            KindError: {
                "version_key must be the name of a field": lambda: ReplayBuffer(version_key=3),  # type: ignore[arg-type]
            },
            KeyMissingError: {
                "the rows lack the field 'version'": lambda: rb.extend({"id": ids}),
            },
            SchemaError: {
                one_each: (
                    lambda: rb.extend({"version": torch.zeros(3), "id": ids}),
                    lambda: rb.extend({"version": torch.zeros(3, 2, dtype=torch.int64), "id": ids}),
                ),
            },
        }
    )
    assert len(rb) == 0
    rb.extend(rows_of([1, 2, 3]))
    assert set(rb.sample(20, max_age=0)["id"].tolist()) == {2}
