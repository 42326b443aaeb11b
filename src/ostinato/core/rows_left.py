"""Rows that have left a buffer: the slots that are free, in their order, and the rows that remain to be drawn."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from ostinato.core.records import Picks, Run

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring

__all__ = ["FreeSlots", "RowsLeft", "SlotSet", "slots_of"]


def slots_of(placement: Placement) -> NDArray[np.int64]:
    """Return the slots of a placement, int64 `[n]`, each once; those of a `Picks` ascending."""
    return placement.slots().numpy() if isinstance(placement, Run) else np.unique(placement.slots.cpu().numpy())


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

    def clear(self) -> None:
        """Remove all slots."""
        self._slots.clear()

    def state(self) -> Tensor:
        """Return the slots in their order, int64 `[n]`. Copy."""
        return torch.tensor(list(self._slots), dtype=torch.int64, device="cpu")

    def load(self, slots: Tensor) -> None:
        """Restore what `state` returned."""
        self._slots = OrderedDict.fromkeys(slots.tolist())


@final
class SlotSet:
    """A set of slots as an array, to draw from at random. Memory: 16 bytes for each slot of the buffer."""

    def __init__(self) -> None:
        self.count = 0
        """Slots in the set: the first ones of `order`."""
        self.order: NDArray[np.int64] = np.zeros(0, np.int64)
        self._position: NDArray[np.int64] = np.zeros(0, np.int64)  # of each slot in the order, -1 for others

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.order.nbytes + self._position.nbytes)

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which slots, below the rows reserved, are in the set, bool `[n]`."""
        return self._position[slots] >= 0

    def fill(self, rows: int) -> None:
        """Make it the set of the slots `[0, rows)`. Cost: O(rows)."""
        self.order, self._position, self.count = np.arange(rows), np.arange(rows), rows

    def insert(self, slots: NDArray[np.int64]) -> None:
        """Add slots that are not in the set, each once."""
        end = self.count + slots.size
        self.order[self.count : end] = slots
        self._position[slots] = np.arange(self.count, end)
        self.count = end

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Remove slots that are in the set, each once; slots at the end of the order fill the gaps."""
        if not slots.size:
            return
        end = self.count - slots.size
        places = self._position[slots]
        self._position[slots] = -1
        tail = self.order[end : self.count]
        movers, gaps = tail[self._position[tail] >= 0], places[places < end]
        self.order[gaps] = movers
        self._position[movers] = gaps
        self.count = end

    def reserve(self, rows: int) -> None:
        """Allocate for at least `rows` slots; the size doubles, since a list storage may have no bound."""
        held = self.order.size
        if rows > held:
            more = max(rows, 2 * held) - held
            self._position = np.concatenate((self._position, np.full(more, -1, np.int64)))
            self.order = np.concatenate((self.order, np.zeros(more, np.int64)))

    def clear(self) -> None:
        """Remove all slots."""
        self._position.fill(-1)
        self.count = 0


@final
class RowsLeft:
    """The rows of a buffer from which some were deleted: what samplers see as `View.starts`, and the free slots.

    Deleted rows have the generation 0. Memory: 16 bytes for each slot, and those of the free slots.

    Args:
        rows: slots that held rows before.
    """

    need = 1
    """Rows of a window, as for `Starts`: single rows."""

    def __init__(self, rows: int) -> None:
        self.free = FreeSlots()
        self._set = SlotSet()
        self._set.fill(rows)

    @property
    def rows(self) -> int:
        """Rows present."""
        return self._set.count

    def delete(self, slots: NDArray[np.int64]) -> None:
        """Remove rows that are present, each once."""
        self._set.remove(slots)
        self.free.add(slots)

    def record(self, placement: Placement) -> None:
        """Add rows just written. Cost: O(n)."""
        slots = slots_of(placement)
        if slots.size and (self.free or int(slots.max()) >= self._set.count):
            self._set.reserve(int(slots.max()) + 1)
            self._set.insert(slots[~self._set.has(slots)])
            self.free.discard(slots)

    def state(self) -> dict[str, Tensor]:
        """Return the free slots in their order, and the rows present in the order of ranks, int64 each. Copy."""
        return {"free": self.free.state(), "order": torch.from_numpy(self._set.order[: self._set.count].copy())}

    @classmethod
    def of_state(cls, state: dict[str, Tensor]) -> RowsLeft:
        """Return what `state` was of."""
        made, order, free = cls(0), state["order"].cpu(), state["free"].cpu()
        made._set.reserve(order.numel() + free.numel())
        made._set.insert(order.numpy())
        made.free.load(free)
        return made

    # -- as `View.starts` ----------------------------------------------------------------------------------------------

    def draw(self, randoms: Tensor) -> Tensor:
        """Draw rows, each with the same probability. Cost: O(n); on other devices than the CPU a copy to the host.

        Args:
            randoms: int64 `[n]`, uniform in `[0, 2**63)`: of R rows, that of rank `randoms * R >> 63` is drawn.

        Returns:
            Slots, int64 `[n]` on the device of `randoms`.
        """
        count, numbers = self._set.count, randoms.cpu().numpy()
        high, low = numbers >> 31, numbers & (2**31 - 1)
        ranks = (high * count + (low * count >> 31)) >> 32  # the product of 63 and 31 bits in two parts
        return self.at(torch.from_numpy(ranks).to(randoms.device))

    def at(self, ranks: Tensor) -> Tensor:
        """Return the slots of these ranks among the rows present, int64 `[n]` on their device."""
        if ranks.is_cpu:
            return torch.from_numpy(self._set.order.take(ranks.numpy()))
        return torch.from_numpy(self._set.order[ranks.cpu().numpy()]).to(ranks.device)

    def allowed(self, slots: Tensor) -> Tensor:
        """Return which slots, of those that held rows, hold rows now: bool `[n]` on their device."""
        return torch.from_numpy(self._set.has(slots.cpu().numpy())).to(slots.device)
