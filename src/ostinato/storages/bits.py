"""Tensors by their bits, where torch can do more with those than with the dtype."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_bits"]

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """View a tensor by its bits where torch cannot index its dtype (unsigned integers, 8-bit floats); else as it is."""
    dtype = tensor.dtype
    rare = dtype in {torch.uint16, torch.uint32, torch.uint64} or str(dtype).startswith("torch.float8")
    return tensor.view(_SIGNED[dtype.itemsize]) if rare else tensor
