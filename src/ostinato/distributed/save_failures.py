"""Periodic checkpoints that fail: counted, reported to every handle, and after a bound the shard takes no more rows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence


class SaveFailure(NamedTuple):
    """Checkpoints of a shard that failed in a row."""

    shard: int
    streak: tuple[int, int]
    """Which row of failures this is: the era of the actor, and a number."""
    reason: str
    """Why the first of them failed."""


class Noticed(NamedTuple):
    """The result of a call to a shard, with the failures that handles have to know."""

    result: Any
    failures: tuple[SaveFailure, ...]


# -- in the shards ----------------------------------------------------------------------------------------------------


@final
class SaveLog:
    """What became of the checkpoints of a shard, and the failures of all shards. Thread-safe.

    Args:
        shard: Its number.
        path: Directory of its checkpoint; None for none.
        most: Failures in a row after which writes raise; None for no bound.
        every_s: Interval of the checkpoints, for messages.
    """

    def __init__(self, shard: int, path: str | None, most: int | None, every_s: float | None) -> None:
        self._shard, self._path, self._most, self._every_s = shard, path, most, every_s
        self._lock = threading.Lock()
        self._streaks = 0
        self._others: tuple[SaveFailure, ...] = ()
        self.rows = 0
        """Rows in the last checkpoint."""
        self.write_count = 0
        """Rows written before it."""
        self.failures = 0
        """Failures in a row."""
        self.error: str | None = None
        """Why the last save failed; None if it did not."""
        self.own: SaveFailure | None = None
        """The failures in a row; None if there are none."""
        self._all: tuple[SaveFailure, ...] = ()

    def saved(self, rows: int, write_count: int) -> None:
        """Record a checkpoint."""
        with self._lock:
            self.rows, self.write_count = rows, write_count
            self.failures, self.error, self.own = 0, None, None
            self._join()

    def failed(self, error: Exception, era: int) -> None:
        """Record a failure."""
        with self._lock:
            self.failures += 1
            self.error = f"{type(error).__name__}: {error}"
            if self.own is None:
                self._streaks += 1
                self.own = SaveFailure(self._shard, (era, self._streaks), self.error)
            self._join()

    def learn(self, failures: Sequence[SaveFailure]) -> None:
        """Replace what is known of the other shards."""
        with self._lock:
            self._others = tuple(SaveFailure(*one) for one in failures if one[0] != self._shard)
            self._join()

    def _join(self) -> None:
        self._all = self._others if self.own is None else (self.own, *self._others)

    def check(self) -> None:
        """Check that rows written now will be saved, as far as is known.

        Raises:
            CheckpointError: Too many checkpoints failed in a row.
        """
        if self._most is None or self.failures < self._most:
            return
        msg = (
            f"the last {self.failures} checkpoints of shard {self._shard} failed ({self.error}), so that rows written "
            f"now would be lost with it: nothing is stored. Writes continue after the next save that succeeds; one is "
            f"tried every {self._every_s:g} s: see that {self._path} can be written to, or call checkpoint()"
        )
        raise CheckpointError(msg)

    def attach(self, result: Any) -> Any:
        """Return the result of a call with the failures that handles have to know, if there are any."""
        return Noticed(result, self._all) if self._all else result

    def describe(self) -> dict[str, Any]:
        """Return what `report` shows."""
        return {
            "saved_rows": self.rows,
            "saved_write_count": self.write_count,
            "save_error": self.error,
            "save_failures": self.failures,
            "failures": self._all,
        }


# -- in the actor of the fleet ----------------------------------------------------------------------------------------


class FailureBroadcast:
    """Passes the failures of each shard to all others, so that their answers carry them to every handle.

    Its methods are coroutines of one thread. Failures are passed on when they begin and when they end; several that
    arrive together go in one call to each shard.

    Args:
        shards: The actors of the shards.
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards = list(shards)
        self._failures: dict[int, SaveFailure] = {}
        self._changed = False
        self._task: asyncio.Future[None] | None = None

    async def report_save(self, shard: int, failure: SaveFailure | None) -> None:
        """Record that the checkpoints of a shard fail, or (None) that they succeed again."""
        before = self._failures.get(shard)
        if failure is None:
            self._failures.pop(shard, None)
        else:
            self._failures[shard] = SaveFailure(*failure)
        self._changed = self._changed or before != failure
        if self._changed and self._task is None:
            self._task = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        try:
            while self._changed:
                self._changed = False
                failures = tuple(map(tuple, self._failures.values()))
                calls = [asyncio.ensure_future(_tell(shard, failures)) for shard in self._shards]
                if calls:
                    await asyncio.wait(calls, timeout=_TELL_S)
        finally:
            self._task = None


_TELL_S = 5.0


async def _tell(shard: Any, failures: tuple[tuple[Any, ...], ...]) -> None:
    with contextlib.suppress(Exception):  # a shard that does not answer learns of the next change
        await shard.learn_failures.remote(failures)


# -- in the handles ---------------------------------------------------------------------------------------------------


@final
class FailureWarnings:
    """Warns once of each row of failures, for one handle. Thread-safe.

    Args:
        shards: Number of shards.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._known: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def take(self, found: Any) -> Any:
        """Return the result of a call to a shard without the failures that it carries, and warn of new ones."""
        if type(found) is not Noticed:
            return found
        self.warn(found.failures)
        return found.result

    def warn(self, failures: Sequence[SaveFailure]) -> None:
        """Warn of failures that are new to this handle."""
        with self._lock:
            new = [one for one in failures if self._known.get(one.shard) != one.streak]
            self._known |= {one.shard: one.streak for one in new}
        for shard, _, reason in new:
            warnings.warn(
                f"the periodic checkpoints of shard {shard} of {self._shards} fail ({reason}): rows written to it "
                "since its last checkpoint would be lost with it; report() counts the failures",
                RuntimeWarning,
                stacklevel=4,
            )
