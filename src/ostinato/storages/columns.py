"""Columns: the fields of the rows of a storage of tensors, in groups of one kind each.

Dense fields lie in a `Table`. Each field of another kind is a `StorageColumn`: a kind of the user's own, compressed
(`coded.py`), ragged (`ragged.py`), or of Python objects (text, and what TensorDict keeps as `NonTensorData`). Next
observations that are stored once are one column together (`single_copy.py`). `Fields` joins them. Fields that were
added after the first rows (`LateFields`) are dense, with a mask of the rows that have them.
"""

from __future__ import annotations

import copy
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato.core import kinds
from ostinato.core.kinds import as_tensor, is_non_tensor, is_tensordict, is_text, show_field, show_path
from ostinato.core.records import Picks, Request, Run
from ostinato.core.rows import Flat, Leaf, Schema, as_bits, column_name, describe, map_leaves
from ostinato.durable import decode, encode
from ostinato.durable.arrays import jagged
from ostinato.durable.manifest import canonical, parse_json
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
    KeyMissingError,
    KindError,
    OptionError,
    OstinatoError,
    SchemaError,
    UsageError,
)
from ostinato.storages.memory import HeapMemory
from ostinato.storages.table import Table, last_of_each, read_column

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import ObjectLeaf, Path
    from ostinato.storages.memory import Memory

__all__ = ["StorageColumn"]

Kind = TypeVar("Kind", bound="StorageColumn")
Choice: TypeAlias = "tuple[StorageColumn, Sequence[int]]"
"""A kind of column, and the positions of its fields in a schema."""

_SHARED_BYTES = 4096
"""Rows of Python objects that are written together share memory up to this size."""
_NO_SLOTS = torch.empty(0, dtype=torch.int64, device="cpu")


def targets(placement: Placement) -> tuple[Tensor, Tensor]:
    """Return the slots of a placement and the rows that go to them, int64 `[n]` each."""
    if isinstance(placement, Run):
        return placement.slots(), torch.arange(placement.skip, placement.total, device="cpu")
    return placement.slots, placement.rows


def counts_after(placement: Placement, rows: int, cursor: int, capacity: int) -> tuple[int, int]:
    """Return the number of rows present and the cursor after a write, from those before it."""
    if isinstance(placement, Run):
        end = placement.start + placement.rows
        return max(rows, min(end, capacity)), end % capacity
    if placement.slots.shape[0]:
        rows = max(rows, int(placement.slots.max()) + 1)
        cursor = rows % capacity if placement.cursor is None else placement.cursor
    return rows, cursor


