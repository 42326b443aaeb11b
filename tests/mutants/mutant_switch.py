"""Which change is on. A module of the changed copy asks `on(number)` at each changed place.

Plain Python without dependencies: each process that a test starts imports it, too. Such processes note the changes that
they meet in the file that OSTINATO_MUTANT_HITS names.
"""

from __future__ import annotations

import contextlib
import os

active = int(os.environ.get("OSTINATO_MUTANT", "-1"))
"""Number of the change that is on, or -1."""
met: set[int] = set()
"""Changes that this process has met since the set was emptied."""
in_pytest = False
"""True in the process that runs the tests, which reads `met`."""
_hits = -1  # descriptor of the file


def begin(path: str) -> None:
    """Let this process and its forks note changes in a file: opened once, since some tests watch what is opened."""
    global _hits  # noqa: PLW0603
    with contextlib.suppress(OSError):
        _hits = os.open(path, os.O_WRONLY | os.O_APPEND)


def on(number: int) -> bool:
    """Say whether the change is on, and note that it was met."""
    if number not in met:
        met.add(number)
        if _hits >= 0 and not in_pytest:
            with contextlib.suppress(OSError):
                os.write(_hits, b"%d\n" % number)
    return number == active


def no_lock() -> contextlib.nullcontext[None]:
    """Stand in for a lock that was removed."""
    return contextlib.nullcontext()


def _in_a_fork() -> None:
    global in_pytest  # noqa: PLW0603
    in_pytest = False
    met.clear()


os.register_at_fork(after_in_child=_in_a_fork)
if "OSTINATO_MUTANT_HITS" in os.environ:
    begin(os.environ["OSTINATO_MUTANT_HITS"])
