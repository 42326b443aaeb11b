"""Reads a batch of windows from a table: all fields, stacked rows and weighted sums, in one native call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.storages.table import Room, Table, row_bytes, row_stride

if TYPE_CHECKING:
    from ostinato.core.records import Column, Plan

__all__ = ["read_windows"]

_MOST_READERS = 16
"""Kinds of plans whose registration is kept; a buffer has one or two."""
_SUMMED = frozenset({torch.float32, torch.float64})


class _Field(NamedTuple):
    """How one field of a batch is made of rows. Plans of equal fields share one registration."""

    position: int
    source: int
    """Position of its slots among those of the plan."""
    leaf: int
    """Field that is read."""
    other: int | None
    """Field that picked rows are read from."""
    tail: tuple[int, ...]
    """Rows of a window."""
    summed: bool
    merge: bool


class _Source(NamedTuple):
    """Slots of windows, and what belongs to each of them."""

    slots: Tensor
    pick: Tensor | None
    weights: Tensor | None
    width: int


def read_windows(table: Table, plan: Plan) -> list[Tensor] | None:
    """Return the fields of a plan's batch, arithmetic included: what `plan.fold(table.fetch(...))` returns.

    Copies, contiguous. Returns None where the native call cannot do it: without the extension, on other devices, and
    for blanked rows, other dtypes of sums, or slots of another form.

    Raises:
        IndexError: if a slot is out of range; nothing was read.
    """
    records = plan.records
    count = records.shape[0]
    if not table.registered or not _is_plain(records, torch.int64, count):
        return None
    sources, fields = [_Source(records, None, None, 1)], []
    known: dict[tuple[int, int, int, tuple[int, ...]], int] = {(id(records), id(None), id(None), ()): 0}
    for position, column in plan.changed.items():
        request, tail, weights, blank, merge = column
        leaf, slots, other, pick = request
        if blank is not None:
            return None
        key = (id(slots), id(pick), id(weights), tail)
        source = known.get(key)
        if source is None:
            found = _source_of(table, column, count)
            if found is None:
                return None
            source = known[key] = len(sources)
            sources.append(found)
        fields.append(_Field(position, source, leaf, other, tail, weights is not None, merge))
    kind = tuple(fields)
    registered = table.readers.get(kind) or _register(table, kind)
    if registered is None:
        return None
    reader, room = registered
    out = room.make(count)
    slots_at = [source.slots.data_ptr() for source in sources]
    picks_at = [0 if source.pick is None else source.pick.data_ptr() for source in sources]
    weights_at = [0 if source.weights is None else source.weights.data_ptr() for source in sources]
    widths = [source.width for source in sources]
    reader.read(slots_at, picks_at, weights_at, widths, count, list(map(Tensor.data_ptr, out)))
    return out


def _source_of(table: Table, column: Column, records: int) -> _Source | None:
    """Return the slots of a column; None if the native call cannot read them."""
    (leaf, slots, other, pick), tail, weights, _, _ = column
    width = tail[0] if tail else 1
    if len(tail) > 1 or (other is None) != (pick is None) or not _is_plain(slots, torch.int64, records * width):
        return None
    if pick is not None and not _is_plain(pick, torch.bool, records * width):
        return None
    if weights is not None:
        dtype = weights.dtype
        if dtype not in _SUMMED or dtype is not table.columns[leaf].dtype or weights.shape != (records, width):
            return None
        if not weights.is_cpu or not weights.is_contiguous():
            return None
    return _Source(slots, pick, weights, width)


def _register(table: Table, fields: tuple[_Field, ...]) -> tuple[Any, Room] | None:
    """Register the fields of a kind of plan, and return the room for a batch of them.

    Returns None if two fields that are to be read as one are not alike, or a window is not that of its slots.
    """
    native: Any = backend.installed  # the table is registered with it
    reader = native.WindowReader(table.capacity)
    changed = {field.position: field for field in fields}
    forms = []
    for position in range(len(table.columns)):
        field = changed.get(position) or _Field(position, 0, position, None, (), summed=False, merge=False)
        column = table.columns[field.leaf]
        other = None if field.other is None else table.columns[field.other]
        if other is not None and not _alike(column, other):
            return None
        number = column.itemsize if field.summed else 0
        bases = column.data_ptr(), 0 if other is None else other.data_ptr()
        reader.add(*bases, row_bytes(column), row_stride(column), field.source, number)
        shape = tuple(column.shape[1:])
        whole = shape if field.summed else (*field.tail, *shape)
        forms.append(((whole[0] * whole[1], *whole[2:]) if field.merge else whole, column.dtype))
    if len(table.readers) >= _MOST_READERS:
        table.readers.clear()
    found = table.readers[fields] = reader, Room(forms)
    return found


def _alike(one: Tensor, other: Tensor) -> bool:
    same = one.dtype is other.dtype and one.shape == other.shape
    return same and row_stride(one) == row_stride(other)


def _is_plain(tensor: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether native code can read `count` entries of a tensor."""
    plain = tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()
    return plain and tensor.dim() == 1 and tensor.shape[0] == count
