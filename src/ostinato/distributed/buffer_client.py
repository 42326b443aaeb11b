"""Calls of the buffer in the actor of a `RayReplayBuffer`, each with its deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ostinato.distributed.actor_names import check_connected
from ostinato.distributed.deadlines import Callee, Deadline
from ostinato.distributed.ray_client import RETRY, result_by
from ostinato.distributed.serialization import Serialized, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.distributed.remote import Time


@final
class BufferClient:
    """Calls of one handle. Thread-safe.

    See `deadlines` for the three kinds of calls.

    Args:
        actor: A `BufferActor`.
        info: What its `describe` returned.
        call_timeout_s: Default time of a call, and longest silence of the actor.
    """

    def __init__(self, actor: Any, info: dict[str, Any], call_timeout_s: float) -> None:
        self.actor = actor
        self.info = info
        self.call_timeout_s = call_timeout_s
        self._methods = {"answer": actor.call.options(concurrency_group="update"), "work": actor.call}
        self._polling = {name: actor.call_polling.options(concurrency_group=name) for name in ("write", "read")}

    @property
    def callee(self) -> Callee:
        """The actor in error messages."""
        return Callee(self.info.get("callee", "the actor of the replay buffer")).at(self.info)

    def result(self, reference: Any, method: str, deadline: Deadline) -> Any:
        """Wait for the result of a call of the actor."""
        return result_by(reference, self.actor, self.callee, method, deadline)

    def check_open(self, method: str, deadline: Deadline) -> None:
        """Raise before a call is sent that cannot be answered.

        Raises:
            LostBufferError: This process is not connected to Ray.
            NoAnswerError: The time is up.
        """
        check_connected()
        deadline.check_open(self.callee, method)

    def deadline(self, time: Time = None) -> Deadline:
        """Return the deadline of a call that is answered at once."""
        return Deadline.of_call(time, self.call_timeout_s)

    def working(self, time: Time = None) -> Deadline:
        """Return the deadline of a call that may work for long."""
        return Deadline.of_work(time, self.call_timeout_s)

    def waiting(self, time: Time = None) -> Deadline:
        """Return the deadline of a call that waits for readers or writers if there is a limiter or a queue."""
        return Deadline.of_wait(time, self.info["limit_s"], self.call_timeout_s)

    def describe(self, time: Time = None) -> dict[str, Any]:
        """Ask for the properties of the buffer again."""
        deadline = self.deadline(time)
        self.check_open("describe", deadline)
        self.info = self.result(self.actor.describe.remote(), "describe", deadline)
        return self.info

    def call(self, kind: str, time: Time, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the buffer, or read a property.

        Args:
            kind: "answer" if it never waits for readers or writers, and has threads of its own; "work" else.
            time: Its deadline.
            name: The buffer's method or property.
            *args: Its arguments.
            **kwargs: Its keyword arguments.
        """
        deadline = self.deadline(time)
        self.check_open(name, deadline)
        return decode(self.result(self._methods[kind].remote(encode((name, args, kwargs))), name, deadline))

    def poll(self, group: str, timeout_s: Time, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method that may wait for readers or writers, in as many polls as needed.

        Args:
            group: The concurrency group that runs it: "write" or "read".
            timeout_s: Longest wait; None is the limiter's.
            name: The buffer's method.
            *args: Its arguments.
            **kwargs: Its keyword arguments, without `timeout_s`.
        """
        deadline = self.waiting(timeout_s)
        self.check_open(name, deadline)
        method, request = self._polling[group], encode((name, args, {**kwargs, "timeout_s": timeout_s}))
        waited_s = 0.0
        while True:
            found = self.result(method.remote(waited_s, request), name, deadline)
            if found is not RETRY:
                return decode(found)
            waited_s = deadline.elapsed_s

    def apply(self, time: Time, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(buffer, *args)` in the actor, which may work for long."""
        deadline = self.working(time)
        self.check_open("apply", deadline)
        return self.result(self.actor.apply.remote(function, *map(Serialized, args)), "apply", deadline)
