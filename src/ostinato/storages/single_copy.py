"""Next observations that are stored once, as the observation of the row that follows (`single_copy`).

A next observation that is not bit by bit equal to the observation of the following row is stored in an *extra row*.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core.kinds import show_field, show_path
from ostinato.core.records import Run
from ostinato.core.rows import as_bits, same_rows, turn_rows
from ostinato.errors import CheckpointError, OptionError, SchemaError
from ostinato.storages.columns import Saved, StorageColumn, check_column, targets
from ostinato.storages.memory import HeapMemory
from ostinato.storages.table import Room, copy_column, last_of_each, read_column, row_stride

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Flat, Leaf, Path, Schema
    from ostinato.storages.columns import Fields
    from ostinato.storages.memory import Memory
    from ostinato.storages.table import Table

Pairs: TypeAlias = "tuple[tuple[int, int], ...]"
"""Positions of leaves: (next field, the field that it equals one row later)."""

_NEVER = frozenset({"reward", "done", "terminated", "truncated"})
"""Fields of a transition, not of a state: `("next", "done")` is unrelated to the `done` one row later."""
_PREFIX = "next_"


def next_kinds(single_copy: object) -> list[NextColumns]:
    """Return the kind of column of the option `single_copy`; none if it is False.

    Raises:
        OptionError: if it is neither a bool nor a mapping of keys to keys.
    """
    if isinstance(single_copy, bool):
        return [NextColumns(None)] if single_copy else []
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
    return [NextColumns(paths)]


def find_pairs(schema: Schema, naming: Mapping[Path, Path] | None, taken: Mapping[int, StorageColumn]) -> Pairs:
    """Find the pairs of fields in a schema, in its order.

    Args:
        schema: of the rows.
        naming: paths of next fields -> paths; None looks for `("next", *path)` beside `path`, and for `next_x` beside
            `x`, with equal dtypes and shapes, except for flags and rewards; a field is in one pair at most.
        taken: fields that have a kind of column already.

    Raises:
        OptionError: if there is no pair, or a named field does not exist or has no bytes, or is no tensor.
        SchemaError: if the fields of a named pair differ in dtype or shape.
    """
    leaves = {leaf.path: leaf for leaf in schema.leaves}
    bare = {schema.leaves[i].path: kind.option for i, kind in taken.items() if not kind.row_tensors}
    if naming is None:
        used = {schema.leaves[i].path for i in taken}
        found: dict[Path, Path] = {}
        paired: set[Path] = set()
        for path, leaf in leaves.items():
            mate = leaves.get(_mate(path))
            if mate is None or path in used or mate.path in bare or {path, mate.path} & paired:
                continue
            if leaf[1:] == mate[1:] and leaf.nbytes:
                found[path] = mate.path
                paired |= {path, mate.path}
        if not found:
            raise OptionError(_none_found(schema))
        naming = found
    for path in (*naming, *naming.values()):
        if path not in leaves:
            known = ", ".join(map(show_path, leaves))
            msg = f"single_copy names the {show_field(path)}, but the fields are {known}"
            raise OptionError(msg)
        if path in bare:
            msg = f"single_copy pairs fields that are a tensor in each row, got {show_field(path)} ({bare[path]})"
            raise OptionError(msg)
    for path, other in naming.items():
        _check_alike(leaves[path], leaves[other])
    return tuple(sorted((schema.find(path), schema.find(other)) for path, other in naming.items()))


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
_BLOCK_BYTES = 16 << 20
_FEW = 32


class Comparison(NamedTuple):
    """Which observations of a batch repeat others."""

    flat: Flat
    """The batch, of which the fields of pairs are contiguous on the CPU."""
    nexts: list[int]
    """Addresses of its next observations."""
    flags: Tensor
    """uint8 on the CPU: `[rows]`, whether a next observation equals the observation of the following row of the batch;
    then `[min(num_envs, rows)]`, whether an observation equals the extra row of the row before it."""
    rows: int
    """Rows of the batch."""
    need: int
    """Extra rows that the write takes, if it goes to the expected slots."""
    cursor: int
    """Expected slot of row 0."""


class _Links(NamedTuple):
    """What the next observations of rows are after a write: of those written, and of those that they follow."""

    placement: Placement
    slots: Tensor
    """int64 `[n]` on the CPU, distinct."""
    nexts: list[Tensor]
    """Their next observations, `[n, *shape]` for each pair."""
    agree: Tensor
    """bool `[n]` on the CPU: which are the observation of the following row."""


def _chunk_rows(capacity: int) -> int:
    """Return how many extra rows are allocated at a time: few, so that unused ones take little memory."""
    return 1 << max(0, (capacity // _CHUNKS).bit_length() - 1)


@final
class NativeExtraRows:
    """The extra rows of a CPU table, in the native extension.

    One writer at a time, under the lock of the buffer; `read` may run in other threads meanwhile.

    Args:
        table: memory of the rows.
        places: positions of the observations in it, in the order of the pairs.
        num_envs: distance in slots from a row to the next row of its environment.
        memory: allocates the extra rows.
    """

    def __init__(self, table: Table, places: Sequence[int], num_envs: int, memory: Memory) -> None:
        with torch.inference_mode(mode=False):
            self.apart = torch.empty(table.capacity, dtype=torch.int32, device="cpu")
            """int32 `[capacity]`, read only: the extra row of each slot, `FOLLOWS` or `EMPTY`."""
        self._memory = memory
        self._chunk_rows = _chunk_rows(table.capacity)
        self.native: Any = backend.native.SingleCopy(  # type: ignore[union-attr]  # the caller has checked
            table.capacity, num_envs, self._chunk_rows, self.apart.data_ptr()
        )
        self._capacity = table.capacity
        self._num_envs = num_envs
        self._table = table  # native code reads its memory
        self._chunks: list[list[Tensor]] = []
        self._rooms: dict[tuple[int, ...], Room] = {}
        for column in table.columns:
            self.native.guard(column.data_ptr(), column.stride(0) * column.itemsize * table.capacity)
        self._leaves = [table.schema.leaves[place] for place in places]
        self._sizes = [leaf.nbytes for leaf in self._leaves]
        for place, size in zip(places, self._sizes, strict=True):
            column = table.columns[place]
            group = self.native.add_group(column.data_ptr(), row_stride(column), size)
            self.native.add_field(group, 0, size)
        self.native.clear()

    @property
    def used(self) -> int:
        """Extra rows in use."""
        return int(self.native.used)

    @property
    def nbytes(self) -> int:
        """Bytes of extra rows, `apart` and lists."""
        return self.apart.nbytes + int(self.native.nbytes) + sum(x.nbytes for chunk in self._chunks for x in chunk)

    def compare(self, flat: Flat, pairs: Pairs, cursor: int) -> Comparison:
        """Compare a batch before it is written to the slots from the cursor on; one pass over its memory."""
        if flat.addresses is None:
            flat = _on_host(flat, pairs)
        at = flat.addresses or []
        nexts, obs = [at[i] for i, _ in pairs], [at[i] for _, i in pairs]
        rows = math.prod(flat.batch)
        flags = torch.empty(rows + min(self._num_envs, rows), dtype=torch.uint8, device="cpu")
        agree = flags.data_ptr()
        need = self.native.compare(cursor, rows, obs, nexts, agree, agree + rows)
        if need < 0:  # the rows lie in the memory of the table, or so close behind it that they seem to
            return self.compare(flat._replace(leaves=[x.clone() for x in flat.leaves], addresses=None), pairs, cursor)
        return Comparison(flat, nexts, flags, rows, need, cursor)

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` more extra rows, at most one for each slot.

        Raises:
            StorageMemoryError: if there is not enough; nothing has changed.
        """
        while self.native.allocated - self.native.used < rows and self.native.allocated < self._capacity:
            number = len(self._chunks)
            self._memory.check(self._chunk_rows * sum(self._sizes))
            chunk = [
                self._memory.block(f"block-side{number}.{pair}.bin", self._chunk_rows * size)
                for pair, size in enumerate(self._sizes)
            ]
            self.native.add_chunk([block.data_ptr() for block in chunk])
            self._chunks.append(chunk)

    def detach_run(self, run: Run, found: Comparison) -> None:
        """Before a run is written: copy next observations that it would overwrite to extra rows.

        There are some after edits, or where the run does not continue the last one.
        """
        lacking = self.native.detach_run(run.start, run.rows, found.need)
        if lacking:
            self.reserve(self.native.allocated - self.native.used + lacking)
            self.native.detach_run(run.start, run.rows, found.need)

    def link_run(self, run: Run, found: Comparison) -> None:
        """After a run was written: record where its next observations are, and fill the extra rows that it needs."""
        expected = (run.start - run.skip) % run.capacity == found.cursor and not run.skip
        agree = found.flags.data_ptr()
        relink = agree + found.rows if expected else 0
        self.native.link_run(run.start, run.rows, run.skip, found.nexts, agree, relink)

    def put(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Store `nexts` `[n, *shape]` in extra rows of `slots` (int64 `[n]`, on the CPU, distinct)."""
        if slots.numel():
            dense = [value.contiguous() for value in nexts]
            self.native.set_rows(slots.data_ptr(), slots.shape[0], _addresses(dense))

    def drop(self, slots: Tensor) -> None:
        """Free the extra rows of slots: their next observations are the ones that follow."""
        self.native.link_rows(slots.data_ptr(), slots.shape[0])

    def reset(self, rows: int) -> None:
        """Free all extra rows; the slots `[0, rows)` have next observations that follow, the others are empty."""
        self.native.clear()
        self.apart[:rows] = FOLLOWS

    def read(self, pairs: Sequence[int], slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy next observations, `[n, *shape]` for each pair.

        Without a lock; rows that changed meanwhile are copied again.

        Raises:
            IndexError: if a slot is out of range or empty.
        """
        room = self._rooms.get(key := tuple(pairs))
        if room is None:
            leaves = [self._leaves[i] for i in pairs]
            self._rooms[key] = room = Room([(leaf.shape, leaf.dtype) for leaf in leaves])
        rows = slots.shape[0]
        out = room.make(rows, pin=pin)
        self.native.gather(list(pairs), slots.data_ptr(), 0, rows, _addresses(out))
        return out


@final
class TorchExtraRows:
    """The same for observations of any kind on any device, with torch. Extra rows lie in memory of the device.

    Args:
        leaves: the observations.
        readers: what reads each of them at slots; see `Fields.reader`.
        capacity: slots.
        num_envs: distance in slots from a row to the next row of its environment.
        device: of the rows.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        readers: Sequence[Callable[[Tensor], Tensor]],
        capacity: int,
        num_envs: int,
        device: torch.device,
    ) -> None:
        self._readers = readers
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._num_envs, self._capacity, self._device = num_envs, capacity, device
        self._lock = threading.Lock()
        with torch.inference_mode(mode=False):
            self.apart = torch.full((self._capacity,), EMPTY, dtype=torch.int32, device="cpu")
            self._apart = self.apart.to(self._device)  # the same tensor on the CPU
            self._rows = [as_bits(torch.empty((0, *x.shape), dtype=x.dtype, device=device)) for x in leaves]
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

    def reserve(self, rows: int) -> None:
        """Allocate more memory, at most one row for each slot, and copy the extra rows to it."""
        room = int(self._rows[0].shape[0])
        wanted = min(self._capacity, self.used + rows)
        if wanted <= room:
            return
        size = min(self._capacity, max(wanted, room + max(_chunk_rows(self._capacity), room // 8)))
        HeapMemory(self._device).check(size * sum(x.shape[1:].numel() * x.itemsize for x in self._rows))
        with torch.inference_mode(mode=False):
            larger = [column.new_empty((size, *column.shape[1:])) for column in self._rows]
        for rows_now, rows_then in zip(larger, self._rows, strict=True):
            rows_now[:room] = rows_then
        with self._lock:
            self._rows = larger
            self._free += range(size - 1, room - 1, -1)

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

    def read(self, pairs: Sequence[int], slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy on the device without a wait."""
        with self._lock:
            rows = self._apart.index_select(0, slots)
            if self._device.type == "cpu" and bool((rows == EMPTY).any()):
                msg = "a slot is empty"
                raise IndexError(msg)
            aside = rows >= 0
            at = torch.where(aside, slots, (slots + self._num_envs) % self._capacity)  # the next slot may be empty
            out = [self._readers[i](at) for i in pairs]
            if self._rows[0].shape[0]:
                chosen = rows.clamp_min(0).to(torch.int64)
                for k, i in enumerate(pairs):
                    shape = (-1, *[1] * (out[k].ndim - 1))
                    out[k] = torch.where(aside.view(shape), self._rows[i].index_select(0, chosen), out[k])
        tensors = [tensor.view(self._dtypes[i]) for i, tensor in zip(pairs, out, strict=True)]
        return [tensor.pin_memory() for tensor in tensors] if pin else tensors


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _on_host(flat: Flat, pairs: Pairs) -> Flat:
    """Return rows of which the fields of pairs are in contiguous memory of the CPU."""
    leaves, addresses = list(flat.leaves), [0] * len(flat.leaves)
    for i in (i for pair in pairs for i in pair):
        leaf = leaves[i].cpu().contiguous()
        leaves[i] = leaf if leaf.data_ptr() or not leaf.numel() else leaf.clone()
        addresses[i] = leaves[i].data_ptr()
    return flat._replace(leaves=leaves, addresses=addresses)


@final
class NextColumns(StorageColumn):
    """The next observations of the rows of a storage: derived from observations of any kind.

    Args:
        naming: paths of next fields -> paths; None finds the pairs, see `find_pairs`.
    """

    option = "single_copy"
    shareable = False
    ring_only = derived = True
    align = 1

    def __init__(self, naming: Mapping[Path, Path] | None) -> None:
        self._naming = naming

    def find(self, schema: Schema, taken: Mapping[int, StorageColumn]) -> list[Sequence[int]]:
        """Return the positions of the next fields; see `find_pairs`."""
        self._pairs = find_pairs(schema, self._naming, taken)
        return [[position for position, _ in self._pairs]]

    def begin(self, fields: Fields) -> None:
        """Find the observations of the next fields, and make room for extra rows."""
        schema = fields.schema
        self._mates = [mate for _, mate in self._pairs]
        self._leaves = [schema.leaves[mate] for mate in self._mates]
        self._readers = list(map(fields.reader, self._mates))
        self._capacity, self._num_envs, self._device = fields.capacity, fields.num_envs, fields.device
        self._names = [schema.column_names[position] for position in self.positions]
        self._all = tuple(range(len(self._pairs)))
        self._rows = 0  # present at least, for the warning; -1 if it was given
        dense = all(mate in fields.places for mate in self._mates)
        if dense and backend.native is not None and self._device.type == "cpu":
            places = [fields.places[mate] for mate in self._mates]
            self._extra: NativeExtraRows | TorchExtraRows
            self._extra = NativeExtraRows(fields.dense, places, self._num_envs, fields.memory)
            self.native = self._extra.native, list(self._pairs)
        else:
            self._extra = TorchExtraRows(self._leaves, self._readers, self._capacity, self._num_envs, self._device)
        self.allocate()

    def allocate(self) -> None:
        """Begin without rows."""
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of extra rows and their bookkeeping."""
        return self._extra.nbytes

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, position: int, slots: Tensor, *, pin: bool = False) -> Tensor:
        """Copy the next observations of rows."""
        slots = slots.to(self._device, torch.int64).contiguous()
        return self._extra.read([self.positions.index(position)], slots, pin=pin)[0]

    def get(self, slots: Tensor) -> Any:
        """Copy the next observations of rows, `[n, *shape]` for each pair, of slots on the CPU or the device."""
        return self._extra.read(self._all, slots.to(self._device))

    # -- writing -------------------------------------------------------------------------------------------------------

    def prepare(self, flat: Flat, rows: int, cursor: int | None) -> tuple[Flat, Comparison | _Links | None]:
        """Compare rows that will be written, and allocate the extra rows that they need."""
        if cursor is None:
            return flat, None
        if isinstance(self._extra, NativeExtraRows):
            found = self._extra.compare(flat, self._pairs, cursor)
            self._extra.reserve(found.need)
            return flat, found
        skip = max(0, rows - self._capacity)
        return flat, self._find_links(flat, Run((cursor + skip) % self._capacity, rows - skip, self._capacity, skip))

    def _find_links(self, flat: Flat, placement: Placement) -> _Links:
        """Compare rows with those that will follow them, and allocate the extra rows that they need."""
        here, rows = last_of_each(*(part.cpu() for part in targets(placement)))
        here, order = torch.sort(here)
        before = (here - self._num_envs) % self._capacity
        before = before[(self._extra.apart[before] != EMPTY) & ~torch.isin(before, here)]
        chosen = []
        for side in (0, 1):
            at = [flat.leaves[pair[side]] for pair in self._pairs]
            leaves = [x.reshape(-1, *leaf.shape) for x, leaf in zip(at, self._leaves, strict=True)]
            chosen.append([as_bits(x)[rows[order].to(x.device)].view(x.dtype).to(self._device) for x in leaves])
        nexts = list(map(torch.cat, zip(self.get(before), chosen[0], strict=True)))
        slots = torch.cat((before, here))
        agree = self._agrees(slots, nexts, here, chosen[1])
        self._extra.reserve(int((~agree & (self._extra.apart[slots] < 0)).sum()))
        return _Links(placement, slots, nexts, agree)

    def begin_write(self, placement: Placement, prepared: tuple[Flat, Any]) -> Comparison | _Links:
        """Copy next observations that a run overwrites to extra rows; find those of other rows."""
        flat, found = prepared
        if isinstance(found, Comparison) and isinstance(placement, Run):
            self._extra.detach_run(placement, found)  # type: ignore[union-attr]  # which has compared the rows
            return found
        return (
            found if isinstance(found, _Links) and found.placement == placement else self._find_links(flat, placement)
        )

    def write(self, placement: Placement, prepared: Comparison | _Links) -> None:
        """Record where the next observations of rows are, and fill the extra rows that they need."""
        if isinstance(prepared, Comparison):
            self._extra.link_run(placement, prepared)  # type: ignore[union-attr, arg-type]  # see `begin_write`
        else:
            self._relink(prepared.slots, prepared.nexts, prepared.agree)
        if isinstance(placement, Run) and self._rows >= 0:
            self._rows = max(self._rows, min(placement.start + placement.rows, self._capacity))
            self._check_savings()

    def _check_savings(self) -> None:
        """Warn once if most rows need an extra row."""
        used, rows = self._extra.used, self._rows
        if used - self._num_envs <= max(rows // 2, _FEW):
            return
        self._rows = -1
        msg = (
            f"single_copy saves little: {used} of {rows} rows keep a next observation of their own, since it is "
            "not the observation of the row that follows. Rows of several environments in turns need ndim=2 (rows "
            "[environments, time, ...]); for data without order leave single_copy out"
        )
        warnings.warn(msg, UserWarning, stacklevel=2)

    def set(self, slots: Tensor, values: Any) -> None:
        """Set the next observations of rows (int64 `[n]`, distinct), `[n, *shape]` for each pair."""
        slots = slots.cpu()
        agree = self._agrees(slots, values, slots[:0], [x[:0] for x in values])
        self._extra.reserve(int((~agree & (self._extra.apart[slots] < 0)).sum()))
        self._relink(slots, values, agree)

    def _agrees(self, slots: Tensor, nexts: Sequence[Tensor], here: Tensor, obs: Sequence[Tensor]) -> Tensor:
        """Return bool `[n]` on the CPU: whether next observations equal the observations that will follow them.

        Args:
            slots: int64 `[n]` on the CPU.
            nexts: `[n, *shape]` for each pair.
            here: slots that will be written, int64 `[m]` on the CPU, sorted.
            obs: observations that will be written there.
        """
        after = (slots + self._num_envs) % self._capacity
        held = self._extra.apart[after] != EMPTY
        agree = held | torch.isin(after, here)
        size = max(1, _BLOCK_BYTES // sum(leaf.nbytes for leaf in self._leaves))
        for first in range(0, slots.shape[0], size):
            part = slice(first, first + size)
            at = after[part]
            known, found = torch.nonzero(held[part]).view(-1), torch.searchsorted(here, at)
            fresh = torch.nonzero(torch.isin(at, here)).view(-1)
            follow = [torch.zeros_like(as_bits(x[part])) for x in nexts]
            for x, read, new in zip(follow, self._readers, obs, strict=True):
                if known.shape[0]:
                    x[known.to(self._device)] = read(at[known].to(self._device))
                x[fresh.to(self._device)] = as_bits(new)[found[fresh].to(self._device)]
            agree[part] &= same_rows([as_bits(x[part]) for x in nexts], follow).cpu()
        return agree

    def _relink(self, slots: Tensor, nexts: Sequence[Tensor], agree: Tensor) -> None:
        self._extra.drop(slots[agree])
        alone = torch.nonzero(~agree).view(-1)
        at = alone.to(self._device)
        self._extra.put(slots[alone], [as_bits(x).index_select(0, at).view(x.dtype) for x in nexts])

    # -- state ---------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all rows."""
        self._begin(torch.zeros(0, dtype=torch.bool, device="cpu"), [])

    def keep(self, slots: Tensor) -> None:
        """Move rows; those that another one follows now get extra rows. See `StorageColumn.keep`."""
        slots = slots.cpu()
        after = torch.cat((slots[self._num_envs :], torch.full_like(slots[: self._num_envs], EMPTY)))
        apart = (self._extra.apart[slots] != FOLLOWS) | (after != (slots + self._num_envs) % self._capacity)
        self._begin(apart, self.get(slots[apart]))

    def _begin(self, apart: Tensor, nexts: Sequence[Tensor]) -> None:
        """Set the next observations of the first rows, and remove all others.

        Args:
            apart: bool `[rows]` on the CPU: rows whose next observation is not the observation that follows.
            nexts: the next observations of these rows, `[n, *shape]` for each pair, in the order of their slots.
        """
        slots = torch.nonzero(apart).view(-1)
        self._extra.reset(apart.shape[0])
        self._rows = min(self._rows, 0) or apart.shape[0]
        self._extra.reserve(slots.shape[0])
        self._extra.put(slots, nexts)

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add to a state which rows have an extra row, copies of these in order, and `single_copy`: the pairs."""
        apart = self._extra.apart[:rows] >= 0
        nexts = self.get(torch.nonzero(apart).view(-1))
        state["single_copy"] = [list(pair) for pair in self._pairs]
        state["columns"]["apart"] = apart
        state["columns"] |= {f"{name}.apart": value for name, value in zip(self._names, nexts, strict=True)}

    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> None:
        """Keep saved next observations, those that were stored once as they are; see `StorageColumn.load`."""
        rows, read = int(state["rows"]), [sources[i] for i in self.positions]
        slots = torch.arange(rows, device="cpu")
        if not all(isinstance(x, SavedNext) and x.mate == mate for x, mate in zip(read, self._mates, strict=True)):
            nexts = [read_column(x).to(self._device) for x in read]
            self._begin(torch.zeros(rows, dtype=torch.bool, device="cpu"), [x[:0] for x in nexts])
            self.set(slots, nexts)
            return
        apart = read[0].apart
        self._begin(apart, [read_column(source.nexts) for source in read])
        if rows == state["capacity"] != self._capacity:  # it closes elsewhere now: its last rows get extra rows
            ends = slots[max(0, rows - self._num_envs) :]
            ends = ends[~apart[ends]]
            at = ((ends + self._num_envs) % rows).to(self._device)
            pairs = zip(self._readers, self._leaves, strict=True)
            self.set(ends, [read(at).view(leaf.dtype) for read, leaf in pairs])


@final
class SavedNext(Saved):
    """A column of next observations of a state that stores them once.

    Args:
        leaf: the field.
        mate: position of the field of observations.
        obs: their column.
        apart: bool `[rows]` on the CPU: which rows have a next observation of their own.
        nexts: these, `[n, *shape]`.
        num_envs: rows of a step.
    """

    def __init__(self, leaf: Leaf, mate: int, obs: Any, apart: Tensor, nexts: Any, *, num_envs: int) -> None:
        self._obs, self._num_envs = obs, num_envs
        self.apart, self.nexts, self.mate = apart, nexts, mate
        self.dtype, self.shape = leaf.dtype, (apart.shape[0], *leaf.shape)

    def read_into(self, dest: Tensor) -> None:
        """Read all rows into a tensor."""
        copy_column(self._obs, dest)
        turn_rows(dest, self._num_envs % max(1, dest.shape[0]))
        at = torch.nonzero(self.apart).view(-1).to(dest.device)
        as_bits(dest)[at] = as_bits(read_column(self.nexts)).to(dest.device)


def find_nexts(state: dict[str, Any], schema: Schema, sources: Mapping[str, Any]) -> dict[str, SavedNext]:
    """Return the next observations that a state stores once by name; their parts are taken out of its columns.

    Args:
        state: of a storage.
        schema: of its rows.
        sources: what reads the other fields, by name.

    Raises:
        CheckpointError: if the schema has no such pairs, or the next observation of a row would be in a slot without a
            row.
    """
    pairs, columns, names = _read_pairs(state, schema), state["columns"], schema.column_names
    if not pairs:
        return {}
    rows, num_envs, capacity = int(state["rows"]), max(1, int(state["lanes"])), int(state["capacity"])
    check_column("apart", columns.get("apart"), torch.bool, (rows,))
    apart = read_column(columns.pop("apart")).cpu()
    full = rows == capacity
    if rows > capacity or not (full or bool(apart[max(0, rows - num_envs) :].all())) or (full and num_envs > rows):
        msg = f"the checkpoint's single copies of {rows} rows refer to rows that it does not hold: it is damaged"
        raise CheckpointError(msg)
    found = {}
    for position, mate in pairs:
        leaf, name = schema.leaves[position], f"{names[position]}.apart"
        check_column(name, columns.get(name), leaf.dtype, (int(apart.sum()), *leaf.shape))
        parts = sources.get(names[mate]), apart, columns.pop(name)
        found[names[position]] = SavedNext(leaf, mate, *parts, num_envs=num_envs)
    return found


def _read_pairs(state: dict[str, Any], schema: Schema) -> Pairs:
    """Return the pairs of a state; `()` if it has no single copies, or was written by a version without them.

    Raises:
        CheckpointError: if the schema has no such pairs.
    """
    leaves, saved = schema.leaves, state.get("single_copy") or ()
    pairs = tuple((int(position), int(mate)) for position, mate in saved)
    flat = [position for pair in pairs for position in pair]
    good = len(set(flat)) == len(flat) and all(0 <= position < len(leaves) for position in flat)
    if not good or any(leaves[i][1:] != leaves[j][1:] or not leaves[i].nbytes for i, j in pairs):
        msg = f"the checkpoint pairs the fields {saved} of {schema} as single copies: it is damaged"
        raise CheckpointError(msg)
    return pairs
