"""Rate limiting: the rules and counts by which readers and writers wait for each other, and the waiting itself."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.buffers.observer import DrawRule
from ostinato.core.options import check_integer, check_number, check_type
from ostinato.core.processes import next_place, whole_in_forks
from ostinato.errors import CheckpointError, OptionError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.reader import Reader
    from ostinato.buffers.store import Store
    from ostinato.core.records import Draw, Placement
    from ostinato.core.ring import Ring
    from ostinato.samplers import CountingSampler, Sampler
    from ostinato.writers import Writer

_DIGITS = 6
"""Decimal places of a balance that count: ten times 0.3 is 3."""


class Stock(NamedTuple):
    """What a buffer has for its readers and writers at one moment."""

    rows: int
    """Rows that can be drawn; `min_size_to_sample` counts these."""
    draws: int | None = None
    """Draws that the rows are still good for; None for any number."""
    room: int | None = None
    """Rows that a writer may place; None for any number."""


@final
@dataclass(frozen=True)
class RateLimiter:
    """When readers and writers must wait for each other, after Cassirer et al., *Reverb* (2021).

    The balance `samples_per_insert * rows written - rows drawn` stays in a band: a write that would lift it above
    waits for readers, a draw that would bring it below waits for writers. Below `min_size_to_sample` rows no draw is
    made, and every write goes ahead (the last of these may leave the band upwards). Whole calls are admitted or wait: a
    batch counts with all its rows. A frozen record: one limiter may serve several buffers, each of which has its own
    counts.

    The band is given in one of two ways: `error_buffer` around `samples_per_insert * min_size_to_sample`, or its edges
    `min_diff` and `max_diff`, which do not depend on `min_size_to_sample`. Balances are compared to a millionth of a
    row: with `samples_per_insert=0.3` ten more rows written allow exactly three more drawn.

    Args:
        samples_per_insert: rows drawn for each row written; None sets no ratio.
        error_buffer: how far the balance may be off, in rows drawn; at least `max(1, samples_per_insert)`. Give it half
            of `samples_per_insert * (rows of a write) + (rows of a batch)` or more: narrower bands can stop both sides.
            A pair is `(min_diff, max_diff)`, as of Reverb's `SampleToInsertRatio`, which must be twice as wide.
        min_size_to_sample: rows that can be drawn before the first draw is made.
        timeout_s: longest wait of calls that name none, in seconds; `math.inf` waits without end.
        min_diff: least balance after a draw; `-math.inf` never lets readers wait for the ratio.
        max_diff: largest balance after a write; `math.inf` never lets writers wait.

    Raises:
        OptionError: for numbers out of range, a ratio without a band or a band without a ratio, a band given twice or
            one in which single rows can neither be written nor drawn.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, RateLimiter, ReplayBuffer
        >>> limiter = RateLimiter(samples_per_insert=2, error_buffer=16, min_size_to_sample=8)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, rate_limiter=limiter)
        >>> index = rb.extend(torch.arange(16), timeout_s=1.0)
        >>> len(rb.sample(timeout_s=1.0))
        4
        >>> RateLimiter(samples_per_insert=1, min_diff=0, max_diff=8).band
        (0.0, 8.0)
    """

    samples_per_insert: float | None = None
    error_buffer: float | tuple[float, float] | None = None
    min_size_to_sample: int = 1
    timeout_s: float = 60.0
    _: KW_ONLY
    min_diff: float | None = None
    max_diff: float | None = None

    def __post_init__(self) -> None:
        """Check."""
        check_integer("min_size_to_sample", self.min_size_to_sample, 1, OptionError)
        check_timeout(self.timeout_s)
        error: Any = self.error_buffer
        ratio, edges = self.samples_per_insert, (self.min_diff, self.max_diff)
        if (ratio, error, edges) == (None, None, (None, None)):
            return
        if ratio is None or edges.count(None) == 1 or (error is None) == (None in edges):
            msg = (
                "samples_per_insert goes together with error_buffer, or with min_diff and max_diff (for no limit "
                f"-math.inf, math.inf), got {ratio!r}, {error!r} and {edges}: give both, or neither for "
                "min_size_to_sample alone"
            )
            raise OptionError(msg)
        ratio = check_number("samples_per_insert", ratio, "a finite number above 0", _is_positive)
        if error is not None and not isinstance(error, tuple):
            error, least = check_number("error_buffer", error, "a finite number above 0", _is_positive), max(1.0, ratio)
            if error < least:
                msg = (
                    f"error_buffer must be at least max(1, samples_per_insert) = {least:g}, or no row could be written "
                    f"or drawn, got {error:g}"
                )
                raise OptionError(msg)
            return
        if error is not None and len(error) != 2:
            msg = f"error_buffer must be a number or a pair (min_diff, max_diff), got {error!r}"
            raise OptionError(msg)
        low, high = edges if error is None else error
        low = check_number("min_diff", low, "a number, finite or -inf", lambda x: x < math.inf)
        high = check_number("max_diff", high, "a number, finite or inf", lambda x: x > -math.inf)
        if error is not None:
            _check_pair(low, high, ratio, ratio * self.min_size_to_sample)
        _check_progress(low, high, ratio)

    @property
    def band(self) -> tuple[float, float]:
        """Least and largest balance; infinite where there is no ratio, or no limit on that side."""
        ratio, error = self.samples_per_insert, self.error_buffer
        if ratio is None:
            return -math.inf, math.inf
        if error is None or isinstance(error, tuple):
            low, high = (self.min_diff, self.max_diff) if error is None else error
            return float(low or 0.0), float(high or 0.0)
        middle = float(ratio) * self.min_size_to_sample
        return middle - float(error), middle + float(error)

    def rules(self) -> dict[str, Any]:
        """Return what the counts depend on, in one spelling for one limiter, as checkpoints hold it."""
        ratio, (low, high) = self.samples_per_insert, self.band
        return {
            "samples_per_insert": None if ratio is None else float(ratio),
            "min_size_to_sample": int(self.min_size_to_sample),
            "min_diff": round(low, _DIGITS),
            "max_diff": round(high, _DIGITS),
        }


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _check_pair(low: float, high: float, ratio: float, middle: float) -> None:
    """Check the pair of Reverb's `SampleToInsertRatio`, as it does."""
    least = 2 * max(1.0, ratio)
    if high - low < least:
        msg = (
            f"error_buffer=({low:g}, {high:g}) must be at least 2 * max(1, samples_per_insert) = {least:g} wide: a "
            "narrower band can stop both sides; min_diff and max_diff take any band in which single rows move"
        )
        raise OptionError(msg)
    if low > middle:
        msg = (
            f"error_buffer=({low:g}, {high:g}) is above samples_per_insert * min_size_to_sample = {middle:g}: readers "
            "would wait at min_size_to_sample rows; raise that, or give min_diff and max_diff"
        )
        raise OptionError(msg)


