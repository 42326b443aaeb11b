"""Which trajectories stay in memory: the most recent ones, bounded in number and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from ostinato.trajectories.index import Entry

__all__ = ["Cache"]


@final
class Cache:
    """Remembers entries that stay in memory, the oldest goes first. The owner holds a lock around every call."""

    def __init__(self, limit: int, limit_bytes: int | None) -> None:
        """Keep at most `limit` trajectories, and at most `limit_bytes` bytes of them if given."""
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self.nbytes = 0
        """Bytes of the trajectories kept."""

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._entries)

    def put(self, entry: Entry) -> list[Entry]:
        """Keep an entry that is in memory, as the most recent one; return those that leave, perhaps itself."""
        self._entries[entry.id] = entry
        self.nbytes += _nbytes(entry)
        entry.cached = True
        gone = []
        while len(self._entries) > self._limit or (self._limit_bytes is not None and self.nbytes > self._limit_bytes):
            gone.append(self._leave())
        return gone

    def touch(self, entry: Entry) -> None:
        """Make an entry that is kept the most recent one."""
        if entry.id in self._entries:
            self._entries.move_to_end(entry.id)

    def clear(self) -> list[Entry]:
        """Let go of all and return them."""
        return [self._leave() for _ in range(len(self._entries))]

    def _leave(self) -> Entry:
        _, entry = self._entries.popitem(last=False)
        self.nbytes -= _nbytes(entry)
        entry.cached = False
        return entry


def _nbytes(entry: Entry) -> int:
    return 0 if entry.held is None else entry.held.nbytes
