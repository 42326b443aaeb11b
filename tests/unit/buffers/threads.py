"""Jobs that threads run over and over at the same time."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["busy_switching", "run_all"]

LIMIT_S = 40
"""A deadlock is one after so long."""


@contextmanager
def busy_switching() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_all(*jobs: Callable[[], object], rounds: int = 20) -> None:
    """Run each job in a thread of its own until all were run so many times; their first error is raised here."""
    errors: list[BaseException] = []
    made = [0] * len(jobs)
    start = threading.Barrier(len(jobs))
    until = time.monotonic() + LIMIT_S

    def work(number: int) -> None:
        try:
            start.wait(LIMIT_S)
            while not errors and min(made) < rounds and time.monotonic() < until:
                jobs[number]()
                made[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(jobs))]
    with busy_switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT_S)
    if errors:
        raise errors[0]
    assert min(made) >= rounds, f"deadlock or starvation: {made} rounds were made"
