"""Batches of one reader, made in an actor in the order in which they were asked for."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ostinato.distributed.turns import AGAIN, TURN_S, Again, take_turn
from ostinato.errors import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.buffers import ReplayBuffer

__all__ = ["END", "Line", "maker"]

END = object()


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

        Returns:
            `count` batches; fewer before an error, which the next call raises, where the next one would have to wait,
            and at the end; none after it.
        """
        with self._gate:
            while not self._over and self._turn != number:
                seen = self._turn
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


def maker(buffer: ReplayBuffer, *, epoch: bool) -> Callable[[float | None], Any]:
    """Return what makes the batches of a line: those of one pass, or of `sample(return_info=True)`."""
    if epoch:
        batches = iter(buffer)
        return lambda _: next(batches, END)
    draw = partial(buffer.sample, return_info=True)
    limited = getattr(buffer, "rate_limiter", None) is not None  # an ensemble has none

    def make(waited_s: float | None) -> Any:
        if waited_s is not None:
            return take_turn(buffer, draw, None, waited_s)
        try:
            return draw(timeout_s=0.0) if limited else draw()
        except WaitTimeoutError:
            return AGAIN

    return make
