"""Keeping the best rows: a max-value writer."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core.draw import Picks
from ostinato.errors import KeyMissingError, OptionError, SchemaError, UsageError
from ostinato.writers.base import Writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["TensorDictMaxValueWriter"]

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "median": lambda x: x.median(-1).values,
}


@final
class TensorDictMaxValueWriter(Writer):
    """Keeps the rows with the highest ranks: a full buffer takes a row only if it outranks the lowest one kept.

    Ties keep the older row. `extend` returns -1 for rows that were not kept. Cost: O(log capacity) for each row.

    Args:
        rank_key: field that ranks rows; None is `("next", "reward")`.
        reduction: how a rank with several values becomes one: "sum", "mean", "max", "min" or "median".
        compilable: no effect: ranks are kept in a Python heap.

    Raises:
        OptionError: for another reduction.
    """

    collections_only = True

    def __init__(
        self,
        rank_key: str | tuple[str, ...] | None = None,
        reduction: str = "sum",
        *,
        compilable: bool = False,  # noqa: ARG002
    ) -> None:
        if reduction not in _REDUCTIONS:
            msg = f"reduction must be one of {sorted(_REDUCTIONS)}, got {reduction!r}"
            raise OptionError(msg)
        self.reduction = reduction
        key = ("next", "reward") if rank_key is None else rank_key
        self.rank_path = (key,) if isinstance(key, str) else tuple(key)
        self._heap: list[tuple[float, int, int]] = []  # (rank, -age, slot): of equal ranks the newer one goes first
        self._count = 0

    def __repr__(self) -> str:
        """Options and the rank to beat."""
        lowest = self._heap[0][0] if self._heap else None
        return f"TensorDictMaxValueWriter(rank_key={self.rank_path}, reduction={self.reduction!r}, lowest={lowest})"

    @property
    def cursor(self) -> int:
        """Next free slot while the buffer fills."""
        return len(self._heap)

    def place(self, rows: int, capacity: int, scores: Tensor | None) -> Picks:
        """Give slots to the rows that rank high enough.

        Raises:
            KeyMissingError: if rows have no field `rank_key`.
            SchemaError: if a rank is NaN, naming the rows.
        """
        ranks = self._ranks(rows, scores)
        kept = [-1] * rows
        owner: dict[int, int] = {}
        for row, rank in enumerate(ranks):
            entry = (rank, -self._count, len(self._heap))
            if len(self._heap) < capacity:
                heapq.heappush(self._heap, entry)
            elif rank > self._heap[0][0]:
                entry = (rank, -self._count, self._heap[0][2])
                heapq.heapreplace(self._heap, entry)
            else:
                continue
            self._count += 1
            slot = entry[2]
            if slot in owner:
                kept[owner[slot]] = -1  # outranked by a later row of the same batch
            owner[slot], kept[row] = row, slot
        slots = torch.tensor(list(owner.keys()), dtype=torch.int64)
        return Picks(
            slots, torch.tensor(list(owner.values()), dtype=torch.int64), torch.tensor(kept, dtype=torch.int64)
        )

    def _ranks(self, rows: int, scores: Tensor | None) -> list[float]:
        if scores is None:
            msg = f"rows have no field {self.rank_path} to rank them by: add it, or choose another rank_key"
            raise KeyMissingError(msg)
        values = scores.reshape(rows, -1).to("cpu", torch.float64)
        ranks = _REDUCTIONS[self.reduction](values)
        bad = ranks.isnan().nonzero().flatten().tolist()
        if bad:
            msg = f"ranks must be numbers, got NaN in {self.rank_path} of the rows {bad[:8]}: nothing was written"
            raise SchemaError(msg)
        return [float(rank) for rank in ranks]

    def resume(self, rows: int, cursor: int) -> None:  # noqa: ARG002
        """Refuse: rows that are there already have no ranks.

        Raises:
            UsageError: always.
        """
        msg = (
            f"TensorDictMaxValueWriter cannot rank the {rows} rows that the storage holds: use it from the first row on"
        )
        raise UsageError(msg)

    def clear(self) -> None:
        """Forget all ranks."""
        self._heap.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return ranks, ages and slots."""
        columns = list(zip(*self._heap, strict=True)) or [(), (), ()]
        return {
            "rank": torch.tensor(columns[0], dtype=torch.float64),
            "age": torch.tensor(columns[1], dtype=torch.int64),
            "slot": torch.tensor(columns[2], dtype=torch.int64),
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        columns = (state["rank"].tolist(), state["age"].tolist(), state["slot"].tolist())
        self._heap = list(zip(*columns, strict=True))
        heapq.heapify(self._heap)
        self._count = int(state["count"])
