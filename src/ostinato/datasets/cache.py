"""What a dataset keeps in memory: blocks or single rows that were read last, within a budget, and open files."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import numpy as np
import torch

from ostinato.core.processes import whole_in_forks
from ostinato.core.rows import Leaf, Schema
from ostinato.storages.memory import HeapMemory
from ostinato.storages.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from pathlib import Path

    from torch import Tensor

    _Numbers = np.ndarray[Any, np.dtype[np.int64]]

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
        self._blocks: OrderedDict[Hashable, Any] = OrderedDict()
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

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """Return a block (a tensor or Arrow array), loaded if it is not here. The caller must not change it."""
        with self._lock:
            found: T | None = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
                return found
        block = load()
        self.put(key, block)
        return block

    def put(self, key: Hashable, block: Any) -> None:
        """Keep a block that was read, unless there is one with this key. The caller must not change it."""
        with self._lock:
            if key not in self._blocks and block.nbytes <= self.max_bytes:
                self._blocks[key] = block
                self.nbytes += block.nbytes
                while self.nbytes > self.max_bytes:
                    self.nbytes -= self._blocks.popitem(last=False)[1].nbytes

    def take(self, key: Hashable) -> Tensor | None:
        """Return a block and forget it; None if it is not kept."""
        with self._lock:
            found: Tensor | None = self._blocks.pop(key, None)
            self.nbytes -= 0 if found is None else found.nbytes
        return found

    def __contains__(self, key: Hashable) -> bool:
        """Whether a block is kept."""
        with self._lock:
            return key in self._blocks

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()
            self.nbytes = 0


def new_rows(rows: int, shape: tuple[int, ...]) -> Tensor:
    """Return a new uint8 tensor `[rows, *shape]`; a large one has huge pages, which cost fewer page faults."""
    nbytes = rows * int(np.prod(shape, dtype=np.int64))
    return HeapMemory(torch.device("cpu")).block("", nbytes).view(rows, *shape)


def _own_pages(nbytes: int) -> Tensor:
    """Return a new uint8 tensor `[nbytes]` outside of the heap, which would keep its memory and be torn by it."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    with torch.inference_mode(mode=False):
        return torch.frombuffer(mmap.mmap(-1, nbytes, **private), dtype=torch.uint8)


@final
class RowCache:
    """Keeps the rows of one column that were read last, all in one block of memory. Thread-safe.

    The memory is taken as rows come in; it never moves, so that the process takes no more than the budget. Pickled
    without its rows; a forked process begins with those of its parent.

    Cost: of a read, one copy; of a row that is kept, one copy.

    Args:
        rows: number of rows of the column.
        shape: of one row, which is uint8.
        max_bytes: largest number of bytes of all rows.
    """

    def __init__(self, rows: int, shape: tuple[int, ...], max_bytes: int) -> None:
        self.rows, self.shape, self.max_bytes = rows, shape, max_bytes
        self._begin()

    def _begin(self) -> None:
        size = int(np.prod(self.shape, dtype=np.int64))
        self.capacity: int = min(self.rows, self.max_bytes // size) if size else 0
        """Rows that fit."""
        self.used = 0
        """Rows kept now."""
        slab = _own_pages(self.capacity * size).view(self.capacity, *self.shape)
        self._slab = slab.numpy()
        self._table = Table.adopt(Schema(None, [Leaf(("row",), torch.uint8, self.shape)]), [slab])
        self._places = np.zeros(self.rows if self.capacity else 0, np.int32)  # of each row, plus one; pages of zeros
        self._row_at = np.zeros(self.capacity, np.int64)
        self._seen = np.zeros(self.capacity, np.int64)
        self._time = 0
        self._oldest: Iterator[tuple[int, int]] = iter(())
        self._lock = threading.Lock()
        whole_in_forks(self, self._lock)

    def __getstate__(self) -> dict[str, Any]:
        """The budget."""
        return {"rows": self.rows, "shape": self.shape, "max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without rows."""
        self.__dict__.update(state)
        self._begin()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows kept now."""
        return self.used * int(np.prod(self.shape, dtype=np.int64))

    def read(self, rows: _Numbers) -> tuple[Tensor, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return `rows` (int64 `[n]`) as a new tensor `[n, *shape]`, and which of them are kept, bool `[n]`.

        The others are undefined.
        """
        with self._lock:
            places = self._places[rows].astype(np.int64) - 1 if self.capacity else np.full(rows.shape[0], -1)
            found: np.ndarray[Any, np.dtype[np.bool_]] = places >= 0
            self._time += 1
            if self.capacity and found.all():
                self._seen[places] = self._time
                return self._table.gather(torch.from_numpy(places))[0], found
            out = new_rows(rows.shape[0], self.shape)
            if found.any():
                self._seen[places[found]] = self._time
                values = out.numpy()
                for at in np.flatnonzero(found).tolist():
                    np.copyto(values[at], self._slab[places[at]])
        return out, found

    def keep(self, rows: _Numbers, values: np.ndarray[Any, np.dtype[np.uint8]], at: _Numbers) -> None:
        """Keep `values[at[i]]` as the row `rows[i]`, both int64 `[n]`; the rows used least recently leave."""
        if not self.capacity:
            return
        with self._lock:
            once = np.sort(np.unique(rows, return_index=True)[1])
            new = once[self._places[rows[once]] == 0]
            self._time += 1
            for i in new[: self.capacity].tolist():
                place = self._free_place()
                np.copyto(self._slab[place], values[at[i]])
                self._places[rows[i]] = place + 1
                self._row_at[place], self._seen[place] = rows[i], self._time

    def _free_place(self) -> int:
        if self.used < self.capacity:
            self.used += 1
            return self.used - 1
        while True:
            for place, seen in self._oldest:
                if self._seen[place] == seen:  # else it was used since they were sorted
                    self._places[self._row_at[place]] = 0
                    return place
            count = max(1, self.capacity // 16)
            places = np.argpartition(self._seen, count - 1)[:count]
            places = places[np.argsort(self._seen[places], kind="stable")]
            self._oldest = iter(list(zip(places.tolist(), self._seen[places].tolist(), strict=True)))

    def clear(self) -> None:
        """Forget all rows. Their memory is kept for others."""
        with self._lock:
            self._places[self._row_at[: self.used]] = 0
            self.used = 0
            self._oldest = iter(())


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
