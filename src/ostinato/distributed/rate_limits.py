"""A rate limiter for many processes: the part of the `FleetActor` that lets calls proceed, and its client."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import math
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

from ostinato.buffers.rate_limit import Flow, RateLimiter, Stock
from ostinato.distributed.actor_names import check_connected
from ostinato.distributed.deadlines import CALL_TIMEOUT_S, POLL_S, Callee, Deadline
from ostinato.distributed.ray_client import RETRY, Retry, finishes, result_of, short_message
from ostinato.errors import LostBufferError, NoPermitError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Kind: TypeAlias = Literal["write", "draw"]

_NAME = "the actor of the rate limiter"
_COUNT_EVERY_S = 0.02
_COUNT_TIMEOUT_S = 1.0
"""How long a count waits for a shard that answered the previous one."""
_FINAL_COUNT_S = 0.25
"""How long a call whose time is up waits for the count that it has requested."""


# -- counting rows ----------------------------------------------------------------------------------------------------


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
        self.counting = True
        """Whether draws consume rows; True until a shard has told."""
        self._open: dict[int, asyncio.Future[tuple[int, bool] | None]] = {}
        self._written = 0  # rows of writes that were allowed since the last count began
        self._drawn = 0
        self._underway = 0  # rows of draws allowed in the interval before: a shard may not have received them yet
        self._requested = self._begun = 0
        self._task: asyncio.Future[None] | None = None
        self._counted = asyncio.Condition()

    @property
    def least(self) -> int:
        """Rows that are certainly present, whatever was drawn since the last count."""
        return max(0, self.rows - self._drawn - self._underway) if self.counting else self.rows

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
        self._requested = self._begun + (2 if self.counting and self._drawn else 1)
        if self._task is None:
            self._task = asyncio.ensure_future(self._keep_counting())
        return self._requested

    async def wait_for(self, number: int, seconds: float | None = None) -> None:
        """Wait for a count, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._counted:
                await self._counted.wait_for(lambda: self.finished >= number)

    async def _keep_counting(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while self._begun < self._requested or self._needed():
                next_count = clock() + _COUNT_EVERY_S
                await self._count()
                async with self._counted:
                    self._counted.notify_all()
                self._changed()
                await asyncio.sleep(max(0.0, next_count - clock()))
        finally:
            self._task = None

    async def _count(self) -> None:
        self._begun += 1
        written, drawn = self._written, self._drawn  # later calls are added to this count
        called = [i for i in range(len(self._shards)) if i not in self._open]
        self._open |= {i: asyncio.ensure_future(_drawable(self._shards[i])) for i in called}
        if called:
            await asyncio.wait([self._open[i] for i in called], timeout=_COUNT_TIMEOUT_S)
        answered = [i for i, call in self._open.items() if call.done()]
        found = [told for told in (self._open.pop(i).result() for i in answered) if told is not None]
        self.rows = sum(rows for rows, _ in found)
        self.counting = found[0][1] if found else self.counting
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


class _Call(NamedTuple):
    """A call that waits."""

    began: float
    """When it began to wait, earlier polls included."""
    rows: int
    counted: asyncio.Future[None]
    """Done once the call may proceed, and is counted."""


@final
class _Side:
    """The writers or the readers, which wait for each other.

    Args:
        check: Raises if a call of so many rows can never be allowed.
        reason: Says why one is not allowed now.
        others: Whom they wait for.
    """

    def __init__(self, check: Callable[[int, None], None], reason: Callable[[int, Stock], str], others: str) -> None:
        self.check, self.reason, self.others = check, reason, others
        self.waiting: list[_Call] = []
        """Calls that wait, the first to wait first."""

    @property
    def rows(self) -> list[int]:
        """Rows of each call that waits."""
        return [call.rows for call in self.waiting]


class RateLimits:
    """The limiter of all shards. Calls wait as coroutines of one thread, so their number is not limited by threads.

    A write counts once it is allowed, before it reaches its shard: if the client dies in between, it stays counted, so
    that no reader waits for it. Rows are counted in the shards until there are enough to begin; if draws consume rows,
    whenever there may be too few; and when a client reports that some may be lost.

    Of calls that wait, the first one that may proceed goes first.

    Args:
        limiter: The rules.
        shards: The actors whose rows are counted.
    """

    def __init__(self, limiter: RateLimiter, shards: Sequence[Any]) -> None:
        flow = self._flow = Flow(limiter)
        self._counter = RowCounter(shards, self._needs_count, self._admit)
        self._begun = False
        self._beginning = asyncio.Lock()
        self._sides: dict[Kind, _Side] = {
            "write": _Side(flow.check_write, flow.why_no_write, "readers"),
            "draw": _Side(flow.check_draw, flow.why_no_draw, "writers"),
        }

    async def acquire(
        self,
        kind: Kind,
        rows: int,
        timeout_s: float | None,
        waited_s: float,
        min_rows: int | None = None,
    ) -> int | Retry:
        """Wait until a call may proceed, for at most `POLL_S`, and count it; `RETRY` if it must be made again.

        Args:
            kind: "write" or "draw".
            rows: Rows of the call.
            timeout_s: Longest wait of all polls together; None is the limiter's.
            waited_s: Seconds waited in earlier polls.
            min_rows: Rows of the smallest batch to draw when the time is up.

        Returns:
            The rows that were counted.

        Raises:
            OptionError: The limiter can never allow it.
            WaitTimeoutError: The time is up; the message says who waits for what.
        """
        side = self._sides[kind]
        side.check(rows if min_rows is None else min_rows, None)
        await self._start()
        limit_s = self._flow.limiter.timeout_s if timeout_s is None else timeout_s
        left_s = max(0.0, limit_s - waited_s)
        if not await self._wait(kind, rows, min(POLL_S, left_s), waited_s):
            if left_s > POLL_S:
                return RETRY
            rows = self._last_chance(kind, rows, min_rows, limit_s)
        return rows

    def _last_chance(self, kind: Kind, rows: int, min_rows: int | None, limit_s: float) -> int:
        """Return the rows of a smaller batch, and count it.

        Raises:
            WaitTimeoutError: Not even that is allowed.
        """
        side, stock = self._sides[kind], Stock(self._counter.least)
        most = 0 if min_rows is None else self._flow.most_draws(rows, stock)
        if min_rows is not None and most >= min_rows:
            self._record(kind, most)
            return most
        what = f"a {kind} of {rows} row(s) waited {limit_s:g} s for {side.others}: {side.reason(rows, stock)}"
        writers, readers = (one.rows + [rows] * (one is side) for one in self._sides.values())
        raise WaitTimeoutError(self._flow.told(what, stock, writers, readers))

    async def can(self, kind: Kind, rows: int) -> bool:
        """Return whether a call would proceed at once. Counts nothing; waits at most for a count of the rows."""
        try:
            self._sides[kind].check(rows, None)
        except OptionError:
            return False
        await self._start()
        if not self._may(kind, rows) and self._short:
            await self._learn(self._counter.request())
        return self._may(kind, rows)

    async def _start(self) -> None:
        """Begin to count with the first call, or the first one after a restart."""
        if not self._begun:
            async with self._beginning:
                if not self._begun:
                    await self.begin()

    def _may(self, kind: Kind, rows: int) -> bool:
        flow, counter = self._flow, self._counter
        if kind == "write":
            return flow.may_write(rows, Stock(counter.most))
        return flow.may_draw(rows, Stock(counter.least))

    async def _wait(self, kind: Kind, rows: int, seconds: float, waited_s: float) -> bool:
        """Wait until a call may proceed, and count it; False if it may not by then."""
        if self._may(kind, rows):
            self._record(kind, rows)
            return True
        loop, side = asyncio.get_running_loop(), self._sides[kind]
        call = _Call(loop.time() - waited_s, rows, loop.create_future())
        bisect.insort(side.waiting, call, key=lambda one: one.began)
        count = self._counter.request() if self._short else 0
        try:
            await asyncio.wait([call.counted], timeout=seconds)
            if not call.counted.done():
                await self._learn(count)
            return call.counted.done()
        finally:
            if call in side.waiting:
                side.waiting.remove(call)

    async def _learn(self, count: int) -> None:
        """Wait for a count of the rows: without it, a denial proves nothing."""
        await self._counter.wait_for(count, _FINAL_COUNT_S)
        self._admit()

    def _record(self, kind: Kind, rows: int) -> None:
        """Count an allowed call, and let the calls proceed that it allows."""
        self._add(kind, rows)
        self._admit()

    def _add(self, kind: Kind, rows: int) -> None:
        if kind == "write":
            self._flow.wrote(rows)
            self._counter.add_written(rows)
        else:
            self._flow.drew(rows)
            self._counter.add_drawn(rows)
            if self._needs_count():
                self._counter.request()

    def _admit(self) -> None:
        """Let calls that wait proceed as far as they may, the first ones first."""
        while any(self._admit_side(kind) for kind in self._sides):
            pass  # what one side did may allow more of the other

    def _admit_side(self, kind: Kind) -> bool:
        """Let calls of one side proceed; return whether one did."""
        side, too_many, waiting = self._sides[kind], math.inf, len(self._sides[kind].waiting)
        for call in tuple(side.waiting):
            if call.rows >= too_many:
                continue
            if not self._may(kind, call.rows):
                too_many = call.rows
                continue
            side.waiting.remove(call)
            call.counted.set_result(None)
            self._add(kind, call.rows)
        return len(side.waiting) < waiting

    # -- counts -------------------------------------------------------------------------------------------------------

    async def give_back(self, written: int, drawn: int) -> None:
        """Uncount rows of calls that were allowed but did not take place."""
        self._flow.wrote(-written)
        self._flow.drew(-drawn)
        self._admit()

    async def recount(self) -> None:
        """Count the rows again: some may be lost."""
        self._counter.request()

    async def begin(self, state: dict[str, Any] | None = None) -> str | None:
        """Restore counts that `limits` returned; under other rules, and with None, reset them to the rows present.

        Returns:
            What differs in the rules, in words; None for nothing.
        """
        await self._counter.wait_for(self._counter.request())
        differing = self._flow.load_state_dict(state, self._counter.rows)
        self._begun = True
        self._admit()
        return differing

    async def limits(self) -> dict[str, Any]:
        """Return the counts, and the rules that they were counted under."""
        await self._start()
        return self._flow.state_dict()

    async def totals(self) -> tuple[int, int]:
        """Return the rows written and drawn since the counts began."""
        return self._flow.written, self._flow.drawn

    @property
    def _short(self) -> bool:
        """Whether there may be too few rows to draw any."""
        return self._counter.least < self._flow.limiter.min_size_to_sample

    def _needs_count(self) -> bool:
        return self._short and any(side.waiting for side in self._sides.values())


# -- the client -------------------------------------------------------------------------------------------------------


def check_minimum(limiter: RateLimiter, shards: int, capacity: int) -> None:
    """Raise `OptionError` if shards that hold `capacity` rows each never hold enough to begin sampling."""
    if limiter.min_size_to_sample > capacity * shards:
        msg = (
            f"min_size_to_sample={limiter.min_size_to_sample} rows are never there: {shards} shards hold {capacity} "
            "each"
        )
        raise OptionError(msg)


def warn_of_rules(differing: str | None) -> None:
    """Warn that counts were saved under other rules, if these differ."""
    if differing is not None:
        warnings.warn(
            f"the checkpoint was saved under another rate limiter: {differing}. The fleet keeps its own, and the "
            "counts begin anew",
            UserWarning,
            stacklevel=4,
        )


@final
class RateLimitClient:
    """Waits until the actor allows a call. Thread-safe.

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

    def acquire(self, kind: Kind, rows: int, timeout_s: float | None, min_rows: int | None = None) -> tuple[int, float]:
        """Wait until `rows` may be written or drawn; return the rows, and the seconds that are left of its time.

        Args:
            kind: "write" or "draw".
            rows: Rows of the call.
            timeout_s: Longest wait; None is the limiter's.
            min_rows: Rows of the smallest batch to draw when the time is up; None draws whole batches only.

        Raises:
            LostBufferError: The actor is dead and not restarted.
            WaitTimeoutError: The time is up; nothing has changed.
            NoPermitError: The actor does not answer; nothing has changed.
        """
        check_connected()
        deadline = Deadline.of_wait(timeout_s, self.limiter.timeout_s, self._call_timeout_s)
        while True:
            call = self.actor.acquire.remote(kind, rows, timeout_s, deadline.elapsed_s, min_rows)
            try:
                found = self._answer(call, deadline.silence_left_s(time.monotonic()))
            except NoPermitError as error:
                self._abandon(call, kind)
                waited_s = min(deadline.wait_s, deadline.elapsed_s)
                msg = f"a {kind} of {rows} row(s) waited {waited_s:.3g} s for the rate limiter, but {error}"
                raise NoPermitError(msg) from None
            if found is not RETRY:
                return int(found), deadline.wait_left_s

    def can(self, kind: Kind, rows: int, deadline: Deadline) -> bool:
        """Return whether a call would proceed at once.

        Raises:
            LostBufferError: The actor is dead and not restarted.
            NoPermitError: The actor does not answer until the deadline.
        """
        check_connected()
        return bool(self._answer(self.actor.can.remote(kind, rows), deadline.left_s))

    def _abandon(self, call: Any, kind: Kind) -> None:
        """Give the rows of a call back if it is allowed after its client has given up."""
        name = "written" if kind == "write" else "drawn"

        def settle(done: Any) -> None:
            if done.exception() is None and done.result() is not RETRY:
                given_back = {name: done.result()}
                threading.Thread(target=self.give_back, kwargs=given_back, daemon=True).start()  # not in Ray's thread

        call.future().add_done_callback(settle)

    def give_back(self, written: int = 0, drawn: int = 0) -> None:
        """Report that allowed rows were not written or drawn. Does not wait."""
        self.actor.give_back.options(max_task_retries=0).remote(written, drawn)

    def recount(self) -> None:
        """Report that rows may be lost. Does not wait."""
        self.actor.recount.options(max_task_retries=0).remote()

    def totals(self, timeout_s: float) -> tuple[int, int]:
        """Return the rows written and drawn since the counts began.

        Raises:
            LostBufferError: The actor is dead.
            NoPermitError: It does not answer within `timeout_s`.
        """
        check_connected()
        written, drawn = self._answer(self.actor.totals.remote(), timeout_s)
        return written, drawn

    def begin(self, deadline: Deadline, saved: dict[str, Any] | None = None) -> None:
        """Restore the counts of a checkpoint; saved under other rules, or not saved, they begin with the rows present.

        Args:
            deadline: When the call ends.
            saved: What was saved about all shards; None for nothing.

        Raises:
            LostBufferError: The actor is dead.
            NoPermitError: It does not answer until the deadline, or for `call_timeout_s`.
        """
        note = "it resets the counts of the rate limiter when it continues, and the rows are in place already"
        call = self.actor.begin.remote((saved or {}).get("limiter"))
        warn_of_rules(self._answer(call, min(deadline.left_s, self._call_timeout_s), note))

    def _answer(self, call: Any, seconds: float, note: str = "nothing has changed, try again") -> Any:
        """Return the result of a call to the actor.

        Raises:
            LostBufferError: The actor is dead.
            NoPermitError: It does not answer in time.
            OstinatoError: The actor raised it.
        """
        if not finishes(call, seconds):
            msg = f"{self._callee} does not answer: it is stopped, overloaded, or being restarted; {note}"
            raise NoPermitError(msg)
        try:
            return result_of(call, _NAME)
        except LostBufferError as error:
            self._check_gone()
            reason = short_message(error.__cause__ or error)
            msg = (
                f"{_NAME} is gone for good ({reason}): no call can proceed any more; shards keep their rows, so save "
                "them with dumps(path) and load them into a new buffer"
            )
            raise LostBufferError(msg) from error
