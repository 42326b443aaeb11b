"""Names of the dtypes in files, and tensors as raw memory."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
# The last ones need a recent version of torch.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_MAX_DIMS = 64
_MAX_BYTES = 2**62


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files, for example `bfloat16`.

    Raises:
        CheckpointError: Files cannot hold this dtype.
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        msg = f"dtype {dtype} cannot be saved: convert to one of {', '.join(DTYPES)}"
        raise CheckpointError(msg)
    return name


def check_shape(shape: object) -> tuple[int, ...] | None:
    """Return a shape from a file as a tuple; None if it is not a list of plausible sizes."""
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        return None
    product = 1
    for size in shape:
        if type(size) is not int or size < 0:
            return None
        product *= max(size, 1)  # zero sizes as 1: torch multiplies the other sizes for the strides
        if product > _MAX_BYTES:
            return None
    return tuple(shape)


def shape_nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


def check_plain(tensor: Tensor, where: Path | str) -> Tensor:
    """Return a plain tensor without autograd history and with the same memory.

    Raises:
        CheckpointError: It is sparse, nested, without data, or has a dtype that files cannot hold.
    """
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        msg = f"{where}: cannot save a {tensor.layout} tensor on {tensor.device}: only dense tensors with data"
        raise CheckpointError(msg)
    if sys.byteorder != "little":
        msg = f"{where}: files are little-endian, big-endian machines are not supported"
        raise CheckpointError(msg)
    dtype_name(tensor.dtype)
    return tensor.detach().as_subclass(Tensor)


def is_raw(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` is its elements in order, readable by the CPU."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy_elements(dest: Tensor, source: Tensor) -> None:
    """Copy between tensors of one dtype and shape with any strides and devices."""
    plain = not (source.is_conj() or source.is_neg() or dest.is_conj() or dest.is_neg())
    if plain and dest.device.type == source.device.type == "cpu" and dest.ndim:
        # 4 to 30 times faster than torch for strided rows of few elements
        same_size = _SAME_SIZE[dest.element_size()]
        np.copyto(dest.view(same_size).numpy(), source.view(same_size).numpy())
    else:
        dest.copy_(source)


def raw_view(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor for which `is_raw` is True as writable bytes. No copy."""
    # as_strided, since a tensor of a single element is contiguous with any stride
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
