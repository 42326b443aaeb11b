"""Priorities of an ensemble's samples on their way to the members that the rows are of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers import priorities
from ostinato.buffers.members import locked
from ostinato.buffers.options import warn_of_sampler
from ostinato.buffers.tensordict import TensorDictReplayBuffer
from ostinato.core import kinds
from ostinato.errors import KeyMissingError, KindError, SchemaError, SlotError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.buffers.members import Member

__all__ = ["update", "update_from_batch"]

_WINDOWS = ("anchor_index", "anchor_generation", "validity_mask", "step_in_sequence")
"""What a sample says of windows around anchors: their priorities are the anchors'."""
_NAMES = "an ensemble's rows are named by index and buffer_ids: pass the sample, or its info"


def update(members: Sequence[Member], index: Any, priority: Any, generation: Any) -> None:
    """Give rows new priorities; see `ReplayBufferEnsemble.update_priority`."""
    ranked = _ranked(members)
    if not ranked:
        return
    if priority is None:
        msg = "update_priority() needs the new priorities: update_priority(sample, priority)"
        raise UsageError(msg)
    index, ids, stamps = _unpack(index, generation)
    lanes = 1 if members[0].buffer.storage.ndim > 1 else 0
    lead = index.shape[: index.ndim - lanes]
    ids = _as_members(ids, lead, len(members))
    index = index.reshape(-1, *index.shape[len(lead) :])
    values = _as_rows(priority, lead)
    stamps = None if stamps is None else _as_tensor(stamps).reshape(-1)
    if stamps is not None and stamps.shape != ids.shape:
        msg = f"generation must hold one integer for each of the {ids.shape[0]} rows, got {stamps.shape[0]}"
        raise SchemaError(msg)
    rows = {i: (ids == i).nonzero().flatten() for i in ranked}
    _write(
        members,
        {
            i: (_take(index, at), values if values.ndim == 0 else _take(values, at), _take(stamps, at))
            for i, at in rows.items()
        },
    )


def update_from_batch(members: Sequence[Member], batch: Any) -> None:
    """Give rows the priorities in a sample; see `ReplayBufferEnsemble.update_tensordict_priority`."""
    ranked = _ranked(members)
    if not ranked:
        return
    index, ids, stamps = _unpack(batch, None)
    ndim = members[0].buffer.storage.ndim
    lead = min(2, ids.ndim)
    owner = ids.reshape(-1, ids.shape[lead:].numel())[:, 0]
    changes: dict[int, tuple[Any, Any, Any]] = {}
    for i in ranked:
        member = members[i]
        at = (owner == i).nonzero().flatten()
        if at.shape[0] == 0:
            continue
        key = member.buffer.priority_key if isinstance(member.buffer, TensorDictReplayBuffer) else "td_error"
        found = batch.get(key, None)
        if found is None:
            path = (key,) if isinstance(key, str) else tuple(key)
            msg = f"the batch has no key {kinds.show_path(path)}: write the priorities there, or call update_priority()"
            raise KeyMissingError(msg)
        part = {"index": _take(_flat(index, lead), at), "priority": _take(_flat(found, lead), at)}
        if stamps is not None:
            part["index_generation"] = _take(_flat(stamps, lead), at)
        windows = {name: batch.get(name, None) for name in _WINDOWS}
        part |= {name: _take(_flat(value, lead), at) for name, value in windows.items() if value is not None}
        reduce = priorities.as_sampler(member.engine.sampler).reduce
        changes[i] = priorities.from_batch(part, "priority", reduce, ndim)
    _write(members, changes)


def _ranked(members: Sequence[Member]) -> list[int]:
    """Return the members that keep priorities; warn where there are none."""
    found = [i for i, member in enumerate(members) if member.engine.sampler.prioritized]
    if not found:
        warn_of_sampler(members[0].engine.sampler)
    return found


def _write(members: Sequence[Member], changes: dict[int, tuple[Any, Any, Any]]) -> None:
    """Check the changes of all members, then make them."""
    with locked([members[i] for i in changes]):
        ready = [(members[i].engine, priorities.prepare(members[i].engine, *change)) for i, change in changes.items()]
        for engine, change in ready:
            priorities.check(engine, change)
        for engine, change in ready:
            priorities.apply(engine, change)


def _unpack(sample: Any, given: Any) -> tuple[Tensor, Tensor, Any]:
    """Return index, members and stamps of a sample, of its info, or of the `index` in one of them."""
    found = sample
    if _has(found, "index") and _is_tree(found["index"]):
        given = found.get("index_generation", None) if given is None else given
        found = found["index"]
    if not (_has(found, "index") and _has(found, "buffer_ids")):
        keys = f" with the keys {sorted(map(str, sample.keys()))}" if _is_tree(sample) else ""
        msg = f"{_NAMES}; got {type(sample).__name__}{keys}"
        raise KindError(msg)
    return _as_tensor(found["index"]), _as_tensor(found["buffer_ids"]), given


def _is_tree(data: Any) -> bool:
    return isinstance(data, dict) or kinds.is_tensordict(data)


def _has(data: Any, key: str) -> bool:
    return _is_tree(data) and key in data.keys()  # noqa: SIM118 (a TensorDict iterates over rows)


def _as_tensor(value: Any) -> Tensor:
    found = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value), device="cpu")
    if found.dtype is torch.bool or found.is_floating_point() or found.is_complex():
        msg = f"index, buffer_ids and generation hold integers, got {found.dtype}: pass what sample() gave"
        raise KindError(msg)
    return found.detach()


def _as_members(ids: Tensor, lead: torch.Size, count: int) -> Tensor:
    """Return one member for each row, `[rows]`; one for each part of the batch, `[parts]`, will do."""
    if ids.shape != lead[: ids.ndim]:
        msg = f"buffer_ids must have the shape {list(lead)} of the index, or {list(lead[:1])}, got {list(ids.shape)}"
        raise SchemaError(msg)
    ids = ids.reshape(*ids.shape, *[1] * (len(lead) - ids.ndim)).expand(lead).reshape(-1)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        msg = f"buffer_ids must be in [0, {count}), got {int(ids.min())} to {int(ids.max())}"
        raise SlotError(msg)
    return ids


def _as_rows(priority: Any, lead: torch.Size) -> Tensor:
    """Return a priority for each row, `[rows, *shape]`, or the one for all of them, `[]`."""
    try:
        values = (
            priority
            if isinstance(priority, Tensor)
            else torch.as_tensor(np.asarray(priority, dtype=np.float64), device="cpu")
        )
    except (TypeError, ValueError) as error:
        msg = f"priorities are numbers, got {type(priority).__name__} ({error})"
        raise KindError(msg) from None
    values = values.detach()
    if values.shape[: len(lead)] == lead:
        return values.reshape(-1, *values.shape[len(lead) :])
    if values.numel() == 1:
        return values.reshape(())
    if values.numel() == lead.numel():
        return values.reshape(-1)
    msg = f"priorities must be one number, or begin with the shape {list(lead)} of the index, got {list(values.shape)}"
    raise SchemaError(msg)


def _flat(values: Tensor, lead: int) -> Tensor:
    return values.reshape(-1, *values.shape[lead:])


def _take(values: Any, at: Tensor) -> Any:
    return None if values is None else values.index_select(0, at.to(values.device))
