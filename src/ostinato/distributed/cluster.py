"""Ray, as far as buffers need it: started if nobody did, actors made, calls answered, failures in our words."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ostinato._optional import require
from ostinato.distributed.parcel import Parcel
from ostinato.errors import LostBufferError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GROUPS", "START_S", "answer", "brief", "first_answer", "lost", "ray", "spawn", "start"]

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
