"""Tables that store a next observation once, as the observation of the row that follows.

A next observation that is not bit by bit equal to the observation of the following row is stored in an *extra row*.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato._backend import backend
from ostinato.core.kinds import show_field, show_path
from ostinato.core.records import Picks, Request, Run, ring_range
from ostinato.core.rows import Flat, Schema, as_bits, same_rows
from ostinato.errors import CheckpointError, OptionError, SchemaError
from ostinato.storages.memory import HeapMemory
from ostinato.storages.table import (
    Room,
    Table,
    check_alike,
    checked_choice,
    copy_column,
    last_of_each,
    plan_layout,
    read_column,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Leaf, Path
    from ostinato.storages.memory import Memory
    from ostinato.storages.table import Block

__all__ = [
    "EMPTY",
    "FOLLOWS",
    "Comparison",
    "NativeNextRows",
    "NextRows",
    "Pairs",
    "SingleCopy",
    "SingleCopyTable",
    "TorchNextRows",
    "as_run",
    "check_apart",
    "check_option",
    "checked_apart",
    "chunk_rows",
    "fill_plain_table",
    "find_pairs",
    "read_pairs",
]

SingleCopy: TypeAlias = "bool | Mapping[Any, Any]"
Pairs: TypeAlias = "tuple[tuple[int, int], ...]"
"""Positions of leaves: (next field, the field that it equals one row later)."""

_NEVER = frozenset({"reward", "done", "terminated", "truncated"})
"""Fields of a transition, not of a state: `("next", "done")` is unrelated to the `done` one row later."""
_PREFIX = "next_"


def check_option(single_copy: object) -> dict[Path, Path] | bool:
    """Return the option `single_copy` with its keys as paths.

    Raises:
        OptionError: if it is neither a bool nor a mapping of keys to keys.
    """
    if isinstance(single_copy, bool):
        return single_copy
    if not isinstance(single_copy, Mapping) or not single_copy:
        msg = (
            "single_copy must be True (find the pairs by their names), False, or a mapping of next keys to keys such "
            f"as {{'next_obs': 'obs'}}, got {single_copy!r}"
        )
        raise OptionError(msg)
    paths = {_path(key): _path(value) for key, value in single_copy.items()}
    clash = set(paths) & set(paths.values())
    if clash or len(set(paths.values())) < len(paths):
        msg = f"single_copy must name every field once, got {single_copy!r}: no field may be in two pairs"
        raise OptionError(msg)
    return paths


def find_pairs(schema: Schema, naming: Mapping[Path, Path] | None) -> Pairs:
    """Find the pairs of fields in a schema, in its order.

    Args:
        schema: of the rows.
        naming: paths of next fields -> paths; None looks for `("next", *path)` beside `path`, and for `next_x` beside
            `x`, with equal dtypes and shapes, except for flags and rewards.

    Raises:
        OptionError: if there is no pair, or a named field does not exist or has no bytes.
        SchemaError: if the fields of a named pair differ in dtype or shape.
    """
    at = {leaf.path: i for i, leaf in enumerate(schema.leaves)}
    if naming is None:
        found: dict[int, int] = {}
        for path, position in at.items():
            mate = at.get(_mate(path))
            if mate is not None and _alike(schema.leaves[position], schema.leaves[mate]) and mate not in found.values():
                found[position] = mate
        if not found:
            raise OptionError(_none_found(schema))
        return tuple(found.items())
    for path in (*naming, *naming.values()):
        if path not in at:
            known = ", ".join(show_path(leaf.path) for leaf in schema.leaves)
            msg = f"single_copy names the {show_field(path)}, but the fields are {known}"
            raise OptionError(msg)
    named = tuple((at[path], at[mate]) for path, mate in naming.items())
    for position, mate in named:
        _check_alike(schema.leaves[position], schema.leaves[mate])
    return tuple(sorted(named))


def _path(key: Hashable) -> Path:
    return key if isinstance(key, tuple) else (key,)


def _mate(path: Path) -> Path:
    """Return the path of the field that a next field equals one row later; `()`, which no pair has, for others."""
    if not path or path[-1] in _NEVER:
        return ()
    if len(path) > 1 and path[0] == "next":
        return path[1:]
    last = path[-1]
    if not isinstance(last, str) or not last.startswith(_PREFIX) or last.removeprefix(_PREFIX) in _NEVER:
        return ()
    return (*path[:-1], last.removeprefix(_PREFIX))


def _alike(one: Leaf, other: Leaf) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and one.nbytes > 0


def _check_alike(one: Leaf, other: Leaf) -> None:
    if one.dtype is not other.dtype or one.shape != other.shape:
        msg = f"single_copy pairs fields of one dtype and shape, got {one} and {other}"
        raise SchemaError(msg)
    if one.nbytes == 0:
        msg = f"single_copy pairs fields that take memory, got {one}: leave it out"
        raise OptionError(msg)


def _none_found(schema: Schema) -> str:
    known = "; ".join(map(str, schema.leaves))
    return (
        "single_copy=True finds no field that is another one of the next row: it looks for ('next', name) beside name, "
        f"and for next_name beside name, of one dtype and shape; the fields are [{known}]: name the pairs, such as "
        "single_copy={'next_obs': 'obs'}, or leave single_copy out"
    )


FOLLOWS = -1
"""The next observation of a slot is the observation of the following slot."""
EMPTY = -2
"""The slot holds no row."""
_CHUNKS = 256


class Comparison(NamedTuple):
    """Which observations of a batch repeat others; see `NextRows.compare`."""

    flags: Tensor
    """uint8 on the CPU: `[rows]`, whether a next observation equals the observation of the following row of the batch;
    then `[min(num_envs, rows)]`, whether an observation equals the extra row of the row before it."""
    rows: int
    """Rows of the batch."""
    need: int
    """Extra rows that the write takes, if it goes to the expected slots."""
    cursor: int
    """Expected slot of row 0."""


class NextRows(Protocol):
    """The next observations of a table: which slots have an extra row, and the memory of the extra rows.

    One writer at a time, under the lock of the buffer; `read` may run in other threads meanwhile.
    """

    apart: Tensor
    """int32 `[capacity]` on the CPU, read only: the extra row of each slot, `FOLLOWS` or `EMPTY`."""

    @property
    def used(self) -> int:
        """Extra rows in use."""

    @property
    def nbytes(self) -> int:
        """Bytes, `apart` included."""

    def compare(self, flat: Flat, rows: int, cursor: int) -> Comparison | None:
        """Compare the rows of a batch before it is written; None if they lie in the memory of the table."""

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` more extra rows.

        Raises:
            StorageMemoryError: if there is not enough; nothing has changed.
        """

    def detach_run(self, run: Run, found: Comparison) -> None:
        """Before a run is written: copy next observations that it would overwrite to extra rows."""

    def link_run(self, run: Run, flat: Flat, found: Comparison) -> None:
        """After a run was written: record where its next observations are, and fill the extra rows that it needs."""

    def put(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Store `nexts` `[n, *shape]` in extra rows of `slots` (int64 `[n]`, on the CPU, distinct)."""

    def drop(self, slots: Tensor) -> None:
        """Free the extra rows of slots: their next observations are the ones that follow."""

    def reset(self, rows: int) -> None:
        """Free all extra rows; the slots `[0, rows)` have next observations that follow, the others are empty."""

    def read(self, pairs: Sequence[int], slots: Tensor, pick: Tensor | None, *, pin: bool) -> list[Tensor]:
        """Copy next observations, `[n, *shape]` for each pair; observations where `pick` is False.

        Raises:
            IndexError: if a slot is out of range or empty.
        """


def chunk_rows(capacity: int) -> int:
    """Return how many extra rows are allocated at a time: few, so that unused ones take little memory."""
    return 1 << max(0, (capacity // _CHUNKS).bit_length() - 1)


@final
class NativeNextRows:
    """`NextRows` of a CPU table, in the native extension.

    Args:
        table: memory of the rows; the observations are its first fields, in the order of `pairs`.
        pairs: positions in the full schema.
        num_envs: distance in slots from a row to the next row of its environment.
        memory: allocates the extra rows.
    """

    def __init__(self, table: Table, pairs: Pairs, num_envs: int, memory: Memory) -> None:
        with torch.inference_mode(mode=False):
            self.apart = torch.empty(table.capacity, dtype=torch.int32, device="cpu")
        self._pairs = pairs
        self._memory = memory
        self._chunk_rows = chunk_rows(table.capacity)
        self._native: Any = backend.native.SingleCopy(  # type: ignore[union-attr]  # SingleCopyTable has checked
            table.capacity, num_envs, self._chunk_rows, self.apart.data_ptr()
        )
        self._capacity = table.capacity
        self._num_envs = num_envs
        self._table = table  # native code reads its memory
        self._sizes: list[int] = []
        self._chunks: list[list[Tensor]] = []
        self._rooms: dict[tuple[int, ...], Room] = {}
        for column in table.columns:
            self._native.guard(column.data_ptr(), column.stride(0) * column.itemsize * table.capacity)
        self._register(table, len(pairs))
        self._native.clear()

    def _register(self, table: Table, count: int) -> None:
        """Divide the observations into groups of adjacent fields, and number them in the order of the pairs."""
        places: dict[int, tuple[int, int]] = {}
        for block in table.layout:
            end = -1
            for position, offset in sorted(block.members, key=lambda member: member[1]):
                if position >= count:
                    continue
                if offset != end:
                    self._sizes.append(0)
                places[position] = (len(self._sizes) - 1, self._sizes[-1])
                self._sizes[-1] += table.schema.leaves[position].nbytes
                end = offset + table.schema.leaves[position].nbytes
        for group, size in enumerate(self._sizes):
            first = next(position for position, place in places.items() if place == (group, 0))
            column = table.columns[first]
            stride = column.stride(0) * column.itemsize if table.capacity > 1 else size
            self._native.add_group(column.data_ptr(), stride, size)
        for position in range(count):
            self._native.add_field(*places[position], table.schema.leaves[position].nbytes)

    @property
    def used(self) -> int:
        """Extra rows in use."""
        return int(self._native.used)

    @property
    def nbytes(self) -> int:
        """Bytes of extra rows, `apart` and lists."""
        return self.apart.nbytes + int(self._native.nbytes) + sum(x.nbytes for chunk in self._chunks for x in chunk)

    def compare(self, flat: Flat, rows: int, cursor: int) -> Comparison | None:
        """Compare a batch; one pass over its memory."""
        addresses = flat.addresses or []
        flags = torch.empty(rows + min(self._num_envs, rows), dtype=torch.uint8, device="cpu")
        at = flags.data_ptr()
        obs, nexts = [addresses[i] for _, i in self._pairs], [addresses[i] for i, _ in self._pairs]
        need = self._native.compare(cursor, rows, obs, nexts, at, at + rows)
        return None if need < 0 else Comparison(flags, rows, need, cursor)

    def reserve(self, rows: int) -> None:
        """Allocate extra rows, at most one for each slot."""
        while self._native.allocated - self._native.used < rows and self._native.allocated < self._capacity:
            number = len(self._chunks)
            self._memory.check(self._chunk_rows * sum(self._sizes))
            chunk = [
                self._memory.block(f"block-side{number}.{group}.bin", self._chunk_rows * size)
                for group, size in enumerate(self._sizes)
            ]
            self._native.add_chunk([block.data_ptr() for block in chunk])
            self._chunks.append(chunk)

    def detach_run(self, run: Run, found: Comparison) -> None:
        """Detach the rows before a run: there are some after edits, or where the run does not continue the last one."""
        lacking = self._native.detach_run(run.start, run.rows, found.need)
        if lacking:
            self.reserve(self._native.allocated - self._native.used + lacking)
            self._native.detach_run(run.start, run.rows, found.need)

    def link_run(self, run: Run, flat: Flat, found: Comparison) -> None:
        """Record the next observations of a run."""
        addresses = flat.addresses or []
        expected = (run.start - run.skip) % run.capacity == found.cursor and not run.skip
        nexts, agree = [addresses[i] for i, _ in self._pairs], found.flags.data_ptr()
        relink = agree + found.rows if expected else 0
        self._native.link_run(run.start, run.rows, run.skip, nexts, agree, relink)

    def put(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Fill extra rows."""
        if slots.numel():
            dense = [value.contiguous() for value in nexts]
            self._native.set_rows(slots.data_ptr(), slots.shape[0], [value.data_ptr() for value in dense])

    def drop(self, slots: Tensor) -> None:
        """Free extra rows."""
        self._native.link_rows(slots.data_ptr(), slots.shape[0])

    def reset(self, rows: int) -> None:
        """Free all extra rows."""
        self._native.clear()
        self.apart[:rows] = FOLLOWS

    def read(self, pairs: Sequence[int], slots: Tensor, pick: Tensor | None, *, pin: bool) -> list[Tensor]:
        """Copy without a lock; rows that changed meanwhile are copied again."""
        room = self._rooms.get(key := tuple(pairs))
        if room is None:
            leaves = [self._table.schema.leaves[i] for i in pairs]
            self._rooms[key] = room = Room([(leaf.shape, leaf.dtype) for leaf in leaves])
        rows = slots.shape[0]
        out = room.make(rows, pin=pin)
        picked = 0 if pick is None else pick.data_ptr()
        self._native.gather(list(pairs), slots.data_ptr(), picked, rows, [tensor.data_ptr() for tensor in out])
        return out


@final
class TorchNextRows:
    """`NextRows` of a table on any device, with torch. Extra rows lie in memory of the device, also for mapped tables.

    Args:
        table: memory of the rows; the observations are its first fields, in the order of `pairs`.
        pairs: positions in the full schema.
        num_envs: distance in slots from a row to the next row of its environment.
    """

    def __init__(self, table: Table, pairs: Pairs, num_envs: int) -> None:
        self._obs = [as_bits(column) for column in table.columns[: len(pairs)]]
        self._dtypes = [column.dtype for column in table.columns[: len(pairs)]]
        self._pairs = pairs
        self._num_envs = num_envs
        self._capacity = table.capacity
        self._device = table.device
        self._lock = threading.Lock()
        with torch.inference_mode(mode=False):
            self.apart = torch.full((self._capacity,), EMPTY, dtype=torch.int32, device="cpu")
            self._apart = self.apart.to(self._device)  # the same tensor on the CPU
        self._rows = [column[:0].contiguous() for column in self._obs]
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """Extra rows in use."""
        return int(self._rows[0].shape[0]) - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of extra rows and `apart`."""
        notes = self.apart.nbytes + (0 if self._apart is self.apart else self._apart.nbytes)
        return notes + sum(rows.nbytes for rows in self._rows) + 8 * len(self._free)

    def compare(self, flat: Flat, rows: int, cursor: int) -> Comparison:
        """Compare a batch on the device; the result is copied to the host once."""
        obs, nexts = self._sources(flat, rows, 1), self._sources(flat, rows, 0)
        agree = torch.zeros(rows, dtype=torch.bool, device=self._device)
        if rows > self._num_envs:
            agree[: rows - self._num_envs] = same_rows(
                [x[: rows - self._num_envs] for x in nexts], [x[self._num_envs :] for x in obs]
            )
        count = min(self._num_envs, rows)
        before = self.apart[ring_range((cursor - self._num_envs) % self._capacity, count, self._capacity)]
        if self._rows[0].shape[0]:
            at = before.clamp_min(0).to(self._device, torch.int64)
            relink = same_rows([x.index_select(0, at) for x in self._rows], [x[:count] for x in obs])
        else:
            relink = torch.zeros(count, dtype=torch.bool, device=self._device)
        found = torch.cat([agree, relink]).cpu()
        found[rows:] &= before >= 0
        need = int((~found[max(0, rows - self._capacity) : rows]).sum() + (before == FOLLOWS).sum())
        return Comparison(found.view(torch.uint8), rows, need, cursor)

    def _sources(self, flat: Flat, rows: int, side: int) -> list[Tensor]:
        picked = [as_bits(flat.leaves[pair[side]]) for pair in self._pairs]
        return [
            value.reshape(rows, *column.shape[1:]).to(self._device)
            for value, column in zip(picked, self._obs, strict=True)
        ]

    def reserve(self, rows: int) -> None:
        """Allocate more memory, at most one row for each slot, and copy the extra rows to it."""
        room = int(self._rows[0].shape[0])
        wanted = min(self._capacity, self.used + rows)
        if wanted <= room:
            return
        size = min(self._capacity, max(wanted, room + max(chunk_rows(self._capacity), room // 8)))
        HeapMemory(self._device).check(size * sum(x[0:1].nbytes for x in self._obs))
        with torch.inference_mode(mode=False):
            larger = [column.new_empty((size, *column.shape[1:])) for column in self._obs]
        for rows_now, rows_then in zip(larger, self._rows, strict=True):
            rows_now[:room] = rows_then
        with self._lock:
            self._rows = larger
            self._free += range(size - 1, room - 1, -1)

    def detach_run(self, run: Run, found: Comparison) -> None:
        """Copy next observations that a run would overwrite to extra rows."""
        before, outside = self._before(run)
        before = before[outside & (self.apart[before] == FOLLOWS)]
        if before.numel():
            self.reserve(before.shape[0] + found.need)
            after = ((before + self._num_envs) % self._capacity).to(self._device)
            self.put(before, [x.index_select(0, after) for x in self._obs])

    def _before(self, run: Run) -> tuple[Tensor, Tensor]:
        """Return the rows before a run, int64 `[min(num_envs, rows)]` on the CPU, and which of them are not in it."""
        count = min(self._num_envs, run.rows)
        before = ring_range((run.start - self._num_envs) % self._capacity, count, self._capacity)
        return before, (before - run.start) % self._capacity >= run.rows

    def link_run(self, run: Run, flat: Flat, found: Comparison) -> None:
        """Record the next observations of a run."""
        if run.start == found.cursor and not run.skip:
            before, outside = self._before(run)
            self.drop(before[outside & found.flags[found.rows :].bool() & (self.apart[before] >= 0)])
        slots, agree = run.slots(), found.flags[run.skip : found.rows].bool()
        self.drop(slots)
        alone = torch.nonzero(~agree).view(-1)
        at = (alone + run.skip).to(self._device)
        self.put(slots[alone], [x.index_select(0, at) for x in self._sources(flat, run.total, 0)])

    def put(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Fill extra rows."""
        if not slots.numel():
            return
        with self._lock:
            rows = self.apart[slots]
            bare = rows < 0
            fresh = [self._free.pop() for _ in range(int(bare.sum()))]
            rows[bare] = torch.tensor(fresh, dtype=torch.int32, device="cpu")
            at = rows.to(self._device, torch.int64)
            for side, value in zip(self._rows, nexts, strict=True):
                side[at] = as_bits(value).to(self._device)
            self._set(slots, rows)

    def drop(self, slots: Tensor) -> None:
        """Free extra rows."""
        with self._lock:
            rows = self.apart[slots]
            self._free += rows[rows >= 0].tolist()
            self._set(slots, torch.full_like(rows, FOLLOWS))

    def _set(self, slots: Tensor, rows: Tensor) -> None:
        self.apart[slots] = rows
        if self._apart is not self.apart:
            self._apart[slots.to(self._device)] = rows.to(self._device)

    def reset(self, rows: int) -> None:
        """Free all extra rows."""
        with self._lock:
            self.apart.fill_(EMPTY)
            self.apart[:rows] = FOLLOWS
            self._apart.fill_(EMPTY)  # filled, not copied from the CPU: nothing waits
            self._apart[:rows] = FOLLOWS
            self._free = list(range(int(self._rows[0].shape[0]) - 1, -1, -1))

    def read(self, pairs: Sequence[int], slots: Tensor, pick: Tensor | None, *, pin: bool) -> list[Tensor]:
        """Copy on the device without a wait."""
        with self._lock:
            rows = self._apart.index_select(0, slots)
            if self._device.type == "cpu" and bool((rows == EMPTY).any()):
                msg = "a slot is empty"
                raise IndexError(msg)
            after = slots + self._num_envs
            after = torch.where(after >= self._capacity, after - self._capacity, after)
            at = after if pick is None else torch.where(pick, after, slots)
            out = [self._obs[i].index_select(0, at) for i in pairs]
            if self._rows[0].shape[0]:
                aside = rows >= 0 if pick is None else (rows >= 0) & pick
                chosen = rows.clamp_min(0).to(torch.int64)
                for k, i in enumerate(pairs):
                    shape = (-1, *[1] * (out[k].ndim - 1))
                    out[k] = torch.where(aside.view(shape), self._rows[i].index_select(0, chosen), out[k])
        tensors = [tensor.view(self._dtypes[i]) for i, tensor in zip(pairs, out, strict=True)]
        return [tensor.pin_memory() for tensor in tensors] if pin else tensors


_BLOCK_BYTES = 16 << 20
_FEW = 32


def as_run(placement: Placement) -> Run:
    """Return a placement in ring order.

    Raises:
        OptionError: for other placements, in which the following slot does not hold the next row.
    """
    if isinstance(placement, Run):
        return placement
    msg = "single_copy takes rows in ring order (Run), got Picks: the row that follows would not be the next one"
    raise OptionError(msg)


def _kept_leaves(schema: Schema, pairs: Pairs) -> list[int]:
    """Return the positions of the leaves that are stored for each row: the observations of pairs come first."""
    nexts, obs = {pair[0] for pair in pairs}, [pair[1] for pair in pairs]
    return [*obs, *(i for i in range(len(schema.leaves)) if i not in nexts and i not in obs)]


@final
class SingleCopyTable:
    """Memory for `capacity` rows of a schema in which some fields equal other fields one row later.

    Args:
        schema: of a row.
        capacity: rows.
        num_envs: distance in slots from a row to the next row of its environment.
        pairs: the fields; see `find_pairs`.
        memory: allocates the table.
        packed: see `plan_layout`.
        layout: of the stored fields, if files already have one.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int,
        num_envs: int,
        pairs: Pairs,
        memory: Memory,
        *,
        packed: bool,
        layout: list[Block] | None = None,
    ) -> None:
        self.schema = schema
        self.capacity = capacity
        self.num_envs = num_envs
        self.pairs = pairs
        self.kept = _kept_leaves(schema, pairs)
        inner = Schema(None, [schema.leaves[i] for i in self.kept])
        self.layout = plan_layout(inner.leaves, packed=packed, align=1) if layout is None else layout
        memory.check(sum(block.stride for block in self.layout) * capacity)
        names = [schema.column_names[i] for i in self.kept]
        self.inner = Table.allocate(inner, capacity, memory, self.layout, names)
        self.device = self.inner.device
        self._native = backend.native is not None and self.device.type == "cpu"
        self.next_rows: NextRows
        if self._native:
            self.next_rows = NativeNextRows(self.inner, pairs, num_envs, memory)
        else:
            self.next_rows = TorchNextRows(self.inner, pairs, num_envs)
        self._all = tuple(range(len(pairs)))
        places = {position: k for k, position in enumerate([*self.kept, *(pair[0] for pair in pairs)])}
        self._order = [places[i] for i in range(len(schema.leaves))]
        self._pair_of = {pair[0]: k for k, pair in enumerate(pairs)}
        self._warned = False

    @property
    def nbytes(self) -> int:
        """Bytes of rows, extra rows and their bookkeeping."""
        return self.inner.nbytes + self.next_rows.nbytes

    # -- reading ----------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy rows; see `Table.gather`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(SingleCopyTable.gather)(self, slots, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        found = self.inner.gather(slots, pin=pin)
        found += self.next_rows.read(self._all, slots, None, pin=pin)
        return [found[i] for i in self._order]

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy different rows of each field; see `Table.fetch`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(SingleCopyTable.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        out: dict[int, Tensor] = {}
        inner: dict[int, Request] = {}
        nexts: dict[tuple[int, int], dict[int, tuple[int, Tensor, Tensor | None]]] = {}
        for i, request in enumerate(requests):
            asked = self._of_next(request)
            if asked is not None:
                nexts.setdefault((id(asked[1]), id(asked[2])), {})[i] = asked
            elif request.leaf in self._pair_of or request.other in self._pair_of:
                out[i] = self._fetch_both(request, pin=pin)
            else:
                other = None if request.other is None else self._order[request.other]
                inner[i] = request._replace(leaf=self._order[request.leaf], other=other)
        out.update(zip(inner, self.inner.fetch(list(inner.values()), pin=pin), strict=True))
        for group in nexts.values():
            _, slots, pick = next(iter(group.values()))
            read = self.next_rows.read([pair for pair, _, _ in group.values()], slots, pick, pin=pin)
            out.update(zip(group, read, strict=True))
        return [out[i] for i in range(len(requests))]

    def _of_next(self, request: Request) -> tuple[int, Tensor, Tensor | None] | None:
        """Return pair, slots and pick of a request for next observations; None for other requests."""
        leaf, slots, other, pick = request
        if other is None and pick is None and leaf in self._pair_of:
            return self._pair_of[leaf], self._plain(slots), None
        if other is not None and (other, leaf) in self.pairs:
            return self._pair_of[other], self._plain(slots), self._choice(request)
        return None

    def _plain(self, slots: Tensor) -> Tensor:
        good = slots.dtype is torch.int64 and slots.device == self.device and slots.is_contiguous()
        return slots if good else slots.to(self.device, torch.int64).contiguous()

    def _choice(self, request: Request) -> Tensor:
        _, pick = checked_choice(request)
        return pick if pick.device == self.device and pick.is_contiguous() else pick.to(self.device).contiguous()

    def _fetch_both(self, request: Request, *, pin: bool) -> Tensor:
        """Read both fields of a choice that is not between an observation and its next observation."""
        other, _ = checked_choice(request)
        one, two = self.schema.leaves[request.leaf], self.schema.leaves[other]
        check_alike(one.dtype, one.shape, two.dtype, two.shape)
        first, second = self.fetch([Request(request.leaf, request.slots), Request(other, request.slots)])
        choice = self._choice(request).view(-1, *[1] * len(one.shape))
        chosen = torch.where(choice, as_bits(second), as_bits(first)).view(one.dtype)
        return chosen.pin_memory() if pin else chosen

    def view(self, span: slice) -> list[Tensor]:
        """Return copies of the rows of a span: changes to them do not reach the table."""
        rows = range(*span.indices(self.capacity))
        return self.gather(torch.arange(rows.start, max(rows.start, rows.stop), rows.step, device=self.device))

    def column(self, position: int, rows: int) -> Tensor:
        """Return a copy of one field of the first `rows` rows."""
        (found,) = self.fetch([Request(position, torch.arange(rows, device=self.device))])
        return found

    # -- writing ----------------------------------------------------------------------------------------------

    def prepare(self, flat: Flat, cursor: int) -> tuple[Flat, Comparison]:
        """Compare rows that will be written, and allocate the extra rows that they need.

        Args:
            flat: the rows.
            cursor: the slot where they will most likely go.

        Raises:
            StorageMemoryError: if there is not enough memory; nothing has changed.
        """
        if is_dynamo_compiling():
            return torch.compiler.disable(SingleCopyTable.prepare)(self, flat, cursor)  # type: ignore[no-untyped-call, no-any-return]
        if not self._native:
            flat = Flat([self.inner.clear_of(x) for x in flat.leaves], flat.batch, None)
        elif flat.addresses is None:
            leaves = [x.cpu().contiguous() for x in flat.leaves]
            leaves = [x if x.data_ptr() or not x.numel() else x.clone() for x in leaves]
            flat = Flat(leaves, flat.batch, [x.data_ptr() for x in leaves])
        rows = math.prod(flat.batch)
        found = self.next_rows.compare(flat, rows, cursor)
        if found is None:  # the rows lie in this table
            leaves = [x.clone() for x in flat.leaves]
            flat = Flat(leaves, flat.batch, [x.data_ptr() for x in leaves])
            found = self.next_rows.compare(flat, rows, cursor)
        self.next_rows.reserve(found.need)  # type: ignore[union-attr]  # copies lie elsewhere
        return flat, found  # type: ignore[return-value]

    def write_run(self, run: Run, flat: Flat, found: Comparison, rows: int) -> None:
        """Write rows in ring order.

        Args:
            run: where they go.
            flat: the rows, as `prepare` returned them.
            found: what `prepare` found.
            rows: rows present after the write.
        """
        if is_dynamo_compiling():
            torch.compiler.disable(SingleCopyTable.write_run)(self, run, flat, found, rows)  # type: ignore[no-untyped-call]
            return
        self.next_rows.detach_run(run, found)
        self.inner.write(run, self._kept(flat), self.num_envs)
        self.next_rows.link_run(run, flat, found)
        if not self._warned:
            self._check_savings(rows)

    def _kept(self, flat: Flat) -> Flat:
        addresses = None if flat.addresses is None else [flat.addresses[i] for i in self.kept]
        return Flat([flat.leaves[i] for i in self.kept], flat.batch, addresses)

    def _check_savings(self, rows: int) -> None:
        """Warn once if most rows need an extra row."""
        used = self.next_rows.used
        if used - self.num_envs <= max(rows // 2, _FEW):
            return
        self._warned = True
        msg = (
            f"single_copy saves little: {used} of {rows} rows keep a next observation of their own, since it is "
            "not the observation of the row that follows. Rows of several environments in turns need ndim=2 (rows "
            "[environments, time, ...]); for data without order leave single_copy out"
        )
        warnings.warn(msg, UserWarning, stacklevel=2)

    def edit(self, slots: Tensor, flat: Flat) -> None:
        """Replace the rows at `slots` (int64 `[n]`, of present rows); of duplicates the last one wins.

        Raises:
            StorageMemoryError: if there is no memory for extra rows; nothing has changed.
        """
        if not slots.numel():
            return
        here, rows = last_of_each(slots.cpu(), torch.arange(slots.shape[0], device="cpu"))
        here, order = torch.sort(here)
        leaves = [self.inner.clear_of(x) for x in flat.leaves]
        if not torch.equal(rows[order], torch.arange(slots.shape[0], device="cpu")):
            leaves = [as_bits(x)[rows[order].to(x.device)].view(x.dtype) for x in leaves]
        leaves = [x.to(self.device) for x in leaves]
        obs, nexts = ([leaves[pair[side]] for pair in self.pairs] for side in (1, 0))
        agree = self._agrees(here, nexts, obs)
        before = self._followed_by(here)
        before = before[~torch.isin(before, here)]
        lacking = int((~agree & (self.next_rows.apart[here] < 0)).sum()) + before.shape[0]
        self.next_rows.reserve(lacking)
        self._detach(before)
        at = here.to(self.device)
        count = torch.arange(here.shape[0], device=self.device)
        self.inner.write(Picks(at, count, at), Flat([leaves[i] for i in self.kept], (here.shape[0],), None))
        self._relink(here, nexts, agree)

    def write_column(self, position: int, slots: Tensor, value: Tensor) -> None:
        """Write one field, `[n, *leaf.shape]`, at distinct slots.

        Raises:
            StorageMemoryError: if there is no memory for extra rows; nothing has changed.
        """
        here = slots.cpu()
        if position in self._pair_of:
            nexts = self.next_rows.read(self._all, slots, None, pin=False)
            nexts[self._pair_of[position]] = value.to(self.device)
            self.relink(here, nexts)
            return
        if self._order[position] < len(self.pairs):
            before = self._followed_by(here)
            self.next_rows.reserve(before.shape[0])
            self._detach(before)
        self.inner.write_column(self._order[position], slots, value)

    def relink(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Set the next observations of rows (int64 `[n]`, on the CPU, distinct), `[n, *shape]` for each pair."""
        agree = self._agrees(slots, nexts, None)
        self.next_rows.reserve(int((~agree & (self.next_rows.apart[slots] < 0)).sum()))
        self._relink(slots, nexts, agree)

    def _followed_by(self, slots: Tensor) -> Tensor:
        """Return the rows whose next observation is the observation of one of the slots, int64 on the CPU."""
        before = (slots - self.num_envs) % self.capacity
        return before[self.next_rows.apart[before] == FOLLOWS]

    def _detach(self, slots: Tensor) -> None:
        for part in self._blocks(slots.shape[0]):
            chosen = slots[part]
            self.next_rows.put(chosen, self.next_rows.read(self._all, chosen.to(self.device), None, pin=False))

    def _agrees(self, slots: Tensor, nexts: Sequence[Tensor], obs: Sequence[Tensor] | None) -> Tensor:
        """Return bool `[n]` on the CPU: whether next observations equal the observations that follow them.

        Args:
            slots: int64 `[n]` on the CPU, sorted if there are observations.
            nexts: `[n, *shape]` for each pair.
            obs: observations that will be written to the slots; None keeps the present ones.
        """
        after = (slots + self.num_envs) % self.capacity
        agree = self.next_rows.apart[after] != EMPTY
        for part in self._blocks(slots.shape[0]):
            at = after[part].to(self.device)
            follow = [as_bits(x).index_select(0, at) for x in self.inner.columns[: len(self.pairs)]]
            if obs is not None:
                found = torch.searchsorted(slots, after[part]).clamp_max(slots.shape[0] - 1)
                fresh = torch.nonzero(slots[found] == after[part]).view(-1)
                for old, new in zip(follow, obs, strict=True):
                    old[fresh.to(self.device)] = as_bits(new)[found[fresh].to(self.device)]
            agree[part] &= same_rows([as_bits(x[part]) for x in nexts], follow).cpu()
        return agree

    def _relink(self, slots: Tensor, nexts: Sequence[Tensor], agree: Tensor) -> None:
        self.next_rows.drop(slots[agree])
        alone = torch.nonzero(~agree).view(-1)
        for part in self._blocks(alone.shape[0]):
            at = alone[part].to(self.device)
            self.next_rows.put(slots[alone[part]], [as_bits(x).index_select(0, at).view(x.dtype) for x in nexts])

    def _blocks(self, rows: int) -> Iterator[slice]:
        size = max(1, _BLOCK_BYTES // sum(self.schema.leaves[pair[0]].nbytes for pair in self.pairs))
        return (slice(first, min(first + size, rows)) for first in range(0, rows, size))

    # -- state ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all rows."""
        self.next_rows.reset(0)

    def apart_rows(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return which of the first `rows` rows have an extra row (bool, on the CPU), and a copy of the extra rows.

        The copies, `[n, *shape]` for each pair, are in the order of their slots.
        """
        apart = self.next_rows.apart[:rows] >= 0
        slots = torch.nonzero(apart).view(-1).to(self.device)
        return apart, self.next_rows.read(self._all, slots, None, pin=False)

    def begin(self, apart: Tensor, nexts: Sequence[Tensor]) -> None:
        """Set the next observations of the first rows; the stored fields are in place.

        Args:
            apart: bool `[rows]` on the CPU: rows whose next observation is not the observation that follows.
            nexts: the next observations of these rows, `[n, *shape]` for each pair, in the order of their slots.
        """
        slots = torch.nonzero(apart).view(-1)
        self.next_rows.reset(apart.shape[0])
        self.next_rows.reserve(slots.shape[0])
        self.next_rows.put(slots, nexts)

    def put_apart(self, slots: Tensor, at: Tensor) -> None:
        """Copy the observations of the slots `at` to extra rows of `slots`; int64 on the CPU."""
        self.next_rows.reserve(slots.shape[0])
        here = at.to(self.device)
        columns = self.inner.columns[: len(self.pairs)]
        self.next_rows.put(slots, [as_bits(x).index_select(0, here).view(x.dtype) for x in columns])

    def fill(self, state: dict[str, Any], saved: Pairs) -> None:
        """Copy the columns of a state in, which has the single copies `saved`, or none.

        Raises:
            CheckpointError: if it has other single copies; nothing has changed.
        """
        names = self.schema.column_names
        rows, columns = int(state["rows"]), state["columns"]
        if saved and set(self.pairs) != set(saved):
            theirs, own = ({names[i]: names[j] for i, j in pairs} for pairs in (saved, self.pairs))
            msg = f"the checkpoint has the single copies {theirs}, the storage {own}: make it with the same single_copy"
            raise CheckpointError(msg)
        if not saved:
            nexts = [read_column(columns[names[i]]).to(self.device) for i, _ in self.pairs]
            self._copy_kept(columns, rows)
            self.begin(torch.zeros(rows, dtype=torch.bool, device="cpu"), [value[:0] for value in nexts])
            self.relink(torch.arange(rows, device="cpu"), nexts)
            return
        apart = check_apart(state)
        nexts = [read_column(columns[f"{names[i]}.apart"]) for i, _ in self.pairs]
        self.next_rows.reserve(int(apart.sum()) + self.num_envs)
        self._copy_kept(columns, rows)
        self.begin(apart, nexts)
        capacity, num_envs = int(state["capacity"]), max(1, int(state["lanes"]))
        if capacity != self.capacity and rows == capacity:  # the ring closes elsewhere now: its end gets extra rows
            end = torch.arange(rows - num_envs, rows, device="cpu")
            end = end[~apart[end]]
            self.put_apart(end, _following(rows, num_envs, capacity)[end])

    def _copy_kept(self, columns: dict[str, Any], rows: int) -> None:
        for i, column in zip(self.kept, self.inner.columns, strict=True):
            copy_column(columns[self.schema.column_names[i]], column[:rows])


_BLOCK_ROWS = 4096


def _following(rows: int, num_envs: int, capacity: int) -> Tensor:
    """Return the slot that follows each of the first `rows` slots, int64 on the CPU."""
    after = torch.arange(rows, device="cpu") + num_envs
    return torch.where(after >= capacity, after - capacity, after).clamp_max(max(0, rows - 1))


def fill_plain_table(table: Table, state: dict[str, Any], saved: Pairs) -> None:
    """Copy the columns of a state with single copies into a table without them."""
    names, columns = table.schema.column_names, state["columns"]
    rows, num_envs, capacity = int(state["rows"]), max(1, int(state["lanes"])), int(state["capacity"])
    apart = check_apart(state)
    after = _following(rows, num_envs, capacity)
    nexts = [read_column(columns[f"{names[i]}.apart"]) for i, _ in saved]
    for (position, mate), value in zip(saved, nexts, strict=True):
        copy_column(columns[names[mate]], table.columns[mate][:rows])
        dest, source = as_bits(table.columns[position]), as_bits(table.columns[mate])
        for first in range(0, rows, _BLOCK_ROWS):
            at = after[first : first + _BLOCK_ROWS].to(table.device)
            dest[first : first + at.shape[0]] = source.index_select(0, at)
        dest[torch.nonzero(apart).view(-1).to(table.device)] = as_bits(value).to(table.device)
    done = {position for pair in saved for position in pair}
    for i, name in enumerate(names):
        if i not in done:
            copy_column(columns[name], table.columns[i][:rows])


def read_pairs(state: dict[str, Any], schema: Schema) -> Pairs:
    """Return the pairs of a state; `()` if it has no single copies, or was written by a version without them.

    Raises:
        CheckpointError: if the schema has no such pairs.
    """
    saved = state.get("single_copy")
    if not saved:
        return ()
    leaves = schema.leaves
    try:
        pairs = tuple((int(position), int(mate)) for position, mate in saved)
        flat = [position for pair in pairs for position in pair]
        good = len(set(flat)) == len(flat) and all(0 <= position < len(leaves) for position in flat)
        good = good and all(leaves[i][1:] == leaves[j][1:] and leaves[i].nbytes > 0 for i, j in pairs)
    except (TypeError, ValueError):
        good = False
    if not good:
        msg = f"the checkpoint pairs the fields {saved} of {schema} as single copies: it is damaged"
        raise CheckpointError(msg)
    return pairs


def check_apart(state: dict[str, Any]) -> Tensor:
    """Return the column `apart` of a state; see `checked_apart`."""
    if "apart" not in state["columns"]:
        msg = "the checkpoint's column 'apart' is missing: it is damaged"
        raise CheckpointError(msg)
    num_envs = max(1, int(state["lanes"]))
    return checked_apart(read_column(state["columns"]["apart"]), int(state["rows"]), num_envs, int(state["capacity"]))


def checked_apart(apart: Tensor, rows: int, num_envs: int, capacity: int) -> Tensor:
    """Return the column `apart` of a state, bool `[rows]` on the CPU.

    Raises:
        CheckpointError: if the next observation of a row would be in a slot without a row.
    """
    full = rows == capacity
    apart = apart.cpu()
    good = apart.dtype is torch.bool and apart.shape == (rows,) and rows <= capacity
    if not good or not (full or bool(apart[max(0, rows - num_envs) :].all())) or (full and num_envs > rows):
        msg = (
            f"the checkpoint's single copies ({apart.dtype}{list(apart.shape)} for {rows} rows) refer to rows "
            "that it does not hold: it is damaged"
        )
        raise CheckpointError(msg)
    return apart
