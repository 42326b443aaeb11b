"""Writing to shards: rows to one shard each, and priorities to the shards that hold their rows."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers.rate_limit import RateLimiter, replayable
from ostinato.buffers.updates import (
    PriorityUpdate,
    parse_update,
    priorities_of_batch,
    read_generations,
    rows_by_owner,
    rows_of_sample,
)
from ostinato.core import kinds
from ostinato.core.index import Slots, read_integers, read_slots
from ostinato.distributed.deadlines import GRACE_S, Deadline
from ostinato.distributed.ray_client import RETRY, finishes, probe, ray
from ostinato.distributed.routing import WriteOrder, split_index
from ostinato.distributed.serialization import Serialized
from ostinato.errors import KindError, SlotError
from ostinato.samplers.base import check_not_negative
from ostinato.samplers.priorities import raise_invalid, reduce_items

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.distributed.rate_limits import RateLimitClient
    from ostinato.distributed.shard_client import ShardClient

__all__ = [
    "ShardInfo",
    "ShardWriter",
    "check_owners",
    "count_rows",
    "delete_rows",
    "one_shard",
    "parse_batch_update",
    "parse_shard_update",
    "split_update",
]


class ShardInfo(NamedTuple):
    """Properties of the shards, which are the same for all."""

    batch_size: int | None
    prioritized: bool
    priority_key: str | tuple[str, ...]
    reduction: str
    capacity: int
    """Rows of one shard."""
    counting: bool
    """Whether draws consume rows."""
    waits: bool
    """Whether writes may wait for room in the shard, as with a queue."""
    least_index: int = 0
    """Smallest index of a row: 0, or -1 where that marks a row that was not kept."""
    steps: int | None = 1
    """Steps of an item, for which priorities may be given one by one: see `steps_of`."""

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> ShardInfo:
        """Return the properties that `ShardActor.describe` returned."""
        return cls(*(described[name] for name in cls._fields))

    def reduce(self, items: Tensor) -> Tensor:
        """Reduce several priorities of each item, `[n, *shape]`, to one, float64 `[n]`."""
        return reduce_items(items, self.reduction)


# -- priorities -------------------------------------------------------------------------------------------------------


def parse_shard_update(shards: ShardInfo, index: Any, priority: Any, generation: Any) -> PriorityUpdate | None:
    """Parse the arguments of `update_priority`; None, with a warning, if the shards have no priorities.

    Raises:
        UsageError: There are no priorities.
        PriorityError: Priorities are negative or not finite.
        SlotError: An index is negative.
    """
    if not _has_priorities(shards):
        return None
    return _checked(parse_update(index, priority, generation, Slots(), shards.reduce, lambda: shards.steps), shards)


def parse_batch_update(shards: ShardInfo, data: Any) -> PriorityUpdate | None:
    """Parse the argument of `update_tensordict_priority`; see `parse_shard_update`."""
    if not _has_priorities(shards):
        return None
    found = priorities_of_batch(data, shards.priority_key, shards.reduce, 1)
    return _checked(parse_update(*found, Slots(), shards.reduce, lambda: shards.steps), shards)


def _has_priorities(shards: ShardInfo) -> bool:
    if not shards.prioritized:
        msg = "update_priority() has no effect: the shards' sampler has no priorities; use PrioritizedSampler"
        warnings.warn(msg, UserWarning, stacklevel=6)
    return shards.prioritized


def _checked(update: PriorityUpdate, shards: ShardInfo) -> PriorityUpdate:
    """Check an update before it is divided among shards, so that an error names the positions given."""
    check_not_negative(update.slots, least=shards.least_index)
    priorities = update.priorities
    if not bool(((priorities >= 0) & (priorities < torch.inf)).all()):
        raise_invalid(priorities)
    return update


def split_update(update: PriorityUpdate, shards: int, capacity: int) -> dict[int, tuple[Tensor, Tensor, Tensor | None]]:
    """Return slots, priorities and generations for each shard; rows that were not kept (-1) are left out.

    Raises:
        SlotError: An index names no shard, or no slot of its shard.
    """
    index, priorities, generations = update
    owners, slots = split_index(index)
    check_owners(owners, index, shards)
    bad = slots >= capacity
    if bool(bad.any()):
        first = int(index[bad][0])
        msg = f"index {first} is of no row: it names slot {int(slots[bad][0])} of a shard that holds {capacity}"
        raise SlotError(msg)
    parts = {}
    for shard, at in rows_by_owner(owners).items():
        parts[shard] = slots[at], priorities[at], None if generations is None else generations[at]
    return parts


def delete_rows(shards: ShardClient, info: ShardInfo, index: Any, generation: Any) -> Tensor:
    """Delete rows, each in its shard; see `ShardedReplayBuffer.delete`.

    Args:
        shards: The shards.
        info: Properties of the shards.
        index: Rows, or a sample.
        generation: Their generations.
    """
    index, generation = rows_of_sample(index, generation)
    flat, batch = read_slots(index, Slots())
    check_not_negative(flat, least=info.least_index)
    generations = None if generation is None else read_generations(generation, flat)
    positions = torch.arange(flat.shape[0], device="cpu")
    parts = split_update(PriorityUpdate(flat, positions, generations), len(shards), info.capacity)
    present = shards.present()
    calls = {i: ("delete", Serialized(slots), Serialized(own)) for i, (slots, _, own) in parts.items() if i in present}
    deleted = torch.zeros(flat.shape[0], dtype=torch.bool, device="cpu")
    for i, found in shards.call("call", calls, "update").items():
        deleted[parts[i][1]] = found
    return deleted.reshape(batch)


def one_shard(index: Any, shards: int) -> tuple[int, Any]:
    """Return the shard of an index, and the slots there: a number for a number.

    Raises:
        SlotError: The index names no shard, or several.
    """
    if not isinstance(index, (int, Tensor, np.ndarray, np.integer, list)):
        msg = f"rows of shards are read by what extend() or sample() gave, got {type(index).__name__}: {index!r}"
        raise KindError(msg)
    where = read_integers("index", index).to("cpu", torch.int64)
    owners, slots = split_index(where)
    check_owners(owners, where, shards)
    found = sorted(set(owners.reshape(-1).tolist()))
    if len(found) != 1 or found[0] < 0:
        msg = f"an index must be of rows of one shard, got rows of {found}: read them shard by shard"
        raise SlotError(msg)
    return found[0], int(slots) if where.ndim == 0 else slots


def check_owners(owners: Tensor, index: Tensor, shards: int) -> None:
    """Raise `SlotError` if an index names a shard that does not exist; -1 names no row."""
    bad = (owners >= shards) | (index < -1)
    if bool(bad.any()):
        first = int(index[bad].reshape(-1)[0])
        msg = f"index {first} is of no shard: there are {shards}, and an index is what extend() or sample() gave"
        raise SlotError(msg)


# -- rows -------------------------------------------------------------------------------------------------------------


def count_rows(data: Any) -> int:
    """Return the number of rows of a batch for `extend`.

    Raises:
        KindError: The data has no leading dimension.
    """
    if isinstance(data, list):
        return len(data)
    if kinds.is_tensor_collection(data) and data.batch_size:
        return int(data.batch_size[0])
    opened = kinds.open_node(data, 1)
    if opened is not None and opened[1]:
        return count_rows(opened[1][0])
    shape = getattr(data, "shape", ())
    if not shape:
        msg = f"a rate_limiter counts rows of tensors, arrays or trees of these, got {type(data).__name__}"
        raise KindError(msg)
    return int(shape[0])


class _Write(NamedTuple):
    """A write to a shard."""

    name: str
    data: Serialized
    kwargs: dict[str, Any]
    limit_s: float | None
    """How long it may wait in the shard; None if shards never wait."""
    deadline: Deadline


@final
class ShardWriter:
    """Writes rows for one handle.

    Args:
        shards: The shards.
        limiter: The rate limiter; None for none.
        waits: Whether writes may wait for room in the shards.
        sticky: Write to one shard; else to one after the other.
        home: The first shard; None takes the one after that of the previous handle.
    """

    def __init__(
        self, shards: ShardClient, limiter: RateLimitClient | None, *, waits: bool, sticky: bool, home: int | None
    ) -> None:
        self._shards = shards
        self._limiter = limiter
        self._waits = waits
        self._sticky = sticky
        self._home = home
        self._order: WriteOrder | None = None

    def write(self, name: str, data: Any, timeout_s: float | None, **kwargs: Any) -> tuple[int, Any]:
        """Call a method of a shard's buffer that writes `data`; return the shard and the result.

        Raises:
            LostBufferError: No shard answers.
            WaitTimeoutError: Too few rows were read in time; nothing is written.
        """
        limit_s = RateLimiter().timeout_s if self._limiter is None else self._limiter.limiter.timeout_s
        deadline = Deadline.of_call(timeout_s, self._shards.call_timeout_s, share=0.5)
        if self._waits or self._limiter is not None:
            deadline = Deadline.of_wait(timeout_s, limit_s, self._shards.call_timeout_s, share=0.5)
        if name == "extend":
            data = replayable(data)
        rows = count_rows(data) if name == "extend" and self._limiter is not None else 1
        write = _Write(name, Serialized(data), kwargs, deadline.wait_s if self._waits else None, deadline)
        with self._shards.within(name, deadline):
            if self._limiter is None or rows == 0:  # nothing to wait for: the shard checks the schema
                return self._send(write)
            self._limiter.acquire("write", rows, timeout_s)
            try:
                return self._send(write)
            except Exception:
                self._limiter.give_back(written=rows)
                raise

    def can_write(self, rows: int) -> bool:
        """Return whether a write of so many rows would go ahead at once.

        Raises:
            LostBufferError: No shard answers.
            WaitTimeoutError: The limiter's actor does not answer.
        """
        present = self._shards.present()
        if self._limiter is not None and not self._limiter.can("write", rows, self._shards.deadline("can_insert")[1]):
            return False
        if not self._waits:
            self._shards.check_gone()
            return True
        shard = next(i for i in self._routes().peek(self._shards.missing) if i in present)
        return all(self._shards.call("call", {shard: ("can_insert", rows)}, "update").values())

    def _routes(self) -> WriteOrder:
        if self._order is None:
            self._order = WriteOrder(len(self._shards), self._first_shard(), sticky=self._sticky)
        return self._order

    def _send(self, write: _Write) -> tuple[int, Any]:
        order = self._routes()
        while True:
            present = self._shards.present()  # raises if no shard returns in time
            for i in order.next(self._shards.missing):
                if i not in present:
                    continue
                found = self._send_to(i, write)
                if found is not None:
                    return i, found[0]

    def _send_to(self, shard: int, write: _Write) -> tuple[Any] | None:
        """Write to one shard, in as many polls as needed; None if it is missing."""
        method = self._shards.actors[shard].write.options(concurrency_group="write")
        while True:
            call = method.remote(write.deadline.elapsed_s, write.limit_s, write.name, write.data, write.kwargs)
            try:
                found = self._result(shard, call, write)
            finally:
                self._shards.changes.add([shard])
            if found is None or found[0] is not RETRY:
                return found

    def _result(self, shard: int, call: Any, write: _Write) -> tuple[Any] | None:
        """Return the result of a write; None if the shard is missing.

        A shard that answers no other call either when the time is up is stopped or cannot be reached. One that does
        answer is busy: its result is waited for, or the rows would be written twice.

        Raises:
            NoAnswerError: The call's time is up; the shard may still write the rows.
        """
        deadline, heard = write.deadline, None
        grace_s = min(GRACE_S, deadline.usual_s / 2)
        seconds = min(self._shards.timeout_s, deadline.usual_s - grace_s)
        if deadline.waits:
            seconds = min(seconds, deadline.wait_left_s)
        while not finishes(call, min(seconds, deadline.left_s)):
            asked, left_s = probe(self._shards.actors[shard]), deadline.left_s
            answered = ray().wait([call, asked], timeout=min(grace_s, left_s))[0]
            if not answered and left_s >= grace_s:
                return self._shards.result(shard, call, 0.0, deadline)
            if not answered or deadline.left_s <= 0:
                raise deadline.error(self._shards.callee(shard), write.name, heard)
            seconds, heard = grace_s, time.monotonic()
        return self._shards.result(shard, call, max(1.0, deadline.left_s), deadline)

    def _first_shard(self) -> int:
        if self._home is not None:
            return self._home
        found = self._shards.call("next_home", {self._shards.present()[0]: ()})
        return next(iter(found.values()), 0)
