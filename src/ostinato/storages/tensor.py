"""TensorStorage: one tensor for each field, on any device; the base class of all storages of tensors."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast, final

import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.counts import StoredRows, make_counts
from ostinato.core.index import apply_index, is_field, plain_index, select
from ostinato.core.records import Picks, Request
from ostinato.core.rows import Flat, Schema, describe, turn_rows
from ostinato.errors import CapacityError, CheckpointError, KindError, OptionError, SchemaError, StackError, UsageError
from ostinato.storages.base import Storage, check_capacity, check_device, check_hook, check_ndim, copied_rows, find_seam
from ostinato.storages.checkpoint import require_form
from ostinato.storages.codec_table import CodecTable, CodedColumn, Encoded, decoded_columns
from ostinato.storages.late_fields import LateFields
from ostinato.storages.memory import show_bytes
from ostinato.storages.object_columns import ObjectColumns, check_objects, own_values
from ostinato.storages.payload import Payload
from ostinato.storages.ragged_table import RaggedTable, SavedRagged
from ostinato.storages.single_copy import Comparison, SingleCopyTable, as_run, check_apart, fill_plain_table, read_pairs
from ostinato.storages.table import Table, copy_column, read_column
from ostinato.storages.window_reader import read_windows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import numpy as np

    from ostinato.core.records import Placement, Plan
    from ostinato.core.rows import Path
    from ostinato.durable.codecs import AnyCodec
    from ostinato.storages.single_copy import Pairs
    from ostinato.storages.table import RowArray

__all__ = ["TensorStorage", "raise_mapped_ring"]

AnyTable: TypeAlias = "Table | SingleCopyTable | CodecTable | RaggedTable"


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
_NO_ROWS = Payload(Flat([], (0,), None), {})
_HELD = ("_table", "num_envs", "capacity", "_late", "exposed", "_objects")


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
    capacity: int = 0
    """Maximum number of rows; with `ndim=2`, rounded up to whole steps of all environments."""
    max_size: int = 0
    """The requested capacity."""
    num_envs: int = 1
    """Number of environments: the second batch dimension with `ndim=2`, else 1."""
    _table: AnyTable | None = None
    _objects: ObjectColumns | None = None
    """Fields of Python objects; None if rows have none."""
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
        leaves, batch, _, objects = flat
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
        self._table = Table.adopt(schema, [x.flatten(0, 1) if self.ndim > 1 else x for x in leaves])
        self.device = self._table.device
        if device != "auto" and check_device(device) != self.device:
            msg = (
                f"the data lies on {self.device}, device={device!r} was asked for: move the data first, or "
                "pass device='auto'"
            )
            raise OptionError(msg)
        self._at: StoredRows = make_counts(StoredRows)
        self._at.rows = rows
        self._late = LateFields(rows, self.device)
        if schema.objects:
            self._objects = ObjectColumns.of(schema.objects, objects, rows)

    @property
    def shape(self) -> torch.Size:
        """Shape of the rows present: `(rows,)`, or `(steps, num_envs)` with `ndim=2`."""
        return torch.Size((self._at.rows,) if self.ndim == 1 else (self._at.rows // self.num_envs, self.num_envs))

    def flatten(self) -> Storage:
        """Return a storage of the rows present with `ndim=1`: this storage, or with `ndim=2` one on the same memory.

        Fields that were added later are copied.

        Raises:
            UsageError: if there are no rows, or with `single_copy` or `codec`.
        """
        if self.ndim == 1:
            return self
        if not self._at.rows:
            msg = "Cannot flatten a non-initialized storage: write rows first"
            raise UsageError(msg)
        if not isinstance(self._table, Table):
            msg = "with single_copy or codec rows cannot be flattened on their own memory: read them with storage[:]"
            raise UsageError(msg)
        self._expose()
        slots = torch.arange(self._at.rows, device=self.device)
        objects = () if self._objects is None else self._objects.get(slots)
        payload = Payload(
            Flat(self._table.view(slice(self._at.rows)), (self._at.rows,), None, objects), self._late.get(slots)
        )
        return TensorStorage(self.present(payload, (self._at.rows,)), allow_pickle=self.allow_pickle)

    @property
    def schema(self) -> Schema | None:
        """Schema of a row; None before the first."""
        return None if self._table is None else self._table.schema

    @property
    def columns(self) -> dict[Path, Tensor]:
        """Tensor fields: path -> `[capacity, *shape]`, rows that were never written included. Views.

        With `single_copy`, copies of the rows present, `[rows, *shape]`.
        """
        table = self._table
        if table is None:
            return {}
        self._expose()
        columns = table.columns if isinstance(table, Table) else table.view(slice(self._at.rows))
        named = {leaf.path: column for leaf, column in zip(table.schema.leaves, columns, strict=True)}
        return {**named, **self._late.columns}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole capacity without those of Python objects; 0 before the first row."""
        objects = 0 if self._objects is None else self._objects.nbytes
        return 0 if self._table is None else self._table.nbytes + self._late.nbytes + objects

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

    def plain_table(self) -> tuple[Table, StoredRows] | None:
        """Return table and counts if a write now only changes rows of the table: native calls may do it then.

        None if something else follows the rows: fields of Python objects or that were added later, files that describe
        them, a budget.
        """
        table, at = self._table, self._at
        others = self._objects is not None or bool(self._late.columns) or self.budget or self._flushed
        at.plain = isinstance(table, Table) and not others
        return (table, at) if isinstance(table, Table) and at.plain else None

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with stored rows."""
        table = self._table.inner if isinstance(self._table, SingleCopyTable) else self._table
        return isinstance(table, Table) and table.shares_memory(tensor)

    @property
    def laid_out(self) -> bool:
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

    def admit(self, data: Any, lead: int) -> tuple[Payload, int]:
        """Check rows against the schema; the first rows define it, and memory is allocated. Casts are copies.

        A list at the root is a stack of rows, a tuple a single pytree. Without rows, only the schema is checked.
        """
        single, lead = lead == 0, lead + self.ndim - 1
        if lead and type(data) is list:
            if not data:
                return _NO_ROWS, 0
            data = self._stacked(data)
        table = self._table
        schema = describe(data, lead) if table is None else table.schema
        late: dict[Path, Tensor] = {}
        if self._late.columns:
            data, late = self._late.split(data, self._known(), None)
            self._late.require_known(late)
        flat = schema.flatten(data, None, lead)
        rows = math.prod(flat.batch)
        if late:
            late = self._late.rows(late, flat.batch)
        if self.ndim > 1:
            self._check_envs(flat.batch, single=single)
        if rows == 0:
            return _NO_ROWS, 0
        if flat.addresses is not None and 0 in flat.addresses:
            _require_memory(schema, flat, self.device)
        if table is None:
            self._lay_out(schema, flat.batch, flat.leaves[0].device)
            table = self._table
        if self._objects is None and isinstance(table, Table):
            return Payload(flat, late), rows
        return self._prepared(flat, late, rows), rows

    def _prepared(self, flat: Flat, late: dict[Path, Tensor], rows: int) -> Payload:
        """Return rows with copies of their Python objects, and compared if the table keeps single copies."""
        objects = () if self._objects is None else self._objects.owned(flat.objects, rows)
        found: Comparison | Encoded | None = None
        if isinstance(self._table, SingleCopyTable):
            flat, found = self._table.prepare(flat, self._at.cursor)
        elif isinstance(self._table, CodecTable):
            found = self._table.encode(flat)
        return Payload(flat._replace(objects=objects), late, found)

    def _check_envs(self, batch: tuple[int, ...], *, single: bool) -> None:
        """Check the number of environments in rows with these leading dimensions, a single step if `single`."""
        if self._table is not None and batch[-1] != self.num_envs:
            msg = (
                f"rows must have {self.num_envs} environments, as the first ones had, got batch size {list(batch)} "
                "(steps, environments): extend() takes [environments, time], with dim_extend=0 [time, environments]"
            )
            raise SchemaError(msg)
        if single and batch[-1] == 0:
            msg = f"a step must have at least one environment, got batch size {list(batch)}"
            raise SchemaError(msg)

    def _stacked(self, rows: list[Any]) -> Any:
        try:
            if self._table is None:
                return kinds.stack(rows, table=True)
            schema = self._table.schema
            return kinds.stack(rows, schema.fit, objects={leaf.path for leaf in schema.objects}, table=True)
        except (SchemaError, KindError) as error:
            msg = (
                f"Stacking the elements of the list resulted in an error: {error}. A list at the root is one item for "
                "each row; a tuple is one pytree of batches"
            )
            raise StackError(msg) from error

    def _known(self) -> set[Path]:
        return set(self._require().schema.paths)

    def _lay_out(self, schema: Schema, batch: tuple[int, ...], device: torch.device) -> None:
        """Allocate memory for rows of a schema."""
        msg = f"a TensorStorage is laid out by its data, got rows on {device} of {schema} and batch {batch}"
        raise UsageError(msg)

    def _lay_mapped(self, schema: Schema, state: dict[str, Any], num_envs: int) -> None:
        """Map the files of a saved state as memory."""
        msg = f"{type(self).__name__} cannot map {len(state)} entries of {schema} in {num_envs} environment(s)"
        raise UsageError(msg)

    def _require(self) -> AnyTable:
        if self._table is None:
            msg = "the storage is closed" if self._closed else _NO_ROWS_YET
            raise UsageError(msg)
        return self._table

    def write(self, placement: Placement, payload: Payload) -> None:
        """Write rows to slots, from any device. One copy."""
        table = self._table or self._require()
        if self.ring_only:
            as_run(placement)
        if self._flushed:
            self._end_flush()
        at = self._at
        rows, cursor = at.rows, at.cursor
        if not isinstance(placement, Picks):
            end = placement.start + placement.rows
            rows, cursor = max(rows, min(end, table.capacity)), end % table.capacity
        elif placement.slots.shape[0]:
            rows = max(rows, int(placement.slots.max()) + 1)
            cursor = rows % table.capacity if placement.cursor is None else placement.cursor
        self._write_table(table, placement, payload, rows)
        if self._objects is not None:
            self._objects.set(placement, payload.flat.objects)
        at.rows, at.cursor = rows, cursor
        if self._late.columns:
            if isinstance(placement, Picks):
                self._late.set(placement.slots, payload.late, placement.rows)
            else:
                given = torch.arange(placement.skip, placement.total, device="cpu")
                self._late.set(placement.slots(self.device), payload.late, given)

    def _write_table(self, table: AnyTable, placement: Placement, payload: Payload, rows: int) -> None:
        """Write the tensor fields of rows; `rows` are present afterwards."""
        if isinstance(table, (Table, RaggedTable)):
            table.write(placement, payload.flat, self.num_envs)
        elif isinstance(table, CodecTable):
            table.write(placement, payload.flat, self.num_envs, encoded=cast("Encoded", payload.found))
        elif isinstance(payload.found, Comparison):
            table.write_run(as_run(placement), payload.flat, payload.found, rows)

    def _end_flush(self) -> None:
        """Record that the rows are about to change; see `LazyMemmapStorage.flush`."""
        self._flushed = False

    def scores(self, payload: Payload, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of rows that will be written, `[rows, *shape]`."""
        flat = payload.flat
        for leaf, value in zip(self._require().schema.leaves, flat.leaves, strict=True):
            if leaf.path == path:
                return value if len(flat.batch) == 1 else value.reshape((math.prod(flat.batch), *leaf.shape))
        return payload.late.get(path)

    def first_rows(self, payload: Payload, path: Path, most: int) -> Tensor:
        """Return a field of the first steps and environments of rows that will be written, `[steps, envs, *shape]`.

        Args:
            payload: of `admit`, with `ndim=2`.
            path: of the field.
            most: steps, and environments.
        """
        schema = self._require().schema
        position = schema.find(path)
        shape, value = schema.leaves[position].shape, payload.flat.leaves[position]
        if len(payload.flat.batch) == 1:
            value = value.reshape(-1, self.num_envs, *shape)
        corner = value[:most, :most]
        return corner.reshape(*corner.shape[:2], *shape)

    def scores_at(self, slots: Tensor, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of some rows; other fields are not read. Copy."""
        paths = [leaf.path for leaf in self._require().schema.leaves]
        return self.fetch([Request(paths.index(path), slots)])[0] if path in paths else None

    def clear(self) -> None:
        """Remove all rows and late fields; keep the memory."""
        if self._flushed:
            self._end_flush()
        self._at.rows = self._at.cursor = 0
        self._late.clear()
        if self._objects is not None:
            self._objects.clear()
        if isinstance(self._table, (SingleCopyTable, CodecTable, RaggedTable)):
            self._table.clear()

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> Payload:
        """Copy the rows at `slots` into new tensors `[B, *shape]`.

        Raises:
            KeyMissingError: if a row lacks a field that was added later to other rows.
        """
        table = self._table or self._require()
        flat = Flat(table.gather(slots, pin=pin), (slots.shape[0],), None)
        if self._objects is None and not self._late.columns:
            return Payload(flat, {})
        return self._with_others(flat, slots, {})

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy different rows of each field: one tensor `[n, *leaf.shape]` for each request.

        Fields that were added later have no leaf and cannot be requested.
        """
        return self._require().fetch(requests, pin=pin)

    def read_plan(self, plan: Plan, *, pin: bool = False) -> list[Tensor]:
        """Return the fields of a plan's batch: one native call where that is possible."""
        table = self._table
        found = read_windows(table, plan) if isinstance(table, Table) and not pin else None
        return super().read_plan(plan, pin=pin) if found is None else found

    def assemble(
        self, leaves: list[Tensor], records: Tensor, elsewhere: Mapping[Path, Tensor] | None = None
    ) -> Payload:
        """Return the payload of a batch whose leaves were fetched; late fields are those of the rows `records`.

        Fields of Python objects are those of `records`, too, except for those that `elsewhere` has other slots for
        (int64 `[R]`).
        """
        return self._with_others(Flat(leaves, (records.shape[0],), None), records, elsewhere or {})

    def _with_others(self, flat: Flat, slots: Tensor, elsewhere: Mapping[Path, Tensor]) -> Payload:
        """Add fields of Python objects and late fields to leaves."""
        if self._objects is not None:
            flat = flat._replace(objects=self._objects.get(slots, elsewhere))
        if not self._late.columns:
            return Payload(flat, {})
        self._late.require_all(slots)
        return Payload(flat, self._late.get(slots))

    def present(self, payload: Payload, batch: tuple[int, ...]) -> Any:
        """Nest leaves as the written rows were nested. No copy."""
        flat = payload.flat
        leaves, objects = flat.leaves, flat.objects
        schema = (self._table or self._require()).schema
        if len(batch) != 1:
            leaves = [x.reshape((*batch, *leaf.shape)) for x, leaf in zip(leaves, schema.leaves, strict=True)]
            objects = [x.reshape((*batch, *leaf.shape)) for x, leaf in zip(objects, schema.objects, strict=True)]
        data = schema.build(leaves, batch, self.device, objects)
        for path, value in payload.late.items():
            data[path[0]] = value.reshape((*batch, *value.shape[1:]))
        return data

    def show_payload(self, payload: Payload) -> dict[str, Any]:
        """Return gathered rows as plain values and tensors; see `Payload.show`."""
        return payload.show()

    def read_payload(self, saved: Any, schema: Schema | None, rows: int) -> Payload:
        """Return what `show_payload` returned, by copy; see `Payload.read`."""
        if schema is None:
            msg = "the checkpoint holds a queued draw of rows without fields: it is damaged"
            raise CheckpointError(msg)
        return Payload.read(saved, schema, rows, self.device)

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
            leaves, late = table.gather(picked.slots), self._late.get(picked.slots)
        else:
            self._expose()
            leaves, late = table.view(picked.span), self._late.view(picked.span, self._at.rows)
        flat = Flat(leaves, picked.batch, None)
        if self._objects is not None:
            flat = flat._replace(objects=self._objects.get(picked.slots if picked.span is None else picked.span))
        return self.present(Payload(flat, late), picked.batch)

    def _read_grid(self, table: AnyTable, index: Any, *, swap: bool) -> Any:
        """Return the rows at an index into `[steps, num_envs]`: a view for ints and slices, else a copy."""
        self._expose()
        index = plain_index(index)
        template = torch.empty(1, dtype=torch.float32, device="cpu").expand(self._at.rows)
        batch = tuple(apply_index(self._as_grid(template, swap=swap), index).shape)
        views = isinstance(table, Table)
        slots = None
        if not views or self._objects is not None or self._late.columns:
            slots = select(index, self.shape, self.device, swap=swap).slots
        if isinstance(table, Table):
            columns = table.view(slice(self._at.rows))
            leaves = [apply_index(self._as_grid(column, swap=swap), index) for column in columns]
        elif slots is not None:
            pairs = zip(table.gather(slots), table.schema.leaves, strict=True)
            leaves = [x.reshape(*batch, *leaf.shape) for x, leaf in pairs]
        objects = [] if self._objects is None or slots is None else self._objects.get(slots)
        nested = [value.reshape((*batch, *value.shape[1:])) for value in objects]
        data = table.schema.build(leaves, batch, self.device, nested)
        late = {} if slots is None else self._late.get(slots)
        for path, value in late.items():
            data[path[0]] = value.reshape((*batch, *value.shape[1:]))
        return data

    def _as_grid(self, column: Tensor, *, swap: bool) -> Tensor:
        """Return a column of the rows present in the shape of the storage; with `swap`, environments first. View."""
        grid = column.view(*self.shape, *column.shape[1:])
        return grid.transpose(0, 1) if swap else grid

    def _read_field(self, path: tuple[str, ...], *, swap: bool) -> Any:
        table = self._require()
        if self._objects is not None and path in self._objects.paths:
            values = self._objects.column(path)[: self._at.rows]
            values = values.reshape((*self.shape, *values.shape[1:]))
            return (values.swapaxes(0, 1) if swap else values).tolist()
        self._expose()
        if path in self._late.columns:
            self._late.require_all(torch.arange(self._at.rows, device=self.device))
            column = self._late.columns[path]
        else:
            column = table.column(table.schema.find(path), self._at.rows)
        return self._as_grid(column[: self._at.rows], swap=swap)

    def _expose(self) -> None:
        """Record that a view is returned; tables with single copies or a codec return copies."""
        self.exposed = self.exposed or isinstance(self._table, Table)

    def row_arrays(self) -> list[RowArray]:
        """Return packed rows and fields as they lie in memory. Views."""
        table = self._table
        if table is None:
            return []
        return table.inner.row_arrays() if isinstance(table, SingleCopyTable) else table.row_arrays()

    # -- edits ---------------------------------------------------------------------------------------------------------

    def check_new_fields(self, index: Any, slots: Tensor, data: Any) -> None:
        """Check that the new fields of an edit are written to all rows, or to the first ones by a slice, `rb[:n]`.

        Raises:
            SchemaError: naming the field and how many rows would lack it.
        """
        leading = isinstance(index, slice) and not index.start and index.step in {None, 1}
        if not leading:
            self._late.require_cover(data, self._known(), slots, len(self))

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check rows for `slots`; keys that are not in the schema become late fields of these rows.

        Raises:
            SchemaError: if they do not match the stored rows, or a field has another number of rows.
        """
        table, count = self._require(), slots.shape[0]
        if batch and type(data) is list:
            if not data:
                if count:
                    msg = f"{count} rows are chosen, an empty list was given: give one for each"
                    raise SchemaError(msg)
                return lambda: None
            data = self._stacked(data)
        data, late = self._late.split(data, self._known(), batch)
        flat = table.schema.flatten(data, batch, len(batch))
        leaves = [x.reshape((count, *leaf.shape)) for x, leaf in zip(flat.leaves, table.schema.leaves, strict=True)]
        kept = self._objects
        objects = () if kept is None else kept.owned(flat.objects, count)

        def change() -> None:
            self._end_flush()
            table.edit(slots, Flat(leaves, (count,), flat.addresses))
            if kept is not None:
                kept.edit(slots, objects)
            if late or self._late.columns:
                self._late.set(slots, late)

        return change

    def prepare_field(
        self, path: tuple[Hashable, ...], slots: Tensor, value: Any, batch: tuple[int, ...]
    ) -> Callable[[], None]:
        """Check the values of one field for `slots`; they are not broadcast.

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
            self._end_flush()
            column[slots.cpu().numpy()] = objects

        return change

    def _change_field(self, position: int | None, path: Path, slots: Tensor, value: Tensor) -> None:
        self._end_flush()
        if position is None:
            self._late.put(path, slots, value)
        else:
            self._require().write_column(position, slots, value)

    # -- hooks and state -----------------------------------------------------------------------------------------------

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Register a hook that converts the rows in checkpoints (`dumps`); the storage keeps its rows.

        Hooks are not saved: register them for each buffer. They are called in the order of registration, each with the
        result of the one before, while the buffer holds its lock.

        Args:
            hook: called as `hook(rows, path=None)` with the rows present (views `[rows]`, with `ndim=2`
                `[steps, num_envs]`, of the kind in which they were written); returns a TensorDict or a dict of tensors
                and plain values. If it has an attribute `shift`, that is set before to the step after the newest, and
                `is_full` to True: no row is unwritten.

        Raises:
            KindError: if it is not callable.
        """
        self.save_hooks = (*self.save_hooks, check_hook(hook))

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Register a hook that converts rows saved with save hooks back when the buffer loads a checkpoint (`loads`).

        Args:
            hook: called as `hook(data, out=None)` with the result of the last save hook, or of the load hook before;
                the last one returns the rows with their original fields.

        Raises:
            KindError: if it is not callable.
        """
        self.load_hooks = (*self.load_hooks, check_hook(hook))

    def state_dict(self) -> dict[str, Any]:
        """Return the rows present as views, and counts. `torch.save` and `copy.deepcopy` copy the rows."""
        table = self._table
        state = {
            "form": self.form,
            "rows": self._at.rows,
            "cursor": self._at.cursor,
            "lanes": self.num_envs,  # its name in the checkpoint format
            "ndim": self.ndim,
            "capacity": self.capacity,
            "schema": None,
            "single_copy": None,
            "columns": _Columns(),
            "late": [],
        }
        if table is None:
            return state
        names, rows = table.schema.column_names, self._at.rows
        state["schema"] = table.schema.to_json()
        if isinstance(table, Table):
            columns = dict(zip(names, table.view(slice(rows)), strict=True))
        elif isinstance(table, CodecTable):
            columns, state["codec"] = table.saved_columns(rows)
        elif isinstance(table, RaggedTable):
            columns, state["ragged"] = table.saved_columns(rows)
        else:
            state["single_copy"] = list(map(list, table.pairs))
            stored = zip(table.kept, table.inner.view(slice(rows)), strict=True)
            columns = {names[i]: column for i, column in stored}
            columns["apart"], nexts = table.apart_rows(rows)
            columns |= {f"{names[i]}.apart": value for (i, _), value in zip(table.pairs, nexts, strict=True)}
        if self._late.columns:
            state["late"] = self._late.add_columns(columns, len(names), rows)
        state["columns"] = _Columns(columns)
        if self._objects is not None:
            state |= self._objects.state(rows, allow_pickle=self.allow_pickle)
        return state

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a state has rows of the same schema, and no more than fit.

        Raises:
            CheckpointError: naming what differs.
        """
        if state["schema"] is None:
            return
        num_envs, mine = max(1, int(state["lanes"])), self.schema
        schema = Schema.from_json(state["schema"], known=mine)
        _check_counts(state, self.ndim, self._capacity_for(num_envs))
        if mine is not None and (mine != schema or self.num_envs != num_envs):
            msg = (
                f"the checkpoint holds {schema} in {num_envs} environment(s), the storage {mine} in {self.num_envs}: "
                "load into a buffer with the same schema"
            )
            raise CheckpointError(msg)
        if state.get("single_copy") and self._codecs():
            msg = "the checkpoint was saved with single_copy, the storage has codec: load into one without codec"
            raise CheckpointError(msg)
        _check_columns(schema, decoded_columns(state, schema, self._codecs()))
        if schema.objects:
            check_objects(schema, state)

    def _codecs(self) -> list[AnyCodec]:
        """Return the codecs with which compressed columns of a checkpoint may be read."""
        return []

    def _capacity_for(self, num_envs: int) -> int:
        """Return the capacity with rows of `num_envs` environments."""
        return self.capacity if self._table is not None else -(-self.max_size // num_envs) * num_envs

    def seam(self, state: dict[str, Any]) -> int:
        """Return the slot of the oldest row of a saved ring that `load_state_dict` rotates to slot 0; see `Storage`."""
        if state.get("schema") is None:
            return 0
        return find_seam(state, int(state["rows"]), self._capacity_for(max(1, int(state["lanes"]))))

    def hold(self, *, replaced: bool) -> Callable[[], None]:
        """Return a function that restores the present rows; see `Storage.hold`."""
        kept = {name: getattr(self, name) for name in _HELD}
        rows, cursor = self._at.rows, self._at.cursor
        state = None if replaced or not self._at.rows else copied_rows(self.state_dict())

        def restore() -> None:
            self.__dict__.update(kept)
            self._at.rows, self._at.cursor = rows, cursor
            if state is not None:
                self.load_state_dict(state)
            elif not self._at.rows and self._table is not None:
                self.clear()

        return restore

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
        self.check_state(state)
        seam, mapped = self.seam(state), bool(state.get("mapped"))
        if seam and mapped:
            raise_mapped_ring(state, seam, self.capacity)
        if seam:
            state = _rotated(decoded_columns(state, Schema.from_json(state["schema"]), self._codecs()), seam)
        schema = Schema.from_json(state["schema"], known=self.schema)
        state = decoded_columns(state, schema, self._codecs())
        rows, num_envs = int(state["rows"]), max(1, int(state["lanes"]))
        before = self._table, self.num_envs, self.capacity, self._objects
        if mapped:
            self._lay_mapped(schema, state, num_envs)
        elif self._table is None:
            self._lay_out(schema, (rows // num_envs, num_envs) if self.ndim > 1 else (rows,), self.device)
        table = self._require()
        self._end_flush()
        try:
            late = self._fill(table, state)
        except Exception:
            if mapped or before[0] is None:  # rows of a damaged file that were read in part are dropped
                self._table, self.num_envs, self.capacity, self._objects = before
            raise
        if self._objects is not None:
            self._objects.load(state)
        if mapped:
            self.exposed = False  # views that were returned are of other memory
        cursor = int(state["cursor"]) if table.capacity == state["capacity"] else rows
        self._at.rows, self._at.cursor, self._late = rows, cursor % table.capacity, late

    def _fill(self, table: AnyTable, state: dict[str, Any]) -> LateFields:
        """Copy the columns of a checked state into a table, and return its late fields."""
        rows, columns = int(state["rows"]), state["columns"]
        saved = read_pairs(state, table.schema)
        if isinstance(table, SingleCopyTable):
            table.fill(state, saved)
        elif saved and isinstance(table, Table):
            fill_plain_table(table, state, saved)
        elif not state.get("mapped"):
            table.fill(columns, rows)
        late = LateFields(table.capacity, table.device)
        for path, name, has in state["late"]:
            late.put(tuple(path), torch.arange(rows, device=table.device), read_column(columns[name]))
            late.has[tuple(path)][:rows] = read_column(columns[has]).to(table.device)
        return late


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
    if not {int, bool}.issuperset([type(state.get(name)) for name in ("rows", "cursor", "lanes", "capacity")]):
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


def _check_columns(schema: Schema, state: dict[str, Any]) -> None:
    """Check that all columns of a state are there, with the dtypes and shapes of the schema.

    Raises:
        CheckpointError: naming the column, its dtype and shape, and the expected ones.
    """
    rows, columns = int(state["rows"]), state["columns"]
    saved: Pairs = read_pairs(state, schema)
    nexts = {pair[0] for pair in saved}
    count = int(check_apart(state).sum()) if saved else 0
    for i, (name, leaf) in enumerate(zip(schema.column_names, schema.leaves, strict=True)):
        wanted, n = (f"{name}.apart", count) if i in nexts else (name, rows)
        source = columns.get(wanted)
        if source is None or source.dtype is not leaf.dtype or tuple(source.shape) != (n, *leaf.shape):
            _raise_column(wanted, source, leaf.dtype, (n, *leaf.shape))
    known = {leaf.path for leaf in schema.leaves} if state["late"] else set()
    for path, name, has in state["late"]:
        value, mask = columns.get(name), columns.get(has)
        if not path or tuple(path) in known or value is None:
            msg = f"the checkpoint's field {path!r}, which was added later, is missing or duplicate: it is damaged"
            raise CheckpointError(msg)
        if tuple(value.shape[:1]) != (rows,):
            _raise_column(name, value, value.dtype, (rows, *value.shape[1:]))
        if mask is None or mask.dtype is not torch.bool or tuple(mask.shape) != (rows,):
            _raise_column(has, mask, torch.bool, (rows,))


def _raise_column(name: str, source: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> NoReturn:
    got = "nothing" if source is None else f"{source.dtype}{list(source.shape)}"
    msg = f"the checkpoint's column {name!r} must be {dtype}{list(shape)}, got {got}: it is damaged"
    raise CheckpointError(msg)


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


def _rotated(state: dict[str, Any], seam: int) -> dict[str, Any]:
    """Return the state of a full ring with its oldest row moved from slot `seam` to slot 0.

    Columns are rotated when they are read: this is not a copy. The cursor is 0.
    """
    columns = dict(state["columns"])
    extra = int(check_apart(state)[:seam].sum()) if state.get("single_copy") else 0
    names = {name for name in columns if state.get("single_copy") and name.endswith(".apart")}
    rotated = {
        name: column.turned(seam)
        if isinstance(column, (CodedColumn, SavedRagged))
        else _Rotated(column, extra if name in names else seam)
        for name, column in columns.items()
    }
    out = {**state, "columns": rotated, "cursor": 0}
    if state.get("objects"):
        out["objects"] = {}
        for name, values in state["objects"].items():
            first = seam * (len(values) // max(int(state["rows"]), 1))
            out["objects"][name] = values[first:] + values[:first]
    return out


@final
class _Rotated:
    """A column of a state whose row `seam` comes first and the rows before it last; read like the column."""

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
        """Read the packed rows that contain the column."""
        self._source.read_rows_into(dest)
        turn_rows(dest, self._seam)

    def read_with(self, others: Sequence[tuple[_Rotated, Tensor]]) -> None:
        """Read columns of the same packed rows, each into its tensor."""
        self._source.read_with([(other._source, dest) for other, dest in others])  # noqa: SLF001 (its own kind)
        for _, dest in others:
            turn_rows(dest, self._seam)

    def read(self) -> Tensor:
        """Return the rows as a new tensor."""
        source = self._source
        rows = source.clone() if isinstance(source, Tensor) else source.read()
        turn_rows(rows, self._seam)
        return rows
