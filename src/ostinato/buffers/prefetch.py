"""Prefetch: batches made ready by one worker thread, in the order of their draws."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, final

from ostinato.buffers.streams import on_stream_of_caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.buffers.gate import Waiters

__all__ = ["Prefetcher", "Steps"]


class _Drawn(Protocol):
    """What is queued: a draw that knows whether it ended an epoch."""

    @property
    def last(self) -> bool: ...


T = TypeVar("T", bound=_Drawn)


class Steps(NamedTuple, Generic[T]):
    """What a reader does on its way to a batch; all but `make` run under the lock."""

    draw: Callable[[], T]
    """Makes the next draw, without waiting."""
    make: Callable[[T], Any]
    """Makes the batch of a draw; runs in the worker."""
    may: Callable[[], bool] | None = None
    """Whether `draw` is permitted now; None where it always is."""
    wait: Callable[[], None] | None = None
    """Waits, with the lock free, until the queue holds a draw or `may()` is true; raises when the time is up."""
    lost: Callable[[T], None] | None = None
    """Takes a draw back whose batch could not be made."""


@final
class Prefetcher(Generic[T]):
    """Keeps `depth` batches ready.

    Draws are made in the caller's thread, in order, so that the sequence of batches is the one without
    prefetch; the worker copies, collates and transforms. One worker: batches are delivered in order in any case, and
    user transforms need not be thread-safe.

    A reader waits for two things, one after the other, and neither can be withheld from it:

    - for a place in the queue: a queued draw, of whichever reader, or the permission to draw. Both are looked at under
      the lock of `waiters`, which also guards the queue, and every draw that is queued wakes the readers that wait.
      A draw in the queue belongs to no reader: the next one that looks takes it. So no reader waits while a draw is
      queued, and no draw stays queued while a reader waits.
    - for the batch of the draw that it took: the worker makes the batches of all draws in order, waits for nobody, and
      a failure is the result of the draw that it belongs to.

    Holds no reference to whoever uses it, beside those of batches that are still to be made.

    Args:
        depth: batches to keep ready, at least 1.
        waiters: the lock that guards the queue, and the calls that wait under it.
    """

    def __init__(self, depth: int, waiters: Waiters) -> None:
        self.depth = depth
        self.waits = 0
        self._waiters = waiters
        self._queue: deque[tuple[T, Future[Any]]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        with self._waiters.lock:
            return sum(future.done() for _, future in self._queue)

    @property
    def filled(self) -> bool:
        """Whether a draw is queued; the caller holds the lock."""
        return bool(self._queue)

    @property
    def tickets(self) -> list[T]:
        """The queued draws, oldest first."""
        with self._waiters.lock:
            return [ticket for ticket, _ in self._queue]

    def next(self, steps: Steps[T], *, within_epoch: bool = False) -> tuple[T, Any]:
        """Return the oldest draw and its batch, having queued draws until `depth` follow it, as far as permitted.

        If a draw raises, the error is the caller's and the queue stays as it is. If its batch cannot be made, the draw
        is taken back before the error is raised.

        Args:
            steps: what to do.
            within_epoch: do not draw beyond the end of the epoch.
        """
        with self._waiters.lock:
            self._revive(steps)
            self._fill(steps, within_epoch=within_epoch)
            while not self._queue:
                if steps.wait is not None:
                    steps.wait()
                self._fill(steps, within_epoch=within_epoch)
            ticket, future = self._queue.popleft()
            self.waits += not future.done()
        try:
            return ticket, future.result()
        except BaseException:
            if steps.lost is not None:
                steps.lost(ticket)
            raise

    def _fill(self, steps: Steps[T], *, within_epoch: bool) -> None:
        """Queue draws until there is one to take and `depth` follow it, as far as no draw has to wait."""
        queue = self._queue
        while len(queue) <= self.depth and not (within_epoch and queue and queue[-1][0].last):
            if steps.may is not None and not steps.may():
                return
            ticket = steps.draw()
            try:
                queue.append((ticket, self._pool().submit(on_stream_of_caller(steps.make), ticket)))
            except BaseException:
                if steps.lost is not None:
                    steps.lost(ticket)
                raise
            self._waiters.wake()

    def clear(self) -> list[T]:
        """Drop all queued batches and return their draws."""
        with self._waiters.lock:
            tickets = [ticket for ticket, _ in self._queue]
            for _, future in self._queue:
                future.cancel()
            self._queue.clear()
            return tickets

    def _pool(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-prefetch")
            self._process = os.getpid()
        return self._executor

    def _revive(self, steps: Steps[T]) -> None:
        """A forked child has the queue but not the thread: hand the queued draws to a thread of its own."""
        if self._executor is not None and self._process != os.getpid():
            self._executor = None
            tickets = [ticket for ticket, _ in self._queue]
            self._queue = deque((ticket, self._pool().submit(steps.make, ticket)) for ticket in tickets)
