"""Table: memory for rows. Small fields share packed rows, and one native call copies a batch of all fields."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato._backend import backend
from ostinato.core.records import Request, Run
from ostinato.core.rows import Schema, as_bits, as_ordinary, turn_rows
from ostinato.durable.arrays import copy_elements, packed_column

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ostinato._native import Batches, WindowReader
    from ostinato.core.records import Column, Placement, Plan
    from ostinato.core.rows import Flat, Leaf
    from ostinato.storages.memory import Memory

_CPU = torch.device("cpu")
_SMALL_BYTES = 256
"""Fields up to this size share a packed row: reading a row that is not in the cache costs by the line, not the byte."""
_MOST_FORMS = 64
"""Number of sets of fields whose registration is kept; a buffer reads only a few of them, repeatedly."""


class Block(NamedTuple):
    """Memory of `stride` bytes per row that holds the leaves `members` = (position of the leaf, byte offset)."""

    stride: int
    members: tuple[tuple[int, int], ...]


def plan_layout(leaves: Sequence[Leaf], *, packed: bool, align: int = 8) -> list[Block]:
    """Decide which fields share memory.

    With `packed`, all small fields share one block if there are at least two; every other field has its own. The
    stride of packed rows is a multiple of `align` bytes and of the size of the widest dtype.
    """
    sizes, items = [leaf.nbytes for leaf in leaves], [leaf.dtype.itemsize for leaf in leaves]
    small = [i for i, size in enumerate(sizes) if 0 < size <= _SMALL_BYTES] if packed else []
    if len(small) < 2:
        small = []
    blocks = [Block(size, ((i, 0),)) for i, size in enumerate(sizes) if i not in small]
    if small:
        members, offset = [], 0
        for i in sorted(small, key=items.__getitem__, reverse=True):  # widest first, so that each is aligned
            members.append((i, offset))
            offset += sizes[i]
            align = max(align, items[i])
        blocks.append(Block(-(-offset // align) * align, tuple(members)))
    return blocks


class Member(NamedTuple):
    """A field in packed rows."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class RowArray(NamedTuple):
    """Memory of all slots, `data[slot]`: a single field, or packed rows of several fields."""

    name: str
    """Name in a checkpoint."""
    data: Tensor
    """`[capacity, ...]`: the field, or uint8 `[capacity, width]`."""
    members: tuple[Member, ...] = ()
    """The fields of packed rows; empty for a single field."""
    used: int = 0
    """Bytes of a packed row without the padding at its end."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.data.shape[1:]) * self.data.itemsize

    def copy(self, out: Tensor, slots: slice | Tensor) -> None:
        """Copy rows to `out` (uint8 `[n, row_bytes]`, contiguous, on the CPU); padding in it stays or becomes zero."""
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


@final
class Room:
    """Allocates the tensors that a batch is copied to: `[rows, *shape]`, contiguous, uninitialized.

    Args:
        forms: shape (without rows) and dtype of each tensor.
    """

    def __init__(self, forms: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self._forms = [(tuple(shape), dtype) for shape, dtype in forms]
        self._templates: tuple[int | list[int], list[Tensor]] = (-1, [])

    def make(self, rows: int | list[int], *, pin: bool = False) -> list[Tensor]:
        """Return new tensors for `rows` rows, or each for its own number of rows; page-locked if `pin`."""
        known, templates = self._templates
        if known == rows and not pin:
            return list(map(torch.empty_like, templates))
        counts = [rows] * len(self._forms) if isinstance(rows, int) else rows
        forms = list(zip(counts, self._forms, strict=True))
        if not pin and min(counts, default=0) > 1:  # empty_like may give a single row a stride of 0
            # empty_like is the fastest way to allocate; templates with zero strides take no memory
            templates = [torch.empty((), dtype=dtype, device="cpu").expand(n, *shape) for n, (shape, dtype) in forms]
            self._templates = (rows, templates)
        return [torch.empty((n, *shape), dtype=dtype, pin_memory=pin, device="cpu") for n, (shape, dtype) in forms]


@final
class Table:
    """Memory for `capacity` rows of a schema.

    `columns[i]` is the tensor `[capacity, *leaf.shape]` of leaf `i`: contiguous for wide fields, strided in a packed
    row. Rows that were never written are uninitialized.

    Reads may run in several threads, and while another thread writes: a batch may then contain torn rows.

    Args:
        schema: of a row.
        columns: of the leaves.
        capacity: rows.
        layout: which leaves share a block; none for memory of others.
        blocks: uint8 `[stride * capacity]` for each block of the layout.
        names: names of the leaves in a checkpoint; None takes those of the schema.
    """

    def __init__(
        self,
        schema: Schema,
        columns: list[Tensor],
        capacity: int,
        layout: Sequence[Block] = (),
        blocks: Sequence[Tensor] = (),
        names: list[str] | None = None,
    ) -> None:
        self.schema, self.columns, self.capacity = schema, columns, capacity
        self.layout, self.blocks = layout, blocks
        self.device = columns[0].device if columns else torch.device("cpu")
        self._names = schema.column_names if names is None else names
        self._bits = [as_bits(column) for column in columns]
        self._fields = _register(columns)
        self.readers: dict[Any, Any] = {}
        """Registrations of kinds of windows; see `read_windows`."""
        self.batches = _batches(self._fields, columns)
        """Gathers that make their tensors natively; None without the extension, or before torch 2.10."""
        self._forms: dict[tuple[int, ...], tuple[Any, Room, Any]] = {}
        self._ranges = [_address_range(part) for part in (self.blocks or columns)]
        self._arrays: list[RowArray] | None = None

    @classmethod
    def adopt(cls, schema: Schema, columns: list[Tensor]) -> Table:
        """Create a table of existing tensors `[rows, *leaf.shape]`. No copy."""
        return cls(schema, [as_ordinary(x) for x in columns], columns[0].shape[0])

    @classmethod
    def of_blocks(
        cls, schema: Schema, capacity: int, layout: list[Block], blocks: list[Tensor], names: list[str] | None = None
    ) -> Table:
        """Create a table of blocks of memory, uint8 `[stride * capacity]` each. No copy."""
        columns = dict[int, Tensor]()
        with torch.inference_mode(mode=False):
            for block, raw in zip(layout, blocks, strict=True):
                for i, offset in block.members:
                    leaf = schema.leaves[i]
                    columns[i] = packed_column(raw, leaf.dtype, leaf.shape, capacity, block.stride, offset)
        return cls(schema, [columns[i] for i in range(len(columns))], capacity, layout, blocks, names)

    @classmethod
    def allocate(cls, schema: Schema, kept: Sequence[int], capacity: int, memory: Memory, layout: list[Block]) -> Table:
        """Create a table of some leaves of a schema in new memory, or in the files that a mapped memory already has.

        Raises:
            StorageMemoryError: if there is too little memory.
        """
        memory.check(sum(block.stride for block in layout) * capacity)
        blocks = [memory.block(f"block{i}.bin", block.stride * capacity) for i, block in enumerate(layout)]
        names = [schema.column_names[i] for i in kept]
        if list(kept) != list(range(len(schema.leaves))):
            schema = Schema(None, [schema.leaves[i] for i in kept])
        return cls.of_blocks(schema, capacity, layout, blocks, names)

    @classmethod
    def map(cls, schema: Schema, columns: Mapping[int, Any], capacity: int) -> Table:
        """Create a table in the files of saved columns, mapped into memory, with their layout."""
        arrays: dict[str, tuple[Any, list[tuple[int, int]]]] = {}
        for i, source in columns.items():
            arrays.setdefault(source.rows, (source, []))[1].append((i, source.offset))
        layout = [Block(source.row_bytes, tuple(members)) for source, members in arrays.values()]
        return cls.of_blocks(schema, capacity, layout, [source.map_rows(capacity) for source, _ in arrays.values()])

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle blocks, not columns, each of which would bring its whole block; addresses are registered again."""
        if self.blocks:
            return Table.of_blocks, (self.schema, self.capacity, self.layout, self.blocks, self._names)
        return Table.adopt, (self.schema, self.columns)

    @property
    def packed(self) -> bool:
        """Whether fields share rows."""
        return any(len(block.members) > 1 for block in self.layout)

    @property
    def registered(self) -> bool:
        """Whether native code reads the columns."""
        return self._fields is not None

    @property
    def nbytes(self) -> int:
        """Bytes, padding included."""
        return sum(part.nbytes for part in (self.blocks or self.columns))

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy the rows at `slots` (int64 `[B]`, contiguous) into new contiguous tensors `[B, *leaf.shape]`.

        Args:
            slots: on the device of the table.
            pin: allocate page-locked memory, which torch's allocator reuses.

        Raises:
            IndexError: if a slot is out of range; nothing was read.
        """
        if self.batches is None or pin or type(slots) is not Tensor or is_dynamo_compiling():
            return self.fetch([Request(i, slots) for i in range(len(self.columns))], pin=pin)
        return self.batches.gather(slots)

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy different rows of each field: a new tensor `[n, *leaf.shape]` for each request, in one native call.

        Raises:
            IndexError: if a slot is out of range; nothing was read.
        """
        if is_dynamo_compiling():  # a graph break: addresses cannot be part of a graph
            return torch.compiler.disable(Table.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        if not requests:
            return []
        fields, room, batches = self._registered(tuple([request.leaf for request in requests]))
        plain: dict[int, Tensor] = {}  # requests that share slots share them as native code reads them, too
        for _, at in requests:
            if id(at) not in plain:
                same = _is_plain(at, torch.int64, self.device)
                plain[id(at)] = at if same else at.to(self.device, torch.int64).contiguous()
        slots = [plain[id(request.slots)] for request in requests]
        if fields is None:
            pairs = zip([request.leaf for request in requests], slots, strict=True)
            read = [self._bits[i].index_select(0, at).view(self.columns[i].dtype) for i, at in pairs]
            return [tensor.pin_memory() for tensor in read] if pin else read
        if batches is not None and not pin and all(type(at) is Tensor for at in slots):
            return batches.gather_each(slots)  # type: ignore[no-any-return]
        counts = [at.shape[0] for at in slots]
        out = room.make(counts, pin=pin)
        fields.gather_each(list(map(Tensor.data_ptr, slots)), counts, list(map(Tensor.data_ptr, out)))
        return out

    def _registered(self, leaves: tuple[int, ...]) -> tuple[Any, Room, Any]:
        """Return the native registration of some fields, and the room for a batch of them."""
        found = self._forms.get(leaves)
        if found is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms = {}
            columns = [self.columns[leaf] for leaf in leaves]
            fields = _register(columns)
            room = Room([(column.shape[1:], column.dtype) for column in columns])
            found = self._forms[leaves] = fields, room, _batches(fields, columns)
        return found

    def view(self, span: slice) -> list[Tensor]:
        """Return views of the columns."""
        return [column[span] for column in self.columns]

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, placement: Placement, flat: Flat, num_envs: int = 1) -> None:
        """Copy rows to the slots of a placement, from any device.

        Args:
            placement: where the rows go.
            flat: the rows, numbered in order by their leading dimensions (none is one row).
            num_envs: size of the second batch dimension, if there are two.
        """
        fields, addresses = self._fields, flat.addresses
        if fields is not None and addresses is not None:
            if isinstance(placement, Run):
                done = fields.write_run(placement.start, placement.rows, placement.skip, addresses)
            else:
                slots, rows = placement.slots, placement.rows
                done = fields.scatter(slots.data_ptr(), rows.data_ptr(), slots.shape[0], addresses)
            if done is not False:
                return
            flat = flat._replace(leaves=[leaf.clone() for leaf in flat.leaves])  # they overlap this table
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

    def write_column(self, position: int, slots: Tensor | slice, value: Tensor) -> None:
        """Write one field, `[n, *leaf.shape]`, at distinct slots."""
        self._bits[position][slots] = as_bits(self.clear_of(value)).to(self.device)

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with the rows."""
        if tensor.device != self.device or not tensor.numel():
            return False
        low, high = _address_range(tensor if tensor.ndim else tensor[None])
        return any(low < last and first < high for first, last in self._ranges)

    def clear_of(self, source: Tensor) -> Tensor:
        """Return a copy of a source that lies in the memory of this table; other sources unchanged."""
        return source.clone() if self.shares_memory(source) else source

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`."""
        for array in self.row_arrays():
            bits = as_bits(array.data)
            bits[: slots.shape[0]] = bits[slots]

    def turn(self, rows: int, seam: int) -> None:
        """Rotate the first `rows` rows: row `seam` becomes row 0, and the rows before it come last."""
        for array in self.row_arrays():
            turn_rows(array.data[:rows], seam)

    # -- state ---------------------------------------------------------------------------------------------------------

    def row_arrays(self) -> list[RowArray]:
        """Return the memory of the rows: packed rows, then single fields. Views."""
        if self._arrays is None:
            leaves, names = self.schema.leaves, self._names
            self._arrays, inside = [], set[int]()
            for block, raw in zip(self.layout, self.blocks, strict=True):
                if len(block.members) > 1:
                    members = [Member(names[i], at, leaves[i].dtype, leaves[i].shape) for i, at in block.members]
                    used = max([at + leaves[i].nbytes for i, at in block.members])
                    rows, name = raw.view(self.capacity, block.stride), f"rows.{len(self._arrays)}"
                    self._arrays.append(RowArray(name, rows, tuple(members), used))
                    inside.update(dict(block.members))
            single = [i for i in range(len(leaves)) if i not in inside]
            self._arrays += [RowArray(names[i], self.columns[i]) for i in single]
        return self._arrays

    def fill(self, columns: dict[str, Any], rows: int) -> None:
        """Copy saved columns in by name: packed rows at once if their layout is the same, else each column."""
        waiting = dict(zip(self._names, self.columns, strict=True))
        for array in self.row_arrays():
            sources = [columns[member.name] for member in array.members]
            if sources and _lie_in(array, sources):
                sources[0].read_rows_into(array.data[:rows])
                for member in array.members:
                    del waiting[member.name]
        groups: dict[str, list[tuple[Any, Tensor]]] = {}
        for name, column in waiting.items():
            source = columns[name]
            if not getattr(source, "packed", False):
                copy_column(source, column[:rows])
            else:
                groups.setdefault(source.rows, []).append((source, column[:rows]))
        for group in groups.values():
            group[0][0].read_with(group)


