"""Work that goes on in threads while a test does something else."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["busy_switching", "in_background"]


@contextmanager
def busy_switching() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def in_background(*jobs: Callable[[], object]) -> Iterator[None]:
    """Call each job over and over in a thread of its own until the block ends; raise their first error.

    Each job runs at least once. Threads are switched often, so that they meet in more places.
    """
    stop, errors = threading.Event(), list[BaseException]()

    def run(job: Callable[[], object]) -> None:
        try:
            job()
            while not stop.is_set() and not errors:
                job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    with busy_switching():
        try:
            for thread in threads:
                thread.start()
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]
