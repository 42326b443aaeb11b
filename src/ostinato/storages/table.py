"""A table of rows: a tensor per field, small fields side by side in a packed row; one native call for a batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato._backend import backend
from ostinato.core.index import apply_index, plain_index, select
from ostinato.core.records import Picks, Run
from ostinato.core.rows import as_bits, as_ordinary
from ostinato.durable.dtypes import copy_elements
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.records import Placement, Request
    from ostinato.core.rows import Flat, Leaf, Schema
    from ostinato.storages.late_fields import LateFields
    from ostinato.storages.memory import Memory
    from ostinato.storages.object_columns import ObjectColumns
    from ostinato.storages.single_copy import MirroredTable

__all__ = [
    "Block",
    "Fetcher",
    "Member",
    "Room",
    "RowArray",
    "Table",
    "as_grid",
    "check_alike",
    "checked_choice",
    "choose",
    "last_of_each",
    "plan_layout",
    "read_grid",
    "register",
    "row_arrays",
]

_MOST_FORMS = 64
"""Sets of fields whose registration is kept: a buffer asks for a handful, over and over."""


def register(columns: Sequence[Tensor], others: Sequence[Tensor | None] | None = None) -> Any:
    """Register columns for native copies, each with the rows of another one after its own where `others` names one.

    Returns:
        `native.Fields`, or None: there is no compiled part, or a column is not on the CPU or strided inside its rows.
    """
    native = backend.native
    if native is None or columns[0].device.type != "cpu":
        return None
    fields = native.Fields()
    for column, other in zip(columns, others or [None] * len(columns), strict=True):
        parts = [column] if other is None else [column, other]
        strides = {_stride(part) for part in parts}
        if len(strides) > 1 or not all(part[:1].is_contiguous() for part in parts):
            return None  # rows of a borrowed tensor may be strided inside; torch copies those
        segments = [(part.data_ptr(), part.shape[0]) for part in parts]
        fields.add(segments, _row_bytes(column), strides.pop())
    return fields


def _row_bytes(column: Tensor) -> int:
    return math.prod(column.shape[1:]) * column.itemsize


def _stride(column: Tensor) -> int:
    return column.stride(0) * column.itemsize if column.shape[0] > 1 else max(_row_bytes(column), 1)


@final
class Room:
    """Makes the tensors that a batch is copied to: `[rows, *shape]`, contiguous, not initialised.

    Args:
        forms: shape (without rows) and dtype of each.
    """

    def __init__(self, forms: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self._forms = [(tuple(shape), dtype) for shape, dtype in forms]
        self._templates: tuple[int | list[int], list[Tensor]] = (-1, [])

    def make(self, rows: int, *, pin: bool = False) -> list[Tensor]:
        """Return fresh tensors for `rows` rows, page-locked if `pin`."""
        known, templates = self._templates
        if known == rows and not pin:
            return [torch.empty_like(t) for t in templates]
        return self._make(rows, [rows] * len(self._forms), pin=pin)

    def make_each(self, rows: list[int], *, pin: bool = False) -> list[Tensor]:
        """Return fresh tensors, each for its own number of rows, page-locked if `pin`."""
        known, templates = self._templates
        if known == rows and not pin:
            return [torch.empty_like(t) for t in templates]
        return self._make(rows, rows, pin=pin)

    def _make(self, key: int | list[int], rows: list[int], *, pin: bool) -> list[Tensor]:
        forms = list(zip(rows, self._forms, strict=True))
        if not pin and min(rows, default=0) > 1:  # (a single row made by empty_like may get a stride of 0)
            # empty_like is the cheapest way to a tensor; templates of zero stride take no memory
            templates = [torch.empty((), dtype=dtype, device="cpu").expand(n, *shape) for n, (shape, dtype) in forms]
            self._templates = (key, templates)
        return [torch.empty((n, *shape), dtype=dtype, pin_memory=pin, device="cpu") for n, (shape, dtype) in forms]


@final
class Fetcher:
    """Reads fields of one set of columns, each at rows of its own.

    May be used by several threads at once, and while another one writes: a batch may then hold torn rows.

    Args:
        columns: `[rows, *shape]`, all of one length and device.
    """

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self._columns = list(columns)
        self._device = self._columns[0].device
        self._rows = int(self._columns[0].shape[0])
        self._forms: dict[tuple[tuple[int, int | None], ...], tuple[Any, Room]] = {}

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Return a fresh tensor `[n, *shape]` for each request; see `Table.fetch`."""
        if is_dynamo_compiling():  # a graph break: addresses are not for a graph
            return torch.compiler.disable(Fetcher.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        return self._fetch(self._checked(requests), pin=pin) if requests else []

    def _checked(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Bring requests to the form that native code reads; most have it."""
        plain: Tensor | None = None
        for request in requests:
            slots = request.slots
            if request.pick is not None or request.other is not None:
                break
            if slots is not plain:
                if not _is_plain(slots, torch.int64, self._device):
                    break
                plain = slots
        else:
            return requests
        return [self._brought(request) for request in requests]

    def _brought(self, request: Request) -> Request:
        leaf, slots, other, pick = request
        if not _is_plain(slots, torch.int64, self._device):
            slots = slots.to(self._device, torch.int64).contiguous()
        if other is None and pick is None:
            return request if slots is request.slots else request._replace(slots=slots)
        other, pick = checked_choice(request)
        first, second = self._columns[leaf], self._columns[other]
        check_alike(first.dtype, first.shape[1:], second.dtype, second.shape[1:])
        if not _is_plain(pick, torch.bool, self._device):
            pick = pick.to(self._device).contiguous()
        same = slots is request.slots and pick is request.pick
        return request if same else request._replace(slots=slots, pick=pick)

    def _fetch(self, requests: Sequence[Request], *, pin: bool) -> list[Tensor]:
        """Serve requests: one native call, or torch."""
        fields, room = self._form([(request.leaf, request.other) for request in requests])
        if fields is None:
            read = [self._select(request) for request in requests]
            return [tensor.pin_memory() for tensor in read] if pin else read
        chosen: dict[tuple[int, int], Tensor] = {}
        addresses = []
        for _, slots, _, pick in requests:
            if pick is None:
                addresses.append(slots.data_ptr())
                continue
            key = (slots.data_ptr(), pick.data_ptr())
            if key not in chosen:  # equal choices share one array, so that fields of a packed row are read together
                chosen[key] = choose(slots, pick, self._rows)
            addresses.append(chosen[key].data_ptr())
        counts = [request.slots.shape[0] for request in requests]
        out = room.make_each(counts, pin=pin)
        fields.gather_each(addresses, counts, [tensor.data_ptr() for tensor in out])
        return out

    def _form(self, key: list[tuple[int, int | None]]) -> tuple[Any, Room]:
        """Return the registration of some fields, made once, and room for a batch."""
        found = self._forms.get(known := tuple(key))
        if found is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms = {}
            others = [None if other is None else self._columns[other] for _, other in key]
            columns = [self._columns[leaf] for leaf, _ in key]
            found = register(columns, others), Room([(column.shape[1:], column.dtype) for column in columns])
            self._forms[known] = found
        return found

    def _select(self, request: Request) -> Tensor:
        column = self._columns[request.leaf]
        out = as_bits(column).index_select(0, request.slots)
        if request.other is not None and request.pick is not None:
            second = as_bits(self._columns[request.other]).index_select(0, request.slots)
            out = torch.where(request.pick.view(-1, *[1] * (column.ndim - 1)), second, out)
        return out.view(column.dtype)


def checked_choice(request: Request) -> tuple[int, Tensor]:
    """Return `other` and `pick` of a request.

    Raises:
        OptionError: if one of them is missing, or `pick` has another form.
    """
    _, slots, other, pick = request
    if other is None or pick is None or pick.shape != slots.shape or pick.dtype is not torch.bool:
        got = "no pick" if pick is None else f"other={other}, pick {pick.dtype}{list(pick.shape)}"
        msg = f"a request takes other and pick (bool{list(slots.shape)}) together, got {got}"
        raise OptionError(msg)
    return other, pick


def check_alike(dtype: torch.dtype, shape: Sequence[int], other_dtype: torch.dtype, other_shape: Sequence[int]) -> None:
    """Refuse to read two fields as one.

    Raises:
        OptionError: if their dtypes or shapes differ.
    """
    if dtype is not other_dtype or tuple(shape) != tuple(other_shape):
        msg = (
            f"a request reads two fields of one dtype and shape, got {dtype}{list(shape)} and "
            f"{other_dtype}{list(other_shape)}"
        )
        raise OptionError(msg)


def choose(slots: Tensor, pick: Tensor, rows: int) -> Tensor:
    """Return `slots + rows * pick`, int64 `[n]`, having checked that slots lie in `[0, rows)`. Native part only.

    Raises:
        IndexError: if a slot is out of range.
    """
    out = torch.empty_like(slots)
    native: Any = backend.installed  # the caller has registered fields with it
    native.choose_slots(slots.data_ptr(), pick.data_ptr(), slots.shape[0], rows, out.data_ptr())
    return out


def _is_plain(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return tensor.dtype is dtype and tensor.device == device and tensor.is_contiguous()


class Member(NamedTuple):
    """A field that lies in packed rows."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class RowArray(NamedTuple):
    """Memory of all slots, `data[slot]`: a field by itself, or packed rows of several."""

    name: str
    """Name in a checkpoint."""
    data: Tensor
    """`[capacity, ...]`: the field, or uint8 `[capacity, width]`."""
    members: tuple[Member, ...] = ()
    """The fields of packed rows; none where the array is a field by itself."""
    used: int = 0
    """Bytes of a packed row that fields take; what follows is padding."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.data.shape[1:]) * self.data.itemsize

    def copy(self, out: Tensor, slots: slice | Tensor) -> None:
        """Copy rows to `out` (uint8 `[n, row_bytes]`, contiguous, on the CPU); padding keeps the zeros it must have."""
        if self.members and isinstance(slots, slice) and self.data.is_cpu:
            np.copyto(out[:, : self.used].numpy(), self.data[slots, : self.used].numpy())
            return
        part = out.view(-1).view(self.data.dtype).view(out.shape[0], *self.data.shape[1:])
        if isinstance(slots, slice):
            copy_elements(part, self.data[slots])
        else:
            chosen = as_bits(self.data).index_select(0, slots.to(self.data.device))
            as_bits(part).copy_(chosen)
        if self.members:
            out[:, self.used :] = 0


def row_arrays(table: Table, names: Sequence[str]) -> list[RowArray]:
    """Return the arrays of a table, whose leaves have these names in a checkpoint."""
    pairs = zip(table.layout, table.blocks, strict=True)
    shared = [(block, raw) for block, raw in pairs if len(block.members) > 1]
    packed = [_packed(number, block, raw, table, names) for number, (block, raw) in enumerate(shared)]
    inside = {position for block, _ in shared for position, _ in block.members}
    return [*packed, *(RowArray(names[i], column) for i, column in enumerate(table.columns) if i not in inside)]


def _packed(number: int, block: Block, raw: Tensor, table: Table, names: Sequence[str]) -> RowArray:
    leaves = table.schema.leaves
    members = tuple(Member(names[i], offset, leaves[i].dtype, tuple(leaves[i].shape)) for i, offset in block.members)
    used = max(offset + leaves[i].nbytes for i, offset in block.members)
    return RowArray(f"rows.{number}", raw.view(table.capacity, block.stride), members, used)


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

    def write(self, placement: Placement, flat: Flat, num_envs: int = 1) -> None:
        """Copy rows to the slots of a placement: one copy, from wherever the source lies.

        Args:
            placement: where the rows go.
            flat: the rows, numbered in order by their leading dimensions (none is one row).
            num_envs: size of the second batch dimension, if there are two.
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
                _copy_run(column, lead, placement, num_envs if len(flat.batch) > 1 else 1, len(leaf.shape))
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


def _copy_run(column: Tensor, source: Tensor, run: Run, num_envs: int, row_dims: int) -> None:
    lead = source.ndim - row_dims
    first = min(run.rows, run.capacity - run.start)
    for slot, row, count in ((run.start, run.skip, first), (0, run.skip + first, run.rows - first)):
        if count == 0:
            continue
        target = column[slot : slot + count]
        if lead > 1:
            target = target.view(count // num_envs, num_envs, *target.shape[1:])
        target.copy_(source[row // num_envs : (row + count) // num_envs])


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


def as_grid(column: Tensor, shape: tuple[int, ...], *, swap: bool) -> Tensor:
    """Return a column of rows as `[steps, num_envs, *shape]`, with `swap` as `[num_envs, steps, *shape]`. View."""
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
    """Return the rows at an index into `[steps, num_envs]`: a view for ints and slices, else a copy.

    Args:
        table: where rows are.
        late: fields added later.
        objects: fields of Python objects, if there are any.
        shape: `(steps, num_envs)` present.
        index: see `select`.
        swap: the index addresses `[num_envs, steps]`.
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
