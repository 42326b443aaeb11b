"""Conditional updates and deletions of rows in several shards, compared with one buffer; without Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from ostinato import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, RoundRobinWriter
from ostinato.buffers.portion import Portion
from ostinato.distributed.routing import join_index
from ostinato.distributed.shard_updates import update_shards
from ostinato.distributed.writing import ShardInfo, delete_rows
from ostinato.errors import KeyMissingError, OptionError, PriorityError, SchemaError, SlotError

from .local_shards import LocalShards

ROWS = 12
INFO = ShardInfo(4, False, "td_error", "max", capacity=100, counting=False, waits=False, least_index=-1, steps=1)
PRIORITIZED = INFO._replace(prioritized=True)


def make(*, prioritized: bool = False) -> ReplayBuffer:
    writer = RoundRobinWriter(track_generations=True)
    sampler = PrioritizedSampler(100, alpha=1.0, beta=1.0) if prioritized else None
    generator = torch.Generator().manual_seed(1)
    storage = LazyTensorStorage(100)
    return ReplayBuffer(storage=storage, writer=writer, sampler=sampler, batch_size=4, generator=generator)


def rows(start: int, count: int) -> dict[str, Any]:
    ids = torch.arange(start, start + count, dtype=torch.float32)
    return {"id": ids, "state": torch.zeros(count, 2), "version": torch.zeros(count, dtype=torch.int64)}


def fleet(*, prioritized: bool = False) -> tuple[Any, ReplayBuffer, Tensor, Tensor, Tensor]:
    """Return shards, a buffer with the same rows, index and generations in the shards, and index in the buffer."""
    shards, one = LocalShards([make(prioritized=prioritized) for _ in range(3)]), make(prioritized=prioritized)
    index, generations = [], []
    for i, buffer in enumerate(shards.buffers):
        slots = buffer.extend(rows(ROWS * i, ROWS))
        index.append(join_index(i, slots))
        generations.append(buffer.writer.generations_of(slots))
        one.extend(rows(ROWS * i, ROWS))
    order = torch.randperm(3 * ROWS, generator=torch.Generator().manual_seed(0))
    return shards, one, torch.cat(index)[order], torch.cat(generations)[order], order


def stored(shards: LocalShards, field: str) -> Tensor:
    return torch.cat([buffer[:][field] for buffer in shards.buffers])


@pytest.mark.parametrize(("shape", "flat"), [((36,), True), ((9, 4), False), ((2, 3, 6), True)])
def test_values_reach_their_rows_and_results_are_in_the_order_of_the_index(shape: tuple[int, ...], flat: bool) -> None:
    shards, one, index, generations, order = fleet()
    stale = torch.arange(36) % 5 == 0
    generations, mine = generations + 1000 * stale, one.writer.generations_of(order) + 1000 * stale
    state = torch.rand(*((36,) if flat else shape), 2)
    versions = torch.arange(36).reshape(shape) % 3
    options: dict[str, Any] = {"version_key": "version", "require_newer": True}
    given = {"patch": {"state": state}, "version": versions, **options}
    found = update_shards(shards, INFO, index.reshape(shape), generations.reshape(shape), **given)
    wanted = one.update_if_present(index=order.reshape(shape), generation=mine.reshape(shape), **given)
    assert torch.equal(found.updated, wanted.updated)
    assert found.version_rejected is not None
    assert wanted.version_rejected is not None
    assert torch.equal(found.version_rejected, wanted.version_rejected)
    assert 0 < found.updated_count < 36
    for field in ("state", "version", "id"):
        assert torch.equal(stored(shards, field), one[:][field])
    assert set(shards.calls) == {"update_if_present"}


def test_arrays_are_cast_and_checked_in_all_shards_before_one_changes() -> None:
    shards, _, index, generations, order = fleet()
    state = np.ones((36, 2))
    state[-1] = 1e300  # float32 cannot hold it
    with pytest.raises(SchemaError):
        update_shards(shards, INFO, index, generations, {"state": state})
    assert not stored(shards, "state").any()
    state[-1] = 1
    assert update_shards(shards, INFO, index, generations, {"state": state}).updated_count == 36
    assert stored(shards, "state").all()
    patch = TensorDict({"state": order[:, None].float().expand(36, 2).clone()}, [36])
    assert update_shards(shards, INFO, index, generations, patch).updated.all()
    assert torch.equal(stored(shards, "state")[:, 0], stored(shards, "id"))


def test_priorities() -> None:
    shards, one, index, generations, order = fleet(prioritized=True)
    priority = torch.rand(36)
    update_shards(shards, PRIORITIZED, index, generations, None, priority=priority)
    one.update_if_present(index=order, generation=one.writer.generations_of(order), priority=priority)
    values = torch.cat([buffer.sampler.priorities[:ROWS] for buffer in shards.buffers])
    assert torch.equal(values, one.sampler.priorities[:36])  # type: ignore[attr-defined]
    priority[7] = torch.nan
    with pytest.raises(PriorityError, match=r"\[7\]"):
        update_shards(shards, PRIORITIZED, index, generations, {"state": torch.ones(36, 2)}, priority=priority)
    assert not stored(shards, "state").any()


def test_rows_of_missing_and_empty_shards_are_not_there() -> None:
    shards, _, index, generations, order = fleet()
    shards.gone = {1}
    shards.buffers[2] = make()
    found = update_shards(shards, INFO, index, generations, {"state": torch.ones(36, 2)})
    assert torch.equal(found.updated, order < ROWS)
    assert found.stale_count == 24


def test_an_index_without_rows_is_checked_all_the_same() -> None:
    shards, *_ = fleet()
    none = torch.full((3,), -1)
    found = update_shards(shards, INFO, none, none, {"state": torch.ones(3, 2)})
    assert found.updated.tolist() == [False] * 3
    with pytest.raises(KeyMissingError, match="other"):
        update_shards(shards, INFO, none[:0], none[:0], {"other": torch.ones(0)})


WRONG: list[tuple[type[Exception], dict[str, Any]]] = [
    (SchemaError, {"patch": {"state": torch.ones(36, 3)}}),
    (SchemaError, {"patch": {"state": torch.ones(36, 2, dtype=torch.float64)}}),
    (SchemaError, {"patch": {"state": torch.ones(5, 2)}}),
    (KeyMissingError, {"patch": {"other": torch.ones(36)}}),
    (OptionError, {"generation": torch.zeros(3, dtype=torch.int64)}),
    (OptionError, {"version": 3}),
    (OptionError, {"priority": 1.0}),
    (SlotError, {"index": join_index(9, torch.arange(36))}),
]


@pytest.mark.parametrize(("error", "changes"), WRONG)
def test_wrong_arguments_change_nothing(error: type[Exception], changes: dict[str, Any]) -> None:
    shards, _, index, generation, _ = fleet()
    given: dict[str, Any] = {"index": index, "generation": generation, "patch": {"state": torch.ones(36, 2)}, **changes}
    with pytest.raises(error):
        update_shards(shards, INFO, **given)
    assert not stored(shards, "state").any()


# -- deletion ---------------------------------------------------------------------------------------------------------


def test_an_index_of_deleted_rows_is_split_by_shard_and_joined_in_its_order() -> None:
    shards, _, index, generations, order = fleet()
    info = INFO._replace(least_index=0)
    named, late = index[:12].reshape(3, 4), generations[:12].reshape(3, 4).clone()
    stale = torch.arange(12).reshape(3, 4) % 2 == 0
    late[stale] += 1  # of other rows
    shards.gone = {1}
    found = delete_rows(shards, info, named, late)
    assert torch.equal(found, ~stale & (order[:12].reshape(3, 4) // ROWS != 1))
    assert sum(map(len, shards.buffers)) == 36 - int(found.sum())
    shards.gone = set()
    assert int(delete_rows(shards, info, index, None).sum()) == 36 - int(found.sum())
    assert [len(rb) for rb in shards.buffers] == [0, 0, 0]
    for wrong in (join_index(3, torch.tensor([0])), join_index(1, torch.tensor([100])), [-1]):
        with pytest.raises(SlotError):
            delete_rows(shards, info, wrong, None)


@pytest.mark.parametrize("prioritized", [False, True])
def test_an_offer_made_before_a_deletion_delivers_no_deleted_row(prioritized: bool) -> None:
    rb = make(prioritized=prioritized)
    rb.extend(torch.arange(8))
    portion = Portion(rb)
    offer = portion.offer(64)
    rb.delete(torch.arange(4))
    assert portion.take(offer.number, 64) is None  # it had some of these rows
    offer = portion.offer(64)
    assert (offer.rows, offer.mass > 0) == (4, True)
    found = portion.take(offer.number, 64)
    assert found is not None
    assert set(found[0].tolist()) == {4, 5, 6, 7}
    rb.delete(torch.arange(4, 8))
    assert portion.offer(64).number == -1
