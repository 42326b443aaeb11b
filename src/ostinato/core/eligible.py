"""Rows that may be drawn, where not all of a buffer may be, and the slots of the others that new rows take first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch

from ostinato.core.records import Picks, Run

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.episodes.table import Starts
    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring

EligibleRows: TypeAlias = "Starts | Eligible | Recent"
"""The rows that may be drawn, where these are only some: those that can start a window, that are left, or young."""


def slots_of(placement: Placement) -> NDArray[np.int64]:
    """Return the slots of a placement, int64 `[n]`, each once; those of a `Picks` ascending."""
    slots = placement.slots_written().cpu().numpy()
    return slots if isinstance(placement, Run) else np.unique(slots)


def grown(array: NDArray[Any], rows: int, fill: int = 0) -> NDArray[Any]:
    """Return an array with an item for each of `rows` slots: the one given, or a copy with `fill` in new items.

    The size doubles, since a list storage may have no bound.
    """
    more = rows - array.size
    return array if more <= 0 else np.concatenate((array, np.full(max(more, array.size), fill, array.dtype)))


@final
class FreeSlots:
    """Slots of rows that have left, in the order in which they left: new rows are written there first.

    Memory: about 150 bytes for each free slot.
    """

    def __init__(self) -> None:
        self._slots: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Free slots."""
        return len(self._slots)

    def add(self, slots: NDArray[np.int64]) -> None:
        """Add slots; those that are free already keep their place."""
        self._slots.update(dict.fromkeys(slots.tolist()))

    def discard(self, slots: NDArray[np.int64]) -> None:
        """Remove slots that were written."""
        for slot in slots.tolist() if self._slots else ():
            self._slots.pop(slot, None)

    def first(self, count: int) -> NDArray[np.int64]:
        """Return the next slots to be written, at most `count`."""
        return np.fromiter(islice(self._slots, count), np.int64)

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which slots are free, bool `[n]`."""
        return np.fromiter((slot in self._slots for slot in slots.tolist()), np.bool_, slots.size)

    def place(self, rows: int, ring: Ring) -> Picks | None:
        """Return free slots, then those from the cursor on; None if there are none of the first."""
        capacity = ring.capacity
        if not self._slots or rows >= capacity:
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


@final
class Eligible:
    """The rows that may be drawn, as a counted set with rank and select; samplers get it as `View.starts`.

    A slot that was removed takes its rank with it: the row of the last rank gets it. Memory: 16 bytes for each slot,
    and those of the free slots.

    Args:
        rows: the slots `[0, rows)` are in the set at first.
    """

    need = 1
    """Rows of a window, as for `Starts`: single rows."""

    def __init__(self, rows: int = 0) -> None:
        self.free = FreeSlots()
        """Slots of deleted rows."""
        self.rows = rows
        """Rows in the set."""
        self._order = np.arange(rows)  # the slot of each rank, then others
        self._rank = np.arange(rows)  # of each slot, -1 for those that are not in the set

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self._order.nbytes + self._rank.nbytes)

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which slots, of those that held rows, are in the set, bool `[n]`."""
        return self._rank[slots] >= 0

    def include(self, slots: NDArray[np.int64]) -> None:
        """Add slots, each once; those in the set keep their ranks. Cost: O(n)."""
        if not slots.size:
            return
        rows = int(slots.max()) + 1
        if rows > self._rank.size:
            self._order, self._rank = grown(self._order, rows), grown(self._rank, rows, -1)
        slots = slots[self._rank[slots] < 0]
        end = self.rows + slots.size
        self._order[self.rows : end] = slots
        self._rank[slots] = np.arange(self.rows, end)
        self.rows = end

    def exclude(self, slots: NDArray[np.int64]) -> None:
        """Remove slots, each once; those that are not in the set are left out. Cost: O(n)."""
        slots = slots[self._rank[slots] >= 0]
        if not slots.size:
            return
        end = self.rows - slots.size
        ranks = self._rank[slots]
        self._rank[slots] = -1
        tail = self._order[end : self.rows]
        movers, gaps = tail[self._rank[tail] >= 0], ranks[ranks < end]
        self._order[gaps] = movers
        self._rank[movers] = gaps
        self.rows = end

    def clear(self) -> None:
        """Remove all slots."""
        self._rank.fill(-1)
        self.rows = 0

    def delete(self, slots: NDArray[np.int64]) -> None:
        """Remove rows that were deleted, and free their slots."""
        self.exclude(slots)
        self.free.add(slots)

    def record(self, placement: Placement) -> None:
        """Add rows just written. Cost: O(n)."""
        slots = slots_of(placement)
        if slots.size and (self.free or int(slots.max()) >= self.rows):
            self.include(slots)
            self.free.discard(slots)

    def order(self) -> Tensor:
        """Return the slots in the set by rank, int64 `[rows]`. Copy."""
        return torch.from_numpy(self._order[: self.rows].copy())

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

    # -- as `View.starts` ----------------------------------------------------------------------------------------------

    def draw(self, randoms: Tensor) -> Tensor:
        """Draw rows, each with the same probability. Cost: O(n); on other devices than the CPU a copy to the host.

        Args:
            randoms: int64 `[n]`, uniform in `[0, 2**63)`: of R rows, that of rank `randoms * R >> 63` is drawn.

        Returns:
            Slots, int64 `[n]` on the device of `randoms`.
        """
        return self.at(scale(randoms, self.rows))

    def select(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of these ranks, int64 `[n]`."""
        return self._order.take(ranks)

    def at(self, ranks: Tensor) -> Tensor:
        """Return the slots of these ranks, int64 `[n]` on their device."""
        if ranks.is_cpu:
            return torch.from_numpy(self._order.take(ranks.numpy()))
        return torch.from_numpy(self._order.take(ranks.cpu().numpy())).to(ranks.device)

    def allowed(self, slots: Tensor) -> Tensor:
        """Return which slots, of those that held rows, are in the set: bool `[n]` on their device."""
        return torch.from_numpy(self.has(slots.cpu().numpy())).to(slots.device)


class Recent(NamedTuple):
    """Rows of a ring that are young enough to be drawn; samplers get them as `View.starts`.

    Positions count rows from the oldest one: the young rows are at `[starts[i], starts[i] + lengths[i])`.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    first: int
    """Slot of the oldest row."""
    capacity: int
    """Slots of the ring."""
    among: EligibleRows | None
    """Rows that may be drawn, young or not, which `allowed` looks at; None for all."""

    @property
    def need(self) -> int:
        """Rows of a window, as for `Starts`: single rows."""
        return 1

    @property
    def rows(self) -> int:
        """How many rows are young enough."""
        return int(self.lengths.sum())

    def at(self, ranks: Tensor) -> Tensor:
        """Return the slots of the young rows of these ranks, int64 `[n]` on their device. Cost: O(n log runs)."""
        if self.starts.size == 1:
            positions = ranks + int(self.starts[0])
        else:
            ends, numbers = np.cumsum(self.lengths), ranks.cpu().numpy()
            shifts = self.starts - (ends - self.lengths)
            positions = torch.from_numpy(numbers + shifts[np.searchsorted(ends, numbers, side="right")]).to(
                ranks.device
            )
        return (positions + self.first).remainder_(self.capacity)

    def draw(self, randoms: Tensor) -> Tensor:
        """Draw young rows, each with the same probability; see `Eligible.draw`."""
        return self.at(scale(randoms, self.rows))

    def allowed(self, slots: Tensor) -> Tensor:
        """Return which slots may be drawn and are young enough: bool `[n]` on their device. Cost: O(n log runs)."""
        positions = (slots - self.first).remainder_(self.capacity).cpu().numpy()
        run = np.searchsorted(self.starts, positions, side="right") - 1
        young = (run >= 0) & (positions < (self.starts + self.lengths)[run])
        found = torch.from_numpy(young).to(slots.device)
        return found if self.among is None else found & self.among.allowed(slots)


def scale(randoms: Tensor, spans: Tensor | int) -> Tensor:
    """Return `randoms * spans >> 63`, exact: int64 in [0, 2**63) times integers in [1, 2**31)."""
    high, low = randoms >> 31, randoms & (2**31 - 1)
    return (high * spans + (low * spans >> 31)) >> 32
