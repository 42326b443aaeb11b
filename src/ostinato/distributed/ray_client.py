"""Starting Ray and actors, and calling them: results, errors, and calls that may wait for other processes.

A call that the rate limiter holds back is a long poll: the actor waits for at most `POLL_S`, then returns `RETRY`, and
the client calls again, behind calls that had no thread. So more calls can wait than the actor has threads, and a client
that has died does not occupy one.
"""

from __future__ import annotations

import os
import time
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from ostinato._optional import require
from ostinato.distributed.serialization import to_arguments
from ostinato.durable.progress import SHARDS, count
from ostinato.errors import LostBufferError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.distributed.deadlines import Callee, Deadline


CONCURRENCY_GROUPS = {"write": 32, "read": 32, "update": 8, "probe": 1}
"""Threads of an actor for each kind of call: readers that wait for rows never block writers, nor writers readers.
Calls that never wait (priorities, edits, reads, counts) have their own, and so have probes."""
START_TIMEOUT_S = 120.0
"""How long to wait for a new actor."""
_NO_LIMIT_S = 1e8
"""Longer waits (more than three years) are passed to Ray as no limit."""
_K = TypeVar("_K")
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
    ITSELF = "itself"


RETRY: Final = _Signal.RETRY
"""Result of a poll that ended before the call could proceed: nothing has changed, call again."""
Retry: TypeAlias = Literal[_Signal.RETRY]
CLOSED: Final = _Signal.CLOSED
"""Result of a request for batches of a stream that the actor does not have, or has closed."""
Closed: TypeAlias = Literal[_Signal.CLOSED]
ITSELF: Final = _Signal.ITSELF
"""Result of a method of a buffer that returns the buffer."""


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
        UsageError: It did not start in time.
    """
    found: dict[str, Any] = result_of(actor.describe.remote(), name, START_TIMEOUT_S)
    return found


def where() -> dict[str, Any]:
    """Return the machine and the process of the actor that calls this; see `Callee.at`."""
    return {"node": ray().util.get_node_ip_address(), "pid": os.getpid()}


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
        timeout_s: Longest wait, for an actor that starts; None for no limit. For other calls see `result_by`.

    Raises:
        LostBufferError: The actor is dead.
        UsageError: There was no result in time.
    """
    found = _result(reference, name, timeout_s)
    if found is not None:
        return found[0]
    resources = ray().available_resources().items()
    free = {what: count for what, count in resources if not what.startswith("node:")}
    msg = f"{name} did not answer within {timeout_s:g} s; free in the cluster: {free}"
    raise UsageError(msg)


def _result(reference: Any, name: str, timeout_s: float | None) -> tuple[Any] | None:
    """Wait for the result of a call; None if there is none in time. See `result_of`."""
    module = ray()
    try:
        return (module.get(reference, timeout=_ray_limit(timeout_s)),)
    except module.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception):
            raise cause from error
        raise
    except module.exceptions.GetTimeoutError:
        return None
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


# -- deadlines --------------------------------------------------------------------------------------------------------


def _ray_limit(seconds: float | None) -> float | None:
    """Return a time limit as Ray takes it: None for very long ones."""
    return None if seconds is None or seconds > _NO_LIMIT_S else seconds


def probe(actor: Any) -> Any:
    """Ask an actor whether it is alive; return a reference. It answers whatever other calls it works on."""
    return actor.ping.options(concurrency_group="probe").remote()


def result_by(reference: Any, actor: Any, callee: Callee, method: str, deadline: Deadline) -> Any:
    """Wait for the result of a call until its deadline; see `result_of`.

    Args:
        reference: Reference to the result, or a list of references to the results of one call.
        actor: The actor.
        callee: Its name in error messages.
        method: The call, for error messages.
        deadline: When the result is due. If it says so, the actor is asked meanwhile whether it is alive.

    Raises:
        LostBufferError: The actor is dead.
        NoAnswerError: The result is late, or the actor was silent for too long.
    """
    sent = time.monotonic()
    step_s = min(deadline.silence_left_s(sent), deadline.probe_every_s)
    found = _result(reference, callee.name, step_s)
    heard = None
    if found is None:
        one = reference[0] if isinstance(reference, list) else reference
        silent = wait_for({0: one}, {0: actor}, deadline, sent)
        if silent:
            heard = silent[0]
        else:
            found = _result(reference, callee.name, max(1.0, deadline.left_s))  # may copy it to this machine
    if found is None:
        raise deadline.error(callee, method, heard)
    return found[0]


def wait_for(
    references: Mapping[_K, Any], actors: Mapping[_K, Any], deadline: Deadline, sent: float
) -> dict[_K, float | None]:
    """Wait for calls that may take long until they have ended, or their actors were silent for too long.

    Args:
        references: References to the results.
        actors: The actor of each.
        deadline: When results are due.
        sent: When the calls were sent, by `time.monotonic`.

    Returns:
        The calls that have not ended, and when their actors last answered another call; None for never.
    """
    pending, heard, probes = dict(references), dict[_K, float](), dict[_K, Any]()
    unanswered: dict[_K, float | None] = {}
    while pending:
        step_s = min(deadline.probe_every_s, *(deadline.silence_left_s(heard.get(key, sent)) for key in pending))
        _, open_ = ray().wait(list(pending.values()), num_returns=len(pending), timeout=_ray_limit(step_s))
        late = set(open_)
        before, pending = len(pending), {key: reference for key, reference in pending.items() if reference in late}
        count(before - len(pending), SHARDS)
        for key in list(pending):
            if key in probes and ray().wait([probes[key]], timeout=0)[0]:
                heard[key] = time.monotonic()
                del probes[key]
            if deadline.silence_left_s(heard.get(key, sent)) <= 0:
                unanswered[key] = heard.get(key)
                del pending[key]
            elif deadline.probed and key not in probes:
                probes[key] = probe(actors[key])
    return unanswered


def finishes(reference: Any, seconds: float) -> bool:
    """Return whether a call ends within `seconds`."""
    return bool(ray().wait([reference], timeout=_ray_limit(seconds))[0])
