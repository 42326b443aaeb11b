"""Locks that are free in a forked process.

Threads do not survive a fork; locks that they hold do, for ever. So a process that forks (for the workers of a data
loader, say) takes all locks before, which also means that the child finds nothing half changed, and gives them back
after it, on both sides.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TypeAlias

__all__ = ["whole_in_forks"]

_Lock: TypeAlias = "threading.Lock | threading.RLock"

_locks: weakref.WeakKeyDictionary[object, tuple[_Lock, ...]] = weakref.WeakKeyDictionary()
_forking = threading.Lock()
_held: list[_Lock] = []


def whole_in_forks(owner: object, *locks: _Lock) -> None:
    """Let forks wait for the locks of an object as long as it lives.

    Args:
        owner: The object.
        *locks: Its locks, in the order in which they are taken. None is held for long.
    """
    _locks[owner] = locks


def _before() -> None:
    _forking.acquire()
    for locks in list(_locks.values()):
        for lock in locks:
            lock.acquire()
            _held.append(lock)


def _after() -> None:
    while _held:
        _held.pop().release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
