"""Tensors by their bits, where torch can do more with those than with the dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["as_bits", "as_ordinary", "same_rows", "turn_rows"]

_PIECE_BYTES = 2 * 2**20
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """View a tensor by its bits where torch cannot index its dtype (unsigned integers, 8-bit floats); else as it is."""
    dtype = tensor.dtype
    rare = dtype in {torch.uint16, torch.uint32, torch.uint64} or str(dtype).startswith("torch.float8")
    return tensor.view(_SIGNED[dtype.itemsize]) if rare else tensor


def as_ordinary(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor with the memory of an inference tensor (`torch.inference_mode`); others as they are.

    Ordinary tensors may be changed in place in any mode. No copy.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def same_rows(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return bool `[n]`: whether row i of every tensor is that of its partner, bit by bit (NaN equals itself)."""
    out: Tensor | None = None
    for one, other in zip(ones, others, strict=True):
        same = (_integers(one) == _integers(other)).flatten(1).all(1)
        out = same if out is None else out & same
    if out is None:
        msg = "there is nothing to compare"
        raise ValueError(msg)
    return out


def turn_rows(rows: Tensor, seam: int) -> None:
    """Turn rows `[n, ...]` in place, so that row `seam` becomes row 0 and the rows before it come last.

    Memory: a copy of the smaller part, and 2 MiB.
    """
    bits, n = as_bits(rows), rows.shape[0]
    rest = n - seam
    step = max(1, _PIECE_BYTES * n // max(1, rows.nbytes))
    if seam <= rest:
        kept = bits[:seam].clone()
        for first in range(0, rest, step):
            last = min(first + step, rest)
            bits[first:last] = bits[first + seam : last + seam].clone()
        bits[rest:] = kept
        return
    kept = bits[seam:].clone()
    for last in range(seam, 0, -step):
        first = max(0, last - step)
        bits[first + rest : last + rest] = bits[first:last].clone()
    bits[:rest] = kept


def _integers(tensor: Tensor) -> Tensor:
    if tensor.dtype.itemsize == 16:  # complex128
        tensor = torch.view_as_real(tensor)
    return tensor.unsqueeze(-1).view(_SIGNED[min(tensor.dtype.itemsize, 8)])
