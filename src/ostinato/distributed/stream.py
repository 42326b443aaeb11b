"""Batches of one reader on their way from an actor: some are made and sent while one is learned from."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from typing import Any, final

from ostinato.distributed.cluster import answer, ray
from ostinato.distributed.packet import unpack

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
        self._coming: deque[list[Any]] = deque()
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
                references = self._coming.popleft()
                for found in answer(references, self._what):
                    if found is not None:
                        self._here.extend([unpack(found)] if type(found) is bytes else found)
                if not self._here:
                    raise StopIteration
                self._ahead -= len(references) - len(self._here)
            self._ahead -= 1
            return self._here.popleft()

    def _ask(self, count: int) -> None:
        references = self._advance[count].remote(self._name, self._calls, count)
        self._coming.append(references if count > 1 else [references])
        self._calls += 1
        self._ahead += count

    def close(self) -> None:
        """Forget what is on its way."""
        self._coming.clear()
        self._here.clear()
        if ray().is_initialized():
            self._actor.leave.remote(self._name)
