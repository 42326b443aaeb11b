"""Values of variable length beside rows: byte strings by slot, and their form in checkpoints (values and ends)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core.records import Run
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.records import Placement

__all__ = ["BlobColumn", "check_ends", "join_blobs", "split_blobs"]


@final
class BlobColumn:
    """One byte string for each slot, each in memory of its own.

    A byte string is never changed in place: a reader that runs while another thread writes gets the old or the new one,
    never a part of each.

    Args:
        capacity: slots.
    """

    def __init__(self, capacity: int) -> None:
        self.blobs: np.ndarray[Any, Any] = np.full(capacity, None, dtype=object)
        """Bytes, or None where no row was written, `[capacity]`."""
        self.nbytes = 0
        """Bytes of all values."""

    def set(self, placement: Placement, blobs: Sequence[bytes]) -> None:
        """Write the values of all rows of a placement, `[placement.total]`, to its slots."""
        slots, rows = _pairs(placement)
        self.put(slots, [blobs[row] for row in rows])

    def put(self, slots: Sequence[int], blobs: Sequence[bytes]) -> None:
        """Write one value to each of `slots`; of equal slots the last one wins."""
        column = self.blobs
        for slot, blob in zip(slots, blobs, strict=True):
            old = column[slot]
            self.nbytes += len(blob) - (0 if old is None else len(old))
            column[slot] = blob

    def get(self, slots: Sequence[int]) -> list[bytes]:
        """Return the values at slots.

        Raises:
            IndexError: if a slot is out of range, or holds no value.
        """
        found = [self.blobs[slot] for slot in slots]
        if None in found:
            msg = f"slot {slots[found.index(None)]} holds no row"
            raise IndexError(msg)
        return found

    def sizes(self, slots: Sequence[int]) -> list[int]:
        """Return the bytes of the values at slots; 0 where there is none."""
        return [0 if blob is None else len(blob) for blob in self.blobs[list(slots)]]

    def clear(self) -> None:
        """Remove all values."""
        self.blobs = np.full(self.blobs.shape[0], None, dtype=object)  # a reader may still use the old array
        self.nbytes = 0


def _pairs(placement: Placement) -> tuple[list[int], range | list[int]]:
    """Return the slots of a placement, and the row that goes to each."""
    if isinstance(placement, Run):
        return placement.slots().tolist(), range(placement.skip, placement.total)
    return placement.slots.tolist(), placement.rows.tolist()


def join_blobs(blobs: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return byte strings as one uint8 tensor `[bytes]`, and where each ends, int64 `[values]`. Copy."""
    whole = bytearray(b"".join(blobs))
    values = torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8, device="cpu")
    ends = torch.tensor([len(blob) for blob in blobs], dtype=torch.int64, device="cpu").cumsum(0)
    return values, ends


def split_blobs(values: Tensor, ends: Tensor) -> list[bytes]:
    """Return the byte strings that `join_blobs` joined. Copy.

    Raises:
        CheckpointError: if the ends do not divide the values.
    """
    check_ends(values, ends)
    whole, cuts = values.cpu().numpy(), [0, *ends.tolist()]
    return [whole[a:b].tobytes() for a, b in pairwise(cuts)]


def check_ends(values: Tensor, ends: Tensor) -> None:
    """Check that ends ascend from 0 to the number of values.

    Raises:
        CheckpointError: if they do not.
    """
    good = values.dtype is torch.uint8 and ends.dtype is torch.int64 and values.ndim == ends.ndim == 1
    if good:
        lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64, device=ends.device))
        last = int(ends[-1]) if ends.shape[0] else 0
        good = not bool((lengths < 0).any()) and last == values.shape[0]
    if not good:
        msg = (
            f"the checkpoint's {values.dtype}{list(values.shape)} values and their ends {ends.dtype}{list(ends.shape)} "
            "do not fit: it is damaged"
        )
        raise CheckpointError(msg)
