"""Records that cross walls: `Run` and `Picks` (where rows go), `View` and `Draw` (sampling), `Request` (reading)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ostinato.errors import KindError, OptionError, SlotError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.episodes import EpisodeTable, Starts
    from ostinato.core.shared_ring import SharedRing
    from ostinato.core.stamps import Stamps

__all__ = [
    "Draw",
    "Picks",
    "Placement",
    "Request",
    "Run",
    "View",
    "as_slots",
    "check_slots",
    "episodes_of",
    "require_values",
]


class Run(NamedTuple):
    """Rows `skip` to `skip + rows - 1` of a batch go to the slots `(start + i) % capacity`, in order.

    `skip` is not zero only for batches longer than the ring: their first rows would be overwritten by
    their last ones within the same call, so they are never copied.
    """

    start: int
    rows: int
    capacity: int
    skip: int = 0

    def slots(self, device: torch.device | None = None) -> Tensor:
        """Return the slots written, int64 `[rows]`."""
        return ring_range(self.start, self.rows, self.capacity, device)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return one slot for each row of the batch, int64 `[skip + rows]`, skipped rows included."""
        start = (self.start - self.skip) % self.capacity if self.skip else self.start
        return ring_range(start, self.skip + self.rows, self.capacity, device)

    @property
    def total(self) -> int:
        """Number of rows of the batch, skipped ones included."""
        return self.skip + self.rows


class Picks(NamedTuple):
    """Rows `rows[i]` of a batch of `total` go to the slots `slots[i]`; -1 in `kept` marks rows that were not kept."""

    slots: Tensor
    rows: Tensor
    kept: Tensor

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return one slot for each row of the batch, int64 `[total]`, -1 where a row was not kept."""
        return self.kept if device is None else self.kept.to(device)

    @property
    def total(self) -> int:
        """Number of rows of the batch, those not kept included."""
        return int(self.kept.shape[0])


Placement: TypeAlias = Run | Picks


class View(NamedTuple):
    """All that a sampler may see of a buffer: counts and stamps, never data.

    Rows present are the slots `[0, rows)`. Frozen: it describes the buffer at the moment of the draw.
    """

    rows: int
    capacity: int
    cursor: int
    stamps: Stamps | SharedRing
    device: torch.device
    episodes: EpisodeTable | None = None
    """Which rows belong together, if the buffer keeps account of that."""
    starts: Starts | None = None
    """The rows that may be drawn; None stands for all of them."""


class Draw(NamedTuple):
    """What a sampler drew: `slots` int64 `[B]`; prioritized samplers add importance `weights` and `stamps`, `[B]` each.

    Stamps, int64, tell a later priority whether the row that it is for has been replaced. With `length`, or `lengths`
    int64 `[B]`, each slot is the first one of a slice of so many rows of its episode, whose last row is repeated up to
    `pad` rows if that is not 0.
    """

    slots: Tensor
    weights: Tensor | None = None
    info: dict[str, Any] | None = None
    stamps: Tensor | None = None
    lengths: Tensor | None = None
    pad: int = 0
    length: int = 0

    @property
    def rows_each(self) -> Tensor | int | None:
        """Rows of the slices, one number where all are equal; None where single rows were drawn."""
        return self.length or self.lengths


class Request(NamedTuple):
    """Rows of one field for a batch: `slots` int64 `[n]` of the leaf number `leaf`, in the schema's order.

    Where `pick` (bool `[n]`) is True, the row is read from the leaf `other` instead, which has the same dtype and
    shape. Requests that share one slots tensor are cheapest: fields that lie side by side are read together.
    """

    leaf: int
    slots: Tensor
    other: int | None = None
    pick: Tensor | None = None


def ring_range(start: int, rows: int, capacity: int, device: torch.device | None = None) -> Tensor:
    """Return `(start + arange(rows)) % capacity`, int64 `[rows]`; the modulo is paid for only where the run wraps."""
    stop = start + rows
    if device is None:  # NumPy's range is the cheaper one, and knows no default device
        out = torch.from_numpy(np.arange(start, stop, dtype=np.int64))
    else:
        out = torch.arange(start, stop, device=device)
    return out if stop <= capacity else out.remainder_(capacity)


def require_values(tensor: Tensor, what: str) -> None:
    """Refuse tensors on the device meta, which have no values.

    Raises:
        KindError: naming what the tensor was to be.
    """
    if tensor.is_meta:
        msg = (
            f"{what} must have values, got a tensor on the device meta: name the device of new tensors, since "
            "torch.set_default_device() and `with torch.device(...)` change what they get without"
        )
        raise KindError(msg)


def as_slots(slots: Tensor, device: torch.device) -> Tensor:
    """Bring slots that a sampler or writer chose to the form that native code reads: int64, contiguous, on a device.

    Raises:
        KindError: if they are on the device meta, where tensors have no values.
    """
    require_values(slots, "slots")
    return slots.to(device, torch.int64).contiguous()


def check_slots(slots: Tensor, capacity: int) -> None:
    """Refuse slots outside `[0, capacity)`.

    Raises:
        SlotError: naming the first one.
    """
    bad = (slots < 0) | (slots >= capacity)
    if bad.any():
        at = int(bad.int().argmax())
        msg = f"slot {int(slots[at])} at position {at} is outside [0, {capacity}): nothing has been read or written"
        raise SlotError(msg)


def episodes_of(view: View) -> EpisodeTable:
    """Return the episodes of a view, for a unit or sampler that cannot do without.

    Raises:
        OptionError: if the buffer keeps none.
    """
    if view.episodes is None:
        msg = "slices and windows need to know where episodes end: give the buffer episodes=Episodes()"
        raise OptionError(msg)
    return view.episodes
