"""Edits: a row gets other values and keeps its place, whichever way it is edited; see also `tests/stateful`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    HeapSampler,
    LazyTensorStorage,
    LimitedSampler,
    QueueSampler,
    ReplayBuffer,
    StackSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def loaded(rb: ReplayBuffer, sampler: Any, capacity: int, path: Path) -> ReplayBuffer:
    rb.dumps(path)
    other = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)
    other.loads(path)
    return other


@pytest.mark.parametrize("sampler", [StackSampler, lambda: HeapSampler(6, "min")])
def test_an_edited_row_keeps_its_place_where_a_load_moves_rows_to_other_slots(sampler: Any, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler())
    rb.extend({"x": torch.arange(6)})
    rb[1] = {"x": torch.tensor(5)}
    other = loaded(rb, sampler(), 6, tmp_path)
    expected = [5, 4, 3, 2] if isinstance(rb.sampler, StackSampler) else [2, 3, 4, 5]
    assert rb.sample(4)["x"].tolist() == other.sample(4)["x"].tolist() == expected


def test_a_row_edited_before_its_batch_failed_is_not_used_up() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(2), sampler=LimitedSampler(1), batch_size=2)
    rb.extend(torch.arange(2))

    def fail(batch: Any) -> Any:
        if 0 in batch.tolist():
            rb[0] = torch.tensor(2)
            raise ValueError
        return batch

    rb.append_transform(fail)
    with pytest.raises(ValueError):
        rb.sample()
    assert sorted(rb.sample().tolist()) == [1, 2]


# -- edits of the storage itself ---------------------------------------------------------------------------------------


def test_ranks_follow_edits_of_the_storage() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="rank"))
    rb.extend(TensorDict({"rank": torch.tensor([1.0, 2.0])}, [2]))
    rb.storage[0] = TensorDict({"rank": torch.tensor(9.0)}, [])
    assert rb.extend(TensorDict({"rank": torch.tensor([3.0])}, [1])).tolist() == [1]


def test_rows_that_the_storage_got_by_itself_are_saved_and_replaced_by_a_load(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=QueueSampler())
    rb.extend({"x": torch.arange(2)})
    rb.dumps(tmp_path / "before")
    rb.storage.set([2, 3], {"x": torch.tensor([2, 3])})
    other = loaded(rb, QueueSampler(), 4, tmp_path / "after")
    assert other.sample(4)["x"].tolist() == rb.sample(4)["x"].tolist() == [0, 1, 2, 3]
    rb.loads(tmp_path / "before")
    assert rb.sample(2)["x"].tolist() == [0, 1]
    assert not rb.can_sample(1)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_damaged_arrivals_are_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=StackSampler())
    rb.extend(torch.arange(3))
    rb[1] = torch.tensor(5)
    for wrong in ([1, 9, 3], [1, 0, 3], [1, 2]):
        state = rb.state_dict()
        state["stamps"]["arrivals"] = torch.tensor(wrong)
        with pytest.raises(CheckpointError, match="arrivals"):
            rb.load_state_dict(state)
    assert rb.sample(3).tolist() == [2, 5, 0]
