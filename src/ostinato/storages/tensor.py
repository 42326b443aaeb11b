"""TensorStorage: one tensor for each field, on any device; the base class of all storages of tensors."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.counts import StoredRows, make_counts
from ostinato.core.index import apply_index, is_field, plain_index, select
from ostinato.core.records import Picks, Request, Run
from ostinato.core.rows import Flat, Schema, describe
from ostinato.durable.arrays import values_of
from ostinato.errors import CapacityError, CheckpointError, KindError, OptionError, SchemaError, StackError, UsageError
from ostinato.storages.base import Storage, check_capacity, check_device, check_ndim
from ostinato.storages.checkpoint import (
    UNREADABLE,
    RowHooks,
    capacity_for,
    check_schema,
    raise_unreadable,
    require_form,
    seam_of,
)
from ostinato.storages.coded import find_coded
from ostinato.storages.columns import (
    Fields,
    StorageColumn,
    check_column,
    check_objects,
    counts_after,
    own_values,
    pack_objects,
    saved_jagged,
    unpack_objects,
)
from ostinato.storages.memory import HeapMemory, show_bytes
from ostinato.storages.single_copy import find_nexts
from ostinato.storages.table import Table, read_windows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ostinato.core.records import Placement, Plan
    from ostinato.core.rows import Path

__all__ = ["TensorStorage", "raise_mapped_ring"]


@final
class _Columns(dict[str, Any]):
    """Columns of a state by name. Pickled and deep copied as dense copies.

    Fields of a packed row are views of one block of memory in several dtypes, which `torch.save` cannot save, and each
    view would be saved with the whole block.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return an `OrderedDict` of copies, which `torch.load(weights_only=True)` accepts."""
        dense = [(name, x.clone(memory_format=torch.contiguous_format)) for name, x in self.items()]
        return OrderedDict, (dense,)


_NO_ROWS_YET = "Cannot get elements out of a non-initialized storage: it holds no rows yet, write some first"
_NO_ROWS = Flat([], (0,))


class TensorStorage(Storage):
    """Rows in existing tensors, such as a dataset; the base class of the storages that allocate their own.

    Args:
        storage: a tensor, TensorDict, tensorclass, or dict/list/tuple pytree of tensors `[rows, ...]`; not copied.
        max_size: capacity in rows; if given, it must be the number of rows of `storage`.
        device: accepted for compatibility with TorchRL: must be the device of the data, or "auto".
        ndim: 1, or 2 for data `[time, environments, ...]`, which is the order in memory. Indices of the buffer have the
            order that `extend` takes: environments first, unless it has `dim_extend=0`.
        allow_pickle: let `dumps` and `loads` pickle objects of non-tensor fields that are not text or plain values.
            Unpickling executes code: set it only for checkpoints that you trust.
        compilable: no effect: the native call is opaque to `torch.compile` in any case.

    Raises:
        CapacityError: if `max_size` is not the number of rows.
        OptionError: if the data lies on another device, or `ndim` is neither 1 nor 2.

    Examples:
        >>> import torch
        >>> from ostinato import ReplayBuffer, TensorStorage
        >>> rb = ReplayBuffer(storage=TensorStorage({"obs": torch.arange(6.0).view(3, 2)}), batch_size=2)
        >>> len(rb)
        3
    """

    form = "tensors"
    supports_conditional_update = True
    rotates = True
    no_hooks = RowHooks.no_hooks
    capacity: int = 0
    """Maximum number of rows; with `ndim=2`, rounded up to whole steps of all environments."""
    max_size: int = 0
    """The requested capacity."""
    _kinds: Sequence[StorageColumn] = ()
    """Kinds of column that options give fields, before there are rows."""
    _table: Fields | None = None
    _flushed: bool = False
    """Whether files on the disk describe the rows as they are now; see `LazyMemmapStorage.flush`."""
    _closed: bool = False

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
        self.ndim = check_ndim(ndim)
        self.allow_pickle = allow_pickle
        if storage is None:
            msg = "Expected storage to be non-null: give the data, or use LazyTensorStorage(max_size) for data to come"
            raise OptionError(msg)
        schema = describe(storage, self.ndim)
        flat = schema.flatten(storage, None, self.ndim)
        leaves, batch = flat.leaves, flat.batch
        _require_memory(schema, flat, leaves[0].device)
        self.num_envs = batch[1] if self.ndim > 1 else 1
        rows = batch[0] * self.num_envs
        if max_size is not None and max_size != rows:
            msg = (
                f"The max-size and the storage shape mismatch: got max_size={max_size} for {rows} rows. Omit max_size, "
                "or use LazyTensorStorage for more room"
            )
            raise CapacityError(msg)
        self.max_size = self.capacity = check_capacity(rows)
        for leaf, value in zip(schema.leaves, leaves, strict=True):
            if value.numel() > 1 and 0 in value.stride():
                msg = f"field {leaf} is expanded, so that rows share memory: clone() the data first"
                raise SchemaError(msg)
        self.exposed = True  # the caller may write to the tensors
        dense = Table.adopt(schema, [x.flatten(0, 1) if self.ndim > 1 else x for x in leaves])
        self.device = dense.device
        if device != "auto" and check_device(device) != self.device:
            msg = (
                f"the data lies on {self.device}, device={device!r} was asked for: move the data first, or "
                "pass device='auto'"
            )
            raise OptionError(msg)
        self._at: StoredRows = make_counts(StoredRows)
        self._at.rows = rows
        memory = HeapMemory(self.device)
        kept = range(len(schema.leaves))
        self._table = Fields(
            schema, kept, dense, [], num_envs=self.num_envs, memory=memory, allow_pickle=self.allow_pickle
        )
        for kind, objects in zip(self._table.kinds, self._table.prepare(flat, rows, None), strict=True):
            kind.write(Run(0, rows, rows), objects)

    def flatten(self) -> Storage:
        """Return a storage of the rows present with `ndim=1`: this storage, or with `ndim=2` one on the same memory.

        Raises:
            UsageError: if there are no rows, or with `single_copy`, `codec` or `kinds`.
        """
        if self.ndim == 1:
            return self
        if not self._at.rows:
            msg = "Cannot flatten a non-initialized storage: write rows first"
            raise UsageError(msg)
        table = self._require()
        if not table.views:
            msg = "rows with single_copy, codec or kinds cannot be flattened in place: read them with storage[:]"
            raise UsageError(msg)
        self._expose()
        rows = self._at.rows
        data = self.present(table.view(slice(rows), rows), (rows,))
        return TensorStorage(data, allow_pickle=self.allow_pickle)

    @property
    def schema(self) -> Schema | None:  # type: ignore[override]
        """Schema of a row; None before the first."""
        return None if self._table is None else self._table.schema

    @property
    def columns(self) -> dict[Path, Tensor]:
        """Tensor fields: path -> `[capacity, *shape]`, rows that were never written included. Views.

        With `single_copy`, `codec` or `kinds`, copies of the rows present, `[rows, *shape]`.
        """
        table = self._table
        if table is None:
            return {}
        self._expose()
        rows = self._at.rows
        columns = table.dense.columns if table.views else table.view(slice(rows), rows).leaves
        found = {leaf.path: column for leaf, column in zip(table.schema.leaves, columns, strict=True)}
        return found | {path: late.columns[0] for path, late in table.late.fields.items()}

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the whole capacity without those of Python objects; 0 before the first row."""
        return 0 if self._table is None else self._table.nbytes

    @property
    def cursor(self) -> int:
        """Slot after the newest row."""
        return self._at.cursor

    @property
    def writes(self) -> int:
        """Number of writes by buffers, and by `set` and `loads`."""
        return self._at.writes

    @writes.setter
    def writes(self, count: int) -> None:
        self._at.writes = count

    def plain_table(self) -> tuple[Fields, StoredRows] | None:
        """Return fields and counts if a write now only changes rows: native calls may do it then.

        None if something else follows the rows: fields of Python objects or that were added later, files that describe
        them, a budget.
        """
        table, at = self._table, self._at
        at.plain = table is not None and table.native is not None and not (self.budget or self._flushed)
        return (table, at) if table is not None and at.plain else None

    @property
    def dense(self) -> Table | None:  # type: ignore[override]
        """Packed rows and fields as they lie in memory; None before the first row."""
        return None if self._table is None else self._table.dense

    @property
    def laid_out(self) -> bool:  # type: ignore[override]
        """Whether the schema is known."""
        return self._table is not None

    def __len__(self) -> int:
        """Number of rows present (of all environments with `ndim=2`)."""
        return self._at.rows

    def __repr__(self) -> str:
        """Class, number of rows, bytes and fields."""
        schema = self.schema
        fields = "not laid out yet" if schema is None else "; ".join(map(str, (*schema.leaves, *schema.objects)))
        num_envs = f", num_envs={self.num_envs}" if self.ndim > 1 else ""
        return (
            f"{type(self).__name__}(rows={self._at.rows}, capacity={self.capacity}{num_envs}, ndim={self.ndim}, "
            f"device={self.device}, bytes={show_bytes(self.nbytes)}, fields=[{fields}])"
        )

    # -- writing -------------------------------------------------------------------------------------------------------

    def admit(self, data: Any, lead: int) -> tuple[Flat, int]:
        """Check rows against the schema; the first rows define it, and memory is allocated. Casts are copies.

        A list at the root is a stack of rows, a tuple a single pytree. Without rows, only the schema is checked.
        """
        single, lead, table = lead == 0, lead + self.ndim - 1, self._table
        if lead and type(data) is list and not data:
            return _NO_ROWS, 0
        schema, flat = self._flattened(data, None, lead, edit=False)
        rows = math.prod(flat.batch)
        if self.ndim > 1:
            _check_envs(flat.batch, None if table is None else self.num_envs, single=single)
        if rows == 0:
            return _NO_ROWS, 0
        if flat.addresses is not None and 0 in flat.addresses:
            _require_memory(schema, flat, self.device)
        return flat if table is not None and not table.kinds else self._prepared(schema, flat), rows

    def _flattened(self, data: Any, batch: tuple[int, ...] | None, lead: int, *, edit: bool) -> tuple[Schema, Flat]:
        """Return the schema of rows, and the rows, checked; an edit may bring new fields."""
        if lead and type(data) is list:
            data = _stacked(data, None if self._table is None else self._table.schema)
        table, late = self._table, None
        schema = describe(data, lead) if table is None else table.schema
        if table is not None and (edit or table.late.fields):
            data, late = table.late.split(data, schema.paths)
            if not edit:
                table.late.require_known(late)
        flat = schema.flatten(data, batch, lead)
        if late and table is not None:
            flat = flat._replace(late=table.late.rows(late, flat.batch))
        return schema, flat

    def _prepared(self, schema: Schema, flat: Flat) -> Flat:
        """Return rows that are ready to be written; the first ones lay the memory out."""
        fresh = self._table is None
        if fresh:
            self._lay_out(schema, flat.batch, flat.leaves[0].device)
        try:
            prepared = self._require().prepare(flat, math.prod(flat.batch), self._at.cursor)
            return flat._replace(prepared=prepared)
        except Exception:
            if fresh:
                self.forget_form()
            raise

    def _lay_out(
        self, schema: Schema, batch: tuple[int, ...], device: torch.device, mapped: Mapping[int, Any] | None = None
    ) -> None:
        """Allocate memory for rows of a schema, or map saved columns (by position of the leaf) as memory."""
        msg = f"a TensorStorage is laid out by its data, got rows on {device} of {schema}, batch {batch}, {mapped}"
        raise UsageError(msg)

    def _require(self) -> Fields:
        if self._table is None:
            msg = "the storage is closed" if self._closed else _NO_ROWS_YET
            raise UsageError(msg)
        return self._table

    def write(self, placement: Placement, payload: Flat) -> None:
        """Write rows to slots, from any device. One copy."""
        table = self._table or self._require()
        if self.ring_only and not isinstance(placement, Run):
            msg = "single_copy takes rows in ring order (Run), got Picks: the row that follows would not be the next"
            raise OptionError(msg)
        if self._flushed:
            self._end_flush()
        rows, cursor = counts_after(placement, self._at.rows, self._at.cursor, table.capacity)
        table.write(placement, payload)
        self._at.rows, self._at.cursor = rows, cursor

    def _end_flush(self) -> None:
        """Record that the rows are about to change; see `LazyMemmapStorage.flush`."""
        self._flushed = False

    def scores(self, payload: Flat, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of rows that will be written, `[rows, *shape]`."""
        position, batch = self._find_leaf(path), payload.batch
        if position is None:
            return payload.late.get(path)
        value = payload.leaves[position]
        return value if len(batch) == 1 else value.reshape((math.prod(batch), *value.shape[len(batch) :]))

    def _find_leaf(self, path: tuple[Hashable, ...]) -> int | None:
        """Return the position of a leaf; None if there is none."""
        paths = [leaf.path for leaf in self._require().schema.leaves]
        return paths.index(path) if path in paths else None

    def scores_at(self, slots: Tensor, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of some rows; other fields are not read. Copy."""
        position = self._find_leaf(path)
        return None if position is None else self.fetch([Request(position, slots)])[0]

    def clear(self) -> None:
        """Remove all rows and late fields; keep the memory."""
        if self._flushed:
            self._end_flush()
        self._at.rows = self._at.cursor = 0
        if self._table is not None:
            self._table.clear()

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> Flat:
        """Copy the rows at `slots` into new tensors `[B, *shape]`.

        Raises:
            KeyMissingError: if a row lacks a field that was added later to other rows.
        """
        return (self._table or self._require()).gather(slots, pin=pin, sampled=True)

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy different rows of each field: one tensor `[n, *leaf.shape]` for each request.

        Fields that were added later have no leaf and cannot be requested.
        """
        return (self._table or self._require()).fetch(requests, pin=pin)

    def read_plan(self, plan: Plan, *, pin: bool = False) -> Flat:
        """Return the payload of a plan's batch, whose leaves are read in one native call where that is possible.

        Fields of Python objects, and those that were added later, are those of the records, except for objects that
        the plan reads elsewhere.
        """
        table, records = self._table or self._require(), plan.records
        leaves = read_windows(table.dense, plan) if table.views and not pin else None
        if leaves is None:
            leaves = plan.fold(table.fetch(plan.requests(), pin=pin))
        objects, late = table.objects(records, plan.elsewhere), table.late.get(records, sampled=True)
        return Flat(leaves, (records.shape[0],), None, objects, late)

    def present(self, payload: Flat, batch: tuple[int, ...]) -> Any:
        """Nest leaves as the written rows were nested. No copy."""
        leaves, objects, late = payload.leaves, payload.objects, payload.late
        schema = (self._table or self._require()).schema
        if len(batch) != 1:
            leaves = [x.reshape((*batch, *leaf.shape)) for x, leaf in zip(leaves, schema.leaves, strict=True)]
            objects = [x.reshape((*batch, *leaf.shape)) for x, leaf in zip(objects, schema.objects, strict=True)]
            late = {path: value.reshape((*batch, *value.shape[1:])) for path, value in late.items()}
        rows = schema.build(leaves, batch, self.device, objects)
        return kinds.with_fields(rows, late) if late else rows

    def show_payload(self, payload: Flat) -> dict[str, Any]:
        """Return gathered rows as plain values and tensors; ragged leaves are values and lengths. Nothing is copied.

        Raises:
            CheckpointError: if a field holds Python objects that a checkpoint cannot hold.
        """
        leaves = [list(values_of(x)) if x.is_nested else x for x in payload.leaves]
        objects = pack_objects(payload.objects, allow_pickle=False)
        late = [[list(path), x] for path, x in payload.late.items()]
        return {"leaves": leaves, "objects": objects, "late": late}

    def read_payload(self, saved: Any, schema: Schema | None, rows: int) -> Flat:
        """Return what `show_payload` returned, by copy.

        Units may have put dimensions between that of the rows and those of a field.
        """
        if schema is None:
            msg = "the checkpoint holds a queued draw of rows without fields: it is damaged"
            raise CheckpointError(msg)
        parts = [saved_jagged(*x) if isinstance(x, list) else x for x in saved["leaves"]]
        leaves = [x.to(self.device).clone() for x in parts]
        objects = unpack_objects(saved["objects"], schema, (rows,), allow_pickle=False)
        late = {tuple(path): x.to(self.device).clone() for path, x in saved["late"]}
        fits = [
            x.dtype is leaf.dtype and x.shape[x.ndim - len(leaf.shape) :] == leaf.shape
            for x, leaf in zip(leaves, schema.leaves, strict=True)
        ]
        if not all(fits) or any(x.shape[:1] != (rows,) for x in (*leaves, *late.values())):
            msg = f"the rows of a queued draw are not {rows} rows of the buffer's fields: the checkpoint is damaged"
            raise CheckpointError(msg)
        return Flat(leaves, (rows,), None, objects, late)

    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return the rows at an index, or one field by its key: a view for ints, slices and keys, else a copy.

        Fields of Python objects are lists of the stored objects for any index.

        Args:
            index: see `select`; a str or tuple of str is the path of a field.
            swap: with `ndim=2`, address `[num_envs, steps]` instead of `[steps, num_envs]`.

        Raises:
            SlotError: if the index is out of range of the rows present.
            KeyMissingError: if there is no such field, or some of the rows lack one that was added later.
        """
        if is_field(index):
            return self._read_field((index,) if isinstance(index, str) else index, swap=swap)
        table = self._require()
        if self.ndim > 1:
            return self._read_grid(table, index, swap=swap)
        picked = select(index, self.shape, self.device)
        if picked.span is None:
            return self.present(table.gather(picked.slots), picked.batch)
        self._expose()
        return self.present(table.view(picked.span, self._at.rows), picked.batch)

    def _read_grid(self, table: Fields, index: Any, *, swap: bool) -> Any:
        """Return the rows at an index into `[steps, num_envs]`: a view for ints and slices, else a copy."""
        self._expose()
        index = plain_index(index)
        template = torch.empty(1, dtype=torch.float32, device="cpu").expand(self._at.rows)
        batch = tuple(apply_index(self._as_grid(template, swap=swap), index).shape)
        grids = [self._as_grid(x, swap=swap) for x in table.dense.view(slice(self._at.rows))] if table.views else []
        flat = Flat([apply_index(grid, index) for grid in grids], batch)
        if table.plain:
            return self.present(flat, batch)
        slots = select(index, self.shape, self.device, swap=swap).slots
        if not table.views:
            return self.present(table.gather(slots), batch)
        return self.present(flat._replace(objects=table.objects(slots), late=table.late.get(slots)), batch)

    def _as_grid(self, column: Any, *, swap: bool) -> Any:
        """Return a column of the rows present in the shape of the storage; with `swap`, environments first. View."""
        grid = column.reshape((*self.shape, *column.shape[1:]))
        return grid.swapaxes(0, 1) if swap else grid

    def _read_field(self, path: tuple[str, ...], *, swap: bool) -> Any:
        table, rows = self._require(), self._at.rows
        paths = table.schema.paths
        self._expose()
        if path in table.late.fields:
            column: Any = table.late.view(slice(rows), rows, sampled=True)[path]
        else:
            column = table.column(paths.index(path) if path in paths else table.schema.find(path), rows)
        if self.ndim > 1:
            column = self._as_grid(column, swap=swap)
        return column if isinstance(column, Tensor) else column.tolist()

    def _expose(self) -> None:
        """Record that a view is returned; tables with fields that are not dense return copies."""
        self.exposed = self.exposed or (self._table is not None and self._table.views)

    # -- edits ---------------------------------------------------------------------------------------------------------

    def check_new_fields(self, index: Any, slots: Tensor, data: Any) -> None:
        """Check that the new fields of an edit are written to all rows, or to the first ones by a slice, `rb[:n]`.

        Raises:
            SchemaError: naming the field and how many rows would lack it.
        """
        leading = isinstance(index, slice) and not index.start and index.step in {None, 1}
        if not leading:
            table = self._require()
            table.late.require_cover(data, table.schema.paths, slots, len(self))

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check rows for `slots`; keys that are not in the schema become late fields of these rows.

        Raises:
            SchemaError: if they do not match the stored rows, or a field has another number of rows.
        """
        table, count = self._require(), slots.shape[0]
        if batch and type(data) is list and not data:
            if count:
                msg = f"{count} rows are chosen, an empty list was given: give one for each"
                raise SchemaError(msg)
            return lambda: None
        schema, flat = self._flattened(data, batch, len(batch), edit=True)
        pairs = zip(flat.leaves, schema.leaves, strict=True)
        leaves = [x if x.is_nested else x.reshape((count, *leaf.shape)) for x, leaf in pairs]
        flat = flat._replace(leaves=leaves, batch=(count,))
        payload = flat._replace(prepared=table.prepare(flat, count, None))
        placement = Picks(slots, torch.arange(count, device=slots.device), slots)

        def change() -> None:
            self._end_flush()
            table.write(placement, payload)

        return change

    def prepare_field(
        self, path: tuple[Hashable, ...], slots: Tensor, value: Any, batch: tuple[int, ...]
    ) -> Callable[[], None]:
        """Check the values of one field for `slots`; they are not broadcast.

        Raises:
            KeyMissingError: if there is no such field.
            SchemaError: if the shape differs, or the values do not fit the stored dtype (see `docs/casts.md`).
        """
        table = self._require()
        paths = table.schema.paths
        if path in table.late.fields:
            fitted = table.late.rows({path: value}, batch)[path]
            write = functools.partial(table.late.put, path, slots, fitted)
        else:
            position = paths.index(path) if path in paths else table.schema.find(path)
            fitted = self._fit_field(position, value, batch, slots.shape[0])
            write = functools.partial(table.write_field, position, slots, fitted)

        def change() -> None:
            self._end_flush()
            write()

        return change

    def _fit_field(self, position: int, value: Any, batch: tuple[int, ...], count: int) -> Any:
        """Return the values of one field, a leaf or one of Python objects, as they are stored in `count` rows."""
        schema = self._require().schema
        if position >= len(schema.leaves):
            leaf = schema.objects[position - len(schema.leaves)]
            objects = own_values(kinds.as_objects(value, leaf.path, (*batch, *leaf.shape)))
            return objects.reshape((count, *leaf.shape))
        (checked,), *_ = schema.only(position).flatten(value, batch, len(batch))
        return checked.reshape((count, *schema.leaves[position].shape))

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_header(self) -> dict[str, Any]:
        """Return a state without columns."""
        return {
            "form": self.form,
            "rows": self._at.rows,
            "cursor": self._at.cursor,
            "lanes": self.num_envs,  # its name in the checkpoint format
            "ndim": self.ndim,
            "capacity": self.capacity,
            "schema": None if self._table is None else self._table.schema.to_json(),
            "single_copy": None,
            "columns": {},
            "late": [],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the rows present as views, and counts. `torch.save` and `copy.deepcopy` copy the rows."""
        state = self.state_header()
        if self._table is not None:
            self._table.add_state(state, self._at.rows)
        return {**state, "columns": _Columns(state["columns"])}

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a state has rows of the same schema, and no more than fit.

        Raises:
            CheckpointError: naming what differs.
        """
        if state["schema"] is not None:
            self.open_state(state)

    def open_state(self, state: dict[str, Any]) -> tuple[Schema, dict[str, Any], dict[int, Any]]:
        """Check a state.

        Returns:
            The schema, the state, and what reads the values of each leaf.

        Raises:
            CheckpointError: naming what differs.
        """
        try:
            num_envs = max(1, int(state["lanes"]))
            schema = Schema.from_json(state["schema"], known=self.schema)
            _check_counts(state, self.ndim, capacity_for(self, num_envs))
            check_schema(self, schema, num_envs)
            state = {**state, "columns": dict(state["columns"]), "objects": check_objects(schema, state)}
            found, rows = self._find_sources(state, schema), int(state["rows"])
            for name, leaf in zip(schema.column_names, schema.leaves, strict=True):
                check_column(name, found[name], leaf.dtype, (rows, *leaf.shape))
            _check_late(schema, state)
        except UNREADABLE as error:
            raise_unreadable(f"a {type(self).__name__}", error)
        return schema, state, {i: found[name] for i, name in enumerate(schema.column_names)}

    def _find_sources(self, state: dict[str, Any], schema: Schema) -> dict[str, Any]:
        """Return what reads the values of each leaf by its name: the columns of a state, or what stands for them."""
        columns = {name: state["columns"].get(name) for name in schema.column_names}
        sources = columns | find_coded(state, schema, self._kinds)
        return sources | find_nexts(state, schema, sources)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy rows in, and allocate the memory if that was not done.

        The rows of a full ring of another capacity are loaded in the order of writing, the oldest to slot 0.

        Raises:
            CheckpointError: if the schema differs, or there are more rows than fit; nothing has changed.
        """
        require_form(state, self)
        if state["schema"] is None:
            self.clear()
            return
        seam, mapped, laid_out = seam_of(state, self), bool(state.get("mapped")), self.laid_out
        schema, state, sources = self.open_state(state)
        rows, num_envs = int(state["rows"]), max(1, int(state["lanes"]))
        if mapped or self._table is None:
            batch = (rows // num_envs, num_envs) if self.ndim > 1 else (rows,)
            self._lay_out(schema, batch, self.device, sources if mapped else None)
        table = self._require()
        self._end_flush()
        try:
            table.load(state, sources, seam)
        except Exception:
            if not laid_out:  # a damaged file, of which a part was read
                self.forget_form()
            raise
        if mapped:
            self.exposed = False  # views that were returned are of other memory
        cursor = int(state["cursor"]) if table.capacity == state["capacity"] else rows
        self._at.rows, self._at.cursor = rows, cursor % table.capacity


def _stacked(rows: list[Any], schema: Schema | None) -> Any:
    """Return a list of rows as one batch.

    Raises:
        StackError: if they cannot be stacked.
    """
    try:
        if schema is None:
            return kinds.stack(rows, table=True)
        return kinds.stack(rows, schema.fit, objects={leaf.path for leaf in schema.objects}, table=True)
    except (SchemaError, KindError) as error:
        msg = (
            f"Stacking the elements of the list resulted in an error: {error}. A list at the root is one item for "
            "each row; a tuple is one pytree of batches"
        )
        raise StackError(msg) from error


def _check_envs(batch: tuple[int, ...], num_envs: int | None, *, single: bool) -> None:
    """Check the number of environments in rows with these leading dimensions, a single step if `single`.

    Raises:
        SchemaError: if it is not that of the rows present (None before the first), or 0 in a step.
    """
    if num_envs is not None and batch[-1] != num_envs:
        msg = (
            f"rows must have {num_envs} environments, as the first ones had, got batch size {list(batch)} "
            "(steps, environments): extend() takes [environments, time], with dim_extend=0 [time, environments]"
        )
        raise SchemaError(msg)
    if single and batch[-1] == 0:
        msg = f"a step must have at least one environment, got batch size {list(batch)}"
        raise SchemaError(msg)


def _require_memory(schema: Schema, flat: Flat, device: torch.device) -> None:
    """Check that rows on the CPU have memory: fake tensors, and subclasses that wrap another tensor, have none.

    Raises:
        KindError: naming the field.
    """
    for leaf, value, address in zip(schema.leaves, flat.leaves, flat.addresses or (), strict=False):
        if not address and value.numel() and device.type == "cpu":
            msg = (
                f"{kinds.show_field(leaf.path)} holds a {type(value).__name__} without memory of its own: give a plain "
                "torch.Tensor (a fake tensor has no values; a subclass that wraps a tensor can be unwrapped)"
            )
            raise KindError(msg)


def _check_counts(state: dict[str, Any], ndim: int, capacity: int) -> None:
    """Check the counts of a state.

    Raises:
        CheckpointError: if it has more rows than `capacity`, or other dimensions.
    """
    if state["ndim"] != ndim:
        msg = f"the checkpoint has ndim={state['ndim']}, the storage ndim={ndim}: load into one with the same ndim"
        raise CheckpointError(msg)
    rows, num_envs = int(state["rows"]), int(state["lanes"])
    if rows < 0 or num_envs < 1 or rows % num_envs or int(state["capacity"]) < 1 or int(state["cursor"]) < 0:
        msg = f"the checkpoint holds {rows} rows of {num_envs} environments, or impossible counts: it is damaged"
        raise CheckpointError(msg)
    if rows > capacity:
        msg = (
            f"the checkpoint holds {rows} rows, the storage has room for {capacity}: load into one with "
            f"max_size >= {rows}"
        )
        raise CheckpointError(msg)


def _check_late(schema: Schema, state: dict[str, Any]) -> None:
    """Check the late fields of a state.

    Raises:
        CheckpointError: naming a column that is missing or has another shape.
    """
    rows, columns = int(state["rows"]), state["columns"]
    for path, name, has in state["late"]:
        if not path or tuple(path) in schema.paths:
            msg = f"the checkpoint's field {path!r}, which was added later, is also one of the others: it is damaged"
            raise CheckpointError(msg)
        check_column(name, columns[name], columns[name].dtype, (rows, *columns[name].shape[1:]))
        check_column(has, columns[has], torch.bool, (rows,))


def raise_mapped_ring(state: dict[str, Any], seam: int, capacity: int) -> NoReturn:
    """Raise for rows that are to be mapped although they have to be moved.

    Raises:
        OptionError: naming both capacities.
    """
    msg = (
        f"mmap=True maps rows where they lie: the checkpoint is a full ring of {state['capacity']} rows, the oldest in "
        f"slot {seam}, which have to be moved for a ring of {capacity}: load without mmap, or into a storage with "
        f"max_size={state['capacity']}"
    )
    raise OptionError(msg)
