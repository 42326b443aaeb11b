"""Names and lifetimes of actors: how other programs find them, when they end, and whether they still exist.

All actors of a buffer have a name in Ray; for a buffer without a name it is random. Ray keeps the name of an actor that
it is restarting, and removes that of an actor that is dead for good: so the names tell one from the other.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.distributed.ray_client import init_ray, ray, result_of, why_dead
from ostinato.errors import LostBufferError, NoAnswerError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


NAMESPACE = "ostinato"
"""Default namespace of names."""
BUFFER = "buffer"
"""Part of the name of the actor of a `RayReplayBuffer`."""
FLEET = "fleet"
"""Part of the name of the `FleetActor`."""
GROUPS = "groups"
"""Part of the name of the actor of a `RayGroupBuffer`."""
_PREFIX = "ostinato"
_LIFETIMES = (None, "non_detached", "detached")
_KINDS = {BUFFER: "RayReplayBuffer", FLEET: "ShardedReplayBuffer", GROUPS: "RayGroupBuffer"}
_MAX_LENGTH = 200
_END_TIMEOUT_S = 10.0
_POLL_EVERY_S = 0.01


def shard_part(shard: int) -> str:
    """Return the part of the name of a shard's actor."""
    return f"shard-{shard:04d}"


class ActorNames(NamedTuple):
    """The name of a buffer, from which the names of its actors follow."""

    name: str
    """The user's, or a random one, which begins with a colon."""
    namespace: str
    given: bool
    """Whether the user gave the name."""
    detached: bool
    """Whether the actors outlive the process that made them."""

    def __str__(self) -> str:
        """Return how messages name the buffer after its class."""
        return f" {self.name!r}" if self.given else ""

    def actor(self, part: str) -> str:
        """Return the name of an actor."""
        return f"{_PREFIX}:{self.name}:{part}"

    def options(self, part: str) -> dict[str, Any]:
        """Return the options of `ray.remote` for an actor."""
        lifetime = "detached" if self.detached else None
        return {"name": self.actor(part), "namespace": self.namespace, "lifetime": lifetime}

    def exists(self, part: str) -> bool:
        """Return whether an actor lives or is being restarted."""
        try:
            ray().get_actor(self.actor(part), namespace=self.namespace)
        except ValueError:
            return False
        return True

    def why_gone(self, actors: Sequence[tuple[str, Any]]) -> str | None:
        """Return why actors are gone for good; None if one of them lives or is being restarted.

        Args:
            actors: For each actor the part of its name, and its handle.
        """
        if not ray().is_initialized():
            return "this process is not connected to Ray any more"
        if any(self.exists(part) for part, _ in actors):
            return None
        known = ray().exceptions
        try:
            ray().get(actors[0][1].__ray_ready__.remote(), timeout=1.0)  # the error of a dead actor comes at once
        except (known.RayActorError, known.GetTimeoutError) as error:
            return why_dead(error)
        return "its actors have ended"

    def wait_until_free(self, parts: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until Ray has removed the names of actors that were ended, at most `timeout_s` (None is 10 s)."""
        until = time.monotonic() + (_END_TIMEOUT_S if timeout_s is None else timeout_s)
        for part in parts:
            while self.exists(part) and time.monotonic() < until:
                time.sleep(_POLL_EVERY_S)


def take_names(
    owner: str,
    name: str | None,
    lifetime: str | None,
    namespace: str | None,
    remote_config: Mapping[str, Any] | None,
) -> tuple[ActorNames, dict[str, Any]]:
    """Return the names of the actors of a new buffer, and the other options of its actors.

    Args:
        owner: The class, for error messages.
        name: The name of the buffer; None for none.
        lifetime: "detached", or None.
        namespace: Namespace of the name; None is `NAMESPACE`.
        remote_config: Options of actors; it may hold the three above instead.

    Raises:
        OptionError: They are invalid or contradict each other.
    """
    rest = dict(remote_config or {})
    chosen: dict[str, Any] = {}
    for option, value in {"name": name, "lifetime": lifetime, "namespace": namespace}.items():
        other = rest.pop(option, None)
        if value is not None and other is not None and value != other:
            msg = f"{owner} got {option}={value!r}, and {other!r} in remote_config: give one of them"
            raise OptionError(msg)
        chosen[option] = other if value is None else value
    if chosen["lifetime"] not in _LIFETIMES:
        msg = f"{owner} lifetime must be None or 'detached', got {chosen['lifetime']!r}"
        raise OptionError(msg)
    detached = chosen["lifetime"] == "detached"
    if chosen["name"] is None and (detached or chosen["namespace"] is not None):
        given = "lifetime='detached'" if detached else f"namespace={chosen['namespace']!r}"
        msg = f"{owner}({given}) needs a name=, by which attach(name) finds it"
        raise OptionError(msg)
    given_name = chosen["name"] is not None
    label = check_name(owner, "name", chosen["name"]) if given_name else f":{uuid.uuid4().hex}"
    place = NAMESPACE if chosen["namespace"] is None else check_name(owner, "namespace", chosen["namespace"])
    return ActorNames(label, place, given_name, detached), rest


def names_of(owner: str, name: str, namespace: str | None) -> ActorNames:
    """Return the names of the actors of an existing buffer.

    Raises:
        OptionError: The name or the namespace is invalid.
    """
    place = NAMESPACE if namespace is None else check_name(owner, "namespace", namespace)
    return ActorNames(check_name(owner, "name", name), place, given=True, detached=False)


def check_name(owner: str, option: str, value: Any) -> str:
    """Return a name given by the user.

    Raises:
        OptionError: It is not a text that Ray can use, or holds a colon.
    """
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_LENGTH or ":" in value or not value.isprintable():
        msg = f"{owner} {option} must be a text of 1 to {_MAX_LENGTH} printable characters without ':', got {value!r}"
        raise OptionError(msg)
    return value


def check_connected() -> None:
    """Raise `LostBufferError` if this process is not connected to Ray: a call would start another cluster."""
    if not ray().is_initialized():
        msg = "this process is not connected to Ray any more, where the buffer is: ray.init(address=...) connects it"
        raise LostBufferError(msg)


def check_free(owner: str, names: ActorNames) -> None:
    """Check that no buffer has a name.

    Raises:
        OptionError: One has, or actors of one are left.
    """
    parts = _named_actors(names.namespace).get(names.name, []) if names.given else []
    if parts:
        msg = f"{owner} name={names.name!r} is taken in namespace {names.namespace!r}: {_taken_by(names, parts)}"
        raise OptionError(msg)


@contextlib.contextmanager
def claiming(owner: str, names: ActorNames) -> Iterator[None]:
    """Start actors in this block; if one of the names is taken meanwhile, `OptionError` is raised."""
    try:
        yield
    except ray().exceptions.ActorAlreadyExistsError as error:
        msg = f"{owner} name={names.name!r} was taken while it was made: take another name, or attach({names.name!r})"
        raise OptionError(msg) from error


def _taken_by(names: ActorNames, parts: list[str]) -> str:
    """Return what has a name, and what to do: attach to a complete buffer, end the actors left of another one."""
    kind = next((kind for part, kind in _KINDS.items() if part in parts), None)
    if kind is None or parts == [FLEET]:
        left = [names.actor(part) for part in parts]
        return (
            f"{len(left)} actor(s) are left of a buffer that was not made or not ended completely, such as {left[0]}; "
            "end each with ray.kill(ray.get_actor(name, namespace)), or take another name"
        )
    return f"{kind}.attach({names.name!r}) returns a handle to it, whose close() ends it; or take another name"


def _named_actors(namespace: str) -> dict[str, list[str]]:
    """Return the parts of the existing actors of each buffer in a namespace, by its name, sorted."""
    found: dict[str, list[str]] = {}
    for one in ray().util.list_named_actors(all_namespaces=True):
        prefix, _, rest = one["name"].partition(":")
        name, _, part = rest.rpartition(":")
        if one["namespace"] == namespace and prefix == _PREFIX:
            found.setdefault(name, []).append(part)
    return {name: sorted(parts) for name, parts in sorted(found.items())}


def find(names: ActorNames, part: str) -> Any:
    """Return the actor through which handles attach to a buffer.

    Raises:
        LostBufferError: There is no such buffer, or it is not complete.
    """
    try:
        return ray().get_actor(names.actor(part), namespace=names.namespace)
    except ValueError:
        pass
    existing, kind = _named_actors(names.namespace), _KINDS[part]
    parts = existing.get(names.name)
    if parts:
        msg = f"{names.name!r} in namespace {names.namespace!r} is no complete {kind}: {_taken_by(names, parts)}"
        raise LostBufferError(msg)
    known = [name for name, parts in existing.items() if part in parts and not name.startswith(":")]
    msg = (
        f"there is no {kind} named {names.name!r} in namespace {names.namespace!r}; it has {known or 'none'}. A buffer "
        "ends with close(), and without lifetime='detached' with the process that made it"
    )
    raise LostBufferError(msg)


def connect(ray_init_config: Mapping[str, Any] | None) -> None:
    """Connect this process to a running cluster unless it is connected already.

    Args:
        ray_init_config: Arguments of `ray.init`; None for the cluster of this machine, or that of `RAY_ADDRESS`.

    Raises:
        UsageError: There is no such cluster.
    """
    if ray().is_initialized():
        return init_ray(ray_init_config)
    try:
        init_ray({"address": "auto", **(ray_init_config or {})})
    except ConnectionError as error:
        msg = "there is no Ray cluster here: call ray.init(address=...), or pass ray_init_config={'address': ...}"
        raise UsageError(msg) from error


def first_answer(calls: Sequence[Any], timeout_s: float, name: str) -> Any:
    """Return the result of the first call that ends.

    Args:
        calls: References to the results.
        timeout_s: Longest wait.
        name: Who answers, for error messages.

    Raises:
        LostBufferError: Its actor is dead.
        NoAnswerError: None ends in time.
    """
    done, _ = ray().wait(list(calls), timeout=max(0.0, timeout_s))
    if not done:
        msg = f"{name} did not answer attach() in time: its actors are stopped, starting, or cannot be reached"
        raise NoAnswerError(msg)
    return result_of(done[0], name)
