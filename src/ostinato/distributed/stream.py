"""Batches of one reader on their way from an actor: some are made and sent while one is learned from."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, final

from ostinato.distributed.cluster import ray
from ostinato.distributed.packet import unpack
from ostinato.distributed.turns import AGAIN, GONE, TURN_S, in_time
from ostinato.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Stream", "Supply", "share_of"]

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
