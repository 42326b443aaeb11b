"""Rate limiting: the rules and counts by which readers and writers wait for each other, and the waiting itself."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np

from ostinato.buffers.observer import Observer
from ostinato.core.processes import next_place, whole_in_forks
from ostinato.errors import CheckpointError, KindError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.records import Ticket
    from ostinato.buffers.store import Store
    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring
    from ostinato.samplers import CountingSampler, Sampler
    from ostinato.writers import Writer

Number: TypeAlias = float | Fraction | Decimal | np.number[Any]
Exact: TypeAlias = Fraction | float
"""A fraction, or an infinite float."""


_LONG = 10**15
"""Integers from here on are shown rounded."""


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
    `min_diff` and `max_diff`, which do not depend on `min_size_to_sample`. Numbers are those that were written, not
    their nearest binary fractions: with `samples_per_insert=0.3` ten more rows written allow exactly three more drawn.

    Args:
        samples_per_insert: rows drawn for each row written: an int, a float, a number of NumPy, a `Fraction` or a
            `Decimal`, as are the other numbers; None sets no ratio.
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

    samples_per_insert: Number | None = None
    error_buffer: Number | tuple[Number, Number] | None = None
    min_size_to_sample: int = 1
    timeout_s: float = 60.0
    _: KW_ONLY
    min_diff: Number | None = None
    max_diff: Number | None = None

    def __post_init__(self) -> None:
        """Check."""
        size: Any = self.min_size_to_sample
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            msg = f"min_size_to_sample must be an integer of at least 1 (rows), got {size!r}"
            raise OptionError(msg)
        check_timeout(self.timeout_s)
        if not self._check_given():
            return
        ratio = _checked("samples_per_insert", self.samples_per_insert)
        error = self.error_buffer
        if error is not None and not isinstance(error, tuple):
            _check_error(_checked("error_buffer", error), ratio)
            return
        (least, low), (most, high) = self._edges()
        if not low < high:
            msg = f"{least} must be below {most}, got {say(low)} and {say(high)}"
            raise OptionError(msg)
        if error is not None:
            _check_pair(low, high, ratio, ratio * int(size))
        _check_progress(low, high, ratio)

    def _check_given(self) -> bool:
        """Check which options are there; return whether there is a ratio."""
        ratio, error, least, most = self.samples_per_insert, self.error_buffer, self.min_diff, self.max_diff
        if error is not None and (least, most) != (None, None):
            msg = (
                f"the band is given by error_buffer, or by min_diff and max_diff, got {error!r} and {least!r}, "
                f"{most!r}: leave one of them out"
            )
            raise OptionError(msg)
        if (least is None) != (most is None):
            msg = (
                f"min_diff and max_diff go together, got {least!r} and {most!r}: for no limit give -math.inf, math.inf"
            )
            raise OptionError(msg)
        if (ratio is None) != (error is None and least is None):
            msg = (
                f"samples_per_insert and error_buffer (or min_diff and max_diff) go together, got {ratio!r} and "
                f"{least if error is None else error!r}: give both, or neither for min_size_to_sample alone"
            )
            raise OptionError(msg)
        return ratio is not None

    def _edges(self) -> tuple[tuple[str, Exact], tuple[str, Exact]]:
        """Return the names and values of explicit edges, checked."""
        pair: Any = self.error_buffer
        if pair is None:
            names, pair = ("min_diff", "max_diff"), (self.min_diff, self.max_diff)
        elif len(pair) == 2:
            names = "error_buffer[0]", "error_buffer[1]"
        else:
            msg = f"error_buffer must be a number or a pair (min_diff, max_diff), got {pair!r}"
            raise OptionError(msg)
        edges = []
        for name, value, worst in zip(names, pair, (math.inf, -math.inf), strict=True):
            found = exact(value)
            if found is None or found == worst:
                msg = f"{name} must be a number, finite or {say(-worst)}, got {value!r}"
                raise OptionError(msg)
            edges.append((name, found))
        return edges[0], edges[1]

    @property
    def band(self) -> tuple[float, float]:
        """Least and largest balance; infinite where there is no ratio, or no limit on that side."""
        low, high = self.exact_band
        return float(low), float(high)

    @property
    def exact_ratio(self) -> Fraction | None:
        """The ratio as it was written; None if there is none."""
        found = exact(self.samples_per_insert)
        return found if isinstance(found, Fraction) else None

    @property
    def exact_band(self) -> tuple[Exact, Exact]:
        """Least and largest balance as they were written."""
        ratio, error = self.exact_ratio, self.error_buffer
        if ratio is None:
            return -math.inf, math.inf
        if error is None or isinstance(error, tuple):
            (_, low), (_, high) = self._edges()
            return low, high
        middle, off = ratio * int(self.min_size_to_sample), exact(error) or 0
        return middle - off, middle + off

    def rules(self) -> dict[str, Any]:
        """Return what the counts depend on, in one spelling for one limiter, as checkpoints hold it."""
        ratio, (low, high) = self.exact_ratio, self.exact_band
        found = {"samples_per_insert": _plain(ratio), "min_size_to_sample": int(self.min_size_to_sample)}
        if ratio is None:
            return {**found, "error_buffer": None}
        middle = ratio * int(self.min_size_to_sample)
        if isinstance(low, Fraction) and high - middle == middle - low:
            return {**found, "error_buffer": _plain(high - middle)}
        return {**found, "error_buffer": None, "min_diff": _plain(low), "max_diff": _plain(high)}


# -- numbers as they were written -------------------------------------------------------------------------------------


def exact(value: Any) -> Exact | None:
    """Return a number as it was written: 0.3 as three tenths; infinite ones as floats; None for what is no number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (Real, Decimal)):
        return None
    if isinstance(value, Fraction):
        return value
    if value.is_nan() if isinstance(value, Decimal) else value != value:  # noqa: PLR0124 (a NaN, of whatever type)
        return None
    return float(value) if value in {math.inf, -math.inf} else Fraction(str(value))


