"""The actor of each `ShardedReplayBuffer` that holds what all its handles and shards share."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, final

from ostinato._optional import require
from ostinato.distributed.deadlines import Callee
from ostinato.distributed.rate_limits import RateLimits
from ostinato.distributed.ray_client import START_TIMEOUT_S, Retry, ray, result_of, where
from ostinato.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.distributed.rate_limits import Kind

__all__ = ["FleetActor", "start_fleet_actor", "wait_for_fleet_actor"]

_NAME = "the actor of the fleet"
_MAX_CALLS = 1 << 16
"""Calls that may wait at once."""


@final
class FleetActor:
    """The actor. Its methods are those of its parts; calls wait as coroutines of one thread.

    If it dies, Ray restarts it with the same arguments, and the parts rebuild their state from the shards.

    Args:
        shards: The actors of the shards, pickled: Ray keeps handles among arguments in its object store, where a
            restarted actor may not find them.
        limiter: The rules of the rate limiter; None for none.
    """

    def __init__(self, shards: bytes, limiter: RateLimiter | None) -> None:
        actors: list[Any] = pickle.loads(shards)  # noqa: S301 (Ray's channel executes code anyway)
        self._limits = None if limiter is None else RateLimits(limiter, actors)

    async def ready(self) -> dict[str, Any]:
        """Return where the actor is: it has started."""
        return where()

    # -- rate limiter -------------------------------------------------------------------------------------------------

    @property
    def _limiter(self) -> RateLimits:
        if self._limits is None:
            msg = "this fleet has no rate limiter: give rate_limiter to the constructor of ShardedReplayBuffer"
            raise UsageError(msg)
        return self._limits

    async def acquire(self, kind: Kind, rows: int, timeout_s: float | None, waited_s: float) -> Retry | None:
        """Do `RateLimits.acquire`."""
        return await self._limiter.acquire(kind, rows, timeout_s, waited_s)

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


def start_fleet_actor(shards: Sequence[Any], limiter: RateLimiter | None) -> Any:
    """Start the actor of a fleet; does not wait until it is ready.

    Args:
        shards: The actors of the shards, which need not be ready.
        limiter: The rules of the rate limiter; None for none.
    """
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": _MAX_CALLS}
    pickled = require("ray.cloudpickle", "ray").dumps(list(shards))
    return ray().remote(**options)(FleetActor).remote(pickled, limiter)


def wait_for_fleet_actor(actor: Any) -> Callee:
    """Wait until the actor is ready; return where it is.

    Raises:
        UsageError: It does not start.
    """
    return Callee(_NAME).at(result_of(actor.ready.remote(), _NAME, START_TIMEOUT_S))
