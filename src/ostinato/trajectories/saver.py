"""One background thread that saves what is handed to it, in order, with a bounded queue and no lost failure."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from ostinato.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.trajectories.index import Entry, Place

__all__ = ["Promise", "Saver"]

Save: TypeAlias = "Callable[[Sequence[Entry]], Sequence[Place | Exception]]"


@final
class Promise:
    """A future of several trajectories: done when all are saved, failed with the first that is not."""

    def __init__(self, ids: list[int]) -> None:
        """Promise to save `ids`, which is the result of the future."""
        self.future: Future[list[int]] = Future()
        self._ids = ids
        self._left = len(ids)
        if not ids:
            self.future.set_result([])

    def note(self, error: Exception | None) -> None:
        """Take in that one was saved, or was not."""
        self._left -= 1
        with suppress(InvalidStateError):  # it has failed, or its user has cancelled it
            if error is not None:
                self.future.set_exception(error)
            elif self._left == 0:
                self.future.set_result(self._ids)


class _Job(NamedTuple):
    entry: Entry
    promise: Promise | None


@final
class Saver:
    """Saves entries in a thread of its own, which starts with the first entry and ends with `stop`.

    An entry that could not be saved stays here, and in memory: the failure is raised by `check` once, and `again`,
    `flush` and `stop` try it once more.
    """

    def __init__(self, save: Save, limit: int) -> None:
        """Save through `save`, with at most `limit` entries waiting."""
        self._save = save
        self._limit = limit
        self.lock = threading.RLock()
        """Held for moments; taken after the shelf's."""
        self._changed = threading.Condition(self.lock)
        self._waiting: deque[_Job] = deque()
        self._busy: list[_Job] = []
        self._failed: list[_Job] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._stops = 0
        """Calls of `stop` that wait for the thread to end; it must not go on before the last of them has seen that."""

    @property
    def pending(self) -> int:
        """Entries that are not saved yet, failed ones among them."""
        with self._changed:
            return len(self._waiting) + len(self._busy) + len(self._failed)

    def put(self, entries: Sequence[Entry], promise: Promise | None = None) -> None:
        """Queue entries, all of them or none; never waits."""
        if not entries:
            return
        with self._changed:
            self._waiting.extend(_Job(entry, promise) for entry in entries)
            self._changed.notify_all()
            self._start()

    def again(self) -> None:
        """Queue once more what could not be saved."""
        with self._changed:
            if self._failed:
                self._waiting.extendleft(reversed(self._failed))
                self._failed.clear()
                self._error = None
                self._start()
                self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Wait while more are queued than may be; the saver's own thread, which makes the room, does not."""
        with self._changed:
            if self._is_own_thread():
                return
            while len(self._waiting) + len(self._busy) > self._limit:
                self._start()  # it may have been stopped meanwhile
                self._changed.wait(1)

    def check(self) -> None:
        """Raise a failure that was not reported yet.

        Raises:
            CheckpointError: naming the trajectories that could not be saved, and why.
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
        """Wait until all that is queued or has failed now is saved or has failed again. `check` tells which.

        What others queue meanwhile is not waited for.

        Raises:
            UsageError: This is the saver's own thread, which would wait for itself.
        """
        self.check_thread("flush")
        self.again()
        with self._changed:
            if self._waiting:
                self._start()
            mine = {id(job.entry) for job in (*self._waiting, *self._busy)}
            self._changed.wait_for(lambda: not any(id(job.entry) in mine for job in (*self._waiting, *self._busy)))

    def cancel(self, entries: Sequence[Entry]) -> None:
        """Forget those of `entries` that wait or have failed; what is being saved right now is waited for."""
        gone = {id(entry) for entry in entries}
        with self._changed:
            cancelled = self._take_out(gone)
            self._changed.wait_for(lambda: not any(id(job.entry) in gone for job in self._busy))
            cancelled += self._take_out(gone)  # what has failed meanwhile
        for job in cancelled:
            if job.promise is not None:
                job.promise.future.cancel()

    def _take_out(self, gone: set[int]) -> list[_Job]:
        out = [job for job in (*self._waiting, *self._failed) if id(job.entry) in gone]
        self._waiting = deque(job for job in self._waiting if id(job.entry) not in gone)
        self._failed = [job for job in self._failed if id(job.entry) not in gone]
        if not self._failed:
            self._error = None
        self._changed.notify_all()
        return out

    def stop(self) -> None:
        """Save what is queued, and once more what has failed, then end the thread."""
        self.again()
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
        """Refuse to wait for the saver's thread in itself.

        Args:
            name: What was called.

        Raises:
            UsageError: This is the saver's thread: a callback of a future runs in it.
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
            results: Sequence[Place | Exception]
            try:
                results = self._save([job.entry for job in jobs])
            except Exception as error:  # noqa: BLE001 - reported by the next call
                results = [error] * len(jobs)
            with self._changed:
                for job, result in zip(jobs, results, strict=True):
                    if isinstance(result, Exception):
                        self._failed.append(job)
                        self._error = self._error or result
            for job, result in zip(jobs, results, strict=True):
                if job.promise is not None:
                    with suppress(SystemExit):  # of a callback: this thread is waited for
                        job.promise.note(result if isinstance(result, Exception) else None)
            with self._changed:
                self._busy = []
                self._changed.notify_all()

    def _next(self) -> list[_Job]:
        """Wait for work and take all of it; empty when the thread shall end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stops)
            jobs = list(self._waiting)
            self._waiting.clear()
            self._busy = jobs
            if not jobs:
                self._thread = None
            return jobs
