"""RaggedTable: fields of another length in each row, as values and offsets, beside the table of the other fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato.core.kinds import show_field
from ostinato.core.records import Picks, Request, Run
from ostinato.core.rows import Flat, Schema, as_bits
from ostinato.errors import CheckpointError, OptionError
from ostinato.storages.table import Table, check_alike, checked_choice, last_of_each, read_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Leaf
    from ostinato.storages.memory import Memory
    from ostinato.storages.table import Block, RowArray

__all__ = ["RaggedColumn", "RaggedTable", "SavedRagged", "jagged", "offsets_of", "ragged_columns"]

_CHUNK = 2**20
"""Elements that are moved at once when values are compacted."""


def jagged(values: Tensor, lengths: Tensor) -> Tensor:
    """Return values `[total, *F]` as a nested tensor `[n, j, *F]` of the layout `torch.jagged`. A view of them."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def offsets_of(nested: Tensor) -> Tensor:
    """Return where the rows of a jagged tensor `[n, j, *F]` begin and end in its values, int64 `[n + 1]`."""
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
    return offsets


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
class RaggedColumn:
    """The values of one field for `capacity` slots, one after the other in a single tensor.

    New values are appended. When the tensor is full, the values of rows that are still there are copied to a new one of
    twice their size, so it has at most twice the elements that were present and about to be written at that moment, and
    each element that is written costs O(1) on average. While values are copied, both tensors are in memory.

    Args:
        leaf: the field; its shape is that of one element.
        capacity: slots.
        memory: on which device, and how much is free.
    """

    def __init__(self, leaf: Leaf, capacity: int, memory: Memory) -> None:
        self.leaf = leaf
        self._memory = memory
        self._capacity = capacity
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the values, free ones included, and of 16 bytes per slot."""
        return self._arena.values.nbytes + self._arena.spans.nbytes

    def clear(self) -> None:
        """Remove all values."""
        device = self._memory.device
        with torch.inference_mode(mode=False):
            spans = torch.zeros((self._capacity, 2), dtype=torch.int64, device=device)
            values = torch.empty((0, *self.leaf.shape), dtype=self.leaf.dtype, device=device)
        self._arena = _Arena(values, spans)
        self._used = self._live = 0

    def take(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of slots (int64 `[n]`), `[total, *F]`, and their lengths `[n]`. Copy.

        Raises:
            IndexError: if a slot is out of range.
        """
        values, spans = self._arena
        return _take(values, spans.index_select(0, slots))

    def choose(self, other: RaggedColumn, slots: Tensor, pick: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of slots, those where `pick` (bool `[n]`) is set from another column. Copy."""
        parts = [column.take(slots) for column in (self, other)]
        values = torch.cat([part[0] for part in parts])
        lengths = torch.cat([part[1] for part in parts])
        spans = torch.stack((lengths.cumsum(0) - lengths, lengths), 1)
        rows = slots.shape[0]
        return _take(values, torch.where(pick[:, None], spans[rows:], spans[:rows]))

    def reserve(self, elements: int) -> None:
        """Make room for elements, so that `put` allocates nothing.

        Raises:
            StorageMemoryError: if there is not enough memory; nothing has changed.
        """
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

    def put(self, slots: Tensor, values: Tensor, lengths: Tensor) -> None:
        """Write values `[total, *F]`, `lengths` (int64 `[n]`) of them to each of `slots`, which are distinct."""
        total = values.shape[0]
        self.reserve(total)
        mine, spans = self._arena
        slots, lengths = slots.to(spans.device), lengths.to(spans.device)
        as_bits(mine)[self._used : self._used + total] = as_bits(values).to(mine.device)
        self._live += total - int(spans[slots, 1].sum())
        spans[slots] = torch.stack((lengths.cumsum(0) - lengths + self._used, lengths), 1)
        self._used += total

    def put_nested(self, slots: Tensor, rows: Tensor, nested: Tensor) -> None:
        """Write rows (int64 `[n]`) of a jagged tensor to slots; of equal slots the last one wins."""
        slots, rows = last_of_each(slots, rows)
        offsets = offsets_of(nested).to(rows.device)
        if rows.shape[0] == offsets.shape[0] - 1 and torch.equal(rows, torch.arange(rows.shape[0], device=rows.device)):
            self.put(slots, nested.values(), torch.diff(offsets))
            return
        starts = offsets[rows]
        spans = torch.stack((starts, offsets[rows + 1] - starts), 1)
        values = nested.values()
        self.put(slots, *_take(values, spans.to(values.device)))


@final
class RaggedTable:
    """Memory for `capacity` rows of a schema, some fields of which differ in length.

    The leaf of such a field has the dtype and shape of one element. Its rows are a jagged nested tensor wherever other
    fields have a tensor `[n, *leaf.shape]`: in rows that are written, and in those that are read. All reads are copies.

    Args:
        schema: of a row.
        capacity: rows.
        ragged: positions of the leaves that differ in length.
        memory: allocates the table of the other fields.
        packed: see `plan_layout`.
    """

    def __init__(self, schema: Schema, capacity: int, ragged: Sequence[int], memory: Memory, *, packed: bool) -> None:
        self.schema = schema
        self.capacity = capacity
        self.device = memory.device
        self.kept = [i for i in range(len(schema.leaves)) if i not in ragged]
        self._places = {position: place for place, position in enumerate(self.kept)}
        self.inner = Table.allocate_some(schema, self.kept, capacity, memory, packed=packed)
        """The other fields; None if there are none."""
        self.columns = {i: RaggedColumn(schema.leaves[i], capacity, memory) for i in sorted(ragged)}
        """The fields that differ in length by position of their leaf."""

    @property
    def layout(self) -> list[Block]:
        """Which of the other fields share a block."""
        return [] if self.inner is None else self.inner.layout

    @property
    def nbytes(self) -> int:
        """Bytes of the ragged values, and of the other fields for the whole capacity."""
        return sum(column.nbytes for column in self.columns.values()) + (0 if self.inner is None else self.inner.nbytes)

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy rows; see `Table.gather`. Ragged fields of equal lengths share their offsets."""
        if is_dynamo_compiling():
            return torch.compiler.disable(RaggedTable.gather)(self, slots, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        dense = iter(() if self.inner is None else self.inner.gather(slots, pin=pin))
        ragged = dict(
            zip(self.columns, self.nest([c.take(slots) for c in self.columns.values()], pin=pin), strict=True)
        )
        return [ragged[i] if i in ragged else next(dense) for i in range(len(self.schema.leaves))]

    @staticmethod
    def nest(parts: Sequence[tuple[Tensor, Tensor]], *, pin: bool) -> list[Tensor]:
        """Return jagged nested tensors of values and lengths; those of equal lengths share their offsets."""
        out: list[Tensor] = []
        for values, lengths in parts:
            values = values.pin_memory() if pin else values  # noqa: PLW2901
            for other, known in zip(out, parts, strict=False):
                if torch.equal(known[1], lengths):  # only tensors that share offsets can be added or multiplied
                    out.append(torch.nested.nested_tensor_from_jagged(values, offsets_of(other)))
                    break
            else:
                out.append(jagged(values, lengths))
        return out

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy different rows of each field; see `Table.fetch`.

        Raises:
            OptionError: if a unit stacks rows of a ragged field.
        """
        if is_dynamo_compiling():
            return torch.compiler.disable(RaggedTable.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        out: dict[int, Tensor] = {}
        dense: dict[int, Request] = {}
        fewest = min((request.slots.shape[0] for request in requests), default=0)
        for i, request in enumerate(requests):
            leaf, other = request.leaf, request.other
            if leaf in self.columns or other in self.columns:
                if request.slots.shape[0] != fewest:
                    msg = (
                        f"{show_field(self.schema.leaves[leaf].path)} has another length in each row, so rows of it "
                        "cannot be stacked: name other fields in the sample_unit"
                    )
                    raise OptionError(msg)
                out[i] = self._fetch_ragged(request, pin=pin)
            else:
                place = None if other is None else self._places[other]
                dense[i] = request._replace(leaf=self._places[leaf], other=place)
        if self.inner is not None and dense:
            out.update(zip(dense, self.inner.fetch(list(dense.values()), pin=pin), strict=True))
        return [out[i] for i in range(len(requests))]

    def _fetch_ragged(self, request: Request, *, pin: bool) -> Tensor:
        leaf, slots, other, pick = request
        if other is None and pick is None:
            return self.nest([self.columns[leaf].take(slots)], pin=pin)[0]
        other, pick = checked_choice(request)
        one, two = self.schema.leaves[leaf], self.schema.leaves[other]
        check_alike(one.dtype, one.shape, two.dtype, two.shape)
        if leaf not in self.columns or other not in self.columns:
            msg = f"{one} and {two} cannot take each other's place: only one of them differs in length"
            raise OptionError(msg)
        chosen = self.columns[leaf].choose(self.columns[other], slots, pick.to(self.device))
        return self.nest([chosen], pin=pin)[0]

    def view(self, span: slice) -> list[Tensor]:
        """Return copies of the rows of a span: changes to them do not reach the table."""
        return self.gather(torch.arange(self.capacity, device=self.device)[span].contiguous())

    def column(self, position: int, rows: int) -> Tensor:
        """Return a copy of one field of the first `rows` rows."""
        return self.fetch([Request(position, torch.arange(rows, device=self.device))])[0]

    # -- writing -------------------------------------------------------------------------------------------------------

    def reserve(self, leaves: Sequence[Tensor]) -> None:
        """Make room for rows that will be written.

        Raises:
            StorageMemoryError: if there is not enough memory; nothing has changed.
        """
        for i, column in self.columns.items():
            column.reserve(leaves[i].values().shape[0])

    def write(self, placement: Placement, flat: Flat, num_envs: int = 1) -> None:
        """Write rows; see `Table.write`. Ragged leaves are jagged nested tensors of all rows of the placement."""
        if self.inner is not None:
            addresses = None if flat.addresses is None else [flat.addresses[i] for i in self.kept]
            self.inner.write(placement, Flat([flat.leaves[i] for i in self.kept], flat.batch, addresses), num_envs)
        for i, column in self.columns.items():
            if isinstance(placement, Run):
                rows = torch.arange(placement.skip, placement.total, device="cpu")
                column.put_nested(placement.slots(torch.device("cpu")), rows, flat.leaves[i])
            else:
                column.put_nested(placement.slots, placement.rows, flat.leaves[i])

    def write_column(self, position: int, slots: Tensor, value: Tensor) -> None:
        """Write one field, `[n, *leaf.shape]` or a jagged nested tensor of `n` rows, at distinct slots."""
        if position in self.columns:
            self.columns[position].put_nested(slots, torch.arange(slots.shape[0], device=slots.device), value)
        elif self.inner is not None:
            self.inner.write_column(self._places[position], slots, value)

    def edit(self, slots: Tensor, flat: Flat) -> None:
        """Replace the rows at `slots` (int64 `[n]`); of duplicates the last one wins."""
        self.write(Picks(slots, torch.arange(slots.shape[0], device=slots.device), slots), flat)

    def clear(self) -> None:
        """Remove all rows."""
        for column in self.columns.values():
            column.clear()

    # -- state ---------------------------------------------------------------------------------------------------------

    def row_arrays(self) -> list[RowArray]:
        """Return the memory of the fields that are not ragged; see `Table.row_arrays`."""
        return [] if self.inner is None else self.inner.row_arrays()

    def saved_columns(self, rows: int) -> tuple[dict[str, Tensor], list[str]]:
        """Return the columns of the first `rows` rows, and the names of the ragged ones.

        Ragged values are copied, in the order of their slots; the other columns are views.
        """
        names, columns = self.schema.column_names, dict[str, Tensor]()
        if self.inner is not None:
            columns.update(zip([names[i] for i in self.kept], self.inner.view(slice(rows)), strict=True))
        for i, column in self.columns.items():
            values, lengths = column.take(torch.arange(rows, device=self.device))
            columns |= {f"{names[i]}.values": values, f"{names[i]}.ends": lengths.cumsum(0)}
        return columns, [names[i] for i in self.columns]

    def fill(self, columns: dict[str, Any], rows: int) -> None:
        """Copy saved columns in.

        Raises:
            CheckpointError: if saved ends do not fit their values.
        """
        names = self.schema.column_names
        read = {i: columns[names[i]].parts() for i in self.columns}
        if self.inner is not None:
            self.inner.fill(columns, rows)
        for i, (values, lengths) in read.items():
            self.columns[i].clear()
            self.columns[i].put(torch.arange(rows, device="cpu"), values, lengths)


@final
class SavedRagged:
    """A ragged column of a state: values `[total, *F]`, and where those of each row end, int64 `[rows]`."""

    def __init__(self, values: Any, ends: Any, seam: int = 0) -> None:
        self._values, self._ends, self._seam = values, ends, seam
        self.dtype, self.shape = values.dtype, (int(ends.shape[0]), *values.shape[1:])

    def turned(self, seam: int) -> SavedRagged:
        """Return the column with its row `seam` first and the rows before it last. Not a copy."""
        return SavedRagged(self._values, self._ends, seam)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return values and lengths.

        Raises:
            CheckpointError: if the ends do not ascend from 0 to the number of values.
        """
        values, ends = read_column(self._values), read_column(self._ends)
        lengths = torch.diff(ends, prepend=ends.new_zeros(1)) if ends.dtype is torch.int64 and ends.ndim == 1 else ends
        last = int(ends[-1]) if ends.shape[0] else 0
        if ends.dtype is not torch.int64 or bool((lengths < 0).any()) or last != values.shape[0]:
            msg = f"the checkpoint's {values.shape[0]} ragged values and their {ends.shape[0]} ends do not fit: damaged"
            raise CheckpointError(msg)
        if not self._seam:
            return values, lengths
        cut = int(ends[self._seam - 1])
        return torch.cat((values[cut:], values[:cut])), torch.cat((lengths[self._seam :], lengths[: self._seam]))


def ragged_columns(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in which each ragged column is a `SavedRagged` under its name; nothing is read yet.

    Raises:
        CheckpointError: if a column is missing, or has not one end for each row.
    """
    columns = dict(state["columns"])
    for name in state.get("ragged") or ():
        if isinstance(columns.get(name), SavedRagged):
            continue
        values, ends = (columns.pop(f"{name}.{part}", None) for part in ("values", "ends"))
        if values is None or ends is None or tuple(ends.shape) != (int(state["rows"]),) or not len(values.shape):
            msg = f"the checkpoint's ragged column {name!r} is missing or does not fit its rows: it is damaged"
            raise CheckpointError(msg)
        columns[name] = SavedRagged(values, ends)
    return {**state, "columns": columns}
