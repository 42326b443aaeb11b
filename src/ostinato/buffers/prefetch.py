"""Prefetch: batches made ready by one worker thread, in the order of their draws."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, final

from ostinato.buffers.streams import on_stream_of_caller

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

__all__ = ["Prefetcher"]


class _Drawn(Protocol):
    """What is queued: a draw that knows whether it ended an epoch."""

    @property
    def last(self) -> bool: ...


T = TypeVar("T", bound=_Drawn)


@final
class Prefetcher(Generic[T]):
    """Keeps `depth` batches ready.

    Draws are made in the caller's thread, in order, so that the sequence of batches is the one without
    prefetch; the worker copies, collates and transforms. One worker: batches are delivered in order in any case, and
    user transforms need not be thread-safe.

    Args:
        depth: batches to keep ready, at least 1.
        work: makes a batch of a draw; runs in the worker.
        lock: the engine's: one lock, so that nobody waits for two.
    """

    def __init__(self, depth: int, work: Callable[[T], Any], lock: threading.RLock) -> None:
        self.depth = depth
        self.waits = 0
        self._work = work
        self._lock = lock
        self._queue: deque[tuple[T, Future[Any]]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        return sum(future.done() for _, future in self._queue)

    @property
    def tickets(self) -> list[T]:
        """The queued draws, oldest first."""
        with self._lock:
            return [ticket for ticket, _ in self._queue]

    def next(
        self,
        draw: Callable[[], T],
        *,
        within_epoch: bool,
        more: Callable[[], bool] | None = None,
        lost: Callable[[T], None] | None = None,
    ) -> tuple[T, Any]:
        """Return the oldest draw and its batch, having queued draws until `depth` follow it.

        Args:
            draw: makes the next draw; if it raises, the error is the caller's and the queue stays as it is.
            within_epoch: do not draw beyond the end of the epoch.
            more: whether a draw could be made without waiting; only the first one in an empty queue may wait.
            lost: hears of the draw whose batch could not be made, before the error is raised.
        """
        with self._lock:
            self._revive()
            while len(self._queue) <= self.depth and not (within_epoch and self._queue and self._queue[-1][0].last):
                if self._queue and more is not None and not more():
                    break
                ticket = draw()
                self._queue.append((ticket, self._pool().submit(on_stream_of_caller(self._work), ticket)))
            ticket, future = self._queue.popleft()
        if not future.done():
            self.waits += 1
        try:
            return ticket, future.result()
        except BaseException:
            if lost is not None:
                lost(ticket)
            raise

    def clear(self) -> list[T]:
        """Drop all queued batches and return their draws."""
        with self._lock:
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

    def _revive(self) -> None:
        """A forked child has the queue but not the thread: hand the queued draws to a thread of its own."""
        if self._executor is not None and self._process != os.getpid():
            self._executor = None
            tickets = [ticket for ticket, _ in self._queue]
            self._queue = deque((ticket, self._pool().submit(self._work, ticket)) for ticket in tickets)
