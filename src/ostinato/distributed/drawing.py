"""The read path of a sharded buffer: weigh the shards, choose one for each position, take rows, put them together."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.buffers.portion import Offer
from ostinato.distributed.joining import join
from ostinato.distributed.routing import Share, allot, places, weight_factors
from ostinato.errors import EmptyBufferError, PriorityError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.distributed.fleet import Fleet

__all__ = ["Drawer"]

_TRIES = 16
"""Batches that shards may spoil, by dying or being emptied between offer and answer, before the caller hears of it."""


@final
class Drawer:
    """Draws batches; with prefetch in one thread of its own, in the order in which they were asked for.

    Without prefetch a batch takes two rounds: every shard makes an offer, then the chosen ones are asked for rows. With
    it the next offers come along with the rows, so that a batch takes one round.

    Args:
        fleet: the shards.
        generator: of the choice of shards; None is torch's global one.
        depth: batches to keep ready; 0 is no prefetch.
    """

    def __init__(self, fleet: Fleet, generator: torch.Generator | None, depth: int) -> None:
        self.depth = depth
        self._fleet = fleet
        self._generator = generator
        self._queue: deque[Future[Any]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ostinato-shards") if depth else None
        self._held: dict[int, Offer] = {}

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        return sum(future.done() for future in self._queue)

    def next(self, size: int) -> tuple[Any, dict[str, Any]]:
        """Return the next batch of `size` rows and its info.

        Raises:
            EmptyBufferError: if there are no rows.
            PriorityError: if no row has a priority above 0.
        """
        if self._pool is None:
            return self._draw(size, self._uniforms(size))
        while len(self._queue) <= self.depth:
            self._queue.append(self._pool.submit(self._draw, size, self._uniforms(size)))
        try:
            found: tuple[Any, dict[str, Any]] = self._queue.popleft().result()
        except Exception:
            self.drop()  # what was drawn after it may be wrong for the same reason
            raise
        return found

    def drop(self) -> None:
        """Forget batches made ahead, and offers of what was there then."""
        for future in self._queue:
            future.cancel()
        self._queue.clear()
        if self._pool is not None:
            self._pool.submit(self._held.clear).result()

    def _uniforms(self, size: int) -> Tensor:
        """Draw the numbers that choose the shards, in the caller's thread: those of torch's generator come in order."""
        return torch.rand(size, dtype=torch.float64, generator=self._generator)

    def _draw(self, size: int, uniforms: Tensor) -> tuple[Any, dict[str, Any]]:
        for _ in range(_TRIES):
            made = self._attempt(size, uniforms)
            if made is not None:
                return made
        msg = f"a batch could not be drawn: in {_TRIES} attempts shards died, or were emptied, between two calls"
        raise UsageError(msg)

    def _attempt(self, size: int, uniforms: Tensor) -> tuple[Any, dict[str, Any]] | None:
        """Make a batch; None if a shard that was chosen is gone by now, or its rows are."""
        offers = self._offers(size)
        if not offers:
            return None  # all that seemed to be there are gone
        shares = {i: Share(offer.rows, offer.mass, offer.least, offer.beta) for i, offer in offers.items()}
        self._check(shares)
        masses = [shares[i].mass if i in shares else 0.0 for i in range(len(self._fleet))]
        spots = places(allot(masses, uniforms))
        parts = self._take(offers, spots, size)
        if any(parts.get(i) is None for i in spots):
            return None
        return join({i: parts[i] for i in spots}, spots, weight_factors(shares))

    def _offers(self, size: int) -> dict[int, Offer]:
        """Return an offer of each shard that is there: those that came with the last rows, and new ones."""
        present = self._fleet.present()
        held = {i: offer for i, offer in self._held.items() if i in present and offer.number >= 0}
        self._held = {}
        calls = {i: (size,) for i in present if i not in held}
        fresh = {i: Offer(*found) for i, found in self._fleet.ask("offer", calls, "read").items()}
        for i, offer in fresh.items():
            self._fleet.note(i, offer.rows)
        return {**held, **fresh}

    def _take(self, offers: dict[int, Offer], spots: dict[int, Tensor], size: int) -> dict[int, Any]:
        counts = {i: int(at.shape[0]) for i, at in spots.items()}
        if self._pool is None:
            calls = {i: (offers[i].number, count) for i, count in counts.items()}
            return self._fleet.ask("take", calls, "read")
        more = {i: (offer.number, counts.get(i, 0), size) for i, offer in offers.items()}
        found = self._fleet.ask("take_and_offer", more, "read")
        self._held = {i: Offer(*offer) for i, (_, offer) in found.items()}
        for i, offer in self._held.items():
            self._fleet.note(i, offer.rows)
        return {i: part for i, (part, _) in found.items()}

    def _check(self, shares: dict[int, Share]) -> None:
        if any(share.mass > 0 for share in shares.values()):
            return
        rows = sum(share.rows for share in shares.values())
        where = f"the {len(shares)} shards that answer"
        if rows:
            msg = f"none of the {rows} rows of {where} can be drawn: give some row a priority above 0, or add rows"
            raise PriorityError(msg)
        msg = f"Cannot sample from an empty storage ({where} have no rows): add rows first"
        raise EmptyBufferError(msg)
