"""Shards in this process, with the interface of a `ShardClient`: real buffers, calls that are counted, no Ray."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ostinato.buffers.portion import Offer, Portion
from ostinato.distributed.sampling import RowConsumer, ShardSampler
from ostinato.distributed.snapshot import ChangeCounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ostinato import ReplayBuffer
    from ostinato.distributed.deadlines import Deadline


class LocalShards:
    """The calls of a `ShardClient` to buffers in this process.

    `calls` counts calls by method.
    """

    call_timeout_s = 60.0

    def __init__(self, buffers: Sequence[ReplayBuffer]) -> None:
        self.buffers = list(buffers)
        self.portions = [Portion(rb) for rb in buffers]
        self.actors = [object() for _ in buffers]
        self.changes = ChangeCounts.of(self.actors)
        self.calls: Counter[str] = Counter()
        self.offered: list[tuple[int, Offer, int]] = []

    def __len__(self) -> int:
        return len(self.buffers)

    @contextmanager
    def within(self, method: str, deadline: Deadline) -> Iterator[Deadline]:
        yield deadline

    def present(self) -> list[int]:
        return list(range(len(self)))

    def record_offers(self, found: Mapping[int, Any]) -> dict[int, Offer]:
        return {i: Offer(*offer) for i, offer in found.items()}

    def request_offers(self, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Offer]:
        return self.record_offers(self.call("offer", arguments, "read"))

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]], group: str | None = None) -> dict[int, Any]:
        return self.call_collecting_errors(method, arguments, group)[0]

    def call_collecting_errors(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], group: str | None = None
    ) -> tuple[dict[int, Any], list[Exception]]:
        self.calls[method] += len(arguments)
        made: Any = {
            "offer": self._offer,
            "take": self._take,
            "take_and_offer": self._take_and_offer,
        }[method]
        assert group == "read"
        return {i: made(i, *given) for i, given in arguments.items()}, []

    def _offer(self, shard: int, rows: int, *others: Any) -> Offer:
        offer = self.portions[shard].offer(rows, *others)
        self.offered.append((shard, offer, rows))
        return offer

    def _take(self, shard: int, number: int, rows: int, keep: bool = False) -> Any:
        return self.portions[shard].take(number, rows, keep=keep)

    def _take_and_offer(self, shard: int, number: int, rows: int, next_rows: int) -> Any:
        found = self._take(shard, number, rows) if rows else None
        return found, self._offer(shard, next_rows, None, None, number)


def sampler_of(shards: LocalShards, age_s: float, seed: int = 0, *, consuming: bool = False) -> ShardSampler:
    """Return a sampler of shards whose snapshots may have an age."""
    consumer = RowConsumer(shards, waits=False, snapshot_age_s=age_s) if consuming else None  # type: ignore[arg-type]
    return ShardSampler(shards, torch.Generator().manual_seed(seed), None, consumer, age_s)  # type: ignore[arg-type]
