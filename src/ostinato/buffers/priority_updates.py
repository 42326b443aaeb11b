"""Priorities on their way from users to the sampler: which slots, one number for each row, and no stale ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core import kinds
from ostinato.core.records import require_values
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, SlotError
from ostinato.samplers.base import check_rows

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ostinato.buffers.records import Engine, Ticket
    from ostinato.samplers import PrioritySampler, Sampler
    from ostinato.storages import Storage

__all__ = [
    "Change",
    "apply_change",
    "as_sampler",
    "check_change",
    "check_sampler",
    "in_storage_order",
    "prepare_change",
    "priorities_of_batch",
    "priorities_of_rows",
    "rank_fields",
    "unpack_update",
    "update_priorities",
]

_CPU = torch.device("cpu")
_INT = torch.int64
_FLOATS = frozenset({torch.float32, torch.float64})
_ERA = 2**44
"""Ring of a buffer that was loaded over begin anew: batches from before must not fit the new rows."""


def check_sampler(storage: Storage, sampler: Sampler) -> None:
    """Refuse a sampler that cannot keep a priority for each slot.

    Raises:
        OptionError: if the storage has room for more rows.
    """
    if sampler.prioritized and as_sampler(sampler).max_capacity < storage.max_size:
        msg = (
            f"{type(sampler).__name__} keeps priorities for max_capacity={as_sampler(sampler).max_capacity} rows, the "
            f"storage has room for {storage.max_size}: give the sampler the storage's max_size"
        )
        raise OptionError(msg)


def as_sampler(sampler: Sampler) -> PrioritySampler:
    """Return a sampler that says it keeps priorities, as what it then is."""
    return sampler  # type: ignore[return-value]


def priorities_of_rows(engine: Engine, data: Any, rows: int) -> Tensor | None:
    """Return the priorities that rows about to be written bring along, float64 `[rows]`, checked; None if they do not.

    Raises:
        PriorityError: naming the positions of bad ones; nothing has been written then.
        SchemaError: if the numbers are not those of `rows` rows.
    """
    if engine.priority_path is None:
        return None
    sampler = as_sampler(engine.sampler)
    values = _find(data, engine.priority_path, rows, sampler)
    if values is None:
        return None
    values = values.to(engine.storage.device)
    sampler.check(values)
    return values


def _find(data: Any, path: tuple[Hashable, ...], rows: int, sampler: PrioritySampler) -> Tensor | None:
    if type(data) is list:
        found = [_find(row, path, rows // max(len(data), 1), sampler) for row in data]
        held = [values for values in found if values is not None]
        return torch.cat(held) if held and len(held) == len(found) else None
    held = kinds.find_field(data, path)
    if held is None:
        return None
    values = kinds.as_tensor(held, path)
    _require_real(values)
    if values.numel() == 0 or values.numel() % rows:
        msg = f"{kinds.show_path(path)} must hold priorities of {rows} rows, got shape {list(values.shape)}"
        raise SchemaError(msg)
    return sampler.reduce(values.reshape(rows, -1)).contiguous()


def rank_fields(engine: Engine, ticket: Ticket) -> dict[str, Tensor]:
    """Return what samples of prioritized buffers carry beside their index, `[R]` each; nothing for others.

    `priority_weight` is that of the row drawn, `index_generation` the stamp of each record; of windows around anchors
    `anchor_generation` is that of the anchor.
    """
    draw, plan = ticket.draw, ticket.plan
    if draw.weights is None:
        return {}
    found = {"priority_weight": ticket.per_record(draw.weights)}
    if draw.generations is not None:
        found["index_generation"] = draw.generations if plan is None or plan.generations is None else plan.generations
        if plan is not None and "anchor_index" in plan.notes:
            found["anchor_generation"] = plan.per_record(draw.generations)
        if engine.era:
            found |= {key: value + engine.era * _ERA for key, value in found.items() if key.endswith("generation")}
    return found


class Change(NamedTuple):
    """New priorities of a buffer, in the form that samplers take, and not yet written."""

    slots: Tensor
    values: Tensor
    stamps: Tensor | None


def update_priorities(engine: Engine, index: Any, priority: Any, given: Any) -> None:
    """Give rows new priorities; see `ReplayBuffer.update_priority`."""
    with engine.lock:
        apply_change(engine, prepare_change(engine, index, priority, given))


def prepare_change(engine: Engine, index: Any, priority: Any, given: Any) -> Change:
    """Bring indices, priorities and stamps to the form that samplers take; the caller holds the lock.

    Raises:
        KindError, SchemaError, SlotError: for what cannot be read; numbers are checked by `check`, or when written.
    """
    kinds.require_eager("updating priorities")
    storage, sampler = engine.storage, as_sampler(engine.sampler)
    if not _is_plain(index, priority, given, storage):
        index, batch = _slots(index, storage)
        if given is not None:
            given = _stamps_given(given, index)
        priority = _values(priority, batch, index.shape[0], storage, sampler)
    if given is not None and engine.era:
        given = given - engine.era * _ERA
    return Change(index, priority, given)


def check_change(engine: Engine, change: Change) -> None:
    """Refuse a change that could not be made, on the CPU: for several buffers that change together.

    Raises:
        PriorityError: for priorities that cannot be kept.
        SlotError: without stamps, if an index is beyond the rows.
    """
    slots, values, stamps = change
    if not slots.is_cpu or not slots.numel():
        return
    as_sampler(engine.sampler).check(values)
    if stamps is None:
        check_rows(slots, len(engine.storage))


def apply_change(engine: Engine, change: Change) -> None:
    """Write what `prepare` read, but for rows replaced meanwhile; bad numbers are refused before anything changes."""
    if change.slots.shape[0]:
        engine.learn(*change)


def _is_plain(index: Any, priority: Any, given: Any, storage: Storage) -> bool:
    """Whether an update comes as samplers take it, as that of a sample does: a quick check, False says nothing."""
    native = backend.native
    if native is None or storage.ndim != 1 or type(index) is not Tensor or index.ndim != 1:
        return False
    dtype = priority.dtype if type(priority) is Tensor else None
    if dtype not in _FLOATS or storage.device != _CPU:
        return False
    shape = index.shape
    if given is None:
        return native.check_leaves([index, priority], [_INT, dtype], [shape, shape], Tensor) is not None
    return native.check_leaves([index, priority, given], [_INT, dtype, _INT], [shape] * 3, Tensor) is not None


def _slots(index: Any, storage: Storage) -> tuple[Tensor, tuple[int, ...]]:
    """Return slots int64 `[n]` on the storage's device, and the shape of the index (without the coordinates)."""
    if type(index) is Tensor and index.ndim == 1 and index.dtype is torch.int64 and storage.ndim == 1:
        require_values(index, "an index")
        here = index if index.is_cpu and storage.device.type == "cpu" else index.to(storage.device)
        return here.contiguous(), (index.shape[0],)
    if isinstance(index, tuple) and len(index) == storage.ndim:
        parts: tuple[Tensor, ...] = tuple(_integers(part, storage) for part in index)
        if len({part.shape for part in parts}) > 1:
            msg = f"the parts of an index must have one shape, got {[list(part.shape) for part in parts]}"
            raise KindError(msg)
    else:
        whole = _integers(index, storage)
        if storage.ndim == 1:
            parts = (whole,)
        elif whole.ndim == 0 or whole.shape[-1] != storage.ndim:
            msg = (
                f"the index of a storage with ndim={storage.ndim} is a pair (step, lane) or a tensor [..., 2], got "
                f"shape {list(whole.shape)}: pass what extend() or sample() gave"
            )
            raise KindError(msg)
        else:
            parts = tuple(whole.unbind(-1))
    if storage.ndim > 1:
        _check_lanes(parts[1], storage.num_envs)
        parts = (torch.where(parts[0] < 0, parts[0], parts[0] * storage.num_envs + parts[1]),)
    return parts[0].reshape(-1).contiguous(), tuple(parts[0].shape)


