"""What processes need of each other: locks that are free in a forked child, and objects that are sent as copies."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["next_place", "send_as_copies", "whole_in_forks"]

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


def send_as_copies(*kinds: type) -> None:
    """Let `multiprocessing` send objects of exactly these classes as `pickle` writes them: by value.

    `multiprocessing` pickles tensors as torch tells it to: their memory would move to shared memory, through a file
    descriptor for each tensor. Tensors of a buffer share memory, for which starting a process raises "bad value(s) in
    fds_to_keep".
    """
    for kind in kinds:
        ForkingPickler.register(kind, _by_value)


def _by_value(value: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return pickle.loads, (pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL),)
