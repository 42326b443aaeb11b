"""RaggedTensorStorage: fields of another length in each row beside dense fields, both in contiguous memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.kinds import show_field, show_path
from ostinato.core.options import check_choice
from ostinato.core.rows import Flat, as_bits, as_ordinary
from ostinato.durable.arrays import jagged, offsets_of, values_of
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError, SchemaError, SlotError
from ostinato.storages.columns import StorageColumn, check_ends, with_field
from ostinato.storages.lazy import LazyTensorStorage
from ostinato.storages.table import read_column

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from ostinato.core.records import Plan
    from ostinato.core.rows import Path, Schema
    from ostinato.durable.codecs import AnyCodec

__all__ = ["RaggedTensorStorage"]

LAYOUTS = ("lazy", "nested", "padded")
Layout = Literal["lazy", "nested", "padded"]
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
_Values: TypeAlias = tuple[Tensor, Tensor]
"""The values of a field of rows, one after the other, `[total, *F]`, and the length of each, int64 `[rows]`."""


_CHUNK = 2**20
"""Elements that are moved at once when values are compacted."""


class _Arena(NamedTuple):
    """Values and where those of each slot lie; both are replaced together, so that a reader has one of two states."""

    values: Tensor
    """`[elements, *F]`."""
    spans: Tensor
    """int64 `[capacity, 2]`: start and length."""


def _take(values: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Copy spans `[n, 2]` of values; return them one after the other, `[total, *F]`, and their lengths `[n]`.

    Spans that another thread is writing may be torn: they are cut to the values there are.
    """
    starts = spans[:, 0].clamp(0, values.shape[0])
    lengths = torch.minimum(spans[:, 1].clamp(min=0), values.shape[0] - starts)
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if ends.shape[0] else 0
    at = torch.arange(total, device=values.device)
    at += torch.repeat_interleave(starts - ends + lengths, lengths, output_size=total)
    return as_bits(values).index_select(0, at).view(values.dtype), lengths


