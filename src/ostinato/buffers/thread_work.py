"""Work for threads: an error that its future keeps does not keep the buffer.

A future keeps the error of its work, the error its traceback, and that the frames with their local variables. A buffer
whose queue holds a failed batch would refer to itself that way, and its memory would not be freed when it is dropped.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

_PACKAGE = __name__.partition(".")[0]
ResultT = TypeVar("ResultT")


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
