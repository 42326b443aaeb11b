"""The episode table in NumPy, for processes without the compiled extension.

An episode is a *record*: the slots of its rows in the order of writing, and what is known of it besides.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints: TypeAlias = npt.NDArray[Any]
    Bools: TypeAlias = npt.NDArray[np.bool_]

OPEN, ENDED, CUT = 0, 1, 2
"""Status of an episode: it continues, its last row ended it, or a row of no episode interrupted it."""

_ENVIRONMENT, _ID = 0, 1  # what the key of a stream is

_RECORD = np.dtype(
    [
        ("begin", np.int64),  # rows that were overwritten
        ("length", np.int64),  # rows present
        ("serial", np.int64),
        ("key", np.int64),
        ("kind", np.uint8),
        ("status", np.uint8),
    ]
)


@final
class NumpyEpisodes:
    """Episode and position of every slot of a ring.

    The interface is that of `ostinato._native.Episodes`, where each call is documented. So are the results, bit for
    bit: records are numbered, freed and used again in the same order. Addresses are those of contiguous memory that
    the caller has checked. Reading costs a Python step for each slot, and a row takes 20 bytes.
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
        self._table = np.zeros(16, dtype=_RECORD)
        self._slots: list[array[int]] = []  # of each record: the last `length` entries are its rows
        self._free: list[int] = []
        self._open: dict[tuple[int, int], int] = {}
        self._weights: dict[int, Ints] = {}

    @property
    def records(self) -> int:
        """Records, free ones included."""
        return len(self._slots)

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
        """Bytes held."""
        slots = sum(x.itemsize * len(x) for x in self._slots)
        return self._record.nbytes + self._number.nbytes + self._table.nbytes + slots

    # -- writing ------------------------------------------------------------------------------------------------------

    def record_write(self, start: int, rows: int, skip: int, ends: int, ids: int, mask: int) -> None:
        """Record a ring write. Overwritten rows leave first; records without rows are freed last."""
        total = skip + rows
        slots = (start - skip + np.arange(total)) % self.capacity
        kind, keys = (_ID, _array(ids, total)) if ids else (_ENVIRONMENT, slots % self.num_envs)
        inside = _array(mask, total, np.bool_) if mask else np.ones(total, dtype=np.bool_)
        closing = _array(ends, total, np.bool_) | ~inside if ends else ~inside
        touched = self._remove(slots[skip:])
        for chunk in _chunks(keys, closing, inside, skip):
            stream, last, stored = (kind, int(keys[chunk[0]])), chunk[-1], slots[chunk[chunk >= skip]]
            if not inside[last]:
                self._record[stored] = -1
            elif stored.size:
                self._append(self._open_record(stream), stored)
            if closing[last] and stream in self._open:
                self._table["status"][self._open.pop(stream)] = ENDED if inside[last] else CUT
        for record in touched[self._table["length"][touched] == 0].tolist():
            self._drop(record)
        self.cursor = (start + rows) % self.capacity
        self.present = min(self.capacity, self.present + rows)
        self._weights.clear()

    def _remove(self, slots: Ints) -> Ints:
        """Remove the rows in these slots, oldest first, from their records; return the records in that order."""
        old = self._record[slots]
        records, firsts, counts = np.unique(old[old >= 0], return_index=True, return_counts=True)
        self._table["begin"][records] += counts
        self._table["length"][records] -= counts
        self.rows -= int(counts.sum())
        for record, length in zip(records.tolist(), self._table["length"][records].tolist(), strict=True):
            listed = self._slots[record]
            if len(listed) > 2 * length:
                del listed[: len(listed) - length]
        return np.asarray(records[np.argsort(firsts)])

    def _open_record(self, stream: tuple[int, int]) -> int:
        """Return the record of the episode that continues in a stream; a new one if there is none."""
        if stream in self._open:
            return self._open[stream]
        record = self._free.pop() if self._free else self.records
        if record == self.records:
            self._slots.append(array("q"))
            if record == self._table.shape[0]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self.serial += 1
        self._table[record] = (0, 0, self.serial, stream[1], stream[0], OPEN)
        self._open[stream] = record
        return record

    def _append(self, record: int, slots: Ints) -> None:
        row = self._table[record]
        self._slots[record].frombytes(slots.tobytes())
        self._record[slots] = record
        self._number[slots] = row["begin"] + row["length"] + np.arange(slots.size)
        row["length"] += slots.size
        self.rows += slots.size

    def _drop(self, record: int) -> None:
        row = self._table[record]
        if row["status"] == OPEN:
            del self._open[int(row["kind"]), int(row["key"])]
        self._table[record] = np.zeros((), dtype=_RECORD)
        self._free.append(record)

    # -- reading ------------------------------------------------------------------------------------------------------

    def ahead(self, slots: int, n: int, out: int) -> None:
        """Count the rows after each one."""
        record, behind = self._find(_array(slots, n))
        _put(out, np.where(record >= 0, self._table["length"][record] - 1 - behind, -1))

    def behind(self, slots: int, n: int, out: int) -> None:
        """Count the rows present before each one."""
        _put(out, self._find(_array(slots, n))[1])

    def shift(self, slots: int, steps: int, n: int, out: int) -> None:
        """Find the slots that lie `steps[i]` rows further."""
        _put(out, self._move(_array(slots, n), _array(steps, n)[:, None])[0])

    def window(self, slots: int, n: int, before: int, after: int, dilation: int, out: int, valid: int) -> None:
        """Find the slots around each one, and which of them are in its episode."""
        found, inside = self._move(_array(slots, n), np.arange(-before, after + 1)[None] * dilation)
        _put(out, found)
        _put(valid, inside, np.bool_)

    def slices(self, slots: int, n: int, length: int, out: int) -> None:
        """Find the slots from each one on."""
        _put(out, self._move(_array(slots, n), np.arange(length)[None])[0])

    def steps(self, slots: int, n: int, width: int, powers: int, single: bool, *outs: int) -> None:  # noqa: FBT001
        """Find the windows of n-step transitions, and the powers of their rows."""
        dtype = np.float32 if single else np.float64
        factors = _array(powers, width + 1, dtype)
        found, inside = self._move(_array(slots, n), np.arange(width)[None])
        counts = inside.sum(1)
        parts = found, np.where(inside, factors[:width], 0), counts, factors[counts], found[:, -1]
        for out, values, kind in zip(outs, parts, (np.int64, dtype, np.int64, np.float32, np.int64), strict=True):
            _put(out, values, kind)

    def stack(self, slots: int, n: int, k: int, then: bool, out: int, valid: int) -> None:  # noqa: FBT001
        """Find the rows up to each one, and which of them are in its episode."""
        found, inside = self._move(_array(slots, n), np.minimum(np.arange(1 - k, 1) + then, 0)[None])
        _put(out, found)
        _put(valid, inside, np.bool_)

    def _find(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the record of each slot and its position among the rows present, -1 for rows of no episode."""
        if slots.size and not 0 <= slots.min() <= slots.max() < self.capacity:
            msg = f"a slot is outside [0, {self.capacity})"
            raise IndexError(msg)
        record = self._record[slots]
        return record, np.where(record >= 0, self._number[slots] - self._table["begin"][record], -1)

    def _move(self, slots: Ints, steps: Ints) -> tuple[Ints, Bools]:
        """Return the slots `[n, T]` that lie `steps` (`[n, T]` or `[1, T]`) further, and which are in the episode."""
        record, behind = self._find(slots)
        inside = record >= 0
        length = np.where(inside, self._table["length"][record], 1)  # a row of no episode is one by itself
        wanted = np.where(inside, behind, 0)[:, None] + steps.clip(-self.capacity, self.capacity)
        found = wanted.clip(0, (length - 1)[:, None])
        out = np.repeat(slots[:, None], found.shape[1], 1)
        out[inside] = self._locate(record[inside], found[inside])
        return out, wanted == found

    def _locate(self, records: Ints, positions: Ints) -> Ints:
        """Return the slots of the rows at these positions `[n, T]` of the records `[n]`."""
        out: Ints = positions - self._table["length"][records][:, None]  # counted from the newest row
        for row, record in zip(out, records.tolist(), strict=True):
            row[:] = np.frombuffer(self._slots[record], dtype=np.int64)[row]
        return out

    def spans(self, first: int, rows: int, closed: int, serial: int) -> None:
        """List the episodes; that with the oldest first row comes first."""
        live = np.flatnonzero(self._table["length"])
        slots = self._locate(live, np.zeros((live.size, 1), dtype=np.int64))[:, 0]
        order = np.argsort((slots - self.cursor) % self.capacity)
        row = self._table[live[order]]
        _put(first, slots[order])
        _put(rows, row["length"])
        _put(closed, row["status"] == ENDED, np.bool_)
        _put(serial, row["serial"])

    # -- draws --------------------------------------------------------------------------------------------------------

    def add_need(self, need: int) -> int:
        """Return the number by which the draws for `need` are called."""
        self._needs.append(need)
        return len(self._needs) - 1

    def start_rows(self, handle: int) -> int:
        """Count the rows that can start a window."""
        return int(self._starts(handle).sum())

    def start_episodes(self, handle: int) -> int:
        """Count the episodes with such a row."""
        return int(np.count_nonzero(self._starts(handle)))

    def draw(self, handle: int, randoms: int, n: int, out: int) -> None:
        """Draw such rows by their ranks."""
        weights = self._starts(handle, n)
        ends = np.cumsum(weights)
        rank = _scale(_array(randoms, n), ends[-1:])
        record = np.searchsorted(ends, rank, side="right")
        _put(out, self._locate(record, (rank - (ends[record] - weights[record]))[:, None]))

    def draw_episodes(self, handle: int, randoms: int, n: int, out: int) -> None:
        """Draw episodes by their ranks, then rows of them."""
        weights, numbers = self._starts(handle, n), _array(randoms, 2 * n)
        eligible = np.flatnonzero(weights)
        record = eligible[_scale(numbers[:n], eligible.size)]
        _put(out, self._locate(record, _scale(numbers[n:], weights[record])[:, None]))

    def _starts(self, handle: int, draws: int = 0) -> Ints:
        """Return how many rows of each record can start a window.

        Raises:
            IndexError: if there is none to draw.
        """
        weights = self._weights.get(handle)
        if weights is None:
            weights = np.maximum(self._table["length"][: self.records] - (self._needs[handle] - 1), 0)
            self._weights[handle] = weights
        if draws and not weights.any():
            msg = f"no row has {self._needs[handle] - 1} rows after it"
            raise IndexError(msg)
        return weights

    # -- state --------------------------------------------------------------------------------------------------------

    def save(self, episode: int, serials: int, keys: int, kinds: int, status: int, free: int) -> None:
        """Write the record of each row present, oldest first; the fields of each record; the free records."""
        slots = (self.cursor - self.present + np.arange(self.present)) % self.capacity
        row = self._table[: self.records]
        is_open = row["status"] == OPEN
        _put(episode, self._record[slots], np.int32)
        _put(serials, row["serial"])
        _put(keys, np.where(is_open, row["key"], 0))
        _put(kinds, np.where(is_open, row["kind"], 0), np.uint8)
        _put(status, row["status"], np.uint8)
        _put(free, np.array(self._free))

    def load(self, cursor: int, serial: int, present: int, records: int, free_count: int, *arrays: int) -> None:
        """Replace everything but the registered needs by a checked state."""
        self.clear()
        episode, serials, keys, kinds, status, free = arrays
        self.cursor, self.serial, self.present = cursor, serial, present
        self._free = _array(free, free_count).tolist()
        self._slots = [array("q") for _ in range(records)]
        self._table = np.zeros(max(16, records), dtype=_RECORD)
        row = self._table[:records]
        row["serial"], row["key"] = _array(serials, records), _array(keys, records)
        row["kind"], row["status"] = _array(kinds, records, np.uint8), _array(status, records, np.uint8)
        of_rows = _array(episode, present, np.int32)
        order = np.argsort(of_rows, kind="stable")
        held, firsts = np.unique(of_rows[order], return_index=True)
        for record, rows in zip(held.tolist(), np.split(order, firsts[1:]), strict=False):
            if record < 0:
                continue
            self._append(record, (cursor - present + rows) % self.capacity)
            if row["status"][record] == OPEN:
                self._open[int(row["kind"][record]), int(row["key"][record])] = record


def _array(address: int, n: int, dtype: Any = np.int64) -> Ints:
    """Return the memory at an address as an array `[n]`. A *view*."""
    dtype = np.dtype(dtype)
    return np.ndarray((n,), dtype, (ctypes.c_byte * (n * dtype.itemsize)).from_address(address))


def _put(address: int, values: Ints, dtype: Any = np.int64) -> None:
    """Write values to the memory at an address."""
    _array(address, values.size, dtype)[:] = values.ravel()


def _chunks(keys: Ints, closing: Bools, inside: Bools, skip: int) -> list[Ints]:
    """Split the rows of a batch into those of one stream and one episode; a row of no episode is a chunk by itself.

    Chunks come in the order of their first rows that are stored, those without such a row first.
    """
    order = np.argsort(keys, kind="stable")
    breaks = (keys[order[1:]] != keys[order[:-1]]) | closing[order[:-1]] | ~inside[order[1:]]
    chunks = np.split(order, np.flatnonzero(breaks) + 1)
    return sorted(chunks, key=lambda rows: int(rows[min(int(np.searchsorted(rows, skip)), rows.size - 1)]))


def _scale(randoms: Ints, totals: int | Ints) -> Ints:
    """Return `randoms * totals >> 63` for randoms of 63 bits and totals of 31, computed in two halves."""
    high, low = (randoms >> 31) & 0xFFFFFFFF, randoms & 0x7FFFFFFF
    return np.asarray((high * totals + ((low * totals) >> 31)) >> 32, dtype=np.int64)