def _integers(index: Any, storage: Storage) -> Tensor:
    try:
        found = index if isinstance(index, Tensor) else torch.as_tensor(np.asarray(index), device="cpu")
    except (TypeError, ValueError) as error:
        msg = f"an index is an integer, a list or an integer tensor of any device, got {index!r} ({error})"
        raise KindError(msg) from None
    if found.numel() == 0 and not isinstance(index, Tensor):
        found = found.to(torch.int64)
    if found.dtype is torch.bool or found.is_floating_point() or found.is_complex():
        msg = f"an index must hold integers, got {found.dtype}: pass what extend() or sample() gave"
        raise KindError(msg)
    require_values(found, "an index")
    return found.detach().to(storage.device, torch.int64)


def _check_lanes(lanes: Tensor, count: int) -> None:
    if lanes.device.type == "cpu" and lanes.numel() and not -1 <= int(lanes.min()) <= int(lanes.max()) < count:
        msg = f"lanes must be in [0, {count}), got {int(lanes.min())} to {int(lanes.max())}"
        raise SlotError(msg)


def _values(priority: Any, batch: tuple[int, ...], n: int, storage: Storage, sampler: PrioritySampler) -> Tensor:
    """Return one priority for each of `n` slots, float64, on the storage's device."""
    if isinstance(priority, (int, float)) and not isinstance(priority, bool):
        return torch.full((n,), float(priority), dtype=torch.float64, device=storage.device)  # filled in there
    try:
        values = (
            priority
            if isinstance(priority, Tensor)
            else torch.as_tensor(np.asarray(priority, dtype=np.float64), device="cpu")
        )
    except (TypeError, ValueError) as error:
        msg = f"priorities are numbers, got {type(priority).__name__} ({error})"
        raise KindError(msg) from None
    if values.dtype is torch.bool:
        msg = f"priorities must be numbers, got {values.dtype}"
        raise KindError(msg)
    _require_real(values)
    require_values(values, "priorities")
    values = values.detach().to(storage.device)
    shape = tuple(values.shape)
    if shape == batch:
        return values.reshape(-1).to(torch.float64).contiguous()
    if values.numel() == 1:
        return values.reshape(1).to(torch.float64).expand(n).contiguous()
    if shape[: len(batch)] == batch:
        return sampler.reduce(values.reshape((n, *shape[len(batch) :]))).contiguous()
    if values.numel() == n:
        return values.reshape(-1).to(torch.float64).contiguous()
    msg = (
        f"priorities must be one number, or have the shape {list(batch)} of the index (further dimensions are reduced "
        f"per row), got shape {list(shape)}"
    )
    raise SchemaError(msg)


