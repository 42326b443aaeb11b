"""What a dataset keeps in memory: blocks of rows that were read last, within a budget, and open files."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from ostinato.core.processes import whole_in_forks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path

    from torch import Tensor

__all__ = ["BlockCache", "OpenHandles"]

T = TypeVar("T")


@final
class BlockCache:
    """Keeps the blocks that were read last, up to a number of bytes. Thread-safe.

    Several threads that miss the same block may each read it. Pickled without its blocks; a forked process begins with
    those of its parent.

    Args:
        max_bytes: largest number of bytes of all blocks; a block larger than this is read each time.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        """Bytes of the blocks kept now."""
        self._blocks: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._names = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        whole_in_forks(self, self._lock)

    def __getstate__(self) -> dict[str, Any]:
        """The budget and the names given so far."""
        return {"max_bytes": self.max_bytes, "_names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without blocks."""
        self.__dict__.update(state)
        self.nbytes, self._blocks = 0, OrderedDict()
        self._begin()

    def register(self) -> int:
        """Return a name for the blocks of one column."""
        return next(self._names)

    def get(self, key: Hashable, load: Callable[[], Tensor]) -> Tensor:
        """Return a block, which is loaded if it is not here. The caller must not change it."""
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
                return found
        block = load()
        self.put(key, block)
        return block

    def put(self, key: Hashable, block: Tensor) -> None:
        """Keep a block that was read, unless there is one with this key. The caller must not change it."""
        with self._lock:
            if key not in self._blocks and block.nbytes <= self.max_bytes:
                self._blocks[key] = block
                self.nbytes += block.nbytes
                while self.nbytes > self.max_bytes:
                    self.nbytes -= self._blocks.popitem(last=False)[1].nbytes

    def __contains__(self, key: Hashable) -> bool:
        """Whether a block is kept."""
        with self._lock:
            return key in self._blocks

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()
            self.nbytes = 0


@final
class OpenHandles(Generic[T]):
    """Files that are open for reading: at most a number of them, the ones used last. Thread-safe.

    A handle is used by one thread at a time. Pickled without handles. A forked process opens its own, since it would
    share the position in the file with its parent.

    Args:
        open_file: opens a path. Must be picklable.
        close_file: closes what it returned. Must be picklable.
        most: open handles that no thread uses.
    """

    def __init__(self, open_file: Callable[[Path], T], close_file: Callable[[T], None], most: int = 16) -> None:
        self._open, self._close, self.most = open_file, close_file, most
        self._begin()

    def _begin(self) -> None:
        import os

        self._lock = threading.Lock()
        self._process = os.getpid()
        self._idle: OrderedDict[int, tuple[Path, T]] = OrderedDict()
        self._serial = itertools.count()
        whole_in_forks(self, self._lock)

    def __getstate__(self) -> dict[str, Any]:
        """How files are opened."""
        return {"_open": self._open, "_close": self._close, "most": self.most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without handles."""
        self.__dict__.update(state)
        self._begin()

    def use(self, path: Path, action: Callable[[T], Any]) -> Any:
        """Return `action(handle)` of a file that no other thread uses meanwhile.

        Handles in which an action raised are closed.
        """
        handle = self._take(path)
        try:
            result = action(handle)
        except BaseException:
            self._close(handle)
            raise
        with self._lock:
            self._idle[next(self._serial)] = path, handle
            extra = [self._idle.popitem(last=False)[1] for _ in range(len(self._idle) - self.most)]
        for _, unused in extra:
            self._close(unused)
        return result

    def _take(self, path: Path) -> T:
        import os

        with self._lock:
            if self._process != os.getpid():  # handles of the parent process; they are not closed here
                self._process = os.getpid()
                self._idle = OrderedDict()
            for serial in reversed(self._idle):
                if self._idle[serial][0] == path:
                    return self._idle.pop(serial)[1]
        return self._open(path)

    def close(self) -> None:
        """Close all handles that no thread uses."""
        with self._lock:
            handles = [handle for _, handle in self._idle.values()]
            self._idle = OrderedDict()
        for handle in handles:
            self._close(handle)

    def __len__(self) -> int:
        """Open handles that no thread uses."""
        with self._lock:
            return len(self._idle)
