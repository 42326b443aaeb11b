"""Batches of shards that are made before they are asked for."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.distributed.ray_client import AGAIN, GONE, TURN_S, in_time, ray
from ostinato.distributed.sampling import Held, Made, split
from ostinato.distributed.serialization import unpack
from ostinato.errors import EmptyBufferError, OptionError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.distributed.sampling import Drawer

__all__ = ["Ahead", "Stream", "Supply", "share_of"]

_MOST = 8
"""Batches made at once: more of them hardly make each cheaper, and the first ones wait for the last."""
_AHEAD_S = -2 * TURN_S
"""How long a batch has been waited for that is asked for ahead: whatever its time, it is not up in the first turn."""


def share_of(depth: int) -> int:
    """Return how many batches to make at once: half of `depth`, so that the next ones are made meanwhile."""
    return max(1, min(depth // 2, _MOST))


@final
class Stream:
    """Asks an actor for batches before they are needed; they come in the order of their draws.

    A call has a price, so one call asks for several batches: half of those that may be on their way, so that one call
    is answered while the batches of another are learned from. Thread-safe: threads get batches in turns.

    A stream that is dropped ends in the actor as well; what was drawn ahead for it is lost.

    Args:
        actor: a `Host`.
        depth: batches that may be on their way while the last one is learned from.
        epoch: those of one iteration over the buffer, which may end; else those of `sample(return_info=True)`.
        what: the actor, in messages.
        limit_s: how long a batch may be waited for, as far as known here; see `in_time`.
    """

    def __init__(self, actor: Any, depth: int, *, epoch: bool, what: str, limit_s: float | None = None) -> None:
        self._actor = actor
        self._depth = depth
        self._share = share_of(depth)
        self._advance = {
            count: actor.advance.options(concurrency_group="read", num_returns=count) for count in {1, self._share}
        }
        self._epoch = epoch
        self._what = what
        self._limit_s = limit_s
        self._name = uuid.uuid4().hex
        self._coming: deque[tuple[int, list[Any]]] = deque()
        self._here: deque[Any] = deque()
        self._calls = self._ahead = 0
        self._lock = threading.Lock()
        self._over = False
        in_time(actor.enter.remote(self._name, epoch=epoch), what, time.monotonic(), limit_s)
        self._leaving = weakref.finalize(self, _leave, actor, self._name)
        self._leaving.atexit = False  # the actor may be gone by then, and Ray with it

    def __iter__(self) -> Stream:
        """Iterate over the batches that are left."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, having asked for those that follow.

        Raises:
            StopIteration: after the last one, and after `close`.
            UsageError: if the actor has given a pass up.
            LostBufferError: if the actor is gone, or does not answer.
        """
        with self._lock:
            if self._over:
                raise StopIteration
            if not self._calls:
                self._ask(1)
            while self._ahead + self._share <= self._depth + 1:
                self._ask(self._share)
            while not self._here:
                number, references = self._coming.popleft()
                for found in self._receive(number, references):
                    if found is not None:
                        self._here.extend([unpack(found)] if type(found) is bytes else found)
                if not self._here:
                    raise StopIteration
                self._ahead -= len(references) - len(self._here)
            self._ahead -= 1
            return self._here.popleft()

    def _ask(self, count: int) -> None:
        self._coming.append((self._calls, self._send(self._calls, count, _AHEAD_S)))
        self._calls += 1
        self._ahead += count

    def _send(self, number: int, count: int, waited_s: float) -> list[Any]:
        references = self._advance[count].remote(self._name, number, count, waited_s)
        return references if count > 1 else [references]

    def _receive(self, number: int, references: list[Any]) -> list[Any]:
        """Return the answer to a call; one that gave up its turn is made anew, and its wait begins now."""
        began = time.monotonic()
        found: list[Any] = in_time(references, self._what, began, self._limit_s)
        while found[0] is AGAIN:
            again = self._send(number, len(references), time.monotonic() - began)
            found = in_time(again, self._what, began, self._limit_s)
        if found[0] is not GONE:
            return found
        if self._epoch and not self._over:
            msg = (
                f"{self._what} has given this pass up, as no batch was asked for in a long time, and there were many "
                "other readers: begin it anew"
            )
            raise UsageError(msg)
        return []

    def close(self) -> Any:
        """Forget what is on its way; return the call that is over when nothing more is drawn, None if there is none.

        Waits for nobody: a thread that waits for a batch may still get it.
        """
        self._over = True
        known = self._leaving.detach()
        return None if known is None else _leave(*known[2])


def _leave(actor: Any, name: str) -> Any:
    """End a line; return the call, None if there is nobody to call. Raises nothing: it may run as an object ends."""
    with contextlib.suppress(Exception):
        return actor.leave.remote(name) if ray().is_initialized() else None
    return None


@final
class Supply:
    """The stream of one handle: begun when a batch is asked for, and anew once it was dropped or has failed.

    Thread-safe: threads share one stream. Holds nothing of the handle, so that a dropped one goes at once.
    """

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self._lock = threading.Lock()

    def next(self, begin: Callable[[], Stream]) -> Any:
        """Return the next batch; an error ends the stream, and reaches one of the threads that wait.

        Args:
            begin: makes a stream.
        """
        while True:
            with self._lock:
                if self.stream is None:
                    self.stream = begin()
                stream = self.stream
            try:
                return next(stream)
            except StopIteration:  # dropped by another thread, or given up by the actor
                self._end(stream)
            except Exception:
                self._end(stream)  # the actor draws nothing more for it
                raise

    def _end(self, stream: Stream) -> None:
        with self._lock:
            if self.stream is stream:
                self.stream = None
        stream.close()

    def drop(self) -> Any:
        """Forget batches on their way; return the call that is over when no more are drawn, None if there is none."""
        with self._lock:
            stream, self.stream = self.stream, None
        return None if stream is None else stream.close()


GRACE_S = 5.0
"""How much longer than its time a reader waits for the worker to come to its batch."""


class _Coming(NamedTuple):
    """Batches that are made in one go."""

    sizes: list[int]
    uniforms: Tensor
    future: Future[Made | None]
    ahead: bool
    """Whether it was asked for before any reader waited for it."""


@final
class _Worker:
    """A thread that makes batches in the order in which they were asked for, and what it remembers between them.

    Nobody waits for it: neither the interpreter's exit, nor who has lost interest.

    Args:
        drawer: draws.
    """

    def __init__(self, drawer: Drawer) -> None:
        self._drawer = drawer
        self._held = Held()
        self._held_up = False  # a batch could not be made ahead; none behind it is, until it was made
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="ostinato-shards", daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def make(self, sizes: list[int], uniforms: Tensor, until: float | None = None) -> _Coming:
        """Ask for batches.

        Args:
            sizes: rows of each.
            uniforms: see `Drawer.draw`.
            until: when the time of their reader is up, on the clock of `time.monotonic`. None asks ahead of their time:
                they are None where they, or those before them, cannot be made now.
        """
        future: Future[Made | None] = Future()
        drawer, held, size = self._drawer, self._held, sum(sizes)

        def draw() -> Made | None:
            if until is not None:
                self._held_up = False
                left_s = round(max(0.0, until - time.monotonic()), 3)  # messages name it
                return drawer.draw(size, uniforms, left_s, held=held)
            if not self._held_up:
                try:
                    return drawer.draw(size, uniforms, 0.0, held=held)
                except (EmptyBufferError, WaitTimeoutError):
                    self._held_up = True
            return None

        self._calls.put((future, draw))
        return _Coming(sizes, uniforms, future, until is None)

    def end(self) -> None:
        """Make nothing more."""
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        future, make = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 (raised where the batch is asked for)
            future.set_exception(error)
        del call, future, make  # else the last batch, and the worker, would live until the next one


@final
class Ahead:
    """Gives batches, of which some are ready. Thread-safe.

    One round makes half of the batches that may be ahead: draws are independent, so many of them are as many batches.
    What a limiter does not let through is not made ahead: it waits its turn when it is asked for; there, and where
    draws use rows up, a round makes one batch.

    Batches are made one after the other, so a reader may have to wait for those of other threads before its own. It
    does so no longer than its own time, whatever theirs is, and leaves its batch to the next reader then.

    Args:
        drawer: draws.
        depth: batches to keep ready; 0 is no prefetch.
    """

    def __init__(self, drawer: Drawer, depth: int) -> None:
        self.drawer = drawer
        self.depth = depth
        self._share = share_of(depth) if drawer.free else 1
        self._queue: deque[_Coming] = deque()
        self._here: deque[Made] = deque()
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        with self._lock:
            return len(self._here) + sum(len(coming.sizes) for coming in self._queue if coming.future.done())

    def next(self, size: int, timeout_s: float | None, max_age: int | None) -> Made:
        """Return the next batch of `size` rows and its info.

        Raises:
            OptionError: if `max_age` is asked for where rows are used up, or batches made ahead.
            EmptyBufferError: if there are no rows.
            PriorityError: if no row has a priority above 0.
            WaitTimeoutError: if writers did not come in time; `timeout_s=None` is the limiter's.
        """
        drawer = self.drawer
        if max_age is not None and (self.depth or drawer.counted is not None):
            what = "batches are prefetched, and max_age is of the moment" if self.depth else "rows are used up"
            msg = f"max_age={max_age} is not available where {what}: leave one of them out"
            raise OptionError(msg)
        if not self.depth:
            return drawer.draw(size, drawer.uniforms(size), timeout_s, max_age)
        with self._lock:
            self._ask(size)
            if self._here:
                return self._here.popleft()
            coming, worker = self._queue.popleft(), self._worker
        batch, info = self._finish(coming, worker, drawer.patience_s(timeout_s))
        if len(coming.sizes) == 1:
            return batch, info
        first, *others = split(batch, info, coming.sizes)
        with self._lock:
            self._here.extend(others)
        return first

    def _ask(self, size: int) -> None:
        """Ask for as many batches as may be ahead; the very first one alone, since somebody waits for it."""
        worker = self._worker = self._worker or _Worker(self.drawer)
        ahead = len(self._here) + sum(len(coming.sizes) for coming in self._queue)
        count = self._share if ahead else 1
        while ahead + count <= self.depth + 1:
            self._queue.append(worker.make([size] * count, self.drawer.uniforms(count * size)))
            ahead, count = ahead + count, self._share

    def _finish(self, coming: _Coming, worker: _Worker | None, patience_s: float) -> Made:
        """Wait for batches; those that could not be made ahead are made now."""
        until, call = time.monotonic() + patience_s, coming
        try:
            if self._in_time(call, until) and call.future.result() is None:
                call = self._make_now(coming, until)
            if self._in_time(call, until):
                found = call.future.result()
                if found is not None:
                    return found
        except WaitTimeoutError:
            raise  # nothing was drawn after it either
        except Exception:
            if self.drawer.counted is None:
                self.drop()  # what was drawn after it may be wrong for the same reason; used rows must not be lost
            raise
        except BaseException:
            self._put_back(call, worker)  # interrupted: it comes all the same
            raise
        if call.future.done() and not call.future.cancelled():
            msg = "a batch was forgotten while it was waited for: empty(), loads() or close() came in between"
            raise UsageError(msg)
        self._put_back(coming, worker)
        msg = (
            f"a draw of {sum(coming.sizes)} row(s) waited {patience_s:g} s for writers, behind draws of other threads "
            "that wait for them as well: raise timeout_s, or see what became of these"
        )
        raise WaitTimeoutError(msg)

    def _in_time(self, call: _Coming, until: float) -> bool:
        """Wait for a call of the worker; False if it has not begun by the end of its reader's time.

        One that has begun ends in its own time. One that its reader will not wait for is made for no other either, as
        it was asked for with that reader's time; those made ahead wait for whoever comes next.
        """
        left_s = until + GRACE_S - time.monotonic()
        try:
            call.future.exception(None if left_s > threading.TIMEOUT_MAX else max(0.0, left_s))
        except TimeoutError:
            if call.future.running():
                return True
            return not (call.ahead or call.future.cancel())
        return True

    def _put_back(self, coming: _Coming, worker: _Worker | None) -> None:
        """Leave a batch to the next reader, or to none if batches of its time were dropped meanwhile."""
        with self._lock:
            if self._worker is worker:
                self._queue.appendleft(coming)
                return
        self._forget(coming)

    def _make_now(self, first: _Coming, until: float) -> _Coming:
        """Make a batch that could not be made ahead, and after it those behind it that are not made yet: in order."""
        with self._lock:
            worker = self._worker = self._worker or _Worker(self.drawer)
            now = worker.make(first.sizes, first.uniforms, until)
            self._queue = deque(
                worker.make(coming.sizes, coming.uniforms) if _unmade(coming.future) else coming
                for coming in self._queue
            )
        return now

    def drop(self) -> None:
        """Forget batches made ahead, and offers of what was there then. Waits for nobody."""
        with self._lock:
            queued, self._queue, worker, self._worker = self._queue, deque(), self._worker, None
            self._here.clear()
        if worker is not None:
            worker.end()
        for coming in queued:
            self._forget(coming)
        self.drawer.forget()

    def _forget(self, coming: _Coming) -> None:
        if not coming.future.cancel():
            coming.future.add_done_callback(_returns(self.drawer, sum(coming.sizes)))


def _unmade(future: Future[Made | None]) -> bool:
    """Whether a batch asked for ahead was not made, and will not be."""
    return future.cancel() or (future.done() and future.exception() is None and future.result() is None)


def _returns(drawer: Drawer, rows: int) -> Callable[[Future[Made | None]], None]:
    """Return what gives a batch back that reaches nobody."""

    def give_back(future: Future[Made | None]) -> None:
        if future.exception() is None and future.result() is not None:
            drawer.give_back(rows)

    return give_back