def say(value: Exact) -> str:
    """Return a number as text for messages."""
    if isinstance(value, float) or (value.denominator == 1 and abs(value.numerator) >= _LONG):
        return f"{float(value):g}"
    if value.denominator == 1:
        return str(value.numerator)
    text = f"{float(value):.12g}"
    return text if Fraction(text) == value else str(value)


def _plain(value: Exact | None) -> float | str | None:
    """Return a number as JSON holds it: of equal numbers the same; text where no float is written like it."""
    if value is None:
        return None
    if isinstance(value, float):
        return str(value)
    try:
        near = float(value)
    except OverflowError:
        return str(value)
    return near if Fraction(str(near)) == value else str(value)


def _checked(name: str, value: Any) -> Fraction:
    found = exact(value)
    if not isinstance(found, Fraction) or found <= 0:
        msg = f"{name} must be a finite number above 0, got {value!r}"
        raise OptionError(msg)
    return found


def _check_error(error: Fraction, ratio: Fraction) -> None:
    least: Fraction = max(Fraction(1), ratio)
    if error < least:
        msg = (
            f"error_buffer must be at least max(1, samples_per_insert) = {say(least)}, or no row "
            f"could be written or drawn, got {say(error)}"
        )
        raise OptionError(msg)


def _check_pair(low: Exact, high: Exact, ratio: Fraction, middle: Fraction) -> None:
    """Check the pair of Reverb's `SampleToInsertRatio`, as it does."""
    least: Fraction = 2 * max(Fraction(1), ratio)
    if high - low < least:
        msg = (
            f"error_buffer=({say(low)}, {say(high)}) must be at least 2 * max(1, samples_per_insert) = {say(least)} "
            "wide: a narrower band can stop both sides; min_diff and max_diff take any band in which single rows move"
        )
        raise OptionError(msg)
    if low > middle:
        msg = (
            f"error_buffer=({say(low)}, {say(high)}) is above samples_per_insert * min_size_to_sample = {say(middle)}: "
            "readers would wait at min_size_to_sample rows; raise that, or give min_diff and max_diff"
        )
        raise OptionError(msg)


