"""The write path of a sharded buffer: ask the limiter, choose a shard, send rows there, or to the next one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.buffers.gate import replayable
from ostinato.buffers.limits import RateLimiter
from ostinato.distributed.cluster import ray
from ostinato.distributed.parcel import Parcel
from ostinato.distributed.routing import Rota
from ostinato.distributed.turns import AGAIN
from ostinato.distributed.turnstile import GRACE_S, count_rows

if TYPE_CHECKING:
    from ostinato.distributed.fleet import Fleet
    from ostinato.distributed.turnstile import Turnstile

__all__ = ["Sender"]


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
