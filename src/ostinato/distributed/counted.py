"""Batches of shards whose draws use rows up: queues, and rows that retire after so many draws."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.distributed.joining import Part, join, split
from ostinato.distributed.routing import deal, places
from ostinato.errors import EmptyBufferError, WaitTimeoutError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.buffers.portion import Offer
    from ostinato.distributed.fleet import Fleet

__all__ = ["Counted"]

_LOOK_S = (0.002, 0.05)
"""How often shards are asked while there are too few rows: at first, and in the end."""


@final
class Counted:
    """Takes rows out of shards, each as often as it may be.

    Rows that were taken and do not make a whole batch yet (another reader was quicker at another shard, or a shard
    died) stay in hand for the next one: they are not to be had a second time.

    Thread-safe: of several threads each gets rows of its own.

    Args:
        fleet: the shards.
        waits: whether to wait for writers.
    """

    def __init__(self, fleet: Fleet, *, waits: bool) -> None:
        self._fleet = fleet
        self._waits = waits
        self._hand: list[tuple[Any, dict[Any, Any]]] = []
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Forget what is in hand."""
        with self._lock:
            self._hand = []

    def make(self, size: int, uniforms: Tensor, patience_s: float) -> tuple[Any, dict[Any, Any]]:
        """Return a batch; of each shard the rows stand together, in their order.

        Raises:
            EmptyBufferError: if there are too few rows, and nobody is waited for.
            WaitTimeoutError: if writers did not come in time.
        """
        until, pause = time.monotonic() + patience_s, _LOOK_S[0]
        while True:
            with self._lock:
                missing = size - sum(map(_rows, self._hand))
                if missing <= 0:
                    return self._give(size)
                offers = self._ask_all(missing)
                left = sum(offer.draws or 0 for offer in offers.values())
                if left >= missing:
                    self._take(offers, missing, uniforms)
                    continue
            self._refuse(missing, size, left, patience_s, late=time.monotonic() >= until)
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(2 * pause, _LOOK_S[1])

    def _ask_all(self, rows: int) -> dict[int, Offer]:
        return self._fleet.offers(self._fleet.ask("offer", dict.fromkeys(self._fleet.present(), (rows,)), "read"))

    def _refuse(self, missing: int, size: int, left: int, patience_s: float, *, late: bool) -> None:
        held = size - missing
        what = f"{size} row(s) were asked for, {held} are in hand, and the shards' rows are good for {left} draw(s)"
        if not self._waits:
            msg = f"{what}: write more, or ask for fewer"
            raise EmptyBufferError(msg)
        if late:
            msg = f"a draw waited {patience_s:g} s for writers; {what}: raise timeout_s, or see what became of these"
            raise WaitTimeoutError(msg)

    def _take(self, offers: dict[int, Offer], rows: int, uniforms: Tensor) -> None:
        shards = sorted(offers)
        chosen = deal([int(offers[i].mass) for i in shards], [offers[i].draws or 0 for i in shards], uniforms[:rows])
        counts = {shards[at]: int(where.shape[0]) for at, where in places(chosen).items()}
        calls = {i: (offers[i].number, count) for i, count in counts.items()}
        found, failed = self._fleet.hear("take", calls, "read")
        for i in (i for i in sorted(found) if found[i] is not None):
            data, info = found[i]
            self._hand.append(join([Part(i, data, info, torch.arange(counts[i], device="cpu"))]))
        if failed:
            raise failed[0]

    def _give(self, size: int) -> tuple[Any, dict[Any, Any]]:
        """Return what is in hand as one batch; what is too much of it stays."""
        parts, first = [], 0
        for data, info in self._hand:
            rows = _rows((data, info))
            parts.append(Part(0, data, info, torch.arange(first, first + rows, device="cpu")))
            first += rows
        self._hand = []
        batch, info = join(parts)
        if first > size:
            (batch, info), rest = split(batch, info, [size, first - size])
            self._hand = [rest]
        return batch, info


def _rows(made: tuple[Any, dict[Any, Any]]) -> int:
    return int(made[1]["index"].shape[0])
