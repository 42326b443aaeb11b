"""A rate limiter for many processes: the part of the `FleetActor` that lets calls proceed, and its client."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

from ostinato.buffers.rate_limit import Flow, RateLimiter, Stock
from ostinato.distributed.actor_names import check_connected
from ostinato.distributed.deadlines import CALL_TIMEOUT_S, POLL_S, Callee, Deadline
from ostinato.distributed.ray_client import RETRY, Retry, finishes, result_of, short_message
from ostinato.errors import KindError, LostBufferError, NoPermitError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Kind",
    "Notifier",
    "RateLimitClient",
    "RateLimits",
    "RowCounter",
    "check_limiter",
    "check_minimum",
]

_NAME = "the actor of the rate limiter"
_COUNT_EVERY_S = 0.02
_COUNT_TIMEOUT_S = 1.0
"""How long a count waits for a shard that answered the previous one."""
_FINAL_COUNT_S = 0.25
"""How long a call whose time is up waits for the count that it has requested."""

Kind: TypeAlias = Literal["write", "draw"]


# -- counting rows ----------------------------------------------------------------------------------------------------


@final
class Notifier:
    """Wakes coroutines that wait for a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all that wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float | None) -> None:
        """Wait for the next `notify`, at most `seconds`."""
        waiter = asyncio.ensure_future(self._event.wait())
        await asyncio.wait([waiter], timeout=seconds)
        waiter.cancel()


