"""Writes to a storage without a buffer: `storage.set(cursor, rows)` and `storage[index] = rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ostinato.core.index import plain_index, select
from ostinato.core.kinds import require_eager
from ostinato.core.records import Picks, Run
from ostinato.errors import KindError, OptionError, SchemaError, SlotError

if TYPE_CHECKING:
    from ostinato.core.records import Placement
    from ostinato.storages.base import Storage

__all__ = ["contains", "set_rows"]

_MOST = 2**40


def set_rows(storage: Storage, cursor: Any, data: Any, *, grow: bool) -> None:
    """Write rows at positions of the first dimension; see `Storage.set`."""
    require_eager("writing rows")
    if not grow:
        _edit(storage, list(cursor) if isinstance(cursor, tuple) and storage.ndim == 1 else cursor, data)
        return
    steps = storage.shape[0]
    positions = _positions(cursor, steps, storage)
    if steps and positions.numel() and int(positions.max()) < steps:
        _edit(storage, int(positions) if positions.ndim == 0 else positions, data)
        return
    known = storage.laid_out
    payload, rows = storage.admit(data, 0 if positions.ndim == 0 else 1)
    try:
        storage.write(_placement(storage, positions.reshape(-1), rows), payload)
    except BaseException:
        if not known:
            storage.forget_form()
        raise
    storage.writes += 1
    storage.exposed = True


def _edit(storage: Storage, index: Any, data: Any) -> None:
    """Replace rows present."""
    picked = select(index, storage.shape, storage.device)
    slots = picked.slots
    if picked.span is not None:
        slots = torch.arange(len(storage), device=storage.device)[picked.span].contiguous()
    change = storage.prepare_edit(slots, data, picked.batch)
    storage.check_new_fields(index, slots, data)
    change()
    storage.writes += 1
    storage.edits += 1
    storage.exposed = True  # a buffer does not know of these rows, so an incremental save writes all


def _positions(cursor: Any, steps: int, storage: Storage) -> Tensor:
    """Return positions in the first dimension, int64 `[n]`, or `[]` for one.

    Raises:
        KindError: if the cursor is not an integer, slice, list, range, array or tensor.
        SlotError: if a position is negative and no row has it.
    """
    if isinstance(cursor, slice):
        span = range(*cursor.indices(storage.capacity // storage.num_envs))
        if len(span) > _MOST:
            msg = f"{cursor!r} of an unbounded storage selects {len(span)} positions: give the slice a stop"
            raise SlotError(msg)
        return torch.arange(span.start, max(span.start, span.stop), span.step, device="cpu")
    if isinstance(cursor, tuple):
        cursor = list(cursor)
    plain = plain_index(np.asarray(cursor) if isinstance(cursor, np.generic) else cursor)
    if not isinstance(plain, (int, Tensor)) or isinstance(plain, bool):
        msg = f"a cursor is an int, slice, list, range, array or tensor of positions, got {cursor!r}"
        raise KindError(msg)
    positions = plain if isinstance(plain, Tensor) else torch.tensor(plain, dtype=torch.int64, device="cpu")
    if positions.dtype is torch.bool:
        positions = positions.nonzero().reshape(-1)
    if positions.is_floating_point() or positions.is_complex() or positions.ndim > 1:
        msg = f"a cursor holds integers in one dimension, got {positions.dtype}{list(positions.shape)}"
        raise KindError(msg)
    positions = positions.to(torch.int64)
    positions = torch.where(positions < 0, positions + steps, positions)
    if positions.numel() and int(positions.min()) < 0:
        msg = f"position {int(positions.min()) - steps} is out of range for {steps} rows"
        raise SlotError(msg)
    return positions


def _placement(storage: Storage, positions: Tensor, rows: int) -> Placement:
    """Return the slots of rows that go to positions of the first dimension.

    Raises:
        SchemaError: if there is not one row for each position.
        SlotError: if a position is beyond the capacity, or a slot before it would stay empty.
        OptionError: if the storage needs the order of a ring, and this is another.
    """
    envs, capacity, present = storage.num_envs, storage.capacity, len(storage)
    if len(positions) * envs != rows:
        msg = f"{len(positions) * envs} slots are chosen, {rows} rows were given: give one for each"
        raise SchemaError(msg)
    steps = capacity // envs
    if len(positions) and int(positions.max()) >= steps:
        msg = (
            "Cannot append data to the storage: "
            f"maximum capacity is {steps}, the index of an item to be set is {int(positions.max())}"
        )
        raise SlotError(msg)
    slots = (positions[:, None] * envs + torch.arange(envs, device="cpu")).reshape(-1)
    fresh = torch.unique(slots[slots >= present])
    if not torch.equal(fresh, torch.arange(present, present + len(fresh), device="cpu")):
        msg = (
            "Cannot append data located more than one item away from the storage size: the storage size is "
            f"{present // envs}, and of the positions from there on {fresh[::envs].tolist()[:5]} were given, which "
            "would leave others empty"
        )
        raise SlotError(msg)
    start = int(slots[0]) if rows else present % capacity
    if torch.equal(slots, (torch.arange(rows, device="cpu") + start) % capacity) and rows <= capacity:
        if storage.ring_only and start != storage.cursor:
            msg = f"rows of this storage are written in ring order: the next slot is {storage.cursor}, got {start}"
            raise OptionError(msg)
        return Run(start, rows, capacity)
    if storage.ring_only:
        msg = f"rows of this storage are written in ring order from slot {storage.cursor} on, got {positions.tolist()}"
        raise OptionError(msg)
    slots = slots.to(storage.device)
    return Picks(slots, torch.arange(rows, device=storage.device), slots)


def contains(item: Any, shape: tuple[int, ...]) -> bool | Tensor:
    """Return whether positions are those of rows present; see `Storage.contains`."""
    steps = shape[0]
    if isinstance(item, (int, np.integer)) and not isinstance(item, (bool, np.bool_)):
        return -steps <= int(item) < steps
    if isinstance(item, Tensor) and not (item.is_floating_point() or item.is_complex() or item.dtype is torch.bool):
        if len(shape) == 1 or item.ndim < 2 or item.shape[-1] != len(shape):
            return (item >= -steps) & (item < steps)
        sizes = torch.tensor(shape, dtype=torch.int64, device=item.device)
        return ((item >= -sizes) & (item < sizes)).all(-1)
    msg = f"contains() takes an int or a tensor of integers, type {type(item)} is not supported yet"
    raise KindError(msg)
