"""Handles with other options, processes of actors that are stopped and killed, and calls at once."""

from __future__ import annotations

import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LONG_S = 60.0
"""Longer than anything should take, so that a lost call fails instead of hanging."""


def until(done: Callable[[], bool], seconds: float = LONG_S) -> None:
    """Wait until something is true; fail if that takes too long."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- processes --------------------------------------------------------------------------------------------------------


def process_of(_: Any) -> int:
    """Return the process of an actor: a function for `apply`."""
    return os.getpid()


def kill(cluster: Any, *actors: Any) -> None:
    """End actors without a warning, as SIGKILL does."""
    found = [None if hasattr(one, "die") else cluster.get(one.__ray_call__.remote(process_of)) for one in actors]
    for actor, process in zip(actors, found, strict=True):
        actor.die() if process is None else os.kill(process, signal.SIGKILL)


@contextmanager
def stopped(cluster: Any, *actors: Any) -> Iterator[None]:
    """Stop actors during a block."""
    threads = [one.running for one in actors if hasattr(one, "running")]
    processes = [] if threads else cluster.get([one.__ray_call__.remote(process_of) for one in actors])
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    for running in threads:
        running.clear()
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)
        for running in threads:
            running.set()


# -- calls ------------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a call returned or raised, and how long it took."""

    result: Any
    took_s: float


def outcome(call: Callable[[], Any]) -> Outcome:
    """Make a call."""
    began = time.monotonic()
    try:
        result = call()
    except Exception as error:
        result = error
    return Outcome(result, time.monotonic() - began)


def all_at_once(calls: Mapping[str, Callable[[], Any]], threads: int = 32) -> dict[str, Outcome]:
    """Make all calls in threads, without warnings."""
    with warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
        warnings.simplefilter("ignore")
        tasks = {name: pool.submit(outcome, call) for name, call in calls.items()}
        return {name: task.result() for name, task in tasks.items()}