def _check_progress(low: float, high: float, ratio: float) -> None:
    """Check that at every balance a row can be written or drawn: else both sides wait for each other.

    Both wait at balances above `high - ratio` and below `low + 1`; a balance is a multiple of `1 / step`.
    """
    if not low < high:
        msg = f"min_diff must be below max_diff, got {low:g} and {high:g}"
        raise OptionError(msg)
    if math.isinf(high - low):
        return
    step = Fraction(ratio).limit_denominator(10**_DIGITS).denominator
    first = (math.floor(round((high - ratio) * step, _DIGITS)) + 1) / step
    if round(first - low - 1, _DIGITS) < 0:
        msg = (
            f"min_diff={low:g} and max_diff={high:g} are too close: at the balance {first:g} no row could be written "
            f"or drawn; samples_per_insert + 1 = {ratio + 1:g} between them always works"
        )
        raise OptionError(msg)


def check_timeout(timeout_s: Any) -> None:
    """Check a number of seconds.

    Raises:
        OptionError: if it is negative or no number.
    """
    words = "a number of seconds of at least 0 (math.inf waits without end)"
    check_number("timeout_s", timeout_s, words, lambda seconds: seconds >= 0)


def check_wait(timeout_s: Any, *, waits: bool) -> None:
    """Check a timeout, and that calls wait at all; None is no timeout.

    Raises:
        OptionError: naming it.
    """
    if timeout_s is None:
        return
    check_timeout(timeout_s)
    if not waits:
        msg = f"timeout_s={timeout_s} has no effect: no call waits in a buffer without rate_limiter; leave it out"
        raise OptionError(msg)


