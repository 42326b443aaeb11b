"""The shards as one client sees them: asked together, left out while they are gone, taken back when they return."""

from __future__ import annotations

import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, final

from ostinato.buffers.portion import Offer
from ostinato.distributed.ray_client import answer, brief, lost, ray
from ostinato.errors import LostBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Fleet"]

_PATIENCE = -1.0
_PROBE_S = 0.25
"""How often a shard that is gone is asked whether it is back."""


@final
class Fleet:
    """Calls to all shards at once. Thread-safe.

    A shard whose actor died, or that does not answer in time, is *missing*: a warning says so, once, and calls go on
    without it. Every so often it is asked whether it is back, without waiting for the answer.

    Args:
        actors: the shards.
        patience_s: how long to wait for an answer, and for the first shard to come back where all are missing.
        changed: called when a shard is missing, or back.
    """

    def __init__(self, actors: Sequence[Any], patience_s: float, changed: Callable[[], None]) -> None:
        self.actors = list(actors)
        self.patience_s = patience_s
        self.missing: dict[int, str] = {}
        self._known: dict[int, int] = {}  # rows when last heard of
        self._eras: dict[int, int] = {}
        self._probes: dict[int, tuple[float, Any]] = {}
        self._lock = threading.Lock()
        self._changed = changed

    def __len__(self) -> int:
        """Shards, missing ones included."""
        return len(self.actors)

    def name(self, shard: int) -> str:
        """Name a shard in messages."""
        return f"shard {shard} of {len(self)}"

    def present(self) -> list[int]:
        """Return the shards that answer, having looked for those that came back.

        Raises:
            LostBufferError: if none does, within the time that there is patience for.
        """
        end = time.monotonic() + self.patience_s
        while True:
            self._look_for_missing()
            found = [i for i in range(len(self)) if i not in self.missing]
            if found:
                return found
            if time.monotonic() > end:
                why = "; ".join(f"{self.name(i)}: {said}" for i, said in self.missing.items())
                msg = f"none of the {len(self)} shards answered within {self.patience_s:g} s ({why})"
                raise LostBufferError(msg)
            time.sleep(_PROBE_S)

    def ask(
        self,
        method: str,
        calls: Mapping[int, tuple[Any, ...]],
        group: str | None = None,
        timeout_s: float | None = _PATIENCE,
    ) -> dict[int, Any]:
        """Call a method of several shards at once and return what those answered that are there.

        Args:
            method: of `ShardHost`.
            calls: its arguments for each shard.
            group: the kind of threads that run it; None is for short calls.
            timeout_s: how long to wait for all of them; None has no end, by default it is `patience_s`.

        Raises:
            OstinatoError: what a shard itself raised.
        """
        answers, failed = self.hear(method, calls, group, timeout_s)
        if failed:
            raise failed[0]
        return answers

    def hear(
        self,
        method: str,
        calls: Mapping[int, tuple[Any, ...]],
        group: str | None = None,
        timeout_s: float | None = _PATIENCE,
    ) -> tuple[dict[int, Any], list[Exception]]:
        """Do what `ask` does, but return what shards raised beside what others answered."""
        references = {}
        for i, arguments in calls.items():
            call = getattr(self.actors[i], method)
            references[i] = (call if group is None else call.options(concurrency_group=group)).remote(*arguments)
        limit = self.patience_s if timeout_s == _PATIENCE else timeout_s
        end = None if limit is None else time.monotonic() + limit
        answers: dict[int, Any] = {}
        failed: list[Exception] = []
        for i, reference in references.items():
            try:
                found = self.wait(i, reference, None if end is None else max(0.0, end - time.monotonic()))
            except Exception as error:  # noqa: BLE001 (the others are heard first)
                failed.append(error)
                continue
            if found is not None:
                answers[i] = found[0]
        return answers, failed

    def wait(self, shard: int, reference: Any, timeout_s: float | None) -> tuple[Any] | None:
        """Return what a shard answered; None if it is missing."""
        try:
            return (ray().get(reference, timeout=timeout_s),)
        except ray().exceptions.RayTaskError:
            return (answer(reference, self.name(shard)),)  # raises what the shard raised
        except Exception as error:
            if not lost(error):
                raise
            self._lose(shard, error)
            return None

    def offers(self, found: Mapping[int, Any]) -> dict[int, Offer]:
        """Return what shards offered, having taken note of it."""
        offers = {i: Offer(*offer) for i, offer in found.items()}
        for i, offer in offers.items():
            self.note(i, offer.rows, offer.era)
        return offers

    def note(self, shard: int, rows: int, era: int) -> None:
        """Remember how many rows a shard has, to say what is missing when it is.

        Args:
            shard: its number.
            rows: how many it has.
            era: which of the buffers that follow each other in its place this is.
        """
        with self._lock:
            before, known = self._eras.get(shard, era), self._rows(shard)
            self._known[shard], self._eras[shard] = rows, era
        if before != era:
            self._changed()
            warnings.warn(
                f"{self.name(shard)} was restarted: it is there with {rows:,} rows ({known} when it was last seen), "
                "those of its last checkpoint",
                RuntimeWarning,
                stacklevel=2,
            )

    def _rows(self, *shards: int) -> str:
        """Say how many rows shards have, as far as that is known here."""
        if any(i not in self._known for i in shards):
            return "an unknown number of rows"
        return f"about {sum(self._known[i] for i in shards):,} rows"

    def _lose(self, shard: int, error: Exception) -> None:
        with self._lock:
            if shard in self.missing:
                return
            self.missing[shard] = brief(error)
            self._probes[shard] = (time.monotonic(), None)
            left = [i for i in range(len(self)) if i not in self.missing]
            told = (
                f"{self.name(shard)} does not answer ({self.missing[shard]}): sampling goes on from {len(left)} "
                f"shard{'s' * (len(left) != 1)} with {self._rows(*left)}; {self._rows(shard)} are missing until it is "
                "back, and then those written after its last checkpoint"
            )
        self._changed()
        warnings.warn(told, RuntimeWarning, stacklevel=2)

    def _look_for_missing(self) -> None:
        for shard in list(self.missing):
            probe = self._probe(shard)
            if probe is None or not ray().wait([probe], timeout=0)[0]:
                continue
            try:
                about = answer(probe, self.name(shard))
            except LostBufferError:
                self._probe(shard, done=True)
            except Exception as error:  # noqa: BLE001 (whatever keeps it from coming back)
                self._probe(shard, done=True)
                self._tell(shard, brief(error))
            else:
                self._take_back(shard, int(about["rows"]), int(about["era"]))

    def _probe(self, shard: int, *, done: bool = False) -> Any:
        """Return the question to a missing shard that is under way; None if there is none, or it is answered."""
        with self._lock:
            asked, probe = self._probes.get(shard, (0.0, None))
            if done:
                probe = None
                self._probes[shard] = (time.monotonic(), None)
            elif probe is None and time.monotonic() - asked >= _PROBE_S:
                probe = self.actors[shard].about.remote()
                self._probes[shard] = (time.monotonic(), probe)
            return probe

    def _tell(self, shard: int, why: str) -> None:
        """Say, once, why a shard does not come back."""
        with self._lock:
            news = self.missing.get(shard) not in {None, why}
            if news:
                self.missing[shard] = why
        if news:
            warnings.warn(f"{self.name(shard)} cannot come back: {why}", RuntimeWarning, stacklevel=2)

    def _take_back(self, shard: int, rows: int, era: int) -> None:
        with self._lock:
            if self.missing.pop(shard, None) is None:
                return  # another thread was quicker
            self._probes.pop(shard, None)
            known = self._rows(shard)
            self._known[shard], self._eras[shard] = rows, era
        self._changed()
        warnings.warn(
            f"{self.name(shard)} is back with {rows:,} rows ({known} when it was last seen)",
            RuntimeWarning,
            stacklevel=2,
        )
