"""The read path of a sharded buffer: weigh the shards, choose one for each position, take rows, put them together."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch

from ostinato.buffers.limits import RateLimiter
from ostinato.buffers.portion import Offer
from ostinato.distributed.joining import Part, join, split
from ostinato.distributed.routing import Share, allot, places, weight_factors
from ostinato.errors import EmptyBufferError, OptionError, PriorityError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.distributed.counted import Counted
    from ostinato.distributed.fleet import Fleet
    from ostinato.distributed.turnstile import Turnstile

__all__ = ["Drawer"]

_Made: TypeAlias = tuple[Any, dict[str, Any]]
"""A batch, and what there is to say of it."""
_MOST = 8
"""Batches of one round: more of them hardly make each cheaper, and the first ones wait for the last."""
_TRIES = 16
"""Batches that shards may spoil, by dying or being emptied between offer and answer, before the caller hears of it."""


class _Coming(NamedTuple):
    """Batches that are made ahead, in one go."""

    sizes: list[int]
    uniforms: Tensor
    future: Future[_Made | None]

    @property
    def made(self) -> bool:
        """Whether there are batches that nobody has got."""
        future = self.future
        return not future.cancelled() and future.exception() is None and future.result() is not None


@final
class Drawer:
    """Draws batches; with prefetch in one thread of its own, in the order in which they were asked for.

    Without prefetch a batch takes two rounds: every shard makes an offer, then the chosen ones are asked for rows. With
    it the next offers come along with the rows, and one round makes half of the batches that may be ahead: draws are
    independent, so many of them are as many batches. What a limiter does not let through is not made ahead: it waits
    its turn when it is asked for; there, and where draws use rows up, a round makes one batch.

    Args:
        fleet: the shards.
        generator: of the choice of shards; None is torch's global one.
        depth: batches to keep ready; 0 is no prefetch.
        turnstile: the rate limiter; None lets everything through.
        counted: takes the rows where draws use them up; None where they do not.
    """

    def __init__(
        self,
        fleet: Fleet,
        generator: torch.Generator | None,
        depth: int,
        turnstile: Turnstile | None,
        counted: Counted | None,
    ) -> None:
        self.depth = depth
        self._fleet = fleet
        self._generator = generator
        self._turnstile = turnstile
        self._counted = counted
        self._share = 1 if turnstile is not None or counted is not None else max(1, min(depth // 2, _MOST))
        self._queue: deque[_Coming] = deque()
        self._here: deque[_Made] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ostinato-shards") if depth else None
        self._held: dict[int, Offer] = {}
        self._held_rows = 0  # draws in each of these
        self._held_up = False  # a batch could not be made ahead; none behind it is, until it was made

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        return len(self._here) + sum(len(coming.sizes) for coming in self._queue if coming.future.done())

    def next(self, size: int, timeout_s: float | None, max_age: int | None) -> _Made:
        """Return the next batch of `size` rows and its info.

        Raises:
            OptionError: if `max_age` is asked for where rows are used up, or batches made ahead.
            EmptyBufferError: if there are no rows.
            PriorityError: if no row has a priority above 0.
            WaitTimeoutError: if writers did not come in time; `timeout_s=None` is the limiter's.
        """
        if max_age is not None and (self._pool is not None or self._counted is not None):
            what = "rows are used up" if self._pool is None else "batches are prefetched, and max_age is of the moment"
            msg = f"max_age={max_age} is not available where {what}: leave one of them out"
            raise OptionError(msg)
        if self._pool is None:
            return self._draw(size, self._uniforms(size), timeout_s, max_age)
        self._ask_ahead(size, self._pool)
        if not self._here:
            coming = self._queue.popleft()
            try:
                found = coming.future.result()
                if found is None:
                    found = self._draw_now(coming, self._pool, timeout_s)
            except Exception:
                if self._counted is None:
                    self.drop()  # what was drawn after it may be wrong for the same reason; used rows must not be lost
                raise
            self._here.extend([found] if len(coming.sizes) == 1 else split(found[0], found[1], coming.sizes))
        return self._here.popleft()

    def _ask_ahead(self, size: int, pool: ThreadPoolExecutor) -> None:
        """Ask for as many batches as may be ahead; the very first one alone, since somebody waits for it."""
        ahead = len(self._here) + sum(len(coming.sizes) for coming in self._queue)
        count = self._share if ahead else 1
        while ahead + count <= self.depth + 1:
            uniforms = self._uniforms(count * size)
            future = pool.submit(self._draw_ahead, count * size, uniforms)
            self._queue.append(_Coming([size] * count, uniforms, future))
            ahead, count = ahead + count, self._share

    def _draw_now(self, first: _Coming, pool: ThreadPoolExecutor, timeout_s: float | None) -> Any:
        """Make a batch that could not be made ahead, and those that wait behind it after it: in order."""
        for coming in self._queue:
            coming.future.cancel()  # one that has run made nothing either

        def make() -> Any:
            self._held_up = False
            return self._draw(sum(first.sizes), first.uniforms, timeout_s)

        future = pool.submit(make)
        self._queue = deque(
            _Coming(sizes, uniforms, pool.submit(self._draw_ahead, sum(sizes), uniforms))
            for sizes, uniforms, _ in self._queue
        )
        return future.result()

    def drop(self) -> None:
        """Forget batches made ahead, and offers of what was there then."""
        for coming in self._queue:
            coming.future.cancel()
        if self._pool is not None:
            self._pool.submit(self._held.clear).result()
        self._held_up = False
        vain = sum(sum(coming.sizes) for coming in self._queue if coming.made)
        self._queue.clear()
        self._here.clear()
        if self._counted is not None:
            self._counted.forget()
        if vain and self._turnstile is not None:
            self._turnstile.back(drawn=vain)

    def _uniforms(self, size: int) -> Tensor:
        """Draw the numbers that choose the shards, in the caller's thread: those of torch's generator come in order."""
        return torch.rand(size, dtype=torch.float64, generator=self._generator)

    def _draw_ahead(self, size: int, uniforms: Tensor) -> _Made | None:
        """Make a batch before it is asked for; None if that is not possible now, and for all that come after it."""
        if not self._held_up:
            try:
                return self._draw(size, uniforms, 0.0)
            except (EmptyBufferError, WaitTimeoutError):
                self._held_up = True
        return None

    def _draw(self, size: int, uniforms: Tensor, timeout_s: float | None, max_age: int | None = None) -> _Made:
        if self._turnstile is None:
            return self._make(size, uniforms, timeout_s, max_age)
        left_s = self._turnstile.draw(size, timeout_s)
        try:
            return self._make(size, uniforms, left_s, max_age)
        except Exception:
            self._turnstile.back(drawn=size)
            raise

    def _make(self, size: int, uniforms: Tensor, timeout_s: float | None, max_age: int | None) -> _Made:
        if self._counted is not None:
            rules = RateLimiter() if self._turnstile is None else self._turnstile.limiter
            return self._counted.make(size, uniforms, rules.timeout_s if timeout_s is None else timeout_s)
        for _ in range(_TRIES):
            made = self._attempt(size, uniforms, max_age)
            if made is not None:
                return made
        msg = f"a batch could not be drawn: in {_TRIES} attempts shards died, or were emptied, between two calls"
        raise UsageError(msg)

    def _attempt(self, size: int, uniforms: Tensor, max_age: int | None) -> _Made | None:
        """Make a batch; None if a shard that was chosen is gone by now, or its rows are."""
        offers = self._offers(size) if max_age is None else self._recent_offers(size, max_age)
        if not offers:
            return None  # all that seemed to be there are gone
        shares = {i: Share(offer.rows, offer.mass, offer.least, offer.beta) for i, offer in offers.items()}
        self._check(shares)
        masses = [shares[i].mass if i in shares else 0.0 for i in range(len(self._fleet))]
        spots = places(allot(masses, uniforms))
        parts = self._take(offers, spots, size)
        if any(parts.get(i) is None for i in spots):
            return None
        factors = weight_factors(shares)
        return join([Part(i, parts[i][0], parts[i][1], at, factors[i]) for i, at in spots.items()])

    def _offers(self, size: int) -> dict[int, Offer]:
        """Return an offer of each shard that is there: those that came with the last rows, and new ones."""
        present = self._fleet.present()
        known = self._held if size <= self._held_rows else {}
        held = {i: offer for i, offer in known.items() if i in present and offer.number >= 0}
        self._held = {}
        calls = {i: (size,) for i in present if i not in held}
        fresh = {i: Offer(*found) for i, found in self._fleet.ask("offer", calls, "read").items()}
        for i, offer in fresh.items():
            self._fleet.note(i, offer.rows)
        return {**held, **fresh}

    def _recent_offers(self, size: int, max_age: int) -> dict[int, Offer]:
        """Return offers of rows that are young enough: those of a shard that did not know the newest version again."""
        offers: dict[int, Offer] = {}
        newest = None
        asked = self._fleet.present()
        while asked:
            found = self._fleet.ask("offer", dict.fromkeys(asked, (size, max_age, newest)), "read")
            offers |= {i: Offer(*offer) for i, offer in found.items()}
            versions = {i: offer.newest for i, offer in offers.items() if offer.newest is not None}
            before, newest = newest, max(versions.values(), default=None)
            asked = [i for i, version in versions.items() if newest not in {before, version}]
        return offers

    def _take(self, offers: dict[int, Offer], spots: dict[int, Tensor], size: int) -> dict[int, Any]:
        counts = {i: int(at.shape[0]) for i, at in spots.items()}
        if self._pool is None:
            calls = {i: (offers[i].number, count) for i, count in counts.items()}
            return self._fleet.ask("take", calls, "read")
        more = {i: (offer.number, counts.get(i, 0), size) for i, offer in offers.items()}
        found = self._fleet.ask("take_and_offer", more, "read")
        self._held, self._held_rows = {i: Offer(*offer) for i, (_, offer) in found.items()}, size
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
