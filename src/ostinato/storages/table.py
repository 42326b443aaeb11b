"""A table of rows: a tensor per field, small fields side by side in a packed row; one native call for a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato.core.bits import as_bits, as_ordinary
from ostinato.core.draw import Picks, Run
from ostinato.storages.fetch import Fetcher, Room, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.draw import Placement, Request
    from ostinato.core.rows import Flat, Leaf, Schema
    from ostinato.storages.memory import Memory

__all__ = ["Block", "Table", "last_of_each", "plan_layout"]

_SMALL_BYTES = 256
"""Fields up to this size share a packed row: a cold row costs cache misses by the line, not by the byte."""


class Block(NamedTuple):
    """A run of memory of `stride` bytes per row, holding the leaves `members` = (leaf position, byte offset)."""

    stride: int
    members: tuple[tuple[int, int], ...]


def plan_layout(leaves: Sequence[Leaf], *, packed: bool, align: int = 8) -> list[Block]:
    """Decide which fields share memory: all small ones if `packed` and there are two or more, each wide one alone.

    Packed rows are as long as a multiple of `align` bytes, and of the widest dtype.
    """
    small = [i for i, leaf in enumerate(leaves) if 0 < leaf.nbytes <= _SMALL_BYTES] if packed else []
    if len(small) < 2:
        small = []
    blocks = [Block(leaf.nbytes, ((i, 0),)) for i, leaf in enumerate(leaves) if i not in small]
    if small:
        members, offset = [], 0
        for i in sorted(small, key=lambda i: -leaves[i].dtype.itemsize):  # the widest dtype first: each stays aligned
            members.append((i, offset))
            offset += leaves[i].nbytes
            align = max(align, leaves[i].dtype.itemsize)
        blocks.append(Block(-(-offset // align) * align, tuple(members)))
    return blocks


@final
class Table:
    """Memory for `capacity` rows of a schema.

    `columns[i]` is the tensor `[capacity, *leaf.shape]` of leaf `i`: contiguous for wide fields, strided where it
    shares a packed row. Never-written rows hold whatever the memory held.

    Args:
        schema: form of a row.
        capacity: rows.
        layout: which leaves share a block.
        blocks: uint8 `[stride * capacity]` for each entry of the layout.
    """

    def __init__(self, schema: Schema, capacity: int, layout: list[Block], blocks: list[Tensor]) -> None:
        columns: list[Tensor | None] = [None] * len(schema.leaves)
        with torch.inference_mode(mode=False):
            for block, raw in zip(layout, blocks, strict=True):
                for position, offset in block.members:
                    columns[position] = _column(raw, schema.leaves[position], capacity, block.stride, offset)
        self._finish(schema, capacity, [column for column in columns if column is not None])
        self.layout = layout
        self.blocks = blocks

    @classmethod
    def allocate(cls, schema: Schema, capacity: int, memory: Memory, layout: list[Block]) -> Table:
        """Make a table in fresh memory (or in the files that a mapped memory has already)."""
        sizes = [block.stride * capacity for block in layout]
        return cls(schema, capacity, layout, [memory.block(f"block{i}.bin", size) for i, size in enumerate(sizes)])

    @classmethod
    def adopt(cls, schema: Schema, columns: list[Tensor]) -> Table:
        """Make a table of tensors that exist, `[rows, *leaf.shape]` each. No copy."""
        table = cls.__new__(cls)
        ordinary = [as_ordinary(column) for column in columns]
        table._finish(schema, int(columns[0].shape[0]), ordinary)  # noqa: SLF001 (its own)
        table.layout, table.blocks = [], []
        return table

    def _finish(self, schema: Schema, capacity: int, columns: list[Tensor]) -> None:
        self.schema = schema
        self.capacity = capacity
        self.columns = columns
        self.device = columns[0].device
        self._bits = [as_bits(column) for column in columns]
        self._fields = register(columns)
        self._fetcher = Fetcher(columns)
        self._ranges = [_reach(column) for column in columns]
        self._room = Room([(leaf.shape, leaf.dtype) for leaf in schema.leaves])

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return sum(part.nbytes for part in (self.blocks or self.columns))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle blocks, not columns, which would each bring the whole block along; register addresses anew."""
        if self.blocks:
            return Table, (self.schema, self.capacity, self.layout, self.blocks)
        return Table.adopt, (self.schema, self.columns)

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy the rows at `slots` (int64 `[B]`, contiguous) into fresh contiguous tensors `[B, *leaf.shape]`.

        Args:
            slots: on the table's device.
            pin: put the result into page-locked memory (its pages are reused by torch's own pinned allocator).

        Raises:
            IndexError: if a slot is out of range; nothing was read.
        """
        if self._fields is None:
            out = [
                bits.index_select(0, slots).view(column.dtype)
                for bits, column in zip(self._bits, self.columns, strict=True)
            ]
            return [tensor.pin_memory() for tensor in out] if pin else out
        if is_dynamo_compiling():  # a graph break: addresses are not for a graph
            return torch.compiler.disable(Table.gather)(self, slots, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        rows = slots.shape[0]
        out = self._room.make(rows, pin=pin)
        self._fields.gather([slots.data_ptr()], rows, [tensor.data_ptr() for tensor in out])
        return out

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy other rows for each field: one fresh tensor `[n, *leaf.shape]` for each request.

        Requests of one length take one native call.

        Raises:
            IndexError: if a slot is out of range; nothing was read.
            OptionError: if `other` has another dtype or shape than `leaf`, or comes without `pick`.
        """
        return self._fetcher.fetch(requests, pin=pin)

    def write(self, placement: Placement, flat: Flat, lanes: int = 1) -> None:
        """Copy rows to the slots of a placement: one copy, from wherever the source lies.

        Args:
            placement: where the rows go.
            flat: the rows, numbered in order by their leading dimensions (none is one row).
            lanes: cells in one step of the first dimension, if there are two.
        """
        if self._fields is not None and flat.addresses is not None:
            if self._write_native(placement, flat.addresses):
                return
            flat = flat._replace(leaves=[leaf.clone() for leaf in flat.leaves])  # they lie in this very table
        sources = [self.clear_of(tensor) for tensor in flat.leaves]
        if not isinstance(placement, Run):
            slots, rows = (part.to(self.device) for part in last_of_each(placement.slots, placement.rows))
        for column, bits, leaf, source in zip(self.columns, self._bits, self.schema.leaves, sources, strict=True):
            if isinstance(placement, Run):
                lead = source if flat.batch else source[None]
                _copy_run(column, lead, placement, lanes if len(flat.batch) > 1 else 1, len(leaf.shape))
            else:
                picked = as_bits(source).reshape((-1, *leaf.shape) if leaf.nbytes else (placement.total, *leaf.shape))
                bits[slots] = picked[rows.to(picked.device)].to(bits.device)

    def write_column(self, position: int, slots: Tensor, value: Tensor) -> None:
        """Write one field, `[n, *leaf.shape]`, at distinct slots."""
        self._bits[position][slots] = as_bits(self.clear_of(value)).to(self.device)

    def _write_native(self, placement: Placement, addresses: list[int]) -> bool:
        """Copy; False, with nothing written, if a source overlaps the table."""
        if is_dynamo_compiling():
            return torch.compiler.disable(Table._write_native)(self, placement, addresses)  # type: ignore[no-untyped-call, no-any-return]
        if isinstance(placement, Run):
            return self._fields.write_run(placement.start, placement.rows, placement.skip, addresses) is not False
        slots, rows = placement.slots, placement.rows
        return self._fields.scatter(slots.data_ptr(), rows.data_ptr(), slots.shape[0], addresses) is not False

    def clear_of(self, source: Tensor) -> Tensor:
        """Copy a source that lies in this table's own memory."""
        if source.device == self.device:
            address = source.data_ptr()
            if any(low <= address < high for low, high in self._ranges):
                return source.clone()
        return source

    def edit(self, slots: Tensor, flat: Flat) -> None:
        """Replace the rows at `slots` (int64 `[n]`); of duplicates the last one wins."""
        self.write(Picks(slots, torch.arange(slots.shape[0], device=slots.device), slots), flat)

    def view(self, span: slice) -> list[Tensor]:
        """Return views of the columns."""
        return [column[span] for column in self.columns]

    def column(self, position: int, rows: int) -> Tensor:
        """Return a view of the first `rows` rows of one column."""
        return self.columns[position][:rows]


def _reach(column: Tensor) -> tuple[int, int]:
    """Addresses that a column's memory spans, the gaps of a packed row included."""
    start = column.data_ptr()
    return start, start + (column.shape[0] * column.stride(0) * column.itemsize if column.numel() else 0)


def _column(raw: Tensor, leaf: Leaf, capacity: int, stride: int, offset: int) -> Tensor:
    if leaf.nbytes == 0:
        return torch.empty((capacity, *leaf.shape), dtype=leaf.dtype, device=raw.device)
    item = leaf.dtype.itemsize
    inner: list[int] = []
    step = 1
    for size in reversed(leaf.shape):
        inner.insert(0, step)
        step *= size
    return raw.view(leaf.dtype).as_strided((capacity, *leaf.shape), (stride // item, *inner), offset // item)


def _copy_run(column: Tensor, source: Tensor, run: Run, lanes: int, row_dims: int) -> None:
    lead = source.ndim - row_dims
    first = min(run.rows, run.capacity - run.start)
    for slot, row, count in ((run.start, run.skip, first), (0, run.skip + first, run.rows - first)):
        if count == 0:
            continue
        target = column[slot : slot + count]
        if lead > 1:
            target = target.view(count // lanes, lanes, *target.shape[1:])
        target.copy_(source[row // lanes : (row + count) // lanes])


def last_of_each(slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the last of duplicate slots, as writing in order would; torch leaves the winner open.

    Returns:
        Distinct slots and the rows that go there, int64 `[m]` each.
    """
    unique, inverse = torch.unique(slots, return_inverse=True)
    if unique.shape[0] == slots.shape[0]:
        return slots, rows
    last = torch.zeros_like(unique).scatter_reduce_(
        0, inverse, torch.arange(slots.shape[0], device=slots.device), "amax"
    )
    return unique, rows.to(slots.device)[last]
