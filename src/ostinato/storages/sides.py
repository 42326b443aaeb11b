"""Side rows: where next observations lie that are not the observation of the row that follows. The compiled way.

What each slot says is one int32: `FOLLOWS`, `NOTHING`, or the number of its side row. Side rows lie in chunks that
are added when needed and never move; a free list says which are free. `native/mirror.hpp` tells why threads may read
while another one writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from ostinato._backend import native
from ostinato.storages.fetch import Room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.draw import Run
    from ostinato.core.rows import Flat
    from ostinato.storages.memory import Memory
    from ostinato.storages.pairs import Pairs
    from ostinato.storages.table import Table

__all__ = ["FOLLOWS", "NOTHING", "Links", "NativeSides", "Sides", "chunk_rows"]

FOLLOWS = -1
"""The next observation of a slot is the observation of the slot that follows it."""
NOTHING = -2
"""The slot holds no row."""
_CHUNKS = 256


class Links(NamedTuple):
    """What a comparison of a batch with itself found; see `Sides.compare`."""

    flags: Tensor
    """uint8 on the CPU. `[rows]`: a next observation is the observation of the row that follows in the batch; then
    `[min(lanes, rows)]`: an observation is what lies in the side row of the row before."""
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
        lanes: slots from a row to the one that follows it.
        memory: where chunks come from.
    """

    def __init__(self, table: Table, pairs: Pairs, lanes: int, memory: Memory) -> None:
        with torch.inference_mode(mode=False):
            self.apart = torch.empty(table.capacity, dtype=torch.int32, device="cpu")
        self._pairs = pairs
        self._memory = memory
        self._chunk_rows = chunk_rows(table.capacity)
        self._mirror: Any = native.Mirror(  # type: ignore[union-attr]  # who makes one has looked
            table.capacity, lanes, self._chunk_rows, self.apart.data_ptr()
        )
        self._capacity = table.capacity
        self._lanes = lanes
        self._table = table  # the compiled part reads its memory
        self._sizes: list[int] = []
        self._chunks: list[list[Tensor]] = []
        self._rooms: dict[tuple[int, ...], Room] = {}
        for column in table.columns:
            self._mirror.guard(column.data_ptr(), column.stride(0) * column.itemsize * table.capacity)
        self._register(table, len(pairs))
        self._mirror.clear()

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
            self._mirror.add_group(column.data_ptr(), stride, size)
        for position in range(count):
            self._mirror.add_leaf(*places[position], table.schema.leaves[position].nbytes)

    @property
    def used(self) -> int:
        """Side rows in use."""
        return int(self._mirror.used)

    @property
    def nbytes(self) -> int:
        """Bytes of chunks, notes and lists."""
        return self.apart.nbytes + int(self._mirror.nbytes) + sum(x.nbytes for chunk in self._chunks for x in chunk)

    def compare(self, flat: Flat, rows: int, cursor: int) -> Links | None:
        """Compare a batch in one pass over its memory."""
        addresses = flat.addresses or []
        flags = torch.empty(rows + min(self._lanes, rows), dtype=torch.uint8, device="cpu")
        at = flags.data_ptr()
        obs, nexts = [addresses[i] for _, i in self._pairs], [addresses[i] for i, _ in self._pairs]
        need = self._mirror.compare(cursor, rows, obs, nexts, at, at + rows)
        return None if need < 0 else Links(flags, rows, need, cursor)

    def reserve(self, rows: int) -> None:
        """Add chunks. Never more than one side row for each slot is needed."""
        while self._mirror.room - self._mirror.used < rows and self._mirror.room < self._capacity:
            number = len(self._chunks)
            self._memory.check(self._chunk_rows * sum(self._sizes))
            chunk = [
                self._memory.block(f"block-side{number}.{group}.bin", self._chunk_rows * size)
                for group, size in enumerate(self._sizes)
            ]
            self._mirror.add_chunk([block.data_ptr() for block in chunk])
            self._chunks.append(chunk)

    def detach_run(self, run: Run, links: Links) -> None:
        """Detach the rows before a run; there are some only where edits made them follow, or writing jumps."""
        lacking = self._mirror.detach_run(run.start, run.rows, links.need)
        if lacking:
            self.reserve(self._mirror.room - self._mirror.used + lacking)
            self._mirror.detach_run(run.start, run.rows, links.need)

    def link_run(self, run: Run, flat: Flat, links: Links) -> None:
        """Link a run."""
        addresses = flat.addresses or []
        expected = (run.start - run.skip) % run.capacity == links.cursor and not run.skip
        nexts, agree = [addresses[i] for i, _ in self._pairs], links.flags.data_ptr()
        relink = agree + links.rows if expected else 0
        self._mirror.link_run(run.start, run.rows, run.skip, nexts, agree, relink)

    def put(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Copy rows aside."""
        if slots.numel():
            dense = [value.contiguous() for value in nexts]
            self._mirror.put_rows(slots.data_ptr(), slots.shape[0], [value.data_ptr() for value in dense])

    def drop(self, slots: Tensor) -> None:
        """Give side rows back."""
        self._mirror.drop_rows(slots.data_ptr(), slots.shape[0])

    def begin(self, rows: int) -> None:
        """Start anew."""
        self._mirror.clear()
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
        self._mirror.read(list(pairs), slots.data_ptr(), picked, rows, [tensor.data_ptr() for tensor in out])
        return out