def read_column(source: Any) -> Tensor:
    """Return a saved column, a tensor or an object with `read()`, as a tensor."""
    return source if isinstance(source, Tensor) else source.read()


def copy_column(source: Any, dest: Tensor) -> None:
    """Copy a saved column, a tensor or an object with `read_into(dest)`, unless it already lies in `dest`."""
    if not isinstance(source, Tensor):
        source.read_into(dest)
    elif dest.numel() and source.data_ptr() != dest.data_ptr():
        dest.copy_(source)


def _lie_in(array: RowArray, sources: Sequence[Any]) -> bool:
    """Whether saved columns lie in packed rows as the members of an array do."""
    places = [(x.rows, x.row_bytes, x.offset) if getattr(x, "packed", False) else None for x in sources]
    if places[0] is None:
        return False
    rows, width = places[0][0], array.row_bytes
    return places == [(rows, width, member.offset) for member in array.members]


def _register(columns: Sequence[Tensor]) -> Any:
    """Return `native.Fields` that copies rows of columns `[rows, *shape]` of one length.

    None without the native extension, or if a column is not on the CPU or has strided rows.
    """
    native = backend.native
    if native is None or not columns or columns[0].device.type != "cpu":
        return None
    fields = native.Fields()
    for column in columns:
        if not column[:1].is_contiguous():
            return None  # rows of a borrowed tensor may be strided; torch copies those
        fields.add([(column.data_ptr(), column.shape[0])], *row_steps(column))
    return fields