@final
class RowCounter:
    """Counts the rows that can be drawn in all shards, at a fixed interval while a call needs to know.

    A shard that does not answer in time counts as empty until it does. Its call stays open, and later counts do not
    wait for it. The shards also tell whether draws consume rows.

    Args:
        shards: The actors.
        needed: Returns whether to continue counting.
        changed: Called after each count.
    """

    def __init__(self, shards: Sequence[Any], needed: Callable[[], bool], changed: Callable[[], None]) -> None:
        self.rows = 0
        """Rows in the last count."""
        self.finished = 0
        """Number of counts so far."""
        self._shards = list(shards)
        self._needed, self._changed = needed, changed
        self._counting = True  # until a shard has told
        self._open: dict[int, asyncio.Future[tuple[int, bool] | None]] = {}
        self._written = 0  # rows of writes that were allowed since the last count began
        self._drawn = 0
        self._underway = 0  # rows of draws allowed in the interval before: a shard may not have received them yet
        self._requested = self._begun = 0
        self._task: asyncio.Future[None] | None = None
        self._counted = Notifier()

    @property
    def least(self) -> int:
        """Rows that are certainly present, whatever was drawn since the last count."""
        return max(0, self.rows - self._drawn - self._underway) if self._counting else self.rows

    @property
    def most(self) -> int:
        """Rows present if all writes allowed since the last count have arrived."""
        return self.rows + self._written

    def add_written(self, rows: int) -> None:
        """Record that a write of `rows` was allowed."""
        self._written += rows

    def add_drawn(self, rows: int) -> None:
        """Record that a draw of `rows` was allowed."""
        self._drawn += rows

    def request(self) -> int:
        """Request a count that includes all that has happened by now; return its number. Does not wait."""
        self._requested = self._begun + (2 if self._counting and self._drawn else 1)
        if self._task is None:
            self._task = asyncio.ensure_future(self._keep_counting())
        return self._requested

    async def wait_for(self, number: int, seconds: float | None = None) -> None:
        """Wait for a count, at most `seconds`."""
        clock = asyncio.get_running_loop().time
        until = None if seconds is None else clock() + seconds
        while self.finished < number and (until is None or clock() < until):
            await self._counted.wait(None if until is None else until - clock())

    async def _keep_counting(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while self._begun < self._requested or self._needed():
                next_count = clock() + _COUNT_EVERY_S
                await self._count()
                self._counted.notify()
                self._changed()
                await asyncio.sleep(max(0.0, next_count - clock()))
        finally:
            self._task = None

    async def _count(self) -> None:
        self._begun += 1
        written, drawn = (
            self._written,
            self._drawn,
        )  # later calls are added to this count
        called = [i for i in range(len(self._shards)) if i not in self._open]
        self._open |= {i: asyncio.ensure_future(_drawable(self._shards[i])) for i in called}
        if called:
            await asyncio.wait([self._open[i] for i in called], timeout=_COUNT_TIMEOUT_S)
        answered = [i for i, call in self._open.items() if call.done()]
        found = [told for told in (self._open.pop(i).result() for i in answered) if told is not None]
        self.rows = sum(rows for rows, _ in found)
        self._counting = found[0][1] if found else self._counting
        self._written, self._drawn, self._underway = self._written - written, self._drawn - drawn, drawn
        self.finished = self._begun


async def _drawable(shard: Any) -> tuple[int, bool] | None:
    """Return the rows that can be drawn, and whether draws consume them; None if the shard cannot answer."""
    try:
        rows, counting = await shard.drawable.remote()
    except Exception:  # noqa: BLE001 (it counts as empty)
        return None
    return int(rows), bool(counting)


# -- the limiter ------------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """The writers or the readers, which wait for each other."""

    check: Callable[[int, None], None]
    may: Callable[[int, Stock], bool]
    record: Callable[[int], None]
    reason: Callable[[int, Stock], str]
    stock: Callable[[], Stock]
    others: str
    waiting: list[int]
    """Rows of each call that waits."""
    changed: Notifier


@final
class RateLimits:
    """The limiter of all shards. Calls wait as coroutines of one thread, so their number is not limited by threads.

    A write counts once it is allowed, before it reaches its shard: if the client dies in between, it stays counted, so
    that no reader waits for it. Rows are counted in the shards until there are enough to begin; if draws consume rows,
    whenever there may be too few; and when a client reports that some may be lost.

    Args:
        limiter: The rules.
        shards: The actors whose rows are counted.
    """

    def __init__(self, limiter: RateLimiter, shards: Sequence[Any]) -> None:
        flow = self._flow = Flow(limiter)
        counter = self._counter = RowCounter(shards, self._needs_count, self._after_count)
        self._begun = False
        self._beginning = asyncio.Lock()
        room, left = lambda: Stock(counter.most), lambda: Stock(counter.least)
        write = flow.check_write, flow.may_write, flow.wrote, flow.why_no_write, room, "readers"
        draw = flow.check_draw, flow.may_draw, flow.drew, flow.why_no_draw, left, "writers"
        self._sides: dict[str, _Side] = {"write": _Side(*write, [], Notifier()), "draw": _Side(*draw, [], Notifier())}

    async def acquire(self, kind: Kind, rows: int, timeout_s: float | None, waited_s: float) -> Retry | None:
        """Wait until a call may proceed, for at most `POLL_S`, and count it; `RETRY` if it must be made again.

        Args:
            kind: "write" or "draw".
            rows: Rows of the call.
            timeout_s: Longest wait of all polls together; None is the limiter's.
            waited_s: Seconds waited in earlier polls.

        Raises:
            OptionError: The limiter can never allow it.
            WaitTimeoutError: The time is up; the message says who waits for what.
        """
        side = self._sides[kind]
        side.check(rows, None)
        if not self._begun:
            async with self._beginning:
                if not self._begun:
                    await self.begin()  # the first call, or the first one after a restart
        limit_s = self._flow.limiter.timeout_s if timeout_s is None else timeout_s
        left_s = max(0.0, limit_s - waited_s)
        side.waiting.append(rows)
        try:
            if await self._wait(side, rows, min(POLL_S, left_s)):
                self._record(kind, rows)
                return None
            if left_s > POLL_S:
                return RETRY
            stock = Stock(self._counter.least)
            what = f"a {kind} of {rows} row(s) waited {limit_s:g} s for {side.others}: {side.reason(rows, stock)}"
            writers, readers = (one.waiting for one in self._sides.values())
            raise WaitTimeoutError(self._flow.told(what, stock, writers, readers))
        finally:
            side.waiting.remove(rows)

    async def _wait(self, side: _Side, rows: int, seconds: float) -> bool:
        """Wait until a call may proceed; False if it may not by then."""
        clock = asyncio.get_running_loop().time
        until, count = clock() + seconds, 0
        while not side.may(rows, side.stock()):
            if self._short and not count:
                count = self._counter.request()
            left = until - clock()
            if left <= 0:
                await self._counter.wait_for(count, _FINAL_COUNT_S)  # a count from before the call proves nothing
                return side.may(rows, side.stock())
            await side.changed.wait(left)
        return True

    def _record(self, kind: Kind, rows: int) -> None:
        """Count an allowed call and wake the calls that it may allow."""
        write, draw = self._sides.values()
        self._sides[kind].record(rows)
        if kind == "write":
            self._counter.add_written(rows)
            if not self._short:
                draw.changed.notify()
            return
        self._counter.add_drawn(rows)
        write.changed.notify()
        if self._needs_count():
            self._counter.request()

    async def give_back(self, written: int, drawn: int) -> None:
        """Uncount rows of calls that were allowed but did not take place."""
        self._flow.wrote(-written)
        self._flow.drew(-drawn)
        self._notify_all()

    async def recount(self) -> None:
        """Count the rows again: some may be lost."""
        self._counter.request()

    async def begin(self) -> None:
        """Reset the counts to the rows that are present."""
        await self._counter.wait_for(self._counter.request())
        self._flow.begin(self._counter.rows)
        self._begun = True
        self._notify_all()

    async def totals(self) -> tuple[int, int]:
        """Return the rows written and drawn since the counts began."""
        return self._flow.written, self._flow.drawn

    async def num_counts(self) -> int:
        """Return how often the rows were counted."""
        return self._counter.finished

    @property
    def _short(self) -> bool:
        """Whether there may be too few rows to draw any."""
        return self._counter.least < self._flow.limiter.min_size_to_sample

    def _needs_count(self) -> bool:
        return self._short and any(side.waiting for side in self._sides.values())

    def _after_count(self) -> None:
        """Wake calls that may proceed now; readers only if there are enough rows."""
        self._sides["write"].changed.notify()
        if not self._short:
            self._sides["draw"].changed.notify()

    def _notify_all(self) -> None:
        for side in self._sides.values():
            side.changed.notify()


# -- the client -------------------------------------------------------------------------------------------------------


def check_limiter(limiter: Any) -> None:
    """Raise `KindError` if `limiter` is neither None nor a `RateLimiter`."""
    if limiter is not None and not isinstance(limiter, RateLimiter):
        msg = f"rate_limiter must be an ostinato.RateLimiter or None, got {type(limiter).__name__}"
        raise KindError(msg)


def check_minimum(limiter: RateLimiter, shards: int, capacity: int) -> None:
    """Raise `OptionError` if shards that hold `capacity` rows each never hold enough to begin sampling."""
    if limiter.min_size_to_sample > capacity * shards:
        msg = (
            f"min_size_to_sample={limiter.min_size_to_sample} rows are never there: {shards} shards hold {capacity} "
            "each"
        )
        raise OptionError(msg)


@final
class RateLimitClient:
    """Waits until the actor allows a call.

    Args:
        actor: The `FleetActor`.
        limiter: Its rules.
        check_gone: Raises `LostBufferError` if the shards are gone for good.
        callee: The actor in error messages.
        call_timeout_s: Longest silence of the actor.
    """

    def __init__(
        self,
        actor: Any,
        limiter: RateLimiter,
        check_gone: Callable[[], None],
        callee: Callee = Callee(_NAME),  # noqa: B008 (immutable)
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.actor = actor
        self.limiter = limiter
        self._check_gone = check_gone
        self._callee = callee
        self._call_timeout_s = call_timeout_s

    def acquire(self, kind: Kind, rows: int, timeout_s: float | None) -> float:
        """Wait until `rows` may be written or drawn; return how many seconds are left then.

        Args:
            kind: "write" or "draw".
            rows: Rows of the call.
            timeout_s: Longest wait; None is the limiter's.

        Raises:
            LostBufferError: The actor is dead and not restarted.
            WaitTimeoutError: The time is up; nothing has changed.
            NoPermitError: The actor does not answer; nothing has changed.
        """
        check_connected()
        deadline = Deadline.of_wait(timeout_s, self.limiter.timeout_s, self._call_timeout_s)
        waited_s = 0.0
        while True:
            call = self.actor.acquire.remote(kind, rows, timeout_s, waited_s)
            if not finishes(call, deadline.silence_left_s(time.monotonic())):
                self._abandon(call, kind, rows)
                msg = (
                    f"a {kind} of {rows} row(s) waited {min(deadline.wait_s, deadline.elapsed_s):.3g} s for the rate "
                    f"limiter, but {self._callee} does not answer: it is stopped, overloaded, or being restarted; "
                    "nothing has changed, try again"
                )
                raise NoPermitError(msg)
            found = self._result(call)
            waited_s = deadline.elapsed_s
            if found is not RETRY:
                return deadline.wait_left_s

    def _abandon(self, call: Any, kind: Kind, rows: int) -> None:
        """Give the rows of a call back if it is allowed after its client has given up."""
        given_back = {"written" if kind == "write" else "drawn": rows}

        def settle(done: Any) -> None:
            if done.exception() is None and done.result() is None:
                threading.Thread(target=self.give_back, kwargs=given_back, daemon=True).start()  # not in Ray's thread

        call.future().add_done_callback(settle)

    def give_back(self, written: int = 0, drawn: int = 0) -> None:
        """Report that allowed rows were not written or drawn. Does not wait."""
        self.actor.give_back.options(max_task_retries=0).remote(written, drawn)

    def recount(self) -> None:
        """Report that rows may be lost. Does not wait."""
        self.actor.recount.options(max_task_retries=0).remote()

    def begin(self, deadline: Deadline) -> None:
        """Reset the counts to the rows that are present.

        Raises:
            LostBufferError: The actor is dead.
            NoPermitError: It does not answer until the deadline, or for `call_timeout_s`.
        """
        call = self.actor.begin.remote()
        if not finishes(call, min(deadline.left_s, self._call_timeout_s)):
            msg = (
                f"{self._callee} does not answer: it resets the counts of the rate limiter when it continues; the rows "
                "are in place already"
            )
            raise NoPermitError(msg)
        self._result(call)

    def _result(self, reference: Any) -> Any:
        """Return the result of a call to the actor that has ended.

        Raises:
            LostBufferError: The actor is dead.
            OstinatoError: The actor raised it.
        """
        try:
            return result_of(reference, _NAME)
        except LostBufferError as error:
            self._check_gone()
            reason = short_message(error.__cause__ or error)
            msg = (
                f"{_NAME} is gone for good ({reason}): no call can proceed any more; shards keep their rows, so save "
                "them with dumps(path) and load them into a new buffer"
            )
            raise LostBufferError(msg) from error