def check_min_batch(min_batch: Any, size: int, *, partial: bool, whole: str | None) -> None:
    """Check the smallest batch to take when the time is up; None is no such batch.

    Args:
        min_batch: rows.
        size: rows of a whole batch.
        partial: whether a batch may come out smaller: draws wait, or use rows up.
        whole: what makes batches of one size only; None if nothing does.

    Raises:
        OptionError: naming what it does not go with.
    """
    if min_batch is None:
        return
    words = f"an integer in [1, {size}], the rows of a batch"
    check_number("min_batch", min_batch, words, lambda rows: rows in range(1, size + 1))
    if whole is not None:
        msg = f"min_batch={min_batch} does not go with {whole}: leave one of them out"
        raise OptionError(msg)
    if not partial:
        msg = (
            f"min_batch={min_batch} has no effect: no draw waits in a buffer without rate_limiter, and none uses rows "
            "up; leave it out"
        )
        raise OptionError(msg)


@final
class Flow:
    """Counts of rows written and drawn, and what a limiter permits with them. Not thread-safe: its owner holds a lock.

    Pure: it knows neither time nor threads, so that it works inside any server. Cost of each verdict: O(1).

    Args:
        limiter: the rules.
    """

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self.written = 0
        self.drawn = 0
        self._ratio = float(limiter.samples_per_insert or 0.0)
        self._low, self._high = limiter.band

    @property
    def _balance(self) -> float:
        return self._ratio * self.written - self.drawn

    def may_write(self, rows: int, stock: Stock) -> bool:
        """Whether a write of so many rows may go ahead now."""
        if stock.room is not None and rows > stock.room:
            return False
        return stock.rows < self.limiter.min_size_to_sample or rows <= self.write_room()

    def may_draw(self, rows: int, stock: Stock) -> bool:
        """Whether a batch of so many rows may be drawn now."""
        return rows <= self.draw_room(stock)

    def most_draws(self, rows: int, stock: Stock) -> int:
        """Return the rows of the largest batch of at most `rows` rows that may be drawn now; 0 if none may."""
        return int(max(0, min(rows, self.draw_room(stock))))

    def draw_room(self, stock: Stock) -> float:
        """Return how many rows may be drawn before others are written; `math.inf` for any number."""
        if stock.rows < self.limiter.min_size_to_sample:
            return 0
        most = math.inf if stock.draws is None else stock.draws
        return min(most, round(self._balance - self._low, _DIGITS))

    def write_room(self) -> float:
        """Return how many rows the band allows to be written before others are drawn; `math.inf` for any number."""
        return round((self._high - self._balance) / self._ratio, _DIGITS) if self._ratio else math.inf

    def check_write(self, rows: int, capacity: int | None) -> None:
        """Check that a write can ever be made; `capacity` is that of a queue.

        Raises:
            OptionError: naming what it exceeds.
        """
        if capacity is not None and rows > capacity:
            msg = f"a write of {rows} rows never fits into a queue of {capacity}: write at most {capacity} rows at once"
            raise OptionError(msg)
        self._check_width("write", rows, self._ratio)

    def check_draw(self, rows: int, capacity: int | None) -> None:
        """Check that a batch can ever be drawn; `capacity` is the number of draws that a full buffer permits.

        Raises:
            OptionError: naming what it exceeds.
        """
        if capacity is not None and rows > capacity:
            msg = f"a batch of {rows} rows never comes together: a full buffer is good for {capacity} draws"
            raise OptionError(msg)
        self._check_width("batch", rows, 1.0)

    def _check_width(self, what: str, rows: int, each: float) -> None:
        if round(rows * each - (self._high - self._low), _DIGITS) > 0:
            msg = (
                f"a {what} of {rows} rows moves the balance by {each:g} each, more than the band [{self._low:.12g}, "
                f"{self._high:.12g}] is wide: widen error_buffer, or min_diff and max_diff, or make it smaller"
            )
            raise OptionError(msg)

    def wrote(self, rows: int) -> None:
        """Count rows written."""
        self.written += rows

    def drew(self, rows: int) -> None:
        """Count rows drawn; a negative number undoes draws that were not delivered."""
        self.drawn += rows

    def begin(self, rows: int) -> None:
        """Start from the rows present, as if the buffer had just been filled for the first draw."""
        self.written, self.drawn = min(rows, self.limiter.min_size_to_sample), 0

    def why_no_write(self, rows: int, stock: Stock) -> str:
        """Say what a write of so many rows waits for."""
        if stock.room is not None and rows > stock.room:
            return f"there is room for {stock.room} of {rows} rows until queued ones have been delivered"
        more = math.ceil(round(self._balance + self._ratio * rows - self._high, _DIGITS)) if self._ratio else 0
        return f"{more} more row(s) must be drawn before {rows} can be written"

    def why_no_draw(self, rows: int, stock: Stock) -> str:
        """Say what a batch of so many rows waits for."""
        least = self.limiter.min_size_to_sample
        if stock.rows < least:
            return f"{stock.rows} row(s) can be drawn, min_size_to_sample is {least}"
        if stock.draws is not None and rows > stock.draws:
            return f"{rows} rows were asked for, and the rows present can be drawn {stock.draws} more time(s) in all"
        more = math.ceil(round((rows + self._low - self._balance) / self._ratio, _DIGITS)) if self._ratio else 0
        return f"{more} more row(s) must be written before {rows} can be drawn"

    def told(self, what: str, stock: Stock, writers: Sequence[int], readers: Sequence[int]) -> str:
        """Say which call has timed out, what there is, and what to do; calls that wait now are named by their rows."""
        ratio, advice = self._ratio, "raise timeout_s, or see what became of the other side"
        counts = f"{self.written} row(s) written, {self.drawn} drawn"
        if ratio:
            sums = f"{ratio:.12g} x {self.written} - {self.drawn} = {self._balance:.12g}"
            counts += f"; {sums} must stay in [{self._low:.12g}, {self._high:.12g}]"
        if writers and readers and ratio:
            wide = max(writers) * ratio + max(readers)
            advice = (
                f"both sides wait: if the band is too narrow for these calls, make error_buffer {wide / 2:.12g} or "
                f"more, or max_diff - min_diff {wide:.12g}"
            )
        rows = f"{stock.rows} row(s) can be drawn (min_size_to_sample={self.limiter.min_size_to_sample})"
        waiting = f"waiting now: {len(writers)} writer(s), {len(readers)} reader(s)"
        return f"{what}; {counts}; {rows}; {waiting}: {advice}"

    def state_dict(self) -> dict[str, Any]:
        """Return counts, and the rules that they were counted under."""
        return {"written": self.written, "drawn": self.drawn, **self.limiter.rules()}

    def load_state_dict(self, state: dict[str, Any] | None, rows: int) -> str | None:
        """Restore counts that were counted under the same rules; else start from `rows` rows.

        Returns:
            What differs, in words, where the rules do; None otherwise.

        Raises:
            CheckpointError: if the counts are no integers; nothing has changed.
        """
        if state is not None and not all(type(state.get(name)) is int for name in ("written", "drawn")):
            msg = f"the state of the rate limiter is damaged: its counts must be integers, got {state}"
            raise CheckpointError(msg)
        mine, saved = self.limiter.rules(), state or {}
        names = () if state is None else (saved.keys() | mine.keys()) - {"written", "drawn"}
        differing = sorted(name for name in names if mine.get(name) != saved.get(name))
        if state is None or differing:
            self.begin(rows)
        else:
            self.written, self.drawn = int(state["written"]), int(state["drawn"])
        return ", ".join(f"{name}={saved.get(name)} (now {mine.get(name)})" for name in differing) or None