def _batches(fields: Any, columns: Sequence[Tensor]) -> Batches | None:
    """Return what gathers into new tensors natively; None if torch does not describe its tensors to C code."""
    if fields is None or backend.native is None or not backend.exchange:
        return None
    try:
        return backend.native.Batches(fields, list(columns))  # type: ignore[no-any-return]
    except ValueError:  # a dtype that DLPack does not know
        return None


def row_steps(column: Tensor) -> tuple[int, int]:
    """Return the bytes of a row of a column, and the bytes from one row to the next."""
    nbytes = math.prod(column.shape[1:]) * column.itemsize
    return nbytes, column.stride(0) * column.itemsize if column.shape[0] > 1 else max(nbytes, 1)


def row_stride(column: Tensor) -> int:
    """Return the bytes from one row of a column to the next."""
    return row_steps(column)[1]


def _address_range(column: Tensor) -> tuple[int, int]:
    """Return the addresses that the memory of a column spans, including the gaps of a packed row."""
    start = column.data_ptr()
    return start, start + (max(column.shape[0] * column.stride(0), 1) * column.itemsize if column.numel() else 0)


def _copy_run(column: Tensor, source: Tensor, run: Run, num_envs: int, row_dims: int) -> None:
    lead = source.ndim - row_dims
    for slot, row, count in run.parts():
        target = column[slot : slot + count]
        if lead > 1:
            target = target.view(count // num_envs, num_envs, *target.shape[1:])
        target.copy_(source[row // num_envs : (row + count) // num_envs])


def _is_plain(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return tensor.dtype is dtype and tensor.device == device and tensor.is_contiguous()


def last_of_each(slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the last of duplicate slots, as sequential writes would; torch does not define which one wins.

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


# -- windows: all fields, stacked rows and weighted sums, in one native call ------------------------------------------

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


class Registration(NamedTuple):
    """The fields of a kind of plan, registered for native reads."""

    reader: WindowReader
    room: Room
    forms: list[tuple[tuple[int, ...], torch.dtype]]
    """Shape, without records, and dtype of each field of a batch."""


class Source(NamedTuple):
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
    found = register_windows(table, plan)
    if found is None:
        return None
    (reader, room, _), sources = found
    count = plan.records.shape[0]
    out = room.make(count)
    slots_at = [source.slots.data_ptr() for source in sources]
    picks_at = [0 if source.pick is None else source.pick.data_ptr() for source in sources]
    weights_at = [0 if source.weights is None else source.weights.data_ptr() for source in sources]
    widths = [source.width for source in sources]
    reader.read(slots_at, picks_at, weights_at, widths, count, list(map(Tensor.data_ptr, out)))
    return out


def register_windows(table: Table, plan: Plan) -> tuple[Registration, list[Source]] | None:
    """Return what reads plans of this kind, and the slots of this one; the first ones are its records.

    Registered once for each kind. None where the native call cannot read the plan.
    """
    records = plan.records
    count = records.shape[0]
    if not table.registered or not _is_flat(records, torch.int64, count):
        return None
    sources, fields = [Source(records, None, None, 1)], []
    known: dict[tuple[int, int, int, tuple[int, ...]], int] = {(id(records), id(None), id(None), ()): 0}
    for position, column in plan.changed.items():
        (leaf, slots), tail, weights, blank, merge, other, pick = column
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
    registered = table.readers.get(kind) or _register_windows(table, kind)
    return None if registered is None else (registered, sources)


def _source_of(table: Table, column: Column, records: int) -> Source | None:
    """Return the slots of a column; None if the native call cannot read them."""
    (leaf, slots), tail, weights, _, _, _, pick = column
    width = tail[0] if tail else 1
    if len(tail) > 1 or not _is_flat(slots, torch.int64, records * width):
        return None
    if pick is not None and not _is_flat(pick, torch.bool, records * width):
        return None
    if weights is not None:
        dtype = weights.dtype
        if dtype not in _SUMMED or dtype is not table.columns[leaf].dtype or weights.shape != (records, width):
            return None
        if not weights.is_cpu or not weights.is_contiguous():
            return None
    return Source(slots, pick, weights, width)


def _register_windows(table: Table, fields: tuple[_Field, ...]) -> Registration | None:
    """Register the fields of a kind of plan.

    Returns None if two fields that are to be read as one are not alike, or a window is not that of its slots.
    """
    native: Any = backend.installed  # the table is registered with it
    reader = native.WindowReader(table.capacity)
    changed = {field.position: field for field in fields}
    forms: list[tuple[tuple[int, ...], torch.dtype]] = []
    for position in range(len(table.columns)):
        field = changed.get(position) or _Field(position, 0, position, None, (), summed=False, merge=False)
        column = table.columns[field.leaf]
        other = None if field.other is None else table.columns[field.other]
        if other is not None and not _alike(column, other):
            return None
        number = column.itemsize if field.summed else 0
        bases = column.data_ptr(), 0 if other is None else other.data_ptr()
        reader.add(*bases, *row_steps(column), field.source, number)
        shape = tuple(column.shape[1:])
        whole = shape if field.summed else (*field.tail, *shape)
        forms.append(((whole[0] * whole[1], *whole[2:]) if field.merge else whole, column.dtype))
    if len(table.readers) >= _MOST_READERS:
        table.readers.clear()
    found = table.readers[fields] = Registration(reader, Room(forms), forms)
    return found


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and row_steps(one) == row_steps(other)


def _is_flat(tensor: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether native code can read `count` entries of a tensor."""
    return _is_plain(tensor, dtype, _CPU) and tensor.shape == (count,)
