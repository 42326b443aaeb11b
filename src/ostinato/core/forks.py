"""Locks that are free in a forked process.

Threads do not survive a fork; locks that they hold do, for ever. So a process that forks (for the workers of a data
loader, say) takes all locks before, which also means that the child finds nothing half changed, and gives them back
after it, on both sides.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["next_place", "whole_in_forks"]

_Lock: TypeAlias = "threading.Lock | threading.RLock"

_known: weakref.WeakKeyDictionary[object, tuple[int, tuple[_Lock, ...]]] = weakref.WeakKeyDictionary()
_forking = threading.Lock()
_held: list[_Lock] = []
_places: Iterator[int] = itertools.count(1)


def next_place() -> int:
    """Return a number above all that were returned before: a place in the order in which locks are taken."""
    return next(_places)


def whole_in_forks(owner: object, *locks: _Lock, place: int = 0) -> None:
    """Let forks wait for the locks of an object as long as it lives.

    Args:
        owner: The object.
        *locks: Its locks, in the order in which they are taken. None is held for long.
        place: Locks of objects at a lower place are taken first; who takes those of several objects at once must do
            it in this order.
    """
    _known[owner] = place, locks


def _before() -> None:
    _forking.acquire()
    for _, locks in sorted(_known.values(), key=lambda known: known[0]):
        for lock in locks:
            lock.acquire()
            _held.append(lock)


def _after() -> None:
    while _held:
        _held.pop().release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
