"""Progress of long calls: a function of the caller, or a bar on the terminal after two seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

from ostinato._optional import require
from ostinato.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Progress", "ProgressOption"]

ProgressOption: TypeAlias = "Callable[[int, int], None] | bool | None"
"""A function of the items done and their total; None for a bar on a terminal; False for nothing."""

_WAIT_S = 2.0


@final
class Progress:
    """Counts the items of a call, for a `with` block.

    Args:
        option: a function that is called with the number of items done and the total, once at the beginning and after
            each step; None or True shows a bar on stderr, if it is a terminal, once the call has taken two seconds;
            False shows nothing. The bar needs rich; without it there is a line with the numbers.
        title: of the bar.
        total: number of items.

    Raises:
        OptionError: for other options.
    """

    def __init__(self, option: Any, title: str, total: int) -> None:
        if option is not None and not isinstance(option, bool) and not callable(option):
            msg = (
                f"progress is a function of the number of rows done and the total, None for a bar, or False, got "
                f"{option!r}"
            )
            raise OptionError(msg)
        self._call = option if callable(option) else None
        self._shows = option in (None, True) and sys.stderr is not None and sys.stderr.isatty()
        self._title, self.total, self.done = title, total, 0
        self._bar: Any = None
        self._task: Any = None
        self._line = False
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        """Call the function for the first time."""
        if self._call is not None:
            self._call(0, self.total)
        return self

    def advance(self, items: int) -> None:
        """Count items that were done."""
        self.done += items
        if self._call is not None:
            self._call(self.done, self.total)
        elif self._shows and time.monotonic() - self._begun >= _WAIT_S:
            self._show()

    def _show(self) -> None:
        if self._bar is None and not self._line:
            self._open()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        else:
            sys.stderr.write(f"\r{self._title}: {self.done:,} of {self.total:,}")
            sys.stderr.flush()

    def _open(self) -> None:
        try:
            bars, console = require("rich.progress", "cli"), require("rich.console", "cli")
        except MissingExtraError:
            self._line = True
            return
        columns = (
            bars.TextColumn(self._title),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
        )
        self._bar = bars.Progress(*columns, console=console.Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._title, total=self.total)
        self._bar.start()

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
        elif self._line:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
