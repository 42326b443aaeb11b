"""Flow control without clocks or locks: counts in, verdict out. Who waits, and how long, is not decided here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Flow", "RateLimiter", "Stock"]


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

    The balance `samples_per_insert * rows written - rows drawn` stays within `error_buffer` of
    `samples_per_insert * min_size_to_sample`: a write that would lift it above the band waits for readers, a draw that
    would bring it below waits for writers. Below `min_size_to_sample` rows no draw is made, and every write goes ahead
    (the last of these may leave the band upwards). Whole calls are admitted or wait: a batch counts with all its rows.
    A frozen record: one limiter may serve several buffers, each of which has its own counts.

    Args:
        samples_per_insert: rows drawn for each row written; None sets no ratio.
        error_buffer: how far the balance may be off, in rows drawn; at least `max(1, samples_per_insert)`. Give it half
            of `samples_per_insert * (rows of a write) + (rows of a batch)` or more: narrower bands can stop both sides.
        min_size_to_sample: rows that can be drawn before the first draw is made.
        timeout_s: longest wait of calls that name none, in seconds; `math.inf` waits without end.

    Raises:
        OptionError: for numbers out of range, or one of ratio and error buffer without the other.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, RateLimiter, ReplayBuffer
        >>> limiter = RateLimiter(samples_per_insert=2, error_buffer=16, min_size_to_sample=8)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, rate_limiter=limiter)
        >>> index = rb.extend(torch.arange(16), timeout_s=1.0)
        >>> len(rb.sample(timeout_s=1.0))
        4
    """

    samples_per_insert: float | None = None
    error_buffer: float | None = None
    min_size_to_sample: int = 1
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Check."""
        size: Any = self.min_size_to_sample
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            msg = f"min_size_to_sample must be an integer of at least 1 (rows), got {size!r}"
            raise OptionError(msg)
        check_timeout(self.timeout_s)
        ratio: Any = self.samples_per_insert
        error: Any = self.error_buffer
        if (ratio is None) != (error is None):
            msg = (
                f"samples_per_insert and error_buffer go together, got {ratio!r} and {error!r}: give both, or neither "
                "for min_size_to_sample alone"
            )
            raise OptionError(msg)
        if ratio is None or error is None:
            return
        for name, value in (("samples_per_insert", ratio), ("error_buffer", error)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                msg = f"{name} must be a finite number above 0, got {value!r}"
                raise OptionError(msg)
        if error < max(1, ratio):
            msg = (
                f"error_buffer must be at least max(1, samples_per_insert) = {max(1, ratio):g}, or no row could be "
                f"written or drawn, got {error:g}"
            )
            raise OptionError(msg)

    @property
    def band(self) -> tuple[float, float]:
        """Least and largest balance; infinite where there is no ratio."""
        if self.samples_per_insert is None or self.error_buffer is None:
            return -math.inf, math.inf
        middle = self.samples_per_insert * self.min_size_to_sample
        return middle - self.error_buffer, middle + self.error_buffer


def check_timeout(timeout_s: Any) -> None:
    """Refuse what is no number of seconds.

    Raises:
        OptionError: if it is negative or no number.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or not float(timeout_s) >= 0:
        msg = f"timeout_s must be a number of seconds of at least 0 (math.inf waits without end), got {timeout_s!r}"
        raise OptionError(msg)


def check_wait(timeout_s: Any, *, waits: bool) -> None:
    """Refuse a timeout that is none, or that no call would wait for; None is no timeout.

    Raises:
        OptionError: naming it.
    """
    if timeout_s is None:
        return
    check_timeout(timeout_s)
    if not waits:
        msg = f"timeout_s={timeout_s} has no effect: no call waits in a buffer without rate_limiter; leave it out"
        raise OptionError(msg)


