"""Removers: which row a new one replaces when the buffer is full, apart from what the sampler draws."""

from __future__ import annotations

from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import numpy as np
import torch

from ostinato.buffers.observer import Observer
from ostinato.buffers.updates import as_sampler, priorities_of_rows
from ostinato.core.eligible import DELETED, USED_UP, Eligible, slots_of
from ostinato.core.options import check_choice
from ostinato.core.rank_order import RankOrder
from ostinato.core.records import Picks
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.buffers.observer import Incoming
    from ostinato.buffers.policy_versions import Versions
    from ostinato.buffers.store import Store
    from ostinato.core.rank_order import ReadKeys
    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.writers import Writer

RemoverName: TypeAlias = Literal["fifo", "lifo", "lowest_priority", "oldest_version"]
_NAMES = ("fifo", "lifo", "lowest_priority", "oldest_version")


@final
class Remover(Observer):
    """Chooses the slots of new rows: free slots, then those never written, then those of the rows that it removes.

    Rows of a batch are placed one after the other, as if they were written one by one.
    Deleted rows are recorded here, too.

    Args:
        name: "fifo" removes the oldest row, "lifo" the newest, "lowest_priority" that of the least priority,
            "oldest_version" that of the least version; of equal ones the oldest.
        implied: whether the buffer has it only since rows were deleted: the ring then has no order any more.
    """

    def __init__(self, name: RemoverName, *, implied: bool = False) -> None:
        self.name = name
        self.implied = implied
        self.eligible: Eligible | None = None
        """Rows that were not deleted, and free slots; None before the first, and with a sampler that keeps them."""
        self._order = RankOrder(rising=name == "fifo")
        self._rows = 0  # rows that the order knows of
        self._writes = 0  # of rows that were placed one by one, since `_turns` was ended
        self._turns: Tensor | None = None

    def __repr__(self) -> str:
        """Show the name."""
        return f"Remover({self.name!r})"

    @property
    def keeps_order(self) -> bool:
        """Whether no row leaves from between others, and none was deleted: the oldest are replaced."""
        return self.name == "fifo" and not self.implied and self.eligible is None

    def direct(self, store: Store) -> bool:
        """Whether the slots of new rows are known: those of the ring, or each replaces a row in a fixed order."""
        return (self.keeps_order and store.ring.counts.in_order) or self._replaces_in_turn(store)

    def _replaces_in_turn(self, store: Store) -> bool:
        """Whether rows of native calls take the slots of `turns`: in a full buffer without free slots."""
        ring, eligible = store.ring, store.eligible
        full = ring.rows == ring.capacity and bool(ring.arrays_of_all()) and not (eligible and eligible.free)
        due = self._turns is not None or self._writes >= _writes_before(ring)
        return full and due and self.name in {"fifo", "lifo"}

    def turns(self, store: Store) -> Tensor | None:
        """Return the slots that rows replace in turn: of "fifo" all slots, by age, of "lifo" that of the newest row.

        Cost: O(rows), once a deletion or a write in Python has ended the order; so there is none for some writes then.
        """
        ring = store.ring
        if self._turns is None and self._replaces_in_turn(store):
            ages = ring.arrays_of_all()[-1].numpy()
            order = np.argsort(ages, kind="stable") if self.name == "fifo" else ages.argmax(0, keepdims=True)
            self._turns, ring.counts.turn = torch.from_numpy(order), 0
        return self._turns

    def _end_turns(self, store: Store) -> None:
        """Let rows be placed one by one from now on."""
        self._writes += 1
        if self._turns is not None:
            store.parts_changed()
            self.reread(store)

    def place(self, store: Store, incoming: Incoming) -> Picks | None:
        """Return the slots of new rows; None leaves rows to the writer that fill the ring in its order."""
        self._end_turns(store)
        ring, rows, eligible = store.ring, incoming.rows, store.eligible
        capacity, known = ring.capacity, ring.rows
        first = np.zeros(0, np.int64) if eligible is None else eligible.free.first(rows)
        unused = min(rows - first.size, capacity - known)
        plain = not first.size and ring.counts.in_order
        if plain and (self.name == "fifo" or (unused == rows and ring.cursor == known)):
            return None
        slots = np.concatenate((first, np.arange(known, known + unused)))
        owners = np.arange(slots.size)
        if slots.size < rows:
            self._add_unknown(ring, eligible)
            slots, owners = self._replace(rows, slots, ring, self._keys_of(store, incoming), partial(self._read, store))
        kept = np.full(rows, -1, np.int64)
        kept[owners] = slots
        full = known + unused == capacity
        cursor = (int(slots[-1]) + 1) % capacity if full else known + unused
        return Picks(torch.from_numpy(slots), torch.from_numpy(owners), torch.from_numpy(kept), cursor)

    def _keys_of(self, store: Store, incoming: Incoming) -> NDArray[np.float64]:
        """Return the keys of new rows, by which they are ordered, float64 `[rows]`."""
        rows, first = incoming.rows, store.ring.written + 1
        if self.name == "lifo":
            return -np.arange(first, first + rows, dtype=np.float64)
        if self.name == "lowest_priority":
            own, sampler = store.own, as_sampler(store.own.sampler)
            path, default = own.priority_path if incoming.ranked else None, sampler.default_priority
            given = priorities_of_rows(incoming.data, path, rows, sampler, store.ring.device)
            return np.full(rows, default) if given is None else given.cpu().numpy()
        if self.name == "oldest_version" and store.versions is not None:
            return store.versions.read(store, incoming).astype(np.float64)
        return np.zeros(rows)

    def _read(self, store: Store, slots: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the keys of rows present, and their arrivals."""
        where = torch.from_numpy(slots).to(store.ring.device)
        ages: NDArray[np.int64] = store.ring.arrivals(where).cpu().numpy()
        if self.name == "lifo":
            return -ages.astype(np.float64), ages
        if self.name == "lowest_priority":
            return as_sampler(store.own.sampler).priorities_at(where, store.own.view()).cpu().numpy(), ages
        if self.name == "oldest_version" and store.versions is not None:
            return store.versions.at(store.storage, where).astype(np.float64), ages
        return np.zeros(slots.size), ages

    def _replace(
        self, rows: int, slots: NDArray[np.int64], ring: Ring, keys: NDArray[np.float64], read: ReadKeys
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the slots that the rows of a batch end in, and these rows, ascending.

        Args:
            rows: of the batch.
            slots: of its first rows, which replace none.
            ring: of the buffer.
            keys: of its rows.
            read: as for `place`.
        """
        old = self._order.first(rows - slots.size, read)
        if slots.size + old.size == rows:
            ((last, _),) = self._order.ranks(old[-1:])
            if last <= keys[: rows - 1].min(initial=np.inf):
                return np.concatenate((slots, old)), np.arange(rows)  # every row replaces one that was there before
        ranks = self._order.ranks(old)
        owner = dict(zip(slots.tolist(), range(slots.size), strict=True))
        values, serial, at = keys.tolist(), ring.written + 1, 0
        heap = [(values[i], serial + i, slot) for slot, i in owner.items()]
        heapify(heap)
        before = [(*rank, slot) for rank, slot in zip(ranks, old.tolist(), strict=True)]
        for i in range(slots.size, rows):
            if at < len(before) and not (heap and heap[0] < before[at]):
                slot, at = before[at][2], at + 1
            else:
                slot = heappop(heap)[2]
            owner[slot] = i
            heappush(heap, (values[i], serial + i, slot))
        ends, owners = np.array(list(owner), np.int64), np.array(list(owner.values()), np.int64)
        order = owners.argsort()
        return ends[order], owners[order]

    def _add_unknown(self, ring: Ring, eligible: Eligible | None) -> None:
        """Add rows that were written while none had to be removed."""
        if self._rows < ring.rows:
            self._order.include(np.arange(self._rows, ring.rows))
            self._rows = ring.rows
            if eligible is not None:
                self._order.exclude(eligible.free.state().numpy(), DELETED)

    def written(self, store: Store, placement: Placement, found: Any) -> None:  # noqa: ARG002
        """Record new rows. Cost: O(n), and O(log rows) for each later."""
        if not self._writes % _writes_before(store.ring):
            store.parts_changed()  # the next calls may be native
        if self.eligible is not None:
            self.eligible.record(placement)
        if self._rows:  # else nothing was removed yet
            slots = slots_of(placement)
            self._order.include(slots)
            self._rows = max(self._rows, int(slots.max(initial=-1)) + 1)

    def changed(self, store: Store, slots: Tensor, paths: tuple[Any, ...] | None, found: Any) -> None:  # noqa: ARG002
        """Read the keys of edited rows again."""
        self.ranked(slots if self.eligible is None else slots[self.eligible.allowed(slots)])

    def ranked(self, slots: Tensor) -> None:
        """Read priorities or versions of rows again before the next row is removed; arrivals do not change."""
        if self._rows and self.name in {"lowest_priority", "oldest_version"}:
            changed = slots.reshape(-1).cpu().numpy()
            self._order.include(changed[(changed >= 0) & (changed < self._rows)])

    def removed(self, store: Store, slots: Tensor) -> None:
        """Free the slots of rows that were deleted."""
        gone: NDArray[np.int64] = slots.cpu().numpy()
        self._end_turns(store)
        if not store.own.sampler.leaves:
            self.eligible = self.eligible or Eligible(store.ring.rows)
            self.eligible.delete(gone)
        self._order.exclude(gone, DELETED)

    def used_up(self, slots: NDArray[np.int64]) -> None:
        """Record rows that the sampler let leave."""
        self._order.exclude(slots, USED_UP)

    def reread(self, store: Store) -> None:  # noqa: ARG002
        """Read all rows again before the next one is removed."""
        self._order.clear()
        self._rows = self._writes = 0
        self._turns = None


def _writes_before(ring: Ring) -> int:
    """Return how many writes in Python cost as much as sorting all rows by age."""
    return 4 + (ring.capacity >> 11)


def make_remover(
    name: Any, storage: Storage, sampler: Sampler, writer: Writer, versions: Versions | None, *, tracked: bool
) -> Remover | None:
    """Return the remover of a buffer; None for that of the writer.

    Args:
        name: of the remover; None is that of the writer.
        storage: of the buffer.
        sampler: of the buffer.
        writer: of the buffer.
        versions: of the rows.
        tracked: whether the buffer has episodes or windows.

    Raises:
        OptionError: for another name, or if parts of the buffer do not go with it.
    """
    if name is None:
        return None
    check_choice("remover", name, _NAMES)
    if not (writer.in_order and writer.mutable):
        msg = f"{type(writer).__name__} chooses the rows to replace itself, got remover={name!r}: use RoundRobinWriter"
        raise OptionError(msg)
    if name == "fifo" and (storage.ndim > 1 or storage.ring_only or storage.budget or tracked):
        return None  # ring order, which is all that these have
    if name == "lowest_priority" and not sampler.prioritized:
        msg = f"remover='lowest_priority' needs a prioritized sampler, got {sampler!r}: use PrioritizedSampler"
        raise OptionError(msg)
    if name == "oldest_version" and versions is None:
        msg = "remover='oldest_version' needs to know the versions of rows: give the buffer version_key='...'"
        raise OptionError(msg)
    if sampler.counting and getattr(sampler, "in_order", False) and name != "fifo":
        msg = f"{sampler!r} delivers rows in the order of writing, got remover={name!r}: leave the remover out"
        raise OptionError(msg)
    _check_parts(f"remover={name!r}", storage, tracked=tracked)
    return Remover(name)


def check_deletable(storage: Storage, writer: Writer, *, tracked: bool) -> None:
    """Check that single rows of a buffer can be deleted.

    Raises:
        OptionError: if rows must stay in ring order, or belong to episodes.
    """
    if not (writer.in_order and writer.mutable):
        msg = f"delete() frees slots, and {type(writer).__name__} chooses slots itself: use RoundRobinWriter"
        raise OptionError(msg)
    _check_parts("delete()", storage, tracked=tracked)


def _check_parts(what: str, storage: Storage, *, tracked: bool) -> None:
    problem = ""
    if storage.ndim > 1:
        problem = f"with ndim={storage.ndim} a step of all environments is written at a time: use ndim=1"
    elif storage.ring_only:
        problem = "single_copy keeps rows in ring order: leave it out"
    elif storage.budget:
        problem = "max_bytes removes the oldest rows: leave it out"
    elif tracked:
        problem = (
            "the buffer draws windows or episodes, which would span the gap: use it without sample_unit, episodes and "
            "slice samplers, or mark rows with Episodes(mask_key=...)"
        )
    if problem:
        msg = f"{what} takes single rows out of a buffer: {problem}"
        raise OptionError(msg)
