"""Progress of long calls: a function of the caller, or a bar on the terminal after two seconds.

A public call opens one `Progress`. Code below it counts with `count`, which finds the `Progress` of its thread: what
reads and writes files needs no argument for it, and an operation made of others has one bar. Other threads count
nothing; the thread that waits for them does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, final

from ostinato._optional import require
from ostinato.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "BYTES",
    "PARTS",
    "SHARDS",
    "TRAJECTORIES",
    "Progress",
    "ProgressOption",
    "bar_only",
    "begin",
    "count",
    "counted",
    "finish",
]

ProgressOption: TypeAlias = Callable[[int, int], object] | bool | None
"""How a call shows progress: None or True shows a bar on a terminal after two seconds, False nothing, and a function
gets the number of items done and their total.

The function is called with `(0, total)` first and with `done == total` last, in the calling thread and never twice at
once. `done` never falls. `total` is 0 while it is not known, and may grow. Between the first and the last call there
are at most 20 calls in a second. An exception of the function ends the call, which then has changed nothing: the last
call comes before a new checkpoint takes the place of an older one, and before loaded rows do. The function must not use
the buffer, which may be locked.
"""

BYTES = "bytes"
"""The unit of saving and loading a buffer."""
PARTS = "parts"
"""The unit of opening a dataset: files, episodes, or blocks of rows that are looked at."""
SHARDS = "shards"
"""The unit of remote buffers."""
TRAJECTORIES = "trajectories"
"""The unit of directories of trajectories: their files are linked rather than copied, and a load reads no rows."""

_T = TypeVar("_T")
_WAIT_S = 2.0
_STEP_S = 0.05
_HERE = threading.local()
"""Its `progress` is that of the public call in this thread."""
_BAR = threading.Lock()
"""Held by the one bar that the process shows."""


@final
class Progress:
    """Counts the items of a call, for a `with` block.

    Inside the block of another one it shows nothing and counts nothing, unless it has a function of its own.

    Args:
        option: see `ProgressOption`. The bar is on stderr, if that is a terminal. It needs rich; without it there is
            a line with the numbers.
        title: of the bar.
        total: number of items, 0 if it is not known; None if `begin` tells it.
        unit: of the items; `count` and `begin` are for the `Progress` of their unit.

    Raises:
        OptionError: for other options.
    """

    def __init__(self, option: Any, title: str, total: int | None = None, *, unit: str = "items") -> None:
        if option is not None and not isinstance(option, bool) and not callable(option):
            msg = f"progress is a function of the number of {unit} done and the total, None for a bar, or False, got "
            msg += f"{option!r}"
            raise OptionError(msg)
        self.unit, self.total, self.done = unit, 0, 0
        self._call = option if callable(option) else None
        self._bar = _Bar(title, unit) if option in (None, True) and _on_terminal() else None
        self._known = total
        self._outer: Progress | None = None
        self._idle = self._call is None and self._bar is None
        self._started = self._ended = False
        self._told = (-1, -1)
        self._error: BaseException | None = None
        self._next = time.monotonic() + _WAIT_S

    def __enter__(self) -> Self:
        """Call the function for the first time, if the total is known."""
        self._outer = getattr(_HERE, "progress", None)
        if self._outer is not None and self._call is None:
            self._idle = True
        else:
            _HERE.progress = self
        try:
            if self._known is not None:
                self.begin(self._known)
        except BaseException:
            _HERE.progress = self._outer
            raise
        return self

    def begin(self, total: int) -> None:
        """Set the total, 0 if it is not known, and call the function for the first time.

        What was counted before is dropped. Later calls do nothing.
        """
        if self._started:
            return
        self._started, self.total, self.done = True, total, 0
        if self._call is not None:
            self._tell(0)
            self._next = time.monotonic() + _STEP_S

    def grow(self, items: int) -> None:
        """Add items that were found to the total."""
        self.total += items

    def advance(self, items: int = 1) -> None:
        """Count items that were done."""
        if self._idle or self._ended:
            return
        self.done += items
        if 0 < self.total < self.done:
            self.done = self.total
        now = time.monotonic()
        if now < self._next or not (self._started or self._bar):
            return
        self._next = now + _STEP_S
        if self._call is not None:
            self._tell(self.done)
        elif self._bar is not None:
            self._bar.show(self.done, self.total)

    def finish(self) -> None:
        """Call the function for the last time; before the result takes the place of an older one."""
        if self._error is not None:
            raise self._error
        if self._idle or self._ended:
            return
        self.begin(0)
        self._ended = True
        self.total = self.done = self.total or self.done
        if self._call is not None:
            self._tell(self.done)

    def _tell(self, done: int) -> None:
        """Call the function; calls of the library in it have a progress of their own.

        Its exception is kept and raised again: what reads files may take it for a damaged one.
        """
        if self._error is not None:
            raise self._error
        if self._told == (done, self.total):
            return
        self._told = (done, self.total)
        here, _HERE.progress = _HERE.progress, None
        try:
            self._call(done, self.total)  # type: ignore[misc]
        except BaseException as error:
            self._error = error
            self._next = 0.0
            raise
        finally:
            _HERE.progress = here

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Call the function for the last time, if that was not done, and remove the bar.

        Raises:
            BaseException: what the function has raised, also where it was taken for another error.
        """
        try:
            if kind is None:
                self.finish()
            elif self._error is not None and error is not self._error:
                raise self._error
        finally:
            _HERE.progress = self._outer
            if self._bar is not None:
                self._bar.close()


