"""A buffer of groups for the other processes of a machine: a server over a local socket, and its clients.

Messages are records as in the log (`records.py`), so nothing is unpickled on either side. A client repeats a call whose
answer did not come: calls have ids, and a repeated one changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from ostinato import errors
from ostinato.core.options import check_number
from ostinato.durable.files import new_token
from ostinato.errors import NoAnswerError, OptionError, OstinatoError
from ostinato.groups.buffer import WAIT_S, GroupBuffer, GroupStats
from ostinato.groups.records import Group, Lease, Payload, Response, event_of, pack, payload_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

METHODS = frozenset(
    {
        "ack",
        "admit",
        "append",
        "cursor",
        "drop",
        "group",
        "ids",
        "lease",
        "leases",
        "position",
        "release",
        "state",
        "stats",
    }
)
_RETRY_S = 0.05


def _plain(value: Any) -> Any:
    """Return an answer with lists in place of named tuples, whose types are not part of messages."""
    if not isinstance(value, tuple):
        return value
    return list(map(_plain, value)) if hasattr(value, "_fields") else tuple(map(_plain, value))


def _group(values: list[Any]) -> Group:
    name, prompt, size, state, responses = values
    return Group(name, prompt, size, state, tuple(Response(*each) for each in responses))


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
                connection.send_bytes(self._answer(bytearray(connection.recv_bytes())))
        self._connections.discard(connection)

    def _answer(self, message: bytearray) -> bytes:
        try:
            method = event_of(message, "a call")["method"]
            if method not in METHODS:
                msg = f"no method {method!r} of a buffer of groups can be called from another process"
                raise OptionError(msg)
            given, named = payload_of(message, "a call")
            attribute = getattr(self._buffer, method)
            answer = attribute if method == "cursor" else attribute(*given, **named)
            return pack({"error": ""}, Payload.of(_plain(answer), "an answer"))
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
class GroupClient:
    """A `GroupBuffer` in another process of this machine. Threads and forked processes have connections of their own.

    A call whose connection ends is repeated until `timeout_s` seconds after it should have been answered, also with a
    server that was started again meanwhile.

    Args:
        address: Path of the socket of the `GroupServer`.
        timeout_s: Seconds without an answer after which a call raises, besides those that it may wait itself.
    """

    def __init__(self, address: str | Path, *, timeout_s: float = 30.0) -> None:
        self._address = str(address)
        self._timeout_s = check_number(
            "timeout_s", timeout_s, "a number of seconds above 0", lambda seconds: seconds > 0
        )
        self._own = threading.local()

    def _call(self, method: str, *given: Any, wait_s: float = 0.0, **named: Any) -> Any:
        """Call a method of the buffer and return its answer.

        Raises:
            NoAnswerError: The server did not answer in time.
            OstinatoError: What the method raised.
        """
        message = pack({"method": method}, Payload.of([list(given), named], method))
        deadline = time.monotonic() + wait_s + self._timeout_s
        while True:
            try:
                answer = self._exchange(message, deadline)
                break
            except (OSError, EOFError) as error:
                self._own.connection = None
                if time.monotonic() > deadline:
                    msg = f"the buffer of groups at {self._address} does not answer ({error}): {method}"
                    raise NoAnswerError(msg) from error
                time.sleep(_RETRY_S)
        event = event_of(answer, "an answer")
        if event["error"]:
            kind = getattr(errors, str(event["error"]), OstinatoError)
            raise kind(event["message"])
        return payload_of(answer, "an answer")

    def _exchange(self, message: bytes, deadline: float) -> bytearray:
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is None or self._own.process != os.getpid():
            connection = self._own.connection = Client(self._address, "AF_UNIX")
            self._own.process = os.getpid()
        connection.send_bytes(message)
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            connection.close()
            msg = "no answer in time"
            raise TimeoutError(msg)
        return bytearray(connection.recv_bytes())

    def admit(
        self,
        prompts: Sequence[Any],
        *,
        ids: Sequence[str],
        size: int | None = None,
        cursor: Any = None,
        timeout_s: float = WAIT_S,
    ) -> list[str]:
        """As `GroupBuffer.admit`; ids are needed, so that the call can be repeated."""
        options = {"ids": list(ids), "size": size, "cursor": cursor, "timeout_s": timeout_s}
        names: list[str] = self._call("admit", list(prompts), wait_s=timeout_s, **options)
        return names

    def append(
        self,
        group: str,
        response: Mapping[str, Any],
        *,
        id: str,  # noqa: A002
        part: int = 0,
        done: bool = True,
    ) -> bool:
        """As `GroupBuffer.append`; the call that is repeated returns False."""
        return bool(self._call("append", group, dict(response), id=id, part=part, done=done))

    def lease(
        self,
        n: int = 1,
        *,
        max_tokens: int | None = None,
        least: int | None = None,
        consumer: str = "",
        id: str | None = None,  # noqa: A002
        timeout_s: float = WAIT_S,
    ) -> Lease:
        """As `GroupBuffer.lease`."""
        options = {"max_tokens": max_tokens, "least": least, "consumer": consumer, "timeout_s": timeout_s}
        name, groups, *others = self._call("lease", n, id=id or new_token(), wait_s=timeout_s, **options)
        return Lease(name, tuple(map(_group, groups)), *others)

    def ack(self, lease: str | Lease, *, step: int) -> bool:
        """As `GroupBuffer.ack`."""
        return bool(self._call("ack", lease.id if isinstance(lease, Lease) else lease, step=step))

    def release(self, lease: str | Lease) -> bool:
        """As `GroupBuffer.release`."""
        return bool(self._call("release", lease.id if isinstance(lease, Lease) else lease))

    def drop(self, group: str, reason: str) -> bool:
        """As `GroupBuffer.drop`."""
        return bool(self._call("drop", group, reason))

    def position(self, step: int) -> dict[str, Any]:
        """As `GroupBuffer.position`."""
        token: dict[str, Any] = self._call("position", step)
        return token

    @property
    def cursor(self) -> Any:
        """As `GroupBuffer.cursor`."""
        return self._call("cursor")

    def leases(self, consumer: str | None = None) -> dict[str, tuple[str, ...]]:
        """As `GroupBuffer.leases`."""
        return {name: tuple(groups) for name, groups in self._call("leases", consumer).items()}

    def ids(self, state: str) -> list[str]:
        """As `GroupBuffer.ids`."""
        return list(self._call("ids", state))

    def group(self, id: str) -> Group:  # noqa: A002
        """As `GroupBuffer.group`."""
        return _group(self._call("group", id))

    def state(self, id: str) -> tuple[str, Any]:  # noqa: A002
        """As `GroupBuffer.state`."""
        state, detail = self._call("state", id)
        return state, detail

    def stats(self) -> GroupStats:
        """As `GroupBuffer.stats`."""
        return GroupStats(*self._call("stats"))

    def close(self) -> None:
        """End the connection of this thread."""
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._own.connection = None
