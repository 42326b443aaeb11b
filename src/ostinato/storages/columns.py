"""Columns: the fields of the rows of a storage of tensors, in groups of one kind each.

Dense fields lie in a `Table`. Fields of other kinds are one `Columns` object for each kind: compressed (`coded.py`),
ragged (`ragged.py`), next observations that are stored once (`single_copy.py`), Python objects (`objects.py`). `Fields`
joins them. Fields that were added after the first rows (`LateFields`) are dense, with a mask of the rows that have
them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato.core.kinds import as_tensor, is_non_tensor, is_tensordict, is_text, show_field, show_path
from ostinato.core.records import Request, Run
from ostinato.core.rows import Flat, Leaf, Schema, as_bits, column_name
from ostinato.errors import CheckpointError, DamagedFileError, KeyMissingError, KindError, SchemaError
from ostinato.storages.table import check_alike, checked_choice, read_column

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Path
    from ostinato.storages.table import Table


def targets(placement: Placement) -> tuple[Tensor, Tensor]:
    """Return the slots of a placement and the rows that go to them, int64 `[n]` each."""
    if isinstance(placement, Run):
        return placement.slots(), torch.arange(placement.skip, placement.total, device="cpu")
    return placement.slots, placement.rows


class Payload(NamedTuple):
    """Rows without their nesting, late fields `[rows, *shape]`, and what `Columns.prepare` made of rows to write."""

    flat: Flat
    late: dict[Path, Tensor]
    prepared: tuple[Any, ...] = ()


class Columns(ABC):
    """Some fields of the rows of a storage, all of one kind: their values by slot.

    Writes come in steps, so that what cannot be stored raises before anything changes: `prepare`, then `begin_write`
    before and `write` after the dense fields are written. `gather` and `fetch` may run while another thread writes.
    """

    positions: Sequence[int]
    """Positions of the fields in the schema: leaves, then fields of Python objects."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes."""

    @abstractmethod
    def prepare(self, flat: Flat, rows: int, cursor: int | None) -> Any:
        """Check and convert rows that will be written, and make room for them. Nothing else changes.

        Args:
            flat: all fields of the rows.
            rows: their number.
            cursor: the slot where they will most likely go, in ring order; None for an edit of rows present.

        Raises:
            StorageMemoryError: if there is not enough memory.
        """

    def begin_write(self, placement: Placement, prepared: Any) -> Any:  # noqa: ARG002
        """Prepare to write what `prepare` returned, before the dense fields change; return what `write` takes."""
        return prepared

    @abstractmethod
    def write(self, placement: Placement, prepared: Any) -> None:
        """Write rows to slots."""

    def begin_field(self, position: int, slots: Tensor) -> None:  # noqa: B027
        """Prepare for new values of a dense field in the rows at `slots`."""

    @abstractmethod
    def write_field(self, position: int, slots: Tensor, value: Any) -> None:
        """Write one of these fields at distinct slots, int64 `[n]`."""

    @abstractmethod
    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Any]:
        """Return the values of all of these fields at slots, int64 `[n]`. Copy."""

    def holds(self, request: Request) -> bool:
        """Whether `fetch` takes a request."""
        return request.leaf in self.positions and request.other is None and request.pick is None

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:  # noqa: ARG002
        """Return one tensor for each request. Copy. Columns without leaves get none."""
        return []

    @abstractmethod
    def clear(self) -> None:
        """Remove all rows."""

    @abstractmethod
    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""

    @abstractmethod
    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add the first `rows` rows to the state of a storage: arrays to its `columns`, and what describes them."""

    @abstractmethod
    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> Callable[[], None]:
        """Read what `add_state` added; return a function that replaces all rows by it, after the dense fields.

        Args:
            state: of the storage.
            sources: saved values by position of the leaf, of any kind, with `dtype`, `shape`, `read()` and
                `read_into(tensor)`.

        Raises:
            CheckpointError: if it is damaged; nothing has changed.
        """


@final
class Fields:
    """All fields of `capacity` rows of a schema: dense ones in a table, those of other kinds in columns of their kind.

    Args:
        schema: of a row.
        kept: positions of the dense leaves, in the order of the table.
        dense: the table.
        kinds: the other fields; those of Python objects come last.
        num_envs: rows of a step.
        device: of the rows.
    """

    def __init__(
        self,
        schema: Schema,
        kept: Sequence[int],
        dense: Table,
        kinds: Sequence[Columns],
        *,
        num_envs: int,
        device: torch.device,
    ) -> None:
        self.schema, self.kept, self.dense, self.kinds = schema, kept, dense, list(kinds)
        self.capacity, self.num_envs, self.device = dense.capacity, num_envs, device
        self._places = {position: place for place, position in enumerate(kept)}
        held = [*kept, *(position for kind in kinds for position in kind.positions)]
        self._order = sorted(range(len(held)), key=held.__getitem__)
        self.late = LateFields(self.capacity, device)
        self.views = len(kept) == len(schema.leaves)
        """Whether reads of spans are views: all leaves are dense, and no field depends on another one."""

    @property
    def nbytes(self) -> int:
        """Bytes, without those of Python objects."""
        return self.dense.nbytes + sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> list[Columns | LateFields]:
        return [*self.kinds, self.late]

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False, sampled: bool = False) -> Payload:
        """Copy rows; see `Table.gather` and `LateFields.get`."""
        late = self.late.get(slots, sampled=sampled) if self.late.columns else {}
        return self._payload(self._gather(slots, pin=pin), (slots.shape[0],), late)

    def _gather(self, slots: Tensor, *, pin: bool = False) -> list[Any]:
        """Copy all leaves, then all fields of objects."""
        if is_dynamo_compiling():  # a graph break: addresses and bytes cannot be part of a graph
            return torch.compiler.disable(Fields._gather)(self, slots, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        found: list[Any] = self.dense.gather(slots, pin=pin)
        for kind in self.kinds:
            found += kind.gather(slots, pin=pin)
        return [found[i] for i in self._order]

    def _payload(self, values: list[Any], batch: tuple[int, ...], late: dict[Path, Tensor]) -> Payload:
        count = len(self.schema.leaves)
        return Payload(Flat(values[:count], batch, None, values[count:]), late)

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy different rows of each field; see `Table.fetch`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(Fields.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        out: dict[int, Any] = {}
        for kind in self.kinds:
            mine = {i: request for i, request in enumerate(requests) if kind.holds(request)}
            out.update(zip(mine, kind.fetch(list(mine.values()), pin=pin) if mine else (), strict=True))
        dense = {i: placed for i, request in enumerate(requests) if (placed := self._placed(request)) is not None}
        out.update(zip(dense, self.dense.fetch(list(dense.values()), pin=pin) if dense else (), strict=True))
        return [out[i] if i in out else self._fetch_choice(request, pin=pin) for i, request in enumerate(requests)]

    def _placed(self, request: Request) -> Request | None:
        """Return a request of dense fields with their positions in the table; None for others."""
        if request.leaf not in self._places or (request.other is not None and request.other not in self._places):
            return None
        other = None if request.other is None else self._places[request.other]
        return request._replace(leaf=self._places[request.leaf], other=other)

    def _fetch_choice(self, request: Request, *, pin: bool) -> Tensor:
        """Read the rows of two fields of different kinds, each where it is picked."""
        other, pick = checked_choice(request)
        one, two = self.schema.leaves[request.leaf], self.schema.leaves[other]
        check_alike(one.dtype, one.shape, two.dtype, two.shape)
        pick = pick.to(self.device)
        slots = request.slots.to(self.device)
        out = torch.empty((pick.shape[0], *one.shape), dtype=one.dtype, device=self.device, pin_memory=pin)
        for position, rows in ((request.leaf, ~pick), (other, pick)):
            as_bits(out)[rows] = as_bits(self.fetch([Request(position, slots[rows])])[0])
        return out

    def view(self, span: slice, rows: int) -> Payload:
        """Return the rows of a span of `[0, rows)`: views if all leaves are dense, else copies. Objects are copies."""
        if self.views and not self.kinds:
            leaves: list[Any] = self.dense.view(span)
        else:
            slots = torch.arange(rows, device=self.device)[span].contiguous()
            leaves = [*self.dense.view(span), *self.objects(slots)] if self.views else self._gather(slots)
        return self._payload(leaves, (leaves[0].shape[0],), self.late.view(span, rows))

    def objects(self, slots: Tensor, elsewhere: Mapping[Path, Tensor] | None = None) -> list[Any]:
        """Return the fields of Python objects at slots, int64 `[n]`; those in `elsewhere` at its slots."""
        fields = self.schema.objects
        if not fields:
            return []
        if not elsewhere:
            return self.kinds[-1].gather(slots)
        return [self.kinds[-1].gather(elsewhere.get(leaf.path, slots))[i] for i, leaf in enumerate(fields)]

    def column(self, position: int, rows: int) -> Any:
        """Return one field of the first `rows` rows: a view of a leaf if all leaves are dense, else a copy."""
        if self.views and position in self._places:
            return self.dense.column(position, rows)
        slots, objects = torch.arange(rows, device=self.device), position - len(self.schema.leaves)
        return self.objects(slots)[objects] if objects >= 0 else self.fetch([Request(position, slots)])[0]

    # -- writing -------------------------------------------------------------------------------------------------------

    def prepare(self, flat: Flat, rows: int, cursor: int | None) -> tuple[Any, ...]:
        """Prepare rows for fields of other kinds than dense; see `Columns.prepare`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(Fields.prepare)(self, flat, rows, cursor)  # type: ignore[no-untyped-call, no-any-return]
        return tuple([kind.prepare(flat, rows, cursor) for kind in self.kinds])

    def write(self, placement: Placement, payload: Payload) -> None:
        """Write rows to the slots of a placement, from any device."""
        if self.kinds:
            self._write_kinds(placement, payload)
        else:
            self.dense.write(placement, payload.flat, self.num_envs)
        if payload.late or self.late.columns:
            self.late.write(placement, payload.late)

    def _write_kinds(self, placement: Placement, payload: Payload) -> None:
        if is_dynamo_compiling():
            torch.compiler.disable(Fields._write_kinds)(self, placement, payload)  # type: ignore[no-untyped-call]
            return
        flat = payload.flat
        addresses = None if flat.addresses is None else [flat.addresses[i] for i in self.kept]
        dense = Flat([flat.leaves[i] for i in self.kept], flat.batch, addresses)
        begun = [kind.begin_write(placement, x) for kind, x in zip(self.kinds, payload.prepared, strict=True)]
        self.dense.write(placement, dense, self.num_envs)
        for kind, prepared in zip(self.kinds, begun, strict=True):
            kind.write(placement, prepared)

    def write_field(self, position: int, slots: Tensor, value: Any) -> None:
        """Write one field at distinct slots: a leaf, `[n, *leaf.shape]`, or a field of objects."""
        for kind in self.kinds:
            if position in kind.positions:
                kind.write_field(position, slots, value)
                return
            kind.begin_field(position, slots)
        self.dense.write_column(self._places[position], slots, value)

    def clear(self) -> None:
        """Remove all rows and late fields."""
        for part in self._parts:
            part.clear()

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        for part in self._parts:
            part.keep(slots)
        self.dense.keep(slots)

    # -- state ---------------------------------------------------------------------------------------------------------

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add the first `rows` rows to a state: views of dense fields, see `Columns.add_state`."""
        names = self.schema.column_names
        state["columns"] = dict(zip([names[i] for i in self.kept], self.dense.view(slice(rows)), strict=True))
        for part in self._parts:
            part.add_state(state, rows)

    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> None:
        """Replace all rows by those of a state; dense fields that are mapped from its files are in place."""
        finish = [part.load(state, sources) for part in self._parts]
        if not state.get("mapped"):
            self.dense.fill({self.schema.column_names[i]: sources[i] for i in self.kept}, int(state["rows"]))
        for end in finish:
            end()


class Saved(ABC):
    """A field in the state of a storage, in another form than its rows one after the other; read like these."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    how: str = ""
    """How it was saved, for messages; empty if it can be mapped."""

    @abstractmethod
    def read_into(self, dest: Tensor) -> None:
        """Read all rows into a tensor."""

    def read(self) -> Tensor:
        """Return all rows as a new tensor."""
        rows = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(rows)
        return rows


