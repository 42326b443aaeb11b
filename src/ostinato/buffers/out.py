"""`sample(out=batch)`: batches that are written to the tensors of an earlier batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ostinato.buffers.direct import direct_rows
from ostinato.core import kinds
from ostinato.core.kinds import show_field
from ostinato.errors import KindError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato._native import Direct
    from ostinato.core.rows import Schema
    from ostinato.storages import Storage

_NOT_PLAIN = "is not a tensor in CPU memory"
"""What the extension says of tensors that it cannot write to; see native/batches.hpp."""


def fill_direct(direct: Direct, schema: Schema, out: Any, size: int) -> tuple[Any, ...] | None:
    """Draw rows into a batch by a direct call, without allocating memory for them; see `ostinato.buffers.direct`.

    Returns:
        What `Direct.sample` returns, with `out` as the batch; None if the call does not apply: the general way decides
        then which fields a batch has, and whether torch can write to those of `out`.

    Raises:
        SchemaError: see `fill`; nothing is drawn.
    """
    fields = direct_rows(out, 1, by_path=direct.by_path) if direct.by_path or schema.kind == "tensordict" else out
    targets: list[Any] = list(fields.values()) if type(fields) is dict else [fields]
    if not _are_writable(targets):
        return None
    try:
        found = direct.sample_into(fields, size)
    except ValueError as error:
        position, _, reason = str(error).partition(":")
        if not position.isdigit():  # of the draw
            raise
        if reason == _NOT_PLAIN:
            return None
        leaf = schema.leaves[int(position)]
        needed = f"{leaf.dtype}{[size, *leaf.shape]}, contiguous, on the CPU"
        _raise(leaf.path, _leaves(out)[leaf.path], needed, reason)
    if found is None:
        return None
    increment_version(targets)  # as `copy_` does: a graph that holds the earlier values must not use these
    return (out, *found[1:])


def _are_writable(targets: list[Any]) -> bool:
    """Whether torch would let `copy_` write to all of these; subclasses decide for themselves."""
    for target in targets:
        if type(target) is not Tensor or target.requires_grad:
            return False
        if target.is_inference() and not torch.is_inference_mode_enabled():
            return False
    return True


def fill(out: Any, batch: Any, storage: Storage | None = None) -> Any:
    """Copy a new batch to the tensors of an earlier one, and return that.

    Args:
        out: a tensor, or a dict or TensorDict of tensors, also nested.
        batch: the new batch.
        storage: where rows are stored: `out` must not share their memory. None if they are in another process.

    Raises:
        KindError: if `out` holds other things than tensors.
        SchemaError: if fields, dtypes, shapes or devices differ, or tensors are not contiguous, require gradients, or
            share memory with the storage or each other; nothing is written.
    """
    targets, sources = _leaves(out), _leaves(batch)
    _check_fields(targets, list(sources))
    ranges: list[tuple[int, int]] = []
    for path, source in sources.items():
        target = targets[path]
        needed = f"{source.dtype}{list(source.shape)}, contiguous, on {source.device}"
        if target.dtype is not source.dtype or target.shape != source.shape or target.device != source.device:
            _raise(path, target, needed, "has another dtype, shape or device")
        if not target.is_contiguous():
            _raise(path, target, needed, "is not contiguous")
        if target.requires_grad:
            _raise(path, target, needed, "requires gradients")
        first, last = target.data_ptr(), target.data_ptr() + target.nbytes
        if storage is not None and storage.shares_memory(target):
            _raise(path, target, needed, "shares memory with the storage")
        if target.nbytes and any(low < last and first < high for low, high in ranges):
            _raise(path, target, needed, "shares memory with another field of the batch")
        ranges.append((first, last))
    for path, source in sources.items():
        targets[path].copy_(source)
    return out


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Tensor]:
    """Return the tensors of a batch by their paths.

    Raises:
        KindError: if there are other things.
    """
    if isinstance(data, Tensor):
        return {path: data}
    found: dict[tuple[Any, ...], Tensor] = {}
    if isinstance(data, dict) or (kinds.is_tensordict(data) and not kinds.is_non_tensor(data)):
        items = data.items()
    elif isinstance(data, (list, tuple)):
        items = enumerate(data)
    else:
        msg = (
            f"out={show_field(path) if path else 'a batch'} must hold tensors, got {type(data).__name__}: pass a batch "
            "of this buffer, or leave out= out for batches with other things than tensors"
        )
        raise KindError(msg)
    for key, value in items:
        found |= _leaves(value, (*path, key))
    return found


def _check_fields(leaves: dict[tuple[Any, ...], Tensor], wanted: Sequence[tuple[Any, ...]]) -> None:
    if set(leaves) != set(wanted):
        msg = (
            f"out must have the fields of a batch, {sorted(map(str, wanted))}, got {sorted(map(str, leaves))}: pass a "
            "batch that this buffer returned with the same options"
        )
        raise SchemaError(msg)


def _raise(path: tuple[Any, ...], tensor: Tensor, needed: str, reason: str) -> NoReturn:
    name = show_field(path) if path else "the tensor"
    msg = (
        f"{name} of out {reason}: it must be {needed}, got {tensor.dtype}{list(tensor.shape)} on {tensor.device}; "
        "nothing is written. Pass a batch that this buffer returned, or empty tensors of this form"
    )
    raise SchemaError(msg)