@final
class RaggedColumn(StorageColumn):
    """The values of one ragged field for `capacity` slots, one after the other in a single tensor.

    The leaf of such a field has the dtype and shape of one element. Its rows are a jagged nested tensor wherever other
    fields have a tensor `[n, *leaf.shape]`: in rows that are written, and in those that are read.

    New values are appended. When the tensor is full, the values of rows that are still there are copied to a new one of
    twice their size, so it has at most twice the elements that were present and about to be written at that moment, and
    each element that is written costs O(1) on average. While values are copied, both tensors are in memory.
    """

    option = "ragged fields"
    shareable = False
    row_tensors = False

    def allocate(self) -> None:
        """Begin without values."""
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the values, free ones included, and of 16 bytes per slot."""
        return self._arena.values.nbytes + self._arena.spans.nbytes

    def clear(self) -> None:
        """Remove all values."""
        device = self.device
        with torch.inference_mode(mode=False):
            spans = torch.zeros((self.capacity, 2), dtype=torch.int64, device=device)
            values = torch.empty((0, *self.leaf.shape), dtype=self.leaf.dtype, device=device)
        self._arena = _Arena(values, spans)
        self._used = self._live = 0

    def set(self, slots: Tensor, values: Tensor) -> None:
        """Keep the rows of a jagged nested tensor, one for each of `slots`, which are distinct."""
        new, lengths = values_of(values)
        total = new.shape[0]
        self._reserve(total)
        mine, spans = self._arena
        lengths = lengths.to(spans.device)
        as_bits(mine)[self._used : self._used + total] = as_bits(new).to(mine.device)
        self._live += total - int(spans[slots, 1].sum())
        spans[slots] = torch.stack((lengths.cumsum(0) - lengths + self._used, lengths), 1)
        self._used += total

    def get(self, slots: Tensor) -> Tensor:
        """Return a jagged nested tensor of the rows at slots.

        Raises:
            IndexError: if a slot is out of range.
        """
        values, spans = self._arena
        return jagged(*_take(values, spans.index_select(0, slots)))

    def read(self, position: int, slots: Tensor, *, pin: bool = False) -> Tensor:  # noqa: ARG002
        """Return the rows at slots, their values page-locked if `pin`."""
        found = self.get(slots)
        if not pin:
            return found
        values, lengths = values_of(found)
        return jagged(values.pin_memory(), lengths)

    def convert(self, values: Tensor, rows: int) -> Tensor:  # noqa: ARG002
        """Make room for the values of rows, so that `write` allocates nothing.

        Raises:
            StorageMemoryError: if there is not enough memory; nothing has changed.
        """
        self._reserve(values.values().shape[0])
        return values

    def _reserve(self, elements: int) -> None:
        old = self._arena
        if self._used + elements <= old.values.shape[0]:
            return
        size = 2 * (self._live + elements)
        self._memory.check(size * self.leaf.nbytes)
        lengths = old.spans[:, 1]
        with torch.inference_mode(mode=False):
            values = torch.empty((size, *self.leaf.shape), dtype=self.leaf.dtype, device=old.values.device)
            ends = lengths.cumsum(0)
            spans = torch.stack((ends - lengths, lengths), 1)
        rows = torch.nonzero(lengths)[:, 0]
        pieces = (ends[rows] - lengths[rows]) // _CHUNK
        sizes = torch.unique_consecutive(pieces, return_counts=True)[1].tolist()
        done = 0
        for part in torch.split(rows, sizes):
            moved, _ = _take(old.values, old.spans[part])
            as_bits(values)[done : done + moved.shape[0]] = as_bits(moved)
            done += moved.shape[0]
        self._arena, self._used = _Arena(values, spans), done  # the old one is not changed: a reader may have it

    def _pick(self, prepared: Tensor, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice) and not rows.start:
            return prepared
        offsets = offsets_of(prepared)
        at = torch.arange(offsets.shape[0] - 1, device=offsets.device)
        at = at[rows.to(at.device) if isinstance(rows, Tensor) else rows]
        return jagged(*_take(prepared.values(), torch.stack((offsets[at], offsets[at + 1] - offsets[at]), 1)))

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add values and ends to the columns of a state, and the name of the field to its `ragged`. Copies."""
        state.setdefault("ragged", []).append(self.name)
        values, lengths = values_of(self.get(torch.arange(rows, device=self.device)))
        state["columns"] |= {f"{self.name}.values": values, f"{self.name}.ends": lengths.cumsum(0)}


