"""Priorities on their way from users to the sampler: which slots, one number for each row, and no stale ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, SlotError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ostinato.buffers.engine import Engine
    from ostinato.samplers import PrioritySampler, Sampler
    from ostinato.storages import Storage

__all__ = [
    "Change",
    "apply",
    "as_sampler",
    "check_sampler",
    "from_batch",
    "from_rows",
    "generation",
    "in_storage_order",
    "prepare",
    "unpack",
    "update",
]

_FLOATS = frozenset({torch.float32, torch.float64})
_ERA = 2**44
"""Stamps of a buffer that was loaded over begin anew: batches from before must not fit the new rows."""


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


def from_rows(engine: Engine, data: Any, rows: int) -> Tensor | None:
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
    for key in path:
        if not (isinstance(data, dict) or kinds.is_tensor_collection(data)) or key not in data.keys():  # noqa: SIM118
            return None
        data = data[key] if isinstance(data, dict) else data.get(key)
    values = kinds.as_tensor(data, path)
    if values.numel() == 0 or values.numel() % rows:
        msg = f"{kinds.show_path(path)} must hold priorities of {rows} rows, got shape {list(values.shape)}"
        raise SchemaError(msg)
    return sampler.reduce(values.reshape(rows, -1)).contiguous()


def generation(engine: Engine, stamps: Tensor) -> Tensor:
    """Return the stamps of a draw as samples carry them, int64 `[B]`."""
    return stamps + engine.era * _ERA if engine.era else stamps


class Change(NamedTuple):
    """New priorities of a buffer, read and not yet written."""

    slots: Tensor
    values: Tensor
    keep: Tensor | None
    """bool `[n]`, False where nothing is to change; None where nothing was left out, or is left out already."""
    stale: int | Tensor
    """How many were left out because their rows had been replaced."""


def update(engine: Engine, index: Any, priority: Any, given: Any) -> None:
    """Give rows new priorities; see `ReplayBuffer.update_priority`."""
    with engine.lock:
        apply(engine, prepare(engine, index, priority, given))


def prepare(engine: Engine, index: Any, priority: Any, given: Any) -> Change:
    """Read indices, priorities and stamps; the caller holds the lock until it has applied them, or leaves it.

    Raises:
        KindError, SchemaError, SlotError: for what cannot be read; the numbers are checked when they are assigned.
    """
    storage, sampler = engine.storage, as_sampler(engine.sampler)
    slots, batch = _slots(index, storage)
    values = _values(priority, batch, slots.shape[0], storage, sampler)
    if slots.numel() == 0:
        return Change(slots, values, None, 0)
    if given is None:
        if not slots.is_cpu:
            return Change(slots, values, slots != -1, 0)
        slots, values = _present(slots, values, len(storage))
        return Change(slots, values, None, 0)
    fresh = _fresh(engine, slots, _stamps_given(given, slots))
    if not slots.is_cpu:
        return Change(slots, values, fresh, (~fresh).sum())
    if fresh.numpy().all():
        return Change(slots, values, None, 0)
    return Change(slots[fresh], values[fresh], None, int((~fresh).sum()))


def apply(engine: Engine, change: Change) -> None:
    """Write what `prepare` read; the sampler refuses bad numbers before it changes anything."""
    if change.slots.numel():
        as_sampler(engine.sampler).assign(change.slots, change.values, engine.view(), change.keep)
    if isinstance(change.stale, Tensor) or change.stale:
        engine.stale_updates = engine.stale_updates + change.stale


def _slots(index: Any, storage: Storage) -> tuple[Tensor, tuple[int, ...]]:
    """Return slots int64 `[n]` on the storage's device, and the shape of the index (without the coordinates)."""
    if type(index) is Tensor and index.ndim == 1 and index.dtype is torch.int64 and storage.ndim == 1:
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
        _check_lanes(parts[1], storage.lanes)
        parts = (torch.where(parts[0] < 0, parts[0], parts[0] * storage.lanes + parts[1]),)
    return parts[0].reshape(-1).contiguous(), tuple(parts[0].shape)


def _integers(index: Any, storage: Storage) -> Tensor:
    try:
        found = index if isinstance(index, Tensor) else torch.as_tensor(np.asarray(index))
    except (TypeError, ValueError) as error:
        msg = f"an index is an integer, a list or an integer tensor of any device, got {index!r} ({error})"
        raise KindError(msg) from None
    if found.numel() == 0 and not isinstance(index, Tensor):
        found = found.to(torch.int64)
    if found.dtype is torch.bool or found.is_floating_point() or found.is_complex():
        msg = f"an index must hold integers, got {found.dtype}: pass what extend() or sample() gave"
        raise KindError(msg)
    return found.detach().to(storage.device, torch.int64)


