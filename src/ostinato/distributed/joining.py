"""Parts of a batch from several shards become one batch. No Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.rows import describe
from ostinato.distributed.routing import join_index
from ostinato.errors import KindError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["join"]

_NAMES = ("index", "anchor_index")
_OWN = (*_NAMES, "priority_weight", "index_generation")
"""What names and weighs rows: in the info, and in batches of TensorDict buffers as well."""


def join(
    parts: Mapping[int, tuple[Any, dict[Any, Any]]], spots: Mapping[int, Tensor], factors: Mapping[int, float]
) -> tuple[Any, dict[Any, Any]]:
    """Put the parts of a batch together.

    Args:
        parts: from each shard its rows and their info.
        spots: the positions that each shard fills, int64.
        factors: what turns weights of each shard into those of the whole.

    Returns:
        The batch, in fresh memory, and its info, with indices of the whole.

    Raises:
        KindError: if batches are no tensors, or trees of these.
        SchemaError: if shards hold rows of different forms.
    """
    infos = {i: _as_whole(i, info, factors[i]) for i, (_, info) in parts.items()}
    first, info = parts[min(parts)]
    size = sum(int(at.shape[0]) for at in spots.values())
    each = info["index"].shape[0] // spots[min(parts)].shape[0]  # windows are several records for each row drawn
    where = {i: _records(at, each) for i, at in spots.items()}
    said = {
        key: _scatter({i: mine[key] for i, mine in infos.items()}, where, size * each)
        for key, value in info.items()
        if isinstance(value, Tensor) and all(key in mine for mine in infos.values())
    }
    try:
        schema = describe(first, 1)
    except SchemaError as error:
        msg = f"batches of shards must be tensors, or trees of these, to be put together, got {type(first).__name__}"
        raise KindError(msg) from error
    flats = {i: schema.flatten(data, None, 1).leaves for i, (data, _) in parts.items()}
    leaves = [
        _scatter({i: flat[at] for i, flat in flats.items()}, where, size * each) for at in range(len(schema.leaves))
    ]
    batch = schema.build(leaves, (size * each,), torch.device("cpu"))
    if kinds.is_tensor_collection(batch):
        kinds.put(batch, {key: said[key] for key in _OWN if key in said and key in batch.keys()})  # noqa: SIM118
    return batch, said


def _as_whole(shard: int, info: dict[Any, Any], factor: float) -> dict[Any, Any]:
    """Return the info of a shard's rows as that of rows of the whole."""
    changed = {key: join_index(shard, info[key]) for key in _NAMES if key in info}
    if "priority_weight" in info:
        changed["priority_weight"] = info["priority_weight"] * factor
    return {**info, **changed}


def _records(spots: Tensor, each: int) -> Tensor:
    return spots if each == 1 else (spots[:, None] * each + torch.arange(each)).reshape(-1)


def _scatter(values: Mapping[int, Tensor], where: Mapping[int, Tensor], size: int) -> Tensor:
    """Put values `[n, *shape]` of each shard to their places in `[size, *shape]`."""
    if len(values) == 1:
        return next(iter(values.values()))
    like = values[min(values)]
    out = like.new_empty((size, *like.shape[1:]))
    for i, value in values.items():
        out.index_copy_(0, where[i], value)
    return out
