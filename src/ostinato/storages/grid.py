"""Reading storages of two dimensions, steps x lanes, by a user's index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.select import apply_index, plain_index, select
from ostinato.storages.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.storages.late import LateFields
    from ostinato.storages.mirror import MirroredTable
    from ostinato.storages.object_columns import ObjectColumns

__all__ = ["as_grid", "read_grid"]


def as_grid(column: Tensor, shape: tuple[int, ...], *, swap: bool) -> Tensor:
    """Return a column of present rows as `[steps, lanes, *shape]`, or with `swap` `[lanes, steps, *shape]`. View."""
    grid = column.view(*shape, *column.shape[1:])
    return grid.transpose(0, 1) if swap else grid


def read_grid(
    table: Table | MirroredTable,
    late: LateFields,
    objects: ObjectColumns | None,
    shape: tuple[int, ...],
    index: Any,
    *,
    swap: bool,
) -> Any:
    """Return the rows at an index into `[steps, lanes]`: a view for ints and slices, else a copy.

    Args:
        table: where rows are.
        late: fields added later.
        objects: fields of Python objects, if there are any.
        shape: `(steps, lanes)` present.
        index: see `select`.
        swap: the index addresses `[lanes, steps]`.
    """
    index = plain_index(index)
    rows = shape[0] * shape[1]
    batch = tuple(
        apply_index(
            as_grid(torch.empty(1, dtype=torch.float32, device="cpu").expand(rows), shape, swap=swap), index
        ).shape
    )
    if isinstance(table, Table):
        leaves = [apply_index(as_grid(column, shape, swap=swap), index) for column in table.view(slice(rows))]
    else:
        found = table.gather(select(index, shape, table.device, swap=swap).slots)
        leaves = [x.reshape(*batch, *leaf.shape) for x, leaf in zip(found, table.schema.leaves, strict=True)]
    found_objects: list[Any] = []
    if objects is not None:
        values = objects.get(select(index, shape, table.device, swap=swap).slots)
        found_objects = [value.reshape((*batch, *value.shape[1:])) for value in values]
    data = table.schema.build(leaves, batch, table.device, found_objects)
    if late:
        for path, value in late.get(select(index, shape, table.device, swap=swap).slots).items():
            data[path[0]] = value.reshape((*batch, *value.shape[1:]))
    return data
