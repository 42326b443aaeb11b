"""Actors in threads of this process, with the functions of the module `ray` that handles call.

Handles, actors and the serialization between them are those of a cluster, and tests run in milliseconds. An actor can
be stopped, killed and restarted. What needs processes (signals, lifetimes, memory) is tested in a cluster of Ray.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

RAY: Any = ray
exceptions = RAY.exceptions
ACTORS: list[Actor] = []
_HERE = threading.local()


def copied(data: Any) -> Any:
    """Return what arrives in another process."""
    return RAY.cloudpickle.loads(RAY.cloudpickle.dumps(data))


class Reference(Future[Any]):
    """A result, for which threads and coroutines can wait."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def future(self) -> Future[Any]:
        """Return the result as Ray does."""
        return self

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the result, unless the actor was killed before."""
        with suppress(InvalidStateError):
            self.set_result(result) if error is None else self.set_exception(error)


class Actor:
    """An actor and its handle. It answers while `running` is set."""

    def __init__(self, cls: Any, options: dict[str, Any], arguments: tuple[Any, ...]) -> None:
        self.made_of, self.given = (cls, copied(arguments)), options
        self.running, self.open = threading.Event(), set[Reference]()
        groups = {None: 8, **options.get("concurrency_groups", {})}
        self.pools = {name: ThreadPoolExecutor(threads) for name, threads in groups.items()}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.place, self.alive, self.ended, self.lock = len(ACTORS), False, False, threading.RLock()
        ACTORS.append(self)
        self.start(reconstructed=False)

    def start(self, *, reconstructed: bool = True) -> None:
        """Make the actor, anew after its process has died."""
        with self.lock:
            if not self.alive:
                _HERE.reconstructed = reconstructed
                cls, arguments = self.made_of
                self.made, self.alive = cls(*arguments), True
                self.running.set()

    def die(self) -> None:
        """Lose the calls in progress; the next call is lost, too, and has the actor made anew if Ray would do that."""
        self.alive, self.ended = False, not self.given.get("max_restarts")
        self.made._made = exceptions.RayActorError()  # ends the threads that save
        for reference in list(self.open):
            reference.end(error=exceptions.RayActorError())

    def __reduce__(self) -> Any:
        return _at, (self.place,)

    def __getattr__(self, name: str) -> Any:
        """Return a method; without Ray's own, which take a function or nothing, all are those of the class."""
        return partial_method(self, name)


def _at(place: int) -> Actor:
    return ACTORS[place]


def partial_method(actor: Actor, name: str, group: str | None = None, num_returns: int = 1) -> Any:
    """Return a method of an actor as a handle has it."""
    return SimpleNamespace(
        remote=partial(_send, actor, name, group, num_returns),
        options=lambda concurrency_group=None, num_returns=1, **_: partial_method(
            actor, name, concurrency_group, num_returns
        ),
    )


def _send(actor: Actor, name: str, group: str | None, num_returns: int, *args: Any, **kwargs: Any) -> Any:
    if not actor.alive and not actor.ended and actor.given.get("max_task_retries"):
        actor.start()
    made, given, whole = actor.made, copied((args, kwargs)), Reference()
    own: dict[str, Any] = {"__ray_ready__": lambda: True, "__ray_call__": lambda function, *more: function(made, *more)}
    method = own.get(name) or getattr(made, name)
    actor.open.add(whole)
    whole.add_done_callback(actor.open.discard)

    def run() -> None:
        actor.running.wait()
        try:
            found = (
                asyncio.run_coroutine_threadsafe(method(*given[0], **given[1]), actor.loop).result()
                if (inspect.iscoroutinefunction(method))
                else method(*given[0], **given[1])
            )
            whole.end(copied(found))
        except BaseException as error:
            whole.end(error=exceptions.RayTaskError(name, "", error))

    if not actor.alive:
        whole.end(error=exceptions.RayActorError())
        if not actor.ended:
            actor.start()
    elif inspect.iscoroutinefunction(method):
        threading.Thread(target=run, daemon=True).start()  # thousands of them may wait
    else:
        actor.pools[group].submit(run)
    return whole if num_returns == 1 else [_part(whole, i) for i in range(num_returns)]


def _part(whole: Reference, i: int) -> Reference:
    part = Reference()
    whole.add_done_callback(
        lambda done: part.end(error=done.exception()) if done.exception() else part.end(done.result()[i])
    )
    return part


# -- the functions of the module --------------------------------------------------------------------------------------


def _get(reference: Any, timeout: float | None = None) -> Any:
    if isinstance(reference, list):
        return [_get(one, timeout) for one in reference]
    try:
        return reference.result(timeout)
    except TimeoutError as error:
        if reference.done():
            raise
        raise exceptions.GetTimeoutError from error


def _wait(references: Sequence[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
    for _ in range(num_returns):
        pending = [one for one in references if not one.done()]
        if len(references) - len(pending) < num_returns:
            wait(pending, timeout, FIRST_COMPLETED)
    ready = [one for one in references if one.done()][:num_returns]
    return ready, [one for one in references if one not in ready]


def _named(**_: Any) -> list[dict[str, Any]]:
    return [one.given for one in ACTORS if not one.ended and one.given.get("name")]


def _get_actor(name: str, namespace: str) -> Actor:
    for one in ACTORS:
        if not one.ended and (one.given.get("name"), one.given.get("namespace")) == (name, namespace):
            return one
    raise ValueError(name)


def _kill(actor: Actor, *, no_restart: bool = True) -> None:
    actor.die()
    actor.ended |= no_restart


def module() -> Any:
    """Return what stands for the module `ray`."""
    made: Any = ModuleType("ray")
    vars(made).update(vars(ray))
    made.is_initialized = lambda: True
    made.remote = lambda **options: lambda cls: SimpleNamespace(remote=lambda *args: Actor(cls, options, args))
    made.get, made.wait, made.kill, made.get_actor = _get, _wait, _kill, _get_actor
    made.available_resources = dict
    made.get_runtime_context = lambda: SimpleNamespace(
        was_current_actor_reconstructed=getattr(_HERE, "reconstructed", False)
    )
    made.nodes = lambda: [{"Alive": True}]
    made.util = SimpleNamespace(
        get_node_ip_address=lambda: "here",
        list_named_actors=_named,
        placement_group=lambda *_, **__: SimpleNamespace(wait=bool),
        remove_placement_group=bool,
    )
    return made
