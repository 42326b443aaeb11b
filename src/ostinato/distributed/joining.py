"""Parts of a batch from several shards become one batch. No Ray."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.rows import describe
from ostinato.distributed.routing import join_index
from ostinato.errors import KindError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.rows import Flat, Schema

__all__ = ["Part", "join", "split"]

_NAMES = ("index", "anchor_index")
_OWN = (*_NAMES, "priority_weight", "index_generation")
"""What names and weighs rows: in the info, and in batches of TensorDict buffers as well."""


class Part(NamedTuple):
    """Rows of a batch that come from one place."""

    shard: int
    """Which one; 0 leaves indices as they are."""
    data: Any
    """Rows."""
    info: dict[Any, Any]
    """What was said of them."""
    spots: Tensor
    """The positions that they fill, int64."""
    factor: float = 1.0
    """What turns weights of the shard into those of the whole."""


def join(parts: Sequence[Part]) -> tuple[Any, dict[Any, Any]]:
    """Put the parts of a batch together.

    Returns:
        The batch, in fresh memory unless there is one part, and its info, with indices of the whole.

    Raises:
        KindError: if batches are no tensors, or trees of these.
        SchemaError: if shards hold rows of different forms.
    """
    infos = [_as_whole(part) for part in parts]
    info, first = parts[0].info, parts[0]
    each = info["index"].shape[0] // first.spots.shape[0]  # windows are several records for each row drawn
    where = [_records(part.spots, each) for part in parts]
    size = each * sum(int(part.spots.shape[0]) for part in parts)
    said = {
        key: _scatter([mine[key] for mine in infos], where, size)
        for key, value in info.items()
        if isinstance(value, Tensor) and all(key in mine for mine in infos)
    }
    schema = _schema(first.data)
    flats = [_flat(part, schema, first.shard) for part in parts]
    leaves = [_scatter([flat.leaves[at] for flat in flats], where, size) for at in range(len(schema.leaves))]
    objects = [_scatter_objects([flat.objects[at] for flat in flats], where, size) for at in range(len(schema.objects))]
    return _built(schema, leaves, said, size, objects), said


def split(batch: Any, info: dict[Any, Any], sizes: Sequence[int]) -> list[tuple[Any, dict[Any, Any]]]:
    """Return a batch as several, of so many rows drawn, each with what was said of it. Views of its memory."""
    schema = _schema(batch)
    flat = schema.flatten(batch, None, 1)
    each = info["index"].shape[0] // sum(sizes)
    ends = [each * end for end in itertools.accumulate(sizes)]
    found = []
    for cut in map(slice, [0, *ends], ends):
        said = {key: value[cut] for key, value in info.items()}
        leaves, objects = [leaf[cut] for leaf in flat.leaves], [values[cut] for values in flat.objects]
        found.append((_built(schema, leaves, said, cut.stop - cut.start, objects), said))
    return found


def _flat(part: Part, schema: Schema, other: int) -> Flat:
    try:
        return schema.flatten(part.data, None, 1, exact=True)
    except SchemaError as error:
        msg = f"shards {other} and {part.shard} hold rows of different forms ({error}): empty one of them"
        raise SchemaError(msg) from error


def _schema(data: Any) -> Schema:
    try:
        return describe(data, 1)
    except (SchemaError, KindError, RuntimeError) as error:  # RuntimeError: a lazy stack of ragged rows
        kind = type(data).__name__
        msg = f"batches of shards must be tensors of one shape, or trees of these, to be put together, got {kind}"
        raise KindError(msg) from error


def _built(
    schema: Schema, leaves: list[Tensor], said: dict[Any, Any], size: int, objects: list[np.ndarray[Any, Any]]
) -> Any:
    batch = schema.build(leaves, (size,), torch.device("cpu"), objects)
    if kinds.is_tensor_collection(batch):
        kinds.put(batch, {key: said[key] for key in _OWN if key in said and key in batch.keys()})  # noqa: SIM118
    return batch


def _as_whole(part: Part) -> dict[Any, Any]:
    """Return the info of a shard's rows as that of rows of the whole."""
    info = part.info
    changed = {key: join_index(part.shard, info[key]) for key in _NAMES if key in info}
    if "priority_weight" in info:
        changed["priority_weight"] = info["priority_weight"] * part.factor
    return {**info, **changed}


def _records(spots: Tensor, each: int) -> Tensor:
    return spots if each == 1 else (spots[:, None] * each + torch.arange(each, device="cpu")).reshape(-1)


def _scatter_objects(
    values: Sequence[np.ndarray[Any, Any]], where: Sequence[Tensor], size: int
) -> np.ndarray[Any, Any]:
    """Do for fields of Python objects what `_scatter` does for tensors."""
    out = np.empty((size, *values[0].shape[1:]), dtype=object)
    for at, value in zip(where, values, strict=True):
        out[at.numpy()] = value
    return values[0] if len(values) == 1 else out


def _scatter(values: Sequence[Tensor], where: Sequence[Tensor], size: int) -> Tensor:
    """Put values `[n, *shape]` of each part to their places in `[size, *shape]`."""
    if len(values) == 1:
        return values[0]
    out = values[0].new_empty((size, *values[0].shape[1:]))
    for at, value in zip(where, values, strict=True):
        out.index_copy_(0, at, value)
    return out