def begin(total: int, unit: str = BYTES) -> None:
    """Tell the `Progress` of this thread its total, if it counts this unit and knows none."""
    here = getattr(_HERE, "progress", None)
    if here is not None and here.unit == unit:
        here.begin(total)


def count(items: int, unit: str = BYTES) -> None:
    """Count items of the call of this thread, if its `Progress` counts this unit."""
    here = getattr(_HERE, "progress", None)
    if here is not None and here.unit == unit:
        here.advance(items)


def counted(items: Iterable[_T], unit: str) -> Iterator[_T]:
    """Yield the items, and count each once the caller is done with it."""
    for item in items:
        yield item
        count(1, unit)


def finish(unit: str = BYTES) -> None:
    """Finish the `Progress` of this thread, if it counts this unit: what follows cannot be undone."""
    here = getattr(_HERE, "progress", None)
    if here is not None and here.unit == unit:
        here.finish()


def bar_only(option: Any) -> bool:
    """Return the option for a step before the one that a function counts: a bar if the caller has given no function."""
    return option is None or option is True


def _on_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


@final
class _Bar:
    """A bar on stderr, or a line without rich. The process shows one at a time."""

    def __init__(self, title: str, unit: str) -> None:
        self._title, self._unit = title, unit
        self._bar: Any = None
        self._task: Any = None
        self._open = self._line = False

    def show(self, done: int, total: int) -> None:
        """Show the items done; the total is 0 if it is not known."""
        if not self._open and not self._begin(done, total):
            return
        if self._line:
            of = f" of {total:,}" if total else ""
            sys.stderr.write(f"\r{self._title}: {done:,}{of} {self._unit}\033[K")
            sys.stderr.flush()
        else:
            self._bar.update(self._task, completed=done, total=total or None)

    def _begin(self, done: int, total: int) -> bool:
        if not _BAR.acquire(blocking=False):
            return False
        self._open = True
        try:
            bars, console = require("rich.progress", "cli"), require("rich.console", "cli")
        except MissingExtraError:
            self._line = True
            return True
        size = [bars.DownloadColumn(), bars.TransferSpeedColumn()]
        items = [bars.MofNCompleteColumn(), bars.TextColumn(self._unit)]
        columns = (
            bars.TextColumn(self._title),
            bars.BarColumn(),
            *(size if self._unit == BYTES else items),
            bars.TimeRemainingColumn(),
        )
        out = console.Console(stderr=True)
        both = sys.stdout is not None and sys.stdout.isatty()  # else what others print would go to stderr
        self._bar = bars.Progress(*columns, console=out, transient=True, redirect_stdout=both)
        self._task = self._bar.add_task(self._title, total=total or None, completed=done)
        self._bar.start()
        return True

    def close(self) -> None:
        """Remove it."""
        if not self._open:
            return
        self._open = False
        try:
            if self._line:
                sys.stderr.write("\r\033[K")
                sys.stderr.flush()
            else:
                self._bar.stop()
        finally:
            _BAR.release()
