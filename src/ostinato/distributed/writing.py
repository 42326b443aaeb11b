"""The write path of a sharded buffer: ask the limiter, choose a shard, send rows there, or to the next one."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers.priority_updates import PriorityUpdate, parse_update, priorities_of_batch, read_integers
from ostinato.buffers.rate_limit import RateLimiter, replayable
from ostinato.distributed.rate_limit_actor import GRACE_S, count_rows
from ostinato.distributed.ray_client import AGAIN, ray
from ostinato.distributed.routing import Rota, split_index
from ostinato.distributed.serialization import Parcel
from ostinato.errors import KindError, SlotError
from ostinato.samplers.priorities import raise_invalid, reduce_items

if TYPE_CHECKING:
    from ostinato.distributed.rate_limit_actor import Turnstile
    from ostinato.distributed.shard_client import Fleet

__all__ = ["About", "Sender", "one_shard", "route", "unpack_batch", "unpack_shares"]


class About(NamedTuple):
    """What a handle knows of the shards, which are all alike."""

    batch_size: int | None
    prioritized: bool
    priority_key: str | tuple[str, ...]
    reduction: str
    capacity: int
    """Rows of a shard."""
    counting: bool
    """Whether draws use rows up."""
    waits: bool
    """Whether shards hold their writers up: a queue does."""

    def reduce(self, items: Tensor) -> Tensor:
        """Reduce several priorities of each item, `[n, *shape]`, to one, float64 `[n]`."""
        return reduce_items(items, self.reduction)


class _Shards(NamedTuple):
    """How an index names rows of shards: one number for shard and slot."""

    ndim: int = 1
    num_envs: int = 1
    device: torch.device = torch.device("cpu")


def unpack_shares(about: About, index: Any, priority: Any, generation: Any) -> PriorityUpdate | None:
    """Parse the arguments of `update_priority`; None, with a warning, if the shards keep no priorities.

    Raises:
        UsageError: if there are no priorities.
        PriorityError: for priorities that are negative or not finite.
    """
    if not _keeps(about):
        return None
    return _checked(parse_update(index, priority, generation, _Shards(), about.reduce))


def unpack_batch(about: About, data: Any) -> PriorityUpdate | None:
    """Parse the argument of `update_tensordict_priority`; see `unpack_shares`."""
    if not _keeps(about):
        return None
    found = priorities_of_batch(data, about.priority_key, about.reduce, 1)
    return _checked(parse_update(*found, _Shards(), about.reduce))


def _keeps(about: About) -> bool:
    if not about.prioritized:
        msg = "update_priority() has no effect: the shards' sampler has no priorities; use PrioritizedSampler"
        warnings.warn(msg, UserWarning, stacklevel=4)
    return about.prioritized


def _checked(update: PriorityUpdate) -> PriorityUpdate:
    """Check priorities before they are divided among shards, so that an error names the positions given."""
    priorities = update.priorities
    if not bool(((priorities >= 0) & (priorities < torch.inf)).all()):
        raise_invalid(priorities)
    return update


def route(update: PriorityUpdate, shards: int, capacity: int) -> dict[int, tuple[Tensor, Tensor, Tensor | None]]:
    """Return slots, priorities and generations for each shard; rows that were not kept (-1) are left out.

    Raises:
        SlotError: if an index names no shard, or no slot of one.
    """
    index, priorities, generations = update
    owners, slots = split_index(index)
    _check_owners(owners, index, shards)
    bad = slots >= capacity
    if bool(bad.any()):
        first = int(index[bad][0])
        msg = f"index {first} is of no row: it names slot {int(slots[bad][0])} of a shard that holds {capacity}"
        raise SlotError(msg)
    parts = {}
    for shard in sorted(set(owners.tolist())):
        at = (owners == shard).nonzero().flatten()
        if shard >= 0:
            parts[shard] = slots[at], priorities[at], None if generations is None else generations[at]
    return parts


def one_shard(index: Any, shards: int) -> tuple[int, Any]:
    """Return the shard that an index is of, and the slots there: a number for a number.

    Raises:
        SlotError: if it names no shard, or several.
    """
    if not isinstance(index, (int, Tensor, np.ndarray, np.integer, list)):
        msg = f"rows of shards are read by what extend() or sample() gave, got {type(index).__name__}: {index!r}"
        raise KindError(msg)
    where = read_integers("index", index).to("cpu", torch.int64)
    owners, slots = split_index(where)
    _check_owners(owners, where, shards)
    found = sorted(set(owners.reshape(-1).tolist()))
    if len(found) != 1 or found[0] < 0:
        msg = f"an index must be of rows of one shard, got rows of {found}: read them shard by shard"
        raise SlotError(msg)
    return found[0], int(slots) if where.ndim == 0 else slots


def _check_owners(owners: Tensor, index: Tensor, shards: int) -> None:
    bad = (owners >= shards) | (index < -1)
    if bool(bad.any()):
        first = int(index[bad].reshape(-1)[0])
        msg = f"index {first} is of no shard: there are {shards}, and an index is what extend() or sample() gave"
        raise SlotError(msg)


class _Write(NamedTuple):
    """A call of a shard's buffer, and the one time that it has."""

    name: str
    parcel: Parcel
    kwargs: dict[str, Any]
    patience_s: float
    began: float

    @property
    def waited_s(self) -> float:
        """How long it has waited, for whomever."""
        return time.monotonic() - self.began


