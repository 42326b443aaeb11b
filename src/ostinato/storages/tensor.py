"""TensorStorage: one tensor per field, on any device; the door, reading and state of all tensor storages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.index import is_field, select
from ostinato.core.records import Picks, Request
from ostinato.core.rows import Flat, Schema, column_name, describe, turn_rows
from ostinato.errors import CapacityError, CheckpointError, KindError, OptionError, SchemaError, UsageError
from ostinato.storages.base import Storage, check_capacity, check_device, check_hook, check_ndim, copied_rows, find_seam
from ostinato.storages.late_fields import LateFields
from ostinato.storages.memory import show_bytes
from ostinato.storages.object_columns import ObjectColumns, check_objects, own_values
from ostinato.storages.single_copy import (
    MirroredTable,
    as_run,
    check_apart,
    copy_column,
    dense,
    fill_mirrored,
    read_pairs,
)
from ostinato.storages.table import Block, Table, as_grid, read_grid, row_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import numpy as np

    from ostinato.core.records import Placement
    from ostinato.core.rows import Path
    from ostinato.storages.single_copy import Links, Pairs
    from ostinato.storages.table import RowArray

__all__ = [
    "TensorStorage",
    "check_columns",
    "check_form",
    "check_room",
    "fill_columns",
    "map_blocks",
    "name_columns",
    "refuse_mapped_ring",
    "turn_columns",
]


@final
class _Turned:
    """A column of a state whose row `seam` comes first and the rows before it last; read as the column is."""

    def __init__(self, source: Any, seam: int) -> None:
        self._source = source
        self._seam = seam
        self.dtype, self.shape = source.dtype, source.shape
        self.packed = getattr(source, "packed", False)
        if self.packed:
            self.rows, self.offset, self.row_bytes = source.rows, source.offset, source.row_bytes

    def read_into(self, dest: Tensor) -> None:
        """Read the rows into a tensor."""
        copy_column(self._source, dest)
        turn_rows(dest, self._seam)

    def read_rows_into(self, dest: Tensor) -> None:
        """Read the packed rows that it lies in."""
        self._source.read_rows_into(dest)
        turn_rows(dest, self._seam)

    def read_with(self, others: Sequence[tuple[_Turned, Tensor]]) -> None:
        """Read columns of the same packed rows, each into its tensor."""
        self._source.read_with([(other._source, dest) for other, dest in others])  # noqa: SLF001 (its own kind)
        for _, dest in others:
            turn_rows(dest, self._seam)

    def read(self) -> Tensor:
        """Return the rows as a new tensor."""
        source = self._source
        rows = source.clone() if isinstance(source, torch.Tensor) else source.read()
        turn_rows(rows, self._seam)
        return rows


def name_columns(
    table: Table | MirroredTable, late: LateFields, rows: int
) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Return the columns `[rows, *shape]` by name (views), and for late fields `[path, name, name of the mask]`.

    Of a table with single copies come what it keeps, `apart` (bool `[rows]`: next observations that lie apart), and
    for each pair those, in the order of their slots.
    """
    names = [column_name(leaf.path, i) for i, leaf in enumerate(table.schema.leaves)]
    if isinstance(table, MirroredTable):
        columns = {names[i]: column for i, column in zip(table.kept, table.inner.view(slice(rows)), strict=True)}
        columns["apart"], nexts = table.apart_rows(rows)
        columns |= {f"{names[i]}.apart": value for (i, _), value in zip(table.pairs, nexts, strict=True)}
    else:
        columns = dict(zip(names, table.view(slice(rows)), strict=True))
    notes: list[list[Any]] = []
    for i, (path, column) in enumerate(late.columns.items(), len(names)):
        name = column_name(path, i)
        notes.append([list(path), name, f"{name}.has"])
        columns[name], columns[f"{name}.has"] = column[:rows], late.has[path][:rows]
    return columns, notes


def fill_columns(table: Table | MirroredTable, state: dict[str, Any]) -> LateFields:
    """Copy the columns of a state into a table, and return its late fields.

    Columns are tensors, or objects with `dtype`, `shape`, `read_into(tensor)` and `read()`.

    Raises:
        CheckpointError: if a column is missing or has another form; nothing is changed.
    """
    rows, columns = int(state["rows"]), dict(state["columns"])
    saved = check_columns(table.schema, state)
    if saved or isinstance(table, MirroredTable):
        fill_mirrored(table, state, saved)
    elif not state.get("mapped"):
        _fill_plain(table, columns, rows)
    late = LateFields(table.capacity, table.device)
    everywhere = torch.arange(rows if state["late"] else 0, device=table.device)
    for path, name, has in state["late"]:
        late.put(tuple(path), everywhere, dense(columns[name]))
        late.has[tuple(path)][:rows] = dense(columns[has]).to(table.device)
    return late


