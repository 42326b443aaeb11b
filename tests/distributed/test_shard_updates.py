"""Conditional updates of rows in several shards, compared with one buffer; without Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from ostinato.buffers.portion import check_update, update_stored
from ostinato.distributed.routing import join_index
from ostinato.distributed.shard_updates import update_shards
from ostinato.distributed.writing import ShardInfo
from ostinato.errors import KeyMissingError, OptionError, PriorityError, SchemaError, SlotError
from ostinato.writers import RoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ostinato.buffers import ConditionalUpdateResult

ROWS = 12


@final
class LocalShards:
    """Shards in this process, called as `ShardClient` calls actors."""

    def __init__(self, count: int, *, prioritized: bool = False) -> None:
        self.buffers = [make(prioritized=prioritized) for _ in range(count)]
        self.missing: set[int] = set()
        self.calls: list[str] = []

    def __len__(self) -> int:
        return len(self.buffers)

    def present(self) -> list[int]:
        return [i for i in range(len(self)) if i not in self.missing]

    def call(self, method: str, arguments: Mapping[int, tuple[Any]], group: str) -> dict[int, Any]:
        assert group == "update"
        self.calls.append(method)
        do = {"check_update": check_update, "update_if_present": update_stored}[method]
        return {i: do(self.buffers[i], given._data) for i, (given,) in arguments.items()}


def make(*, prioritized: bool) -> ReplayBuffer:
    writer = RoundRobinWriter(track_generations=True)
    sampler = PrioritizedSampler(100, alpha=1.0, beta=1.0) if prioritized else None
    return ReplayBuffer(storage=LazyTensorStorage(100), writer=writer, sampler=sampler, batch_size=4)


def rows(start: int, count: int) -> dict[str, Any]:
    ids = torch.arange(start, start + count, dtype=torch.float32)
    return {"id": ids, "state": torch.zeros(count, 2), "version": torch.zeros(count, dtype=torch.int64)}


def fleet(*, prioritized: bool = False) -> tuple[LocalShards, ReplayBuffer, Tensor, Tensor, Tensor]:
    """Return shards, a buffer with the same rows, index and generations in the shards, and index in the buffer."""
    shards, one = LocalShards(3, prioritized=prioritized), make(prioritized=prioritized)
    index, generations = [], []
    for i, buffer in enumerate(shards.buffers):
        slots = buffer.extend(rows(ROWS * i, ROWS))
        index.append(join_index(i, slots))
        generations.append(buffer.writer.generations_of(slots))
        one.extend(rows(ROWS * i, ROWS))
    order = torch.randperm(3 * ROWS, generator=torch.Generator().manual_seed(0))
    return shards, one, torch.cat(index)[order], torch.cat(generations)[order], order


def info(*, prioritized: bool = False) -> ShardInfo:
    values = {"batch_size": 4, "prioritized": prioritized, "priority_key": "td_error", "reduction": "max"}
    return ShardInfo.of({**values, "capacity": 100, "counting": False, "waits": False, "least_index": -1, "steps": 1})


def update(shards: Any, *arguments: Any, **options: Any) -> ConditionalUpdateResult:
    return update_shards(shards, *arguments, **options)


def stored(shards: LocalShards, field: str) -> Tensor:
    return torch.cat([buffer[:][field] for buffer in shards.buffers])


@pytest.mark.parametrize("shape", [(36,), (9, 4), (2, 3, 6)])
@pytest.mark.parametrize("flat", [False, True])
def test_values_reach_their_rows_and_results_are_in_the_order_of_the_index(shape: tuple[int, ...], flat: bool) -> None:
    shards, one, index, generations, order = fleet()
    stale = torch.arange(36) % 5 == 0
    generations, mine = generations + 1000 * stale, one.writer.generations_of(order) + 1000 * stale
    state = torch.rand(*((36,) if flat else shape), 2)
    versions = torch.arange(36).reshape(shape) % 3
    options: dict[str, Any] = {"version_key": "version", "require_newer": True}
    given = {"patch": {"state": state}, "version": versions, **options}
    found = update(shards, info(), index.reshape(shape), generations.reshape(shape), **given)
    wanted = one.update_if_present(index=order.reshape(shape), generation=mine.reshape(shape), **given)
    assert torch.equal(found.updated, wanted.updated)
    assert found.version_rejected is not None
    assert wanted.version_rejected is not None
    assert torch.equal(found.version_rejected, wanted.version_rejected)
    assert 0 < found.updated_count < 36
    for field in ("state", "version", "id"):
        assert torch.equal(stored(shards, field), one[:][field])
    assert shards.calls == ["update_if_present"]


def test_arrays_are_cast_and_checked_in_all_shards_before_one_changes() -> None:
    shards, _, index, generations, _ = fleet()
    state = np.ones((36, 2))
    state[-1] = 1e300  # float32 cannot hold it
    with pytest.raises(SchemaError):
        update(shards, info(), index, generations, {"state": state})
    assert not stored(shards, "state").any()
    state[-1] = 1
    assert update(shards, info(), index, generations, {"state": state}).updated_count == 36
    assert stored(shards, "state").all()


def test_priorities() -> None:
    shards, one, index, generations, order = fleet(prioritized=True)
    priority = torch.rand(36)
    update(shards, info(prioritized=True), index, generations, None, priority=priority)
    one.update_if_present(index=order, generation=one.writer.generations_of(order), priority=priority)
    values = torch.cat([buffer.sampler.priorities[:ROWS] for buffer in shards.buffers])  # type: ignore[attr-defined]
    assert torch.equal(values, one.sampler.priorities[:36])  # type: ignore[attr-defined]
    priority[7] = torch.nan
    with pytest.raises(PriorityError, match=r"\[7\]"):
        update(shards, info(prioritized=True), index, generations, {"state": torch.ones(36, 2)}, priority=priority)
    assert not stored(shards, "state").any()


def test_rows_of_missing_and_empty_shards_are_not_there() -> None:
    shards, _, index, generations, order = fleet()
    shards.missing = {1}
    shards.buffers[2] = make(prioritized=False)
    found = update(shards, info(), index, generations, {"state": torch.ones(36, 2)})
    assert torch.equal(found.updated, order < ROWS)
    assert found.stale_count == 24


def test_an_index_without_rows_is_checked_all_the_same() -> None:
    shards, *_ = fleet()
    none = torch.full((3,), -1)
    found = update(shards, info(), none, none, {"state": torch.ones(3, 2)})
    assert found.updated.tolist() == [False] * 3
    with pytest.raises(KeyMissingError, match="other"):
        update(shards, info(), none[:0], none[:0], {"other": torch.ones(0)})


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (SchemaError, {"patch": {"state": torch.ones(36, 3)}}),
        (SchemaError, {"patch": {"state": torch.ones(36, 2, dtype=torch.float64)}}),
        (SchemaError, {"patch": {"state": torch.ones(5, 2)}}),
        (KeyMissingError, {"patch": {"other": torch.ones(36)}}),
        (OptionError, {"generation": torch.zeros(3, dtype=torch.int64)}),
        (OptionError, {"version": 3}),
        (OptionError, {"priority": 1.0}),
        (SlotError, {"index": join_index(9, torch.arange(36))}),
    ],
)
def test_wrong_arguments_change_nothing(error: type[Exception], changes: dict[str, Any]) -> None:
    shards, _, index, generation, _ = fleet()
    given: dict[str, Any] = {"index": index, "generation": generation, "patch": {"state": torch.ones(36, 2)}, **changes}
    with pytest.raises(error):
        update(shards, info(), **given)
    assert not stored(shards, "state").any()


def test_tensordicts() -> None:
    tensordict = pytest.importorskip("tensordict")
    shards, _, index, generations, order = fleet()
    patch = tensordict.TensorDict({"state": order[:, None].float().expand(36, 2).clone()}, [36])
    assert update(shards, info(), index, generations, patch).updated.all()
    assert torch.equal(stored(shards, "state")[:, 0], stored(shards, "id"))
