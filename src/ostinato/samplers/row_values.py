"""The values of one stored field for each row, kept up to date for samplers that draw by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch

from ostinato.core.records import ring_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.records import View
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Path
    from ostinato.core.shared_ring import SharedRing

    Values: TypeAlias = "Tensor | list[Any]"


@final
class RowValues:
    """One stored field as a tensor with one value for each row. A draw reads the rows written since the last one.

    Not part of a state: a copy, and a sampler that was loaded, read all rows again.

    Args:
        path: the field.
        convert: makes a tensor `[n]` of what the storage returns for `n` rows, and checks it.
    """

    def __init__(self, path: Path, convert: Callable[[Values], Tensor]) -> None:
        self.path = path
        self.values = torch.empty(0, dtype=torch.int64, device="cpu")
        """`[rows]`, as of the last `update`."""
        self._convert = convert
        self._ring: Ring | SharedRing | None = None
        self._serial = self._rows = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the field alone."""
        return {"path": self.path, "convert": self._convert}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read all rows with the next draw."""
        RowValues.__init__(self, state["path"], state["convert"])

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.nbytes

    def forget(self) -> None:
        """Read all rows with the next draw."""
        self._ring = None

    def update(self, view: View) -> bool:
        """Read the rows written or edited since the last call; return whether there are any.

        Raises:
            KeyMissingError: if rows lack the field.
            KindError: if the storage has no fields.
        """
        slots = None
        if view.ring is self._ring and view.rows >= self._rows:
            slots = changed_slots(view, self._serial)
            if not slots.shape[0]:
                return False
        with torch.inference_mode(mode=False):  # changed in place in any mode
            self._read(view, slots)
        self._ring, self._serial, self._rows = view.ring, view.ring.written, view.rows
        return True

    def _read(self, view: View, slots: Tensor | None) -> None:
        """Read the rows at `slots`, or all rows."""
        if slots is None:
            self.values = self._convert(view.read(torch.arange(view.rows, device=view.device), self.path))
            return
        found = self._convert(view.read(slots, self.path))
        if self.values.shape[0] < view.rows:
            more = view.rows - self.values.shape[0]
            self.values = torch.cat((self.values, self.values.new_zeros(more)))
        self.values[slots] = found.to(self.values.dtype)


def changed_slots(view: View, serial: int) -> Tensor:
    """Return the slots written or edited after the row with a serial number, int64 `[n]`.

    Cost: O(n) if they were written in ring order, else O(rows).
    """
    ring = cast("Ring", view.ring)  # buffers shared by processes have other samplers
    count = ring.written - serial
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device=view.device)
    if count < view.rows:  # if these rows account for all serial numbers since then, there was no other change
        slots = ring_range((view.cursor - count) % view.capacity, count, view.capacity, view.device)
        if int(slots.max()) < view.rows and bool((ring.generations(slots) > serial).all()):
            return slots
    slots = torch.arange(view.rows, device=view.device)
    return slots[ring.changed(slots, serial)]
