"""Rows of shards and of a buffer in an actor are deleted by index and generation."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    PrioritizedSampler,
    RayReplayBuffer,
    ReplayBuffer,
    RoundRobinWriter,
    ShardedReplayBuffer,
)
from ostinato.buffers.portion import Portion
from ostinato.distributed.routing import join_index
from ostinato.distributed.writing import delete_rows
from ostinato.errors import SlotError

from ..stats.chi_square import p_value

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

CAPACITY = 32


def local(sampler: Any = None) -> ReplayBuffer:
    writer = RoundRobinWriter(track_generations=True)
    storage = LazyTensorStorage(CAPACITY)
    return ReplayBuffer(storage=storage, sampler=sampler, writer=writer, generator=torch.Generator().manual_seed(1))


class Shards:
    """Buffers of this process in place of shards, one of which may be missing."""

    def __init__(self, *buffers: ReplayBuffer, missing: int = -1) -> None:
        self.buffers = buffers
        self.missing = missing

    def __len__(self) -> int:
        return len(self.buffers)

    def present(self) -> list[int]:
        return [i for i in range(len(self)) if i != self.missing]

    def call(self, method: str, arguments: dict[int, tuple[Any, ...]], group: str) -> dict[int, Any]:
        assert (method, group) == ("call", "update")
        return {
            i: getattr(self.buffers[i], name)(*(part.value for part in parts))
            for i, (name, *parts) in arguments.items()
        }


def test_an_index_is_split_by_shard_and_joined_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.distributed.writing.Serialized", lambda value: SimpleNamespace(value=value))
    buffers = [local(), local(), local()]
    index = torch.cat([join_index(i, rb.extend(torch.arange(10))) for i, rb in enumerate(buffers)])
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:12]
    generations = torch.cat([rb.writer.generations_of(torch.arange(10)) for rb in buffers])
    late = generations.clone()
    late[::2] += 1  # of other rows
    named = index[order].reshape(3, 4)
    shards: Any = Shards(*buffers, missing=1)
    info: Any = SimpleNamespace(capacity=CAPACITY, least_index=0)
    found = delete_rows(shards, info, named, late[order].reshape(3, 4))
    assert torch.equal(found, ((order % 2 == 1) & (order // 10 != 1)).reshape(3, 4))
    assert sum(map(len, buffers)) == 30 - int(found.sum())
    whole: Any = Shards(*buffers)
    assert int(delete_rows(whole, info, index, None).sum()) == 30 - int(found.sum())
    assert [len(rb) for rb in buffers] == [0, 0, 0]
    for wrong in (join_index(3, torch.tensor([0])), join_index(1, torch.tensor([CAPACITY])), [-1]):
        with pytest.raises(SlotError):
            delete_rows(whole, info, wrong, None)


@pytest.mark.parametrize("sampler", [None, PrioritizedSampler(CAPACITY, 1.0, 1.0)])
def test_an_offer_made_before_a_deletion_delivers_no_deleted_row(sampler: Any) -> None:
    rb = local(sampler)
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


@pytest.fixture(scope="module")
def fleet(cluster: Any) -> Iterator[ShardedReplayBuffer]:
    made = ShardedReplayBuffer(
        2,
        storage=lambda: LazyTensorStorage(CAPACITY),
        writer=lambda: RoundRobinWriter(track_generations=True),
        batch_size=32,
    )
    with closing(made):
        yield made


def test_rows_of_shards_are_deleted(fleet: ShardedReplayBuffer) -> None:
    index = torch.cat([fleet.pinned(i).extend(torch.arange(20 * i, 20 * i + 20)) for i in range(2)])
    _, info = fleet.sample(return_info=True)
    drawn = info["index"]
    assert bool(fleet.delete(info).all())
    gone = set(drawn.tolist())
    assert len(fleet) == 40 - len(gone)
    assert not bool(fleet.delete(info).any())
    left = [i for i, where in enumerate(index.tolist()) if where not in gone]
    counts = Counter[int]()
    for _ in range(60):
        counts.update(fleet.sample().tolist())
    assert set(counts) == set(left)
    assert p_value([counts[i] for i in left]) > 1e-4
    assert sum(part.rows for part in [fleet.stats()]) == len(left)


def test_rows_of_a_buffer_in_an_actor_are_deleted(cluster: Any) -> None:
    made = RayReplayBuffer(
        storage=lambda: LazyTensorStorage(CAPACITY),
        writer=lambda: RoundRobinWriter(track_generations=True),
        batch_size=8,
    )
    with closing(made):
        index = made.extend(torch.arange(12))
        _, info = made.sample(return_info=True)
        made.extend(torch.arange(12, 12 + CAPACITY - 4))  # replaces the rows of the first 8 slots
        found = made.delete(info)
        assert torch.equal(found, info["index"] >= 8)
        assert made.delete(index[8:]).tolist() == [where not in info["index"] for where in index[8:]]
        assert len(made) == CAPACITY - 4
        assert {int(x) for _ in range(30) for x in made.sample()}.isdisjoint(range(12))
