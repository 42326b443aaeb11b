"""Conditional updates of rows in several shards: each shard gets its part, and the results are joined in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ostinato.buffers.updates import (
    ConditionalUpdateResult,
    join_results,
    part_of,
    read_generations,
    rows_by_owner,
    rows_of_sample,
)
from ostinato.core import kinds
from ostinato.core.index import read_integers
from ostinato.distributed.routing import split_index
from ostinato.distributed.serialization import Serialized
from ostinato.distributed.writing import check_owners
from ostinato.errors import OptionError
from ostinato.samplers.base import check_not_negative
from ostinato.samplers.priorities import raise_invalid, read_values

if TYPE_CHECKING:
    from ostinato.distributed.shard_client import ShardClient
    from ostinato.distributed.writing import ShardInfo

__all__ = ["update_shards"]


class _Rows(NamedTuple):
    """The rows of an update."""

    batch: tuple[int, ...]
    """Shape of the index."""
    parts: dict[int, Tensor]
    """Positions of the rows of each shard, int64 `[m]`, in the order of the index."""
    slots: Tensor
    """int64 `[n]`."""
    generations: Tensor
    """int64 `[n]`."""


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
    rows = _find_rows(index, generation, len(shards), info)
    if priority is not None:
        priority = _check_priorities(priority, rows.batch, info)
    present = shards.present()
    parts = {i: at for i, at in rows.parts.items() if i in present}
    if not rows.parts:
        parts = {present[0]: torch.empty(0, dtype=torch.int64, device="cpu")}  # it checks the arguments
    given = {"patch": {} if patch is None else patch, "version": version, "priority": priority}
    calls = {}
    for i, at in parts.items():
        own = {name: part_of(value, at, rows.batch) for name, value in given.items()}
        own |= {"index": rows.slots[at], "generation": rows.generations[at], **options}
        calls[i] = (Serialized(own),)
    if len(calls) > 1 and not (_only_tensors(patch) and _only_tensors(version)):
        calls = {i: calls[i] for i in shards.call("check_update", calls, "update")}
    found = shards.call("update_if_present", calls, "update")
    return join_results(rows.batch, parts, found, versions=version is not None)


def _find_rows(index: Any, generation: Any, shards: int, info: ShardInfo) -> _Rows:
    index, generation = rows_of_sample(index, generation)
    if generation is None:
        msg = "update_if_present() needs generations: pass index_generation as well, or a sample that has them"
        raise OptionError(msg)
    where = read_integers("index", index).to("cpu", torch.int64)
    flat = where.reshape(-1)
    generations = read_generations(generation, flat, OptionError)
    check_not_negative(flat, least=info.least_index)
    owners, slots = split_index(flat)
    check_owners(owners, flat, shards)
    return _Rows(tuple(where.shape), rows_by_owner(owners), slots, generations)


def _check_priorities(priority: Any, batch: tuple[int, ...], info: ShardInfo) -> Tensor:
    """Return one priority for each row, or one for all; a shard names a sampler that has none."""
    values = read_values(priority, batch, info.reduce, info.steps).to("cpu")
    if not bool(((values >= 0) & (values < torch.inf)).all()):
        raise_invalid(values)
    return values


def _only_tensors(value: Any) -> bool:
    """Whether no value is cast: tensors must have the stored dtype, so all shards find the same."""
    if isinstance(value, Mapping):
        return all(map(_only_tensors, value.values()))
    return value is None or isinstance(value, Tensor) or kinds.is_tensor_collection(value)
