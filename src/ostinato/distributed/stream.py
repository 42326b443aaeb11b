"""Batches of one reader on their way from an actor: some are made and sent while one is learned from."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from typing import Any, final

from ostinato.distributed.cluster import answer, ray
from ostinato.distributed.packet import unpack
from ostinato.distributed.turns import AGAIN

__all__ = ["Stream"]

_MOST = 8
"""Batches of one call: more of them hardly make each cheaper, and the first ones wait for the last."""


@final
class Stream:
    """Asks an actor for batches before they are needed; they come in the order of their draws.

    A call has a price, so one call asks for several batches: half of those that may be on their way, so that one call
    is answered while the batches of another are learned from.

    Args:
        actor: a `Host`.
        depth: batches that may be on their way while the last one is learned from.
        epoch: those of one iteration over the buffer, which may end; else those of `sample(return_info=True)`.
        what: the actor, in messages.
    """

    def __init__(self, actor: Any, depth: int, *, epoch: bool, what: str) -> None:
        self._actor = actor
        self._depth = depth
        self._share = max(1, min(depth // 2, _MOST))
        self._advance = {
            count: actor.advance.options(concurrency_group="read", num_returns=count) for count in {1, self._share}
        }
        self._what = what
        self._name = uuid.uuid4().hex
        self._coming: deque[tuple[int, list[Any]]] = deque()
        self._here: deque[Any] = deque()
        self._calls = self._ahead = 0
        self._lock = threading.Lock()
        answer(actor.enter.remote(self._name, epoch=epoch), what)

    def __iter__(self) -> Stream:
        """Iterate over the batches that are left."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, having asked for those that follow.

        Raises:
            StopIteration: after the last one.
        """
        with self._lock:
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
        self._coming.append((self._calls, self._send(self._calls, count, 0.0)))
        self._calls += 1
        self._ahead += count

    def _send(self, number: int, count: int, waited_s: float) -> list[Any]:
        references = self._advance[count].remote(self._name, number, count, waited_s)
        return references if count > 1 else [references]

    def _receive(self, number: int, references: list[Any]) -> list[Any]:
        """Return the answer to a call; one that gave up its turn is made anew, and its wait begins now."""
        began = time.monotonic()
        found: list[Any] = answer(references, self._what)
        while found[0] is AGAIN:
            found = answer(self._send(number, len(references), time.monotonic() - began), self._what)
        return found

    def close(self) -> Any:
        """Forget what is on its way; return the call that is over when nothing more is drawn."""
        self._coming.clear()
        self._here.clear()
        return self._actor.leave.remote(self._name) if ray().is_initialized() else None