def _fill_plain(table: Table, columns: dict[str, Any], rows: int) -> None:
    """Copy columns in: packed rows as they lie where they lie alike here, else column by column."""
    names = [column_name(leaf.path, i) for i, leaf in enumerate(table.schema.leaves)]
    waiting = dict(zip(names, table.columns, strict=True))
    for array in row_arrays(table, names):
        sources = [(columns[member.name], member.offset) for member in array.members]
        if sources and _lie_alike(sources, array.row_bytes, columns):
            sources[0][0].read_rows_into(array.data[:rows])
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


def _lie_alike(sources: list[tuple[Any, int]], row_bytes: int, columns: dict[str, Any]) -> bool:
    """Whether saved columns lie in one array of packed rows, alone, at these offsets."""
    first = sources[0][0]
    if not getattr(first, "packed", False) or first.row_bytes != row_bytes:
        return False
    same = all(getattr(x, "rows", None) == first.rows and x.offset == offset for x, offset in sources)
    return same and sum(getattr(x, "rows", None) == first.rows for x in columns.values()) == len(sources)


def map_blocks(schema: Schema, state: dict[str, Any], capacity: int) -> tuple[list[Block], list[Tensor]]:
    """Map saved columns into memory for `capacity` rows, laid out as they were saved.

    Raises:
        CheckpointError: if the rows were saved with single copies, or a column is missing or has another form.
    """
    columns, rows = state["columns"], int(state["rows"])
    pairs = read_pairs(state, schema)
    if pairs:
        names = {schema.leaves[i].path: schema.leaves[mate].path for i, mate in pairs}
        shown = ", ".join(f"{_dotted(path)} (as {_dotted(mate)} of the next row)" for path, mate in names.items())
        msg = (
            f"the checkpoint was saved with single_copy, it stores {shown} once: such rows cannot be mapped, load it "
            "with mmap=False"
        )
        raise CheckpointError(msg)
    found: dict[str, tuple[Any, list[tuple[int, int]]]] = {}
    for i, leaf in enumerate(schema.leaves):
        name = column_name(leaf.path, i)
        _check_column(columns, name, leaf.dtype, (rows, *leaf.shape))
        source = columns[name]
        found.setdefault(source.rows, (source, []))[1].append((i, source.offset))
    layout = [Block(source.row_bytes, tuple(members)) for source, members in found.values()]
    return layout, [source.map_rows(capacity) for source, _ in found.values()]


def turn_columns(state: dict[str, Any], seam: int) -> dict[str, Any]:
    """Return the state of a full ring with its oldest row, in slot `seam`, in slot 0; columns turn when they are read.

    The state is that of a ring of the same capacity with the cursor at 0. No copy.
    """
    columns = dict(state["columns"])
    aside = int(check_apart(state)[:seam].sum()) if state.get("single_copy") else 0
    sides = {name for name in columns if state.get("single_copy") and name.endswith(".apart")}
    turned = {name: _Turned(column, aside if name in sides else seam) for name, column in columns.items()}
    objects = {name: _turned(values, seam, int(state["rows"])) for name, values in (state.get("objects") or {}).items()}
    return {**state, "columns": turned, "cursor": 0, **({"objects": objects} if objects else {})}


