"""The episode table in Python, for processes without the compiled extension: as equal as it is slow.

An episode is a *record*: the slots of its rows present in the order of writing, and what is known of it besides.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import Counter, deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]

OPEN, ENDED, CUT = 0, 1, 2
"""Status of an episode: it continues, its last row ended it, or a row of no episode interrupted it."""

_ENVIRONMENT, _ID = 0, 1  # what the key of a stream is


@final
class _Record:
    """The rows present of one episode; without a serial number it is free.

    Args:
        serial: number of the episode.
        stream: what its rows have in common: the kind of the key, and the key.
        status: whether it continues.
    """

    def __init__(self, serial: int = 0, stream: tuple[int, int] = (0, 0), status: int = OPEN) -> None:
        self.serial, self.stream, self.status = serial, stream, status
        self.slots: deque[int] = deque()
        self.begin = 0
        """Rows that were overwritten."""


@final
class NumpyEpisodes:
    """Episode and position of every slot of a ring.

    The interface is that of `ostinato._native.Episodes`, where each call is documented. So are the results, bit for
    bit: records are numbered, freed and used again in the same order. Addresses are those of contiguous memory that
    the caller has checked. Each call costs a Python step for each row, and a draw one for each episode.
    """

    def __init__(self, capacity: int, num_envs: int) -> None:
        self.capacity = capacity
        self.num_envs = num_envs
        self.serial = 0
        self._needs: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Remove all rows; serial numbers and registered needs stay."""
        self.cursor = self.present = self.rows = 0
        self._record = np.full(self.capacity, -1, dtype=np.int32)  # of each slot
        self._number = np.zeros(self.capacity, dtype=np.int64)  # of each row in its episode, overwritten rows counted
        self._records: list[_Record] = []
        self._free: list[int] = []
        self._open: dict[tuple[int, int], int] = {}

    @property
    def records(self) -> int:
        """Records, free ones included."""
        return len(self._records)

    @property
    def free_count(self) -> int:
        """Records that are not in use."""
        return len(self._free)

    @property
    def count(self) -> int:
        """Episodes with rows present."""
        return self.records - self.free_count

    @property
    def nbytes(self) -> int:
        """Bytes held, about."""
        return self._record.nbytes + self._number.nbytes + 8 * self.rows + 200 * self.records

    # -- writing ------------------------------------------------------------------------------------------------------

    def record_write(self, start: int, rows: int, skip: int, ends: int, ids: int, mask: int) -> None:
        """Record a ring write. Overwritten rows leave first; records without rows are freed last."""
        total = skip + rows
        slots = (start - skip + np.arange(total)) % self.capacity
        kind, keys = (_ID, _array(ids, total)) if ids else (_ENVIRONMENT, slots % self.num_envs)
        inside = _array(mask, total, np.bool_) if mask else np.ones(total, np.bool_)
        closing = _array(ends, total, np.bool_) | ~inside if ends else ~inside
        touched = self._remove(slots[skip:])
        rows_written = (x.tolist() for x in (slots, keys, inside, closing))
        for i, (slot, key, valid, closes) in enumerate(zip(*rows_written, strict=True)):
            number = self._open.get((kind, key))
            if i >= skip and valid:
                number = self._begin((kind, key)) if number is None else number
                self._append(number, slot)
            elif i >= skip:
                self._record[slot] = -1
            if closes and number is not None:
                self._records[self._open.pop((kind, key))].status = ENDED if valid else CUT
        for number in touched:
            if not self._records[number].slots:
                self._drop(number)
        self.cursor = (start + rows) % self.capacity
        self.present = min(self.capacity, self.present + rows)

    def _remove(self, slots: Array) -> list[int]:
        """Remove the rows in these slots, oldest first, from their records; return the records in that order."""
        counts = Counter(self._record[slots].tolist())
        del counts[-1]
        for number, count in counts.items():
            record = self._records[number]
            record.begin += count
            self.rows -= count
            for _ in range(count):
                record.slots.popleft()
        return list(counts)

    def _begin(self, stream: tuple[int, int]) -> int:
        """Return the record of a new episode."""
        number = self._free.pop() if self._free else self.records
        self.serial += 1
        self._records[number : number + 1] = [_Record(self.serial, stream)]
        self._open[stream] = number
        return number

    def _append(self, number: int, slot: int) -> None:
        record = self._records[number]
        self._record[slot] = number
        self._number[slot] = record.begin + len(record.slots)
        record.slots.append(slot)
        self.rows += 1

    def _drop(self, number: int) -> None:
        record = self._records[number]
        if record.status == OPEN:
            del self._open[record.stream]
        self._records[number] = _Record()
        self._free.append(number)

    # -- reading ------------------------------------------------------------------------------------------------------

    def ahead(self, slots: int, n: int, out: int) -> None:
        """Count the rows after each one."""
        _put(out, [-1 if record is None else len(record.slots) - 1 - at for _, record, at in self._find(slots, n)])

    def behind(self, slots: int, n: int, out: int) -> None:
        """Count the rows present before each one."""
        _put(out, [at for _, _, at in self._find(slots, n)])

    def shift(self, slots: int, steps: int, n: int, out: int) -> None:
        """Find the slots that lie `steps[i]` rows further."""
        self._move(slots, n, _array(steps, n)[:, None], out)

    def window(self, slots: int, n: int, before: int, after: int, dilation: int, out: int, valid: int) -> None:
        """Find the slots around each one, and which of them are in its episode."""
        self._move(slots, n, np.arange(-before, after + 1)[None] * dilation, out, valid)

    def slices(self, slots: int, n: int, length: int, out: int) -> None:
        """Find the slots from each one on."""
        self._move(slots, n, np.arange(length)[None], out)

    def steps(self, slots: int, n: int, width: int, powers: int, single: bool, *outs: int) -> None:  # noqa: FBT001
        """Find the windows of n-step transitions, and the powers of their rows."""
        dtype = np.float32 if single else np.float64
        factors = _array(powers, width + 1, dtype)
        found, inside = self._move(slots, n, np.arange(width)[None], outs[0])
        counts = inside.sum(1)
        parts = np.where(inside, factors[:width], 0), counts, factors[counts], found[:, -1]
        for out, values, kind in zip(outs[1:], parts, (dtype, np.int64, np.float32, np.int64), strict=True):
            _put(out, values, kind)

    def stack(self, slots: int, n: int, k: int, then: bool, out: int, valid: int) -> None:  # noqa: FBT001
        """Find the rows up to each one, and which of them are in its episode."""
        self._move(slots, n, np.minimum(np.arange(1 - k, 1) + then, 0)[None], out, valid)

    def _find(self, slots: int, n: int) -> Iterator[tuple[int, _Record | None, int]]:
        """Iterate over slots, their records and positions among the rows present; None and -1 for rows of no episode.

        Raises:
            IndexError: for a slot outside the ring.
        """
        at = _array(slots, n)
        if at.size and not 0 <= at.min() <= at.max() < self.capacity:
            msg = f"a slot is outside [0, {self.capacity})"
            raise IndexError(msg)
        for slot, number, row in zip(*(x.tolist() for x in (at, self._record[at], self._number[at])), strict=True):
            record = self._records[number] if number >= 0 else None
            yield slot, record, -1 if record is None else row - record.begin

    def _move(self, slots: int, n: int, steps: Array, out: int, valid: int = 0) -> tuple[Array, Array]:
        """Write and return the slots `[n, T]` that lie `steps` (`[n, T]` or `[1, T]`) further, and which there are."""
        found, inside = np.zeros((n, steps.shape[1]), np.int64), np.zeros((n, steps.shape[1]), np.bool_)
        wanted = np.broadcast_to(steps, found.shape).tolist()
        for i, (slot, record, at) in enumerate(self._find(slots, n)):
            line, first = ([slot], 0) if record is None else (record.slots, at)  # a row of no episode is one by itself
            places = [min(max(first + step, 0), len(line) - 1) for step in wanted[i]]
            found[i] = [line[place] for place in places]
            inside[i] = [place == first + step for place, step in zip(places, wanted[i], strict=True)]
        _put(out, found)
        if valid:
            _put(valid, inside, np.bool_)
        return found, inside

    def spans(self, first: int, rows: int, closed: int, serial: int) -> None:
        """List the episodes; that with the oldest first row comes first."""
        live = [record for record in self._records if record.slots]
        live.sort(key=lambda record: (record.slots[0] - self.cursor) % self.capacity)
        _put(first, [record.slots[0] for record in live])
        _put(rows, [len(record.slots) for record in live])
        _put(closed, [record.status == ENDED for record in live], np.bool_)
        _put(serial, [record.serial for record in live])

    # -- draws --------------------------------------------------------------------------------------------------------

    def add_need(self, need: int) -> int:
        """Return the number by which the draws for `need` are called."""
        self._needs.append(need)
        return len(self._needs) - 1

    def start_rows(self, handle: int) -> int:
        """Count the rows that can start a window."""
        return sum(self._starts(handle))

    def start_episodes(self, handle: int) -> int:
        """Count the episodes with such a row."""
        return sum(rows > 0 for rows in self._starts(handle))

    def draw(self, handle: int, randoms: int, n: int, out: int) -> None:
        """Draw such rows by their ranks."""
        ends = list(accumulate(self._starts(handle, n), initial=0))
        found = []
        for random in _array(randoms, n).tolist():
            rank = _scale(random, ends[-1])
            number = bisect_right(ends, rank) - 1
            found.append(self._records[number].slots[rank - ends[number]])
        _put(out, found)

    def draw_episodes(self, handle: int, randoms: int, n: int, out: int) -> None:
        """Draw episodes by their ranks, then rows of them."""
        starts, numbers = self._starts(handle, n), _array(randoms, 2 * n).tolist()
        eligible = [number for number, rows in enumerate(starts) if rows]
        chosen = [eligible[_scale(random, len(eligible))] for random in numbers[:n]]
        pairs = zip(chosen, numbers[n:], strict=True)
        _put(out, [self._records[number].slots[_scale(random, starts[number])] for number, random in pairs])

    def _starts(self, handle: int, draws: int = 0) -> list[int]:
        """Return how many rows of each record can start a window.

        Raises:
            IndexError: if there is none to draw.
        """
        need = self._needs[handle]
        starts = [max(len(record.slots) - need + 1, 0) for record in self._records]
        if draws and not any(starts):
            msg = f"no row has {need - 1} rows after it"
            raise IndexError(msg)
        return starts

    # -- state --------------------------------------------------------------------------------------------------------

    def save(self, episode: int, serials: int, keys: int, kinds: int, status: int, free: int) -> None:
        """Write the record of each row present, oldest first; the fields of each record; the free records."""
        streams = [record.stream if record.status == OPEN else (0, 0) for record in self._records]
        _put(episode, self._record[(self.cursor - self.present + np.arange(self.present)) % self.capacity], np.int32)
        _put(serials, [record.serial for record in self._records])
        _put(keys, [key for _, key in streams])
        _put(kinds, [kind for kind, _ in streams], np.uint8)
        _put(status, [record.status for record in self._records], np.uint8)
        _put(free, self._free)

    def load(self, cursor: int, serial: int, present: int, records: int, free_count: int, *arrays: int) -> None:
        """Replace everything but the registered needs by a checked state."""
        self.clear()
        episode, serials, keys, kinds, status, free = arrays
        self.cursor, self.serial, self.present = cursor, serial, present
        self._free = _array(free, free_count).tolist()
        streams = zip(_array(kinds, records, np.uint8).tolist(), _array(keys, records).tolist(), strict=True)
        parts = _array(serials, records).tolist(), streams, _array(status, records, np.uint8).tolist()
        self._records = [_Record(*each) for each in zip(*parts, strict=True)]
        for i, number in enumerate(_array(episode, present, np.int32).tolist()):
            if number >= 0:
                self._append(number, (cursor - present + i) % self.capacity)
        going = (n for n, record in enumerate(self._records) if record.slots and record.status == OPEN)
        self._open = {self._records[number].stream: number for number in going}


def _array(address: int, n: int, dtype: Any = np.int64) -> Array:
    """Return the memory at an address as an array `[n]`. A *view*."""
    dtype = np.dtype(dtype)
    return np.ndarray((n,), dtype, (ctypes.c_byte * (n * dtype.itemsize)).from_address(address))


def _put(address: int, values: Any, dtype: Any = np.int64) -> None:
    """Write values to the memory at an address."""
    array = np.asarray(values, dtype).ravel()
    _array(address, array.size, dtype)[:] = array


def _scale(random: int, total: int) -> int:
    """Return `random * total >> 63` for a random number of 63 bits."""
    return (random & (2**63 - 1)) * total >> 63