class Ask(NamedTuple):
    """What one call of `sample` asks for beside its size."""

    timeout_s: float | None = None
    """Longest wait; None is the limiter's."""
    max_age: int | None = None
    """Oldest version, counted back from the newest one; None takes all rows."""
    until: float | None = None
    """When the time is up, on the clock of `time.monotonic`; None begins with the first wait."""
    min_rows: int | None = None
    """Rows of the smallest batch to take when the time is up; None takes whole batches only."""

    def begun(self, limit: LimiterState) -> Ask:
        """Return the same, its time beginning now unless it has begun."""
        if self.until is not None:
            return self
        patience_s = limit.patience_s(self.timeout_s)
        return self._replace(timeout_s=patience_s, until=time.monotonic() + patience_s)


@final
class Waiters:
    """The lock of a buffer, and the calls that wait under it until others let them go on.

    One lock and one condition serve all that a call can wait for: room for a write, the permission to draw, a draw that
    is queued by prefetch or was loaded. No wait outlasts its reason, by two rules:

    1. A call looks at everything that could let it go on, and waits, without giving the lock back in between; when it
       wakes, it looks at everything again.
    2. Code that changes something of that (rows, counts, queued and loaded draws, sampler, storage, limiter) holds the
       lock, and calls `wake` before giving it back.

    The lock is free while a call waits, and in a forked process. A thread that ends while it waits leaves no entry.

    Args:
        outer: whether the lock is taken before those of other buffers, as that of an ensemble is.
    """

    def __init__(self, *, outer: bool = False) -> None:
        self.lock = threading.RLock()
        self.place = -next_place() if outer else next_place()
        """The locks of several buffers are taken in the order of their places."""
        whole_in_forks(self, self.lock, place=self.place)
        self.writers: list[int] = []
        """Rows of the writes that wait."""
        self.readers: list[int] = []
        """Rows of the draws that wait."""
        self._changed = threading.Condition(self.lock)

    def wait(
        self,
        side: list[int],
        rows: int,
        until: float,
        held_by: Callable[[], LimiterState | None],
        why: Callable[[LimiterState], str],
    ) -> None:
        """Return once `held_by()` is None; the caller holds the lock, which is free meanwhile.

        Args:
            side: `writers` or `readers`.
            rows: of the call.
            until: when its time is up, on the clock of `time.monotonic`.
            held_by: looks at everything that could let the call go on, and returns the limit that does not let it; what
                it raises ends the wait.
            why: the message of the error.

        Raises:
            WaitTimeoutError: if the time is up.
        """
        side.append(rows)
        try:
            while (limit := held_by()) is not None:
                left = until - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError(why(limit))
                self._changed.wait(None if left == math.inf else min(left, threading.TIMEOUT_MAX))
        finally:
            side.remove(rows)

    def wake(self) -> None:
        """Let the calls that wait look again; the caller holds the lock."""
        if self.writers or self.readers:
            self._changed.notify_all()


