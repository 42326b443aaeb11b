"""Processes and threads: locks that a forked child finds free, objects sent as copies, work that keeps no buffer alive.

A fork copies locks, but not the threads that hold them. So before a fork (for example for the workers of a data loader)
the process acquires all registered locks, and afterwards the parent and the child release them. This also ensures that
no object is in the middle of a change in the child.

A future keeps the error of its work, the error its traceback, and that the frames with their local variables. A buffer
whose queue holds a failed batch would refer to itself that way, and its memory would not be freed when it is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import traceback
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

_PACKAGE = __name__.partition(".")[0]
ResultT = TypeVar("ResultT")
_Lock: TypeAlias = "threading.Lock | threading.RLock"

_known: weakref.WeakKeyDictionary[object, tuple[int, tuple[_Lock, ...]]] = weakref.WeakKeyDictionary()
_forking = threading.Lock()
_held: list[_Lock] = []
_places: Iterator[int] = itertools.count(1)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def kept_scheduling() -> Iterator[None]:
    """Give this thread the scheduling policy back that it had before.

    The encoder SVT-AV1 makes the thread that opens it a real-time thread, if the process may do that (as root). All
    threads that are started later inherit this, and other threads and processes then wait for them.
    """
    if not hasattr(os, "sched_getscheduler"):
        yield
        return
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, priority)


def next_place() -> int:
    """Return a number larger than all that were returned before: a place in the order in which locks are acquired."""
    return next(_places)


def whole_in_forks(owner: object, *locks: _Lock, place: int = 0) -> None:
    """Acquire the locks of an object around each fork, as long as the object exists.

    Args:
        owner: The object.
        *locks: Its locks, in the order in which they are acquired. None is held for long.
        place: Locks of objects at a lower place are acquired first; code that acquires locks of several objects at
            once must use the same order.
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


# -- work for threads --------------------------------------------------------------------------------------------------


@final
class Work(Generic[ResultT]):
    """A call for a thread, made once. After an error it refers to nothing, and neither do frames of this package.

    Args:
        call: takes no arguments. No lambda or nested function that refers to the buffer: a frame keeps its function.
    """

    def __init__(self, call: Callable[[], ResultT]) -> None:
        self._call: Callable[[], ResultT] | None = call

    def __call__(self) -> ResultT:
        """Make the call."""
        try:
            return self._call()  # type: ignore[misc]
        except BaseException as error:
            self._call = None
            _clear_frames(error)
            raise


def raise_first(futures: list[Future[Any]]) -> None:
    """Raise the first error of futures that are done, if there is one, and clear the list; cancelled ones have none."""
    errors = [error for error in (future.exception() for future in futures if not future.cancelled()) if error]
    futures.clear()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # the traceback keeps this frame


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables of this package's frames in the traceback of an error, and of those that led to it."""
    found: BaseException | None = error
    while found is not None:
        for frame, _ in traceback.walk_tb(found.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
        found = found.__cause__ or found.__context__