def _require_real(values: Tensor) -> None:
    """Raise `KindError` for complex priorities."""
    if values.is_complex():
        msg = f"priorities must be real numbers, got {values.dtype}: pass absolute errors, such as td_error.abs()"
        raise KindError(msg)


def _stamps_given(given: Any, slots: Tensor) -> Tensor:
    stamps = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given), device="cpu")
    if stamps.numel() != slots.shape[0] or stamps.dtype is torch.bool or stamps.is_floating_point():
        msg = (
            f"generation must hold one integer for each of the {slots.shape[0]} rows (the sample's index_generation), "
            f"got {stamps.dtype}{list(stamps.shape)}"
        )
        raise SchemaError(msg)
    require_values(stamps, "generation")
    return stamps.reshape(-1).to(slots.device, torch.int64).contiguous()


def in_storage_order(priority: Any, index: Any) -> Any:
    """Bring priorities `[lanes, steps]`, in the form of the data given to `extend`, to the order of its index."""
    if isinstance(priority, Tensor) and priority.ndim > 1:
        rows = index[0].numel() if isinstance(index, tuple) else index.shape[0] if isinstance(index, Tensor) else 0
        if priority.shape[0] != rows and priority.shape[:2].numel() == rows:
            return priority.transpose(0, 1).flatten(0, 1)
    return priority


