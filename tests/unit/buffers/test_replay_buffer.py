"""Exchanging parts, counters, and writing back. Defaults and single fields: `parity`, `stateful`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
)

from ...tags import buffer, fill, read_ids, rows, table


@pytest.mark.parametrize(("dim", "lanes"), [(None, 2), (0, 3)])
def test_another_storage_brings_its_collate_function_and_dimensions(dim, lanes):
    rb, steps = ReplayBuffer(storage=ListStorage(20), dim_extend=dim), torch.arange(6).view(2, 3)
    rb.set_storage(LazyTensorStorage(20, ndim=2))
    rb.extend(steps)
    assert rb.storage.num_envs == lanes
    rb.set_storage(LazyTensorStorage(20))
    rb.extend(steps)
    assert rb[:].tolist() == [[0, 1, 2], [3, 4, 5]]
    rb.set_storage(ListStorage(5), collate_fn=lambda items: items)
    rb.extend(["a", "b"])
    assert rb[:] == ["a", "b"]


def test_writing_goes_on_after_the_rows_of_another_storage_and_with_another_writer():
    rb, other = buffer("packed", 5, sampler=SamplerWithoutReplacement(), batch_size=2), LazyTensorStorage(5)
    fill(rb, range(4))
    rb.sample()
    fill(buffer(other), range(10, 12))
    rb.set_storage(other)
    assert sorted(read_ids(rb.sample())) == read_ids(rb[:]) == [10, 11]
    assert fill(rb, range(12, 17)).tolist() == [2, 3, 4, 0, 1]
    rb.set_writer(RoundRobinWriter())
    assert fill(rb, [17]).tolist() == [2]
    assert sorted(read_ids(rb[:])) == [13, 14, 15, 16, 17]


def test_counts_and_ages():
    rb = buffer("packed", 5)
    assert math.isnan(rb.stats().row_age_mean)

    def counts() -> tuple[Any, ...]:
        stats = rb.stats()
        return stats.rows, stats.capacity, stats.rows_written, stats.rows_drawn, stats.row_age_max

    assert counts() == (0, 5, 0, 0, 0)
    fill(rb, range(4))
    rb.sample(8)
    assert counts() == (4, 5, 4, 8, 3)
    assert (rb.stats().row_age_mean, rb.stats().draws_per_insert) == (1.5, 2.0)
    fill(rb, range(12))
    assert counts() == (5, 5, 16, 8, 4)
    assert rb.stats().row_age_mean == 2.0
    rb[2] = rows(torch.tensor(5))
    assert counts() == (5, 5, 16, 8, 5)
    rb.empty()
    assert counts() == (0, 5, 16, 8, 0)
    stats = rb.stats()
    assert (stats.rows_lost, stats.repairs, stats.redone_gathers, stats.prefetch_waits) == (0, 0, 0, 0)


def test_read_all_and_write_all_follow_the_order_of_slots():
    rb = buffer("packed", 5)
    fill(rb, range(7))
    assert read_ids(rb.read_all_in_order()) == [5, 6, 2, 3, 4]
    assert read_ids(rb.read_all_in_order(end=2)) == [5, 6]
    rb.write_all(table(torch.arange(20, 22)), end=2)
    assert read_ids(rb[:]) == [20, 21, 2, 3, 4]


def test_an_update_of_fields_is_checked_before_the_first_is_written():
    rb = buffer("packed", 5)
    fill(rb, range(4))
    with pytest.raises(ValueError):
        rb.update_({"id": torch.zeros(4, dtype=torch.int64), "obs": torch.zeros(4)})
    rb.update_({"obs": torch.zeros(4, 3), "none": torch.ones(4, 0)}, keys_to_update=["none"])
    assert read_ids(rb[:]) == [0, 1, 2, 3]
