"""The episode table in numpy and Python, for processes without the compiled part.

What lives here: the results of `native/episodes.hpp`, bit for bit. What does not: checks of arguments and what each
call means; both are in `core/episodes/table.py`.

An episode is a record: its rows are known by arithmetic while they lie `stride` slots apart, then by a list of slots.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch

from ostinato.core.episodes.checks import CUT, ENDED, OPEN
from ostinato.core.records import check_slots

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Ints: TypeAlias = npt.NDArray[np.int64]
    Bools: TypeAlias = npt.NDArray[np.bool_]

__all__ = ["PlainEpisodes"]

_LANE, _ID = 0, 1  # what the key of an open episode is

_RECORD = np.dtype(
    [
        ("first", np.int64),  # slot of the oldest row present
        ("last", np.int64),
        ("stride", np.int64),  # slots from row to row; 0 with fewer than two rows
        ("begin", np.int64),  # rows that were overwritten
        ("length", np.int64),  # rows present
        ("serial", np.int64),
        ("key", np.int64),
        ("kind", np.uint8),
        ("status", np.uint8),
        ("listed", np.bool_),
    ]
)


class _Ranks(NamedTuple):
    """The rows that can start a window, counted up over the records."""

    weights: Ints
    ends: Ints  # running sums of the weights
    eligible: Ints  # records with a weight above zero

    @property
    def total(self) -> int:
        return int(self.ends[-1]) if self.ends.size else 0


class _List(NamedTuple):
    """Slots of an episode whose rows do not lie evenly: those of its rows number `before`, `before + 1`, ..."""

    before: int
    slots: array[int]


class _Said(NamedTuple):
    """What came with the rows of a batch."""

    ends: Bools | None
    ids: Ints | None
    mask: Bools | None

    def part(self, begin: int, end: int) -> _Said:
        return _Said(
            None if self.ends is None else self.ends[begin:end],
            None if self.ids is None else self.ids[begin:end],
            None if self.mask is None else self.mask[begin:end],
        )

    @property
    def kind(self) -> int:
        return _LANE if self.ids is None else _ID

    def streams(self, slots: Ints, lanes: int) -> Ints:
        return slots % lanes if self.ids is None else self.ids

    def closing(self, rows: int) -> Bools:
        """Rows after which their stream begins a new episode."""
        out = np.zeros(rows, dtype=np.bool_)
        if self.ends is not None:
            out |= self.ends
        if self.mask is not None:
            out |= ~self.mask
        return out


@final
class PlainEpisodes:
    """Episode and position of every slot. Arguments are contiguous CPU tensors that were checked before."""

    def __init__(self, capacity: int, lanes: int) -> None:
        self.capacity = capacity
        self.lanes = lanes
        self.serial = 0  # episodes that ever began
        self._needs: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forget all rows; serial numbers and registered needs stay."""
        self.cursor = self.present = self.rows = self.records = 0
        self._episode = np.full(self.capacity, -1, dtype=np.int32)
        self._number = np.zeros(self.capacity, dtype=np.int64)  # position in the episode, overwritten rows counted
        self._table = np.zeros(16, dtype=_RECORD)
        self._free: list[int] = []  # taken from the end
        self._open: tuple[dict[int, int], dict[int, int]] = ({}, {})  # by lane, and by id
        self._lists: dict[int, _List] = {}
        self._ranks: dict[int, _Ranks] = {}

    @property
    def count(self) -> int:
        """Episodes with rows present."""
        return self.records - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        lists = sum(x.slots.itemsize * len(x.slots) for x in self._lists.values())
        return self._episode.nbytes + self._number.nbytes + self._table.nbytes + lists

    # -- writing ------------------------------------------------------------------------------------------------------

    def note(
        self, start: int, rows: int, skip: int, ends: Tensor | None, ids: Tensor | None, mask: Tensor | None
    ) -> None:
        """First all rows leave that are overwritten, then the new ones come; records left empty are freed last."""
        said = _Said(*(None if x is None else x.numpy() for x in (ends, ids, mask)))
        slots = (start + np.arange(rows)) % self.capacity
        touched = self._leave(slots)
        if skip:
            self._pass_over((start - skip + np.arange(skip)) % self.capacity, said.part(0, skip))
        self._enter(slots, said.part(skip, skip + rows))
        for record in touched[self._table["length"][touched] == 0].tolist():
            self._drop(record)
        self.cursor = (start + rows) % self.capacity
        self.present = min(self.capacity, self.present + rows)
        self._ranks.clear()

    def _leave(self, slots: Ints) -> Ints:
        """Take the rows in these slots, oldest first, from their episodes; return the episodes in that order."""
        old = self._episode[slots]
        records, firsts, counts = np.unique(old[old >= 0], return_index=True, return_counts=True)
        for record, count in zip(records.tolist(), counts.tolist(), strict=True):
            row = self._table[record]
            row["begin"] += count
            row["length"] -= count
            self.rows -= count
            if not row["length"]:
                row["stride"], row["listed"] = 0, False
                self._lists.pop(record, None)
            elif row["listed"]:
                row["first"] = self._trim(record, int(row["begin"]))
            else:
                row["first"] = (row["first"] + count * row["stride"]) % self.capacity
        return np.asarray(records[np.argsort(firsts)], dtype=np.int64)

    def _trim(self, record: int, begin: int) -> int:
        """Forget slots that were overwritten once they are the larger part; return the first one left."""
        before, slots = self._lists[record]
        gone = begin - before
        first = slots[gone]
        if gone > len(slots) // 2:
            del slots[:gone]
            self._lists[record] = _List(begin, slots)
        return first

    def _pass_over(self, slots: Ints, said: _Said) -> None:
        """Rows that are never stored close episodes all the same."""
        for key in said.streams(slots, self.lanes)[said.closing(slots.shape[0])].tolist():
            self._close(key, CUT, said.kind)  # no row of it is left, so nobody will see how it was closed

    def _enter(self, slots: Ints, said: _Said) -> None:
        """Give rows to the episodes of their streams, chunk by chunk."""
        streams = said.streams(slots, self.lanes)
        for chunk in _chunks(streams, said):
            at, key, last = slots[chunk], int(streams[chunk[0]]), int(chunk[-1])
            if said.mask is not None and not said.mask[last]:
                self._episode[at] = -1
                self._close(key, CUT, said.kind)
                continue
            self._append(self._find_open(key, said.kind), at)
            if said.ends is not None and said.ends[last]:
                self._close(key, ENDED, said.kind)

    def _find_open(self, key: int, kind: int) -> int:
        found = self._open[kind].get(key)
        if found is not None:
            return found
        if self._free:
            record = self._free.pop()
        else:
            record = self.records
            self.records += 1
            if record == self._table.shape[0]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self.serial += 1
        self._table[record] = (0, 0, 0, 0, 0, self.serial, key, kind, OPEN, False)
        self._open[kind][key] = record
        return record

    def _close(self, key: int, status: int, kind: int) -> None:
        record = self._open[kind].pop(key, None)
        if record is not None:
            self._table["status"][record] = status

    def _append(self, record: int, slots: Ints) -> None:
        row = self._table[record]
        count, length = slots.shape[0], int(row["length"])
        if not length:
            row["first"] = slots[0]
        if not row["listed"]:
            steps = np.diff(np.concatenate([[row["last"]], slots]) if length else slots) % self.capacity
            if length < 2:
                row["stride"] = steps[0] if steps.size else 0
            if steps.size and (steps != row["stride"]).any():
                known = (row["first"] + row["stride"] * np.arange(length)) % self.capacity
                self._lists[record] = _List(int(row["begin"]), array("q", known.astype(np.int64).tobytes()))
                row["listed"] = True
        if row["listed"]:
            self._lists[record].slots.frombytes(slots.tobytes())
        self._episode[slots] = record
        self._number[slots] = int(row["begin"]) + length + np.arange(count)
        row["last"] = slots[-1]
        row["length"] += count
        self.rows += count

    def _drop(self, record: int) -> None:
        row = self._table[record]
        if row["status"] == OPEN:
            del self._open[int(row["kind"])][int(row["key"])]
        self._table[record] = np.zeros((), dtype=_RECORD)
        self._free.append(record)

    # -- reading ------------------------------------------------------------------------------------------------------

    def ahead(self, slots: Tensor) -> Tensor:
        """Rows that follow each one."""
        record, at = self._find(slots)
        return torch.from_numpy(np.where(record >= 0, self._table["length"][record] - 1 - at, -1))

    def behind(self, slots: Tensor) -> Tensor:
        """Rows present before each one."""
        record, at = self._find(slots)
        return torch.from_numpy(np.where(record >= 0, at, -1))

    def ended(self, slots: Tensor) -> Tensor:
        """Whether each row was written with an end flag."""
        record, _ = self._find(slots)
        row = self._table[record]
        return torch.from_numpy((record >= 0) & (row["status"] == ENDED) & (row["last"] == slots.numpy()))

    def shift(self, slots: Tensor, steps: Tensor) -> Tensor:
        """Slots that lie `steps[i]` on."""
        return torch.from_numpy(self._move(slots, steps.numpy()[:, None])[0][:, 0].copy())

    def window(self, slots: Tensor, before: int, after: int, dilation: int) -> tuple[Tensor, Tensor]:
        """Slots around each one, and whether they are in the episode."""
        out, valid = self._move(slots, (np.arange(-before, after + 1) * dilation)[None])
        return torch.from_numpy(out), torch.from_numpy(valid)

    def _find(self, slots: Tensor) -> tuple[npt.NDArray[np.int32], Ints]:
        """The records of some rows, -1 for none, and their positions among the rows present."""
        check_slots(slots, self.capacity)
        at = slots.numpy()
        record = self._episode[at]
        return record, self._number[at] - self._table["begin"][record]

    def _move(self, slots: Tensor, steps: Ints) -> tuple[Ints, Bools]:
        """Slots `[n, T]` that lie `steps` (`[n, T]` or `[1, T]`) on, and whether they are in the episode."""
        record, at = self._find(slots)
        known = record >= 0
        length = np.where(known, self._table["length"][record], 1)  # a row of no episode is one by itself
        wanted = np.where(known, at, 0)[:, None] + steps.clip(-self.capacity, self.capacity)
        found = wanted.clip(0, (length - 1)[:, None])
        return np.where(known[:, None], self._locate(record, found), slots.numpy()[:, None]), wanted == found

    def _locate(self, records: npt.NDArray[Any], positions: Ints) -> Ints:
        """The slots of the rows at these positions `[n, T]` of the episodes `[n]`, whatever for record -1."""
        row = self._table[records]
        out: Ints = (row["first"][:, None] + row["stride"][:, None] * positions) % self.capacity
        for i in np.flatnonzero(row["listed"] & (records >= 0)).tolist():
            before, slots = self._lists[int(records[i])]
            out[i] = np.frombuffer(slots, dtype=np.int64)[row["begin"][i] - before + positions[i]]
        return out

    def spans(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First slots, rows, whether ended, serials; the episode whose first row is the oldest comes first."""
        row = self._table[: self.records]
        row = row[row["length"] > 0]
        row = row[np.argsort((row["first"] - self.cursor) % self.capacity)]
        first, rows, serial = (torch.from_numpy(row[name].copy()) for name in ("first", "length", "serial"))
        return first, rows, torch.from_numpy(row["status"] == ENDED), serial

    # -- draws --------------------------------------------------------------------------------------------------------

    def register(self, need: int) -> int:
        """Return the number by which the draws for `need` are called."""
        self._needs.append(need)
        return len(self._needs) - 1

    def start_rows(self, handle: int) -> int:
        """Rows that can start a window."""
        return self._ranks_of(handle).total

    def start_episodes(self, handle: int) -> int:
        """Episodes with such a row."""
        return int(self._ranks_of(handle).eligible.shape[0])

    def _ranks_of(self, handle: int) -> _Ranks:
        found = self._ranks.get(handle)
        if found is None:
            weights = np.maximum(self._table["length"][: self.records] - (self._needs[handle] - 1), 0)
            found = self._ranks[handle] = _Ranks(weights, np.cumsum(weights), np.flatnonzero(weights))
        return found

    def draw(self, handle: int, randoms: Tensor) -> Tensor:
        """Such rows by their ranks."""
        ranks = self._require_ranks(handle, randoms)
        rank = _scale(randoms.numpy(), ranks.total)
        record = np.searchsorted(ranks.ends, rank, side="right")
        at = rank - (ranks.ends[record] - ranks.weights[record])
        return torch.from_numpy(self._locate(record, at[:, None])[:, 0].copy())

    def draw_episodes(self, handle: int, randoms: Tensor) -> Tensor:
        """Episodes by their ranks, then rows of them."""
        ranks = self._require_ranks(handle, randoms)
        numbers, n = randoms.numpy(), randoms.shape[0] // 2
        record = ranks.eligible[_scale(numbers[:n], ranks.eligible.shape[0])]
        at = _scale(numbers[n:], ranks.weights[record])
        return torch.from_numpy(self._locate(record, at[:, None])[:, 0].copy())

    def _require_ranks(self, handle: int, randoms: Tensor) -> _Ranks:
        ranks = self._ranks_of(handle)
        if randoms.numel() and not ranks.total:
            msg = f"no row has {self._needs[handle] - 1} rows after it"
            raise IndexError(msg)
        return ranks

    def _take(self, records: npt.NDArray[Any], positions: Ints) -> Tensor:
        return torch.from_numpy(self._locate(records, positions[:, None])[:, 0].copy())

    # -- state --------------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Tensor]:
        """Records of the rows present, oldest first; what is known of each record besides its rows; free records."""
        slots = (self.cursor - self.present + np.arange(self.present)) % self.capacity
        row = self._table[: self.records]
        arrays: dict[str, npt.NDArray[Any]] = {
            "episode": self._episode[slots],
            "serials": row["serial"].copy(),
            "keys": np.where(row["status"] == OPEN, row["key"], 0),
            "kinds": np.where(row["status"] == OPEN, row["kind"], 0).astype(np.uint8),
            "status": row["status"].copy(),
            "free": np.array(self._free, dtype=np.int64),
        }
        return {name: torch.from_numpy(x) for name, x in arrays.items()}

    def load(self, cursor: int, serial: int, state: dict[str, Tensor]) -> None:
        """Take a checked state over; registered needs stay."""
        self.clear()
        episode = state["episode"].numpy()
        self.cursor, self.serial, self.present = cursor, serial, episode.shape[0]
        self.records, self._free = state["serials"].shape[0], state["free"].tolist()
        self._table = np.zeros(max(16, self.records), dtype=_RECORD)
        row = self._table[: self.records]
        for field, name in (("serial", "serials"), ("key", "keys"), ("kind", "kinds"), ("status", "status")):
            row[field] = state[name].numpy()
        order = np.argsort(episode, kind="stable")
        order = order[np.searchsorted(episode[order], 0) :]  # rows of no episode come first
        slots = (cursor - self.present + order) % self.capacity
        held, firsts = np.unique(episode[order], return_index=True)
        for record, first, end in zip(held.tolist(), firsts, [*firsts[1:], order.shape[0]], strict=False):
            self._append(record, slots[first:end])
            if row["status"][record] == OPEN:
                self._open[int(row["kind"][record])][int(row["key"][record])] = record


def _chunks(streams: Ints, said: _Said) -> list[Ints]:
    """Rows (numbers) of one stream between two closings, in the order of their first rows."""
    count = streams.shape[0]
    order = np.argsort(streams, kind="stable")
    breaks = (streams[order[1:]] != streams[order[:-1]]) | said.closing(count)[order[:-1]]
    if said.mask is not None:
        breaks |= ~said.mask[order[1:]]  # a row of no episode is a chunk by itself
    return sorted(np.split(order, np.flatnonzero(breaks) + 1), key=lambda chunk: int(chunk[0]))


def _scale(randoms: Ints, totals: int | Ints) -> Ints:
    """`randoms * totals >> 63` for randoms of 63 bits and totals of 31, in two halves."""
    high, low = (randoms >> 31) & 0xFFFFFFFF, randoms & 0x7FFFFFFF
    return np.asarray((high * totals + ((low * totals) >> 31)) >> 32, dtype=np.int64)
