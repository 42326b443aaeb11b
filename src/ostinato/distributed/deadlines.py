"""Deadlines of calls to actors: by when an answer is due, and how long an actor may be silent before it counts as lost.

There are three kinds of calls:

- A call that the actor answers at once (`len`, priorities, reads): the answer is due after `timeout_s`, by default
  after `call_timeout_s`.
- A call that may wait for readers or writers (`sample`, `extend`, `add` with a rate limiter or a queue): it may wait
  for `timeout_s`, by default the limiter's. The answer is due `GRACE_S` later, or up to `call_timeout_s` later if the
  actor answers other calls meanwhile.
- A call that may work for long (`dumps`, `loads`, `apply`): it may take as long as its actor answers other calls
  meanwhile. With `timeout_s` the answer is due then, whatever the actor does.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, final

from ostinato.buffers.rate_limit import check_timeout
from ostinato.core.options import check_number
from ostinato.errors import NoAnswerError

CALL_TIMEOUT_S = 60.0
"""Default of `call_timeout_s`."""
GRACE_S = 5.0
"""How much longer than `timeout_s` the answer of a call that waits may take, unless its actor answers other calls."""
POLL_S = 1.0
"""Longest wait of one poll, and so the longest time that an actor waits on behalf of a dead process."""
_PROBE_EVERY_S = 2.0
"""Interval at which the actor of a call that takes long is asked whether it is alive; polls end earlier."""


def check_call_timeout(call_timeout_s: Any) -> float:
    """Return the option `call_timeout_s` as a float.

    Raises:
        OptionError: It is not a number above 0.
    """
    words = "a number of seconds above 0 (math.inf sets no limit)"
    return check_number("call_timeout_s", call_timeout_s, words, lambda seconds: seconds > 0)


class Callee(NamedTuple):
    """An actor, as error messages name it."""

    name: str
    node: str | None = None
    """Address of its machine, if known."""
    pid: int | None = None
    """Its process there, if known."""

    def __str__(self) -> str:
        """The name, and where the actor is."""
        return self.name if self.node is None else f"{self.name} ({self.place})"

    @property
    def place(self) -> str:
        """Where the actor is."""
        return "at an unknown place" if self.node is None else f"process {self.pid} on node {self.node}"

    def at(self, description: dict[str, Any]) -> Callee:
        """Return the same actor with the node and process that `describe` of the actor returned."""
        return self._replace(node=description["node"], pid=description["pid"])


def _now() -> float:
    return time.monotonic()


@final
@dataclass(frozen=True)
class Deadline:
    """By when a call must be answered; it begins when it is made. Times are in seconds."""

    call_timeout_s: float
    """Longest silence of an actor."""
    limit_s: float
    """When the call ends, whatever the actor does."""
    wait_s: float = 0.0
    """How long the call may wait for readers or writers; infinity for work."""
    grace_s: float = math.inf
    """How long the actor may be silent once the call may wait no more."""
    probed: bool = False
    """Whether the actor is asked meanwhile whether it is alive."""
    share: float = 1.0
    """Part of the time that one of several calls to shards may take."""
    began: float = field(default_factory=_now)
    """By `time.monotonic`."""

    @classmethod
    def of_call(cls, timeout_s: Any, call_timeout_s: float, *, share: float = 1.0) -> Self:
        """Return the deadline of a call that the actor answers at once.

        Args:
            timeout_s: When the answer is due; None is `call_timeout_s`. A deadline, of the call that this one is a part
                of, is returned.
            call_timeout_s: The default.
            share: Part of the time that one of several calls to shards may take.

        Raises:
            OptionError: `timeout_s` is not a number of at least 0.
        """
        if isinstance(timeout_s, cls):
            return timeout_s
        return cls(call_timeout_s, _limit(timeout_s, call_timeout_s), share=share)

    @classmethod
    def of_wait(cls, timeout_s: Any, default_s: float | None, call_timeout_s: float, *, share: float = 1.0) -> Self:
        """Return the deadline of a call that may wait for readers or writers.

        Args:
            timeout_s: Longest wait; None is `default_s`.
            default_s: The limiter's; None if nothing makes the call wait: then it is one that is answered at once.
            call_timeout_s: Longest silence of an actor.
            share: Part of the time that one of several calls to shards may take.

        Raises:
            OptionError: `timeout_s` is not a number of at least 0.
        """
        if default_s is None:
            return cls.of_call(timeout_s, call_timeout_s, share=share)
        wait_s = _limit(timeout_s, float(default_s))
        grace_s = call_timeout_s if timeout_s is None else min(GRACE_S, call_timeout_s)
        return cls(call_timeout_s, wait_s + call_timeout_s, wait_s, grace_s, probed=True, share=share)

    @classmethod
    def of_work(cls, timeout_s: Any, call_timeout_s: float) -> Self:
        """Return the deadline of a call that may work for long.

        Args:
            timeout_s: When the answer is due; None sets no limit while the actor answers other calls. A deadline is
                returned.
            call_timeout_s: Longest silence of an actor.

        Raises:
            OptionError: `timeout_s` is not a number of at least 0.
        """
        if isinstance(timeout_s, cls):
            return timeout_s
        return cls(call_timeout_s, _limit(timeout_s, math.inf), wait_s=math.inf, probed=True)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Seconds until the call ends, at least 0."""
        return max(0.0, self.limit_s - self.elapsed_s)

    @property
    def wait_left_s(self) -> float:
        """Seconds that the call may still wait, at least 0."""
        return max(0.0, self.wait_s - self.elapsed_s)

    @property
    def answer_left_s(self) -> float:
        """Seconds until the answer of an actor that need not wait is due."""
        return min(self.left_s, max(0.0, self.wait_s + self.grace_s - self.elapsed_s))

    def silence_left_s(self, heard: float) -> float:
        """Return for how many seconds the actor may be silent from now on, at least 0.

        Args:
            heard: When it last answered a call, by `time.monotonic`.
        """
        if not self.probed:
            return self.left_s
        until = heard + self.call_timeout_s + (POLL_S if self.waits else 0.0)
        until = min(until, max(heard, self.began + self.wait_s) + self.grace_s)
        return min(self.left_s, max(0.0, until - time.monotonic()))

    @property
    def probe_every_s(self) -> float:
        """Interval at which the actor is asked whether it is alive; infinity for never."""
        return min(_PROBE_EVERY_S, self.call_timeout_s / 4) if self.probed else math.inf

    @property
    def waits(self) -> bool:
        """Whether the call waits for readers or writers, in polls of `POLL_S`."""
        return self.grace_s < math.inf

    @property
    def works(self) -> bool:
        """Whether the call may take as long as its actor answers other calls."""
        return self.probed and not self.waits

    @property
    def usual_s(self) -> float:
        """How long one of several calls to shards may take at most."""
        return self.share * self.call_timeout_s

    def patience_s(self, shard_timeout_s: float) -> float:
        """Return how long to wait for the answer of a shard."""
        return min(shard_timeout_s, self.usual_s, self.answer_left_s)

    def check_open(self, callee: object, method: str) -> None:
        """Raise before a call is sent whose time is up already.

        Raises:
            NoAnswerError: The time is up; nothing is sent.
        """
        if self.left_s <= 0:
            msg = (
                f"the {self.limit_s:g} s for {method} ended before {callee} could be called: nothing was sent; give "
                "more time (timeout_s)"
            )
            raise NoAnswerError(msg)

    def error(self, callee: object, method: str, heard: float | None = None) -> NoAnswerError:
        """Return the error of a call that got no answer.

        Args:
            callee: Who did not answer.
            method: The call.
            heard: When the actor last answered another call, by `time.monotonic`; None if it answered none.
        """
        took = self.elapsed_s
        waited = f", {self.wait_s:g} s of which it may wait for readers or writers" if 0 < self.wait_s < took else ""
        state = "it is stopped, overloaded, or cannot be reached"
        if heard is not None and self.silence_left_s(heard) + 0.01 >= self.left_s:
            state = "it is busy, and answers other calls"
        msg = f"{callee} did not answer {method} within {took:.3g} s{waited}: {state}; the call may still take effect"
        return NoAnswerError(msg)


def _limit(timeout_s: Any, default_s: float) -> float:
    if timeout_s is None:
        return default_s
    check_timeout(timeout_s)
    return float(timeout_s)
