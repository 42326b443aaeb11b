"""The actor of each `ShardedReplayBuffer` that holds what all its handles and shards share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ostinato.distributed.fleet_schema import FleetSchema
from ostinato.distributed.rate_limits import RateLimits
from ostinato.distributed.ray_client import where
from ostinato.distributed.save_failures import FailureBroadcast
from ostinato.distributed.serialization import from_arguments
from ostinato.errors import UsageError

if TYPE_CHECKING:
    from ostinato.distributed.fleet import Fleet
    from ostinato.distributed.rate_limits import Kind
    from ostinato.distributed.ray_client import Retry
    from ostinato.distributed.save_failures import SaveFailure

__all__ = ["FleetActor"]


@final
class FleetActor:
    """The actor. Its methods are those of its parts; calls wait as coroutines of one thread.

    If it dies, Ray restarts it with the same arguments, and the parts rebuild their state from the shards.

    Args:
        *fleet: The `Fleet`, as `to_arguments` returns it.
    """

    def __init__(self, *fleet: bytes) -> None:
        self._fleet: Fleet = from_arguments(fleet)
        limiter = self._fleet.rate_limiter
        self._limits = None if limiter is None else RateLimits(limiter, self._fleet.shards)
        self._schema = FleetSchema(self._fleet.shards)
        self._failures = FailureBroadcast(self._fleet.shards)

    async def ready(self) -> dict[str, Any]:
        """Return where the actor is: it has started."""
        return where()

    async def fleet(self) -> Fleet:
        """Return the fleet, for a handle that attaches."""
        return self._fleet

    # -- rate limiter -------------------------------------------------------------------------------------------------

    @property
    def _limiter(self) -> RateLimits:
        if self._limits is None:
            msg = "this fleet has no rate limiter: give rate_limiter to the constructor of ShardedReplayBuffer"
            raise UsageError(msg)
        return self._limits

    async def acquire(
        self,
        kind: Kind,
        rows: int,
        timeout_s: float | None,
        waited_s: float,
        min_rows: int | None = None,
    ) -> int | Retry:
        """Do `RateLimits.acquire`."""
        return await self._limiter.acquire(kind, rows, timeout_s, waited_s, min_rows)

    async def can(self, kind: Kind, rows: int) -> bool:
        """Do `RateLimits.can`."""
        return await self._limiter.can(kind, rows)

    async def give_back(self, written: int, drawn: int) -> None:
        """Do `RateLimits.give_back`."""
        await self._limiter.give_back(written, drawn)

    async def recount(self) -> None:
        """Do `RateLimits.recount`."""
        await self._limiter.recount()

    async def begin(self) -> None:
        """Do `RateLimits.begin`."""
        await self._limiter.begin()

    async def totals(self) -> tuple[int, int]:
        """Do `RateLimits.totals`."""
        return await self._limiter.totals()

    async def num_counts(self) -> int:
        """Do `RateLimits.num_counts`."""
        return await self._limiter.num_counts()

    async def limits(self) -> dict[str, Any] | None:
        """Do `RateLimits.state`; None without a limiter."""
        return None if self._limits is None else await self._limits.state()

    async def restore_limits(self, state: dict[str, Any] | None) -> str | None:
        """Do `RateLimits.restore`."""
        return await self._limiter.restore(state)

    # -- schema -------------------------------------------------------------------------------------------------------

    async def schema(self) -> bytes | None:
        """Do `FleetSchema.current`."""
        return await self._schema.current()

    async def claim_schema(self, shard: int, schema: bytes) -> bytes:
        """Do `FleetSchema.claim`."""
        return await self._schema.claim(shard, schema)

    async def free_schema(self) -> bool:
        """Do `FleetSchema.free`."""
        return await self._schema.free()

    # -- failed checkpoints -------------------------------------------------------------------------------------------

    async def report_save(self, shard: int, failure: SaveFailure | None) -> None:
        """Do `FailureBroadcast.report`."""
        await self._failures.report(shard, failure)
