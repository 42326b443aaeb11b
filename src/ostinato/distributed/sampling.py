"""Sampling from shards: weigh them, choose one for each position of a batch, take the rows, and join them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers.rate_limit import RateLimiter
from ostinato.core import kinds
from ostinato.core.rows import describe
from ostinato.distributed.deadlines import Deadline
from ostinato.distributed.routing import (
    ShardWeight,
    allot,
    allot_consuming,
    join_index,
    positions_by_shard,
    weight_factors,
)
from ostinato.distributed.snapshot import Snapshot, batches_per_round
from ostinato.errors import EmptyBufferError, KindError, PriorityError, SchemaError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from ostinato.buffers.portion import Offer
    from ostinato.core.rows import Flat, Schema
    from ostinato.distributed.rate_limits import RateLimitClient
    from ostinato.distributed.shard_client import ShardClient
    from ostinato.distributed.snapshot import Reservation


BatchAndInfo: TypeAlias = tuple[Any, dict[str, Any]]
"""A batch and its info, as `sample(return_info=True)` returns them."""

_INDEX_KEYS = ("index", "anchor_index")
_INFO_KEYS = (*_INDEX_KEYS, "priority_weight", "index_generation")
"""Keys of the info that batches of TensorDict buffers hold as well."""


# -- joining and splitting batches ------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Rows of a batch that come from one shard."""

    shard: int
    """Its number; 0 leaves indices unchanged."""
    data: Any
    """The rows."""
    info: dict[Any, Any]
    """Their info."""
    positions: Tensor
    """Their positions in the batch, int64."""
    weight_factor: float = 1.0
    """Factor from importance weights of the shard to those of the whole buffer."""


def join_parts(parts: Sequence[Part]) -> BatchAndInfo:
    """Join the parts of a batch.

    Returns:
        The batch, in new memory unless there is only one part, and its info, with indices of the whole buffer.

    Raises:
        KindError: Batches are not tensors, or trees of tensors.
        SchemaError: Shards hold rows of different schemas.
    """
    info, first = parts[0].info, parts[0]
    window = info["index"].shape[0] // first.positions.shape[0]  # units return several transitions for each row drawn
    rows = _RowOrder([_expand(part.positions, window) for part in parts])
    joined = {
        key: rows.scatter([part.info[key] for part in parts])
        for key, value in info.items()
        if isinstance(value, Tensor) and all(key in part.info for part in parts)
    }
    joined |= _global_info(parts, joined, rows)
    schema, flats = _flatten(parts)
    leaves = [rows.scatter([flat.leaves[i] for flat in flats]) for i in range(len(schema.leaves))]
    objects = [rows.scatter_objects([flat.objects[i] for flat in flats]) for i in range(len(schema.objects))]
    return _build(schema, leaves, joined, rows.size, objects), joined


def split_batch(batch: Any, info: dict[Any, Any], sizes: Sequence[int]) -> list[BatchAndInfo]:
    """Split a batch into several of `sizes` rows drawn, each with its info. Views."""
    schema = _schema(batch)
    flat = schema.flatten(batch, None, 1)
    window = info["index"].shape[0] // sum(sizes)
    ends = [window * end for end in itertools.accumulate(sizes)]
    found = []
    for rows in map(slice, [0, *ends], ends):
        part = {key: value[rows] for key, value in info.items()}
        leaves, objects = [leaf[rows] for leaf in flat.leaves], [values[rows] for values in flat.objects]
        found.append((_build(schema, leaves, part, rows.stop - rows.start, objects), part))
    return found


def _flatten(parts: Sequence[Part]) -> tuple[Schema, list[Flat]]:
    """Return the schema of a batch and the leaves of its parts.

    Rows of tensor storages have one schema. Those of a `ListStorage` may have different dtypes, which are promoted, as
    they are when such rows of one buffer are stacked.
    """
    schema = _schema(parts[0].data)
    try:
        return schema, [schema.flatten(part.data, None, 1, exact=True) for part in parts]
    except SchemaError as error:
        return schema, _promoted(parts, schema, error)