@final
class LateFields:
    """Fields that were added after the first rows, for example by `write_all`, each with a mask of its rows."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._device = device
        self.columns: dict[Path, Tensor] = {}
        """Path -> `[capacity, *shape]`. Empty in nearly all storages; callers check it before they call a method."""
        self.has: dict[Path, Tensor] = {}
        """Path -> bool `[capacity]`."""
        self._schemas: dict[Path, Schema] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of columns and masks."""
        return sum(t.nbytes for t in (*self.columns.values(), *self.has.values()))

    def split(self, data: Any, known: Sequence[Path]) -> tuple[Any, dict[Path, Any]]:
        """Separate the top-level keys of `data` that are not in the schema; `rows` makes late fields of their values.

        Args:
            data: rows; only dicts and TensorDicts can have new keys.
            known: paths of the schema.
        """
        fresh = _fresh_keys(data, known)
        given = set(data.keys()) if fresh else set()
        if any((key,) not in self.columns for key in fresh) and any(path[0] not in given for path in known if path):
            return data, {}  # a field is missing, perhaps misspelt: the error of the schema names all keys given
        if not fresh:
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
        fresh = [key for key in _fresh_keys(first, known) if (key,) not in self.columns]
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
        for path in late.keys() - self.columns.keys():
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
            schema = self._schemas.get(path)
            if schema is None:
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
        for mask in self.has.values():
            mask[slots] = False
        for path in [path for path, mask in self.has.items() if path not in values and not bool(mask.any())]:
            # no row has the field any more
            self.has = {key: mask for key, mask in self.has.items() if key != path}
            self.columns = {key: column for key, column in self.columns.items() if key != path}
            del self._schemas[path]
        for path, value in values.items():
            self.put(path, slots, value[rows.to(value.device)])

    def put(self, path: Path, slots: Tensor | slice, value: Tensor) -> None:
        """Write one field at `slots`; the others are unchanged."""
        if path not in self.columns:
            shape = (self._capacity, *value.shape[1:])
            # new dicts, since readers may iterate over the old ones
            with torch.inference_mode(mode=False):
                has = torch.zeros(self._capacity, dtype=torch.bool, device=self._device)
                column = torch.zeros(shape, dtype=value.dtype, device=self._device)
            self._schemas[path] = Schema(None, [Leaf(path, value.dtype, shape[1:])])
            self.has = {**self.has, path: has}
            self.columns = {**self.columns, path: column}
        as_bits(self.columns[path])[slots] = as_bits(value.to(self._device))
        self.has[path][slots] = True

    def get(self, slots: Tensor, *, sampled: bool = False) -> dict[Path, Tensor]:
        """Return the late fields of the rows at `slots`. Copy.

        Fields that none of these rows has are omitted, or raise if rows are sampled.

        Raises:
            KeyMissingError: if some of the rows lack a field; names it and their number.
        """
        out: dict[Path, Tensor] = {}
        for path, column in self.columns.items():
            has = self.has[path][slots]
            lacking = int((~has).sum())
            if lacking and (sampled or lacking < has.shape[0]):
                msg = (
                    f"{lacking} of the {has.shape[0]} rows {'sampled' if sampled else 'read'} lack the field "
                    f"{show_path(path)}, which was added to other rows: write it to all rows (write_all), or read rows "
                    "that have it"
                )
                raise KeyMissingError(msg)
            if not lacking and has.shape[0]:
                out[path] = as_bits(column)[slots].view(column.dtype)
        return out

    def view(self, span: slice, rows: int, *, sampled: bool = False) -> dict[Path, Tensor]:
        """Return views of the fields that all rows in a span of `[0, rows)` have; see `get`."""
        held = self.get(torch.arange(rows, device=self._device)[span], sampled=sampled) if self.columns else {}
        return {path: self.columns[path][span] for path in held}

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        rows = slots.shape[0]
        for path, column in self.columns.items():
            bits, has = as_bits(column), self.has[path]
            bits[:rows], has[:rows] = bits[slots], has[slots]
            has[rows:] = False

    def clear(self) -> None:
        """Remove all late fields."""
        self.columns, self.has, self._schemas = {}, {}, {}

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add fields and masks to the columns of a state, and `late`: path and both names of each. Views."""
        for i, (path, column) in enumerate(self.columns.items(), len(state["schema"]["leaves"])):
            name = column_name(path, i)
            state["late"].append([list(path), name, f"{name}.has"])
            state["columns"] |= {name: column[:rows], f"{name}.has": self.has[path][:rows]}

    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> Callable[[], None]:  # noqa: ARG002
        """Read what `add_state` added; return a function that replaces all fields by it."""
        columns, rows = state["columns"], slice(int(state["rows"]))
        new = LateFields(self._capacity, self._device)
        for path, name, has in state["late"]:
            new.put(tuple(path), rows, read_column(columns[name]))
            new.has[tuple(path)][rows] = read_column(columns[has]).to(self._device)

        def finish() -> None:
            self.columns, self.has, self._schemas = new.columns, new.has, new._schemas

        return finish


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


def take_parts(columns: dict[str, Any], name: str, rows: int, part: str) -> tuple[Any, Any]:
    """Take the values and ends of a field out of the columns of a state.

    Raises:
        CheckpointError: if one of them is missing, or there is not one end for each row.
    """
    values, ends = columns.pop(f"{name}.{part}", None), columns.pop(f"{name}.ends", None)
    if values is None or ends is None or tuple(ends.shape) != (rows,) or not len(values.shape):
        msg = f"the checkpoint's column {name!r} of {part} is missing or does not fit its rows: it is damaged"
        raise CheckpointError(msg)
    return values, ends


def check_column(name: str, source: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Check a column of a state.

    Raises:
        CheckpointError: naming the column, its dtype and shape, and the expected ones.
    """
    if source is None or source.dtype is not dtype or tuple(source.shape) != shape:
        got = "nothing" if source is None else f"{source.dtype}{list(source.shape)}"
        msg = f"the checkpoint's column {name!r} must be {dtype}{list(shape)}, got {got}: it is damaged"
        raise CheckpointError(msg)