def _turned(values: list[Any], seam: int, rows: int) -> list[Any]:
    """Return the objects of `rows` rows with those of the row in slot `seam` first."""
    first = seam * (len(values) // max(rows, 1))
    return values[first:] + values[:first]


def refuse_mapped_ring(state: dict[str, Any], seam: int, capacity: int) -> NoReturn:
    """Raise for rows that are to be mapped where they would have to be moved.

    Raises:
        OptionError: naming both capacities.
    """
    msg = (
        f"mmap=True maps rows where they lie: the checkpoint is a full ring of {state['capacity']} rows, the oldest in "
        f"slot {seam}, and would have to be moved into a ring of {capacity}: load without mmap, or into a storage with "
        f"max_size={state['capacity']}"
    )
    raise OptionError(msg)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def check_room(state: dict[str, Any], ndim: int, capacity: int) -> None:
    """Refuse a state that does not fit.

    Raises:
        CheckpointError: if it has more rows than `capacity`, or other dimensions.
    """
    if state["ndim"] != ndim:
        msg = f"the checkpoint has ndim={state['ndim']}, the storage ndim={ndim}: load into one of that form"
        raise CheckpointError(msg)
    if not all(isinstance(state.get(name), int) for name in ("rows", "cursor", "lanes", "capacity")):
        msg = "the checkpoint's storage has no rows, cursor, lanes or capacity: it is damaged"
        raise CheckpointError(msg)
    if int(state["rows"]) < 0 or int(state["lanes"]) < 1 or int(state["rows"]) % int(state["lanes"]):
        msg = f"the checkpoint holds {state['rows']} rows of {state['lanes']} environments: it is damaged"
        raise CheckpointError(msg)
    if int(state["rows"]) > capacity:
        msg = (
            f"the checkpoint holds {state['rows']} rows, the storage has room for {capacity}: load into one "
            f"with max_size >= {state['rows']}"
        )
        raise CheckpointError(msg)


def check_form(mine: Schema, my_num_envs: int, saved: Schema, num_envs: int) -> None:
    """Refuse rows of another form.

    Raises:
        CheckpointError: naming both forms.
    """
    if mine != saved or my_num_envs != num_envs:
        msg = (
            f"the checkpoint holds {saved} in {num_envs} environment(s), the storage {mine} in {my_num_envs}: "
            "load into a buffer of that form"
        )
        raise CheckpointError(msg)


def check_columns(schema: Schema, state: dict[str, Any]) -> Pairs:
    """Refuse columns that are missing or of another form, before the first is copied; return the single copies.

    Raises:
        CheckpointError: naming the column, its form and the one it must have.
    """
    rows, columns = int(state["rows"]), state["columns"]
    saved = read_pairs(state, schema)
    nexts = {pair[0] for pair in saved}
    for i, leaf in enumerate(schema.leaves):
        if i not in nexts:
            _check_column(columns, column_name(leaf.path, i), leaf.dtype, (rows, *leaf.shape))
    if saved:
        count = int(check_apart(state).sum())
        for i in nexts:
            leaf = schema.leaves[i]
            _check_column(columns, f"{column_name(leaf.path, i)}.apart", leaf.dtype, (count, *leaf.shape))
    known = {leaf.path for leaf in schema.leaves}
    for path, name, has in state["late"]:
        value = columns.get(name)
        if not path or tuple(path) in known or value is None:
            msg = f"the checkpoint's field {path!r}, which came later, is not there or there twice: it is damaged"
            raise CheckpointError(msg)
        _check_column(columns, name, value.dtype, (rows, *value.shape[1:]))
        _check_column(columns, has, torch.bool, (rows,))
    return saved


def _check_column(columns: dict[str, Any], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = columns.get(name)
    if source is None or source.dtype is not dtype or tuple(source.shape) != shape:
        got = "nothing" if source is None else f"{source.dtype}{list(source.shape)}"
        msg = f"the checkpoint's column {name!r} must be {dtype}{list(shape)}, got {got}: it is damaged"
        raise CheckpointError(msg)


class _Payload(NamedTuple):
    """Rows without their nesting, and late fields `[rows, *shape]`."""

    flat: Flat
    late: dict[Path, Tensor]
    links: Links | None = None


_NO_ROWS = _Payload(Flat([], (0,), None), {})


class TensorStorage(Storage):
    """Rows in tensors that exist already, such as a dataset; the base of the storages that make their own.

    Args:
        storage: a tensor, TensorDict, tensorclass, or dict/list/tuple pytree of tensors `[rows, ...]`; not copied.
        max_size: capacity in rows; if given it must be the number of rows of `storage`.
        device: kept for TorchRL's signature: must be the device of the data, or "auto".
        ndim: 1, or 2 for data `[time, environments, ...]`.
        allow_pickle: let `dumps` and `loads` pickle objects of non-tensor fields that are no text or plain values.
            Unpickling runs code: set it only for checkpoints that you trust.
        compilable: no effect: the native call is opaque to `torch.compile` in any case.

    Raises:
        CapacityError: if `max_size` is not the number of rows.
        OptionError: if the data lies on another device, or `ndim` is neither 1 nor 2.

    Example:
        >>> import torch
        >>> from ostinato import ReplayBuffer, TensorStorage
        >>> rb = ReplayBuffer(storage=TensorStorage({"obs": torch.arange(6.0).view(3, 2)}), batch_size=2)
        >>> len(rb)
        3
    """

    form = "tensors"
    _table: Table | MirroredTable | None
    _objects: ObjectColumns | None = None
    """Fields of Python objects; None where rows have none."""

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str | int = "auto",
        ndim: int = 1,
        allow_pickle: bool = False,
        compilable: bool = False,  # noqa: ARG002
    ) -> None:
        self._start(check_ndim(ndim))
        schema = describe(storage, self.ndim)
        self.allow_pickle = allow_pickle
        flat = schema.flatten(storage, None, self.ndim)
        leaves, batch, _, objects = flat
        _require_memory(schema, flat, leaves[0].device)
        self._num_envs = batch[1] if self.ndim > 1 else 1
        rows = batch[0] * self._num_envs
        if max_size is not None and max_size != rows:
            msg = (
                f"max_size must be the {rows} rows of the data given (or None), got {max_size}: use "
                "LazyTensorStorage to leave room"
            )
            raise CapacityError(msg)
        self._max_size = check_capacity(rows)
        for leaf, value in zip(schema.leaves, leaves, strict=True):
            if value.numel() > 1 and 0 in value.stride():
                msg = f"field {leaf} is expanded, so that rows share memory: clone() the data first"
                raise SchemaError(msg)
        self.exposed = True  # whoever gave the tensors may write to them
        self._table = Table.adopt(schema, [x.flatten(0, 1) if self.ndim > 1 else x for x in leaves])
        self.device = self._table.device
        if device != "auto" and check_device(device) != self.device:
            msg = (
                f"the data lies on {self.device}, device={device!r} was asked for: move the data first, or "
                "pass device='auto'"
            )
            raise OptionError(msg)
        self._rows = rows
        self._late = LateFields(rows, self.device)
        if schema.objects:
            self._objects = ObjectColumns.of(schema.objects, objects, rows)

    def _start(self, ndim: int) -> None:
        self.ndim = ndim
        self._table = None
        self._rows = 0
        self._cursor = 0
        self._num_envs = 1

    @property
    def capacity(self) -> int:
        """Maximum number of rows; with `ndim=2`, rounded up to whole steps of all environments."""
        return self._max_size if self._table is None else self._table.capacity

    @property
    def max_size(self) -> int:
        """The capacity asked for."""
        return self._max_size

    @property
    def num_envs(self) -> int:
        """Number of environments: the second batch dimension with `ndim=2`, else 1."""
        return self._num_envs

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows present: `(rows,)`, or `(steps, num_envs)` with `ndim=2`."""
        return (self._rows,) if self.ndim == 1 else (self._rows // self._num_envs, self._num_envs)

    @property
    def schema(self) -> Schema | None:
        """Form of a row; None before the first."""
        return None if self._table is None else self._table.schema

    @property
    def columns(self) -> dict[Path, Tensor]:
        """Field path -> tensor `[capacity, *shape]`, never-written rows included. Views. Tensor fields alone.

        With `single_copy` copies of the rows present, `[rows, *shape]`.
        """
        table = self._table
        if table is None:
            return {}
        self._expose()
        columns = table.columns if isinstance(table, Table) else table.view(slice(self._rows))
        named = {leaf.path: column for leaf, column in zip(table.schema.leaves, columns, strict=True)}
        return {**named, **self._late.columns}

    @property
    def nbytes(self) -> int:
        """Bytes held for the whole capacity, those of Python objects not counted; 0 before the first row."""
        objects = 0 if self._objects is None else self._objects.nbytes
        return 0 if self._table is None else self._table.nbytes + self._late.nbytes + objects

    @property
    def cursor(self) -> int:
        """Slot after the newest row."""
        return self._cursor

    def __len__(self) -> int:
        """Rows present (cells with `ndim=2`)."""
        return self._rows

    def __repr__(self) -> str:
        """Class, fill, bytes and fields."""
        schema = self.schema
        fields = "not laid out yet" if schema is None else "; ".join(map(str, (*schema.leaves, *schema.objects)))
        num_envs = f", num_envs={self._num_envs}" if self.ndim > 1 else ""
        return (
            f"{type(self).__name__}(rows={self._rows}, capacity={self.capacity}{num_envs}, ndim={self.ndim}, "
            f"device={self.device}, bytes={show_bytes(self.nbytes)}, fields=[{fields}])"
        )

    def admit(self, data: Any, lead: int) -> tuple[_Payload, int]:
        """Check rows against the schema (the first set it and lay out memory). Copies what is cast.

        A root list is a stack of rows, a root tuple one pytree. Of no rows the schema is checked, and nothing laid out.
        """
        single, lead = lead == 0, lead + self.ndim - 1
        if lead and type(data) is list:
            if not data:
                return _NO_ROWS, 0
            data = self._stacked(data)
        late: dict[Path, Tensor] = {}
        schema = describe(data, lead) if self._table is None else self._table.schema
        if self._late:
            data, late = self._late.split(data, self._known(), None)
            self._late.refuse_unknown(late)
        flat = schema.flatten(data, None, lead)
        rows = math.prod(flat.batch)
        late = self._late.rows(late, flat.batch) if late else late
        if self._table is not None and self.ndim > 1:
            self._check_num_envs(flat.batch)
        if rows == 0:
            return _no_rows(flat, single=single), 0
        if flat.addresses is not None and 0 in flat.addresses:
            _require_memory(schema, flat, self.device)
        if self._table is None:
            self._lay_out(schema, flat.batch, flat.leaves[0].device)
        links = None
        if self._objects is not None:
            flat = flat._replace(objects=self._objects.owned(flat.objects, rows))
        if isinstance(self._table, MirroredTable):
            objects = flat.objects
            flat, links = self._table.prepare(flat, self._cursor)
            flat = flat._replace(objects=objects)
        return _Payload(flat, late, links), rows

    def _stacked(self, rows: list[Any]) -> Any:
        if self._table is None:
            return kinds.stack(rows, table=True)
        schema = self._table.schema
        return kinds.stack(rows, schema.fit, objects={leaf.path for leaf in schema.objects}, table=True)

    @property
    def laid_out(self) -> bool:
        """Whether rows have shown their form."""
        return self._table is not None

    def forget_form(self) -> None:
        """Drop the form taken from rows that were refused after all, so that the next rows may show another."""
        self._table = None
        self._objects = None
        self._num_envs = 1

    def _known(self) -> set[Path]:
        return set(self._require().schema.paths)

    def _check_num_envs(self, batch: tuple[int, ...]) -> None:
        if batch[-1] != self._num_envs:
            msg = f"rows must have {self._num_envs} environments, got batch size {list(batch)}"
            raise SchemaError(msg)

    def _lay_out(self, schema: Schema, batch: tuple[int, ...], device: torch.device) -> None:
        msg = f"a TensorStorage is laid out by its data, got rows on {device} of {schema} and batch {batch}"
        raise UsageError(msg)

    def _lay_mapped(self, schema: Schema, state: dict[str, Any], num_envs: int) -> None:
        msg = f"{type(self).__name__} cannot map {len(state)} entries of {schema} in {num_envs} environment(s)"
        raise UsageError(msg)

    def _require(self) -> Table | MirroredTable:
        if self._table is None:
            msg = "the storage holds no rows yet: write some first"
            raise UsageError(msg)
        return self._table

    def scores(self, payload: _Payload, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of rows about to be written, `[rows, *shape]`."""
        flat = payload.flat
        for leaf, value in zip(self._require().schema.leaves, flat.leaves, strict=True):
            if leaf.path == path:
                return value.reshape((math.prod(flat.batch), *leaf.shape))
        return payload.late.get(path)

    def scores_at(self, slots: Tensor, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return a field of some rows; the others are not read. Copy."""
        paths = [leaf.path for leaf in self._require().schema.leaves]
        return self.fetch([Request(paths.index(path), slots)])[0] if path in paths else None

    def set(self, placement: Placement, payload: _Payload) -> None:
        """Write rows to slots: one copy, from whichever device they are on."""
        table = self._require()
        if self.ring_only:
            as_run(placement)
        self._about_to_change()
        if payload.links is not None and isinstance(table, MirroredTable):
            table.write_run(as_run(placement), payload.flat, self._num_envs, payload.links)
        elif isinstance(table, Table):
            table.write(placement, payload.flat, self._num_envs)
        if self._objects is not None:
            self._objects.set(placement, payload.flat.objects)
        if isinstance(placement, Picks):
            if placement.slots.shape[0]:
                self._rows = max(self._rows, int(placement.slots.max()) + 1)
                self._cursor = self._rows % table.capacity
        else:
            end = placement.start + placement.rows
            self._rows = max(self._rows, min(end, table.capacity))
            self._cursor = end % table.capacity
        if self._late:
            slots = placement.slots if isinstance(placement, Picks) else placement.slots(self.device)
            rows = (
                placement.rows
                if isinstance(placement, Picks)
                else torch.arange(placement.skip, placement.total, device="cpu")
            )
            self._late.set(slots, payload.late, rows)

    def get(self, slots: Tensor, *, pin: bool = False) -> _Payload:
        """Copy the rows at `slots` into fresh tensors `[B, *shape]`.

        Raises:
            KeyMissingError: if a row lacks a field that was added later to other rows.
        """
        flat = Flat(self._require().gather(slots, pin=pin), (slots.shape[0],), None)
        if self._objects is not None:
            flat = flat._replace(objects=self._objects.get(slots))
        if not self._late:
            return _Payload(flat, {})
        self._late.require_all(slots)
        return _Payload(flat, self._late.get(slots))

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy other rows for each field: one tensor `[n, *leaf.shape]` for each request.

        Fields added later cannot be asked for: they have no leaf.
        """
        return self._require().fetch(requests, pin=pin)

    def assemble(
        self, leaves: list[Tensor], records: Tensor, elsewhere: Mapping[Path, Tensor] | None = None
    ) -> _Payload:
        """Return the payload of a batch whose leaves were fetched; late fields are those of the records.

        So are fields of Python objects, but those that `elsewhere` names other slots for (int64 `[R]`).
        """
        flat = Flat(leaves, (records.shape[0],), None)
        if self._objects is not None:
            flat = flat._replace(objects=self._objects.get(records, elsewhere or {}))
        if not self._late:
            return _Payload(flat, {})
        self._late.require_all(records)
        return _Payload(flat, self._late.get(records))

    def present(self, payload: _Payload, batch: tuple[int, ...]) -> Any:
        """Nest leaves as the rows were nested. No copy."""
        leaves, objects = payload.flat.leaves, payload.flat.objects
        schema = self._require().schema
        if len(batch) != 1:
            leaves = [x.reshape((*batch, *leaf.shape)) for x, leaf in zip(leaves, schema.leaves, strict=True)]
            objects = [x.reshape((*batch, *leaf.shape)) for x, leaf in zip(objects, schema.objects, strict=True)]
        data = schema.build(leaves, batch, self.device, objects)
        for path, value in payload.late.items():
            data[path[0]] = value.reshape((*batch, *value.shape[1:]))
        return data

    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return the rows at an index, or one field by its key: a view for ints, slices and keys, else a copy.

        Fields of Python objects are lists of the objects themselves, whatever the index.

        Args:
            index: see `select`; a str or tuple of str is the path of a field.
            swap: with `ndim=2`, address `[num_envs, steps]` instead of `[steps, num_envs]`.

        Raises:
            SlotError: if the index is out of range of the rows present.
            KeyMissingError: no such field, or some of the rows lack one that was added later.
        """
        if is_field(index):
            return self._read_field((index,) if isinstance(index, str) else index, swap=swap)
        table = self._require()
        if self.ndim > 1:
            self._expose()
            return read_grid(table, self._late, self._objects, self.shape, index, swap=swap)
        picked = select(index, self.shape, self.device)
        if picked.span is None:
            leaves, late = table.gather(picked.slots), self._late.get(picked.slots) if self._late else {}
        else:
            self._expose()
            leaves, late = table.view(picked.span), self._late.view(picked.span, self._rows) if self._late else {}
        flat = Flat(leaves, picked.batch, None)
        if self._objects is not None:
            flat = flat._replace(objects=self._objects.get(picked.slots if picked.span is None else picked.span))
        return self.present(_Payload(flat, late), picked.batch)

    def _read_field(self, path: tuple[str, ...], *, swap: bool) -> Any:
        table = self._require()
        if self._objects is not None and path in self._objects.paths:
            values = self._objects.column(path)[: self._rows]
            values = values.reshape((*self.shape, *values.shape[1:]))
            return (values.swapaxes(0, 1) if swap else values).tolist()
        self._expose()
        if path in self._late.columns:
            self._late.require_all(torch.arange(self._rows, device=self.device))
            column = self._late.columns[path]
        else:
            column = table.column(table.schema.find(path), self._rows)
        return as_grid(column[: self._rows], self.shape, swap=swap)

    def _expose(self) -> None:
        """Take note that a view goes out; reads of single copies are copies."""
        self.exposed = self.exposed or not isinstance(self._table, MirroredTable)

    def row_arrays(self) -> list[RowArray]:
        """Return packed rows and fields as they lie in memory. Views."""
        table = self._table
        if table is None:
            return []
        names = [column_name(leaf.path, i) for i, leaf in enumerate(table.schema.leaves)]
        if isinstance(table, MirroredTable):
            return row_arrays(table.inner, [names[i] for i in table.kept])
        return row_arrays(table, names)

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check rows for `slots`; keys that the schema does not know become late fields of these rows.

        Raises:
            SchemaError: if they do not match the rows stored, or a field has another number of rows.
        """
        table, count = self._require(), slots.shape[0]
        if batch and type(data) is list:
            if not data:
                _require_none(count)
                return lambda: None
            data = self._stacked(data)
        data, late = self._late.split(data, self._known(), batch)
        flat = table.schema.flatten(data, batch, len(batch))
        leaves = [x.reshape((count, *leaf.shape)) for x, leaf in zip(flat.leaves, table.schema.leaves, strict=True)]
        kept = self._objects
        objects = () if kept is None else kept.owned(flat.objects, count)

        def change() -> None:
            self._about_to_change()
            table.edit(slots, Flat(leaves, (count,), flat.addresses))
            if kept is not None:
                kept.edit(slots, objects)
            if late or self._late:
                self._late.set(slots, late)

        return change

    def prepare_field(
        self, path: tuple[Hashable, ...], slots: Tensor, value: Any, batch: tuple[int, ...]
    ) -> Callable[[], None]:
        """Check one field for `slots`; a value is not broadcast.

        Raises:
            KeyMissingError: if there is no such field.
            SchemaError: if the shape differs, or the values do not fit the stored dtype (see `docs/casts.md`).
        """
        if path in self._late.columns:
            _, late = self._late.split({path[0]: value}, set(), batch)
            return lambda: self._change_field(None, path, slots, late[path])
        table = self._require()
        if self._objects is not None and path in self._objects.paths:
            return self._prepare_objects(self._objects.column(path), path, slots, (value, batch))
        position = table.schema.find(path)
        leaf = table.schema.leaves[position]
        (checked,), *_ = table.schema.only(position).flatten(value, batch, len(batch))
        column = checked.reshape((slots.shape[0], *leaf.shape))
        return lambda: self._change_field(position, path, slots, column)

    def _prepare_objects(
        self, column: np.ndarray[Any, Any], path: tuple[Hashable, ...], slots: Tensor, given: tuple[Any, Any]
    ) -> Callable[[], None]:
        value, batch = given
        objects = own_values(kinds.as_objects(value, path, (*batch, *column.shape[1:])))
        objects = objects.reshape((slots.shape[0], *column.shape[1:]))

        def change() -> None:
            self._about_to_change()
            column[slots.cpu().numpy()] = objects

        return change

    def _change_field(self, position: int | None, path: Path, slots: Tensor, value: Tensor) -> None:
        self._about_to_change()
        if position is None:
            self._late.put(path, slots, value)
        else:
            self._require().write_column(position, slots, value)

    def _about_to_change(self) -> None:
        """Take note that rows will change: what a mapped storage has flushed is not what it holds any more."""

    def clear(self) -> None:
        """Forget all rows and late fields, keep the memory."""
        self._about_to_change()
        self._rows = 0
        self._cursor = 0
        self._late.clear()
        if self._objects is not None:
            self._objects.clear()
        if isinstance(self._table, MirroredTable):
            self._table.clear()

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Let a hook convert the rows whenever the buffer saves a checkpoint (`dumps`); the storage keeps its rows.

        Hooks are not saved: register them anew for each buffer. They run in the order of registration, each on what the
        one before returned, and under the buffer's lock.

        Args:
            hook: called as `hook(rows, path=None)`, with the rows present (views `[rows]`, with `ndim=2`
                `[steps, num_envs]`, of the kind in which they came); returns a TensorDict or a dict of tensors and
                plain values. If it has an attribute `shift`, that is set before to the step after the newest, and
                `is_full` to True: no row is unwritten.

        Raises:
            KindError: if it cannot be called.
        """
        self.save_hooks = (*self.save_hooks, check_hook(hook))

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Let a hook convert rows back that were saved with save hooks, when the buffer loads a checkpoint (`loads`).

        Args:
            hook: called as `hook(data, out=None)` with what the last save hook returned, or the load hook before;
                the last one returns the rows, with the fields that they had.

        Raises:
            KindError: if it cannot be called.
        """
        self.load_hooks = (*self.load_hooks, check_hook(hook))

    def state_dict(self) -> dict[str, Any]:
        """Return rows present as views, and counts."""
        columns, late = ({}, []) if self._table is None else name_columns(self._table, self._late, self._rows)
        return {
            "form": self.form,
            "rows": self._rows,
            "cursor": self._cursor,
            "lanes": self._num_envs,
            "ndim": self.ndim,
            "capacity": self.capacity,
            "schema": None if self._table is None else self._table.schema.to_json(),
            "single_copy": list(map(list, self._table.pairs)) if isinstance(self._table, MirroredTable) else None,
            "columns": columns,
            "late": late,
            **({} if self._objects is None else self._objects.state(self._rows, allow_pickle=self.allow_pickle)),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse rows of another form, or more than fit.

        Raises:
            CheckpointError: naming what differs.
        """
        if state["schema"] is None:
            return
        num_envs, schema = max(1, int(state["lanes"])), Schema.from_json(state["schema"])
        if self._table is None:
            check_room(state, self.ndim, -(-self._max_size // num_envs) * num_envs)
        else:
            check_room(state, self.ndim, self._table.capacity)
            check_form(self._table.schema, self._num_envs, schema, num_envs)
        check_columns(schema, state)
        check_objects(schema, state)

    def seam(self, state: dict[str, Any]) -> int:
        """Return the slot of the oldest row in a saved ring that `load_state_dict` turns until it is in slot 0."""
        if state.get("schema") is None:
            return 0
        num_envs = max(1, int(state["lanes"]))
        capacity = -(-self._max_size // num_envs) * num_envs if self._table is None else self._table.capacity
        return find_seam(state, int(state["rows"]), capacity)

    def hold(self, *, replaced: bool) -> Callable[[], None]:
        """Return what brings the rows of now back; see `Storage.hold`."""
        kept = self._table, self._num_envs, self._rows, self._cursor, self._late, self.exposed, self._objects
        state = None if replaced or not self._rows else copied_rows(self.state_dict())

        def restore() -> None:
            self._table, self._num_envs, self._rows, self._cursor, self._late, self.exposed, self._objects = kept
            if state is not None:
                self.load_state_dict(state)
            elif not self._rows and self._table is not None:
                self.clear()

        return restore

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy rows in, laying out the memory if that was not done.

        The rows of a full ring of another capacity come in the order of writing, the oldest in slot 0.

        Raises:
            CheckpointError: if the schema differs, or there are more rows than fit; nothing is changed.
        """
        if state["schema"] is None:
            self.clear()
            return
        self.check_state(state)
        seam = self.seam(state)
        if seam and state.get("mapped"):
            refuse_mapped_ring(state, seam, self.capacity)
        if seam:
            state = turn_columns(state, seam)
        schema, rows, num_envs = Schema.from_json(state["schema"]), int(state["rows"]), max(1, int(state["lanes"]))
        mapped, before = bool(state.get("mapped")), (self._table, self._num_envs, self._objects)
        if mapped:
            self._lay_mapped(schema, state, num_envs)
        elif self._table is None:
            self._lay_out(schema, (rows // num_envs, num_envs) if self.ndim > 1 else (rows,), self.device)
        table = self._require()
        self._about_to_change()
        try:
            late = fill_columns(table, state)
        except Exception:
            if mapped or before[0] is None:
                self._table, self._num_envs, self._objects = before  # half-read rows of a damaged file must not stay
            raise
        if self._objects is not None:
            self._objects.load(state)
        if mapped:
            self.exposed = False  # views that were handed out are of other memory
        cursor = int(state["cursor"]) if table.capacity == state["capacity"] else rows
        self._rows, self._cursor, self._late = rows, cursor % table.capacity, late


def _require_none(rows: int) -> None:
    """Raise `SchemaError` where an empty list is given for some rows."""
    if rows:
        msg = f"{rows} rows are chosen, an empty list was given: give one for each"
        raise SchemaError(msg)


def _no_rows(flat: Flat, *, single: bool) -> _Payload:
    """Return what is written of no rows; raise `SchemaError` for a step of no environments."""
    if single:
        msg = f"a step must have at least one environment, got batch size {list(flat.batch)}"
        raise SchemaError(msg)
    return _NO_ROWS


def _require_memory(schema: Schema, flat: Flat, device: torch.device) -> None:
    """Refuse rows on the CPU that native code cannot read: fake tensors, and subclasses that wrap another tensor.

    Raises:
        KindError: naming the field.
    """
    for leaf, value, address in zip(schema.leaves, flat.leaves, flat.addresses or (), strict=False):
        if not address and value.numel() and device.type == "cpu":
            msg = (
                f"{kinds.show_field(leaf.path)} holds a {type(value).__name__} without memory of its own: give a plain "
                "torch.Tensor (of a fake tensor there are no values; subclasses that wrap a tensor have one to unwrap)"
            )
            raise KindError(msg)
