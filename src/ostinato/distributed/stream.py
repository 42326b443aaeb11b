"""Batches of one reader on their way from an actor: some are made and sent while one is learned from."""

from __future__ import annotations

import uuid
from collections import deque
from typing import Any, final

from ostinato.distributed.cluster import answer, ray
from ostinato.distributed.turns import insist

__all__ = ["Stream"]


@final
class Stream:
    """Asks an actor for batches before they are needed; they come in the order of their draws.

    Args:
        actor: a `Host`.
        depth: batches to keep on their way.
        epoch: those of one iteration over the buffer, which may end; else those of `sample(return_info=True)`.
        what: the actor, in messages.
    """

    def __init__(self, actor: Any, depth: int, *, epoch: bool, what: str) -> None:
        self._actor = actor
        self._advance = actor.advance.options(concurrency_group="read")
        self._depth = depth
        self._what = what
        self._name = uuid.uuid4().hex
        self._coming: deque[Any] = deque()
        self._asked = 0
        answer(actor.enter.remote(self._name, epoch=epoch), what)

    def next(self) -> tuple[Any] | None:
        """Return the next batch, having asked for those that follow; None after the last one."""
        while len(self._coming) <= self._depth:
            self._coming.append(self._advance.remote(self._name, self._asked))
            self._asked += 1
        number, first = self._asked - len(self._coming), self._coming.popleft()
        # one that gave up its turn before it was wanted is asked for anew, its wait begins now
        found: tuple[Any] | None = insist(
            lambda waited_s: self._advance.remote(self._name, number, waited_s), self._what, first
        )
        return found

    def close(self) -> Any:
        """Forget what is on its way; return the call that is over when nothing more is drawn."""
        self._coming.clear()
        return self._actor.leave.remote(self._name) if ray().is_initialized() else None
