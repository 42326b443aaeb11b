"""Policy versions: runs of equal versions, kept as rows are written, and draws among the rows young enough."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.buffers.observer import Observer
from ostinato.core import kinds
from ostinato.core.eligible import Recent
from ostinato.core.options import check_integer
from ostinato.core.records import Run
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError
from ostinato.samplers import RandomSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.buffers.observer import Incoming
    from ostinato.buffers.store import Store
    from ostinato.core.records import Placement, View
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.writers import Writer


@final
class Runs:
    """Versions of rows in the order of writing, as runs of equal ones. Positions count rows written; no clock, no lock.

    While versions do not decrease, the rows above a version are the newest ones: a search among runs finds them, O(log
    runs). After a decrease all runs are looked at, O(runs), until the older side of it has been replaced.
    """

    def __init__(self) -> None:
        self.written = 0
        self._values: list[int] = []
        self._ends: list[int] = []
        self._first = 0
        self._falls = 0

    @property
    def ordered(self) -> bool:
        """Whether no version present is smaller than the one before it."""
        return self._falls == 0

    def __len__(self) -> int:
        """Runs present."""
        return len(self._values) - self._first

    def record(self, versions: NDArray[np.int64]) -> None:
        """Record rows just written. Cost: O(n)."""
        first, before = int(versions[0]), self.written
        self.written += versions.size
        values, ends = [first], [self.written]
        if not bool((versions == first).all()):
            cuts = np.flatnonzero(np.diff(versions)) + 1
            values, ends = versions[np.r_[0, cuts]].tolist(), [*(cuts + before).tolist(), self.written]
            self._falls += sum(b < a for a, b in pairwise(values))
        if len(self) and self._values[-1] == first:
            self._values.pop()
            self._ends.pop()
        elif len(self):
            self._falls += first < self._values[-1]
        self._values += values
        self._ends += ends

    def forget(self, rows: int) -> None:
        """Drop the runs that lie before the newest `rows` rows. Cost: O(1) for each, over time."""
        oldest = self.written - rows
        stop = bisect_right(self._ends, oldest, lo=self._first)
        if not self.ordered:
            gone = self._values[self._first : stop + 1]
            self._falls -= sum(b < a for a, b in pairwise(gone))
        self._first = stop
        if stop > 32 and 2 * stop > len(self._values):
            del self._values[:stop], self._ends[:stop]
            self._first = 0

    @property
    def newest(self) -> int:
        """Largest version present."""
        return self._values[-1] if self.ordered else max(self._values[self._first :])

    def recent(self, rows: int, max_age: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows, of the newest `rows`, whose version is at least the newest version less `max_age`.

        Returns:
            Starts and lengths of runs of such rows, which are counted from the oldest one of the newest `rows`.
        """
        self.forget(rows)
        oldest, first = self.written - rows, self._first
        if self.ordered:
            run = bisect_left(self._values, self._values[-1] - max_age, lo=first)
            start = oldest if run == first else self._ends[run - 1]
            return np.array([start - oldest]), np.array([self.written - start])
        values, ends = np.array(self._values[first:]), np.array(self._ends[first:]) - oldest
        starts = np.r_[0, ends[:-1]]
        young = values >= values.max() - max_age
        return starts[young], (ends - starts)[young]


