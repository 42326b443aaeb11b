"""Byte budgets: which rows of a storage with a codec leave so that its rows stay within `max_bytes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from ostinato.core.records import ring_range
from ostinato.errors import CapacityError, OptionError, StorageMemoryError
from ostinato.storages.coded import CodedColumns, sizes_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.storages.columns import Fields, Payload

Evict: TypeAlias = Literal["rows", "episodes"]

_SLACK = 16
"""A removal leaves room for a 16th of the budget: moving the rows that stay then costs little per row written."""


class Budget(NamedTuple):
    """The options `max_bytes` and `evict`."""

    max_bytes: int
    episodes: bool
    """Whether whole episodes leave."""


def check_budget(max_bytes: object, evict: object, *, coded: bool, ndim: int) -> Budget | None:
    """Return the budget of a storage; None without one.

    Raises:
        CapacityError: if `max_bytes` is not a positive integer.
        OptionError: for another `evict`, a budget without codec, or episodes with `ndim=2`.
    """
    if evict not in ("rows", "episodes"):
        msg = f"evict must be 'rows' or 'episodes', got {evict!r}"
        raise OptionError(msg)
    if max_bytes is None:
        if evict != "rows":
            msg = "evict says which rows leave when max_bytes is reached: give max_bytes, or leave evict out"
            raise OptionError(msg)
        return None
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        msg = f"max_bytes must be a positive integer or None, got {max_bytes!r}"
        raise CapacityError(msg)
    if not coded:
        msg = "max_bytes needs codec: without it all rows have the same bytes, so that max_size sets the memory"
        raise OptionError(msg)
    if evict == "episodes" and ndim > 1:
        msg = "evict='episodes' needs ndim=1, since with ndim=2 a step of all environments leaves: use evict='rows'"
        raise OptionError(msg)
    return Budget(max_bytes, evict == "episodes")


def rows_that_stay(
    budget: Budget, table: Fields, payload: Payload, rows: int, oldest: int, episodes: EpisodeTable | None
) -> Tensor | None:
    """Return the slots of the rows that stay when others have to leave; None if all may stay.

    The rows that the new ones replace in a full ring leave in any case.

    Args:
        budget: the limits.
        table: the fields of the rows; the compressed ones come first among the kinds.
        payload: rows about to be written in ring order.
        rows: rows present.
        oldest: slot of the oldest.
        episodes: of the rows, for a budget of whole episodes.

    Returns:
        int64 `[n]`, the oldest row first.

    Raises:
        StorageMemoryError: if the new rows alone exceed the budget.
    """
    coded = table.kinds[0]
    if not isinstance(coded, CodedColumns):
        return None
    dense = sum(table.schema.leaves[i].nbytes for i in table.kept)
    coming = (sizes_of(payload.prepared[0]) + dense)[-table.capacity :]
    needed = int(coming.sum())
    if needed > budget.max_bytes:
        msg = (
            f"{coming.shape[0]} row(s) take {needed} bytes compressed, max_bytes={budget.max_bytes}: write fewer rows "
            "at once, or raise max_bytes"
        )
        raise StorageMemoryError(msg)
    if needed + coded.nbytes + rows * dense <= budget.max_bytes:
        return None
    order = ring_range(oldest, rows, table.capacity)
    sizes = coded.sizes(order) + dense
    replaced = max(0, rows + coming.shape[0] - table.capacity)
    most = budget.max_bytes - needed
    if int(sizes[replaced:].sum()) <= most:
        return None
    wanted = max(0, most - budget.max_bytes // _SLACK)
    leaving = np.zeros(rows, dtype=np.bool_)
    if budget.episodes and episodes is not None:
        _mark_episodes(leaving, episodes, order, sizes, (wanted, most))
        if int(sizes[~leaving].sum()) > most:
            _mark_rows(leaving, sizes, most, 1)
    else:
        _mark_rows(leaving, sizes, wanted, table.num_envs)
    return order[torch.from_numpy(~leaving)]


def _mark_rows(leaving: npt.NDArray[np.bool_], sizes: npt.NDArray[np.int64], most: int, step: int) -> None:
    """Mark the oldest rows, a multiple of `step`, until the others take at most `most` bytes."""
    left = np.where(leaving, 0, sizes)
    after = int(left.sum()) - np.cumsum(left)  # bytes without the rows up to each
    count = int(np.argmax(after <= most)) + 1
    leaving[: -(-count // step) * step] = True


def _mark_episodes(
    leaving: npt.NDArray[np.bool_],
    episodes: EpisodeTable,
    order: Tensor,
    sizes: npt.NDArray[np.int64],
    limits: tuple[int, int],
) -> None:
    """Mark the rows of the oldest episodes, and rows of no episode that are older than these.

    Args:
        leaving: by age.
        episodes: of the rows.
        order: the slots by age.
        sizes: bytes by age.
        limits: finished episodes leave until the others take the first number of bytes; unfinished ones, but for the
            newest, until they take the second.
    """
    age = torch.empty(episodes.capacity, dtype=torch.int64, device="cpu")
    age[order] = torch.arange(order.shape[0], device="cpu")
    outside = (episodes.ahead(order) < 0).numpy()
    spans = episodes.episodes()
    rank = range(spans.first.shape[0])
    closed = spans.closed.tolist()
    finished, others = [i for i in rank if closed[i]], [i for i in rank if not closed[i]]
    left = int(sizes.sum())
    for chosen, limit in ((finished, limits[0]), (others[:-1], limits[1])):
        for i in chosen:
            if left <= limit:
                break
            rows = int(spans.rows[i])
            slots = episodes.shift(spans.first[i].repeat(rows), torch.arange(rows, device="cpu"))
            leaving[age[slots].numpy()] = True
            newest = int(age[slots].max())
            leaving[:newest] |= outside[:newest]
            left = int(sizes[~leaving].sum())
