"""Starting Ray and actors, and calling them: results, errors, and calls that may wait for other processes.

A call that the rate limiter holds back is a long poll: the actor waits for at most `POLL_S`, then returns `RETRY`, and
the client calls again, behind calls that had no thread. So more calls can wait than the actor has threads, and a client
that has died does not occupy one.
"""

from __future__ import annotations

import time
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ostinato._optional import require
from ostinato.buffers.rate_limit import check_timeout
from ostinato.distributed.serialization import decode, encode, to_arguments
from ostinato.errors import LostBufferError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "CLOSED",
    "CONCURRENCY_GROUPS",
    "GRACE_S",
    "POLL_S",
    "RETRY",
    "START_TIMEOUT_S",
    "Closed",
    "Retry",
    "call_buffer",
    "call_buffer_polling",
    "init_ray",
    "is_lost",
    "poll",
    "pop_service",
    "ray",
    "result_in_time",
    "result_of",
    "short_message",
    "start_actor",
    "wait_until_ready",
    "why_dead",
]

CONCURRENCY_GROUPS = {"write": 32, "read": 32, "update": 8}
"""Threads of an actor for each kind of call: readers that wait for rows never block writers, nor writers readers.
Calls that never wait (priorities, edits, reads by index) have their own."""
START_TIMEOUT_S = 120.0
"""How long to wait for a new actor."""
POLL_S = 1.0
"""Longest wait of one poll, and so the longest time that an actor waits on behalf of a dead process."""
GRACE_S = 30.0
"""How long the result of a call may take beyond the time that the call may wait: its actor may be busy, or the result
large. An actor that exceeds it is stopped, or its machine cannot be reached."""
_NO_LIMIT_S = 1e8
"""Longer waits (more than three years) are passed to Ray as no limit."""
_RESERVED = ("concurrency_groups", "get_if_exists", "max_task_retries")
_OUTLIVE = "name= and lifetime='detached' let it outlive that"
_DEATHS = {
    "ray.kill": "it was closed, by close() of one of its handles or by ray.kill()",
    "owner has died": f"the process that made it has ended; {_OUTLIVE}",
    "job has finished": f"the program that made it has ended; {_OUTLIVE}",
    "out of scope": f"the process that made it dropped its last handle; {_OUTLIVE}",
    "references to the actor were removed": f"the process that made it dropped its last handle; {_OUTLIVE}",
}
"""Parts of Ray's messages about dead actors, and what they mean for a buffer."""


class _Signal(Enum):
    """Results that are identical on both sides of a pickle."""

    RETRY = "retry"
    CLOSED = "closed"


RETRY: Final = _Signal.RETRY
"""Result of a poll that ended before the call could proceed: nothing has changed, call again."""
Retry: TypeAlias = Literal[_Signal.RETRY]
CLOSED: Final = _Signal.CLOSED
"""Result of a request for batches of a stream that the actor does not have, or has closed."""
Closed: TypeAlias = Literal[_Signal.CLOSED]


# -- starting ---------------------------------------------------------------------------------------------------------


def ray() -> Any:
    """Return the `ray` module.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    return require("ray", "ray")


def init_ray(config: Mapping[str, Any] | None) -> None:
    """Call `ray.init` with `config` unless this process is connected to Ray already."""
    module = ray()
    if not module.is_initialized():
        module.init(**(config or {}))
    elif config:
        warnings.warn(
            f"ray_init_config={dict(config)} has no effect: this process is connected to Ray already",
            UserWarning,
            stacklevel=3,
        )


def pop_service(name: str, options: Any) -> None:
    """Remove TorchRL's options of services from the options of a buffer in actors.

    Args:
        name: The class, for error messages.
        options: Keyword arguments.

    Raises:
        OptionError: They ask for another service than actors of Ray.
    """
    backend = options.pop("service_backend", "ray")
    if backend != "ray":
        msg = f"{name} is in actors of Ray: service_backend must be 'ray', got {backend!r}; use ReplayBuffer otherwise"
        raise OptionError(msg)
    given = options.pop("service_backend_options", None)
    if given:
        msg = f"{name} has no service_backend_options, got {given!r}: pass ray_init_config and remote_config to it"
        raise OptionError(msg)
    transport = options.pop("transport", "auto")
    if transport == "distributed":
        msg = (
            f"{name}(transport='distributed') is not available: rows and batches go through Ray's object store, which "
            "takes any rows and copies them once. Leave transport out"
        )
        raise OptionError(msg)
    if transport not in ("auto", "ray"):
        msg = f"{name} transport must be 'auto', 'ray', or 'distributed' (not available), got {transport!r}"
        raise OptionError(msg)
    given = options.pop("transport_options", None)
    if given:
        msg = f"transport_options are not used by the Ray replay transport, got {given!r}: leave them out"
        raise OptionError(msg)


def start_actor(actor_class: type, options: Mapping[str, Any] | None, argument: tuple[Any, ...], **more: Any) -> Any:
    """Start an actor that holds a buffer.

    Args:
        actor_class: Its class.
        options: The user's options for `ray.remote`.
        argument: Argument of the class.
        **more: Options that the caller sets.

    Raises:
        OptionError: The user's options contain one that is set here.
    """
    given = dict(options or {})
    for name in (*_RESERVED, *({"max_restarts"} & more.keys())):
        if name in given:
            msg = f"remote_config must not hold {name!r}, which the buffer sets itself, got {given[name]!r}"
            raise OptionError(msg)
    merged = {"max_concurrency": 8, **given, **more, "concurrency_groups": CONCURRENCY_GROUPS}
    kept = merged.get("lifetime") == "detached"
    return ray().remote(**merged)(actor_class).remote(*to_arguments(argument, kept=kept))


def wait_until_ready(actor: Any, name: str) -> dict[str, Any]:
    """Wait until a new actor is ready and return its description.

    Args:
        actor: The actor.
        name: Its name in error messages.

    Raises:
        OstinatoError: The actor's constructor raised it.
    """
    found: dict[str, Any] = result_of(actor.describe.remote(), name, START_TIMEOUT_S)
    return found


# -- results and errors -----------------------------------------------------------------------------------------------


def is_lost(error: BaseException) -> bool:
    """Return whether a call failed because its actor is dead or did not answer in time."""
    known = ray().exceptions
    return isinstance(error, (known.RayActorError, known.ObjectLostError, known.GetTimeoutError))


def result_of(reference: Any, name: str, timeout_s: float | None = None) -> Any:
    """Wait for the result of a call; an exception of the buffer is raised with its own type.

    Args:
        reference: Reference to the result, or a list of references.
        name: The actor's name in error messages.
        timeout_s: Longest wait; None for no limit.

    Raises:
        LostBufferError: The actor is dead.
        UsageError: There was no result in time.
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
        free = {what: count for what, count in module.available_resources().items() if not what.startswith("node:")}
        msg = f"{name} did not answer within {timeout_s:g} s; free in the cluster: {free}"
        raise UsageError(msg) from error
    except (module.exceptions.RayActorError, module.exceptions.ObjectLostError) as error:
        msg = f"{name} is gone, and its rows with it ({why_dead(error)}): make a new one and load a checkpoint into it"
        raise LostBufferError(msg) from error


