"""A buffer of groups for other processes: behind a socket on this machine, or in an actor of Ray.

Handles have one table of methods, that of `RemoteGroups`. Calls have ids, so that a handle repeats those whose answer
did not come. Messages of sockets are records as in the log (`groups.records`), so nothing is unpickled there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from abc import ABC, abstractmethod
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, final

from ostinato import errors
from ostinato.buffers.options import check_seconds
from ostinato.distributed.actor_names import (
    GROUPS,
    check_free,
    claiming,
    connect,
    find,
    names_of,
    take_names,
)
from ostinato.distributed.buffer_client import BufferClient
from ostinato.distributed.deadlines import CALL_TIMEOUT_S, POLL_S, Deadline, check_call_timeout
from ostinato.distributed.ray_client import RETRY, finishes, init_ray, ray, start_actor, wait_until_ready, where
from ostinato.distributed.remote import Method, RemoteProperty, Time, named, remote
from ostinato.distributed.serialization import decode, encode, from_arguments
from ostinato.durable.files import new_token
from ostinato.errors import LostBufferError, NoAnswerError, OptionError, OstinatoError, WaitTimeoutError
from ostinato.groups.buffer import WAIT_S, GroupBuffer, GroupOptions
from ostinato.groups.records import Group, Lease, Payload, Response, event_of, pack, payload_of
from ostinato.groups.stats import GroupStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.distributed.actor_names import ActorNames

__all__ = ["GroupClient", "GroupServer", "RayGroupBuffer", "RemoteGroups"]

_RETRY_S = 0.05
_CLOSE_TIMEOUT_S = 5.0


# -- methods of all handles -------------------------------------------------------------------------------------------


def _listed(_: object, given: dict[str, Any]) -> None:
    if given.get("ids") is None:
        msg = "admit in another process needs ids, so that the call can be repeated: give one for each prompt"
        raise OptionError(msg)
    given |= {"prompts": list(given["prompts"]), "ids": list(given["ids"])}


def _as_dict(_: object, given: dict[str, Any]) -> None:
    if hasattr(given["response"], "keys"):
        given["response"] = dict(given["response"])


def _with_id(_: object, given: dict[str, Any]) -> None:
    given["id"] = given.get("id") or new_token()


def _by_id(_: object, given: dict[str, Any]) -> None:
    """Send the name of a lease without its groups."""
    if isinstance(given["lease"], Lease):
        given["lease"] = given["lease"].id


@named
class RemoteGroups(ABC):
    """The methods of a `GroupBuffer` in another process."""

    @abstractmethod
    def _call(self, method: Method, time: Time, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the buffer, or read a property."""

    admit = remote(GroupBuffer.admit, "write", "`ids` are required, for calls that are repeated.", prepare=_listed)
    append = remote(GroupBuffer.append, prepare=_as_dict)
    drop = remote(GroupBuffer.drop)
    lease = remote(GroupBuffer.lease, "write", prepare=_with_id)
    ack = remote(GroupBuffer.ack, prepare=_by_id)
    renew = remote(GroupBuffer.renew, prepare=_by_id)
    release = remote(GroupBuffer.release, prepare=_by_id)
    leases = remote(GroupBuffer.leases)
    position = remote(GroupBuffer.position)
    return_to = remote(GroupBuffer.return_to)
    cursor = RemoteProperty[Any](GroupBuffer.cursor)
    ids = remote(GroupBuffer.ids)
    group = remote(GroupBuffer.group)
    state = remote(GroupBuffer.state)
    stats = remote(GroupBuffer.stats)

    def __len__(self) -> int:
        """Return the number of groups that are neither trained nor dropped."""
        return int(self._call(_LEN, None))

    def __bool__(self) -> bool:
        """Return True: a handle without groups is a handle."""
        return True

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the handle."""


_LEN = Method("__len__")
_METHODS = {"__len__", "cursor", *(name for name, made in vars(RemoteGroups).items() if hasattr(made, "__wrapped__"))}
"""What may be called from other processes."""


def _answer(buffer: GroupBuffer, method: str, args: Any, kwargs: Any) -> Any:
    """Call a method of the buffer, or read its property."""
    if method not in _METHODS:
        msg = f"no method {method!r} of a buffer of groups can be called from another process"
        raise OptionError(msg)
    found = getattr(buffer, method)
    return found(*args, **kwargs) if callable(found) else found


def _deadline(method: Method, time: Time, call_timeout_s: float) -> Deadline:
    """Return when the answer of a call is due, which may wait in the buffer before."""
    if method.kind != "write":
        return Deadline.of_call(time, call_timeout_s)
    return Deadline.of_wait(WAIT_S if time is None else time, WAIT_S, call_timeout_s)


# -- a socket ---------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Return an answer with lists in place of named tuples, whose types are not part of messages."""
    if not isinstance(value, tuple):
        return value
    return list(map(_plain, value)) if hasattr(value, "_fields") else tuple(map(_plain, value))


