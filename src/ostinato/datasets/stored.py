"""Rows as files store them: one array per episode, observations that have one row more, flags made of two others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.datasets.columns import DatasetColumn

__all__ = ["BLOCK_BYTES", "EitherColumn", "Pieces", "StoredRows", "as_block", "torch_dtype"]

BLOCK_BYTES = 1 << 18
"""Bytes of a block where the file has no chunks: reading it costs about as much as finding it."""


def torch_dtype(dtype: Any, field: str) -> torch.dtype:
    """Return the dtype of tensors with these numbers.

    Raises:
        SchemaError: if torch has no such dtype, as for text, objects and records.
    """
    try:
        return torch.from_numpy(np.empty(0, np.dtype(dtype).newbyteorder("="))).dtype
    except TypeError:
        msg = f"{field} has the dtype {dtype}, which tensors cannot have: store numbers or flags"
        raise SchemaError(msg) from None


def as_block(array: np.ndarray[Any, Any]) -> Tensor:
    """Return an array that was just read as a tensor. No copy if its bytes are in the order of this machine."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


@final
class Pieces:
    """Blocks of a field that is stored in pieces, one array for each episode.

    A block never reaches over two pieces. It ends at a chunk of the array, if chunks are known.

    Args:
        lengths: rows of each piece, int64 `[pieces]`.
        row_bytes: bytes of one row.
        chunk_rows: rows of the chunks of an array; None if it has none.
        block_bytes: smallest number of bytes of a block within a piece.
    """

    def __init__(
        self,
        lengths: np.ndarray[Any, Any],
        row_bytes: int,
        chunk_rows: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        unit = max(1, chunk_rows or 1)
        rows = unit * max(1, math.ceil(block_bytes / max(1, row_bytes * unit)))
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        """First row of each piece, and the number of rows at the end: int64 `[pieces + 1]`."""
        counts = -(-np.asarray(lengths, dtype=np.int64) // rows)
        first = np.cumsum(counts) - counts
        within = (np.arange(counts.sum()) - np.repeat(first, counts)) * rows
        self.starts = np.concatenate([np.repeat(self.offsets[:-1], counts) + within, self.offsets[-1:]])
        """First row of each block, and the number of rows at the end: int64 `[blocks + 1]`."""

    def locate(self, block: int) -> tuple[int, int, int]:
        """Return the piece of a block, and its rows within the piece as a half-open range."""
        start, stop = int(self.starts[block]), int(self.starts[block + 1])
        piece = int(np.searchsorted(self.offsets, start, side="right")) - 1
        offset = int(self.offsets[piece])
        return piece, start - offset, stop - offset


@final
@dataclass(frozen=True, eq=False)
class StoredRows:
    """Takes rows of a dataset to those of an array with other rows between the episodes. A `move` of `MovedColumn`."""

    ends: Tensor
    """The row of the dataset after the last one of each episode, int64 `[episodes]`."""
    shifts: Tensor
    """How many rows further on each episode is stored, int64 `[episodes]`."""
    step: int = 0
    """1 for the observation after the step, which is the next row."""
    last: Tensor | None = None
    """Last stored row of each episode, beyond which no row is read, int64 `[episodes]`; None if all rows are there."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the stored rows, int64 `[n]`."""
        episodes = torch.searchsorted(self.ends, rows, right=True)
        stored = rows + self.shifts[episodes] + self.step
        return stored if self.last is None else torch.minimum(stored, self.last[episodes])


@final
class EitherColumn:
    """Whether one of two flags is set.

    Args:
        first: a column of flags.
        second: another one, with the same rows.
    """

    def __init__(self, first: DatasetColumn, second: DatasetColumn) -> None:
        self.first, self.second = first, second

    @property
    def dtype(self) -> torch.dtype:
        """Bool."""
        return torch.bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the flags in one row."""
        return self.first.shape

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows; see `DatasetColumn`."""
        first, second = self.first.start(rows), self.second.start(rows)
        return lambda: first().bool() | second().bool()

    def close(self) -> None:
        """Close files."""
        self.first.close()
        self.second.close()
