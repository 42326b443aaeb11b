"""Batches of one reader, made in an actor in the order in which they were asked for."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ostinato.buffers.passes import END, Pass
from ostinato.distributed.turns import AGAIN, GONE, TURN_S, Again, Gone, take_turn
from ostinato.errors import UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.buffers import ReplayBuffer

__all__ = ["END", "IDLE_S", "MANY_LINES", "Line", "Lines", "maker"]

MANY_LINES = 64
"""Lines that are kept, however long nobody asks for their batches."""
IDLE_S = 600.0
"""Beyond these, a line is closed that nobody has asked for a batch for so long: its reader may be dead."""


@final
class Line:
    """Gives batches to one reader in the order of its calls, though these come in many threads.

    A batch that cannot be made ends the line: those asked for after it are not drawn for nobody.

    Args:
        make: makes the next batch, `END` after the last one. It is given how long its reader has waited for it, in
            seconds, or None where it must not wait, as the call has a batch already; `AGAIN` says that it would.
    """

    def __init__(self, make: Callable[[float | None], Any]) -> None:
        self._make = make
        self._turn = 0
        self._over = False
        self._error: Exception | None = None
        self._gate = threading.Condition()

    def take(self, number: int, count: int, waited_s: float = 0.0) -> list[Any] | Again:
        """Answer call `number`, once those before it are answered; `AGAIN` where it should be made once more.

        Args:
            number: of the call, from 0 on.
            count: batches.
            waited_s: how long the reader has waited for this answer, having those before it; below 0 for calls made
                ahead, whose time has not begun.

        Returns:
            `count` batches; fewer before an error, which the next call raises, where the next one would have to wait,
            and at the end; none after it.

        Raises:
            UsageError: if the call was answered before, or its turn never comes; the line ends then.
        """
        with self._gate:
            while not self._over and self._turn != number:
                seen = self._turn
                self._check(number, waited_s)
                if not self._gate.wait_for(lambda: self._over or self._turn != seen, TURN_S):  # noqa: B023
                    return AGAIN
            if self._over:
                error, self._error = (self._error, None) if number == self._turn else (None, self._error)
                if error is not None:
                    raise error
                return []
            found = self._some(count, waited_s)
            if found is None:
                return AGAIN
            self._turn += 1
            self._gate.notify_all()
            return found

    def _check(self, number: int, waited_s: float) -> None:
        """Refuse a call whose turn never comes: a reader waits for one when it has the answers to those before it."""
        if number > self._turn and waited_s <= TURN_S:
            return
        turn = self._turn
        self._end()
        msg = (
            f"call {number} for batches does not follow the {turn} that were answered: each call of a reader is "
            "answered once, in order; ask anew"
        )
        raise UsageError(msg)

    def _some(self, count: int, waited_s: float) -> list[Any] | None:
        batches: list[Any] = []
        while len(batches) < count:
            try:
                batch = self._make(None if batches else waited_s)
            except Exception as error:
                self._end()
                if not batches:
                    raise
                self._error = error
                break
            if batch is AGAIN and not batches:
                return None
            if batch is AGAIN:
                break
            if batch is END:
                self._end()
                break
            batches.append(batch)
        return batches

    def _end(self) -> None:
        self._over = True
        self._gate.notify_all()

    def close(self) -> None:
        """Give no further batches. When it returns, none is being made."""
        with self._gate:
            self._end()


class _Place:
    """A line among others: whether somebody asks for its batches."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.calls = 0
        self.asked = time.monotonic()


@final
class Lines:
    """The lines of all readers of an actor. Thread-safe.

    A reader ends its line; those of the dead are closed when others begin: beyond `MANY_LINES`, the ones that nobody
    has asked for a batch for `IDLE_S`. Batches that were made for them are lost, as are those on their way to the dead.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Lines that are open."""
        return len(self._places)

    def begin(self, name: str, line: Line) -> None:
        """Begin a line."""
        with self._lock:
            self._places[name] = _Place(line)
            idle = self._idle() if len(self._places) > MANY_LINES else []
        for one in idle:
            self.end(one)

    def _idle(self) -> list[str]:
        """Return the lines to close: the longest unasked first, no more than there are too many."""
        before = time.monotonic() - IDLE_S
        found = sorted((place.asked, name) for name, place in self._places.items() if not place.calls)
        return [name for asked, name in found[: len(self._places) - MANY_LINES] if asked < before]

    def take(self, name: str, number: int, count: int, waited_s: float) -> list[Any] | Again | Gone:
        """Answer a call; see `Line.take`. `GONE` if there is no such line, or no more."""
        with self._lock:
            place = self._places.get(name)
            if place is None:
                return GONE
            place.calls += 1
        try:
            return place.line.take(number, count, waited_s)
        finally:
            with self._lock:
                place.calls -= 1
                place.asked = time.monotonic()

    def end(self, name: str) -> None:
        """Close a line, if it is there. When this returns, no batch is being made for it."""
        with self._lock:
            place = self._places.pop(name, None)
        if place is not None:
            place.line.close()


def maker(buffer: ReplayBuffer, *, epoch: bool) -> Callable[[float | None], Any]:
    """Return what makes the batches of a line: those of one pass, or of `sample(return_info=True)`."""
    draw = Pass(buffer).next if epoch else partial(buffer.sample, return_info=True)

    def make(waited_s: float | None) -> Any:
        if waited_s is not None:
            return take_turn(buffer, draw, None, waited_s)
        try:
            return draw() if buffer.rate_limiter is None else draw(timeout_s=0.0)
        except WaitTimeoutError:
            return AGAIN

    return make
