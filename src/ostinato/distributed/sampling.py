"""The read path of a sharded buffer: weigh the shards, choose one for each position, take rows, put them together."""

from __future__ import annotations

import itertools
import math
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers.rate_limit import RateLimiter
from ostinato.core import kinds
from ostinato.core.rows import describe
from ostinato.distributed.routing import Share, allot, deal, join_index, places, weight_factors
from ostinato.errors import EmptyBufferError, KindError, PriorityError, SchemaError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.buffers.portion import Offer
    from ostinato.core.rows import Flat, Schema
    from ostinato.distributed.rate_limit_actor import Turnstile
    from ostinato.distributed.shard_client import Fleet

__all__ = ["Counted", "Drawer", "Held", "Made", "Part", "join", "split"]

_NAMES = ("index", "anchor_index")
_OWN = (*_NAMES, "priority_weight", "index_generation")
"""What names and weighs rows: in the info, and in batches of TensorDict buffers as well."""


class Part(NamedTuple):
    """Rows of a batch that come from one place."""

    shard: int
    """Which one; 0 leaves indices as they are."""
    data: Any
    """Rows."""
    info: dict[Any, Any]
    """What was said of them."""
    spots: Tensor
    """The positions that they fill, int64."""
    factor: float = 1.0
    """What turns weights of the shard into those of the whole."""


def join(parts: Sequence[Part]) -> tuple[Any, dict[Any, Any]]:
    """Put the parts of a batch together.

    Returns:
        The batch, in fresh memory unless there is one part, and its info, with indices of the whole.

    Raises:
        KindError: if batches are no tensors, or trees of these.
        SchemaError: if shards hold rows of different forms.
    """
    infos = [_as_whole(part) for part in parts]
    info, first = parts[0].info, parts[0]
    each = info["index"].shape[0] // first.spots.shape[0]  # windows are several records for each row drawn
    where = [_records(part.spots, each) for part in parts]
    size = each * sum(int(part.spots.shape[0]) for part in parts)
    said = {
        key: _scatter([mine[key] for mine in infos], where, size)
        for key, value in info.items()
        if isinstance(value, Tensor) and all(key in mine for mine in infos)
    }
    schema = _schema(first.data)
    flats = [_flat(part, schema, first.shard) for part in parts]
    leaves = [_scatter([flat.leaves[at] for flat in flats], where, size) for at in range(len(schema.leaves))]
    objects = [_scatter_objects([flat.objects[at] for flat in flats], where, size) for at in range(len(schema.objects))]
    return _built(schema, leaves, said, size, objects), said


def split(batch: Any, info: dict[Any, Any], sizes: Sequence[int]) -> list[tuple[Any, dict[Any, Any]]]:
    """Return a batch as several, of so many rows drawn, each with what was said of it. Views of its memory."""
    schema = _schema(batch)
    flat = schema.flatten(batch, None, 1)
    each = info["index"].shape[0] // sum(sizes)
    ends = [each * end for end in itertools.accumulate(sizes)]
    found = []
    for cut in map(slice, [0, *ends], ends):
        said = {key: value[cut] for key, value in info.items()}
        leaves, objects = [leaf[cut] for leaf in flat.leaves], [values[cut] for values in flat.objects]
        found.append((_built(schema, leaves, said, cut.stop - cut.start, objects), said))
    return found


def _flat(part: Part, schema: Schema, other: int) -> Flat:
    try:
        return schema.flatten(part.data, None, 1, exact=True)
    except SchemaError as error:
        msg = f"shards {other} and {part.shard} hold rows of different forms ({error}): empty one of them"
        raise SchemaError(msg) from error


def _schema(data: Any) -> Schema:
    try:
        return describe(data, 1)
    except (SchemaError, KindError, RuntimeError) as error:  # RuntimeError: a lazy stack of ragged rows
        kind = type(data).__name__
        msg = f"batches of shards must be tensors of one shape, or trees of these, to be put together, got {kind}"
        raise KindError(msg) from error


def _built(
    schema: Schema, leaves: list[Tensor], said: dict[Any, Any], size: int, objects: list[np.ndarray[Any, Any]]
) -> Any:
    batch = schema.build(leaves, (size,), torch.device("cpu"), objects)
    if kinds.is_tensor_collection(batch):
        kinds.put(batch, {key: said[key] for key in _OWN if key in said and key in batch.keys()})  # noqa: SIM118
    return batch


def _as_whole(part: Part) -> dict[Any, Any]:
    """Return the info of a shard's rows as that of rows of the whole."""
    info = part.info
    changed = {key: join_index(part.shard, info[key]) for key in _NAMES if key in info}
    if "priority_weight" in info:
        changed["priority_weight"] = info["priority_weight"] * part.factor
    return {**info, **changed}


def _records(spots: Tensor, each: int) -> Tensor:
    return spots if each == 1 else (spots[:, None] * each + torch.arange(each, device="cpu")).reshape(-1)


def _scatter_objects(
    values: Sequence[np.ndarray[Any, Any]], where: Sequence[Tensor], size: int
) -> np.ndarray[Any, Any]:
    """Do for fields of Python objects what `_scatter` does for tensors."""
    out = np.empty((size, *values[0].shape[1:]), dtype=object)
    for at, value in zip(where, values, strict=True):
        out[at.numpy()] = value
    return values[0] if len(values) == 1 else out


def _scatter(values: Sequence[Tensor], where: Sequence[Tensor], size: int) -> Tensor:
    """Put values `[n, *shape]` of each part to their places in `[size, *shape]`."""
    if len(values) == 1:
        return values[0]
    out = values[0].new_empty((size, *values[0].shape[1:]))
    for at, value in zip(where, values, strict=True):
        out.index_copy_(0, at, value)
    return out


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
