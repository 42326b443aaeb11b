"""The rows that may be drawn, where not all of a buffer may be, and why; the slots of the others, which are free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.records import Picks, Run

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring

DELETED, USED_UP, _NO_ROW = 1, 2, 4
"""Why a row may not be drawn, one bit each: it was deleted, it was drawn as often as it may be, or there is none."""
ANY = DELETED | USED_UP | _NO_ROW


class EligibleRows(ABC):
    """The rows that may be drawn, where these are only some: every sampler draws from them, as `View.starts`.

    The rows have ranks, in an order of their own: one that is drawn has a rank uniform in `[0, rows)`. Which rows are
    not in it, and why, is kept where it is cheapest to know: a byte for each slot (`Eligible`: deleted, used up), the
    episodes (`Starts`: masked, or too few rows after it), the order of versions (`Recent`: too old).
    """

    rows: int
    """Number of rows that may be drawn."""
    need: int = 1
    """Rows of the window that each of them can start: 1 for single rows."""

    @abstractmethod
    def at(self, ranks: Tensor) -> Tensor:
        """Return the slots of these ranks, int64 `[n]` on their device."""

    @abstractmethod
    def allowed(self, slots: Tensor) -> Tensor:
        """Return which slots, of those that held rows, may be drawn: bool `[n]` on their device."""

    def draw(self, randoms: Tensor) -> Tensor:
        """Draw rows, each with the same probability.

        Args:
            randoms: int64 `[n]`, uniform in `[0, 2**63)`: of R rows, that of rank `randoms * R >> 63` is drawn.

        Returns:
            Slots, int64 `[n]` on the device of `randoms`.
        """
        return self.at(scale(randoms, self.rows))

    def pick(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw `count` rows, each with the same probability: slots, int64 `[count]` on the device."""
        return self.at(torch.randint(0, self.rows, (count,), generator=generator, device=device))

    def why_none(self, rows: int) -> str:
        """Return why none of the `rows` rows of a buffer may be drawn, where `self.rows` is 0."""
        return f"Cannot sample from an empty storage: all {rows} rows were deleted: add rows first"


def slots_of(placement: Placement) -> NDArray[np.int64]:
    """Return the slots of a placement, int64 `[n]`, each once; those of a `Picks` ascending."""
    slots = placement.slots_written().cpu().numpy()
    return slots if isinstance(placement, Run) else each_once(slots)


