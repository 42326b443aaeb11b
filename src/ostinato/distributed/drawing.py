"""The read path of a sharded buffer: weigh the shards, choose one for each position, take rows, put them together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from ostinato.buffers.limits import RateLimiter
from ostinato.distributed.joining import Part, join
from ostinato.distributed.routing import Share, allot, places, weight_factors
from ostinato.errors import EmptyBufferError, PriorityError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.buffers.portion import Offer
    from ostinato.distributed.counted import Counted
    from ostinato.distributed.fleet import Fleet
    from ostinato.distributed.turnstile import Turnstile

__all__ = ["Drawer", "Held", "Made"]

Made: TypeAlias = tuple[Any, dict[str, Any]]
"""A batch, and what there is to say of it."""
_TRIES = 16
"""Batches that shards may spoil, by dying or being emptied between offer and answer, before the caller hears of it."""


@final
class Held:
    """Offers that came along with the rows of the last batch, for the next one."""

    def __init__(self) -> None:
        self._offers: dict[int, Offer] = {}
        self._rows = 0

    def keep(self, offers: dict[int, Offer], rows: int) -> None:
        """Keep offers of so many draws each."""
        self._offers, self._rows = offers, rows

    def use(self, rows: int) -> dict[int, Offer]:
        """Give those away that have so many draws."""
        found, self._offers = self._offers if rows <= self._rows else {}, {}
        return {i: offer for i, offer in found.items() if offer.number >= 0}


@final
class Drawer:
    """Draws batches from all shards. Thread-safe, apart from the generator.

    A batch takes two rounds: every shard makes an offer, then the chosen ones are asked for rows. Who keeps what is
    `Held` between batches gets the next offers along with the rows, so that a batch takes one round.

    Args:
        fleet: the shards.
        generator: of the choice of shards; None is torch's global one.
        turnstile: the rate limiter; None lets everything through.
        counted: takes the rows where draws use them up; None where they do not.
    """

    def __init__(
        self, fleet: Fleet, generator: torch.Generator | None, turnstile: Turnstile | None, counted: Counted | None
    ) -> None:
        self.counted = counted
        self._fleet = fleet
        self._generator = generator
        self._turnstile = turnstile

    @property
    def free(self) -> bool:
        """Whether any number of rows may be drawn at any time."""
        return self._turnstile is None and self.counted is None

    def patience_s(self, timeout_s: float | None) -> float:
        """Return how long a draw may wait for writers, in seconds; without end where none waits for them."""
        if timeout_s is not None:
            return float(timeout_s)
        if self._turnstile is not None:
            return float(self._turnstile.limiter.timeout_s)
        return math.inf if self.counted is None else RateLimiter().timeout_s

    def uniforms(self, size: int) -> Tensor:
        """Draw the numbers that choose the shards, in the caller's thread: those of torch's generator come in order."""
        return torch.rand(size, dtype=torch.float64, generator=self._generator, device="cpu")

    def forget(self) -> None:
        """Forget rows in hand: there are others now, or none."""
        if self.counted is not None:
            self.counted.forget()

    def give_back(self, rows: int) -> None:
        """Take note that rows that were let through reach nobody."""
        if self._turnstile is not None:
            self._turnstile.back(drawn=rows)

    def draw(
        self,
        size: int,
        uniforms: Tensor,
        timeout_s: float | None,
        max_age: int | None = None,
        held: Held | None = None,
    ) -> Made:
        """Return a batch of `size` rows and its info; `uniforms` choose their shards."""
        left_s = timeout_s if self._turnstile is None else self._turnstile.draw(size, timeout_s)
        try:
            if self.counted is not None:
                return self.counted.make(size, uniforms, RateLimiter().timeout_s if left_s is None else left_s)
            return self._make(size, uniforms, max_age, held)
        except Exception:
            self.give_back(size)
            raise

    def _make(self, size: int, uniforms: Tensor, max_age: int | None, held: Held | None) -> Made:
        for _ in range(_TRIES):
            made = self._attempt(size, uniforms, max_age, held)
            if made is not None:
                return made
        msg = f"a batch could not be drawn: in {_TRIES} attempts shards died, or were emptied, between two calls"
        raise UsageError(msg)

    def _attempt(self, size: int, uniforms: Tensor, max_age: int | None, held: Held | None) -> Made | None:
        """Make a batch; None if a shard that was chosen is gone by now, or its rows are."""
        offers = self._offers(size, held) if max_age is None else self._recent_offers(size, max_age)
        if not offers:
            return None  # all that seemed to be there are gone
        shares = {i: Share(offer.rows, offer.mass, offer.least, offer.beta) for i, offer in offers.items()}
        self._check(shares)
        masses = [shares[i].mass if i in shares else 0.0 for i in range(len(self._fleet))]
        spots = places(allot(masses, uniforms))
        parts = self._take(offers, spots, size, held)
        if any(parts.get(i) is None for i in spots):
            return None
        factors = weight_factors(shares)
        return join([Part(i, parts[i][0], parts[i][1], at, factors[i]) for i, at in spots.items()])

    def _offers(self, size: int, held: Held | None) -> dict[int, Offer]:
        """Return an offer of each shard that is there: those that came with the last rows, and new ones."""
        present = self._fleet.present()
        kept = {} if held is None else {i: offer for i, offer in held.use(size).items() if i in present}
        return {**kept, **self._ask({i: (size,) for i in present if i not in kept})}

    def _ask(self, calls: dict[int, tuple[Any, ...]]) -> dict[int, Offer]:
        return self._fleet.offers(self._fleet.ask("offer", calls, "read"))

    def _recent_offers(self, size: int, max_age: int) -> dict[int, Offer]:
        """Return offers of rows that are young enough: those of a shard that did not know the newest version again."""
        offers: dict[int, Offer] = {}
        newest = None
        asked = self._fleet.present()
        while asked:
            offers |= self._ask(dict.fromkeys(asked, (size, max_age, newest)))
            versions = {i: offer.newest for i, offer in offers.items() if offer.newest is not None}
            before, newest = newest, max(versions.values(), default=None)
            asked = [i for i, version in versions.items() if newest not in {before, version}]
        return offers

    def _take(self, offers: dict[int, Offer], spots: dict[int, Tensor], size: int, held: Held | None) -> dict[int, Any]:
        counts = {i: int(at.shape[0]) for i, at in spots.items()}
        if held is None:
            calls = {i: (offers[i].number, count) for i, count in counts.items()}
            return self._fleet.ask("take", calls, "read")
        more = {i: (offer.number, counts.get(i, 0), size) for i, offer in offers.items()}
        found = self._fleet.ask("take_and_offer", more, "read")
        held.keep(self._fleet.offers({i: offer for i, (_, offer) in found.items()}), size)
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
