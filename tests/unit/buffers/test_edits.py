"""Edits: a row gets other values and keeps its place, whichever way it is edited; see also `tests/stateful`."""

from __future__ import annotations

import pytest
import torch

from ostinato import (
    HeapSampler,
    LazyTensorStorage,
    ReplayBuffer,
    StackSampler,
)
from ostinato.errors import CheckpointError


@pytest.mark.parametrize("sampler", [StackSampler, lambda: HeapSampler(6, "min")])
def test_an_edited_row_keeps_its_place_where_a_load_moves_rows_to_other_slots(sampler, tmp_path):
    rb, other = (ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler()) for size in (4, 6))
    rb.extend({"x": torch.arange(6)})
    rb[1] = {"x": torch.tensor(5)}
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    expected = [5, 4, 3, 2] if isinstance(rb.sampler, StackSampler) else [2, 3, 4, 5]
    assert rb.sample(4)["x"].tolist() == other.sample(4)["x"].tolist() == expected


def test_damaged_arrivals_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=StackSampler())
    rb.extend(torch.arange(3))
    rb[1] = torch.tensor(5)
    for wrong in ([1, 9, 3], [1, 0, 3], [1, 2]):
        state = rb.state_dict()
        state["stamps"]["arrivals"] = torch.tensor(wrong)
        with pytest.raises(CheckpointError, match="arrivals"):
            rb.load_state_dict(state)
    assert rb.sample(3).tolist() == [2, 5, 0]
