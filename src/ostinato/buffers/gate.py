"""The gate: readers and writers that wait for each other, with timeouts, around the counts of `limits`."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.buffers.limits import Flow, RateLimiter, Stock
from ostinato.errors import KindError, OptionError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.engine import Engine
    from ostinato.buffers.records import AnyEngine, Ticket
    from ostinato.samplers import CountingSampler, Sampler
    from ostinato.writers import Writer

__all__ = [
    "Ask",
    "Gate",
    "as_counting",
    "check_counting",
    "give_back",
    "make_gate",
    "renew_gate",
    "replayable",
    "retake",
    "stock",
]


class Ask(NamedTuple):
    """What one call of `sample` asks for beside its size."""

    timeout_s: float | None = None
    """Longest wait; None is the limiter's."""
    max_age: int | None = None
    """Oldest version, counted back from the newest one; None takes all rows."""


@final
class Gate:
    """Holds calls back until a `Flow` lets them through. Every method is called under the engine's lock.

    While a call waits the lock is free. A thread that dies while it waits leaves nothing behind; one that
    dies elsewhere is waited for no longer than the timeout.
    """

    def __init__(self, limiter: RateLimiter, lock: threading.RLock) -> None:
        self.flow = Flow(limiter)
        self._delivered = 0
        self._since = 0  # number of the last write before counts began: older draws do not count
        self._writers: list[int] = []
        self._readers: list[int] = []
        self._changed = threading.Condition(lock)

    def __getstate__(self) -> dict[str, Any]:
        """Counts and rules; nobody waits in a copy."""
        return {"flow": self.flow, "_delivered": self._delivered, "_since": self._since}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wait for `attach`."""
        self.__dict__.update(state, _writers=[], _readers=[])

    def attach(self, lock: threading.RLock) -> None:
        """Take the lock of the engine that a copy belongs to."""
        self._changed = threading.Condition(lock)

    # -- calls that may wait ------------------------------------------------------------------------------------------

    def hold_write(self, engine: Engine, rows: int, timeout_s: float | None) -> bool:
        """Return once `rows` rows may be written; True if that took a wait, in which anything may have changed.

        Raises:
            OptionError: if they could never be written.
            WaitTimeoutError: naming who waits for what.
        """
        flow, sampler = self.flow, engine.sampler
        bounded = sampler.counting and as_counting(sampler).bounded
        flow.check_write(rows, engine.storage.capacity if bounded else None)
        if flow.may_write(rows, stock(engine)):
            return False
        done = lambda: flow.may_write(rows, stock(engine))  # noqa: E731
        why = lambda: f"a write of {rows} row(s) waited {{}} s for readers: {flow.why_no_write(rows, stock(engine))}"  # noqa: E731
        self._wait(engine, self._writers, rows, timeout_s, done, why)
        return True

    def hold_draw(self, engine: Engine, rows: int, timeout_s: float | None) -> None:
        """Return once `rows` rows may be drawn, or a checkpoint has brought a draw along.

        Raises:
            OptionError: if they could never be drawn.
            WaitTimeoutError: naming who waits for what.
        """
        if engine.pending or self.may_draw(engine, rows):
            return
        flow, sampler = self.flow, engine.sampler
        most = as_counting(sampler).draws_of(engine.storage.capacity) if sampler.counting else None
        flow.check_draw(rows, most)
        done = lambda: bool(engine.pending) or self.may_draw(engine, rows)  # noqa: E731
        why = lambda: f"a draw of {rows} row(s) waited {{}} s for writers: {flow.why_no_draw(rows, stock(engine))}"  # noqa: E731
        self._wait(engine, self._readers, rows, timeout_s, done, why)

    def may_draw(self, engine: AnyEngine, rows: int) -> bool:
        """Whether so many rows may be drawn now."""
        return self.flow.may_draw(rows, stock(engine))

    def _wait(
        self,
        engine: Engine,
        side: list[int],
        rows: int,
        timeout_s: float | None,
        done: Callable[[], bool],
        why: Callable[[], str],
    ) -> None:
        patience = float(self.flow.limiter.timeout_s if timeout_s is None else timeout_s)  # numpy's may be narrow
        until = time.monotonic() + patience
        side.append(rows)
        try:
            while not done():
                left = until - time.monotonic()
                if left <= 0:
                    told = self.flow.told(why().format(f"{patience:g}"), stock(engine), self._writers, self._readers)
                    raise WaitTimeoutError(told)
                self._changed.wait(None if left == math.inf else min(left, threading.TIMEOUT_MAX))
        finally:
            side.remove(rows)

    # -- what has happened --------------------------------------------------------------------------------------------

    def wrote(self, rows: int) -> None:
        """Count rows written."""
        self.flow.wrote(rows)
        self.wake()

    def drew(self, ticket: Ticket) -> None:
        """Count the rows of a draw."""
        self.flow.drew(rows_of(ticket))
        self.wake()

    def delivered(self, engine: Engine, ticket: Ticket) -> None:
        """Count the rows of a batch that reached its reader."""
        if not self._knows(engine, ticket):
            return
        self._delivered += rows_of(ticket)
        if engine.sampler.counting and ticket.sampler is engine.sampler:
            as_counting(engine.sampler).deliver(ticket.draw)
        self.wake()

    def undrew(self, engine: Engine, ticket: Ticket) -> None:
        """Take a draw back that reached nobody."""
        if self._knows(engine, ticket):
            self.flow.drew(-rows_of(ticket))
        self.wake()

    def _knows(self, engine: Engine, ticket: Ticket) -> bool:
        return ticket.stamps is engine.stamps and ticket.serial >= self._since

    def begin(self, engine: Engine) -> None:
        """Begin to count anew, with the rows that are there already."""
        self.flow.begin(len(engine.storage))
        self._delivered, self._since = 0, engine.stamps.written
        self.wake()

    def wake(self) -> None:
        """Let those who wait look again."""
        if self._writers or self._readers:
            self._changed.notify_all()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, queued: Sequence[Ticket]) -> dict[str, Any]:
        """Return the counts: rows drawn are those delivered and those queued, as only these will ever arrive."""
        return {**self.flow.state_dict(), "drawn": self._delivered + sum(map(rows_of, queued))}

    def hold(self) -> Callable[[], None]:
        """Return what brings the counts of now back."""
        flow = self.flow
        kept = flow.written, flow.drawn, self._delivered, self._since

        def restore() -> None:
            flow.written, flow.drawn, self._delivered, self._since = kept

        return restore

    def load_state_dict(self, engine: Engine, state: dict[str, Any] | None) -> None:
        """Restore counts. The rules stay this buffer's own: saved under others, the counts begin anew."""
        differing = self.flow.load_state_dict(state, len(engine.storage))
        self._delivered = self.flow.drawn - sum(map(rows_of, engine.pending))
        self._since = engine.stamps.written
        self.wake()
        if differing is not None:
            warnings.warn(
                f"the checkpoint was saved under another rate limiter: {differing}. This buffer's own holds, and "
                "counts anew from now on",
                UserWarning,
                stacklevel=2,
            )


