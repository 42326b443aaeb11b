"""Calls to all shards of a buffer at once; dead shards are left out until they return."""

from __future__ import annotations

import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, final

from ostinato.buffers.portion import Offer
from ostinato.distributed.actor_names import check_connected
from ostinato.distributed.ray_client import is_lost, ray, result_of, short_message
from ostinato.distributed.save_failures import FailureWarnings
from ostinato.distributed.snapshot import ChangeCounts
from ostinato.errors import LostBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ShardClient"]

_DEFAULT_TIMEOUT = -1.0
_PROBE_EVERY_S = 0.25


@final
class ShardClient:
    """Calls to all shards at once. Thread-safe.

    A shard whose actor is dead, or does not answer in time, is *missing*: one warning reports it, and calls leave it
    out. It is asked periodically whether it is back, without waiting for the answer.

    Args:
        actors: The shards.
        timeout_s: How long to wait for an answer, and for the first shard to return if all are missing.
        why_gone: Returns why all shards are gone for good; None if one of them lives or is being restarted.
    """

    def __init__(self, actors: Sequence[Any], timeout_s: float, why_gone: Callable[[], str | None]) -> None:
        self.actors = list(actors)
        self.timeout_s = timeout_s
        self.missing: dict[int, str] = {}
        """Shards that do not answer, and why."""
        self.failures = FailureWarnings(len(self.actors))
        """Warns of checkpoints that fail."""
        self.changes = ChangeCounts.of(self.actors)
        self._rows: dict[int, int] = {}  # when last known
        self._eras: dict[int, int] = {}
        self._probes: dict[int, tuple[float, Any]] = {}
        self._lock = threading.Lock()
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

    def present(self) -> list[int]:
        """Return the shards that answer, after checking whether missing ones are back.

        Raises:
            LostBufferError: All are gone for good, or none answers within `timeout_s`.
        """
        self.check_reachable()
        end = time.monotonic() + self.timeout_s
        while True:
            self._check_missing()
            found = [i for i in range(len(self)) if i not in self.missing]
            if found:
                return found
            self.check_gone()
            if time.monotonic() > end:
                reasons = "; ".join(f"{self.name(i)}: {reason}" for i, reason in self.missing.items())
                msg = f"none of the {len(self)} shards answered within {self.timeout_s:g} s ({reasons})"
                raise LostBufferError(msg)
            time.sleep(_PROBE_EVERY_S)

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

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        group: str | None = None,
        timeout_s: float | None = _DEFAULT_TIMEOUT,
    ) -> dict[int, Any]:
        """Call a method of several shards at once.

        Args:
            method: A method of `ShardActor`.
            arguments: Its arguments for each shard.
            group: The concurrency group that runs it; None for short calls.
            timeout_s: How long to wait for all results; None for no limit, by default the client's `timeout_s`.

        Returns:
            The results of the shards that answered.

        Raises:
            OstinatoError: A shard raised it.
        """
        results, errors = self.call_collecting_errors(method, arguments, group, timeout_s)
        if errors:
            raise errors[0]
        return results

    def call_collecting_errors(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        group: str | None = None,
        timeout_s: float | None = _DEFAULT_TIMEOUT,
    ) -> tuple[dict[int, Any], list[Exception]]:
        """Call a method of several shards at once; return results and exceptions. See `call`."""
        self.check_reachable()
        references = {}
        for i, given in arguments.items():
            remote = getattr(self.actors[i], method)
            references[i] = (remote if group is None else remote.options(concurrency_group=group)).remote(*given)
        limit = self.timeout_s if timeout_s == _DEFAULT_TIMEOUT else timeout_s
        end = None if limit is None else time.monotonic() + limit
        results: dict[int, Any] = {}
        errors: list[Exception] = []
        for i, reference in references.items():
            try:
                found = self.result(i, reference, None if end is None else max(0.0, end - time.monotonic()))
            except Exception as error:  # noqa: BLE001 (the results of the other shards are collected first)
                errors.append(error)
                continue
            if found is not None:
                results[i] = found[0]
        self.changes.record(method, arguments)
        return results, errors

    def call_all(self, method: str, *arguments: Any, timeout_s: float | None = _DEFAULT_TIMEOUT) -> dict[int, Any]:
        """Call a method of all present shards with the same arguments; see `call`.

        If none of them answers, those that return are called again.

        Raises:
            LostBufferError: All shards are gone for good, or none returns within the client's `timeout_s`.
        """
        while True:
            found = self.call(method, dict.fromkeys(self.present(), arguments), timeout_s=timeout_s)
            if found:
                return found

    def result(self, shard: int, reference: Any, timeout_s: float | None) -> tuple[Any] | None:
        """Wait for the result of a call to a shard; None if the shard is missing."""
        try:
            return (self.failures.take(ray().get(reference, timeout=timeout_s)),)
        except ray().exceptions.RayTaskError:
            return (result_of(reference, self.name(shard)),)  # raises the shard's own exception
        except Exception as error:
            if not is_lost(error):
                raise
            self.check_gone()
            self._mark_missing(shard, error)
            return None

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
            self.on_change()
            self._warn(
                f"{self.name(shard)} was restarted: it has {rows:,} rows ({known} when it was last seen), those of its "
                "last checkpoint"
            )

    def _show_rows(self, *shards: int) -> str:
        if any(i not in self._rows for i in shards):
            return "an unknown number of rows"
        return f"about {sum(self._rows[i] for i in shards):,} rows"

    def _mark_missing(self, shard: int, error: Exception) -> None:
        with self._lock:
            if shard in self.missing:
                return
            self.missing[shard] = short_message(error)
            self._probes[shard] = (time.monotonic(), None)
            left = [i for i in range(len(self)) if i not in self.missing]
            message = (
                f"{self.name(shard)} does not answer ({self.missing[shard]}): sampling continues with {len(left)} "
                f"shard{'s' * (len(left) != 1)} with {self._show_rows(*left)}; {self._show_rows(shard)} are missing "
                "until it is back, and then those written after its last checkpoint"
            )
        self.on_change()
        self._warn(message)

    def _check_missing(self) -> None:
        for shard in list(self.missing):
            probe = self._probe(shard)
            if probe is None or not ray().wait([probe], timeout=0)[0]:
                continue
            try:
                found = result_of(probe, self.name(shard))
            except LostBufferError:
                self._probe(shard, done=True)
            except Exception as error:  # noqa: BLE001 (whatever keeps the shard from returning)
                self._probe(shard, done=True)
                self._warn_once(shard, short_message(error))
            else:
                self._mark_present(shard, int(found["rows"]), int(found["era"]))

    def _probe(self, shard: int, *, done: bool = False) -> Any:
        """Return the pending call to a missing shard; None if there is none, or if it is `done`."""
        with self._lock:
            began, probe = self._probes.get(shard, (0.0, None))
            if done:
                probe = None
                self._probes[shard] = (time.monotonic(), None)
            elif probe is None and time.monotonic() - began >= _PROBE_EVERY_S:
                probe = self.actors[shard].describe.remote()
                self._probes[shard] = (time.monotonic(), probe)
            return probe

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