def _shapes(schema: Schema) -> dict[Any, tuple[int, ...]]:
    tensors = {leaf.path: leaf.shape for leaf in schema.leaves}
    return {**tensors, **{leaf.path: leaf.shape for leaf in schema.objects}}


def _promoted(parts: Sequence[Part], schema: Schema, error: SchemaError) -> list[Flat]:
    """Return the leaves of parts of the same fields and shapes, of the dtypes to which theirs are promoted.

    Raises:
        SchemaError: Fields or shapes differ, as `error` says.
    """
    flats = []
    for part in parts:
        own = _schema(part.data)
        if _shapes(own) != _shapes(schema):
            msg = f"shards {parts[0].shard} and {part.shard} hold rows of different schemas ({error})"
            raise SchemaError(msg) from error
        flat = own.flatten(part.data, None, 1)
        leaves = [flat.leaves[own.find(leaf.path)] for leaf in schema.leaves]
        objects = [flat.objects[own.objects.index(leaf)] for leaf in schema.objects]
        flats.append(flat._replace(leaves=leaves, objects=objects))
    columns = zip(*(flat.leaves for flat in flats), strict=True)
    dtypes = [reduce(torch.promote_types, (leaf.dtype for leaf in column)) for column in columns]
    return [
        flat._replace(leaves=[leaf.to(dtype) for leaf, dtype in zip(flat.leaves, dtypes, strict=True)])
        for flat in flats
    ]


def _schema(data: Any) -> Schema:
    try:
        return describe(data, 1)
    except (SchemaError, KindError, RuntimeError) as error:  # RuntimeError: a lazy stack of ragged rows
        kind = type(data).__name__
        msg = f"batches of shards must be tensors of one shape, or trees of these, to be joined, got {kind}"
        raise KindError(msg) from error


def _build(
    schema: Schema, leaves: list[Tensor], info: dict[Any, Any], size: int, objects: list[np.ndarray[Any, Any]]
) -> Any:
    batch = schema.build(leaves, (size,), torch.device("cpu"), objects)
    if kinds.is_tensor_collection(batch):
        kinds.put(batch, {key: info[key] for key in _INFO_KEYS if key in info and key in batch.keys()})  # noqa: SIM118
    return batch


def _global_info(parts: Sequence[Part], joined: dict[Any, Tensor], rows: _RowOrder) -> dict[Any, Tensor]:
    """Return the info of the shards' rows that is another one in the whole buffer: indices and weights."""
    shards = rows.scatter_numbers([part.shard for part in parts], torch.int64)
    changed = {key: join_index(shards, joined[key]) for key in _INDEX_KEYS if key in joined}
    if "priority_weight" in joined:
        weights = joined["priority_weight"]
        changed["priority_weight"] = weights * rows.scatter_numbers([p.weight_factor for p in parts], weights.dtype)
    return changed


def _expand(positions: Tensor, window: int) -> Tensor:
    """Return the positions of all transitions of windows whose first rows have `positions`."""
    return positions if window == 1 else (positions[:, None] * window + torch.arange(window, device="cpu")).reshape(-1)


_MANY_PARTS = 8
_SMALL_BYTES = 1 << 20


