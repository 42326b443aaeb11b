"""RaggedTensorStorage: fields of another length in each row beside dense fields, both in contiguous memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core import kinds
from ostinato.core.kinds import show_field, show_path
from ostinato.core.rows import Flat, Schema, as_bits
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError, SchemaError, SlotError
from ostinato.storages.lazy import LazyTensorStorage
from ostinato.storages.ragged_table import RaggedTable, jagged, offsets_of, ragged_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ostinato.core.rows import Path
    from ostinato.storages.payload import Payload

__all__ = ["RaggedTensorStorage"]

_LAYOUTS = ("lazy", "nested", "padded")
Layout = Literal["lazy", "nested", "padded"]


class _Given(NamedTuple):
    """The values of one field of rows that are written."""

    values: Tensor
    """`[total, *F]`, of the dtype that was given."""
    lengths: Tensor
    """int64 `[rows]`."""
    typed: bool = True
    """Whether dtype and shape are known: not those of an empty list."""


@final
class RaggedTensorStorage(LazyTensorStorage):
    """A `LazyTensorStorage` with fields whose first dimension differs in length: tokens, point clouds, sets of objects.

    Dense fields are stored as in `LazyTensorStorage`. The values of a ragged field lie one after the other in a single
    tensor, with a start and a length per slot (16 bytes). A batch is gathered by vectorized operations, without a loop
    over rows. New values are appended; the space of rows that were overwritten is reclaimed by copying the others when
    the tensor is full, so memory is at most twice the most that was present and being written at once, and three times
    while values are copied.

    Rows are TensorDicts or dicts. The rows of one write may be a list of rows, a lazy stack, or a batch in which a
    ragged field is a nested tensor, a list of tensors, arrays or lists of numbers, or a tensor `[B, length, *F]`. All
    rows of a field have one dtype and one shape `F` of an element, which the first rows define; others are cast as
    dense fields are. All reads are copies.

    Samplers, writers and units work as with other tensor storages. Units read ragged fields at other rows (`NStep`,
    `Hindsight`, `SequenceUnit`), and none can stack them (`FrameStack`, `DeltaTimestamps`) or rank rows by them.

    Args:
        max_size: capacity in rows.
        ragged: the fields whose length differs: a key, or several keys; a tuple is a nested key. They are named, since
            the first rows may happen to have one length.
        layout: of batches, and of `storage[index]` for several rows. "lazy": TensorDicts come as a
            `LazyStackedTensorDict`, dicts with a list of tensors. "nested": a jagged nested tensor (values and
            offsets). "padded": a tensor `[B, longest, *F]`, padded with 0, and bool masks `[B, longest]` of the same
            name under "masks". Dense fields are tensors with all of them.
        device: where rows are stored; "auto" takes the device of the first rows.
        packed: False gives every dense field a contiguous tensor.
        allow_pickle: see `LazyTensorStorage`.
        compilable: no effect, see `LazyTensorStorage`.

    Raises:
        CapacityError: if `max_size` is not a positive integer.
        OptionError: for another layout, or if `ragged` names no field.

    Examples:
        >>> import torch
        >>> from ostinato import RaggedTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=RaggedTensorStorage(100, ragged="tokens", layout="padded"), batch_size=8)
        >>> _ = rb.extend({"tokens": [torch.arange(3), torch.arange(5)], "reward": torch.tensor([1.0, 0.0])})
        >>> batch = rb.sample()
        >>> batch["reward"].shape, batch["tokens"].shape == batch["masks"]["tokens"].shape
        (torch.Size([8]), True)
    """

    form = "ragged"
    mappable = False

    def __init__(
        self,
        max_size: int,
        *,
        ragged: str | Sequence[Hashable],
        layout: Layout = "lazy",
        device: torch.device | str | int = "cpu",
        packed: bool = True,
        allow_pickle: bool = False,
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, device=device, packed=packed, allow_pickle=allow_pickle, compilable=compilable)
        if layout not in _LAYOUTS:
            msg = f"layout must be one of {_LAYOUTS}, got {layout!r}"
            raise OptionError(msg)
        keys = [ragged] if isinstance(ragged, str) else list(ragged)
        self.ragged: list[Path] = [key if isinstance(key, tuple) else (key,) for key in keys]
        """Paths of the fields whose length differs."""
        if not self.ragged or not all(path and all(isinstance(k, str) for k in path) for path in self.ragged):
            msg = (
                f"ragged names fields by keys or tuples of keys, such as ['tokens', ('next', 'tokens')], got {ragged!r}"
            )
            raise OptionError(msg)
        self.layout: Layout = layout

    def __repr__(self) -> str:
        """As of `LazyTensorStorage`, with the ragged fields."""
        ragged = ", ".join(map(show_path, self.ragged))
        return f"{super().__repr__()[:-1]}, ragged=[{ragged}], layout={self.layout!r})"

    def _options(self) -> dict[str, Any]:
        options = {name: super(RaggedTensorStorage, self)._options()[name] for name in _KEPT_OPTIONS}
        return {**options, "ragged": self.ragged, "layout": self.layout}

    @property
    def why_private(self) -> str | None:
        """The option because of which processes cannot share its rows."""
        return "ragged fields"

    def _lay_out(self, schema: Schema, batch: tuple[int, ...], device: torch.device) -> None:  # noqa: ARG002
        positions = self._positions(schema)
        if self._auto:
            self.device = device
        objects = self._object_columns(schema, self.capacity)
        packed = self.packed and backend.native is not None and self.device.type == "cpu"
        self._table = RaggedTable(schema, self.capacity, positions, self._memory(), packed=packed)
        self._objects = objects
        self._late = type(self._late)(self.capacity, self.device)

    def _positions(self, schema: Schema) -> list[int]:
        """Return the positions of the ragged fields.

        Raises:
            KindError: if they are not in dicts or TensorDicts.
            SchemaError: if a dense field has the name of the masks.
        """
        if schema.kind not in {"dict", "tensordict"}:
            msg = f"ragged fields are those of dicts and TensorDicts, got rows that are a {schema.kind}"
            raise KindError(msg)
        if self.layout == "padded" and any(path[0] == "masks" for path in schema.paths):
            msg = "layout='padded' puts masks under 'masks', and the rows have such a field: rename it"
            raise SchemaError(msg)
        return [schema.find(path) for path in self.ragged]

    # -- writing -------------------------------------------------------------------------------------------------------

    def admit(self, data: Any, lead: int) -> tuple[Payload, int]:
        """Check rows; see `LazyTensorStorage.admit`.

        Raises:
            KeyMissingError: if a ragged field is missing.
            KindError: if rows are not dicts or TensorDicts, or a ragged field is not made of tensors.
            SchemaError: if a ragged field has another dtype or shape of elements.
            StorageMemoryError: if there is not enough memory for the values.
        """
        if lead and type(data) is list and not data:
            return super().admit(data, lead)
        data, given = self._split(data, lead)
        fresh = self._table is None
        payload, rows = super().admit(data, lead)
        if not rows:
            return payload, rows
        try:
            flat = self._joined(payload.flat, given, rows)
            self._ragged_table().reserve(flat.leaves)
        except Exception:
            if fresh:
                self.forget_form()
            raise
        return payload._replace(flat=flat), rows

    def _ragged_table(self) -> RaggedTable:
        table = self._require()
        if not isinstance(table, RaggedTable):
            msg = f"the table of {type(self).__name__} is a {type(table).__name__}"
            raise TypeError(msg)
        return table

    def _split(self, data: Any, lead: int) -> tuple[Any, dict[Path, _Given]]:
        """Take the ragged fields out of rows; zeros of the dtype and shape of an element take their place."""
        if lead and type(data) is list:
            pairs = [self._split(row, 0) for row in data]
            joined = {path: self._join_given([given[path] for _, given in pairs], path) for path in self.ragged}
            return [row for row, _ in pairs], joined
        given = {}
        if not isinstance(data, dict) and not kinds.is_tensordict(data):
            _raise_kind(data)
        rest = data.exclude(*self.ragged) if kinds.is_tensordict(data) else dict(data)
        for path in self.ragged:
            given[path] = found = self._read_ragged(data, path, lead)
            if not found.typed:
                msg = f"the first rows of the ragged {show_field(path)} are empty lists without a dtype: give a tensor"
                raise KindError(msg)
            shape = found.values.shape[1:] if lead == 0 else (found.lengths.shape[0], *found.values.shape[1:])
            blank = torch.zeros((), dtype=found.values.dtype, device=found.values.device).expand(shape)
            if kinds.is_tensordict(rest):
                rest.set(path, blank)
            else:
                _put(rest, path, blank)
        return rest, given

    def _read_ragged(self, data: Any, path: Path, lead: int) -> _Given:
        """Return one ragged field of a row (`lead` of 0) or of a batch of rows."""
        rows = getattr(data, "tensordicts", None) if kinds.is_tensordict(data) else None
        if rows is not None and lead:
            return self._join_given([self._read_ragged(row, path, 0) for row in rows], path)
        value = kinds.find_field(data, path)
        if value is None:
            msg = f"rows lack the ragged {show_field(path)}: give it, or do not name it in ragged="
            raise KeyMissingError(msg)
        return self._values_of(value, path, lead)

    def _values_of(self, value: Any, path: Path, lead: int) -> _Given:
        if lead == 0:
            if isinstance(value, (list, tuple)) and not value and self._table is None:
                return _Given(
                    _NOTHING,
                    torch.zeros(1, dtype=torch.int64, device="cpu"),
                    typed=False,
                )
            values = self._row(value, path)
            return _Given(values, torch.tensor([values.shape[0]], dtype=torch.int64, device="cpu"))
        if isinstance(value, Tensor) and value.is_nested:
            if value.layout is torch.jagged and value.lengths() is None:  # type: ignore[attr-defined]
                return _Given(value.values().detach(), torch.diff(offsets_of(value)))
            value = list(value.unbind(0))
        if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
            return self._join_given([self._values_of(row, path, 0) for row in value], path)
        dense = kinds.as_tensor(value, path)
        if dense.ndim < 2:
            msg = f"the ragged {show_field(path)} of rows needs the shape [rows, length, ...], got {list(dense.shape)}"
            raise SchemaError(msg)
        lengths = torch.full((dense.shape[0],), dense.shape[1], dtype=torch.int64, device="cpu")
        return _Given(dense.flatten(0, 1), lengths)

    def _row(self, value: Any, path: Path) -> Tensor:
        """Return the field of one row, `[length, *F]`."""
        if isinstance(value, (list, tuple)):
            value = self._numbers(value, path)
        tensor = kinds.as_tensor(value, path) if self._table is None else self._table.schema.fit(value, path)
        if tensor.ndim == 0:
            msg = f"the ragged {show_field(path)} of a row needs the shape [length, ...], got a single number"
            raise SchemaError(msg)
        return tensor

    def _numbers(self, value: Any, path: Path) -> Tensor:
        if not value and self._table is not None:
            leaf = self._table.schema.leaves[self._table.schema.find(path)]
            return torch.empty((0, *leaf.shape), dtype=leaf.dtype, device="cpu")
        try:
            array = np.asarray(value)
        except ValueError as error:
            msg = f"the ragged {show_field(path)} of a row is a list that is no array ({error}): give one of numbers"
            raise KindError(msg) from error
        fresh_floats = self._table is None and array.dtype.kind == "f"  # first rows store Python floats as float32
        return kinds.as_tensor(array.astype(np.float32) if fresh_floats else array, path)

    def _join_given(self, parts: list[_Given], path: Path) -> _Given:
        known = [part.values for part in parts if part.typed]
        if len({(values.dtype, values.shape[1:]) for values in known}) > 1:
            shown = ", ".join(sorted({f"{x.dtype}[length{''.join(f', {n}' for n in x.shape[1:])}]" for x in known}))
            msg = f"rows of the ragged {show_field(path)} may differ in their first dimension alone, got {shown}"
            raise SchemaError(msg)
        lengths = torch.tensor([part.values.shape[0] for part in parts], dtype=torch.int64, device="cpu")
        if not known:
            return _Given(_NOTHING, lengths, typed=self._table is not None)
        return _Given(torch.cat(known), lengths)

    def _joined(self, flat: Flat, given: dict[Path, _Given], rows: int) -> Flat:
        """Put ragged fields, checked and cast, into the leaves of rows."""
        schema, leaves = self._ragged_table().schema, list(flat.leaves)
        for path, (values, lengths, _) in given.items():
            position = schema.find(path)
            if lengths.shape[0] != rows:
                msg = f"the ragged {show_field(path)} has {lengths.shape[0]} rows, the other fields have {rows}"
                raise SchemaError(msg)
            if int(lengths.sum()) != values.shape[0] or (rows and int(lengths.min()) < 0):
                msg = f"the lengths of the ragged {show_field(path)} do not add up to its {values.shape[0]} values"
                raise SchemaError(msg)
            (checked,), *_ = schema.only(position).flatten(values, None, 1)
            leaves[position] = jagged(checked, lengths.to(checked.device))
        return Flat(leaves, flat.batch, flat.addresses, flat.objects)

    def scores(self, payload: Payload, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of rows that will be written; see `LazyTensorStorage.scores`."""
        self._check_dense(path)
        return super().scores(payload, path)

    def scores_at(self, slots: Tensor, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of some rows; see `LazyTensorStorage.scores_at`."""
        self._check_dense(path)
        return super().scores_at(slots, path)

    def _check_dense(self, path: tuple[Hashable, ...]) -> None:
        if path in self.ragged:
            msg = f"{show_field(path)} has another length in each row, and a dense field is needed here: name another"
            raise KindError(msg)

    # -- reading -------------------------------------------------------------------------------------------------------

    def present(self, payload: Payload, batch: tuple[int, ...]) -> Any:
        """Nest rows as they were written, with the ragged fields in the layout of the storage."""
        table = self._ragged_table()
        flat, schema, late = payload.flat, table.schema, payload.late
        if len(batch) > 1:
            msg = f"rows with ragged fields are read by one dimension, got an index of the shape {list(batch)}"
            raise SlotError(msg)
        if not batch:
            leaves = [x.values() if i in table.columns else x[0] for i, x in enumerate(flat.leaves)]
            data = schema.build(leaves, (), self.device, [x[0, ...] for x in flat.objects])
            return _with_late(data, {path: value[0] for path, value in late.items()})
        if self.layout == "lazy" and schema.kind == "tensordict":
            return _with_late(self._stack(table, flat, batch[0]), late)
        leaves, masks = list(flat.leaves), dict[Any, Tensor]()
        for i in table.columns:
            if self.layout == "padded":
                leaves[i], mask = _padded(leaves[i])
                masks["masks", *schema.leaves[i].path] = mask
            elif self.layout == "lazy":
                leaves[i] = list(_rows_of(leaves[i]))  # type: ignore[call-overload]
        data = schema.build(leaves, batch, self.device, flat.objects)
        return kinds.with_fields(_with_late(data, late), masks)

    def _stack(self, table: RaggedTable, flat: Flat, rows: int) -> Any:
        """Return rows as a lazy stack of TensorDicts, whose fields are views of one batch."""
        if not rows:
            return table.schema.build([_padded(x)[0] if x.is_nested else x for x in flat.leaves], (0,), self.device)
        columns = [_rows_of(leaf) if leaf.is_nested else leaf.unbind(0) for leaf in flat.leaves]
        objects = [[x[i, ...] for x in flat.objects] for i in range(rows)]
        made = [
            table.schema.build(row, (), self.device, held)
            for row, held in zip(zip(*columns, strict=True), objects, strict=True)
        ]
        return kinds.lazy_stack(made)

    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return the rows at an index, or one field by its key; see `LazyTensorStorage.read`. Copy."""
        path = (index,) if isinstance(index, str) else index
        if isinstance(path, tuple) and path in self.ragged:
            table = self._ragged_table()
            column = table.column(table.schema.find(path), self._at.rows)
            return column if self.layout == "nested" else list(_rows_of(column))
        return super().read(index, swap=swap)

    # -- edits ---------------------------------------------------------------------------------------------------------

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check rows for `slots`; see `LazyTensorStorage.prepare_edit`. New keys cannot be added.

        Raises:
            SchemaError: if they do not match the stored rows, or there is another number of rows.
        """
        table = self._ragged_table()
        if batch and len(batch) != 1:
            msg = f"rows with ragged fields are written by one dimension, got an index of the shape {list(batch)}"
            raise SlotError(msg)
        if batch and type(data) is list and not data:
            return super().prepare_edit(slots, data, batch)
        data, given = self._split(data, len(batch))
        if batch and type(data) is list:
            data = self._stacked(data)
        data, late = self._late.split(data, self._known(), batch)
        count = slots.shape[0]
        flat = table.schema.flatten(data, batch, len(batch))
        leaves = [x.reshape((count, *leaf.shape)) for x, leaf in zip(flat.leaves, table.schema.leaves, strict=True)]
        joined = self._joined(Flat(leaves, (count,), None), given, count)
        table.reserve(joined.leaves)
        kept = self._objects
        objects = () if kept is None else kept.owned(flat.objects, count)

        def change() -> None:
            self._end_flush()
            table.edit(slots, joined)
            if kept is not None:
                kept.edit(slots, objects)
            if late or self._late.columns:
                self._late.set(slots, late)

        return change

    def prepare_field(
        self, path: tuple[Hashable, ...], slots: Tensor, value: Any, batch: tuple[int, ...]
    ) -> Callable[[], None]:
        """Check the values of one field for `slots`; see `LazyTensorStorage.prepare_field`."""
        if path not in self.ragged:
            return super().prepare_field(path, slots, value, batch)
        table = self._ragged_table()
        position, given = table.schema.find(path), self._values_of(value, path, len(batch))
        blank = Flat([_NOTHING] * len(table.schema.leaves), (slots.shape[0],), None)
        nested = self._joined(blank, {path: given}, slots.shape[0]).leaves[position]
        table.columns[position].reserve(nested.values().shape[0])
        return lambda: table.write_column(position, slots, nested)

    # -- state ---------------------------------------------------------------------------------------------------------

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Raise: hooks convert dense fields.

        Raises:
            OptionError: always.
        """
        msg = f"hooks convert dense fields, and rows have ragged ones, got {hook!r}: save without hooks"
        raise OptionError(msg)

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a state has rows of the same schema and ragged fields, and no more than fit."""
        super().check_state(self._with_columns(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy rows in; see `LazyTensorStorage.load_state_dict`."""
        super().load_state_dict(self._with_columns(state))

    def _with_columns(self, state: dict[str, Any]) -> dict[str, Any]:
        if state.get("schema") is None or "ragged" not in state:
            return state
        schema = Schema.from_json(state["schema"], known=self.schema)
        names = sorted(schema.column_names[i] for i in self._positions(schema))
        if sorted(state["ragged"]) != names:
            msg = f"the checkpoint has the ragged columns {sorted(state['ragged'])}, the storage {names}"
            raise CheckpointError(msg)
        return ragged_columns(state)


_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
_KEPT_OPTIONS = ("packed", "device", "allow_pickle")


def _raise_kind(data: Any) -> NoReturn:
    msg = f"rows with ragged fields are dicts or TensorDicts, got a {type(data).__name__}: convert them"
    raise KindError(msg)


def _put(data: dict[Any, Any], path: Path, value: Any) -> None:
    """Set a field of a dict whose levels above it are copied."""
    *parents, last = path
    for key in parents:
        inner = data[key]
        if not isinstance(inner, dict):
            msg = f"the ragged {show_field(path)} must lie in dicts, got a {type(inner).__name__} at {key!r}"
            raise KindError(msg)
        data[key] = dict(inner)
        data = data[key]
    data[last] = value


def _with_late(data: Any, late: dict[Path, Tensor]) -> Any:
    for path, value in late.items():
        data[path[0]] = value
    return data


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return a jagged tensor `[n, j, *F]` padded with 0, `[n, longest, *F]`, and the mask of its values."""
    values, offsets = nested.values(), offsets_of(nested)
    lengths = torch.diff(offsets)
    longest = int(lengths.max()) if lengths.shape[0] else 0
    mask = torch.arange(longest, device=values.device) < lengths[:, None]
    rows = lengths.shape[0]
    out = torch.zeros((rows * longest, *values.shape[1:]), dtype=values.dtype, device=values.device)
    shift = torch.arange(rows, device=values.device) * longest - offsets[:-1]
    at = torch.arange(values.shape[0], device=values.device)
    at += torch.repeat_interleave(shift, lengths, output_size=values.shape[0])
    as_bits(out)[at] = as_bits(values)
    return out.view(rows, longest, *values.shape[1:]), mask


def _rows_of(nested: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of a jagged tensor. Views."""
    return torch.split(nested.values(), torch.diff(offsets_of(nested)).tolist())
