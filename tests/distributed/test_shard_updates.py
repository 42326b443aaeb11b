"""Conditional updates, priorities and deletions of rows in several shards, compared with one buffer."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import LazyTensorStorage, PrioritizedSampler, RoundRobinWriter, TensorDictReplayBuffer
from ostinato.distributed.routing import join_index
from ostinato.errors import KeyMissingError, KindError, OptionError, PriorityError, SchemaError, SlotError, UsageError

from ..unit.buffers.refusals import raises
from .handles import stopped

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato import ShardedReplayBuffer

ROWS = 12


def rows(start: int) -> TensorDict:
    ids = torch.arange(start, start + ROWS, dtype=torch.float32)
    fields = {"id": ids, "state": torch.zeros(ROWS, 2), "version": torch.zeros(ROWS, dtype=torch.int64)}
    return TensorDict(fields, [ROWS])


class Two:
    """Shards, a buffer with the same rows, and the same rows of both in another order."""

    def __init__(self, shards: ShardedReplayBuffer) -> None:
        self.shards = shards
        self.one = TensorDictReplayBuffer(
            storage=LazyTensorStorage(100),
            sampler=PrioritizedSampler(100, 0.7, 0.6, 0.0),
            writer=RoundRobinWriter(track_generations=True),
        )
        index = torch.cat([shards.pinned(i).extend(rows(ROWS * i)) for i in range(3)])
        for i in range(3):
            self.one.extend(rows(ROWS * i))
        self.order = torch.randperm(3 * ROWS, generator=torch.Generator().manual_seed(0))
        self.index = index[self.order]
        self.generations = torch.cat(shards.apply(_generations))[self.order]

    def priorities(self) -> Tensor:
        return torch.cat(self.shards.apply(lambda buffer: buffer.sampler.priorities[:ROWS]))

    def stored(self, field: str) -> Tensor:
        return torch.cat(self.shards.apply(lambda buffer: buffer[:][field]))


def _generations(buffer: Any) -> Tensor:
    found: Tensor = buffer.writer.generations_of(torch.arange(ROWS))
    return found


@pytest.fixture
def two(shards: ShardedReplayBuffer) -> Two:
    return Two(shards)


@pytest.mark.parametrize(("shape", "flat"), [((36,), True), ((9, 4), False), ((2, 3, 6), True)])
def test_values_reach_their_rows_and_results_are_in_the_order_of_the_index(two, shape, flat):
    stale = 1000 * (torch.arange(36) % 5 == 0)
    given: dict[str, Any] = {"version": torch.arange(36).reshape(shape) % 3, "version_key": "version"}
    given |= {"patch": {"state": torch.rand(*((36,) if flat else shape), 2)}, "require_newer": True}
    given["priority"] = torch.rand(36) if flat else torch.rand(shape)
    mine, theirs = two.one.writer.generations_of(two.order) + stale, two.generations + stale
    found = two.shards.update_if_present(index=two.index.reshape(shape), generation=theirs.reshape(shape), **given)
    wanted = two.one.update_if_present(index=two.order.reshape(shape), generation=mine.reshape(shape), **given)
    for name in ("updated", "version_rejected"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert 0 < found.updated_count < 36
    assert found.stale_count == wanted.stale_count == 8
    for field in ("state", "version", "id"):
        assert torch.equal(two.stored(field), two.one[:][field])
    assert torch.equal(two.priorities(), two.one.sampler.priorities[:36])


def test_all_shards_check_before_one_changes(two):
    state = np.ones((36, 2))
    state[-1] = 1e300  # float32 cannot hold it
    nan = torch.rand(36)
    nan[7] = torch.nan
    good = {"index": two.index, "generation": two.generations, "patch": {"state": torch.ones(36, 2)}}
    wrong: list[Any] = [
        (SchemaError, {"patch": {"state": state}}),
        (SchemaError, {"patch": {"state": torch.ones(36, 3)}}),
        (KeyMissingError, {"patch": {"other": torch.ones(36)}}),
        (OptionError, {"generation": torch.zeros(3, dtype=torch.int64)}),
        (OptionError, {"version": 3}),
        (PriorityError, {"priority": nan}),
        (SlotError, {"index": join_index(9, torch.arange(36))}),
    ]
    for error, changes in wrong:
        with pytest.raises(error):
            two.shards.update_if_present(**{**good, **changes})
        assert not two.stored("state").any()
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(KeyMissingError, match="other"):
        two.shards.update_if_present(index=none, generation=none, patch={"other": torch.ones(0)})
    patch = TensorDict({"state": two.order[:, None].float().expand(36, 2).clone()}, [36])
    assert two.shards.update_if_present(**{**good, "patch": patch}).updated.all()
    assert torch.equal(two.stored("state")[:, 0], two.stored("id"))


def test_rows_of_missing_and_empty_shards_are_not_there(cluster, two):
    """Deletions have the order of their index, too."""
    shards = two.shards._handle(shard_timeout_s=0.3)
    two.shards.reset(2)
    named, late = two.index[:12].reshape(3, 4), two.generations[:12].reshape(3, 4).clone()
    stale = torch.arange(12).reshape(3, 4) % 2 == 0
    late[stale] += 1  # of other rows
    with stopped(cluster, shards.actors[1]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good: dict[str, Any] = {
            "index": two.index,
            "generation": two.generations,
            "patch": {"state": torch.ones(36, 2)},
        }
        found = shards.update_if_present(**good)
        assert torch.equal(found.updated, two.order < ROWS)
        assert found.stale_count == 24
        deleted = shards.delete(named, late)
        assert torch.equal(deleted, ~stale & (two.order[:12].reshape(3, 4) < ROWS))
    assert int(two.shards.delete(two.index).sum()) == len(two.one) - ROWS - int(deleted.sum())
    assert len(two.shards) == 0


# -- priorities -------------------------------------------------------------------------------------------------------


def test_priorities_go_to_their_shards(two):
    wide = torch.rand(36, 6)  # further dimensions are reduced
    two.shards.update_priority(two.index, wide)
    mine = two.priorities()[two.order]
    assert torch.equal(mine, wide.amax(1).to(mine.dtype))
    batch = TensorDict(
        {"index": two.index[:4], "index_generation": two.generations[:4], "td_error": torch.ones(4)}, [4]
    )
    batch["index_generation"][0] += 1  # of another row
    two.shards.update_tensordict_priority(batch)
    now = two.priorities()[two.order]
    assert now[1:4].tolist() == [1.0] * 3
    assert torch.equal(now[[0, *range(4, 36)]], mine[[0, *range(4, 36)]])
    two.shards.update_priority(two.index, 0.5)
    assert two.priorities().tolist() == [0.5] * 36


def test_invalid_priorities_and_indices_raise_before_anything_is_sent(two):
    index, rb = two.index[:4], two.shards
    nowhere = join_index(3, torch.tensor([0]))
    before = two.priorities()
    raises(
        (lambda: rb.update_priority(index, [1.0, 1.0, -1.0, 1.0]), PriorityError, r"at the positions \[2\] of 4"),
        (lambda: rb.update_priority(index, torch.rand(4, 4)), SchemaError, r"use \.squeeze\(-1\)"),
        (lambda: rb.update_priority(index, None), UsageError, "needs the new priorities"),
        (lambda: rb.update_priority(torch.rand(3), 1.0), KindError, "index must hold integers"),
        (lambda: rb.update_priority(nowhere, 1.0), SlotError, "of no shard: there are 3"),
        (lambda: rb.update_priority([4000], 1.0), SlotError, "names slot 4000 of a shard that holds 4000"),
        (lambda: rb.update_priority([-1], 1.0), SlotError, "index -1 is out of range"),  # each row is kept
        (lambda: rb.update_tensordict_priority(TensorDict({"index": index}, [4])), KeyMissingError, "td_error"),
        (lambda: rb.delete(nowhere), SlotError, "of no shard"),
        (lambda: rb[-7], SlotError, "of no shard"),
        (lambda: rb[two.index], SlotError, "one shard"),
    )
    assert torch.equal(two.priorities(), before)
    assert len(rb) == 36


def test_shards_without_priorities_warn(remade):
    with pytest.warns(UserWarning, match="has no priorities"):
        remade().update_priority([0], 1.0)
