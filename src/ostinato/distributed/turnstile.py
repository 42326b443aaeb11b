"""A rate limiter that many processes keep to: it counts in an actor of its own, where calls wait their turn."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato._optional import require
from ostinato.buffers.limits import Flow, RateLimiter, Stock, check_timeout
from ostinato.core import kinds
from ostinato.distributed.cluster import answer, ray
from ostinato.distributed.turns import AGAIN, TURN_S, Again, insist
from ostinato.errors import KindError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Turnstile", "TurnstileHost", "check_wait", "count_rows"]

_WHAT = "the actor of the rate limiter"
_MOST_CALLS = 1 << 16
"""Calls that may wait at once."""
_LOOK_S = 0.02
"""How often rows are counted while a draw waits for the first of them."""
_COUNT_S = 1.0
"""How long to wait for a shard that is counted."""


class _Side(NamedTuple):
    """One of the two sides that wait for each other, as the flow sees it."""

    check: Callable[[int, None], None]
    may: Callable[[int, Stock], bool]
    note: Callable[[int], None]
    why: Callable[[int, Stock], str]
    others: str
    waiting: list[int]
    """Rows of the calls that wait."""


@final
class TurnstileHost:
    """The actor. Calls wait in one thread, as coroutines, so that any number of them may.

    A write counts once it is let through, before it reaches its shard: a client that dies between the two leaves it
    counted, and nobody waits for what will not come. Rows present are asked of the shards, until there are enough to
    begin, and again when a client says that some may be gone.

    Args:
        limiter: the rules.
        shards: the actors to count the rows of, pickled: Ray keeps handles among arguments in its object store, where a
            restart may not find them any more.
    """

    def __init__(self, limiter: RateLimiter, shards: bytes) -> None:
        flow = self._flow = Flow(limiter)
        self._shards: list[Any] = pickle.loads(shards)  # noqa: S301 (Ray's own channel)
        self._rows = 0
        self._begun = False
        self._beginning = asyncio.Lock()
        self._changed = asyncio.Event()
        self._sides = {
            "write": _Side(flow.check_write, flow.may_write, flow.wrote, flow.why_no_write, "readers", []),
            "draw": _Side(flow.check_draw, flow.may_draw, flow.drew, flow.why_no_draw, "writers", []),
        }

    async def let(self, call: str, rows: int, timeout_s: float | None, waited_s: float) -> Again | None:
        """Return once a call may go ahead, and count it; `AGAIN` where its turn is over, and time is left.

        Args:
            call: "write" or "draw".
            rows: how many.
            timeout_s: longest wait of all turns together; None is the limiter's.
            waited_s: how long the call has waited before.

        Raises:
            OptionError: if it never could.
            WaitTimeoutError: naming who waits for what.
        """
        side = self._sides[call]
        side.check(rows, None)
        async with self._beginning:
            if not self._begun:
                await self.begin()  # the first call, or the first one after a restart
        patience_s = self._flow.limiter.timeout_s if timeout_s is None else timeout_s
        left_s = max(0.0, patience_s - waited_s)
        side.waiting.append(rows)
        try:
            if await self._opened(side, rows, min(TURN_S, left_s)):
                side.note(rows)
                self._wake()
                return None
            if left_s > TURN_S:
                return AGAIN
            what = f"a {call} of {rows} row(s) waited {patience_s:g} s for {side.others}: {side.why(rows, self._stock)}"
            writers, readers = (one.waiting for one in self._sides.values())
            raise WaitTimeoutError(self._flow.told(what, self._stock, writers, readers))
        finally:
            side.waiting.remove(rows)

    async def _opened(self, side: _Side, rows: int, seconds: float) -> bool:
        """Wait until so many rows may pass; False if they may not by then."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while True:
            if self._short:
                await self._count()
            if side.may(rows, self._stock):
                return True
            left = until - clock()
            if left <= 0:
                return False
            await self._change(min(left, _LOOK_S) if self._short else left)

    async def back(self, written: int, drawn: int) -> None:
        """Take back what was let through and did not come about."""
        self._flow.wrote(-written)
        self._flow.drew(-drawn)
        self._wake()

    async def look(self) -> None:
        """Count the rows anew: some may be gone."""
        await self._count()
        self._wake()

    async def begin(self) -> None:
        """Begin to count anew, with the rows that there are."""
        await self._count()
        self._flow.begin(self._rows)
        self._begun = True
        self._wake()

    async def counts(self) -> tuple[int, int]:
        """Return rows written and drawn since counts began."""
        return self._flow.written, self._flow.drawn

    @property
    def _stock(self) -> Stock:
        return Stock(self._rows)

    @property
    def _short(self) -> bool:
        return self._rows < self._flow.limiter.min_size_to_sample

    async def _change(self, seconds: float) -> None:
        """Wait until something has changed, at most so long."""
        waiter = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait([waiter], timeout=seconds)
        waiter.cancel()

    def _wake(self) -> None:
        """Let those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _count(self) -> None:
        """Ask the shards for their rows; one that does not answer has none."""
        calls = [asyncio.ensure_future(_future(shard.drawable.remote())) for shard in self._shards]
        done, late = await asyncio.wait(calls, timeout=_COUNT_S)
        for call in late:
            call.cancel()
        self._rows = sum(call.result() for call in done if call.exception() is None)


async def _future(reference: Any) -> int:
    return int(await reference)


@final
class Turnstile:
    """A client's way through: waits, or is told why in vain. May be pickled.

    Args:
        actor: a `TurnstileHost`.
        limiter: its rules.
    """

    def __init__(self, actor: Any, limiter: RateLimiter) -> None:
        self.actor = actor
        self.limiter = limiter

    @classmethod
    def make(cls, limiter: Any, shards: Sequence[Any], capacity: int) -> Turnstile:
        """Start the actor; Ray restarts it if it dies, and it counts anew then.

        Raises:
            KindError: if the limiter is none.
            OptionError: if sampling could never begin.
        """
        if not isinstance(limiter, RateLimiter):
            msg = f"rate_limiter must be an ostinato.RateLimiter or None, got {type(limiter).__name__}"
            raise KindError(msg)
        if limiter.min_size_to_sample > capacity * len(shards):
            msg = (
                f"min_size_to_sample={limiter.min_size_to_sample} rows are never there: {len(shards)} shards hold "
                f"{capacity} each"
            )
            raise OptionError(msg)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": _MOST_CALLS}
        known = require("ray.cloudpickle", "ray").dumps(list(shards))
        return cls(ray().remote(**options)(TurnstileHost).remote(limiter, known), limiter)

    def write(self, rows: int, timeout_s: float | None) -> None:
        """Wait until so many rows may be written."""
        insist(lambda waited_s: self.actor.let.remote("write", rows, timeout_s, waited_s), _WHAT)

    def draw(self, rows: int, timeout_s: float | None) -> None:
        """Wait until so many rows may be drawn."""
        insist(lambda waited_s: self.actor.let.remote("draw", rows, timeout_s, waited_s), _WHAT)

    def back(self, written: int = 0, drawn: int = 0) -> None:
        """Say that what was let through did not come about. Waits for nobody."""
        self.actor.back.options(max_task_retries=0).remote(written, drawn)

    def look(self) -> None:
        """Say that rows may be gone. Waits for nobody."""
        self.actor.look.options(max_task_retries=0).remote()

    def begin(self) -> None:
        """Let counts begin anew, with the rows that there are."""
        answer(self.actor.begin.remote(), _WHAT)


def check_wait(timeout_s: float | None, *, waits: bool) -> None:
    """Refuse a timeout that is none, or that no call would wait for.

    Raises:
        OptionError: naming it.
    """
    if timeout_s is None:
        return
    check_timeout(timeout_s)
    if not waits:
        msg = f"timeout_s={timeout_s} has no effect: no call waits for others without rate_limiter; leave it out"
        raise OptionError(msg)


def count_rows(data: Any) -> int:
    """Return how many rows a batch for `extend` has.

    Raises:
        KindError: if that cannot be told.
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
