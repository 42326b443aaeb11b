"""Which shard a row goes to and comes from: arithmetic alone, no Ray.

A batch of one big buffer is drawn in two levels. Shard `s` holds rows of the values `v_i`, which add up to its mass
`m_s`. Each position of the batch chooses a shard with probability `m_s / sum m`, and the shard a row with probability
`v_i / m_s`; their product, `v_i / sum m`, is the law of one buffer that holds all rows. For uniform sampling every row
has the value 1, and the mass is the number of rows.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, NamedTuple, final

import torch

from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

__all__ = ["MOST_SHARDS", "Rota", "Share", "allot", "deal", "join_index", "places", "split_index", "weight_factors"]

_SLOT_BITS = 40
_SLOT_MASK = (1 << _SLOT_BITS) - 1
MOST_SHARDS = 1 << 20
"""An index, int64, has 40 bits for the slot and room for so many shards."""


class Share(NamedTuple):
    """What one shard weighs among all, at the moment of a draw."""

    rows: int
    """Rows present."""
    mass: float
    """Sum of the values of the rows that can be drawn."""
    least: float
    """Smallest value above zero; 1 where sampling is uniform."""
    beta: float = 0.0
    """Exponent of the importance weights; 0 where sampling is uniform."""


def join_index(shard: int, slots: Tensor) -> Tensor:
    """Return slots of a shard as indices of the whole, int64; -1, a row that was not kept, stays."""
    return torch.where(slots < 0, slots, slots + (shard << _SLOT_BITS))


def split_index(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shard and the slot of each index of the whole, int64; both are -1 for -1."""
    return index >> _SLOT_BITS, torch.where(index < 0, index, index & _SLOT_MASK)


def allot(masses: Sequence[float], uniforms: Tensor) -> Tensor:
    """Choose a shard for each position of a batch, independently, in proportion to the masses.

    Args:
        masses: at least 0 each, one of them above.
        uniforms: float64 `[B]` in `[0, 1)`.

    Returns:
        int64 `[B]`; a shard without mass is never chosen.
    """
    ends = torch.tensor(list(itertools.accumulate(masses)), dtype=torch.float64, device="cpu")
    chosen = torch.searchsorted(ends, uniforms * ends[-1], right=True)
    last = max(i for i, mass in enumerate(masses) if mass > 0)  # rounding may reach the end of the line
    return chosen.clamp_(max=last)


def deal(rows: Sequence[int], draws: Sequence[int], uniforms: Tensor) -> Tensor:
    """Choose a shard for each position of a batch where draws use rows up.

    A shard is chosen in proportion to the rows that can be drawn; each draw takes its part of them away, so that no
    shard is chosen more often than its rows are good for. Where rows are good for one draw each, this is the law of
    drawing without replacement from all of them. Cost: O(positions x shards).

    Args:
        rows: of each shard, that can be drawn.
        draws: that these are good for; the sum is at least the number of positions.
        uniforms: float64 `[B]` in `[0, 1)`.

    Returns:
        int64 `[B]`.
    """
    worth = [mine / good if good else 0.0 for mine, good in zip(rows, draws, strict=True)]
    left, chosen = list(draws), []
    for uniform in uniforms.tolist():
        ends = list(itertools.accumulate(each * many for each, many in zip(worth, left, strict=True)))
        last = max(i for i, many in enumerate(left) if many)  # rounding may reach the end of the line
        at = min(bisect.bisect_right(ends, uniform * ends[-1]), last)
        left[at] -= 1
        chosen.append(at)
    return torch.tensor(chosen, dtype=torch.int64, device="cpu")


def places(chosen: Tensor) -> dict[int, Tensor]:
    """Return the positions of a batch that each chosen shard fills, int64, in order."""
    return {shard: (chosen == shard).nonzero().flatten() for shard in sorted(set(chosen.tolist()))}


def weight_factors(shares: Mapping[int, Share]) -> dict[int, float]:
    """Return what turns the weights of each shard into those of the whole.

    A shard weighs its rows by `(v / v_min) ** -beta` with its own smallest value; the whole by the smallest one of all
    shards that can be drawn, so that the largest weight there is stays 1.
    """
    least = min(share.least for share in shares.values() if share.mass > 0)
    return {i: (share.least / least) ** -share.beta for i, share in shares.items() if share.mass > 0}


@final
class Rota:
    """Chooses the shard of each write: one after the other, or always the same.

    Args:
        shards: how many there are.
        first: where to begin.
        sticky: stay there.

    Raises:
        OptionError: if there are no shards, or too many.
    """

    def __init__(self, shards: int, first: int, *, sticky: bool) -> None:
        if not 0 < shards <= MOST_SHARDS:
            msg = f"num_shards must be in [1, {MOST_SHARDS}], got {shards}"
            raise OptionError(msg)
        self._shards = shards
        self._next = first % shards
        self._sticky = sticky

    def order(self, missing: Collection[int]) -> list[int]:
        """Return the shards to try for one write, the best first; those that are missing come last."""
        start = self._next
        if not self._sticky:
            self._next = (start + 1) % self._shards
        ring = [(start + i) % self._shards for i in range(self._shards)]
        return [i for i in ring if i not in missing] + [i for i in ring if i in missing]
