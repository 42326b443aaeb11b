"""States of tables with single copies: checked before they are used, and read into tables of either kind."""

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
from ostinato.core.rows import Flat, Schema, as_bits, column_name, same_rows
from ostinato.errors import CheckpointError, OptionError, SchemaError
from ostinato.storages.memory import HeapMemory
from ostinato.storages.table import Room, Table, check_alike, checked_choice, last_of_each, plan_layout

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Leaf, Path
    from ostinato.storages.memory import Memory
    from ostinato.storages.table import Block

__all__ = [
    "FOLLOWS",
    "NOTHING",
    "Links",
    "MirroredTable",
    "NativeSides",
    "Pairs",
    "PlainSides",
    "Sides",
    "SingleCopy",
    "as_run",
    "check_apart",
    "check_option",
    "checked_apart",
    "chunk_rows",
    "copy_column",
    "dense",
    "fill_mirrored",
    "find_pairs",
    "read_pairs",
]

SingleCopy: TypeAlias = "bool | Mapping[Any, Any]"
Pairs: TypeAlias = "tuple[tuple[int, int], ...]"
"""Positions of leaves: (next field, the field that it is one row later)."""

_NEVER = frozenset({"reward", "done", "terminated", "truncated"})
"""Fields of a transition, not of a state: `("next", "done")` says nothing of the `done` one row later."""
_PREFIX = "next_"


def check_option(single_copy: object) -> dict[Path, Path] | bool:
    """Return the option with its keys as paths.

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
        msg = f"single_copy must name every field once, got {single_copy!r}: a field has one next field and is none"
        raise OptionError(msg)
    return paths


def find_pairs(schema: Schema, naming: Mapping[Path, Path] | None) -> Pairs:
    """Find the pairs of a schema, in its order.

    Args:
        schema: form of the rows.
        naming: paths of next fields -> paths; None looks for `("next", *path)` beside `path`, and for `next_x` beside
            `x`, with equal dtypes and shapes, flags and rewards left out.

    Raises:
        OptionError: if there is no pair, or a field that was named does not exist or has no bytes.
        SchemaError: if the fields of a pair that was named differ in dtype or shape.
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
    """Return the path of the field that a next field would be one row later; `()`, which no pair has, if it is none."""
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
"""The next observation of a slot is the observation of the slot that follows it."""
NOTHING = -2
"""The slot holds no row."""
_CHUNKS = 256


class Links(NamedTuple):
    """What a comparison of a batch with itself found; see `Sides.compare`."""

    flags: Tensor
    """uint8 on the CPU. `[rows]`: a next observation is the observation of the row that follows in the batch; then
    `[min(num_envs, rows)]`: an observation is what lies in the side row of the row before."""
    rows: int
    """Rows of the batch."""
    need: int
    """Side rows that the write takes, if it goes where it was expected."""
    cursor: int
    """Slot of row 0 that was expected."""


class Sides(Protocol):
    """Side rows of a table. One writer at a time, under the buffer's lock; `read` may run beside it, anywhere."""

    apart: Tensor
    """int32 `[capacity]` on the CPU: what each slot says. Read only."""

    @property
    def used(self) -> int:
        """Side rows in use."""

    @property
    def nbytes(self) -> int:
        """Bytes held, the notes of the slots included."""

    def compare(self, flat: Flat, rows: int, cursor: int) -> Links | None:
        """Compare the rows of a batch that is about to be written; None if they lie in memory of the table."""

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more side rows.

        Raises:
            StorageMemoryError: if there is none; nothing has changed.
        """

    def detach_run(self, run: Run, links: Links) -> None:
        """Before a run is written: rows before it, whose next observations would be overwritten, get side rows."""

    def link_run(self, run: Run, flat: Flat, links: Links) -> None:
        """After a run was written: note where the next observations are, and put apart those that are needed."""

    def put(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Give the rows at `slots` (int64 `[n]`, on the CPU, distinct) side rows with `nexts` `[n, *shape]`."""

    def drop(self, slots: Tensor) -> None:
        """Say of rows that their next observation is the one that follows."""

    def begin(self, rows: int) -> None:
        """Forget all rows, and say of the slots `[0, rows)` that their next observation is the one that follows."""

    def read(self, pairs: Sequence[int], slots: Tensor, pick: Tensor | None, *, pin: bool) -> list[Tensor]:
        """Copy next observations, `[n, *shape]` for each pair; observations where `pick` is False.

        Raises:
            IndexError: if a slot is out of range, or holds no row.
        """


