"""Draws by policy version: the runs against a plain list, the law by chi-square, at wraps, after edits and loads."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    Episodes,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    ReservoirWriter,
    SequenceUnit,
    TensorDictReplayBuffer,
)
from ostinato.buffers.policy_versions import Runs
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError

from ...stats.chi_square import p_value

if TYPE_CHECKING:
    from pathlib import Path

LOW, HIGH = 1e-4, 1 - 1e-4


def rows_of(versions: list[int], first: int = 0) -> dict[str, torch.Tensor]:
    return {"version": torch.tensor(versions), "id": torch.arange(first, first + len(versions))}


def make(capacity: int = 10, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=LazyTensorStorage(capacity), version_key="version", generator=generator, **options)


@given(
    st.lists(st.tuples(st.lists(st.integers(-3, 6), min_size=1, max_size=9), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 9),
    st.integers(1, 20),
)
def test_runs_know_exactly_the_rows_that_are_young_enough(
    batches: list[tuple[list[int], bool]], max_age: int, capacity: int
) -> None:
    runs, log = Runs(), list[int]()
    for versions, in_order in batches:
        given = sorted(v + max(log, default=0) for v in versions) if in_order else versions
        log += given
        runs.record(np.array(given))
        held = log[-capacity:]
        found = runs.recent(len(held), max_age)
        expected = [i for i, version in enumerate(held) if version >= max(held) - max_age]
        assert found.rows == len(expected)
        assert found.pick(np.arange(found.rows)).tolist() == expected
        assert len(runs) == 1 + sum(a != b for a, b in pairwise(held))
        assert runs.ordered == (held == sorted(held))


def test_runs_of_a_long_life_take_the_memory_of_the_present_ones() -> None:
    runs = Runs()
    for version in range(1000):
        runs.record(np.array([version]))
        runs.forget(10)
    assert len(runs) == 10
    assert len(runs._values) < 50


@pytest.mark.parametrize("written", [7, 10, 13, 20, 26])
def test_draws_are_uniform_among_the_young_rows_alone(written: int) -> None:
    rb = make(batch_size=4000)
    for i in range(written):
        rb.extend(rows_of([i // 3], i))
    for max_age in (0, 1, 2, 50):
        young = [i for i in range(max(0, written - 10), written) if i // 3 >= (written - 1) // 3 - max_age]
        ids = rb.sample(max_age=max_age)["id"]
        assert set(ids.tolist()) == set(young)
        if len(young) > 1:
            counts = [int((ids == i).sum()) for i in young]
            assert LOW < p_value(counts) < HIGH


@pytest.mark.parametrize("written", [6, 10, 14])
def test_older_versions_that_come_late_are_exact_too(written: int) -> None:
    versions = [0, 2, 1, 2, 0, 3, 3, 1, 3, 2, 3, 0, 2, 3][:written]
    rb = make(batch_size=6000)
    for i, version in enumerate(versions):
        rb.extend(rows_of([version], i))
    present = list(range(max(0, written - 10), written))
    newest = max(versions[i] for i in present)
    for max_age in (0, 1, 2):
        young = [i for i in present if versions[i] >= newest - max_age]
        ids = rb.sample(max_age=max_age)["id"]
        assert set(ids.tolist()) == set(young)
        counts = [int((ids == i).sum()) for i in young]
        assert len(young) == 1 or LOW < p_value(counts) < HIGH


def test_one_write_of_many_versions_and_more_rows_than_fit() -> None:
    rb = make(batch_size=300)
    rb.extend(rows_of([i // 2 for i in range(25)]))
    assert set(rb.sample(max_age=1)["id"].tolist()) == {22, 23, 24}
    assert set(rb.sample(max_age=99)["id"].tolist()) == set(range(15, 25))
    assert set(rb.sample()["id"].tolist()) == set(range(15, 25))


def test_edits_count_from_the_next_draw_on() -> None:
    rb = make(batch_size=300)
    rb.extend(rows_of([1] * 6 + [2] * 6))
    rb.set_at_("version", torch.tensor([9, 9]), torch.tensor([4, 5]))
    assert set(rb.sample(max_age=0)["id"].tolist()) == {4, 5}
    rb[3] = {"version": torch.tensor(10), "id": torch.tensor(33)}
    assert set(rb.sample(max_age=0)["id"].tolist()) == {33}
    assert set(rb.sample(max_age=1)["id"].tolist()) == {33, 4, 5}
    rb.extend(rows_of([10], 50))
    assert set(rb.sample(max_age=0)["id"].tolist()) == {33, 50}
    rb.set_at_("id", torch.tensor([77]), torch.tensor([3]))
    assert set(rb.sample(max_age=0)["id"].tolist()) == {77, 50}


@pytest.mark.parametrize("written", [4, 10, 13])
def test_versions_survive_loads_copies_and_other_storages(written: int, tmp_path: Path) -> None:
    rb = make(batch_size=200)
    rb.extend(rows_of([i // 4 for i in range(written)]))
    rb.dumps(tmp_path / "saved")
    expected = [rb.sample(max_age=1)["id"].tolist() for _ in range(3)]
    again = make(batch_size=200)
    again.extend(rows_of([70]))
    again.loads(tmp_path / "saved")
    assert [again.sample(max_age=1)["id"].tolist() for _ in range(3)] == expected
    larger = make(16, batch_size=200)
    larger.loads(tmp_path / "saved")
    copied = pickle.loads(pickle.dumps(rb))
    over = ReplayBuffer(storage=rb.storage, version_key="version", batch_size=200)
    moved = make(batch_size=200)
    moved.set_storage(rb.storage)
    for other in (larger, copied, over, moved):
        assert set(other.sample(max_age=1)["id"].tolist()) == set(expected[0])
    larger.extend(rows_of([written], 100))
    assert set(larger.sample(max_age=0)["id"].tolist()) == {100}
    rb.empty()
    rb.extend(rows_of([0, 1], 500))
    assert set(rb.sample(max_age=0)["id"].tolist()) == {501}


def test_lists_lanes_and_nested_keys_have_versions_too() -> None:
    listed = ReplayBuffer(storage=ListStorage(5), version_key="version", batch_size=50, collate_fn=list)
    listed.extend([{"version": i // 2, "id": i} for i in range(7)])
    assert {row["id"] for row in listed.sample(max_age=1)} == {4, 5, 6}
    lanes = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), version_key=("next", "v"), batch_size=60, dim_extend=0)
    for step in range(6):
        lanes.extend({"next": {"v": torch.full((1, 2), step)}, "id": torch.tensor([[2 * step, 2 * step + 1]])})
    assert set(lanes.sample(max_age=1)["id"].tolist()) == {8, 9, 10, 11}
    dicts = TensorDictReplayBuffer(storage=LazyTensorStorage(8), version_key="version", batch_size=60)
    dicts.extend(TensorDict(rows_of([0, 0, 1, 2]), [4]))
    assert set(dicts.sample(max_age=1)["id"].tolist()) == {2, 3}


def test_units_read_on_from_the_row_drawn() -> None:
    rb = make(20, batch_size=100, sample_unit=SequenceUnit(2), episodes=Episodes(end_key="done"))
    rows = {**rows_of([0, 0, 0, 1, 1, 2]), "done": torch.tensor([False] * 6)}
    rb.extend(rows)
    info = rb.sample(max_age=0, return_info=True)[1]
    assert set(info["anchor_index"].tolist()) == {5}


def test_a_limiter_goes_with_versions() -> None:
    rb = make(20, batch_size=8, rate_limiter=RateLimiter(1.0, 8.0, 4))
    rb.extend(rows_of([0, 1, 2, 3, 4]))
    assert set(rb.sample(max_age=0, timeout_s=0)["version"].tolist()) == {4}


def test_what_cannot_be_told_is_refused() -> None:
    plain = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    plain.extend(rows_of([1, 2]))
    with pytest.raises(OptionError, match="make the buffer with version_key"):
        plain.sample(max_age=1)
    ahead = make(batch_size=2, prefetch=1)
    ahead.extend(rows_of([1, 2]))
    with pytest.raises(OptionError, match="make the buffer without prefetch"):
        ahead.sample(max_age=1)
    ranked = make(sampler=PrioritizedSampler(10, 0.5, 0.5), batch_size=2)
    ranked.extend(rows_of([1, 2]))
    with pytest.raises(OptionError, match=r"available with RandomSampler, .*, this buffer has PrioritizedSampler"):
        ranked.sample(max_age=1)
    rb = make(batch_size=2)
    for bad in (-1, 1.5, True, "new"):
        with pytest.raises(OptionError, match="max_age must be an integer of at least 0"):
            rb.sample(max_age=bad)  # type: ignore[arg-type]
    strict = make(sample_unit=SequenceUnit(2, "strict"), episodes=Episodes(end_key="done"), batch_size=2)
    strict.extend({**rows_of([1, 2, 3]), "done": torch.tensor([False] * 3)})
    with pytest.raises(OptionError, match="windows that only some rows can start"):
        strict.sample(max_age=1)
    with pytest.raises(OptionError, match="ReservoirWriter does not keep rows in the order"):
        make(writer=ReservoirWriter())
    with pytest.raises(OptionError, match="ReservoirWriter does not keep rows in the order"):
        rb.set_writer(ReservoirWriter())
    with pytest.raises(KindError, match="version_key must be the name of a field"):
        ReplayBuffer(version_key=3)  # type: ignore[arg-type]


def test_rows_without_a_good_version_are_refused_before_anything_changes() -> None:
    rb = make(batch_size=2)
    with pytest.raises(KeyMissingError, match="the rows lack the field 'version'"):
        rb.extend({"id": torch.arange(3)})
    for bad in (torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64)):
        with pytest.raises(SchemaError, match="must hold one integer for each of 3 rows"):
            rb.extend({"version": bad, "id": torch.arange(3)})
    assert len(rb) == 0
    rb.extend(rows_of([1, 2, 3]))
    assert set(rb.sample(20, max_age=0)["id"].tolist()) == {2}
