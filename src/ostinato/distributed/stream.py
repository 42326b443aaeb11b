"""Batches of one reader on their way from an actor: some are made and sent while one is learned from."""

from __future__ import annotations

import uuid
from collections import deque
from typing import Any, final

from ostinato.distributed.cluster import answer, ray
from ostinato.distributed.parcel import unseal

__all__ = ["Stream"]

_MOST = 8
"""Batches of one call: more of them hardly make each cheaper, and the first ones wait for the last."""


@final
class Stream:
    """Asks an actor for batches before they are needed; they come in the order of their draws.

    A call has a price, so one call asks for several batches: half of those that may be on their way, so that one call
    is answered while the batches of another are learned from. Each batch is an object of its own to Ray.

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
        self._what = what
        self._name = uuid.uuid4().hex
        self._coming: deque[list[Any]] = deque()
        self._here: deque[Any] = deque()
        self._calls = self._ahead = 0
        answer(actor.enter.remote(self._name, epoch=epoch), what)

    def __iter__(self) -> Stream:
        """Iterate over the batches that are left."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, having asked for those that follow.

        Raises:
            StopIteration: after the last one.
        """
        if not self._calls:
            self._ask(1)
        while self._ahead + self._share <= self._depth + 1:
            self._ask(self._share)
        while not self._here:
            chunk = self._coming.popleft()
            batches = [batch for batch in answer(chunk, self._what) if batch is not None]
            if not batches:
                raise StopIteration
            self._here.extend(batches)
            self._ahead -= len(chunk) - len(batches)
        self._ahead -= 1
        return unseal(self._here.popleft())

    def _ask(self, count: int) -> None:
        advance = self._actor.advance.options(concurrency_group="read", num_returns=count)
        references = advance.remote(self._name, self._calls, count)
        self._coming.append(references if count > 1 else [references])
        self._calls += 1
        self._ahead += count

    def close(self) -> None:
        """Forget what is on its way."""
        self._coming.clear()
        self._here.clear()
        if ray().is_initialized():
            self._actor.leave.remote(self._name)
