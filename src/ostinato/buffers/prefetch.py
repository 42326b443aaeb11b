"""The prefetch queue: batches requested before they are asked for, of buffers here, in an actor, and in shards."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.core.processes import Work, raise_first

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor


class Requested(NamedTuple):
    """Batches in the queue that were requested together."""

    draw: Any
    """What they are made from: the draw of a reader, the random numbers of one from shards, the number of a request."""
    made: Any
    """The batches: the future of the worker, or what the order waits for itself."""
    number: int = 1
    """How many."""


class Order(ABC):
    """A batch that a reader asks for: how it, and those ahead of it, are requested and received.

    Each call makes one, so that the queue refers to no buffer.
    """

    @abstractmethod
    def request(self, queue: Prefetcher, count: int) -> Requested | None:
        """Request the next batches of the queue, whose lock the caller holds.

        Returns:
            The request; None if it would have to wait, or must not be made, and the queue is filled.
        """

    @abstractmethod
    def receive(self, queue: Prefetcher, requested: Requested) -> list[Any]:
        """Wait for batches that were requested, by this order or an earlier one, and return them, at least one."""


def _thread() -> Executor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-prefetch")


@final
class Prefetcher:
    """Keeps up to `depth` batches requested ahead, and delivers them in the order of their requests. Thread-safe.

    A reader first gets a place in the queue, under its lock: a batch that is queued, of whichever reader, or one that
    it requests. A batch in the queue belongs to no reader: the next one that looks takes it. Then it waits for this
    batch, without the lock.

    Batches may be made in a worker (`submit`). One worker: batches are delivered in order in any case, and user
    transforms need not be thread-safe. Holds no reference to its user, except in batches that are still to be made.

    Args:
        depth: batches to keep requested; 0 for none, in a buffer without prefetch.
        lock: guards the queue; the same thread may take it several times.
        count: batches of one request. Only the first request is for one batch, because a reader waits for it.
        start: starts the worker, for the first work.
    """

    def __init__(self, depth: int, lock: Any, count: int = 1, start: Callable[[], Executor] = _thread) -> None:
        self.depth = depth
        self.lock = lock
        self.waits = 0
        """Times a reader had to wait for a batch of the worker."""
        self._count = count
        self._start = start
        self._queue: deque[Requested] = deque()
        self._batches: deque[Any] = deque()  # received with those of earlier readers
        self._executor: Executor | None = None
        self._process = 0

    @property
    def ready(self) -> int:
        """Batches of the worker that are ready now."""
        with self.lock:
            return len(self._batches) + sum(one.number for one in self._queue if one.made.done())

    @property
    def queued(self) -> int:
        """Batches that are queued, ready or not."""
        if self._count == 1:
            return len(self._queue)
        return len(self._batches) + sum(one.number for one in self._queue)

    @property
    def filled(self) -> bool:
        """Whether a batch is queued; the caller holds the lock."""
        return bool(self._queue or self._batches)

    @property
    def requests(self) -> list[Requested]:
        """The requests whose batches were not received yet, oldest first."""
        with self.lock:
            return list(self._queue)

    @property
    def draws(self) -> list[Any]:
        """The queued draws, oldest first."""
        return [one.draw for one in self.requests]

    def next(self, order: Order) -> Any:
        """Return the oldest batch, having requested batches until `depth` follow it, as far as the order permits.

        If a request raises, the error is the caller's and the queue stays as it is.
        """
        with self.lock:
            self._fill(order)
            if self._batches:
                return self._batches.popleft()
            requested = self._queue.popleft()
        try:
            batches = order.receive(self, requested)
        finally:
            del requested  # its future keeps an error, whose traceback keeps this frame
        if len(batches) > 1:
            with self.lock:
                self._batches.extend(batches[1:])
        return batches[0]

    def _fill(self, order: Order) -> None:
        ahead, most = self.queued, self.depth + 1
        while ahead + (count := self._count if ahead else 1) <= most:
            requested = order.request(self, count)
            if requested is None:
                return
            self._queue.append(requested)
            ahead += count

    def put_back(self, requested: Requested) -> None:
        """Leave a request to the next reader."""
        with self.lock:
            self._queue.appendleft(requested)

    def renew(self, renewed: Callable[[Requested], Requested]) -> None:
        """Exchange requests, in their order, for others that get the same batches."""
        with self.lock:
            self._queue = deque([renewed(one) for one in self._queue])

    def drop(self) -> list[Requested]:
        """Drop all queued batches and return the requests whose batches were not received."""
        with self.lock:
            dropped, self._queue = list(self._queue), deque()
            self._batches.clear()
            return dropped

    # -- the worker ---------------------------------------------------------------------------------------------------

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run a function in the worker, after those submitted before. A forked process gets a worker of its own."""
        with self.lock:
            if self._executor is None or self.forked:
                self._executor, self._process = self._start(), os.getpid()
            return self._executor.submit(Work(work))

    @property
    def forked(self) -> bool:
        """Whether the worker is in another process, which has forked this one."""
        return self._process not in (0, os.getpid())

    def worker(self) -> Callable[[Callable[[], Any]], Future[Any]] | None:
        """Return what runs a function in the worker, after the batches queued; None without one in this process."""
        return None if self.forked or not self.depth else self.submit

    def count_wait(self, made: Future[Any]) -> None:
        """Count a reader that has to wait for the worker, if it does."""
        if not made.done():
            with self.lock:
                self.waits += 1

    def clear(self) -> list[Any]:
        """Drop all queued batches, which the worker makes no more, and return their draws."""
        dropped = self.drop()
        for one in dropped:
            one.made.cancel()
        return [one.draw for one in dropped]

    def close(self) -> None:
        """Drop all queued batches, and end the worker once the batch that it is making is made."""
        with self.lock:
            self.clear()
            executor, self._executor = self._executor, None
        if executor is not None and not self.forked:
            executor.shutdown()

    def synchronize(self) -> None:
        """Wait for the queued batches, which stay queued, and raise the first error of one."""
        with self.lock:
            futures = [] if self.forked else [one.made for one in self._queue]
        wait(futures)
        raise_first(futures)
