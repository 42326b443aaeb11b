"""Indices of users, such as `rb[3]`, `rb[2:5]`, `rb[mask]` or `rb[:, 1]`, and the slots that they select."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.core.records import require_values
from ostinato.errors import KindError, SlotError


class Selection(NamedTuple):
    """Selected slots: a `span` if possible, else `slots`; results have the leading dimensions `batch`."""

    span: slice | None
    slots: Tensor
    batch: tuple[int, ...]


_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


def select(index: Any, shape: tuple[int, ...], device: torch.device, *, swap: bool = False) -> Selection:
    """Convert an index to slots.

    Args:
        index: int, slice, list, range, int or bool tensor or array of any device, `...`, None, or a tuple of these.
        shape: `(rows,)`, or `(steps, num_envs)` of the rows present.
        device: device of the slots.
        swap: the first two dimensions of the index are environments and steps, in this order.

    Raises:
        SlotError: naming the index and the length, if it is out of range.
        KindError: if it is not an index.
    """
    rows = shape[0]
    if len(shape) == 1:
        if isinstance(index, (int, np.integer)) and not isinstance(index, (bool, np.bool_)):
            at = int(index)
            if not -rows <= at < rows:
                raise SlotError(_range_message(at, rows))
            at %= rows
            return Selection(slice(at, at + 1), _NONE, ())
        if index is ...:
            index = slice(None)
        if isinstance(index, slice):
            plain_index(index)
            span = range(*index.indices(rows))
            return Selection(slice(span.start, max(span.start, span.stop), span.step), _NONE, (len(span),))
    index = plain_index(index)
    if len(shape) == 1 and isinstance(index, Tensor) and index.dtype is not torch.bool:
        return _by_tensor(index, rows, device)
    count = rows if len(shape) == 1 else rows * shape[1]
    grid = torch.arange(count, device="cpu").reshape(shape)
    picked = apply_index(grid.transpose(0, 1) if swap else grid, index)
    return Selection(None, picked.reshape(-1).contiguous().to(device), tuple(picked.shape))


def apply_index(tensor: Tensor, index: Any) -> Tensor:
    """Index a tensor; errors of torch become errors that name the shape.

    Raises:
        SlotError: if it is out of range.
        KindError: if it is not an index.
    """
    try:
        return tensor[index]
    except IndexError as error:
        msg = f"{error}: the rows present have the shape {list(tensor.shape)}"
        raise SlotError(msg) from None
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"rows are chosen by int, slice, tensor, mask or tuple of these, got {index!r} ({error})"
        raise KindError(msg) from None


def is_field(index: Any) -> bool:
    """Whether an index is the name of a field: a str, or a tuple of str."""
    if isinstance(index, str):
        return True
    return isinstance(index, tuple) and bool(index) and all(isinstance(key, str) for key in index)


def plain_index(index: Any) -> Any:
    """Convert lists, ranges and arrays in an index to tensors on the CPU; the rest is unchanged."""
    return tuple(map(_plain, index)) if isinstance(index, tuple) else _plain(index)


def _plain(index: Any) -> Any:
    """Convert lists, ranges and arrays to tensors on the CPU; the rest is unchanged."""
    if isinstance(index, Tensor):
        require_values(index, "an index")
        return (
            index if type(index) is Tensor else index.as_subclass(Tensor)
        ).cpu()  # without its class, which rows must not get
    if isinstance(index, slice) and index.step is not None and index.step < 0:
        msg = f"slices of rows have a positive step, got {index!r}: index with a tensor to reverse"
        raise KindError(msg)
    if isinstance(index, (list, range, np.ndarray)):
        try:
            out = torch.as_tensor(np.asarray(index), device="cpu")
        except (TypeError, ValueError) as error:
            msg = f"rows are chosen by int, slice, tensor, mask or tuple of these, got {index!r} ({error})"
            raise KindError(msg) from None
        return out.to(torch.int64) if out.numel() == 0 else out
    return index


def _by_tensor(index: Tensor, rows: int, device: torch.device) -> Selection:
    if index.is_floating_point() or index.is_complex():
        msg = f"an index tensor must hold integers or bools, got {index.dtype}"
        raise KindError(msg)
    slots = index.reshape(-1).to(torch.int64)
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        if low < -rows or high >= rows:
            raise SlotError(_range_message(high if high >= rows else low, rows))
        if low < 0:
            slots = torch.where(slots < 0, slots + rows, slots)
    return Selection(None, slots.contiguous().to(device), tuple(index.shape))


def _range_message(index: int, rows: int) -> str:
    return f"index {index} is out of range for {rows} rows: use an index in [{-rows}, {rows})"