@final
class SavedRagged:
    """A ragged column of a state: values `[total, *F]`, and where those of each row end."""

    def __init__(self, values: Any, ends: Any) -> None:
        self._values, self._ends = values, ends
        self.dtype, self.shape = values.dtype, (int(ends.shape[0]), *values.shape[1:])

    def read(self) -> Tensor:
        """Return all rows as a jagged tensor.

        Raises:
            DamagedFileError: if the ends do not ascend from 0 to the number of values.
        """
        with torch.inference_mode(mode=False):  # nested tensors cannot be made of inference tensors
            values = as_ordinary(read_column(self._values))
            return jagged(values, check_ends(values, read_column(self._ends)))


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
        single_copy: see `LazyTensorStorage`; not for ragged fields.
        codec: see `LazyTensorStorage`; not for ragged fields.
        kinds: see `LazyTensorStorage`; not for ragged fields.
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
    no_hooks = OptionError, "ragged fields, and hooks convert dense ones: save without hooks"

    def __init__(
        self,
        max_size: int,
        *,
        ragged: str | Sequence[Hashable],
        layout: Layout = "lazy",
        device: torch.device | str | int = "cpu",
        packed: bool = True,
        single_copy: bool | Mapping[Any, Any] = False,
        codec: str | AnyCodec | Mapping[Any, str | AnyCodec] | None = None,
        kinds: Mapping[Any, StorageColumn] | None = None,
        allow_pickle: bool = False,
        compilable: bool = False,
    ) -> None:
        super().__init__(
            max_size,
            device=device,
            packed=packed,
            single_copy=single_copy,
            codec=codec,
            kinds=kinds,
            allow_pickle=allow_pickle,
            compilable=compilable,
        )
        keys = [ragged] if isinstance(ragged, str) else list(ragged)
        self.ragged: list[Path] = [key if isinstance(key, tuple) else (key,) for key in keys]
        """Paths of the fields whose length differs."""
        if not self.ragged or not all(path and all(isinstance(k, str) for k in path) for path in self.ragged):
            msg = (
                f"ragged names fields by keys or tuples of keys, such as ['tokens', ('next', 'tokens')], got {ragged!r}"
            )
            raise OptionError(msg)
        self.layout: Layout = check_choice("layout", layout, LAYOUTS)
        self._set_kinds([*(with_field(RaggedColumn(), path, "ragged") for path in self.ragged), *self._kinds])

    def __repr__(self) -> str:
        """As of `LazyTensorStorage`, with the ragged fields."""
        ragged = ", ".join(map(show_path, self.ragged))
        return f"{super().__repr__()[:-1]}, ragged=[{ragged}], layout={self.layout!r})"

    def _check_first_rows(self, schema: Schema, batch: tuple[int, ...], num_envs: int) -> None:
        """Check the schema of the first rows.

        Raises:
            KindError: if ragged fields are not in dicts or TensorDicts.
            SchemaError: if a dense field has the name of the masks.
        """
        if schema.kind not in {"dict", "tensordict"}:
            msg = f"ragged fields are those of dicts and TensorDicts, got rows that are a {schema.kind}"
            raise KindError(msg)
        if self.layout == "padded" and any(path[0] == "masks" for path in schema.paths):
            msg = "layout='padded' puts masks under 'masks', and the rows have such a field: rename it"
            raise SchemaError(msg)
        super()._check_first_rows(schema, batch, num_envs)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _flattened(self, data: Any, batch: tuple[int, ...] | None, lead: int, *, edit: bool) -> tuple[Schema, Flat]:
        rest, given = self._set_aside(data, lead)
        schema, flat = super()._flattened(rest, batch, lead, edit=edit)
        joined = self._joined(given, math.prod(flat.batch), schema)
        leaves = [joined.get(i, leaf) for i, leaf in enumerate(flat.leaves)]
        return schema, flat._replace(leaves=leaves, addresses=None)

    def _set_aside(self, data: Any, lead: int) -> tuple[Any, dict[Path, _Values]]:
        """Take the ragged fields out of rows; zeros of the dtype and shape of an element take their place."""
        if lead and type(data) is list:
            pairs = [self._set_aside(row, 0) for row in data]
            joined = {path: self._join([given[path][0] for _, given in pairs], path) for path in self.ragged}
            return [row for row, _ in pairs], joined
        given: dict[Path, _Values] = {}
        if not isinstance(data, dict) and not kinds.is_tensordict(data):
            msg = f"rows with ragged fields are dicts or TensorDicts, got a {type(data).__name__}: convert them"
            raise KindError(msg)
        rest = data.exclude(*self.ragged) if kinds.is_tensordict(data) else dict(data)
        for path in self.ragged:
            given[path] = values, lengths = self._find(data, path, lead)
            if values is _NOTHING and self._table is None:
                msg = f"the first rows of the ragged {show_field(path)} are empty lists without a dtype: give a tensor"
                raise KindError(msg)
            shape = (*lengths.shape[:lead], *values.shape[1:])
            blank = torch.zeros((), dtype=values.dtype, device=values.device).expand(shape)
            if kinds.is_tensordict(rest):
                rest.set(path, blank)
            else:
                _put(rest, path, blank)
        return rest, given

    def _find(self, data: Any, path: Path, lead: int) -> _Values:
        """Return one ragged field of a row (`lead` of 0) or of a batch of rows."""
        rows = getattr(data, "tensordicts", None) if kinds.is_tensordict(data) else None
        if rows is not None and lead:
            return self._join([self._find(row, path, 0)[0] for row in rows], path)
        value = kinds.find_field(data, path)
        if value is None:
            msg = f"rows lack the ragged {show_field(path)}: give it, or do not name it in ragged="
            raise KeyMissingError(msg)
        return self._values_of(value, path, lead)

    def _values_of(self, value: Any, path: Path, lead: int) -> _Values:
        if lead == 0:
            return self._join([self._row(value, path)], path)
        if isinstance(value, Tensor) and value.is_nested:
            if value.layout is torch.jagged and value.lengths() is None:  # type: ignore[attr-defined]
                return values_of(value)
            value = list(value.unbind(0))
        if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
            return self._join([self._row(row, path) for row in value], path)
        dense = kinds.as_tensor(value, path)
        if dense.ndim < 2:
            msg = f"the ragged {show_field(path)} of rows needs the shape [rows, length, ...], got {list(dense.shape)}"
            raise SchemaError(msg)
        lengths = torch.full((dense.shape[0],), dense.shape[1], dtype=torch.int64, device="cpu")
        return dense.flatten(0, 1), lengths

    def _row(self, value: Any, path: Path) -> Tensor:
        """Return the field of one row, `[length, *F]`; `_NOTHING` of an empty list that no dtype is known of."""
        schema = self.schema
        if isinstance(value, (list, tuple)):
            if not value:
                leaf = None if schema is None else schema.leaves[schema.find(path)]
                return _NOTHING if leaf is None else torch.empty((0, *leaf.shape), dtype=leaf.dtype, device="cpu")
            try:
                value = np.asarray(value)
            except ValueError as error:
                msg = (
                    f"the ragged {show_field(path)} of a row is a list that is no array ({error}): give one of numbers"
                )
                raise KindError(msg) from error
            if schema is None and value.dtype.kind == "f":  # first rows store Python floats as float32
                value = value.astype(np.float32)
        tensor = kinds.as_tensor(value, path) if schema is None else schema.fit(value, path)
        if tensor.ndim == 0:
            msg = f"the ragged {show_field(path)} of a row needs the shape [length, ...], got a single number"
            raise SchemaError(msg)
        return tensor

    def _join(self, rows: list[Tensor], path: Path) -> _Values:
        """Return rows one after the other, and their lengths."""
        known = [values for values in rows if values is not _NOTHING]
        if len({(values.dtype, values.shape[1:]) for values in known}) > 1:
            shown = ", ".join(sorted({f"{x.dtype}[length{''.join(f', {n}' for n in x.shape[1:])}]" for x in known}))
            msg = f"rows of the ragged {show_field(path)} may differ in their first dimension alone, got {shown}"
            raise SchemaError(msg)
        lengths = torch.tensor([values.shape[0] for values in rows], dtype=torch.int64, device="cpu")
        return torch.cat(known) if known else _NOTHING, lengths

    def _joined(self, given: dict[Path, _Values], rows: int, schema: Schema) -> dict[int, Tensor]:
        """Return jagged nested tensors of ragged fields, checked and cast, by position."""
        out = {}
        for path, (values, lengths) in given.items():
            position = schema.find(path)
            if lengths.shape[0] != rows:
                msg = f"the ragged {show_field(path)} has {lengths.shape[0]} rows, the other fields have {rows}"
                raise SchemaError(msg)
            if int(lengths.sum()) != values.shape[0] or (rows and int(lengths.min()) < 0):
                msg = f"the lengths of the ragged {show_field(path)} do not add up to its {values.shape[0]} values"
                raise SchemaError(msg)
            (checked,), *_ = schema.only(position).flatten(values, None, 1)
            out[position] = jagged(checked, lengths.to(checked.device))
        return out

    def _find_leaf(self, path: tuple[Hashable, ...]) -> int | None:
        if path in self.ragged:
            msg = f"{show_path(path)} has another length in each row, and a dense field is needed here: name another"
            raise KindError(msg)
        return super()._find_leaf(path)

    def _fit_field(self, position: int, value: Any, batch: tuple[int, ...], count: int) -> Any:
        schema = self._require().schema
        path = schema.paths[position]
        if path not in self.ragged:
            return super()._fit_field(position, value, batch, count)
        return self._joined({path: self._values_of(value, path, len(batch))}, count, schema)[position]

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_plan(self, plan: Plan, *, pin: bool = False) -> Flat:
        """Return the payload of a plan's batch; see `LazyTensorStorage.read_plan`.

        Raises:
            OptionError: if a unit stacks rows of a ragged field, or reads a dense field in its place.
        """
        for position, column in plan.changed.items():
            path = plan.schema.leaves[position].path
            one, two = (plan.schema.leaves[i] for i in (position, position if column.other is None else column.other))
            if (one.path in self.ragged) != (two.path in self.ragged):
                msg = f"{one} and {two} cannot take each other's place: only one of them differs in length"
                raise OptionError(msg)
            if column.tail and path in self.ragged:
                msg = (
                    f"{show_field(path)} has another length in each row, so rows of it cannot be stacked: name other "
                    "fields in the sample_unit"
                )
                raise OptionError(msg)
        return super().read_plan(plan, pin=pin)

    def present(self, payload: Flat, batch: tuple[int, ...]) -> Any:
        """Nest rows as they were written, with the ragged fields in the layout of the storage."""
        flat, schema = payload, self._require().schema
        if len(batch) > 1:
            msg = f"rows with ragged fields are read by one dimension, got an index of the shape {list(batch)}"
            raise SlotError(msg)
        leaves, objects, masks = list(flat.leaves), list(flat.objects), dict[Any, Tensor]()
        late = payload.late
        if not batch:
            leaves = [x.values() if x.is_nested else x[0] for x in leaves]
            objects, late = [x[0, ...] for x in objects], {path: value[0] for path, value in late.items()}
        elif self.layout == "lazy" and schema.kind == "tensordict":
            return kinds.with_fields(self._stack(flat, batch[0]), late)
        elif self.layout == "lazy":
            leaves = [list(_rows_of(x)) if x.is_nested else x for x in leaves]  # type: ignore[misc]
        elif self.layout == "padded":
            for i in [schema.find(path) for path in self.ragged]:
                leaves[i], masks["masks", *schema.leaves[i].path] = _padded(leaves[i])
        else:
            _share_offsets(leaves)
        return kinds.with_fields(schema.build(leaves, batch, self.device, objects), late | masks)

    def _stack(self, flat: Flat, rows: int) -> Any:
        """Return rows as a lazy stack of TensorDicts, whose fields are views of one batch."""
        schema = self._require().schema
        if not rows:
            return schema.build([_padded(x)[0] if x.is_nested else x for x in flat.leaves], (0,), self.device)
        columns = [_rows_of(leaf) if leaf.is_nested else leaf.unbind(0) for leaf in flat.leaves]
        made = []
        for i, row in enumerate(zip(*columns, strict=True)):
            made.append(schema.build(row, (), self.device, [x[i, ...] for x in flat.objects]))
        return kinds.lazy_stack(made)

    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return the rows at an index, or one field by its key; see `LazyTensorStorage.read`. Copy."""
        found = super().read(index, swap=swap)
        one = isinstance(found, Tensor) and found.is_nested and self.layout != "nested"
        return list(_rows_of(found)) if one else found

    # -- state ---------------------------------------------------------------------------------------------------------

    def _find_sources(self, state: dict[str, Any], schema: Schema) -> dict[str, Any]:
        names = sorted(schema.column_names[schema.find(path)] for path in self.ragged)
        if sorted(state["ragged"]) != names:
            msg = f"the checkpoint has the ragged columns {sorted(state['ragged'])}, the storage {names}"
            raise CheckpointError(msg)
        columns = state["columns"]
        found = {name: SavedRagged(columns[f"{name}.values"], columns[f"{name}.ends"]) for name in names}
        return super()._find_sources(state, schema) | found


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


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return a jagged tensor `[n, j, *F]` padded with 0, `[n, longest, *F]`, and the mask of its values."""
    values, lengths = values_of(nested)
    longest = int(lengths.max()) if lengths.shape[0] else 0
    mask = torch.arange(longest, device=values.device) < lengths[:, None]
    out = torch.zeros((*mask.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    as_bits(out)[mask] = as_bits(values)
    return out, mask


def _share_offsets(leaves: list[Tensor]) -> None:
    """Let jagged tensors of equal lengths share their offsets: only such can be added or multiplied."""
    known: list[Tensor] = []
    for i, leaf in enumerate(leaves):
        if leaf.is_nested:
            offsets = next((x for x in known if torch.equal(x, offsets_of(leaf))), None)
            if offsets is None:
                known.append(offsets_of(leaf))
            else:
                leaves[i] = torch.nested.nested_tensor_from_jagged(leaf.values(), offsets)


def _rows_of(nested: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of a jagged tensor. Views."""
    values, lengths = values_of(nested)
    return torch.split(values, lengths.tolist())
