"""A rate limiter that many processes keep to: it counts in an actor of its own, where calls wait their turn."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato._optional import require
from ostinato.buffers.rate_limit import Flow, RateLimiter, Stock
from ostinato.core import kinds
from ostinato.distributed.ray_client import AGAIN, START_S, TURN_S, Again, answer, brief, ray
from ostinato.errors import KindError, LostBufferError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.distributed.writing import About

__all__ = ["Bell", "Tally", "Turnstile", "TurnstileHost", "count_rows"]

_PACE_S = 0.02
"""From one count of the rows to the next."""
_COUNT_S = 1.0
"""How long a count waits for a shard that answered the one before."""


@final
class Bell:
    """Wakes those who wait for something to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Let those who wait look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def heard(self, seconds: float | None) -> None:
        """Wait until it rings, at most so long."""
        waiter = asyncio.ensure_future(self._event.wait())
        await asyncio.wait([waiter], timeout=seconds)
        waiter.cancel()


@final
class Tally:
    """Rows that can be drawn in all shards: one task counts them at a fixed pace, while somebody needs to know.

    A shard that does not answer in time has no rows until it does: its call stays open, and no later count waits for
    it.

    Args:
        shards: actors.
        counting: whether draws use rows up.
        needed: whether to go on counting.
        changed: called after each count.
    """

    def __init__(
        self, shards: Sequence[Any], needed: Callable[[], bool], changed: Callable[[], None], *, counting: bool
    ) -> None:
        self.rows = 0
        self._shards = list(shards)
        self._needed, self._changed, self._counting = needed, changed, counting
        self._open: dict[int, asyncio.Future[int]] = {}
        self._written = 0  # rows let through since the last count began
        self._drawn = 0
        self._underway = 0  # rows of the draws of one pace before that: a shard may not have heard of them yet
        self.done = 0  # counts; so are these:
        self._wanted = self._begun = 0
        self._task: asyncio.Future[None] | None = None
        self._counted = Bell()

    @property
    def least(self) -> int:
        """Rows that are there whatever was drawn since they were counted."""
        return max(0, self.rows - self._drawn - self._underway) if self._counting else self.rows

    @property
    def most(self) -> int:
        """Rows that are there if all that was let through since they were counted was written."""
        return self.rows + self._written

    def wrote(self, rows: int) -> None:
        """Note rows let through."""
        self._written += rows

    def drew(self, rows: int) -> None:
        """Note rows let through."""
        self._drawn += rows

    def want(self) -> int:
        """Ask for a count that knows of all that has come about by now; return its number. Waits for nobody."""
        self._wanted = self._begun + (2 if self._counting and self._drawn else 1)
        if self._task is None:
            self._task = asyncio.ensure_future(self._keep_counting())
        return self._wanted

    async def reach(self, number: int, seconds: float | None = None) -> None:
        """Wait for a count, at most so long."""
        clock = asyncio.get_running_loop().time
        until = None if seconds is None else clock() + seconds
        while self.done < number and (until is None or clock() < until):
            await self._counted.heard(None if until is None else until - clock())

    async def _keep_counting(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while self._begun < self._wanted or self._needed():
                again = clock() + _PACE_S
                await self._count()
                self._counted.ring()
                self._changed()
                await asyncio.sleep(max(0.0, again - clock()))
        finally:
            self._task = None

    async def _count(self) -> None:
        self._begun += 1
        written, drawn = self._written, self._drawn  # what comes in between is on top of either count
        asked = [i for i in range(len(self._shards)) if i not in self._open]
        self._open |= {i: asyncio.ensure_future(_drawable(self._shards[i])) for i in asked}
        if asked:
            await asyncio.wait([self._open[i] for i in asked], timeout=_COUNT_S)
        answered = [i for i, call in self._open.items() if call.done()]
        self.rows = sum(self._open.pop(i).result() for i in answered)
        self._written, self._drawn, self._underway = self._written - written, self._drawn - drawn, drawn
        self.done = self._begun


async def _drawable(shard: Any) -> int:
    try:
        return int(await shard.drawable.remote())
    except Exception:  # noqa: BLE001 (one that cannot say has none)
        return 0


_WHAT = "the actor of the rate limiter"
GRACE_S = 5.0
"""How much longer than its time a call may take before who was asked is held to be dead or stopped."""
_MOST_CALLS = 1 << 16
"""Calls that may wait at once."""
_LAST_LOOK_S = 0.25
"""How long a call whose time is up waits for the count that it has asked for."""


class _Side(NamedTuple):
    """One of the two sides that wait for each other, as the flow sees it."""

    check: Callable[[int, None], None]
    may: Callable[[int, Stock], bool]
    note: Callable[[int], None]
    why: Callable[[int, Stock], str]
    stock: Callable[[], Stock]
    others: str
    waiting: list[int]
    """Rows of the calls that wait."""
    bell: Bell


@final
class TurnstileHost:
    """The actor. Calls wait in one thread, as coroutines, so that any number of them may.

    A write counts once it is let through, before it reaches its shard: a client that dies between the two leaves it
    counted, and nobody waits for what will not come. Rows are counted in the shards until there are enough to begin,
    where draws use them up again whenever there may be too few, and when a client says that some may be gone.

    Args:
        limiter: the rules.
        shards: the actors to count the rows of, pickled: Ray keeps handles among arguments in its object store, where a
            restart may not find them any more.
        counting: whether draws use rows up.
    """

    def __init__(self, limiter: RateLimiter, shards: bytes, *, counting: bool) -> None:
        flow = self._flow = Flow(limiter)
        known: list[Any] = pickle.loads(shards)  # noqa: S301 (Ray's own channel)
        tally = self._tally = Tally(known, self._needed, self._recounted, counting=counting)
        self._begun = False
        self._beginning = asyncio.Lock()
        room, left = lambda: Stock(tally.most), lambda: Stock(tally.least)
        write = flow.check_write, flow.may_write, flow.wrote, flow.why_no_write, room, "readers"
        draw = flow.check_draw, flow.may_draw, flow.drew, flow.why_no_draw, left, "writers"
        self._sides = {"write": _Side(*write, [], Bell()), "draw": _Side(*draw, [], Bell())}

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
        if not self._begun:
            async with self._beginning:
                if not self._begun:
                    await self.begin()  # the first call, or the first one after a restart
        patience_s = self._flow.limiter.timeout_s if timeout_s is None else timeout_s
        left_s = max(0.0, patience_s - waited_s)
        side.waiting.append(rows)
        try:
            if await self._opened(side, rows, min(TURN_S, left_s)):
                self._note(call, rows)
                return None
            if left_s > TURN_S:
                return AGAIN
            stock = Stock(self._tally.least)
            what = f"a {call} of {rows} row(s) waited {patience_s:g} s for {side.others}: {side.why(rows, stock)}"
            writers, readers = (one.waiting for one in self._sides.values())
            raise WaitTimeoutError(self._flow.told(what, stock, writers, readers))
        finally:
            side.waiting.remove(rows)

    async def _opened(self, side: _Side, rows: int, seconds: float) -> bool:
        """Wait until so many rows may pass; False if they may not by then."""
        clock = asyncio.get_running_loop().time
        until, count = clock() + seconds, 0
        while not side.may(rows, side.stock()):
            if self._short and not count:
                count = self._tally.want()
            left = until - clock()
            if left <= 0:
                await self._tally.reach(count, _LAST_LOOK_S)  # a verdict on rows as they were before the call is none
                return side.may(rows, side.stock())
            await side.bell.heard(left)
        return True

    def _note(self, call: str, rows: int) -> None:
        """Count what was let through, and wake whom it may help."""
        write, draw = self._sides.values()
        self._sides[call].note(rows)
        if call == "write":
            self._tally.wrote(rows)
            if not self._short:
                draw.bell.ring()
            return
        self._tally.drew(rows)
        write.bell.ring()
        if self._needed():
            self._tally.want()

    async def back(self, written: int, drawn: int) -> None:
        """Take back what was let through and did not come about."""
        self._flow.wrote(-written)
        self._flow.drew(-drawn)
        self._wake()

    async def look(self) -> None:
        """Count the rows anew: some may be gone."""
        self._tally.want()

    async def begin(self) -> None:
        """Begin to count anew, with the rows that there are."""
        await self._tally.reach(self._tally.want())
        self._flow.begin(self._tally.rows)
        self._begun = True
        self._wake()

    async def counts(self) -> tuple[int, int]:
        """Return rows written and drawn since counts began."""
        return self._flow.written, self._flow.drawn

    async def looks(self) -> int:
        """Return how often the rows were counted."""
        return self._tally.done

    @property
    def _short(self) -> bool:
        """Whether there may be too few rows to draw any."""
        return self._tally.least < self._flow.limiter.min_size_to_sample

    def _needed(self) -> bool:
        return self._short and any(side.waiting for side in self._sides.values())

    def _recounted(self) -> None:
        """Wake those who can go on: no reader, while there are too few rows."""
        self._sides["write"].bell.ring()
        if not self._short:
            self._sides["draw"].bell.ring()

    def _wake(self) -> None:
        """Let all who wait look again."""
        for side in self._sides.values():
            side.bell.ring()


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
    def make(cls, limiter: Any, shards: Sequence[Any], about: About) -> Turnstile:
        """Start the actor, and wait until it stands; Ray restarts it if it dies, and it counts anew then.

        Args:
            limiter: the rules.
            shards: actors.
            about: what they are.

        Raises:
            KindError: if the limiter is none.
            OptionError: if sampling could never begin.
            UsageError: if it does not come up.
        """
        if not isinstance(limiter, RateLimiter):
            msg = f"rate_limiter must be an ostinato.RateLimiter or None, got {type(limiter).__name__}"
            raise KindError(msg)
        if limiter.min_size_to_sample > about.capacity * len(shards):
            msg = (
                f"min_size_to_sample={limiter.min_size_to_sample} rows are never there: {len(shards)} shards hold "
                f"{about.capacity} each"
            )
            raise OptionError(msg)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": _MOST_CALLS}
        known = require("ray.cloudpickle", "ray").dumps(list(shards))
        host = ray().remote(**options)(TurnstileHost)
        actor = host.remote(limiter, known, counting=about.counting)
        answer(actor.counts.remote(), _WHAT, START_S)  # no call's time is to begin earlier
        return cls(actor, limiter)

    def write(self, rows: int, timeout_s: float | None) -> float:
        """Wait until so many rows may be written; return how many seconds are left then."""
        return self._pass("write", rows, timeout_s)

    def draw(self, rows: int, timeout_s: float | None) -> float:
        """Wait until so many rows may be drawn; return how many seconds are left then."""
        return self._pass("draw", rows, timeout_s)

    def _pass(self, call: str, rows: int, timeout_s: float | None) -> float:
        patience_s = self.limiter.timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        waited_s = 0.0
        while True:
            asked = self.actor.let.remote(call, rows, timeout_s, waited_s)
            limit = max(0.0, patience_s - waited_s) + GRACE_S
            if not _ready(asked, limit):
                self._abandon(asked, call, rows)
                msg = (
                    f"a {call} of {rows} row(s) waited {patience_s:g} s for the rate limiter, whose actor does not "
                    "answer: it is stopped, starved, or being restarted; nothing has changed, try again"
                )
                raise WaitTimeoutError(msg)
            found = _heard(asked)
            waited_s = time.monotonic() - began
            if found is not AGAIN:
                return max(0.0, patience_s - waited_s)

    def _abandon(self, asked: Any, call: str, rows: int) -> None:
        """Take back what nobody will make any more, should it be let through after all."""
        vain = {"written" if call == "write" else "drawn": rows}

        def settle(done: Any) -> None:
            if done.exception() is None and done.result() is None:
                threading.Thread(target=self.back, kwargs=vain, daemon=True).start()  # not in Ray's own thread

        asked.future().add_done_callback(settle)

    def back(self, written: int = 0, drawn: int = 0) -> None:
        """Say that what was let through did not come about. Waits for nobody."""
        self.actor.back.options(max_task_retries=0).remote(written, drawn)

    def look(self) -> None:
        """Say that rows may be gone. Waits for nobody."""
        self.actor.look.options(max_task_retries=0).remote()

    def begin(self, patience_s: float) -> None:
        """Let counts begin anew, with the rows that there are.

        Raises:
            LostBufferError: if the actor is gone.
            WaitTimeoutError: if it does not answer.
        """
        asked = self.actor.begin.remote()
        if not _ready(asked, patience_s + GRACE_S):
            msg = (
                f"{_WHAT} has not answered for {patience_s + GRACE_S:g} s: counts begin anew "
                "when it goes on, rows are in place already"
            )
            raise WaitTimeoutError(msg)
        _heard(asked)


def _ready(reference: Any, seconds: float) -> bool:
    """Whether a call is answered within so many seconds."""
    limit = seconds if seconds < threading.TIMEOUT_MAX else None
    return bool(ray().wait([reference], timeout=limit)[0])


def _heard(reference: Any) -> Any:
    """Return what the actor answered.

    Raises:
        LostBufferError: if it is gone.
        OstinatoError: what it raised itself.
    """
    try:
        return answer(reference, _WHAT)
    except LostBufferError as error:
        why = brief(error.__cause__ or error)
        msg = (
            f"{_WHAT} is gone for good ({why}): it lets nothing through any more; shards keep their rows, so save them "
            "with dumps(path) and load them into a new buffer"
        )
        raise LostBufferError(msg) from error


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