class StorageColumn(ABC):
    """How a storage keeps one field. A kind of your own subclasses it; `kinds={"obs": MyColumn()}` chooses it.

    Implement `allocate`, `set` and `get`. The values of a field are tensors `[n, *leaf.shape]` of its dtype, checked
    and cast as those of other fields are. `set` and `get` need not be exact, but must change nothing if values that
    `get` returned are set again: checkpoints hold these values, so that any storage can load them.

    The object that the option was given has no rows: each storage lays out a copy of it (`copy.copy`), whose
    attributes `leaf`, `capacity` and `device` are set when `allocate` is called.

    `set` is called under the lock of the buffer. `get` may run meanwhile: the buffer then reads again.

    Kinds of the library override more. `find` chooses their fields among those of the first rows; one column may keep
    several fields that depend on each other. Writes come in steps, so that what cannot be stored raises before
    anything changes: `prepare`, then `begin_write` before and `write` after the dense fields are written. A storage
    knows nothing else of its columns.
    """

    option: str = "kinds"
    """The option of a storage that chose it, for messages."""
    shareable: bool = True
    """Whether processes can share the values: True if they are in tensors that `new_tensor` returned. With False, a
    buffer with `shared=True` raises an error that names it."""
    ring_only: bool = False
    """Whether rows must be written in ring order."""
    derived: bool = False
    """Whether it reads other fields, which must have their values before and lose them after it."""
    align: int = 8
    """The stride of packed rows beside it is a multiple of so many bytes."""
    row_tensors: bool = True
    """Whether its values are a tensor `[n, *leaf.shape]`."""
    native: Any = None
    """What native calls write in its place; None if they cannot."""
    positions: Sequence[int]
    """Positions of its fields in the schema: leaves, then fields of Python objects."""
    path: Path | None = None
    """The field; None before a storage has it."""
    leaf: Any
    """Path, dtype and shape of the field in one row."""
    name: str
    """Name of the field in checkpoints."""
    capacity: int
    """Number of slots."""
    device: torch.device
    """Device of the rows, on which `get` returns values."""
    position: int
    """Position of the field in the schema."""
    _memory: Memory
    _sizes: Sequence[int] = ()
    _allocating: bool = False

    @abstractmethod
    def allocate(self) -> None:
        """Make room for the values of `capacity` rows, with `new_tensor`.

        It must not write to these tensors: each process that maps the memory calls it, also when there are rows.

        Raises:
            OptionError: if a field such as `leaf` cannot be kept.
        """

    @abstractmethod
    def set(self, slots: Tensor, values: Tensor) -> None:
        """Keep values. It must not raise for values of the dtype and shape of the leaf: other fields may be written.

        Args:
            slots: int64 `[n]` on the device, distinct.
            values: `[n, *leaf.shape]` on the device.
        """

    @abstractmethod
    def get(self, slots: Tensor) -> Tensor:
        """Return the values at slots (int64 `[n]` on the device, in any order): `[n, *leaf.shape]`, its dtype. Copy."""

    @final
    def new_tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a tensor `[capacity, *shape]`, uninitialized, in the memory of the storage: own, mapped or shared.

        Raises:
            StorageMemoryError: if there is not enough memory.
            UsageError: if `allocate` does not run: other processes would not have the tensor.
        """
        if not self._allocating:
            msg = f"new_tensor makes tensors in allocate() only: {type(self).__name__} called it at another time"
            raise UsageError(msg)
        nbytes = self.capacity * math.prod(shape) * dtype.itemsize
        self._memory.check(nbytes)
        block = self._memory.block(f"block-column{self.position}.{len(self._sizes)}.bin", nbytes)
        self._sizes = [*self._sizes, nbytes]
        with torch.inference_mode(mode=False):  # rows may be written in any mode later
            return block.view(dtype).view(self.capacity, *shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that `new_tensor` returned."""
        return sum(self._sizes)

    @property
    def why_private(self) -> str:
        """Why processes cannot share its values, for messages."""
        if self.option != "kinds":
            return self.option
        return f"{show_field(self.path or ())} of the kind {type(self).__name__}, whose shareable is False"

    def find(self, schema: Schema, taken: Mapping[int, StorageColumn]) -> list[Sequence[int]]:  # noqa: ARG002
        """Return the positions of its fields in a schema, one sequence for each `laid_out`: that of `path`.

        Args:
            schema: of a row.
            taken: fields that have a kind already; those of an option that names no field are left out.

        Raises:
            OptionError: if a field that was named does not exist.
        """
        for position, leaf in enumerate(schema.leaves):
            if leaf.path == self.path:
                return [(position,)]
        msg = (
            f"{self.option} names {show_path(self.path or ())}, which is not a tensor field of the rows: they have "
            f"[{'; '.join(map(str, schema.leaves))}]"
        )
        raise OptionError(msg)

    def laid_out(self, fields: Fields, positions: Sequence[int]) -> Self:
        """Return such a column with memory for the rows of the fields at these positions; see `begin`."""
        made = copy.copy(self)
        made.positions = positions
        made.begin(fields)
        return made

    def begin(self, fields: Fields) -> None:
        """Find out about the field, and make room for the values of its rows.

        Raises:
            StorageMemoryError: if there is not enough memory.
            OptionError: if these fields cannot be of this kind.
        """
        self.position = self.positions[0]
        self.leaf, self.name = fields.leaves[self.position], fields.names[self.position]
        self.capacity, self.device, self._memory = fields.capacity, fields.device, fields.memory
        self._allocating = True
        self.allocate()
        self._allocating = False

    def convert(self, values: Any, rows: int) -> Any:
        """Convert the values of rows, and make room for them; see `prepare`."""
        return values.reshape((rows, *self.leaf.shape))

    def prepare(self, flat: Flat, rows: int, cursor: int | None) -> Any:  # noqa: ARG002
        """Check and convert rows that will be written, and make room for them. Nothing else changes.

        Args:
            flat: all fields of the rows.
            rows: their number.
            cursor: the slot where they will most likely go, in ring order; None for an edit of rows present.

        Raises:
            StorageMemoryError: if there is not enough memory.
        """
        at, leaves = self.position, flat.leaves
        return self.convert(leaves[at] if at < len(leaves) else flat.objects[at - len(leaves)], rows)

    def begin_write(self, placement: Placement, prepared: Any) -> Any:  # noqa: ARG002
        """Prepare to write what `prepare` returned, before the dense fields change; return what `write` takes."""
        return prepared

    def write(self, placement: Placement, prepared: Any) -> None:
        """Set the values of rows; of equal slots the last one wins."""
        if isinstance(placement, Run):
            slots, chosen = placement.slots(), self._pick(prepared, slice(placement.skip, None))
        else:
            slots, rows = last_of_each(placement.slots, placement.rows)
            chosen = self._pick(prepared, rows)
        self.set(slots.to(self.device), chosen)

    def _pick(self, prepared: Any, rows: slice | Tensor) -> Any:
        """Return some rows of what `convert` returned, on the device."""
        if isinstance(prepared, np.ndarray):
            return prepared[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
        at = rows.to(prepared.device) if isinstance(rows, Tensor) else rows
        return as_bits(prepared)[at].view(prepared.dtype).to(self.device)

    def _held(self, slots: Tensor) -> Any:
        """Return what `set` keeps, for moves."""
        return self.read(self.position, slots)

    def read(self, position: int, slots: Tensor, *, pin: bool = False) -> Any:  # noqa: ARG002
        """Return the values of one of its fields at slots; see `get`.

        Raises:
            SchemaError: if `get` returns something else.
        """
        values: Any = self.get(slots.to(self.device))  # of a class of the user
        leaf = self.leaf
        if self.row_tensors:
            shape = (slots.shape[0], *leaf.shape)
            if not isinstance(values, Tensor) or values.dtype is not leaf.dtype or values.shape != shape:
                got = f"{values.dtype}{list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
                name = f"{type(self).__name__}.get for {show_field(leaf.path)}"
                msg = f"{name} must return {leaf.dtype}{list(shape)}, got {got}"
                raise SchemaError(msg)
        return values.pin_memory() if pin else values

    def clear(self) -> None:  # noqa: B027
        """Remove all rows; values may stay in memory."""

    def keep(self, slots: Tensor) -> None:
        """Move the values at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        values = self._held(slots)
        self.clear()
        self.set(torch.arange(slots.shape[0], device=self.device), values)

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add the values of the first rows to the columns of a state, as a dense field is saved. Copy."""
        state["columns"][self.name] = self.read(self.position, torch.arange(rows, device=self.device))

    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> None:
        """Replace all rows by what `add_state` added; fields that this one reads have their rows already.

        Args:
            state: of the storage.
            sources: saved values by position of the leaf, of any kind, with `dtype`, `shape`, `read()` and
                `read_into(tensor)`.

        Raises:
            CheckpointError: if it is damaged.
        """
        rows = int(state["rows"])
        values = self.convert(read_column(sources[self.position]).to(self.device), rows)
        self.clear()
        self.set(torch.arange(rows, device=self.device), values)


def named_kinds(kinds: object, option: str = "kinds") -> list[StorageColumn]:
    """Return the kinds of column that a mapping of fields gives, each with its field.

    Raises:
        OptionError: if it is not a mapping of keys or paths to objects of subclasses of `StorageColumn`.
    """
    if kinds is None:
        return []
    values = kinds.values() if isinstance(kinds, Mapping) else ()
    if not isinstance(kinds, Mapping) or not kinds or not all(isinstance(kind, StorageColumn) for kind in values):
        msg = (
            f"{option} must be a mapping of fields to objects of subclasses of StorageColumn, such as "
            f"{option}={{'obs': MyColumn()}}, or None, got {kinds!r}"
        )
        raise OptionError(msg)
    return [with_field(kind, key if isinstance(key, tuple) else (key,), option) for key, kind in kinds.items()]


def with_field(kind: Kind, path: Path | None, option: str) -> Kind:
    """Return a copy of a kind of column for a field; None lets it choose its fields."""
    made = copy.copy(kind)
    made.path, made.option = path, option
    return made


def choose(kinds: Sequence[StorageColumn], schema: Schema) -> list[Choice]:
    """Return the kinds of column of the fields of a schema that are not dense, and the positions of these fields.

    Each kind comes once for each of its columns, in the order in which they are written: those of the user first, which
    may raise, and those that read other fields last.

    Raises:
        OptionError: if two options name one field.
    """
    taken: dict[int, StorageColumn] = {}
    chosen = []
    for kind in kinds:
        for positions in kind.find(schema, taken):
            for position in positions:
                if position in taken:
                    field = show_field(schema.paths[position])
                    msg = f"{field} is named by {taken[position].option} and by {kind.option}: leave one of them out"
                    raise OptionError(msg)
                taken[position] = kind
            chosen.append((kind, positions))
    return sorted(chosen, key=lambda pair: (pair[0].derived, pair[0].option != "kinds"))


def dense_positions(schema: Schema, chosen: Sequence[Choice]) -> list[int]:
    """Return the positions of the leaves that no kind of column was chosen for."""
    elsewhere = {position for _, positions in chosen for position in positions}
    return [i for i in range(len(schema.leaves)) if i not in elsewhere]


@final
class Fields:
    """All fields of `capacity` rows of a schema: dense ones in a table, those of other kinds in columns of their kind.

    Args:
        schema: of a row.
        kept: positions of the dense leaves, in the order of the table.
        dense: the table.
        kinds: the kinds of the other tensor fields, as `choose` returns them.
        num_envs: rows of a step.
        memory: of the rows.
        allow_pickle: of the storage, for fields of Python objects.
    """

    def __init__(
        self,
        schema: Schema,
        kept: Sequence[int],
        dense: Table,
        kinds: Sequence[Choice],
        *,
        num_envs: int,
        memory: Memory,
        allow_pickle: bool,
    ) -> None:
        self.schema, self.kept, self.dense, self.memory = schema, kept, dense, memory
        self.capacity, self.num_envs, self.device = dense.capacity, num_envs, memory.device
        self.leaves = (*schema.leaves, *schema.objects)
        self.names = [*schema.column_names, *map(object_name, schema.objects, range(len(schema.objects)))]
        """Names of all fields in a checkpoint."""
        self.places = {position: place for place, position in enumerate(kept)}
        """Positions in the table of the dense fields."""
        self.kinds: list[StorageColumn] = []
        self._others: dict[int, StorageColumn] = {}
        for kind, positions in [*kinds, *choose([ObjectColumn(allow_pickle=allow_pickle)], schema)]:
            made = kind.laid_out(self, positions)
            self.kinds.append(made)
            self._others |= dict.fromkeys(positions, made)
        self.late = LateFields(self.capacity, self.device)
        self.views = len(kept) == len(schema.leaves)
        """Whether reads of spans are views: all leaves are dense, and no field depends on another one."""

    @property
    def nbytes(self) -> int:
        """Bytes, without those of Python objects."""
        return self.dense.nbytes + sum(part.nbytes for part in self._parts)

    @property
    def plain(self) -> bool:
        """Whether all fields are dense and in the schema."""
        return not self.kinds and not self.late.fields

    @property
    def native(self) -> list[Any] | None:
        """What native calls write for each of `kinds`; None if they cannot write whole rows."""
        found = [kind.native for kind in self.kinds]
        return None if self.late.fields or None in found else found

    @property
    def _parts(self) -> list[StorageColumn | LateFields]:
        return [*self.kinds, self.late]

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False, sampled: bool = False) -> Flat:
        """Copy rows; see `Table.gather` and `LateFields.get`."""
        if not self.kinds and not self.late.fields:
            return Flat(self.dense.gather(slots, pin=pin), (slots.shape[0],))
        late = self.late.get(slots, sampled=sampled)
        return Flat(self._gather(slots, pin=pin), (slots.shape[0],), None, self.objects(slots), late)

    def _gather(self, slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy all leaves."""
        if is_dynamo_compiling():  # a graph break: addresses and bytes cannot be part of a graph
            return torch.compiler.disable(Fields._gather)(self, slots, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        dense, places = self.dense.gather(slots, pin=pin), self.places
        return [
            dense[places[i]] if i in places else self._others[i].read(i, slots, pin=pin)
            for i in range(len(self.schema.leaves))
        ]

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy different rows of each field; see `Table.fetch`."""
        if not self.kinds:
            return self.dense.fetch(requests, pin=pin)
        if is_dynamo_compiling():
            return torch.compiler.disable(Fields.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        placed = [Request(self.places[leaf], slots) for leaf, slots in requests if leaf in self.places]
        found = iter(self.dense.fetch(placed, pin=pin))
        return [
            next(found) if leaf in self.places else self._others[leaf].read(leaf, slots.to(self.device), pin=pin)
            for leaf, slots in requests
        ]

    def view(self, span: slice, rows: int) -> Flat:
        """Return the rows of a span of `[0, rows)`: views if all leaves are dense, else copies. Objects are copies."""
        slots = torch.arange(rows, device=self.device)[span] if self.kinds else _NO_SLOTS
        leaves = self.dense.view(span) if self.views else self._gather(slots.contiguous())
        return Flat(leaves, (leaves[0].shape[0],), None, self.objects(slots), self.late.view(span, rows))

    def objects(self, slots: Tensor, elsewhere: Mapping[Path, Tensor] | None = None) -> list[Any]:
        """Return the fields of Python objects at slots, int64 `[n]`; those in `elsewhere` at its slots."""
        if not self.schema.objects:
            return []
        named = enumerate(self.schema.objects, len(self.schema.leaves))
        return [self._others[i].read(i, (elsewhere or {}).get(leaf.path, slots)) for i, leaf in named]

    def reader(self, position: int) -> Callable[[Tensor], Tensor]:
        """Return what reads a field at slots, as `as_bits` views it. Copies."""
        place = self.places.get(position)
        if place is not None:
            return partial(as_bits(self.dense.columns[place]).index_select, 0)
        kind = self._others[position]
        return lambda slots: as_bits(kind.read(position, slots))

    def column(self, position: int, rows: int) -> Any:
        """Return one field of the first `rows` rows: a view of a leaf if all leaves are dense, else a copy."""
        if self.views and position in self.places:
            return self.dense.columns[position][:rows]
        return self.fetch([Request(position, torch.arange(rows, device=self.device))])[0]

    # -- writing -------------------------------------------------------------------------------------------------------

    def prepare(self, flat: Flat, rows: int, cursor: int | None) -> tuple[Any, ...]:
        """Prepare rows for fields of other kinds than dense; see `StorageColumn.prepare`."""
        return tuple([kind.prepare(flat, rows, cursor) for kind in self.kinds])

    def write(self, placement: Placement, flat: Flat) -> None:
        """Write rows to the slots of a placement, from any device."""
        if self.kinds:
            self._write_kinds(placement, flat)
        else:
            self.dense.write(placement, flat, self.num_envs)
        if flat.late or self.late.fields:
            self.late.write(placement, flat.late)

    def _write_kinds(self, placement: Placement, flat: Flat) -> None:
        addresses = None if flat.addresses is None else [flat.addresses[i] for i in self.kept]
        dense = Flat([flat.leaves[i] for i in self.kept], flat.batch, addresses)
        prepared = flat.prepared or self.prepare(flat, math.prod(flat.batch), None)  # rows that were gathered
        begun = [(kind, kind.begin_write(placement, x)) for kind, x in zip(self.kinds, prepared, strict=True)]
        for kind, values in begun:
            if not kind.derived:
                kind.write(placement, values)
        self.dense.write(placement, dense, self.num_envs)
        for kind, values in begun:
            if kind.derived:
                kind.write(placement, values)

    def write_field(self, position: int, slots: Tensor, value: Any) -> None:
        """Write one field at distinct slots: a leaf, `[n, *leaf.shape]`, or a field of objects."""
        rows, leaves, other = slots.shape[0], list[Any](), self._others.get(position)
        placement = Picks(slots, torch.arange(rows, device=slots.device), slots)
        derived = [kind for kind in self.kinds if kind.derived]
        if derived:
            leaves = self._gather(slots)
            leaves[position : position + 1] = [value]
        prepared = [kind.prepare(Flat(leaves, (rows,)), rows, None) for kind in derived]
        begun = [(kind, kind.begin_write(placement, x)) for kind, x in zip(derived, prepared, strict=True)]
        if other is None:
            self.dense.write_column(self.places[position], slots, value)
        elif not other.derived:
            other.write(placement, other.convert(value, rows))
        for kind, values in begun:
            kind.write(placement, values)

    def clear(self) -> None:
        """Remove all rows and late fields."""
        for part in self._parts:
            part.clear()

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        for part in reversed(self._parts):  # those that read other fields come first
            part.keep(slots)
        self.dense.keep(slots)

    # -- state ---------------------------------------------------------------------------------------------------------

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add the first `rows` rows to a state: views of dense fields, see `StorageColumn.add_state`."""
        names = self.schema.column_names
        state["columns"] = dict(zip([names[i] for i in self.kept], self.dense.view(slice(rows)), strict=True))
        for part in self._parts:
            part.add_state(state, rows)

    def load(self, state: dict[str, Any], sources: Mapping[int, Any], seam: int = 0) -> None:
        """Replace all rows by those of a state, row `seam` first; dense fields mapped from its files are in place."""
        rows = int(state["rows"])
        if not state.get("mapped"):
            self.dense.fill({self.schema.column_names[i]: sources[i] for i in self.kept}, rows)
        for part in self._parts:
            part.load(state, sources)
        if seam:
            for part in reversed(self._parts):
                part.keep(torch.arange(rows, device=self.device).roll(-seam))
            self.dense.turn(rows, seam)


class Saved(ABC):
    """A field in the state of a storage, in another form than its rows one after the other; read like these."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @abstractmethod
    def read_into(self, dest: Tensor) -> None:
        """Read all rows into a tensor."""

    def read(self) -> Tensor:
        """Return all rows as a new tensor."""
        rows = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(rows)
        return rows


_HAS = Leaf(("has",), torch.bool, ())
"""The second field of the table of a field that was added later: which rows have it."""


@final
class LateFields:
    """Fields that were added after the first rows, for example by `write_all`, each with a mask of its rows."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._device = device
        self.fields: dict[Path, Table] = {}
        """A table of values and `_HAS` for each. Empty in nearly all storages; callers check it before they call a
        method. Replaced, never changed in place: readers may iterate over it."""

    @property
    def nbytes(self) -> int:
        """Bytes of values and masks."""
        return sum(table.nbytes for table in self.fields.values())

    def split(self, data: Any, known: Sequence[Path]) -> tuple[Any, dict[Path, Any]]:
        """Separate the top-level keys of `data` that are not in the schema; `rows` makes late fields of their values.

        Args:
            data: rows; only dicts and TensorDicts can have new keys.
            known: paths of the schema.
        """
        fresh = _fresh_keys(data, known)
        given = set(data.keys()) if fresh else set()
        misspelt = any((key,) not in self.fields for key in fresh) and any(
            path[0] not in given for path in known if path
        )
        if not fresh or misspelt:  # a field is missing: the error of the schema names all keys given
            return data, {}
        late: dict[Path, Any] = {(key,): data.get(key) for key in fresh}
        rest: Any = data.exclude(*fresh) if is_tensordict(data) else {k: v for k, v in data.items() if k not in fresh}
        return rest, late

    def require_cover(self, data: Any, known: Sequence[Path], slots: Tensor, rows: int) -> None:
        """Check that a new field of an edit is one of all rows: rows that lack it could not be sampled.

        Args:
            data: rows, or a list of them, that match the schema.
            known: paths of the schema.
            slots: where they are written, int64 `[n]`.
            rows: rows present.

        Raises:
            SchemaError: naming the field and how many rows would lack it.
        """
        first = data[0] if type(data) is list and data else data
        fresh = [key for key in _fresh_keys(first, known) if (key,) not in self.fields]
        lacking = rows - int(torch.unique(slots).numel()) if fresh else 0
        if lacking:
            msg = (
                f"the new {show_field((fresh[0],))} would be missing in {lacking} of the {rows} rows, which could then "
                "not be sampled: write it to all rows first (write_all, rb[:] = rows), or leave it out"
            )
            raise SchemaError(msg)

    def require_known(self, late: dict[Path, Tensor]) -> None:
        """Check that all fields were added before.

        Raises:
            SchemaError: naming the field and the methods that can add it.
        """
        for path in late.keys() - self.fields.keys():
            msg = f"unknown {show_field(path)}: extend() takes the stored fields; write_all() and rb[...] = can add one"
            raise SchemaError(msg)

    def rows(self, late: dict[Path, Any], batch: tuple[int, ...]) -> dict[Path, Tensor]:
        """Check and cast the values of late fields `[*batch, *shape]`; flatten them to `[rows, *shape]`.

        Raises:
            KindError: if a new value is not a tensor, array or number.
            SchemaError: naming the field, what was expected and what was given.
        """
        out: dict[Path, Tensor] = {}
        for path, value in late.items():
            if path in self.fields:
                schema = self.fields[path].schema.only(0)
            else:
                _check_new(path, value)
                tensor = as_tensor(value, path)
                schema = Schema(None, [Leaf(path, tensor.dtype, tuple(tensor.shape[len(batch) :]))])
            (fitted,), *_ = schema.flatten(value, batch, len(batch))
            out[path] = fitted.reshape((math.prod(batch), *schema.leaves[0].shape))
        return out

    def write(self, placement: Placement, values: dict[Path, Tensor]) -> None:
        """Write rows, `[total, *shape]` of each field, and mark all other late fields of these rows as missing."""
        slots, rows = targets(placement)
        slots = slots.to(self._device)
        for table in self.fields.values():
            table.columns[1][slots] = False
        # without the fields that no row has any more
        self.fields = {path: x for path, x in self.fields.items() if path in values or bool(x.columns[1].any())}
        for path, value in values.items():
            self.put(path, slots, value[rows.to(value.device)])

    def put(self, path: Path, slots: Tensor | slice, value: Tensor) -> None:
        """Write one field at `slots`; the others are unchanged."""
        if path not in self.fields:
            leaves = [Leaf(path, value.dtype, tuple(value.shape[1:])), _HAS]
            with torch.inference_mode(mode=False):
                columns = [
                    torch.zeros((self._capacity, *leaf.shape), dtype=leaf.dtype, device=self._device) for leaf in leaves
                ]
            self.fields = {**self.fields, path: Table.adopt(Schema(None, leaves), columns)}
        table = self.fields[path]
        table.write_column(0, slots, value)
        table.columns[1][slots] = True

    def get(self, slots: Tensor, *, sampled: bool = False) -> dict[Path, Tensor]:
        """Return the late fields of the rows at `slots`. Copy.

        Fields that none of these rows has are omitted, or raise if rows are sampled.

        Raises:
            KeyMissingError: if some of the rows lack a field; names it and their number.
        """
        out: dict[Path, Tensor] = {}
        for path, table in self.fields.items():
            values, has = table.columns[0], table.columns[1][slots]
            lacking = int((~has).sum())
            if lacking and (sampled or lacking < has.shape[0]):
                msg = (
                    f"{lacking} of the {has.shape[0]} rows {'sampled' if sampled else 'read'} lack the field "
                    f"{show_path(path)}, which was added to other rows: write it to all rows (write_all), or read rows "
                    "that have it"
                )
                raise KeyMissingError(msg)
            if not lacking and has.shape[0]:
                out[path] = as_bits(values)[slots].view(values.dtype)
        return out

    def view(self, span: slice, rows: int, *, sampled: bool = False) -> dict[Path, Tensor]:
        """Return views of the fields that all rows in a span of `[0, rows)` have; see `get`."""
        held = self.get(torch.arange(rows, device=self._device)[span], sampled=sampled) if self.fields else {}
        return {path: self.fields[path].columns[0][span] for path in held}

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        for table in self.fields.values():
            table.keep(slots)
            table.columns[1][slots.shape[0] :] = False

    def clear(self) -> None:
        """Remove all late fields."""
        self.fields = {}

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add fields and masks to the columns of a state, and `late`: path and both names of each. Views."""
        for i, (path, table) in enumerate(self.fields.items(), len(state["schema"]["leaves"])):
            names = column_name(path, i), f"{column_name(path, i)}.has"
            state["late"].append([list(path), *names])
            state["columns"] |= dict(zip(names, table.view(slice(rows)), strict=True))

    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> None:  # noqa: ARG002
        """Replace all fields by what `add_state` added."""
        columns, rows = state["columns"], slice(int(state["rows"]))
        self.clear()
        for path, name, has in state["late"]:
            self.put(tuple(path), rows, read_column(columns[name]))
            self.fields[tuple(path)].columns[1][rows] = read_column(columns[has]).to(self._device)


def _check_new(path: Path, value: Any) -> None:
    """Check that a value can be a field of its own.

    Raises:
        KindError: if it is text or nested.
    """
    if is_non_tensor(value) or isinstance(value, (str, bytes)) or is_text(value, 1):
        msg = (
            f"the new {show_field(path)} is text or another non-tensor value: only tensors can be added to stored "
            "rows; give such fields with the first rows"
        )
        raise KindError(msg)
    if isinstance(value, (dict, list, tuple)) or is_tensordict(value):
        msg = f"the new {show_field(path)} is nested: write each of its leaves as a field"
        raise KindError(msg)


def _fresh_keys(data: Any, known: Sequence[Path]) -> list[Any]:
    """Return the top-level keys of rows that the schema lacks; none if rows are no dicts or TensorDicts."""
    if not (isinstance(data, dict) or is_tensordict(data)):
        return []
    roots = {path[0] for path in known if path}
    return [key for key in data.keys() if key not in roots]  # noqa: SIM118 (a TensorDict iterates over rows)


# -- values of variable length in checkpoints --------------------------------------------------------------------------


def join_blobs(blobs: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return byte strings as one uint8 tensor `[bytes]`, and where each ends, int64 `[values]`. Copy."""
    whole = bytearray(b"".join(blobs))
    values = torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8, device="cpu")
    ends = torch.tensor([len(blob) for blob in blobs], dtype=torch.int64, device="cpu").cumsum(0)
    return values, ends


def split_blobs(values: Tensor, ends: Tensor) -> list[bytes]:
    """Return the byte strings that `join_blobs` joined. Copy.

    Raises:
        DamagedFileError: if the ends do not divide the values.
    """
    check_ends(values, ends)
    whole, cuts = values.cpu().numpy(), [0, *ends.tolist()]
    return [whole[a:b].tobytes() for a, b in pairwise(cuts)]


def check_ends(values: Tensor, ends: Tensor) -> Tensor:
    """Return the lengths of values of which the ends are known.

    Raises:
        DamagedFileError: if the ends do not ascend from 0 to the number of values.
    """
    if ends.dtype is torch.int64 and values.ndim >= ends.ndim == 1:
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        if not bool((lengths < 0).any()) and int(lengths.sum()) == values.shape[0]:
            return lengths
    msg = (
        f"the checkpoint's {values.dtype}{list(values.shape)} values and their ends {ends.dtype}{list(ends.shape)} "
        "do not fit: it is damaged"
    )
    raise DamagedFileError(msg)


def saved_jagged(values: Tensor, lengths: Tensor) -> Tensor:
    """Return saved values as a nested tensor; see `jagged`.

    Raises:
        DamagedFileError: if the lengths do not add up to the number of values.
    """
    check_ends(values, lengths.cumsum(0))
    return jagged(values, lengths)


def check_column(name: str, source: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Check a column of a state.

    Raises:
        CheckpointError: naming the column, its dtype and shape, and the expected ones.
    """
    if source is None or source.dtype is not dtype or tuple(source.shape) != shape:
        got = "nothing" if source is None else f"{source.dtype}{list(source.shape)}"
        msg = f"the checkpoint's column {name!r} must be {dtype}{list(shape)}, got {got}: it is damaged"
        raise CheckpointError(msg)


# -- Python objects ----------------------------------------------------------------------------------------------------


def owned(row: Any) -> Any:
    """Copy the tensors and arrays of a row: callers reuse theirs, and a view would keep a whole batch in memory.

    The copies are normal tensors without autograd history, also in inference mode.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return map_leaves(row, _own_leaf)
    return map_leaves(row, _own_leaf)


def owned_rows(batch: Any) -> list[Any]:
    """Return copies of the rows of a batch; small rows of tensors share memory, as much as an object takes itself.

    Raises:
        TypeError: if it is no batch.
    """
    leaves, together = [], 1
    if isinstance(batch, Tensor):
        leaves = [batch]
    elif kinds.is_plain_tensordict(batch):
        leaves = list(batch.values(include_nested=True, leaves_only=True))
    if (
        leaves
        and batch.ndim
        and all(type(x) is Tensor and x.layout is torch.strided and not x.is_nested for x in leaves)
    ):
        together = _SHARED_BYTES * len(batch) // max(1, sum(x.nbytes for x in leaves))
    if together < 2:
        return [owned(row) for row in kinds.unstack(batch)]
    return [row for part in batch.split(together) for row in kinds.unstack(owned(part))]


def _own_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.detach() if leaf.requires_grad else leaf).clone()
    if kinds.is_plain_tensordict(leaf):
        with torch.no_grad():  # in place of detach(), which takes five times as long
            return leaf.clone()
    if kinds.is_tensor_collection(leaf):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def pack(row: Any, *, allow_pickle: bool) -> dict[str, Any]:
    """Convert a row to values that checkpoints can hold.

    Raises:
        CheckpointError: if it is not a tensor, array, TensorDict or plain value, and pickling is not allowed.
    """
    try:
        if kinds.is_tensor_collection(row):
            return _pack_tree(row, allow_pickle=allow_pickle)
        encode(row, store=lambda *_: "state:0")
    except OstinatoError as error:
        if not allow_pickle:
            msg = f"a row cannot be saved: {kinds.reason_of(error)}; or create the storage with allow_pickle=True"
            raise CheckpointError(msg) from error
        return {"form": "pickle", "bytes": pickle.dumps(row)}
    return {"form": "plain", "value": row}


def _pack_tree(row: Any, *, allow_pickle: bool) -> dict[str, Any]:
    schema = describe(row, 0, bare=True)
    flat = schema.flatten(row, (), 0)
    objects = {"objects": pack_objects(flat.objects, allow_pickle=allow_pickle)} if schema.objects else {}
    return {"form": "tree", "schema": schema.to_json(), "leaves": flat.leaves, **objects}


def pack_objects(fields: Sequence[np.ndarray[Any, Any]], *, allow_pickle: bool) -> list[list[dict[str, Any]]]:
    """Convert object arrays to lists of values that checkpoints can hold; see `pack`."""
    return [[pack(value, allow_pickle=allow_pickle) for value in field.reshape(-1).tolist()] for field in fields]


def unpack(saved: dict[str, Any], *, allow_pickle: bool) -> Any:
    """Convert the result of `pack` back to a row.

    Raises:
        CheckpointError: if it is a pickle and unpickling is not allowed.
    """
    form = saved.get("form")
    if form == "plain":
        return saved["value"]
    if form == "tree":
        schema, leaves = Schema.from_json(saved["schema"]), saved["leaves"]
        objects = unpack_objects(saved.get("objects", []), schema, allow_pickle=allow_pickle)
        if len(leaves) != len(schema.leaves):
            msg = f"the checkpoint holds {len(leaves)} tensors for {len(schema.leaves)} fields"
            raise CheckpointError(msg)
        device = leaves[0].device if leaves else torch.device("cpu")
        row = schema.build(leaves, (), device, objects)
        return schema.build(schema.flatten(row, (), 0, exact=True).leaves, (), device, objects)
    if form == "pickle":
        if not allow_pickle:
            msg = (
                "the checkpoint holds pickled objects, and unpickling executes code: if you trust it, load into "
                "a storage with allow_pickle=True"
            )
            raise CheckpointError(msg)
        return pickle.loads(saved["bytes"])  # noqa: S301 (asked for by name, off by default)
    msg = f"the checkpoint holds an object of unknown form {form!r}"
    raise CheckpointError(msg)


def unpack_objects(
    packed: Sequence[Sequence[Any]], schema: Schema, lead: tuple[int, ...] = (), *, allow_pickle: bool
) -> list[np.ndarray[Any, Any]]:
    """Return the result of `pack_objects` as object arrays `[*lead, *leaf.shape]` of the fields of a schema.

    Raises:
        CheckpointError: if there is another number of them, or they are pickled and that is not allowed.
    """
    fields = []
    for values, leaf in zip(packed, schema.objects, strict=True):
        shape = (*lead, *leaf.shape)
        if len(values) != math.prod(shape):
            msg = f"the checkpoint holds {len(values)} objects for {math.prod(shape)} places: it is damaged"
            raise CheckpointError(msg)
        objects = (unpack(value, allow_pickle=allow_pickle) for value in values)
        fields.append(np.fromiter(objects, dtype=object, count=len(values)).reshape(shape))
    return fields


def pack_column(name: str, values: Sequence[Any], *, allow_pickle: bool) -> tuple[str, Tensor, Tensor]:
    """Convert a column of objects to two arrays: the bytes of all values, and the end of each value.

    Returns:
        "text" (each value is UTF-8) or "json" (each value is JSON), uint8 `[bytes]`, and int64 `[values]`.

    Raises:
        CheckpointError: naming the column, if a value is not text or a plain value, and pickling is not allowed.
    """
    form, parts = "text", _as_text(values)
    if parts is None:
        form, parts = "json", list[bytes]()
        for i, value in enumerate(values):
            try:
                parts.append(canonical(encode(pack(value, allow_pickle=allow_pickle))))
            except CheckpointError as error:
                msg = f"value {i} of the column {name[:200]!r} cannot be saved: {error}"
                raise CheckpointError(msg) from error
    return form, *join_blobs(parts)


def _as_text(values: Sequence[Any]) -> list[bytes] | None:
    """Return values as UTF-8; None if one is not text, or contains surrogates, which UTF-8 cannot encode."""
    if not {str}.issuperset(map(type, values)):
        return None
    try:
        return [value.encode("utf-8") for value in values]
    except UnicodeEncodeError:
        return None


def unpack_column(name: str, form: object, text: Tensor, ends: Tensor, *, allow_pickle: bool) -> list[Any]:
    """Convert the result of `pack_column` back to objects.

    Raises:
        DamagedFileError: if the arrays do not match, or contain other data.
        CheckpointError: if there are pickles, and unpickling is not allowed.
    """
    where = f"column {name[:200]!r}"
    if text.dtype is not torch.uint8 or form not in {"text", "json"}:
        _raise_damaged(where, f"it holds {text.dtype} of the form {form!r}")
    try:
        parts = split_blobs(text, ends)
        if form == "text":
            return [part.decode("utf-8") for part in parts]
    except (DamagedFileError, UnicodeDecodeError) as error:
        _raise_damaged(where, error)
    return [unpack(decode(parse_json(part, where), where=where), allow_pickle=allow_pickle) for part in parts]


def _raise_damaged(where: str, reason: object) -> NoReturn:
    msg = f"the {where} of the checkpoint is damaged: {reason}"
    raise DamagedFileError(msg)


@final
class ObjectColumn(StorageColumn):
    """An object array `[capacity, *leaf.shape]` in memory of the host.

    Objects are copied when they are written (tensors, arrays and containers in them). Reads return the stored objects:
    a change to a mutable object that was read is a change to the storage. Columns are read and written while Python's
    global lock is held, so a reader never sees half a value; generations show whether a row was replaced meanwhile, as
    for tensors.

    Args:
        allow_pickle: of the storage.
    """

    option = "text or other non-tensor fields"
    shareable = False
    row_tensors = False

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle

    def find(self, schema: Schema, taken: Mapping[int, StorageColumn]) -> list[Sequence[int]]:  # noqa: ARG002
        """Return the positions of all fields of objects."""
        return [(len(schema.leaves) + number,) for number in range(len(schema.objects))]

    def allocate(self) -> None:
        """Make room for the references to the objects.

        Raises:
            StorageMemoryError: if there are not eight bytes of memory for each.
        """
        self.device = torch.device("cpu")
        HeapMemory(self.device).check(8 * self.capacity * math.prod(self.leaf.shape))
        self._values: np.ndarray[Any, Any] = np.empty((self.capacity, *self.leaf.shape), dtype=object)

    @property
    def nbytes(self) -> int:
        """Bytes of the references; the sizes of the objects are not known."""
        return self._values.nbytes

    def convert(self, values: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
        """Return the field of rows, `[rows, *shape]`, with copies of mutable objects."""
        return own_values(values).reshape((rows, *self._values.shape[1:]))

    def set(self, slots: Tensor, values: Any) -> None:
        """Keep objects."""
        self._values[slots.numpy()] = values

    def get(self, slots: Tensor) -> Any:
        """Return the objects at slots."""
        return self._values[slots.numpy()]

    def clear(self) -> None:
        """Remove all objects."""
        self._values.fill(None)

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add a list of the objects of the first rows to a state by its name, not copied."""
        state.setdefault("objects", {})[self.name] = self._values[:rows].reshape(-1).tolist()
        state["allow_pickle"] = self._allow_pickle

    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> None:  # noqa: ARG002
        """Replace all objects by copies of what `add_state` added, after `check_objects`."""
        values, rows = state["objects"][self.name], int(state["rows"])
        read = self.convert(np.fromiter(values, dtype=object, count=len(values)), rows)
        self.clear()
        self.set(torch.arange(rows, device="cpu"), read)


def object_name(leaf: ObjectLeaf, number: int) -> str:
    """Return the name of a field of objects in a checkpoint, by its number among these."""
    return f"object {column_name(leaf.path, number)}"


def check_objects(schema: Schema, state: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the objects of a state by name.

    Raises:
        CheckpointError: naming a field that is missing, or has not one object for each row.
    """
    saved, out = state.get("objects") or {}, {}
    for number, leaf in enumerate(schema.objects):
        name, count = object_name(leaf, number), int(state["rows"]) * math.prod(leaf.shape)
        out[name] = saved.get(name, [])
        if not isinstance(out[name], list) or len(out[name]) != count:
            msg = f"the checkpoint must hold {count} objects for {show_field(leaf.path)}, got others: it is damaged"
            raise CheckpointError(msg)
    return out


def own_values(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an object array in which tensors, arrays and containers are copies."""
    flat = values.reshape(-1).tolist()
    if not _IMMUTABLE.issuperset(map(type, flat)):
        flat = [value if type(value) in _IMMUTABLE else owned(value) for value in flat]
    return np.fromiter(flat, dtype=object, count=len(flat)).reshape(values.shape)


_IMMUTABLE = frozenset({str, bytes, int, float, complex, bool, type(None)})