@final
class LimiterState(DrawRule):
    """The counts of a `Flow` for the calls of one buffer. Every method is called under the lock of the buffer.

    A wait may outlast its limit, since a new sampler may bring another one, or none: a call that waits looks at the
    limits that its reader has now.

    Args:
        limiter: the rules; None is `RateLimiter()`, for a queue.
        max_size: rows that the storage can hold.
        waiters: the calls of the buffer that wait.

    Raises:
        KindError: if the limiter is none.
        OptionError: if sampling could never begin.
    """

    def __init__(self, limiter: Any, max_size: int, waiters: Waiters) -> None:
        rules = check_type("rate_limiter", limiter, RateLimiter, "RateLimiter(2, 64)") or RateLimiter()
        if rules.min_size_to_sample > max_size:
            msg = (
                f"min_size_to_sample={rules.min_size_to_sample} rows are never there: the storage has "
                f"max_size={max_size}"
            )
            raise OptionError(msg)
        self.flow = Flow(rules)
        self._delivered = 0
        self._waiters = waiters

    def __getstate__(self) -> dict[str, Any]:
        """Counts and rules; no call waits in a copy."""
        return {name: value for name, value in self.__dict__.items() if name != "_waiters"}

    def attach(self, waiters: Waiters) -> None:
        """Take the waiters of the engine that a copy belongs to."""
        self._waiters = waiters

    def patience_s(self, timeout_s: float | None) -> float:
        """Return how long a call may wait, in seconds: its own `timeout_s`, or the limiter's."""
        return float(self.flow.limiter.timeout_s if timeout_s is None else timeout_s)  # numpy's may be narrow

    def why_no_write(self, rows: int, stock: Stock, waited_s: float) -> str:
        """Say what a write waited for, and which calls wait."""
        why = f"a write of {rows} row(s) waited {waited_s:g} s for readers: {self.flow.why_no_write(rows, stock)}"
        return self.flow.told(why, stock, self._waiters.writers, self._waiters.readers)

    def why_no_draw(self, rows: int, stock: Stock, waited_s: float) -> str:
        """Say what a draw waited for, and which calls wait."""
        why = f"a draw of {rows} row(s) waited {waited_s:g} s for writers: {self.flow.why_no_draw(rows, stock)}"
        return self.flow.told(why, stock, self._waiters.writers, self._waiters.readers)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def may_write(self, reader: Reader, rows: int) -> bool:
        """Whether a write of so many rows may go ahead now.

        Raises:
            OptionError: if it could never be made.
        """
        stock = reader.stock()
        self.flow.check_write(rows, None if stock.room is None else reader.storage.capacity)
        return self.flow.may_write(rows, stock)

    def may_draw(self, reader: Reader, rows: int) -> bool:
        """Whether a batch of so many rows may be drawn now."""
        return self.flow.may_draw(rows, reader.stock())

    can_draw = may_draw

    def most_draws(self, reader: Reader, rows: int) -> int:
        """Return the rows of the largest batch of at most `rows` rows that may be drawn now; 0 if none may."""
        return self.flow.most_draws(rows, reader.stock())

    def wait(self, store: Store, rows: int, timeout_s: float | None) -> float | None:
        """Wait until so many rows may be written: return the seconds that are left, None if no wait was needed.

        Raises:
            OptionError: if they could never be written.
            WaitTimeoutError: naming what the call waits for.
        """
        reader = store.own

        def held_by() -> LimiterState | None:
            return next((limit for limit in reader.limits if not limit.may_write(reader, rows)), None)

        if held_by() is None:
            return None
        waited_s = self.patience_s(timeout_s)
        until = time.monotonic() + waited_s
        writers = self._waiters.writers
        self._waiters.wait(
            writers, rows, until, held_by, lambda limit: limit.why_no_write(rows, reader.stock(), waited_s)
        )
        return max(0.0, until - time.monotonic())

    def wait_to_draw(self, reader: Reader, rows: int, ask: Ask, queued: Callable[[], bool]) -> int:
        """Return once a batch of so many rows may be drawn, or one is queued.

        Returns:
            The rows to draw: fewer if the time is up, and at least `ask.min_rows` may be drawn.

        Raises:
            OptionError: if it could never be drawn.
            WaitTimeoutError: naming what the call waits for.
        """
        if queued() or reader.may_draw(rows):
            return rows
        begun = ask.begun(self)
        waited_s, until = begun.timeout_s or 0.0, begun.until or 0.0

        def held_by() -> LimiterState | None:
            if queued() or reader.may_draw(rows):
                return None
            sampler = reader.sampler
            most = as_counting(sampler).draws_of(reader.storage.capacity) if sampler.counting else None
            for limit in reader.limits:
                limit.flow.check_draw(ask.min_rows or rows, most)
            return reader.limits[0]

        try:
            self._waiters.wait(
                self._waiters.readers,
                rows,
                until,
                held_by,
                lambda limit: limit.why_no_draw(rows, reader.stock(), waited_s),
            )
        except WaitTimeoutError:
            fewer = 0 if ask.min_rows is None else largest_batch(reader, rows, ask.min_rows)
            if not fewer:
                raise
            return fewer
        return rows

    # -- counts -------------------------------------------------------------------------------------------------------

    def direct(self, store: Store) -> bool:  # noqa: ARG002
        """Return True: native calls ask it first (`admits`)."""
        return True

    def admits(self, reader: Reader, rows: int) -> bool:
        """Whether so many rows may be written now; False also if they never may."""
        try:
            return self.may_write(reader, rows)
        except OptionError:
            return False

    def reported(self, store: Store, placement: Placement) -> None:
        """Count rows written."""
        self.written(store, placement, None)

    def written(self, store: Store, placement: Placement, found: Any) -> None:  # noqa: ARG002
        """Count rows written."""
        self.flow.wrote(placement.total)
        self._waiters.wake()

    def drew(self, draw: Draw) -> None:
        """Count the rows of a draw."""
        self.flow.drew(rows_of(draw))
        self._waiters.wake()

    def delivered(self, reader: Reader, draw: Draw) -> None:
        """Count the rows of a batch that was delivered."""
        if self.knows(draw, reader.ring):
            self._delivered += rows_of(draw)
        self._waiters.wake()

    def canceled(self, reader: Reader, draw: Draw) -> None:
        """Undo the count of a draw that was not delivered."""
        if self.knows(draw, reader.ring):
            self.flow.drew(-rows_of(draw))
        self._waiters.wake()

    def begin(self, ring: Ring) -> None:
        """Start the counts from the rows present."""
        super().begin(ring)
        self.flow.begin(ring.rows)
        self._delivered = 0
        self._waiters.wake()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def saved(self, store: Store, queued: Sequence[Draw]) -> dict[str, Any]:  # noqa: ARG002
        """Return the counts: rows drawn are those delivered and those queued, as only these will ever arrive."""
        return {"flow": {**self.flow.state_dict(), "drawn": self._delivered + sum(map(rows_of, queued))}}

    def load_state(self, state: dict[str, Any] | None, ring: Ring, pending: Sequence[Draw]) -> None:
        """Restore counts. The rules stay this buffer's own: saved under others, the counts restart."""
        differing = self.flow.load_state_dict(state, ring.rows)
        self._delivered = self.flow.drawn - sum(map(rows_of, pending))
        self._since = ring.written
        self._waiters.wake()
        if differing is not None:
            warnings.warn(
                f"the checkpoint was saved under another rate limiter: {differing}. This buffer keeps its own, and "
                "its counts restart",
                UserWarning,
                stacklevel=2,
            )