@final
class Flow:
    """Counts of rows written and drawn, and what a limiter says of them. Not thread-safe: its owner holds a lock.

    Pure: it knows neither time nor threads, so that it works inside any server. Verdicts are exact: the
    numbers of the limiter are taken as fractions and compared as integers. Cost of each: O(1).

    Args:
        limiter: the rules.
    """

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self.written = 0
        self.drawn = 0
        self._step: tuple[int, int, int, int] | None = None
        if limiter.samples_per_insert is not None and limiter.error_buffer is not None:
            ratio, error = Fraction(limiter.samples_per_insert), Fraction(limiter.error_buffer)
            scale = math.lcm(ratio.denominator, error.denominator)
            middle = ratio * limiter.min_size_to_sample
            self._step = int(ratio * scale), scale, int((middle - error) * scale), int((middle + error) * scale)

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

    def check_write(self, rows: int, capacity: int | None) -> None:
        """Refuse a write that could never go ahead; `capacity` is that of a queue.

        Raises:
            OptionError: naming what it exceeds.
        """
        if capacity is not None and rows > capacity:
            msg = f"a write of {rows} rows never fits into a queue of {capacity}: write at most {capacity} rows at once"
            raise OptionError(msg)
        if self._step is not None and rows * self._step[0] > self._step[3] - self._step[2]:
            self._refuse(f"a write of {rows} rows moves the balance by {self.limiter.samples_per_insert:g} each")

    def check_draw(self, rows: int, capacity: int | None) -> None:
        """Refuse a batch that could never be drawn; `capacity` is the draws that a full buffer is good for.

        Raises:
            OptionError: naming what it exceeds.
        """
        if capacity is not None and rows > capacity:
            msg = f"a batch of {rows} rows never comes together: a full buffer is good for {capacity} draws"
            raise OptionError(msg)
        if self._step is not None and rows * self._step[1] > self._step[3] - self._step[2]:
            self._refuse(f"a batch of {rows} rows moves the balance by 1 each")

    def _refuse(self, what: str) -> None:
        low, high = self.limiter.band
        msg = f"{what}, more than the band [{low:g}, {high:g}] is wide: raise error_buffer, or make it smaller"
        raise OptionError(msg)

    def wrote(self, rows: int) -> None:
        """Count rows written."""
        self.written += rows

    def drew(self, rows: int) -> None:
        """Count rows drawn; a negative number takes draws back that reached nobody."""
        self.drawn += rows

    def begin(self, rows: int) -> None:
        """Begin anew with rows that are there already: as if the buffer had just been filled to the first draw."""
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
        ratio, error = self.limiter.samples_per_insert, self.limiter.error_buffer
        if ratio is None or error is None:
            return told
        low, high = self.limiter.band
        balance = ratio * self.written - self.drawn
        return (
            f"{told}; {ratio:g} x {self.written} - {self.drawn} = {balance:g} must stay in [{low:g}, {high:g}] "
            f"(samples_per_insert={ratio:g}, error_buffer={error:g})"
        )

    def told(self, what: str, stock: Stock, writers: Sequence[int], readers: Sequence[int]) -> str:
        """Say who has waited in vain, what there is, and what to do; those who wait now are named by their rows."""
        ratio, least = self.limiter.samples_per_insert, self.limiter.min_size_to_sample
        advice = "raise timeout_s, or see what became of the other side"
        if writers and readers and ratio is not None:
            wide = (max(writers) * ratio + max(readers)) / 2
            advice = f"both sides wait: if the band is too narrow for these calls, make error_buffer {wide:g} or more"
        rows = f"{stock.rows} row(s) can be drawn (min_size_to_sample={least})"
        waiting = f"waiting now: {len(writers)} writer(s), {len(readers)} reader(s)"
        return f"{what}; {self.counts()}; {rows}; {waiting}: {advice}"

    def state_dict(self) -> dict[str, Any]:
        """Return counts, and the rules that they were counted under."""
        rules = self.limiter
        named = {name: getattr(rules, name) for name in ("samples_per_insert", "error_buffer", "min_size_to_sample")}
        return {"written": self.written, "drawn": self.drawn, **named}

    def load_state_dict(self, state: dict[str, Any] | None, rows: int) -> str | None:
        """Restore counts that were counted under the same rules; else begin anew with `rows` rows.

        Returns:
            What differs, in words, where the rules do; None otherwise.
        """
        mine = self.state_dict()
        rules = mine.keys() - {"written", "drawn"} if state is not None else ()
        differing = sorted(name for name in rules if mine[name] != (state or {})[name])
        if state is None or differing:
            self.begin(rows)
        else:
            self.written, self.drawn = int(state["written"]), int(state["drawn"])
        return ", ".join(f"{name}={(state or {})[name]} (now {mine[name]})" for name in differing) or None
