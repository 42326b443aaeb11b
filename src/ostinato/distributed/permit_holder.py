"""The permits that a handle has borrowed from the rate limiter: for all threads of its process, reported in time."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
import uuid
import weakref
from typing import TYPE_CHECKING, Any, final

from ostinato.distributed.permits import Loan, Purse
from ostinato.distributed.ray_client import ray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostinato.distributed.permits import Kind, PermitReport

__all__ = ["Borrowed", "PermitHolder"]

_ANSWER_S = 0.005
"""How long a thread waits for permits that another one has asked for, before it asks itself."""
_EXIT_S = 1.0
"""How long the end of the process waits for its last report."""


@final
class Borrowed:
    """What a call to the limiter asks for, and what its answer says."""

    def __init__(self, loan: Loan) -> None:
        self.rows = loan.rows
        self.loan = loan if loan.rows or any(loan.report[1:]) else None
        """None if there is nothing to ask for, and nothing to report."""
        self.lent = 0
        """Rows of permits."""
        self.era = 0


@final
class PermitHolder:
    """The permits of one handle. Thread-safe.

    A thread reports what was used, at the latest 25 ms after the permits arrived; it runs only while there is something
    to report. The end of the process reports the rest.

    Args:
        actor: The `FleetActor`.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._owner = uuid.uuid4().hex
        self._purse = Purse()
        self._changed = threading.Condition()
        self._reporting = False

    def take(self, kind: Kind, rows: int) -> bool:
        """Use permits for a call; False if there are none, also after those that another thread has asked for."""
        purse = self._purse
        with self._changed:
            if purse.take(kind, rows, time.monotonic()):
                return True
            if not purse.asks(kind):
                return False
            self._changed.wait_for(lambda: not purse.asks(kind), _ANSWER_S)
            return purse.take(kind, rows, time.monotonic())

    @contextlib.contextmanager
    def borrow(self, kind: Kind, rows: int) -> Iterator[Borrowed]:
        """Ask for permits with a call of `rows` rows; at the end of the block they are there."""
        purse, sent = self._purse, time.monotonic()
        with self._changed:
            borrowed = Borrowed(Loan(self._owner, purse.ask(kind, rows), purse.report(sent)))
        try:
            yield borrowed
        finally:
            with self._changed:
                now = time.monotonic()
                purse.receive(kind, borrowed.rows, borrowed.lent, borrowed.era, sent, now)
                self._changed.notify_all()
                if purse.due is not None and not self._reporting:
                    self._reporting = True
                    _close_at_exit()
                    _holders.add(self)
                    threading.Thread(target=self._report, name="ostinato-permits", daemon=True).start()

    def _report(self) -> None:
        """Report permits when their time is up, until there are none."""
        while True:
            with self._changed:
                due, now = self._purse.due, time.monotonic()
                if due is None:
                    self._reporting = False
                    return
                if now < due:
                    self._changed.wait(due - now)
                    continue
                report = self._purse.report(now)
            self._send(report)

    def _send(self, report: PermitReport) -> Any:
        """Send a report, and return the call; None without Ray."""
        with contextlib.suppress(Exception):  # a dead actor counts anew, or never again
            if ray().is_initialized():
                return self._actor.settle.options(max_task_retries=0).remote(self._owner, report)
        return None

    def close(self) -> None:
        """Report what was used, and give the rest back."""
        with self._changed:
            if self._purse.due is None:
                return
            report = self._purse.report(float("inf"))
        call = self._send(report)
        if call is not None:
            with contextlib.suppress(Exception):
                ray().wait([call], timeout=_EXIT_S)


_holders: weakref.WeakSet[PermitHolder] = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    """Let the end of the process report: before Ray ends, whose handler is registered by now and called later."""
    atexit.register(_close_all)


def _close_all() -> None:
    for holder in list(_holders):
        holder.close()