def _group(name: str, prompt: Any, size: int, state: str, responses: Any) -> Group:
    return Group(name, prompt, size, state, tuple(Response(*each) for each in responses))


def _lease(name: str, groups: Any, consumer: str, until: float) -> Lease:
    return Lease(name, tuple(_group(*each) for each in groups), consumer, until)


_MAKE: dict[str, Any] = {"Group": _group, "Lease": _lease, "GroupStats": GroupStats}
"""Makes the named tuples that are answers."""


@final
class GroupServer:
    """Answers the calls of `GroupClient` for a buffer, each connection in a thread, until it is closed.

    Args:
        buffer: The buffer, which this process may use as well.
        address: Path of the socket, which is created; short, since systems allow about 100 bytes. Whoever may write to
            its folder may connect.

    Raises:
        OptionError: The socket cannot be created at the path.
    """

    def __init__(self, buffer: GroupBuffer, address: str | Path) -> None:
        self._buffer, self._address = buffer, str(address)
        try:
            Path(self._address).unlink(missing_ok=True)  # of a server that was killed
            self._listener = Listener(self._address, "AF_UNIX")
        except OSError as error:
            msg = f"no socket can be created at address {self._address!r}: {error}"
            raise OptionError(msg) from error
        self._connections: set[Connection] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="ostinato-groups", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError, EOFError):
                connection = self._listener.accept()
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer the calls of a connection until it ends."""
        with contextlib.suppress(OSError, EOFError), connection:
            while True:
                connection.send_bytes(self._reply(bytearray(connection.recv_bytes())))
        self._connections.discard(connection)

    def _reply(self, message: bytearray) -> bytes:
        try:
            method = event_of(message, "a call")["method"]
            answer = _answer(self._buffer, method, *payload_of(message, "a call"))
            return pack({"error": "", "kind": type(answer).__name__}, Payload.of(_plain(answer), "an answer"))
        except OstinatoError as error:
            return pack({"error": type(error).__name__, "message": str(error)})
        except Exception as error:  # noqa: BLE001 (the caller gets it)
            return pack({"error": "OstinatoError", "message": repr(error)})

    def close(self) -> None:
        """End all connections. The buffer stays open."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            Client(self._address, "AF_UNIX").close()  # ends the wait for a connection
        self._thread.join()
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # the thread that reads it closes it

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


