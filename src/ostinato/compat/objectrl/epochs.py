"""Epochs over a memory: every row once in each, in an order shuffled anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, final

import torch

from ostinato.core.records import View
from ostinato.core.ring import Ring
from ostinato.errors import UsageError
from ostinato.samplers import SamplerWithoutReplacement

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDict
    from torch import Tensor

__all__ = ["Epochs"]


@final
class Epochs:
    """An iterator over the batches of some epochs.

    Args:
        read: gives the rows of slots, int64 `[B]`.
        rows: rows of an epoch: the slots `[0, rows)`.
        batch_size: rows of a batch; the last one of an epoch holds what is left.
        n_epochs: epochs.
    """

    def __init__(self, read: Callable[[Tensor], TensorDict], rows: int, batch_size: int, n_epochs: int) -> None:
        self.batches = n_epochs * -(-rows // batch_size)
        """Batches in all."""
        self._read = read
        self._batch_size = batch_size
        self._sampler = SamplerWithoutReplacement()
        self._view = View(rows, rows, 0, Ring(rows), torch.device("cpu"))  # fixed: an epoch takes no more rows in
        self._left = self.batches
        self._ended = False

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> TensorDict:
        """Return the next batch.

        Raises:
            UsageError: if the memory holds other rows by now.
        """
        if self._ended:
            msg = "the memory was reset, resized or loaded since this iterator was made: make a new one"
            raise UsageError(msg)
        if self._left == 0:
            raise StopIteration
        batch = self._read(self._sampler.draw(self._view, self._batch_size, None).slots)
        self._left -= 1
        return batch

    def end(self) -> None:
        """Give no more batches: the rows are gone."""
        self._ended = True
