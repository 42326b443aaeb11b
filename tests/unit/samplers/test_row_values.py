"""Which rows a sampler reads again, and what it keeps of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    PromptGroupSampler,
    ReplayBuffer,
    Sampler,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from ostinato.core.records import Picks, Run, View
from ostinato.core.ring import Ring
from ostinato.samplers.row_values import RowValues, changed_slots

CPU = torch.device("cpu")


class Field:
    """A stored field that notes which slots are read."""

    def __init__(self) -> None:
        self.values = torch.zeros(8, dtype=torch.int64)
        self.read: list[list[int]] = []

    def field_at(self, slots: torch.Tensor, path: Any) -> torch.Tensor:
        self.read.append(sorted(slots.tolist()))
        return self.values[slots]


def view(ring: Ring, field: Field) -> View:
    return ring.view()._replace(stored=field)


def test_only_changed_rows_are_read() -> None:
    ring, field = Ring(8), Field()
    values = RowValues(("x",), lambda found: found.clone())  # type: ignore[union-attr]
    changes: list[Any] = [
        (lambda: ring.record(Run(0, 5, 8)), [0, 1, 2, 3, 4]),
        (lambda: ring.record(Run(5, 2, 8)), [5, 6]),
        (lambda: ring.record(Run(7, 3, 8)), [0, 1, 7]),
        (lambda: ring.record_edit(torch.tensor([3, 3])), [3]),
        (lambda: ring.record_patch(torch.tensor([1, 5, 6])), [1, 5, 6]),
        (lambda: ring.record_patch(torch.tensor([1, 7])), [1, 7]),  # 1 is the newest row in the ring
        (lambda: ring.record(Picks(torch.tensor([6, 2]), torch.arange(2), torch.tensor([6, 2]), 2)), [2, 6]),
        (lambda: ring.record(Run(2, 8, 8)), list(range(8))),
    ]
    for change, slots in changes:
        before = ring.written
        change()
        field.values = torch.arange(8) + 100 * ring.written
        found = changed_slots(view(ring, field), before)
        assert sorted(found.tolist()) == slots
        assert values.update(view(ring, field))
        assert field.read[-1] == slots
        assert not values.update(view(ring, field))
        field.values = values.values.clone()
    other = Ring(8)
    other.record(Run(0, 8, 8))
    other.counts.written = ring.written  # as many writes, of other rows
    assert values.update(view(other, field))
    assert field.read[-1] == list(range(8))


@pytest.mark.parametrize(
    "sampler",
    [
        StalenessAwareSampler(version_key="x"),
        PromptGroupSampler(num_groups=1, group_key="y"),
        PromptGroupSampler(num_groups=1, group_key="y", strategy="reward", reward_key="x"),
        StreamingSliceSampler(slice_len=1, end_key="done"),
    ],
)
def test_memory_is_counted(sampler: Sampler) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=4)
    rb.extend({"x": torch.arange(1000), "y": torch.zeros(1000), "done": torch.ones(1000, dtype=torch.bool)})
    rb.sample()
    assert 4 * 1000 <= sampler.nbytes <= 32 * 1000