def limits_of(reader: Reader, limiter: RateLimiter | None) -> tuple[LimiterState, ...]:
    """Return what makes the calls of a reader wait: for a rate limiter, or a queue; counts that go on are kept.

    Raises:
        KindError: if the limiter is no `RateLimiter`.
        OptionError: if sampling could never begin.
    """
    sampler = reader.sampler
    if limiter is None and not (sampler.counting and as_counting(sampler).bounded):
        return ()
    if limiter is None and reader.limits:
        return reader.limits
    limit = LimiterState(limiter, reader.storage.max_size, reader.waiters)
    limit.begin(reader.ring)
    return (limit,)


def largest_batch(reader: Reader, rows: int, least: int) -> int:
    """Return the rows of the largest batch of `least` to `rows` rows that may be drawn now; 0 if none may."""
    view = reader.view()
    most = min((rule.most_draws(reader, rows) for rule in reader.rules), default=rows)
    for size in range(most, least - 1, -1):
        try:
            reader.sampler.check_draw(view, size)
        except (OptionError, UsageError):
            continue  # slices and groups are drawn in whole numbers of rows
        return size
    return 0


def rows_of(draw: Draw) -> int:
    """Return how many rows of a batch a draw counts for: those of slices, else the rows drawn."""
    return int((draw.slots if draw.rows_each is None else draw.records).shape[0])


def as_counting(sampler: Sampler) -> CountingSampler:
    """Cast to `CountingSampler`."""
    return sampler  # type: ignore[return-value]


def replayable(data: Any) -> Any:
    """Return rows that can be read twice: before a wait, and after it."""
    return list(data) if isinstance(data, Iterator) else data


def check_counting(sampler: Sampler, writer: Writer, unit: Any, wanted: Any) -> None:
    """Check what goes with a sampler that uses rows up.

    Raises:
        OptionError: naming it.
    """
    if not sampler.counting:
        return
    if (unit is not None and not unit.plain) or wanted is not None:
        msg = (
            f"{sampler!r} counts the draws of single rows, it has no windows or episodes: leave out "
            f"{'sample_unit' if unit is not None and not unit.plain else 'episodes'}"
        )
        raise OptionError(msg)
    if as_counting(sampler).in_order and not writer.in_order:
        msg = (
            f"{sampler!r} needs rows in the order in which they came: use RoundRobinWriter, not {type(writer).__name__}"
        )
        raise OptionError(msg)
