"""Calls that may wait in an actor, in turns: more of them may wait than it has threads, and none waits for the dead.

A call that the rate limiter holds back keeps its thread for one turn. Then it comes back, and whoever made it makes it
again, behind those that had no thread. One whose process has died is not made again.
"""

from __future__ import annotations

import time
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ostinato._optional import require
from ostinato.buffers.rate_limit import check_timeout
from ostinato.distributed.serialization import Parcel, seal, unseal
from ostinato.errors import LostBufferError, OptionError, UsageError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ostinato.buffers import ReplayBuffer

__all__ = [
    "AGAIN",
    "GONE",
    "GRACE_S",
    "GROUPS",
    "START_S",
    "TURN_S",
    "Again",
    "Gone",
    "answer",
    "brief",
    "exchange",
    "exchange_in_turns",
    "first_answer",
    "in_time",
    "insist",
    "lost",
    "ray",
    "spawn",
    "start",
    "take_turn",
]

GROUPS = {"write": 32, "read": 32, "update": 8}
"""Threads of an actor for each kind of call: readers that wait for rows never keep writers out, nor writers readers.
Neither keeps out what never waits: priorities, edits, reads by index."""
START_S = 120.0
"""How long to wait for a new actor."""
_OURS = ("concurrency_groups", "max_task_retries")


def ray() -> Any:
    """Return the module, or say what to install."""
    return require("ray", "ray")


def start(config: Mapping[str, Any] | None) -> None:
    """Start Ray, or join it as `config` says, if this process has not yet."""
    module = ray()
    if not module.is_initialized():
        module.init(**(config or {}))
    elif config:
        warnings.warn(
            f"ray_init_config={dict(config)} has no effect: this process is connected to Ray already",
            UserWarning,
            stacklevel=3,
        )


def spawn(host: type, options: Mapping[str, Any] | None, recipe: tuple[Any, ...], **more: Any) -> Any:
    """Make an actor that holds a buffer.

    Args:
        host: the actor's class.
        options: of `ray.remote`, as the user gave them.
        recipe: what the class takes.
        more: options of ours.

    Raises:
        OptionError: if the user's options undo what the actor relies on.
    """
    given = dict(options or {})
    for name in (*_OURS, *({"max_restarts"} & more.keys())):
        if name in given:
            msg = f"remote_config must not hold {name!r}, which the buffer sets itself, got {given[name]!r}"
            raise OptionError(msg)
    merged = {"max_concurrency": 8, **given, **more, "concurrency_groups": GROUPS}
    return ray().remote(**merged)(host).remote(Parcel(recipe))


def lost(error: BaseException) -> bool:
    """Whether a call failed because its actor was not there, or did not answer in time."""
    known = ray().exceptions
    return isinstance(error, (known.RayActorError, known.ObjectLostError, known.GetTimeoutError))


def answer(reference: Any, what: str, timeout_s: float | None = None) -> Any:
    """Wait for the result of a call; an error of the buffer is raised as the buffer raised it.

    Raises:
        LostBufferError: if the actor is gone.
        UsageError: if the time is over.
    """
    module = ray()
    try:
        return module.get(reference, timeout=timeout_s)
    except module.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception):
            raise cause from error
        raise
    except module.exceptions.GetTimeoutError as error:
        free = {name: count for name, count in module.available_resources().items() if not name.startswith("node:")}
        msg = f"{what} did not answer within {timeout_s:g} s; free in the cluster: {free}"
        raise UsageError(msg) from error
    except (module.exceptions.RayActorError, module.exceptions.ObjectLostError) as error:
        msg = f"{what} is gone, and its rows with it ({brief(error)}): make a new one and load a checkpoint into it"
        raise LostBufferError(msg) from error


def brief(error: BaseException) -> str:
    """Say in a line what Ray says in many: the first and the last of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__


def first_answer(actor: Any, what: str) -> dict[str, Any]:
    """Wait until a new actor stands, and return what it says of its buffer; its constructor's errors are raised."""
    found: dict[str, Any] = answer(actor.about.remote(), what, START_S)
    return found


