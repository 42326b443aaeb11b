"""The trajectories that stay in memory: the most recent ones, bounded in number and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from ostinato.trajectories.index import Entry

__all__ = ["Cache"]


@final
class Cache:
    """A least-recently-used cache of entries. Not thread-safe: the store's lock guards every call.

    Args:
        limit: Most trajectories.
        limit_bytes: Most bytes of them; None for no bound.
    """

    def __init__(self, limit: int, limit_bytes: int | None) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self.nbytes = 0
        """Bytes of the cached trajectories."""

    def __len__(self) -> int:
        """Number of cached trajectories."""
        return len(self._entries)

    def put(self, entry: Entry) -> list[Entry]:
        """Add an entry that is in memory as the most recent one; return the evicted entries, which may include it."""
        self._entries[entry.id] = entry
        self.nbytes += _nbytes(entry)
        entry.cached = True
        evicted = []
        while len(self._entries) > self._limit or (self._limit_bytes is not None and self.nbytes > self._limit_bytes):
            evicted.append(self._evict())
        return evicted

    def touch(self, entry: Entry) -> None:
        """Make a cached entry the most recent one."""
        if entry.id in self._entries:
            self._entries.move_to_end(entry.id)

    def clear(self) -> list[Entry]:
        """Remove all entries and return them."""
        return [self._evict() for _ in range(len(self._entries))]

    def _evict(self) -> Entry:
        _, entry = self._entries.popitem(last=False)
        self.nbytes -= _nbytes(entry)
        entry.cached = False
        return entry


def _nbytes(entry: Entry) -> int:
    return 0 if entry.data is None else entry.data.nbytes