def why_dead(error: BaseException) -> str:
    """Return what the error of a call says about an actor that is dead for good."""
    text = str(error)
    return next((reason for part, reason in _DEATHS.items() if part in text), short_message(error))


def short_message(error: BaseException) -> str:
    """Return the first and the last line of an error message of Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__


# -- calls ------------------------------------------------------------------------------------------------------------


def call_buffer(method: Any, actor_name: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the buffer in an actor and return its result.

    Args:
        method: The actor's method that takes an encoded request.
        actor_name: The actor's name in error messages.
        name: The buffer's method.
        *args: Its arguments.
        **kwargs: Its keyword arguments.
    """
    return decode(result_of(method.remote(encode((name, args, kwargs))), actor_name))


def call_buffer_polling(
    method: Any, actor_name: str, limit_s: float | None, name: str, *args: Any, **kwargs: Any
) -> Any:
    """Call a method of the buffer that may wait; see `call_buffer`.

    Args:
        method: The actor's method that takes the seconds waited so far and an encoded request.
        actor_name: The actor's name in error messages.
        limit_s: Longest wait unless `kwargs` holds `timeout_s`.
        name: The buffer's method.
        *args: Its arguments.
        **kwargs: Its keyword arguments.
    """
    timeout_s = kwargs.get("timeout_s")
    if timeout_s is not None:
        check_timeout(timeout_s)
        limit_s = float(timeout_s)
    request = encode((name, args, kwargs))
    return decode(poll(lambda waited_s: method.remote(waited_s, request), actor_name, limit_s))


def poll(send: Callable[[float], Any], name: str, limit_s: float | None = None) -> Any:
    """Repeat a call that may wait until its result is not `RETRY`.

    Args:
        send: Starts the call, given the seconds waited so far; returns a reference.
        name: The actor's name in error messages.
        limit_s: How long the call may wait, if that is known here; see `result_in_time`.

    Raises:
        LostBufferError: The actor is dead, or did not answer within that time and `GRACE_S`.
    """
    began = time.monotonic()
    found = result_in_time(send(0.0), name, began, limit_s)
    while found is RETRY:
        found = result_in_time(send(time.monotonic() - began), name, began, limit_s)
    return found


def result_in_time(reference: Any, name: str, began: float, limit_s: float | None = None) -> Any:
    """Wait for the result of a call until `GRACE_S` after the time that the call may wait.

    Args:
        reference: Reference to the result, or a list of references.
        name: The actor's name in error messages.
        began: When the call began to wait, by `time.monotonic`.
        limit_s: How long it may wait; None and infinity set no limit.

    Raises:
        LostBufferError: The actor is dead, or did not answer in time.
    """
    if limit_s is None or limit_s > _NO_LIMIT_S:
        return result_of(reference, name)
    try:
        return result_of(reference, name, max(0.0, began + limit_s + GRACE_S - time.monotonic()))
    except UsageError as error:
        if not isinstance(error.__cause__, ray().exceptions.GetTimeoutError):
            raise  # the buffer raised it
        msg = (
            f"{name} did not answer within {GRACE_S:g} s after the {limit_s:g} s that the call may wait: it is "
            "stopped, cannot be reached, or is overloaded; the call may still take effect"
        )
        raise LostBufferError(msg) from error
