"""A writer that keeps the rows with the highest ranks."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch

from ostinato.core import kinds
from ostinato.core.options import LARGEST, check_choice
from ostinato.core.rank_order import REDUCTIONS
from ostinato.core.records import Picks
from ostinato.errors import CheckpointError, KeyMissingError, SchemaError, UsageError
from ostinato.writers.ring import Writer

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.ring import Ring

_Entry: TypeAlias = tuple[float, int, int]
"""Rank, negative age and slot of a row: of equal ranks the newer one is replaced first."""


@final
class TensorDictMaxValueWriter(Writer):
    """Keeps the rows with the highest ranks: a full buffer takes a row only if it outranks the lowest one kept.

    Of equal ranks the older row is kept. `extend` returns -1 for rows that were not kept. Edited rows get new ranks.
    Cost: O(log capacity) for each row kept; rows that rank below all of a full buffer cost a comparison.

    Args:
        rank_key: field that ranks rows; None is `("next", "reward")`.
        reduction: how a rank with several values becomes one: "sum", "mean", "max", "min" or "median".
        compilable: no effect: ranks are kept in a Python heap.

    Raises:
        OptionError: for another reduction.
    """

    collections_only = True
    single_rows = True

    def __init__(
        self,
        rank_key: str | tuple[str, ...] | None = None,
        reduction: str = "sum",
        *,
        compilable: bool = False,  # noqa: ARG002
    ) -> None:
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        key = ("next", "reward") if rank_key is None else rank_key
        self.rank_path = (key,) if isinstance(key, str) else tuple(key)
        self._heap: list[_Entry] = []
        self._live: list[_Entry] = []
        self._replaced: list[tuple[int, _Entry | None]] = []  # slots of the last `place`, with the entries before it
        self._count = 0
        self._capacity: int | None = None  # known since the first `place`

    def __repr__(self) -> str:
        """Show the options and the lowest rank kept."""
        lowest = self._lowest()[0] if self._live else None
        return f"TensorDictMaxValueWriter(rank_key={self.rank_path}, reduction={self.reduction!r}, lowest={lowest})"

    def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Picks:
        """Choose slots for the rows whose ranks are high enough.

        Raises:
            KeyMissingError: if rows have no field `rank_key`.
            SchemaError: if a rank is NaN, naming the rows.
        """
        ranks = self._ranks(rows, scores)
        bad = np.flatnonzero(np.isnan(ranks))[:8].tolist()
        if bad:
            msg = f"ranks must be numbers, got NaN in {self.rank_path} of the rows {bad}: nothing was written"
            raise SchemaError(msg)
        self._replaced.clear()
        self._capacity = ring.capacity
        owner: dict[int, int] = {}  # slot -> row; a later row of the batch may outrank an earlier one
        free = min(rows, ring.capacity - len(self._live))
        for row, rank in enumerate(ranks[:free].tolist()):
            owner[len(self._live)] = row
            self._replaced.append((len(self._live), None))
            self._live.append(self._push(rank, len(self._live)))
        if free < rows:
            # the lowest rank only rises: rows below it now are not kept
            for row in (free + np.flatnonzero(ranks[free:] > self._lowest()[0])).tolist():
                lowest = self._lowest()
                if ranks[row] > lowest[0]:
                    slot = lowest[2]
                    heapq.heappop(self._heap)
                    self._replaced.append((slot, lowest))
                    self._live[slot] = self._push(float(ranks[row]), slot)
                    owner[slot] = row
        slots, winners = (np.fromiter(x, np.int64, len(owner)) for x in (owner.keys(), owner.values()))
        order = winners.argsort()  # generations are numbers in the order of writing
        slots, winners = slots[order], winners[order]
        kept = np.full(rows, -1, np.int64)
        kept[winners] = slots
        return Picks(torch.from_numpy(slots), torch.from_numpy(winners), torch.from_numpy(kept))

    def get_insert_index(self, data: Any) -> int | None:
        """Return the slot that a row would get, None if it would not be kept. Nothing is changed.

        A buffer that is full is known by its ranks alone: before, the slot is the next free one.

        Args:
            data: one row, a TensorDict or tensorclass without batch dimensions.

        Raises:
            UsageError: for other data, or several rows.
            KeyMissingError: if it has no field `rank_key`.
        """
        if not kinds.is_tensor_collection(data):
            msg = (
                f"{type(self).__name__} expects data to be a tensor collection (tensordict or tensorclass), got "
                f"{type(data).__name__}"
            )
            raise UsageError(msg)
        if data.batch_dims > 1:
            msg = (
                f"get_insert_index() takes one row of no more than 1 dimension, got batch_size={list(data.batch_size)}"
            )
            raise UsageError(msg)
        found = data.get(self.rank_path, None)
        rank = float(self._ranks(1, found)[0])
        if self._capacity is None or len(self._live) < self._capacity:
            return len(self._live)
        lowest = self._lowest()
        return lowest[2] if rank > lowest[0] else None

    def _push(self, rank: float, slot: int) -> _Entry:
        entry = (rank, -self._count, slot)
        heapq.heappush(self._heap, entry)
        self._count += 1
        return entry

    def _lowest(self) -> _Entry:
        """Return the entry that is replaced first, after outdated entries were dropped."""
        while self._heap[0][2] >= len(self._live) or self._heap[0] != self._live[self._heap[0][2]]:
            heapq.heappop(self._heap)
        return self._heap[0]

    def take_back(self) -> None:
        """Give the slots of the last `place` their former ranks. Cost: O(log capacity) for each row that was kept."""
        for slot, entry in reversed(self._replaced):
            if entry is None:
                self._live.pop()
            else:
                self._live[slot] = entry
                heapq.heappush(self._heap, entry)
        self._replaced.clear()

    def rerank(self, slots: Tensor, scores: Tensor | None) -> None:
        """Update the ranks of edited rows; their ages stay. A row without a rank, or with NaN, is replaced first.

        Cost: O(log capacity) for each row.
        """
        chosen = slots.tolist()
        ranks = [-math.inf] * len(chosen) if scores is None else self._ranks(len(chosen), scores).tolist()
        for slot, rank in zip(chosen, ranks, strict=True):
            entry = (-math.inf if math.isnan(rank) else rank, self._live[slot][1], slot)
            if entry != self._live[slot]:
                heapq.heappush(self._heap, entry)
                self._live[slot] = entry
        if len(self._heap) > 2 * len(self._live) + 64:  # drop outdated entries when they are half of all
            self._heap = self._live.copy()
            heapq.heapify(self._heap)

    def _ranks(self, rows: int, scores: Tensor | None) -> np.ndarray[Any, Any]:
        if scores is None:
            msg = f"rows have no field {self.rank_path} to rank them by: add it, or choose another rank_key"
            raise KeyMissingError(msg)
        values = scores.reshape(rows, -1).to("cpu", torch.float64)
        return REDUCTIONS[self.reduction](values).detach().numpy()

    def begin(self, rows: int) -> None:
        """Raise: rows present already have no ranks.

        Raises:
            UsageError: always.
        """
        msg = (
            f"TensorDictMaxValueWriter cannot rank the {rows} rows that the storage holds: use it from the first row on"
        )
        raise UsageError(msg)

    def clear(self) -> None:
        """Discard all ranks."""
        self._heap.clear()
        self._live.clear()
        self._replaced.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return ranks and ages, by slot."""
        columns = list(zip(*self._live, strict=True)) or [(), (), ()]
        return {
            "rank": torch.tensor(columns[0], dtype=torch.float64, device="cpu"),
            "age": torch.tensor(columns[1], dtype=torch.int64, device="cpu"),
            "slot": torch.tensor(columns[2], dtype=torch.int64, device="cpu"),
            "count": self._count,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if a state is damaged.

        Raises:
            CheckpointError: naming what is wrong.
        """
        columns = (state["rank"].tolist(), state["age"].tolist(), state["slot"].tolist())
        count = int(state["count"])
        if not 0 <= count < LARGEST or not all(-count < age <= 0 for age in columns[1]):
            msg = f"the writer's state is damaged: rows are older than the {count} that were offered"
            raise CheckpointError(msg)
        if len({len(column) for column in columns}) > 1 or sorted(columns[2]) != list(range(len(columns[2]))):
            msg = f"the writer's state is damaged: ranks of the slots {columns[2][:8]} do not follow on each other"
            raise CheckpointError(msg)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `check_state`."""
        self.check_state(state)
        columns = (state["rank"].tolist(), state["age"].tolist(), state["slot"].tolist())
        self._live = sorted(zip(*columns, strict=True), key=lambda entry: entry[2])
        self._replaced.clear()
        self._heap = self._live.copy()
        heapq.heapify(self._heap)
        self._count = int(state["count"])