def unpack_update(sample: Any, priority: Any, given: Any) -> tuple[Any, Any, Any]:
    """Return index, priorities and generation of a sample or of its info; of anything else, what was given.

    Priorities of windows become those of their anchors: the largest of the valid rows of each, or one for each.

    Raises:
        KeyMissingError: if a sample has no index.
    """
    if type(sample) is Tensor or not (isinstance(sample, dict) or kinds.is_tensor_collection(sample)):
        return sample, priority, given
    keys = sample.keys()
    if "index" not in keys:
        msg = f"a sample must have the key 'index' to update priorities, got {sorted(map(str, keys))}"
        raise KeyMissingError(msg)
    stamps = sample.get("index_generation", None) if given is None else given
    if "anchor_index" in keys and "validity_mask" in keys:
        return _of_anchors(sample, priority, sample.get("anchor_generation", None) if given is None else given)
    return sample["index"], priority, stamps


def _of_anchors(sample: Any, priority: Any, stamps: Any) -> tuple[Any, Any, Any]:
    """Return index, priorities and generation of the anchors of windows, whatever the shape of the batch."""
    valid, anchors = sample["validity_mask"], sample["anchor_index"]
    if isinstance(anchors, tuple):
        anchors = torch.stack(anchors, -1)
    lead, anchors = valid.shape, anchors.reshape(-1, *anchors.shape[valid.ndim :])
    first = (sample["step_in_sequence"] == 0).reshape(-1)
    windows = int(first.sum())
    values = priority if isinstance(priority, Tensor) else torch.as_tensor(np.asarray(priority), device="cpu")
    if values.numel() == 1:
        values = values.reshape(1).expand(lead)
    if values.shape[: len(lead)] != lead or (len(lead) == 1 and lead[0] == windows):  # one for each window
        few = isinstance(stamps, Tensor) and stamps.numel() == first.numel()
        return anchors[first], values, stamps.reshape(-1)[first] if few else stamps
    seen = valid.reshape(-1).to(anchors.device)
    if not bool(seen.all()):
        anchors, first = anchors[seen], first[seen]
        values = values.reshape(seen.numel(), -1)[seen.to(values.device)]
        stamps = stamps.reshape(-1)[seen.to(stamps.device)] if isinstance(stamps, Tensor) else stamps
    index, group = torch.unique(anchors, dim=0, return_inverse=True)
    values = values.detach().reshape(first.numel(), -1).to(torch.float64).amax(1)
    best = values.new_full((index.shape[0],), -torch.inf).scatter_reduce_(0, group.to(values.device), values, "amax")
    if isinstance(stamps, Tensor):
        stamps = stamps.new_zeros(index.shape[0]).scatter_(0, group.to(stamps.device), stamps.reshape(-1))
    return index, best, stamps


def priorities_of_batch(sample: Any, key: str | tuple[str, ...], reduce: Any, ndim: int) -> tuple[Any, Tensor, Any]:
    """Return index, priorities and generation of a TensorDict, one of each per item.

    Where the rows are trajectories, the batch has them as `[B, T]`, all steps of an item with one index: their
    priorities are reduced.

    Raises:
        KeyMissingError: if it has no priority, or no index.
    """
    path = (key,) if isinstance(key, str) else tuple(key)
    priority = sample.get(path if len(path) > 1 else path[0], None)
    if priority is None:
        msg = f"the batch has no key {kinds.show_path(path)}: write the priorities there, or call update_priority()"
        raise KeyMissingError(msg)
    index, priority, stamps = unpack_update(sample, priority, None)
    lead = index.ndim - (1 if ndim > 1 else 0)
    if lead > 1:
        first = index[:, :1].reshape(index.shape[0], *[1] * (lead - 1), *index.shape[lead:])
        if bool((index == first).all()):
            while index.ndim > (2 if ndim > 1 else 1):
                index = index[:, 0]
                stamps = None if stamps is None else stamps[:, 0]
            priority = reduce(priority.reshape(priority.shape[0], -1))
    return index, priority, stamps
