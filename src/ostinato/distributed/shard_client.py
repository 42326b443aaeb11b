"""Calls to all shards of a buffer at once; dead shards are left out until they return."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.buffers.portion import Offer
from ostinato.distributed.actor_names import check_connected
from ostinato.distributed.deadlines import CALL_TIMEOUT_S, Callee, Deadline
from ostinato.distributed.ray_client import finishes, is_lost, probe, ray, result_of, short_message, wait_for
from ostinato.distributed.save_failures import FailureWarnings
from ostinato.distributed.snapshot import ChangeCounts
from ostinato.errors import LostBufferError, NoAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


_PROBE_EVERY_S = 0.25


class _LateError(Exception):
    """A shard has not answered in time."""


class _Calls(NamedTuple):
    """Calls of one method of several shards."""

    name: str
    """What the user has called."""
    deadline: Deadline
    sent: float
    """When they were sent, by `time.monotonic`."""
    patience_s: float
    """How long to wait for a shard."""
    heard: dict[int, float | None]
    """When shards that work answered other calls."""
    late: list[int]
    """Shards that are late, but not missing."""


@final
class ShardClient:
    """Calls to all shards at once. Thread-safe.

    A shard whose actor is dead, or does not answer in time, is *missing*: one warning reports it, and calls leave it
    out. It is asked periodically whether it is back, without waiting for the answer.

    Every call has a deadline: that of the block `within` in which it is made, else `call_timeout_s`. A shard that is
    silent for a shorter time, because the caller has no more, is left out of that call alone; if it stays silent, it
    becomes missing later.

    Args:
        actors: The shards.
        timeout_s: How long to wait for an answer, and for the first shard to return if all are missing.
        why_gone: Returns why all shards are gone for good; None if one of them lives or is being restarted.
        call_timeout_s: Time of a call, and longest silence of a shard in calls that may work for long.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        timeout_s: float,
        why_gone: Callable[[], str | None],
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.actors = list(actors)
        self.timeout_s = timeout_s
        self.call_timeout_s = call_timeout_s
        self.missing: dict[int, str] = {}
        """Shards that do not answer, and why."""
        self.failures = FailureWarnings(len(self.actors))
        """Warns of checkpoints that fail."""
        self.changes = ChangeCounts.of(self.actors)
        self._places: dict[int, Callee] = {}
        self._rows: dict[int, int] = {}  # when last known
        self._eras: dict[int, int] = {}
        self._probes: dict[int, tuple[float, Any]] = {}
        self._silent: dict[int, tuple[float, Any]] = {}  # since when, and a probe, of shards that may be missing
        self._lock = threading.Lock()
        self._block = threading.local()
        self.on_change: Callable[[], None] = lambda: None
        """Called when a shard becomes missing or returns."""
        self._why_gone = why_gone
        self.closed = False
        """Whether this handle has ended the shards."""

    def __len__(self) -> int:
        """Number of shards, missing ones included."""
        return len(self.actors)

    def name(self, shard: int) -> str:
        """Return the name of a shard in messages."""
        return f"shard {shard} of {len(self)}"

    def callee(self, shard: int) -> Callee:
        """Return the name of a shard in messages, and where it is."""
        return self._places.get(shard, Callee(self.name(shard)))

    def record_places(self, places: Sequence[Callee]) -> None:
        """Record where the shards are, for error messages."""
        self._places.update(enumerate(places))

    def name_silent(self, timeout_s: float = 0.5) -> str:
        """Ask all shards whether they are alive; return the names of those that do not answer in time."""
        asked = {i: probe(actor) for i, actor in enumerate(self.actors)}
        late = set(ray().wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)[1])
        silent = [str(self.callee(i)) for i, reference in asked.items() if reference in late]
        return ", ".join(silent) or f"one of the {len(self)} shards, all of which are alive,"

    # -- deadlines ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def within(self, method: str, deadline: Deadline) -> Iterator[Deadline]:
        """Make all calls of this thread in the block end by a deadline; an enclosing block takes precedence.

        Args:
            method: What the user has called, for error messages.
            deadline: When it ends.
        """
        outer = getattr(self._block, "current", None)
        if outer is not None:
            yield outer[1]
            return
        deadline.check_open(f"the {len(self)} shards", method)
        self._block.current = method, deadline
        try:
            yield deadline
        finally:
            self._block.current = None

    def deadline(self, method: str) -> tuple[str, Deadline]:
        """Return what the user has called, `method` if that is unknown, and its deadline."""
        found: tuple[str, Deadline] | None = getattr(self._block, "current", None)
        return found or (method, Deadline.of_call(None, self.call_timeout_s))

    def present(self) -> list[int]:
        """Return the shards that answer, after checking whether missing ones are back.

        Raises:
            LostBufferError: All are gone for good.
            NoAnswerError: None answers within `timeout_s`, or until the deadline.
        """
        self.check_reachable()
        method, deadline = self.deadline("the call")
        began = time.monotonic()
        limit_s = min(self.timeout_s, self.call_timeout_s, deadline.answer_left_s)
        while True:
            self._check_silent()
            self._check_missing()
            found = [i for i in range(len(self)) if i not in self.missing]
            if found:
                return found
            self.check_gone()
            if time.monotonic() - began >= limit_s:
                reasons = "; ".join(f"{self.callee(i)}: {reason}" for i, reason in self.missing.items())
                took = deadline.elapsed_s
                msg = f"none of the {len(self)} shards answered {method} within {took:.3g} s ({reasons})"
                raise NoAnswerError(msg)
            time.sleep(min(_PROBE_EVERY_S, limit_s))

    def check_reachable(self) -> None:
        """Raise `LostBufferError` if this handle has ended the shards, or has no connection to them."""
        if self.closed:
            msg = "the ShardedReplayBuffer was closed, by close() of this handle, and its rows are gone: make a new one"
            raise LostBufferError(msg)
        check_connected()

    def check_gone(self) -> None:
        """Raise `LostBufferError` if all shards are gone for good, or out of reach."""
        self.check_reachable()
        reason = self._why_gone()
        if reason is not None:
            msg = (
                f"the ShardedReplayBuffer is gone, and its rows with it: {reason}. Make a new one, with resume=True if "
                "it had a checkpoint_dir"
            )
            raise LostBufferError(msg)

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]], group: str | None = None) -> dict[int, Any]:
        """Call a method of several shards at once.

        Args:
            method: A method of `ShardActor`.
            arguments: Its arguments for each shard.
            group: The concurrency group that runs it; None for short calls.

        Returns:
            The results of the shards that answered.

        Raises:
            OstinatoError: A shard raised it.
            NoAnswerError: The time is up.
        """
        results, errors = self.call_collecting_errors(method, arguments, group)
        if errors:
            raise errors[0]
        return results

    def call_collecting_errors(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], group: str | None = None
    ) -> tuple[dict[int, Any], list[Exception]]:
        """Call a method of several shards at once; return results and exceptions. See `call`."""
        self.check_reachable()
        name, deadline = self.deadline(method)
        deadline.check_open(f"the {len(self)} shards", name)
        sent, references = time.monotonic(), {}
        for i, given in arguments.items():
            remote = getattr(self.actors[i], method)
            references[i] = (remote if group is None else remote.options(concurrency_group=group)).remote(*given)
        heard: dict[int, float | None] = {}
        if deadline.works:
            heard = wait_for(references, {i: self.actors[i] for i in references}, deadline, sent)
        calls = _Calls(name, deadline, sent, 0.0 if deadline.works else deadline.patience_s(self.timeout_s), heard, [])
        results: dict[int, Any] = {}
        errors: list[Exception] = []
        for i, reference in references.items():
            try:
                found = self._answer(i, reference, calls)
            except Exception as error:  # noqa: BLE001 (the results of the other shards are collected first)
                errors.append(error)
                continue
            if found is not None:
                results[i] = found[0]
        self.changes.record(method, arguments)
        if calls.late:
            self._report_late(calls, errors, alone=not results)
        return results, errors

    def _answer(self, shard: int, reference: Any, calls: _Calls) -> tuple[Any] | None:
        """Wait for the result of one of several calls; None if the shard is missing, or late."""
        try:
            return self._fetch(shard, reference, max(0.0, calls.sent + calls.patience_s - time.monotonic()))
        except _LateError:
            if not self._decide_missing(shard, calls):
                calls.late.append(shard)
            return None

    def _report_late(self, calls: _Calls, errors: list[Exception], *, alone: bool) -> None:
        """Warn about shards that had too little time to become missing, or add an error if the call needs them."""
        name, deadline, late = calls.name, calls.deadline, calls.late
        if deadline.share < 1 or deadline.works or alone:
            errors.append(deadline.error(", ".join(str(self.callee(i)) for i in late), name, calls.heard.get(late[0])))
        else:
            left_out = " and ".join(str(self.callee(i)) for i in late)
            self._warn(f"{left_out} did not answer {name} within {deadline.limit_s:g} s: left out of this call")

    def call_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method of all present shards with the same arguments; see `call`.

        If none of them answers, those that return are called again.

        Raises:
            LostBufferError: All shards are gone for good.
            NoAnswerError: None returns in time.
        """
        while True:
            found = self.call(method, dict.fromkeys(self.present(), arguments))
            if found:
                return found

    def result(self, shard: int, reference: Any, timeout_s: float, deadline: Deadline) -> tuple[Any] | None:
        """Wait for the result of a call to a shard; None if the shard is missing, which it is if it is late."""
        try:
            return self._fetch(shard, reference, timeout_s)
        except _LateError:
            self._mark_missing(shard, f"no answer within {deadline.elapsed_s:.3g} s")
            return None

    def _fetch(self, shard: int, reference: Any, timeout_s: float) -> tuple[Any] | None:
        """Wait for the result of a call to a shard; None if the shard is dead, and missing now.

        Raises:
            _LateError: There is no result in time.
            OstinatoError: The shard raised it.
        """
        known = ray().exceptions
        try:
            return (self.failures.take(ray().get(reference, timeout=timeout_s)),)
        except known.RayTaskError:
            return (result_of(reference, self.name(shard)),)  # raises the shard's own exception
        except known.GetTimeoutError as error:
            raise _LateError from error
        except Exception as error:
            if not is_lost(error):
                raise
            self.check_gone()
            self._mark_missing(shard, short_message(error))
            return None

    def _decide_missing(self, shard: int, calls: _Calls) -> bool:
        """Decide whether a shard that is late is missing; if it may be, ask it whether it is alive."""
        deadline, heard = calls.deadline, calls.heard.get(shard)
        silent_s = time.monotonic() - (heard or calls.sent)
        enough_s = deadline.usual_s if deadline.works else min(self.timeout_s, deadline.usual_s)
        if silent_s >= 0.9 * enough_s:
            self._mark_missing(shard, f"no answer to {calls.name} within {time.monotonic() - calls.sent:.3g} s")
            return True
        with self._lock:
            if heard is None and shard not in self._silent:
                self._silent[shard] = calls.sent, probe(self.actors[shard])
        return False

    def _check_silent(self) -> None:
        """Decide whether shards are missing that were silent for a short time."""
        for shard, (since, asked) in list(self._silent.items()):
            silent_s = time.monotonic() - since
            answered = finishes(asked, 0.0)
            if answered or silent_s >= min(self.timeout_s, self.call_timeout_s):
                self._silent.pop(shard, None)
                if not answered:
                    self._mark_missing(shard, f"no answer for {silent_s:.3g} s")

    # -- rows and restarts of the shards ------------------------------------------------------------------------------

    def request_offers(self, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Offer]:
        """Call `ShardActor.offer` of several shards, and return the offers of those that answered."""
        return self.record_offers(self.call("offer", arguments, "read"))

    def record_offers(self, found: Mapping[int, Any]) -> dict[int, Offer]:
        """Return the offers of shards, and record their numbers of rows and their eras."""
        offers = {i: Offer(*offer) for i, offer in found.items()}
        for i, offer in offers.items():
            self._record(i, offer.rows, offer.era)
        return offers

    def _record(self, shard: int, rows: int, era: int) -> None:
        """Record the rows of a shard for warnings.

        Args:
            shard: Its number.
            rows: Its number of rows.
            era: Identifies the buffer; it changes when the actor is restarted.
        """
        with self._lock:
            before, known = self._eras.get(shard, era), self._show_rows(shard)
            self._rows[shard], self._eras[shard] = rows, era
        if before != era:
            self._places.pop(shard, None)
            self.on_change()
            self._warn(
                f"{self.name(shard)} was restarted: it has {rows:,} rows ({known} when it was last seen), those of its "
                "last checkpoint"
            )

    def _show_rows(self, *shards: int) -> str:
        if any(i not in self._rows for i in shards):
            return "an unknown number of rows"
        return f"about {sum(self._rows[i] for i in shards):,} rows"

    def _mark_missing(self, shard: int, reason: str) -> None:
        with self._lock:
            if shard in self.missing:
                return
            self.missing[shard] = reason
            self._probes[shard] = (time.monotonic(), None)
            left = [i for i in range(len(self)) if i not in self.missing]
            message = (
                f"{self.name(shard)} does not answer ({self.callee(shard).place}: {reason}): sampling continues with "
                f"{len(left)} shard{'s' * (len(left) != 1)} with {self._show_rows(*left)}; {self._show_rows(shard)} "
                "are missing until it is back, and then those written after its last checkpoint"
            )
        self.on_change()
        self._warn(message)

    def _check_missing(self) -> None:
        for shard in list(self.missing):
            asked = self._probe(shard)
            if asked is None or not finishes(asked, 0.0):
                continue
            try:
                found = result_of(asked, self.name(shard))
            except LostBufferError:
                self._probe(shard, done=True)
            except Exception as error:  # noqa: BLE001 (whatever keeps the shard from returning)
                self._probe(shard, done=True)
                self._warn_once(shard, short_message(error))
            else:
                self._places[shard] = Callee(self.name(shard)).at(found)
                self._mark_present(shard, int(found["rows"]), int(found["era"]))

    def _probe(self, shard: int, *, done: bool = False) -> Any:
        """Return the pending call to a missing shard; None if there is none, or if it is `done`."""
        with self._lock:
            began, asked = self._probes.get(shard, (0.0, None))
            if done:
                asked = None
                self._probes[shard] = (time.monotonic(), None)
            elif asked is None and time.monotonic() - began >= _PROBE_EVERY_S:
                asked = self.actors[shard].describe.remote()
                self._probes[shard] = (time.monotonic(), asked)
            return asked

    def _warn_once(self, shard: int, reason: str) -> None:
        """Warn about the reason why a shard does not return, if it is new."""
        with self._lock:
            new = self.missing.get(shard) not in {None, reason}
            if new:
                self.missing[shard] = reason
        if new:
            self._warn(f"{self.name(shard)} cannot return: {reason}")

    def _mark_present(self, shard: int, rows: int, era: int) -> None:
        with self._lock:
            if self.missing.pop(shard, None) is None:
                return  # another thread was faster
            self._probes.pop(shard, None)
            known = self._show_rows(shard)
            self._rows[shard], self._eras[shard] = rows, era
        self.on_change()
        self._warn(f"{self.name(shard)} is back with {rows:,} rows ({known} when it was last seen)")

    def _warn(self, message: str) -> None:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