def _check_progress(low: Exact, high: Exact, ratio: Fraction) -> None:
    """Check that at every balance a row can be written or drawn: else both sides wait for each other.

    Both wait at balances above `high - ratio` and below `low + 1`; a balance is a multiple of `1 / denominator`.
    """
    if isinstance(low, float) or isinstance(high, float):
        return
    step = ratio.denominator
    first = math.floor((high - ratio) * step) + 1
    if Fraction(first, step) < low + 1:
        msg = (
            f"min_diff={say(low)} and max_diff={say(high)} are too close: at the balance {say(Fraction(first, step))} "
            f"no row could be written or drawn; samples_per_insert + 1 = {say(ratio + 1)} between them always works"
        )
        raise OptionError(msg)


def check_timeout(timeout_s: Any) -> None:
    """Check a number of seconds.

    Raises:
        OptionError: if it is negative or no number.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or not float(timeout_s) >= 0:
        msg = f"timeout_s must be a number of seconds of at least 0 (math.inf waits without end), got {timeout_s!r}"
        raise OptionError(msg)


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


class _Step(NamedTuple):
    """A limiter in whole numbers, so that verdicts are exact."""

    each: int
    """What a row written adds to the balance."""
    one: int
    """What a row drawn takes from it."""
    low: float
    """Least balance: an integer, or infinite."""
    high: float


def _steps(limiter: RateLimiter) -> _Step | None:
    ratio, edges = limiter.exact_ratio, limiter.exact_band
    if ratio is None:
        return None
    scale = math.lcm(ratio.denominator, *(edge.denominator for edge in edges if isinstance(edge, Fraction)))
    low, high = (int(edge * scale) if isinstance(edge, Fraction) else edge for edge in edges)
    return _Step(int(ratio * scale), scale, low, high)


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
    if isinstance(min_batch, bool) or not isinstance(min_batch, Integral) or not 1 <= int(min_batch) <= size:
        msg = f"min_batch must be an integer in [1, {size}], the rows of a batch, got {min_batch!r}"
        raise OptionError(msg)
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

    Pure: it knows neither time nor threads, so that it works inside any server. Verdicts are exact: the
    numbers of the limiter are taken as they were written, and compared as integers. Cost of each: O(1).

    Args:
        limiter: the rules.
    """

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self.written = 0
        self.drawn = 0
        self._step = _steps(limiter)

    def may_write(self, rows: int, stock: Stock) -> bool:
        """Whether a write of so many rows may go ahead now."""
        if stock.room is not None and rows > stock.room:
            return False
        if self._step is None or stock.rows < self.limiter.min_size_to_sample:
            return True
        each, one, _, high = self._step
        return (self.written + rows) * each - self.drawn * one <= high

    def may_draw(self, rows: int, stock: Stock) -> bool:
        """Whether a batch of so many rows may be drawn now."""
        if stock.rows < self.limiter.min_size_to_sample or (stock.draws is not None and rows > stock.draws):
            return False
        if self._step is None:
            return True
        each, one, low, _ = self._step
        return self.written * each - (self.drawn + rows) * one >= low

    def most_draws(self, rows: int, stock: Stock) -> int:
        """Return the rows of the largest batch of at most `rows` rows that may be drawn now; 0 if none may."""
        return int(max(0, min(rows, self.draw_room(stock))))

    def draw_room(self, stock: Stock) -> float:
        """Return how many rows may be drawn before others are written; `math.inf` for any number."""
        if stock.rows < self.limiter.min_size_to_sample:
            return 0
        most = math.inf if stock.draws is None else stock.draws
        if self._step is None or self._step.low == -math.inf:
            return most
        each, one, low, _ = self._step
        return min(most, (self.written * each - int(low)) // one - self.drawn)

    def write_room(self) -> float:
        """Return how many rows the band allows to be written before others are drawn; `math.inf` for any number."""
        if self._step is None or self._step.high == math.inf:
            return math.inf
        each, one, _, high = self._step
        return (int(high) + self.drawn * one) // each - self.written

    def check_write(self, rows: int, capacity: int | None) -> None:
        """Check that a write can ever be made; `capacity` is that of a queue.

        Raises:
            OptionError: naming what it exceeds.
        """
        if capacity is not None and rows > capacity:
            msg = f"a write of {rows} rows never fits into a queue of {capacity}: write at most {capacity} rows at once"
            raise OptionError(msg)
        if self._step is not None and rows * self._step[0] > self._step[3] - self._step[2]:
            self._refuse(f"a write of {rows} rows moves the balance by {self._ratio} each")

    def check_draw(self, rows: int, capacity: int | None) -> None:
        """Check that a batch can ever be drawn; `capacity` is the number of draws that a full buffer permits.

        Raises:
            OptionError: naming what it exceeds.
        """
        if capacity is not None and rows > capacity:
            msg = f"a batch of {rows} rows never comes together: a full buffer is good for {capacity} draws"
            raise OptionError(msg)
        if self._step is not None and rows * self._step[1] > self._step[3] - self._step[2]:
            self._refuse(f"a batch of {rows} rows moves the balance by 1 each")

    def _refuse(self, what: str) -> None:
        low, high = map(say, self.limiter.exact_band)
        wider = "raise error_buffer" if self._symmetric else "move min_diff and max_diff apart"
        msg = f"{what}, more than the band [{low}, {high}] is wide: {wider}, or make it smaller"
        raise OptionError(msg)

    @property
    def _symmetric(self) -> bool:
        """Whether the band was given by one number."""
        return isinstance(self.limiter.error_buffer, (Real, Decimal))

    @property
    def _ratio(self) -> str:
        return say(self.limiter.exact_ratio or Fraction(0))

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
        if self._step is None:
            return "nothing holds it up"
        each, one, _, high = self._step
        more = -((high - (self.written + rows) * each + self.drawn * one) // one)
        return f"{more} more row(s) must be drawn before {rows} can be written"

    def why_no_draw(self, rows: int, stock: Stock) -> str:
        """Say what a batch of so many rows waits for."""
        least = self.limiter.min_size_to_sample
        if stock.rows < least:
            return f"{stock.rows} row(s) can be drawn, min_size_to_sample is {least}"
        if stock.draws is not None and rows > stock.draws:
            return f"{rows} rows were asked for, and the rows present can be drawn {stock.draws} more time(s) in all"
        if self._step is None:
            return "nothing holds it up"
        each, one, low, _ = self._step
        more = -((self.written * each - (self.drawn + rows) * one - low) // each)
        return f"{more} more row(s) must be written before {rows} can be drawn"

    def counts(self) -> str:
        """Say what was counted, and what is allowed."""
        told = f"{self.written} row(s) written, {self.drawn} drawn"
        ratio = self.limiter.exact_ratio
        if ratio is None:
            return told
        low, high = map(say, self.limiter.exact_band)
        error: Any = self.limiter.error_buffer
        options = f"error_buffer={say(exact(error) or 0.0)}" if self._symmetric else f"min_diff={low}, max_diff={high}"
        balance = ratio * self.written - self.drawn
        return (
            f"{told}; {self._ratio} x {self.written} - {self.drawn} = {say(balance)} must stay in [{low}, {high}] "
            f"(samples_per_insert={self._ratio}, {options})"
        )

    def told(self, what: str, stock: Stock, writers: Sequence[int], readers: Sequence[int]) -> str:
        """Say which call has timed out, what there is, and what to do; calls that wait now are named by their rows."""
        ratio, least = self.limiter.exact_ratio, self.limiter.min_size_to_sample
        advice = "raise timeout_s, or see what became of the other side"
        if writers and readers and ratio is not None:
            wide = max(writers) * ratio + max(readers)
            how = f"error_buffer {say(wide / 2)}" if self._symmetric else f"max_diff - min_diff {say(wide)}"
            advice = f"both sides wait: if the band is too narrow for these calls, make {how} or more"
        rows = f"{stock.rows} row(s) can be drawn (min_size_to_sample={least})"
        waiting = f"waiting now: {len(writers)} writer(s), {len(readers)} reader(s)"
        return f"{what}; {self.counts()}; {rows}; {waiting}: {advice}"

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

    def begun(self, gate: Gate) -> Ask:
        """Return the same, its time beginning now."""
        patience_s = gate.patience_s(self.timeout_s)
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
        self, side: list[int], rows: int, until: float, held_by: Callable[[], Gate | None], why: Callable[[Gate], str]
    ) -> None:
        """Return once `held_by()` is None; the caller holds the lock, which is free meanwhile.

        Args:
            side: `writers` or `readers`.
            rows: of the call.
            until: when its time is up, on the clock of `time.monotonic`.
            held_by: looks at everything that could let the call go on, and returns the gate that does not let it; what
                it raises ends the wait.
            why: the message of the error.

        Raises:
            WaitTimeoutError: if the time is up.
        """
        side.append(rows)
        try:
            while (gate := held_by()) is not None:
                left = until - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError(why(gate))
                self._changed.wait(None if left == math.inf else min(left, threading.TIMEOUT_MAX))
        finally:
            side.remove(rows)

    def wake(self) -> None:
        """Let the calls that wait look again; the caller holds the lock."""
        if self.writers or self.readers:
            self._changed.notify_all()


@final
class Gate(Observer):
    """The counts of a `Flow` for the calls of one buffer. Every method is called under the engine's lock.

    It decides; the engine (`wait_to_write`, `wait_to_draw`) waits, since a wait may outlast the gate: a new
    sampler may bring another one, or none.

    Args:
        limiter: the rules; None is `RateLimiter()`, for a queue.
        max_size: rows that the storage can hold.
        waiters: the calls of the buffer that wait.

    Raises:
        KindError: if the limiter is none.
        OptionError: if sampling could never begin.
    """

    def __init__(self, limiter: Any, max_size: int, waiters: Waiters) -> None:
        if limiter is not None and not isinstance(limiter, RateLimiter):
            msg = f"rate_limiter must be an ostinato.RateLimiter or None, got {type(limiter).__name__}"
            raise KindError(msg)
        rules = RateLimiter() if limiter is None else limiter
        if rules.min_size_to_sample > max_size:
            msg = (
                f"min_size_to_sample={rules.min_size_to_sample} rows are never there: the storage has "
                f"max_size={max_size}"
            )
            raise OptionError(msg)
        self.flow = Flow(rules)
        self._delivered = 0
        self._since = 0  # serial number of the first row that a draw under these counts may have met
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

    # -- counts -------------------------------------------------------------------------------------------------------

    def wait(self, store: Store, rows: int, timeout_s: float | None) -> float | None:
        """Wait for readers; see `Reader.wait_to_write`."""
        return store.own.wait_to_write(rows, timeout_s)

    def written(self, store: Store, placement: Placement, found: Any) -> None:  # noqa: ARG002
        """Count rows written."""
        self.flow.wrote(placement.total)
        self._waiters.wake()

    def cleared(self, store: Store) -> None:
        """Start the counts anew."""
        self.begin(store.ring)

    replaced = cleared

    def drew(self, ticket: Ticket) -> None:
        """Count the rows of a draw."""
        self.flow.drew(rows_of(ticket))
        self._waiters.wake()

    def delivered(self, ticket: Ticket, ring: Ring) -> bool:
        """Count the rows of a batch that was delivered; return whether its draw is one of these counts."""
        known = self._knows(ticket, ring)
        if known:
            self._delivered += rows_of(ticket)
        return known

    def undrew(self, ticket: Ticket, ring: Ring) -> None:
        """Undo the count of a draw that was not delivered."""
        if self._knows(ticket, ring):
            self.flow.drew(-rows_of(ticket))
        self._waiters.wake()

    def _knows(self, ticket: Ticket, ring: Ring) -> bool:
        return ticket.ring is ring and ticket.serial >= self._since

    def begin(self, ring: Ring) -> None:
        """Start the counts from the rows present."""
        self.flow.begin(ring.rows)
        # of an empty buffer nothing can be drawn before the next write: earlier draws are not of these counts
        self._delivered, self._since = 0, ring.written + (ring.rows == 0)
        self._waiters.wake()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, queued: Sequence[Ticket]) -> dict[str, Any]:
        """Return the counts: rows drawn are those delivered and those queued, as only these will ever arrive."""
        return {**self.flow.state_dict(), "drawn": self._delivered + sum(map(rows_of, queued))}

    def load_state_dict(self, state: dict[str, Any] | None, ring: Ring, pending: Sequence[Ticket]) -> None:
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


def rows_of(ticket: Ticket) -> int:
    """Return how many rows of a batch a draw counts for: those of slices, else the rows drawn."""
    return int((ticket.draw.slots if ticket.draw.rows_each is None else ticket.records).shape[0])


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