@final
class Versions(Observer):
    """The version of each row, by run: read from the storage when draws ask for them. Called under the buffer's lock.

    Args:
        key: field that holds one integer for each row; nested ones as a tuple.
    """

    def __init__(self, key: Any) -> None:
        path = (key,) if isinstance(key, str) else key
        if not isinstance(path, tuple) or not path:
            msg = f"version_key must be the name of a field, or a tuple of names for a nested one, got {key!r}"
            raise KindError(msg)
        self.path: tuple[str, ...] = path
        self._runs: Runs | None = None
        self._written = 0  # rows ever written, as of the runs

    def direct(self, store: Store) -> bool:
        """Whether rows have been checked: then all have the field, and versions are read at the next draw."""
        return store.ring.rows > 0

    def check(self, store: Store, incoming: Incoming) -> NDArray[np.int64] | None:
        """Check the first rows. On a device return all versions: draws would have to wait for their copy to the host.

        Raises:
            KeyMissingError: if they lack the field.
            SchemaError: if it does not hold one integer for each row.
        """
        return self.read(store, incoming) if not store.ring.rows or store.ring.device.type != "cpu" else None

    def written(self, store: Store, placement: Placement, found: NDArray[np.int64] | None) -> None:
        """Record versions that are known, if all before them are."""
        if found is None or not isinstance(placement, Run):
            return
        if store.ring.rows == placement.rows:  # there are no others
            self._runs, self._written = Runs(), store.counts.written
        if self._runs is not None and self._written == store.counts.written:
            self._runs.record(found)
            self._written += found.size

    def read(self, store: Store, incoming: Incoming) -> NDArray[np.int64]:
        """Return the versions of rows about to be written; raises as `check`."""
        return self._checked(store.storage.scores(incoming.payload, self.path), incoming.rows)

    def _checked(self, found: Tensor | None, rows: int) -> NDArray[np.int64]:
        name = kinds.show_path(self.path)
        if found is None:
            msg = f"the rows lack the field {name}, which version_key names: write the policy's version there"
            raise KeyMissingError(msg)
        if found.dtype.is_floating_point or found.dtype.is_complex or found.numel() != rows:
            msg = f"{name} must hold one integer for each of {rows} rows, got {found.dtype} {list(found.shape)}"
            raise SchemaError(msg)
        return found.detach().reshape(-1).to("cpu", torch.int64).numpy()

    def changed(self, store: Store, slots: Tensor, paths: tuple[Any, ...] | None, found: Any) -> None:  # noqa: ARG002
        """Read versions from the storage again if they were edited."""
        if paths is None or self.path in paths:
            self._runs = None

    def plan_move(self, store: Store, slots: Tensor) -> Callable[[], None]:  # noqa: ARG002
        """Read versions from the storage again after the move."""
        return partial(self.reread, store)

    def reread(self, store: Store) -> None:  # noqa: ARG002
        """Read versions from the storage again before the next draw."""
        self._runs = None

    cleared = replaced = reread

    def at(self, storage: Storage, slots: Tensor) -> NDArray[np.int64]:
        """Return the versions of rows, int64 `[n]`; they are read from the storage."""
        return self._checked(storage.scores_at(slots, self.path), slots.shape[0])

    def recent(self, store: Store, view: View, max_age: int) -> Recent:
        """Return the rows that may be drawn and are young enough: a version of at least the newest less `max_age`."""
        runs, first = self._present(store)
        return Recent(*runs.recent(store.ring.rows, max_age), first, view.capacity, view.starts)

    def newest(self, store: Store) -> int:
        """Return the largest version of the rows present, of which there are some."""
        return self._present(store)[0].newest

    def _present(self, store: Store) -> tuple[Runs, int]:
        """Return the runs of the rows present, and the slot of the first; rows written meanwhile are read."""
        ring, written = store.ring, store.counts.written
        rows, capacity, runs = ring.rows, ring.capacity, self._runs
        new = written - self._written
        first = ring.cursor if rows == capacity else 0
        if runs is None or new >= rows or (new and not ring.counts.in_order):
            runs, new = Runs(), rows
        if new:
            slots = Run((first + rows - new) % capacity, new, capacity).slots(ring.device)
            runs.record(self.at(store.storage, slots))
        self._runs, self._written = runs, written
        runs.forget(rows)
        return runs, first


def check_versions(writer: Writer, versions: Versions | None) -> None:
    """Check that a writer keeps rows in the order of time, where there is a `version_key`.

    Raises:
        OptionError: naming it.
    """
    if versions is not None and not writer.in_order:
        msg = (
            f"{type(writer).__name__} does not keep rows in the order in which they came, which version_key needs: use "
            "RoundRobinWriter"
        )
        raise OptionError(msg)


def check_age(versions: Versions | None, sampler: Sampler, max_age: Any, *, prefetch: bool) -> int:
    """Return a `max_age` that the buffer can keep to.

    Raises:
        OptionError: if there is no `version_key`, batches are prefetched, or something else says which rows are drawn.
    """
    age = check_integer("max_age", max_age, 0, OptionError)
    if versions is None:
        raise OptionError(no_versions(max_age))
    if prefetch:
        msg = f"max_age={max_age} is that of the moment, and batches are prefetched: make the buffer without prefetch"
        raise OptionError(msg)
    if type(sampler) is not RandomSampler and not sampler.by_age:
        msg = (
            f"max_age={max_age} is available with RandomSampler, StalenessAwareSampler and PromptGroupSampler, this "
            f"buffer has {sampler!r}"
        )
        raise OptionError(msg)
    return age


def no_versions(max_age: int) -> str:
    """Return the message that a buffer keeps no versions."""
    return f"max_age={max_age} needs to know the versions of rows: make the buffer with version_key='...'"
