"""Next observations that are stored once, against a plain list of rows; arguments that raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .tables import address, noise, slots_of

if TYPE_CHECKING:
    from types import ModuleType

    from .tables import Bytes

SIZES = (3, 20)


class Rows:
    """Two observed fields in one packed row, stored once; `log[slot]` is the observation and the next one."""

    def __init__(self, native: ModuleType, capacity: int, num_envs: int, chunk_rows: int) -> None:
        self.capacity, self.num_envs, self.chunk_rows = capacity, num_envs, chunk_rows
        self.memory = noise(capacity, sum(SIZES) + 5, 1)
        self.side_rows = np.empty(capacity, np.int32)
        self.table = native.SingleCopy(capacity, num_envs, chunk_rows, address(self.side_rows))
        group = self.table.add_group(address(self.memory) + 2, sum(SIZES) + 5, sum(SIZES))
        for offset, size in zip((0, SIZES[0]), SIZES, strict=True):
            self.table.add_field(group, offset, size)
        self.table.clear()
        self.chunks: list[Bytes] = []
        self.log: list[tuple[bytes, bytes] | None] = [None] * capacity
        self.cursor = 0

    def reserve(self, rows: int) -> None:
        while self.table.allocated - self.table.used < rows and self.table.allocated < self.capacity:
            self.chunks.append(noise(self.chunk_rows, sum(SIZES), 7))
            self.table.add_chunk([address(self.chunks[-1])])

    def write(self, start: int, obs: Bytes, nexts: Bytes) -> None:
        total, skip = len(obs), max(0, len(obs) - self.capacity)
        first, n = (start + skip) % self.capacity, total - skip
        split = [np.ascontiguousarray(part) for rows in (obs, nexts) for part in np.split(rows, [SIZES[0]], axis=1)]
        at = [address(part) for part in split]
        flags = np.full(total + min(self.num_envs, total), 255, np.uint8)
        need = self.table.compare(start, total, at[:2], at[2:], address(flags), address(flags) + total)
        assert need >= 0
        self.reserve(need)
        missing = self.table.detach_run(first, n, need)
        if missing:
            self.reserve(self.table.allocated - self.table.used + missing)
            assert self.table.detach_run(first, n, need) == 0
        for i in range(n):
            slot = (first + i) % self.capacity
            self.memory[slot, 2 : 2 + sum(SIZES)] = obs[skip + i]
            self.log[slot] = obs[skip + i].tobytes(), nexts[skip + i].tobytes()
        equal = 0 if skip else address(flags) + total
        self.table.link_run(first, n, skip, at[2:], address(flags), equal)
        self.cursor = (first + n) % self.capacity

    def read(self, slots: list[int], pick: list[bool] | None = None) -> list[bytes]:
        at, outs = slots_of(slots), [np.zeros((len(slots), size), np.uint8) for size in SIZES]
        choice = None if pick is None else np.array(pick, dtype=np.bool_)
        where = 0 if choice is None else address(choice)
        self.table.gather([1, 0], address(at), where, len(slots), [address(out) for out in reversed(outs)])
        return [row.tobytes() for row in np.concatenate(outs, axis=1)]


@given(data=st.data())
def test_next_observations_are_those_that_were_written(native: ModuleType, data: st.DataObject) -> None:
    num_envs = data.draw(st.integers(1, 3))
    capacity = num_envs * data.draw(st.integers(1, 5))
    rows = Rows(native, capacity, num_envs, data.draw(st.sampled_from([1, 2, 8])))
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(1, 2 * capacity))
        numbers = data.draw(st.lists(st.integers(0, 3), min_size=2 * count, max_size=2 * count))
        obs, nexts = (np.array(part, np.uint8)[:, None].repeat(sum(SIZES), 1) for part in (numbers[::2], numbers[1::2]))
        jump = data.draw(st.sampled_from([0, 0, 0, 1]))  # a write that does not continue after the newest row
        rows.write((rows.cursor + jump) % capacity, obs, nexts)
        present = [slot for slot, row in enumerate(rows.log) if row is not None]
        pick = [data.draw(st.booleans()) for _ in present]
        expected = [row for row in rows.log if row is not None]
        assert rows.read(present) == [nexts for _, nexts in expected]
        assert rows.read(present, pick) == [row[chosen] for row, chosen in zip(expected, pick, strict=True)]
        assert rows.table.used == int((rows.side_rows >= 0).sum())


def test_slots_without_rows_raise(native: ModuleType) -> None:
    rows = Rows(native, 6, 1, 2)
    rows.write(0, noise(2, sum(SIZES), 3), noise(2, sum(SIZES), 4))
    for slot in (-1, 2, 5, 6, 2**62):
        with pytest.raises(IndexError):
            rows.read([0, slot])
    assert rows.read([2], [False]) == [rows.memory[2, 2 : 2 + sum(SIZES)].tobytes()]
    rows.side_rows[0] = 99  # a number written by other code does not lead out of memory
    with pytest.raises(IndexError, match="slot 0 holds no row"):
        rows.read([0])
