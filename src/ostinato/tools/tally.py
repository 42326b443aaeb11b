"""Statistics of a column that arrives in pieces: the extra memory is that of one piece."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

__all__ = ["Tally", "elements"]

_PIECE = 2**20
"""Elements looked at in one go: 8 MiB as float64."""


@final
class Tally:
    """Counts, bounds and mean of the numbers seen so far; NaN is counted and otherwise left out."""

    def __init__(self) -> None:
        self.count = 0
        """Numbers that are not NaN."""
        self.nan_count = 0
        self._low: float | int | None = None
        self._high: float | int | None = None
        self._sum = 0.0

    def see(self, numbers: Tensor) -> None:
        """Take in real numbers, flags or integers of any dtype, `[n]`."""
        for piece in torch.split(numbers, _PIECE):
            self._see(piece)

    def _see(self, piece: Tensor) -> None:
        # Wide enough for every value; integers stay integers, so that their bounds are exact.
        exact = not piece.is_floating_point() and piece.dtype is not torch.uint64
        wide = piece.to(torch.int64 if exact else torch.float64)
        if not exact:
            missing = wide.isnan()
            self.nan_count += int(missing.sum())
            wide = wide[~missing]
        if wide.numel() == 0:
            return
        low, high = wide.min().item(), wide.max().item()
        self._low = low if self._low is None else min(self._low, low)
        self._high = high if self._high is None else max(self._high, high)
        self._sum += float(wide.double().sum())
        self.count += wide.numel()

    @property
    def minimum(self) -> float | int | None:
        """Smallest number; None if there is none."""
        return self._low

    @property
    def maximum(self) -> float | int | None:
        """Largest number; None if there is none."""
        return self._high

    @property
    def mean(self) -> float | None:
        """Mean; None if there is none, or infinities of both signs leave none."""
        mean = self._sum / self.count if self.count else math.nan
        return None if math.isnan(mean) else mean


def elements(blocks: Iterable[bytes], dtype: torch.dtype) -> Iterator[Tensor]:
    """Cut a stream of bytes into tensors of whole elements, `[n]` each.

    Args:
        blocks: Bytes of any lengths; an element may lie across two of them.
        dtype: What the bytes are.
    """
    rest = b""
    for block in blocks:
        raw = bytearray(rest + block)
        whole = len(raw) // dtype.itemsize * dtype.itemsize
        if whole:
            yield torch.frombuffer(raw, dtype=dtype, count=whole // dtype.itemsize)
        rest = bytes(raw[whole:])