def chunk_rows(capacity: int) -> int:
    """Return how many side rows are added at a time: few enough that free ones cost next to nothing."""
    return 1 << max(0, (capacity // _CHUNKS).bit_length() - 1)


@final
class NativeSides:
    """Side rows of a CPU table, in the compiled part; see `Sides`.

    Args:
        table: where the rows are; the observations are its first fields, in the order of `pairs`.
        pairs: positions in the full schema.
        num_envs: distance in slots from a row to the next row of its environment.
        memory: where chunks come from.
    """

    def __init__(self, table: Table, pairs: Pairs, num_envs: int, memory: Memory) -> None:
        with torch.inference_mode(mode=False):
            self.apart = torch.empty(table.capacity, dtype=torch.int32, device="cpu")
        self._pairs = pairs
        self._memory = memory
        self._chunk_rows = chunk_rows(table.capacity)
        self._native: Any = backend.native.SingleCopy(  # type: ignore[union-attr]  # who makes one has looked
            table.capacity, num_envs, self._chunk_rows, self.apart.data_ptr()
        )
        self._capacity = table.capacity
        self._num_envs = num_envs
        self._table = table  # the compiled part reads its memory
        self._sizes: list[int] = []
        self._chunks: list[list[Tensor]] = []
        self._rooms: dict[tuple[int, ...], Room] = {}
        for column in table.columns:
            self._native.guard(column.data_ptr(), column.stride(0) * column.itemsize * table.capacity)
        self._register(table, len(pairs))
        self._native.clear()

    def _register(self, table: Table, count: int) -> None:
        """Divide the observations into groups that lie side by side, and number them in the order of the pairs."""
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
        """Side rows in use."""
        return int(self._native.used)

    @property
    def nbytes(self) -> int:
        """Bytes of chunks, notes and lists."""
        return self.apart.nbytes + int(self._native.nbytes) + sum(x.nbytes for chunk in self._chunks for x in chunk)

    def compare(self, flat: Flat, rows: int, cursor: int) -> Links | None:
        """Compare a batch in one pass over its memory."""
        addresses = flat.addresses or []
        flags = torch.empty(rows + min(self._num_envs, rows), dtype=torch.uint8, device="cpu")
        at = flags.data_ptr()
        obs, nexts = [addresses[i] for _, i in self._pairs], [addresses[i] for i, _ in self._pairs]
        need = self._native.compare(cursor, rows, obs, nexts, at, at + rows)
        return None if need < 0 else Links(flags, rows, need, cursor)

    def reserve(self, rows: int) -> None:
        """Add chunks. Never more than one side row for each slot is needed."""
        while self._native.allocated - self._native.used < rows and self._native.allocated < self._capacity:
            number = len(self._chunks)
            self._memory.check(self._chunk_rows * sum(self._sizes))
            chunk = [
                self._memory.block(f"block-side{number}.{group}.bin", self._chunk_rows * size)
                for group, size in enumerate(self._sizes)
            ]
            self._native.add_chunk([block.data_ptr() for block in chunk])
            self._chunks.append(chunk)

    def detach_run(self, run: Run, links: Links) -> None:
        """Detach the rows before a run; there are some only where edits made them follow, or writing jumps."""
        lacking = self._native.detach_run(run.start, run.rows, links.need)
        if lacking:
            self.reserve(self._native.allocated - self._native.used + lacking)
            self._native.detach_run(run.start, run.rows, links.need)

    def link_run(self, run: Run, flat: Flat, links: Links) -> None:
        """Link a run."""
        addresses = flat.addresses or []
        expected = (run.start - run.skip) % run.capacity == links.cursor and not run.skip
        nexts, agree = [addresses[i] for i, _ in self._pairs], links.flags.data_ptr()
        relink = agree + links.rows if expected else 0
        self._native.link_run(run.start, run.rows, run.skip, nexts, agree, relink)

    def put(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Copy rows aside."""
        if slots.numel():
            dense = [value.contiguous() for value in nexts]
            self._native.set_rows(slots.data_ptr(), slots.shape[0], [value.data_ptr() for value in dense])

    def drop(self, slots: Tensor) -> None:
        """Give side rows back."""
        self._native.link_rows(slots.data_ptr(), slots.shape[0])

    def begin(self, rows: int) -> None:
        """Start anew."""
        self._native.clear()
        self.apart[:rows] = FOLLOWS

    def read(self, pairs: Sequence[int], slots: Tensor, pick: Tensor | None, *, pin: bool) -> list[Tensor]:
        """Copy, without the lock: what changed meanwhile is copied anew."""
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
class PlainSides:
    """Side rows of a table on any device; see `Sides`. They lie in memory of that device, mapped tables included.

    Args:
        table: where the rows are; the observations are its first fields, in the order of `pairs`.
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
            self.apart = torch.full((self._capacity,), NOTHING, dtype=torch.int32, device="cpu")
            self._shown = self.apart.to(self._device)  # the same tensor on the CPU
        self._rows = [column[:0].contiguous() for column in self._obs]
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """Side rows in use."""
        return int(self._rows[0].shape[0]) - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of side rows and notes."""
        notes = self.apart.nbytes + (0 if self._shown is self.apart else self._shown.nbytes)
        return notes + sum(rows.nbytes for rows in self._rows) + 8 * len(self._free)

    def compare(self, flat: Flat, rows: int, cursor: int) -> Links:
        """Compare a batch on the device; its outcome comes to the host in one piece."""
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
        return Links(found.view(torch.uint8), rows, need, cursor)

    def _sources(self, flat: Flat, rows: int, side: int) -> list[Tensor]:
        picked = [as_bits(flat.leaves[pair[side]]) for pair in self._pairs]
        return [
            value.reshape(rows, *column.shape[1:]).to(self._device)
            for value, column in zip(picked, self._obs, strict=True)
        ]

    def reserve(self, rows: int) -> None:
        """Take more memory and copy the side rows there. Never more than one for each slot is needed."""
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

    def detach_run(self, run: Run, links: Links) -> None:
        """Detach the rows before a run."""
        before, outside = self._before(run)
        before = before[outside & (self.apart[before] == FOLLOWS)]
        if before.numel():
            self.reserve(before.shape[0] + links.need)
            after = ((before + self._num_envs) % self._capacity).to(self._device)
            self.put(before, [x.index_select(0, after) for x in self._obs])

    def _before(self, run: Run) -> tuple[Tensor, Tensor]:
        """Return the rows before a run, int64 `[min(num_envs, rows)]` on the CPU, and which of them are not in it."""
        count = min(self._num_envs, run.rows)
        before = ring_range((run.start - self._num_envs) % self._capacity, count, self._capacity)
        return before, (before - run.start) % self._capacity >= run.rows

    def link_run(self, run: Run, flat: Flat, links: Links) -> None:
        """Link a run."""
        if run.start == links.cursor and not run.skip:
            before, outside = self._before(run)
            self.drop(before[outside & links.flags[links.rows :].bool() & (self.apart[before] >= 0)])
        slots, agree = run.slots(), links.flags[run.skip : links.rows].bool()
        self.drop(slots)
        alone = torch.nonzero(~agree).view(-1)
        at = (alone + run.skip).to(self._device)
        self.put(slots[alone], [x.index_select(0, at) for x in self._sources(flat, run.total, 0)])

    def put(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Copy rows aside."""
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
            self._say(slots, rows)

    def drop(self, slots: Tensor) -> None:
        """Give side rows back."""
        with self._lock:
            rows = self.apart[slots]
            self._free += rows[rows >= 0].tolist()
            self._say(slots, torch.full_like(rows, FOLLOWS))

    def _say(self, slots: Tensor, rows: Tensor) -> None:
        self.apart[slots] = rows
        if self._shown is not self.apart:
            self._shown[slots.to(self._device)] = rows.to(self._device)

    def begin(self, rows: int) -> None:
        """Start anew."""
        with self._lock:
            self.apart.fill_(NOTHING)
            self.apart[:rows] = FOLLOWS
            self._shown.fill_(NOTHING)  # filled, not copied from the CPU: nothing waits
            self._shown[:rows] = FOLLOWS
            self._free = list(range(int(self._rows[0].shape[0]) - 1, -1, -1))

    def read(self, pairs: Sequence[int], slots: Tensor, pick: Tensor | None, *, pin: bool) -> list[Tensor]:
        """Copy; nothing meets the host."""
        with self._lock:
            rows = self._shown.index_select(0, slots)
            if self._device.type == "cpu" and bool((rows == NOTHING).any()):
                msg = "a slot holds no row"
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
    """Return a placement of a ring.

    Raises:
        OptionError: if it is of another kind: the row that follows would not be the next one.
    """
    if isinstance(placement, Run):
        return placement
    msg = "single_copy takes rows in ring order (Run), got Picks: the row that follows would not be the next one"
    raise OptionError(msg)


def _kept_leaves(schema: Schema, pairs: Pairs) -> list[int]:
    """Return the positions of the leaves that are stored row by row: those that next ones follow from come first."""
    nexts, obs = {pair[0] for pair in pairs}, [pair[1] for pair in pairs]
    return [*obs, *(i for i in range(len(schema.leaves)) if i not in nexts and i not in obs)]


@final
class MirroredTable:
    """Memory for `capacity` rows of a schema, in which some fields are other fields one row later.

    Args:
        schema: form of a row.
        capacity: rows.
        num_envs: distance in slots from a row to the next row of its environment.
        pairs: which fields; see `find_pairs`.
        memory: where to take memory from.
        packed: see `plan_layout`.
        layout: that of the rows kept, where files have one already.
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
        self.inner = Table.allocate(inner, capacity, memory, self.layout)
        self.device = self.inner.device
        self._native = backend.native is not None and self.device.type == "cpu"
        self.sides: Sides = (
            NativeSides(self.inner, pairs, num_envs, memory)
            if self._native
            else PlainSides(self.inner, pairs, num_envs)
        )
        self._all = tuple(range(len(pairs)))
        places = {position: k for k, position in enumerate([*self.kept, *(pair[0] for pair in pairs)])}
        self._order = [places[i] for i in range(len(schema.leaves))]
        self._pair_of = {pair[0]: k for k, pair in enumerate(pairs)}
        self._rows = 0
        self._warned = False

    @property
    def nbytes(self) -> int:
        """Bytes held: rows, side rows, and what each slot says."""
        return self.inner.nbytes + self.sides.nbytes

    # -- reading ----------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy rows, whole; see `Table.gather`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(MirroredTable.gather)(self, slots, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        found = self.inner.gather(slots, pin=pin)
        found += self.sides.read(self._all, slots, None, pin=pin)
        return [found[i] for i in self._order]

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy other rows for each field; see `Table.fetch`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(MirroredTable.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        out: dict[int, Tensor] = {}
        inner: dict[int, Request] = {}
        sides: dict[tuple[int, int], dict[int, tuple[int, Tensor, Tensor | None]]] = {}
        for i, request in enumerate(requests):
            asked = self._of_sides(request)
            if asked is not None:
                sides.setdefault((id(asked[1]), id(asked[2])), {})[i] = asked
            elif request.leaf in self._pair_of or request.other in self._pair_of:
                out[i] = self._fetch_both(request, pin=pin)
            else:
                other = None if request.other is None else self._order[request.other]
                inner[i] = request._replace(leaf=self._order[request.leaf], other=other)
        out.update(zip(inner, self.inner.fetch(list(inner.values()), pin=pin), strict=True))
        for group in sides.values():
            _, slots, pick = next(iter(group.values()))
            read = self.sides.read([pair for pair, _, _ in group.values()], slots, pick, pin=pin)
            out.update(zip(group, read, strict=True))
        return [out[i] for i in range(len(requests))]

    def _of_sides(self, request: Request) -> tuple[int, Tensor, Tensor | None] | None:
        """Return pair, slots and pick of a request that side rows answer; None if others do."""
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
        """Read both fields of a choice that is not between an observation and its next one."""
        other, _ = checked_choice(request)
        one, two = self.schema.leaves[request.leaf], self.schema.leaves[other]
        check_alike(one.dtype, one.shape, two.dtype, two.shape)
        first, second = self.fetch([Request(request.leaf, request.slots), Request(other, request.slots)])
        choice = self._choice(request).view(-1, *[1] * len(one.shape))
        chosen = torch.where(choice, as_bits(second), as_bits(first)).view(one.dtype)
        return chosen.pin_memory() if pin else chosen

    def view(self, span: slice) -> list[Tensor]:
        """Return copies of the rows of a span: what is edited in them is not edited here."""
        rows = range(*span.indices(self.capacity))
        return self.gather(torch.arange(rows.start, max(rows.start, rows.stop), rows.step, device=self.device))

    def column(self, position: int, rows: int) -> Tensor:
        """Return a copy of one field of the first `rows` rows."""
        (found,) = self.fetch([Request(position, torch.arange(rows, device=self.device))])
        return found

    # -- writing ----------------------------------------------------------------------------------------------

    def prepare(self, flat: Flat, cursor: int) -> tuple[Flat, Links]:
        """Compare rows that are about to be written, and make room for those that must lie apart.

        Args:
            flat: the rows.
            cursor: where they will go, most likely.

        Raises:
            StorageMemoryError: if there is no room; nothing has changed.
        """
        if is_dynamo_compiling():
            return torch.compiler.disable(MirroredTable.prepare)(self, flat, cursor)  # type: ignore[no-untyped-call, no-any-return]
        if not self._native:
            flat = Flat([self.inner.clear_of(x) for x in flat.leaves], flat.batch, None)
        elif flat.addresses is None:
            leaves = [x.cpu().contiguous() for x in flat.leaves]
            leaves = [x if x.data_ptr() or not x.numel() else x.clone() for x in leaves]
            flat = Flat(leaves, flat.batch, [x.data_ptr() for x in leaves])
        rows = math.prod(flat.batch)
        links = self.sides.compare(flat, rows, cursor)
        if links is None:  # they lie in this very table
            leaves = [x.clone() for x in flat.leaves]
            flat = Flat(leaves, flat.batch, [x.data_ptr() for x in leaves])
            links = self.sides.compare(flat, rows, cursor)
        self.sides.reserve(links.need)  # type: ignore[union-attr]  # copies lie elsewhere
        return flat, links  # type: ignore[return-value]

    def write_run(self, run: Run, flat: Flat, num_envs: int, links: Links) -> None:
        """Write rows in ring order, as `prepare` returned them."""
        if is_dynamo_compiling():
            torch.compiler.disable(MirroredTable.write_run)(self, run, flat, num_envs, links)  # type: ignore[no-untyped-call]
            return
        self.sides.detach_run(run, links)
        self.inner.write(run, self._kept(flat), num_envs)
        self.sides.link_run(run, flat, links)
        self._rows = min(max(self._rows, run.start + run.rows), self.capacity)
        if not self._warned:
            self._look_at_size()

    def _kept(self, flat: Flat) -> Flat:
        addresses = None if flat.addresses is None else [flat.addresses[i] for i in self.kept]
        return Flat([flat.leaves[i] for i in self.kept], flat.batch, addresses)

    def _look_at_size(self) -> None:
        used = self.sides.used
        if used - self.num_envs <= max(self._rows // 2, _FEW):
            return
        self._warned = True
        msg = (
            f"single_copy saves little: {used} of {self._rows} rows keep a next observation of their own, since it is "
            "not the observation of the row that follows. Rows of several environments in turns need ndim=2 (rows "
            "[time, environments, ...]); for data without order leave single_copy out"
        )
        warnings.warn(msg, UserWarning, stacklevel=2)

    def edit(self, slots: Tensor, flat: Flat) -> None:
        """Replace the rows at `slots` (int64 `[n]`, of rows present); of duplicates the last one wins.

        Raises:
            StorageMemoryError: if there is no room for what must lie apart; nothing has changed.
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
        lacking = int((~agree & (self.sides.apart[here] < 0)).sum()) + before.shape[0]
        self.sides.reserve(lacking)
        self._detach(before)
        at = here.to(self.device)
        count = torch.arange(here.shape[0], device=self.device)
        self.inner.write(Picks(at, count, at), Flat([leaves[i] for i in self.kept], (here.shape[0],), None))
        self._relink(here, nexts, agree)

    def write_column(self, position: int, slots: Tensor, value: Tensor) -> None:
        """Write one field, `[n, *leaf.shape]`, at distinct slots.

        Raises:
            StorageMemoryError: if there is no room for what must lie apart; nothing has changed.
        """
        here = slots.cpu()
        if position in self._pair_of:
            nexts = self.sides.read(self._all, slots, None, pin=False)
            nexts[self._pair_of[position]] = value.to(self.device)
            self.relink(here, nexts)
            return
        if self._order[position] < len(self.pairs):
            before = self._followed_by(here)
            self.sides.reserve(before.shape[0])
            self._detach(before)
        self.inner.write_column(self._order[position], slots, value)

    def relink(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Give rows (int64 `[n]`, on the CPU, distinct) the next observations `nexts`, `[n, *shape]` for each pair."""
        agree = self._agrees(slots, nexts, None)
        self.sides.reserve(int((~agree & (self.sides.apart[slots] < 0)).sum()))
        self._relink(slots, nexts, agree)

    def _followed_by(self, slots: Tensor) -> Tensor:
        """Return the rows whose next observation is the observation in one of the slots, int64 on the CPU."""
        before = (slots - self.num_envs) % self.capacity
        return before[self.sides.apart[before] == FOLLOWS]

    def _detach(self, slots: Tensor) -> None:
        for part in self._blocks(slots.shape[0]):
            chosen = slots[part]
            self.sides.put(chosen, self.sides.read(self._all, chosen.to(self.device), None, pin=False))

    def _agrees(self, slots: Tensor, nexts: Sequence[Tensor], obs: Sequence[Tensor] | None) -> Tensor:
        """Return bool `[n]` on the CPU: whether next observations equal the observations that will follow them.

        Args:
            slots: int64 `[n]` on the CPU, sorted if there are observations.
            nexts: `[n, *shape]` for each pair.
            obs: observations that will be written to the slots; None leaves those that are there.
        """
        after = (slots + self.num_envs) % self.capacity
        agree = self.sides.apart[after] != NOTHING
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
        self.sides.drop(slots[agree])
        alone = torch.nonzero(~agree).view(-1)
        for part in self._blocks(alone.shape[0]):
            at = alone[part].to(self.device)
            self.sides.put(slots[alone[part]], [as_bits(x).index_select(0, at).view(x.dtype) for x in nexts])

    def _blocks(self, rows: int) -> Iterator[slice]:
        size = max(1, _BLOCK_BYTES // sum(self.schema.leaves[pair[0]].nbytes for pair in self.pairs))
        return (slice(first, min(first + size, rows)) for first in range(0, rows, size))

    # -- state ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all rows."""
        self.sides.begin(0)
        self._rows = 0

    def apart_rows(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return which of the first `rows` rows keep a next observation apart (bool, on the CPU), and a copy of those.

        The copies, `[n, *shape]` for each pair, are in the order of their slots.
        """
        apart = self.sides.apart[:rows] >= 0
        slots = torch.nonzero(apart).view(-1).to(self.device)
        return apart, self.sides.read(self._all, slots, None, pin=False)

    def begin(self, apart: Tensor, nexts: Sequence[Tensor]) -> None:
        """Take the first rows as they lie in the kept columns for the rows present.

        Args:
            apart: bool `[rows]` on the CPU: rows whose next observation is not the observation that follows.
            nexts: theirs, `[n, *shape]` for each pair, in the order of their slots.
        """
        slots = torch.nonzero(apart).view(-1)
        self.sides.begin(apart.shape[0])
        self.sides.reserve(slots.shape[0])
        self.sides.put(slots, nexts)
        self._rows = apart.shape[0]

    def put_apart(self, slots: Tensor, at: Tensor) -> None:
        """Put the observations in the slots `at` apart, as next ones of the rows at `slots`; int64 on the CPU."""
        self.sides.reserve(slots.shape[0])
        here = at.to(self.device)
        columns = self.inner.columns[: len(self.pairs)]
        self.sides.put(slots, [as_bits(x).index_select(0, here).view(x.dtype) for x in columns])


_BLOCK_ROWS = 4096


def dense(source: Any) -> Tensor:
    """Return a column of a state as a tensor."""
    return source if isinstance(source, Tensor) else source.read()


def copy_column(source: Any, dest: Tensor) -> None:
    """Copy a column of a state to where it belongs, unless it lies there."""
    if not isinstance(source, Tensor):
        source.read_into(dest)
    elif dest.numel() and source.data_ptr() != dest.data_ptr():
        dest.copy_(source)


def read_pairs(state: dict[str, Any], schema: Schema) -> Pairs:
    """Return the pairs of a state; none if it has no single copies, or was written before there were any.

    Raises:
        CheckpointError: if they fit no such rows.
    """
    saved = state.get("single_copy") or []
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
    """Return the notes of a state, having checked them; see `checked_apart`."""
    if "apart" not in state["columns"]:
        msg = "the checkpoint's column 'apart' is missing: it is damaged"
        raise CheckpointError(msg)
    num_envs = max(1, int(state["lanes"]))
    return checked_apart(dense(state["columns"]["apart"]), int(state["rows"]), num_envs, int(state["capacity"]))


def checked_apart(apart: Tensor, rows: int, num_envs: int, capacity: int) -> Tensor:
    """Return the notes of a state, bool `[rows]` on the CPU, having checked that they lead to no row that is not there.

    Raises:
        CheckpointError: otherwise.
    """
    full = rows == capacity
    apart = apart.cpu()
    good = apart.dtype is torch.bool and apart.shape == (rows,) and rows <= capacity
    if not good or not (full or bool(apart[max(0, rows - num_envs) :].all())) or (full and num_envs > rows):
        msg = (
            f"the checkpoint's notes on single copies ({apart.dtype}{list(apart.shape)} for {rows} rows) lead to rows "
            "that it does not hold: it is damaged"
        )
        raise CheckpointError(msg)
    return apart


def fill_mirrored(table: Table | MirroredTable, state: dict[str, Any], saved: Pairs) -> None:
    """Copy the columns of a state into a table, where one of them, or both, have single copies.

    Raises:
        CheckpointError: if they have other ones; nothing is changed.
    """
    mine: Pairs = table.pairs if isinstance(table, MirroredTable) else ()
    if mine and saved and set(mine) != set(saved):
        names = [column_name(leaf.path, i) for i, leaf in enumerate(table.schema.leaves)]
        theirs, own = ({names[i]: names[j] for i, j in pairs} for pairs in (saved, mine))
        msg = f"the checkpoint has the single copies {theirs}, the storage {own}: make it with the same single_copy"
        raise CheckpointError(msg)
    if saved:
        _fill_from_single(table, state, saved)
    elif isinstance(table, MirroredTable):
        _fill_from_plain(table, state)


def _fill_from_single(table: Table | MirroredTable, state: dict[str, Any], saved: Pairs) -> None:
    rows, num_envs, capacity = int(state["rows"]), max(1, int(state["lanes"])), int(state["capacity"])
    columns = state["columns"]
    apart = check_apart(state)
    names = [f"{column_name(table.schema.leaves[i].path, i)}.apart" for i, _ in saved]
    nexts = [dense(columns[name]) for name in names]
    after = torch.arange(rows, device="cpu") + num_envs
    after = torch.where(after >= capacity, after - capacity, after).clamp_max(max(0, rows - 1))
    if isinstance(table, MirroredTable):
        nexts = [nexts[saved.index(pair)] for pair in table.pairs]
        table.sides.reserve(int(apart.sum()) + num_envs)
        _copy_kept(table, columns, rows)
        table.begin(apart, nexts)
        if capacity != table.capacity and rows == capacity:  # the ring closes elsewhere now: its seam lies apart
            seam = torch.arange(rows - num_envs, rows, device="cpu")
            table.put_apart(seam[~apart[seam]], after[seam[~apart[seam]]])
        return
    for (position, mate), aside in zip(saved, nexts, strict=True):
        leaf = table.schema.leaves[mate]
        copy_column(columns[column_name(leaf.path, mate)], table.columns[mate][:rows])
        dest, source = as_bits(table.columns[position]), as_bits(table.columns[mate])
        for first in range(0, rows, _BLOCK_ROWS):
            at = after[first : first + _BLOCK_ROWS].to(table.device)
            dest[first : first + at.shape[0]] = source.index_select(0, at)
        dest[torch.nonzero(apart).view(-1).to(table.device)] = as_bits(aside).to(table.device)
    done = {position for pair in saved for position in pair}
    for i, leaf in enumerate(table.schema.leaves):
        if i not in done:
            copy_column(columns[column_name(leaf.path, i)], table.columns[i][:rows])


def _fill_from_plain(table: MirroredTable, state: dict[str, Any]) -> None:
    rows, columns = int(state["rows"]), state["columns"]
    leaves = table.schema.leaves
    nexts = [dense(columns[column_name(leaves[i].path, i)]).to(table.device) for i, _ in table.pairs]
    _copy_kept(table, columns, rows)
    table.begin(torch.zeros(rows, dtype=torch.bool, device="cpu"), [value[:0] for value in nexts])
    table.relink(torch.arange(rows, device="cpu"), nexts)


def _copy_kept(table: MirroredTable, columns: dict[str, Any], rows: int) -> None:
    for i, column in zip(table.kept, table.inner.columns, strict=True):
        copy_column(columns[column_name(table.schema.leaves[i].path, i)], column[:rows])
