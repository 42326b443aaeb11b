"""Updates of rows in several shards: each shard gets its part, and results are joined in the order of the index."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.buffers.updates import (
    ConditionalUpdateResult,
    join_results,
    parse_update,
    part_of,
    priorities_of_batch,
    read_generations,
    rows_by_owner,
    rows_of_sample,
)
from ostinato.core import kinds
from ostinato.core.index import Slots, read_integers, read_slots
from ostinato.distributed.routing import split_index
from ostinato.distributed.serialization import Serialized
from ostinato.errors import KindError, OptionError, SlotError
from ostinato.samplers.base import check_not_negative
from ostinato.samplers.priorities import raise_invalid, read_values, reduce_items

if TYPE_CHECKING:
    from ostinato.buffers.updates import PriorityUpdate
    from ostinato.distributed.shard_client import ShardClient


class ShardInfo(NamedTuple):
    """Properties of the shards, which are the same for all."""

    batch_size: int | None
    prioritized: bool
    priority_key: str | tuple[str, ...]
    reduction: str
    capacity: int
    """Rows of one shard."""
    counting: bool
    """Whether draws consume rows."""
    waits: bool
    """Whether writes may wait for room in the shard, as with a queue."""
    least_index: int = 0
    """Smallest index of a row: 0, or -1 where that marks a row that was not kept."""
    steps: int | None = 1
    """Steps of an item, for which priorities may be given one by one: see `steps_of`."""

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> ShardInfo:
        """Return the properties that `ShardActor.describe` returned."""
        return cls(*(described[name] for name in cls._fields))

    def reduce(self, items: Tensor) -> Tensor:
        """Reduce several priorities of each item, `[n, *shape]`, to one, float64 `[n]`."""
        return reduce_items(items, self.reduction)


# -- rows of several shards -------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows by an index of the whole buffer."""

    slots: Tensor
    """Their slots in the shards, int64 `[n]`."""
    parts: dict[int, Tensor]
    """Positions of the rows of each shard, int64 `[m]`, in the order of the index; -1, for no row, is left out."""


def _find_rows(index: Tensor, shards: ShardClient, info: ShardInfo) -> _Rows:
    """Return the rows of an index, int64 `[n]`.

    Raises:
        SlotError: An index is negative, or names no shard.
    """
    check_not_negative(index, least=info.least_index)
    owners, slots = split_index(index)
    _check_owners(owners, index, len(shards))
    return _Rows(slots, rows_by_owner(owners))


def _find_slots(index: Tensor, shards: ShardClient, info: ShardInfo) -> _Rows:
    """Do `_find_rows` for slots that must exist.

    Raises:
        SlotError: As there, or an index names no slot of its shard.
    """
    rows = _find_rows(index, shards, info)
    bad = rows.slots >= info.capacity
    if bool(bad.any()):
        first, slot = int(index[bad][0]), int(rows.slots[bad][0])
        msg = f"index {first} is of no row: it names slot {slot} of a shard that holds {info.capacity}"
        raise SlotError(msg)
    return rows


def _check_owners(owners: Tensor, index: Tensor, shards: int) -> None:
    """Raise `SlotError` if an index names a shard that does not exist; -1 names no row."""
    bad = (owners >= shards) | (index < -1)
    if bool(bad.any()):
        first = int(index[bad].reshape(-1)[0])
        msg = f"index {first} is of no shard: there are {shards}, and an index is what extend() or sample() gave"
        raise SlotError(msg)


def one_shard(index: Any, shards: int) -> tuple[int, Any]:
    """Return the shard of an index, and the slots there: a number for a number.

    Raises:
        SlotError: The index names no shard, or several.
    """
    if not isinstance(index, (int, Tensor, np.ndarray, np.integer, list)):
        msg = f"rows of shards are read by what extend() or sample() gave, got {type(index).__name__}: {index!r}"
        raise KindError(msg)
    where = read_integers("index", index).to("cpu", torch.int64)
    owners, slots = split_index(where)
    _check_owners(owners, where, shards)
    found = sorted(set(owners.reshape(-1).tolist()))
    if len(found) != 1 or found[0] < 0:
        msg = f"an index must be of rows of one shard, got rows of {found}: read them shard by shard"
        raise SlotError(msg)
    return found[0], int(slots) if where.ndim == 0 else slots


def delete_rows(shards: ShardClient, info: ShardInfo, index: Any, generation: Any = None) -> Tensor:
    """Delete rows, each in its shard; see `ShardedReplayBuffer.delete`.

    Args:
        shards: The shards.
        info: Properties of the shards.
        index: Rows, or a sample.
        generation: Their generations.
    """
    index, generation = rows_of_sample(index, generation)
    flat, batch = read_slots(index, Slots())
    generations = None if generation is None else read_generations(generation, flat)
    rows = _find_slots(flat, shards, info)
    deleted = torch.zeros(flat.shape[0], dtype=torch.bool, device="cpu")
    for i, found in _call(shards, "delete", rows, generations).items():
        deleted[rows.parts[i]] = found
    return deleted.reshape(batch)


