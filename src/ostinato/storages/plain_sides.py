"""Side rows by torch alone: on other devices than the CPU, and without the compiled part.

The notes of the slots are kept twice on such devices: on the CPU, where writes decide, and on the device, where
reads follow them without meeting the host. A write meets it once, for the outcome of its comparison. A lock keeps
reads and writes of side rows apart; on a device it is held while work is queued, and the stream keeps the order.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from ostinato.core.bits import as_bits, same_rows
from ostinato.core.draw import ring_range
from ostinato.storages.memory import HeapMemory
from ostinato.storages.sides import FOLLOWS, NOTHING, Links, chunk_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.draw import Run
    from ostinato.core.rows import Flat
    from ostinato.storages.pairs import Pairs
    from ostinato.storages.table import Table

__all__ = ["PlainSides"]


@final
class PlainSides:
    """Side rows of a table on any device; see `Sides`. They lie in memory of that device, mapped tables included.

    Args:
        table: where the rows are; the observations are its first fields, in the order of `pairs`.
        pairs: positions in the full schema.
        lanes: slots from a row to the one that follows it.
    """

    def __init__(self, table: Table, pairs: Pairs, lanes: int) -> None:
        self._obs = [as_bits(column) for column in table.columns[: len(pairs)]]
        self._dtypes = [column.dtype for column in table.columns[: len(pairs)]]
        self._pairs = pairs
        self._lanes = lanes
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
        if rows > self._lanes:
            agree[: rows - self._lanes] = same_rows(
                [x[: rows - self._lanes] for x in nexts], [x[self._lanes :] for x in obs]
            )
        count = min(self._lanes, rows)
        before = self.apart[ring_range((cursor - self._lanes) % self._capacity, count, self._capacity)]
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
            after = ((before + self._lanes) % self._capacity).to(self._device)
            self.put(before, [x.index_select(0, after) for x in self._obs])

    def _before(self, run: Run) -> tuple[Tensor, Tensor]:
        """Return the rows before a run, int64 `[min(lanes, rows)]` on the CPU, and which of them are not in it."""
        count = min(self._lanes, run.rows)
        before = ring_range((run.start - self._lanes) % self._capacity, count, self._capacity)
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
            after = slots + self._lanes
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