@final
class GroupClient(RemoteGroups):
    """A `GroupBuffer` in another process of this machine. Threads and forked processes have connections of their own.

    Methods are those of the buffer. `timeout_s` of `admit` and `lease` is how long they may wait for groups, that of
    other calls when the answer is due. A call whose connection ends is repeated until then, also with a server that was
    started again meanwhile.

    Args:
        address: Path of the socket of the `GroupServer`.
        call_timeout_s: Seconds after which a call without an answer raises, besides those that it may wait itself.
    """

    def __init__(self, address: str | Path, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._address = str(address)
        self._call_timeout_s = check_call_timeout(call_timeout_s)
        self._own = threading.local()

    def _call(self, method: Method, time: Time, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the buffer and return its answer.

        Raises:
            NoAnswerError: The server did not answer in time.
            OstinatoError: What the method raised.
        """
        deadline = _deadline(method, time, self._call_timeout_s)
        if method.kind == "write":
            kwargs["timeout_s"] = deadline.wait_s
        message = pack({"method": method.name}, Payload.of([list(args), kwargs], method.name))
        answer = self._ask(message, method.name, deadline)
        event = event_of(answer, "an answer")
        if event["error"]:
            kind = getattr(errors, str(event["error"]), OstinatoError)
            raise kind(event["message"])
        found = payload_of(answer, "an answer")
        make = _MAKE.get(event["kind"])
        return found if make is None else make(*found)

    def _ask(self, message: bytes, method: str, deadline: Deadline) -> bytearray:
        """Send a message until there is an answer."""
        while True:
            try:
                return self._exchange(message, deadline)
            except (OSError, EOFError) as error:
                self._own.connection = None
                if not deadline.left_s:
                    msg = f"the buffer of groups at {self._address} does not answer ({error}): {method}"
                    raise NoAnswerError(msg) from error
                sleep(_RETRY_S)

    def _exchange(self, message: bytes, deadline: Deadline) -> bytearray:
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is None or self._own.process != os.getpid():
            connection = self._own.connection = Client(self._address, "AF_UNIX")
            self._own.process = os.getpid()
        connection.send_bytes(message)
        if not connection.poll(deadline.left_s):
            connection.close()
            msg = "no answer in time"
            raise TimeoutError(msg)
        return bytearray(connection.recv_bytes())

    def close(self) -> None:
        """End the connection of this thread."""
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._own.connection = None


# -- an actor of Ray --------------------------------------------------------------------------------------------------


_INFO = {"callee": "the actor of the buffer of groups", "limit_s": WAIT_S, "node": None, "pid": None}


@final
class GroupActor:
    """The actor of a `RayGroupBuffer`. One that Ray restarts opens the log again.

    Args:
        *spec: Path and options of the buffer, as `to_arguments` returns them.
    """

    def __init__(self, *spec: Any) -> None:
        self._made: GroupBuffer | Exception
        try:
            path, options = from_arguments(spec)
            self._made = GroupBuffer(path, **options)
        except Exception as error:  # noqa: BLE001 (raised by the next call)
            self._made = error

    @property
    def _buffer(self) -> GroupBuffer:
        if isinstance(self._made, Exception):
            raise self._made
        return self._made

    def describe(self) -> dict[str, Any]:
        """Return where the buffer is, and how messages name it, once it is open."""
        return {**_INFO, "groups": len(self._buffer), **where()}

    def ping(self) -> None:
        """Do nothing: an actor that answers is alive, whatever else it works on."""

    def call(self, request: Any) -> Any:
        """Call a method of the buffer, or read a property: name, arguments, keyword arguments, encoded."""
        return encode(_answer(self._buffer, *decode(request)))

    def call_polling(self, waited_s: float, request: Any) -> Any:
        """Call a method that may wait, for at most `POLL_S`; return `RETRY` if the call must be made again."""
        name, args, kwargs = decode(request)
        left = max(0.0, kwargs.pop("timeout_s") - waited_s)
        try:
            return encode(_answer(self._buffer, name, args, {**kwargs, "timeout_s": min(left, POLL_S)}))
        except WaitTimeoutError:
            if left > POLL_S:
                return RETRY
            raise

    def close(self) -> None:
        """Put all changes on the disk."""
        self._buffer.close()


@final
class RayGroupBuffer(RemoteGroups):
    """A `GroupBuffer` in a Ray actor. This is a handle to it, which can be pickled; threads may share one.

    Methods are those of the buffer. `timeout_s` of `admit` and `lease` is how long they may wait for groups, that of
    other calls when the answer is due. With a path, Ray restarts an actor that has died: it opens the log again, and
    handles repeat their calls. Calls that wait never block others.

    Args:
        path: Folder of the log, on the machine of the actor; None keeps everything in its memory.
        call_timeout_s: Seconds after which a call without an answer raises, besides those that it may wait itself.
        name: Name by which `attach` returns a handle in other programs of the cluster.
        lifetime: "detached" lets the actor outlive the process that makes it; it needs a `name`.
        namespace: Namespace of the name; None is "ostinato".
        ray_init_config: Arguments of `ray.init`, if this process is not connected to Ray yet.
        remote_config: Options of the actor, as for `ray.remote`.
        **options: As for `GroupBuffer`.

    Raises:
        MissingExtraError: Ray is not installed.
        OptionError: The name is taken, or an option is out of its range.
        CheckpointError: The folder is in use, or holds something else.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        name: str | None = None,
        lifetime: Literal["detached"] | None = None,
        namespace: str | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        timeout_s = check_call_timeout(call_timeout_s)
        owner = type(self).__name__
        names, actor_options = take_names(owner, name, lifetime, namespace, remote_config)
        init_ray(ray_init_config)
        check_free(owner, names)
        spec = (None if path is None else str(Path(path).absolute()), dict(options))
        more = {**names.options(GROUPS), "max_restarts": 0 if path is None else -1}
        with claiming(owner, names):
            actor = start_actor(GroupActor, actor_options, spec, **more)
        try:
            info = wait_until_ready(actor, "the actor of the buffer of groups")
        except BaseException:
            ray().kill(actor)
            raise
        self.__setstate__({"actor": actor, "info": info, "names": names, "call_timeout_s": timeout_s})

    @classmethod
    def attach(
        cls,
        name: str,
        namespace: str | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        ray_init_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a handle to the buffer that was made with `name`; see `RayReplayBuffer.attach`.

        Raises:
            LostBufferError: There is no such buffer.
            NoAnswerError: Its actor does not answer in time.
        """
        check_seconds("timeout_s", timeout_s)
        names = names_of(cls.__name__, name, namespace)
        connect(ray_init_config)
        handle = object.__new__(cls)
        state = {"actor": find(names, GROUPS), "info": _INFO, "names": names, "call_timeout_s": CALL_TIMEOUT_S}
        handle.__setstate__(state)
        handle._call(_LEN, timeout_s)  # it may be restarting
        return handle

    def __getstate__(self) -> dict[str, Any]:
        """A pickled handle reaches the same buffer."""
        client = self._client
        state = {"actor": client.actor, "info": client.info, "call_timeout_s": client.call_timeout_s}
        return {**state, "names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect to the actor."""
        self._names: ActorNames = state["names"]
        self._client = BufferClient(state["actor"], state["info"], state["call_timeout_s"])

    def _call(self, method: Method, time: Time, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the buffer, again if its actor is restarted meanwhile.

        Raises:
            NoAnswerError: The actor did not answer in time.
            LostBufferError: The actor has ended for good.
        """
        client, deadline = self._client, _deadline(method, time, self._client.call_timeout_s)
        group = "read" if method.name == "lease" else "write"
        while True:
            try:
                if method.kind == "write":
                    return client.poll(group, deadline.wait_left_s, method.name, *args, **kwargs)
                return client.call("answer", deadline, method.name, *args, **kwargs)
            except NoAnswerError:
                raise
            except LostBufferError as error:
                if not deadline.left_s or not self._names.exists(GROUPS):
                    msg = f"{client.callee} has ended, its log stays: open it in a new RayGroupBuffer"
                    raise LostBufferError(msg) from error
                sleep(_RETRY_S)

    def close(self) -> None:
        """End the actor, for all handles: later calls raise `LostBufferError`. The log stays. May be called again."""
        if ray().is_initialized() and self._names.exists(GROUPS):
            finishes(self._client.actor.close.options(concurrency_group="update").remote(), _CLOSE_TIMEOUT_S)
            ray().kill(self._client.actor)
            self._names.wait_until_free([GROUPS])
