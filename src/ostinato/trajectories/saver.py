"""The background thread that saves trajectories in order, with a bounded queue; failures are reported and retried."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from ostinato.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.trajectories.index import Entry, SavedFile

__all__ = ["SaveGroup", "Saver"]

SaveFunction: TypeAlias = "Callable[[Sequence[Entry]], Sequence[SavedFile | Exception]]"


@final
class SaveGroup:
    """Trajectories that were added together: their future is done when all are saved, or fails with the first error."""

    def __init__(self, ids: list[int]) -> None:
        """Make a group of trajectories; the result of its future is `ids`."""
        self.future: Future[list[int]] = Future()
        self._ids = ids
        self._left = len(ids)
        if not ids:
            self.future.set_result([])

    def record(self, error: Exception | None) -> None:
        """Record that one trajectory was saved (None) or could not be saved."""
        self._left -= 1
        with suppress(InvalidStateError):  # the future has failed already, or its user has cancelled it
            if error is not None:
                self.future.set_exception(error)
            elif self._left == 0:
                self.future.set_result(self._ids)


class _Job(NamedTuple):
    entry: Entry
    group: SaveGroup | None


@final
class Saver:
    """Saves entries in its own thread, which starts with the first entry and ends with `stop`.

    An entry that could not be saved stays in the saver, and in memory: `check` raises the error once, and `retry`,
    `flush` and `stop` try to save it again.

    Args:
        save: Saves entries; returns the file of each, or the error.
        limit: Most entries that wait or are being saved before `wait_for_room` blocks.
    """

    def __init__(self, save: SaveFunction, limit: int) -> None:
        self._save = save
        self._limit = limit
        self.lock = threading.RLock()
        """Held briefly; acquired after the store's lock."""
        self._changed = threading.Condition(self.lock)
        self._waiting: deque[_Job] = deque()
        self._busy: list[_Job] = []
        self._failed: list[_Job] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._stops = 0
        """Calls of `stop` in progress; the thread does not wait for more work until the last one has returned."""

    @property
    def pending(self) -> int:
        """Entries that are not saved yet, failed ones included."""
        with self._changed:
            return len(self._waiting) + len(self._busy) + len(self._failed)

    def submit(self, entries: Sequence[Entry], group: SaveGroup | None = None) -> None:
        """Queue all entries without blocking."""
        if not entries:
            return
        with self._changed:
            self._waiting.extend(_Job(entry, group) for entry in entries)
            self._changed.notify_all()
            self._start()

    def retry(self) -> None:
        """Queue again the entries that could not be saved."""
        with self._changed:
            if self._failed:
                self._waiting.extendleft(reversed(self._failed))
                self._failed.clear()
                self._error = None
                self._start()
                self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Block while the queue is over its limit. Returns at once in the saver's own thread, which empties it."""
        with self._changed:
            if self._is_own_thread():
                return
            while len(self._waiting) + len(self._busy) > self._limit:
                self._start()  # it may have been stopped meanwhile
                self._changed.wait(1)

    def check(self) -> None:
        """Raise an error that was not reported yet.

        Raises:
            CheckpointError: Trajectories could not be saved; the message names them and the error.
        """
        with self._changed:
            error, self._error = self._error, None
            if error is None:
                return
            ids = [job.entry.id for job in self._failed]
        msg = (
            f"{len(ids)} trajectories could not be saved (ids {', '.join(map(str, ids[:10]))}): {error}; they stay in "
            "memory and are tried again by the next add_trajectories, flush or close; clear() gives them up"
        )
        raise CheckpointError(msg) from error

    def flush(self) -> None:
        """Wait until all entries queued or failed now are saved or have failed again; `check` tells which.

        Entries that other threads queue meanwhile are not waited for.

        Raises:
            UsageError: This is the saver's own thread, which would wait for itself.
        """
        self.check_thread("flush")
        self.retry()
        with self._changed:
            if self._waiting:
                self._start()
            mine = {id(job.entry) for job in (*self._waiting, *self._busy)}
            self._changed.wait_for(lambda: not any(id(job.entry) in mine for job in (*self._waiting, *self._busy)))

    def cancel(self, entries: Sequence[Entry]) -> None:
        """Remove those of `entries` that wait or have failed; wait for those that are being saved."""
        cancelled_ids = {id(entry) for entry in entries}
        with self._changed:
            cancelled = self._remove(cancelled_ids)
            self._changed.wait_for(lambda: not any(id(job.entry) in cancelled_ids for job in self._busy))
            cancelled += self._remove(cancelled_ids)  # those that failed meanwhile
        for job in cancelled:
            if job.group is not None:
                job.group.future.cancel()

    def _remove(self, entry_ids: set[int]) -> list[_Job]:
        removed = [job for job in (*self._waiting, *self._failed) if id(job.entry) in entry_ids]
        self._waiting = deque(job for job in self._waiting if id(job.entry) not in entry_ids)
        self._failed = [job for job in self._failed if id(job.entry) not in entry_ids]
        if not self._failed:
            self._error = None
        self._changed.notify_all()
        return removed

    def stop(self) -> None:
        """Save what is queued, try failed entries again, then end the thread."""
        self.retry()
        with self._changed:
            if self._waiting:
                self._start()
            thread = self._thread
            self._stops += 1
            self._changed.notify_all()
        try:
            if thread is not None and not self._is_own_thread():
                thread.join()
        finally:
            with self._changed:
                self._stops -= 1

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def check_thread(self, name: str) -> None:
        """Raise in the saver's own thread.

        Args:
            name: The method that was called.

        Raises:
            UsageError: This is the saver's thread: callbacks of futures run in it.
        """
        if self._is_own_thread():
            msg = f"{name} was called by a callback of a future, in the thread that saves: it would wait for itself"
            raise UsageError(msg)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ostinato-saver", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while jobs := self._next():
            results: Sequence[SavedFile | Exception]
            try:
                results = self._save([job.entry for job in jobs])
            except Exception as error:  # noqa: BLE001 - raised by `check`
                results = [error] * len(jobs)
            with self._changed:
                for job, result in zip(jobs, results, strict=True):
                    if isinstance(result, Exception):
                        self._failed.append(job)
                        self._error = self._error or result
            for job, result in zip(jobs, results, strict=True):
                if job.group is not None:
                    with suppress(SystemExit):  # a callback must not end this thread: others wait for it
                        job.group.record(result if isinstance(result, Exception) else None)
            with self._changed:
                self._busy = []
                self._changed.notify_all()

    def _next(self) -> list[_Job]:
        """Wait for work and return all of it; an empty list ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stops)
            jobs = list(self._waiting)
            self._waiting.clear()
            self._busy = jobs
            if not jobs:
                self._thread = None
            return jobs