@final
class Sender:
    """Writes for one handle.

    Args:
        fleet: the shards.
        turnstile: the rate limiter; None lets everything through.
        waits: whether writes wait in the shards, for room.
        sticky: write to one shard, else to one after the other.
        home: where to begin; None takes the place after the handle before.
    """

    def __init__(
        self, fleet: Fleet, turnstile: Turnstile | None, *, waits: bool, sticky: bool, home: int | None
    ) -> None:
        self.sticky = sticky
        self.home = home
        self._fleet = fleet
        self._turnstile = turnstile
        self._waits = waits
        self._rota: Rota | None = None

    def put(self, name: str, data: Any, timeout_s: float | None, **kwargs: Any) -> tuple[int, Any]:
        """Call a method of a shard's buffer that writes `data`; return the shard, and what it answered.

        Raises:
            LostBufferError: if no shard is there.
            WaitTimeoutError: if readers did not come in time; nothing is written.
        """
        if name == "extend":
            data = replayable(data)
        rules = RateLimiter() if self._turnstile is None else self._turnstile.limiter
        patience_s = rules.timeout_s if timeout_s is None else timeout_s
        write = _Write(name, Parcel(data), kwargs, patience_s, time.monotonic())
        if self._turnstile is None:
            return self._send(write)
        rows = count_rows(data) if name == "extend" else 1
        if rows == 0:
            return self._send(write)  # nothing to wait for: the shard checks the form
        self._turnstile.write(rows, timeout_s)
        try:
            return self._send(write)
        except Exception:
            self._turnstile.back(written=rows)
            raise

    def _send(self, write: _Write) -> tuple[int, Any]:
        rota = self._rota
        if rota is None:
            rota = self._rota = Rota(len(self._fleet), self._seat(), sticky=self.sticky)
        while True:
            present = self._fleet.present()  # raises in the end, if there is none
            for i in rota.order(self._fleet.missing):
                if i not in present:
                    continue
                found = self._try(i, write)
                if found is not None:
                    return i, found[0]

    def _try(self, shard: int, write: _Write) -> tuple[Any] | None:
        """Write to one shard, in as many turns as it takes; None if it is missing."""
        call = self._fleet.actors[shard].write.options(concurrency_group="write")
        timeout_s = write.patience_s if self._waits else None
        while True:
            asked = call.remote(write.waited_s, timeout_s, write.name, write.parcel, write.kwargs)
            found = self._hear(shard, asked, write)
            if found is None or found[0] is not AGAIN:
                return found

    def _hear(self, shard: int, asked: Any, write: _Write) -> tuple[Any] | None:
        """Return what a shard answered; None if it is missing.

        One that answers to nothing when the time is up is stopped, or its machine is. One that does answer has much to
        do: it is waited for, or the rows would be written twice.
        """
        seconds = min(self._fleet.patience_s, max(0.0, write.patience_s - write.waited_s))
        while not ray().wait([asked], timeout=seconds)[0]:
            sign = self._fleet.actors[shard].drawable.remote()
            if not ray().wait([asked, sign], timeout=GRACE_S)[0]:
                return self._fleet.wait(shard, asked, 0.0)
            seconds = GRACE_S
        return self._fleet.wait(shard, asked, None)

    def _seat(self) -> int:
        """Return where to write first: handles take their places one after the other."""
        if self.home is not None:
            return self.home
        seats = self._fleet.ask("seat", {self._fleet.present()[0]: ()})
        return next(iter(seats.values()), 0)