@final
class _RowOrder:
    """Writes the values of all parts, `[n, *shape]` each, to their positions in `[size, *shape]`.

    Many small values are concatenated and sorted: two copies, but two calls instead of one for each part.

    Args:
        where: Positions of each part, int64.
    """

    def __init__(self, where: Sequence[Tensor]) -> None:
        self._where = where
        self._counts = [at.shape[0] for at in where]
        self.size = sum(self._counts)
        self._order: Tensor | None = None  # of the concatenated rows
        if len(where) > _MANY_PARTS:
            self._order = torch.empty(self.size, dtype=torch.int64, device="cpu")
            self._order[torch.cat(list(where))] = torch.arange(self.size, device="cpu")

    def scatter(self, values: Sequence[Tensor]) -> Tensor:
        """Write the values of each part to their positions."""
        if len(values) == 1:
            return values[0]
        first = values[0]
        row_bytes = first.element_size() * first[:1].numel()
        if self._order is not None and row_bytes * self.size <= _SMALL_BYTES:
            return torch.cat(list(values)).index_select(0, self._order)
        out = first.new_empty((self.size, *first.shape[1:]))
        for at, value in zip(self._where, values, strict=True):
            out.index_copy_(0, at, value)
        return out

    def scatter_numbers(self, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Do the same for one number of each part."""
        # unlike this, torch.repeat_interleave starts threads for a few rows
        each = torch.from_numpy(np.repeat(np.asarray(numbers), self._counts)).to(dtype)
        if self._order is not None:
            return each.index_select(0, self._order)
        out = torch.empty_like(each)
        out[self._where[0] if len(self._where) == 1 else torch.cat(list(self._where))] = each
        return out

    def scatter_objects(self, values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Do the same for fields of Python objects."""
        if len(values) == 1:
            return values[0]
        out = np.empty((self.size, *values[0].shape[1:]), dtype=object)
        for at, value in zip(self._where, values, strict=True):
            out[at.numpy()] = value
        return out


# -- rows that draws consume ------------------------------------------------------------------------------------------

_POLL_S = (0.002, 0.05)
"""Interval between requests to the shards while there are too few rows: at first, and at most."""
_POLLED_SHARDS = 16
"""With more shards the intervals are longer in proportion, so that polls do not take all of the reader's time."""


@final
class RowConsumer:
    """Takes rows out of shards whose sampler consumes them (`QueueSampler`, `LimitedSampler`).

    Rows that were taken but do not fill a batch yet, because another reader was faster at another shard or a shard
    died, are kept for the next batch, since they cannot be drawn again. Thread-safe: each thread gets its own rows.

    Each answer of a shard says how many rows it has left. These counts choose the shards of later batches, until they
    are too old or too few; so a batch calls the shards that have rows. A shard that has fewer rows by then, because
    another reader was faster, returns none, and its new count is used.

    Args:
        shards: The shards.
        waits: Whether to wait for writers.
        snapshot_age_s: Longest age of the counts; 0 asks all shards for each batch.
    """

    def __init__(self, shards: ShardClient, *, waits: bool, snapshot_age_s: float = 0.0) -> None:
        self._shards = shards
        self._waits = waits
        self._age_s = snapshot_age_s
        self._kept: list[BatchAndInfo] = []
        self._counts: dict[int, tuple[Offer, int]] = {}  # with the changes that each includes
        self._counted = -math.inf
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Discard the rows that are kept."""
        with self._lock:
            self._kept = []
            self._counts = {}

    def can_draw(self, size: int) -> bool:
        """Return whether a batch can be had at once."""
        with self._lock:
            missing = size - sum(map(_num_rows, self._kept))
            return missing <= 0 or self._left(self._count(self._shards.present(), missing)) >= missing

    @staticmethod
    def _left(offers: dict[int, Offer]) -> int:
        return sum(offer.draws or 0 for offer in offers.values())

    def draw(self, size: int, uniforms: Tensor, limit_s: float, min_rows: int | None = None) -> BatchAndInfo:
        """Return a batch; the rows of each shard are together, in their order.

        Args:
            size: Number of rows.
            uniforms: Numbers that choose their shards.
            limit_s: Longest wait for writers.
            min_rows: Rows of the smallest batch to take when the time is up, or writers are not waited for.

        Raises:
            EmptyBufferError: There are too few rows, and writers are not waited for.
            WaitTimeoutError: Too few rows were written within `limit_s`.
        """
        scale = max(1.0, len(self._shards) / _POLLED_SHARDS)
        until, pause = time.monotonic() + limit_s, scale * _POLL_S[0]
        while True:
            with self._lock:
                late = time.monotonic() >= until
                missing = size - sum(map(_num_rows, self._kept))
                if missing <= 0:
                    return self._pop_batch(size)
                offers = self._offers(missing)
                left = self._left(offers)
                enough = missing if min_rows is None or (self._waits and not late) else missing - size + min_rows
                if left and left >= enough:
                    self._take(offers, min(left, missing), uniforms)
                    continue
                if enough <= 0:
                    return self._pop_batch(size - missing)
            self._check(missing, size, left, limit_s, late=late)
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(2 * pause, scale * _POLL_S[1])

    def _offers(self, missing: int) -> dict[int, Offer]:
        """Return what the shards have left: known counts if they are young and enough, else new ones of all shards."""
        present, now = self._shards.present(), time.monotonic()
        if now - self._counted <= self._age_s:
            changed = [i for i in present if self._counts.get(i, (None, -1))[1] != self._shards.changes[i]]
            found = self._count(changed, missing) | {i: self._counts[i][0] for i in present if i not in changed}
            if self._left(found) >= missing:
                return found
        self._counted = now
        return self._count(present, missing)

    def _count(self, shards: list[int], missing: int) -> dict[int, Offer]:
        """Ask shards how many rows they have left."""
        changes = {i: self._shards.changes[i] for i in shards}
        offers = self._shards.request_offers(dict.fromkeys(shards, (missing,))) if shards else {}
        self._record(offers, changes)
        return offers

    def _record(self, offers: dict[int, Offer], changes: dict[int, int]) -> None:
        self._counts |= {i: (offer, changes[i]) for i, offer in offers.items()}

    def _check(self, missing: int, size: int, left: int, limit_s: float, *, late: bool) -> None:
        """Raise if there are too few rows and it is too late to wait."""
        kept = size - missing
        what = f"{size} row(s) were requested, {kept} are taken already, and the shards' rows allow {left} more draw(s)"
        if not self._waits:
            msg = f"{what}: write more, or ask for fewer"
            raise EmptyBufferError(msg)
        if late:
            msg = f"a draw waited {limit_s:g} s for writers; {what}: raise timeout_s, or see what became of these"
            raise WaitTimeoutError(msg)

    def _take(self, offers: dict[int, Offer], rows: int, uniforms: Tensor) -> None:
        shards = sorted(offers)
        masses, draws = [int(offers[i].mass) for i in shards], [offers[i].draws or 0 for i in shards]
        chosen = allot_consuming(masses, draws, uniforms[:rows])
        counts = {shards[at]: int(where.shape[0]) for at, where in positions_by_shard(chosen).items()}
        changes = {i: self._shards.changes[i] for i in counts}
        calls = {i: (offers[i].number, count, rows) for i, count in counts.items()}
        found, errors = self._shards.call_collecting_errors("take_and_offer", calls, "read")
        self._counts = {i: count for i, count in self._counts.items() if i not in counts}
        self._record(self._shards.record_offers({i: offer for i, (_, offer) in found.items()}), changes)
        for i in (i for i in sorted(found) if found[i][0] is not None):
            data, info = found[i][0]
            self._kept.append(join_parts([Part(i, data, info, torch.arange(counts[i], device="cpu"))]))
        if errors:
            raise errors[0]

    def _pop_batch(self, size: int) -> BatchAndInfo:
        """Return the kept rows as one batch; surplus rows stay."""
        parts, first = [], 0
        for data, info in self._kept:
            rows = _num_rows((data, info))
            parts.append(Part(0, data, info, torch.arange(first, first + rows, device="cpu")))
            first += rows
        self._kept = []
        batch, info = join_parts(parts)
        if first > size:
            (batch, info), rest = split_batch(batch, info, [size, first - size])
            self._kept = [rest]
        return batch, info


def _num_rows(batch: BatchAndInfo) -> int:
    return int(batch[1]["index"].shape[0])


# -- sampling ---------------------------------------------------------------------------------------------------------

_MAX_ATTEMPTS = 16
"""Attempts that may fail because a shard dies or is emptied between its offer and its rows."""


@final
class ShardSampler:
    """Draws batches from all shards. Thread-safe, except for the generator.

    A batch takes two rounds of calls: each shard makes an offer, then the chosen shards return rows. If offers may be
    of some age, they serve several batches, and a batch takes one round, to the chosen shards only; see `Snapshot`.

    Args:
        shards: The shards.
        generator: Chooses the shards; None is torch's global generator.
        limiter: The rate limiter; None for none.
        consumer: Takes the rows if draws consume them; None if they do not.
        snapshot_age_s: Longest age of an offer when it is used; 0 requests offers for each batch.
    """

    def __init__(
        self,
        shards: ShardClient,
        generator: torch.Generator | None,
        limiter: RateLimitClient | None,
        consumer: RowConsumer | None,
        snapshot_age_s: float = 0.0,
    ) -> None:
        self.consumer = consumer
        self._age_s = snapshot_age_s
        self._snapshot = Snapshot() if snapshot_age_s else None
        self._shards = shards
        self._generator = generator
        self._limiter = limiter

    @property
    def unlimited(self) -> bool:
        """Whether any number of rows may be drawn at any time."""
        return self._limiter is None and self.consumer is None

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Return the deadline of a draw; half of its time is for one round of calls, so that a shard may be left out.

        Raises:
            OptionError: `timeout_s` is not a number of at least 0.
        """
        limit_s = RateLimiter.timeout_s if self._limiter is None else self._limiter.limiter.timeout_s
        default_s = None if self.unlimited else limit_s
        return Deadline.of_wait(timeout_s, default_s, self._shards.call_timeout_s, share=0.5)

    def within(self, deadline: Deadline) -> AbstractContextManager[Deadline]:
        """Make all calls of this thread in a block end by a deadline."""
        return self._shards.within("sample", deadline)

    def name_silent(self) -> str:
        """Return the names of the shards that do not answer."""
        return self._shards.name_silent()

    def uniforms(self, size: int) -> Tensor:
        """Draw the numbers that choose the shards; in the caller's thread, so that their order is deterministic."""
        return torch.rand(size, dtype=torch.float64, generator=self._generator, device="cpu")

    def batches_per_round(self, depth: int) -> int:
        """Return how many batches to draw at once if `depth` may be ahead."""
        return batches_per_round(depth, len(self._shards)) if self.unlimited else 1

    def forget(self) -> None:
        """Discard offers, and rows that the consumer keeps, because the content of the shards has changed."""
        if self._snapshot is not None:
            self._snapshot.clear()
        if self.consumer is not None:
            self.consumer.forget()

    def can_draw(self, size: int) -> bool:
        """Return whether a batch of `size` rows can be drawn at once."""
        if self._limiter is not None and not self._limiter.can("draw", size, self._shards.deadline("can_sample")[1]):
            return False
        if self.consumer is not None:
            return self.consumer.can_draw(size)
        return any(self._shards.call_all("call", "can_sample", 1).values())

    def give_back(self, rows: int) -> None:
        """Report to the rate limiter that rows were drawn but not used."""
        if rows and self._limiter is not None:
            self._limiter.give_back(drawn=rows)

    def draw(
        self,
        size: int,
        uniforms: Tensor,
        timeout_s: float | None,
        max_age: int | None = None,
        offers: Snapshot | None = None,
        min_rows: int | None = None,
    ) -> BatchAndInfo:
        """Return a batch of `size` rows and its info.

        Args:
            size: Number of rows.
            uniforms: Numbers that choose their shards, float64 `[size]` in `[0, 1)`.
            timeout_s: Longest wait for writers; None is the limiter's.
            max_age: Draw only rows of recent versions; see `ShardedReplayBuffer.sample`.
            offers: Holds the offers of a single reader that requests the next ones with the rows of each batch; None
                is for any thread.
            min_rows: Rows of the smallest batch to return when the time is up; None returns whole batches only.
        """
        left_s = timeout_s
        if self._limiter is not None:
            size, left_s = self._limiter.acquire("draw", size, timeout_s, min_rows)
            uniforms = uniforms[:size]
        try:
            if self.consumer is not None:
                limit_s = RateLimiter.timeout_s if left_s is None else left_s
                taken = self.consumer.draw(size, uniforms, limit_s, min_rows)
                self.give_back(size - _num_rows(taken))
                return taken
            for _ in range(_MAX_ATTEMPTS):
                found = self._attempt(size, uniforms, max_age, self._snapshot if offers is None else offers)
                if found is not None:
                    return found
            msg = (
                f"a batch could not be drawn: in {_MAX_ATTEMPTS} attempts shards died, or were emptied, between two "
                "calls"
            )
            raise UsageError(msg)
        except Exception:
            self.give_back(size)
            raise

    def _attempt(
        self, size: int, uniforms: Tensor, max_age: int | None, snapshot: Snapshot | None
    ) -> BatchAndInfo | None:
        """Draw a batch; None if a chosen shard is dead by now, or its rows are gone."""
        reserved = None
        if max_age is not None:
            offers = self._recent_offers(size, max_age)
        elif snapshot is not None:
            reserved = snapshot.reserve(self._shards, size, self._age_s)
            offers = reserved.offers
        else:
            offers = self._shards.request_offers(dict.fromkeys(self._shards.present(), (size,)))
        if not offers:
            return None
        weights = {i: ShardWeight(offer.rows, offer.mass, offer.least, offer.beta) for i, offer in offers.items()}
        if not any(weight.mass > 0 for weight in weights.values()):
            if snapshot is not None:
                snapshot.clear()  # so that rows are seen as soon as they are written
            raise _no_rows(weights)
        masses = [weights[i].mass if i in weights else 0.0 for i in range(len(self._shards))]
        positions = positions_by_shard(allot(masses, uniforms))
        counts = {i: int(at.shape[0]) for i, at in positions.items()}
        parts = self._take(offers, counts, snapshot, reserved)
        failed = [i for i in positions if parts.get(i) is None]
        if failed:
            if snapshot is not None:
                snapshot.drop(offers, failed)
            return None
        factors = weight_factors(weights)
        return join_parts([Part(i, parts[i][0], parts[i][1], at, factors[i]) for i, at in positions.items()])

    def _recent_offers(self, size: int, max_age: int) -> dict[int, Offer]:
        """Return offers of recent rows; shards that did not know the newest version of all shards are asked again."""
        offers: dict[int, Offer] = {}
        newest = None
        called = self._shards.present()
        while called:
            offers |= self._shards.request_offers(dict.fromkeys(called, (size, max_age, newest)))
            versions = {i: offer.newest for i, offer in offers.items() if offer.newest is not None}
            before, newest = newest, max(versions.values(), default=None)
            called = [i for i, version in versions.items() if newest not in {before, version}]
        return offers

    def _take(
        self,
        offers: dict[int, Offer],
        counts: dict[int, int],
        snapshot: Snapshot | None,
        reserved: Reservation | None,
    ) -> dict[int, Any]:
        """Return rows of the chosen shards; None for those whose rows are gone."""
        if snapshot is None or reserved is None or not reserved.renew:
            keep = reserved is not None
            return self._shards.call("take", {i: (offers[i].number, n, keep) for i, n in counts.items()}, "read")
        calls = {i: (offer.number, counts.get(i, 0), reserved.rows) for i, offer in offers.items()}
        found = self._shards.call("take_and_offer", calls, "read")
        snapshot.renew(reserved, self._shards.record_offers({i: offer for i, (_, offer) in found.items()}))
        return {i: part for i, (part, _) in found.items()}


def _no_rows(weights: dict[int, ShardWeight]) -> Exception:
    """Return the error of shards from which no row can be drawn."""
    rows = sum(weight.rows for weight in weights.values())
    where = f"the {len(weights)} shards that answer"
    if rows:
        return PriorityError(
            f"none of the {rows} rows of {where} can be drawn: give some row a priority above 0, or add rows"
        )
    return EmptyBufferError(f"Cannot sample from an empty storage ({where} have no rows): add rows first")