def rows_of(ticket: Ticket) -> int:
    """Return how many rows of a batch a draw counts for: those of slices, else the rows drawn."""
    return int((ticket.draw.slots if ticket.draw.rows_each is None else ticket.records).shape[0])


def as_counting(sampler: Sampler) -> CountingSampler:
    """Return a sampler that says it counts draws, as what it then is."""
    return sampler  # type: ignore[return-value]


def stock(engine: AnyEngine) -> Stock:
    """Return what a buffer has for readers and writers now."""
    if not engine.sampler.counting:
        return Stock(len(engine.storage))
    sampler, view = as_counting(engine.sampler), engine.view()
    return Stock(sampler.rows_left, sampler.draws_left, sampler.room(view))


def make_gate(limiter: Any, engine: Engine) -> Gate | None:
    """Return the gate that a buffer needs; None where nobody ever waits.

    Raises:
        KindError: if the limiter is none.
        OptionError: if sampling could never begin.
    """
    if limiter is None and not (engine.sampler.counting and as_counting(engine.sampler).bounded):
        return None
    if limiter is not None and not isinstance(limiter, RateLimiter):
        msg = f"rate_limiter must be an ostinato.RateLimiter or None, got {type(limiter).__name__}"
        raise KindError(msg)
    gate = Gate(RateLimiter() if limiter is None else limiter, engine.lock)
    rules, size = gate.flow.limiter, engine.storage.max_size
    if rules.min_size_to_sample > size:
        msg = f"min_size_to_sample={rules.min_size_to_sample} rows are never there: the storage has max_size={size}"
        raise OptionError(msg)
    gate.begin(engine)
    return gate


def renew_gate(engine: Engine) -> None:
    """Follow a new sampler in a buffer that was given no limiter: a queue holds its writers up, others do not."""
    old, engine.gate = engine.gate, make_gate(None, engine)
    if old is not None:
        old.wake()


def replayable(data: Any) -> Any:
    """Return rows that can be read twice: before a wait, and after it."""
    return list(data) if isinstance(data, Iterator) else data


def check_counting(sampler: Sampler, writer: Writer, unit: Any, wanted: Any) -> None:
    """Refuse what does not go with a sampler that uses rows up.

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


def give_back(engine: AnyEngine, ticket: Ticket) -> None:
    """Take a draw back whose batch reached nobody, where draws are counted."""
    with engine.lock:
        if ticket.stamps is not engine.stamps or ticket.sampler is not engine.sampler:
            return  # of rows, or of a sampler, that are gone
        if engine.sampler.counting:
            as_counting(engine.sampler).undo(ticket.draw, engine.view())
        if engine.gate is not None:
            engine.gate.undrew(engine, ticket)


def retake(engine: Engine, tickets: Sequence[Ticket]) -> list[Ticket]:
    """Return the draws of a checkpoint that are still to be delivered; of those that are void the rows go back."""
    if not engine.sampler.counting:
        return list(tickets)
    sampler, view, kept = as_counting(engine.sampler), engine.view(), []
    for ticket in tickets:
        stamps = ticket.draw.stamps
        if stamps is not None and bool(view.stamps.match(ticket.draw.slots, stamps).all()):
            kept.append(ticket)
        else:
            sampler.undo(ticket.draw, view)
    sampler.resume([ticket.draw for ticket in kept], view)
    return kept