def each_once(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return slots ascending, each once: `np.unique`, in a tenth of its time for hundreds of slots."""
    slots = np.sort(slots)
    differs = slots[1:] != slots[:-1]
    return slots if differs.all() else slots[np.concatenate(([True], differs))]


def grown(array: NDArray[Any], rows: int, fill: int = 0) -> NDArray[Any]:
    """Return an array with an item for each of `rows` slots: the one given, or a copy with `fill` in new items.

    The size doubles, since a list storage may have no bound.
    """
    more = rows - array.size
    return array if more <= 0 else np.concatenate((array, np.full(max(more, array.size), fill, array.dtype)))


@final
class FreeSlots(OrderedDict[int, None]):
    """Slots of rows that have left, in the order in which they left: new rows are written there first.

    Memory: about 150 bytes for each free slot.
    """

    def add(self, slots: NDArray[np.int64]) -> None:
        """Add slots; those that are free already keep their place."""
        self.update(dict.fromkeys(slots.tolist()))

    def discard(self, slots: NDArray[np.int64]) -> None:
        """Remove slots that were written."""
        for slot in slots.tolist():
            self.pop(slot, None)

    def first(self, count: int) -> NDArray[np.int64]:
        """Return the next slots to be written, at most `count`."""
        return np.fromiter(islice(self, count), np.int64)

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which slots are free, bool `[n]`."""
        return np.fromiter((slot in self for slot in slots.tolist()), np.bool_, slots.size)

    def place(self, rows: int, ring: Ring) -> Picks | None:
        """Return free slots, then those from the cursor on; None if there are none of the first."""
        capacity = ring.capacity
        if not self or rows >= capacity:
            return None
        free = self.first(rows)
        cursor, more = ring.cursor, rows - free.size
        if more:
            ahead = (cursor + np.arange(rows)) % capacity
            steps = np.flatnonzero(~np.isin(ahead, free))[:more]
            free, cursor = np.concatenate((free, ahead[steps])), int(cursor + steps[-1] + 1) % capacity
        slots = torch.from_numpy(free)
        return Picks(slots, torch.arange(rows, device="cpu"), slots, cursor)

    def state(self) -> Tensor:
        """Return the slots in their order, int64 `[n]`. Copy."""
        return torch.from_numpy(self.first(len(self)))


class Eligible(EligibleRows):
    """One byte of reasons for each slot, a counted set of the slots without any, and the free slots of the others.

    A slot that is excluded takes its rank with it: the row of the last rank gets it. Memory: 17 bytes for each slot,
    and those of the free slots.

    Args:
        rows: the slots `[0, rows)` are in the set at first.
        ranked: whether the slots have ranks, which `at` and `pick` need; else it takes 1 byte for each slot.
    """

    def __init__(self, rows: int = 0, *, ranked: bool = True) -> None:
        self.free = FreeSlots()
        """Slots of rows that have left."""
        self.rows = rows
        """Rows in the set."""
        self._ranked = ranked
        self._reasons: NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self._order = np.arange(rows)  # the slot of each rank, then others
        self._rank = np.arange(rows)  # of each slot in the set

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(int(array.nbytes) for array in vars(self).values() if isinstance(array, np.ndarray))

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which slots, of those that held rows, are in the set: bool `[n]`."""
        found: NDArray[np.bool_] = self._reasons[slots] == 0
        return found

    def include(self, slots: NDArray[np.int64], reason: int = ANY) -> None:
        """Remove a reason of slots, each once; by default all, as of rows just written. They are not free then.

        Slots without other reasons get the last ranks; those that were in the set keep theirs. Cost: O(n).
        """
        if not slots.size:
            return
        if self.free:
            self.free.discard(slots)
        try:
            before = self._reasons[slots]
        except IndexError:  # more slots than before; to look first would take longer
            self._reserve(int(slots.max()) + 1)
            before = self._reasons[slots]
        if not np.bitwise_or.reduce(before):
            return
        after = before & (ANY ^ reason)
        self._reasons[slots] = after
        fresh = slots[after < (before > 0)]  # there was a reason, and there is none now
        end = self.rows + fresh.size
        if self._ranked:
            self._order[self.rows : end] = fresh
            self._rank[fresh] = np.arange(self.rows, end)
        self.rows = end

    def exclude(self, slots: NDArray[np.int64], reason: int) -> None:
        """Add a reason to slots, each once. Cost: O(n)."""
        if not slots.size:
            return
        before = self._reasons[slots]
        self._reasons[slots] = before | reason
        gone = slots[before == 0]
        end = self.rows - gone.size
        if self._ranked:
            ranks, tail = self._rank[gone], self._order[end : self.rows]
            movers, gaps = tail[self._reasons[tail] == 0], ranks[ranks < end]
            self._order[gaps] = movers
            self._rank[movers] = gaps
        self.rows = end

    def clear(self) -> None:
        """Forget all rows and free slots."""
        self._reasons.fill(_NO_ROW)
        self.free.clear()
        self.rows = 0

    def _reserve(self, rows: int) -> None:
        """Allocate for at least `rows` slots."""
        self._reasons = grown(self._reasons, rows, _NO_ROW)
        if self._ranked:
            self._order, self._rank = grown(self._order, rows), grown(self._rank, rows)

    def delete(self, slots: NDArray[np.int64]) -> None:
        """Exclude rows that were deleted, and free their slots."""
        self.exclude(slots, DELETED)
        self.free.add(slots)

    def record(self, placement: Placement) -> None:
        """Add rows just written. Cost: O(n)."""
        slots = slots_of(placement)
        if slots.size and (self.free or int(slots.max()) >= self.rows):
            self.include(slots)

    def order(self) -> Tensor:
        """Return the slots in the set by rank, ascending if they have none: int64 `[rows]`. Copy."""
        found = self._order[: self.rows].copy() if self._ranked else np.flatnonzero(self._reasons == 0)
        return torch.from_numpy(found)

    def state(self) -> dict[str, Tensor]:
        """Return the free slots in their order, and the rows present in the order of ranks, int64 each. Copy."""
        return {"free": self.free.state(), "order": self.order()}

    @classmethod
    def of_state(cls, state: dict[str, Tensor]) -> Eligible:
        """Return what `state` was of."""
        made, order, free = cls(), state["order"].cpu().numpy(), state["free"].cpu().numpy()
        made.include(np.concatenate((order, free)))
        made.delete(free)
        return made

    def at(self, ranks: Tensor) -> Tensor:
        """Return the slots of these ranks. Cost: O(n); on other devices than the CPU a copy to the host."""
        if ranks.is_cpu:
            return torch.from_numpy(self._order.take(ranks.numpy()))
        return torch.from_numpy(self._order.take(ranks.cpu().numpy())).to(ranks.device)

    def allowed(self, slots: Tensor) -> Tensor:
        """Return which slots, of those that held rows, are in the set."""
        return torch.from_numpy(self.has(slots.cpu().numpy())).to(slots.device)


@final
class Recent(EligibleRows):
    """Rows of a ring that are not too old to be drawn.

    Positions count rows from the oldest one: the young rows are at `[starts[i], starts[i] + lengths[i])`.

    Args:
        starts: int64 `[n]`.
        lengths: int64 `[n]`.
        first: slot of the oldest row.
        capacity: slots of the ring.
        among: rows that may be drawn, young or not, which `allowed` looks at; None for all.
    """

    def __init__(
        self,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        first: int,
        capacity: int,
        among: EligibleRows | None,
    ) -> None:
        self.rows = int(lengths.sum())
        self._starts, self._lengths, self._first, self._capacity, self._among = starts, lengths, first, capacity, among

    def at(self, ranks: Tensor) -> Tensor:
        """Return the slots of the young rows of these ranks. Cost: O(n log runs)."""
        if self._starts.size == 1:
            positions = ranks + int(self._starts[0])
        else:
            ends, numbers = np.cumsum(self._lengths), ranks.cpu().numpy()
            shifts = self._starts - (ends - self._lengths)
            positions = torch.from_numpy(numbers + shifts[np.searchsorted(ends, numbers, side="right")]).to(
                ranks.device
            )
        return (positions + self._first).remainder_(self._capacity)

    def allowed(self, slots: Tensor) -> Tensor:
        """Return which slots may be drawn and are young enough. Cost: O(n log runs)."""
        positions = (slots - self._first).remainder_(self._capacity).cpu().numpy()
        run = np.searchsorted(self._starts, positions, side="right") - 1
        young = (run >= 0) & (positions < (self._starts + self._lengths)[run])
        found = torch.from_numpy(young).to(slots.device)
        return found if self._among is None else found & self._among.allowed(slots)


def scale(randoms: Tensor, spans: Tensor | int) -> Tensor:
    """Return `randoms * spans >> 63`, exact: int64 in [0, 2**63) times integers in [1, 2**31)."""
    high, low = randoms >> 31, randoms & (2**31 - 1)
    return (high * spans + (low * spans >> 31)) >> 32
