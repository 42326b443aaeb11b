"""Priorities and indices on their way to the shards that the rows are in. No Ray."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers import priorities
from ostinato.distributed.routing import split_index
from ostinato.errors import KindError, SchemaError, SlotError, UsageError
from ostinato.samplers.values import REDUCTIONS, refuse_bad

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["About", "Change", "one_shard", "route", "unpack", "unpack_batch"]


class About(NamedTuple):
    """What a handle knows of the shards, which are all alike."""

    batch_size: int | None
    prioritized: bool
    priority_key: str | tuple[str, ...]
    reduction: str
    capacity: int
    """Rows of a shard."""
    counting: bool
    """Whether draws use rows up."""
    waits: bool
    """Whether shards hold their writers up: a queue does."""

    @property
    def reduce(self) -> Callable[[Tensor], Tensor]:
        """Make one priority of those of an item's steps."""
        return REDUCTIONS[self.reduction]


class Change(NamedTuple):
    """New priorities of the whole, not yet routed."""

    where: Tensor
    """Indices of the whole, int64 `[n]`."""
    values: Tensor
    """`[n, *shape]`, or `[]`: one for all."""
    stamps: Tensor | None
    """int64 `[n]`."""


def unpack(about: About, index: Any, priority: Any, generation: Any) -> Change | None:
    """Return what `update_priority` was given; None, and a warning, where shards keep no priorities.

    Raises:
        UsageError: if there are no priorities.
        PriorityError: for priorities that are negative or not finite.
    """
    if not _keeps(about):
        return None
    if priority is None:
        msg = "update_priority() needs the new priorities: update_priority(index, priority)"
        raise UsageError(msg)
    return _change(*priorities.unpack(index, priority, generation))


def unpack_batch(about: About, data: Any) -> Change | None:
    """Return what `update_tensordict_priority` was given; see `unpack`."""
    if not _keeps(about):
        return None
    return _change(*priorities.from_batch(data, about.priority_key, about.reduce, 1))


def _keeps(about: About) -> bool:
    if not about.prioritized:
        msg = "update_priority() has no effect: the shards' sampler has no priorities; use PrioritizedSampler"
        warnings.warn(msg, UserWarning, stacklevel=4)
    return about.prioritized


def _change(index: Any, priority: Any, stamps: Any) -> Change:
    where = _integers("index", index)
    lead = where.shape
    try:
        values = (
            priority
            if isinstance(priority, Tensor)
            else torch.as_tensor(np.asarray(priority, dtype=np.float64), device="cpu")
        )
    except (TypeError, ValueError) as error:
        msg = f"priorities are numbers, got {type(priority).__name__} ({error})"
        raise KindError(msg) from None
    values = values.detach().cpu()
    if values.is_complex() or values.dtype is torch.bool:
        msg = f"priorities must be real numbers, got {values.dtype}"
        raise KindError(msg)
    if values.shape[: len(lead)] == lead and lead:
        values = values.reshape(-1, *values.shape[len(lead) :])
    elif values.numel() == where.numel():
        values = values.reshape(-1)
    elif values.numel() == 1:
        values = values.reshape(())
    else:
        msg = (
            f"priorities must be one number, or have the shape {list(lead)} of the index (further dimensions are "
            f"reduced per row), got shape {list(values.shape)}"
        )
        raise SchemaError(msg)
    plain = values.reshape(-1).to(torch.float64)
    if not bool(((plain >= 0) & (plain < torch.inf)).all()):
        refuse_bad(plain)
    if stamps is not None:
        stamps = _integers("generation", stamps).reshape(-1)
        if stamps.shape[0] != where.numel():
            msg = f"generation must hold one integer for each of the {where.numel()} rows, got {stamps.shape[0]}"
            raise SchemaError(msg)
    return Change(where.reshape(-1), values, stamps)


def _integers(name: str, value: Any) -> Tensor:
    found = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value), device="cpu")
    if found.numel() and (found.dtype is torch.bool or found.is_floating_point() or found.is_complex()):
        msg = f"{name} must hold integers, got {found.dtype}: pass what extend() or sample() gave"
        raise KindError(msg)
    return found.detach().to("cpu", torch.int64)


def route(change: Change, shards: int, capacity: int) -> dict[int, tuple[Tensor, Tensor, Tensor | None]]:
    """Return slots, priorities and stamps for each shard; rows that were not kept (-1) are left out.

    Raises:
        SlotError: if an index names no shard, or no slot of one.
    """
    owners, slots = split_index(change.where)
    _check_owners(owners, change.where, shards)
    bad = slots >= capacity
    if bool(bad.any()):
        first = int(change.where[bad][0])
        msg = f"index {first} is of no row: it names slot {int(slots[bad][0])} of a shard that holds {capacity}"
        raise SlotError(msg)
    parts = {}
    for shard in sorted(set(owners.tolist())):
        at = (owners == shard).nonzero().flatten()
        if shard >= 0:
            values = change.values if change.values.ndim == 0 else change.values[at]
            parts[shard] = slots[at], values, None if change.stamps is None else change.stamps[at]
    return parts


def one_shard(index: Any, shards: int) -> tuple[int, Any]:
    """Return the shard that an index is of, and the slots there: a number for a number.

    Raises:
        SlotError: if it names no shard, or several.
    """
    if not isinstance(index, (int, Tensor, np.ndarray, np.integer, list)):
        msg = f"rows of shards are read by what extend() or sample() gave, got {type(index).__name__}: {index!r}"
        raise KindError(msg)
    where = _integers("index", index)
    owners, slots = split_index(where)
    _check_owners(owners, where, shards)
    found = sorted(set(owners.reshape(-1).tolist()))
    if len(found) != 1 or found[0] < 0:
        msg = f"an index must be of rows of one shard, got rows of {found}: read them shard by shard"
        raise SlotError(msg)
    return found[0], int(slots) if where.ndim == 0 else slots


def _check_owners(owners: Tensor, index: Tensor, shards: int) -> None:
    bad = (owners >= shards) | (index < -1)
    if bool(bad.any()):
        first = int(index[bad].reshape(-1)[0])
        msg = f"index {first} is of no shard: there are {shards}, and an index is what extend() or sample() gave"
        raise SlotError(msg)
