"""Writing rows to shards, each to one of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.buffers.rate_limit import RateLimiter, replayable
from ostinato.core import kinds
from ostinato.distributed.deadlines import GRACE_S, Deadline
from ostinato.distributed.ray_client import RETRY, finishes, probe, ray
from ostinato.distributed.routing import write_order
from ostinato.distributed.serialization import Serialized
from ostinato.errors import KindError

if TYPE_CHECKING:
    from ostinato.distributed.rate_limits import RateLimitClient
    from ostinato.distributed.shard_client import ShardClient


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
        self._first = home
        """Shard to try first for the next write; None if it is not known yet."""

    def write(self, name: str, data: Any, timeout_s: float | None, **kwargs: Any) -> tuple[int, Any]:
        """Call a method of a shard's buffer that writes `data`; return the shard and the result.

        Raises:
            LostBufferError: No shard answers.
            WaitTimeoutError: Too few rows were read in time; nothing is written.
        """
        limit_s = RateLimiter.timeout_s if self._limiter is None else self._limiter.limiter.timeout_s
        default_s = limit_s if self._waits or self._limiter is not None else None
        deadline = Deadline.of_wait(timeout_s, default_s, self._shards.call_timeout_s, share=0.5)
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
        shard = next(i for i in self._order() if i in present)
        return all(self._shards.call("call", {shard: ("can_insert", rows)}, "update").values())

    def _order(self) -> list[int]:
        """Return the shards to try for the next write."""
        if self._first is None:
            found = self._shards.call("next_home", {self._shards.present()[0]: ()})
            self._first = next(iter(found.values()), 0)
        return write_order(len(self._shards), self._first, self._shards.missing)

    def _send(self, write: _Write) -> tuple[int, Any]:
        while True:
            present = self._shards.present()  # raises if no shard returns in time
            order = self._order()
            if not self._sticky:
                self._first = (self._first or 0) + 1
            for i in order:
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
