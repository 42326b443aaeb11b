"""Counting rows in shards, in an actor's one thread: at a fixed pace, while somebody waits for rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Bell", "Tally"]

_PACE_S = 0.02
"""From one count of the rows to the next."""
_COUNT_S = 1.0
"""How long a count waits for a shard that answered the one before."""


@final
class Bell:
    """Wakes those who wait for something to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Let those who wait look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def heard(self, seconds: float | None) -> None:
        """Wait until it rings, at most so long."""
        waiter = asyncio.ensure_future(self._event.wait())
        await asyncio.wait([waiter], timeout=seconds)
        waiter.cancel()


@final
class Tally:
    """Rows that can be drawn in all shards: one task counts them at a fixed pace, while somebody needs to know.

    A shard that does not answer in time has no rows until it does: its call stays open, and no later count waits for
    it.

    Args:
        shards: actors.
        counting: whether draws use rows up.
        needed: whether to go on counting.
        changed: called after each count.
    """

    def __init__(
        self, shards: Sequence[Any], needed: Callable[[], bool], changed: Callable[[], None], *, counting: bool
    ) -> None:
        self.rows = 0
        self._shards = list(shards)
        self._needed, self._changed, self._counting = needed, changed, counting
        self._open: dict[int, asyncio.Future[int]] = {}
        self._written = 0  # rows let through since the last count began
        self._drawn = 0
        self._underway = 0  # rows of the draws of one pace before that: a shard may not have heard of them yet
        self.done = 0  # counts; so are these:
        self._wanted = self._begun = 0
        self._task: asyncio.Future[None] | None = None
        self._counted = Bell()

    @property
    def least(self) -> int:
        """Rows that are there whatever was drawn since they were counted."""
        return max(0, self.rows - self._drawn - self._underway) if self._counting else self.rows

    @property
    def most(self) -> int:
        """Rows that are there if all that was let through since they were counted was written."""
        return self.rows + self._written

    def wrote(self, rows: int) -> None:
        """Note rows let through."""
        self._written += rows

    def drew(self, rows: int) -> None:
        """Note rows let through."""
        self._drawn += rows

    def want(self) -> int:
        """Ask for a count that knows of all that has come about by now; return its number. Waits for nobody."""
        self._wanted = self._begun + (2 if self._counting and self._drawn else 1)
        if self._task is None:
            self._task = asyncio.ensure_future(self._keep_counting())
        return self._wanted

    async def reach(self, number: int, seconds: float | None = None) -> None:
        """Wait for a count, at most so long."""
        clock = asyncio.get_running_loop().time
        until = None if seconds is None else clock() + seconds
        while self.done < number and (until is None or clock() < until):
            await self._counted.heard(None if until is None else until - clock())

    async def _keep_counting(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while self._begun < self._wanted or self._needed():
                again = clock() + _PACE_S
                await self._count()
                self._counted.ring()
                self._changed()
                await asyncio.sleep(max(0.0, again - clock()))
        finally:
            self._task = None

    async def _count(self) -> None:
        self._begun += 1
        written, drawn = self._written, self._drawn  # what comes in between is on top of either count
        asked = [i for i in range(len(self._shards)) if i not in self._open]
        self._open |= {i: asyncio.ensure_future(_drawable(self._shards[i])) for i in asked}
        if asked:
            await asyncio.wait([self._open[i] for i in asked], timeout=_COUNT_S)
        answered = [i for i, call in self._open.items() if call.done()]
        self.rows = sum(self._open.pop(i).result() for i in answered)
        self._written, self._drawn, self._underway = self._written - written, self._drawn - drawn, drawn
        self.done = self._begun


async def _drawable(shard: Any) -> int:
    try:
        return int(await shard.drawable.remote())
    except Exception:  # noqa: BLE001 (one that cannot say has none)
        return 0
