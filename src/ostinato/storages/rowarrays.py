"""Rows as they lie in memory, array by array: what a checkpoint copies, and reads back, without looking at fields."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ostinato.core.bits import as_bits
from ostinato.durable.dtypes import copy_elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from ostinato.storages.table import Block, Table

__all__ = ["Member", "RowArray", "row_arrays"]


class Member(NamedTuple):
    """A field that lies in packed rows."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class RowArray(NamedTuple):
    """Memory of all slots, `data[slot]`: a field by itself, or packed rows of several."""

    name: str
    """Name in a checkpoint."""
    data: Tensor
    """`[capacity, ...]`: the field, or uint8 `[capacity, width]`."""
    members: tuple[Member, ...] = ()
    """The fields of packed rows; none where the array is a field by itself."""
    used: int = 0
    """Bytes of a packed row that fields take; what follows is padding."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.data.shape[1:]) * self.data.itemsize

    def copy(self, out: Tensor, slots: slice | Tensor) -> None:
        """Copy rows to `out` (uint8 `[n, row_bytes]`, contiguous, on the CPU); padding keeps the zeros it must have."""
        if self.members and isinstance(slots, slice) and self.data.is_cpu:
            np.copyto(out[:, : self.used].numpy(), self.data[slots, : self.used].numpy())
            return
        part = out.view(-1).view(self.data.dtype).view(out.shape[0], *self.data.shape[1:])
        if isinstance(slots, slice):
            copy_elements(part, self.data[slots])
        else:
            chosen = as_bits(self.data).index_select(0, slots.to(self.data.device))
            as_bits(part).copy_(chosen)
        if self.members:
            out[:, self.used :] = 0


def row_arrays(table: Table, names: Sequence[str]) -> list[RowArray]:
    """Return the arrays of a table, whose leaves have these names in a checkpoint."""
    pairs = zip(table.layout, table.blocks, strict=True)
    shared = [(block, raw) for block, raw in pairs if len(block.members) > 1]
    packed = [_packed(number, block, raw, table, names) for number, (block, raw) in enumerate(shared)]
    inside = {position for block, _ in shared for position, _ in block.members}
    return [*packed, *(RowArray(names[i], column) for i, column in enumerate(table.columns) if i not in inside)]


def _packed(number: int, block: Block, raw: Tensor, table: Table, names: Sequence[str]) -> RowArray:
    leaves = table.schema.leaves
    members = tuple(Member(names[i], offset, leaves[i].dtype, tuple(leaves[i].shape)) for i, offset in block.members)
    used = max(offset + leaves[i].nbytes for i, offset in block.members)
    return RowArray(f"rows.{number}", raw.view(table.capacity, block.stride), members, used)
