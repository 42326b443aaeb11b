"""The write path of a sharded buffer: ask the limiter, choose a shard, send rows there, or to the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ostinato.distributed.parcel import Parcel
from ostinato.distributed.routing import Rota
from ostinato.distributed.turnstile import count_rows

if TYPE_CHECKING:
    from ostinato.distributed.fleet import Fleet
    from ostinato.distributed.turnstile import Turnstile

__all__ = ["Sender"]


@final
class Sender:
    """Writes for one handle.

    Args:
        fleet: the shards.
        turnstile: the rate limiter; None lets everything through.
        sticky: write to one shard, else to one after the other.
        home: where to begin; None takes the place after the handle before.
    """

    def __init__(self, fleet: Fleet, turnstile: Turnstile | None, *, sticky: bool, home: int | None) -> None:
        self.sticky = sticky
        self.home = home
        self._fleet = fleet
        self._turnstile = turnstile
        self._rota: Rota | None = None

    def put(self, name: str, data: Any, timeout_s: float | None, **kwargs: Any) -> tuple[int, Any]:
        """Call a method of a shard's buffer that writes `data`; return the shard, and what it answered.

        Raises:
            LostBufferError: if no shard is there.
            WaitTimeoutError: if readers did not come in time; nothing is written.
        """
        if self._turnstile is None:
            waits = {} if timeout_s is None else {"timeout_s": timeout_s}
            return self._send(name, data, {**kwargs, **waits})
        data = data if hasattr(data, "__len__") else list(data)  # read twice
        rows = count_rows(data) if name == "extend" else 1
        self._turnstile.write(rows, timeout_s)
        try:
            return self._send(name, data, kwargs)
        except Exception:
            self._turnstile.back(written=rows)
            raise

    def _send(self, name: str, data: Any, kwargs: dict[str, Any]) -> tuple[int, Any]:
        rota = self._rota
        if rota is None:
            rota = self._rota = Rota(len(self._fleet), self._seat(), sticky=self.sticky)
        parcel = Parcel(data)
        while True:
            present = self._fleet.present()  # raises in the end, if there is none
            for i in rota.order(self._fleet.missing):
                if i not in present:
                    continue
                call = self._fleet.actors[i].call.options(concurrency_group="write")
                found = self._fleet.wait(i, call.remote(name, parcel, **kwargs), None)
                if found is not None:
                    return i, found[0]

    def _seat(self) -> int:
        """Return where to write first: handles take their places one after the other."""
        if self.home is not None:
            return self.home
        seats = self._fleet.ask("seat", {self._fleet.present()[0]: ()})
        return next(iter(seats.values()), 0)
