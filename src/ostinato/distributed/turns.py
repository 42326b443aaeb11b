"""Calls that may wait in an actor, in turns: more of them may wait than it has threads, and none waits for the dead.

A call that the rate limiter holds back keeps its thread for one turn. Then it comes back, and whoever made it makes it
again, behind those that had no thread. One whose process has died is not made again.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ostinato.buffers.limits import check_timeout
from ostinato.distributed.cluster import answer
from ostinato.distributed.parcel import seal, unseal
from ostinato.errors import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.buffers import ReplayBuffer

__all__ = ["AGAIN", "TURN_S", "Again", "exchange", "exchange_in_turns", "insist", "take_turn"]

TURN_S = 1.0
"""Longest wait of one turn: for so long at most an actor waits on behalf of a process that is dead."""


class _Turn(Enum):
    """One value, which is itself on both sides of a pickle."""

    AGAIN = "again"


AGAIN: Final = _Turn.AGAIN
"""What a call gives whose turn is over and whose time is not: nothing has changed, make it again."""
Again: TypeAlias = Literal[_Turn.AGAIN]


def take_turn(
    buffer: ReplayBuffer, call: Callable[..., Any], timeout_s: float | None = None, waited_s: float = 0.0
) -> Any:
    """Make a call that may wait, in the actor, for one turn.

    Args:
        buffer: whose method it is.
        call: makes it; takes `timeout_s` where there is a limiter, or one was given.
        timeout_s: longest wait of all turns together; None is the limiter's.
        waited_s: how long it has waited in the turns before this one.

    Returns:
        What the call returns; `AGAIN` if it must be made again.

    Raises:
        WaitTimeoutError: if all the time is up; nothing is changed.
    """
    limiter = getattr(buffer, "rate_limiter", None)  # an ensemble has none
    if limiter is None:
        return call() if timeout_s is None else call(timeout_s=timeout_s)
    if timeout_s is not None:
        check_timeout(timeout_s)
    limit = limiter.timeout_s if timeout_s is None else timeout_s
    left = max(0.0, limit - waited_s)
    turn = min(left, TURN_S)
    try:
        return call(timeout_s=turn)
    except WaitTimeoutError as error:
        if left > turn:
            return AGAIN
        told = str(error).replace(f"waited {turn:g} s", f"waited {limit:g} s", 1)
        raise WaitTimeoutError(told) from None


def insist(send: Callable[[float], Any], what: str) -> Any:
    """Make a call that may wait, from another process, until it has been let through or its time is up.

    Args:
        send: starts the call, given how long it has waited, in seconds.
        what: the actor, in messages.
    """
    began = time.monotonic()
    found = answer(send(0.0), what)
    while found is AGAIN:
        found = answer(send(time.monotonic() - began), what)
    return found


def exchange(method: Any, what: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the buffer in its actor, and wait for what it returns.

    Args:
        method: of the actor, that takes a sealed request.
        what: the actor, in messages.
        name: the buffer's method.
        *args: of it.
        **kwargs: of it.
    """
    return unseal(answer(method.remote(seal((name, args, kwargs))), what))


def exchange_in_turns(method: Any, what: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Do the same with a method that may wait."""
    request = seal((name, args, kwargs))
    return unseal(insist(lambda waited_s: method.remote(waited_s, request), what))
