"""Functions at the same time, a thread each, with a limit: a call that waits for ever fails its test."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["together"]

LIMIT_S = 60.0


def together(*works: Callable[[], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """Start all functions at once; return what they returned, or raise what the first of them raised."""
    found: list[Any] = [None] * len(works)
    errors: list[BaseException] = []
    begun = threading.Barrier(len(works))

    def run(number: int) -> None:
        try:
            begun.wait(limit_s)
            found[number] = works[number]()
        except BaseException as error:  # raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return found