def _present(parts: dict[int, Tensor], shards: ShardClient) -> dict[int, Tensor]:
    present = shards.present()
    return {i: at for i, at in parts.items() if i in present}


def _call(shards: ShardClient, name: str, rows: _Rows, *values: Tensor | None) -> dict[int, Any]:
    """Call a method of the buffers with the slots and the values of their rows; return the results by shard."""
    batch = tuple(rows.slots.shape)
    calls = {
        i: (name, *(Serialized(part_of(value, at, batch)) for value in (rows.slots, *values)))
        for i, at in _present(rows.parts, shards).items()
    }
    return shards.call("call", calls, "update")


# -- priorities -------------------------------------------------------------------------------------------------------


def update_priorities(
    shards: ShardClient, info: ShardInfo, index: Any, priority: Any = None, generation: Any = None
) -> None:
    """Set priorities, each in the shard of its row; those of missing shards are dropped.

    Warns, and does nothing, if the shards have no priorities.
    """
    if not info.prioritized:
        msg = "update_priority() has no effect: the shards' sampler has no priorities; use PrioritizedSampler"
        warnings.warn(msg, UserWarning, stacklevel=5)
        shards.check_gone()
        return
    update = parse_priorities(info, index, priority, generation)
    rows = _find_slots(update.slots, shards, info)
    _call(shards, "update_priority", rows, update.priorities, update.generations)


def update_batch_priorities(shards: ShardClient, info: ShardInfo, data: Any) -> None:
    """Set the priorities of the rows of a sample to those that it holds; see `update_priorities`."""
    found = priorities_of_batch(data, info.priority_key, info.reduce, 1) if info.prioritized else (data,)
    update_priorities(shards, info, *found)


def parse_priorities(info: ShardInfo, index: Any, priority: Any, generation: Any) -> PriorityUpdate:
    """Parse the arguments of `update_priority`, before they are divided: errors name the positions given.

    Raises:
        UsageError: There are no priorities.
        PriorityError: Priorities are negative or not finite.
        SlotError: An index is negative.
    """
    update = parse_update(index, priority, generation, Slots(), info.reduce, lambda: info.steps)
    check_not_negative(update.slots, least=info.least_index)
    _check_values(update.priorities)
    return update


def _check_values(priorities: Tensor) -> None:
    if not bool(((priorities >= 0) & (priorities < torch.inf)).all()):
        raise_invalid(priorities)


# -- conditional updates ----------------------------------------------------------------------------------------------


def update_shards(
    shards: ShardClient,
    info: ShardInfo,
    *,
    index: Any,
    generation: Any = None,
    patch: Any = None,
    version: Any = None,
    priority: Any = None,
    **options: Any,
) -> ConditionalUpdateResult:
    """Change rows that are still there, each in its shard; see `ShardedReplayBuffer.update_if_present`.

    Values that may not fit the stored dtype are checked in all shards before any of them is changed.
    """
    index, generation = rows_of_sample(index, generation)
    if generation is None:
        msg = "update_if_present() needs generations: pass index_generation as well, or a sample that has them"
        raise OptionError(msg)
    where = read_integers("index", index).to("cpu", torch.int64)
    flat, batch = where.reshape(-1), tuple(where.shape)
    generations = read_generations(generation, flat, OptionError)
    rows = _find_rows(flat, shards, info)
    if priority is not None:
        priority = read_values(priority, batch, info.reduce, info.steps).to("cpu")  # a shard names a sampler without
        _check_values(priority)
    parts = _present(rows.parts, shards)
    if not rows.parts:
        parts = {shards.present()[0]: torch.empty(0, dtype=torch.int64, device="cpu")}  # it checks the arguments
    given = {"patch": {} if patch is None else patch, "version": version, "priority": priority}
    calls = {}
    for i, at in parts.items():
        own = {name: part_of(value, at, batch) for name, value in given.items()}
        own |= {"index": rows.slots[at], "generation": generations[at], **options}
        calls[i] = (Serialized(own),)
    if len(calls) > 1 and not (_only_tensors(patch) and _only_tensors(version)):
        calls = {i: calls[i] for i in shards.call("check_update", calls, "update")}
    found = shards.call("update_if_present", calls, "update")
    return join_results(batch, parts, found, versions=version is not None)


def _only_tensors(value: Any) -> bool:
    """Whether no value is cast: tensors must have the stored dtype, so all shards find the same."""
    if isinstance(value, Mapping):
        return all(map(_only_tensors, value.values()))
    return value is None or isinstance(value, Tensor) or kinds.is_tensor_collection(value)