TURN_S = 1.0
"""Longest wait of one turn: for so long at most an actor waits on behalf of a process that is dead."""
GRACE_S = 30.0
"""How long the answer to a call may take beyond the time that the call may wait: its actor may have much to do, or to
send. One that has not answered by then is stopped, or its machine cannot be reached."""
_ENDLESS_S = 1e8
"""Waits of more than three years are without end, as far as Ray's clock is concerned."""


class _Turn(Enum):
    """Values that are themselves on both sides of a pickle."""

    AGAIN = "again"
    GONE = "gone"


AGAIN: Final = _Turn.AGAIN
"""What a call gives whose turn is over and whose time is not: nothing has changed, make it again."""
Again: TypeAlias = Literal[_Turn.AGAIN]
GONE: Final = _Turn.GONE
"""What a call gives that asks for batches of a line that the actor does not have, or has no more."""
Gone: TypeAlias = Literal[_Turn.GONE]


def take_turn(
    buffer: ReplayBuffer, call: Callable[..., Any], timeout_s: float | None = None, waited_s: float = 0.0
) -> Any:
    """Make a call that may wait, in the actor, for one turn.

    Args:
        buffer: whose method it is.
        call: makes it; takes `timeout_s` where there is a limiter, or one was given.
        timeout_s: longest wait of all turns together; None is the limiter's.
        waited_s: how long it has waited in the turns before this one; below 0 for one that nobody waits for yet.

    Returns:
        What the call returns; `AGAIN` if it must be made again.

    Raises:
        WaitTimeoutError: if all the time is up; nothing is changed.
    """
    limiter = buffer.rate_limiter
    if limiter is None:
        return call() if timeout_s is None else call(timeout_s=timeout_s)
    if timeout_s is not None:
        check_timeout(timeout_s)
    limit = float(limiter.timeout_s if timeout_s is None else timeout_s)
    left = max(0.0, limit - waited_s)
    turn = min(left, TURN_S)
    try:
        return call(timeout_s=turn)
    except WaitTimeoutError as error:
        if left > turn:
            return AGAIN
        told = str(error).replace(f"waited {turn:g} s", f"waited {limit:g} s", 1)
        raise WaitTimeoutError(told) from None


def in_time(reference: Any, what: str, began: float, limit_s: float | None = None) -> Any:
    """Wait for the answer to a call that may wait for so long, and for `GRACE_S` beyond.

    Args:
        reference: of the call, or a list of them.
        what: the actor, in messages.
        began: when the call began to wait, of `time.monotonic`.
        limit_s: how long it may wait; None and infinity set no end.

    Raises:
        LostBufferError: if the actor is gone, or did not answer by then.
    """
    if limit_s is None or limit_s > _ENDLESS_S:
        return answer(reference, what)
    try:
        return answer(reference, what, max(0.0, began + limit_s + GRACE_S - time.monotonic()))
    except UsageError as error:
        if not isinstance(error.__cause__, ray().exceptions.GetTimeoutError):
            raise  # of the buffer
        msg = (
            f"{what} did not answer within {GRACE_S:g} s after the {limit_s:g} s that the call may wait: it is stopped,"
            " cannot be reached, or has too much to do; what the call asked for may still come about"
        )
        raise LostBufferError(msg) from error


def insist(send: Callable[[float], Any], what: str, limit_s: float | None = None) -> Any:
    """Make a call that may wait, from another process, until it has been let through or its time is up.

    Args:
        send: starts the call, given how long it has waited, in seconds.
        what: the actor, in messages.
        limit_s: how long it may wait, as far as known here; see `in_time`.

    Raises:
        LostBufferError: if the actor is gone, or did not answer within that time and `GRACE_S`.
    """
    began = time.monotonic()
    found = in_time(send(0.0), what, began, limit_s)
    while found is AGAIN:
        found = in_time(send(time.monotonic() - began), what, began, limit_s)
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


def exchange_in_turns(method: Any, what: str, limit_s: float | None, name: str, *args: Any, **kwargs: Any) -> Any:
    """Do the same with a method that may wait, as long as its argument `timeout_s` says; without it, for `limit_s`."""
    timeout_s = kwargs.get("timeout_s")
    if timeout_s is not None:
        check_timeout(timeout_s)
        limit_s = float(timeout_s)
    request = seal((name, args, kwargs))
    return unseal(insist(lambda waited_s: method.remote(waited_s, request), what, limit_s))