def _check_lanes(lanes: Tensor, count: int) -> None:
    if lanes.device.type == "cpu" and lanes.numel() and not -1 <= int(lanes.min()) <= int(lanes.max()) < count:
        msg = f"lanes must be in [0, {count}), got {int(lanes.min())} to {int(lanes.max())}"
        raise SlotError(msg)


def _values(priority: Any, batch: tuple[int, ...], n: int, storage: Storage, sampler: PrioritySampler) -> Tensor:
    """Return one priority for each of `n` slots, float64, on the storage's device."""
    if type(priority) is Tensor and priority.is_cpu and priority.dtype in _FLOATS and priority.shape == batch:
        return torch.from_numpy(priority.detach().numpy().reshape(-1).astype(np.float64)).to(storage.device)
    try:
        values = priority if isinstance(priority, Tensor) else torch.as_tensor(np.asarray(priority, dtype=np.float64))
    except (TypeError, ValueError) as error:
        msg = f"priorities are numbers, got {type(priority).__name__} ({error})"
        raise KindError(msg) from None
    if values.is_complex() or values.dtype is torch.bool:
        msg = f"priorities must be real numbers, got {values.dtype}"
        raise KindError(msg)
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


def _stamps_given(given: Any, slots: Tensor) -> Tensor:
    stamps = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if stamps.numel() != slots.shape[0] or stamps.dtype is torch.bool or stamps.is_floating_point():
        msg = (
            f"generation must hold one integer for each of the {slots.shape[0]} rows (the sample's index_generation), "
            f"got {stamps.dtype}{list(stamps.shape)}"
        )
        raise SchemaError(msg)
    return stamps.reshape(-1).to(slots.device, torch.int64)


def _fresh(engine: Engine, slots: Tensor, given: Tensor) -> Tensor:
    """Return bool `[n]`: which rows are still those that the stamps were read from."""
    return engine.stamps.match(slots, given - engine.era * _ERA if engine.era else given)


def _present(slots: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Leave out -1, which stands for a row that the writer did not keep, and refuse what is no row."""
    low, high = int(np.minimum.reduce(slots.numpy())), int(np.maximum.reduce(slots.numpy()))
    if low < -1 or high >= rows:
        msg = f"index {high if high >= rows else low} is out of range for {rows} rows: use an index in [0, {rows})"
        raise SlotError(msg)
    return (slots, values) if low >= 0 else (slots[slots >= 0], values[slots >= 0])


def in_storage_order(priority: Any, index: Any) -> Any:
    """Bring priorities `[lanes, steps]`, in the form of the data given to `extend`, to the order of its index."""
    if isinstance(priority, Tensor) and priority.ndim > 1:
        rows = index[0].numel() if isinstance(index, tuple) else index.shape[0] if isinstance(index, Tensor) else 0
        if priority.shape[0] != rows and priority.shape[:2].numel() == rows:
            return priority.transpose(0, 1).flatten(0, 1)
    return priority


def unpack(sample: Any, given: Any) -> tuple[Any, Any]:
    """Return index and generation of a sample or of its info; of anything else, itself and `given`.

    Raises:
        KeyMissingError: if a sample has no index.
    """
    if type(sample) is Tensor or not (isinstance(sample, dict) or kinds.is_tensor_collection(sample)):
        return sample, given
    if "index" not in sample.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
        msg = f"a sample must have the key 'index' to update priorities, got {sorted(map(str, sample.keys()))}"
        raise KeyMissingError(msg)
    return sample["index"], sample.get("index_generation", None) if given is None else given


def from_batch(sample: Any, key: str | tuple[str, ...], reduce: Any, ndim: int) -> tuple[Any, Tensor, Any]:
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
    index, stamps = unpack(sample, None)
    lead = index.ndim - (1 if ndim > 1 else 0)
    if lead > 1:
        first = index[:, :1].reshape(index.shape[0], *[1] * (lead - 1), *index.shape[lead:])
        if bool((index == first).all()):
            while index.ndim > (2 if ndim > 1 else 1):
                index = index[:, 0]
                stamps = None if stamps is None else stamps[:, 0]
            priority = reduce(priority.reshape(priority.shape[0], -1))
    return index, priority, stamps
